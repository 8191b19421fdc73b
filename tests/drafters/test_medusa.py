"""MEDUSA's heads predict by depth, independent of the path."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.inference.proposer import TreeProposer
from drafttrain.training.trainer import draft_loss
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


def predicted(drafter, state: torch.Tensor, head: int) -> torch.Tensor:
    read = state + F.silu(drafter.blocks[head](state))
    return torch.log_softmax(drafter.lm_heads[head](read), -1)


@pytest.fixture
def pair(make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target, kind="medusa", heads=3)
    with torch.no_grad():
        for number, block in enumerate(drafter.blocks):  # blocks start as nothing: a lost one would not show
            block.weight += torch.randn_like(block.weight) * 0.2 * (number + 1)
    return target, drafter


@torch.no_grad()
def test_a_head_for_each_depth(pair):
    target, drafter = pair
    ids = torch.randint(3, 512, (2, 6))
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped
    state = drafter.new_state(2, 10)
    drafter.update(state, ids, tapped, torch.tensor([6, 4]))
    tree = TokenTree.root_only(torch.tensor([20, 21]))
    tree = tree.append(torch.tensor([[0, 0]] * 2), torch.tensor([[7, 8]] * 2), torch.zeros(2, 2))
    tree = tree.append(torch.tensor([[2]] * 2), torch.tensor([[9]] * 2), torch.zeros(2, 1))
    found = drafter.expand(state, tree, torch.tensor([[0, 1, 2, 3]] * 2))  # [2, 4, D]
    for row, last in ((0, 5), (1, 3)):
        for node, head in enumerate((0, 1, 1, 2)):
            torch.testing.assert_close(found[row, node], predicted(drafter, tapped[row, last], head))
    drafter.update(state, ids[:, :1], tapped[:, :1], torch.tensor([1, 1]))  # what was kept is forgotten
    found = drafter.expand(state, tree, torch.tensor([[0]] * 2))
    torch.testing.assert_close(found[0, 0], predicted(drafter, tapped[0, 0], 0))


@torch.no_grad()
def test_a_row_that_takes_anothers_place_forgets_it(pair):
    target, drafter = pair
    ids = torch.randint(3, 512, (2, 6))
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped
    tree, root = TokenTree.root_only(torch.tensor([20])), torch.tensor([[0]])
    first, second = drafter.new_state(1, 10), drafter.new_state(1, 10)
    drafter.update(first, ids[:1], tapped[:1], torch.tensor([6]))
    drafter.expand(first, tree, root)  # keeps its predictions
    drafter.update(second, ids[1:], tapped[1:], torch.tensor([6]))
    drafter.replace_rows(first, torch.tensor([0]), second)
    torch.testing.assert_close(drafter.expand(first, tree, root)[0, 0], predicted(drafter, tapped[1, 5], 0))


def test_loss_is_a_decaying_sum_over_heads(pair):
    target, drafter = pair
    ids = torch.randint(3, 512, (1, 9))
    start = torch.tensor([[0] * 5 + [5] * 4])
    final = torch.cat(
        [target.encode(part, torch.zeros_like(part)).final for part in (ids[:, :5], ids[:, 5:])], 1
    )
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 0]])
    batch = {
        "input_ids": ids,
        "loss_mask": mask,
        "document_start": start,
        "positions": torch.arange(9)[None] - start,
        "tapped": final,
        "final": final,
    }
    got = draft_loss(drafter, drafter, target, batch, None, chunk=2, bf16=False)
    total, first = 0.0, 0.0
    for head in range(3):
        for t in range(9):
            judged = t + 1 + head  # whose distribution it predicts
            if judged < 9 and mask[0, judged] and start[0, judged] == start[0, t]:
                q = predicted(drafter, final[0, t], head)
                p = torch.log_softmax(target.head(final[0, judged])[::2], -1)
                kl = (p.exp() * (p - q)).sum()
                total, first = total + 0.8**head * kl, first + (kl if head == 0 else 0)
    torch.testing.assert_close(got.total, total, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.kl, first, atol=1e-4, rtol=1e-4)
    got.total.backward()
    assert all(block.weight.grad.abs().sum() > 0 for block in drafter.blocks)


def test_trees_deeper_than_its_heads_are_refused(pair):
    with pytest.raises(UserError, match="up to 4 tokens deep and this drafter reaches 3"):
        TreeProposer(pair[1], ChainPolicy(4))
    TreeProposer(pair[1], ChainPolicy(3))
