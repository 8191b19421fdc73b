"""The acceptance rule for drawn candidates: recursive rejection sampling."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from drafttrain.inference.acceptance import Accepted
from drafttrain.inference.drawing import SamplingRule
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.sampling import is_cut, kept_tokens, uniform
from drafttrain.kernels.draw import draw_logits, reject_drafts
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
        params = [self.params[number] for number in self.numbers]
        if all(one.temperature > 0 and not is_cut(one) for one in params):
            own, drawn = (tree.tokens, tree.parents, tree.sizes), tree.drawn_from
            draws = zip(*((one.temperature, one.seed) for one in params), strict=True)
            positions = [self.emitted[number] for number in self.numbers]
            found = reject_drafts(logits, own, drawn and (drawn.probs, drawn.ids), *draws, positions)
            if found is not None:
                for number, count in zip(self.numbers, found[1].tolist()):
                    self.emitted[number] += count
                return Accepted(*found)
        return self._in_python(tree, logits)

    def _in_python(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        parents, tokens, sizes = (part.tolist() for part in (tree.parents, tree.tokens, tree.sizes))
        candidates = _Candidates.of(tree, logits)
        paths, after = [], []
        for row, number in enumerate(self.numbers):
            drafts: dict[int, list[tuple[int, int]]] = {}  # (node, token) of the children of each node
            for node, (parent, token) in enumerate(zip(parents[row][: sizes[row]], tokens[row])):
                drafts.setdefault(parent, []).append((node, token))
            path, token = self._walk(drafts, candidates, logits[row], row, number)
            paths.append(path)
            after.append(token)
            self.emitted[number] += len(path)
        return Accepted.of(paths, after, tree.tokens.device)

    def _walk(
        self,
        drafts: dict[int, list[tuple[int, int]]],
        candidates: "_Candidates | None",
        logits: torch.Tensor,
        row: int,
        number: int,
    ) -> tuple[list[int], int]:
        """Return a row's accepted nodes from the root on, and the target's own token after them, from logits
        [n, V]."""
        params = self.params[number]
        node, path = 0, [0]
        while True:
            position = self.emitted[number] + len(path) - 1
            p = _distribution(logits[node], params, uniform(params.seed, position))
            if node not in drafts:
                return path, p.token
            ids, q = candidates.ids[row, node], candidates.probs[row, node]  # [K]
            chances = p.at(ids, candidates.logits[row, node])
            if not (np.isfinite(chances).all() and np.isfinite(q).all()):
                return path, p.token
            accepted, left, elsewhere = _choose(chances, q, ids, drafts[node], params.seed, position)
            if accepted is None:
                return path, _draw_rest(p, ids, left, elsewhere)
            node = accepted
            path.append(node)


@dataclass(frozen=True)
class _Candidates:
    """Distributions that the children of each node were drawn from, on the host, where a step of the walk
    over a tree takes less time than one torch operator.

    Attributes:
        ids: the tokens that could be drawn, int64 [B, n, K].
        probs: their probabilities in q, fp64 [B, n, K].
        logits: their logits by the target, fp64 [B, n, K].
    """

    ids: np.ndarray
    probs: np.ndarray
    logits: np.ndarray

    @classmethod
    def of(cls, tree: TokenTree, logits: torch.Tensor) -> "_Candidates | None":
        """Return the candidates of trees with target logits [B, n, V]; None if the trees have no drafts."""
        if tree.drawn_from is None:
            return None
        ids, probs = tree.drawn_from.ids, tree.drawn_from.probs
        parts = ids, probs.double(), logits.gather(-1, ids).double()
        return cls(*(part.numpy(force=True) for part in parts))


def _choose(
    p: np.ndarray, q: np.ndarray, ids: np.ndarray, drafts: list[tuple[int, int]], seed: int, position: int
) -> tuple[int | None, np.ndarray, float]:
    """Accept one of the children of a node, which are (node, token) pairs, or none.

    q is 0 except at the K tokens that could be drawn, `ids` [K], so elsewhere p is only scaled. All but the
    last step are computed from K numbers, on the host.

    Returns:
        the accepted node or None; what is then left of p at those tokens, [K], and its sum elsewhere.
    """
    left, elsewhere = p, max(0.0, 1.0 - float(p.sum()))
    places = ids.tolist()
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
        q = q.copy()  # it belongs to the tree
        q[place] = 0.0
        q /= max(q.sum(), 1e-300)
    return None, left, elsewhere


def _draw_rest(p: "_Whole | _Cut", ids: np.ndarray, left: np.ndarray, elsewhere: float) -> int:
    """Draw the target's token from the rest of p: `left` [K] at `ids`, and `elsewhere` in sum elsewhere."""
    cumulative = left.cumsum()
    goal = p.uniform * (cumulative[-1] + elsewhere)
    if goal >= cumulative[-1] and elsewhere > 0:
        if (other := p.without(ids, (goal - cumulative[-1]) / elsewhere)) is not None:
            return other  # without other tokens, `elsewhere` is a rounding error
    if not left.any():  # and nothing else is left: p is q up to rounding
        return p.token
    place = cumulative.searchsorted(goal, "right")
    return int(ids[min(place, left.nonzero()[0].max())])  # rounding may put the goal at the end


class _Whole:
    """The softmax of logits [V], without a tensor of probabilities.

    Attributes:
        uniform, token: the number in [0, 1) that draws the token, and the token; where logits are not finite,
            the index of one of these.
    """

    def __init__(self, logits: torch.Tensor, temperature: float, uniform: float):
        self.logits, self.temperature, self.uniform = logits, temperature, uniform
        share = torch.tensor([uniform], dtype=torch.float64, device=logits.device)  # [1]
        rounded = torch.tensor([temperature], dtype=torch.float, device=logits.device)  # [1]
        token, log_mass = draw_logits(logits[None], rounded, share)
        self.token, self.log_mass = int(token), float(log_mass)

    def at(self, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities of tokens [K], whose logits these are."""
        with np.errstate(invalid="ignore", over="ignore"):  # logits may be infinite; the caller looks
            return np.exp(logits * float(np.float32(1) / np.float32(self.temperature)) - self.log_mass)

    def without(self, ids: np.ndarray, uniform: float) -> int | None:
        """Draw another token than these; None if there is none."""
        rest = self.logits.index_fill(0, torch.as_tensor(ids, device=self.logits.device), -torch.inf)  # [V]
        return _Whole(rest, self.temperature, uniform).token if rest.max().isfinite() else None


class _Cut:
    """The part of a distribution that top-k, top-p or temperature 0 leaves: tokens [m], ascending, with their
    probabilities. It has the interface of `_Whole`."""

    def __init__(self, tokens: np.ndarray, probs: np.ndarray, uniform: float):
        self.tokens, self.probs, self.uniform = tokens, probs, uniform

    @cached_property
    def token(self) -> int:  # most nodes that a walk reaches have drafts below them and never need it
        cumulative = self.probs.cumsum()
        place = cumulative.searchsorted(self.uniform * cumulative[-1], "right")
        return int(self.tokens[min(place, self.probs.nonzero()[0].max())])  # rounding may reach the end

    def at(self, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        places, is_kept = self._find(ids)
        return np.where(is_kept, self.probs[places], 0.0)

    def without(self, ids: np.ndarray, uniform: float) -> int:
        others, (places, is_kept) = self.probs.copy(), self._find(ids)
        others[places[is_kept]] = 0.0
        # without others, what is left to draw is a rounding error
        return _Cut(self.tokens, others if others.any() else self.probs, uniform).token

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of tokens [K] among those kept, and whether each is one of them."""
        # not `clip`, whose look at the limits of the dtype takes longer than all the rest
        places = np.minimum(self.tokens.searchsorted(ids), len(self.tokens) - 1)
        return places, self.tokens[places] == ids


def _distribution(logits: torch.Tensor, params: SamplingParams, uniform: float) -> _Whole | _Cut:
    """Return the distribution of the target's token after a node, whose logits are [V]."""
    if params.temperature == 0 or is_cut(params):
        tokens, probs = kept_tokens(logits, params)
        if np.isfinite(probs[0]):
            return _Cut(tokens, probs, uniform)
    return _Whole(logits, params.temperature or 1.0, uniform)
