"""SEED on hardware that waits: forwards hold their device for declared times and overlap for real.

    python -m studies.seed.paced --limit 1
    python -m studies.seed.paced --together
    python -m studies.seed.paced --tune

The real tokens are computed beside it. A forward of the target takes 40 ms for up to 32 tokens, a step of the
drafter 4 ms for up to 8 sequences, each on a device of its own. Three methods grow the same trees in turn:
serial AR, serial MCSD, and SEED with verifier `one` for three sequences, whose drafts overlap with verifying.

A tree leaves one sequence alone for a good part of its time, with which nothing can overlap. So --together
lets SEED grow all trees of a task at the same time, still three sequences, beside one tree after the other.

--tune prints SEED's tokens per second on GSM8K's training problems with each tree of drafts that fits in a
forward.
"""

import json
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from drafttrain.kernels.cores import Cores
from drafttrain.kernels.machine import describe_machine, dtype_name
from drafttrain.reasoning.branches import Branch, Pace
from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.reason import Growth, grow_all
from drafttrain.reasoning.tasks import TASKS
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.seed.comparison import of, ratio, seconds_per_token
from studies.seed.methods import (
    SCHEDULING,
    SERIAL_AR,
    TASK_FILES,
    TUNING_FILES,
    Grown,
    Method,
    collect,
    drawn,
    scheduled,
    serial,
    token_count,
)
from studies.seed.pairs import DEFAULTS, Pair, load_pair

# The fastest of CANDIDATES (`--tune`), but for Blocksworld, after whose long prompts two cores do not compute
# 29 tokens in the declared time.
TREES = {"writing": drawn(4, 2, 1, 1), "gsm8k": drawn(4, 2, 1, 1), "blocksworld": drawn(2, 2, 1)}
CANDIDATES = [drawn(4, 2, 1, 1), drawn(3, 2, 1, 1), drawn(2, 2, 1, 1), drawn(2, 1, 1, 1)]
CANDIDATES += [drawn(2, 2, 1), drawn(2, 1, 1), drawn(1, 1, 1, 1, 1)]
# deeper ones, whose drafting a verification hides just as well
CANDIDATES += [drawn(3, 2, 1, 1, 1), drawn(2, 2, 1, 1, 1), drawn(2, 2, 1, 1, 1, 1), drawn(2, 1, 1, 1, 1)]
THREADS = [2, 1]  # the target's forward on both cores; drafting needs little of one
SERIAL_SD, SEED, TOGETHER = "serial MCSD", "SEED", "SEED, trees together"
TARGET_SECONDS, TARGET_TOKENS = 0.040, 32
STEP_SECONDS, STEP_SEQUENCES = 0.004, 8


@dataclass
class Paced(Pace):
    """Holds devices.

    Attributes:
        pieces: pieces of work so far.
        late: those whose computation alone took longer than declared.
        overdue: by how many seconds in all.
    """

    pieces: int = 0
    late: int = 0
    overdue: float = 0.0

    def drafted(self, began: float, branches: Sequence[Branch]) -> None:
        steps = max(int(branch.tree.depths.max()) for branch in branches)
        self._hold(began, steps * _parts(len(branches), STEP_SEQUENCES) * STEP_SECONDS)

    def forwarded(self, began: float, tokens: int, trees: Sequence[TokenTree]) -> None:
        nodes = sum(tree.width for tree in trees)
        self._hold(began, _parts(tokens + nodes, TARGET_TOKENS) * TARGET_SECONDS)

    def _hold(self, began: float, seconds: float) -> None:
        left = began + seconds - time.perf_counter()
        self.pieces += 1
        if left > 0:
            time.sleep(left)
        elif seconds:
            self.late += 1
            self.overdue -= left


def _parts(n: int, size: int) -> int:
    return -(-n // size)


def measure(
    pair: Pair, limit: int, repeats: int, raw: Path, resume: bool = False
) -> tuple[list[Grown], float | None]:
    """Grow the trees of all tasks by serial AR, serial MCSD and SEED; return them, and the share of pieces of
    work whose computation alone took longer than declared (None: a resumed run had nothing left to do)."""

    def methods(task: str) -> list[Method]:
        tree = TREES[task]
        return [serial(SERIAL_AR, None), serial(SERIAL_SD, tree, short=0), seed_method(tree)]

    paces: list[Paced] = []

    def pace() -> Paced:
        paces.append(Paced())
        return paces[-1]

    with declared_devices():
        found = collect(pair, methods, dict.fromkeys(TASK_FILES, limit), repeats, raw, resume, pace)
    pieces = sum(pace.pieces for pace in paces)
    return found, sum(pace.late for pace in paces) / pieces if pieces else None


def overdue(found: Sequence[Grown]) -> dict[str, float]:
    """Return by method the share of its trees' time by which computation took longer than declared; nothing
    of a method with trees that did not note it."""
    shares = {}
    for name in dict.fromkeys(one.method for one in found):
        own = of(found, name)
        if all(one.overdue is not None for one in own):
            shares[name] = sum(one.overdue for one in own) / sum(one.seconds for one in own)
    return shares


def together(pair: Pair, limit: int, raw: Path, resume: bool = False) -> dict[str, dict[str, dict]]:
    """Grow the trees of each task by serial MCSD and by SEED, one after the other, and by SEED all at once,
    each with one store of prefixes; return by task and method seconds per token, tokens of prompts that were
    encoded, the share of late pieces of work, and the commit."""
    setting = {"problems": limit, "trees": TREES, "drafter": pair.source, "scheduling": SCHEDULING}
    setting |= {"dtype": dtype_name(pair.target.dtype), "target": pair.target.fingerprint}
    before = read_json(raw) if resume and raw.exists() else {"rows": {}} | setting
    if other := [key for key in setting if before.get(key) != setting[key]]:
        key = other[0]
        raise UserError(
            f"{raw}: {key}: must be {before.get(key, 'recorded')}, got {setting[key]}; leave out --resume"
        )
    found: dict[str, dict[str, dict]] = before["rows"]
    for one in (one for row in found.values() for one in row.values()):
        one.setdefault("commit", before.get("commit"))  # once it was that of the file
    ways = {SERIAL_SD: 1, SEED: 1, TOGETHER: limit}
    for name, tree in TREES.items():
        task, row = TASKS[name](), found.setdefault(name, {})
        problems = task.read(TASK_FILES[name], limit)
        for way, at_once in ways.items():
            if way in row:
                continue
            pace, traces = Paced(), []
            method = serial(way, tree, short=0) if way == SERIAL_SD else seed_method(tree)
            decoder = method.decoder(pair, pace)
            trees = (Growth(task, one, SearchConfig(seed=0), None) for one in problems)
            began = time.perf_counter()
            with declared_devices():
                grow_all(trees, decoder.answer, traces.append, at_once)
            seconds = time.perf_counter() - began
            row[way] = {
                "seconds_per_token": seconds / sum(map(token_count, traces)),
                "encoded": decoder.store.encoded,
                "late": pace.late / pace.pieces,
                "commit": git_commit(),  # others may be of an earlier one
            }
            machine = describe_machine(pair.target.device, pair.target.dtype)
            write_json(raw, {"rows": found} | setting | {"machine": machine})
    return found


@contextmanager
def declared_devices() -> Iterator[None]:
    """Let nobody warn that threads are more than this machine's cores, and keep the target's: for the moments
    in which the drafter's device computes on one of them, its team would be made smaller for seconds."""
    with warnings.catch_warnings(), patch.object(Cores, "fit", lambda cores, threads: threads):
        warnings.filterwarnings("ignore", "scheduler.threads")
        yield


def seed_method(tree: str) -> Method:
    """Return SEED with this tree; a drafter with a device of its own drafts for short answers, too."""
    chunk = TARGET_TOKENS - parse_policy(tree).nodes
    return scheduled(SEED, tree, "one", overlap=True, threads=THREADS, short=0, chunk=chunk)


def tune(pair: Pair, limit: int, raw: Path, resume: bool = False) -> dict[str, float]:
    """Return SEED's tokens per second on training problems by tree of drafts."""
    methods = [replace(seed_method(tree), name=tree) for tree in CANDIDATES]
    tasks = dict.fromkeys(TUNING_FILES, limit)
    with declared_devices():
        found = collect(pair, lambda task: methods, tasks, 1, raw, resume, Paced, TUNING_FILES)
    return {tree: 1 / seconds_per_token(of(found, tree)) for tree in CANDIDATES}


def study(args: Namespace) -> None:
    pair = load_pair("B", args.target, args.bundle, args.dtype)
    if args.tune:
        print(json.dumps(tune(pair, args.limit or 2, args.out / "tuning_paced.jsonl", args.resume)))
        return
    if args.together:
        rows = together(pair, args.limit or 3, args.out / "paced_together.json", args.resume)
        for method in (SEED, TOGETHER):
            by_task = {
                name: row[SERIAL_SD]["seconds_per_token"] / row[method]["seconds_per_token"]
                for name, row in rows.items()
            }
            said = ", ".join(f"{name} {value:.3f}" for name, value in by_task.items())
            print(f"{method} / {SERIAL_SD}: {statistics.fmean(by_task.values()):.3f} ({said})")
        return
    found, late = measure(pair, args.limit or 1, 1, args.out / "paced.jsonl", args.resume)
    ratios = {base: ratio(found, base, SEED) for base in (SERIAL_AR, SERIAL_SD)}
    write_json(args.out / "paced.json", {"ratios": ratios, "late": late, "trees": TREES})
    print(json.dumps({base: one["value"] for base, one in ratios.items()} | {"late": late}))


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype", "limit", "resume", "together", "tune")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", **DEFAULTS)


if __name__ == "__main__":
    arguments.start(main)
