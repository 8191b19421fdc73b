"""Trees of one shape, whatever the drafter thinks: by a number of children for each layer, or by paths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

# EAGLE-1's tree of 26 nodes, root included (Li et al. 2024; `choices.py` of its repository)
EAGLE1_PATHS = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()
)
LARGEST = 4096  # nodes


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
            raise UserError(f"static tree: {len(self.paths)} nodes are more than {LARGEST}: make it smaller")
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise UserError(
                    f"static tree: path {list(path)} hangs in the air; list every node on the way to it, "
                    "with ranks from 0"
                )

    @classmethod
    def from_k_config(cls, k_config: Sequence[int]) -> "StaticPolicy":
        """Every node of layer d has `k_config[d]` children (SEED's notation; VCT is (3, 3, 3, 3, 3))."""
        layer: list[tuple[int, ...]] = [()]
        paths = []
        for k in k_config:
            if len(layer) * k > LARGEST:
                raise UserError(f"static tree: a layer of {len(layer) * k} nodes is more than {LARGEST}")
            layer = [(*path, rank) for path in layer for rank in range(k)]
            paths += layer
        return cls(paths)

    @classmethod
    def vanilla(cls, width: int = 3, depth: int = 5) -> "StaticPolicy":
        """VCT of the EDD paper: every node has `width` children, `depth` layers deep (363 drafted nodes)."""
        return cls.from_k_config((width,) * depth)

    @classmethod
    def from_text(cls, paths: str) -> "StaticPolicy":
        """Paths as ranks below ten joined by dashes: `0-1-00-01`."""
        if not all(path.isdecimal() for path in paths.split("-")):
            raise UserError(f"static tree: paths {paths!r} are to be digits joined by dashes, as in 0-1-00")
        return cls([tuple(map(int, path)) for path in paths.split("-")])

    @classmethod
    def eagle1(cls) -> "StaticPolicy":
        """EAGLE-1's tree."""
        return cls([tuple(map(int, path)) for path in EAGLE1_PATHS])

    @property
    def max_depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Drafts the tree behind each root token [B]."""
        tree = TokenTree.root_only(root)
        index = {(): 0}
        for depth in range(1, self.max_depth + 1):
            layer = [path for path in self.paths if len(path) == depth]
            parents = sorted({index[path[:-1]] for path in layer})
            frontier = torch.tensor(parents, device=root.device).expand(len(root), -1)  # [B, f]
            ranks = max(path[-1] for path in layer) + 1
            if ranks > drafter.draft_vocab_size:
                raise UserError(
                    f"static tree: {ranks} children, and the drafter has {drafter.draft_vocab_size} tokens: "
                    "make it narrower"
                )
            log_probs, ids = drafter.top(state, tree, frontier, ranks)  # [B, f, ranks]
            places = [parents.index(index[path[:-1]]) * ranks + path[-1] for path in layer]
            places = torch.tensor(places, device=root.device)  # [nodes] in [f * ranks]
            above = torch.tensor([index[path[:-1]] for path in layer], device=root.device)
            index |= {path: tree.width + i for i, path in enumerate(layer)}
            tree = tree.append(
                above.expand(len(root), -1),
                drafter.to_target(ids.flatten(1)[:, places]),
                log_probs.flatten(1)[:, places],
            )
        return tree
