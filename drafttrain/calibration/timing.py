"""Time the target and the drafter by number of tokens and length of context.

All sizes are measured interleaved, so that a machine that slows down slows all of them, and drafting steps
come in threes after a forward of the target, as in decoding: the target's weights push the drafter's out of
the caches.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from drafttrain.calibration.calibration import Curve
from drafttrain.inference.acceptance import accept_greedy
from drafttrain.kernels.growth import grow_best
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.costs import CostCurve
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import add_children
from drafttrain.trees.native import grow_natively
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

VERIFIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens
EXPANDED = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # nodes
CONTEXTS = (64, 256, 512)  # committed tokens
STEPS = 3  # drafting steps between two forwards of the target
WARM_UP = 2  # rounds that do not count
LEAST = 1e-9  # seconds of a layer at least: noise in those that are subtracted could leave less than 0


@torch.no_grad()
def measure_costs(
    target: FrozenTarget,
    drafter: Drafter,
    width: int,
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = 15,
    on_round: Callable[[], None] = lambda: None,
    verified: Sequence[int] = VERIFIED,
    expanded: Sequence[int] = EXPANDED,
    seconds: float = math.inf,
) -> tuple[list[Curve], list[Curve], list[Curve] | None]:
    """Time forwards of the target (blocks, LM head and acceptance), drafting steps (layer, head, choice of
    `width` children, growth of the tree), and the layers of trees that grow in one native call.

    Args:
        contexts: those beyond the target's positions are left out.
        on_round: called after each round of each context: `WARM_UP + rounds`, or fewer where time runs out.
        verified, expanded: tokens of the forwards and expanded nodes of the drafting steps to measure.
        seconds: time limit of a context; its first counted round is always completed.

    Returns:
        the target's curves s_t(n), the drafter's s_d(f) and those of a layer of native growth, one for each
        context; None in place of the last if the drafter has no native growth.

    Raises:
        UserError: the target has too few positions for any context.
    """
    fitting = [context for context in contexts if fitting_context(target, context, verified) == context]
    if not fitting:
        raise UserError(
            f"{target.name}: must have {min(contexts) + max(verified)} positions to be calibrated, got "
            f"{target.positions}"
        )
    curves = []
    with target.own_cores():  # as in decoding
        for context in fitting:
            clock = _Clock(target, drafter, context, verified, expanded)
            curves.append(_time(clock, context, rounds, on_round, verified, expanded, width, seconds))
    verification, drafting, growth = map(list, zip(*curves))
    return verification, drafting, growth if all(growth) else None


@torch.no_grad()
def measure_verification(
    target: FrozenTarget, context: int, rounds: int, on_round: Callable[[], None] = lambda: None
) -> Curve:
    """Time forwards of the target alone, without the drafting steps of `measure_costs`; in a shorter context
    if the target has too few positions for this one.

    Raises:
        UserError: the target has too few positions for any.
    """
    context = fitting_context(target, context, VERIFIED)
    with target.own_cores():  # as in decoding
        return _time(_Clock(target, None, context, VERIFIED), context, rounds, on_round, VERIFIED)[0]


def fitting_context(target: FrozenTarget, context: int, verified: Sequence[int]) -> int:
    """Return the context, or the part of it that fits into the target's positions with the sizes to measure.

    Raises:
        UserError: no token of context fits.
    """
    positions = target.positions
    if positions <= max(verified):
        raise UserError(
            f"{target.name}: must have more than {max(verified)} positions to be timed, got {positions}"
        )
    return min(context, positions - max(verified))


def _time(
    clock: "_Clock",
    context: int,
    rounds: int,
    on_round: Callable[[], None],
    verified: Sequence[int],
    expanded: Sequence[int] = (),
    width: int = 0,
    seconds: float = math.inf,
) -> tuple[Curve, Curve, Curve | None]:
    """Return the curves of a clock's target, its drafter and its native growth (None without one); arguments
    as `measure_costs`."""
    target_seconds: dict[int, list[float]] = {n: [] for n in verified}
    draft_seconds: dict[int, list[float]] = {f: [] for f in expanded}
    growth_seconds = {f: [] for f in expanded if clock.grow(f, width) is not None}
    drafts = [(draft_seconds[f], clock.draft, f) for f in expanded]
    drafts += [(growth_seconds[f], clock.grow, f) for f in growth_seconds]
    begun = time.perf_counter()
    for round_ in range(WARM_UP + rounds):
        if round_ > WARM_UP and time.perf_counter() - begun > seconds:
            break
        for i in range(max(len(verified), len(drafts))):
            n = verified[i % len(verified)]
            taken = [(target_seconds[n], clock.verify(n))]
            if drafts:
                measured, draft, f = drafts[(i + round_) % len(drafts)]
                taken.append((measured, draft(f, width)))
            if round_ >= WARM_UP:
                for measured, passed in taken:
                    measured.append(passed)
        on_round()
    growth = Curve.of(context, _of_a_layer(growth_seconds, width)) if growth_seconds else None
    return Curve.of(context, target_seconds), Curve.of(context, draft_seconds), growth


def _layers(f: int, width: int) -> list[int]:
    """Return the expanded nodes of each layer of a tree: layers that widen to f nodes, then STEPS of f."""
    layers = [1]
    while layers[-1] < f:
        layers.append(min(f, max(width, 2) * layers[-1]))
    return layers[:-1] + [f] * STEPS


def _of_a_layer(seconds: Mapping[int, Sequence[float]], width: int) -> dict[int, list[float]]:
    """Return the seconds of a layer that expands f nodes, by f, from those of trees of `_layers`: subtract
    the layers that widen to f, as measured with smaller f (medians), and divide by STEPS."""
    found: dict[int, list[float]] = {}
    for f in sorted(seconds):
        before = 0.0
        widening = _layers(f, width)[:-STEPS]
        if widening and found:
            known = CostCurve(tuple(found), tuple(map(statistics.median, found.values())))
            before = sum(map(known, widening))
        found[f] = [max((passed - before) / STEPS, LEAST) for passed in seconds[f]]
    return found


class _Clock:
    """A sequence with a context of random tokens, after which forwards are timed and discarded.

    Args:
        drafter: None to time the target alone.
        verified, expanded: as `measure_costs` takes them; caches have room for the largest of each. Trees
            that grow natively may need more, which is allocated when one of their size is first grown.
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter | None,
        context: int,
        verified: Sequence[int],
        expanded: Sequence[int] = (),
    ):
        self.target, self.drafter = target, drafter
        generator = torch.Generator().manual_seed(context)
        ids = torch.randint(target.vocab_size, (1, context), generator=generator).to(target.device)
        self.cache = target.new_cache(1, context + max(verified))
        order = torch.arange(context, device=target.device)  # [c]
        states = target.forward(self.cache, ids, order, causal(context, target.device))
        count = torch.tensor([context], device=target.device)
        self.cache.commit(order[None], count)
        self.root = ids[:, -1]  # [1]
        if drafter is not None:
            self.state = drafter.new_state(1, context + 1 + max(expanded))
            drafter.update(self.state, ids, states.tapped, count)

    def verify(self, n: int) -> float:
        """Return the seconds of a forward over n tokens."""
        tree = TokenTree.root_only(self.root)
        if n > 1:  # depth 1 for all, within the model's positions: time does not depend on the tree's shape
            tokens = self._tokens(n - 1)  # [1, n - 1]
            tree = tree.append(torch.zeros_like(tokens), tokens, torch.zeros_like(tokens, dtype=torch.float))
        self._wait()
        started = time.perf_counter()
        states = self.target.forward(self.cache, tree.tokens, tree.depths, tree.ancestors())
        accept_greedy(tree, self.target.head(states.final)).next_token.tolist()
        return time.perf_counter() - started

    def draft(self, f: int, width: int) -> float:
        """Return the mean seconds of some drafting steps that expand f nodes each."""
        tokens = self._tokens(f)  # [1, f]
        nothing = torch.zeros_like(tokens, dtype=torch.float)
        start = TokenTree.root_only(self.root).append(torch.zeros_like(tokens), tokens, nothing)
        frontier = torch.arange(1, f + 1, device=self.root.device)[None]  # [1, f]
        counts = torch.full_like(self.root, f)
        self._wait()
        started = time.perf_counter()
        for _ in range(STEPS):
            tree = add_children(self.drafter, self.state, start, frontier, counts, width)
            tree.joint_log_probs().amax().item()
        return (time.perf_counter() - started) / STEPS

    def grow(self, f: int, width: int) -> float | None:
        """Return the seconds of growing a tree of `_layers(f, width)` in one native call; None if the drafter
        has no native growth."""
        depth, width = len(_layers(f, width)), min(max(width, 2), self.drafter.draft_vocab_size)
        self._wait()
        started = time.perf_counter()
        grown = grow_natively(self.drafter, grow_best, self.state, self.root, width, f, depth, f)
        return None if grown is None else time.perf_counter() - started

    def _tokens(self, n: int) -> torch.Tensor:
        """Return n tokens of the vocabulary, int64 [1, n]."""
        return torch.arange(n, device=self.root.device)[None] % self.target.vocab_size

    def _wait(self) -> None:
        if self.root.device.type == "cuda":
            torch.cuda.synchronize(self.root.device)
