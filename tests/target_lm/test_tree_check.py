"""The tree probe accepts what is exact and refuses what is not, over tiny random models of many families."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drafttrain.target_lm import stock_masks
from drafttrain.target_lm import tree_check as probe
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.tree_check import TOLERANCE, check_tree_support
from drafttrain.utils.errors import UserError

SIZES = dict(
    vocab_size=160,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    initializer_range=0.2,
    tie_word_embeddings=False,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=2,
)
LLAMA_LIKE = SIZES | dict(intermediate_size=96, num_key_value_heads=2, max_position_embeddings=64)
SLIDING = dict(sliding_window=8)  # shorter than the prefix, so that the window cuts
EXACT = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | dict(head_dim=16),
    "qwen3-sliding": LLAMA_LIKE
    | SLIDING
    | dict(
        head_dim=16,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "mistral": LLAMA_LIKE | SLIDING | dict(head_dim=16),
    "gpt2": SIZES | dict(n_positions=64),
    "gemma2": LLAMA_LIKE | SLIDING | dict(head_dim=16, query_pre_attn_scalar=16),
}
REFUSED = {
    "mpt": dict(d_model=64, n_heads=4, n_layers=3, vocab_size=160, max_seq_len=64),
    "bloom": dict(hidden_size=64, n_layer=3, n_head=4, vocab_size=160),
    "falcon": SIZES | dict(alibi=True),
    "mamba": dict(
        vocab_size=160, hidden_size=64, num_hidden_layers=2, state_size=4, tie_word_embeddings=False
    ),
}


def tiny(name: str, settings: dict, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    config = CONFIG_MAPPING[name.split("-")[0]](**settings)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    return FrozenTarget(model, None, f"tiny {name}")


def error_of(target: FrozenTarget) -> float:
    ids = torch.randint(160, (20,))
    with torch.no_grad():
        return probe._logit_error(target, ids[:12], ids[12:-1], ids[-1:])


@pytest.mark.parametrize("name", EXACT)
def test_exact_families_pass(name):
    target = tiny(name, EXACT[name])
    check_tree_support(target)
    assert error_of(target) < 5e-5  # far below the tolerance


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_bf16_passes(monkeypatch, free):
    """In fp32 where memory allows it, which leaves the weights as they were; else in bf16."""
    monkeypatch.setattr(probe, "free_memory", lambda device: free)
    target = tiny("llama", LLAMA_LIKE, torch.bfloat16)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    places = [weight.data_ptr() for weight in target.model.parameters()]
    probed, logit_error = [], probe._logit_error

    def noting(target, *ids):
        probed.append(target.dtype)
        return logit_error(target, *ids)

    monkeypatch.setattr(probe, "_logit_error", noting)
    check_tree_support(target)
    assert set(probed) == {torch.float32 if free else torch.bfloat16}
    for name, weight in target.model.state_dict().items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, before[name]), name
    assert [weight.data_ptr() for weight in target.model.parameters()] == places  # native copies know them


def test_weights_are_put_back_where_converting_them_is_interrupted(monkeypatch):
    target, converted = tiny("llama", LLAMA_LIKE, torch.bfloat16), []

    def float_once(tensor):
        if converted:
            raise KeyboardInterrupt
        converted.append(tensor)
        return tensor.to(torch.float32)

    monkeypatch.setattr(torch.Tensor, "float", float_once)
    with pytest.raises(KeyboardInterrupt):
        check_tree_support(target)
    assert converted and {weight.dtype for weight in target.model.parameters()} == {torch.bfloat16}


def test_quantized_layers_may_round(monkeypatch):
    """They compute in a dtype of their own, regardless of that of the other weights."""
    target = tiny("llama", LLAMA_LIKE)
    monkeypatch.setattr(probe, "_logit_error", lambda *ids: 0.1)
    with pytest.raises(UserError, match="verifies trees wrongly"):
        check_tree_support(target)
    target.model.is_quantized = True
    check_tree_support(target)


def test_free_memory_is_known_or_unlimited(monkeypatch):
    assert probe.free_memory(torch.device("cpu")) > 1 << 20
    monkeypatch.setattr(probe.Path, "read_text", lambda self: (_ for _ in ()).throw(OSError))
    assert probe.free_memory(torch.device("cpu")) == float("inf")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mpt", "no list of decoder blocks"),
        ("falcon", "ALiBi"),
        ("mamba", "linear_attention"),
        ("bloom", "cannot verify trees"),
    ],
)
def test_unsupported_families_are_refused(name, reason):
    with pytest.raises(UserError, match=f"tiny {name}.*{reason}"):
        check_tree_support(tiny(name, REFUSED[name]))


def test_unsupported_layer_types_are_named():
    target = tiny("qwen2", LLAMA_LIKE)
    target.config.layer_types = ["full_attention", "linear_attention", "chunked_attention"]
    with pytest.raises(UserError, match="chunked_attention, linear_attention"):
        check_tree_support(target)


def blind_to_branches(lengths, ancestors, view):
    """Every node sees all nodes before it, siblings included."""
    return allowed_slots(lengths, torch.ones_like(ancestors).tril(), view)


allowed_slots = stock_masks.allowed_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_mask_is_found(monkeypatch, dtype):
    monkeypatch.setattr(stock_masks, "allowed_slots", blind_to_branches)
    with pytest.raises(UserError, match="verifies trees wrongly"):
        check_tree_support(tiny("llama", LLAMA_LIKE, dtype))


def test_wrong_positions_are_found(monkeypatch):
    target = tiny("llama", LLAMA_LIKE)
    forward = target.forward
    # what a forward does that is given no positions: siblings follow each other
    monkeypatch.setattr(
        target,
        "forward",
        lambda cache, tokens, depths, mask: forward(cache, tokens, torch.arange(tokens.shape[1]), mask),
    )
    assert error_of(target) > TOLERANCE
    with pytest.raises(UserError, match="verifies trees wrongly"):
        check_tree_support(target)


def test_a_forgotten_window_is_found(monkeypatch):
    target = tiny("mistral", EXACT["mistral"])
    mask = stock_masks.attention_mask

    def without_window(allowed, kv_positions, positions, config, dtype):
        return mask(allowed, torch.full_like(kv_positions, 10**6), positions, config, dtype)

    monkeypatch.setattr(stock_masks, "attention_mask", without_window)
    with pytest.raises(UserError, match="verifies trees wrongly"):
        check_tree_support(target)


@pytest.mark.parametrize(
    "files, left",
    [
        (
            {"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 5\ninactive_file 100\n"},
            600.0,
        ),
        ({"memory.max": "max", "memory.current": "1", "memory.stat": ""}, float("inf")),
        (
            {
                "memory.limit_in_bytes": "90",
                "memory.usage_in_bytes": "40",
                "memory.stat": "total_inactive_file 1",
            },
            51.0,
        ),
        ({}, float("inf")),
    ],
)
def test_a_cgroup_limits_the_memory(files, left, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(probe, "cgroups", lambda controller: iter([tmp_path]))
    free = probe.free_memory(torch.device("cpu"))
    assert free == left if left < float("inf") else free > 1 << 20
