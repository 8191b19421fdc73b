"""The acceptance rule for drawn candidates: recursive rejection sampling."""

import numpy as np
import torch

from drafttrain.inference.acceptance import Accepted, SamplingRule
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.sampling import is_cut, token_probs, uniform
from drafttrain.kernels.draw import draw, draw_logits
from drafttrain.trees.tree import TokenTree


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
        return Accepted.of(paths, tokens, tree.tokens.device)

    def _walk(self, tree: TokenTree, logits: torch.Tensor, row: int, number: int) -> tuple[list[int], int]:
        """Return a row's accepted nodes from the root on, and the target's own token after them, from logits
        [n, V]."""
        params = self.params[number]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[row, : int(tree.sizes[row])].tolist()):
            children.setdefault(parent, []).append(node)
        tokens = tree.tokens[row].tolist()
        node, path = 0, [0]
        while True:
            position = self.emitted[number] + len(path) - 1
            p = _distribution(logits[node], params, uniform(params.seed, position))
            if node not in children:
                return path, p.token
            ids, q = (part[row, node] for part in (tree.drawn_from.ids, tree.drawn_from.probs))  # [K]
            chances = p.at(ids)
            if not np.isfinite(chances).all():
                return path, p.token
            drafts = [(child, tokens[child]) for child in children[node]]
            accepted, left, elsewhere = _choose(chances, q, ids, drafts, params.seed, position)
            if accepted is None:
                return path, _draw_rest(p, ids, left, elsewhere)
            node = accepted
            path.append(node)


def _choose(
    p: np.ndarray, q: torch.Tensor, ids: torch.Tensor, drafts: list[tuple[int, int]], seed: int, position: int
) -> tuple[int | None, np.ndarray, float]:
    """Choose among the drafts, node and token each, that follow a node.

    p and q differ at the K tokens that could be drawn, `ids` [K]; elsewhere p is only scaled. So all but the
    last step are made of K numbers, on the host.

    Returns:
        the node that is accepted or None; what is then left of p at those tokens, [K], and elsewhere in all.
    """
    left, elsewhere = p, max(0.0, 1.0 - float(p.sum()))
    q, places = q.double().cpu().numpy(), ids.tolist()
    for candidate, (node, token) in enumerate(drafts, 1):
        place = places.index(token)
        if q[place] == 0:  # q had nothing left to draw
            break
        rest = np.maximum(left - q, 0.0)
        mass = elsewhere + float(rest.sum())
        # without a rest p is q up to rounding, and nothing is ever rejected
        if uniform(seed, position, candidate) * q[place] < left[place] or not mass > 0:
            return node, left, elsewhere
        left, elsewhere = rest / mass, elsewhere / mass
        q = q.copy()  # the tree's own, where its numbers are fp64
        q[place] = 0.0
        q /= max(q.sum(), 1e-300)
    return None, left, elsewhere


def _draw_rest(p: "_Whole | _Cut", ids: torch.Tensor, left: np.ndarray, elsewhere: float) -> int:
    """Draw from what is `left` [K] of p at some tokens and, where it is only scaled, `elsewhere`."""
    cumulative = left.cumsum()
    goal = p.uniform * (cumulative[-1] + elsewhere)
    if goal >= cumulative[-1] and elsewhere > 0:
        return p.without(ids, (goal - cumulative[-1]) / elsewhere)
    place = cumulative.searchsorted(goal, "right")
    return int(ids[min(place, left.nonzero()[0].max())])  # rounding may leave the last one's share open


class _Whole:
    """The softmax of logits [V], without a tensor of probabilities.

    Attributes:
        uniform, token: the number in [0, 1) that draws the token, and this; of logits that are not finite the
            place of one.
    """

    def __init__(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: float):
        self.logits, self.temperature, self.uniform = logits, temperature, uniform
        share = torch.tensor([uniform], dtype=torch.float64, device=logits.device)  # [1]
        token, self.log_mass = draw_logits(logits[None], temperature, share)
        self.token = int(token)

    def at(self, ids: torch.Tensor) -> np.ndarray:
        """Return the probabilities of tokens [K]."""
        scaled = self.logits[ids].double() / self.temperature  # [K]
        return (scaled - self.log_mass).exp().cpu().numpy()

    def without(self, ids: torch.Tensor, uniform: float) -> int:
        """Draw another token than these."""
        return _Whole(self.logits.index_fill(0, ids, -torch.inf), self.temperature, uniform).token


class _Cut:
    """A distribution [V] of which top-k or top-p leaves a part, or temperature 0 one token; as `_Whole`."""

    def __init__(self, probs: torch.Tensor, uniform: float):
        self.probs, self.uniform = probs, uniform
        share = torch.tensor([uniform], dtype=torch.float64, device=probs.device)  # [1]
        self.token = int(draw(probs[None], share))

    def at(self, ids: torch.Tensor) -> np.ndarray:
        return self.probs[ids].cpu().numpy()

    def without(self, ids: torch.Tensor, uniform: float) -> int:
        return _Cut(self.probs.index_fill(0, ids, 0.0), uniform).token


def _distribution(logits: torch.Tensor, params: SamplingParams, uniform: float) -> _Whole | _Cut:
    """Return what the target's token after a node is drawn from, by its logits [V]."""
    if (params.temperature == 0 or is_cut(params)) and logits.max().isfinite():
        return _Cut(token_probs(logits, params), uniform)
    temperature = params.temperature or 1.0
    return _Whole(logits, torch.tensor([temperature], device=logits.device), uniform)
