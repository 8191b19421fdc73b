"""Statistics of decoding runs, defined once for training, benchmarks and the command line."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from threading import get_ident
from typing import Any

import torch
from torch import nn

GRAM = 4  # tokens of the n-grams that count as repetition


@dataclass
class DecodeStats:
    """Counts and seconds of one or more decoding runs; `a + b` joins two.

    The first token of each output comes from the prefill. It counts in new_tokens and the prefill in the
    times, but neither counts in accept_len, so plain autoregressive decoding has accept_len 1 exactly.

    Attributes:
        prompts: sequences decoded.
        prompt_tokens: tokens of their prompts.
        new_tokens: emitted tokens, stop tokens included; what an acceptance rule accepted beyond a stop token
            or the length limit is not counted.
        steps: target forwards after the prefill, counted once for each unfinished sequence that takes part.
        verify_tokens: draft tokens sent to the target, roots excluded.
        tree_depths: sum of the depths of all trees sent.
        offered: at index d - 1, steps in which the target judged children, at depth d, of an accepted node.
        granted: at index d - 1, steps in which it accepted one of these.
        repeated_tokens: tokens emitted by steps that are in a 4-gram seen before in the same output.
        fresh_tokens: the other tokens emitted by steps.
        fresh_steps: the forwards they took; a step that emits k tokens charges each of them 1/k of a forward.
        prefill_seconds: from the start until target and drafter have read the prompt and the first token is
            known.
        draft_seconds: in the proposer, all of it (drafter, tree policy, updates). With a GPU, the time in
            which the host gives it that work.
        draft_model_seconds: in the drafter's forwards, native growth included; part of draft_seconds. With a
            GPU, its own seconds, without updates that it has not ended by the end of the step.
        verify_seconds: in the target's modules alone; masks, gathers and hooks are left out.
        seconds: everything in the decode loop, without the time that the caller takes between two steps.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    verify_tokens: int = 0
    tree_depths: int = 0
    offered: list[int] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    repeated_tokens: int = 0
    fresh_tokens: int = 0
    fresh_steps: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_model_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0

    # what one row of one step adds

    def count_step(self, emitted: int, drafted: int, rejected: bool, verified: int, depth: int) -> None:
        """Count one sequence's share of a step.

        Args:
            emitted: tokens emitted.
            drafted: how many of them came from the draft.
            rejected: whether the target, after accepting `drafted` draft tokens, rejected all that followed.
            verified: draft tokens in its tree.
            depth: depth of its tree.
        """
        self.new_tokens += emitted
        self.steps += 1
        self.verify_tokens += verified
        self.tree_depths += depth
        judged = drafted + rejected
        longer = judged - len(self.offered)
        self.offered += [0] * longer
        self.granted += [0] * longer
        for i in range(judged):
            self.offered[i] += 1
            self.granted[i] += i < drafted

    def count_repetition(self, token_ids: Sequence[int], step_sizes: Sequence[int]) -> None:
        """Count the repetition in a finished output.

        Args:
            token_ids: all its tokens; the first comes from the prompt's forward.
            step_sizes: how many tokens each step emitted; they add up to len(token_ids) - 1.
        """
        repeated = in_repeated_grams(token_ids)
        start = 1
        for size in step_sizes:
            again = sum(repeated[start : start + size])
            self.repeated_tokens += again
            self.fresh_tokens += size - again
            self.fresh_steps += (size - again) / size
            start += size

    # what is reported

    @property
    def accept_len(self) -> float:
        """Return the tokens emitted per target forward, the target's own token included."""
        return _ratio(self.new_tokens - self.prompts, self.steps)

    @property
    def verify_per_step(self) -> float:
        """Return the draft tokens sent to the target per forward, root excluded."""
        return _ratio(self.verify_tokens, self.steps)

    @property
    def accept_len_nonrepeated(self) -> float | None:
        """Return the accept_len of tokens outside repeated 4-grams; None if all are in them."""
        return self.fresh_tokens / self.fresh_steps if self.fresh_steps else None

    @property
    def repetition(self) -> float:
        """Return the share of the steps' tokens that are in repeated 4-grams."""
        return _ratio(self.repeated_tokens, self.repeated_tokens + self.fresh_tokens)

    @property
    def accept_rate(self) -> float:
        """Return the tokens emitted by steps per layer of the trees sent (EDD's alpha; for chains it is
        accept_len / chain length)."""
        return _ratio(self.new_tokens - self.prompts, self.tree_depths)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Return `granted` / `offered`: at index d - 1, how often a draft token at depth d was accepted."""
        return [_ratio(granted, offered) for granted, offered in zip(self.granted, self.offered)]

    @property
    def tokens_per_second(self) -> float:
        """Return the new tokens per second, prefill included."""
        return _ratio(self.new_tokens, self.seconds)

    @property
    def other_seconds(self) -> float:
        """Return the time of the loop outside the prefill, the proposer and the target's modules."""
        return self.seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    @property
    def outside_share(self) -> float:
        """Return the share of the steps' time outside forwards of target and drafter: tree policy, masks,
        gathers, acceptance, the loop."""
        steps = self.seconds - self.prefill_seconds
        return _ratio(steps - self.verify_seconds - self.draft_model_seconds, steps)

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        def join(mine, others):
            if not isinstance(mine, list):
                return mine + others
            n = max(len(mine), len(others))
            return [sum(pair) for pair in zip(mine + [0] * (n - len(mine)), others + [0] * (n - len(others)))]

        return DecodeStats(
            **{item.name: join(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def in_repeated_grams(token_ids: Sequence[int]) -> list[bool]:
    """Return which tokens are in a 4-gram that began earlier in the same sequence; its first occurrence does
    not count.

    Example: for 1 2 3 4 5 1 2 3 4 the last four.
    """
    repeated = [False] * len(token_ids)
    seen: set[tuple[int, ...]] = set()
    for i in range(len(token_ids) - GRAM + 1):
        gram = tuple(token_ids[i : i + GRAM])
        if gram in seen:
            repeated[i : i + GRAM] = [True] * GRAM
        seen.add(gram)
    return repeated


class Stopwatch:
    """Seconds spent in some calls on a CPU so far; `gpu_stopwatch.py` is for GPUs."""

    seconds = 0.0

    def begin(self) -> float:
        """Return when a call begins, for `end`."""
        return time.perf_counter()

    def end(self, begun: float) -> None:
        """Add the call that began then, and ends now."""
        self.seconds += time.perf_counter() - begun


def stopwatch(device: torch.device) -> Stopwatch:
    """Return a stopwatch for calls on a device."""
    if device.type != "cuda":
        return Stopwatch()
    from drafttrain.inference.gpu_stopwatch import GpuStopwatch

    return GpuStopwatch(device)


class ModuleClock:
    """Stopwatch for the calls of some modules.

    Args:
        device: device of the modules.
    """

    def __init__(self, device: torch.device):
        self.watch = stopwatch(device)
        self.thread = get_ident()  # whose calls count; others may decode with the same modules
        self._started: Any = None

    @property
    def seconds(self) -> float:
        return self.watch.seconds

    @contextmanager
    def on(self, *modules: nn.Module) -> Iterator["ModuleClock"]:
        """Time the calls of these modules within a `with` block; none of them may contain another."""

        def before(module: nn.Module, args) -> None:
            if get_ident() == self.thread:
                self._started = self.watch.begin()

        def after(module: nn.Module, args, output) -> None:
            if get_ident() == self.thread:
                self.watch.end(self._started)

        hooks = [module.register_forward_pre_hook(before) for module in modules]
        hooks += [module.register_forward_hook(after) for module in modules]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
