"""Compare the answers of SEED with those of plain decoding: success of the same trees of thoughts.

    python -m studies.seed.accuracy                 all 1,319 + 145 + 100 problems: hours
    python -m studies.seed.accuracy --limit 40      40 of each task, evenly spaced: an interval alone
    python -m studies.seed.accuracy --resume        goes on with the trees that are finished
    python -m studies.seed.accuracy --share 1/2     the first half of the work, and 2/2 the second, for two
                                                    processes of one thread: faster than one of two

Many trees grow at the same time, many sequences are decoded together, and nothing is timed. Texts differ,
because candidates are drawn at random; their distribution does not. GSM8K counts right numbers, Blocksworld
plans that reach the goal, creative writing passages with all four end sentences, and the sentences kept.
"""

import json
import math
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from drafttrain.kernels.machine import dtype_name
from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.reason import Growth, grow_all
from drafttrain.reasoning.tasks import TASKS
from drafttrain.reasoning.tasks.task import Problem, Task
from drafttrain.reasoning.trace import Trace
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.resuming import whole_lines
from studies.seed.methods import TASK_FILES, Method, check_same, drawn, scheduled, token_count
from studies.seed.pairs import DEFAULTS, Pair, load_pair

AR, SEED = "AR", "SEED"
TREE = drawn(2, 1, 1)
PROBLEMS = {"gsm8k": 1319, "blocksworld": 145, "writing": 100}
SEQUENCES, TREES = 32, 32  # decoded, and growing, at the same time
CHUNK = 64  # problems that one method solves before the other does
POINTS = 100.0


@dataclass(frozen=True)
class Checked:
    """A finished tree; one without a result is none that succeeded.

    Attributes:
        kept: end sentences, in creative writing; None elsewhere.
        without_score: answers of the evaluator that had none.
        drafter, dtype, tree, target: as in `Grown`.
    """

    task: str
    problem: str
    method: str
    success: bool
    kept: int | None
    without_score: int
    tokens: int
    error: str | None
    drafter: str = ""
    dtype: str = ""
    tree: str | None = ""
    target: str = ""


def methods() -> list[Method]:
    """Return plain decoding and SEED, both of many sequences at a time."""
    return [
        scheduled(name, tree, "batched", sequences=SEQUENCES) for name, tree in ((AR, None), (SEED, TREE))
    ]


def solve(
    pair: Pair,
    tasks: dict[str, int | None],
    raw: Path,
    resume: bool,
    note: Callable[[list[Checked]], None],
    share: tuple[int, int] = (1, 1),
) -> list[Checked]:
    """Grow the trees of tasks by both methods; each that is finished is written to a file of JSON lines.

    Args:
        tasks: problems of each task; None: all.
        resume: go on with the trees that are in the file.
        note: called with all trees so far after each chunk of problems.
        share: (k, n) for every n-th chunk of problems from the k-th on.

    Raises:
        UserError: the file has trees of another drafter, target, dtype or tree of drafts.
    """
    found = [Checked(**json.loads(line)) for line in whole_lines(raw)] if resume else []
    ways = methods()
    check_same(raw, found, pair, [(task, method) for task in tasks for method in ways])
    done = {(one.task, one.problem, one.method) for one in found}
    decoders = {method.name: method.decoder(pair) for method in ways}
    drafts = {method.name: method.tree for method in ways}
    same = {"drafter": pair.source, "dtype": dtype_name(pair.target.dtype)}
    same["target"] = pair.target.fingerprint
    with open(raw, "a" if resume else "w", encoding="utf-8") as file:

        def keep(method: str, trace: Trace) -> None:
            found.append(replace(checked(trace, method), **same, tree=drafts[method]))
            file.write(json.dumps(asdict(found[-1])) + "\n")
            file.flush()

        for name, limit in tasks.items():
            task = TASKS[name]()
            problems = task.read(TASK_FILES[name], limit)
            for i in range((share[0] - 1) * CHUNK, len(problems), share[1] * CHUNK):
                for method, decoder in decoders.items():
                    left = [one for one in problems[i : i + CHUNK] if (name, one.id, method) not in done]
                    write = partial(keep, method)
                    grow_all(trees(task, left), decoder.answer, write, TREES)
                note(found)
    return found


def trees(task: Task, problems: Sequence[Problem]) -> Iterator[Growth]:
    """Return the paper's trees of problems, each with a seed of its own."""
    return (Growth(task, one, SearchConfig(seed=zlib.crc32(one.id.encode())), None) for one in problems)


def checked(trace: Trace, method: str) -> Checked:
    """Return what is kept of a finished tree."""
    result = trace.result or {}
    success, kept = bool(result.get("success")), result.get("end_sentences_kept")
    return Checked(
        trace.task,
        trace.problem["id"],
        method,
        success,
        kept,
        trace.without_score,
        token_count(trace),
        trace.error,
    )


def compare(found: Sequence[Checked], task: str) -> dict:
    """Return success of both methods on the problems of a task that both have, in points, and the difference
    SEED - AR with its 95 % interval (Agresti and Min 2005: that of paired shares with half a problem added to
    each of the four outcomes, which is no point where all pairs agree)."""
    by_method = {
        method: {one.problem: one for one in found if (one.task, one.method) == (task, method)}
        for method in (AR, SEED)
    }
    both = [(by_method[AR][name], one) for name, one in by_method[SEED].items() if name in by_method[AR]]
    gained = sum(seed.success > ar.success for ar, seed in both)
    lost = sum(seed.success < ar.success for ar, seed in both)
    n = len(both) + 2
    middle = (gained - lost) / n
    half = 1.96 * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / n) / n
    rows = dict(zip((AR, SEED), zip(*both))) if both else {AR: (), SEED: ()}
    return {
        "problems": len(both),
        "difference": POINTS * (gained - lost) / max(len(both), 1),
        "interval": [POINTS * (middle - half), POINTS * (middle + half)],
        "success": {name: POINTS * mean([one.success for one in own]) for name, own in rows.items()},
        "kept": {name: sum(one.kept or 0 for one in own) for name, own in rows.items()},
        "without_result": {name: sum(one.error is not None for one in own) for name, own in rows.items()},
        "without_score": {name: sum(one.without_score for one in own) for name, own in rows.items()},
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(values) / max(len(values), 1)


def line(task: str, result: dict) -> str:
    """Return a task's comparison in words; the difference of fewer problems than there are stays unsaid."""
    low, high = result["interval"]
    words = f"{task}: {result['problems']} of {PROBLEMS[task]} problems, SEED - AR "
    if result["problems"] >= PROBLEMS[task]:
        words += f"{result['difference']:+.2f} points, "
    words += f"95 % from {low:+.2f} to {high:+.2f} points"
    if task == "writing":
        words += f"; end sentences kept: {result['kept'][AR]} by AR, {result['kept'][SEED]} by SEED"
    return words


def study(args: Namespace) -> None:
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)

    def note(found: list[Checked]) -> None:
        task = found[-1].task
        print(line(task, compare(found, task)), flush=True)

    k, n = args.share
    raw = args.out / (f"accuracy_{pair.name}.jsonl" if n == 1 else f"accuracy_{pair.name}_{k}_of_{n}.jsonl")
    found = solve(pair, dict.fromkeys(PROBLEMS, args.limit), raw, args.resume, note, args.share)
    results = {task: compare(found, task) for task in PROBLEMS}
    write_json(raw.with_suffix(".json"), {"tree": TREE, "dtype": args.dtype, **results})
    print("\n".join(line(task, result) for task, result in results.items()))


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype", "limit", "resume", "share")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", **DEFAULTS)


if __name__ == "__main__":
    arguments.start(main)
