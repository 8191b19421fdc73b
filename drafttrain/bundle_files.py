"""Names and contents of the files of a bundle."""

from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

CARD = "card.json"  # the recipe's section `export`, for the model card
README = "README.md"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CALIBRATION = "calibration.json"
CLASSIFIER, CLASSIFIER_WEIGHTS = "classifier.json", "classifier.safetensors"
SELF_DRAFT = ("ngrams.json", "self_draft.json")  # either, or both
GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"
EVALUATION = "eval.json"
LOG = "training_log.json"
# The files of a bundle; others in its folder are never published.
CONTENTS = {
    CONFIG: "the drafter's shape, the target it is for, how it was trained",
    WEIGHTS: "its weights",
    CARD: "facts for this card that are in no other file: licence, data, notes",
    EVALUATION: "the raw evaluation",
    LOG: "the training log",
    CALIBRATION: "the cost of drafting and verifying on one machine, for `pct`, `timed`, `c2t`",
    "costs.png": "plot of these costs",
    "reliability.png": "the drafter's confidence against what the target accepts",
    CLASSIFIER: "a C2T classifier, for `--tree c2t`: its shape and training",
    CLASSIFIER_WEIGHTS: "its weights",
    "classifier_report.json": "its results on held-out trees",
    "classifier_reliability.png": "its confidence against what the target accepts",
    "classifier_recall.png": "its recall by share of nodes kept",
    "ngrams.json": "an n-gram cache for Self-Draft (`--tree ngram`, `--tree ngram+POLICY`): its header",
    "ngrams.bin": "its n-grams",
    "ngrams_report.json": "the counts of its sources",
    "self_draft.json": "settings of Self-Draft, tuned on one machine",
    GENERATE: "for `custom_generate` of transformers",
    REQUIREMENTS: "what that needs",
    "LICENSE": "the licence",
    "NOTICE": "notices that the licence requires",
}


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """Return the results of an evaluation, or None if there is no such file.

    Raises:
        UserError: the file does not hold results of an evaluation.
    """
    if not path.exists():
        return None
    results = read_json(path)
    is_object = isinstance(results, dict)
    if not is_object or not isinstance(results.get("tree"), str | None):
        wrong = f"tree: must be a text, got {results['tree']!r}" if is_object else "must be an object"
        raise UserError(f"{path}: {wrong}; give what drafttrain benchmark RECIPE wrote")
    return results
