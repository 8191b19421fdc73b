"""The figures of topic `seed`: trees of thoughts by scheduled decoding against serial and batched decoding.

Speeds are ratios of seconds per new token on whole trees, prompts included, every method growing the trees of
the same problems in turn. The drafts of each method are chosen before a problem is read, by whole trees of
thoughts for problems of GSM8K's training split. Pair B is SmolLM2 with the committed EDD drafter; pair
A, a larger target with a small LM, is named by --pair. Estimated minutes at full size on 2 cores: pair B 135,
pair A some hours (`--only target_busy` 35), `tree_alpha_gain` 25, paced 140, `seed_mismatches` 18,
`accuracy_difference` some hours (`--resume` goes on with an ended run).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.decode import Request
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.session import DRAFT_SLOTS, Session
from drafttrain.inference.text import encode
from drafttrain.reasoning.branches import Branch, Pace
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies.goals import Group, Measured, Run, Size
from studies.seed import accuracy, paced, table2
from studies.seed.comparison import (
    explain,
    interval,
    of,
    ratio,
    seconds_per_token,
    tasks_of,
    total,
    traits,
)
from studies.seed.methods import (
    BATCHED_AR,
    SERIAL_AR,
    TASK_FILES,
    TUNING_FILES,
    Grown,
    Method,
    collect,
    drawn,
    lockstep,
    scheduled,
    serial,
)
from studies.seed.pairs import DRAFTER, Pair, load_pair
from studies.weights import tensors_by_address, weights_by_address

TUNING_PROBLEMS = {"A": 1, "B": 2}  # trees of thoughts that each choice of drafts grows
PROMPTS = "data/tuning_prompts.jsonl"
SAMPLES, MISMATCH_PROMPTS = 3, 6
CHAINS = [drawn(*k_config) for k_config in ((1, 1), (1, 1, 1), (1, 1, 1, 1))]
CHAINS += [drawn(1, 1, 1, 1, 1, 1, threshold=least) for least in (0.1, 0.2, 0.3, 0.5)]
TREES = [drawn(2, 1, 1), drawn(2, 2, 1)]
TREES += [drawn(2, 1, 1, 1, 1, threshold=0.2), drawn(2, 2, 1, 1, 1, threshold=0.2)]
NO_PREFIXES, SEED, BATCHED_SEED = "serial AR, prompts apart", "SEED", "SEED batched"
BUSY = "target_busy"
SERIAL_SD, SERIAL_MCSD, BATCHED_SD = "serial SD", "serial MCSD", "batched SD"
# what each method's drafts are chosen among
CHOICES = {
    SERIAL_SD: CHAINS,
    SERIAL_MCSD: TREES,
    SEED: CHAINS + TREES,
    BATCHED_SD: CHAINS + TREES,
    BATCHED_SEED: CHAINS + TREES,
}
SHORTS = (SchedulerConfig.short, 0)  # whether short answers, such as scores, get drafts is chosen, too
MAKERS: dict[str, Callable[..., Method]] = {
    SERIAL_SD: serial,
    SERIAL_MCSD: serial,
    SEED: partial(scheduled, verifier="one"),
    BATCHED_SD: lockstep,
    BATCHED_SEED: partial(scheduled, verifier="batched"),
}
WAYS = [
    SchedulerConfig(verifier, drafting, sequences, overlap)
    for verifier in ("one", "batched")
    for drafting in ("each", "joined")
    for sequences in (1, 3, 8)
    for overlap in (False, True)
]
PROBLEMS = {"A": 3, "B": 8}
GOALS = {
    "seed_vs_serial_ar": ">= 1.5",
    "seed_vs_serial_ar_small": ">= 1.3",
    "seed_vs_serial_sd": ">= 1.15",
    "paced_vs_serial_ar": ">= 1.5",
    "paced_vs_serial_sd": ">= 1.25",
    "batched_vs_batched_ar": ">= 1.2",
    "batched_vs_batched_ar_small": ">= 1.1",
    BUSY: ">= 0.9",
    "tree_alpha_gain": "> 1",
    "prefix_gain": ">= 1.2",
    "draft_memory": "<= 1.02",
    "accuracy_difference": "<= 1.5",
    "seed_mismatches": "== 0",
}


def sampled_requests(pair: Pair, new_tokens: int, prompts: int) -> list[Request]:
    """Return samples of tuning prompts at temperature 1, each with a seed of its own."""
    chosen = spread(read_prompts(PROMPTS), prompts)
    ids = [encode(pair.target, one.turns[0]) for one in chosen]
    return [
        Request(prompt, new_tokens, SamplingParams(1.0, seed=SAMPLES * i + j))
        for i, prompt in enumerate(ids)
        for j in range(SAMPLES)
    ]


def tune(
    pair: Pair, variants: Mapping[str, Mapping[str, Method]], raw: Path, resume: bool
) -> dict[str, dict[str, float]]:
    """Return by method the tokens per second of each of its variants on whole trees of thoughts, which all
    grow in turn: this machine may be slow for a while, and sequences are alone in a part of each tree. They
    are kept beside the trees, and `resume` takes them from there: others would mix trees of different drafts.
    """
    kept = raw.with_suffix(".json")
    if resume and kept.exists():
        return read_json(kept)
    candidates = [
        replace(one, name=f"{method}, {label}")
        for method, own in variants.items()
        for label, one in own.items()
    ]
    tasks = dict.fromkeys(TUNING_FILES, TUNING_PROBLEMS[pair.name])
    found = collect(pair, lambda task: candidates, tasks, 1, raw, resume, files=TUNING_FILES)
    rates = {
        method: {label: 1 / seconds_per_token(of(found, f"{method}, {label}")) for label in own}
        for method, own in variants.items()
    }
    write_json(kept, rates)
    return rates


def choose(
    pair: Pair, choices: Mapping[str, Sequence[str]], folder: Path, resume: bool
) -> tuple[dict[str, Method], dict[str, float]]:
    """Return each method with the drafts that make it the fastest, and then with or without drafts for short
    answers, and its tokens per second with those drafts.

    Args:
        choices: names of trees of drafts by method.
    """
    made = {name: {tree: MAKERS[name](name, tree) for tree in trees} for name, trees in choices.items()}
    rates = tune(pair, made, folder / "tuning.jsonl", resume)
    trees = {name: max(own, key=own.get) for name, own in rates.items()}
    made = {
        name: {str(short): MAKERS[name](name, tree, short=short) for short in SHORTS}
        for name, tree in trees.items()
    }
    shorts = tune(pair, made, folder / "tuning_short.jsonl", resume)
    chosen = {name: made[name][max(own, key=own.get)] for name, own in shorts.items()}
    return chosen, {name: max(own.values()) for name, own in shorts.items()}


def speeds(run: Run, name: str) -> Measured:
    """Grow trees with a pair by all methods in turn."""
    ending = "" if name == "A" else "_small"
    names = [f"seed_vs_serial_ar{ending}", f"batched_vs_batched_ar{ending}"]
    if name == "A" and not run.pair:
        skipped = {"value": None, "skipped": "no --pair TARGET DRAFTER"}
        return {figure: skipped for figure in (*names, "seed_vs_serial_sd", BUSY)}
    if name == "A" and {*run.only} & {*names, "seed_vs_serial_sd", BUSY} == {BUSY}:
        return busy_alone(run)
    run.check_quiet()
    pair = load_pair("A", *run.pair) if name == "A" else load_pair("B", None, DRAFTER)
    choices = {method: trees[:2] for method, trees in CHOICES.items()} if run.quick else CHOICES
    folder = run.folder(f"seed_{name}", pair=run.pair if name == "A" else None, choices=choices)
    chosen, rates = choose(pair, choices, folder, run.resume)
    best_serial = max((SERIAL_SD, SERIAL_MCSD), key=rates.get)
    apart = [replace(serial(NO_PREFIXES, None), prefixes=0)] if name == "B" else []  # of `prefix_gain` alone
    methods = [
        serial(SERIAL_AR, None),
        *apart,
        scheduled(BATCHED_AR, None, "batched"),
        *chosen.values(),
    ]
    problems, repeats = run.prompts(1, PROBLEMS[name]), 1 if run.quick or run.limit else 3
    tasks = dict.fromkeys(TASK_FILES, problems)
    found = collect(pair, lambda task: methods, tasks, repeats, folder / "trees.jsonl", run.resume)
    note = {
        "trees": {name: method.tree for name, method in chosen.items()},
        "short": {name: method.scheduler.short for name, method in chosen.items()},
        "size": {"prompts": tasks, "repeats": repeats},
        "accept_len": {m.name: total(of(found, m.name)).accept_len for m in methods},
    }

    def speed(figure: str, base: str, method: str) -> dict:
        trees = dict.fromkeys(tasks, chosen[method].tree)
        return compare(GOALS[figure], found, base, method, trees) | note

    every = {m.name: ratio(found, SERIAL_AR, m.name) for m in methods[1:]}
    figures = {
        names[0]: speed(names[0], SERIAL_AR, SEED) | {"vs_serial_ar": every},
        names[1]: speed(names[1], BATCHED_AR, BATCHED_SEED),
    }
    if name == "B":
        return figures | {"prefix_gain": ratio(found, NO_PREFIXES, SERIAL_AR) | note}
    drafted = speed("seed_vs_serial_sd", best_serial, SEED) | {"base": best_serial}
    return figures | {
        "seed_vs_serial_sd": drafted,
        BUSY: {**mean_busy(found), "costs": drafted["costs"], **note},
    }


def busy_alone(run: Run) -> Measured:
    """Grow pair A's trees by SEED alone: how busy its target is depends on no other method."""
    run.check_quiet()
    pair, choices = load_pair("A", *run.pair), {SEED: CHOICES[SEED]}
    folder = run.folder("seed_A_busy", pair=run.pair, choices=choices)
    chosen, _ = choose(pair, choices, folder, run.resume)
    tasks, repeats = dict.fromkeys(TASK_FILES, run.prompts(1, PROBLEMS["A"])), 1 if run.limit else 3
    found = collect(pair, lambda task: [chosen[SEED]], tasks, repeats, folder / "trees.jsonl", run.resume)
    notes = {
        "trees": {SEED: chosen[SEED].tree},
        "short": {SEED: chosen[SEED].scheduler.short},
        "size": {"prompts": tasks, "repeats": repeats},
        "accept_len": {SEED: total(found).accept_len},
        "costs": {task: traits(of(found, SEED, task)) for task in tasks},
    }
    return {BUSY: mean_busy(found) | notes}


def compare(goal: str, found: Sequence[Grown], base: str, method: str, trees: Mapping[str, str]) -> dict:
    """Return a method's speed to another's, what it depends on, and the acceptance that its goal needs."""
    return ratio(found, base, method) | explain(found, base, method, trees, float(goal.split()[1]))


def mean_busy(found: Sequence[Grown]) -> dict[str, Any]:
    """Return the mean over SEED's trees that had two or more sequences at a time, with its interval over
    problems, and each task's own."""
    own = [one for one in of(found, SEED) if one.busy is not None]

    def mean(trees: Sequence[Grown]) -> float:
        return sum(one.busy for one in trees) / len(trees) if trees else math.nan

    by_task = {task: mean(of(own, SEED, task)) for task in tasks_of(own)}
    return {"value": mean(own), "interval": interval(own, mean), "tasks": by_task}


def paced_speeds(run: Run) -> Measured:
    """Grow trees on devices that are held for declared times."""
    run.check_quiet()
    problems, repeats = run.prompts(1, PROBLEMS["B"]), 1 if run.limit else 3
    raw = run.folder("seed_paced", trees=paced.TREES) / "trees.jsonl"
    found, late = paced.measure(load_pair("B", None, DRAFTER), problems, repeats, raw, run.resume)
    size = {"prompts": dict.fromkeys(TASK_FILES, problems), "repeats": repeats}
    notes = {"late": late, "overdue": paced.overdue(found), "trees": paced.TREES, "size": size}
    bases = {"paced_vs_serial_ar": SERIAL_AR, "paced_vs_serial_sd": paced.SERIAL_SD}
    return {
        figure: compare(GOALS[figure], found, base, paced.SEED, paced.TREES) | notes
        for figure, base in bases.items()
    }


def tree_alpha(run: Run) -> Measured:
    """Compare acceptance with and without tree attention, of thought generator and state evaluator apart."""
    run.check_quiet()
    problems, repeats = run.prompts(1, table2.PROBLEMS), 1 if run.quick or run.limit else table2.REPEATS
    trees = {method.name: method.tree for method in table2.methods()}
    raw = run.folder("seed_table2", trees=trees) / "trees.jsonl"
    found = collect(
        load_pair("B", None, DRAFTER), table2.methods, {table2.TASK: problems}, repeats, raw, run.resume
    )
    size = {"prompts": {table2.TASK: problems}, "repeats": repeats}
    return {"tree_alpha_gain": table2.summarize(found) | {"size": size}}


def accuracy_difference(run: Run) -> Measured:
    """Compare how often trees of thoughts succeed with SEED and with plain decoding."""
    tasks = {task: run.prompts(2, n) for task, n in accuracy.PROBLEMS.items()}
    raw = run.folder("seed_accuracy", tree=accuracy.TREE) / "trees.jsonl"
    found = accuracy.solve(load_pair("B", None, DRAFTER), tasks, raw, run.resume, note=lambda rows: None)
    results = {task: accuracy.compare(found, task) for task in tasks}
    size = {"prompts": {task: result["problems"] for task, result in results.items()}}
    main = results["gsm8k"]
    notes = {"interval": main["interval"], "tree": accuracy.TREE, "tasks": results, "size": size}
    value: dict[str, Any] = {"value": abs(main["difference"])}
    if main["problems"] < accuracy.PROBLEMS["gsm8k"]:
        said = f"{main['problems']} of {accuracy.PROBLEMS['gsm8k']} problems: the interval alone"
        value = {"value": None, "ok": None, "why": said}
    return {"accuracy_difference": value | notes}


def mismatches(run: Run) -> Measured:
    """Count seeded texts of scheduled decoding that differ from serial AR's, in fp32, with deterministic
    candidates."""
    pair = load_pair("B", None, DRAFTER, "float32")
    requests = sampled_requests(pair, 24 if run.quick else 48, 1 if run.quick else MISMATCH_PROMPTS)

    def texts(method: Method) -> list[list[int]]:
        return [branch.row.output for branch in method.decoder(pair).decode(requests)]

    expected = texts(serial(SERIAL_AR, None))
    differ, compared = 0, 0
    trees = None, "chain:length=3", "eagle2:top_k=4,max_depth=3,total=8"
    methods = [Method("", tree, way) for way in WAYS for tree in trees]
    methods += [Method("", tree, SchedulerConfig("one", "joined", SAMPLES), prefixes=0) for tree in trees]
    chunked = [replace(way, chunk=8) for way in WAYS if way.sequences == SAMPLES and way.drafting == "joined"]
    methods += [Method("", tree, way) for way in chunked for tree in trees]
    for method in methods:
        found = texts(method)
        differ += sum(a != b for a, b in zip(found, expected, strict=True))
        compared += len(found)
    return {"seed_mismatches": {"value": differ, "texts": compared, **run.quick_note}}


class _Held(Pace):
    """Keeps the session of each branch that drafts; one that has ended lets go of its own."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}

    def drafted(self, began: float, branches: Sequence[Branch]) -> None:
        self.sessions |= {branch.row.number: branch.session for branch in branches}


def draft_memory(run: Run) -> Measured:
    """Compare the bytes of drafter weights and states in a running decoder with one copy of the weights and,
    for each sequence, keys and values of its prompt and output with the slots of a tree."""
    pair, n, held = load_pair("B", None, DRAFTER), 3, _Held()
    requests = sampled_requests(pair, 48, 1)[:n]
    scheduled("", drawn(1, 1, 1), "one").decoder(pair, held).decode(requests, stop=())
    sessions = list(held.sessions.values())
    held_by = tensors_by_address([session.state.kv for session in sessions])
    for session in sessions:
        held_by |= weights_by_address(session.proposer.drafter)
    room = len(requests[0].prompt_ids) + requests[0].max_new_tokens + DRAFT_SLOTS
    weights = sum(weights_by_address(pair.drafter).values())
    least = weights + n * sum(tensors_by_address([pair.drafter.new_state(1, room).kv]).values())
    measured = sum(held_by.values())
    counts = {"bytes": measured, "weights": weights, "sequences": n}
    return {"draft_memory": {"value": measured / least, **counts}}


def goals(*names: str) -> dict[str, str]:
    """Return the goals of figures that are measured together."""
    return {name: GOALS[name] for name in names}


GROUPS = [
    Group(goals("seed_mismatches"), mismatches),
    Group(goals("draft_memory"), draft_memory),
    Group(
        goals("seed_vs_serial_ar_small", "batched_vs_batched_ar_small", "prefix_gain"),
        partial(speeds, name="B"),
        size=Size(dict.fromkeys(TASK_FILES, PROBLEMS["B"]), 3),
    ),
    Group(
        goals("tree_alpha_gain"),
        tree_alpha,
        size=Size({table2.TASK: table2.PROBLEMS}, table2.REPEATS),
    ),
    Group(
        goals("paced_vs_serial_ar", "paced_vs_serial_sd"),
        paced_speeds,
        size=Size(dict.fromkeys(TASK_FILES, PROBLEMS["B"]), 3),
    ),
    Group(
        goals("seed_vs_serial_ar", "seed_vs_serial_sd", "batched_vs_batched_ar", BUSY),
        partial(speeds, name="A"),
        long=True,
        size=Size(dict.fromkeys(TASK_FILES, PROBLEMS["A"]), 3),
    ),
    Group(goals("accuracy_difference"), accuracy_difference, long=True, size=Size(accuracy.PROBLEMS)),
]
