"""The acceptance rule for drawn candidates: recursive rejection sampling."""

import torch

from drafttrain.inference.acceptance import Accepted, SamplingRule
from drafttrain.inference.sampling import draw, token_probs, uniform
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
