"""Record the hidden states that the target computes while it answers, to avoid computing them again.

Decoding runs the target over every token of a prompt and its answer, and collecting would repeat that.
`StateRecorder` receives the states in place of a proposer, `Recordings` writes them to shards like those of a
store, and `RecordedStates` finds the states of a document by its tokens.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from drafttrain.hidden_states.shards import Link, is_sound, write_shard
from drafttrain.hidden_states.store import (
    MANIFEST,
    Document,
    Manifest,
    Shard,
    open_shard,
    read_manifest,
    shard_path,
)
from drafttrain.inference.proposer import NoProposer
from drafttrain.target_lm.config import stored_bytes
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

TAIL = 8  # tokens without states at a document's end, at most: an answer's last and those of the template


class Recordings:
    """Writer of documents' states, which are buffered until they fill a shard and lost if the process dies.

    States that cannot be written are computed later, so a full disk ends only the recording.

    Attributes:
        problem: why recording has stopped; None while it goes on.
    """

    def __init__(self, folder: Path, manifest: Manifest, max_bytes: float, shard_tokens: int):
        """
        Args:
            folder: for the shards; those of the same manifest are continued, others are removed.
            max_bytes: of all shards together.
            shard_tokens: tokens in one shard, which is in memory until it is written.
        """
        self.folder, self.manifest = folder, manifest
        self.max_bytes, self.shard_tokens = max_bytes, shard_tokens
        self.problem: str | None = None
        self.waiting: list[Document] = []
        if folder.exists() and _key(folder) != manifest.key:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        shards = _shards(folder, manifest)
        for leftover in folder.glob(".shard-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for path in folder.glob("shard-*"):
            if path >= shard_path(folder, len(shards)):  # after a damaged one
                path.unlink()
        self.n_shards, self.bytes = len(shards), sum(shard.path.stat().st_size for shard in shards)
        manifest.write(folder)

    def add(self, document: Document) -> None:
        """Add a document to the next shard, as long as there is room."""
        info, stored = self.manifest.target, self.manifest.stored
        if not (document.tapped.isfinite().all() and document.final.isfinite().all()):
            return  # collection reports it
        size = stored_bytes(len(document.tokens), 1, 0, info.hidden_size, len(info.tapped_blocks), stored)
        if self.bytes + size > self.max_bytes:
            self.problem = self.problem or f"{self.folder}: has {self.bytes / 1e9:.3g} GB, the most allowed"
        if self.problem is None:
            self.bytes += size
            self.waiting.append(document)
            if sum(len(one.tokens) for one in self.waiting) >= self.shard_tokens:
                self.flush()

    def flush(self) -> None:
        """Write the waiting documents as a shard; set `problem` if that fails."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            try:
                write_shard(self.folder, self.n_shards, self.manifest, waiting, [])
                self.n_shards += 1
            except UserError as error:
                self.problem = str(error)


class StateRecorder(NoProposer):
    """Proposer without drafts that keeps the states of all tokens that the target reads, prompts included.

    The target's last tapped block has to be its final state.

    Attributes:
        rows: states of each row of the decode loop, in its order, as parts [n, (K + 1)*H] on the CPU.
    """

    needs_last_update = True

    def __init__(self, recordings: Recordings):
        """
        Args:
            recordings: where the states will be written; nothing is kept once they have a problem.
        """
        self.recordings = recordings
        self.dtype = getattr(torch, recordings.manifest.stored)
        self.rows: list[list[torch.Tensor]] = []

    def new_state(self, batch: int, max_len: int) -> list[list[torch.Tensor]]:
        self.rows = [[] for _ in range(batch)]
        return self.rows

    def select_rows(self, state: list[list[torch.Tensor]], rows: torch.Tensor) -> list[list[torch.Tensor]]:
        self.rows = [list(state[row]) for row in rows.tolist()]
        return self.rows

    def append_rows(
        self, state: list[list[torch.Tensor]], other: list[list[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        self.rows = [*state, *other]
        return self.rows

    def update(
        self,
        state: list[list[torch.Tensor]],
        tokens: torch.Tensor,
        tapped: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        if self.recordings.problem is not None:
            return
        tapped = tapped.to("cpu", self.dtype)  # [B, m, (K + 1)*H]
        for row, states, count in zip(state, tapped, counts.tolist()):
            row.append(states[:count].clone())  # a view would keep the rest in memory

    def document(self, place: int, tokens: Sequence[int]) -> Document | None:
        """Return the states of a row's tokens but the last, which no forward has read; None without them.

        Args:
            place: index of the row; negative from the end.
            tokens: prompt and answer.
        """
        if self.recordings.problem is not None or len(tokens) < 2:
            return None
        states, hidden = torch.cat(self.rows[place]), self.recordings.manifest.target.hidden_size
        tapped, final = states.split([states.shape[1] - hidden, hidden], dim=1)  # [n, K*H], [n, H]
        return Document(torch.tensor(tokens[: len(states)]), tapped, final)


def recording_of(target: FrozenTarget, blocks: Sequence[int], dtype: str) -> Manifest:
    """Return a manifest of what recorded states depend on: the target, its tapped blocks, and dtypes."""
    computed = str(target.dtype).removeprefix("torch.")
    return Manifest(target.name, target_info(target, blocks), "", computed, 0, 0, [], stored=dtype)


def states_folder(answers: Path) -> Path:
    """Return the folder of the states that were kept with answers; hidden, because later stages only get
    faster with it."""
    return answers / ".states"


def require_recording(folder: Path, manifest: Manifest) -> None:
    """Require that a folder has states of this target, these blocks and dtypes.

    Raises:
        UserError: it has none.
    """
    if not (folder / MANIFEST).exists():
        found = "without any; answer with regenerate.keep_states and hidden_states.mode offline"
    elif _key(folder) != manifest.key:
        found = "with those of other ones; take the settings that they were kept with"
    else:
        return
    raise UserError(
        "hidden_states.kept_in: must name folders of answers with states of this target, these blocks and "
        f"dtypes, got {folder.parent} {found}, or leave the folder out"
    )


@dataclass
class Recorded:
    """Location of the recorded states of a document's first tokens.

    Attributes:
        shard: a shard of a recording.
        name: name of links to its file, a hash of its tokens.
        first, rows: first row and number of rows in the shard.
    """

    shard: Shard
    name: str
    first: int
    rows: int

    def document(self, tokens: Sequence[int]) -> Document:
        """Read the states of a document; its last tokens, without recorded states, get zeros."""
        later = (0, 0, 0, len(tokens) - self.rows)
        tapped, final = (
            pad(self.shard.read(name, self.first, self.first + self.rows), later)
            for name in ("tapped", "final")
        )  # [t, K*H], [t, H]
        return Document(torch.tensor(tokens), tapped, final)

    def is_on_disk_of(self, folder: Path) -> bool:
        """Return whether a folder, which may not exist yet, is on the disk of the recorded file."""
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        return there.stat().st_dev == self.shard.path.stat().st_dev

    def link(self, tokens: Sequence[int], folder: Path) -> Link | None:
        """Hard-link the recorded file into a store's folder; return None if the file system cannot."""
        linked, temporary = folder / self.name, folder / f".{self.name}.{os.getpid()}.tmp"
        try:
            if not (linked.exists() and linked.samefile(self.shard.path)):
                os.link(self.shard.path, temporary)
                os.replace(temporary, linked)  # may replace a file with the same states
        except OSError:  # another disk, or one without links
            return None
        finally:
            temporary.unlink(missing_ok=True)
        return Link(torch.tensor(tokens), self.name, self.first, self.rows)


@dataclass
class RecordedStates:
    """Recorded states, found by the tokens of their documents.

    Attributes:
        places: hash of a document's tokens -> location of its states.
    """

    places: dict[bytes, Recorded]

    @classmethod
    def open(cls, folders: Iterable[Path], manifest: Manifest, longest: int) -> "RecordedStates":
        """Index the undamaged shards of folders. A folder that is absent or of another target, blocks or
        dtypes has none.

        Args:
            longest: most tokens in a document of the corpus, which has truncated longer ones.
        """
        places = {}
        found = (shard for folder in folders for shard in _shards(folder, manifest))
        for shard in filter(is_sound, found):
            tokens = shard.read("tokens", 0, int(shard.offsets[-1])).numpy()  # [T]
            name = f"recorded-{_hash(tokens).hex()}.safetensors"
            for first, last in zip(shard.offsets.tolist(), shard.offsets[1:].tolist()):
                last = min(last, first + longest)
                places[_hash(tokens[first:last])] = Recorded(shard, name, first, last - first)
        return cls(places)

    def find(self, tokens: Sequence[int], trained: Sequence[int]) -> Recorded | None:
        """Return the location of a document's states, if all that training reads are recorded; else None.

        Args:
            tokens: of the document.
            trained: its loss mask, 1 for tokens that the drafter learns to predict.
        """
        ids = np.asarray(tokens, np.int32)
        for n in range(len(ids), max(len(ids) - TAIL, 1) - 1, -1):
            if (place := self.places.get(_hash(ids[:n]))) is not None:
                # the state at n - 1 predicts token n
                return None if any(trained[n + 1 :]) else place
        return None


def _key(folder: Path) -> str | None:
    """Return the key of a folder's manifest; None where it is absent or damaged."""
    try:
        return read_manifest(folder).key
    except UserError:
        return None


def _shards(folder: Path, manifest: Manifest) -> list[Shard]:
    """Return the complete shards of a recording, up to the first that is missing or damaged."""
    shards: list[Shard] = []
    while (shard := open_shard(folder, len(shards), manifest)) is not None:
        shards.append(shard)
    return shards


def _hash(tokens: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()[:16]
