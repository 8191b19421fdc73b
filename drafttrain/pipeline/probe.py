"""Check that a target cut into stages gives the logits of the whole one, once all ranks have loaded.

A small tree after a prefix goes through the stages; the last rank compares its logits with those of
transformers' own blocks in fp32, which it loads one after the other, so that it never holds more than one.
"""

from collections.abc import Callable

import torch

from drafttrain.pipeline.member import Member
from drafttrain.pipeline.part import TargetPart, load_part
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Program, Receive, Send
from drafttrain.target_lm.loading import load_config
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.tree_check import PARENTS, PREFIX, ROUNDED_TOLERANCE, TOLERANCE
from drafttrain.trees.lists import tree_of_lists
from drafttrain.utils.errors import UserError


def probe_ids(place: str) -> torch.Tensor:
    """Return the tokens of the probe, the prefix first, int64 [p + n]."""
    vocabulary = load_config(place).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (PREFIX + len(PARENTS),), generator=generator)


def probe(me: Member, ids: torch.Tensor) -> Program:
    """Run the probe through the stages; return its logits [n, V] at the last one, None elsewhere."""
    if me.stage is None:
        return None
    prefix, tree = Flow(ids[:PREFIX], ids[:PREFIX]), Flow(ids[PREFIX:], torch.tensor(PARENTS))
    part = me.stage.part
    me.stage.reset(_dtype(part))
    if (before := me.layout.before(me.rank)) is not None:
        prefix, tree = (yield Receive(before)), (yield Receive(before))
    with part.unrounded():
        states, _ = me.stage.prefill(prefix.tokens if prefix.x is None else prefix.x)
        out = me.stage.compute_tree(tree)
        logits = part.logits(out.x).float() if me.is_last else None
    me.stage.reset()
    if me.is_last:
        return logits
    yield Send(me.layout.after(me.rank), Flow(prefix.tokens, prefix.parents, states))
    yield Send(me.layout.after(me.rank), out)
    return None


def rounds(me: Member) -> bool:
    """Return whether this rank rounds states to 16 bits in the probe."""
    return me.stage is not None and _dtype(me.stage.part) != torch.float


@torch.no_grad()
def whole_logits(
    place: str, ids: torch.Tensor, after_block: Callable[[], None], rounded: torch.dtype
) -> torch.Tensor:
    """Return the probe's logits [n, V] from transformers' blocks in fp32, loaded one at a time.

    Args:
        rounded: dtype of the stages' weights.
    """
    tree = tree_of_lists([ids[PREFIX:].tolist()], [list(PARENTS)], ids.device)
    x, y, order = ids[None, :PREFIX], tree.tokens, torch.arange(PREFIX)
    part: TargetPart | None = None
    for block in range(_blocks(place)):
        part = load_part(place, range(block, block + 1), torch.float, rounded=rounded)
        cache = part.new_cache(PREFIX + tree.width)
        x, _ = part.run(cache, x, order, causal(PREFIX, ids.device))
        cache.commit(order[None], order.new_tensor([PREFIX]))
        cache.carried.clear()
        y, _ = part.run(cache, y, tree.depths[0], tree.ancestors()[0])
        after_block()
    return part.logits(y[0])


def _dtype(part: TargetPart) -> torch.dtype:
    """Return the dtype in which the probe computes: fp32 in native blocks, that of the weights in others."""
    return part.dtype if part.native is None else torch.float


def _blocks(place: str) -> int:
    return load_config(place).get_text_config().num_hidden_layers


def check_cut(
    me: Member,
    found: torch.Tensor | None,
    place: str,
    ids: torch.Tensor,
    is_rounded: bool,
    after_block: Callable[[], None] = lambda: None,
) -> None:
    """Compare the logits of the stages with those of the whole target, at the last rank.

    Args:
        found: logits of the stages [n, V] at the last rank; None at the others.
        is_rounded: whether any rank rounds (`rounds`).
        after_block: called at all ranks for each block of the target, as they meet there: so a last rank that
            takes long to load the blocks does not count as lost.

    Raises:
        UserError: they differ by more than rounding.
    """
    if found is None:
        for _ in range(_blocks(place)):
            after_block()
        return
    expected = whole_logits(place, ids, after_block, me.stage.part.dtype).to(found.device)  # [n, V]
    error = float((found - expected).square().mean(-1).sqrt().max() / expected.std())
    tolerance = ROUNDED_TOLERANCE if is_rounded else TOLERANCE
    if not error <= tolerance:  # NaN fails too
        raise UserError(
            f"rank {me.rank}: {place}: its stages must give the logits of the whole target, got ones that "
            f"differ by {error:.2g} of their standard deviation; see that all ranks have the same files"
        )
