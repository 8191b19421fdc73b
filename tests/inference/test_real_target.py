"""SmolLM2 itself: the probe accepts it, and drafts do not change what it writes in fp32."""

import pytest
import torch

from drafttrain.decoder import SpeculativeDecoder
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.tree_check import check_tree_support
from drafttrain.trees.chain import ChainPolicy

NEW = 20


def test_bf16_target_verifies_trees(smollm2):
    check_tree_support(load_target(str(smollm2), dtype="bfloat16"))


@pytest.fixture(scope="module")
def smol(smollm2):
    target = load_target(str(smollm2), dtype="float32")
    target.tap([-4])
    check_tree_support(target)
    return target


@torch.no_grad()
def test_fp32_output_is_that_of_transformers(smol, greedy, replay):
    decoder = SpeculativeDecoder(smol, NoProposer())
    prompts = [decoder.encode(text) for text in ("Why is the sky blue?", "Write a haiku about rivers.")]
    wanted = [greedy(smol, prompt, NEW, None) for prompt in prompts]
    drafter = replay(smol, [p + w for p, w in zip(prompts, wanted)], lambda row, position: position % 4 > 0)
    outputs, stats = decode_all(smol, TreeProposer(drafter, ChainPolicy(5)), prompts, NEW, stop=())
    assert outputs == wanted
    assert stats.accept_len > 2
    assert decode_all(smol, NoProposer(), prompts[:1], NEW, stop=())[0] == wanted[:1]
