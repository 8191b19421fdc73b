"""Download a bundle from the Hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from drafttrain.bundle_files import CONTENTS, README
from drafttrain.utils.errors import UserError, brief


def download_bundle(name: str) -> Path:
    """Return the folder of a bundle by its Hub id, downloaded once; `user/name@branch` names a branch.

    Raises:
        UserError: there is none, or no network.
    """
    repo, _, revision = name.partition("@")
    try:
        known = [*CONTENTS, README]  # other files, such as a target's shards, are not downloaded
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=known))
    except HFValidationError:
        raise UserError(f"{name}: no such folder; give a bundle's folder or Hub id (user/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{name}: no such folder; downloading it from the Hub failed ({brief(error)})"
        ) from None
