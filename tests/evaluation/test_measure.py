"""Interleaving, later turns, resume, and that every method decodes the same thing."""

import json

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.evaluation.measure import (
    MeasurementLog,
    autoregressive,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, MethodRun, tabulate
from drafttrain.evaluation.prompts import Prompt, Task
from drafttrain.trees.tree import TokenTree

TASK = Task("t", [Prompt("a", ["One?", "Two?"]), Prompt("b", ["Three?"]), Prompt("c", ["Four?", "Five?"])])
TWO_TURNS = Task("t", TASK.prompts, turns=2)


class Oracle:
    """Proposes the two tokens that the target will say next, as it knows from decoding plainly first."""

    model_seconds = 0.0

    def __init__(self, target):
        self.run = autoregressive(target)

    def new_state(self, batch, max_len):
        return []

    def observe(self, state, tokens, tapped, counts):
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


def test_too_long_prompts_are_named(tiny_target, log):
    task = Task("long", [Prompt("fits", ["x"]), Prompt("does not", ["many words " * 200])])
    methods, _ = named("x")
    with pytest.raises(UserError, match="long: prompt does not has .* exceed the 512 positions"):
        measure(tiny_target, methods, task, log, 30)
