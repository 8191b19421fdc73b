"""Self-Draft and its baselines are exact, and their branches and windows are what plain forwards give."""

import math
import random
from collections import Counter
from functools import cache

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.inference.acceptance import accept_greedy
from drafttrain.inference.decode import decode, decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.self_draft.candidates import CandidateModel, Candidates
from drafttrain.self_draft.corpus_cache import NO_MATCHES, Matches
from drafttrain.self_draft.hybrid import DRAFTER, HybridProposer
from drafttrain.self_draft.lookahead import Lookahead
from drafttrain.self_draft.prompt_lookup import PromptLookup
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import AcceptanceCurve, CostCurve
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.utils.errors import UserError

NEW = 24
MODES = {
    "nothing": SelfDraftConfig(budget=0, recycle=0, context=False),
    "context": SelfDraftConfig(recycle=0),
    "recycling": SelfDraftConfig(context=False, recycle=3, budget=20, least=0.0),
    "branches": SelfDraftConfig(branches=3, branch_length=5, gram=2, recycle=0),
    "short branches": SelfDraftConfig(branches=8, branch_length=2, gram=1, recycle=0, context=False),
    "branches alone": SelfDraftConfig(
        branches=2, branch_length=4, gram=4, budget=0, recycle=0, context=False
    ),
    "everything": SelfDraftConfig(branches=2, branch_length=6, recycle=4, budget=30, least=0.0, longest=3),
}


class TextCorpus:
    """N-grams of some texts, one token in five of which is wrong."""

    max_prefix = 3

    def __init__(self, texts: list[list[int]]):
        rng, self.found = random.Random(1), {}
        for text in texts:
            for i in range(1, len(text)):
                token = text[i] if rng.random() < 0.8 else rng.randrange(3, 500)
                for n in range(1, min(i, 3) + 1):
                    self.found.setdefault(tuple(text[i - n : i]), Counter()).update([token, token, 7])

    def next_tokens(self, suffix, limit, longest=None):
        for n in range(min(3, len(suffix)), 0, -1):
            if counts := self.found.get(tuple(suffix[-n:])):
                best = counts.most_common(limit)
                return Matches([t for t, _ in best], [c for _, c in best], n, sum(counts.values()) + 1)
        return NO_MATCHES


@pytest.fixture(scope="session")
def corpus(greedy, prompts):
    return lambda target: TextCorpus([prompt + greedy(target, prompt, NEW + 8) for prompt in prompts])


def self_draft(target, config, corpus=None) -> SelfDraft:
    return SelfDraft(config, target.vocab_size, (0, 1, 2), corpus)


def run_all(target, prompts, temperature, proposer, **options):
    rule = accept_greedy
    if temperature:
        rule = AcceptMatching([SamplingParams(temperature, seed=i) for i in range(4)])
    return decode_all(target, proposer, prompts, NEW, accept=rule, **options)


@pytest.fixture(scope="module")
def plain(prompts):
    """Gives a token that stops the first prompt, and plain decoding that stops there: once for all modes."""

    @cache
    def decoded(target: FrozenTarget, temperature: float) -> tuple[int, list[list[int]]]:
        stop = run_all(target, prompts, temperature, NoProposer(), stop=())[0][0][7]
        return stop, run_all(target, prompts, temperature, NoProposer(), stop={stop})[0]

    return decoded


@pytest.mark.parametrize("max_rows", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_exact(target, prompts, corpus, plain, mode, temperature, max_rows):
    """Alone, in batches, and in the places of prompts that have ended, at a stop token or the limit."""
    stop, wanted = plain(target, temperature)
    proposer = self_draft(target, MODES[mode], corpus(target))
    outputs, stats = run_all(target, prompts, temperature, proposer, stop={stop}, max_rows=max_rows)
    assert outputs == wanted
    if temperature == 0 and MODES[mode].budget:
        assert stats.accept_len > 1.3
    assert mode != "nothing" or stats.verify_tokens == 0


def test_rows_draft_the_same_in_every_batch(llama, prompts, corpus):
    proposer = self_draft(llama, MODES["everything"], corpus(llama))

    def run(rows, max_rows):
        steps = decode(llama, proposer, [prompts[row] for row in rows], NEW, stop=(), max_rows=max_rows)
        steps = list(steps)
        return [[(s.tokens[i], s.verified[i]) for s in steps if s.tokens[i]] for i in range(len(rows))]

    together = run(range(4), 3)
    assert all([together[row]] == run([row], 1) for row in range(4))


def test_budget_and_what_a_forward_costs(llama, prompts, corpus):
    config = SelfDraftConfig(budget=5, least=0.0, branches=2, branch_length=3, gram=2)
    steps = list(decode(llama, self_draft(llama, config, corpus(llama)), prompts, NEW, stop=()))
    assert max(max(step.verified) for step in steps) == 5 + 2 * 3
    # a token more takes 1 ms, and a step has to bring 400 tokens a second: each has to be worth 0.4
    curve = CostCurve((1, 101), (0.01, 0.11))
    odds = CandidateModel(0.0, {("corpus", 1, 1): math.log(9), ("corpus", 2, 0): -3.0})
    proposer = SelfDraft(
        SelfDraftConfig(context=False, recycle=0), 512, (), corpus(llama), odds, verify=curve, rate=400.0
    )
    state = proposer.new_state(1, 99)
    proposer.corpus.found = {(5,): Counter({6: 2, 7: 2}), (5, 6): Counter({8: 9}), (6, 8): Counter({9: 9})}
    tree = proposer.candidates(state[0], 5)
    assert tree.joint[1:] == pytest.approx([0.9, 0.9]) and tree.tokens == [5, 6, 7]


def watched(proposer, before, after):
    """The proposer, which shows each harvest to a function beforehand and afterwards."""
    harvest = proposer.harvest

    def shown(state, tree, logits):
        seen = [before(sequence) for sequence in state]
        harvest(state, tree, logits)
        for sequence, root, was in zip(state, tree.tokens[:, 0].tolist(), seen):
            after(sequence, root, was)

    proposer.harvest = shown
    return proposer


def argmax_after(target, tokens) -> int:
    return int(target.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())


@torch.no_grad()
def test_branches_are_what_plain_forwards_give(target, prompts):
    """A branch sees the text with the root, and itself; the token after it is appended, the first goes."""
    config = SelfDraftConfig(branches=3, branch_length=4, gram=2, recycle=0, budget=3, least=0.0)
    checked = [0]
    windows: set[tuple[int, ...]] = set()

    def after(sequence, root, was):
        for old, new in zip(was, sequence.branches):
            if new == old:  # the end of the output has cut the tree
                continue
            text = [*sequence.text, root]
            expected = argmax_after(target, text + old)
            assert new == [*old, expected][-4:]
            for end in range(2, len(old) + 1):  # every window of G tokens, and the token after it
                gram = (*old[end - 2 : end], argmax_after(target, text + old[:end]))
                windows.add(gram)
                matched, found = sequence.sources.drafted.after(gram[:2])
                assert matched == 2 and gram[2] in [token for token, _ in found]
            checked[0] += 1

    proposer = self_draft(target, config)
    watched(proposer, lambda sequence: [list(branch) for branch in sequence.branches], after)
    steps = list(decode(target, proposer, prompts[:2], 12, stop=()))
    assert checked[0] > 3 * 8 and len(windows) > 20
    assert max(max(step.verified) for step in steps) <= 3 + 3 * 4


def test_branches_start_from_distinct_tokens_that_are_text():
    config = SelfDraftConfig(branches=5)
    [sequence] = SelfDraft(config, 8, special=(0, 1, 2)).new_state(1, 9)
    assert sorted(sequence.branches) == [[3], [4], [5], [6], [7]]
    again = SelfDraft(config, 8, special=(0, 1, 2)).new_state(2, 9)
    assert again[0].branches == again[1].branches == sequence.branches


@torch.no_grad()
def test_recycling_keeps_what_the_target_predicts_after_each_node(llama, prompts, corpus):
    config = SelfDraftConfig(recycle=2, context=False, least=0.0, budget=6)
    seen = []

    def after(sequence, root, sent):
        if not sequence.sources.drafted.after([root])[0]:  # the end of the output has cut the tree
            return
        for node, path in enumerate(sent.paths([])):
            text = [*sequence.text, *path]
            logits = llama.model(input_ids=torch.tensor([text])).logits[0, -1]
            expected = logits.topk(2).indices.tolist()
            matched, found = sequence.sources.drafted.after(text[-4:])
            assert matched == min(len(text), 4) and [token for token, _ in found][:2] == expected
            seen.append(node)

    proposer = watched(self_draft(llama, config, corpus(llama)), lambda sequence: sequence.sent, after)
    decode_all(llama, proposer, prompts[:1], 8, stop=())
    assert max(seen) >= 4


def test_caches_of_the_text_keep_as_many_followers_as_are_asked_for():
    config = SelfDraftConfig(recycle=16, width=12)
    [sequence] = SelfDraft(config, 64).new_state(1, 9)
    for grams in (sequence.sources.text, sequence.sources.drafted):
        for token in range(20):
            grams.add([1, token], "x")
        assert len(grams.after([1])[1]) == 16


def test_accepted_candidates_are_counted_by_source(llama, prompts, corpus):
    proposer = self_draft(llama, MODES["everything"], corpus(llama))
    steps = list(decode(llama, proposer, prompts, NEW, stop=()))
    drafted = sum(sum(step.drafted) for step in steps)
    last = sum(step.drafted[i] for step in steps for i in range(4) if step.finish_reason[i])
    # the last step of an output is not observed if no other goes on with it
    assert drafted - last <= sum(proposer.accepted.values()) <= drafted + len(prompts)
    assert proposer.accepted["corpus"] > 0 and set(proposer.accepted) <= {
        "corpus", "prompt", "accepted", "recycled", "branch"
    }  # fmt: skip
    granted = sum(number for (_, accepted), number in proposer.judged.items() if accepted)
    assert granted == sum(proposer.accepted.values())


def test_nodes_that_a_limit_has_cut_are_not_counted(llama, prompts, corpus):
    """Where other outputs go on, the ended one is updated with them."""
    proposer = self_draft(llama, MODES["everything"], corpus(llama))
    state = proposer.new_state(2, 64)
    update = {"tapped": torch.zeros(2, 9, 0), "counts": torch.tensor([9, 9])}
    text = torch.tensor([prompts[0][:9], prompts[0][:9]])  # [2, 9]
    proposer.update(state, text, **update)
    tree = proposer.propose(state, text[:, 8])
    cut = tree.select(torch.tensor([[True] * tree.width, [True] * 3 + [False] * (tree.width - 3)]))
    assert cut.sizes[0] > cut.sizes[1]
    proposer.harvest(state, cut, torch.zeros(2, cut.width, llama.vocab_size))
    known = cut.tokens[1, 1:3].tolist()
    assert cut.depths[1, 1:3].tolist() == [1, 1] and cut.sizes[1] == 3
    emitted = torch.tensor([[int(text[1, 8]), known[0], 7]])
    before = proposer.judged.total()
    proposer.update(state[1:], emitted, torch.zeros(1, 3, 0), torch.tensor([3]))
    assert proposer.judged.total() == before + 2  # not the children of the first one


# ------------------------------------------------------------------------------------------- the baselines


def test_prompt_lookup_against_a_search():
    rng = random.Random(0)
    for _ in range(300):
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 15))]
        wanted = []
        for n in (3, 2, 1):
            starts = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
            if starts and n < len(text):
                wanted = text[starts[-1] + n :][:5]
                break
        assert PromptLookup(5).continuation(text) == wanted, text


@pytest.mark.parametrize("proposer", [PromptLookup(6), Lookahead(4, 3, 3, 512), Lookahead(1, 2, 1, 512)])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_baselines_are_exact(target, prompts, proposer, max_rows):
    wanted, _ = decode_all(target, NoProposer(), prompts, NEW, stop=())
    assert decode_all(target, proposer, prompts, NEW, stop=(), max_rows=max_rows)[0] == wanted


def test_prompt_lookup_drafts_a_chain():
    proposer, state = PromptLookup(4), [[5, 6, 7, 8, 5, 6]]
    tree = proposer.propose(state, torch.tensor([7]))
    assert tree.tokens.tolist() == [[7, 8, 5, 6, 7]] and tree.depths.tolist() == [[0, 1, 2, 3, 4]]


@torch.no_grad()
def test_the_window_is_what_plain_forwards_give(llama, prompts):
    """Column i sees the root, the first level before i and its own later levels, and gives an n-gram."""
    checked = [0]

    def before(sequence):
        return [list(level) for level in sequence.levels]

    def after(sequence, root, levels):
        guesses = [
            argmax_after(llama, [*text, *levels[0][:i], *(level[i] for level in levels[1:])])
            for i in range(4)
        ]
        if sequence.levels == levels:  # the end of the output has cut the tree
            return
        assert sequence.levels[-1] == guesses
        if len(levels) == 2:  # full: the oldest level goes, and each column gives its tokens
            assert sequence.levels == [levels[1][1:], guesses]
            for first, second, third in zip([root, *levels[0]], levels[1], guesses):
                assert (second, third) in sequence.pool[first]
        checked[0] += 1

    text = list(prompts[0])  # with the root
    proposer = watched(Lookahead(4, 3, 5, 512), before, after)
    for step in decode(llama, proposer, prompts[:1], 16, stop=()):
        text += step.tokens[0]
    assert checked[0] >= 5


# --------------------------------------------------------------------------------------- beside a drafter


@pytest.fixture(scope="module")
def edd(tiny_llama):
    target = FrozenTarget(*tiny_llama, "llama")
    settings = DrafterConfig(tapped_blocks=[-2], layers=1)
    drafter = EddModel(EddConfig.for_target(target, settings, 512)).eval()
    drafter.initialize_from(target, settings, torch.arange(512))
    return target, drafter


@torch.no_grad()
@pytest.mark.parametrize("sure", [0.0, 1.0, 99.0])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_joined_with_a_drafter(edd, prompts, corpus, sure, max_rows):
    target, drafter = edd
    target.tap(drafter.config.tapped_blocks)
    ngrams = self_draft(
        target, SelfDraftConfig(least=0.0, branches=1, branch_length=3, gram=2), corpus(target)
    )
    joined = HybridProposer(ngrams, TreeProposer(drafter, ChainPolicy(3)), sure=sure, least=0.1)
    stats, wanted = DecodeStats(), decode_all(target, NoProposer(), prompts, NEW, stop=())[0]
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, joined, prompts, NEW, (), stats=stats, max_rows=max_rows):
        for output, tokens in zip(outputs, step.tokens):
            output += tokens
    assert outputs == wanted and stats.accept_len > 1.2
    asked = sum(number for (evidence, _), number in ngrams.judged.items() if evidence == DRAFTER)
    assert (asked == 0) if sure == 0 else asked > 0


@torch.no_grad()
def test_the_drafter_is_skipped_where_the_candidates_of_all_rows_are_sure(edd, monkeypatch):
    """Their probabilities add up to 0.6 + 0.5 in one row and to 0.9 in the other."""
    target, drafter = edd
    target.tap(drafter.config.tapped_blocks)
    ngrams = SelfDraft(SelfDraftConfig(least=0.0), 512)
    kept = {
        7: Candidates([7, 20, 21], [-1, 0, 0], [0, 1, 1], [1.0, 0.6, 0.5], [(), (), ()]),
        8: Candidates([8, 22], [-1, 0], [0, 1], [1.0, 0.9], [(), ()]),
    }
    monkeypatch.setattr(ngrams, "candidates", lambda sequence, token, *given: kept[token])
    asked = []
    for roots, sure, drafts in (([7], 1.0, 0), ([7], 1.2, 1), ([7, 8], 1.0, 1), ([7, 8], 0.9, 0)):
        joined = HybridProposer(ngrams, TreeProposer(drafter, ChainPolicy(2)), sure=sure, least=0.0)
        asked.clear()

        def propose(state, root, own=joined.drafter.propose):
            asked.append(1)
            return own(state, root)

        monkeypatch.setattr(joined.drafter, "propose", propose)
        joined.propose(joined.new_state(len(roots), 32), torch.tensor(roots))
        assert len(asked) == drafts, (roots, sure)


@torch.no_grad()
@pytest.mark.parametrize("promise", [None, AcceptanceCurve((-16.0, -1.0, 0.0), (0.0, 0.0, 1.0))])
def test_the_most_probable_nodes_of_both_are_verified(edd, prompts, corpus, promise):
    target, drafter = edd
    target.tap(drafter.config.tapped_blocks)
    ngrams = self_draft(target, SelfDraftConfig(least=0.0, budget=9), corpus(target))
    tree = TreeProposer(drafter, Eagle2Policy(top_k=3, max_depth=3, total=9))
    joined = HybridProposer(ngrams, tree, sure=99.0, least=0.0, nodes=9, promise=promise)
    wanted, stats = decode_all(target, NoProposer(), prompts, NEW, stop=())[0], DecodeStats()
    outputs = [[] for _ in prompts]
    for step in decode(target, joined, prompts, NEW, (), stats=stats):
        for output, tokens in zip(outputs, step.tokens):
            output += tokens
    assert outputs == wanted
    # each step verifies nine nodes or as many as the output's limit leaves
    assert 7 < stats.verify_per_step <= 9
    kinds = {evidence == DRAFTER for evidence, _ in ngrams.judged}
    assert kinds == {True, False}


@torch.no_grad()
def test_nan_of_the_drafter_leaves_the_text_unchanged(edd, prompts, corpus):
    target, drafter = edd
    target.tap(drafter.config.tapped_blocks)
    spoiled = EddModel(drafter.config).eval()
    spoiled.initialize_from(target, DrafterConfig(tapped_blocks=[-2], layers=1), torch.arange(512))
    for parameter in spoiled.layers.parameters():
        parameter.fill_(math.nan)
    ngrams = self_draft(target, SelfDraftConfig(least=0.0, budget=9), corpus(target))
    tree = TreeProposer(spoiled, Eagle2Policy(top_k=3, max_depth=3, total=9))
    joined = HybridProposer(ngrams, tree, sure=99.0, least=0.0, nodes=9)
    wanted = decode_all(target, NoProposer(), prompts, NEW, stop=())[0]
    outputs = decode_all(target, joined, prompts, NEW, stop=())[0]
    assert outputs == wanted and ngrams.accepted


@torch.no_grad()
def test_a_policy_that_weighs_costs_limits_the_tree_of_both(edd, prompts, corpus):
    target, drafter = edd
    target.tap(drafter.config.tapped_blocks)
    dear = CostCurve((1, 4, 5), (0.01, 0.01, 9.0))  # up to three drafts cost nothing
    policy = TimedPolicy(CostCurve((1,), (1e-9,)), dear, 10.0, (0.9,), follow=0.0)
    ngrams = self_draft(target, SelfDraftConfig(least=0.0, budget=9), corpus(target))
    joined = HybridProposer(ngrams, TreeProposer(drafter, policy), sure=99.0, least=0.0)
    wanted = decode_all(target, NoProposer(), prompts[:1], NEW, stop=())[0]
    steps = list(decode(target, joined, prompts[:1], NEW, ()))
    assert [token for step in steps for token in step.tokens[0]] == wanted[0]
    assert {step.verified[0] for step in steps if step.verified[0]} >= {3}
    assert max(step.verified[0] for step in steps) == 3


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"branches": 2, "branch_length": 3}, "self_draft.gram: must be <= branch_length .3., got 4"),
        ({"budget": -1}, "self_draft.budget: must be >= 0 and <= 4096, got -1"),
        ({"longest": 0}, "self_draft.longest: must be >= 1 and <= 128, got 0"),
        ({"least": 1.0}, "self_draft.least: must be >= 0 and < 1, got 1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        SelfDraftConfig(**settings)


def test_no_more_recycled_tokens_than_the_target_has():
    with pytest.raises(UserError, match="self_draft.recycle: must be <= 3, the target's tokens, got 4"):
        SelfDraft(SelfDraftConfig(recycle=4), 3)
    with pytest.raises(UserError, match="self_draft.branches: must be <= 3, the target's tokens, got 4"):
        SelfDraft(SelfDraftConfig(branches=4), 5, special=(0, 1))
