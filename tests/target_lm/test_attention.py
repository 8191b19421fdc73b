"""The fast way of attention gives what the slow one gives: packed rows what each document gives by itself,
trees under shared heads what they give with copied keys and values."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from drafttrain.target_lm import attention, packed
from drafttrain.target_lm.attention import attends_within_documents, grouped_attention
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.packed import causal_document_mask, document_stretches
from drafttrain.utils.errors import UserError
from tests.target_lm.test_tree_check import EXACT, tiny

CLOSE = dict(rtol=1e-4, atol=1e-4)
ROWS = ([9, 1, 12, 3], [1, 1, 1, 20], [25])  # lengths of documents; the rest of a row of 25 is padding


def starts_of(lengths: list[int], width: int = 25) -> list[int]:
    starts = [start for i, n in enumerate(lengths) for start in [sum(lengths[:i])] * n]
    return starts + list(range(len(starts), width))


STARTS = torch.tensor([starts_of(lengths) for lengths in ROWS])


def check(target: FrozenTarget) -> None:
    target.tap([1])
    ids = torch.randint(3, 160, STARTS.shape, generator=torch.Generator().manual_seed(0))
    packed = target.encode(ids, STARTS)
    assert packed.final.shape == (*ids.shape, target.hidden_size)
    for row, lengths in enumerate(ROWS):
        at = 0
        for n in lengths:
            with torch.no_grad(), target._tapped() as taps:
                alone = target.base(input_ids=ids[row : row + 1, at : at + n], use_cache=False)
            tapped = target._states(taps, alone.last_hidden_state).tapped[0]
            torch.testing.assert_close(packed.final[row, at : at + n], alone.last_hidden_state[0], **CLOSE)
            torch.testing.assert_close(packed.tapped[row, at : at + n], tapped, **CLOSE)
            at += n


@pytest.mark.parametrize("name", EXACT)
def test_packed_equals_alone(name):
    check(tiny(name, EXACT[name]))


def test_only_plain_causal_sdpa_takes_the_short_way():
    ways = {name: attends_within_documents(tiny(name, settings).config) for name, settings in EXACT.items()}
    assert ways == dict.fromkeys(EXACT, False) | dict.fromkeys(("llama", "qwen2", "qwen3", "gpt2"), True)
    eager = tiny("llama", EXACT["llama"])
    eager.model.set_attn_implementation("eager")
    assert not attends_within_documents(eager.config)
    check(eager)


def test_large_batches_are_encoded_in_parts(monkeypatch):
    target = tiny("llama", EXACT["llama"])
    target.tap([0, 2])
    ids = torch.randint(3, 160, STARTS.shape, generator=torch.Generator().manual_seed(0))
    whole = target.encode(ids, STARTS)
    monkeypatch.setattr(packed, "CPU_TOKENS", 50)  # 2 rows of 25, then 1
    rows = []
    target.base.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given.get("input_ids", args[0] if args else ()))),
        with_kwargs=True,
    )
    parts = target.encode(ids, STARTS)
    assert rows == [2, 1]
    torch.testing.assert_close(parts.tapped, whole.tapped, **CLOSE)
    torch.testing.assert_close(parts.final, whole.final, **CLOSE)


def test_documents_of_one_thread_are_nothing_to_another():
    target = tiny("llama", EXACT["llama"])
    ids = torch.randint(3, 160, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = target.base(input_ids=ids, use_cache=False).last_hidden_state
    with packed.within_documents(torch.tensor([[0] * 4 + [4] * 5])):
        with ThreadPoolExecutor() as pool:
            other = pool.submit(lambda: target.base(input_ids=ids, use_cache=False).last_hidden_state)
        inside = target.base(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(other.result(), plain) and not torch.allclose(inside, plain)
    assert torch.equal(target.base(input_ids=ids, use_cache=False).last_hidden_state, plain)


def test_generate_of_transformers_keeps_its_masks():
    """A left-padded batch, which needs them, gives what its rows give alone."""
    target = tiny("llama", EXACT["llama"])
    ids = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[0, :5] = 0
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=159, pad_token_id=0)
    both = target.model.generate(ids, attention_mask=(ids != 0).long(), **settings)
    alone = target.model.generate(ids[:1, 5:], **settings)
    n = alone.shape[1]
    assert both[0, 5 : 5 + n].tolist() == alone[0].tolist()


def test_targets_with_a_fixed_attention_stay_unchanged():
    sizes = dict(vocab_size=160, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    falcon = tiny(
        "falcon", sizes | dict(tie_word_embeddings=False, alibi=False, new_decoder_architecture=False)
    )
    assert not attends_within_documents(falcon.config)
    check(falcon)


@pytest.mark.parametrize("own", ["flash_attention_2", "flex_attention", "kernels-community/flash-attn3"])
def test_attention_without_tree_masks_is_replaced(own):
    target = tiny("llama", EXACT["llama"])
    config = target.model.config
    config._attn_implementation = own
    attention.use(target.model)
    assert config._attn_implementation == attention.NAME
    config._attn_implementation = own
    target.model._supports_attention_backend = False
    with pytest.raises(UserError, match=f"attn_implementation: must be sdpa or eager, got {own}; load"):
        attention.use(target.model)


def test_stretches():
    assert document_stretches(STARTS) == [
        (0, 0, 9, False), (0, 9, 10, True), (0, 10, 22, False), (0, 22, 25, False),
        (1, 0, 3, True), (1, 3, 23, False), (1, 23, 25, True),
        (2, 0, 25, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(9, 3, 5), (4, 4, 2), (6, 1, 1)])
def test_grouped_attention_is_sdpa_over_copied_heads(heads, kv_heads, n):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, n, 16, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, 11, 16, generator=generator)
    allowed = torch.rand(2, 1, n, 11, generator=generator) < 0.6
    allowed[..., 0] = True
    copies = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
    expected = F.scaled_dot_product_attention(q, *copies, attn_mask=allowed, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(grouped_attention(q, k, v, allowed, 0.3), expected)


def test_verification_copies_no_heads(monkeypatch):
    """And gives what the slow way gives."""
    target = tiny("qwen3", EXACT["qwen3"])
    ids = torch.randint(3, 160, (1, 6), generator=torch.Generator().manual_seed(0))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()

    def states() -> torch.Tensor:
        return target.forward(target.new_cache(1, 8), ids, torch.arange(6), causal).final

    slow = "transformers.integrations.sdpa_attention.repeat_kv"
    with monkeypatch.context() as patch:
        patch.setattr(attention, "LONGEST", 0)
        expected = states()
    monkeypatch.setattr(slow, lambda *args: pytest.fail("copied"))
    torch.testing.assert_close(states(), expected)


def test_causal_document_mask():
    document = torch.tensor([starts_of([3, 2], 6)])
    expected = [[document[0, q] == document[0, k] and k <= q for k in range(6)] for q in range(6)]
    assert torch.equal(causal_document_mask(document), torch.tensor([expected]))
