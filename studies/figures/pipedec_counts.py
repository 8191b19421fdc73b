"""The figures of topic `pipedec` from counts: trees grown against known texts, and simulated times."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drafttrain.calibration.timing import VERIFIED, fitting_context, measure_costs
from drafttrain.data.prompts import Prompt, read_prompts
from drafttrain.inference.params import SamplingParams
from drafttrain.kernels.machine import describe_machine
from drafttrain.pipeline.outlook import cut, sent_bytes
from drafttrain.pipeline.simulate import Link, Machines
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies.figures.machine_setting import in_dtype
from studies.goals import Measured, Run
from studies.pipedec import counts, tasks, top_k
from studies.pipedec.counts import Counted, Shape
from studies.pipedec.ratios import Name, ratio
from studies.seed.pairs import Pair, load_pair

STAGES, WIDTH, CHILDREN = (7, 14, 21), 32, 16  # the paper's
NEW_TOKENS, TUNING_PROMPTS = 64, 6
DRAFT_MS = 30.0  # of accelerators; a stage of fourteen takes as long, for up to WIDTH tokens
GBIT, LATENCY, SYNC = 10.0, 1e-4, 5e-4  # 10^9 bits a second, seconds
SAMPLED, SEEDS = {"temperature": 0.6, "top_p": 0.9, "top_k": 80}, range(5)
Tasks = Mapping[str, Sequence[Prompt]]
NO_PAIR = {"value": None, "skipped": "no --pair TARGET DRAFTER"}
BEST_FIRST_FIGURE = "sim14_best_first_vs_stpp"
SIMULATED_FIGURES, HIT_FIGURES = ("sim14_vs_pp", "sim14_vs_stpp"), ("hits_vs_static", "deep_hits")
RAW, SAMPLED_RAW, CURVES = "pipedec_counts", "pipedec_counts_sampled", "curves.json"
CONTEXT, ROUNDS = 256, 7  # of the curves
TOP_K_DTYPE = "bfloat16"


def accelerators(stages: int, hidden: int) -> Machines:
    """Describe accelerators on which a drafting step takes as long as one of fourteen stages."""
    target = CostCurve((1, WIDTH), [14 * DRAFT_MS / 1e3] * 2)
    draft = CostCurve((1, WIDTH), [DRAFT_MS / 1e3] * 2)
    return cut(Machines([target], [], draft, SYNC), stages, Link(GBIT, LATENCY, 2 * hidden))


def simulated_figures(run: Run) -> Measured:
    """Count the hits of the larger pair in greedy texts at 14 stages, and simulate accelerators with them."""
    if not run.pair:
        return dict.fromkeys(SIMULATED_FIGURES, NO_PAIR)
    pair, prompts = _asked(run)  # before the folder is emptied
    if not run.resume:
        run.check_quiet()
    folder = run.folder(RAW, pair=run.pair)
    if not (folder / CURVES).exists():
        run.check_quiet()
        measure_curves(pair, folder)
    return simulated(pair, prompts, folder, NEW_TOKENS)


def best_first_figure(run: Run) -> Measured:
    """Simulate accelerators with the hits of best-first trees, beside the counts of `simulated_figures`."""
    if not run.pair:
        return {BEST_FIRST_FIGURE: NO_PAIR}
    folder = run.folder_of(RAW, pair=run.pair)
    return best_first(*_asked(run), folder, NEW_TOKENS)


def hit_figures(run: Run) -> Measured:
    """Compare the hits of the larger pair in greedy texts by stages and with static trees, beside the counts
    of `simulated_figures`."""
    if not run.pair:
        return dict.fromkeys(HIT_FIGURES, NO_PAIR)
    folder = run.folder_of(RAW, pair=run.pair)
    return hits(*_asked(run), folder, NEW_TOKENS)


def sampled_figure(run: Run) -> Measured:
    """Simulate accelerators with the hits of the larger pair in sampled texts and in greedy ones."""
    if not run.pair:
        return {"sampling_slowdown": NO_PAIR}
    folder, greedy = run.folder(SAMPLED_RAW, pair=run.pair), run.folder_of(RAW, pair=run.pair)
    return slowdown(*_asked(run), folder, greedy, NEW_TOKENS)


def _asked(run: Run) -> tuple[Pair, Tasks]:
    prompts = tasks.read_tasks(run.more_prompts, run.prompts(1, tasks.PROMPTS))
    return load_pair("A", *run.pair), prompts


def measure_curves(pair: Pair, folder: Path) -> None:
    """Write the seconds of the target's forward by tokens and of a drafting step by nodes here."""
    context = fitting_context(pair.target, CONTEXT, VERIFIED)
    measured = measure_costs(pair.target, pair.drafter, CHILDREN, [context], ROUNDS)[:2]
    curves = [curve.cost() for [curve] in measured]
    found = {name: [curve.sizes, curve.seconds] for name, curve in zip(("target", "draft"), curves)}
    machine = describe_machine(torch.device("cpu"), pair.target.dtype)
    write_json(folder / CURVES, found | {"context": context, "machine": machine})


def machines_here(stages: int, target: FrozenTarget, folder: Path) -> Machines:
    """Describe stages that share this machine's time of a forward equally, with this drafter's own time; they
    send states as the target's blocks compute them."""
    found = read_json(folder / CURVES)
    whole, draft = (CostCurve(*map(tuple, found[name])) for name in ("target", "draft"))
    return cut(Machines([whole], [], draft, SYNC), stages, Link(GBIT, LATENCY, sent_bytes(target)))


def grown(
    pair: Pair,
    prompts: Tasks,
    folder: Path,
    new_tokens: int,
    shapes: Sequence[Shape],
    seed: int | None = None,
) -> list[Counted]:
    """Grow trees of these shapes against greedy texts, or those of a seed; what the folder has is not done
    again."""
    sampling = counts.GREEDY if seed is None else SamplingParams(**SAMPLED, seed=seed)
    file = folder / ("greedy.json" if seed is None else f"sampled_{seed}.json")
    known = counts.texts(pair, prompts, new_tokens, sampling, file)
    return counts.count(pair.drafter, known, shapes, folder / "counts.jsonl", _note)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def simulated(pair: Pair, prompts: Tasks, folder: Path, new_tokens: int) -> Measured:
    """Return the simulated speeds at 14 stages, on accelerators and with this machine's own costs."""
    [flight] = counts.flights([14], WIDTH, CHILDREN)
    statics = [*counts.statics(CHILDREN), chosen_eagle(pair, folder, new_tokens)]
    rows, hidden = grown(pair, prompts, folder, new_tokens, [flight, *statics]), pair.target.hidden_size
    found = speed(rows, accelerators(14, hidden), flight, statics)
    here = speed(rows, machines_here(14, pair.target, folder), flight, statics)
    notes = {
        "hit_rate": counts.hit_rate(rows, flight),
        "static": found["static"],
        "with_costs_of_this_machine": values(here),
        **_size(pair, prompts, new_tokens),
    }
    return {"sim14_vs_pp": found["pp"] | notes, "sim14_vs_stpp": found["stpp"] | notes}


def best_first(pair: Pair, prompts: Tasks, folder: Path, new_tokens: int) -> Measured:
    """Return the simulated speed of best-first trees at 14 stages over static trees, on accelerators."""
    [paper], [shape] = (counts.flights([14], WIDTH, CHILDREN, best_first=ours) for ours in (False, True))
    statics = [*counts.statics(CHILDREN), chosen_eagle(pair, folder, new_tokens)]
    rows = grown(pair, prompts, folder, new_tokens, [paper, shape, *statics])
    described = accelerators(14, pair.target.hidden_size)
    found = speed(rows, described, shape, statics)
    notes = {
        "over_pp": found["pp"],
        "over_layers": ratio(*(counts.seconds(rows, "pipedec", one, described) for one in (paper, shape))),
        "hit_rate": counts.hit_rate(rows, shape),
        "static": found["static"],
        **_size(pair, prompts, new_tokens),
    }
    return {BEST_FIRST_FIGURE: found["stpp"] | notes}


def chosen_eagle(pair: Pair, folder: Path, new_tokens: int) -> Shape:
    """Return the tree of EAGLE-2 that is the fastest on tuning prompts, through fourteen accelerators."""
    own = folder / "tuning"
    own.mkdir(exist_ok=True)
    prompts, shapes = {"tuning": read_prompts(tasks.TUNING, TUNING_PROMPTS)}, counts.eagles()
    rows = grown(pair, prompts, own, new_tokens, shapes)
    return counts.best_static(rows, shapes, accelerators(14, pair.target.hidden_size))


def hits(pair: Pair, prompts: Tasks, folder: Path, new_tokens: int) -> Measured:
    """Return the figures that compare hits."""
    flights = counts.flights(STAGES, WIDTH, CHILDREN)
    statics = [*counts.statics(CHILDREN), chosen_eagle(pair, folder, new_tokens)]
    rows = grown(pair, prompts, folder, new_tokens, [*flights, *statics])
    of_14, hidden = flights[STAGES.index(14)], pair.target.hidden_size
    wide = counts.equal_nodes(
        rows, of_14, CHILDREN, lambda shape: grown(pair, prompts, folder, new_tokens, [shape])
    )
    rates = {n: counts.hit_rate(rows, flight) for n, flight in zip(STAGES, flights)}
    speeds = {n: speed(rows, accelerators(n, hidden), own, statics) for n, own in zip(STAGES, flights)}
    notes = {
        "by_stages": {n: values(own) | {"hit_rate": rates[n]} for n, own in speeds.items()},
        **_size(pair, prompts, new_tokens),
    }
    return {
        "deep_hits": {"value": rates[21] / rates[7], **notes},
        "hits_vs_static": {
            "value": rates[14] / counts.hit_rate(rows, wide),
            "nodes": [counts.nodes_each(rows, of_14), counts.nodes_each(rows, wide)],
            "static": wide,
            **notes,
        },
    }


def slowdown(pair: Pair, prompts: Tasks, folder: Path, greedy_folder: Path, new_tokens: int) -> Measured:
    """Return the seconds per token of sampled texts over those of greedy ones, which have a folder of their
    own."""
    described = accelerators(14, pair.target.hidden_size)

    def seconds(seed: int | None) -> dict[Name, float]:
        [shape] = counts.flights([14], WIDTH, CHILDREN, seed)
        place = greedy_folder if seed is None else folder
        rows = grown(pair, prompts, place, new_tokens, [shape], seed)
        return counts.seconds(rows, "pipedec", shape, described)

    greedy, sampled = seconds(None), [seconds(seed) for seed in SEEDS]
    names = [name for name in greedy if all(name in one for one in sampled)]
    mean = {name: sum(one[name] for one in sampled) / len(sampled) for name in names}
    slower = ratio(mean, {name: greedy[name] for name in names})
    return {"sampling_slowdown": {**slower, **_size(pair, prompts, new_tokens)}}


def _size(pair: Pair, prompts: Tasks, new_tokens: int) -> dict[str, Any]:
    texts = {"new_tokens": new_tokens, "target": pair.target.name}
    return {"size": {"prompts": tasks.sizes(prompts)}, "texts": texts, "machine": in_dtype(pair.target)}


def speed(
    rows: Sequence[Counted], described: Machines, flight: Shape, statics: Sequence[Shape]
) -> dict[str, Any]:
    """Return PipeDec's speed over PP's and over that of the fastest static tree, simulated."""
    static = counts.best_static(rows, statics, described)
    own = counts.seconds(rows, "pipedec", flight, described)
    return {
        "pp": ratio(counts.seconds(rows, "pp", flight, described), own),
        "stpp": ratio(counts.seconds(rows, "stpp", static, described), own),
        "static": static,
    }


def values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of `speed` without their intervals."""
    return {"pp": found["pp"]["value"], "stpp": found["stpp"]["value"], "static": found["static"]}


def top8(run: Run) -> Measured:
    """Look for the target's greedy tokens among the drafter's eight most probable ones, on long and short
    texts."""
    if not run.pair:
        return {"top8_accuracy": NO_PAIR}
    found = top_k.compare(*run.pair, TOP_K_DTYPE)
    folder = run.folder("pipedec_top_k")
    write_json(folder / "top_k.json", found)
    notes = {"texts": found, "machine": {"dtype": TOP_K_DTYPE}}
    return {"top8_accuracy": {"value": min(row["accuracy"][8] for row in found.values()), **notes}}
