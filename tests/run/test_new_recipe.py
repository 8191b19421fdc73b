"""A recipe for one's own target and chats is written, can be read, and is ready to run."""

import json
import math
import random
from pathlib import Path

import pytest
import yaml

from drafttrain import SpeculativeDecoder
from drafttrain.data.prompts import read_prompts
from drafttrain.run.cli import main
from drafttrain.run.recipe import load_recipe

WORDS = "the quick brown fox jumps over a lazy dog while it verifies several tokens in one pass".split()


@pytest.fixture
def chats(tmp_path, monkeypatch) -> Path:
    """A working folder with 40 chats."""
    monkeypatch.chdir(tmp_path)

    def words() -> str:
        return " ".join(random.choices(WORDS, k=random.randint(10, 14)))

    turns = [[{"from": who, "value": words()} for who in ("human", "gpt")] for _ in range(40)]
    rows = [{"id": str(i), "conversations": turn} for i, turn in enumerate(turns)]
    Path("chats.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("hasty_calibration")
def test_it_runs_as_it_is_to_a_bundle(chats, tiny_target_folder, capsys):
    words = ["new-recipe", "--target", str(tiny_target_folder), "--chats", "chats.json", "--out", "own.yaml"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "own.yaml: for 40 conversations\nown.prompts.jsonl: 4 of their prompts" in printed
    assert main(["run", "own.yaml"]) == 0
    summary = json.loads(Path("runs/own/summary.json").read_text())
    assert summary["accept_len"] >= 1 and summary["lossless"] is True and summary["tree"] == "timed"
    decoder = SpeculativeDecoder.from_pretrained("runs/own/bundle", dtype="float32")
    prompt = "Could you please explain"
    assert decoder.generate(prompt, 12).token_ids == decoder.autoregressive(prompt, 12).token_ids


@pytest.mark.parametrize("kind", ["edd", "eagle", "medusa", "vdm"])
@pytest.mark.parametrize("words", [[], ["--keep-answers"]])
def test_each_kind_can_be_read(kind, words, chats):
    assert (
        main(["new-recipe", "--target", "my/Model-3.2", "--chats", "chats.json", "--kind", kind, *words]) == 0
    )
    recipe = load_recipe("model-3.2.yaml")
    assert recipe.drafter.kind == kind and recipe.target.model == "my/Model-3.2"
    assert recipe.drafter.train_head == (kind != "eagle")  # other engines know none but the target's
    sources = recipe.corpus.sources if words else recipe.regenerate.sources
    assert [source.path for source in sources] == ["chats.json"] and (recipe.regenerate is None) == bool(
        words
    )
    assert recipe.classifier.prompts is None and "c2t" not in recipe.evaluate.trees
    assert recipe.corpus.exclude == ["model-3.2.prompts.jsonl"] == [p.path for p in recipe.evaluate.prompts]
    assert len(read_prompts("model-3.2.prompts.jsonl")) == 4


def test_it_invents_no_licence(chats):
    write = ["new-recipe", "--target", "org/a", "--chats", "chats.json"]
    assert main([*write, "--out", "none.yaml"]) == 0
    assert "export" not in yaml.safe_load(Path("none.yaml").read_text())
    assert main([*write, "--out", "some.yaml", "--base-model", "org/a", "--license", "mit"]) == 0
    assert yaml.safe_load(Path("some.yaml").read_text())["export"] == {
        "base_model": "org/a",
        "license": "mit",
    }


def test_documents_and_few_chats_leave_nothing_to_hold_out(chats):
    Path("text.txt").write_text("A dog walks.\n\nIt barks at the fox.")
    Path("few.json").write_text(json.dumps(json.loads(Path("chats.json").read_text())[:9]))
    for file in ("text.txt", "few.json"):
        assert main(["new-recipe", "--target", "org/x", "--chats", file, "--out", "own.yaml"]) == 0
        recipe = load_recipe("own.yaml")
        assert (recipe.regenerate is None) == (file == "text.txt") and not recipe.evaluate.prompts
        Path("own.yaml").unlink()


@pytest.mark.parametrize("positions", [2048, math.inf])  # those of a target that is not there are unknown
def test_prompts_that_may_not_fit_are_not_held_out(positions, chats, monkeypatch):
    monkeypatch.setattr("drafttrain.run.new_recipe._positions", lambda target: positions)
    rows = json.loads(Path("chats.json").read_text())
    for i, row in enumerate(rows[::2]):
        turn = next(turn for turn in row["conversations"] if turn["from"] == "human")
        turn["value"] = f"{i} " + "word " * 2000
    Path("long.json").write_text(json.dumps(rows))
    assert main(["new-recipe", "--target", "org/x", "--chats", "long.json", "--out", "own.yaml"]) == 0
    held = [json.loads(line) for line in Path("own.prompts.jsonl").read_text().splitlines()]
    assert held and all(len(row["prompt"]) < 1000 for row in held)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--chats", "nowhere.json"], "nowhere.json: no such file"),
        (["--chats", "chats.json", "--out", "old.yaml"], "--out: must name a new file, got old.yaml"),
        (["--chats", "chats.json", "--kind", "x"], "--kind: must be one of edd, eagle, medusa, vdm, got x"),
        ([], "the following arguments are required: --chats"),
        (
            ["--chats", "chats.json", "--target", "smollm2-135m-instuct"],
            "did you mean smollm2-135m-instruct?",
        ),
        (
            ["--chats", "chats.json", "--target", "org/x@dev"],
            "--target: must be a folder, a .gguf file or a Hub id user/name, got org/x@dev",
        ),
        (["--chats", "chats.json", "--target", "."], "--target: must be a folder with a config.json, got ."),
        (["--chats", "chats.json", "--out", "."], "--out: must name a new file, got .; . exists"),
        (["--chats", "chats.json", "--out", "/"], "--out: must name a new file, got /; / exists"),
        (["--chat", "chats.json"], "--chat: no such option; did you mean --chats?"),
    ],
)
def test_mistakes(words, expected, chats, capsys):
    Path("old.yaml").write_text("")
    target = [] if "--target" in words else ["--target", "org/x"]
    assert main(["new-recipe", *target, *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert sorted(path.name for path in chats.iterdir()) == ["chats.json", "old.yaml"]


@pytest.mark.parametrize("config", [[], {"max_position_embeddings": "many"}])
def test_a_broken_config_of_the_target_is_one_line(config, chats, capsys):
    Path("broken").mkdir()
    Path("broken/config.json").write_text(json.dumps(config))
    assert main(["new-recipe", "--target", "broken", "--chats", "chats.json"]) == 2
    error = capsys.readouterr().err
    assert "broken/config.json: " in error and error.count("\n") == 1


def test_documents_beside_chats_are_trained_on(chats):
    Path("text.txt").write_text("A dog walks.\n\nIt barks at the fox.")
    words = ["--target", "org/x", "--chats", "chats.json", "text.txt", "--out", "own.yaml"]
    assert main(["new-recipe", *words]) == 0
    recipe = load_recipe("own.yaml")
    assert [source.path for source in recipe.regenerate.sources] == ["chats.json"]
    assert [source.path for source in recipe.corpus.sources] == ["text.txt"]
    Path("own.yaml").unlink()
    assert main(["new-recipe", *words, "--keep-answers"]) == 0
    assert [source.path for source in load_recipe("own.yaml").corpus.sources] == ["chats.json", "text.txt"]


def test_prompts_that_any_chat_may_hold_are_not_held_out(chats):
    """No chat that says hello would be trained on."""
    rows = json.loads(Path("chats.json").read_text())
    for row in rows[::2]:
        next(turn for turn in row["conversations"] if turn["from"] == "human")["value"] = f"Hi {row['id']}!"
    Path("chats.json").write_text(json.dumps(rows))
    assert main(["new-recipe", "--target", "org/x", "--chats", "chats.json", "--out", "own.yaml"]) == 0
    held = [json.loads(line) for line in Path("own.prompts.jsonl").read_text().splitlines()]
    assert held and not any(row["prompt"].startswith("Hi ") for row in held)
