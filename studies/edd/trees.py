"""Trees in the EDD paper's settings, and what its tables and figures about them share."""

import os
from argparse import Namespace
from pathlib import Path

import torch

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, versions

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
    """Open the raw data of a study, which is continued with --resume and begun again without."""
    path = args.out / f"{name}.jsonl"
    if not args.resume:
        path.unlink(missing_ok=True)
    calibration = args.calibration and content_hash(args.calibration)
    depends = [content_hash(args.bundle), args.target, calibration, TREES, args.new_tokens, versions()]
    return MeasurementLog(path, fingerprint([*depends, torch.get_num_threads()]))


def write(path: Path, text: str) -> None:
    """Put a file in place as a whole and print it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    print(text)
