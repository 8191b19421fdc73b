"""Arguments that studies share, and the frame that runs one."""

import argparse
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.utils.errors import UserError
from studies import ROOT

RECORDS, PICTURES = "docs/results/raw", "docs/results"  # what a shortened run must not write over
SIZES = ("limit", "max_steps", "new_tokens", "repeats", "seconds")  # a lower value shortens a run
BUNDLE = "model_cards/smollm2-135m-edd"
MT_BENCH = "data/eval/mt_bench.jsonl"


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)


def share(text: str) -> tuple[int, int]:
    """Read a share of work such as 1/2."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, got {text}")
    return int(k), int(n)


OPTIONS: dict[str, dict[str, Any]] = {
    "bundle": {"default": BUNDLE, "metavar": "DIR", "help": "the drafter"},
    "target": {"metavar": "MODEL", "help": "default: the target that the bundle names"},
    "drafter": {"required": True, "metavar": "MODEL", "help": "a small LM of the target's tokenizer"},
    "calibration": {"metavar": "DIR", "help": "default: the bundle's"},
    "classifier": {"metavar": "DIR", "help": "default: the bundle's"},
    "ngrams": {"default": BUNDLE, "metavar": "DIR", "help": "an n-gram cache"},
    "trees": {"default": "runs/trees", "metavar": "DIR", "help": "folder of drafttrain c2t"},
    "prompts": {"default": MT_BENCH, "metavar": "FILE", "help": "prompts to decode"},
    "problems": {"required": True, "metavar": "DIR", "help": "files of each task's problems"},
    "tasks": {
        "action": "append",
        "default": [],
        "metavar": "NAME=FILE",
        "help": "prompts of a task in place of the paper's tasks; may be repeated",
    },
    "wmt14": {"metavar": "FILE", "help": "prompts of WMT14, which may not be redistributed"},
    "texts": {
        "nargs": "+",
        "choices": ["passages", "code", "answers"],
        "default": ["passages", "code", "answers"],
        "help": "to read; all unless given",
    },
    "limit": {"type": positive, "metavar": "N", "help": "prompts of each task at most, at equal distances"},
    "new_tokens": {"type": positive, "default": 96, "metavar": "N", "help": "tokens of each answer at most"},
    "dtype": {"choices": ["auto", "bfloat16", "float32"], "default": "auto"},
    "responses": {
        "default": "data/train/responses.jsonl.gz",
        "metavar": "FILE",
        "help": "the target's own answers, to train on",
    },
    "max_steps": {"type": positive, "metavar": "N", "help": "optimizer steps of each training"},
    "kinds": {"nargs": "+", "metavar": "KIND", "help": "of drafters, to share the work between processes"},
    "devices": {
        "choices": ["paced", "real"],
        "default": "paced",
        "help": "that hold for declared times, or this machine's",
    },
    "seconds": {"type": positive, "default": 120, "metavar": "N", "help": "to record"},
    "logs": {"nargs": "+", "required": True, "metavar": "NAME=FILE", "help": "training logs"},
    "pictures": {
        "metavar": "DIR",
        "help": "folder of the SVG files (default: docs/results, that of --out for a shortened run)",
    },
    "recipe": {"required": True, "metavar": "RECIPE", "help": "of drafttrain pipeline"},
    "repeats": {"type": positive, "default": 3, "metavar": "N", "help": "timings of each kind"},
    "mode": {
        "action": "append",
        "default": [],
        "choices": ("pp", "stpp", "pipedec"),
        "help": "of a pipeline; may be repeated; all unless given",
    },
    "cut": {
        "action": "append",
        "default": [],
        "metavar": "MODE=N,N",
        "help": "blocks of each rank in a mode; may be repeated",
    },
    "set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "a key of the recipe; may be repeated",
    },
    "part": {
        "nargs": "+",
        "choices": ["files", "kills", "signals", "faults", "together"],
        "help": "default: all",
    },
    "every": {"type": positive, "default": 1, "metavar": "N", "help": "take one of N"},
    "against": {"required": True, "metavar": "COMMIT", "help": "an earlier one of this repository"},
    "share": {
        "type": share,
        "default": (1, 1),
        "metavar": "K/N",
        "help": "of the work, for one of N processes; their raw files joined are the whole",
    },
    "together": {"action": "store_true", "help": "let SEED grow the trees of a task at the same time"},
    "tune": {"action": "store_true", "help": "compare trees of drafts on training problems"},
    "resume": {"action": "store_true", "help": "go on with an interrupted run's raw data"},
}


def run(
    study: Callable[[Namespace], None],
    doc: str,
    argv: Sequence[str] | None,
    names: Sequence[str],
    out: str,
    **defaults: Any,
) -> int:
    """Read a study's arguments and run it; return the exit status, 2 for a mistake of the user's.

    Args:
        names: of `OPTIONS` that the study takes; --out is always there.
        out: default of --out, a folder that is made. Shortened runs write to runs/ in place of
            docs/results/raw.
        defaults: of single options, in place of those in `OPTIONS`.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", **OPTIONS[name])
    apart = re.sub(f"^{RECORDS}", "runs", out)
    shown = out if out == apart else f"{out}, {apart} for a shortened run"
    parser.add_argument("--out", metavar="DIR", help=f"default: {shown}")
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    is_shorter = is_shortened(args, {name: parser.get_default(name) for name in SIZES if name in names})
    if "pictures" in names and args.pictures is None:
        args.pictures = args.out or apart if is_shorter else PICTURES
    args.out = Path(args.out or (apart if is_shorter else out))
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        study(args)
    except UserError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 2
    return 0


def is_shortened(args: Namespace, sizes: dict[str, int | None]) -> bool:
    """Return True if a size is given that is lower than its default; None is as many as the study has."""
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) != sizes[name]}
    return any(sizes[name] is None or value < sizes[name] for name, value in given.items())


def start(main: Callable[[], int]) -> None:
    """Run a module's `main` from the repository's root and end with its status."""
    os.chdir(ROOT)
    sys.exit(main())


def tasks(args: Namespace, default: dict[str, tuple[str, int]]) -> list[Task]:
    """Return the tasks of --tasks, one turn each, or a paper's: by name its file and turns."""
    chosen = default
    if args.tasks:
        chosen = {name: (path, 1) for name, _, path in (text.partition("=") for text in args.tasks)}
    return [
        Task(name, spread(read_prompts(path), args.limit), turns) for name, (path, turns) in chosen.items()
    ]
