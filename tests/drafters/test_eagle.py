"""EAGLE goes on with states: the target's where they are known, its own after them."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.training.attention import block_attention
from drafttrain.training.masks import whole_documents
from drafttrain.training.trainer import draft_loss
from drafttrain.trees.tree import TokenTree


@torch.no_grad()
def expected_states(drafter, pairs: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Output [H] after the last of some (token, state before it), by a plain loop over heads."""
    layer = drafter.layers[0]
    x = torch.stack(
        [
            drafter.fc(
                torch.cat((drafter.embed_norm(drafter.embed_tokens.weight[t]), drafter.state_norm(state)))
            )
            for t, state in pairs
        ]
    )[None]
    cos, sin = drafter.rope(torch.arange(len(pairs))[None])
    normed = layer.input_layernorm(x)
    k, v = layer.keys_values(normed, cos, sin)
    q = layer.queries(normed, cos, sin)[:, :, -1]
    group = q.shape[1] // k.shape[1]
    heads = [
        torch.softmax(k[0, h // group] @ q[0, h] / q.shape[-1] ** 0.5, -1) @ v[0, h // group]
        for h in range(q.shape[1])
    ]
    return drafter.norm(layer.finish(x[0, -1], torch.cat(heads)))


def log_probs(drafter, state: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(drafter.lm_head(state), -1)


@pytest.mark.parametrize("input_norms", [False, True])
@torch.no_grad()
def test_a_tree_goes_on_with_its_own_states(input_norms, make_target, make_drafter):
    target = make_target("qwen2")
    drafter = make_drafter(target, kind="eagle", input_norms=input_norms)
    assert target.tapped_blocks == [4]  # the state after the final norm
    ids = torch.randint(3, 512, (1, 8))
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped
    assert torch.equal(tapped, target.encode(ids, torch.zeros_like(ids)).final)
    state = drafter.new_state(1, 4)
    drafter.update(state, ids[:, :5], tapped[:, :5], torch.tensor([5]))
    drafter.update(state, ids[:, 5:], tapped[:, 5:], torch.tensor([2]))  # the last is padding
    known = [(int(ids[0, j]), tapped[0, j - 1]) for j in range(1, 7)]
    tree = TokenTree.root_only(torch.tensor([20]))
    root = expected_states(drafter, [*known, (20, tapped[0, 6])])
    found = drafter.expand(state, tree, torch.tensor([[0]]))[0, 0]
    torch.testing.assert_close(found, log_probs(drafter, root), atol=1e-5, rtol=1e-5)

    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[7, 8]]), torch.zeros(1, 2))
    found = drafter.expand(state, tree, torch.tensor([[1, 2]]))[0]
    before = [*known, (20, tapped[0, 6])]
    children = [expected_states(drafter, [*before, (token, root)]) for token in (7, 8)]
    for row, child in zip(found, children, strict=True):
        torch.testing.assert_close(row, log_probs(drafter, child), atol=1e-5, rtol=1e-5)

    tree = tree.append(torch.tensor([[2]]), torch.tensor([[9]]), torch.zeros(1, 1))
    found = drafter.expand(state, tree, torch.tensor([[3]]))[0, 0]
    leaf = expected_states(drafter, [*before, (8, root), (9, children[1])])
    torch.testing.assert_close(found, log_probs(drafter, leaf), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("labels", [False, True])
def test_loss_is_smooth_l1_and_a_tenth_of_cross_entropy(labels, make_target, make_drafter):
    target = make_target("qwen2")
    drafter = make_drafter(target, kind="eagle", noise=0.0).train()
    ids = torch.randint(3, 512, (1, 12))
    start = torch.tensor([[0] * 7 + [7] * 5])
    positions = torch.arange(12)[None] - start
    final = torch.cat(
        [target.encode(part, torch.zeros_like(part)).final for part in (ids[:, :7], ids[:, 7:])], 1
    )
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]])
    batch = {
        "input_ids": ids,
        "loss_mask": mask,
        "document_start": start,
        "positions": positions,
        "tapped": final,
        "final": final,
    }
    got = draft_loss(
        drafter, drafter, target, batch, None, chunk=3, bf16=False, loss="ce" if labels else "kl"
    )
    total, divergence, count = 0.0, 0.0, 0
    for j in range(12):
        if not mask[0, j] or positions[0, j] == 0:  # a document's first token is no input
            continue
        first = int(start[0, j])
        pairs = [(int(ids[0, i]), final[0, i - 1]) for i in range(first + 1, j + 1)]
        expected_state = expected_states(drafter, pairs)
        q, p = log_probs(drafter, expected_state), torch.log_softmax(target.head(final[0, j])[::2], -1)
        apart = F.smooth_l1_loss(expected_state, final[0, j])
        kl = (p.exp() * (p - q)).sum()
        if labels:
            label = int(ids[0, j + 1])
            kl = -q[label // 2] if label % 2 == 0 else torch.tensor(0.0)  # odd tokens cannot be drafted
        total, divergence = total + apart + 0.1 * kl, divergence + kl
        count += not labels or label % 2 == 0
    torch.testing.assert_close(got.total, total, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.kl, divergence, atol=1e-4, rtol=1e-4)
    assert got.positions == count
    got.total.backward()
    assert drafter.fc.weight.grad.abs().sum() > 0 and drafter.lm_head.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_noise_is_of_training_alone_and_of_each_rows_seed(make_target, make_drafter):
    """Independent of what was drawn before, and of the rows beside it."""
    target = make_target("llama")
    drafter = make_drafter(target, kind="eagle", noise=0.5)
    ids = torch.randint(3, 512, (1, 6)).expand(2, -1)
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped

    def run(*seeds):
        n = len(seeds)
        batch = {"input_ids": ids[:n], "tapped": tapped[:n], "positions": torch.arange(6).expand(n, -1)}
        attend = block_attention(whole_documents(torch.zeros_like(ids[:n]), drafter.first_token))
        everywhere = torch.ones_like(ids[:n], dtype=torch.bool)
        batch["row_seeds"] = torch.tensor(seeds)
        [expected_state] = drafter.predictions(drafter, batch, attend, everywhere)
        return expected_state.states.unflatten(0, (n, 5))  # a document's first token is no input

    assert torch.equal(run(1), run(2))
    plain = run(1)
    drafter.train()
    assert (run(1) - plain).abs().mean() > 0.01
    assert (run(1) - run(2)).abs().mean() > 0.01
    first, second = run(2**32 - 1, 3)
    torch.manual_seed(7)
    torch.testing.assert_close(run(2**32 - 1)[0], first)
    torch.testing.assert_close(run(3)[0], second)

    drafter.config.noise = 0.0
    assert torch.equal(run(1), plain)


@torch.no_grad()
def test_sequences_with_trees_of_different_widths_are_joined(make_target, make_drafter):
    """For an update, which forgets what the trees have carried."""
    target = make_target("qwen2")
    drafter = make_drafter(target, kind="eagle")
    ids = torch.randint(3, 512, (2, 5))
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped
    states = [drafter.new_state(1, 16) for _ in range(2)]
    for row, state in enumerate(states):
        drafter.update(state, ids[row : row + 1], tapped[row : row + 1], torch.tensor([5]))
        tree = TokenTree.root_only(torch.tensor([20]))
        for _ in range(1 + row):
            drafter.expand(state, tree, torch.tensor([[tree.width - 1]]))
            tree = tree.append(torch.tensor([[tree.width - 1]]), torch.tensor([[7]]), torch.zeros(1, 1))
    joined = drafter.join(states)
    drafter.update(joined, ids[:, :2], tapped[:, :2], torch.tensor([2, 1]))
    drafter.split(joined, states)
    assert [int(state.lengths) for state in states] == [6, 5]
