"""Write the shards of a hidden-state store (`store.py`), and verify them by their digests."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafttrain.hidden_states.store import LINKED, Document, Manifest, Shard, shard_path
from drafttrain.utils.errors import UserError

PART = 4096  # rows that are read at a time to compute a digest


@dataclass
class Link:
    """States of one document of t tokens in a recorded file of the store's folder.

    Attributes:
        tokens: int64 [t].
        file: name of that file.
        first, rows: first row and number of rows there; at most t rows, for the document's first tokens.
    """

    tokens: torch.Tensor
    file: str
    first: int
    rows: int


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[int]:
    """Return shard boundaries [0, …, documents]: at most `shard_tokens` tokens, or one document, in each."""
    bounds, tokens = [0], 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > shard_tokens:
            bounds.append(index)
            tokens = 0
        tokens += length
    return [*bounds, len(lengths)] if len(lengths) else bounds


def temporary_folder(folder: Path, index: int) -> Path:
    """Return the folder where a shard is written until it is complete; only the shard's process writes there.

    A folder, because safetensors writes to randomly named files, which a killed process leaves behind.
    """
    return folder / f".shard-{index:05d}.tmp"


def write_shard(
    folder: Path,
    index: int,
    manifest: Manifest,
    documents: Sequence[Document | Link],
    skipped: Sequence[str],
) -> None:
    """Write a shard under a temporary name, and rename it once it is on the disk.

    Args:
        documents: the recorded files of links have to be in the folder already.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    own = [document for document in documents if isinstance(document, Document)]
    lengths = torch.tensor([0, *(len(document.tokens) for document in documents)])  # [documents + 1]
    dtype, hidden = getattr(torch, manifest.stored), manifest.target.hidden_size
    none = torch.zeros(0, hidden, dtype=dtype)
    wide = none.repeat(1, len(manifest.target.tapped_blocks))  # [0, K*H]
    tensors = {
        "tokens": torch.cat([document.tokens for document in documents]).to(torch.int32),  # [T]
        "tapped": torch.cat([wide, *(document.tapped.to(dtype) for document in own)]),  # [T, K*H]
        "final": torch.cat([none, *(document.final.to(dtype) for document in own)]),  # [T, H]
        "offsets": lengths.cumsum(0),  # [documents + 1]
    }
    note: dict[str, Any] = {"store": manifest.key, "shard": index, "skipped": list(skipped)}
    if files := sorted({document.file for document in documents if isinstance(document, Link)}):
        tensors["places"] = _places(documents, files)  # [documents, 3]
        note["files"] = [[name, (folder / name).stat().st_size] for name in files]
        note["store"] += LINKED
    note["sha256"] = _digest(tensors[name] for name in sorted(tensors))
    temporary, path = temporary_folder(folder, index), shard_path(folder, index)
    whole = temporary / path.name
    try:
        temporary.mkdir(exist_ok=True)
        # one key: with several, safetensors writes them in an order that changes from run to run
        save_file(tensors, whole, metadata={"drafttrain": json.dumps(note)})
        os.chmod(whole, folder.stat().st_mode & 0o666)  # safetensors lets only the owner read
        with open(whole, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(whole, path)
    except (OSError, SafetensorError) as error:
        is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        remedy = "free some space" if is_full else "resolve that"
        raise UserError(
            f"{path}: cannot be written ({error}); {remedy} and run the same command again: finished shards "
            "are kept"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the concatenated bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if len(tensor):
            digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _places(documents: Sequence[Document | Link], files: Sequence[str]) -> torch.Tensor:
    """Return `Shard.places` for documents whose links are into these files."""
    places, rows = [], 0
    for document in documents:
        if isinstance(document, Link):
            places.append((1 + files.index(document.file), document.first, document.rows))
        else:
            places.append((0, rows, len(document.tokens)))
            rows += len(document.tokens)
    return torch.tensor(places)  # [documents, 3]


def is_sound(shard: Shard) -> bool:
    """Return whether a shard's file, read in full, matches its recorded digest; True if it has none.

    Raises:
        UserError: the file is gone or was cut short.
    """

    def parts(name: str) -> Iterator[torch.Tensor]:
        rows = shard.tensors[name][1][0]
        for first in range(0, rows, PART):
            yield shard.read(name, first, min(first + PART, rows))

    names = sorted(shard.tensors)
    return shard.sha256 in (None, _digest(part for name in names for part in parts(name)))
