"""Acceptance rules: which drafted nodes the target would have produced itself, and the token after them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.inference.sampling import Sampler, SamplingParams, draw, token_probs, uniform
from drafttrain.kernels.maximum import first_maximum
from drafttrain.trees.tree import TokenTree


@dataclass
class Accepted:
    """The outcome of one verification.

    Attributes:
        path: accepted nodes of each row from the root on, int64 [B, m]; rows shorter than m are padded with
            other nodes of the tree.
        counts: length of each path, root included, int64 [B]; m is the largest.
        next_token: what the target itself emits after the path, int64 [B].
    """

    path: torch.Tensor
    counts: torch.Tensor
    next_token: torch.Tensor


class AcceptanceRule(ABC):
    """Compare trees with the target's logits after each of their nodes."""

    @abstractmethod
    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        """Return the accepted path of each row and the target's own token after it.

        Args:
            logits: of the target after each node, [B, n, V].
        """

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for; a rule that treats all alike does nothing."""


class AcceptGreedy(AcceptanceRule):
    """Accept the longest path whose every token is the target's most probable one (temperature 0).

    Among equal logits the smallest token id wins, in drafting and in plain decoding alike.
    """

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        return follow(tree, first_maximum(logits))


accept_greedy = AcceptGreedy()


def rule_for(sampling: Sequence[SamplingParams], draws: bool) -> AcceptanceRule:
    """Return the exact rule for these parameters, one for each prompt.

    Args:
        draws: whether candidates are drawn at random (`Proposer.draws`).
    """
    if draws:
        return RejectionSampling(sampling)
    return AcceptMatching(sampling) if any(params.temperature for params in sampling) else accept_greedy


class SamplingRule(AcceptanceRule):
    """The base of rules that draw.

    Args:
        params: of each prompt; `add` takes those of further prompts.
    """

    def __init__(self, params: Sequence[SamplingParams] = ()):
        self.params = list(params)
        self.emitted = [0] * len(self.params)  # tokens of each prompt so far
        self.numbers: list[int] | None = None
        self.set_active(range(len(self.params)))

    def add(self, params: SamplingParams) -> None:
        """Take the next prompt's parameters."""
        self.params.append(params)
        self.emitted.append(0)

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for, each named once: draws are counted by prompt."""
        self.numbers = _different(numbers)


class AcceptMatching(SamplingRule):
    """Sampling with deterministic candidates (trees of most probable tokens): the target's token after each
    node is drawn from its own distribution, and the path goes on as long as a child has the token drawn.

    Exact, because a draw never depends on the tree, and no rule can accept more of candidates that were not
    drawn themselves: a token is accepted with the target's probability of it. A draw belongs to its position
    in the output (`sampling.uniform`), so the text is that of plain sampling with the same seed.

    One object serves one call of `decode`.
    """

    def set_active(self, numbers: Sequence[int]) -> None:
        if (numbers := _different(numbers)) != self.numbers:
            self.numbers, self.sampler = numbers, Sampler([self.params[number] for number in numbers])

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        device = tree.sizes.device
        emitted = torch.tensor([self.emitted[number] for number in self.numbers], device=device)  # [B]
        rows = torch.arange(len(emitted), device=device)  # [B]
        node = torch.zeros_like(tree.sizes)  # [B] the last accepted one
        path, counts = [node], torch.ones_like(tree.sizes)
        while True:  # only what the path reaches is drawn: a draw sorts thousands of probabilities
            position = emitted + tree.depths[rows, node]  # [B]
            after = logits if tree.width == 1 else logits[rows, node][:, None]  # [B, 1, V]
            token = self.sampler.pick(after, position[:, None])[:, 0]  # [B]
            child = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid  # [B, n]
            if not child.any():
                break
            # a row whose path has ended draws the same again and finds no child again
            counts = counts + child.any(1)
            node = torch.where(child.any(1), child.byte().argmax(1), node)
            path.append(node)
        for number, count in zip(self.numbers, counts.tolist()):
            self.emitted[number] += count
        return Accepted(torch.stack(path, 1), counts, token)


class RejectionSampling(SamplingRule):
    """Sampling with drawn candidates: recursive rejection over the children of a node, in the order in which
    they were drawn without replacement (Leviathan et al. 2023 for one candidate; SpecInfer, MCSD and SEED
    for several).

    A candidate x drawn from q is accepted with min(1, p(x) / q(x)). After a rejection p becomes the
    normalized positive part of p - q, and q loses x. What remains of p after the last rejection gives the
    target's own token. Exact for every q that the candidates were really drawn from (`TokenTree.drawn_from`).

    One object serves one call of `decode`.
    """

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        paths, tokens = [], []
        for row, number in enumerate(self.numbers):
            path, token = self._walk(tree, logits[row], row, number)
            paths.append(path)
            tokens.append(token)
            self.emitted[number] += len(path)
        longest = max(map(len, paths))
        padded = [path + [0] * (longest - len(path)) for path in paths]
        device = tree.tokens.device
        return Accepted(
            torch.tensor(padded, device=device),  # [B, m]
            torch.tensor([len(path) for path in paths], device=device),
            torch.tensor(tokens, device=device),
        )

    def _walk(self, tree: TokenTree, logits: torch.Tensor, row: int, number: int) -> tuple[list[int], int]:
        """Return a row's accepted nodes from the root on, and the target's own token after them, from logits
        [n, V]."""
        params = self.params[number]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[row, : int(tree.sizes[row])].tolist()):
            children.setdefault(parent, []).append(node)
        node, path = 0, [0]
        while True:
            position = self.emitted[number] + len(path) - 1
            p = token_probs(logits[node], params)  # [V]
            accepted, p = self._choose(tree, p, row, children.get(node, []), params.seed, position)
            if accepted is None:
                return path, draw(p, uniform(params.seed, position))
            node = accepted
            path.append(node)

    @staticmethod
    def _choose(
        tree: TokenTree, p: torch.Tensor, row: int, children: list[int], seed: int, position: int
    ) -> tuple[int | None, torch.Tensor]:
        """Return the child that is accepted of a row's node, or None with what is left of p, [V].

        p and q differ at the K tokens that could be drawn; elsewhere p is only scaled. So all but the last
        step are made of K numbers, on the host.
        """
        if not children:
            return None, p
        parent = tree.parents[row, children[0]]
        ids = tree.drawn_from.ids[row, parent]  # [K]
        q, places = tree.drawn_from.probs[row, parent].tolist(), ids.tolist()
        left = p[ids].tolist()  # of p at these tokens
        elsewhere, scale = max(0.0, 1.0 - sum(left)), 1.0
        for candidate, child in enumerate(children, 1):
            place = places.index(int(tree.tokens[row, child]))
            if q[place] == 0:  # q had nothing left to draw
                break
            rest = [max(target - draft, 0.0) for target, draft in zip(left, q)]
            mass = elsewhere + sum(rest)
            # without a rest p is q up to rounding, and nothing is ever rejected
            if uniform(seed, position, candidate) * q[place] < left[place] or not mass > 0:
                return child, p
            left, elsewhere, scale = [value / mass for value in rest], elsewhere / mass, scale / mass
            q[place] = 0.0
            total = max(sum(q), 1e-300)
            q = [value / total for value in q]
        return None, (p * scale).index_copy(0, ids, torch.tensor(left, dtype=p.dtype, device=p.device))


def _different(numbers: Sequence[int]) -> list[int]:
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"numbers: must differ, got {list(numbers)}; give forked rows numbers of their own")
    return list(numbers)


def follow(tree: TokenTree, choices: torch.Tensor) -> Accepted:
    """Return the longest path whose every token is the target's choice after the node before it.

    Args:
        choices: the target's token after each node, int64 [B, n].
    """
    if tree.width == 1:  # plain decoding
        return Accepted(torch.zeros_like(choices), torch.ones_like(tree.sizes), choices[:, 0])
    # a walk on the host: a tree has some dozens of nodes, and each of torch's operators takes as long
    facts = torch.stack([choices, tree.tokens, tree.parents, tree.depths]).tolist()  # [4, B, n]
    paths = []
    for chosen, tokens, parents, depths in zip(*facts):
        right, leaf = [True], 0
        for node in range(1, tree.width):
            right.append(right[parents[node]] and tokens[node] == chosen[parents[node]])
            if right[node] and depths[node] > depths[leaf]:  # a padding node has depth 0
                leaf = node
        path = [leaf]
        while path[-1]:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    longest = max(map(len, paths))
    rows = []
    for path, chosen in zip(paths, facts[0]):
        others = [node for node in range(tree.width) if node not in path]
        rows.append([*[*path, *others][:longest], len(path), chosen[path[-1]]])
    columns = torch.tensor(rows, device=choices.device)  # [B, m + 2]
    return Accepted(columns[:, :longest], columns[:, longest], columns[:, longest + 1])
