"""VDM is a causal LM of one layer, in training and in decoding."""

import torch

from drafttrain.training.attention import block_attention
from drafttrain.training.masks import whole_documents
from drafttrain.trees.tree import TokenTree


@torch.no_grad()
def expected_log_probs(drafter, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, D] after each token of one document, by a plain loop over positions."""
    layer, rows = drafter.layers[0], []
    for last in range(len(ids)):
        positions = torch.arange(last + 1)[None]
        cos, sin = drafter.rope(positions)
        x = drafter.embed_tokens(ids[None, : last + 1])
        normed = layer.input_layernorm(x)
        k, v = layer.keys_values(normed, cos, sin)
        q = layer.queries(normed, cos, sin)[:, :, -1]  # [1, heads, dim]
        group = q.shape[1] // k.shape[1]
        heads = []
        for head in range(q.shape[1]):
            scores = k[0, head // group] @ q[0, head] / q.shape[-1] ** 0.5
            heads.append(torch.softmax(scores, -1) @ v[0, head // group])
        out = layer.finish(x[0, -1], torch.cat(heads))
        rows.append(torch.log_softmax(drafter.lm_head(drafter.norm(out)), -1))
    return torch.stack(rows)


@torch.no_grad()
def test_training_stays_within_documents(make_target, make_drafter):
    target = make_target("qwen2")
    drafter = make_drafter(target, kind="vdm")
    ids = torch.randint(3, 512, (1, 150))  # longer than a stretch of the attention
    start = torch.where(torch.arange(150) < 110, 0, 110)[None]
    attend = block_attention(whole_documents(start, drafter.first_token))
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    states = drafter(ids, torch.zeros(1, 150, 0), torch.arange(150)[None] - start, attend, everywhere)
    got = torch.log_softmax(drafter.lm_head(states), -1)
    for first, last in ((0, 110), (110, 150)):
        expected = expected_log_probs(drafter, ids[0, first:last])
        torch.testing.assert_close(got[first:last], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_nodes_of_a_tree_see_their_ancestors(make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target, kind="vdm")
    ids = torch.randint(3, 512, (1, 9))
    state = drafter.new_state(1, 4)  # too short on purpose: it must grow
    drafter.update(state, ids[:, :5], torch.zeros(1, 5, 0), torch.tensor([5]))
    drafter.update(state, ids[:, 5:], torch.zeros(1, 4, 0), torch.tensor([3]))  # the last is padding
    tree = TokenTree.root_only(torch.tensor([20]))
    found = [drafter.expand(state, tree, torch.tensor([[0]]))[0]]
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[7, 8]]), torch.zeros(1, 2))
    found.append(drafter.expand(state, tree, torch.tensor([[1, 2]]))[0])
    tree = tree.append(torch.tensor([[2, 1]]), torch.tensor([[9, 10]]), torch.zeros(1, 2))
    found.append(drafter.expand(state, tree, torch.tensor([[3, 4]]))[0])
    for row, path in zip(torch.cat(found), ([], [7], [8], [8, 9], [7, 10]), strict=True):
        text = torch.cat((ids[0, :8], torch.tensor([20, *path])))
        torch.testing.assert_close(row, expected_log_probs(drafter, text)[-1], atol=1e-5, rtol=1e-5)
