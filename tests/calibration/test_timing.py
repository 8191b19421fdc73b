"""Timing on tiny targets: sizes beyond those of a calibration, and vocabularies smaller than a tree."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.bundle import load_bundle
from drafttrain.calibration import timing
from drafttrain.calibration.timing import measure_costs, measure_verification
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.target_lm.model import FrozenTarget


def test_caches_have_room_for_the_sizes_that_are_timed(tiny_bundle):
    loaded = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    made = loaded.target, loaded.drafter, 2, (64,)
    largest = 2 * max(timing.VERIFIED), 2 * max(timing.EXPANDED)
    sizes = {"verified": (1, largest[0]), "expanded": (1, largest[1])}
    [target], [drafter], _ = measure_costs(*made, rounds=1, **sizes)
    assert (target.sizes, drafter.sizes) == ([1, largest[0]], [1, largest[1]])
    clock = timing._Clock(*made[:2], 64, (1, 4), (1, 2))
    assert clock.cache.max_len == 64 + 4 and clock.state.max_len == 64 + 3
    clock.verify(4), clock.draft(2, 2)
    assert clock.cache.max_len == 64 + 4 and clock.state.max_len == 64 + 3  # nothing had to grow


def test_a_vocabulary_smaller_than_a_tree():
    """Of characters, for example."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(vocab_size=20, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, **sizes)
    target = FrozenTarget(LlamaForCausalLM(config), None, "characters", [0])
    drafter = new_drafter(target, DrafterConfig(tapped_blocks=[0], draft_vocab_size=None), torch.arange(20))
    assert measure_verification(target, 64, rounds=1).sizes == list(timing.VERIFIED)
    assert measure_costs(target, drafter.eval(), 2, (64,), rounds=1)[1][0].sizes == list(timing.EXPANDED)
