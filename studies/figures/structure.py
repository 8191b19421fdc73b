"""The figures of the package's structure: imports, size, commands, words, and that the rebuild cost no speed.

`imports_to_decode` counts the lines of the package's files that a fresh process has imported (`sys.modules`)
once it has loaded a bundle of the tests' tiny target and decoded with it (in a dtype that is given: the
probe of a machine's first start is left out); `imports_to_train` those that `drafttrain run RECIPE --only
train` has imported when it ends, recipe and stages included, the corpus being there. `package_lines` counts
the package's Python files, empty lines and comments included. The speeds are tokens per second of the present
package over those of the last commit before the rebuild, both in processes of their own that alternate
(`studies/rebuild_speed.py`): the median over rounds, the lower one of drafted and plain decoding and of
training with and without stored states. Estimated minutes at full size on 2 cores: `decode_speed` 9,
`train_speed` 15, `regenerate_speed` 8, `suite_s` its own value.
"""

import contextlib
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from drafttrain.drafters.config import KINDS
from drafttrain.run import cli
from drafttrain.utils.errors import UserError
from studies import ROOT, words
from studies.figures.columns import AVX2
from studies.goals import Group, Measured, Run, Size
from studies.rebuild_speed import compare
from studies.shape import (
    PACKAGE,
    Imported,
    count_lines,
    cycles,
    folder_imports,
    function_lengths,
    imported,
)

COMMAND = (sys.executable, "-m", "drafttrain.run.cli")
CONVERSATIONS = ROOT / "data/train/conversations.jsonl"
HEAVY = ("sklearn", "datasets", "gguf", "wandb", "deepspeed", "matplotlib")
LONG_P95, LONGEST = 40, 100  # lines of functions
ROUNDS = 9
REPEATS = 5
DECODE = """
import sys
import torch
from drafttrain import SpeculativeDecoder
SpeculativeDecoder.from_pretrained(sys.argv[1], dtype=torch.float32).generate("Why is the sky blue?", 8)
"""
TRAIN = """
import sys
from drafttrain.run.cli import main
assert main(["run", sys.argv[1], "--only", "train"]) == 0
"""
WRONG = {  # what a user gets wrong in a recipe -> keys that do so
    "unknown key": {"training": {"learning_rate": 1e-3}},
    "wrong type": {"training": {"lr": "fast"}},
    "out of range": {"training": {"lr": -1.0}},
    "keys at odds": {"corpus": {"max_length": 512}, "training": {"row_length": 128}},
    "no such policy": {"evaluate": {"trees": ["oak"]}},
    "no such file": {"corpus": {"sources": [{"path": "no/such/chats.jsonl"}]}},
}


# what can be read


def shape(run: Run) -> Measured:
    """Count cycles, lines, commands and words to avoid."""
    files = sorted(PACKAGE.rglob("*.py"))
    lengths = function_lengths(files)
    p95 = statistics.quantiles(lengths.values(), n=20)[-1]
    too_long = sorted((name for name, n in lengths.items() if n > LONGEST), key=lengths.get)
    circles = cycles(folder_imports())
    names = command_names()
    found = Counter(str(Path(path).parent) for path in words.files() for _ in words.hits(path))
    return {
        "package_cycles": {"value": len(circles), "cycles": circles},
        "package_lines": {
            "value": count_lines(files),
            "files": len(files),
            "functions": {"p95": p95, "longest": max(lengths.values()), "too_long": too_long},
            "ok": p95 <= LONG_P95 and not too_long,
            "why": f"95 % of the functions have up to {p95:g} lines, and {len(too_long)} more than {LONGEST}",
        },
        "commands": {"value": len(names), "names": names},
        "words": {"value": found.total(), "folders": dict(sorted(found.items()))},
    }


def command_names() -> list[str]:
    """Return the words of the command line that its help lists."""
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines), contextlib.suppress(SystemExit):
        cli.main(["--help"])
    return re.findall(r"^ {2,4}([a-z][a-z0-9-]*)(?: {2,}|$)", lines.getvalue(), re.MULTILINE)


# what is imported


def imports(run: Run) -> Measured:
    """Decode and train with a tiny target, each in its own process, and count what they have imported."""
    folder = run.folder("structure_imports")
    write_tiny_model(folder)
    decoding = imported(DECODE, [str(folder / "bundle")])
    training = {"max_steps": 2, "eval_steps": 2, "eval_prompt_limit": 1, "eval_new_tokens": 4}
    sections = {
        "corpus": {"max_length": 512, "validation_fraction": 0.2},
        "drafter": {"draft_vocab_size": 128},
        "training": {**training, "rows_per_batch": 1, "bf16": False},
        "output": str(folder / "run"),
    }
    shutil.rmtree(folder / "run", ignore_errors=True)  # a resumed run would import nothing of what is done
    recipe = write_recipe(folder, "train", sections)
    run_command("run", str(recipe), "--until", "corpus")
    trained = imported(TRAIN, [str(recipe)])
    heavy = sorted({name.split(".")[0] for name in decoding.modules} & set(HEAVY))
    return {
        "imports_to_decode": closure(decoding),
        "imports_to_train": closure(trained),
        "decode_imports": {"value": len(heavy), "imported": heavy},
    }


def closure(found: Imported) -> dict[str, Any]:
    """Return the lines of what a program has imported, with the lines of each folder."""
    folders: Counter[str] = Counter()
    for path in found.files:
        folders[str(Path(path).parent)] += count_lines([ROOT / path])
    return {"value": found.lines, "files": len(found.files), "folders": dict(folders.most_common())}


def write_tiny_model(folder: Path) -> None:
    """Write the tests' tiny target and a bundle for it; the tests have to be installed."""
    command = [sys.executable, "-m", "studies.tiny_model", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=2, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def write_recipe(folder: Path, name: str, sections: Mapping[str, Any], n_conversations: int = 24) -> Path:
    """Write a recipe of the tiny target and some conversations; further sections are laid over it."""
    chats = folder / "chats.jsonl"
    with open(CONVERSATIONS, encoding="utf-8") as file:
        chats.write_text("".join(next(file) for _ in range(n_conversations)), encoding="utf-8")
    recipe = {
        "target": {"model": str((folder / "target").resolve())},
        "corpus": {"sources": [{"path": str(chats.resolve())}]},
    }
    for key, section in sections.items():
        recipe[key] = {**recipe[key], **section} if key in recipe else section
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def run_command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run drafttrain in a process of its own.

    Raises:
        UserError: it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*COMMAND, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise UserError(
            f"drafttrain {' '.join(arguments[:2])}: must end with 0, got {done.returncode} ({last})"
        )
    return done


# the first hour


def first_error(run: Run) -> Measured:
    """Time `drafttrain run` on recipes that are wrong in several ways, each in its medians."""
    run.check_quiet()
    folder = run.folder("structure_first_error")
    repeats = 1 if run.quick else REPEATS
    seconds: dict[str, float] = {}
    broken: dict[str, str] = {}
    for kind, sections in WRONG.items():
        recipe = write_recipe(folder, kind.replace(" ", "_"), sections)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            done = subprocess.run([*COMMAND, "run", str(recipe)], cwd=ROOT, capture_output=True, text=True)
            times.append(time.perf_counter() - started)
        lines = done.stderr.strip().split("\n")
        if done.returncode != 2 or len(lines) != 1:
            broken[kind] = f"status {done.returncode}, {len(lines)} lines: {lines[-1]}"
        seconds[kind] = statistics.median(times)
    return {
        "first_error_s": {
            "value": max(seconds.values()),
            "seconds": seconds,
            "ok": not broken,
            "why": f"not one line and status 2: {broken}",
            "size": {"repeats": repeats},
        }
    }


def minimal_recipes(run: Run) -> Measured:
    """Train every kind of drafter for the tiny target from `target`, `corpus.sources` and its kind alone."""
    folder = run.folder("structure_minimal")
    write_tiny_model(folder)
    shutil.rmtree(folder / "runs", ignore_errors=True)  # what is done is not trained again
    kinds = list(KINDS)
    failed = {}
    for kind in kinds:
        own = {"model": str((folder / "target").resolve())} if kind == "causal_lm" else {}
        recipe = write_recipe(folder, kind, {"drafter": {"kind": kind, **own}}, n_conversations=200)
        try:
            run_command("run", str(recipe.resolve()), "--until", "train", cwd=folder)
        except UserError as error:
            failed[kind] = str(error)
    share = 1 - len(failed) / len(kinds)
    return {"minimal_recipes": {"value": share, "kinds": kinds, "failed": failed}}


# speed and the suite


def speed(part: str) -> Callable[[Run], Measured]:
    """Return what measures the present speed of a part over that before the rebuild."""

    def measure(run: Run) -> Measured:
        run.check_quiet()
        return {f"{part}_speed": compare(part, run.folder(f"structure_{part}"), ROUNDS)}

    return measure


def described(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the machine as a process with these variables sees it."""
    script = (
        "import json, torch; from drafttrain.kernels.machine import describe_machine; "
        "print(json.dumps(describe_machine(torch.device('cpu'))))"
    )
    command, variables = [sys.executable, "-c", script], {**os.environ, **environment}
    return json.loads(subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True).stdout)


def suite(run: Run, avx2: bool = False) -> Measured:
    """Run all tests as scripts/test.sh does."""
    run.check_quiet()
    suffix, environment = ("_avx2", AVX2) if avx2 else ("", {})
    log = run.folder(f"structure_suite{suffix}") / "log.txt"
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    started = time.perf_counter()
    with open(log, "w") as file:
        status = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **quiet, **environment}, stdout=file, stderr=file
        ).returncode
    seconds = time.perf_counter() - started
    last = log.read_text().strip().rpartition("\n")[2]
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}
    notes = {"tests": counts, "ok": status == 0, "why": f"pytest ended with {status}; see {log}"}
    notes["machine"] = described(environment)
    return {f"suite_s{suffix}": {"value": seconds, **notes}}


GROUPS = [
    Group(
        {"package_cycles": "== 0", "package_lines": "<= 20000", "commands": "<= 18", "words": "== 0"}, shape
    ),
    Group({"imports_to_decode": "<= 7000", "imports_to_train": "<= 9500", "decode_imports": "== 0"}, imports),
    Group({"first_error_s": "<= 1.5"}, first_error, size=Size(repeats=REPEATS)),
    Group({"minimal_recipes": "== 1"}, minimal_recipes),
    *(
        Group({f"{part}_speed": ">= 0.98"}, speed(part), long=True, size=Size(repeats=ROUNDS))
        for part in ("decode", "train", "regenerate")
    ),
    Group({"suite_s": "<= 900"}, suite, long=True),
    Group({"suite_s_avx2": "<= 900"}, partial(suite, avx2=True), long=True),
]
