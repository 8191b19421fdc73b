"""Does this target verify trees correctly? Asked once, when it is loaded.

Architectures read explicit masks and positions in ways of their own, and some read them wrongly without an
error (ALiBi counts slots, not positions). A small tree against plain forwards tells.
"""

import torch

from drafttrain.errors import UserError
from drafttrain.target.frozen import FrozenTarget
from drafttrain.trees.tree import TokenTree

PREFIX = 12  # committed tokens before the tree
PARENTS = (-1, 0, 0, 1, 1, 2, 3)  # the root has two children; nodes 3 and 4 are siblings, 6 lies under 3
DEPTHS = (0, 1, 1, 2, 2, 2, 3)
PATHS = ((0, 1, 3, 6), (0, 1, 4), (0, 2, 5))  # from the root to each leaf
COMMITTED = PATHS[2]  # its slots are not adjacent, so that committing has to move them
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# Largest root-mean-square difference of a node's logits, as a share of their standard deviation. In bf16 the
# same token rounds differently when forwarded with others: 0.03 (Qwen2.5-0.5B) to 0.1 (SmolLM2) of random
# text; wrong masks or positions gave 0.23 and more there.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.2}


@torch.no_grad()
def check_tree_support(target: FrozenTarget) -> None:
    """Compares a tree of seven nodes, and a step after committing one of its paths, with forwards over plain
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
            f"{target.name} has {', '.join(sorted(unsupported))} layers, which cannot verify trees: use a "
            "target with full or sliding-window attention"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        target.config.vocab_size, (PREFIX + len(PARENTS) + 1,), generator=generator
    )  # [p + n + 1]
    ids = ids.to(target.device)
    try:
        error = _logit_error(target, ids[:PREFIX], ids[PREFIX:-1], ids[-1:])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as problem:
        raise UserError(
            f"{target.name} ({type(target.model).__name__}) cannot verify trees: "
            f"{str(problem).splitlines()[0]}; use another target"
        ) from problem
    if not error <= TOLERANCE[target.dtype]:  # NaN fails too
        raise UserError(
            f"{target.name} ({type(target.model).__name__}) verifies trees wrongly: logits differ by "
            f"{error:.2g} of their standard deviation from plain forwards; use another target"
        )


def _logit_error(
    target: FrozenTarget, prefix: torch.Tensor, nodes: torch.Tensor, following: torch.Tensor
) -> float:
    """Root-mean-square difference between a node's tree logits and its plain ones, worst node, as a share of
    the plain logits' standard deviation.

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
    target.forward(
        cache, prefix[None], order, torch.ones(len(prefix), len(prefix), device=device).tril().bool()
    )
    cache.commit(order[None], torch.tensor([len(prefix)], device=device))
    parents, depths = (
        torch.tensor(PARENTS, device=device)[None],
        torch.tensor(DEPTHS, device=device)[None],
    )  # [1, 7]
    nothing = torch.zeros(1, len(PARENTS), device=device)  # [1, 7]
    tree = TokenTree(
        nodes[None], parents, depths, nothing, nothing, torch.tensor([len(PARENTS)], device=device)
    )
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
