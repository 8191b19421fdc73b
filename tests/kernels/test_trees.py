"""Native arithmetic on trees against torch's operators and slow references; tests/trees and tests/inference
have more of it."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.layered import LayeredDrafter
from drafttrain.drafters.new import new_drafter
from drafttrain.drafters.vdm import VdmModel
from drafttrain.kernels import trees
from drafttrain.kernels.drafting import Inputs
from drafttrain.kernels.growth import grow_timed
from drafttrain.kernels.step import draft_top
from drafttrain.target_lm.cache import KvCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.costs import AcceptanceCurve, CostCurve
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.operators import append_layer
from drafttrain.trees.pct import PctPolicy
from drafttrain.trees.sampled import SampledTreePolicy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.trees.tree import TokenTree
from tests.kernels.conftest import use, variants


@pytest.fixture(params=variants(), scope="module")
def kernels(request):
    """As for other files, but for all tests of one instruction set together: packing takes time."""
    with pytest.MonkeyPatch.context() as patch:
        yield from use(request.param, patch)


def random_trees(batch: int, layers: int) -> TokenTree:
    tree = TokenTree.root_only(torch.randint(100, (batch,)))
    for depth in range(layers):
        begin = int((tree.depths[0] < depth).sum())
        parents = torch.randint(begin, tree.width, (batch, 3 + depth)).sort(1).values
        tree = tree.append(parents, torch.randint(100, parents.shape), -torch.rand(parents.shape))
    return tree


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("entropies", [True, False])
def test_a_layer_is_appended_as_torch_does(kernels, batch, entropies):
    for layers in range(4):
        fields = random_trees(batch, layers).fields()
        above = torch.randint(fields[0].shape[1], (batch, 5))
        layer = above, torch.randint(100, (batch, 5)), -torch.rand(batch, 5)
        entropy = torch.rand(batch, 5) if entropies else None
        found = trees.append_layer(fields, *layer, entropy)
        for ours, torchs in zip(found, append_layer(fields, *layer, entropy), strict=True):
            assert ours.dtype == torchs.dtype
            torch.testing.assert_close(ours, torchs, rtol=0, atol=0, equal_nan=True)


def test_any_layout_is_read(kernels):
    fields = random_trees(2, 3).fields()
    strided = [one.repeat_interleave(2, 1)[:, ::2] for one in fields]
    nodes = torch.tensor([[0, 1], [0, 3]])
    for ours, same in zip(trees.take_nodes(fields, nodes), trees.take_nodes(strided, nodes)):
        torch.testing.assert_close(ours, same, rtol=0, atol=0, equal_nan=True)


def test_other_dtypes_of_numbers_are_converted(kernels):
    tree = TokenTree.root_only(torch.tensor([3], dtype=torch.int32))
    layer = [torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[5, 9]], dtype=torch.int32)]
    scores = [torch.tensor([[-1.0, -2.0]], dtype=torch.double), torch.tensor([[1.0, 2.0]]).double()]
    grown = tree.append(*layer, *scores)
    assert grown.tokens.tolist() == [[3, 5, 9]] and grown.parents.tolist() == [[-1, 0, 0]]
    assert grown.joint_log_probs().tolist() == [[0, -1, -2]] and grown.entropies.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("nodes", [[0, 3], [1, 2], [2]])
def test_nodes_without_their_parents_are_refused(kernels, nodes):
    tree = TokenTree.root_only(torch.tensor([1]))
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[5, 6]]), torch.zeros(1, 2))
    tree = tree.append(torch.tensor([[2]]), torch.tensor([[7]]), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="none without its parent"):
        tree.take(torch.tensor([nodes]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepted_slots_move_to_the_front(kernels, dtype):
    cache = KvCache(3, 4, 40, dtype, "cpu")
    cache.allocate(2, 5)
    cache.reserve_rows(6)
    cache.kv.copy_(torch.randn(cache.kv.shape))
    cache.lengths = torch.tensor([7, 0, 20, 3])
    path = torch.tensor([[0, 1, 4, 9], [0, 2, 3, 5], [0, 1, 2, 3], [0, 6, 1, 2]])
    counts = torch.tensor([4, 3, 4, 2])
    expected = cache.kv.clone()
    for row, (start, count) in enumerate(zip(cache.lengths.tolist(), counts.tolist())):
        for place, node in enumerate(path[row, :count].tolist()):
            expected[:, :, row, :, start + place] = cache.kv[:, :, row, :, start + node]
    cache.commit(path, counts)
    assert cache.lengths.tolist() == [11, 3, 24, 5]
    assert torch.equal(cache.kv, expected)


LENGTHS = [5, 9, 2]  # verified tokens of the drafter's sequences


DRAFTERS = {
    "edd": DrafterConfig(tapped_blocks=[-2]),
    "anchor": DrafterConfig(tapped_blocks=[-2], anchor=True),
    "eagle": DrafterConfig(kind="eagle"),
    "norms": DrafterConfig(kind="eagle", input_norms=True),
}


@pytest.fixture(
    params=[f"float32-{kind}" for kind in DRAFTERS] + ["bfloat16-edd", "bfloat16-anchor", "bfloat16-eagle"],
    scope="module",
)
def drafter(request, kernels, tiny_llama) -> LayeredDrafter:
    """A packed drafter over every second token; tests must not change it."""
    dtype, kind = request.param.split("-")
    target = FrozenTarget(copy.deepcopy(tiny_llama[0]).to(getattr(torch, dtype)), None, "llama")
    drafter = new_drafter(target, DRAFTERS[kind], torch.arange(100) * 2).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in drafter.named_parameters():  # joins as after training: no two inputs are alike
        if name.split(".")[0] in ("embed_norm", "anchor_norm", "state_norm", "anchor_fc"):
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    drafter.to(getattr(torch, dtype)).attach(target).pack()
    assert drafter.native is not None
    return drafter


def new_state(drafter: LayeredDrafter, kind: str):
    parts = []
    for row, length in enumerate(LENGTHS):
        tokens = torch.full((1, length), row)
        tapped = torch.full((1, length, drafter.config.hidden_size), 0.1 * row + 0.1)
        tapped[..., : 16 * row] *= -1  # their norms differ, too
        parts.append(drafter.new_state(1, 40))
        drafter.update(parts[-1], tokens, tapped, torch.tensor([length]))
    if kind == "joined caches":
        return drafter.join(parts)
    whole = parts[0]
    for part in parts[1:] if kind == "one cache" else ():
        whole = drafter.append_rows(whole, part)
    return whole


def grown_both_ways(
    drafter: LayeredDrafter, policy: TreePolicy, kind: str, root: torch.Tensor
) -> tuple[TokenTree, TokenTree]:
    """Trees that a policy grows in one native call and layer by layer, which have to be the same."""
    found = policy.grow(drafter, new_state(drafter, kind), root)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LayeredDrafter, "grow_natively")
        expected = policy.grow(drafter, new_state(drafter, kind), root)
    for ours, theirs in zip(found.fields(), expected.fields(), strict=True):
        error = tolerance(drafter) if ours.is_floating_point() else 0
        torch.testing.assert_close(ours, theirs, rtol=error, atol=error, equal_nan=True)
    return found, expected


def tolerance(drafter: LayeredDrafter) -> float:
    """The last bits of torch's norm differ, by which EAGLE's single steps join states and tokens."""
    return 1e-5 if getattr(drafter.config, "input_norms", False) else 0


@pytest.mark.parametrize(
    "drafter",
    [f"{dtype}-{kind}" for dtype in ("float32", "bfloat16") for kind in ("edd", "anchor")],
    indirect=True,
)
@pytest.mark.parametrize("kind", ["one cache", "joined caches"])
def test_a_drafting_step_is_that_of_the_layers_and_the_head(drafter, kind):
    """Over trees of several layers and sequences of several lengths; bit by bit, but for anchors, as torch's
    norm has other last bits."""

    def grown(top) -> TokenTree:
        tree, own = TokenTree.root_only(torch.tensor([3, 8, 5])), new_state(drafter, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayeredDrafter, "top", top)
            for frontier in ([[0]], [[1, 2]], [[3, 5, 8]]):
                tree = add_children(drafter, own, tree, torch.tensor(frontier * 3), None, 3)
        return tree

    def in_parts(self, state, tree, frontier, k):
        return self.lm_head.top_log_probs(self._read_frontier(state, tree, frontier), k)

    found, expected = grown(LayeredDrafter.top), grown(in_parts)
    assert torch.equal(found.tokens, expected.tokens)
    joins = getattr(drafter.config, "anchor", False)
    error = 0 if not joins else 1e-2 if drafter.lm_head.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=error, atol=error)
    assert len(found.tokens[0].unique()) > 3
    root = TokenTree.root_only(torch.tensor([3, -1, 5]))
    for k, tree, error in ((0, found, ValueError), (3, root, IndexError)):
        with pytest.raises(error):
            drafter.top(new_state(drafter, kind), tree, torch.zeros(3, 1, dtype=torch.long), k)
    stock = Drafter.top(
        drafter,
        new_state(drafter, kind),
        TokenTree.root_only(torch.tensor([3, 8, 5])),
        torch.zeros(3, 1, dtype=torch.long),
        3,
    )
    torch.testing.assert_close(found.log_probs[:, 1:4], stock[0][:, 0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["one row", "one cache", "joined caches"])
@pytest.mark.parametrize(
    "promise", [None, AcceptanceCurve((-9.0, -4.0, -1.0, 0.0), (0.02, 0.1, 0.6, 0.9))], ids=["joint", "curve"]
)
def test_growth_is_that_of_the_policy(drafter, kind, promise):
    """The trees that `timed` grows in one native call are those that it grows layer by layer."""
    draft, verify = CostCurve((1, 4, 9), (1.0, 1.5, 3.0)), CostCurve((2, 6, 30), (10.0, 11.0, 24.0))
    root = torch.tensor([3, 8, 5] if kind != "one row" else [7])
    sizes = set()
    for rate in (0.001, 0.02, 0.1, 0.3, 5.0):
        for width, frontier, max_depth in ((4, 8, 10), (3, 2, 6), (1, 1, 4), (2, 9, 0)):
            limits = {"width": width, "frontier": frontier, "max_depth": max_depth}
            policy = TimedPolicy(draft, verify, rate, (0.9, 0.7), promise, follow=0.0, **limits)
            found, expected = grown_both_ways(drafter, policy, kind, root)
            assert torch.equal(found.sizes, expected.sizes)
            sizes.add(found.width)
    assert len(sizes) > 4


@pytest.mark.parametrize("kind", ["one row", "one cache", "joined caches"])
@pytest.mark.parametrize(
    "policy",
    [
        *(Eagle2Policy(*limits) for limits in ((3, 4, 8), (1, 5, None), (8, 3, 200), (4, 0, 9), (4, 3, 0))),
        *(PctPolicy(threshold=0.02, min_confidence=least, width=5) for least in (0.0, 0.01, 0.05)),
        PctPolicy(threshold=1.0, max_depth=3),
        PctPolicy(threshold=1e-4, min_confidence=0.0, width=3, max_depth=4),
    ],
    ids=str,
)
def test_the_best_nodes_are_those_of_the_policy(drafter, kind, policy):
    root = torch.tensor([3, 8, 5] if kind != "one row" else [7])
    grown_both_ways(drafter, policy, kind, root)


@pytest.mark.parametrize("kind", ["one row", "one cache", "joined caches"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"candidates": 5}, {"threshold": 0.01}, {"threshold": 0.02}],
    ids=str,
)
def test_drawn_trees_are_those_of_the_policy(drafter, kind, settings):
    """The trees that are drawn in one native call are those that are drawn layer by layer."""
    root, different, uneven = torch.tensor([3, 8, 5] if kind != "one row" else [7]), set(), 0
    for k_config in ((1, 1, 1), (4, 2, 1), (3, 3)):
        policy = SampledTreePolicy(k_config, **settings)
        for seed in range(4):
            policy.set_active([seed + row for row in range(len(root))], [10 * seed] * len(root))
            found, expected = grown_both_ways(drafter, policy, kind, root)
            drawn = expected.drawn_from.probs > 0
            assert torch.equal(found.drawn_from.ids[drawn], expected.drawn_from.ids[drawn])
            error = max(1e-6, 10 * tolerance(drafter))
            torch.testing.assert_close(found.drawn_from.probs, expected.drawn_from.probs, rtol=error, atol=0)
            different.add(tuple(found.tokens.flatten().tolist()))
            uneven += len(set(found.sizes.tolist())) > 1
    assert len(different) > 6
    # rows of a layer that expand fewer nodes than others are filled up
    assert bool(uneven) == ("threshold" in settings and len(root) > 1)


def test_what_cannot_be_grown_natively_grows_layer_by_layer(drafter, monkeypatch):
    native, calls = LayeredDrafter.grow_natively, []

    def noted(*given):
        calls.append(native(*given))
        return calls[-1]

    monkeypatch.setattr(LayeredDrafter, "grow_natively", noted)
    curve, root = CostCurve((1,), (1.0,)), torch.tensor([7])
    for policy, is_native in (
        (TimedPolicy(curve, curve, 1e-6, width=100, max_depth=2), True),
        (TimedPolicy(curve, curve, 1e-6, width=128, max_depth=2, frontier=2), False),  # 100 tokens in all
        (Eagle2Policy(10, 3, None), True),
        (Eagle2Policy(101, 1, None), False),
        (PctPolicy(threshold=1e-9, width=100, max_depth=1, min_confidence=0.0), True),
        (SampledTreePolicy((100, 1)), True),
        (SampledTreePolicy((100, 1), threshold=1e-9), True),
    ):
        tree = policy.grow(drafter, new_state(drafter, "one row"), root)
        assert tree.width > 100 and [found is not None for found in calls] == [True] * is_native
        calls.clear()
    for policy in TimedPolicy(curve, curve, 1e-6), SampledTreePolicy((1, 1)):
        with pytest.raises(IndexError, match="tokens: must be in"):
            policy.grow(drafter, new_state(drafter, "one row"), torch.tensor([-1]))
    falling, cheap = AcceptanceCurve((-9.0, 0.0), (0.9, 0.1)), CostCurve((1,), (1e-6,))
    broken = TimedPolicy(cheap, CostCurve((1, 9), (1.0, 9.0)), 0.7, (1.0,), falling)
    with pytest.raises(ValueError, match="more probable than its parent"):
        broken.grow(drafter, new_state(drafter, "one row"), root)
    large = TimedPolicy(curve, curve, 1e-6, width=100, frontier=100, max_depth=2)  # 10,101 nodes
    assert native(drafter, grow_timed, new_state(drafter, "one row"), root, large._timing, 1e-6) is None
    assert native(SimpleNamespace(native=None), None, None) is None


def test_drafters_that_keep_outputs_in_torch_do_not_grow_natively():
    class Keeping(VdmModel):
        def keep_outputs(self, *given):
            pass

    assert LayeredDrafter.native_inputs(Keeping.__new__(Keeping), None) is None


def test_children_are_as_many_as_there_are_tokens_at_most(drafter):
    with pytest.raises(ValueError, match="k_config: must be at most 100, the tokens drawn from, got 101"):
        SampledTreePolicy((101,)).grow(drafter, new_state(drafter, "one row"), torch.tensor([7]))


@pytest.mark.parametrize("drafter", ["float32-eagle"], indirect=True)
def test_a_step_alone_follows_no_parents(drafter):
    state, tree = new_state(drafter, "one row"), TokenTree.root_only(torch.tensor([7]))
    nodes, inputs = (tree.tokens, tree.depths, tree.ancestors()), Inputs(*drafter.native_inputs(state))
    with pytest.raises(ValueError, match="inputs: must be without own_states"):
        draft_top(drafter.native, drafter.lm_head, inputs, state, nodes, torch.zeros(1, 1).long(), 3)


def test_seeds_are_as_many_as_trees(drafter):
    policy, state = SampledTreePolicy((2, 1)), new_state(drafter, "one cache")
    alike = policy.grow(drafter, state, torch.tensor([7, 7, 7]))  # of the one seed that a policy begins with
    assert alike.width == 5
    policy.set_active([0, 1], [3, 3])
    with pytest.raises(ValueError, match="seeds: must be one for each of 3 trees, got 2"):
        policy.grow(drafter, state, torch.tensor([7, 7, 7]))


def test_nothing_is_drawn_whose_probability_is_too_small_for_fp32(drafter):
    """So at a low temperature all but the best token: acceptance would compare it with a coarse number."""
    root = torch.tensor([7])
    policy = SampledTreePolicy((3,), temperature=1e-4)
    found = policy.grow(drafter, new_state(drafter, "one row"), root)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LayeredDrafter, "grow_natively")
        expected = policy.grow(drafter, new_state(drafter, "one row"), root)
    probs = found.drawn_from.probs[0, 0]
    assert found.tokens[0, 1] == expected.tokens[0, 1]
    torch.testing.assert_close(probs, expected.drawn_from.probs[0, 0], rtol=1e-6, atol=0)
    assert ((probs == 0) | (probs >= torch.finfo(torch.float).tiny)).all() and (probs == 0).any()


def test_caches_grow_where_drafts_need_it_alone(drafter):
    """Trees of few nodes leave a cache as it was; large ones are the same in a cache that had room."""
    curve, root = CostCurve((1,), (1.0,)), torch.tensor([7])
    wide = TimedPolicy(curve, curve, 1e-6, max_depth=4)
    for policy, grows in ((TimedPolicy(curve, curve, 0.6), False), (wide, True)):
        state, roomy = new_state(drafter, "one row"), new_state(drafter, "one row")
        roomy.reserve(1000)
        found = policy.grow(drafter, state, root)
        assert torch.equal(found.tokens, policy.grow(drafter, roomy, root).tokens)
        assert (state.max_len > 40) == grows == (found.width > 35)


def test_policies_can_be_copied(drafter):
    policy = TimedPolicy(CostCurve((1, 9), (1.0, 2.0)), CostCurve((1, 9), (1.0, 3.0)), 0.2)
    expected = policy.grow(drafter, new_state(drafter, "one row"), torch.tensor([7]))
    for twin in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        found = twin.grow(drafter, new_state(drafter, "one row"), torch.tensor([7]))
        assert twin == policy and torch.equal(found.tokens, expected.tokens)
