"""Traces: kill and resume, seeds, many trees at a time, damaged and foreign files."""

import json
import random
import re

import pytest

from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.interface import Answer, in_rounds
from drafttrain.reasoning.lines import call_seed
from drafttrain.reasoning.reason import Growth, grow_all, reason, trace_file
from drafttrain.reasoning.tasks.task import Problem
from drafttrain.reasoning.trace import Trace, totals
from drafttrain.utils.errors import UserError
from tests.reasoning.toys import PROBLEM, Toy, table_model

SCORES = {"0": 3, "1": 8, "2": 5, "10": 2, "11": 9, "112": 7, "20": 6}
SEARCHES = ["bfs", "dfs:threshold=0.1", "astar", "mcts:rounds=6"]
# votes are for searches that compare the thoughts of a state alone
WITH_EVALUATORS = [
    *((search, "value") for search in SEARCHES),
    *((search, "vote") for search in SEARCHES[:2]),
]


class Seeded:
    """A model whose texts depend on seeds alone, and which is killed in a round."""

    def __init__(self, killed_in: int | None = None):
        self.rounds, self.killed_in = [], killed_in

    def __call__(self, calls, then):
        in_rounds(self.answer)(calls, then)

    def answer(self, calls):
        if len(self.rounds) == self.killed_in:
            raise KeyboardInterrupt
        self.rounds.append([call.messages for call in calls])
        return [self._answer(call) for call in calls]

    @staticmethod
    def _answer(call):
        seed = call.sampling.seed
        return Answer(str(seed % (3 if call.messages.startswith("think") else 11)), (seed % 97,))


class InAnyOrder(Seeded):
    """Answers one of the calls that wait at a time, and is killed after some answers.

    Attributes:
        asked: prompts and seeds of the answered calls, in order.
    """

    def __init__(self, seed: int, killed_after: int | None = None, failing: int = 0):
        self.draws, self.killed_after, self.asked = random.Random(seed), killed_after, []
        self.failing = failing  # one of N calls fails, as its seed decides; 0: none

    def _answer(self, call):
        return failing_answer(call, self.failing)

    def __call__(self, calls, then):
        waiting, made = list(enumerate(calls)), len(calls)
        while waiting:
            if len(self.asked) == self.killed_after:
                raise KeyboardInterrupt
            number, call = waiting.pop(self.draws.randrange(len(waiting)))
            self.asked.append((call.messages, call.sampling.seed))
            more = then(number, self._answer(call))
            waiting += enumerate(more, made)
            made += len(more)


def failing_answer(call, one_of: int):
    """Answer as `Seeded` does, but let one of N calls fail."""
    if one_of and call.sampling.seed // 7 % one_of == 0:
        return Answer("", finish_reason="", error="it failed")
    return Seeded._answer(call)


def without_times(path):
    values = json.loads(path.read_text())
    for entry in values["rounds"]:
        assert entry.pop("seconds") >= 0
    return values


@pytest.mark.parametrize("evaluator", ["value", "vote"])
def test_calls_know_whether_the_evaluator_asks(evaluator):
    rounds = []

    def model(calls):
        rounds.append(calls)
        return Seeded().answer(calls)

    reason(Toy(), PROBLEM, in_rounds(model), SearchConfig(evaluator=evaluator))
    for calls in rounds:
        [evaluates] = {call.evaluates for call in calls}
        assert evaluates == (not calls[0].messages.startswith("think"))


@pytest.mark.parametrize(("search", "evaluator"), WITH_EVALUATORS)
def test_kill_and_resume_give_the_same_trace(search, evaluator, tmp_path):
    config = SearchConfig(search=search, evaluator=evaluator, breadth=2)
    whole = Seeded()
    reason(Toy(), PROBLEM, whole, config, tmp_path / "whole.json")
    for n in range(len(whole.rounds)):
        path = tmp_path / f"killed{n}.json"
        with pytest.raises(KeyboardInterrupt):
            reason(Toy(), PROBLEM, Seeded(killed_in=n), config, path)
        assert path.exists() == (n > 0)
        (tmp_path / f".killed{n}.json.12345678.tmp").write_text('{"half": ')  # of a kill while writing
        rest = Seeded()
        reason(Toy(), PROBLEM, rest, config, path)
        assert without_times(path) == without_times(tmp_path / "whole.json")
        assert rest.rounds == whole.rounds[n:]


@pytest.mark.parametrize("failing", [0, 4])
@pytest.mark.parametrize(("search", "evaluator"), WITH_EVALUATORS)
def test_the_order_of_answers_changes_nothing(search, evaluator, failing, tmp_path):
    """Also not where a tree is ended after any answer, and goes on with answers in another order."""
    config = SearchConfig(search=search, evaluator=evaluator, breadth=2, steps=2, seed=1)

    def in_order(calls):
        return [failing_answer(call, failing) for call in calls]

    trace = reason(Toy(), PROBLEM, in_rounds(in_order), config, tmp_path / "rounds.json")
    errors = [call["error"] for entry in trace.rounds for call in entry["calls"]]
    assert any(errors) == bool(failing) and trace.leaf is not None
    whole = without_times(tmp_path / "rounds.json")
    first = InAnyOrder(1, failing=failing)
    reason(Toy(), PROBLEM, first, config, tmp_path / "mixed.json")
    assert without_times(tmp_path / "mixed.json") == whole
    for n in range(1, len(first.asked)):
        path = tmp_path / f"killed{n}.json"
        with pytest.raises(KeyboardInterrupt):
            reason(Toy(), PROBLEM, InAnyOrder(n, n, failing), config, path)
        rest = InAnyOrder(n + 1, failing=failing)
        reason(Toy(), PROBLEM, rest, config, path)
        assert without_times(path) == whole and len(rest.asked) == len(first.asked) - n


def test_a_score_is_asked_for_before_the_other_thoughts_are_there():
    asked = []

    def one_after_the_other(calls, then):
        waiting, made = list(enumerate(calls)), len(calls)
        while waiting:
            number, call = waiting.pop(0)
            asked.append(call.messages)
            more = then(number, Answer(str(number)))
            waiting[:0] = enumerate(more, made)
            made += len(more)

    reason(Toy(), PROBLEM, one_after_the_other, SearchConfig(steps=1))
    assert asked[:6] == ["think ", "judge 0", "think ", "judge 1", "think ", "judge 2"]


def test_a_finished_tree_is_not_grown_again(tmp_path):
    first = reason(Toy(), PROBLEM, table_model(SCORES), out=tmp_path / "t.json")
    written = (tmp_path / "t.json").stat().st_mtime_ns
    model = table_model(SCORES)
    again = reason(Toy(), PROBLEM, model, out=tmp_path / "t.json")
    assert again == first and not model.rounds
    assert (tmp_path / "t.json").stat().st_mtime_ns == written
    loaded = Trace.load(tmp_path / "t.json")
    assert loaded.finished and loaded.leaf == first.leaf and loaded.seconds == first.seconds


def test_a_result_that_is_checked_otherwise_later_is_in_the_trace(tmp_path):
    class Stricter(Toy):
        def check(self, problem, thoughts, closing):
            return {"success": False}

    path = tmp_path / "t.json"
    reason(Toy(), PROBLEM, table_model(SCORES), out=path)
    assert reason(Stricter(), PROBLEM, table_model(SCORES), out=path).result == {"success": False}
    assert Trace.load(path).result == {"success": False}


def test_traces_of_other_weights_are_refused(tmp_path):
    path = tmp_path / "t.json"
    for weights in ("a", "a", None):
        grow_all(
            [Growth(Toy(), PROBLEM, SearchConfig(), path, weights)], table_model(SCORES), lambda trace: None
        )
    with pytest.raises(UserError, match="must be the trace of weights b, got a; remove it"):
        Growth(Toy(), PROBLEM, SearchConfig(), path, "b")


def test_the_last_answer_of_a_tree_outlives_a_check_that_fails(tmp_path):
    class Broken(Toy):
        def check(self, problem, thoughts, closing):
            raise OSError("no memory")

    path = tmp_path / "t.json"
    with pytest.raises(OSError):
        reason(Broken(), PROBLEM, table_model(SCORES), out=path)
    model = table_model(SCORES)
    trace = reason(Toy(), PROBLEM, model, out=path)
    assert not model.rounds and trace.finished and Trace.load(path).finished


def test_failed_calls_fail_again_when_a_tree_is_resumed(tmp_path):
    model = table_model(SCORES, ["think #0"])
    first = reason(Toy(), PROBLEM, model, out=tmp_path / "t.json")
    again = reason(Toy(), PROBLEM, table_model(SCORES), out=tmp_path / "t.json")
    assert again == first and again.states[1]["error"] == "think  failed"


def test_a_trace_has_everything(tmp_path):
    trace = reason(Toy(), PROBLEM, table_model(SCORES), SearchConfig(seed=5), tmp_path / "t.json")
    values = json.loads((tmp_path / "t.json").read_text())
    assert values["problem"] == {"id": "p", "text": "a problem"} and values["task"] == "toy"
    assert values["settings"]["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": None}
    assert values["settings"]["steps"] == 3 and values["settings"]["seed"] == 5
    first = values["rounds"][0]["calls"][2]
    assert first == {
        "path": [1], "number": 0, "prompt": "think ", "seed": call_seed(5, (1,), 0), "max_new_tokens": 4,
        "stop": [], "begin": "", "text": "1", "token_ids": [49], "finish_reason": "stop", "error": None,
    }  # fmt: skip
    numbers = [(call["path"], call["number"]) for call in values["rounds"][0]["calls"]]
    assert numbers == [([i], n) for i in range(3) for n in (0, 1)]  # the evaluator's call follows at its node
    assert values["leaf"] == [1, 1, 2] and values["closing"] == {"digit": "0"} and values["finished"]
    assert values["states"][2] == {
        "path": [1], "thoughts": [{"digit": "1"}], "score": 8.0, "worth": 0.8, "without_score": 0,
        "error": None,
    }  # fmt: skip
    assert trace.seconds == sum(entry["seconds"] for entry in values["rounds"])


def test_seeds_depend_on_seed_path_and_number_alone():
    seeds = {call_seed(s, p, n) for s in (0, 1) for p in ((), (0,), (0, 1), (1, 0), (10,)) for n in (0, 1)}
    assert len(seeds) == 20 and all(0 <= seed < 2**48 for seed in seeds)
    assert call_seed(3, (1, 0), 2) == 110416772096873
    models = [table_model(SCORES), table_model(SCORES)]
    for model in models:
        reason(Toy(), PROBLEM, model)
    assert models[0].rounds == models[1].rounds


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_trees_at_the_same_time_are_the_same_trees(at_once, tmp_path):
    problems = [Problem(str(i), "text", None) for i in range(5)]
    configs = [SearchConfig(search=SEARCHES[i % 4], seed=i) for i in range(5)]
    alone = [reason(Toy(), p, Seeded(), c) for p, c in zip(problems, configs)]
    model = Seeded()
    trees = (Growth(Toy(), p, c, tmp_path / f"{p.id}.json") for p, c in zip(problems, configs))
    together, started, most = {}, 0, 0

    def counted():
        nonlocal started, most
        for tree in trees:
            started += 1
            most = max(most, started - len(together))
            yield tree

    grow_all(counted(), model, lambda trace: together.update({trace.problem["id"]: trace}), at_once)
    assert most == min(at_once, 5)
    for one in alone:
        other = together[one.problem["id"]]
        assert (one.states, one.leaf, one.result) == (other.states, other.leaf, other.result)
        assert [e["calls"] for e in one.rounds] == [e["calls"] for e in other.rounds]


def test_totals():
    traces = [
        reason(Toy(), PROBLEM, table_model(SCORES)),
        reason(Toy(), PROBLEM, table_model({}, ["think "])),
    ]
    traces[0].result |= {"kept": 3, "text": "x"}
    sums = totals(traces)
    calls = 3 * 3 * 2 + 1
    assert sums.pop("seconds") == traces[0].seconds + traces[1].seconds
    assert sums == {
        "trees": 2, "success": 1, "without_result": 1, "without_score": 0, "calls": calls + 3, "kept": 3,
        "tokens": sum(len(call["token_ids"]) for entry in traces[0].rounds for call in entry["calls"]),
    }  # fmt: skip


def test_a_file_for_each_problem(tmp_path):
    assert trace_file(tmp_path, "basic/instance-3") == tmp_path / "basic_instance-3.json"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t[: len(t) // 2], "cannot be read as JSON"),
        (lambda t: "[]", "must be a trace of format 2, got another file"),
        (lambda t: t.replace('"format_version": 2', '"format_version": 1'), "must be a trace of format 2"),
        (lambda t: t.replace('"error": null', '"none": null'), "damaged"),
        (lambda t: t.replace('"settings"', '"set"'), "damaged (without settings)"),
        (lambda t: re.sub('"problem": {[^}]*}', '"problem": "x"', t), "damaged"),
        (lambda t: re.sub('"text": "[^"]*",(\\s*"token)', r'"text": null,\1', t), "damaged (text must be"),
        (lambda t: t.replace('"seconds": ', '"seconds": "x", "s": '), "damaged"),
        (lambda t: t.replace('"number": 0', '"number": [0]', 1), "damaged"),
        (lambda t: t.replace('"number": 1', '"number": 0', 1), "must be a trace of the same prompts"),
        (lambda t: t.replace('"task": "toy"', '"task": "gsm8k"'), "must be the trace of task toy, got gsm8k"),
        (lambda t: t.replace('"id": "p"', '"id": "q"'), "must be the trace of problem p, got q"),
        (lambda t: t.replace('"breadth": 1', '"breadth": 2'), "must be the trace of breadth 1, got 2"),
        (lambda t: t.replace('"think 1"', '"think 9"'), "must be a trace of the same prompts and seeds"),
    ],
)
def test_damaged_traces_and_those_of_other_trees(change, message, tmp_path):
    path = tmp_path / "t.json"
    reason(Toy(), PROBLEM, table_model(SCORES), out=path)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError) as error:
        reason(Toy(), PROBLEM, table_model(SCORES), out=path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"thoughts": 0}, "thoughts: must be >= 1 and <= 1000, got 0"),
        ({"breadth": 0}, "breadth: must be >= 1 and <= 1000, got 0"),
        ({"steps": 0}, "steps: must be >= 1 and <= 1000, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be >= 1, got 0"),
        ({"search": "beam"}, "search: must be one of bfs, dfs, astar, mcts, got beam"),
        ({"search": "astar", "evaluator": "vote"}, "evaluator: must be value for search astar, got vote"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError) as error:
        reason(Toy(), PROBLEM, table_model(SCORES), SearchConfig(**settings))
    assert str(error.value) == message


@pytest.mark.parametrize("task", ["chess", ""])
def test_an_unknown_task(task):
    with pytest.raises(UserError) as error:
        reason(task, PROBLEM, table_model(SCORES))
    assert str(error.value) == f"task: must be one of gsm8k, writing, blocksworld, or a Task, got {task!r}"


def test_the_seconds_of_a_round_go_on_after_it_was_ended(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        reason(Toy(), PROBLEM, InAnyOrder(0, killed_after=2), out=tmp_path / "t.json")
    values = json.loads((tmp_path / "t.json").read_text())
    values["rounds"][0]["seconds"] += 1000
    (tmp_path / "t.json").write_text(json.dumps(values))
    trace = reason(Toy(), PROBLEM, InAnyOrder(0), out=tmp_path / "t.json")
    assert 1000 < trace.rounds[0]["seconds"] < 1060 and trace.rounds[1]["seconds"] < 60


def test_a_model_that_answers_fewer_calls_is_a_mistake():
    with pytest.raises(ValueError):
        reason(Toy(), PROBLEM, in_rounds(lambda calls: []))
