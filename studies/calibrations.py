"""Compare calibrations by what decoding reaches with them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.bundle import Bundle
from drafttrain.calibration.calibration import FILE, Calibration
from drafttrain.calibration.quick import quick_calibration
from drafttrain.data.prompts import Task
from drafttrain.evaluation.measure import MeasurementLog, drafting, measure
from drafttrain.evaluation.metrics import noise, ratio_interval, ratio_spread, tabulate
from drafttrain.utils.files import fingerprint
from drafttrain.utils.writing import write_json


def quick_against_full(
    loaded: Bundle, full: Calibration, task: Task, folder: Path, **options: Any
) -> dict[str, Any]:
    """Make a short calibration and compare `timed` by it with `timed` by a full one, interleaved.

    Args:
        loaded: the bundle; what belongs to the drafter is taken from its own calibration if it has one.
        full: of `calibrate` on this machine.
        task: prompts to decode.
        folder: for the short calibration and the raw measurements.
        options: of `measure`, such as max_new_tokens and repeats.

    Returns:
        `seconds` that the short calibration took, `load` meanwhile, `rates` to beat and `tokens_per_second`
        of both, and `ratio`, the short one's tokens per second divided by the full one's, with `interval`.
    """
    begun = time.perf_counter()
    made = loaded.target, loaded.drafter, loaded.fingerprints
    quick = quick_calibration(*made, loaded.calibration, loaded.classifier)
    seconds = time.perf_counter() - begun
    write_json(folder / FILE, quick.to_json())
    both = {"quick": quick, "full": full}
    methods = {
        name: drafting(loaded.target, replace(loaded, calibration=found, is_given=True).proposer("timed"))
        for name, found in both.items()
    }
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([quick, full]))
    measured = measure(loaded.target, methods, task, log, **options)
    rows = tabulate(measured)
    speeds = {name: rows[name].tokens_per_second for name in both}
    return {
        "seconds": seconds,
        "load": quick.machine["load"],
        "rates": {name: found.rate for name, found in both.items()},
        "tokens_per_second": speeds,
        "ratio": speeds["quick"] / speeds["full"],
        "interval": ratio_interval(measured, "full", "quick"),
        "flags": noise(ratio_spread(measured, "full", "quick"), speeds["quick"] / speeds["full"]),
    }
