"""Texts that end for other reasons than their limit: logits that are not finite, and the last position."""

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.session import NOT_FINITE
from drafttrain.kernels.build import variant
from drafttrain.pipeline.baselines import pp, stpp
from drafttrain.pipeline.program import pipedec
from drafttrain.trees.eagle2 import Eagle2Policy
from tests.pipeline.local import GREEDY, NEW, SAMPLED, decode

CUTS = (1, 2, 1)
MODES = [
    (pp, {}),
    (stpp, {}),
    (pipedec, {}),
    (pipedec, {"layers": 3}),
    (pipedec, {"layers": 2, "best_first": True}),
]
STAGES = [False, pytest.param(True, marks=pytest.mark.skipif(variant() is None, reason="no native kernels"))]


def new_pipeline(members, whole, folders, family, reads, native, spoil=None):
    """A pipeline whose drafter reads two blocks of the target, or is the target."""
    target, taps = whole(family), [0, 2] if reads else []
    small = {"kind": "causal_lm", "model": str(folders[family])}
    config = DrafterConfig(**({"tapped_blocks": taps} if reads else small), draft_vocab_size=None)
    drafter = new_drafter(target, config, torch.arange(512)).eval()
    if native:
        drafter.pack()
    policy = Eagle2Policy(3, 5, 8)
    return members(family, CUTS, drafter, taps, native=native, policy=policy, spoil=spoil)


@pytest.mark.parametrize("native", STAGES)
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
def test_weights_that_are_not_finite_end_the_text(members, whole, folders, prompts, native, reads, stage):
    def spoil(parts):
        parts[stage].base.layers[0].mlp.down_proj.weight[3] = torch.nan

    pipeline = new_pipeline(members, whole, folders, "llama", reads, native, spoil)
    for mode, tree in MODES:
        for sampling in (GREEDY, SAMPLED):
            assert decode(mode, pipeline, prompts[0], sampling, **tree).tokens == [NOT_FINITE]


@pytest.mark.parametrize("native", STAGES)
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_token_that_is_not_finite_ends_the_text(
    members, whole, folders, texts, prompts, native, reads, sampling
):
    """Its states reach the nodes that go through a stage with it: then the text ends before it."""
    expected = texts("llama", 0, sampling)
    place = next(i for i in range(3, NEW) if expected[i] not in (*prompts[0], *expected[:i]))

    def spoil(parts):
        parts[0].base.embed_tokens.weight[expected[place]] = torch.nan

    pipeline = new_pipeline(members, whole, folders, "llama", reads, native, spoil)
    for mode, tree in MODES:
        *found, last = decode(mode, pipeline, prompts[0], sampling, **tree).tokens
        assert last == NOT_FINITE and found == expected[: len(found)] and len(found) <= place + 1
        assert mode is not pp or len(found) == place + 1


@pytest.mark.parametrize("native", STAGES)
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_text_up_to_the_last_position(members, whole, folders, texts, prompts, native, reads, sampling):
    """Drafts go beyond it."""
    assert len(prompts[0]) + NEW == whole("short").config.max_position_embeddings
    pipeline = new_pipeline(members, whole, folders, "short", reads, native)
    for mode, tree in MODES:
        assert decode(mode, pipeline, prompts[0], sampling, **tree).tokens == texts("short", 0, sampling)
