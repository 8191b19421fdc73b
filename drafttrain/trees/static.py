"""Trees of a fixed shape, given by the number of children per layer or by paths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import DEEPEST, LARGEST, TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

# EAGLE-1's tree of 26 nodes, root included (Li et al. 2024; `choices.py` of its repository)
EAGLE1_PATHS = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()
)


@dataclass
class StaticPolicy(TreePolicy):
    """A tree whose nodes are given by their ranks among their siblings.

    Attributes:
        paths: for each node but the root, the ranks on the way to it: (0, 2) is the third child of the first
            child of the root. Every prefix of a path is a path too.
    """

    paths: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        self.paths = sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        if len(self.paths) > LARGEST:
            raise UserError(f"paths: must be at most {LARGEST} nodes, got {len(self.paths)}")
        self._known: dict[torch.device, list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]]] = {}
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise UserError(
                    f"paths: must contain every node on the way to a node, with ranks from 0, got "
                    f"{list(path)} without its parent"
                )

    @classmethod
    def from_k_config(cls, k_config: Sequence[int]) -> "StaticPolicy":
        """Return a tree whose nodes of layer d have `k_config[d]` children (SEED; VCT is (3, 3, 3, 3, 3))."""
        layer: list[tuple[int, ...]] = [()]
        paths = []
        for k in k_config:
            if not 1 <= k <= (LARGEST - len(paths)) // len(layer):
                raise UserError(
                    f"k_config: must be >= 1 per layer and at most {LARGEST} nodes, got {list(k_config)}"
                )
            layer = [(*path, rank) for path in layer for rank in range(k)]
            paths += layer
        return cls(paths)

    @classmethod
    def vanilla(cls, width: int = 3, depth: int = 5) -> "StaticPolicy":
        """Return the VCT of the EDD paper: `depth` layers, `width` children per node (363 drafted nodes)."""
        if not 0 <= depth <= DEEPEST:
            raise UserError(f"depth: must be >= 0 and at most {DEEPEST}, got {depth}")
        return cls.from_k_config((width,) * depth)

    @classmethod
    def from_text(cls, paths: str) -> "StaticPolicy":
        """Return the tree of paths written as digits (ranks below ten) and joined by dashes: `0-1-00-01`."""
        if not all(path.isdecimal() for path in paths.split("-")):
            raise UserError(f"paths: must be digits joined by dashes, such as 0-1-00, got {paths}")
        return cls([tuple(map(int, path)) for path in paths.split("-")])

    @classmethod
    def eagle1(cls) -> "StaticPolicy":
        """Return EAGLE-1's tree."""
        return cls([tuple(map(int, path)) for path in EAGLE1_PATHS])

    @property
    def max_depth(self) -> int:
        """Return the length of the longest path."""
        return max((len(path) for path in self.paths), default=0)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft the tree after each root token [B].

        Raises:
            UserError: the tree has more children per node than the drafter has tokens.
        """
        tree = TokenTree.root_only(root)
        for parents, ranks, places, above in self._layers(root.device):
            if ranks > drafter.draft_vocab_size:
                raise UserError(
                    f"tree: must have at most {drafter.draft_vocab_size} children per node, the drafter's "
                    f"tokens, got {ranks}"
                )
            log_probs, ids = drafter.top(state, tree, parents.expand(len(root), -1), ranks)  # [B, f, ranks]
            tree = tree.append(
                above.expand(len(root), -1),
                drafter.to_target(ids.flatten(1)[:, places]),
                log_probs.flatten(1)[:, places],
            )
        return tree

    def _layers(self, device: torch.device) -> list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]]:
        """Return of each layer, from the first on: the nodes that get children, int64 [f], the candidates of
        each, the new nodes' places among them, int64 [w] in [f * ranks], and their parents, int64 [w]."""
        if device not in self._known:
            index, found = {(): 0}, []
            for depth in range(1, self.max_depth + 1):
                layer = [path for path in self.paths if len(path) == depth]
                parents = sorted({index[path[:-1]] for path in layer})
                ranks = max(path[-1] for path in layer) + 1
                above = [index[path[:-1]] for path in layer]
                places = [parents.index(node) * ranks + path[-1] for node, path in zip(above, layer)]
                index |= {path: len(index) + i for i, path in enumerate(layer)}
                parents, places, above = (
                    torch.tensor(one, device=device) for one in (parents, places, above)
                )
                found.append((parents, ranks, places, above))
            self._known[device] = found
        return self._known[device]
