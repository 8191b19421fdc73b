"""Download bundles and targets from the Hub, and the files of a bundle there."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError

from drafttrain.bundle_files import (
    CALIBRATION,
    CARD,
    CLASSIFIER,
    CLASSIFIER_WEIGHTS,
    CONFIG,
    EVALUATION,
    GENERATE,
    LOG,
    README,
    REQUIREMENTS,
    WEIGHTS,
)
from drafttrain.utils.disk import disk_problem
from drafttrain.utils.errors import UserError, brief

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


def download_bundle(name: str) -> Path:
    """Return the local folder of a bundle on the Hub (`user/name` or `user/name@branch`), downloaded once.

    Raises:
        UserError: there is no such bundle, or no network.
    """
    return _download(name, [*CONTENTS, README], "bundle")  # not a target's shards


def download_target(name: str) -> Path:
    """Return the local folder of a target on the Hub, like `download_bundle`; its weights are safetensors.

    Raises:
        UserError: there is no such target, or no network.
    """
    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
    return _download(name, patterns, "target", ["*/*", "consolidated*"])  # the same weights in another form


def _download(name: str, patterns: list[str], what: str, others: Sequence[str] = ()) -> Path:
    repo, _, revision = name.partition("@")
    try:
        chosen = {"allow_patterns": patterns, "ignore_patterns": list(others)}
        return Path(snapshot_download(repo, revision=revision or None, **chosen))
    except HFValidationError:
        raise UserError(f"{name}: no such folder; give a {what}'s folder or Hub id (user/name)") from None
    except (HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OSError) as error:
        if problem := disk_problem(error):
            raise UserError(f"{name}: cannot be downloaded; {problem}") from None
        raise UserError(
            f"{name}: no such folder; downloading it from the Hub failed ({brief(error)}); see "
            "that the name and the network are right"
        ) from None
