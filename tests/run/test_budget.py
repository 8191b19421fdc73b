"""The plan as a pure function: monotone in every speed, within the time, and never nothing."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.calibration import quick, timing
from drafttrain.data.chat import encode_prompt
from drafttrain.data.prompts import read_prompts
from drafttrain.data.readers import read_conversations
from drafttrain.evaluation import measure, stock
from drafttrain.run import budget
from drafttrain.run.budget import SHARES, SIZES, SPARE, Evaluation, Speeds, plain_trees, plan
from drafttrain.run.recipe import Recipe, load_recipe
from drafttrain.target_lm.loading import load_tokenizer

ROOT = Path(__file__).parents[2]
NAMES = ("generate", "collect", "train", "decode", "transformers", "draft")
RECIPE = load_recipe(ROOT / "recipes/quickstart.yaml")
TWENTY = 1200.0


def recipe_with(values: dict[str, Any]) -> Recipe:
    words = [word for key, value in values.items() for word in (f"--{key}", json.dumps(value))]
    return load_recipe(ROOT / "recipes/quickstart.yaml", words)


def speeds(value: float = 100.0, load: float = 2.0, rows: int = 32, **others: float) -> Speeds:
    return Speeds(load, generate_rows=rows, **{**dict.fromkeys(NAMES, value), **others})


def amounts(planned: budget.Plan) -> tuple:
    """The part of a plan that must not shrink."""
    size = dataclasses.astuple(planned.evaluation)
    kept = (planned.answers, planned.conversations, planned.steps, planned.eval_prompts)
    return (*kept, planned.calibrates, *size)


def test_the_shares_are_all_of_the_time():
    assert sum(SHARES.values()) == pytest.approx(1) and 0 < SPARE < 1


def test_sizes_ascend():
    for small, large in itertools.pairwise(map(dataclasses.astuple, SIZES)):
        assert small != large and all(a <= b for a, b in zip(small, large))


any_speed = st.floats(1, 10_000)
machines = st.builds(speeds, rows=st.sampled_from([1, 8, 32, 128]), **dict.fromkeys(NAMES, any_speed))


@settings(max_examples=500)
@given(machines, st.sampled_from(NAMES), st.floats(1, 100), st.floats(120, 7200))
def test_more_speed_never_plans_less(machine, name, factor, seconds):
    faster = replace(machine, **{name: getattr(machine, name) * factor})
    before, after = plan(machine, seconds, RECIPE), plan(faster, seconds, RECIPE)
    assert all(a <= b for a, b in zip(amounts(before), amounts(after)))


@settings(max_examples=200)
@given(machines, st.floats(120, 7200), st.floats(1, 10))
def test_more_time_never_plans_less(machine, seconds, factor):
    before, after = plan(machine, seconds, RECIPE), plan(machine, seconds * factor, RECIPE)
    assert all(a <= b for a, b in zip(amounts(before), amounts(after)))


def test_never_over_the_time_and_never_nothing():
    for values in itertools.product([1.0, 30.0, 1e3, 1e4], repeat=len(NAMES)):
        planned = plan(speeds(**dict(zip(NAMES, values))), TWENTY, RECIPE)
        assert planned.total <= TWENTY * (1 - SPARE), values
        assert min(planned.evaluation.tasks, planned.evaluation.prompts, planned.evaluation.new_tokens) >= 1


@settings(max_examples=200)
@given(machines, st.floats(1, 7200))
def test_over_the_time_only_with_the_smallest_run(machine, seconds):
    planned = plan(machine, seconds, RECIPE)
    if planned.total > seconds * (1 - SPARE):
        assert planned.evaluation == SIZES[0] and not planned.steps and not planned.calibrates


def test_a_fast_machine_does_all_of_the_recipe():
    planned = plan(speeds(10_000), TWENTY, RECIPE)
    assert (
        planned.answers == 500
        and planned.conversations == 2000
        and planned.evaluation == Evaluation(3, 20, 96, 4, 8, 16, 64)
    )
    assert planned.steps == int(2000 * budget.CONVERSATION * 0.97 * 3 / 2048)
    assert planned.calibrates and planned.eval_prompts == 16


def test_what_falls_back_on_what():
    slow = plan(speeds(1000, train=40), TWENTY, RECIPE)
    assert slow.steps == slow.answers == slow.conversations == 0 and 0 < slow.fitting["steps"] < 30
    assert list(slow.seconds) == ["calibrate", "evaluate"] and slow.evaluation == Evaluation(
        3, 20, 96, 4, 8, 16, 64
    )
    slow = plan(speeds(1000, generate=5, rows=1), TWENTY, RECIPE)
    assert slow.answers == 0 and 0 < slow.fitting["answers"] < 16 and slow.steps > 30
    slow = plan(speeds(1000, decode=0.7, transformers=1e4, draft=1e4), TWENTY, RECIPE)
    assert not slow.calibrates and "calibrate" not in slow.seconds and slow.evaluation.trees <= 2
    slow = plan(speeds(1e4, transformers=1.3), TWENTY, RECIPE)  # all of the time for a decent evaluation
    assert slow.evaluation == SIZES[budget.DECENT] and list(slow.seconds) == ["evaluate"]
    assert slow.seconds["evaluate"] > SHARES["evaluate"] * TWENTY * (1 - SPARE) and slow.fitting == {}
    slow = plan(speeds(1.0), TWENTY, RECIPE)
    assert slow.evaluation == SIZES[0] and list(slow.seconds) == ["evaluate"]


def test_the_recipe_is_the_most():
    words = {
        "regenerate.sources": [{"path": "a", "max_conversations": 3}],
        "corpus.sources": [{"path": "b", "max_conversations": 10}],
        "training.max_steps": 2,
        "evaluate.prompts": [{"name": "c", "path": "c", "limit": 2}],
        "evaluate.tune_prompts": {"name": "d", "path": "d", "limit": 2},
        "evaluate.trees": RECIPE.evaluate.trees[:2],
        "evaluate.max_new_tokens": 6,
        "evaluate.lossless_prompts": 2,
        "evaluate.lossless_new_tokens": 6,
    }
    planned = plan(speeds(10_000), TWENTY, recipe_with(words))
    assert planned.steps == 2 and planned.evaluation == Evaluation(1, 2, 6, 2, 2, 2, 6)
    assert (planned.answers, planned.conversations) == (3, 13)  # fewer than are worth it, but all there are
    words = {
        "regenerate": None,
        "calibrate.quick": False,
        "evaluate.trees": [f"chain:length={n}" for n in (1, 2, 3, 4)],
    }
    nothing = plan(speeds(10_000), TWENTY, recipe_with(words))
    assert nothing.answers == 0 and not nothing.calibrates and nothing.evaluation.trees == 4


def test_a_half_empty_batch_takes_as_long_as_a_full_one():
    one, many = (budget.regenerate_seconds(speeds(rows=32), n, RECIPE) for n in (1, 32))
    assert many - one == pytest.approx(31 * budget.ASKED / 100)


def test_declared_numbers_are_those_of_the_stages():
    assert budget.CALIBRATION_S == quick.CURVE_SECONDS + quick.TREE_SECONDS + quick.CHAIN_SECONDS
    assert budget.CALIBRATION_ROUNDS == timing.WARM_UP + 1
    assert budget.CALIBRATION_FORWARDS == 2 * len(quick.VERIFIED)
    assert budget.CALIBRATION_TOKENS == sum(quick.VERIFIED)
    assert budget.CALIBRATION_ANSWER == quick.NEW_TOKENS
    assert measure.WARM_UP_TOKENS == budget.WARM_UP_TOKENS
    assert (stock.PROMPT, stock.FIRST_TOKENS) == (budget.STOCK_PROMPT, budget.STOCK_TOKENS)


def test_declared_lengths_are_those_of_the_bundled_texts(smollm2, monkeypatch):
    monkeypatch.chdir(ROOT)
    tokenizer, recipe = load_tokenizer(str(smollm2)), load_recipe("recipes/quickstart.yaml")

    def near(tokens: list[int], declared: int) -> bool:
        return declared == pytest.approx(sum(tokens) / len(tokens), rel=0.1)

    sets = recipe.evaluate.prompts
    prompts = [prompt for one in sets for prompt in read_prompts(one.path, one.limit)]
    assert near([len(prompt.token_ids(tokenizer)) for prompt in prompts], budget.PROMPT)
    asked, said = [], []
    for path, lengths, last in (
        (recipe.regenerate.sources[0].path, asked, 1),
        (recipe.corpus.sources[0].path, said, 2),
    ):
        for conversation in itertools.islice(read_conversations(path), 300):
            ids = encode_prompt(tokenizer, [m for m in conversation.messages if m.role == "user"][:1])
            answers = [m.token_ids for m in conversation.messages if m.role == "assistant"][: last - 1]
            lengths.append(len(ids) + sum(map(len, answers)))
    assert near(asked, budget.ASKED) and near(said, budget.CONVERSATION)


def test_what_the_quickstart_asks_for():
    assert Evaluation.of(RECIPE) == Evaluation(3, 20, 96, 4, 8, 16, 64)
    assert budget.asked_rows(RECIPE) == 500 and budget.rows_of(RECIPE.corpus.sources) == 1500
    assert RECIPE.calibrate.is_asked and len(plain_trees(RECIPE.evaluate.trees)) == 2
