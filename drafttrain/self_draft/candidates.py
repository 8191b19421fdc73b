"""Candidates from n-gram caches, merged into one tree of the most probable ones.

Each cache returns the tokens that followed the end of the text before. The probability that such a token is
accepted depends on the caches that offer it, the length of the match and the token's rank there (its
`Features`). A logistic model of these, fitted while tuning, is updated in each sequence, and the tree grows
best first by the products of its probabilities.
Self-Draft orders candidates by source, length and frequency alone (paper, "Draft Cache Initialization").
"""

import heapq
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from drafttrain.self_draft.context_cache import ContextCache
from drafttrain.self_draft.corpus_cache import CorpusCache

CORPUS = "corpus"
MOST = 60.0  # limit of log-odds, so that their exponential does not overflow
RANKS = 3  # distinct ranks of the followers of a context prefix; further followers have the last one
SHARES = 5  # classes of a follower's share of its corpus prefix, each half of the one before

Feature = tuple[str, int, int]  # source, matched tokens, rank or class of share
Features = tuple[Feature, ...]  # of one candidate: an offer from each cache that has it
# returns the candidates after a text, with their probabilities and features
Followers = Callable[[tuple[int, ...]], dict[int, tuple[float, Features]]]


@dataclass
class CandidateModel:
    """Logistic model of the probability of acceptance, additive in a candidate's offers and their number.

    Attributes:
        bias: log-odds that every candidate starts from.
        weights: log-odds that an offer adds; `unknown` gives those of offers without a weight.
        agreement: log-odds that the number of caches offering the token adds.
        rate: learning rate of the updates.
    """

    bias: float = -1.2
    weights: dict[Feature, float] = field(default_factory=dict)
    agreement: dict[int, float] = field(default_factory=dict)
    rate: float = 0.1

    @staticmethod
    def unknown(offer: Feature) -> float:
        """Return a rough weight for an offer that tuning has not seen, by length of its match and rank."""
        return 0.7 * (offer[1] - 1 - offer[2])

    def weight(self, offer: Feature) -> float:
        """Return the log-odds that an offer adds."""
        found = self.weights.get(offer)
        return self.unknown(offer) if found is None else found

    def __call__(self, evidence: Features) -> float:
        """Return the probability that a candidate with these features is accepted."""
        odds = self.bias + self.agreement.get(len(evidence), 0.0) + sum(map(self.weight, evidence))
        return 1 / (1 + math.exp(-max(-MOST, min(MOST, odds))))

    def learn(self, evidence: Features, accepted: bool) -> None:
        """Take a step of gradient descent on the log-loss of a verified candidate."""
        step = self.rate * (accepted - self(evidence))
        self.agreement[len(evidence)] = self.agreement.get(len(evidence), 0.0) + step
        for offer in evidence:
            self.weights[offer] = self.weight(offer) + step

    def copy(self) -> "CandidateModel":
        """Return a copy, which one sequence updates."""
        return CandidateModel(self.bias, dict(self.weights), dict(self.agreement), self.rate)


@dataclass
class Candidates:
    """A tree of candidates, the root first; parents come before children.

    Attributes:
        tokens: of each node.
        parents: index of each node's parent, -1 for the root.
        depths: distance from the root.
        joint: probability that each is accepted.
        evidence: features of each; empty for the root.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    joint: list[float]
    evidence: list[Features]

    @classmethod
    def of(cls, root: int) -> "Candidates":
        """Return the tree of a root token alone."""
        return cls([root], [-1], [0], [1.0], [()])

    def first(self, n: int) -> "Candidates":
        """Return the first n nodes, which include the parents of all others among them."""
        return self if n == len(self.tokens) else Candidates(*(values[:n] for values in vars(self).values()))

    def judged(self, accepted: Sequence[int]) -> list[tuple[Features, bool]]:
        """Return the features of all candidates whose parent was accepted, and whether they were.

        Args:
            accepted: the accepted tokens after the root.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        outcomes, node = [], 0
        for token in [*accepted, None]:
            following = None
            for child in children.get(node, ()):
                right = following is None and self.tokens[child] == token
                following = child if right else following
                outcomes.append((self.evidence[child], right))
            if following is None:
                break
            node = following
        return outcomes

    def paths(self, before: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, for each node, the given tokens and those from the root to it."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents):
            paths.append((*(paths[parent] if parent >= 0 else before), token))
        return paths

    def index(self) -> dict[tuple[int, int], int]:
        """Return the index of each node by its (parent, token)."""
        return {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens))}

    def best(self, n: int) -> "Candidates":
        """Return the sub-tree of the root and the n most probable other nodes."""
        if n >= len(self.tokens) - 1:
            return self
        order = sorted(range(1, len(self.tokens)), key=lambda node: -self.joint[node])  # stable
        return self._of([0, *sorted(order[:n])])

    def with_chains(
        self, chains: Sequence[Sequence[int]], evidence: Features
    ) -> tuple["Candidates", list[list[int]]]:
        """Return the tree in breadth-first order with chains after its root, and the node of each token of
        each chain; existing nodes are shared."""
        tree = Candidates(*([*values] for values in vars(self).values()))
        index = tree.index()
        nodes: list[list[int]] = []
        for chain in chains:
            node, passed = 0, []
            for token in chain:
                if (node, token) not in index:
                    index[node, token] = tree.add(node, token, 0.0, evidence)
                node = index[node, token]
                passed.append(node)
            nodes.append(passed)
        order = sorted(range(len(tree.tokens)), key=tree.depths.__getitem__)
        place = {node: i for i, node in enumerate(order)}
        return tree._of(order), [[place[node] for node in passed] for passed in nodes]

    def _of(self, nodes: Sequence[int]) -> "Candidates":
        """Return the sub-tree of these nodes, in this order; it must contain the parent of each."""
        place = {node: i for i, node in enumerate(nodes)}
        tree = Candidates(*([values[node] for node in nodes] for values in vars(self).values()))
        tree.parents = [place[parent] if parent >= 0 else -1 for parent in tree.parents]
        return tree

    def add(self, parent: int, token: int, joint: float, evidence: Features) -> int:
        """Append a node; return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.joint.append(joint)
        self.evidence.append(evidence)
        return len(self.tokens) - 1


@dataclass
class Drafted:
    """A drafter's tree.

    Attributes:
        tree: its nodes.
        shares: the drafter's probability of each node given its parent; 1 for the root.
    """

    tree: Candidates
    shares: list[float]


def grow(
    text: Sequence[int],
    followers: Followers,
    budget: int,
    least: float,
    max_depth: int,
    context: int,
    prices: Sequence[float] | None = None,
    drafted: Drafted | None = None,
) -> Candidates:
    """Grow the tree of the candidates most likely to be accepted, best first.

    A drafted node that a cache offers as well gets the higher of both probabilities and the candidate's
    features, so that the outcome updates their model. Where the cache's is higher, the drafter's nodes below
    it rise, too.

    Args:
        text: emitted tokens; the last one is the root.
        followers: of the caches.
        budget: candidates that are added at most.
        least: least joint probability of a candidate.
        max_depth: greatest depth of a candidate.
        context: number of last tokens that `followers` reads.
        prices: price of verifying 0 to `budget` candidates, in accepted tokens; the number of candidates with
            the largest net gain is kept. None: all are kept.
        drafted: a drafter's tree, which is extended in place; candidates may follow any of its nodes. None:
            the tree starts from the root alone.
    """
    tree = Candidates.of(text[-1]) if drafted is None else drafted.tree
    paths = tree.paths(text[-context:-1])
    heap: list[tuple[float, int, int, int, Features]] = []
    order = 0
    known, start = tree.index(), len(tree.tokens)
    offered: dict[int, float] = {}  # the caches' probability of drafted nodes given their parents
    raised: set[int] = set()

    def offer(node: int) -> None:
        nonlocal order
        if tree.depths[node] >= max_depth:
            return
        for token, (share, evidence) in followers(paths[node]).items():
            if (child := known.get((node, token))) is not None:
                offered[child], tree.evidence[child] = share, evidence
            elif (joint := tree.joint[node] * share) >= least:
                order += 1
                heapq.heappush(heap, (-joint, order, node, token, evidence))

    for node in range(start):  # parents before children
        parent = tree.parents[node]
        share = max(offered.get(node, 0.0), drafted.shares[node] if parent in raised else 0.0)
        if node and tree.joint[parent] * share > tree.joint[node]:
            tree.joint[node] = tree.joint[parent] * share
            raised.add(node)
        if tree.joint[node] >= least:
            offer(node)
    for n in range(budget):
        if not heap:
            break
        joint, _, parent, token, evidence = heapq.heappop(heap)
        # no later candidate is more probable than this one, which bounds the gain of every larger tree
        if prices and not any(m * -joint > prices[n + m] - prices[n] for m in range(1, budget - n + 1)):
            break
        paths.append((*paths[parent][-context + 1 :], token))
        offer(tree.add(parent, token, -joint, evidence))
    if not prices:
        return tree
    gains = list(map(operator.sub, accumulate(tree.joint[start:], initial=0.0), prices))
    return tree.first(start + max(range(len(gains)), key=gains.__getitem__))


@dataclass
class Sources:
    """N-gram caches that one sequence drafts from.

    Attributes:
        text: n-grams of the prompt and of the accepted text; None to leave it out.
        drafted: n-grams of branches and of the target's predictions after drafts.
        corpus: n-grams of a large text; None to leave it out.
        odds: model of the candidates' acceptance.
        width: followers taken from each cache.
    """

    text: ContextCache | None
    drafted: ContextCache
    corpus: CorpusCache | None
    odds: CandidateModel
    width: int = 4

    def followers(self, text: Sequence[int]) -> dict[int, tuple[float, Features]]:
        """Return the candidates after a text, with probabilities and features."""
        offers: dict[int, list[Feature]] = {}
        for cache in (self.text, self.drafted):
            if cache is not None:
                matched, tokens = cache.after(text)
                for rank, (token, source) in enumerate(tokens[: self.width]):
                    offers.setdefault(token, []).append((source, matched, min(rank, RANKS - 1)))
        if self.corpus is not None:
            matches = self.corpus.next_tokens(text, self.width)
            for token, count in zip(matches.tokens, matches.counts):
                offer = (CORPUS, matches.matched, share_class(count, matches.total))
                offers.setdefault(token, []).append(offer)
        return {token: (self.odds(known), known) for token, known in zip(offers, map(tuple, offers.values()))}


def share_class(count: int, total: int) -> int:
    """Return 0 for more than half of all occurrences, 1 for more than a quarter, up to SHARES - 1."""
    return min(int(math.log2(total / count)), SHARES - 1)
