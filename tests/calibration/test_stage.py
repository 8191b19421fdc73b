"""Calibration end to end on a tiny target with a random drafter, and what is made of its file."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.calibration import full
from drafttrain.calibration.calibration import Calibration, Curve
from drafttrain.calibration.confidence import TEMPERATURES
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.calibration.judged import Judged, JudgedChains, JudgedTrees, PredictedPolicy, judge
from drafttrain.classifier.model import Classifier
from drafttrain.data.config import PromptSet
from drafttrain.inference.decode import decode, decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.kernels.build import variant
from drafttrain.run import calibrate as stage
from drafttrain.run.calibrate import calibrate
from drafttrain.run.cli import main
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import EXAMPLE_COSTS, CostCurve, Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from tests.conftest import with_cheap_drafts

RELIABILITY = {
    "tokens": 1,
    "accepted": 1.0,
    "confidence": 0.5,
    "ece": 0.5,
    "auroc": None,
    "brier": 0.2,
    "bins": [],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: None)


@pytest.fixture
def calibrated(tiny_bundle, questions, tmp_path):
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions)), max_new_tokens=12, rounds=2)
    found = calibrate(config, tiny_bundle, tmp_path / "out", dtype="float32", device="cpu")
    return found, tmp_path / "out"


@pytest.fixture(scope="module")
def stored(tiny_bundle, tmp_path_factory) -> str:
    """The file of a calibration."""
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "prompts.txt").write_text("Why?\nWhat?\nWho?\nWhere?\n")
    config = CalibrateConfig(PromptSet("prompts", str(folder / "prompts.txt")), max_new_tokens=12, rounds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "check_quiet", lambda refuse: None)
        found = calibrate(config, tiny_bundle, folder / "out", dtype="float32", device="cpu")
    assert Calibration.load(folder / "out") == found
    return (folder / "out/calibration.json").read_text()


def test_end_to_end(calibrated, tiny_bundle, capsys):
    found, out = calibrated
    assert Calibration.load(out) == found == Calibration.load(out / "calibration.json")
    assert (out / "costs.png").stat().st_size > 5000 and (out / "reliability.png").stat().st_size > 5000
    assert [curve.context for curve in found.target] == [64, 256]  # 512 positions end before 512 + 128
    for curve in found.target + found.drafter:
        assert all(0 < low <= mid <= high for low, mid, high in zip(curve.lower, curve.median, curve.upper))
    assert found.rate > 0 and found.step_overhead >= 0 and 0 < found.acceptance[0] <= 1
    raw = found.confidence["raw"]
    assert sum(raw[depth].tokens for depth in raw if depth != "all") == raw["all"].tokens > 0
    assert found.temperature in TEMPERATURES
    here = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, is_packed=True)
    if variant() is not None:
        assert found.growth and [curve.context for curve in found.growth] == [64, 256]
        given = SimpleNamespace(**{**vars(here), "is_packed": False})
        assert "kernel" in found.foreign(given, found.made_for)
    assert found.foreign(here, found.made_for) is None
    elsewhere = dataclasses.replace(found, machine={**found.machine, "processor": "another"})
    assert "calibrated for processor another" in elsewhere.foreign(here, found.made_for)
    other = SimpleNamespace(**{**vars(here), "dtype": torch.bfloat16})
    assert "calibrated for dtype float32" in found.foreign(other, found.made_for)
    assert "calibrated for drafter" in found.foreign(here, {**found.made_for, "drafter": "another"})

    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu", calibration=with_cheap_drafts(out))
    for tree in ("pct:width=2", "timed"):
        assert bundle.proposer(tree).policy.max_depth == 10 and bundle.warning(tree) is None
    bundle.calibration = elsewhere
    assert "another" in bundle.warning("timed") and bundle.warning("chain:length=2") is None
    assert f"; measure again: drafttrain calibrate {tiny_bundle} --prompts FILE" in bundle.warning("timed")
    bundle.name = "my bundle"
    assert "drafttrain calibrate 'my bundle' --prompts FILE" in bundle.warning("timed")


class HalfRight(Drafter):
    """Drafts the target's own text but for every third position; half sure of everything."""

    def __init__(self, text: list[int], size: int):
        self.text, self.draft_vocab_size = text, size

    def new_state(self, batch, max_len):
        return {"seen": 0}

    def update(self, state, tokens, tapped, counts):
        state["seen"] += int(counts[0])

    def expand(self, state, tree, frontier):
        at = state["seen"] + int(tree.depths[0, frontier[0, 0]]) + 1
        right = self.text[min(at, len(self.text) - 1)]
        probs = torch.full((self.draft_vocab_size,), 0.5 / (self.draft_vocab_size - 1))
        probs[right if at % 3 else right - 1] = 0.5
        return probs.log()[None, None]

    def to_target(self, ids):
        return ids


def test_what_is_judged(tiny_target):
    """Drafts count up to the first that the target rejects, and none after it."""
    prompt = [7, 8, 9, 10]
    [text], _ = decode_all(tiny_target, NoProposer(), [prompt], 20, stop=())
    chains = JudgedChains(4, ())
    chains.next_prompt()
    proposer = TreeProposer(HalfRight(prompt + text, tiny_target.vocab_size), chains)
    steps = list(decode(tiny_target, proposer, [prompt], 20, stop=(), accept=chains))
    expected = []
    for step in steps[1:]:
        expected += [(depth, True) for depth in range(1, step.drafted[0] + 1)]
        if step.drafted[0] < step.verified[0]:
            expected.append((step.drafted[0] + 1, False))
    assert [(item.depth, item.accepted) for item in chains.judged] == expected
    assert 0 < sum(accepted for _, accepted in expected) < len(expected)
    for item in chains.judged:
        at_one, at_two = (item.confidence[TEMPERATURES.index(t)] for t in (1.0, 2.0))
        assert at_one == pytest.approx(0.5)
        rest = (0.5 / (tiny_target.vocab_size - 1)) ** 0.5 * (tiny_target.vocab_size - 1)
        assert at_two == pytest.approx(0.5**0.5 / (0.5**0.5 + rest), rel=1e-4)


def test_trees_are_taken_at_what_they_kept():
    """Nodes are accepted with half the probability that they promise."""
    judged = JudgedTrees()
    joint = torch.rand(20_000)
    judged.log_joint = list(joint.log().split(100))
    judged.accepted = list((torch.rand(20_000) < joint / 2).split(100))
    promise = judged.promise()
    assert list(promise.accepted) == sorted(promise.accepted) and promise.accepted[0] == 0
    probabilities = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.9])
    np.testing.assert_allclose(promise(probabilities.log().numpy()), probabilities / 2, atol=0.06)


def test_too_little_to_judge():
    with pytest.raises(UserError, match="give more prompts"):
        judge([Judged(0, 1, [0.5] * len(TEMPERATURES), True)] * 3)


def test_nothing_is_judged_after_a_stop_token(tiny_target):
    prompt = [7, 8, 9, 10]
    [text], _ = decode_all(tiny_target, NoProposer(), [prompt], 20, stop=())
    drafter = HalfRight(prompt + text, tiny_target.vocab_size)
    judged = []
    for stop in ((), {text[1]}):
        chains = JudgedChains(4, stop)
        chains.next_prompt()
        list(decode(tiny_target, TreeProposer(drafter, chains), [prompt], 8, stop=stop, accept=chains))
        judged.append([(item.depth, item.accepted) for item in chains.judged])
    assert judged[1] == judged[0][: len(judged[1])] and len(judged[1]) < len(judged[0])


def test_curves_never_fall():
    curve = Curve.of(64, {4: [3.0, 3.2, 3.1], 1: [1.0, 1.1, 1.2], 8: [2.9, 3.0, 2.8]})
    assert curve.sizes == [1, 4, 8] and curve.median == [1.1, 3.1, 2.9]
    assert curve.cost().seconds == pytest.approx((1.1, 3.0, 3.0))


def test_a_damaged_calibration_can_be_replaced(tiny_bundle, questions, tmp_path):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (bundle / "calibration.json").write_text("{}")
    with pytest.raises(UserError, match="measure it again with drafttrain calibrate"):
        load_bundle(bundle, dtype="float32", device="cpu")
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions)), max_new_tokens=8, rounds=1)
    found = calibrate(config, bundle, bundle, dtype="float32", device="cpu")
    assert load_bundle(bundle, dtype="float32", device="cpu").calibration == found


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": None}, "calibrate.prompts: must be set, got null"),
        ({"quick": True}, "calibrate.quick: must be without calibrate.prompts, got both"),
        ({"rounds": 0}, "calibrate.rounds: must be >= 1, got 0"),
        ({"max_new_tokens": 1}, "calibrate.max_new_tokens: must be >= 2, got 1"),
        ({"prompts": PromptSet("a", "b", limit=1)}, "calibrate.prompts.limit: must be >= 2, got 1"),
        ({"prompts": PromptSet("a", "b", turns=2)}, "calibrate.prompts.turns: must be 1, .* got 2"),
        ({"prompts": PromptSet("a", "nowhere.jsonl")}, "nowhere.jsonl: no such file"),
    ],
)
def test_unusable_settings(questions, tmp_path, changes, message):
    config = dataclasses.replace(CalibrateConfig(PromptSet("a", str(questions))), **changes)
    with pytest.raises(UserError, match=message):
        calibrate(config, tmp_path / "no bundle", tmp_path / "out")


def test_one_prompt_is_too_few(tmp_path):
    (tmp_path / "one.txt").write_text("Why?\n")
    config = CalibrateConfig(PromptSet("a", str(tmp_path / "one.txt")))
    with pytest.raises(UserError, match="must hold >= 2 prompts, got 1"):
        calibrate(config, tmp_path / "no bundle", tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 0},
        {"target": None},
        {"target": []},
        {"rate": ...},
        {"rate": None},
        {"rate": "fast"},
        {"acceptance": []},
        {"acceptance": [2.0]},
        {"step_overhead": -1},
        {"machine": None},
        {"made_for": {}},
        {"drafter": [{"context": 64, "sizes": [1, 2], "lower": [1.0], "median": [1.0], "upper": [1.0]}]},
        {"drafter": [{"context": 64, "sizes": [1], "lower": ["a"], "median": [1.0], "upper": [1.0]}]},
        {"confidence": {}},
        {"confidence": {"raw": {}}},
        {"confidence": {"raw": {"all": RELIABILITY}, "scaled": {}}},
        {"confidence": {"raw": {"all": {**RELIABILITY, "ece": None}}}},
        {"confidence": {"raw": {"all": {**RELIABILITY, "bins": [[1]]}}}},
        {"confidence": {"raw": {"all": RELIABILITY, "deep": RELIABILITY}}},
    ],
)
def test_a_damaged_file_is_refused(stored, tmp_path, change):
    values = json.loads(stored)
    for key, value in change.items():
        values[key] = value
        if value is ...:
            del values[key]
    (tmp_path / "calibration.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="measure it again with drafttrain calibrate"):
        Calibration.load(tmp_path)


def test_threshold_of_c2t_is_looked_for_where_there_is_a_classifier(tiny_bundle, questions, tmp_path):
    model = Classifier(hidden=1)
    with torch.no_grad():
        model.inner.weight.copy_(torch.tensor([[8.0, 0.0, 0.0]]))
        model.outer.weight.fill_(1.0)
    model.save(tmp_path / "classifier", {})
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions), 2), max_new_tokens=6, rounds=1)
    options = {"dtype": "float32", "device": "cpu", "classifier": tmp_path / "classifier"}
    found = calibrate(config, tiny_bundle, tmp_path / "out", **options)
    costs = Calibration.load(tmp_path / "out").costs
    assert (costs.beta, costs.expand, costs.top_k) == (found.beta, found.expand, config.width)
    loaded = load_bundle(tiny_bundle, calibration=tmp_path / "out", **options)
    policy = loaded.proposer("c2t").policy
    assert (policy.beta, policy.expand, policy.top_k) == (found.beta, found.expand, config.width)
    assert loaded.proposer("c2t:beta=0.7").policy.beta == 0.7
    words = ["calibrate", str(tiny_bundle), "--prompts", str(questions), "--out", str(tmp_path / "told")]
    words += ["--classifier", str(tmp_path / "classifier"), "--dtype", "float32", "--limit", "2"]
    assert main([*words, "--rounds", "1", "--max-new-tokens", "6"]) == 0
    assert Calibration.load(tmp_path / "told").made_for == found.made_for
    loaded.calibration.machine["processor"] = "another"
    assert "another" in loaded.warning("c2t")
    assert loaded.warning("c2t:beta=0.7") is None is loaded.warning("pct:threshold=0.2")
    with torch.no_grad():
        loaded.classifier.outer.weight.add_(1)  # trained again since
    policy = loaded.proposer("c2t").policy
    assert (policy.beta, policy.expand, policy.top_k) == (0.5, None, 15) and loaded.warning("c2t") is None


@pytest.mark.parametrize("cheapest", [(full.BETAS[3], None), (0.1, 0.3)])
def test_thresholds_are_those_that_promise_most(cheapest, tiny_bundle, questions, tmp_path, monkeypatch):
    """Where all thresholds' trees take the same tokens, those that cost least win."""
    tried = []

    class Told(PredictedPolicy):
        def grow(self, drafter, state, root):
            tried.append((self.policy.beta, self.policy.expand))
            self.seconds += 1.0 if tried[-1] == cheapest else 2.0
            return TokenTree.root_only(root)

    pairs = iter([(0.05, 0.2), (0.1, 0.3), (0.2, 0.4), (0.3, 0.5)])
    monkeypatch.setattr(Costs, "worth", lambda costs, rate: next(pairs))
    monkeypatch.setattr(full, "PredictedPolicy", Told)
    Classifier(hidden=1).save(tmp_path / "classifier", {})
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions), 2), max_new_tokens=6, rounds=1)
    options = {"dtype": "float32", "device": "cpu", "classifier": tmp_path / "classifier"}
    found = calibrate(config, tiny_bundle, tmp_path / "out", **options)
    assert (found.beta, found.expand, found.top_k) == (*cheapest, config.width)
    assert len(set(tried)) == full.C2T_TRIALS


def test_predicted_seconds_are_those_of_the_curves(tiny_bundle):
    """A chain of three: three drafting steps of one node, and a forward over four tokens, each step."""
    loaded = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    costs = dataclasses.replace(EXAMPLE_COSTS, verify=CostCurve((1, 5), (1.0, 5.0)))
    predicted = PredictedPolicy(ChainPolicy(3), costs)
    proposer = TreeProposer(loaded.drafter, predicted)
    [output], stats = decode_all(loaded.target, proposer, [[3, 4, 5]], 12, stop=())
    assert predicted.seconds == pytest.approx(stats.steps * (3 * costs.draft(1) + 4.0))
    assert output == decode_all(loaded.target, NoProposer(), [[3, 4, 5]], 12, stop=())[0][0]
