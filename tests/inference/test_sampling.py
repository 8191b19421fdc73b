"""Draws follow the distribution they should, belong to seed and position, and give with drafts what they give
without."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.inference import rejection
from drafttrain.inference.decode import decode, decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.inference.rejection import RejectionSampling, _distribution, _draw_rest
from drafttrain.inference.sampling import (
    NUCLEUS,
    Sampler,
    SamplingParams,
    is_cut,
    kept_tokens,
    pick_tokens,
    uniform,
)
from drafttrain.kernels.build import variant
from drafttrain.kernels.draw import draw
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.lists import rows_of
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.pct import PctPolicy
from drafttrain.trees.sampled import SampledTreePolicy
from drafttrain.trees.static import StaticPolicy
from drafttrain.utils.errors import UserError


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities [V] of nucleus sampling: the fewest best tokens that reach top_p, renormalised."""
    probs = (logits.double() / temperature).softmax(-1)
    kept, mass = torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = probs[token]
        mass += probs[token].item()
    return kept / kept.sum()


def token_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that is drawn from, fp64 [V], from logits [V]."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    if not is_cut(params):
        return probs
    probs, ids = probs.sort(descending=True, stable=True)
    probs[params.top_k or len(probs) :] = 0
    probs /= probs.sum()
    probs[probs.cumsum(-1) - probs >= params.top_p] = 0
    return torch.zeros_like(probs).scatter_(0, ids, probs / probs.sum())


@pytest.mark.parametrize("top_k", [None, 1, 3, NUCLEUS, NUCLEUS + 1, 3 * NUCLEUS, 4 * NUCLEUS, 9999])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("vocabulary", [2, 6, 4 * NUCLEUS])
def test_tokens_that_are_kept(vocabulary, temperature, top_p, top_k):
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    params = SamplingParams(temperature, top_p, top_k)
    tokens, probs = kept_tokens(logits, params)
    assert (np.diff(tokens) > 0).all()
    found = torch.zeros(vocabulary, dtype=torch.double)
    found[torch.from_numpy(tokens)] = torch.from_numpy(probs)
    torch.testing.assert_close(found, token_probs(logits, params), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_kept_of_broken_logits(bad, temperature):
    logits = torch.randn(600)
    logits[77] = bad
    assert np.isnan(kept_tokens(logits, SamplingParams(temperature, 0.9))[1]).all()


@pytest.mark.parametrize("vocabulary", [8, 2 * NUCLEUS])
@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9), (1.3, 0.5), (0.2, 0.95), (3.0, 0.99)])
def test_draws_invert_the_nucleus_distribution(vocabulary, temperature, top_p):
    """Evenly spaced uniforms hit each token in proportion, up to one at each end of its interval."""
    n = 4000
    logits = 2 * torch.randn(vocabulary)
    uniform = (torch.arange(n) + 0.5) / n
    tokens = pick_tokens(
        logits.expand(n, -1), torch.full((n,), temperature), torch.full((n,), top_p), uniform
    )
    counts = tokens.bincount(minlength=vocabulary)
    assert (counts - n * nucleus(logits, temperature, top_p)).abs().max() <= 1.01


def test_seeded_draws_follow_the_distribution():
    """Pearson's statistic of 20000 draws over 8 tokens; with 7 degrees of freedom P(> 29.9) is 1e-4."""
    n, logits = 20000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.2])
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    counts = pick_tokens(logits.expand(n, -1), torch.ones(n), torch.ones(n), uniform).bincount(minlength=8)
    expected = n * logits.double().softmax(-1)
    assert ((counts - expected) ** 2 / expected).sum() < 29.9


def test_greedy_cut_and_whole_rows_side_by_side():
    logits = torch.randn(4, 50)
    temperature, top_p = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 0.9, 1.0, 0.5])
    tokens = pick_tokens(logits, temperature, top_p, torch.tensor([0.9, 0.0, 0.6, 0.1]))
    expected = logits.argmax(-1)  # 0 draws the most probable token of those that are left
    expected[2] = (logits[2].softmax(-1).cumsum(-1) <= 0.6).sum()
    assert torch.equal(tokens, expected)


def test_uniform_numbers_are_uniform_and_unrelated():
    """Kolmogorov-Smirnov over 20000 numbers of one seed, of neighbouring seeds, and of pairs: D > 0.0138 has
    probability 1e-3."""
    n = 20000
    even = torch.arange(1, n + 1) / n
    for numbers in (
        [uniform(7, i) for i in range(n)],
        [uniform(i, 3) for i in range(n)],
        [(uniform(i, 0) + uniform(i, 1)) % 1 for i in range(n)],
        [(uniform(i, 5) - uniform(i + 1, 5)) % 1 for i in range(n)],
    ):
        values = torch.tensor(numbers, dtype=torch.double).sort().values
        assert 0 <= values[0] and values[-1] < 1
        assert (values - even).abs().max() < 0.0138
    assert uniform(1, 2) == uniform(1, 2) != uniform(2, 1)


@pytest.mark.parametrize("top_k", [1, 3, NUCLEUS, NUCLEUS + 20, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.6])
def test_top_k_comes_before_top_p(top_k, top_p):
    n, logits = 4000, 2 * torch.randn(2 * NUCLEUS, generator=torch.Generator().manual_seed(0))
    numbers = (torch.arange(n) + 0.5) / n
    limits = torch.full((n,), top_k)
    tokens = pick_tokens(logits.expand(n, -1), torch.ones(n), torch.full((n,), top_p), numbers, limits)
    filtered = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    counts = tokens.bincount(minlength=2 * NUCLEUS)
    assert (counts - n * nucleus(filtered, 1.0, top_p)).abs().max() <= 1.01


@pytest.mark.parametrize("params", [(1.0, 0.5), (1.0, 1.0, 3), (0.5, 0.9, 300)])
def test_the_largest_numbers_draw_nothing_that_is_left_out(params):
    """Just below 1, which fp32 rounds to 1."""
    params = SamplingParams(*params)
    logits = torch.randn(64, 2 * NUCLEUS, generator=torch.Generator().manual_seed(0))
    many = torch.ones(64)
    top_k = torch.full((64,), params.top_k or 2 * NUCLEUS)
    for number in (1 - 2**-24, 1 - 2**-53):
        tokens = pick_tokens(logits, params.temperature * many, params.top_p * many, number * many, top_k)
        for row, token in zip(logits, tokens):
            assert token_probs(row, params)[token] > 0


def test_a_draw_belongs_to_seed_and_position():
    params = [SamplingParams(1.0, seed=seed) for seed in (4, 5)]
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2], [7, 7, 8]])
    tokens = Sampler(params).pick(logits, positions)
    for row in range(2):
        for i in range(3):
            alone = Sampler([params[row]]).pick(logits[row, i][None, None], positions[row, i][None, None])
            assert alone.item() == tokens[row, i]


MIXED = (
    SamplingParams(1.0, seed=1),
    SamplingParams(0.8, top_p=0.9, seed=2),
    SamplingParams(0.0),
    SamplingParams(1.2, top_k=20, seed=3),
)


@pytest.fixture(scope="module")
def plain_texts(target, prompts) -> list[list[int]]:
    """Texts of plain sampling of a batch of unequal rows, which are those of each row alone."""
    found, _ = decode_all(target, NoProposer(), prompts, 24, (), AcceptMatching(MIXED))
    for text, prompt, params in zip(found, prompts, MIXED):
        assert decode_all(target, NoProposer(), [prompt], 24, (), AcceptMatching([params]))[0] == [text]
    return found


@pytest.mark.parametrize(
    "policy",
    [
        ChainPolicy(4),
        StaticPolicy.from_k_config((3, 2, 1)),
        Eagle2Policy(top_k=3, max_depth=3, total=8),
        PctPolicy(0.01, 1.0, width=3, max_depth=4),
    ],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("quality", [lambda row, position: True, lambda row, position: position % 3 == 0])
def test_drafting_gives_the_text_of_plain_sampling(target, prompts, plain_texts, replay, policy, quality):
    """For every seed, in fp32, token by token; a batch of unequal rows, one of them greedy."""
    texts = [prompt + output for prompt, output in zip(prompts, plain_texts)]
    drafter = replay(target, texts, quality)
    proposer = TreeProposer(drafter, policy)
    drafted, stats = decode_all(target, proposer, prompts, 24, (), AcceptMatching(MIXED))
    assert drafted == plain_texts
    assert stats.accept_len > 1.1


def test_texts_follow_the_targets_distribution(target, replay):
    """All texts of two tokens over the six most probable ones, drafted by a tree: Pearson's statistic of 3000
    seeds against the enumerated distribution."""
    prompt, n = [5, 9, 11], 3000
    param = dict(temperature=1.0, top_k=2)

    def after(ids: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([ids])).logits[0, -1]
        best = logits.topk(2)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist()))

    expected = {(a, b): p * q for a, p in after(prompt).items() for b, q in after([*prompt, a]).items()}
    drafter = replay(target, [[*prompt, *max(expected, key=expected.get), 3, 3, 3]] * 100, lambda *_: True)
    counts = dict.fromkeys(expected, 0)
    for start in range(0, n, 100):
        rule = AcceptMatching([SamplingParams(**param, seed=start + i) for i in range(100)])
        proposer = TreeProposer(drafter, StaticPolicy.from_k_config((2, 2)))
        outputs, _ = decode_all(target, proposer, [prompt] * 100, 2, (), rule)
        for output in outputs:
            counts[tuple(output)] += 1
    statistic = sum((counts[text] - n * p) ** 2 / (n * p) for text, p in expected.items())
    assert statistic < 16.3  # 3 degrees of freedom: P = 1e-3


def drawn(k_config, seeds, **settings) -> SampledTreePolicy:
    """A policy whose next trees are for sequences of these seeds."""
    policy = SampledTreePolicy(k_config, **settings)
    policy.set_active(seeds, [0] * len(seeds))
    return policy


class LastToken(Drafter):
    """Target and drafter over six tokens: what comes next depends on the last token alone."""

    draft_vocab_size = 5  # draft token j is target token 5 - j, so target token 0 is never drafted

    def __init__(self, kind: str):
        generator = torch.Generator().manual_seed(3)
        self.target = 1.5 * torch.randn(6, 6, generator=generator)  # logits [last, next]
        log_p = self.target[:, [5, 4, 3, 2, 1]].log_softmax(-1)  # [last, D]
        never = torch.tensor([0.0, -torch.inf, -torch.inf, 0.0, -torch.inf]).expand(6, -1)
        self.draft = {
            "right": log_p,
            "wrong": (-3 * log_p).log_softmax(-1),
            "uniform": torch.zeros(6, 5).log_softmax(-1),
            "two of five": (log_p + never).log_softmax(-1),  # fewer than the tree has children
            "sure": torch.tensor([0.0, -90.0, -90.0, -90.0, -90.0]).expand(6, -1).log_softmax(-1),
        }[kind]

    def to_target(self, ids):
        return 5 - ids

    def expand(self, state, tree, frontier):
        return self.draft[tree.tokens.gather(1, frontier)]


def remembered_tokens() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Return `kept_tokens` which computes those of the same logits and cut once: `LastToken` has six rows."""
    known = {}

    def kept(logits: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        key = logits.numpy().tobytes(), params.temperature, params.top_p, params.top_k
        if key not in known:
            known[key] = kept_tokens(logits, params)
        return known[key]

    return kept


@pytest.mark.parametrize(
    ("k_config", "candidates", "threshold"),
    [((1, 1), 5, 0.0), ((3, 2), 5, 0.0), ((3, 2), 3, 0.25)],
    ids=["chain", "tree", "of the best three, where they are likely"],
)
@pytest.mark.parametrize("kind", ["right", "wrong", "uniform", "two of five", "sure"])
@pytest.mark.parametrize("top_p", [0.97, 1.0])  # which leaves some out, or nothing
def test_recursive_rejection_is_exact(kind, k_config, candidates, threshold, top_p, monkeypatch):
    """20000 texts of two tokens against the enumerated distribution of all 36."""
    monkeypatch.setattr(rejection, "kept_tokens", remembered_tokens())
    model, n, batch, root = LastToken(kind), 20000, 1000, 2
    settings = dict(temperature=0.9, top_p=top_p)
    counts = torch.zeros(6, 6)
    for start in range(0, n, batch):
        seeds = range(start, start + batch)
        rule = RejectionSampling([SamplingParams(**settings, seed=seed) for seed in seeds])
        policy = drawn(k_config, seeds, candidates=candidates, threshold=threshold)
        texts: list[list[int]] = [[] for _ in seeds]
        while going := [number for number, text in enumerate(texts) if len(text) < 2]:
            rule.set_active(going)
            policy.set_active([seeds[number] for number in going], [len(texts[number]) for number in going])
            last = torch.tensor([texts[number][-1] if texts[number] else root for number in going])
            tree = policy.grow(model, None, last)
            accepted = rule(tree, model.target[tree.tokens])
            found = accepted.path, accepted.counts, accepted.next_token, tree.tokens
            for number, path, count, token, tokens in zip(going, *(part.tolist() for part in found)):
                texts[number] += [*(tokens[node] for node in path[1:count]), token]
        for text in texts:
            counts[text[0], text[1]] += 1
    rows = torch.stack([token_probs(logits, SamplingParams(**settings)) for logits in model.target])
    expected = n * rows[root][:, None] * rows  # [6, 6]
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    assert statistic < 73  # at most 35 degrees of freedom: P < 2e-4


@pytest.mark.parametrize("k_config", [(1, 1, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("kind", ["right", "wrong", "two of five", "sure"])
@pytest.mark.parametrize("threshold", [0.02, 0.2, 0.6, 1.0])
def test_only_confident_nodes_get_children(k_config, kind, threshold):
    """The trees are those without a threshold, less what is below a node that is less likely."""

    def grow(threshold):
        model, nodes = LastToken(kind), []
        expand = model.expand
        model.expand = lambda state, tree, frontier: (
            nodes.append(len(frontier[0])) or expand(state, tree, frontier)
        )
        return drawn(k_config, range(20), threshold=threshold).grow(model, None, torch.arange(20) % 6), nodes

    whole, _ = grow(0.0)
    found, expanded = grow(threshold)
    assert found.depths.max() >= 1  # the root's confidence is 1
    unlikely = whole.joint_log_probs().exp() < threshold
    below = whole.ancestors() & ~torch.eye(whole.width, dtype=torch.bool)
    expected = whole.select(~(below & unlikely[:, None]).any(-1))
    for part in ("tokens", "parents", "depths", "log_probs", "sizes"):
        assert torch.equal(getattr(found, part), getattr(expected, part))
    assert torch.equal(found.ancestors(), expected.ancestors())
    most: list[int] = []  # expanded nodes of a row at most, layer by layer
    for row, tree in enumerate(rows_of(found)):
        parents = tree.parents[0, 1:].unique()
        assert torch.equal(tree.drawn_from.probs[0, parents], expected.drawn_from.probs[row, parents])
        layers = tree.depths[0, parents].bincount(minlength=len(expanded)).tolist()
        most = list(map(max, layers, most or layers))
    assert expanded == most


@pytest.mark.skipif(variant() is None, reason="no C++ compiler, and so no native rule to compare")
@pytest.mark.parametrize("k_config", [(1, 1), (3, 2), (4, 1, 2)])
@pytest.mark.parametrize("kind", ["right", "wrong", "uniform", "two of five", "sure"])
def test_a_native_rejection_decides_as_the_rule(kind, k_config):
    """Of broken logits and drafts, too."""
    model, seeds = LastToken(kind), [*range(299), 2**64 - 3]
    tree = drawn(k_config, seeds).grow(model, None, torch.arange(300) % 6)
    logits = model.target[tree.tokens]  # [300, n, 6]
    logits[7, 0, 2], logits[8, :, 3], logits[9, :, 1] = torch.nan, torch.inf, -torch.inf
    tree.drawn_from.probs[10, :, 1] = torch.nan
    params = [SamplingParams((0.4, 0.85, 1.0, 1.1)[seed % 4], seed=seed) for seed in seeds]
    rules, rest = (RejectionSampling(params), RejectionSampling(params)), tree.select(tree.depths < 2)
    for trees, after in ((tree, logits), (rest, logits[:, : rest.width])):
        found, expected = rules[0](trees, after), rules[1]._in_python(trees, after)
        for part in ("path", "counts", "next_token"):
            assert torch.equal(getattr(found, part), getattr(expected, part))
        assert rules[0].emitted == rules[1].emitted and len(found.counts.unique()) > 1
    assert tree.tokens[10, 1] >= 0 and found.counts[[7, 10]].tolist() == [1, 1]


def test_recursive_rejection_at_temperature_0_is_greedy():
    model = LastToken("uniform")
    tree = drawn((5, 2), range(50)).grow(model, None, torch.full((50,), 2))
    rule = RejectionSampling([SamplingParams(seed=seed) for seed in range(50)])
    accepted = rule(tree, model.target[tree.tokens])
    for row in range(50):
        best = [int(tree.tokens[row, 0])]
        for node in accepted.path[row, 1 : accepted.counts[row]].tolist():
            best.append(int(tree.tokens[row, node]))
        best.append(int(accepted.next_token[row]))
        assert all(model.target[a].argmax() == b for a, b in zip(best, best[1:]))


def test_drawn_rows_that_end_leave_the_others_alone(tiny_llama, prompts):
    """Rows of a batch end at different steps; each draws and is judged as it is alone."""
    target = FrozenTarget(*tiny_llama, "llama")
    drafter = EddModel(EddConfig.for_target(target, DrafterConfig(tapped_blocks=[-2]), 400)).eval()
    drafter.initialize_from(target, DrafterConfig(tapped_blocks=[-2]), torch.arange(400))

    def run(rows, max_rows=None):
        sampling, chosen = [SamplingParams(1.0, seed=row) for row in rows], [prompts[row] for row in rows]
        proposer = TreeProposer(drafter, parse_policy("drawn:k_config=4-3-2"))
        steps = list(decode(target, proposer, chosen, 40, (), max_rows=max_rows, sampling=sampling))
        ends = [max(i for i, step in enumerate(steps) if step.tokens[place]) for place in range(len(rows))]
        return [sum((step.tokens[place] for step in steps), []) for place in range(len(rows))], ends

    together, ends = run(range(4))
    assert len(set(ends)) > 1
    for row in range(4):
        alone, [end] = run([row])
        assert alone == [together[row]] and end == ends[row]
    assert run(range(4), max_rows=2)[0] == together


def test_drawn_siblings_come_in_the_order_of_their_draws():
    """First children follow q; seconds follow q without the first; the same seeds draw the same again."""
    model, n = LastToken("right"), 20000
    tree, again = (drawn((2,), range(n)).grow(model, None, torch.full((n,), 2)) for _ in range(2))
    assert torch.equal(tree.tokens, again.tokens)
    q = model.draft[2].exp()
    first, second = 5 - tree.tokens[:, 1], 5 - tree.tokens[:, 2]
    pairs = torch.zeros(5, 5).index_put_((first, second), torch.ones(n), accumulate=True)
    expected = n * q[:, None] * q / (1 - q[:, None])
    expected.fill_diagonal_(0)
    off = ~torch.eye(5, dtype=torch.bool)
    assert not pairs.diagonal().any()
    assert ((pairs - expected) ** 2 / expected)[off].sum() < 49.6  # 19 degrees of freedom: P = 1e-4
    torch.testing.assert_close(tree.drawn_from.probs[0, 0], q[5 - tree.drawn_from.ids[0, 0]])


@pytest.mark.parametrize("params", [(0.0,), (1.0,), (0.7, 0.8), (1.3, 1.0, 3), (1.0, 0.5, 4)])
def test_token_probs_are_what_is_drawn_from(params):
    logits, n = 2 * torch.randn(40, generator=torch.Generator().manual_seed(1)), 4000
    params = SamplingParams(*params)
    probs = token_probs(logits, params)
    numbers = (torch.arange(n) + 0.5) / n
    tokens = pick_tokens(
        logits.expand(n, -1),
        torch.full((n,), params.temperature),
        torch.full((n,), params.top_p),
        numbers,
        torch.full((n,), params.top_k or 40),
    )
    assert (tokens.bincount(minlength=40) - n * probs).abs().max() <= 1.01
    drawn = draw(probs.expand(n, -1), numbers.double())
    assert (drawn.bincount(minlength=40) - n * probs).abs().max() <= 1.01


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(temperature=-1), "temperature: must be >= 0 and finite, got -1"),
        (dict(temperature=float("nan")), "temperature: must be >= 0 and finite, got nan"),
        (dict(top_p=0.0), "top_p: must be > 0 and <= 1, got 0.0"),
        (dict(top_k=0), "top_k: must be >= 1, got 0"),
        (dict(top_k=True), "top_k: must be a whole number or None, got True"),
        (dict(max_tokens=0), "max_tokens: must be >= 1, got 0"),
        (dict(max_tokens="8"), "max_tokens: must be a whole number or None, got '8'"),
    ],
)
def test_values_without_sense(values, words):
    with pytest.raises(UserError, match=words):
        SamplingParams(**values)


def test_rounding_leaves_nothing_to_draw_but_what_is_kept():
    """All kept tokens were candidates, and what is left elsewhere is a rounding error."""
    logits = torch.tensor([3.0, -1.0, 2.0, 0.0])
    cut = _distribution(logits, SamplingParams(1.0, top_k=2), 0.5)
    assert cut.without(np.array([0, 2]), 0.3) in (0, 2)
    assert cut.without(np.array([0, 1]), 0.3) == 2


def test_where_rounding_leaves_nothing_the_target_draws():
    """Nothing of p is left at the candidates, and there are no other tokens."""
    whole = _distribution(torch.tensor([3.0, -1.0]), SamplingParams(1.0), 0.5)
    assert _draw_rest(whole, np.array([0, 1]), np.zeros(2), 1.0) == whole.token


@pytest.mark.parametrize("temperature", [0.003, 0.03, 1.0])
def test_nothing_is_drawn_where_nothing_is(temperature):
    """Candidates that hold all of the target's tokens leave rounding alone for others."""
    model, n = LastToken("wrong"), 4000
    tree = drawn((1,), range(n)).grow(model, None, torch.arange(n) % 6)
    logits = 10 * model.target[tree.tokens]  # [n, 2, 6]
    logits[:, :, 0] = -torch.inf
    for rule in (lambda own: own(tree, logits), lambda own: own._in_python(tree, logits)):
        own = RejectionSampling([SamplingParams(temperature, seed=seed) for seed in range(n)])
        assert (rule(own).next_token > 0).all()


def test_a_temperature_that_fp32_cannot_invert_is_greedy():
    assert SamplingParams(1e-40).temperature == 0.0 and SamplingParams(1e-3).temperature == 1e-3
