"""Predicted speed of a pipeline by its number of stages, from real hits and simulated time.

Texts are decoded once. Trees in flight and static trees are then grown against them for any number of stages,
and their time is simulated for given machines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from drafttrain.inference.decode import decode_all
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.pipeline.replay import replay, replay_static
from drafttrain.pipeline.simulate import (
    Job,
    Link,
    Machines,
    pipedec_jobs,
    pp_jobs,
    run,
    stpp_jobs,
    total_seconds,
)
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.drafter import Drafter
from drafttrain.utils.errors import UserError

# width and depth of the static trees that are tried: 32 verified nodes at most, the root included
STATIC = (1, 2), (1, 4), (2, 3), (4, 4), (4, 7), (2, 12), (3, 10), (2, 15)


@dataclass
class KnownText:
    """A prompt and the target's answer.

    Attributes:
        tapped: the target's tapped states at all their tokens, [n, K·H].
        limit: most tokens that the answer could have had; None: those that it has.
    """

    prompt: list[int]
    answer: list[int]
    tapped: torch.Tensor
    limit: int | None = None


@dataclass
class Row:
    """Seconds per token of a pipeline with some number of stages.

    Attributes:
        pp, stpp, pipedec: in each mode.
        single: of one process with the whole target, its fastest static tree and no messages.
        hit_rate: of the tree in flight.
        static: width and depth of the fastest static tree in the pipeline.
    """

    stages: int
    pp: float
    stpp: float
    pipedec: float
    single: float
    hit_rate: float
    timesteps_per_token: float
    static: tuple[int, int]


def known_texts(
    target: FrozenTarget,
    taps: Sequence[int],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: SamplingParams,
) -> list[KnownText]:
    """Decode prompts with the target alone, and encode the texts for a drafter that reads blocks `taps`."""
    answers, _ = decode_all(target, NoProposer(), prompts, new_tokens, sampling=[sampling] * len(prompts))
    return list(encoded(target, taps, prompts, answers, new_tokens))


@torch.no_grad()
def encoded(
    target: FrozenTarget,
    taps: Sequence[int],
    prompts: Iterable[Sequence[int]],
    answers: Iterable[list[int]],
    limit: int | None = None,
) -> Iterator[KnownText]:
    """Yield texts of up to `limit` tokens with the tapped states of the target's blocks `taps`, as a drafter
    reads them."""
    target.tap(taps)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=target.device)  # [1, n]
        tapped = torch.zeros(ids.shape[1], 0, device=target.device)
        if taps:
            tapped = target.encode(ids, torch.zeros_like(ids)).tapped[0]
        yield KnownText(list(prompt), answer, tapped, limit)


def cut(whole: Machines, stages: int, link: Link) -> Machines:
    """Return machines with equal stages of what all stages of `whole` take together."""

    def share(curves: Sequence[Callable[[int], float]]) -> list[Callable[[int], float]]:
        return [lambda n: sum(curve(n) for curve in curves) / stages] * stages if curves else []

    links = [link] * (stages - 1)
    return replace(whole, stages=share(whole.stages), links=links, alone=share(whole.alone))


def sent_bytes(target: FrozenTarget) -> int:
    """Return the bytes that ranks of this target send per token: its hidden state, in fp32 if blocks are
    native, else in the target's dtype."""
    return (4 if target.native else target.dtype.itemsize) * target.hidden_size


def outlook(
    drafter: Drafter,
    texts: Sequence[KnownText],
    described: Iterable[Mapping[str, Machines]],
    width: int,
    children: int,
    layers: int = 1,
    best_first: bool = False,
    at_once: int = 1,
) -> Iterator[Row]:
    """Yield a row for each pipeline: all modes, simulated over all texts, `at_once` of them together.

    Args:
        described: the machines of each pipeline by mode, each group a stage; those of "single" have the speed
            of one process.
        width, children, layers, best_first: of the tree in flight (`PipelineConfig`).

    Raises:
        UserError: all answers have one token.
    """
    tokens = sum(len(text.answer) - 1 for text in texts)
    if not tokens:
        raise UserError("prompts: must give answers of two tokens or more, got none; name others")
    static = {  # by width and depth; the same for any number of stages
        (size, depth): [
            [(one.drafted, one.nodes) for one in replay_static(drafter, *_known(t), depth, size, children)]
            for t in texts
        ]
        for size, depth in STATIC
    }

    def fastest(pipeline: Machines, at_once: int) -> tuple[float, tuple[int, int]]:
        return min(
            (_seconds([stpp_jobs(pipeline, one) for one in rounds], at_once), shape)
            for shape, rounds in static.items()
        )

    for pipeline in described:
        tree = len(pipeline["pipedec"].stages), width, children, layers
        traces = [replay(drafter, *_known(t), *tree, best_first=best_first, limit=t.limit) for t in texts]
        stpp, shape = fastest(pipeline["stpp"], at_once)
        yield Row(
            tree[0],
            _seconds([pp_jobs(pipeline["pp"], len(text.answer) - 1) for text in texts], at_once) / tokens,
            stpp / tokens,
            _seconds([pipedec_jobs(pipeline["pipedec"], trace) for trace in traces], at_once) / tokens,
            fastest(one_process(pipeline["single"]), 1)[0] / tokens,
            sum(trace.hits for trace in traces) / max(sum(max(trace.tokens - 1, 0) for trace in traces), 1),
            sum(len(trace.steps) for trace in traces) / tokens,
            shape,
        )


def one_process(described: Machines) -> Machines:
    """Return a machine with the blocks of all stages, between which nothing is sent."""
    groups = range(len(described.stages))
    return Machines([lambda n: sum(described.computing(group, n) for group in groups)], [], described.draft)


def _seconds(requests: Sequence[Iterable[Job]], at_once: int) -> float:
    return total_seconds(run(requests, at_once))


def _known(text: KnownText) -> tuple[list[int], list[int], torch.Tensor]:
    return text.prompt, text.answer, text.tapped


def as_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, with the least number of stages from which `pipedec` wins."""
    names = ("PP", "STPP", "PipeDec", "one process")
    heads = ["stages", *(f"{name}, ms" for name in names), *(f"over {name}" for name in ("PP", "STPP"))]
    heads += ["over one process", "hits", "timesteps per token"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        others = row.pp, row.stpp, row.single
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (row.pp, row.stpp, row.pipedec, row.single))
        gains = " | ".join(f"{other / row.pipedec:.2f}" for other in others)
        lines.append(
            f"| {row.stages} | {times} | {gains} | {row.hit_rate:.3f} | {row.timesteps_per_token:.2f} |"
        )
    rivals = {"the best static tree": "stpp", "one process with drafts": "single"}
    ends = [f"PipeDec {_first_ahead(rows, name, of)}" for name, of in rivals.items()]
    return "\n".join([*lines, "", *ends])


def _first_ahead(rows: Sequence[Row], rival: str, of: str) -> str:
    first = None  # from which on all win
    for row in sorted(rows, key=lambda row: -row.stages):
        if row.pipedec >= getattr(row, of):
            break
        first = row.stages
    return f"beats {rival} from {first} stages on" if first else f"does not beat {rival}"
