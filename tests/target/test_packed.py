"""Packed weights give what plain ones give, bit by bit, and are used only where they can be."""

import copy

import pytest
import torch
from torch import nn

from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.target import packed
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.packed import PackedLinear, can_pack, pack_linears

needs_bf16 = pytest.mark.skipif(
    not can_pack(nn.Linear(8, 8).bfloat16()), reason="this processor or torch cannot pack bf16 weights"
)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_bit_identical(bias, n):
    linear = nn.Linear(96, 160, bias=bias).bfloat16()
    for x in (torch.randn(1, n, 96), torch.randn(n, 96), torch.randn(3, n, 96)):
        assert torch.equal(PackedLinear(linear)(x.bfloat16()), linear(x.bfloat16()))


def test_what_cannot_be_packed_stays(monkeypatch):
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Other(8, 8).bfloat16(), nn.LayerNorm(8))
    assert pack_linears(model) == 0
    monkeypatch.setattr(packed, "PRODUCT", ("no such operator",))
    assert not can_pack(nn.Linear(8, 8).bfloat16())


@needs_bf16
def test_a_packed_target_is_the_same_target(tiny_llama):
    model, tokenizer = tiny_llama
    model = copy.deepcopy(model).bfloat16()
    plain = FrozenTarget(copy.deepcopy(model), tokenizer, "plain", tapped_blocks=[1])
    target = FrozenTarget(model, tokenizer, "packed", tapped_blocks=[1])
    target.pack()
    target.pack()  # a second time changes nothing
    assert target.is_packed and not plain.is_packed
    assert sum(isinstance(module, PackedLinear) for module in target.base.modules()) == 4 * 7
    assert target.fingerprint == plain.fingerprint
    assert torch.equal(target.lm_head.weight, plain.lm_head.weight)
    prompts = [[5, 6, 7], [9] * 20]
    outputs = [decode_all(t, NoProposer(), prompts, 20, stop=())[0] for t in (plain, target)]
    assert outputs[0] == outputs[1]


def test_fp32_is_left_alone(tiny_llama):
    model, tokenizer = tiny_llama
    target = FrozenTarget(model, tokenizer, "plain")
    target.pack()
    assert not target.is_packed
