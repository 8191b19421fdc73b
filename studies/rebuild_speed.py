"""Compare the package before it was rebuilt in layers with the present one: speed in alternating rounds."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from math import comb
from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies import ROOT

# the last commit before "Imports run one way: the package in layers"
BEFORE = "10f1bcfbb849a56b730fb4961a507abc06743324"
ROUND = "studies/rebuild_round.py"
Rates = dict[str, float]  # tokens per second by kind of work


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Give a folder with the files of a commit, for as long as the context lasts.

    Raises:
        UserError: the repository does not have it, as in a shallow clone.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        command = ["git", "worktree", "add", "--quiet", "--detach", str(place), commit]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().split("\n")[-1]
            raise UserError(f"commit {commit}: cannot be checked out ({last}); fetch the whole history")
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def measure_round(part: str, side: str, tree: Path, folder: Path) -> Rates:
    """Measure one round of a part with the package of a tree, in a process of its own.

    Raises:
        UserError: it fails; its messages are in log.txt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, str(ROOT / ROUND), part, side, str(folder.resolve())]
    with open(folder / "log.txt", "w") as log:
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    if done.returncode:
        raise UserError(f"{part} {side}: must end with 0, got {done.returncode}; see {folder / 'log.txt'}")
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def compare(part: str, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Measure rounds of a part with both packages alternately; those already in the folder are not repeated.

    The order within a round alternates, so that a machine that slows down slows both. One more round at the
    beginning is not counted: it compiles kernels and stores hidden states.
    """
    path = folder / "rounds.json"
    rounds: list[dict[str, Rates]] = read_json(path) if path.exists() else []
    with checkout(BEFORE) as tree:
        sides = [("before", tree), ("after", ROOT)]
        for side, place in sides:
            measure_round(part, side, place, folder / side)
        while len(rounds) < n_rounds:
            order = sides if len(rounds) % 2 else sides[::-1]
            rounds.append({side: measure_round(part, side, place, folder / side) for side, place in order})
            write_json(path, rounds)
    return {"before": BEFORE, **summarize(rounds), "size": {"repeats": len(rounds)}}


def summarize(rounds: Sequence[dict[str, Rates]]) -> dict[str, Any]:
    """Return the median ratio, after over before, of the kind of work that has lost most; all beside it."""
    works = {}
    for kind in rounds[0]["before"]:
        pairs = [(one["before"][kind], one["after"][kind]) for one in rounds]
        ratios = [after / before for before, after in pairs]
        works[kind] = {
            "value": statistics.median(ratios),
            "interval": median_interval(ratios),
            "tokens_per_second": [statistics.median(side) for side in zip(*pairs)],
        }
    slowest = min(works.values(), key=lambda work: work["value"])
    return {"value": slowest["value"], "interval": slowest["interval"], "works": works}


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Return a 95 % interval of the median by order statistics; None for fewer than six values."""
    n, outside, tail = len(values), 0, 0.0
    while tail + comb(n, outside) / 2**n <= 0.025:
        tail += comb(n, outside) / 2**n
        outside += 1
    ordered = sorted(values)
    return [ordered[outside - 1], ordered[n - outside]] if outside else None
