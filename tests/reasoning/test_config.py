"""Recipes of `drafttrain reason`: read as strictly as others, explained, each with a tiny twin."""

import json
from pathlib import Path

import pytest
import yaml

from drafttrain.reasoning.config import ReasonConfig
from drafttrain.reasoning.reason import reason_from, trace_file
from drafttrain.reasoning.tasks import TASKS
from drafttrain.run.keys import describe_keys, explain_keys
from drafttrain.run.recipe import load_settings
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from tests.reasoning.toys import Scripted

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "reasoning").glob("*.yaml"))
MINIMAL = {"target": "x", "task": {"name": "gsm8k", "path": "p.jsonl"}, "out": "runs/x"}
DRAFTER = ["--drafter", "nowhere"]


def load(values, tmp_path, *overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_settings(ReasonConfig, path, overrides)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_the_settings_of_the_paper_and_have_a_twin(path):
    config = load_settings(ReasonConfig, path)
    assert (config.thoughts, config.breadth, config.search, config.evaluator) == (3, 1, "bfs", "value")
    assert config.sampling.temperature == 1 and config.task.name == path.stem
    assert config.steps == TASKS[config.task.name].steps
    assert (ROOT / config.task.path).exists() and (ROOT / config.drafter).exists()
    twin = load_settings(ReasonConfig, ROOT / "recipes" / "tiny" / "reasoning" / path.name)
    assert (twin.task.name, twin.task.path) == (config.task.name, config.task.path)


def test_there_is_a_recipe_for_each_task():
    assert [path.stem for path in RECIPES] == sorted(TASKS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_twins_grow_trees(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--task.limit", "2", "--out", str(tmp_path), "--task.at_once=2"]
    config = load_settings(ReasonConfig, f"recipes/tiny/reasoning/{path.name}", words)
    traces = []
    model = Scripted(lambda prompt, number: f"{number} is good, score: 7")
    reason_from(config, lambda problems, finished: model, traces.append)
    assert len(traces) == 2 and all(trace.finished and trace.result for trace in traces)
    for trace in traces:
        assert read_json(trace_file(tmp_path, trace.problem["id"]))["result"] == trace.result


def test_the_home_folder_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(MINIMAL | {"out": "~/runs/x"}, tmp_path).out == "/home/somebody/runs/x"


def test_minimal_recipe(tmp_path):
    config = load(MINIMAL, tmp_path)
    assert (config.thoughts, config.steps, config.drafter, config.prefixes) == (3, None, None, True)
    assert config.scheduler.overlap == "auto" and config.scheduler.verifier == "batched"
    assert load(MINIMAL, tmp_path, "--scheduler.overlap", "false").scheduler.overlap is False
    assert load(MINIMAL, tmp_path, "--task.limit", "4").task.limit == 4


def test_every_key_is_explained():
    keys = {key.name: key for key in describe_keys(ReasonConfig)}
    assert all(key.text for key in keys.values()), [name for name, key in keys.items() if not key.text]
    named = (
        "target drafter task thoughts breadth steps search evaluator sampling max_new_tokens tree prefixes"
    )
    named += " seed out scheduler scheduler.verifier scheduler.drafting scheduler.sequences scheduler.threads"
    assert {*named.split(), "scheduler.overlap"} <= set(keys)
    assert "verifier (one | batched, default batched)" in explain_keys("scheduler", ReasonConfig)
    assert keys["scheduler.overlap"].kind == "bool | auto"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--thoughts", "0"], "thoughts: must be >= 1 and <= 1000, got 0"),
        (["--breadth", "0"], "breadth: must be >= 1 and <= 1000, got 0"),
        (["--steps", "0"], "steps: must be >= 1 and <= 1000, got 0"),
        (["--scheduler.sequences", "0"], "scheduler.sequences: must be >= 1 and <= 1024, got 0"),
        (["--scheduler.threads", "[1, 0]"], "scheduler.threads: must be two numbers >= 1"),
        (["--sampling.temperature", "-1"], "sampling.temperature: must be >= 0, got -1.0"),
        (["--sampling.top_p", "0"], "sampling.top_p: must be > 0 and <= 1, got 0.0"),
        (["--task.limit", "0"], "task.limit: must be >= 1, got 0"),
        (["--task.name", "chess"], "task.name: must be one of gsm8k, writing, blocksworld, got chess"),
        (["--search", "beam"], "search: must be one of bfs, dfs, astar, mcts, got beam"),
        (["--search", "mcts", "--evaluator", "vote"], "evaluator: must be value for search mcts, got vote"),
        (["--evaluator", "judge"], "evaluator: must be one of value, vote, got judge"),
        (["--scheduler.verifier", "two"], "scheduler.verifier: must be one of one, batched, got two"),
        (["--scheduler.drafting", "none"], "scheduler.drafting: must be one of each, joined, got none"),
        (["--thoughts", "many"], "thoughts: must be a whole number, got many"),
        (["--scheduler.chunk", "0"], "scheduler.chunk: must be >= 1, got 0"),
        (["--tree", "chain"], "tree: must be null or ngram without a drafter, got chain"),
        (
            ["--tree", "drawn:k_config=2-1"],
            "tree: must be null or ngram without a drafter, got drawn:k_config",
        ),
        ([*DRAFTER, "--tree", "drawn:k_config=2-0"], "tree 'drawn:k_config=2-0': k_config: "),
        ([*DRAFTER, "--tree", "ngram+chain:length=x"], "tree 'chain:length=x': length: must be int, got 'x'"),
        ([*DRAFTER, "--tree", "ngram+drawn:k_config=2-1"], "tree: must be a deterministic one after ngram"),
        (
            [*DRAFTER, "--tree", "drawn:k_config=2-1", "--scheduler.shared_ngrams", "true"],
            "scheduler.shared_ngrams: must be false or auto with tree drawn:k_config=2-1, got true",
        ),
        ([*DRAFTER, "--tree", "chains"], "there is no policy 'chains'; did you mean chain?"),
        (["--thougts", "3"], "unknown key thougts; did you mean thoughts?"),
        (["--verifier", "one"], "unknown key verifier; did you mean scheduler.verifier?"),
        (["--corpus.max_length", "3"], "unknown key corpus; "),
    ],
)
def test_wrong_values_are_refused_by_their_key(words, message, tmp_path):
    with pytest.raises(UserError) as error:
        load(MINIMAL, tmp_path, *words)
    assert message in str(error.value) and "recipe.yaml" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tree", ["timed", "ngram+pct", "c2t", "ngram", "ngram+chain:length=2", "drawn:k_config=2-1"]
)
def test_trees_that_a_bundle_may_have_are_read_with_it(tree, tmp_path):
    assert load(MINIMAL, tmp_path, *DRAFTER, "--tree", tree).tree == tree


def test_missing_keys(tmp_path):
    with pytest.raises(UserError, match="missing .*target"):
        load({"task": MINIMAL["task"], "out": "x"}, tmp_path)
    with pytest.raises(UserError, match="missing task.path"):
        load(MINIMAL | {"task": {"name": "gsm8k"}}, tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    config = load(MINIMAL, tmp_path)
    with pytest.raises(UserError, match="p.jsonl: no such file"):
        reason_from(config, lambda problems, finished: None, print)


def test_all_traces_are_read_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--task.limit", "3", "--out", str(tmp_path)]
    config = load_settings(ReasonConfig, "recipes/tiny/reasoning/gsm8k.yaml", words)
    model, loaded, traces = Scripted(lambda prompt, number: f"{number}"), [], []

    def begin(problems: int, finished: list):
        loaded.append((problems, len(finished)))
        return model

    reason_from(config, begin, traces.append)
    last = trace_file(tmp_path, traces[-1].problem["id"])
    whole = last.read_text()
    last.write_text("{")
    with pytest.raises(UserError, match=last.name):
        reason_from(config, begin, traces.append)
    assert loaded == [(3, 0)] and len(traces) == 3
    last.unlink()
    reason_from(config, begin, traces.append)
    last.write_text(whole)
    reason_from(config, begin, traces.append)  # of finished trees nothing is loaded
    assert loaded == [(3, 0), (3, 2)] and len(traces) == 9


def test_ids_that_name_one_file_are_refused(tmp_path):
    problems = tmp_path / "p.jsonl"
    rows = [{"id": id, "question": "How many?", "answer": "Two.\n#### 2"} for id in ("a/b", "c", "a_b")]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = MINIMAL | {"task": {"name": "gsm8k", "path": str(problems)}, "out": str(tmp_path)}
    with pytest.raises(UserError, match="ids must differ, also as names of files, got a_b twice"):
        reason_from(load(values, tmp_path), lambda problems, finished: None, print)
    problems.write_text(json.dumps(rows[1] | {"id": "summary"}) + "\n")  # the file of all results
    with pytest.raises(UserError, match="no id may be summary, the results' name; rename it"):
        reason_from(load(values, tmp_path), lambda problems, finished: None, print)
