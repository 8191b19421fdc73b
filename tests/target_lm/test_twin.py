"""Native copies of loaded models: they compute what the model does, and leave it unchanged."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from drafttrain.kernels.linear import NativeLinear, is_available
from drafttrain.target_lm import twin
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.twin import Look, is_plain, native_copy

pytestmark = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def pair(request):
    """A model of one's own, and its tokenizer."""
    model, tokenizer = request.getfixturevalue(request.param)
    return copy.deepcopy(model), tokenizer


def logits(target, ids):
    """[n, V] after a prompt [n]."""
    cache = target.new_cache(1, len(ids))
    states = target.forward(cache, ids[None], torch.arange(len(ids)), causal(len(ids), ids.device))
    return target.head(states.final)[0]


def test_the_copy_computes_what_the_model_does(pair):
    model, tokenizer = pair
    model.train().requires_grad_(True)
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    modules = [(name, id(module), type(module)) for name, module in model.named_modules()]
    target = native_copy(model, tokenizer, "tiny")
    assert target.native is not None and target.is_packed
    ids = torch.arange(3, 40)
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]  # [n, V]
    torch.testing.assert_close(logits(target, ids), expected, atol=1e-4, rtol=1e-4)
    after = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    assert before == after and modules == [(name, id(m), type(m)) for name, m in model.named_modules()]
    assert all(module.training for module in model.modules())
    assert not any(isinstance(module, NativeLinear) for module in model.modules())
    model(input_ids=ids[None], labels=ids[None]).loss.backward()


@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_is_the_same_target(tied, tiny_llama):
    """By its fingerprint, for which drafters and calibrations are made."""
    model = copy.deepcopy(tiny_llama[0])
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    expected = FrozenTarget(copy.deepcopy(model), None, "tiny").fingerprint
    assert native_copy(model, tiny_llama[1], "tiny").fingerprint == expected


def early_exit(model):
    model.config.num_hidden_layers = 1


def another_module(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


def another_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def another_scaling(model):
    model.model.layers[1].self_attn.scaling *= 2


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def hooked_before(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def own_forward(model):
    model.model.layers[0].forward = lambda *args, **kwargs: args[0]


def dropout(model):
    model.train().model.layers[0].self_attn.attention_dropout = 0.1


def half(model):
    model.half()


def adapter(model):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)


def subclass(model):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.up_proj.__class__ = Scaled


def hooked_outside(model):
    model.register_forward_hook(lambda module, args, output: output)


def own_class(model):
    class Capped(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Capped


def another_attention(model):
    model.config._attn_implementation = "mine"


def two_layers(model):
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))


def other_norms(model):
    model.model.layers[0].input_layernorm = nn.RMSNorm(64)


def no_attention(model):
    model.model.layers[1].self_attn = nn.Identity()


OTHER_CODE = [
    hooked,
    hooked_before,
    hooked_outside,
    own_forward,
    own_class,
    another_attention,
    adapter,
    subclass,
]


@pytest.mark.parametrize("change", [*OTHER_CODE, dropout, half])
def test_no_copy_of_what_is_not_transformers_own(change, tiny_llama):
    model = copy.deepcopy(tiny_llama[0])
    assert is_plain(model)
    change(model)
    assert not is_plain(model) and native_copy(model, tiny_llama[1], "tiny") is None


UNLIKE = [another_epsilon, another_scaling, early_exit, two_layers, another_module, other_norms, no_attention]


@pytest.mark.parametrize("change", UNLIKE)
def test_no_copy_of_blocks_that_differ(change, tiny_llama):
    model = copy.deepcopy(tiny_llama[0])
    change(model)
    assert native_copy(model, tiny_llama[1], "tiny") is None


def test_hooks_that_transformers_leaves_do_not_count(tiny_llama):
    model = copy.deepcopy(tiny_llama[0])
    model(input_ids=torch.tensor([[3, 4]]), output_hidden_states=True)
    assert is_plain(model)


def test_no_copy_of_other_architectures(tiny_llama):
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=320)
    assert native_copy(GPT2LMHeadModel(config).eval(), tiny_llama[1], "tiny") is None


def test_no_copy_without_memory(monkeypatch, tiny_llama):
    monkeypatch.setattr(twin, "free_memory", lambda device: 1 << 12)
    assert native_copy(tiny_llama[0], tiny_llama[1], "tiny") is None


def through_data(model):
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1e-3


def in_place(model):
    with torch.no_grad():
        model.model.norm.weight[0] = 7


def embeddings(model):
    model.model.embed_tokens.weight.data[-1, -1] += 1e-3


def another_dtype(model):
    model.bfloat16()


def fewer_layers(model):
    model.model.layers = model.model.layers[:1]


def another_window(model):
    model.config.sliding_window = 4


def swapped_rows(model):
    model.lm_head.weight[[5, 7]] = model.lm_head.weight[[7, 5]]


def rows_swapped_through_data(model):
    weight = model.lm_head.weight.data
    weight[[5, 7]] = weight[[7, 5]]


def other_frequencies(model):
    model.model.rotary_emb.inv_freq.div_(4)


CHANGES = [
    through_data,
    in_place,
    embeddings,
    another_dtype,
    another_module,
    fewer_layers,
    another_window,
    swapped_rows,
    rows_swapped_through_data,
    other_frequencies,
    early_exit,
    another_epsilon,
    another_scaling,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, tiny_llama):
    model = copy.deepcopy(tiny_llama[0])
    before = Look.at(model)
    assert Look.at(model) == before
    with torch.no_grad():
        change(model)
    assert Look.at(model) != before


@pytest.mark.parametrize("shape", [(3, 5), (8, 8), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skipped", [0, 1])
def test_every_bit_counts(shape, dtype, skipped):
    """Also of tensors that begin or end within eight bytes."""
    count = torch.Size(shape).numel()
    weight = torch.randn(count + skipped, dtype=dtype)[skipped:].view(shape)
    before, numbers = twin._sum(weight), weight.view(-1).view(torch.uint8)
    for i in range(len(numbers)):
        for bit in range(8):
            numbers[i] ^= 1 << bit
            assert twin._sum(weight) != before
            numbers[i] ^= 1 << bit
    assert twin._sum(weight) == before
