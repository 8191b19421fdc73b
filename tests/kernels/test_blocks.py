"""Native blocks against the stock modules, over random trees; a node's bits against those it has alone."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drafttrain.target_lm import native
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree

SIZES = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=90,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    tie_word_embeddings=False,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=2,
)
KINDS = ["full_attention", "sliding_attention", "full_attention"]
MODELS = {
    "llama": {},
    "llama-biases": dict(attention_bias=True, mlp_bias=True),
    "llama-odd": dict(hidden_size=60, num_attention_heads=3, num_key_value_heads=1, head_dim=22),
    "llama-wide": dict(head_dim=64, tie_word_embeddings=True),
    "llama-widest": dict(head_dim=128),
    "llama-llama3": dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),
    "llama-yarn": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32
        )
    ),
    "mistral": dict(head_dim=16, sliding_window=None),
    "mistral-window": dict(head_dim=16, sliding_window=6),
    "qwen2": {},
    "qwen3": dict(head_dim=32),
    "qwen3-window": dict(head_dim=16, use_sliding_window=True, sliding_window=6, layer_types=KINDS),
}


def tiny(name: str, dtype: torch.dtype = torch.float32, **more) -> tuple[FrozenTarget, FrozenTarget]:
    """A random target with native blocks, and the same with stock ones in fp32."""
    config = CONFIG_MAPPING[name.split("-")[0]](**SIZES | MODELS.get(name, {}) | more)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0: losing either would go unnoticed
                parameter += 0.2 * torch.randn_like(parameter)
    stock = FrozenTarget(copy.deepcopy(model).float(), None, "stock", tapped_blocks=[0, -1, 3])
    target = FrozenTarget(model, None, name, tapped_blocks=[0, -1, 3])
    target.pack()
    return target, stock


def random_trees(sizes: list[int], generator: torch.Generator) -> TokenTree:
    """Trees of these sizes with random parents, in breadth-first order."""
    tokens, parents = [], []
    for size in sizes:
        above, depths = [-1], [0]
        while len(above) < size:
            parent = int(torch.randint(len(above), (), generator=generator))
            if depths[parent] + 1 >= depths[-1]:
                above.append(parent)
                depths.append(depths[parent] + 1)
        parents.append(above)
        tokens.append(torch.randint(160, (size,), generator=generator).tolist())
    return tree_of_lists(tokens, parents, torch.device("cpu"))


def decode(target: FrozenTarget, tree: TokenTree, prefixes: list[list[int]]):
    """States of prefixes, of trees after them, and of a step after committing each tree's deepest path."""
    cache = target.new_cache(len(prefixes), 64)
    width = max(map(len, prefixes))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in prefixes])
    order = torch.arange(width)
    first = target.forward(cache, tokens, order, torch.ones(width, width).tril().bool())
    cache.commit(order.expand(len(prefixes), width), torch.tensor([len(row) for row in prefixes]))
    states = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
    leaf = tree.depths.argmax(1)
    seen = tree.ancestors()[torch.arange(len(leaf)), leaf]  # [B, n]
    paths = (~seen).byte().argsort(dim=1, stable=True)[:, : int(tree.depths.max()) + 1]
    cache.commit(paths, tree.depths.amax(1) + 1)
    root = TokenTree.root_only(torch.full_like(leaf, 7))
    return first, states, target.forward(cache, root.tokens, root.depths, root.ancestors())


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_stock_modules_compute(kernels, name):
    target, stock = tiny(name)
    assert target.native is not None
    generator = torch.Generator().manual_seed(1)
    tree = random_trees([7, 12, 1], generator)
    prefixes = [torch.randint(160, (n,), generator=generator).tolist() for n in (9, 4, 17)]
    known = torch.arange(17) < torch.tensor([[9], [4], [17]])
    valid = [known, tree.valid, torch.ones(3, 1, dtype=torch.bool)]
    for mine, other, real in zip(decode(target, tree, prefixes), decode(stock, tree, prefixes), valid):
        for a, b in ((mine.final, other.final), (mine.tapped, other.tapped)):
            assert (a - b)[real].abs().max() < 2e-4 * b[real].std()
        assert (target.head(mine.final) - stock.head(other.final))[real].abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["llama-odd", "llama-wide", "llama-widest", "qwen3-window", "mistral-window"]
)
def test_a_node_has_the_bits_of_plain_decoding(kernels, name, dtype):
    target, _ = tiny(name, dtype)
    generator = torch.Generator().manual_seed(2)
    for sizes in ([1], [2], [9], [40], [3, 14, 1, 8]):
        tree = random_trees(sizes, generator)
        prefixes = [torch.randint(160, (5 + 3 * i,), generator=generator).tolist() for i in range(len(sizes))]
        _, states, _ = decode(target, tree, prefixes)
        logits = target.head(states.final)
        for row, size in enumerate(sizes):
            for node in range(size):
                path = tree.ancestors()[row, node].nonzero()[:, 0]
                wanted = plain(target, prefixes[row] + tree.tokens[row, path].tolist())
                assert torch.equal(states.final[row, node], wanted)
                assert torch.equal(logits[row, node], target.head(wanted[None])[0])


def plain(target: FrozenTarget, tokens: list[int]) -> torch.Tensor:
    """State of the last of some tokens, forwarded one at a time, [H]."""
    cache, alone = target.new_cache(1, 64), torch.ones(1, 1, dtype=torch.bool)
    for token in tokens:
        states = target.forward(cache, torch.tensor([[token]]), torch.tensor([0]), alone)
        cache.commit(torch.tensor([[0]]), torch.tensor([1]))
    return states.final[0, 0]


def test_threads_change_no_bit(kernels):
    target, _ = tiny("llama-wide", torch.bfloat16)
    tree, before = random_trees([11, 5], torch.Generator().manual_seed(3)), torch.get_num_threads()
    prefixes = [[3, 4, 5], [6] * 9]
    one = decode(target, tree, prefixes)
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for mine, other in zip(decode(target, tree, prefixes), one):
                assert torch.equal(mine.final, other.final) and torch.equal(mine.tapped, other.tapped)
    finally:
        torch.set_num_threads(before)


def test_fewer_states_than_nodes_are_refused(kernels):
    """They are overwritten, and what is stored after them would be as well."""
    target, _ = tiny("llama")
    cache, n = target.new_cache(1, 16), 3
    target.forward(
        cache, torch.zeros(1, n, dtype=torch.long), torch.arange(n), torch.ones(n, n).tril().bool()
    )
    nodes = cache.nodes(torch.arange(n)[None], torch.arange(n)[None], torch.ones(n, n).tril().bool())
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        target.native(torch.zeros(1, n - 1, 64), nodes, n)


def test_long_prompts_go_in_chunks(kernels):
    target, stock = tiny("qwen2", max_position_embeddings=1024)
    ids = torch.randint(160, (1, 450))
    start = torch.zeros_like(ids)
    start[:, 200:] = 200  # two documents
    mine, other = target.encode(ids, start), stock.encode(ids, start)
    assert (mine.final - other.final).abs().max() < 1e-3
    assert (mine.tapped - other.tapped).abs().max() < 1e-3
    second = target.encode(ids[:, 200:], torch.zeros_like(ids[:, 200:]))
    assert torch.equal(mine.final[:, 200:], second.final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-wide", "mistral-window"])
def test_documents_in_a_row_have_the_bits_of_each_alone(kernels, name, dtype):
    target, _ = tiny(name, dtype, max_position_embeddings=1024)
    ids, start = torch.randint(160, (2, 300)), torch.zeros(2, 300, dtype=torch.long)
    start[0, 150:], start[1, 70:140], start[1, 140:] = 150, 70, 140
    together = target.encode(ids, start)
    for row, begin, end in ((0, 0, 150), (0, 150, 300), (1, 0, 70), (1, 70, 140), (1, 140, 300)):
        part = ids[row : row + 1, begin:end]
        alone = target.encode(part, torch.zeros_like(part))
        assert torch.equal(together.final[row, begin:end], alone.final[0])
    after = decode_after(target, ids[0, :150].tolist(), ids[0, 149:150])
    assert torch.equal(together.final[0, 149], after)


def decode_after(target: FrozenTarget, text: list[int], last: torch.Tensor) -> torch.Tensor:
    """State of a text's last token, decoded by itself after the others."""
    n = len(text) - 1
    cache, order = target.new_cache(1, n + 4), torch.arange(n)
    target.forward(cache, torch.tensor([text[:n]]), order, torch.ones(n, n).tril().bool())
    cache.commit(order[None], torch.tensor([n]))
    itself = torch.ones(1, 1, dtype=torch.bool)
    return target.forward(cache, last[None], torch.zeros(1, dtype=torch.long), itself).final[0, 0]


@pytest.mark.parametrize(
    "head_dim", (16, 22, 32, 40, 64, 80, 96, 128, 144)
)  # whole vectors, and what is left
def test_bf16_products_stay_close(kernels, head_dim):
    target, stock = tiny("llama", torch.bfloat16, head_dim=head_dim)
    ids = torch.randint(160, (1, 30))
    mine, other = (t.head(t.encode(ids, torch.zeros_like(ids)).final) for t in (target, stock))
    assert (mine - other).square().mean().sqrt() < 0.05 * other.std()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", dict(hidden_act="gelu")),
        ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))),
        ("gemma2", dict(head_dim=16, query_pre_attn_scalar=16)),
    ],
)
def test_other_models_keep_the_stock_modules(kernels, name, settings):
    target, stock = tiny(name, **settings)
    assert target.native is None and target.is_packed
    ids = torch.randint(160, (1, 12))
    mine, other = (t.head(t.encode(ids, torch.zeros_like(ids)).final) for t in (target, stock))
    assert (mine - other).abs().max() < 1e-3


def test_a_difference_from_the_stock_modules_is_found(kernels, monkeypatch):
    """Not loud: the stock modules are right, and are used."""
    parts = native._parts

    def without_bias(block, window):
        made = parts(block, window)
        made.k.bias = None
        made.k.struct.bias = None
        return made

    monkeypatch.setattr(native, "_parts", without_bias)
    with pytest.warns(UserWarning, match="the native forward differs from the stock one"):
        target, _ = tiny("qwen2")
    assert target.native is None
