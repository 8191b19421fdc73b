"""Trees in the EDD paper's settings, and what its tables and figures about them share."""

from argparse import Namespace
from pathlib import Path

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.utils.provenance import content_hash
from drafttrain.utils.writing import write_text
from studies import resuming

TREES = {  # in the paper's settings
    "VCT": "vct:width=3,depth=5",
    "CAPE": "cape:max_depth=5",
    "EAGLE-2": "eagle2:top_k=10,max_depth=6,total=50",
    "PCT": "pct:width=5,max_depth=10,min_confidence=0.01",
    "PCT w/o removing leaves": "pct:width=5,max_depth=10,min_confidence=0",
}
NAMES = ("bundle", "target", "calibration", "limit", "new_tokens")


def load(args: Namespace) -> Bundle:
    """Load the drafter with the costs by which PCT grows."""
    return load_bundle(args.bundle, target=args.target, dtype="bfloat16", calibration=args.calibration)


def open_log(args: Namespace, name: str) -> MeasurementLog:
    """Open the raw data of a study over the trees of `TREES`.

    Raises:
        UserError: as `resuming.open_log`.
    """
    calibration = args.calibration and content_hash(args.calibration)
    return resuming.open_log(args, name, [content_hash(args.bundle), calibration, TREES])


def write(path: Path, text: str) -> None:
    """Put a file in place as a whole and print it."""
    write_text(path, text)
    print(text)
