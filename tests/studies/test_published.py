"""PCT and C2T as published: which target's value is a figure's, and the measurements on a tiny one."""

import shutil

import numpy as np
import pytest
import torch

from drafttrain.classifier.model import Classifier
from drafttrain.evaluation.sweep import Point
from drafttrain.utils.errors import UserError
from studies import goals
from studies.figures import c2t, published
from studies.figures.published import Pairing
from studies.goals import Run


def point(by_prompt: list[list[int]]) -> Point:
    emitted, steps, sent = (sum(column) for column in zip(*by_prompt))
    return Point("x", emitted / steps, sent / steps, sent, steps, emitted, None, 0.0, 0.0, by_prompt)


def test_ratios_of_counts_with_intervals():
    ours, theirs = [[30, 10, 50], [20, 10, 70]], [[40, 10, 100], [20, 10, 100]]
    found = published.over(point(ours), point(theirs))
    assert found["verify"] == pytest.approx(6 / 10) and found["accept_len"] == pytest.approx(2.5 / 3)
    assert found["accept_lens"] == [2.5, 3.0]
    # of two prompts a resample has the first twice, the second twice, or both
    assert found["verify_interval"] == pytest.approx([0.5, 0.7])
    assert found["accept_len_interval"] == pytest.approx([0.75, 1.0])


def test_a_target_counts_where_its_drafts_are_long_enough_on_every_task():
    def rows(*pairs):
        return {
            str(i): {"verify": verify, "accept_len": length, "verify_interval": [verify, verify]}
            for i, (verify, length) in enumerate(pairs)
        }

    found = {
        "few": published.worst(rows((0.3, 1.0), (0.4, 0.96))),
        "enough": published.worst(rows((0.5, 0.98), (0.2, 0.99))),
    }
    assert found["few"]["shortest"] == 0.96 and found["enough"]["task"] == "0"
    assert published.best(found) == {"value": 0.5, "interval": [0.5, 0.5], "target": "enough"}
    del found["enough"]
    assert published.best(found) == {"value": 0.4, "interval": [0.4, 0.4], "target": "few", "ok": False}


def test_the_target_with_the_fewest_verified_tokens():
    found = {"a": {"value": 0.9, "interval": [0.8, 1.0]}, "b": {"value": 0.7}, "c": {"value": None}}
    chosen = published.fewest(found)
    assert (chosen["value"], chosen["target"], set(chosen["targets"])) == (0.7, "b", {"a", "b", "c"})
    assert published.fewest({"a": found["a"]})["interval"] == [0.8, 1.0]
    none = published.fewest({"c": {"value": None, "error": "no accept_len in common on x"}})
    assert none["value"] is None and none["error"] == "no accept_len in common on x"


def test_a_second_target_has_its_own_drafter_and_tasks():
    assert list(published.pairings(Run("flagship"))) == ["smollm2"]
    second = published.pairings(Run("flagship", target="x.gguf"))["qwen05"]
    assert second.bundle == "model_cards/qwen2.5-coder-0.5b-edd-anchored" and second.target == "x.gguf"
    assert second.tasks["mbpp"] == ("data/eval/mbpp.jsonl", 40) and second.tasks["mt_bench"][1] is None
    found = published.pairings(Run("flagship", pair=["large.gguf", "small.gguf"]))
    assert list(found) == ["smollm2", "qwen15"]
    assert (found["qwen15"].target, found["qwen15"].bundle) == ("large.gguf", "small.gguf")
    assert found["qwen15"].tasks == second.tasks


def test_a_value_is_judged_by_the_prompts_of_its_own_target():
    [group] = [one for one in published.GROUPS if "pct_vs_eagle2_verify" in one.goals]
    prompts = {"humaneval": 40, "mbpp": 40, "mt_bench": 80}
    found = {"value": 0.5, "target": "qwen05", "size": {"prompts": prompts}}
    goal = group.goals["pct_vs_eagle2_verify"]
    assert goals.judge(goal, found, group.asked_size(found)) == (True, None)
    found["target"] = "smollm2"
    ok, why = goals.judge(goal, found, group.asked_size(found))
    assert ok is None and "0 of 40 prompts of gsm8k" in why


@pytest.fixture
def tiny(tiny_bundle, questions, tmp_path, monkeypatch):
    """Two tiny pairings, the second with a classifier of its own, and small trees."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    torch.manual_seed(0)
    Classifier(hidden=2).save(bundle, {})
    monkeypatch.chdir(tmp_path)
    tasks = {"mt_bench": (str(questions), None), "other": (str(questions), 2)}
    made = {name: Pairing(str(bundle), None, tasks) for name in ("smollm2", "qwen05")}
    monkeypatch.setattr(published, "pairings", lambda run: made)
    monkeypatch.setattr(published, "NEW_TOKENS", 6)
    monkeypatch.setattr(published, "TUNING", str(questions))
    pct = "pct:width=2,max_depth=2,min_confidence=0.001,threshold=0.001"
    large = {published.EAGLE2_LARGE: "eagle2:top_k=3,max_depth=3,total=9", published.PCT_LARGE: pct}
    monkeypatch.setattr(published, "LARGE", large)
    grids = {"eagle2": ["eagle2:total=4", "eagle2:top_k=2,max_depth=2,total=3"], "pct": [pct]}
    monkeypatch.setattr(published, "GRIDS", grids)
    for name, trees in (
        ("EAGLE2", ["eagle2:top_k=3,max_depth=2,total=2", "eagle2:total=20"]),
        ("JOINT", ["joint:threshold=0.2,max_depth=2", "joint:threshold=0.001"]),
        ("C2T", ["c2t:beta=0.2,max_depth=2", "c2t:beta=0.048,max_depth=3"]),
    ):
        monkeypatch.setattr(c2t, name, trees)
    monkeypatch.setattr(goals, "check_quiet", lambda refuse: None)
    return made


def test_counts_of_all_targets(tiny):
    found = published.verified(Run("flagship", limit=3))["pct_vs_eagle2_verify"]
    assert found["size"] == {"prompts": {"mt_bench": 3, "other": 2}}
    assert set(found["targets"]) == {"smollm2", "qwen05"}
    row = found["targets"]["smollm2"]
    assert row == found["targets"]["qwen05"] and set(row["tasks"]) == {"mt_bench", "other"}
    assert found["value"] == max(task["verify"] for task in row["tasks"].values()) > 0
    assert np.isfinite(row["tasks"]["other"]["verify_interval"]).all()


def test_a_classifier_of_each_bundle(tiny):
    found = published.judged(Run("flagship", limit=3))
    assert set(found) == {"c2t_vs_eagle2", "c2t_vs_p_threshold"}
    for figure in found.values():
        assert set(figure["targets"]) == {"smollm2", "qwen05"}
        assert figure["targets"]["smollm2"]["features"] == ["P", "H", "d"]


def test_a_missing_classifier_is_refused_before_anything_is_measured(tiny, tmp_path, monkeypatch):
    (tmp_path / "without").mkdir()
    tiny["qwen05"] = Pairing("without", None, tiny["qwen05"].tasks)
    monkeypatch.setattr(c2t, "compared", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match="without: no classifier; make one with"):
        published.judged(Run("flagship", limit=3))


def test_speeds_of_all_targets(tiny):
    found = published.faster(Run("flagship", quick=True))["pct_vs_eagle2_speed"]
    row = found["targets"][found["target"]]
    assert (
        found["value"]
        == row["tasks"][row["task"]]["value"]
        == min(task["value"] for task in row["tasks"].values())
    )
    assert row["trees"][0].startswith("pct") and row["trees"][1].startswith("eagle2")
    assert found["size"]["repeats"] == 1
