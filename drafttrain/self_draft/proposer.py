"""Self-Draft: the target drafts for itself, from n-gram caches and from branches that it extends (Self-Draft
paper, Algorithm 1).

One tree holds the candidates of the caches and N branches, chains of L tokens that the target extends by a
guess in every forward. A branch sees the text, the root and itself. It is verified like any other part of the
tree, so the output is exact, and shares nodes with the candidates. Its tokens and the target's prediction
after it are added to the context cache. Two more sources cost no forward and are ours: the prompt and the
accepted text, and the target's predictions after drafts, rejected ones too (`recycle`, the idea of Token
Recycling, Luo et al. 2024).
"""

import random
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch

from drafttrain.inference.per_sequence import PerSequence
from drafttrain.kernels.largest import largest
from drafttrain.self_draft.candidates import (
    CandidateModel,
    Candidates,
    Drafted,
    Features,
    Followers,
    Sources,
    grow,
)
from drafttrain.self_draft.context_cache import ACCEPTED, BRANCH, PROMPT, RECYCLED, ContextCache
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.trees.costs import CostCurve
from drafttrain.trees.interface import DEEPEST, LARGEST, WIDEST
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

LIVE: Features = ((BRANCH, 0, 0),)  # a token of a branch, not from a cache


@dataclass(frozen=True)
class SelfDraftConfig:
    """Settings of Self-Draft.

    Attributes:
        branches: N, number of branches; 0 for none.
        branch_length: L, tokens of a branch at most.
        gram: G, tokens of a branch that are stored with their successor.
        budget: candidates verified at most, branches not counted.
        least: least joint probability of a candidate.
        max_depth: layers of the tree of candidates.
        context: add the prompt and the accepted text to the cache.
        recycle: most probable tokens after each node that are added to the cache; 0 for none.
        longest: tokens of the longest prefix that is looked up in the context.
        width: followers taken from each cache.
        seed: seed of the tokens that branches start from.
    """

    branches: int = setting(0, ge=0, le=WIDEST)
    branch_length: int = setting(6, ge=1, le=DEEPEST)
    gram: int = setting(4, ge=1, le=DEEPEST)
    budget: int = setting(12, ge=0, le=LARGEST)
    least: float = setting(0.05, ge=0, lt=1)
    max_depth: int = setting(10, ge=1, le=DEEPEST)
    context: bool = True
    recycle: int = setting(4, ge=0, le=WIDEST)
    longest: int = setting(4, ge=1, le=DEEPEST)
    width: int = setting(4, ge=1, le=WIDEST)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(SelfDraftConfig).items():
            if kind is int and type(getattr(self, name)) is not int:
                raise UserError(f"self_draft.{name}: must be a whole number, got {getattr(self, name)!r}")
        check_ranges(self, "self_draft")
        if self.branches and self.gram > self.branch_length:
            raise UserError(
                f"self_draft.gram: must be <= branch_length ({self.branch_length}), got {self.gram}"
            )


@dataclass
class _Sequence:
    """One sequence's caches and branches.

    Attributes:
        text: verified tokens.
        sources: its n-gram caches.
        branches: tokens of each branch.
        sent: the tree that the target is verifying, root included.
        verified: number of its first nodes that are verified: the output's limit may cut it.
        ends: the node of each branch token in that tree, branch by branch.
    """

    text: list[int]
    sources: Sources
    branches: list[list[int]]
    sent: Candidates | None = None
    verified: int = 0
    ends: list[list[int]] = field(default_factory=list)


class SelfDraft(PerSequence):
    """Proposer of Self-Draft, which needs no drafter.

    Args:
        config: its settings.
        vocab_size: of the target; branches start from any token below it.
        special: tokens that no branch starts from.
        corpus: n-grams of a large text; None for none.
        odds: model of the candidates' acceptance, fitted by `tune_self_draft`; None for a rough guess.
        verify: seconds of a target forward by its tokens; with `rate` it limits the tree to the size that is
            worth its time. None: `budget` and `least` alone limit it.
        rate: tokens per second that verifying candidates has to yield.

    Attributes:
        accepted: number of accepted candidates by the source with the largest weight, over all sequences.
        judged: number of candidates whose parent was accepted, by features and acceptance, over all
            sequences. The last tree of an output may be missing.
        warning: why trees may have a wrong size, in one line.

    Raises:
        UserError: more branches, or more recycled tokens, than the vocabulary has.
    """

    def __init__(
        self,
        config: SelfDraftConfig,
        vocab_size: int,
        special: Collection[int] = (),
        corpus: CorpusCache | None = None,
        odds: CandidateModel | None = None,
        verify: CostCurve | None = None,
        rate: float = 0.0,
    ):
        self.config, self.vocab_size, self.special = config, vocab_size, frozenset(special)
        self.corpus, self.odds, self.verify, self.rate = corpus, odds or CandidateModel(), verify, rate
        self.warning: str | None = None
        if config.branches > vocab_size - len(self.special):
            raise UserError(
                f"self_draft.branches: must be <= {vocab_size - len(self.special)}, the target's tokens, got "
                f"{config.branches}"
            )
        if config.recycle > vocab_size:
            raise UserError(
                f"self_draft.recycle: must be <= {vocab_size}, the target's tokens, got {config.recycle}"
            )
        self._known_prices: dict[int, list[float]] = {}  # by the nodes verified in any case
        self._alone = threading.Lock()  # sequences of several threads may share their caches
        self.accepted: Counter[str] = Counter()
        self.judged: Counter[tuple[Features, bool]] = Counter()

    def with_costs(self, verify: CostCurve | None, rate: float = 0.0) -> "SelfDraft":
        """Return a proposer of the same caches with other costs of verifying, None for none, and counters of
        its own."""
        return SelfDraft(self.config, self.vocab_size, self.special, self.corpus, self.odds, verify, rate)

    # the state of a batch is a list of sequences

    def new_state(self, batch: int, max_len: int) -> list[_Sequence]:
        return [self._new_sequence() for _ in range(batch)]

    def _new_sequence(self) -> _Sequence:
        config, draws = self.config, random.Random(self.config.seed)
        starts: list[int] = []
        while len(starts) < config.branches:
            token = draws.randrange(self.vocab_size)
            if token not in self.special and token not in starts:
                starts.append(token)
        followers = max(8, config.width, config.recycle)
        text = ContextCache(config.longest, followers) if config.context else None
        drafted = ContextCache(config.longest, followers)
        sources = Sources(text, drafted, self.corpus, self.odds.copy(), config.width)
        return _Sequence([], sources, [[token] for token in starts])

    def prefix(self, state: list[_Sequence], length: int, room: int, tapped: torch.Tensor) -> list[_Sequence]:
        [fresh] = twin = self.new_state(1, room)
        self._observe(fresh, state[0].text[:length])
        return twin

    def learned(self, state: list[_Sequence]) -> Any:
        return state[0].sources

    def share(self, state: list[_Sequence], learned: Any) -> None:
        state[0].sources = learned

    def update(
        self, state: list[_Sequence], tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        for sequence, row, count in zip(state, tokens.tolist(), counts.tolist()):
            with self._alone:
                self._observe(sequence, row[:count])

    def _observe(self, sequence: _Sequence, tokens: list[int]) -> None:
        source = ACCEPTED if sequence.text else PROMPT
        known = min(len(sequence.text), self.config.longest)
        sequence.text += tokens
        if sequence.sources.text is not None:
            sequence.sources.text.add(sequence.text[-known - len(tokens) :], source, known)
        if sequence.sent is not None:
            odds = sequence.sources.odds
            for evidence, accepted in sequence.sent.first(sequence.verified).judged(tokens[1:]):
                self.judged[evidence, accepted] += 1
                if accepted:
                    self.accepted[max(evidence, key=odds.weight)[0]] += 1
                if evidence[0][1]:  # matched tokens, which branches and drafters have none of
                    odds.learn(evidence, accepted)
            sequence.sent = None

    def propose(self, state: list[_Sequence], root: torch.Tensor) -> TokenTree:
        for sequence, token in zip(state, root.tolist()):
            self.send(sequence, self.candidates(sequence, token))
        sent = [sequence.sent for sequence in state]
        return tree_of_lists([tree.tokens for tree in sent], [tree.parents for tree in sent], root.device)

    def candidates(
        self,
        sequence: _Sequence,
        root: int,
        drafted: Drafted | None = None,
        least: float = 0.0,
        followers: Followers | None = None,
    ) -> Candidates:
        """Return the caches' candidates after a sequence's root token, or a drafter's tree with those added
        whose joint probability is at least `least`.

        Args:
            followers: of the sequence's caches, if the caller remembers what they returned.
        """
        config, sources = self.config, sequence.sources
        context = config.longest if self.corpus is None else max(config.longest, self.corpus.max_prefix)
        text, least = [*sequence.text[-context:], root], max(least, config.least)
        first = 1 if drafted is None else len(drafted.tree.tokens)
        prices = None if self.verify is None else self._prices(first)
        with self._alone:
            found = followers or sources.followers
            return grow(text, found, config.budget, least, config.max_depth, context, prices, drafted)

    def send(self, sequence: _Sequence, tree: Candidates) -> None:
        """Add the branches to a tree of candidates and make it the tree that is verified next."""
        sequence.sent, sequence.ends = tree.with_chains(sequence.branches, LIVE)
        sequence.verified = len(sequence.sent.tokens)

    def _prices(self, first: int) -> list[float]:
        """Return how many accepted tokens verifying 0, 1, … candidates beyond the first nodes costs."""
        if first not in self._known_prices:
            branches = self.config.branches * self.config.branch_length  # verified in any case
            seconds = [self.verify(first + branches + n) for n in range(self.config.budget + 1)]
            self._known_prices[first] = [self.rate * (one - seconds[0]) for one in seconds]
        return self._known_prices[first]

    def harvest(self, state: list[_Sequence], tree: TokenTree, logits: torch.Tensor) -> None:
        """Learn the target's predictions after each node of the proposed trees, from logits [B, n, V]."""
        config = self.config
        for sequence, size in zip(state, tree.sizes.tolist()):
            sequence.verified = size
        if not (config.recycle or config.branches):
            return
        said = largest(logits, max(config.recycle, 1)).tolist()  # [B, n, k]
        for sequence, rows in zip(state, said):
            if sequence.verified == len(sequence.sent.tokens):  # else the output's limit has cut the tree
                with self._alone:
                    self._harvest(sequence, rows)

    def _harvest(self, sequence: _Sequence, said: list[list[int]]) -> None:
        config, drafted, tree = self.config, sequence.sources.drafted, sequence.sent
        if config.recycle:
            paths = tree.paths(sequence.text[-config.longest + 1 :] if config.longest > 1 else [])
            for path, tokens in zip(paths, said):  # the most probable becomes the newest
                drafted.add_after(path, tokens[config.recycle - 1 :: -1], RECYCLED)
        for branch, nodes in zip(sequence.branches, sequence.ends):
            for end in range(config.gram, len(branch) + 1):
                drafted.add([*branch[end - config.gram : end], said[nodes[end - 1]][0]], BRANCH)
            branch.append(said[nodes[-1]][0])
            del branch[: max(0, len(branch) - config.branch_length)]
