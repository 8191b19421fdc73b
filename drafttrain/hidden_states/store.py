"""The hidden-state store: a target's states for every document of a corpus split, on disk.

    <folder>/manifest.json            what the states were made from, and which documents each shard has
    <folder>/shard-NNNNN.safetensors  tokens int32 [T], tapped [T, K*H] and final [T, H] in bf16
                                      or fp32, offsets int64 [documents + 1] (where each document starts)
    <folder>/recorded-….safetensors   files of states that were recorded elsewhere, as hard links

Document i of a store is row i of its split. Shards are planned before anything is written, so their bytes
depend neither on interruptions nor on the number of processes. A shard names the manifest it belongs to, so
that a leftover of another collection is never used.

States of some documents may be in recorded files. The shard then has `places` int64 [documents, 3] (0 for
this file or 1 + the number of a recorded one, first row, rows), the names and sizes of those files, and in
`tapped` and `final` only the rows of the other documents. A document's tokens without recorded states get
zeros.

Documents are read with plain reads, not through a memory map: as fast from the page cache, nothing is shared
over a fork, what was read does not stay in the process's memory, and a truncated file is an exception instead
of a bus error. `collect.py` computes the states.
"""

import json
import os
import struct
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from datasets import Dataset
from torch.nn.functional import pad

from drafttrain.hidden_states.fingerprints import corpus_fingerprint, mask_fingerprint
from drafttrain.target_lm.info import TargetInfo
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.writing import write_json

FORMAT_VERSION = 1
LINKED = " with links"  # in the key of shards with links, which earlier versions cannot read and so refuse
MANIFEST = "manifest.json"
_TYPES = {"I64": torch.int64, "I32": torch.int32, "BF16": torch.bfloat16, "F32": torch.float32}  # of headers


@dataclass
class Manifest:
    """Record of what a store was made from.

    Attributes:
        target_name: folder or Hub id, for display; not compared.
        target: has to agree with the target in use.
        corpus: fingerprint of the split.
        dtype: dtype that the target computed in.
        documents, tokens: size of the split.
        bounds: document boundaries of the shards: shard k holds documents bounds[k] … bounds[k + 1] - 1.
        format_version: of this layout of files.
        skipped: ids of documents without usable states (NaN); they are stored as empty ones.
        complete: whether all shards have been written.
        stored: dtype of the stored states.
        masks: fingerprint of the loss masks if states were recorded: states that no trained token needs may
            be zeros. Empty if all were computed.
    """

    target_name: str
    target: TargetInfo
    corpus: str
    dtype: str
    documents: int
    tokens: int
    bounds: list[int]
    format_version: int = FORMAT_VERSION
    skipped: list[str] = field(default_factory=list)
    complete: bool = False
    stored: str = "bfloat16"
    masks: str = ""

    @property
    def n_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def key(self) -> str:
        """Return a fingerprint of a collection, the same for each process and each attempt at it."""
        values = asdict(self)
        left_out = {"target_name", "skipped", "complete", "masks"}
        left_out |= {"stored"} if self.stored == "bfloat16" else set()
        return fingerprint([values[name] for name in values if name not in left_out])

    def difference(self, target: TargetInfo, corpus: str | None) -> str | None:
        """Return the first difference from a target or corpus, in words; None without any."""
        ours, theirs = asdict(self.target), asdict(target)
        for name, value in ours.items():
            if value != theirs[name]:
                return f"target's {name.replace('_', ' ')} ({value} in the store, {theirs[name]} in use)"
        if corpus is not None and corpus != self.corpus:
            return f"corpus ({self.corpus} in the store, {corpus} in use)"
        return None

    def write(self, folder: Path) -> None:
        """Write or replace the manifest of a folder.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        try:
            write_json(folder / MANIFEST, asdict(self))
        except OSError as error:
            raise UserError(
                f"{folder / MANIFEST}: cannot be written ({error.strerror}); resolve that and run the same "
                "command again: finished shards are kept"
            ) from None


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """Read a store's manifest.

    Raises:
        UserError: there is none, or this version cannot read it.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise UserError(f"{path}: no such file, so no hidden states are stored there; collect them first")
    values = read_json(path)
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version}, this version reads {FORMAT_VERSION}; collect again"
        )
    try:
        return Manifest(**{**values, "target": TargetInfo(**values["target"])})
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not a manifest of hidden states ({error}); collect again") from None


@dataclass
class Document:
    """States of one document of t tokens; t is 0 for one that was skipped.

    Attributes:
        tokens: int64 [t].
        tapped: [t, K*H], the tapped blocks side by side.
        final: [t, H], after the target's final norm: what its LM head reads.
    """

    tokens: torch.Tensor
    tapped: torch.Tensor
    final: torch.Tensor


@dataclass
class StatesFile:
    """A file of tensors that are read in parts.

    Attributes:
        path: the file.
        tensors: name of each tensor -> (type, shape, first byte in the file).
    """

    path: Path
    tensors: dict[str, tuple[torch.dtype, list[int], int]]

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows first … last - 1 of a tensor.

        Raises:
            UserError: the file is gone or was cut short.
        """
        dtype, shape, start = self.tensors[name]
        rows = torch.empty(last - first, *shape[1:], dtype=dtype)
        try:
            with open(self.path, "rb", buffering=0) as file:
                _read_into(file, start + first * rows[:1].nbytes, rows)
        except OSError as error:
            raise UserError(
                f"{self.path}: {error.strerror or error}; collect the hidden states again"
            ) from None
        return rows


@dataclass
class Shard(StatesFile):
    """A complete shard file.

    Attributes:
        offsets: int64 [documents + 1], first token of each document.
        skipped: ids of its documents without usable states.
        places: int64 [documents, 3], where each document's states are: number of the file, first row, number
            of rows. None: all are in this one.
        files: this one and the recorded ones.
        sha256: of its tensors; None in shards of earlier versions.
    """

    offsets: torch.Tensor
    skipped: list[str]
    places: torch.Tensor | None
    files: list[Path]
    sha256: str | None

    def place(self, document: int) -> tuple[Path, int, int]:
        """Return the file of a document's states, the first row and the one after its last."""
        if self.places is None:
            return self.path, *self.offsets[document : document + 2].tolist()
        number, first, rows = self.places[document].tolist()
        return self.files[number], first, first + rows


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def open_shard(folder: Path, index: int, manifest: Manifest) -> Shard | None:
    """Return a complete shard of the manifest; None for an absent, truncated or foreign one, or one whose
    recorded files are absent or of other sizes."""
    path = shard_path(folder, index)
    if (found := _open(path)) is None:
        return None
    file, note = found
    try:
        recorded = note.get("files", [])
        if (note["store"], note["shard"]) != (manifest.key + LINKED * bool(recorded), index):
            return None
        if any((folder / name).stat().st_size != size for name, size in recorded):
            return None
        offsets, places = (
            file.read(name, 0, file.tensors[name][1][0]) if name in file.tensors else None
            for name in ("offsets", "places")
        )
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return None
    files = [path, *(folder / name for name, _ in recorded)]
    return Shard(path, file.tensors, offsets, note["skipped"], places, files, note.get("sha256"))


def _open(path: Path) -> tuple[StatesFile, dict[str, Any]] | None:
    """Return a complete file and its metadata; None for an absent, truncated or foreign one."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            (header_size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(header_size, size)))
        note = json.loads(header.pop("__metadata__")["drafttrain"])
        begin = 8 + header_size
        if begin + max(place["data_offsets"][1] for place in header.values()) != size:
            return None
        tensors = {
            name: (_TYPES[place["dtype"]], place["shape"], begin + place["data_offsets"][0])
            for name, place in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error):  # JSON errors are ValueErrors
        return None
    return StatesFile(path, tensors), note


def _read_into(file, start: int, tensor: torch.Tensor) -> None:
    file.seek(start)
    buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while len(buffer):
        n = file.readinto(buffer)  # the system reads at most 2 GB at a time
        if not n:
            raise OSError("the file was cut short")
        buffer = buffer[n:]


class HiddenStateStore:
    """A finished store, for reading: `store[i]` has the states of row i of the corpus split.

    Attributes:
        path: its folder.
        manifest: what it was made from.
        lengths: int64 [documents], stored tokens of each document; 0 for skipped ones.
        blocks: those whose outputs `tapped` has, side by side; the number of blocks means the final state.
    """

    def __init__(self, path: Path, manifest: Manifest, shards: list[Shard]):
        self.path, self.manifest, self._shards = path, manifest, shards
        self.blocks = manifest.target.tapped_blocks
        self._files: dict[Path, StatesFile] = {shard.path: shard for shard in shards}  # and recorded ones
        self._bounds = numpy.asarray(manifest.bounds)
        none = torch.zeros(0, dtype=torch.int64)
        self.lengths = torch.cat([none, *(shard.offsets.diff() for shard in shards)])  # [documents]

    @classmethod
    def open(
        cls, path: str | os.PathLike, target: TargetInfo, corpus: Dataset | None = None
    ) -> "HiddenStateStore":
        """Open the store of one split.

        Args:
            path: its folder.
            target: the target in use, with the blocks to read as its tapped blocks (`target_info`); a store
                may hold more.
            corpus: the split in use; None: the corpus is not compared.

        Raises:
            UserError: no store, an unfinished or damaged one, or one made for another target or corpus.
        """
        path = Path(path)
        manifest = read_manifest(path)
        wanted, stored = target.tapped_blocks, manifest.target.tapped_blocks
        if set(wanted) <= {*stored, target.n_blocks}:
            target = replace(target, tapped_blocks=stored)
        difference = manifest.difference(target, None if corpus is None else corpus_fingerprint(corpus))
        if difference:
            raise UserError(f"{path}: made with another {difference}; collect the hidden states again")
        if corpus is not None and manifest.masks and manifest.masks != mask_fingerprint(corpus):
            raise UserError(f"{path}: made for other trained tokens; delete it and collect again")
        if not manifest.complete:
            raise UserError(f"{path}: collection was interrupted; run the same collection again to finish it")
        shards = []
        for index in range(manifest.n_shards):
            shard = open_shard(path, index, manifest)
            if shard is None:
                where = shard_path(path, index)
                raise UserError(f"{where}: missing or damaged; run the same collection again to repair it")
            shards.append(shard)
        store = cls(path, manifest, shards)
        store.blocks = wanted
        return store

    def __len__(self) -> int:
        return self.manifest.documents

    def __getitem__(self, index: int) -> Document:
        """Read the states of a document: t * (K + 1) * H numbers for t tokens, read again each time."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        number = int(numpy.searchsorted(self._bounds, index, side="right")) - 1
        shard = self._shards[number]
        within = index - int(self._bounds[number])
        tokens = shard.read("tokens", *shard.offsets[within : within + 2].tolist()).long()  # [t]
        path, first, last = shard.place(within)
        file = self._file(path)
        final = file.read("final", first, last)  # [n, H]
        later = (0, 0, 0, len(tokens) - len(final))  # zeros for tokens without recorded states
        return Document(tokens, pad(self._tapped(file, first, last, final), later), pad(final, later))

    def _file(self, path: Path) -> StatesFile:
        if path not in self._files:
            if (found := _open(path)) is None:
                raise UserError(f"{path}: missing or damaged; collect the hidden states again")
            self._files[path] = found[0]
        return self._files[path]

    def _tapped(self, file: StatesFile, first: int, last: int, final: torch.Tensor) -> torch.Tensor:
        """Return the outputs of `blocks`, [n, K*H]."""
        info = self.manifest.target
        if self.blocks == info.tapped_blocks:
            return file.read("tapped", first, last)
        named = {info.n_blocks: final}
        if set(self.blocks) - named.keys():
            parts = file.read("tapped", first, last).split(info.hidden_size, dim=1)  # [n, H] each
            named |= dict(zip(info.tapped_blocks, parts))
        return torch.cat([final[:, :0], *(named[block] for block in self.blocks)], dim=1)
