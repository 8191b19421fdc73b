"""Recompute, from the committed measurements, the tables and the older figures that docs quote.

    python -m studies.recompute

Nothing is measured. It writes the summaries under docs/results/raw, the committed drafter's eval.json, and
docs/figures/history: figures that are not ok, because their machine was not recorded, they were measured on
too little, or they have another definition now. Each says why. New figures come from `studies/figures`.
"""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.evaluation.config import ALL
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, Measurement, ratio, tabulate
from drafttrain.evaluation.sweep import Point, compare_families
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies import ROOT
from studies.edd import bench
from studies.edd.table2 import markdown
from studies.figures import baselines as benchmark_figures
from studies.figures import c2t as c2t_figures
from studies.figures import self_draft as self_draft_figures
from studies.figures import trees as tree_figures
from studies.figures import vllm as vllm_figures
from studies.figures.__main__ import TOPICS
from studies.goals import HISTORY, Group, Measured, judge, read_rows, rounded
from studies.policies import table

RAW = Path("docs/results/raw")
NEW_TOKENS = 96  # at most, in table2.jsonl
BUNDLE = Path("model_cards/smollm2-135m-edd")
TASKS = {"MT-bench": "mt_bench", "GSM8K": "gsm8k", "HumanEval": "humaneval"}  # names in the speed log
# what methods were called when they were measured
TREES = {
    "PCT (large)": "PCT tuned (large)",
    "PCT (paper)": "PCT (costs of 7B)",
    "PCT (costs of this machine)": "PCT (published)",
}
NGRAMS = {"self-draft": "ngram", "lookup (equal budget)": "lookup (budget of ngram)"}
STUDIES = {  # rows of the tables on baselines: how the drafters are called, before "-seed"
    "EDD": "edd",
    "EAGLE": "eagle",
    "EAGLE, the target's own head": "eagle-frozen",
    "MEDUSA-1": "medusa",
    "VDM": "vdm",
    "EDD, 2,000 steps": "edd-long",
    "EAGLE, 2,000 steps": "eagle-long",
    "EDD, last hidden state as a second tap": "edd-joined",
    "EDD, nine heads of keys and values": "edd-wide",
    "EDD, anchored": "edd-anchored",
    "EDD, anchored, two taps": "edd-anchored-joined",
    "EAGLE, MTP-style": "mtp",
    "cross-entropy with the text": "edd-ce",
    "blocks of 5": "edd-fixed5",
    **{f"block {block}": f"edd-block{block}" for block in (8, 18, 26, 29)},
}


def read_log(path: Path, names: dict[str, str] | None = None) -> Iterator[Measurement]:
    """Yield the measurements of a log, its methods under their present names."""
    names = names or {}
    lines = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8")
    with lines as file:
        next(file)  # what was measured
        for line in file:
            one = Measurement.from_json(json.loads(line))
            one.runs = {names.get(name, name): run for name, run in one.runs.items()}
            yield one


def by_task(measurements: Iterator[Measurement]) -> dict[str, list[Measurement]]:
    """Return measurements by task, tuning left out."""
    found: dict[str, list[Measurement]] = {}
    for one in measurements:
        if not one.task.startswith("("):
            found.setdefault(one.task, []).append(one)
    return found


def points(path: Path) -> list[Point]:
    """Read the points of a sweep."""
    return [Point(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def speed() -> Measured:
    """Recompute the README's 32 prompts: tables by task, and the committed drafter's results."""
    parts = by_task(read_log(RAW / "speed_32_prompts.jsonl"))
    tasks = {name: tabulate(part) for name, part in parts.items()}
    tasks[ALL] = tabulate([one for part in parts.values() for one in part])
    summary = read_json(RAW / "speed_32_prompts_summary.json")
    summary["tasks"] = {
        task: {name: asdict(row) for name, row in rows.items()} for task, rows in tasks.items()
    }
    write_json(RAW / "speed_32_prompts_summary.json", summary)
    kept, tree = read_json(BUNDLE / "eval.json"), summary["tree"]
    kept["tasks"] = {task: asdict(rows[tree]) for task, rows in tasks.items()}
    write_json(BUNDLE / "eval.json", kept)
    row = tasks[ALL][tree]
    prompts = {TASKS[task]: tasks[task][tree].prompts for task in parts}
    notes = {
        "tree": tree,
        "identical": row.identical,
        "dtype": summary["dtype"],
        "flags": row.flags,
        "size": {"prompts": prompts, "repeats": row.repeats},
    }
    return {
        "quickstart_speedup_ar": {"value": row.speedup, "interval": row.speedup_interval, **notes},
        "quickstart_speedup_transformers": {
            "value": row.speedup_transformers,
            "interval": row.speedup_transformers_interval,
            **notes,
        },
        "quickstart_accept_len": {"value": row.accept_len, **notes},
    }


def tree_policies() -> Measured:
    """Recompute the policies' table and figures, large trees, and the EDD paper's Tables 2 and 3."""
    folder = RAW / "trees"
    parts = by_task(read_log(folder / "measurements.jsonl", TREES))
    tables = {task: table(part) for task, part in parts.items()}
    write_json(folder / "tables.json", tables)
    chosen = read_json(folder / "tuning.json")["chosen"]
    found = tree_figures.tree_figures(parts, tables, chosen, tree_figures.fastest(folder))
    large = list(read_log(folder / "large_trees.jsonl.gz", TREES))
    write_json(folder / "large_trees.json", table(large))
    paper = {task: tabulate(part) for task, part in by_task(read_log(folder / "table2.jsonl")).items()}
    (folder / "table2.md").write_text(markdown(paper, NEW_TOKENS), encoding="utf-8")
    return found | tree_figures.large_figures(large)


def c2t() -> Measured:
    """Recompute comparisons of C2T's sweeps, and of its thresholds against PCT."""
    folder = RAW / "c2t"
    compared = {}
    for path in sorted(folder.glob("points_*.jsonl")):
        swept = points(path)
        references = ("dyjoint", "dymax") if "chains" in path.stem else ("eagle2", "joint")
        compared[path.stem.removeprefix("points_")] = {
            reference: [asdict(one) for one in compare_families(swept, reference)] for reference in references
        }
    transferred = [Point(**row) for row in read_json(folder / "transfer.json")["points"]]
    compared["transfer"] = {"here": [asdict(one) for one in compare_families(transferred, "here")]}
    write_json(folder / "comparisons.json", compared)
    part = list(read_log(folder / "auto_beta.jsonl"))
    row = c2t_figures.against_pct(part)
    return {"auto_beta_vs_pct": row, **c2t_figures.chain_figures(points(folder / "points_chains.jsonl"))}


def n_grams() -> Measured:
    """Recompute tables and figures of what ships as Self-Draft."""
    folder = RAW / "self_draft"
    parts = by_task(read_log(folder / "measurements.jsonl.gz", NGRAMS))
    self_draft_figures.write_report(folder, read_json(folder / "chosen.json"), parts)
    return self_draft_figures.speed_figures(parts, "ngram") | self_draft_figures.beside_figures(parts)


def rivals() -> Measured:
    """Recompute means over seeds of the trained baselines, the benchmark's repeatability, and vLLM."""
    folder = RAW / "baselines"
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    trained = {row["name"]: row for row in map(json.loads, lines)}
    rows = {
        title: [trained[f"{name}-seed{seed}"] for seed in bench.SEEDS if f"{name}-seed{seed}" in trained]
        for title, name in STUDIES.items()
    }
    write_json(folder / "tables.json", bench.summarize(rows))
    runs = [list(read_log(folder / f"repeatability_{name}.jsonl.gz")) for name in ("first", "second")]
    speedups = {
        method: [ratio(part, AUTOREGRESSIVE, method) for part in runs]
        for method in runs[0][0].runs
        if method != AUTOREGRESSIVE
    }
    repeated = benchmark_figures.repeated(speedups)
    return {"benchmark_repeatability": repeated} | vllm_figures.figures(read_json(folder / "vllm.json"))


def reasons(row: dict[str, Any], group: Group) -> list[str]:
    """Return why an older figure is not ok."""
    if row["value"] is None:
        return [row["definition"]]
    measured = {key: item for key, item in row.items() if key not in ("ok", "why")}
    _, why = judge(row["goal"], measured, group.size, group.floor(row["figure"]))
    found = [row["definition"]] if "definition" in row else []
    found += [why] if why else []
    stamp = {"machine": "machine", "commit": "commit", "measured": "date"}
    found += [f"no {name} recorded" for key, name in stamp.items() if not row.get(key)]
    return found + ["measured with changes to its commit"] * str(row.get("commit")).endswith("+changes")


def main() -> int:
    """Recompute everything; return the exit status."""
    found = speed() | tree_policies() | c2t() | n_grams() | rivals()
    for topic, groups in TOPICS.items():
        path, rows = HISTORY / f"{topic}.jsonl", []
        known = {name: group for group in groups for name in group.goals}
        for name, row in read_rows(path).items():
            row |= found.get(name, {})
            row |= {"goal": known[name].goals[name], "ok": None}
            row["why"] = "; ".join(reasons(row, known[name]))
            rows.append(rounded(row))
        if rows:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
