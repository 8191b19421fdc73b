"""The evaluation stage end to end on a tiny target with a random drafter."""

import dataclasses
import json

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.classifier.model import Classifier
from drafttrain.data.config import PromptSet
from drafttrain.evaluation import evaluate as stage
from drafttrain.evaluation.config import EvaluateConfig
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.metrics import Measurement, tabulate
from drafttrain.utils.errors import UserError


@pytest.fixture
def config(questions) -> EvaluateConfig:
    return EvaluateConfig(
        prompts=[
            PromptSet("both turns", str(questions), limit=2, turns=2),
            PromptSet("first turns", str(questions), limit=3),
        ],
        tune_prompts=PromptSet("held out", str(questions), limit=1),
        trees=["chain:length=1", "eagle2:top_k=2,max_depth=2,total=4"],
        max_new_tokens=12,
        repeats=2,
        lossless_prompts=3,
        lossless_new_tokens=10,
    )


@pytest.fixture
def small(config, questions) -> EvaluateConfig:
    """One prompt, one length, nothing in fp32."""
    prompts = [PromptSet("one", str(questions), limit=1)]
    return dataclasses.replace(
        config, prompts=prompts, trees=["chain:length=2"], lossless_prompts=0, repeats=1
    )


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: None)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("how", "dtype", "tried"),
    [("auto", "float32", 0), ("auto", "auto", 2), ("fastest", "float32", 2), ("same", "auto", 0)],
)
def test_the_dtype_of_transformers(how, dtype, tried, small, tiny_bundle, tmp_path, capsys):
    config = dataclasses.replace(small, transformers_dtype=how)
    evaluate(config, tiny_bundle, tmp_path, dtype=dtype)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert len(found["transformers"]["tokens_per_second"]) == tried
    used = found["transformers"]["dtype"]
    assert used == found["dtype"] or tried
    assert f"{found['dtype']} (transformers in {used})" in capsys.readouterr().out.replace("\n", " ")


def test_end_to_end_and_resumed(config, tiny_bundle, tmp_path, capsys):
    out = tmp_path / "out"
    figures = evaluate(config, tiny_bundle, out, dtype="float32")
    printed = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["tasks"]) == {"both turns", "first turns", "all"}
    for task in summary["tasks"]:
        assert f"{task}: {summary['tasks'][task]['autoregressive']['prompts']} answers" in printed

    # the tree is the fastest one on the tuning prompts
    speeds = {trial["tree"]: trial["tokens_per_second"] for trial in summary["tuning"]}
    assert list(speeds) == config.trees and speeds[summary["tree"]] == max(speeds.values())
    chain = summary["tree"]
    assert list(summary["tasks"]["all"]) == ["autoregressive", "transformers", chain]

    # every row can be computed again from the raw measurements; tuning prompts are in none of them
    raw = [Measurement.from_json(row) for row in lines(out / "measurements.jsonl")[1:]]
    tasks = {"both turns": 4, "first turns": 3}
    assert len(raw) == 2 * (1 + sum(tasks.values()))
    for task, turns in tasks.items():
        part = [m for m in raw if m.task == task]
        rows = {method: dataclasses.asdict(row) for method, row in tabulate(part).items()}
        assert rows == summary["tasks"][task] and rows[chain]["prompts"] == turns
    assert summary["tasks"]["all"][chain]["prompts"] == 7
    for m in raw:
        assert len({tuple(run.token_ids) for run in m.runs.values()}) == 1  # fp32: all say the same

    row = summary["tasks"]["all"][chain]
    exact = {"prompts": 3, "mismatches": 0, "transformers_mismatches": 0, "dtype": "float32"}
    assert summary["lossless"] == {**exact, "differences": []}
    assert figures == {
        **{k: row[k] for k in ("accept_len", "speedup", "speedup_transformers", "tokens_per_second")},
        "lossless": True,
        "lossless_prompts": 3,
        "tree": summary["tree"],
    }
    assert figures["accept_len"] >= 1

    # the bundle carries the tree to decode with
    carried = json.loads((out / "eval.json").read_text())
    assert carried["tree"] == summary["tree"] and carried["dtype"] == "float32"
    assert (
        carried["tasks"]["first turns"]["accept_len"] == summary["tasks"]["first turns"][chain]["accept_len"]
    )
    assert carried["lossless"] == {"prompts": 3, "mismatches": 0, "dtype": "float32"}

    assert summary["transformers"] == carried["transformers"] == {"dtype": "float32", "tokens_per_second": {}}

    # again: nothing is decoded any more, and everything but the date is the same
    before = (out / "measurements.jsonl").read_bytes(), (out / "lossless.jsonl").read_bytes()
    evaluate(config, tiny_bundle, out, dtype="float32")
    assert before == ((out / "measurements.jsonl").read_bytes(), (out / "lossless.jsonl").read_bytes())
    again = json.loads((out / "summary.json").read_text())
    del summary["measured"], again["measured"]
    assert again == summary


@pytest.mark.parametrize(
    "changes", [{"max_new_tokens": 505}, {"lossless_prompts": 1, "lossless_new_tokens": 505}]
)
def test_a_prompt_that_is_too_long_ends_it_before_anything_is_decoded(changes, small, tiny_bundle, tmp_path):
    with pytest.raises(UserError, match="one: prompt .* must fit into the 512 positions .* 505; remove it"):
        evaluate(dataclasses.replace(small, **changes), tiny_bundle, tmp_path, dtype="float32")
    assert not (tmp_path / "measurements.jsonl").exists()


def test_another_drafter_is_measured_again(small, tiny_bundle, tmp_path):
    evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32")
    before = lines(tmp_path / "out" / "measurements.jsonl")
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_bundle.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "training_log.json").write_text("[]")
    evaluate(small, other, tmp_path / "out", dtype="float32")
    after = lines(tmp_path / "out" / "measurements.jsonl")
    assert len(after) == len(before) and after[0] != before[0]


def test_measurements_of_other_prompts_or_elsewhere_are_not_continued(small, tiny_bundle, tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "a.txt").write_text("Why?\n")
    (folder / "b.txt").write_text("How?\n")

    def key(names: str = "xy", device: str = "cpu") -> str:
        prompts = [PromptSet(name, str(folder / file)) for name, file in zip(names, ("a.txt", "b.txt"))]
        config = dataclasses.replace(small, prompts=[*prompts, PromptSet("folder", str(folder))])
        return stage._measured_key(config, tiny_bundle, "target", "float32", {"device": device})

    keys = [key(), key("yx"), key(device="cuda")]
    (folder / "b.txt").write_text("How not?\n")
    assert len({*keys, key()}) == 4


def test_another_machine_does_not_continue(small, tiny_bundle, tmp_path, monkeypatch):
    heads, describe = [], stage.describe_machine
    for processor in ("one", "one", "another"):
        here = {**describe(torch.device("cpu")), "processor": processor}
        monkeypatch.setattr(stage, "describe_machine", lambda device, dtype=None, here=here: here)
        evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32")
        heads.append(lines(tmp_path / "out" / "measurements.jsonl")[0])
    assert heads[0] == heads[1] != heads[2]


def test_one_tree_needs_no_tuning(small, tiny_bundle, tmp_path):
    small = dataclasses.replace(small, tune_prompts=None)
    figures = evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32")
    assert figures["tree"] == "chain:length=2" and figures["lossless"] is None


def test_each_classifier_is_measured_by_itself(small, tiny_bundle, tmp_path):
    small = dataclasses.replace(small, trees=["c2t:beta=0.1,max_depth=2"])
    with pytest.raises(UserError, match="needs a classifier"):
        evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32")
    Classifier(hidden=2).save(tmp_path / "one", {})
    Classifier(hidden=3).save(tmp_path / "two", {})
    measured = []
    for name in ("one", "one", "two"):
        evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32", classifier=tmp_path / name)
        measured.append((tmp_path / "out" / "measurements.jsonl").read_bytes())
    assert measured[0] == measured[1] != measured[2]


def test_no_tree_takes_the_bundles(small, tiny_bundle, tmp_path):
    small = dataclasses.replace(small, trees=[])
    figures = evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32")
    assert figures["tree"] == load_bundle(tiny_bundle, dtype="float32").tree


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": []}, "evaluate.prompts: must name at least one"),
        ({"tune_prompts": None}, "evaluate.tune_prompts: must be set"),
        ({"trees": ["chain:lenth=2"]}, "did you mean length"),
        ({"repeats": 0}, "evaluate.repeats"),
        ({"prompts": [PromptSet("a", "nowhere.jsonl")]}, "nowhere.jsonl: no such file"),
        ({"prompts": [PromptSet("a", "x"), PromptSet("a", "x")]}, "must differ"),
        ({"prompts": [PromptSet("all", "x")]}, "must differ"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_loaded(config, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        evaluate(dataclasses.replace(config, **changes), tmp_path / "no bundle", tmp_path / "out")
    assert "\n" not in str(error.value)


def test_busy_machines_can_be_refused(small, tiny_bundle, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: asked.append(refuse) or "others are busy")
    evaluate(small, tiny_bundle, tmp_path / "out", dtype="float32")
    evaluate(dataclasses.replace(small, busy="refuse"), tiny_bundle, tmp_path / "out", dtype="float32")
    assert asked == [False, True]
