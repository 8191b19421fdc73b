"""Raw data of an interrupted run, with which --resume goes on."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import git_commit, versions


def open_log(args: Namespace, name: str, depends: Sequence[Any]) -> MeasurementLog:
    """Open the measurements of a study, which are continued with --resume and begun again without.

    Args:
        depends: all that they depend on beside target, prompts, new tokens, commit, versions and threads.

    Raises:
        UserError: those to be continued have other settings, or are of another commit.
    """
    path = args.out / f"{name}.jsonl"
    if not args.resume:
        path.unlink(missing_ok=True)
    chosen = [getattr(args, key, None) for key in ("target", "prompts", "tasks", "new_tokens")]
    same = [*chosen, git_commit(), versions(), torch.get_num_threads()]
    return MeasurementLog(path, fingerprint([*depends, *same]), replace=False)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that is written line by line, none if there is no file; a last one that a
    kill has cut off is removed from it, so that others can be appended."""
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].decode().splitlines()
