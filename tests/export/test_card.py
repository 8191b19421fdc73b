"""The card is rendered from the bundle alone and describes each kind of drafter."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.export.card import model_card, read_facts, read_settings, write_card
from drafttrain.export.config import ExportConfig
from drafttrain.export.write import export
from drafttrain.run.cli import main

ROOT = Path(__file__).parents[2]


def curve(context: int, sizes: list[int], median: list[float]) -> dict:
    return {"context": context, "sizes": sizes, "lower": median, "median": median, "upper": median}


RELIABILITY = {"tokens": 77, "confidence": 0.5, "accepted": 0.6, "ece": 0.1234, "auroc": 0.8}
RELIABILITY |= {"brier": 0.2, "bins": []}
CALIBRATION = json.loads((ROOT / "model_cards/smollm2-135m-edd/calibration.json").read_text()) | {
    "machine": {"processor": "Some CPU", "cores": 8, "threads": 4, "device": "cuda", "gpu": "Some GPU"},
    "dtype": "bfloat16",
    "target": [
        curve(64, [1, 8], [0.9, 0.9]),
        curve(256, [1, 8, 16], [0.0201, 0.0222, 0.0253]),
    ],
    "drafter": [curve(256, [1, 8, 32], [0.0011, 0.0014, 0.003])],
    "confidence": {"raw": {"all": RELIABILITY}},
}


@pytest.fixture
def bundle(tiny_bundle, tmp_path):
    return export(ExportConfig(name="tiny", base_model="someone/tiny"), tiny_bundle, tmp_path / "bundle")


def change(folder, **settings) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, **settings}))


def test_the_recipes_facts_are_kept_without_paths_of_the_maker(bundle, tmp_path):
    config = ExportConfig(
        name="tiny",
        license="mit",
        base_model="someone/tiny",
        datasets=["chats"],
        hub_datasets=["openai/gsm8k"],
        hardware="8 GPUs",
        notes=["a word"],
        ngrams=str(tmp_path),
    )
    write_card(config, bundle)
    text = (bundle / "README.md").read_text()
    assert text == model_card(bundle) and str(tmp_path) not in (bundle / "card.json").read_text()
    config.ngrams = None
    assert read_facts(bundle) == config
    assert ModelCard(text).data.datasets == ["openai/gsm8k"]
    assert "- a word\n" in text and "- chats\n" in text


def test_a_target_in_a_file_is_named_in_the_commands(bundle):
    """Where that file is on the user's machine nobody knows; a published bundle names the Hub's."""
    target = json.loads((bundle / "config.json").read_text())["target"]
    change(bundle, target={**target, "name": "someone/tiny"})
    assert "--target" not in model_card(bundle)
    change(bundle, target={**target, "name": "models/tiny.gguf"})
    text = model_card(bundle)
    assert 'from_pretrained("PATH_OR_HUB_ID", target="someone/tiny")' in text
    assert "generate --bundle PATH_OR_HUB_ID --target someone/tiny --prompt" in text
    assert "--target" not in model_card(bundle, "someone/drafter")


def test_what_it_was_trained_from(bundle):
    assert "started from" not in model_card(bundle)
    change(bundle, training={"init_from": "older"})
    assert "- started from the drafter `older`, whose card names" in model_card(bundle)


def test_an_anchored_drafter_is_not_described_as_the_papers(bundle):
    assert "newest verified state" not in model_card(bundle)
    change(bundle, anchor=True)
    assert "each joined with the newest verified state (beyond the paper)" in model_card(bundle)


def test_hours_and_hardware_of_training(bundle):
    machine = {"processor": "Some CPU", "cores": 8, "threads": 4, "device": "cuda", "gpu": "Some GPU"}
    change(bundle, training={"seconds": 9000.0, "processes": 2, "machine": machine, "steps": 5})
    text = model_card(bundle)
    assert "in 150.0 minutes (2.5 hours, evaluations left out)" in text
    assert "- hardware: Some GPU, 4 of 8 cores of Some CPU, 2 processes\n" in text
    facts = read_facts(bundle)
    facts.hardware = "a borrowed machine"
    write_card(facts, bundle)
    assert "- hardware: a borrowed machine, 2 processes\n" in model_card(bundle)


def test_calibration_in_a_few_lines(bundle):
    (bundle / "calibration.json").write_text(json.dumps(CALIBRATION))
    text = model_card(bundle)
    assert "On Some GPU, 4 of 8 cores of Some CPU, bfloat16, 256 tokens of context, medians:" in text
    assert "- one forward of the target over 1 / 8 / 16 tokens: 20.1 / 22.2 / 25.3 ms\n" in text
    assert "- one drafting step over 1 / 8 nodes: 1.1 / 1.4 ms\n" in text
    assert "77 drafts: mean confidence 0.50, accepted 0.60, ECE 0.123, AUROC 0.800\n" in text
    assert "- `calibration.json`:" in text
    few = {**RELIABILITY, "tokens": 2, "accepted": 1.0, "ece": 0.5, "auroc": None}  # all were accepted
    (bundle / "calibration.json").write_text(json.dumps({**CALIBRATION, "confidence": {"raw": {"all": few}}}))
    assert "ECE 0.500, AUROC unknown\n" in model_card(bundle)


@pytest.mark.parametrize(
    "kind, says, cites, never",
    [
        ("edd", "as soft prompts", "@misc{edd_pct", "@misc{medusa"),
        ("vdm", "none of the target's hidden states", "@inproceedings{speculative_decoding", "soft prompts"),
        ("eagle", "predicts the target's state\nat that position", "@inproceedings{eagle,", "soft prompts"),
        (
            "causal_lm",
            "4 decoder layers of hidden size 64",
            "@inproceedings{speculative_decoding",
            "soft prompts",
        ),
        ("medusa", "3 small heads on the target's last hidden state", "@misc{medusa", "soft prompts"),
    ],
)
def test_kinds(kind, says, cites, never, tiny_target, tiny_target_folder, tmp_path):
    own = {"causal_lm": {"model": str(tiny_target_folder)}, "medusa": {"heads": 3}}.get(kind, {})
    config = DrafterConfig(kind=kind, tapped_blocks=[-2], **own)
    new_drafter(tiny_target, config, torch.arange(200)).save_pretrained(tmp_path / "drafter")
    config = ExportConfig(name="tiny", base_model="someone/tiny")
    text = model_card(export(config, tmp_path / "drafter", tmp_path / "bundle"))
    assert says in text and cites in text and never not in text
    assert "over 200 of the target's 512 tokens" in text
    assert kind in ModelCard(text).data.tags
    assert ("It needs drafttrain, inside `generate` of transformers too" in text) == (kind == "edd")


def test_papers_of_what_the_bundle_holds(bundle):
    assert "@misc{c2t" not in model_card(bundle) and "@inproceedings{self_draft" not in model_card(bundle)
    (bundle / "classifier.json").write_text("{}")
    (bundle / "ngrams.json").write_text("{}")
    text = model_card(bundle)
    assert text.count("@misc{c2t") == text.count("@inproceedings{self_draft") == 1
    (bundle / "eval.json").write_text('{"tree": "ngram+eagle2:total=20", "tasks": {}}')
    assert model_card(bundle).count("@inproceedings{eagle2") == 1


RESULTS = {"tree": "chain:length=3", "dtype": "float32", "threads": 1}
ROW = {"prompts": 8, "accept_len": 2.0, "accept_len_nonrepeated": None, "repetition": None, "speedup": 1.5}
ROW |= {"tokens_per_second": 50.0, "speedup_transformers": None}


def test_what_was_not_measured_is_unknown(bundle):
    (bundle / "eval.json").write_text(json.dumps({**RESULTS, "tasks": {"x": ROW}}))
    line = "| x | 8 | unknown | 2.00 | unknown | unknown | 50.0 | 1.50 | unknown | unknown |"
    assert line in model_card(bundle)
    (bundle / "training_log.json").write_text('[{"eval_loss": 2.5, "step": 7}, {"loss": 1.0, "step": 8}]')
    assert "| 7 | 2.500 | unknown | unknown |" in model_card(bundle)


def test_intervals_repeats_and_equal_texts_are_on_the_card(bundle):
    more = {"speedup_interval": [1.25, 1.75], "repeats": 3, "identical": 0.5}
    more |= {"speedup_transformers": 2.0, "speedup_transformers_interval": [1.875, 2.125]}
    (bundle / "eval.json").write_text(json.dumps({**RESULTS, "tasks": {"x": {**ROW, **more}}}))
    card = model_card(bundle)
    assert "| 50.0 | 1.50 (1.25 to 1.75) | 2.00 (1.88 to 2.12) | 50 % |" in card
    assert "(95 % interval over prompts 1.25 to 1.75; repeats: 3)" in " ".join(
        card.partition("\n# ")[0].split()
    )
    assert "share of texts identical to plain decoding in float32" in card.partition("\n# ")[0]


def test_the_interval_of_accept_len_is_on_the_card_where_it_is_known(bundle):
    def card(**more) -> str:
        tasks = {"x": {**ROW, **more}, "y": ROW}  # the second one of a single prompt
        (bundle / "eval.json").write_text(json.dumps({**RESULTS, "tasks": tasks}))
        return model_card(bundle)

    known, unknown = card(accept_len_interval=[1.75, 2.25]), card()  # of an earlier version
    assert "| x | 8 | unknown | 2.00 (1.75 to 2.25) | unknown |" in known
    assert (
        "| y | 8 | unknown | 2.00 | unknown |" in known and "| x | 8 | unknown | 2.00 | unknown |" in unknown
    )
    assert "own token, with its 95 % interval over prompts; " in known and "own token; " in unknown
    names = {
        metric["name"]
        for result in ModelCard(known).data.to_dict()["model-index"][0]["results"]
        for metric in result["metrics"]
        if metric["type"] == "accept_len"
    }
    plain = "tokens per target forward"
    assert names == {plain, f"{plain} (95 % interval over prompts 1.75 to 2.25)"}


@pytest.mark.parametrize(
    "file, content, expected",
    [
        (
            "eval.json",
            {**RESULTS, "tasks": {"x": {**ROW, "identical": "all"}}},
            "tasks.x.identical: must be a finite number, got .all.; give what drafttrain benchmark",
        ),
        (
            "eval.json",
            {**RESULTS, "tasks": {"x": {**ROW, "speedup_interval": [1]}}},
            r"speedup_interval: must be two finite numbers, got \[1\]",
        ),
        (
            "eval.json",
            {**RESULTS, "tasks": {"x": {**ROW, "accept_len_interval": 2.0}}},
            "tasks.x.accept_len_interval: must be two finite numbers, got 2.0; give what drafttrain",
        ),
        ("eval.json", {**RESULTS, "tasks": []}, r"eval.json: tasks: must be an object, got \[\]"),
        (
            "eval.json",
            {**RESULTS, "tasks": {"x": None}},
            "eval.json: tasks.x.prompts: must be a finite number",
        ),
        ("eval.json", {**RESULTS, "tasks": {"x": {}}}, "tasks.x.prompts: must be a finite number, got None"),
        (
            "eval.json",
            {**RESULTS, "tasks": {"x": {**ROW, "accept_len": "2"}}},
            "tasks.x.accept_len: must be a finite number, got '2'",
        ),
        (
            "eval.json",
            {**RESULTS, "tasks": {"x": {**ROW, "speedup": float("nan")}}},
            "x.speedup: must be a finite number, got nan",
        ),
        ("eval.json", {**RESULTS, "tree": 5, "tasks": {}}, "eval.json: tree: must be a text, got 5"),
        ("calibration.json", {"format_version": 1}, "calibration.json: damaged .'target'.; measure it again"),
        ("calibration.json", [], "calibration.json: no calibration of format 1; measure it again"),
        ("training_log.json", {}, "training_log.json: must be a list of log entries"),
        ("training_log.json", [1], "training_log.json: must be a list of log entries"),
        (
            "training_log.json",
            [{"eval_loss": "x"}],
            "training_log.json: eval_loss: must be a number, got .x.",
        ),
        ("eval.json", {**RESULTS, "machine": "x"}, "eval.json holds a value of the wrong type"),
        (
            "eval.json",
            {**RESULTS, "measured": "2026-05-01", "versions": [1]},
            "eval.json holds a value of the wrong type",
        ),
        ("card.json", {"notes": "one"}, "card.json: notes: must be a list of texts, got 'one'"),
        ("card.json", {"hub_datasets": ["a/b", 5]}, "hub_datasets: must be a list of texts, got .'a/b', 5."),
        ("card.json", {"base_model": ["a/b"]}, "base_model: must be a text, got .'a/b'."),
        ("card.json", {"language": None}, "language: must be a text, got None"),
    ],
)
def test_damaged_files_are_errors_of_one_line(file, content, expected, bundle, capsys):
    (bundle / file).write_text(json.dumps(content))
    assert main(["export", str(bundle), "--to", "card"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and re.search(expected, line), line


@pytest.mark.parametrize(
    "settings",
    [{"tapped_blocks": 5}, {"draft_vocab_size": "x"}, {"training": "x"}, {"training": {"seconds": None}}],
)
def test_settings_that_no_card_can_show_are_one_line(settings, bundle, capsys):
    change(bundle, **settings)
    assert main(["export", str(bundle), "--to", "card"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "config.json or eval.json holds a value of the wrong type" in line


def test_from_the_command_line(bundle, tmp_path, capsys):
    assert main(["export", str(bundle), "--to", "card"]) == 0
    assert capsys.readouterr().out == model_card(bundle) == (bundle / "README.md").read_text()
    assert main(["export", str(bundle), "--to", "card", "--out", str(tmp_path / "new" / "card.md")]) == 0
    assert (tmp_path / "new" / "card.md").read_text() == model_card(bundle)
    assert main(["export", str(tmp_path), "--to", "card"]) == 2
    assert "no config.json there" in capsys.readouterr().err


def test_without_facts_of_a_recipe_the_card_names_the_target_and_no_licence(bundle):
    (bundle / "card.json").unlink()
    data = ModelCard(model_card(bundle)).data
    assert data.base_model == read_settings(bundle)["target"]["name"] and data.license is None


def test_the_command_is_the_one_that_trained(bundle):
    """Not that of a later export; the recipe may name another."""
    change(bundle, training={"command": "drafttrain run tiny.yaml --training.deepspeed zero2.json"})
    line = "Command: `drafttrain run tiny.yaml --training.deepspeed zero2.json`\n"
    assert line in model_card(bundle)
    facts = read_facts(bundle)
    facts.command = "make drafter"
    write_card(facts, bundle)
    assert "Command: `make drafter`\n" in model_card(bundle)
    change(bundle, training={"deepspeed": "zero2.json", "processes": 2, "seconds": 1.0})
    assert "in each of 2 processes, DeepSpeed (`zero2.json`), seed" in model_card(bundle)


@pytest.mark.parametrize(
    "facts, missing",
    [
        ({"base_model": "someone/tiny", "license": "mit"}, None),
        ({"base_model": "someone/tiny"}, r"export.license \(.*, got none\)"),
        ({"license": "mit"}, r"export.base_model \(.*, got .*\)"),
        ({}, r"export.base_model \(.*\) and export.license \(.*\)"),
    ],
)
def test_export_says_what_publishing_needs(facts, missing, tiny_bundle, tmp_path, capsys):
    export(ExportConfig(**facts), tiny_bundle, tmp_path / "bundle")
    printed = capsys.readouterr().err
    assert ("license: mit" in (tmp_path / "bundle/README.md").read_text()) == ("license" in facts)
    assert printed == "" if missing is None else re.search(f"to publish it, set {missing} in the", printed)
    assert printed.count("\n") == (missing is not None)
