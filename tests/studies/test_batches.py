"""Batches are timed as wholes and compared row by row."""

import pytest
import torch

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.classifier.model import Classifier
from drafttrain.drafters.auto import load_drafter
from drafttrain.inference.decode import decode, decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.parse import parse_policy, uses_calibration
from studies import batches
from studies.batches import batch_mismatches, batch_times
from tests.policies import EVERY_POLICY

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [20, 21], [22] * 5]
CURVE = CostCurve((1, 8, 64), (0.02, 0.025, 0.1))
COSTS = Costs(CostCurve((1,), (0.001,)), CURVE, CURVE, 80.0, (0.6,), AcceptanceCurve())
POLICIES = (
    *EVERY_POLICY,
    "pct:width=2,max_depth=4,min_confidence=0",
    "c2t:beta=0.05,top_k=2,layer_k=none,max_depth=3",
    "c2t:beta=0.02,expand=0.06,top_k=3,max_depth=4",
)


def sure_of_the_probable() -> Classifier:
    """Mostly by joint probability, a little by entropy and depth."""
    classifier = Classifier(hidden=1)
    with torch.no_grad():
        classifier.inner.weight.copy_(torch.tensor([[20.0, -0.1, -0.1]]))
        classifier.inner.bias.fill_(3.0)
        classifier.outer.weight.fill_(1.0)
        classifier.outer.bias.fill_(-6.0)
    return classifier


def sure_bundle(folder) -> Bundle:
    bundle = load_bundle(folder, dtype="float32", device="cpu")
    surer = load_drafter(folder, bundle.target)
    surer.lm_head.weight.data *= 3  # so that trees differ in shape
    surer.pack()
    bundle.drafter = surer
    bundle.classifier = sure_of_the_probable()
    return bundle


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", POLICIES)
def test_every_policy_gives_the_same_text_in_every_batch(tree, temperature, tiny_bundle):
    bundle = sure_bundle(tiny_bundle)
    proposer = None if uses_calibration(tree, COSTS) else bundle.proposer(tree)
    if proposer is None:
        proposer = bundle.proposer("chain:length=1")
        proposer.policy = parse_policy(tree, COSTS)
    found = batch_mismatches(
        bundle.target, {"drafting": proposer}, PROMPTS, (2, 3, 5), 12, temperature=temperature
    )
    assert found == {"drafting": []}


def test_rows_of_a_batch_grow_trees_of_their_own(tiny_bundle):
    bundle = sure_bundle(tiny_bundle)
    for tree in [tree for tree in POLICIES if tree.startswith(("c2t:", "joint"))]:
        steps = list(decode(bundle.target, bundle.proposer(tree), PROMPTS, 12))
        assert any(len(set(step.verified)) > 1 for step in steps[:4]), tree


def test_rows_that_differ_are_named(tiny_target, monkeypatch):
    def lies(target, proposer, prompts, max_new_tokens, accept, max_rows):
        outputs, stats = decode_all(target, proposer, prompts, max_new_tokens, None, accept, max_rows)
        return ([[0], *outputs[1:]] if max_rows == 3 else outputs), stats

    monkeypatch.setattr(batches, "decode_all", lies)
    found = batch_mismatches(tiny_target, {"none": NoProposer()}, PROMPTS, (2, 3), 6)
    assert found == {"none": [{"batch": 3, "prompt": 0}]}


def test_times(tiny_target):
    torch.manual_seed(0)
    found = batch_times(tiny_target, {"none": NoProposer()}, PROMPTS, 4, 6, repeats=3)
    assert len(found["none"].rates) == 3 and found["none"].accept_len == 1
    assert found["none"].tokens_per_second == sorted(found["none"].rates)[1] > 0
