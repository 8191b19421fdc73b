"""Download bundles and targets from the Hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError

from drafttrain.bundle_files import CONTENTS, README
from drafttrain.utils.disk import disk_problem
from drafttrain.utils.errors import UserError, brief


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
