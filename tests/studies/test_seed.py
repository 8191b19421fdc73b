"""Studies of SEED: what is measured, and how."""

import json
import math
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.kernels.linear import is_available
from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.tasks.task import Problem
from drafttrain.reasoning.timeline import Span, Timeline
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from studies import goals
from studies.figures import seed
from studies.seed import accuracy, comparison, methods, overlap, paced, table1, table2, timelines
from studies.seed.comparison import explain, ratio, seconds_per_token
from studies.seed.drawing import Block, draw
from studies.seed.methods import EVALUATOR, GENERATOR, SERIAL_AR, Grown, Part
from studies.seed.pairs import Pair

pytestmark = pytest.mark.skipif(not is_available(), reason="the studies time the native forward")
RAW = Path("docs/results/raw/seed")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pair(tiny_bundle):
    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    return Pair("tiny", bundle.target, bundle.drafter)


def grown(method: str, seconds: float, repeat: int = 0) -> Grown:
    parts = {GENERATOR: Part(seconds, 0.0, 10, 50, 100, 60, 3, 6)}
    return Grown("gsm8k", "1", method, repeat, seconds, 100, 50, 10, 1.5, 3, 6, True, None, None, parts)


def test_every_row_of_table_1_has_a_tree_of_the_papers_shape():
    for task, (chains, trees) in table1.K_CONFIGS.items():
        rows = table1.methods(task)
        assert rows[0].name == SERIAL_AR and rows[0].tree is None
        for k_config in (*chains, *trees):
            names = [one for one in rows if str(k_config) in one.name]
            assert len(names) == 3  # SD or MCSD, SEED, SEED batched
            for one in names:
                assert parse_policy(one.tree).k_config == k_config
        assert {one.scheduler.sequences for one in rows} == {1, 3}
        settings = [(one.tree, one.scheduler) for one in rows]
        assert all(settings.count(one) == 1 for one in settings)  # no row twice
        assert set(table1.TUNED) <= {one.tree for one in rows}


def test_seconds_per_token_are_medians_over_repeats():
    trees = [grown("SD", 1.0, 0), grown("SD", 3.0, 0), grown("SD", 8.0, 1), grown("SD", 3.0, 2)]
    assert seconds_per_token(trees) == pytest.approx(0.03)
    read = replace(trees[3], parts={GENERATOR: Part(3.0, 1.0, 10, 50, 100, 60, 3, 6)})
    assert seconds_per_token([read], without_prompts=True) == pytest.approx(0.02)
    assert seconds_per_token([read], GENERATOR, without_prompts=True) == pytest.approx(0.02)


def test_table_1_is_of_problems_that_all_methods_have_grown():
    """Not of the one at which a run was interrupted."""
    names = [method.name for method in table1.methods("gsm8k")]
    trees = [grown(name, 3.0 if name == SERIAL_AR else 2.0) for name in names]
    begun = [replace(tree, problem="2", seconds=9.0) for tree in trees[:5]]
    rows = table1.summary(trees + begun)
    assert (rows["gsm8k"]["problems"], rows["gsm8k"]["repeats"]) == (1, 1)
    assert "| gsm8k | SD (1, 1, 1) | 1.50 | 1.50 to 1.50 | 50.0 | 1.50 |" in table1.table(rows)
    assert "SEED (4, 2, 1, 1)" not in table1.summary(begun)["gsm8k"] and table1.summary(begun[1:]) == {}


def test_the_committed_table_1_is_that_of_its_trees(monkeypatch):
    """Without its intervals, for which many samples are drawn."""
    monkeypatch.setattr(comparison, "RESAMPLES", 40)
    lines = (RAW / "table1_B.jsonl").read_text(encoding="utf-8").splitlines()
    rows, recorded = (
        table1.summary([Grown.read(line) for line in lines]),
        read_json(RAW / "table1_B_summary.json"),
    )
    for row in (*rows.values(), *recorded.values()):
        for one in filter(lambda one: isinstance(one, dict), row.values()):
            del one["interval"]
    assert rows == recorded and {row["repeats"] for row in rows.values()} == {3}


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("drafter", "other", "with drafter ours, got other"),
        ("dtype", "bfloat16", "with dtype float32, got bfloat16"),
        ("dtype", "", "with dtype float32, got one that was not recorded"),
        ("tree", "drawn:k_config=2-1", "with tree None, got drawn:k_config=2-1"),
        ("target", "other", "got other"),
    ],
)
def test_trees_of_other_settings_are_not_gone_on_with(pair, tmp_path, key, value, message):
    pair, raw = replace(pair, source="ours"), tmp_path / "raw.jsonl"
    same = {"drafter": "ours", "dtype": "float32", "tree": None, "target": pair.target.fingerprint}
    row = asdict(replace(grown(SERIAL_AR, 1.0), **same | {key: value}))
    raw.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError) as error:
        methods.collect(pair, table1.methods, {"gsm8k": 1}, 1, raw, resume=True)
    assert message in str(error.value) and "\n" not in str(error.value)
    row = asdict(replace(solved(accuracy.AR, 1, True), **same | {key: value}))
    raw.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError) as error:
        accuracy.solve(pair, {"gsm8k": 1}, raw, True, lambda found: None)
    assert message in str(error.value)


def test_interrupted_tables_are_resumed(pair, tmp_path, monkeypatch):
    made = []

    def interleave(pair, rows, task, limit, repeat, note, pace, done, files):
        if (task, "1", SERIAL_AR, repeat) not in done:
            made.append((task, repeat))
            one = Grown(task, "1", SERIAL_AR, repeat, 1.0, 100, 50, 10, 1.0, 0, 0, None, None)
            note(replace(one, dtype="float32", tree=None, target=pair.target.fingerprint))

    monkeypatch.setattr(methods, "interleave", interleave)
    monkeypatch.setattr(methods, "problems_of", lambda task, limit, files: [Problem("1", "", "")][:limit])
    raw = tmp_path / "raw.jsonl"
    first = methods.collect(pair, table1.methods, {"gsm8k": 1}, 1, raw)
    again = methods.collect(pair, table1.methods, {"gsm8k": 1, "writing": 1}, 1, raw, resume=True)
    assert made == [("gsm8k", 0), ("writing", 0)] and again[:1] == first and len(again) == 2
    none = methods.collect(pair, table1.methods, {"gsm8k": 0, "writing": 1}, 1, raw, resume=True)
    assert none == again[1:]  # the others are of another size


def test_trees_of_earlier_scheduling_are_not_gone_on_with(pair, tmp_path):
    raw = tmp_path / "raw.jsonl"
    row = asdict(Grown("gsm8k", "1", SERIAL_AR, 0, 1.0, 100, 50, 10, 1.0, 0, 0, None, None))
    del row["scheduling"]
    raw.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="this version's scheduling"):
        methods.collect(pair, table1.methods, {"gsm8k": 1}, 1, raw, resume=True)


def test_generator_and_evaluator_are_measured_apart(pair, monkeypatch):
    monkeypatch.setattr(methods, "SearchConfig", partial(SearchConfig, steps=1, max_new_tokens=6))
    problem = Problem("1", "How many?", "2")
    for method in table2.methods():
        one = methods.grow(method, method.decoder(pair), "gsm8k", problem, 0, seed=0)
        thinks, scores = one.parts[GENERATOR], one.parts[EVALUATOR]
        assert (thinks.calls, scores.calls) == (3 * 2 + 1, 3)  # the closing generation is a thought
        assert one.tokens == thinks.tokens + scores.tokens <= 6 * 10
        assert one.seconds > thinks.seconds + scores.seconds > thinks.prompt_seconds > 0
        assert 0 <= thinks.granted <= thinks.offered and (thinks.offered > 0) == (method.tree is not None)
        assert one.accept_len == pytest.approx((one.tokens - 10) / (thinks.steps + scores.steps))
        assert Grown.read(json.dumps(asdict(one))) == one


def test_the_target_is_busy_while_two_or_more_sequences_live():
    timeline = Timeline()

    def spans(*rows):
        timeline.spans.clear()
        own = [Span("target", what, (number,), *times) for what, number, *times in rows]
        timeline.spans.extend(sorted(own, key=lambda span: span.end))
        return methods.busy(timeline)

    alone = ("prefill", 0, 0.0, 1.0), ("verify", 0, 1.0, 2.0), ("verify", 0, 3.5, 4.0)
    assert spans(*alone) is None
    # 1 lives from 2.5, when its prompt is encoded, to 3.5, of which the target works from 3 to 3.5
    assert spans(*alone, ("prefill", 1, 2.0, 2.5), ("verify", 1, 3.0, 3.5)) == pytest.approx(0.5)
    # a forward over a prompt and a draft has two spans, and a prompt in chunks several
    chunks = ("prefill", 1, 2.0, 2.25), ("prefill", 1, 2.25, 2.5), ("verify", 0, 2.25, 2.5)
    assert spans(*alone, *chunks, ("verify", 1, 3.0, 3.5)) == pytest.approx(0.5)
    # before the first verdict nothing counts
    early = ("prefill", 0, 0.0, 1.0), ("prefill", 1, 1.0, 2.0), ("verify", 0, 4.0, 5.0)
    assert spans(*early, ("verify", 1, 5.5, 6.0), ("verify", 0, 6.5, 7.0)) == pytest.approx(0.5)


def test_table_2_compares_acceptance_with_and_without_tree_attention(monkeypatch):
    monkeypatch.setattr(comparison, "RESAMPLES", 40)

    def tree(method: str, problem: str, seconds: float, granted: int) -> Grown:
        one = grown(method, 2 * seconds)
        one.problem = problem
        one.parts = {
            GENERATOR: Part(seconds, 0.1, 2, 50, 102, 50, granted, 100),
            EVALUATOR: Part(seconds / 2, 0.1, 1, 50, 51, 40, granted // 2, 100),
        }
        return one

    found = [tree(SERIAL_AR, problem, 3.0, 0) for problem in "ab"]
    for problem, extra in (("a", 0), ("b", 4)):
        found += [tree(table2.WITHOUT, problem, 2.0, 40), tree(table2.WITH, problem, 1.5, 44 + extra)]
    found = table2.summarize(found)
    assert found["gains"] == pytest.approx({GENERATOR: 92 / 80, EVALUATOR: 46 / 40})
    assert found["interval"][0] == pytest.approx(1.1) and found["interval"][1] == pytest.approx(1.2)
    assert [row["alpha"] for row in found["rows"]] == pytest.approx([0.4, 0.46, 0.2, 0.23])
    assert [row["speedup"] for row in found["rows"]] == pytest.approx([1.5, 2.0, 1.5, 2.0])
    assert found["rows"][0]["accept_len"] == 2.0


def drafted(method: str, seconds: float, tokens: int, steps: int, alpha: float) -> Grown:
    """Return a tree of ten calls with a second for prompts, and half of the steps in the evaluator."""
    half = [(seconds - 1) / 2, 0.5, 5, 50, tokens // 2, steps // 2, round(alpha * 100), 100]
    parts = {GENERATOR: Part(*half), EVALUATOR: Part(*half)}
    return Grown("gsm8k", "1", method, 0, seconds, tokens, 100, 0, 1.0, 0, 0, True, None, None, parts)


def test_the_acceptance_that_a_goal_needs_is_predicted(monkeypatch):
    monkeypatch.setattr(comparison, "RESAMPLES", 10)
    # 990 tokens of verifications at accept_len 1.65; chains of two at α = 0.5 would have 1.75
    found = [drafted(SERIAL_AR, 13.0, 1000, 990, 0.0), drafted("SEED", 10.0, 1000, 600, 0.5)]
    one = ratio(found, SERIAL_AR, "SEED")
    assert one["value"] == pytest.approx(1.3) and one["tasks"] == {"gsm8k": pytest.approx(1.3)}
    assert one["decoding"]["value"] == pytest.approx((13 - 1) / (10 - 1))
    speed = one["tokens_per_second"]
    assert (speed[SERIAL_AR]["value"], speed["SEED"]["value"]) == pytest.approx((1000 / 13, 100))
    assert speed["SEED"]["interval"] == pytest.approx([100, 100])
    costs = comparison.costs(found, SERIAL_AR, "SEED", methods.drawn(1, 1), "gsm8k")
    assert (costs.accept_len, costs.alpha, costs.depth) == pytest.approx((1.65, 0.5, 2))
    assert costs.fixed == pytest.approx(2.0) and costs.step == pytest.approx(8 / 600)
    assert costs.evaluator_share == pytest.approx(0.45) and costs.prompt_share == pytest.approx(0.1)
    assert costs.speedup(0.5) == pytest.approx(1.3)
    # α = 0.8: 1 + 0.65 / 0.75 * (0.8 + 0.64) = 2.248 tokens per verification
    assert costs.speedup(0.8) == pytest.approx(13 / (2 + 8 / 600 * 990 / 2.248))
    goal, trees = costs.speedup(0.8), {"gsm8k": methods.drawn(1, 1)}
    notes = explain(found, SERIAL_AR, "SEED", trees, goal)
    assert notes["alpha_needed"] == pytest.approx(0.8) and notes["costs"]["gsm8k"]["alpha"] == 0.5
    assert explain(found, SERIAL_AR, "SEED", trees, 3.0)["alpha_needed"] is None


@pytest.fixture
def figures(monkeypatch, tmp_path):
    monkeypatch.setattr(goals, "RAW", tmp_path)
    monkeypatch.setattr(seed, "load_pair", lambda *names: None)
    monkeypatch.setattr(comparison, "RESAMPLES", 10)
    return seed


def test_drafts_are_chosen_by_whole_trees_of_training_problems(figures, pair, tmp_path, monkeypatch):
    grown_for = []

    def grow(method, decoder, task, problem, repeat, seed):
        grown_for.append(problem.text)
        seconds = 1.0 if method.tree == methods.drawn(1, 1, 1) else 2.0
        if method.name.startswith(figures.SEED) and not method.scheduler.short:
            seconds /= 2
        return replace(grown(method.name, seconds), problem=problem.id)

    monkeypatch.setattr(methods, "grow", grow)
    monkeypatch.setitem(figures.TUNING_PROBLEMS, "tiny", 2)
    chosen, rates = figures.choose(pair, figures.CHOICES, tmp_path, False)
    assert chosen.keys() == rates.keys() == figures.CHOICES.keys()
    for name in (figures.SERIAL_SD, figures.SEED, figures.BATCHED_SD, figures.BATCHED_SEED):
        rate = 200 if name.startswith(figures.SEED) else 100  # of what is chosen, for short answers as well
        assert chosen[name].tree == methods.drawn(1, 1, 1) and rates[name] == pytest.approx(rate)
        assert chosen[name].name == name and bool(chosen[name].scheduler.short) != name.startswith(
            figures.SEED
        )
    assert chosen[figures.SERIAL_MCSD].tree in figures.TREES
    before = len(grown_for)
    assert figures.choose(pair, figures.CHOICES, tmp_path, True) == (chosen, rates)
    assert len(grown_for) == before
    prompts = {one.turns[0] for one in read_prompts(figures.PROMPTS)}  # which no training text has
    assert set(grown_for) <= prompts and len(set(grown_for)) == 2


def test_batches_in_lockstep_wait_for_the_slowest_call(pair, monkeypatch):
    """They have the tokens of SEED's, whose calls follow at once."""
    monkeypatch.setattr(methods, "SearchConfig", partial(SearchConfig, steps=1, max_new_tokens=6))
    problem, rounds, found = Problem("1", "How many?", "2"), [], []
    answer = methods.ScheduledDecoder.answer

    def noted(decoder, calls, *then):
        rounds.append(len(calls))
        return answer(decoder, calls, *then)

    monkeypatch.setattr(methods.ScheduledDecoder, "answer", noted)
    tree = methods.drawn(1, 1)
    for method in (methods.lockstep("", tree), methods.scheduled("", tree, "batched")):
        found.append(methods.grow(method, method.decoder(pair), "gsm8k", problem, 0, seed=0))
        rounds.append(None)
    # sub-questions, sub-answers, scores, the closing generation; SEED's follow from the first three
    assert rounds == [3, 3, 3, 1, None, 3, None]
    assert found[0].tokens == found[1].tokens > 10


def test_paced_figures_have_intervals_and_what_speed_depends_on(figures, monkeypatch):
    found = [drafted(SERIAL_AR, 16.0, 1000, 990, 0.0), drafted(paced.SEED, 10.0, 1000, 600, 0.5)]
    found.append(drafted(paced.SERIAL_SD, 12.0, 1000, 600, 0.5))
    monkeypatch.setattr(paced, "measure", lambda *names: (found, 0.01))
    found[1].overdue = found[1].seconds / 10  # the others' was not noted
    rows = figures.paced_speeds(goals.Run("seed", quick=True))
    assert rows["paced_vs_serial_ar"]["value"] == pytest.approx(1.6)
    assert rows["paced_vs_serial_ar"]["alpha_needed"] < 0.5 < rows["paced_vs_serial_sd"]["alpha_needed"]
    assert rows["paced_vs_serial_sd"]["interval"] == pytest.approx([1.2, 1.2])
    assert rows["paced_vs_serial_sd"]["overdue"] == pytest.approx({paced.SEED: 0.1})


def test_how_busy_the_target_is_needs_seed_alone(figures, monkeypatch):
    chosen, collected = methods.scheduled(figures.SEED, methods.drawn(1, 1), "one"), []

    def collect(pair, methods_of, tasks, repeats, raw, resume):
        collected.append(([method.name for method in methods_of("gsm8k")], tasks, repeats))
        trees = [replace(grown(figures.SEED, 1.0), task=task) for task in tasks]
        return [replace(one, busy=busy) for one, busy in zip(trees, (0.9, 0.6, None))]

    monkeypatch.setattr(figures, "choose", lambda *names: ({figures.SEED: chosen}, {}))
    monkeypatch.setattr(figures, "collect", collect)
    run = goals.Run("seed", pair=["large", "small"], only=[figures.BUSY, "prefix_gain"], busy="warn")
    measured = figures.speeds(run, "A")
    assert measured.keys() == {figures.BUSY} and collected == [([figures.SEED], run_size(), 3)]
    row = measured[figures.BUSY]
    assert row["value"] == pytest.approx(0.75) and row["interval"] == pytest.approx([0.75, 0.75])
    assert list(row["tasks"].values()) == pytest.approx([0.9, 0.6])


def run_size() -> dict[str, int]:
    return dict.fromkeys(methods.TASK_FILES, seed.PROBLEMS["A"])


def test_few_problems_do_not_decide_about_accuracy(figures, monkeypatch):
    found = [solved(name, i, i < 2) for name in (accuracy.AR, accuracy.SEED) for i in range(40)]
    monkeypatch.setattr(accuracy, "solve", lambda *names, note: found)
    [group] = [group for group in figures.GROUPS if "accuracy_difference" in group.goals]
    measured = group.measure(goals.Run("seed", limit=40))["accuracy_difference"]
    assert measured["value"] is None and measured["interval"][0] < -1.5
    ok, why = goals.judge(group.goals["accuracy_difference"], measured, group.size)
    assert ok is None and why == "40 of 1319 problems: the interval alone"


def solved(method: str, problem: int, success: bool, task: str = "gsm8k", kept: int | None = None):
    return accuracy.Checked(task, str(problem), method, success, kept, 0, 10, None)


def test_accuracies_are_compared_over_pairs():
    found = [solved(accuracy.AR, i, i < 10) for i in range(100)]
    found += [solved(accuracy.SEED, i, 4 <= i < 12) for i in range(98)]  # the last two are not paired yet
    result = accuracy.compare(found, "gsm8k")
    assert result["problems"] == 98 and result["difference"] == pytest.approx(-200 / 98)
    assert result["success"] == pytest.approx({accuracy.AR: 1000 / 98, accuracy.SEED: 800 / 98})
    half = 1.96 * math.sqrt((4 + 2 + 1) - (2 - 4) ** 2 / 100) / 100
    assert result["interval"] == pytest.approx([100 * (-0.02 - half), 100 * (-0.02 + half)])
    assert "-2.04 points" not in accuracy.line("gsm8k", result)  # too few problems
    kept = [solved(name, 1, False, "writing", 3) for name in (accuracy.AR, accuracy.SEED)]
    result = accuracy.compare(kept, "writing")
    assert result["kept"] == {accuracy.AR: 3, accuracy.SEED: 3}
    low, high = result["interval"]
    assert low == -high < -50  # one pair that agrees shows nothing
    assert accuracy.compare([], "gsm8k")["problems"] == 0


def test_many_trees_are_solved_at_a_time_and_resumed(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "SearchConfig", partial(SearchConfig, steps=1, max_new_tokens=3))
    monkeypatch.setattr(accuracy, "CHUNK", 2)
    raw, sizes = tmp_path / "raw.jsonl", []
    whole = accuracy.solve(pair, {"gsm8k": 3}, raw, False, lambda found: sizes.append(len(found)))
    assert sizes == [4, 6] and len(raw.read_text().splitlines()) == 6
    raw.write_text("".join(raw.read_text().splitlines(keepends=True)[:3]))
    again = accuracy.solve(pair, {"gsm8k": 3}, raw, True, lambda found: None)
    assert sorted(again, key=str) == sorted(whole, key=str) and len(raw.read_text().splitlines()) == 6
    assert {one.method for one in whole} == {accuracy.AR, accuracy.SEED} and all(one.tokens for one in whole)


def test_shares_of_the_work_are_the_whole_together(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "SearchConfig", partial(SearchConfig, steps=1, max_new_tokens=3))
    monkeypatch.setattr(accuracy, "CHUNK", 2)
    shares = [
        accuracy.solve(pair, {"gsm8k": 5}, tmp_path / f"{k}.jsonl", False, lambda found: None, (k, 2))
        for k in (1, 2)
    ]
    assert [len(found) for found in shares] == [2 * 3, 2 * 2]
    whole = accuracy.solve(pair, {"gsm8k": 5}, tmp_path / "whole.jsonl", False, lambda found: None)
    assert sorted(shares[0] + shares[1], key=str) == sorted(whole, key=str)


@pytest.mark.parametrize("text", ["1", "0/2", "3/2", "a/b", "1/0"])
def test_shares_that_are_none(text, capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["--share", text])
    assert f"must be K/N with K from 1 to N, got {text}" in capsys.readouterr().err


def test_methods_begin_in_turn(monkeypatch):
    order = []

    def grow(method, *rest, **seeds):
        order.append(method.name)
        return grown(method.name, 1.0)

    monkeypatch.setattr(methods, "grow", grow)
    warm = SimpleNamespace(target=None, proposer=None, config=None, prefixes=0)
    monkeypatch.setattr(methods.Method, "decoder", lambda *ignored: warm)
    monkeypatch.setattr(
        methods, "ScheduledDecoder", lambda *given: SimpleNamespace(answer=lambda calls: None)
    )
    names = [methods.serial(name, None) for name in "abc"]
    made, pair = [], Pair("none", None, None, "a drafter")
    for repeat in range(3):
        methods.interleave(pair, names, "gsm8k", 2, repeat, note=made.append)
    assert "".join(order) == "abcbcacababcbcacab"
    assert {one.drafter for one in made} == {"a drafter"}


def test_paced_work_holds_its_device_for_the_declared_time():
    pace, tree = paced.Paced(), SimpleNamespace(width=33, depths=torch.tensor([[0, 1, 2]]))
    branch = SimpleNamespace(tree=tree)
    began = time.perf_counter()
    pace.drafted(began, [branch] * 9)  # two steps of 4 ms, for two groups of sequences
    assert time.perf_counter() - began >= 0.016
    began = time.perf_counter()
    pace.forwarded(began, 0, [tree])  # 33 tokens are two forwards
    assert time.perf_counter() - began >= 0.080
    began = time.perf_counter()
    pace.forwarded(began, 32, [tree])  # 65 are three
    assert time.perf_counter() - began >= 0.120
    pace.forwarded(began - 1.0, 5, [])
    assert (pace.pieces, pace.late) == (4, 1) and pace.overdue >= 0.9


def test_trees_that_grow_together_have_the_same_tokens(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(paced, "SearchConfig", partial(SearchConfig, steps=1, max_new_tokens=3))
    monkeypatch.setattr(paced, "TARGET_SECONDS", 1e-4)
    monkeypatch.setattr(paced, "STEP_SECONDS", 1e-4)
    monkeypatch.setattr(paced, "TREES", {"gsm8k": methods.drawn(1, 1)})
    counts, count = [], paced.token_count
    monkeypatch.setattr(paced, "token_count", lambda trace: counts.append(count(trace)) or counts[-1])
    rows = paced.together(pair, 2, tmp_path / "rows.json")
    assert sorted(counts[:2]) == sorted(counts[2:4]) == sorted(counts[4:]) and len(counts) == 6
    assert rows["gsm8k"].keys() == {paced.SERIAL_SD, paced.SEED, paced.TOGETHER}
    assert all(row["seconds_per_token"] > 0 and row["encoded"] > 0 for row in rows["gsm8k"].values())
    assert paced.together(pair, 2, tmp_path / "rows.json", True) == rows and len(counts) == 6  # all is there
    assert all("commit" in one for row in rows.values() for one in row.values())


def test_what_drafting_and_verifying_cost_is_measured_in_three_ways(pair, monkeypatch):
    monkeypatch.setattr(overlap, "CONTEXT", 24)
    table = overlap.measure(pair, rounds=1)
    assert {"s_t(1)", "s_t(29)", "s_d(1)", "s_d(8)"} <= set(table)
    for found in table.values():
        assert len(found) >= 2 and "1 thread, beside the other" in found and min(found.values()) > 0


def recorded(*spans) -> timelines.Recorded:
    return timelines.Recorded("a run", 1.0, [Span(*span) for span in spans])


RUN = recorded(
    ("drafter 0", "draft", (0,), 0.0, 0.1),
    ("drafter 1", "draft", (1,), 0.0, 0.2),
    ("target", "verify", (0,), 0.1, 0.5),
    ("target", "verify", (1,), 0.5, 0.9),
    ("drafter 0", "draft", (0,), 0.5, 0.6),
)


def test_drafts_wait_from_their_end_to_their_verification():
    assert timelines.waits(RUN.spans, 0) == [Block(0.1, 0.1, "wait", (0,))]  # the last one was not verified
    assert timelines.waits(RUN.spans, 1) == [Block(0.2, 0.5, "wait", (1,))]
    *sequences, target, queue = timelines.queue(RUN)
    assert [lane.name for lane in sequences] == ["draft 1", "draft 2"] and len(target.blocks) == 2
    lengths = dict(queue.levels)
    assert lengths[0.0] == 0 and lengths[0.2] == pytest.approx(1 / 3) and lengths[0.5] == 0


def test_shares_are_of_time_in_which_somebody_works():
    target, drafting = timelines.shares(RUN, width=0.5)
    assert [share for _, share in target.levels] == pytest.approx([0.8, 0.8])
    assert [share for _, share in drafting.levels] == pytest.approx([0.4, 0.2])
    assert (target.note, drafting.note) == ("80% of time", "30% of time")


def test_several_drafting_workers_have_a_lane_for_each_sequence():
    assert [lane.name for lane in timelines.by_worker(RUN)] == ["target", "draft 1", "draft 2"]
    one = recorded(("drafter", "draft", (0, 1), 0.0, 0.1), ("target", "verify", (0, 1), 0.1, 0.5))
    assert [lane.name for lane in timelines.by_worker(one)] == ["target", "drafts"]
    picture = ElementTree.fromstring(draw(timelines.figure_1([one])))
    stripes = [shape.get("class") for shape in picture.iter(f"{SVG}rect")]
    assert stripes.count("s0 draft") == stripes.count("s1 draft") == 1


def test_recorded_figures_are_drawn_again(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timelines, "load_pair", lambda *names: pair)
    monkeypatch.setattr(timelines, "SearchConfig", partial(SearchConfig, steps=1, max_new_tokens=4))
    words = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--devices", "real", "--seconds", "1"]
    assert timelines.main(words) == 0
    pictures = {path: path.read_text() for path in tmp_path.glob("*.svg")}
    assert len(pictures) == 3
    for picture in pictures.values():
        assert ElementTree.fromstring(picture).tag == f"{SVG}svg"
    runs = read_json(tmp_path / "timelines_real.json")
    drafts = [any("draft" in span for span in run["spans"]) for run in runs["figure1"]]
    assert drafts == [False, True, True, False]
    monkeypatch.setattr(timelines, "record", None)
    assert timelines.main([*words, "--resume"]) == 0
    assert pictures == {path: path.read_text() for path in tmp_path.glob("*.svg")}
