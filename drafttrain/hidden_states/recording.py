"""Keep the hidden states that the target computes while it answers, so that they need not be computed again.

Decoding runs the target over every token of a prompt and its answer, and collecting would do the same once
more. `StateRecorder` gets those states in a proposer's place, `Recordings` writes them to shards like those
of a store, and `RecordedStates` finds those of a document by its tokens.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafttrain.hidden_states.store import (
    Document,
    Manifest,
    Shard,
    open_shard,
    read_manifest,
    shard_path,
    write_shard,
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


@dataclass
class RecordedStates:
    """Recorded states by the tokens that they are of.

    Attributes:
        places: hash of a document's tokens -> its shard, and where it begins and ends there.
    """

    places: dict[bytes, tuple[Shard, int, int]]

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, longest: int) -> "RecordedStates":
        """Index a folder's shards; there are none if it is absent or of another target, blocks or dtypes.

        Args:
            longest: tokens in a document of the corpus, which has cut what was longer.
        """
        places = {}
        for shard in _shards(folder, manifest):
            tokens = shard.read("tokens", 0, int(shard.offsets[-1])).numpy()  # [T]
            for first, last in zip(shard.offsets.tolist(), shard.offsets[1:].tolist()):
                last = min(last, first + longest)
                places[_hash(tokens[first:last])] = (shard, first, last)
        return cls(places)

    def find(self, tokens: Sequence[int], trained: Sequence[int]) -> Document | None:
        """Return the states of a document; zeros at its last tokens if nothing that is trained reads them.

        Args:
            tokens: of the document.
            trained: its loss mask, 1 for tokens that the drafter learns to predict.

        Returns:
            None if none are recorded, or not enough of them.
        """
        ids = np.asarray(tokens, np.int32)
        for n in range(len(ids), max(len(ids) - TAIL, 1) - 1, -1):
            if (place := self.places.get(_hash(ids[:n]))) is not None:
                break
        else:
            return None
        if any(trained[n + 1 :]):  # the state at n - 1 predicts token n
            return None
        shard, first, last = place
        tapped, final = (
            torch.nn.functional.pad(shard.read(name, first, last), (0, 0, 0, len(ids) - n))
            for name in ("tapped", "final")
        )  # [t, K*H], [t, H]
        return Document(torch.from_numpy(ids).long(), tapped, final)


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
