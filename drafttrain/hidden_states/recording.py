"""Keep the hidden states that the target computes while it answers, so that they need not be computed again.

Decoding runs the target over every token of a prompt and its answer, and collecting would do the same once
more. `StateRecorder` gets those states in a proposer's place, `Recordings` writes them to shards like those
of a store, and `RecordedStates` finds those of a document by its tokens.
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

TAIL = 8  # tokens without states at a document's end: an answer's last one, and what the template adds


class Recordings:
    """Writes states of documents as they come, in shards; what is not in one yet is lost with the process.

    States that cannot be written are computed later, so a full disk ends the recording and nothing else.

    Attributes:
        problem: why nothing more is recorded; None while something is.
    """

    def __init__(self, folder: Path, manifest: Manifest, max_bytes: float, shard_tokens: int):
        """
        Args:
            folder: gets the shards, and goes on with those of the same manifest; others are removed.
            max_bytes: of all shards together.
            shard_tokens: in one shard, which is in memory until it is written.
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
        """Keep a document for the next shard, as long as there is room."""
        info, stored = self.manifest.target, self.manifest.stored
        if not (document.tapped.isfinite().all() and document.final.isfinite().all()):
            return  # collecting says what is wrong
        size = stored_bytes(len(document.tokens), 1, 0, info.hidden_size, len(info.tapped_blocks), stored)
        if self.bytes + size > self.max_bytes:
            self.problem = self.problem or f"{self.folder}: has {self.bytes / 1e9:.3g} GB, the most allowed"
        if self.problem is None:
            self.bytes += size
            self.waiting.append(document)
            if sum(len(one.tokens) for one in self.waiting) >= self.shard_tokens:
                self.flush()

    def flush(self) -> None:
        """Write what waits; note the problem where that fails."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            try:
                write_shard(self.folder, self.n_shards, self.manifest, waiting, [])
                self.n_shards += 1
            except UserError as error:
                self.problem = str(error)


class StateRecorder(NoProposer):
    """Drafts nothing, and keeps the states of all tokens that the target has read, prompts included.

    The target's last tapped block is its final state.

    Attributes:
        rows: states of each row of the decode loop, in its order, as parts [n, (K + 1)*H] on the CPU.
    """

    needs_last_update = True

    def __init__(self, recordings: Recordings):
        """
        Args:
            recordings: what the states are for; nothing is kept once they have a problem.
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
            row.append(states[:count].clone())  # the rest would stay in memory

    def document(self, place: int, tokens: Sequence[int]) -> Document | None:
        """Return the states of a row's tokens but the last, which no forward has had; None without them.

        Args:
            place: of the row, from the start or the end.
            tokens: prompt and answer.
        """
        if self.recordings.problem is not None or len(tokens) < 2:
            return None
        states, hidden = torch.cat(self.rows[place]), self.recordings.manifest.target.hidden_size
        tapped, final = states.split([states.shape[1] - hidden, hidden], dim=1)  # [n, K*H], [n, H]
        return Document(torch.tensor(tokens[: len(states)]), tapped, final)


def recording_of(target: FrozenTarget, blocks: Sequence[int], dtype: str) -> Manifest:
    """Return what recorded states depend on: the target, the blocks whose outputs they are, and dtypes."""
    computed = str(target.dtype).removeprefix("torch.")
    return Manifest(target.name, target_info(target, blocks), "", computed, 0, 0, [], stored=dtype)


def states_folder(answers: Path) -> Path:
    """Return the folder of the states that were kept with answers; hidden, as nothing but the time of later
    stages depends on it."""
    return answers / ".states"


def require_recording(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that has no states of this target, these blocks and dtypes.

    Raises:
        UserError: it is one.
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
    """Where the states of a document's first tokens are recorded.

    Attributes:
        shard: of a recording.
        name: that its file gets elsewhere, made of its tokens.
        first, rows: where they are there.
    """

    shard: Shard
    name: str
    first: int
    rows: int

    def document(self, tokens: Sequence[int]) -> Document:
        """Read the states of a document; zeros at its last tokens, of which none are recorded."""
        later = (0, 0, 0, len(tokens) - self.rows)
        tapped, final = (
            pad(self.shard.read(name, self.first, self.first + self.rows), later)
            for name in ("tapped", "final")
        )  # [t, K*H], [t, H]
        return Document(torch.tensor(tokens), tapped, final)

    def is_on_disk_of(self, folder: Path) -> bool:
        """Return whether a folder, which may not be there yet, is on the disk of the recorded file."""
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        return there.stat().st_dev == self.shard.path.stat().st_dev

    def link(self, tokens: Sequence[int], folder: Path) -> Link | None:
        """Give the recorded file a name in a store's folder, too; None where the file system cannot."""
        linked, temporary = folder / self.name, folder / f".{self.name}.{os.getpid()}.tmp"
        try:
            if not (linked.exists() and linked.samefile(self.shard.path)):
                os.link(self.shard.path, temporary)
                os.replace(temporary, linked)  # a file of the same states is as good
        except OSError:  # another disk, or one without links
            return None
        finally:
            temporary.unlink(missing_ok=True)
        return Link(torch.tensor(tokens), self.name, self.first, self.rows)


@dataclass
class RecordedStates:
    """Recorded states by the tokens that they are of.

    Attributes:
        places: hash of a document's tokens -> where its states are.
    """

    places: dict[bytes, Recorded]

    @classmethod
    def open(cls, folders: Iterable[Path], manifest: Manifest, longest: int) -> "RecordedStates":
        """Index the shards of folders that are sound; a folder that is absent or of another target, blocks or
        dtypes has none.

        Args:
            longest: tokens in a document of the corpus, which has cut what was longer.
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
        """Return where the states of a document are, if all are recorded that anything trained reads.

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
    """Return the whole shards of a recording, up to the first that is missing or damaged."""
    shards: list[Shard] = []
    while (shard := open_shard(folder, len(shards), manifest)) is not None:
        shards.append(shard)
    return shards


def _hash(tokens: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()[:16]
