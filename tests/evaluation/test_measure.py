"""Interleaving, later turns, resume, and that every method decodes the same thing."""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from drafttrain.data.prompts import Prompt, Task
from drafttrain.evaluation import measure as module
from drafttrain.evaluation.measure import (
    MeasurementLog,
    autoregressive,
    drafting,
    measure,
    seeded,
    transformers_generate,
)
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, MethodRun, tabulate
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.per_sequence import PerSequence
from drafttrain.target_lm.stock import load_model_like
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

TASK = Task("t", [Prompt("a", ["One?", "Two?"]), Prompt("b", ["Three?"]), Prompt("c", ["Four?", "Five?"])])
TWO_TURNS = Task("t", TASK.prompts, turns=2)


class Oracle(PerSequence):
    """Proposes the two tokens that the target will say next, as it knows from decoding plainly first."""

    def __init__(self, target):
        self.run = autoregressive(target)

    def new_state(self, batch, max_len):
        return []

    def update(self, state, tokens, tapped, counts):
        state += tokens[0, : int(counts[0])].tolist()

    def propose(self, state, root):
        tree, text = TokenTree.root_only(root), [*state, int(root[0])]
        for depth, token in enumerate(self.run(text, 2).token_ids):
            parents = torch.tensor([[depth]])
            tree = tree.append(parents, torch.tensor([[token]]), torch.zeros(1, 1))
        return tree


class Named:
    """A method that writes its name into a list and answers with fixed tokens."""

    def __init__(self, name: str, calls: list, answer: list[int]):
        self.name, self.calls, self.answer = name, calls, answer

    def __call__(self, prompt_ids, max_new_tokens):
        self.calls.append((self.name, tuple(prompt_ids), max_new_tokens))
        return MethodRun(1.0, self.answer)


def named(*names: str) -> tuple[dict, list]:
    calls: list = []
    return {name: Named(name, calls, [40 + i, 41, 42]) for i, name in enumerate(names)}, calls


@pytest.fixture(autouse=True)
def unknown_peaks(monkeypatch):
    """Peak memory is none of what runs are compared by."""
    monkeypatch.setattr(module, "reset_peak", lambda device: False)


@pytest.fixture
def log(tmp_path) -> MeasurementLog:
    return MeasurementLog(tmp_path / "m.jsonl", "key")


def test_all_methods_say_the_same(tiny_target, log):
    methods = {
        AUTOREGRESSIVE: autoregressive(tiny_target),
        TRANSFORMERS: transformers_generate(tiny_target),
        "oracle": drafting(tiny_target, Oracle(tiny_target)),
    }
    measured = measure(tiny_target, methods, TWO_TURNS, log, max_new_tokens=11)
    assert len(measured) == 5
    for m in measured:
        outputs = [run.token_ids for run in m.runs.values()]
        assert outputs[0] == outputs[1] == outputs[2] and 0 < len(outputs[0]) <= 11
    rows = tabulate(measured)
    assert rows["oracle"].accept_len == 2.5 and rows["oracle"].identical == 1
    assert rows[AUTOREGRESSIVE].accept_len == 1 and rows[TRANSFORMERS].identical == 1


def test_generate_ignores_the_defaults_of_a_checkpoint(tiny_target, log, monkeypatch):
    expected = transformers_generate(tiny_target)([5, 6, 7], 8).token_ids
    for name, value in (("repetition_penalty", 5.0), ("do_sample", True), ("temperature", 3.0)):
        monkeypatch.setattr(tiny_target.model.generation_config, name, value)
    assert transformers_generate(tiny_target)([5, 6, 7], 8).token_ids == expected


def test_the_defaults_of_a_folder_for_generate_are_left_out(tiny_target_folder, tiny_target, tmp_path):
    """Such as a cache that is off: the baseline would encode the whole text for each token."""
    shutil.copytree(tiny_target_folder, tmp_path / "own")
    given = {"use_cache": False, "no_repeat_ngram_size": 1, "return_dict_in_generate": True}
    GenerationConfig(**given, stop_strings=["a"], min_new_tokens=9).save_pretrained(tmp_path / "own")
    stock = load_model_like(str(tmp_path / "own"), tiny_target)
    calls = []
    stock.model.register_forward_pre_hook(
        lambda module, args, given: calls.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    found = transformers_generate(tiny_target, stock)([5, 6, 7], 8).token_ids
    assert found == transformers_generate(tiny_target)([5, 6, 7], 8).token_ids
    assert calls == [3, *[1] * (len(calls) - 1)]


def test_order_rotates_from_turn_to_turn_and_repeat_to_repeat(tiny_target, log):
    methods, calls = named("x", "y", "z")
    measured = measure(tiny_target, methods, TASK, log, max_new_tokens=30, repeats=2)
    assert [name for name, _, limit in calls if limit == 16] == ["x", "y", "z"]  # warm-up, once
    timed = [name for name, _, limit in calls if limit == 30]
    assert "".join(timed) == "xyz yzx zxy yzx zxy xyz".replace(" ", "")
    assert [list(m.runs) for m in measured][:2] == [["x", "y", "z"], ["y", "z", "x"]]
    assert [(m.prompt, m.repeat) for m in measured] == [(p, r) for r in range(2) for p in "abc"]


def test_later_turns_follow_the_first_methods_answer(tiny_target, log):
    methods, calls = named("x", "y")
    measured = measure(tiny_target, methods, TWO_TURNS, log, max_new_tokens=30)
    assert [(m.prompt, m.turn) for m in measured] == [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1)]
    tokenizer = tiny_target.tokenizer
    answer = tokenizer.decode([40, 41, 42])
    expected = tuple(TASK.prompts[0].token_ids(tokenizer, [answer]))
    assert {ids for _, ids, limit in calls[2:] if limit == 30} >= {expected}
    assert measured[1].prompt_tokens == len(expected)


def test_what_was_measured_is_not_repeated(tiny_target, tmp_path):
    methods, calls = named("x", "y")
    whole = measure(tiny_target, methods, TWO_TURNS, MeasurementLog(tmp_path / "m", "key"), 30, repeats=2)
    lines = (tmp_path / "m").read_bytes().split(b"\n")
    (tmp_path / "m").write_bytes(
        b"\n".join(lines[:4]) + b"\n" + lines[4][:30]
    )  # killed while it wrote the fourth
    calls.clear()
    turns = []
    log = MeasurementLog(tmp_path / "m", "key")
    again = measure(tiny_target, methods, TWO_TURNS, log, 30, repeats=2, on_turn=lambda: turns.append(1))
    assert [m.runs for m in again] == [m.runs for m in whole] and len(turns) == 10
    assert len([1 for _, _, limit in calls if limit == 30]) == 2 * (10 - 3)
    rows = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert rows[0] == {"measured": "key"} and len(rows) == 11


def test_other_measurements_are_not_continued(tiny_target, tmp_path):
    methods, calls = named("x")
    measure(tiny_target, methods, TASK, MeasurementLog(tmp_path / "m", "key"), 30)
    more, more_calls = named("x", "y")
    measure(tiny_target, more, TASK, MeasurementLog(tmp_path / "m", "key"), 30)  # another set of methods
    assert len(more_calls) == 2 + 6
    calls.clear()
    measure(tiny_target, methods, TASK, MeasurementLog(tmp_path / "m", "other"), 30)  # another bundle, say
    assert len(calls) == 1 + 3
    assert len((tmp_path / "m").read_text().splitlines()) == 4


def test_temperatures_are_measured_apart(tiny_target, tmp_path):
    methods, calls = named("x")
    for temperature in (0.0, 1.0, 1.0):
        log = MeasurementLog(tmp_path / "m", "key")
        [*_, last] = measure(tiny_target, methods, TASK, log, 30, temperature=temperature)
        assert last.temperature == temperature
    assert len([1 for _, _, limit in calls if limit == 30]) == 2 * 3  # the third time all was there


def test_files_from_before_temperatures_are_read_on(tiny_target, tmp_path):
    methods, calls = named("x")
    whole = measure(tiny_target, methods, TASK, MeasurementLog(tmp_path / "m", "key"), 30)
    head, *lines = (tmp_path / "m").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["temperature"], row["harness_seconds"]
        del row["runs"]["x"]["peak_bytes"]
    (tmp_path / "m").write_text("\n".join([head, *map(json.dumps, rows)]) + "\n")
    calls.clear()
    again = measure(tiny_target, methods, TASK, MeasurementLog(tmp_path / "m", "key"), 30)
    assert calls == [] and [one.runs for one in again] == [one.runs for one in whole]
    assert {(one.temperature, one.harness_seconds) for one in again} == {(0.0, None)}


def test_a_log_of_other_things_can_be_refused(tiny_target, tmp_path):
    MeasurementLog(tmp_path / "m", "old")  # nothing in it yet
    log = MeasurementLog(tmp_path / "m", "key", replace=False)
    measure(tiny_target, named("x")[0], TASK, log, 30)
    kept = (tmp_path / "m").read_bytes()
    MeasurementLog(tmp_path / "m", "key", replace=False)
    with pytest.raises(UserError, match="holds measurements of other things"):
        MeasurementLog(tmp_path / "m", "other", replace=False)
    assert (tmp_path / "m").read_bytes() == kept


@pytest.mark.parametrize("line", ['{"task": "t", "pro', '{"task": "t"}', "[]", "", "\0\0"])
def test_a_damaged_line_is_named(tiny_target, tmp_path, line):
    measure(tiny_target, named("x")[0], TASK, MeasurementLog(tmp_path / "m", "key"), 30)
    head, first, *rest = (tmp_path / "m").read_text().splitlines()
    damaged = "\n".join([head, first, line, *rest]) + "\n"
    (tmp_path / "m").write_text(damaged)
    with pytest.raises(UserError, match="m: line 3: damaged") as error:
        MeasurementLog(tmp_path / "m", "key")
    assert "\n" not in str(error.value) and (tmp_path / "m").read_text() == damaged


def test_sampled_drafts_say_what_sampling_alone_says(tiny_target):
    sampling = SamplingParams(1.0, top_p=0.9, seed=2)
    proposer = Oracle(tiny_target)
    ids = [[5, 6, 7], [8, 9, 10]]
    plain = [autoregressive(tiny_target, sampling)(prompt, 12).token_ids for prompt in ids]
    assert [drafting(tiny_target, proposer, sampling)(prompt, 12).token_ids for prompt in ids] == plain
    assert plain != [autoregressive(tiny_target)(prompt, 12).token_ids for prompt in ids]
    assert len({seeded(sampling, prompt).seed for prompt in ids}) == 2
    assert seeded(sampling, ids[0]) == seeded(SamplingParams(1.0, top_p=0.9, seed=2), tuple(ids[0]))
    assert seeded(SamplingParams(1.0, seed=3), ids[0]).seed != seeded(sampling, ids[0]).seed


def test_peak_memory_is_noted_with_each_run(tiny_target, log, monkeypatch):
    monkeypatch.setattr(module, "reset_peak", lambda device: device == tiny_target.device)
    peaks = iter(range(100))
    monkeypatch.setattr(module, "peak_bytes", lambda device: next(peaks))
    measured = measure(tiny_target, named("x", "y")[0], TASK, log, 30)
    assert [run.peak_bytes for one in measured for run in one.runs.values()] == list(range(6))
    monkeypatch.setattr(module, "reset_peak", lambda device: False)  # the system cannot
    [one] = measure(tiny_target, named("z")[0], Task("u", TASK.prompts[:1]), log, 30)
    assert one.runs["z"].peak_bytes is None


def test_what_measuring_takes_is_told_apart_from_the_methods(tiny_target, log, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def pass_by(seconds):
        now[0] += seconds

    def slow(prompt_ids, max_new_tokens):
        pass_by(0.05)
        return MethodRun(0.05, [40])

    measured = measure(tiny_target, {"slow": slow}, TASK, log, 30, on_turn=lambda: pass_by(0.02))
    first, *later = [one.harness_seconds for one in measured]
    assert first == pytest.approx(0)  # neither the run nor the warm-up
    assert later and later == pytest.approx([0.02] * len(later))  # after a turn: it belongs to the next one


def test_long_turns_can_be_left_out(tiny_target, log):
    prompts = [Prompt("a", ["x", "many words " * 200, "y"]), Prompt("b", ["z"])]
    long, turns = set(), []
    methods, _ = named("x")
    task = Task("t", prompts, turns=3)
    measured = measure(tiny_target, methods, task, log, 30, on_turn=lambda: turns.append(1), too_long=long)
    assert [(m.prompt, m.turn) for m in measured] == [("a", 0), ("b", 0)]
    assert long == {("t", "a", 1), ("t", "a", 2)}  # what would follow is longer still
    assert len(turns) == task.n_turns


def test_all_repeats_decode_the_same_prompts(tiny_target, tmp_path):
    answers = itertools.count(40)
    methods = {"unsteady": lambda prompt_ids, limit: MethodRun(1.0, [next(answers)])}
    log = MeasurementLog(tmp_path / "m", "key")
    calls: list = []
    methods["other"] = Named("other", calls, [7])
    measure(tiny_target, methods, TWO_TURNS, log, 30, repeats=3)
    prompts = [ids for _, ids, limit in calls if limit == 30]
    assert len(prompts) == 3 * 5 and len(set(prompts)) == 5
    calls.clear()  # so do repeats that are added later
    measure(tiny_target, methods, TWO_TURNS, MeasurementLog(tmp_path / "m", "key"), 30, repeats=4)
    assert {ids for _, ids, limit in calls if limit == 30} == set(prompts)


def test_too_long_prompts_are_named(tiny_target, log):
    task = Task("long", [Prompt("fits", ["x"]), Prompt("does not", ["many words " * 200])])
    methods, _ = named("x")
    with pytest.raises(UserError, match="long: prompt does not: .* must fit into the 512 positions"):
        measure(tiny_target, methods, task, log, 30)
