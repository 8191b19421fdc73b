"""Searches find the best path of toy trees; breadth-first search is Algorithm 1, line by line."""

import itertools
import random

import pytest

from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.interface import Answer
from drafttrain.reasoning.reason import reason
from drafttrain.reasoning.search import BreadthFirst, DepthFirst, MonteCarlo, parse_search
from drafttrain.utils.errors import UserError
from tests.reasoning.toys import PROBLEM, Scripted, Toy, table_model

# the greedy way, 0, ends badly; the best path is 1 2 0
TRAP = {"0": 9, "1": 7, "2": 1, "00": 2, "01": 1, "02": 2}
TRAP |= {"10": 3, "11": 4, "12": 9, "120": 9, "121": 5, "122": 6, "000": 3}


def grow(model, **settings):
    return reason(Toy(), PROBLEM, model, SearchConfig(**settings))


def algorithm_1(generate, evaluate, steps, n, b):
    """SEED's Algorithm 1 with states as texts of digits; returns the leaf and all S'_i."""
    states, proposed = [""], []  # line 2: S_0
    for _ in range(steps):  # line 3
        new = [c + z for c in states for z in generate(c, n)]  # lines 4, 5
        values = {s: evaluate(s) for s in new}  # line 6
        subsets = itertools.combinations(new, min(b, len(new)))
        states = max(subsets, key=lambda subset: sum(values[s] for s in subset))  # line 7
        proposed.append(new)
    return max(states, key=lambda s: values[s]), proposed  # line 9


@pytest.mark.parametrize("n, b", [(1, 1), (2, 1), (3, 1), (3, 2), (2, 3), (3, 3)])
def test_breadth_first_search_is_algorithm_1(n, b):
    for seed in range(12):
        draw = random.Random(seed)
        states = ("".join(s) for size in (1, 2, 3) for s in itertools.product("012", repeat=size))
        scores = dict(zip(states, draw.sample(range(99), 39)))  # no ties
        leaf, proposed = algorithm_1(lambda c, k: [str(i) for i in range(k)], scores.__getitem__, 3, n, b)
        model = table_model(scores)
        trace = grow(model, thoughts=n, breadth=b)
        assert "".join(map(str, trace.leaf)) == leaf
        grown = ["".join(t["digit"] for t in state["thoughts"]) for state in trace.states[1:-1]]
        assert sorted(grown) == sorted(state for level in proposed for state in level)
        assert len(model.rounds) == 2 * 3 + 1  # the whole level in one round, and the closing one
        assert model.rounds[-1][0].messages == f"think {leaf}" and len(model.rounds[-1]) == 1


@pytest.mark.parametrize(
    "search",
    ["bfs", "dfs:threshold=0.6", "astar", "astar:weight=0", "mcts:rounds=40", "mcts:rounds=60,explore=2"],
)
def test_each_search_finds_the_best_path(search):
    trace = grow(table_model(TRAP), search=search, breadth=2)
    assert trace.leaf == [1, 2, 0]
    assert trace.result == {"success": True, "digits": "1200"}
    assert trace.error is None and trace.finished


def test_greedy_search_does_not():
    assert grow(table_model(TRAP)).leaf == [0, 0, 0]


def test_uniform_cost_search_finds_the_cheapest_path_of_any_tree():
    paths = ["".join(s) for size in (1, 2, 3) for s in itertools.product("01", repeat=size)]
    for seed in range(20):
        draw = random.Random(seed)
        scores = {path: draw.randrange(11) for path in paths}
        trace = grow(table_model(scores), search="astar:weight=0", thoughts=2)
        sums = {leaf: sum(scores[leaf[:n]] for n in (1, 2, 3)) for leaf in paths if len(leaf) == 3}
        assert sums["".join(map(str, trace.leaf))] == max(sums.values())


def test_monte_carlo_search_with_enough_rounds_finds_the_best_path_of_any_tree():
    paths = ["".join(s) for size in (1, 2, 3) for s in itertools.product("01", repeat=size)]
    for seed in range(20):
        draw = random.Random(seed)
        scores = {path: draw.randrange(11) for path in paths}
        trace = grow(table_model(scores), search="mcts:rounds=300,explore=3", thoughts=2)
        sums = {leaf: sum(scores[leaf[:n]] for n in (1, 2, 3)) for leaf in paths if len(leaf) == 3}
        assert sums["".join(map(str, trace.leaf))] == max(sums.values())


def test_depth_first_search_visits_the_better_child_first_and_turns_back_below_the_threshold():
    model = table_model(TRAP)
    grow(model, search="dfs:threshold=0.6")
    assert [calls[0].messages for calls in model.rounds][::2] == [
        "think ", "think 0", "think 1", "think 12", "think 120",
    ]  # fmt: skip


def test_depth_first_search_without_a_leaf_closes_the_best_of_the_deepest():
    trace = grow(table_model({"0": 9, "01": 3, "02": 4}), search="dfs")
    assert trace.leaf == [0, 2]


@pytest.mark.parametrize("search", ["dfs:threshold=0,expansions=2", "astar:expansions=2", "mcts:rounds=2"])
def test_limits_of_expansions(search):
    model = table_model({"0": 9, "1": 8, "00": 5, "01": 6})
    trace = grow(model, search=search)
    assert [calls[0].messages for calls in model.rounds[:-1:2]] == ["think ", "think 0"]
    assert trace.leaf == [0, 1]


@pytest.mark.parametrize("search", ["bfs", "dfs:threshold=0", "astar", "mcts"])
def test_a_failed_branch_ends_and_the_others_go_on(search):
    trace = grow(table_model(TRAP, ["think 0#0", "judge 12", "think #2"]), search=search, breadth=3)
    errors = {tuple(state["path"]): state["error"] for state in trace.states if state["error"]}
    assert errors[(2,)] == "think  failed"
    assert trace.result["success"] and trace.leaf not in ([2], [0, 0], [1, 2])
    assert not any(state["path"][:1] == (2,) and len(state["path"]) > 1 for state in trace.states)


def test_monte_carlo_search_goes_on_beside_a_thought_that_cannot_be_continued():
    table = {"0": 9, "1": 8, "2": 7, "10": 5, "11": 6, "12": 4, "20": 3, "21": 3, "22": 3}
    trace = grow(
        table_model(table, ["think 0#0", "think 0#1", "think 0#2"]), search="mcts:rounds=4,explore=0"
    )
    assert trace.leaf[0] in (1, 2) and len(trace.leaf) > 1


@pytest.mark.parametrize("search", ["bfs", "dfs", "astar", "mcts"])
@pytest.mark.parametrize("failing", ["think ", "judge "])
def test_a_tree_whose_branches_have_all_failed_says_why(search, failing):
    failed = Answer("", finish_reason="", error="the worker raised")
    model = Scripted(lambda prompt, k: failed if prompt.startswith(failing) else str(k))
    trace = grow(model, search=search)
    assert trace.finished and trace.result is None and trace.leaf is None
    assert trace.error == "the worker raised"


def test_the_closing_generation_may_fail():
    trace = grow(table_model({"0": 1, "00": 1, "000": 1}, ["think 000"]))
    assert trace.leaf == [0, 0, 0] and trace.result is None and trace.error == "think 000 failed"


def test_an_answer_without_a_score_counts_as_the_lowest():
    model = table_model({"1": 1})
    script = model.script
    model.script = lambda prompt, k: "no idea" if prompt in ("judge 0", "judge 10") else script(prompt, k)
    trace = grow(model)
    assert trace.leaf[0] == 1 and trace.without_score == 2
    assert [state["score"] for state in trace.states[1:4]] == [0, 1, 0]


def vote_model(favorite):
    """Return a model that votes for the choice that a function of their texts gives."""

    def script(prompt, number):
        if prompt.startswith("think"):
            return str(number)
        choices = [part.partition("\n")[2].split("\n")[0] for part in prompt.split("Choice ")[1:]]
        return favorite(choices, number)

    return Scripted(script)


@pytest.mark.parametrize("search", ["bfs", "dfs"])
def test_votes(search):
    model = vote_model(lambda choices, k: f"{1 + choices.index('2')}. They differ.")
    trace = grow(model, search=search, evaluator="vote")
    assert trace.leaf == [2, 2, 2] and trace.without_score == 0
    assert [state["score"] for state in trace.states[1:4]] == [0, 0, 3]
    assert len(model.rounds[1]) == 3 and len({call.sampling.seed for call in model.rounds[1]}) == 3


def test_votes_for_nothing_are_counted():
    answers = ["Best choice: 2", "Best choice: 7", "I like all of them."]
    trace = grow(vote_model(lambda choices, k: answers[k]), evaluator="vote")
    assert trace.leaf == [1, 1, 1] and trace.without_score == 6


def test_votes_over_the_children_of_several_states():
    model = vote_model(lambda choices, k: f"Best choice: {len(choices) - k}")
    trace = grow(model, evaluator="vote", breadth=2, steps=2)
    assert [len(calls) for calls in model.rounds] == [3, 3, 6, 3, 1]
    assert trace.leaf == [1, 0]  # the first of those with a vote


def test_settings_of_searches():
    assert parse_search("bfs") == BreadthFirst()
    assert parse_search("dfs:threshold=0.25,expansions=9") == DepthFirst(0.25, 9)
    assert parse_search("mcts:explore=2") == MonteCarlo(24, 2.0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("beam", "search: must be one of bfs, dfs, astar, mcts, got beam"),
        ("dsf", "search: must be one of bfs, dfs, astar, mcts, got dsf; did you mean dfs?"),
        ("bfs:width=2", "search: settings of bfs must be left out, got width"),
        ("dfs:limit=2", "search: settings of dfs must be one of threshold, expansions, got limit"),
        ("dfs:threshold=2", "search.threshold: must be >= 0 and <= 1, got 2.0"),
        ("dfs:threshold=x", "search: threshold must be a number, got 'x'"),
        ("dfs:threshold", "search: threshold must be a number, got ''"),
        ("mcts:rounds=0", "search.rounds: must be >= 1, got 0"),
        ("mcts:rounds=1.5", "search: rounds must be a whole number, got '1.5'"),
        ("astar:weight=nan", "search.weight: must be >= 0 and < inf, got nan"),
    ],
)
def test_searches_that_there_are_not(text, message):
    with pytest.raises(UserError) as error:
        parse_search(text)
    assert str(error.value) == message


def test_breadth_first_search_goes_on_from_the_deepest_level_that_there_is():
    """All thoughts of the second level fail."""
    failing = [f"think {state}#{k}" for state in "01" for k in range(3)]
    trace = grow(table_model({"0": 3, "1": 8, "2": 1}, failing), search="bfs", breadth=2)
    assert trace.leaf == [1]  # whose closing generation fails as its thoughts do
