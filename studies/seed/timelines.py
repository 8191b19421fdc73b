"""Figures 1, 3 and 4 of the SEED paper, drawn from recorded timelines.

    python -m studies.seed.timelines                     on paced devices, of which two work at the same time
    python -m studies.seed.timelines --devices real      on this machine
    python -m studies.seed.timelines --seconds 30        less of Figure 4
    python -m studies.seed.timelines --resume            draw what is recorded again

Figure 1: three samples of a prompt by serial decoding, serial decoding with drafts, SEED with one verifier,
and plain decoding of all three at once. Figure 3: what each draft of SEED waits for, and how many wait.
Figure 4: who is busy while trees grow. Spans go to --out as JSON, the pictures to --pictures.
"""

import itertools
import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafttrain.inference.decode import Request
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.text import encode
from drafttrain.kernels.machine import describe_machine
from drafttrain.reasoning.branches import Pace
from drafttrain.reasoning.config import SchedulerConfig, SearchConfig
from drafttrain.reasoning.interface import Answer, Call, Then
from drafttrain.reasoning.reason import reason
from drafttrain.reasoning.scheduler import ScheduledDecoder
from drafttrain.reasoning.tasks import TASKS
from drafttrain.reasoning.timeline import TARGET, Span
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json, write_text
from studies import arguments
from studies.seed.drawing import Block, Lane, Panel, draw
from studies.seed.methods import SEQUENCES, SERIAL_AR, TASK_FILES, Method, drawn, scheduled, serial
from studies.seed.paced import TREES, Paced, seed_method
from studies.seed.pairs import DEFAULTS, Pair, load_pair

TASK = "gsm8k"
NEW_TOKENS = SchedulerConfig.short + 4  # of each sequence in Figures 1 and 3: enough to be drafted
VERDICTS = 8  # in Figure 3a
BIN = 0.5  # seconds of a point of Figure 4
REAL_TREE = drawn(1, 1, 1)


@dataclass
class Recorded:
    """A run and who was busy in it.

    Attributes:
        seconds: that are drawn.
    """

    title: str
    seconds: float
    spans: list[Span]

    def row(self) -> dict:
        """Return it as JSON, a list for each span, with times in whole microseconds."""
        spans = [
            [span.who, span.what, span.sequences, round(span.begin, 6), round(span.end, 6)]
            for span in self.spans
        ]
        return {**vars(self), "spans": spans}

    @classmethod
    def read(cls, values: dict) -> "Recorded":
        """Return what `row` made."""
        spans = [Span(who, what, tuple(numbers), *times) for who, what, numbers, *times in values["spans"]]
        return cls(values["title"], values["seconds"], spans)


class Over(Exception):
    """Time is over."""


def ways(devices: str) -> list[Method]:
    """Return the methods of Figure 1, in its order; SEED as it is scheduled on these devices."""
    if devices == "paced":
        tree = TREES[TASK]
        short = 0  # as the paced figures: a drafter with a device of its own drafts for short answers, too
        scheduler = replace(seed_method(tree).scheduler, drafting="each")
    else:
        tree, short = REAL_TREE, SchedulerConfig.short
        scheduler = SchedulerConfig("one", "joined", SEQUENCES)
    return [
        serial(SERIAL_AR, None),
        serial("serial speculative decoding", tree, short),
        Method("SEED, scheduled", tree, scheduler),
        scheduled("all sequences in one forward", None, "batched"),
    ]


# recording


def sample(pair: Pair, method: Method, pace: Pace, new_tokens: int = NEW_TOKENS) -> Recorded:
    """Decode three samples of a thought's prompt, which is encoded already."""
    task = TASKS[TASK]()
    [problem] = task.read(TASK_FILES[TASK], 1)
    prompt = encode(pair.target, next(task.think(problem, [])).prompt)
    requests = [Request(prompt, new_tokens, SamplingParams(1.0, seed=i)) for i in range(SEQUENCES)]
    decoder = method.decoder(pair, pace)
    for _ in range(2):  # the first run warms
        decoder.decode(requests, stop=())
    spans = kept(decoder, method)
    return Recorded(method.name, max(span.end for span in spans), spans)


def watch(pair: Pair, method: Method, pace: Pace, seconds: float) -> Recorded:
    """Grow trees of thoughts until time is over."""
    decoder, spans, started = method.decoder(pair, pace), [], time.perf_counter()

    def generate(calls: Sequence[Call], then: Then) -> None:
        def checked(number: int, answer: Answer) -> Sequence[Call]:
            if time.perf_counter() - started > seconds:
                raise Over
            return then(number, answer)

        try:
            decoder.answer(calls, checked)
        finally:
            offset = decoder.timeline.started - started
            moved = (
                replace(one, begin=one.begin + offset, end=one.end + offset) for one in kept(decoder, method)
            )
            spans.extend(span for span in moved if span.begin < seconds)

    try:
        for problem in itertools.cycle(TASKS[TASK]().read(TASK_FILES[TASK], 8)):
            reason(TASK, problem, generate, SearchConfig())
    except Over:
        return Recorded(method.name, seconds, spans)


def kept(decoder: ScheduledDecoder, method: Method) -> list[Span]:
    """Return the spans of a decoder's last call, in order and to 0.1 ms, without those of no drafts."""
    spans = sorted(decoder.timeline.spans, key=lambda span: span.begin)
    return [
        replace(span, begin=round(span.begin, 4), end=round(span.end, 4))
        for span in spans
        if span.what != "draft" or method.tree is not None
    ]


# lanes


def blocks(spans: Sequence[Span]) -> list[Block]:
    """Return spans as they are drawn."""
    return [Block(span.begin, span.end, span.what, span.sequences) for span in spans]


def by_worker(recorded: Recorded) -> list[Lane]:
    """Return the target, and what drafts: one lane, or one for each sequence where several draft at once."""
    drafts = [span for span in recorded.spans if span.what == "draft"]
    lanes = [Lane(TARGET, blocks([span for span in recorded.spans if span.who == TARGET]))]
    if len({span.who for span in drafts}) > 1:
        for number in numbers(drafts):
            own = [span for span in drafts if number in span.sequences]
            lanes.append(Lane(f"draft {number + 1}", blocks(own)))
    elif drafts:
        lanes.append(Lane("drafts", blocks(drafts)))
    return lanes


def numbers(spans: Sequence[Span]) -> list[int]:
    """Return the sequences of spans."""
    return sorted({number for span in spans for number in span.sequences})


def waits(spans: Sequence[Span], number: int) -> list[Block]:
    """Return the times between a sequence's drafts and their verification."""
    own = [span for span in spans if number in span.sequences and span.what in ("draft", "verify")]
    own.sort(key=lambda span: span.begin)
    return [
        Block(draft.end, verdict.begin, "wait", (number,))
        for draft, verdict in itertools.pairwise(own)
        if (draft.what, verdict.what) == ("draft", "verify")
    ]


def queue(recorded: Recorded) -> list[Lane]:
    """Return each sequence with its drafts, waits and verifications, the target, and the queue's length."""
    lanes, changes = [], [(0.0, 0)]
    for number in numbers(recorded.spans):
        own = [replace(one, sequences=(number,)) for one in recorded.spans if number in one.sequences]
        waiting = waits(recorded.spans, number)
        lanes.append(Lane(f"draft {number + 1}", blocks(own) + waiting))
        changes += [(wait.begin, 1) for wait in waiting] + [(wait.end, -1) for wait in waiting]
    lengths, n = [], 0
    for seconds, change in sorted(changes):
        n += change
        lengths.append((seconds, n / SEQUENCES))
    target = Lane(TARGET, blocks([span for span in recorded.spans if span.who == TARGET]))
    return [*lanes, target, Lane("queue", levels=lengths, note=f"0 to {SEQUENCES}")]


def shares(recorded: Recorded, width: float = BIN) -> list[Lane]:
    """Return how much of each bin of time the target works, and how much drafting goes on."""
    lanes = []
    for name, own in (
        (TARGET, [span for span in recorded.spans if span.who == TARGET]),
        ("drafting", [span for span in recorded.spans if span.what == "draft"]),
    ):
        bins = [0.0] * max(1, round(recorded.seconds / width))
        for begin, end in merged(own):
            for i in range(int(begin / width), min(len(bins), int(end / width) + 1)):
                bins[i] += max(0.0, min(end, (i + 1) * width) - max(begin, i * width))
        levels = [(i * width, busy / width) for i, busy in enumerate(bins)]
        lanes.append(Lane(name, levels=levels, note=f"{sum(bins) / (len(bins) * width):.0%} of time"))
    return lanes


def merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return the times at which there is a span, those that overlap joined."""
    times: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if times and begin <= times[-1][1]:
            begin, last = times.pop()
            end = max(last, end)
        times.append((begin, end))
    return times


# the figures


def figure_1(runs: Sequence[Recorded]) -> list[Panel]:
    """Return a panel for each way, on the same axis."""
    end = max(run.seconds for run in runs)
    return [
        Panel(f"({letter}) {run.title}: {run.seconds:.2f} s", by_worker(run), end)
        for letter, run in zip("abcd", runs)
    ]


def figure_3(runs: Sequence[Recorded]) -> list[Panel]:
    """Return the queue of a run at its beginning, and to its end."""
    [run] = runs
    verdicts = [span for span in run.spans if span.what == "verify"]
    first = verdicts[: VERDICTS + 1][-1].begin
    return [
        Panel(f"(a) the first {VERDICTS} verdicts", queue(run), first),
        Panel("(b) until all sequences have ended", queue(run), run.seconds),
    ]


def figure_4(runs: Sequence[Recorded]) -> list[Panel]:
    """Return who is busy in each run."""
    return [Panel(run.title, shares(run), run.seconds) for run in runs]


FIGURES: dict[str, Callable[[Sequence[Recorded]], list[Panel]]] = {
    "figure1": figure_1,
    "figure3": figure_3,
    "figure4": figure_4,
}


def record(
    pair: Pair, devices: str, seconds: float, new_tokens: int = NEW_TOKENS
) -> dict[str, list[Recorded]]:
    """Record the runs of all figures."""
    methods = ways(devices)
    pace = Paced if devices == "paced" else Pace
    found = [sample(pair, method, pace(), new_tokens) for method in methods]
    watched = [watch(pair, method, pace(), seconds) for method in methods[1:3]]
    return {"figure1": found, "figure3": found[2:3], "figure4": watched}


def study(args: Namespace) -> None:
    raw = args.out / f"timelines_{args.devices}.json"
    if not (args.resume and raw.exists()):
        found = record(load_pair("B", args.target, args.bundle, args.dtype), args.devices, args.seconds)
        rows = {name: [run.row() for run in runs] for name, runs in found.items()}
        write_text(raw, json.dumps(rows) + "\n")
        made = {**describe_machine(torch.device("cpu")), "drafter": args.bundle, "dtype": args.dtype}
        write_json(args.out / f"timelines_{args.devices}.machine.json", made | {"commit": git_commit()})
    pictures = Path(args.pictures)
    for name, runs in read_json(raw).items():
        place = pictures / f"seed_{name}_{args.devices}.svg"
        write_text(place, draw(FIGURES[name]([Recorded.read(run) for run in runs])))
        print(place)


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype", "devices", "seconds", "pictures", "resume")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", **DEFAULTS)


if __name__ == "__main__":
    arguments.start(main)
