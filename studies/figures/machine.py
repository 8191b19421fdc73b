"""Measure decoding, training and the quickstart on this machine, natively and as if it had AVX2 alone.

Each group runs in a process of its own, for the second column with torch, oneDNN, our kernels and llama.cpp
limited to AVX2. Estimated minutes at full size on 2 cores, natively and with AVX2: `limit_share` 1 and 1;
speed (`ar_vs_transformers` and what follows it) 17 and 25; `drafted_equals_plain` 15 and 20;
`auto_vs_best_dtype` 4 and 6; training 2, with AVX2 only; `startup_s` 1; `quick_calibration_s` 4; the
quickstart 24 and 25; `one_core` 11.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.errors import UserError
from drafttrain.utils.machine import OtherLoad
from drafttrain.utils.writing import write_json
from studies import ROOT
from studies.figures.columns import column
from studies.figures.machine_quickstart import one_core, quickstart, quickstart_speed
from studies.figures.machine_setting import (
    REPEATS,
)
from studies.figures.machine_speed import speed
from studies.figures.machine_start import quick_calibration, startup
from studies.figures.machine_texts import TEXTS, drafted_equals_plain
from studies.figures.machine_work import auto_vs_best_dtype, limit_share, training
from studies.goals import FIRST_TURNS, Group, Measured, Run, Size

CPU = torch.device("cpu")
PARTS: dict[str, Callable[[Run, Path], Measured]] = {
    "limit_share": limit_share,
    "speed": speed,
    "drafted_equals_plain": drafted_equals_plain,
    "auto_vs_best_dtype": auto_vs_best_dtype,
    "training": training,
    "startup": startup,
    "quick_calibration": quick_calibration,
    "quickstart_speed": quickstart_speed,
}
FIGURES = {
    "limit_share": ["limit_share"],
    "speed": ["ar_vs_transformers", "ar_vs_llamacpp_f16", "best_vs_llamacpp_f16", "best_vs_ar"],
    "drafted_equals_plain": ["drafted_equals_plain"],
    "auto_vs_best_dtype": ["auto_vs_best_dtype"],
    "training": ["train_tokens_per_s"],
    "startup": ["startup_s"],
    "quick_calibration": ["quick_calibration_s"],
    "quickstart_speed": ["quickstart_speed"],
}
SPEEDS = Size(FIRST_TURNS, REPEATS)
EXACT = Size({name: n for name, (_, n) in TEXTS.items()})
GROUPS = [
    Group({"limit_share": ">= 0.65"}, column("limit_share")),
    Group({"limit_share_avx2": ">= 0.65"}, column("limit_share", avx2=True)),
    Group(
        {
            "ar_vs_transformers": ">= 1.8",
            "ar_vs_llamacpp_f16": ">= 1.0",
            "best_vs_llamacpp_f16": ">= 1.4",
            "best_vs_ar": ">= 1.6",
        },
        column("speed"),
        size=SPEEDS,
    ),
    Group(
        {
            "ar_vs_transformers_avx2": ">= 2.5",
            "ar_vs_llamacpp_f16_avx2": ">= 1.0",
            "best_vs_llamacpp_f16_avx2": ">= 1.4",
            "best_vs_ar_avx2": ">= 1.4",
        },
        column("speed", avx2=True),
        size=SPEEDS,
    ),
    Group({"drafted_equals_plain": "== 1.0"}, column("drafted_equals_plain"), size=EXACT),
    Group({"drafted_equals_plain_avx2": "== 1.0"}, column("drafted_equals_plain", avx2=True), size=EXACT),
    Group({"auto_vs_best_dtype": ">= 0.97"}, column("auto_vs_best_dtype"), long=True, size=Size(repeats=3)),
    Group(
        {"auto_vs_best_dtype_avx2": ">= 0.97"},
        column("auto_vs_best_dtype", avx2=True),
        long=True,
        size=Size(repeats=3),
    ),
    Group(
        {"train_tokens_per_s_avx2": ">= 0.5"}, column("training", avx2=True), long=True, size=Size(repeats=3)
    ),
    Group({"startup_s": "<= 4"}, column("startup"), size=Size(repeats=5)),
    Group(
        {"quick_calibration_s": "<= 15"},
        column("quick_calibration"),
        long=True,
        size=Size({"mt_bench": 20}, REPEATS),
    ),
    Group({"quickstart_wall_s": "<= 1500", "six_gb": "<= 6"}, quickstart, long=True),
    Group({"quickstart_wall_s_avx2": "<= 1500"}, partial(quickstart, avx2=True), long=True),
    Group({"one_core": "== 1"}, one_core, long=True),
]


def measure_part(part: str, folder: Path, run: Run) -> None:
    """Measure a part in this process and write its figures, each with the machine they hold for."""
    load = OtherLoad()
    try:
        found = PARTS[part](run, folder)
    except UserError as error:
        found = {name: {"value": None, "error": str(error), "failed": True} for name in FIGURES[part]}
    machine = {**describe_machine(CPU), "load": load.lap()}
    for figure in found.values():
        figure["machine"] = {**machine, **figure.get("machine", {})}
    asked = {"limit": run.limit, "quick": run.quick}
    write_json(folder / "figures.json", {"asked": asked, "figures": found})


if __name__ == "__main__":
    os.chdir(ROOT)
    name, place, asked = sys.argv[1:]
    measure_part(name, Path(place), Run(**json.loads(asked)))
