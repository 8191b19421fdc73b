"""SDPA with the dense mask, flex-attention with the block mask and a plain loop agree."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from drafttrain.training.attention import block_attention
from drafttrain.training.masks import random_blocks
from tests.training.test_masks import dense_mask


def inputs(kv_heads: int, t: int = 40):
    q = torch.randn(2, 4, t, 16)
    k, v = torch.randn(2, 2, kv_heads, 2 * t, 16)
    document = torch.tensor([[0] * 25 + [25] * (t - 25), [0] * t])
    return q, k, v, random_blocks(document, 3, 6, torch.Generator().manual_seed(0))


def reference(q, k, v, mask):
    """Softmax over what each query may see, one query at a time."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = mask[b, 0, i].nonzero()[:, 0]
                scores = k[b, h // group, seen] @ q[b, h, i] / q.shape[-1] ** 0.5
                out[b, h, i] = scores.softmax(0) @ v[b, h // group, seen]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "flex", "auto"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()  # flex-attention has no backward pass on the CPU
def test_equals_the_reference(implementation, kv_heads):
    q, k, v, layout = inputs(kv_heads)
    got = block_attention(layout, implementation)(q, k, v)
    torch.testing.assert_close(got, reference(q, k, v, dense_mask(layout)), atol=1e-5, rtol=1e-5)


def test_gradients_do_not_pass_what_is_masked():
    """The states of a block's own positions get no gradient from that block's queries."""
    q, k, v, layout = inputs(2)
    k.requires_grad_(), v.requires_grad_()
    attended = block_attention(layout)(q, k, v)
    query = 17
    attended[0, :, query].sum().backward()
    seen = dense_mask(layout)[0, 0, query]
    for grad in (k.grad, v.grad):
        touched = grad[0].abs().sum((0, 2)) > 0
        assert torch.equal(touched, seen)
        assert not grad[1].any()


def test_stretches_change_nothing():
    """Rows with several stretches against the whole dense mask, gradients included."""
    t, generator = 200, torch.Generator().manual_seed(0)
    document = torch.tensor([[0] * 90 + [90] * 75 + [165] * 20 + list(range(185, 200)), [0] * t])
    for low, high in ((5, 10), (1, 1), (90, 120)):
        layout = random_blocks(document, low, high, generator)
        inputs = [torch.randn(2, heads, n, 16) for heads, n in ((4, t), (2, 2 * t), (2, 2 * t))]
        mask, grad = dense_mask(layout), torch.randn(2, 4, t, 16)
        results = []
        for attend in (
            block_attention(layout),
            partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True),
        ):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = attend(*leaves)
            out.backward(grad)
            results.append([out, *(leaf.grad for leaf in leaves)])
        for ours, whole in zip(*results):
            torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-5)
