"""Measure the figures that README and docs quote, and judge whether they reach their goals.

    python -m studies.figures main                      everything; takes hours, wants the machine for itself
    python -m studies.figures main --quick              16 prompts, the committed drafter; at most 10 minutes
    python -m studies.figures main --only train_ratio   one figure (may be repeated)

Prints one JSON object per figure, {"figure", "value", "goal", "ok"} and notes; everything else goes to
standard error. "ok" is null, with the reason under "why", for what was measured on fewer prompts, repeats or
seeds than the figure asks, as in most quick runs. Raw measurements are kept under runs/figures/. Exits with 1
when a figure falls short or is missing. Figures that cannot be had in ten minutes are taken by --quick from
the last full run, with its date under "recorded".

A topic is a list of groups; a group is a function that measures some figures together.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from studies import ROOT
from studies.figures import (
    baselines,
    c2t,
    drafters,
    flagship,
    hostile,
    machine,
    pipedec,
    published,
    report,
    second_target,
    seed,
    self_draft,
    structure,
    trees,
    vllm,
)
from studies.figures import main as main_topic
from studies.goals import Run, measure_topic
from studies.pipedec.tasks import BY_PATH

TOPICS = {
    "main": main_topic.GROUPS,
    "trees": trees.GROUPS,
    "c2t": c2t.GROUPS,
    "self-draft": self_draft.GROUPS,
    "machine": machine.GROUPS,
    "structure": structure.GROUPS,
    "seed": seed.GROUPS,
    "pipedec": pipedec.GROUPS,
    "hostile": hostile.GROUPS,
    "flagship": [*flagship.GROUPS, *drafters.GROUPS, *published.GROUPS, *second_target.GROUPS],
    "baselines": [*vllm.GROUPS, *baselines.GROUPS, *report.GROUPS],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--quick", action="store_true", help="16 prompts, the committed drafter")
    parser.add_argument("--only", action="append", default=[], metavar="FIGURE", help="may be repeated")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run's raw data")
    text = "prompts of each task at most, for trees, c2t, self-draft, machine, seed, pipedec, flagship, ..."
    parser.add_argument("--limit", type=int, metavar="N", help=text)
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vLLM")
    parser.add_argument("--oanc", metavar="FILE", help="OANC's oanc_written_2.zip, for self-draft")
    text = "a further task's prompts: for c2t such as alpaca=FILE, for pipedec wmt14=FILE; may be repeated"
    parser.add_argument("--prompts", action="append", default=[], metavar="NAME=FILE", help=text)
    text = "a larger target and a small LM that drafts for it, for seed, pipedec, flagship"
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFTER"), help=text)
    text = "Qwen2.5-Coder-0.5B-Instruct, folder or GGUF file, for flagship"
    parser.add_argument("--target", metavar="FILE", help=text)
    parser.add_argument("--busy", choices=["refuse", "warn"], default="refuse", help="on a busy machine")
    args = parser.parse_args(argv)
    names = [name for group in TOPICS[args.topic] for name in group.goals]
    if unknown := set(args.only) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such figure; there are {', '.join(names)}")
    if args.vllm_python and not Path(args.vllm_python).exists():
        parser.error(f"--vllm-python: {args.vllm_python} does not exist")
    if args.oanc and not Path(args.oanc).exists():
        parser.error(f"--oanc: {args.oanc} does not exist")
    more = dict(item.partition("=")[::2] for item in args.prompts)
    if more and args.topic not in ("c2t", "pipedec"):
        parser.error("--prompts is for topics c2t and pipedec")
    for name, path in more.items():
        if not name.isidentifier() or name in c2t.TASKS:
            parser.error(f"--prompts {name}={path}: name a task of your own, in letters")
        if args.topic == "pipedec" and name != BY_PATH:
            parser.error(f"--prompts {name}={path}: pipedec reads {BY_PATH} alone")
        if not Path(path).is_file():
            parser.error(f"--prompts {name}={path}: no such file")
    run = Run(
        args.topic,
        args.quick,
        args.resume,
        args.busy,
        args.limit,
        args.vllm_python,
        more,
        args.oanc,
        args.pair,
        args.target,
    )
    return 0 if measure_topic(TOPICS[args.topic], run, args.only) else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
