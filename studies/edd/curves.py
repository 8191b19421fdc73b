"""accept_len against tokens seen while drafters train, and an extrapolation that each last point tests.

    python -m studies.edd.curves --logs edd=runs/a/training_log.json eagle=runs/b/training_log.json

A log may also be the `result.json` of a training of `studies.edd.equal`. The points are real decoding of the
validation prompts (`training.eval_prompts`). The extrapolation is a line in the logarithm of the tokens
through all points but the last. Where the learning rate falls along a training, points before its end are
shorter than those of trainings that end there, so the last one is promised too little.
"""

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.report.panels import Chart, Series
from drafttrain.report.pictures import sheet
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json, write_text
from studies import arguments

MILLION = 1e6
FEWEST = 3  # points: two for a line and one that tests it


@dataclass(frozen=True)
class Curve:
    """The evaluations of one training.

    Attributes:
        tokens: trained so far, in millions.
        accept_len: on the validation prompts.
    """

    name: str
    tokens: list[float]
    accept_len: list[float]

    @property
    def predicted(self) -> float:
        """Return what the points before the last one promise for it: a line in log(tokens)."""
        xs, ys = [math.log(x) for x in self.tokens[:-1]], self.accept_len[:-1]
        slope, level = statistics.linear_regression(xs, ys)
        return level + slope * math.log(self.tokens[-1])


def points(log: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return millions of tokens and accept_len of each evaluation of a training log."""
    seen, found = 0, {}
    for row in log:
        seen += row.get("tokens", 0)  # since the row before
        if "eval_accept_len" in row:
            found[seen / MILLION] = row["eval_accept_len"]
    found.pop(0.0, None)  # before any training
    return list(found.items())


def read_curve(name: str, log: Sequence[dict[str, Any]] | dict[str, Any]) -> Curve:
    """Return the evaluations of a training log, or those that a result of `Bench` has kept.

    Raises:
        UserError: it has too few.
    """
    found = log.get("curve", []) if isinstance(log, dict) else points(log)
    if len(found) < FEWEST:
        raise UserError(
            f"{name}: must have {FEWEST} evaluations with accept_len at least, got {len(found)}; train with "
            "training.eval_prompts and smaller eval_steps"
        )
    tokens, lengths = zip(*found)
    return Curve(name, list(tokens), list(lengths))


def picture(curves: Sequence[Curve]) -> str:
    """Return the curves as SVG."""
    series = [
        Series(one.name, style, one.tokens, one.accept_len, [f"{y:.3f}" for y in one.accept_len])
        for style, one in enumerate(curves)
    ]
    xs = [x for one in curves for x in one.tokens]
    ys = [y for one in curves for y in one.accept_len]
    chart = Chart(
        "accept_len while training",
        series,
        "tokens seen (millions)",
        "accept_len",
        (min(xs), max(xs)),
        (min(ys), max(ys)),
        log_x=True,
        legend=True,
    )
    return str(sheet([chart], []))


def study(args: Namespace) -> None:
    curves = []
    for given in args.logs:
        name, _, path = given.partition("=")
        if not path:
            raise UserError(f"--logs: must be NAME=FILE, got {given}")
        curves.append(read_curve(name, read_json(path)))
    rows = [
        {"name": one.name, "tokens": one.tokens, "accept_len": one.accept_len, "predicted": one.predicted}
        for one in curves
    ]
    write_json(args.out / "curves.json", rows)
    write_text(Path(args.pictures) / "accept_len_curves.svg", picture(curves))
    for one in curves:
        last, tokens = one.accept_len[-1], one.tokens[-1]
        print(json.dumps({"name": one.name, "tokens": tokens, "last": last, "predicted": one.predicted}))


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("logs", "pictures"), "docs/results/raw/baselines")


if __name__ == "__main__":
    arguments.start(main)
