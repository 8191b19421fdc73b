"""Check that a target verifies trees correctly, once when it is loaded.

Architectures handle explicit masks and positions differently, and some handle them wrongly without an error
(ALiBi counts slots, not positions). A small tree is compared with plain forwards.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError, first_line
from drafttrain.utils.threads import cgroups

PREFIX = 12  # committed tokens before the tree
PARENTS = (-1, 0, 0, 1, 1, 2, 3)  # the root has two children; nodes 3 and 4 are siblings, 6 is below 3
PATHS = ((0, 1, 3, 6), (0, 1, 4), (0, 2, 5))  # from the root to each leaf
COMMITTED = PATHS[2]  # its slots are not adjacent, so that committing has to move them
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Largest root-mean-square difference of a node's logits, as a share of their standard deviation; in fp32 it
# is 1e-6 with right masks, 0.2 or more with wrong ones. In bf16 the same token rounds differently when it is
# forwarded with others, by up to 0.1 (SmolLM2), so the probe runs in fp32 wherever memory allows it.
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.2


@torch.no_grad()
def check_tree_support(target: FrozenTarget) -> None:
    """Compare a tree of seven nodes, and a step after committing one of its paths, with forwards over plain
    text.

    Raises:
        UserError: the target has layers that cannot verify trees, cannot take the masks, or reads them
            wrongly.
    """
    unsupported = set(getattr(target.config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if getattr(target.config, "alibi", False):
        unsupported.add("ALiBi")
    if unsupported:
        raise UserError(
            f"{target.name}: layers must have full or sliding-window attention to verify trees, got "
            f"{', '.join(sorted(unsupported))}; use another target"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        target.config.vocab_size, (PREFIX + len(PARENTS) + 1,), generator=generator
    )  # [p + n + 1]
    ids, stored = ids.to(target.device), target.dtype
    try:
        with _in_fp32(target):
            error = _logit_error(target, ids[:PREFIX], ids[PREFIX:-1], ids[-1:])
            # a packed head may round its inputs, and quantized layers compute in a dtype of their own
            rounds = target.is_packed and stored != torch.float32
            rounds |= getattr(target.model, "is_quantized", False)
            is_exact = target.dtype == torch.float32 and not rounds
            tolerance = TOLERANCE if is_exact else ROUNDED_TOLERANCE
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as problem:
        raise UserError(
            f"{target.name} ({type(target.model).__name__}) cannot verify trees: "
            f"{first_line(problem)}; use another target"
        ) from problem
    if not error <= tolerance:  # NaN fails too
        raise UserError(
            f"{target.name} ({type(target.model).__name__}) verifies trees wrongly: logits differ by "
            f"{error:.2g} of their standard deviation from plain forwards; use another target"
        )


@contextmanager
def _in_fp32(target: FrozenTarget) -> Iterator[None]:
    """Convert the weights to fp32 inside the block, if memory has room for them next to the originals."""
    weights = [p for p in target.model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    needed = 4 * sum(weight.numel() for weight in weights)
    stored = [weight.data for weight in weights] if 1.1 * needed < free_memory(target.device) else []
    try:
        for weight, data in zip(weights, stored):
            weight.data = data.float()
        yield
    finally:
        for weight, data in zip(weights, stored):
            weight.data = data  # the original memory, which native copies and drafters refer to


def free_memory(device: torch.device) -> float:
    """Return the bytes that can still be allocated on a device; infinite if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kilobytes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([1024.0 * next(kilobytes, math.inf), *map(_left, cgroups("memory"))])


def _left(cgroup: Path) -> float:
    """Return the bytes that a cgroup can still allocate; infinite without a limit. Its inactive file cache
    counts as free, because the system drops it first."""
    version_2 = (cgroup / "memory.max").exists()
    names = ("max", "current") if version_2 else ("limit_in_bytes", "usage_in_bytes")
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text() for name in names)
        held = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = held.get("inactive_file" if version_2 else "total_inactive_file", "0")
        return float(limit) - float(used) + float(files)
    except (OSError, ValueError):  # no such file; "max": no limit
        return math.inf


def _logit_error(
    target: FrozenTarget, prefix: torch.Tensor, nodes: torch.Tensor, following: torch.Tensor
) -> float:
    """Return the root-mean-square difference between tree logits and plain ones of the worst node, as a share
    of the plain logits' standard deviation.

    Args:
        prefix: tokens to commit first [p].
        nodes: tokens of the tree [7].
        following: the token after the committed path [1].
    """
    device = target.device
    longest = max(map(len, PATHS)) + 1
    texts = [torch.cat([prefix, nodes[list(path)], following.expand(longest - len(path))]) for path in PATHS]
    plain = target.model(input_ids=torch.stack(texts), use_cache=False).logits.float()  # [3, p + 5, V]
    plain = plain[:, len(prefix) :]  # [3, 5, V]

    cache = target.new_cache(1, len(prefix) + len(nodes) + 1)
    order = torch.arange(len(prefix), device=device)  # [p]
    target.forward(cache, prefix[None], order, causal(len(prefix), device))
    cache.commit(order[None], torch.tensor([len(prefix)], device=device))
    tree = tree_of_lists([nodes.tolist()], [PARENTS], device)  # of 7 nodes
    states = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
    verified = target.head(states.final)[0].float()  # [7, V]
    path = torch.tensor([COMMITTED], device=device)  # [1, 3]
    cache.commit(path, torch.tensor([len(COMMITTED)], device=device))
    root = TokenTree.root_only(following)
    states = target.forward(cache, root.tokens, root.depths, root.ancestors())
    after = target.head(states.final)[0, 0].float()  # [V]

    differences = [
        plain[row, : len(path)] - verified[list(path)] for row, path in enumerate(PATHS)
    ]  # [l, V] each
    differences.append(plain[PATHS.index(COMMITTED), len(COMMITTED)] - after)
    worst = max(difference.square().mean(-1).sqrt().max() for difference in differences)
    return float(worst / plain.std())
