"""Forwards through TreeCache against plain ones, by logits: ragged rows, trees, committed paths, windows."""

import gc
import weakref

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drafttrain.target_lm import cache as cache_module
from drafttrain.target_lm.cache import KvCache, TreeCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

SIZES = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.2,
    tie_word_embeddings=False,
    sliding_window=2,  # shorter than the longest path of the tree, whose slots are not its positions
)
LENGTHS = (11, 4, 17)
# the deepest path is 0 2 5 6; rows 1 and 2 keep a part of the tree
PARENTS = (-1, 0, 0, 1, 2, 2, 5)
KEPT = ((0, 1, 2, 3, 4, 5, 6), (0, 2, 5), (0,))


@pytest.fixture(params=["llama", "qwen2", "mistral-window", "qwen3-window"])
def any_target(request) -> FrozenTarget:
    if request.param == "mistral-window":
        model = MistralForCausalLM(MistralConfig(**SIZES))
    elif request.param == "qwen3-window":
        layers = ["full_attention", "sliding_attention", "full_attention"]
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=True, layer_types=layers))
    else:
        model = request.getfixturevalue(f"tiny_{request.param}")[0]
    return FrozenTarget(model, None, request.param)


def ragged_trees() -> TokenTree:
    """Three trees of 7, 3 and 1 nodes with random tokens."""
    parents = torch.tensor(PARENTS).expand(3, -1)
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 3]).expand(3, -1)
    zeros = torch.zeros(3, 7)
    tree = TokenTree(torch.randint(512, (3, 7)), parents, depths, zeros, zeros, torch.full((3,), 7))
    return tree.select(torch.tensor([[i in kept for i in range(7)] for kept in KEPT]))


def check(target: FrozenTarget, cache: TreeCache, tree: TokenTree, texts: list[list[int]]) -> None:
    """Run trees after committed texts; a node's logits must be those of a plain forward over its path."""
    states = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
    logits = target.head(states.final)
    for row, text in enumerate(texts):
        for node in range(int(tree.sizes[row])):
            path = tree.ancestors()[row, node].nonzero().flatten()
            ids = torch.tensor([text + tree.tokens[row, path].tolist()])
            plain = target.model(input_ids=ids).logits[0, -1]
            torch.testing.assert_close(logits[row, node], plain, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("native", [True, False])
@torch.no_grad()
def test_ragged_trees_and_committed_paths(any_target, native, monkeypatch):
    if not native:  # as on a GPU
        monkeypatch.setattr(cache_module, "is_native", lambda like: False)
    texts = [torch.randint(512, (n,)).tolist() for n in LENGTHS]
    tokens = torch.zeros(3, max(LENGTHS), dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    cache = any_target.new_cache(3, 40)
    order = torch.arange(max(LENGTHS))
    any_target.forward(cache, tokens, order, torch.ones(len(order), len(order), dtype=torch.bool).tril())
    cache.commit(order.expand(3, -1), torch.tensor(LENGTHS))
    # old paths are committed while new trees follow: slots that were left behind must not be seen again
    for path, counts in (
        ([[0, 2, 5], [0, 1, 2], [0, 0, 0]], [3, 2, 1]),
        ([[0, 1, 3], [0, 1, 2], [0, 0, 0]], [3, 0, 1]),
    ):
        tree = ragged_trees()
        check(any_target, cache, tree, texts)
        cache.commit(torch.tensor(path), torch.tensor(counts))
        for row, count in enumerate(counts):
            texts[row] = texts[row] + tree.tokens[row, path[row][:count]].tolist()
        assert cache.lengths.tolist() == [len(text) for text in texts]
    check(any_target, cache, ragged_trees(), texts)


@pytest.mark.parametrize("native", [True, False])
@torch.no_grad()
def test_a_single_row_commits_paths_too(any_target, native, monkeypatch):
    if not native:  # as on a GPU
        monkeypatch.setattr(cache_module, "is_native", lambda like: False)
    text = torch.randint(512, (9,)).tolist()
    cache = any_target.new_cache(1, 30)
    any_target.forward(
        cache, torch.tensor([text]), torch.arange(9), torch.ones(9, 9, dtype=torch.bool).tril()
    )
    cache.commit(torch.arange(9)[None], torch.tensor([9]))
    zeros = torch.zeros(1, 7)
    depths = torch.tensor([[0, 1, 1, 2, 2, 2, 3]])
    tree = TokenTree(
        torch.randint(512, (1, 7)), torch.tensor([PARENTS]), depths, zeros, zeros, torch.tensor([7])
    )
    check(any_target, cache, tree, [text])
    cache.commit(torch.tensor([[0, 2, 5]]), torch.tensor([3]))
    check(any_target, cache, tree, [text + tree.tokens[0, [0, 2, 5]].tolist()])


@torch.no_grad()
def test_reserve_keeps_what_is_committed(llama):
    text = torch.randint(512, (6,)).tolist()
    cache = llama.new_cache(1, 8)
    llama.forward(cache, torch.tensor([text]), torch.arange(6), torch.ones(6, 6, dtype=torch.bool).tril())
    cache.commit(torch.arange(6)[None], torch.tensor([6]))
    cache.reserve(2)
    assert cache.max_len == 8  # nothing to do
    tree = TokenTree.root_only(torch.tensor([5]))
    for i in range(6):
        tree = tree.append(torch.tensor([[i]]), torch.tensor([[i]]), torch.zeros(1, 1))
    cache.reserve(tree.width)
    check(llama, cache, tree, [text])
    assert cache.kv.shape[4] == cache.max_len >= 13


def test_a_cache_is_freed_with_its_last_reference(llama):
    """Some megabytes for each text would else wait for the garbage collector, which counts objects alone."""
    cache = llama.new_cache(1, 8)
    llama.forward(cache, torch.tensor([[1, 2]]), torch.arange(2), torch.ones(2, 2, dtype=torch.bool).tril())
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_a_full_cache_is_an_error(llama):
    cache = llama.new_cache(1, 4)
    with pytest.raises(UserError, match="max_len: must be at least 5, got 4"):
        cache.open(5)


def filled_cache(lengths: list[int], first: float, max_len: int = 8) -> KvCache:
    """A cache of one layer whose row number b holds first + b in its verified slots, and NaN after them."""
    cache = KvCache(1, len(lengths), max_len, torch.float32, "cpu")
    cache.allocate(1, 2)
    cache.lengths = torch.tensor(lengths)
    for row, n in enumerate(lengths):
        cache.kv[:, :, row] = first + row
        cache.kv[:, :, row, :, n:] = torch.nan
    return cache


def contents(cache: KvCache) -> list[list[float]]:
    assert cache.kv.shape[2] == cache.batch == len(cache.lengths) == len(cache.rows)
    rows = [cache.kv[:, :, row, :, :n].flatten().tolist() for row, n in enumerate(cache.lengths.tolist())]
    assert all(len(set(values)) == 1 for values in rows)
    return [(values[0], len(values) // 4) for values in rows]


def test_rows_are_selected_and_appended():
    """Dropped, reordered, forked and joined with others, in any order; nothing else changes."""
    cache = filled_cache([3, 5, 2, 4], 10.0)
    cache.select_rows(torch.tensor([0, 3, 2]))
    assert contents(cache) == [(10, 3), (13, 4), (12, 2)]
    cache.append_rows(filled_cache([1, 6], 20.0, max_len=6))
    assert contents(cache) == [(10, 3), (13, 4), (12, 2), (20, 1), (21, 6)]
    cache.select_rows(torch.tensor([4, 0]))
    cache.append_rows(filled_cache([2], 30.0, max_len=20))
    assert contents(cache) == [(21, 6), (10, 3), (30, 2)]
    cache.select_rows(torch.tensor([1, 1, 0, 2, 1, 0]))
    assert contents(cache) == [(10, 3), (10, 3), (21, 6), (30, 2), (10, 3), (21, 6)]
    cache.kv[:, :, 1, :, :3] = 99.0
    assert contents(cache)[0] == contents(cache)[4] == (10, 3)  # independent
    cache.reserve(5)
    cache.append_rows(filled_cache([19], 40.0, max_len=19))  # longer than there is room for
    assert contents(cache)[2:] == [(21, 6), (30, 2), (10, 3), (21, 6), (40, 19)]


def test_rows_are_dropped_and_appended_without_copying_the_others():
    cache = filled_cache([3, 5, 2], 10.0)
    cache.reserve_rows(8)
    address = cache.kv.data_ptr()
    cache.select_rows(torch.tensor([0, 2]))
    for i in range(6):
        cache.append_rows(filled_cache([1], 20.0 + i))
    assert cache.kv.data_ptr() == address and cache.batch == 8
    assert contents(cache)[:3] == [(10, 3), (12, 2), (20, 1)]


@pytest.mark.parametrize("keep", [[], [1], [3], [1, 2, 4], [2, 5], [1, 2, 3, 4, 5]])
def test_the_root_is_committed_and_some_of_its_tree_stay_in_flight(keep):
    cache = filled_cache([3], 10.0, max_len=12)
    cache.kv[..., 3:9, :] = torch.arange(6.0)[:, None]  # the root and five nodes below it
    cache.advance(torch.tensor(keep, dtype=torch.long))
    assert cache.lengths.tolist() == [4]
    slots = [*[10.0] * 3, 0.0, *map(float, keep)]
    assert (
        cache.kv[0, 0, 0, 0, : len(slots), 1].tolist()
        == cache.kv[0, 1, 0, 0, : len(slots), 0].tolist()
        == slots
    )


def test_cleared_rows_hold_no_nan():
    cache = filled_cache([3, 5, 2], 10.0)
    cache.clear_rows(torch.tensor([False, True, False]))
    assert not cache.kv[:, :, 1].any()
    assert cache.kv[:, :, 0].isnan().any() and contents(cache)[2] == (12, 2)


def test_new_slots_are_zeros_and_those_in_use_are_kept():
    """In a new cache, a copy with more room, and one that has grown."""
    cache = KvCache(2, 1, 5, torch.float32, "cpu")
    cache.allocate(3, 4)
    assert cache.kv.shape == (2, 2, 1, 3, 5, 4) and not cache.kv.any()
    cache.kv.copy_(torch.randn(cache.kv.shape))
    cache.lengths = torch.tensor([4])
    twin = cache.copy(3, 9)
    assert twin.kv.shape[4] == 9 and twin.lengths.tolist() == [3]
    assert torch.equal(twin.kv[..., :3, :], cache.kv[..., :3, :]) and not twin.kv[..., 3:, :].any()
    before = cache.kv.clone()
    assert cache.reserve(3) == 7 and cache.max_len == 10
    assert torch.equal(cache.kv[..., :5, :], before) and not cache.kv[..., 5:, :].any()
    twin.kv.fill_(1.0)
    assert torch.equal(cache.kv[..., :5, :], before)
