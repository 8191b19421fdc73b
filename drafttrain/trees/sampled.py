"""Trees of sampled candidates, for recursive rejection sampling at temperature above 0."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import LARGEST, TreePolicy
from drafttrain.trees.tree import DrawnFrom, TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import setting


@dataclass
class SampledTreePolicy(TreePolicy):
    """Each node of layer d gets `k_config[d]` children, drawn without replacement (SEED's k_config; a chain
    is (1, 1, 1)). A tree's draws depend on its sequence's seed and on the position of its root.

    Attributes:
        k_config: children per node, layer by layer.
        temperature: of the draws; the output is exact for any.
        candidates: they are drawn from this many most probable tokens; fewer cost less time.
    """

    k_config: Sequence[int] = setting(ge=1)
    temperature: float = setting(1.0, gt=0)
    candidates: int = setting(128, ge=1, le=LARGEST)

    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.k_config) > self.candidates:
            raise UserError(
                f"k_config: must be at most candidates ({self.candidates}), got {max(self.k_config)}; raise "
                "candidates"
            )
        self.set_active([0], [0])

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        self._active = list(zip(seeds, positions, strict=True))

    @property
    def max_depth(self) -> int:
        return len(self.k_config)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        batch, size = len(root), min(self.candidates, drafter.draft_vocab_size)
        generators = self._generators()
        tree = TokenTree.root_only(root)
        frontier = torch.zeros_like(root)[:, None]  # [B, 1]
        drawn_from = DrawnFrom(*(root.new_zeros(batch, 1, size, dtype=t) for t in (torch.float, torch.long)))
        for k in self.k_config:
            k, f = min(k, size), frontier.shape[1]
            log_probs, ids = drafter.top(state, tree, frontier, size)  # [B, f, K]
            log_q = torch.log_softmax(log_probs / self.temperature, dim=-1)
            exponential = [torch.empty(f, size).exponential_(generator=g) for g in generators]
            noise = torch.stack(exponential).to(root.device)  # [B, f, K]
            # Gumbel top-k: the k largest of log q - log E, in order, are k draws without replacement
            drawn = (log_q - noise.log()).topk(k).indices  # [B, f, k]
            tokens = drafter.to_target(ids)  # [B, f, K]
            place = frontier[:, :, None].expand(-1, -1, size)
            probs = drawn_from.probs.scatter(1, place, log_q.exp())  # [B, n, K]
            all_ids = drawn_from.ids.scatter(1, place, tokens)  # [B, n, K]
            leaves = probs.new_zeros(batch, f * k, size)
            drawn_from = DrawnFrom(torch.cat([probs, leaves], 1), torch.cat([all_ids, leaves.long()], 1))
            parents = frontier[:, :, None].expand_as(drawn)  # [B, f, k]
            first = tree.width
            tree = tree.append(
                parents.flatten(1),
                tokens.gather(2, drawn).flatten(1),
                log_probs.gather(2, drawn).flatten(1),
                drawn_from=drawn_from,
            )
            frontier = torch.arange(first, tree.width, device=root.device).expand(batch, -1)
        return tree

    def _generators(self) -> list[torch.Generator]:
        """Return random numbers for the next tree of each active sequence."""
        numbers = [(1_000_003 * seed + position) % 2**63 for seed, position in self._active]
        return [torch.Generator().manual_seed(number) for number in numbers]
