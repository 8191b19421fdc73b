"""Figures 1, 2 and 4 to 8 of the PipeDec paper, by real hits and simulated accelerators.

    python -m studies.pipedec.pictures
    python -m studies.pipedec.pictures --limit 2 --target TARGET --bundle SMALL_LM

Figure 1: who works when, with a static tree and with a tree in flight. Figure 2: the first timesteps of three
stages with two children for each node and layers of three. Figure 4: milliseconds per token and hit rate by
width and children at 14 stages. Figure 5: milliseconds per token by stages and mode. Figure 6: hit rates by
task. Figure 7: greedy and sampled. Figure 8: tokens per second by the number of requests at a time, twelve
prompts, of the tasks in turn. Prompts of WMT14 count where --wmt14 names their file. Times are
those of the accelerators in `studies/figures/pipedec_counts.py`. Counts are kept in --out and not made twice;
the numbers of the charts go there as well, pictures to --pictures.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.replay import Timestep, Trace
from drafttrain.pipeline.simulate import (
    Machines,
    pipedec_jobs,
    pp_jobs,
    run,
    stpp_jobs,
    timestep_seconds,
    total_seconds,
)
from drafttrain.report.panels import Bar, Bars, Chart, Panel, Series
from drafttrain.report.pictures import sheet
from drafttrain.utils.writing import write_json, write_text
from studies import arguments
from studies.figures.pipedec_counts import CHILDREN, SAMPLED, STAGES, WIDTH, accelerators
from studies.pipedec import counts, tasks
from studies.pipedec.counts import Counted, Shape
from studies.seed import drawing
from studies.seed.drawing import Block, Lane
from studies.seed.pairs import Pair, load_pair

WIDTHS, ALL_CHILDREN = (8, 16, 32, 64, 128), (2, 4, 8, 16)
AT_ONCE, REQUESTS = range(1, 9), 12  # of Figure 8
SHOWN = 40  # timesteps of Figures 1 and 2
SMALL = (3, 3, 2)  # groups, width and children of Figure 2
Legend = list[tuple[str, int | str, bool]]


def of(rows: Sequence[Counted], shape: Shape) -> list[Counted]:
    """Return the texts against which a shape was grown."""
    return [one for one in rows if one.shape == shape]


def in_turn(rows: Sequence[Counted], n: int) -> list[Counted]:
    """Return n texts, of the tasks in turn."""
    names = dict.fromkeys(one.task for one in rows)
    turns = itertools.zip_longest(*([one for one in rows if one.task == name] for name in names))
    return [one for turn in turns for one in turn if one is not None][:n]


def milliseconds(rows: Sequence[Counted], mode: str, shape: Shape, machines: Machines) -> float:
    """Return the mean of the simulated milliseconds per token over prompts."""
    found = counts.seconds(rows, mode, shape, machines).values()
    return 1e3 * sum(found) / len(found)


# timelines


def lanes(trace: Trace, machines: Machines) -> list[Lane]:
    """Return the drafter and each group at work in the timesteps of a trace, colored by layers in turn."""
    found = [Lane("draft"), *(Lane(f"stage {i + 1}") for i in range(len(machines.stages)))]
    now = 0.0
    for number, step in enumerate(trace.steps):
        if step.drafted:
            end = now + sum(map(machines.draft, step.drafted))
            found[0].blocks.append(Block(now, end, "draft", (number,)))
        for group, nodes in enumerate(step.nodes):
            if nodes:
                end = now + machines.computing(group, nodes)
                found[group + 1].blocks.append(Block(now, end, "verify", (number - group,)))
        now += timestep_seconds(machines, step.drafted, step.nodes)
    return found


def static_lanes(one: Counted, machines: Machines, seconds: float) -> list[Lane]:
    """Return the drafter and each stage at work with static trees, colored by trees in turn."""
    found = [Lane("draft"), *(Lane(f"stage {i + 1}") for i in range(len(machines.stages)))]
    begin, number = 0.0, 0
    for drafted, nodes in one.rounds:
        for event in run([stpp_jobs(machines, [(drafted, nodes)])]):
            kind, _, place = event.resource.partition(" ")
            lane = found[int(place) + 1] if kind == "stage" else found[0] if kind == "drafter" else None
            if lane is not None:
                what = "draft" if kind == "drafter" else "verify"
                lane.blocks.append(Block(begin + event.start, begin + event.end, what, (number,)))
        begin, number = begin + total_seconds(run([stpp_jobs(machines, [(drafted, nodes)])])), number + 1
        if begin > seconds:
            break
    return found


def timesteps(flight: Counted) -> list[Timestep]:
    """Return all timesteps, those beside the prompt first."""
    trace = flight.trace()
    return [*trace.beside, *trace.steps]


def figure_1(flight: Counted, static: Counted, machines: Machines) -> str:
    """Draw who works when, with a static tree and with a tree in flight."""
    trace = Trace(timesteps(flight)[:SHOWN])
    end = sum(timestep_seconds(machines, step.drafted, step.nodes) for step in trace.steps)
    return drawing.draw(
        [
            drawing.Panel(
                "(1) a static tree, drafted and verified in turn", static_lanes(static, machines, end), end
            ),
            drawing.Panel("(2) a tree in flight", lanes(trace, machines), end),
        ]
    )


def figure_2(flight: Counted, machines: Machines) -> str:
    """Draw the first timesteps of three stages."""
    trace = Trace(timesteps(flight)[: SHOWN // 2])
    end = sum(timestep_seconds(machines, step.drafted, step.nodes) for step in trace.steps)
    title = "three stages, two children for each node, layers of three: "
    title += "".join("h" if step.hits else "m" if step.tokens else "." for step in trace.steps)
    return drawing.draw([drawing.Panel(f"{title} (hit, miss, no token)", lanes(trace, machines), end)])


# charts


def lines(title: str, series: Sequence[Series], x_label: str, y_label: str, **more: bool) -> Chart:
    """Return a chart whose axes hold all points."""
    xs = [x for one in series for x in one.xs]
    ys = [y for one in series for y in one.ys]
    top = 1.0 if more.get("percent") else 1.05 * max(ys)
    return Chart(title, list(series), x_label, y_label, (min(xs), max(xs)), (0.0, top), legend=True, **more)


def figure_4(rows: Sequence[Counted], machines: Machines) -> list[Panel]:
    """Return milliseconds per token and hit rate by width, a line for each number of children."""
    slow, hits = [], []
    for style, children in enumerate(ALL_CHILDREN):
        shapes = [("flight", None, 14, width, children) for width in WIDTHS]
        times = [milliseconds(rows, "pipedec", shape, machines) for shape in shapes]
        rates = [counts.hit_rate(rows, shape) for shape in shapes]
        name, xs = f"{children} children", [float(width) for width in WIDTHS]
        slow.append(Series(name, style, xs, times, [f"{time:.0f} ms" for time in times]))
        hits.append(Series(name, style, xs, rates, [f"{rate:.3f}" for rate in rates]))
    return [
        lines("latency", slow, "width", "ms per token", log_x=True),
        lines("hit rate", hits, "width", "share of tokens", log_x=True, percent=True),
    ]


def figure_5(rows: Sequence[Counted], statics: Sequence[Shape], hidden: int) -> list[Panel]:
    """Return milliseconds per token by stages and mode, and of the drafter alone."""
    bars = []
    for stages in STAGES:
        machines = accelerators(stages, hidden)
        flight = ("flight", None, stages, WIDTH, CHILDREN)
        static = counts.best_static(rows, statics, machines)
        for mode, shape in (("pp", flight), ("stpp", static), ("pipedec", flight)):
            bars.append(bar(f"{mode}, {stages} stages", milliseconds(rows, mode, shape, machines)))
    bars.append(bar("the small model alone", 1e3 * accelerators(STAGES[0], hidden).draft(1)))
    return [Bars("latency by stages", bars, "ms per token")]


def bar(label: str, value: float) -> Bar:
    """Return a bar with its value."""
    return Bar(label, value, f"{value:.0f}")


def figure_6(rows: Sequence[Counted], static: Shape) -> list[Panel]:
    """Return the hit rates of each task by stages, and of a static tree.

    Args:
        static: with as many nodes as the groups of fourteen stages hold.
    """
    names = list(dict.fromkeys(one.task for one in rows))
    found = []
    shapes = {f"{stages} stages": ("flight", None, stages, WIDTH, CHILDREN) for stages in STAGES}
    for label, shape in {**shapes, "static tree": static}.items():
        own = {name: counts.hit_rate([one for one in rows if one.task == name], shape) for name in names}
        found.append(Bars(label, [Bar(name, rate, f"{rate:.3f}") for name, rate in own.items()], "hit rate"))
    return found


def figure_7(rows: Sequence[Counted], static: Shape, machines: Machines, seeds: Sequence[int]) -> list[Panel]:
    """Return milliseconds per token and hit rates, greedy and sampled."""
    latency, hits = [], []
    for mode, kind, (_, _, groups, width, children) in (
        ("pipedec", "flight", ("flight", None, 14, WIDTH, CHILDREN)),
        ("stpp", "static", static),
    ):
        for label, own in (("greedy", [None]), ("sampled", list(seeds))):
            shapes: list[Shape] = [(kind, seed, groups, width, children) for seed in own]
            times = [milliseconds(rows, mode, shape, machines) for shape in shapes]
            rates = [counts.hit_rate(rows, shape) for shape in shapes]
            latency.append(bar(f"{mode}, {label}", sum(times) / len(times)))
            mean = sum(rates) / len(rates)
            hits.append(Bar(f"{mode}, {label}", mean, f"{mean:.3f}"))
    return [Bars("latency", latency, "ms per token"), Bars("tokens in the tree", hits, "share")]


def figure_8(rows: Sequence[Counted], static: Shape, machines: Machines) -> list[Panel]:
    """Return tokens per second by the number of requests at a time."""
    flight = ("flight", None, 14, WIDTH, CHILDREN)
    flights, trees = (in_turn(of(rows, shape), REQUESTS) for shape in (flight, static))
    tokens = sum(one.tokens for one in flights)

    def rate(mode: str, at_once: int) -> float:
        if mode == "pipedec":  # has all stages for one request
            jobs = [pipedec_jobs(machines, one.trace()) for one in flights]
            return tokens / total_seconds(run(jobs, 1))
        jobs = (
            [pp_jobs(machines, one.tokens) for one in flights]
            if mode == "pp"
            else [stpp_jobs(machines, [tuple(each) for each in one.rounds]) for one in trees]
        )
        return tokens / total_seconds(run(jobs, at_once))

    series = []
    for style, mode in enumerate(("pp", "stpp", "pipedec")):
        rates = [rate(mode, at_once) for at_once in AT_ONCE]
        notes = [f"{one:.1f} tokens/s" for one in rates]
        series.append(Series(mode, style, [float(one) for one in AT_ONCE], rates, notes))
    return [lines("throughput", series, "requests at a time", "tokens/s", counts=True)]


# counting and drawing


def needed(statics: Sequence[Shape], seeds: Sequence[int]) -> tuple[list[Shape], dict[int, list[Shape]]]:
    """Return the shapes of greedy texts, and of those of each seed."""
    wide = [("flight", None, 14, width, n) for width, n in itertools.product(WIDTHS, ALL_CHILDREN)]
    greedy = [*counts.flights(STAGES, WIDTH, CHILDREN), *statics, ("flight", None, *SMALL), *wide]
    sampled = {
        seed: [*counts.flights([14], WIDTH, CHILDREN, seed), *counts.statics(CHILDREN, seed)]
        for seed in seeds
    }
    return list(dict.fromkeys(greedy)), sampled


def grow(pair: Pair, args: Namespace, seeds: Sequence[int]) -> list[Counted]:
    """Grow all trees that are needed."""
    more = {tasks.BY_PATH: args.wmt14} if args.wmt14 else {}
    prompts = tasks.read_tasks(more, args.limit)
    greedy, sampled = needed(counts.statics(CHILDREN), seeds)
    raw, rows = args.out / f"counts_{pair.name}.jsonl", []
    for seed, shapes in {None: greedy, **sampled}.items():
        sampling = counts.GREEDY if seed is None else SamplingParams(**SAMPLED, seed=seed)
        path = args.out / f"texts_{pair.name}_{'greedy' if seed is None else seed}.json"
        known = counts.texts(pair, prompts, args.new_tokens, sampling, path)
        rows += counts.count(pair.drafter, known, shapes, raw, _note)
        if seed is None:
            equal_nodes(
                rows, lambda shape, known=known: counts.count(pair.drafter, known, [shape], raw, _note)
            )
    return rows


def equal_nodes(rows: list[Counted], grown: Callable[[Shape], list[Counted]] = lambda shape: []) -> Shape:
    """Return the static tree with as many nodes as the groups of fourteen stages hold, and add its rows.

    Args:
        grown: grows trees of a shape; without it the rows must be there.
    """
    return counts.equal_nodes(rows, ("flight", None, 14, WIDTH, CHILDREN), CHILDREN, grown)


def _note(line: str) -> None:
    print(line, flush=True)


def numbers(panels: Sequence[Panel]) -> dict[str, Any]:
    """Return the points or bars of charts by their titles and labels."""
    return {
        panel.title: {bar.label: round(bar.value, 4) for bar in panel.bars}
        if isinstance(panel, Bars)
        else {one.name: [[x, round(y, 4)] for x, y in zip(one.xs, one.ys)] for one in panel.series}
        for panel in panels
    }


def timelines(rows: Sequence[Counted], hidden: int) -> Iterator[tuple[str, str]]:
    """Yield the names and pictures of Figures 1 and 2."""
    statics, machines = counts.statics(CHILDREN), accelerators(14, hidden)
    static = counts.best_static(rows, statics, machines)
    flight = of(rows, ("flight", None, 14, WIDTH, CHILDREN))[0]
    seven = of(rows, ("flight", None, STAGES[0], WIDTH, CHILDREN))[0]
    few = accelerators(STAGES[0], hidden)
    same = next(one for one in of(rows, static) if (one.task, one.prompt) == (flight.task, flight.prompt))
    yield "figure1", figure_1(seven, same, few)
    yield "figure2", figure_2(of(rows, ("flight", None, *SMALL))[0], accelerators(SMALL[0], hidden))


def charts(rows: Sequence[Counted], hidden: int, seeds: Sequence[int]) -> dict[str, list[Panel]]:
    """Return the panels of Figures 4 to 8."""
    statics, machines = counts.statics(CHILDREN), accelerators(14, hidden)
    static = counts.best_static(rows, statics, machines)
    return {
        "figure4": figure_4(rows, machines),
        "figure5": figure_5(rows, statics, hidden),
        "figure6": figure_6(rows, equal_nodes(rows)),
        "figure7": figure_7(rows, static, machines, seeds),
        "figure8": figure_8(rows, static, machines),
    }


def study(args: Namespace) -> None:
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)
    seeds = range(5)
    rows, folder = grow(pair, args, seeds), Path(args.pictures)
    hidden = pair.target.hidden_size
    drawn = charts(rows, hidden, seeds)
    values = {name: numbers(panels) for name, panels in drawn.items()}
    prompts = len({(one.task, one.prompt) for one in rows})
    write_json(args.out / f"figures_{pair.name}.json", {"prompts": prompts, **values})
    pictures = itertools.chain(timelines(rows, hidden), ((n, str(sheet(p, []))) for n, p in drawn.items()))
    for name, picture in pictures:
        path = folder / f"pipedec_{name}_{pair.name}.svg"
        write_text(path, picture)
        print(path)


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "limit", "new_tokens", "dtype", "wmt14", "pictures")
    defaults = {"dtype": "bfloat16", "limit": tasks.PROMPTS, "new_tokens": 64}
    return arguments.run(study, __doc__, argv, names, "runs/pipedec", **defaults)


if __name__ == "__main__":
    arguments.start(main)
