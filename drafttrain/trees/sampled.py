"""Trees of sampled candidates, for recursive rejection sampling at temperature above 0."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import DrawnFrom, TokenTree
from drafttrain.utils.ranges import setting


@dataclass
class SampledTreePolicy(TreePolicy):
    """Each node of layer d gets `k_config[d]` children, drawn without replacement (SEED's k_config; a chain
    is (1, 1, 1)). One object serves one call of `decode`: each tree uses new random numbers.

    Attributes:
        k_config: children per node, layer by layer.
        seeds: of each prompt.
        temperature: of the draws; the rule is exact for any.
    """

    k_config: Sequence[int] = setting(ge=1)
    seeds: Sequence[int]
    temperature: float = setting(1.0, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grown = [0] * len(self.seeds)  # trees so far: no two of a prompt use the same numbers
        self._rows: Sequence[int] = range(len(self.seeds))

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for."""
        self._rows = list(numbers)

    @property
    def max_depth(self) -> int:
        return len(self.k_config)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        batch, size = len(root), drafter.draft_vocab_size
        ids = drafter.to_target(torch.arange(size, device=root.device))  # [D]
        generators = []
        for row in self._rows:
            number = 1_000_003 * self.seeds[row] + self._grown[row]
            generators.append(torch.Generator().manual_seed(number))
            self._grown[row] += 1
        tree = TokenTree.root_only(root)
        frontier = torch.zeros_like(root)[:, None]  # [B, 1]
        probs = torch.zeros(batch, 1, size, device=root.device)  # [B, n, D]
        for k in self.k_config:
            k, f = min(k, size), frontier.shape[1]
            log_probs = drafter.expand(state, tree, frontier)  # [B, f, D]
            log_q = torch.log_softmax(log_probs / self.temperature, dim=-1)
            exponential = [torch.empty(f, size).exponential_(generator=g) for g in generators]
            noise = torch.stack(exponential).to(root.device)  # [B, f, D]
            # Gumbel top-k: the k largest of log q - log E, in order, are k draws without replacement
            drawn = (log_q - noise.log()).topk(k).indices  # [B, f, k]
            probs = probs.scatter(1, frontier[:, :, None].expand(-1, -1, size), log_q.exp())
            probs = torch.cat([probs, probs.new_zeros(batch, f * k, size)], 1)
            parents = frontier[:, :, None].expand_as(drawn)  # [B, f, k]
            first = tree.width
            tree = tree.append(
                parents.flatten(1),
                drafter.to_target(drawn).flatten(1),
                log_probs.gather(2, drawn).flatten(1),
                drawn_from=DrawnFrom(probs, ids),
            )
            frontier = torch.arange(first, tree.width, device=root.device).expand(batch, -1)
        return tree
