"""The studies of topic `flagship` on tiny models."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.data.prompts import Prompt
from drafttrain.run.recipe import load_recipe
from drafttrain.self_draft.proposer import SelfDraftConfig
from drafttrain.self_draft.settings import SelfDraftSettings
from drafttrain.target_lm.stock import load_stock_model
from drafttrain.utils.errors import UserError
from studies import ROOT, generate, spoiled
from studies.figures import flagship, second_target
from studies.goals import Run
from studies.spoiled import SPOILED


@pytest.fixture
def prompts():
    return [Prompt(str(i), "chat", [f"The cat sat {i}"]) for i in range(3)]


def test_texts_of_generate_are_compared_and_gone_on_with(
    tiny_target, tiny_bundle, prompts, tmp_path, monkeypatch
):
    path, model = tmp_path / "texts.json", load_stock_model(tiny_target)
    tasks = {"alone": (prompts, 1, False), "two": (prompts, 2, False), "processed": (prompts, 1, True)}
    cells = generate.differing(model, tiny_target, tiny_bundle, tasks, 12, path)
    assert cells == {name: {"texts": 3, "differing": []} for name in tasks}

    def other(model, target, ids, max_new_tokens, **options):
        """The drafted texts have one token that is not the plain ones'."""
        return [[*one, 1] if "drafter" in options else one for one in ids]

    monkeypatch.setattr(generate, "generate_batch", other)
    again = generate.differing(model, tiny_target, tiny_bundle, tasks, 12, path)
    assert again == cells  # nothing is left to be done
    found = generate.differing(model, tiny_target, tiny_bundle, {"new": (prompts, 2, False)}, 12, path)
    assert found["new"] == {"texts": 3, "differing": ["0", "1", "2"]}
    assert json.loads(path.read_text()) == found


def test_best_accept_len_is_that_of_the_stored_runs(tiny_bundle, questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_bundle, tmp_path / "other")
    monkeypatch.setattr(flagship, "DRAFTERS", (str(tiny_bundle), str(tmp_path / "other")))
    monkeypatch.setattr(flagship, "SHIPPED", str(tiny_bundle))
    monkeypatch.setattr(flagship, "TASKS", dict.fromkeys(("mt_bench", "gsm8k"), (str(questions), 80)))
    monkeypatch.setattr(flagship, "TUNING", str(questions))
    monkeypatch.setattr(flagship, "NEW_TOKENS", 6)
    found = flagship.best_accept_len(Run("flagship", quick=True))
    folder = Path("runs/figures/quick/best_accept_len") / tiny_bundle.name
    rows = [json.loads(line) for line in open(folder / "measurements.jsonl")][1:]
    assert len(rows) == 4
    plain = found.pop("edd_accept_len")
    assert plain["value"] == found["best_accept_len_chain"]["value"] and plain["drafter"] == str(tiny_bundle)
    for figure in found.values():
        runs = [row["runs"][figure["tree"]] for row in rows if row["task"] == "mt_bench"]
        counts = [(len(one["token_ids"]) - 1, one["stats"]["steps"]) for one in runs]
        assert figure["value"] == pytest.approx(sum(a for a, _ in counts) / sum(b for _, b in counts))
        low, high = figure["interval"]
        ratios = [a / b for a, b in counts]
        assert min(ratios) <= low <= figure["value"] <= high <= max(ratios)
        assert set(figure["tasks"]) == {"mt_bench", "gsm8k"}
        [(other, row)] = figure["others"].items()  # of two that are alike the first
        assert figure["drafter"] == str(tiny_bundle) and other == str(tmp_path / "other")
        assert row["value"] == figure["value"] and figure["tuning"] == row["tuning"] >= 1
    assert found["best_accept_len_chain"]["tree"] == "chain:length=5"
    assert found["best_accept_len_tree"]["tree"] in flagship.TREES


def test_a_joined_tree_has_as_many_nodes(tiny_bundle, questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    monkeypatch.setattr(flagship, "DRAFTERS", (str(bundle),))
    monkeypatch.setattr(flagship, "TASKS", {"mt_bench": (str(questions), 80)})
    monkeypatch.setattr(flagship, "TUNING", str(questions))
    monkeypatch.setattr(flagship, "NEW_TOKENS", 12)
    monkeypatch.setattr(flagship, "NODES", 9)
    monkeypatch.setattr(flagship, "TREES", ("eagle2:top_k=3,max_depth=3,total=9", "eagle2:total=9"))
    with pytest.raises(UserError, match="bundle: must have n-grams, got none; make them with"):
        flagship.joined_accept_len(Run("flagship", quick=True))
    SelfDraftSettings(config=SelfDraftConfig(budget=1, least=0.5, branches=2)).save(bundle)
    found = flagship.joined_accept_len(Run("flagship", quick=True))["joined_accept_len_tree"]
    assert found["drafter"] == str(bundle) and found["tree"] in [f"ngram+{tree}" for tree in flagship.TREES]
    folder = Path("runs/figures/quick/joined_accept_len/bundle")
    rows = [json.loads(line) for line in open(folder / "measurements.jsonl")][1:]
    counts = [row["runs"][found["tree"]]["stats"] for row in rows]
    assert found["size"]["prompts"] == {"mt_bench": len(rows)}
    for count in counts:  # nine nodes a step, or what the output's limit leaves
        assert 9 <= count["verify_tokens"] <= 9 * count["steps"]


@pytest.mark.parametrize(("lengths", "ok"), [((2.0, 2.01), None), ((2.1, 2.0), False)])
def test_a_recipe_that_is_trained_again(lengths, ok, tmp_path, monkeypatch):
    """Too long is as bad as too short: the committed drafter is then not what the recipe makes."""
    ran, values = [], dict(zip(("trained", "committed"), lengths))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flagship.Workflow, "run", lambda self, last: ran.append((self.output, last)))
    monkeypatch.setattr(flagship, "load_recipe", lambda path, words: load_recipe(ROOT / path, words))
    size = {"prompts": {"mt_bench": 80}}
    monkeypatch.setattr(
        flagship, "accept_len", lambda run, bundle, folder: {"value": values[folder.name], "size": size}
    )
    found = flagship.reproduces(Run("flagship"))["recipe_reproduces"]
    assert ran == [(Path("runs/figures/full/recipe_reproduces/run"), "train")]
    assert found["value"] == lengths[0] / lengths[1] and found.get("ok") is ok


def test_the_distribution_is_that_of_the_suite_s_own_test(monkeypatch):
    file, name = generate.DISTRIBUTION.split("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text()
    for status in (0, 1):
        commands = []

        def run(command, status=status, commands=commands, **given):
            commands.append(command)
            return SimpleNamespace(returncode=status)

        monkeypatch.setattr(generate.subprocess, "run", run)
        assert generate.distribution_holds(["-x"]) is (status == 0)
        assert commands[0][1:3] == ["-m", "pytest"] and commands[0][-2:] == [generate.DISTRIBUTION, "-x"]


def test_a_spoiled_target_is_the_other_with_one_thing_changed(tiny_target_folder, tiny_bundle, tmp_path):
    for name in ("template", "weights"):
        (tmp_path / name).mkdir()
    bundle, other = spoiled.another_template(tiny_bundle, tiny_target_folder, tmp_path / "template")
    read = [AutoTokenizer.from_pretrained(folder) for folder in (tiny_target_folder, other)]
    assert bundle == tiny_bundle and read[0].get_vocab() == read[1].get_vocab()
    assert read[0].chat_template != read[1].chat_template
    _, stale = spoiled.stale_weights(tiny_bundle, tiny_target_folder, tmp_path / "weights")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_target_folder, stale))
    moved = {
        float(torch.nn.functional.cosine_similarity(own.flatten(), new.flatten(), dim=0).detach())
        for own, new in zip(before.parameters(), after.parameters(), strict=True)
    }
    assert 0.9 < min(moved) < 1.0
    # the target itself has stayed as it was
    assert torch.equal(
        next(before.parameters()), next(AutoModelForCausalLM.from_pretrained(tiny_target_folder).parameters())
    )


def test_another_tapped_block_is_another_bundle(tiny_target_folder, tiny_bundle, tmp_path):
    own = json.loads((tiny_bundle / "config.json").read_text())
    bundle, target = spoiled.another_block(tiny_bundle, tiny_target_folder, tmp_path)
    config = json.loads((bundle / "config.json").read_text())
    assert target == tiny_target_folder and config == {**own, "tapped_blocks": [4]}
    assert json.loads((tiny_bundle / "config.json").read_text()) == own


def test_hits_are_counted_where_a_cause_is_among_the_first(tiny_bundle, tmp_path, monkeypatch, capsys):
    """The diagnosis is imitated: it names the vocabulary of every drafter, and what it has named stays."""
    seen = []

    def diagnose(bundle, prompts, file, limit, **options):
        seen.append(file.stem)
        changes = [{"cause": cause} for cause in ("vocabulary", "weights", "training", "template")]
        file.write_text(json.dumps({"changes": changes, "accept_len": 1.5, "prompts": limit}))

    monkeypatch.setattr(spoiled, "diagnose", diagnose)
    folders = []

    def left_alone(bundle, target, out):
        folders.append(target)
        return bundle, target

    nothing = {name: (left_alone, causes) for name, (_, causes) in SPOILED.items()}
    monkeypatch.setattr(
        spoiled, "resolve_target", lambda name: f"{name}/fetched"
    )  # a known name is no folder
    monkeypatch.setattr(spoiled, "SPOILED", nothing)
    rows = spoiled.diagnosed(tiny_bundle, tmp_path, 2)
    assert [row["cause"] for row in rows if row["hit"]] == ["stale weights", "small vocabulary"]
    assert {folder.name for folder in folders} == {"fetched"}
    assert len(seen) == 5 and spoiled.diagnosed(tiny_bundle, tmp_path, 2) == rows and len(seen) == 5
    assert spoiled.main(["--bundle", str(tiny_bundle), "--out", str(tmp_path), "--limit", "2"]) == 0
    assert json.loads((tmp_path / "causes.json").read_text()) == rows
    assert "| short answers | vocabulary, weights, training | 1.50 |" in capsys.readouterr().out
    assert spoiled.diagnosed(tiny_bundle, tmp_path, 3)[0]["prompts"] == 3  # not those of two prompts


@pytest.fixture
def second(tiny_bundle, questions, tmp_path, monkeypatch):
    """Let the second target's figures run on a tiny bundle and three tasks of the same questions."""
    names = ("HumanEval", "MBPP", "MT-bench")
    recipe = tmp_path / "recipe.yaml"
    sets = [{"name": name, "path": str(questions)} for name in names]
    trees = {"trees": ["chain:length=2"], "max_new_tokens": 6}
    text = {"target": {"model": "tiny"}, "corpus": {"sources": [{"path": str(questions)}]}}
    recipe.write_text(json.dumps({**text, "evaluate": {"prompts": sets, **trees}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(second_target, "DRAFTER", str(tiny_bundle))
    monkeypatch.setattr(second_target, "RECIPE", str(recipe))
    tasks = {name: (str(questions), 2) for name in second_target.TASKS}
    monkeypatch.setattr(second_target, "TASKS", tasks)
    monkeypatch.setattr(flagship, "TUNING", str(questions))
    monkeypatch.setattr(flagship, "NEW_TOKENS", 6)


def test_the_second_target_is_measured_over_all_its_tasks(second, tiny_target_folder):
    target = str(tiny_target_folder)
    run = Run("flagship", limit=1, busy="warn", target=target)
    found = second_target.speeds(run, target) | second_target.accept_len(run, target)
    rows = [json.loads(line) for line in open("runs/figures/limited/qwen05_speed/measurements.jsonl")][1:]

    def seconds(method):
        return sum(row["runs"][method]["seconds"] for row in rows)

    ratio = seconds("autoregressive") / seconds("chain:length=2")
    assert found["qwen05_best_vs_ar"]["value"] == pytest.approx(ratio)
    stock = seconds("transformers") / seconds("chain:length=2")
    assert found["qwen05_best_vs_transformers"]["value"] == pytest.approx(stock)
    prompts = dict.fromkeys(("humaneval", "mbpp", "mt_bench"), 1)
    assert found["qwen05_best_vs_ar"]["size"] == {"prompts": prompts, "repeats": 1}
    lengths = found["qwen05_accept_len_tree"]
    assert lengths["tree"] in flagship.TREES and set(lengths["tasks"]) == set(prompts)
    assert len({*lengths["tasks"].values(), lengths["value"]}) == 1  # the questions of all are the same


def test_the_raw_data_of_another_target_are_not_gone_on_with(second, tiny_target_folder):
    run, again = Run("flagship", limit=1, busy="warn"), Run("flagship", limit=1, busy="warn", resume=True)
    for measure in (second_target.accept_len, second_target.speeds):
        measure(run, str(tiny_target_folder))
        with pytest.raises(UserError, match="was begun with"):
            measure(again, "another")


def test_a_pair_is_measured_as_the_second_target_is(second, tiny_target_folder, monkeypatch):
    monkeypatch.setattr(second_target, "TREES_15", ["chain:length=2"])
    pair = (str(tiny_target_folder), str(tiny_target_folder))  # it drafts for itself
    run = Run("flagship", limit=1, busy="warn", pair=pair)
    found = second_target.pair_speeds(run, *pair) | second_target.pair_lengths(run, *pair)
    assert found["qwen15_best_vs_ar"]["tree"] in second_target.TREES_15
    assert found["qwen15_best_vs_ar"]["value"] > 0 and found["qwen15_best_vs_transformers"]["value"] > 0
    assert found["qwen15_accept_len_tree"]["value"] > 2


def test_a_target_that_is_not_named_is_skipped():
    for group in second_target.GROUPS:
        rows = group.measure(Run("flagship"))
        assert set(rows) == set(group.goals)
        for name, row in rows.items():
            assert row["skipped"] == (
                "no --pair TARGET DRAFTER" if name.startswith("qwen15") else "no --target FILE"
            )
