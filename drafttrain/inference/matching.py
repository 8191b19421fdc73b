"""The acceptance rule for sampling with the drafter's most probable candidates."""

from collections.abc import Sequence

import torch

from drafttrain.inference.acceptance import Accepted
from drafttrain.inference.drawing import SamplingRule, require_different
from drafttrain.inference.sampling import Sampler
from drafttrain.trees.tree import TokenTree

AT_ONCE = 1 << 27  # logits that are drawn from together: 512 MB in fp32


class AcceptMatching(SamplingRule):
    """Sampling with deterministic candidates (trees of most probable tokens): the target's token after each
    node is drawn from its own distribution, and the path goes on as long as a child has the token drawn.

    Exact, because a draw never depends on the tree. A candidate is accepted with the target's probability of
    its token; no rule can accept more of candidates that are not drawn. A draw depends on seed and position
    in the output (`sampling.uniform`), so the text is that of plain sampling with the same seed.

    One object serves one call of `decode`.
    """

    def set_active(self, numbers: Sequence[int]) -> None:
        if (numbers := require_different(numbers)) != self.numbers:
            self.numbers, self.sampler = numbers, Sampler([self.params[number] for number in numbers])

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        device = logits.device
        emitted = torch.tensor([self.emitted[number] for number in self.numbers])  # [B]
        emitted = emitted.to(device, non_blocking=True)
        if tree.width == 1:  # plain decoding
            token = self.sampler.pick(logits, emitted[:, None])[:, 0]  # [B]
            for number in self.numbers:
                self.emitted[number] += 1
            return Accepted(torch.zeros_like(token)[:, None], torch.ones_like(token), token)
        if device.type == "cuda" and logits.numel() <= AT_ONCE:  # waits once instead of for each token
            found = Accepted(*tree.follow(self.sampler.pick(logits, emitted[:, None] + tree.depths)))
            return self._counted(found)
        rows = torch.arange(len(emitted), device=device)  # [B]
        node = torch.zeros_like(tree.sizes)  # [B] the last accepted one
        path, counts = [node], torch.ones_like(tree.sizes)
        while True:  # only what the path reaches is drawn: a draw sorts thousands of probabilities
            position = emitted + tree.depths[rows, node]  # [B]
            token = self.sampler.pick(logits[rows, node][:, None], position[:, None])[:, 0]  # [B]
            child = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid  # [B, n]
            if not child.any():
                break
            # a row whose path has ended draws the same again and finds no child again
            counts = counts + child.any(1)
            node = torch.where(child.any(1), child.byte().argmax(1), node)
            path.append(node)
        return self._counted(Accepted(torch.stack(path, 1), counts, token))

    def _counted(self, found: Accepted) -> Accepted:
        for number, count in zip(self.numbers, found.counts.tolist()):
            self.emitted[number] += count
        return found
