"""The files of a bundle."""

from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

CARD = "card.json"  # what the recipe's section `export` said, kept for the card
README = "README.md"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CLASSIFIER = "classifier.safetensors"
EVALUATION = "eval.json"
LOG = "training_log.json"
# The files of a bundle, and what each is. Others in the folder are never published.
CONTENTS = {
    CONFIG: "the drafter's shape, the target it is for, how it was trained",
    WEIGHTS: "its weights, bf16",
    CARD: "what this card says beside the other files",
    EVALUATION: "the evaluation, raw",
    LOG: "the training log",
    "calibration.json": "what drafting and verifying cost on one machine, for `pct`, `timed`, `c2t`",
    "costs.png": "the same as a picture",
    "reliability.png": "the drafter's confidence against what the target accepts",
    "classifier.json": "a C2T classifier, for `--tree c2t`: its shape and training",
    CLASSIFIER: "its weights",
    "classifier_report.json": "what it reaches on held-out trees",
    "classifier_reliability.png": "the same by confidence",
    "classifier_recall.png": "the same by share of nodes kept",
    "ngrams.json": "an n-gram cache for Self-Draft (`--tree ngram`, `--tree ngram+POLICY`): its header",
    "ngrams.bin": "its n-grams",
    "ngrams_report.json": "what was counted for it",
    "self_draft.json": "settings of Self-Draft, tuned on one machine",
    "LICENSE": "the licence",
    "NOTICE": "notices that the licence asks for",
}


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """An evaluation's results; None where there are none.

    Raises:
        UserError: the file holds something else.
    """
    if not path.exists():
        return None
    results = read_json(path)
    if not isinstance(results, dict):
        raise UserError(
            f"{path}: holds no results of an evaluation; give what drafttrain benchmark RECIPE wrote"
        )
    return results
