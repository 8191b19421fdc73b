"""Packed weights give what plain ones give, bit by bit, and are used only where they can be."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.kernels import linear
from drafttrain.target_lm import cpu_linear as packed
from drafttrain.target_lm.cpu_linear import JoinedLinear, PackedLinear, can_pack, pack_linears
from drafttrain.target_lm.model import FrozenTarget

needs_bf16 = pytest.mark.skipif(
    not can_pack(nn.Linear(8, 8).bfloat16()), reason="this processor or torch cannot pack bf16 weights"
)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_bit_identical(bias, n):
    linear = nn.Linear(96, 160, bias=bias).bfloat16()
    for x in (torch.randn(1, n, 96), torch.randn(n, 96), torch.randn(3, n, 96)):
        assert torch.equal(PackedLinear(linear.weight, linear.bias)(x.bfloat16()), linear(x.bfloat16()))


class Attention(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.q_proj = nn.Linear(96, 96, bias=bias)
        self.k_proj = nn.Linear(96, 32, bias=bias)
        self.v_proj = nn.Linear(96, 32, bias=bias)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [1, 9])
def test_joined_layers_in_any_order(bias, n):
    plain = Attention(bias).bfloat16()
    joined = copy.deepcopy(plain)
    assert pack_linears(joined) == 3 and isinstance(joined.k_proj, JoinedLinear)
    inputs = [torch.randn(1, n, 96).bfloat16() for _ in range(2)]
    for order in ("qkv", "kvq", "kv", "qqk", "vk", "q"):
        for x in (*inputs, inputs[0]):
            for name in order:
                found = getattr(joined, f"{name}_proj")(x)
                assert torch.equal(found, getattr(plain, f"{name}_proj")(x))
    for name in "qkv":
        getattr(joined, f"{name}_proj")(inputs[1])
    assert joined.q_proj.joined.input is None and not joined.q_proj.joined.parts


@needs_bf16
def test_threads_do_not_see_each_others_products():
    plain = Attention(False).bfloat16()
    joined = copy.deepcopy(plain)
    pack_linears(joined)

    def run(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        same = True
        for _ in range(100):
            x = torch.randn(1, 2, 96, generator=generator).bfloat16()
            names = ("q_proj", "k_proj", "v_proj")
            same &= all(torch.equal(getattr(joined, name)(x), getattr(plain, name)(x)) for name in names)
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


@needs_bf16
def test_siblings_that_differ_are_packed_one_by_one():
    model = Attention(False).bfloat16()
    model.k_proj = nn.Linear(96, 32, bias=True).bfloat16()
    assert pack_linears(model) == 3 and isinstance(model.q_proj, PackedLinear)


def test_what_cannot_be_packed_stays(monkeypatch):
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Other(8, 8).bfloat16(), nn.LayerNorm(8))
    assert pack_linears(model) == 0
    monkeypatch.setattr(packed, "PRODUCT", ("no such operator",))
    assert not can_pack(nn.Linear(8, 8).bfloat16())


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(linear, "library", lambda: None)


@needs_bf16
def test_a_packed_target_is_the_same_target(tiny_llama, no_compiler):
    model, tokenizer = tiny_llama
    model = copy.deepcopy(model).bfloat16()
    plain = FrozenTarget(copy.deepcopy(model), tokenizer, "plain", tapped_blocks=[1])
    target = FrozenTarget(model, tokenizer, "packed", tapped_blocks=[1])
    target.pack()
    target.pack()  # a second time changes nothing
    assert target.is_packed and not plain.is_packed
    layers = [type(module) for module in target.base.modules()]
    assert layers.count(JoinedLinear) == 4 * 5 and layers.count(PackedLinear) == 4 * 2
    assert target.fingerprint == plain.fingerprint
    assert torch.equal(target.lm_head.weight, plain.lm_head.weight)
    prompts = [[5, 6, 7], [9] * 20]
    outputs = [decode_all(t, NoProposer(), prompts, 20, stop=())[0] for t in (plain, target)]
    assert outputs[0] == outputs[1]


def test_fp32_is_left_alone(tiny_llama, no_compiler):
    model, tokenizer = tiny_llama
    target = FrozenTarget(model, tokenizer, "plain")
    target.pack()
    assert not target.is_packed
