"""Every kind drafts exactly, in batches whose rows end and are refilled, and is loaded as it was saved."""

import pytest
import torch

from drafttrain.drafters.auto import load_drafter, model_class
from drafttrain.drafters.config import KINDS, DrafterConfig
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

NATIVE = [kind for kind in KINDS if "model" not in KINDS[kind].settings]
TREES = ("chain:length=3", "eagle2:top_k=3,max_depth=3,total=7")


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", NATIVE)
def test_drafts_are_exact(kind, tree, make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target, kind=kind)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 1, 9, 3, 12)]
    expected = decode_all(target, NoProposer(), prompts, 12)[0]
    proposer = TreeProposer(drafter, parse_policy(tree))
    for max_rows in (None, 2, 1):
        assert decode_all(target, proposer, prompts, 12, max_rows=max_rows)[0] == expected


@pytest.mark.parametrize("kind", NATIVE)
def test_saves_and_loads(kind, make_target, make_drafter, tmp_path):
    target = make_target("qwen2")
    drafter = make_drafter(target, kind=kind)
    drafter.save_pretrained(tmp_path)
    again = load_drafter(tmp_path, target)
    assert type(again) is model_class(kind) and again.config.tapped_blocks == drafter.config.tapped_blocks
    for (name, ours), theirs in zip(drafter.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "vdm", "layers": 2}, "layers: must be 1 for kind vdm, got 2; it is for edd, leave it out"),
        ({"kind": "medusa", "train_head": False}, "train_head: must be true for kind medusa, got false"),
        ({"kind": "medusa", "heads": 0}, "heads: must be >= 1 and <= 100, got 0"),
        ({"kind": "eagle", "noise": -1.0}, "noise: must be >= 0, got -1"),
        ({"kind": "causal_lm"}, "model: must be a folder or Hub id for kind causal_lm, got null"),
        ({"kind": "vdm", "model": "x"}, 'model: must be null for kind vdm, got "x"; it is for causal_lm'),
        ({"kind": "edd", "input_norms": True}, "input_norms: must be false .*; it is for eagle"),
        ({"kind": "vdm", "anchor": True}, "anchor: must be false for kind vdm, got true; it is for edd"),
        ({"kind": "eagle", "lora_rank": 4}, "lora_rank: must be null for kind eagle, got 4"),
        ({"kind": "causal_lm", "model": "x", "lora_rank": 0}, "lora_rank: must be >= 1 and <= 65536, got 0"),
        ({"kind": "medusa", "kv_heads": 2}, "kv_heads: must be null .*; it is for edd, vdm, eagle, leave"),
        ({"kv_heads": 2, "init": -1}, "kv_heads: .* leave out one of the two"),
        ({"intermediate_size": 9, "init": -1}, "intermediate_size: .* leave out one of the two"),
        (
            {"kind": "medusa", "intermediate_size": 9},
            "intermediate_size: must be null .*; it is for edd, vdm",
        ),
        ({"kind": "eagel"}, "kind: must be one of edd, vdm, .*, got eagel"),
    ],
)
def test_settings_that_no_drafter_has_are_refused(settings, words):
    with pytest.raises(UserError, match=f"^drafter.{words}"):
        DrafterConfig(**settings).check()


@pytest.mark.parametrize(("kind", "anchor"), [*((kind, False) for kind in NATIVE), ("edd", True)])
@torch.no_grad()
def test_rows_come_and_go(kind, anchor, make_target, make_drafter):
    """A row that takes another's place drafts what it drafts alone, and so does one that stays."""
    target = make_target("llama")
    drafter = make_drafter(target, kind=kind, anchor=anchor)
    ids = torch.randint(3, 512, (3, 6), generator=torch.Generator().manual_seed(2))
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped
    counts = torch.tensor([6, 4, 1])
    roots = torch.tensor([20, 21, 22])

    def first(state, rows):
        tree = TokenTree.root_only(roots[rows])
        return drafter.expand(state, tree, torch.zeros(len(rows), 1, dtype=torch.long))[:, 0]

    def alone(row):
        state = drafter.new_state(1, 20)
        n = int(counts[row])
        drafter.update(state, ids[row : row + 1, :n], tapped[row : row + 1, :n], counts[row : row + 1])
        return state

    state = drafter.new_state(2, 20)
    drafter.update(state, ids[:2], tapped[:2], counts[:2])
    for row in (0, 1):
        found = first(state, [0, 1])[row]
        torch.testing.assert_close(found, first(alone(row), [row])[0], atol=1e-5, rtol=1e-5)
    state = drafter.append_rows(drafter.select_rows(state, torch.tensor([1])), alone(2))
    for row, place in ((1, 0), (2, 1)):
        found = first(state, [1, 2])[place]
        torch.testing.assert_close(found, first(alone(row), [row])[0], atol=1e-5, rtol=1e-5)
    turned = drafter.select_rows(state, torch.tensor([1, 0]))
    kept = drafter.select_rows(turned, torch.tensor([1]))
    torch.testing.assert_close(first(kept, [1]), first(alone(1), [1]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "settings", [{"kind": "edd"}, {"kind": "edd", "anchor": True}, {"kind": "vdm"}, {"kind": "eagle"}]
)
def test_pruning_keeps_the_keys_of_the_nodes_that_stay(settings, native, make_target, make_drafter):
    """The root's slot gets its verified state, and the nodes that stay are right after it."""
    target = make_target("llama")
    drafter = make_drafter(target, **settings)
    if native:
        drafter.pack()
    width = len(drafter.config.tapped_blocks) * target.hidden_size if drafter.config.tapped_blocks else 0
    text, tapped = torch.randint(3, 512, (1, 6)), torch.randn(1, 7, width)
    state, fresh = drafter.new_state(1, 32), drafter.new_state(1, 32)
    drafter.update(state, text, tapped[:, :6], torch.tensor([6]))
    root = torch.tensor([9])
    tree = TokenTree.root_only(root)
    drafter.expand(state, tree, torch.tensor([[0]]))
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[4, 5]]), torch.zeros(1, 2))
    drafter.expand(state, tree, torch.tensor([[1, 2]]))
    tree = tree.append(torch.tensor([[1, 2, 2]]), torch.tensor([[6, 7, 8]]), torch.zeros(1, 3))
    drafter.expand(state, tree, torch.tensor([[3, 4, 5]]))
    start, before = int(state.lengths), state.kv.clone()
    outputs = state.carried["outputs"].clone() if "outputs" in state.carried else None
    keep = torch.tensor([2, 4, 5])  # what is below the root's second child
    drafter.prune(state, root, tapped[:, 6], keep)
    drafter.update(fresh, text, tapped[:, :6], torch.tensor([6]))
    drafter.update(fresh, root[None], tapped[:, 6:], torch.tensor([1]))
    assert torch.equal(state.lengths, fresh.lengths) and int(state.lengths) == start + 1
    assert torch.equal(state.kv[..., : start + 1, :], fresh.kv[..., : start + 1, :])
    assert torch.equal(state.kv[..., start + 1 : start + 4, :], before[..., start + keep, :])
    if outputs is not None:
        assert torch.equal(state.carried["outputs"], outputs[:, keep])
    assert (outputs is not None) == (settings["kind"] == "eagle")
