"""Packed drafters draft what their stock modules draft, and a node has the same bits in any company."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.drafters.config import KINDS, DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.kernels import blocks
from drafttrain.kernels.build import variant
from drafttrain.kernels.linear import ZERO, NativeLinear, is_available, to_bytes
from drafttrain.trees.tree import TokenTree

pytestmark = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")

DRAFTERS: dict[str, dict] = {kind: dict(kind=kind) for kind in KINDS if "model" not in KINDS[kind].settings}
DRAFTERS |= {
    "edd-two-layers": dict(layers=2, tapped_blocks=[-2, 1]),
    "edd-anchor": dict(anchor=True),
    "edd-anchor-taps": dict(anchor=True, tapped_blocks=[-2, 1]),
    "edd-heads": dict(kv_heads=4),
    "edd-narrow": dict(intermediate_size=40),
    "eagle-norms": dict(kind="eagle", input_norms=True),
}


def drafting(drafter, ids, tapped, counts) -> torch.Tensor:
    """Log-probabilities after each node of a growing tree, in two rounds with a verification between them."""
    rows, found = len(ids), []
    state = drafter.new_state(rows, 8)  # too short on purpose: it must grow
    first = torch.minimum(counts, torch.tensor(5))
    for observed in (first, counts - first):
        start = 0 if observed is first else 5
        drafter.update(state, ids[:, start : start + 5], tapped[:, start : start + 5], observed)
        tree = TokenTree.root_only(ids[:, 0])
        found.append(drafter.expand(state, tree, torch.zeros(rows, 1, dtype=torch.long)))
        children = torch.tensor([[7, 8, 9]]).expand(rows, -1)
        tree = tree.append(torch.zeros_like(children), children, torch.zeros(rows, 3))
        found.append(drafter.expand(state, tree, torch.tensor([[1, 3]]).expand(rows, -1)))
        children = torch.tensor([[11, 12]]).expand(rows, -1)
        tree = tree.append(torch.tensor([[3, 1]]).expand(rows, -1), children, torch.zeros(rows, 2))
        found.append(drafter.expand(state, tree, torch.tensor([[4, 5]]).expand(rows, -1)))
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_native_drafts_are_the_stock_ones(name, make_target, make_drafter):
    target = make_target("qwen2" if name == "edd" else "llama")  # Qwen2 has biases
    stock = make_drafter(target, **DRAFTERS[name])
    native = copy.deepcopy(stock)
    native.pack()
    assert sum(isinstance(module, NativeLinear) for module in native.modules()) >= 3
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 512, (2, 10), generator=generator)
    tapped, counts = target.encode(ids, torch.zeros_like(ids)).tapped, torch.tensor([10, 7])
    mine = drafting(native, ids, tapped, counts)
    torch.testing.assert_close(mine, drafting(stock, ids, tapped, counts), atol=1e-4, rtol=1e-4)
    if native.config.model_type != "drafttrain_medusa":
        assert native.native is not None
        for row in (0, 1):  # alone
            part = slice(row, row + 1)
            assert torch.equal(drafting(native, ids[part], tapped[part], counts[part])[0], mine[row])


def with_rounded_weights(stock, below: str = ""):
    """The stock drafter in fp32 with the weights that the bytes of one in bf16 stand for."""
    rounded = copy.deepcopy(stock)
    joins = {"drafttrain_eagle": "fc", "drafttrain_edd": "anchor_fc"}  # whose parts are packed apart
    join = getattr(rounded, joins.get(stock.config.model_type, ""), None)
    for module in rounded.get_submodule(below).modules():
        if isinstance(module, torch.nn.Linear) and variant() != "generic":
            hidden, inputs = stock.config.hidden_size, module.in_features
            sizes = [hidden, inputs - hidden] if module is join else [inputs]
            parts = [to_bytes(part) for part in module.weight.bfloat16().split(sizes, 1)]
            weights = [(numbers.float() - ZERO) * scales[:, None] for numbers, scales in parts]
            module.weight = torch.nn.Parameter(torch.cat(weights, 1))
    return rounded


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_native_drafts_in_bf16_are_those_of_the_rounded_weights(name, make_target, make_drafter):
    target = make_target("llama")
    stock = make_drafter(target, **DRAFTERS[name])
    native = copy.deepcopy(stock).bfloat16()
    native.pack()
    layers = [module for module in native.modules() if isinstance(module, NativeLinear)]
    assert layers and all((one.scales is not None) == (variant() != "generic") for one in layers)
    ids = torch.randint(3, 512, (2, 10), generator=torch.Generator().manual_seed(1))
    tapped, counts = target.encode(ids, torch.zeros_like(ids)).tapped, torch.tensor([10, 7])
    drafters = (native, with_rounded_weights(stock), stock)
    mine, expected, other = (drafting(drafter, ids, tapped, counts) for drafter in drafters)
    assert mine.dtype == torch.float and (mine - expected).std() < 0.05 * other.std()
    assert (mine - other).std() < 0.1 * other.std()


@pytest.mark.parametrize("name", ["edd-anchor", "edd-anchor-taps", "eagle", "eagle-norms"])
@torch.no_grad()
def test_joins_are_packed_where_layers_are_not_native(name, make_target, make_drafter):
    """As with an activation that the native layers lack."""
    target = make_target("llama")
    stock = make_drafter(target, **DRAFTERS[name])
    packed = copy.deepcopy(stock).bfloat16()
    packed.config.hidden_act = "gelu"  # its layers' own stays
    packed.pack()
    assert packed.native is None and isinstance(packed.token_fc, NativeLinear)
    ids = torch.randint(3, 512, (2, 10), generator=torch.Generator().manual_seed(1))
    tapped, counts = target.encode(ids, torch.zeros_like(ids)).tapped, torch.tensor([10, 7])
    mine, other = (
        drafting(drafter, ids, tapped.to(dtype), counts)
        for drafter, dtype in ((packed, torch.bfloat16), (stock, torch.float))
    )
    assert (mine - other).std() < 0.1 * other.std()


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_the_most_probable_tokens_are_those_of_all(name, make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target, **DRAFTERS[name])
    ids = torch.randint(3, 512, (2, 6), generator=torch.Generator().manual_seed(1))
    tapped, counts = target.encode(ids, torch.zeros_like(ids)).tapped, torch.tensor([6, 4])
    tree = TokenTree.root_only(ids[:, 0])
    for _ in range(2):  # stock, then native
        state = drafter.new_state(2, 16)
        drafter.update(state, ids, tapped, counts)
        root = torch.zeros(2, 1, dtype=torch.long)
        every = drafter.expand(state, tree, root)  # [2, 1, D]
        for k in (1, 5, drafter.draft_vocab_size + 1):
            log_probs, chosen = drafter.top(state, tree, root, k)
            assert log_probs.shape == (2, 1, min(k, drafter.draft_vocab_size))
            torch.testing.assert_close(log_probs, every.topk(log_probs.shape[-1]).values)
            torch.testing.assert_close(log_probs, every.gather(2, chosen))
        drafter.pack()


@torch.no_grad()
def test_keys_and_values_are_the_same_with_any_threads(make_target, make_drafter, monkeypatch):
    target = make_target("llama")
    drafter = make_drafter(target, layers=2)
    drafter.pack()
    ids, before, found = torch.randint(3, 512, (2, 100)), torch.get_num_threads(), []
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped
    try:
        for threads, few in ((1, 0), (3, 0), (3, 1 << 60)):  # the last ones are too few to wake threads
            torch.set_num_threads(threads)
            monkeypatch.setattr(blocks, "FEW", few)
            state = drafter.new_state(2, 100)
            drafter.update(state, ids, tapped, torch.tensor([100, 60]))
            found.append(state.kv)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.fixture
def make_small_lm(make_target, tiny_llama, tmp_path):
    """Return a function that makes a small LM of random weights draft tokens [D]."""

    def make(draft_ids: torch.Tensor):
        config = copy.deepcopy(tiny_llama[0].config)
        LlamaForCausalLM(LlamaConfig(**config.to_dict())).save_pretrained(tmp_path)
        tiny_llama[1].save_pretrained(tmp_path)
        settings = DrafterConfig(kind="causal_lm", model=str(tmp_path))
        return new_drafter(make_target("llama"), settings, draft_ids).eval()

    return make


@torch.no_grad()
def test_a_small_lm_runs_natively(make_small_lm):
    stock = make_small_lm(torch.arange(0, 512, 2))
    native = copy.deepcopy(stock)
    native.pack()
    assert native.native is not None
    ids = torch.randint(3, 512, (2, 10), generator=torch.Generator().manual_seed(1))
    nothing, counts = torch.zeros(2, 10, 0), torch.tensor([10, 7])
    mine, other = (drafting(drafter, ids, nothing, counts) for drafter in (native, stock))
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_small_lm_in_bf16_drafts_with_narrow_weights(make_small_lm):
    stock = make_small_lm(torch.arange(512))
    narrow = copy.deepcopy(stock).bfloat16()
    narrow.pack()
    layers = [module for module in narrow.modules() if isinstance(module, NativeLinear)]
    assert layers and all((one.scales is not None) == (variant() != "generic") for one in layers)
    rounded = with_rounded_weights(stock, "lm")
    ids = torch.randint(3, 512, (2, 10), generator=torch.Generator().manual_seed(1))
    nothing, counts = torch.zeros(2, 10, 0), torch.tensor([10, 7])
    drafters = (narrow, rounded, stock)
    mine, expected, other = (drafting(drafter, ids, nothing, counts) for drafter in drafters)
    assert (mine - expected).std() < 0.1 * other.std()  # inputs have 8 bits as well, in every layer


VERIFIED = [  # of the tree below: a leaf's path, one that ends earlier, one that leaves it, the root alone
    [5, 8, 12],
    [5, 9],
    [5, 7, 40],
    [5],
]


@pytest.mark.parametrize("joined", [False, True])
@torch.no_grad()
def test_a_small_lm_reads_no_node_again(make_small_lm, monkeypatch, joined):
    """Accepted nodes keep their keys and values, wherever they are in the tree: bit for bit those of a state
    that has read the same text as a prompt."""
    drafter = make_small_lm(torch.arange(512))
    drafter.pack()
    ran, run = [], drafter._run
    monkeypatch.setattr(
        drafter, "_run", lambda state, tokens, *rest: ran.append(tokens.shape) or run(state, tokens, *rest)
    )
    rows, zeros = len(VERIFIED), torch.zeros(len(VERIFIED), 1, dtype=torch.long)
    prompts = torch.randint(3, 512, (rows, 6), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([6, 4, 5, 6])
    if joined:
        states = []
        for prompt, n in zip(prompts, lengths):
            states.append(drafter.new_state(1, 8))
            drafter.update(states[-1], prompt[None, :n], torch.zeros(1, int(n), 0), n[None])
    else:
        state = drafter.new_state(rows, 8)
        drafter.update(state, prompts, torch.zeros(rows, 6, 0), lengths)

    def together(use):
        """Call `use` with the state of all rows."""
        if not joined:
            return use(state)
        one = drafter.join(states)
        found = use(one)
        drafter.split(one, states)
        return found

    def grow(state) -> None:
        tree = TokenTree.root_only(torch.full((rows,), 5))
        drafter.expand(state, tree, zeros)
        tree = tree.append(
            zeros.expand(-1, 3), torch.tensor([[7, 8, 9]]).expand(rows, -1), torch.zeros(rows, 3)
        )
        drafter.expand(state, tree, torch.tensor([[1, 2, 3]]).expand(rows, -1))
        parents, tokens = (torch.tensor([one]).expand(rows, -1) for one in ([1, 2], [11, 12]))
        tree = tree.append(parents, tokens, torch.zeros(rows, 2))
        drafter.expand(state, tree, torch.tensor([[5]]).expand(rows, -1))

    together(grow)
    verified = torch.tensor([[*path, *[0] * (3 - len(path))] for path in VERIFIED])
    counts = torch.tensor([len(path) for path in VERIFIED])
    together(lambda state: drafter.update(state, verified, torch.zeros(rows, 3, 0), counts))
    root = TokenTree.root_only(torch.full((rows,), 30))
    ran.clear()
    found = together(lambda state: drafter.expand(state, root, zeros))
    assert ran == [(rows, 2)]  # the token that is no node, and the roots
    for row, (prompt, n, path) in enumerate(zip(prompts, lengths, VERIFIED)):
        fresh, text = drafter.new_state(1, 16), torch.tensor([[*prompt[:n].tolist(), *path]])
        drafter.update(fresh, text, torch.zeros(*text.shape, 0), torch.tensor([text.shape[1]]))
        expected = drafter.expand(fresh, TokenTree.root_only(torch.tensor([30])), zeros[:1])
        assert torch.equal(found[row], expected[0])
