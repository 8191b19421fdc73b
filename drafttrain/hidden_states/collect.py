"""Collect hidden states offline: run the target once over a corpus and store what the drafter reads.

Each split of the corpus becomes a `HiddenStateStore` in a folder named like it. Several processes
(`deepspeed`, `torchrun`) share the shards of a split; each shard is computed by one process from its own
documents, so the result does not depend on their number. States that were recorded while the target answered
(`recording.py`) are linked, or copied from another disk; they differ from computed ones only in rounding. The
processes coordinate through the folder: the first one writes the manifest and marks it complete once all
shards are there. A collection that was killed continues with the missing shards.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.compute
import torch
from datasets import Dataset, DatasetDict
from rich.console import Console

from drafttrain.data.corpus import load_corpus
from drafttrain.hidden_states.fingerprints import corpus_fingerprint, mask_fingerprint
from drafttrain.hidden_states.recording import RecordedStates, recording_of, require_recording, states_folder
from drafttrain.hidden_states.shards import Link, plan_shards, temporary_folder, write_shard
from drafttrain.hidden_states.store import (
    MANIFEST,
    Document,
    Manifest,
    Shard,
    open_shard,
    read_manifest,
)
from drafttrain.kernels.build import variant
from drafttrain.target_lm.config import CollectConfig, stored_bytes
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.native import can_run_natively
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.progress import counted

PATIENCE_S = 3600.0  # without a new document, after which a process assumes that the others are dead
ALIVE = ".alive-{}"  # a rank's file, touched for each document


@dataclass
class CollectReport:
    """Sizes of a whole store, and the speed of this process in this attempt.

    Attributes:
        tokens_per_second: reused ones included.
        reused: tokens whose states were recorded while the target answered.
    """

    documents: int
    tokens: int
    skipped: int
    bytes: int
    wall_seconds: float
    tokens_per_second: float
    reused: int = 0


def collect(
    config: CollectConfig,
    target_model: str,
    tapped_blocks: Sequence[int],
    corpus: str | os.PathLike,
    out: str | os.PathLike,
    dtype: str = "auto",
    device: str = "auto",
    recorded: Sequence[Path] = (),
) -> CollectReport:
    """Load a target and store its states over a corpus; continue an interrupted collection.

    Args:
        target_model: what `load_target` takes.
        tapped_blocks: blocks to store; negative numbers count from the end.
        corpus: folder of the corpus stage.
        out: folder for one store per split.
        recorded: folders of states that were recorded while the target answered, besides those of
            `config.kept_in`. These states are not computed again.

    Raises:
        UserError: the corpus or the contents of `out` do not fit the target, the disk is too small or full,
            or too many documents have no finite states.
    """
    target = load_target(target_model, dtype=dtype, device=device)
    # torch's products use AMX better; else native ones are 6 % (AVX2) to 24 % (AVX-512, 512 tokens) faster
    if can_run_natively(target.base, target.config) and variant() != "amx_bf16":
        target.pack()
    target.tap(tapped_blocks)
    splits, _ = load_corpus(corpus, target.tokenizer)
    return collect_states(config, target, splits, out, recorded=recorded)


def collect_states(
    config: CollectConfig,
    target: FrozenTarget,
    splits: DatasetDict,
    out: str | os.PathLike,
    console: Console | None = None,
    recorded: Sequence[Path] = (),
) -> CollectReport:
    """Collect as `collect` does, with a target that is loaded and tapped. The splits have columns `id` and
    `input_ids`, and `loss_mask` if states were recorded."""
    out, begun = Path(out), time.monotonic()
    console = console or Console(quiet=_rank() > 0, soft_wrap=True)
    lengths = {name: _checked_lengths(target, split, name) for name, split in splits.items()}
    stored = "float32" if config.dtype == "float32" else "bfloat16"
    made_of = recording_of(target, target.tapped_blocks, stored)
    longest = max((n for one in lengths.values() for n in one), default=0)
    kept = [states_folder(Path(answers)) for answers in config.kept_in]
    begun_before = all((out / name / MANIFEST).exists() for name in splits)  # recordings may be gone by now
    for folder in kept if not begun_before else ():
        require_recording(folder, made_of)
    found = RecordedStates.open([*recorded, *kept], made_of, longest)
    parts = [
        _Collection(config, target, found, split, lengths[name], out / name, console)
        for name, split in splits.items()
    ]
    if _rank() == 0:
        for part in parts:
            part.refuse_foreign()
        _check_disk(config, parts, out, console)
    computed = sum(part.run() for part in parts)
    seconds = time.monotonic() - begun
    return CollectReport(
        documents=sum(part.manifest.documents for part in parts),
        tokens=sum(part.manifest.tokens for part in parts),
        skipped=sum(len(part.manifest.skipped) for part in parts),
        bytes=sum(part.bytes() for part in parts),
        wall_seconds=seconds,
        tokens_per_second=computed / seconds,
        reused=sum(part.reused for part in parts),
    )


def encode_documents(
    target: FrozenTarget, rows: Sequence[Sequence[int]], batch_tokens: int
) -> Iterator[tuple[int, Document]]:
    """Yield the states of each document, as (index in `rows`, states on the CPU), shortest first.

    They have the target's dtype.

    Args:
        rows: token ids of each document; empty ones are skipped.
        batch_tokens: tokens in a batch, padding included; a longer document is a batch of its own.
    """
    for batch in _batches([len(row) for row in rows], batch_tokens):
        width = len(rows[batch[-1]])
        ids = torch.zeros(len(batch), width, dtype=torch.long)  # [B, T]
        for i, index in enumerate(batch):
            ids[i, : len(rows[index])] = torch.tensor(rows[index])
        # padding follows a document, where causal attention does not see it
        with target.own_cores():
            states = target.encode(ids.to(target.device), torch.zeros_like(ids, device=target.device))
        tapped, final = states.tapped.cpu(), states.final.cpu()  # [B, T, K*H], [B, T, H]
        for i, index in enumerate(batch):
            n = len(rows[index])
            yield index, Document(ids[i, :n].clone(), tapped[i, :n].clone(), final[i, :n].clone())


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of document indices by length, longest last; batch size x longest <= batch_tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if lengths[index] == 0:
            continue
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class _Collection:
    """This process's part of the store of one split."""

    def __init__(
        self,
        config: CollectConfig,
        target: FrozenTarget,
        recorded: RecordedStates,
        split: Dataset,
        lengths: list[int],
        folder: Path,
        console: Console,
    ):
        self.config, self.target, self.recorded = config, target, recorded
        self.split, self.folder, self.console = split, folder, console
        self.lengths, self.reused = lengths, 0
        self.manifest = Manifest(
            target_name=target.name,
            target=target_info(target),
            corpus=corpus_fingerprint(split),
            dtype=str(target.dtype).removeprefix("torch."),
            documents=len(self.lengths),
            tokens=sum(self.lengths),
            bounds=plan_shards(self.lengths, config.shard_tokens),
            stored="float32" if config.dtype == "float32" else "bfloat16",
            masks=mask_fingerprint(split) if recorded.places else "",
        )

    def run(self) -> int:
        """Write this process's missing shards, wait for the others'; return the number of tokens written."""
        self._begin()
        mine = range(_rank(), self.manifest.n_shards, _world())
        done = {index: shard for index in mine if (shard := self._shard(index))}
        skipped = [name for shard in done.values() for name in shard.skipped]
        for index in mine:
            shutil.rmtree(temporary_folder(self.folder, index), ignore_errors=True)
        total, computed, begun = sum(map(self._tokens, mine)), 0, time.monotonic()
        earlier, title = sum(map(self._tokens, done)), f"hidden states, {self.folder.name}"
        with counted(title, total, "tokens", self.console, earlier) as advance:
            for index in mine:
                if index not in done:
                    skipped += self._collect_shard(index, skipped, advance)
                    computed += self._tokens(index)
                    rate = computed / (time.monotonic() - begun)
                    if not self.console.is_terminal:  # for each shard; `advance` prints a line a minute
                        line = f"{title}: {earlier + computed:,} of {total:,} tokens, {rate:,.0f} tokens/s"
                        self.console.print(line, highlight=False)
        self._finish()
        return computed

    def bytes(self, done: bool = False) -> int:
        """Return the bytes of the whole store, or of the shards that are done, without the recorded files."""
        shards = [k for k in range(self.manifest.n_shards) if not done or self._shard(k)]
        documents = sum(self.manifest.bounds[k + 1] - self.manifest.bounds[k] for k in shards)
        info = self.manifest.target
        tokens = sum(map(self._own_tokens, shards))
        sizes = info.hidden_size, len(info.tapped_blocks), self.manifest.stored
        return stored_bytes(tokens, documents, len(shards), *sizes)

    def refuse_foreign(self) -> None:
        """Raise UserError if the folder holds a store other than an earlier attempt at this collection."""
        if not (self.folder / MANIFEST).exists():
            return
        try:
            theirs = read_manifest(self.folder)
        except UserError as error:
            problem = str(error).rpartition(";")[0]
            raise UserError(
                f"{self.folder}: holds hidden states that cannot be read ({problem}); delete the folder or "
                "choose another"
            ) from None
        if theirs.key != self.manifest.key:
            difference = theirs.difference(self.manifest.target, self.manifest.corpus)
            raise UserError(
                f"{self.folder}: holds hidden states made with another "
                f"{difference or 'dtype or shard_tokens'}; delete the folder or choose another"
            )
        is_known = "loss_mask" in self.split.column_names
        if theirs.masks and is_known and theirs.masks != mask_fingerprint(self.split):  # some may be zeros
            raise UserError(
                f"{self.folder}: holds hidden states for other trained tokens; delete the folder or choose "
                "another"
            )

    def _shard(self, index: int) -> Shard | None:
        return open_shard(self.folder, index, self.manifest)

    def _tokens(self, index: int) -> int:
        return sum(self.lengths[self.manifest.bounds[index] : self.manifest.bounds[index + 1]])

    def _own_tokens(self, index: int) -> int:
        """Return the number of tokens whose states a shard holds, or will hold, itself."""
        if (shard := self._shard(index)) is not None:
            return shard.tensors["final"][1][0]
        if not self.recorded.places:
            return self._tokens(index)
        rows = self.split[self.manifest.bounds[index] : self.manifest.bounds[index + 1]]
        found = zip(rows["input_ids"], map(self.recorded.find, rows["input_ids"], rows["loss_mask"]))
        return sum(len(tokens) for tokens, one in found if one is None or not one.is_on_disk_of(self.folder))

    def _collect_shard(self, index: int, skipped: list[str], advance: Callable[[int], None]) -> list[str]:
        """Compute and write a shard; return the ids of its documents without finite states."""
        first, last = self.manifest.bounds[index : index + 2]
        rows = self.split[first:last]
        hidden, info = self.target.hidden_size, self.manifest.target
        dtype = getattr(torch, self.manifest.stored)
        empty = Document(
            torch.zeros(0, dtype=torch.long),
            torch.zeros(0, len(info.tapped_blocks) * hidden, dtype=dtype),
            torch.zeros(0, hidden, dtype=dtype),
        )
        documents: list[Document | Link] = [empty] * (last - first)
        bad = []
        alive = self.folder / ALIVE.format(_rank())
        for place, document in self._states(rows):
            advance(len(document.tokens))
            if _world() > 1:
                alive.touch()
            if isinstance(document, Link):
                documents[place] = document
                continue
            tapped, final = document.tapped.to(dtype), document.final.to(dtype)
            if tapped.isfinite().all() and final.isfinite().all():
                documents[place] = Document(document.tokens, tapped, final)
                continue
            bad.append(str(rows["id"][place]))
            self.console.print(
                f"{self.folder.name} row {first + place} ({bad[-1]}): NaN or infinite states; left out",
                markup=False,
            )
            self._refuse_skipped([*skipped, *bad])
        write_shard(self.folder, index, self.manifest, documents, sorted(bad))
        return bad

    def _states(self, rows: dict[str, list]) -> Iterator[tuple[int, Document | Link]]:
        """Yield (place in the shard, states): recorded ones first, then computed ones."""
        computed = list(rows["input_ids"])
        if self.recorded.places:
            for place, (tokens, trained) in enumerate(zip(rows["input_ids"], rows["loss_mask"])):
                if (found := self.recorded.find(tokens, trained)) is not None:
                    self.reused += len(tokens)
                    computed[place] = []
                    yield place, found.link(tokens, self.folder) or found.document(tokens)
        yield from encode_documents(self.target, computed, self.config.batch_tokens)

    def _refuse_skipped(self, skipped: list[str]) -> None:
        if len(skipped) > max(1, self.config.max_skipped * self.manifest.documents):
            raise UserError(
                f"{self.folder}: {len(skipped)} of {self.manifest.documents} documents have NaN or infinite "
                f"states ({', '.join(skipped[:3])}, …), above hidden_states.max_skipped = "
                f"{self.config.max_skipped:g}; compute the target in float32 or check its weights"
            )

    def _begin(self) -> None:
        """Write the manifest in the first process; wait for it in the others."""
        if _rank() == 0:
            if (self.folder / MANIFEST).exists() and not self.manifest.masks:  # some may be recorded
                self.manifest.masks = read_manifest(self.folder).masks
            for leftover in (*self.folder.glob(f".{MANIFEST}.*.tmp"), *self.folder.glob(".recorded-*.tmp")):
                leftover.unlink(missing_ok=True)
            self.manifest.write(self.folder)
            return
        _wait(
            lambda: int(not (self.folder / MANIFEST).exists()),
            f"{self.folder}: the first process wrote no manifest; see its output",
        )
        self.refuse_foreign()

    def _finish(self) -> None:
        """Wait for all shards; the first process then completes the manifest, and the others wait for it."""
        shards: dict[int, Shard] = {}

        def missing() -> int:
            for index in range(self.manifest.n_shards):
                if index not in shards and (shard := self._shard(index)):
                    shards[index] = shard
            return self.manifest.n_shards - len(shards)

        stopped = f"{self.folder}: the other processes have stopped; run the same command again"
        _wait(missing, stopped, [self.folder / ALIVE.format(rank) for rank in range(_world())])
        self.manifest.skipped = [name for index in sorted(shards) for name in shards[index].skipped]
        self._refuse_skipped(self.manifest.skipped)
        self.manifest.complete = True
        if _rank() == 0:
            linked = {path for shard in shards.values() for path in shard.files}
            for path in set(self.folder.glob("recorded-*")) - linked:  # of shards that were made again
                path.unlink()
            for path in self.folder.glob(ALIVE.format("*")):
                path.unlink()
            self.manifest.write(self.folder)
        _wait(lambda: int(not read_manifest(self.folder).complete), stopped)


def _checked_lengths(target: FrozenTarget, split: Dataset, name: str) -> list[int]:
    """Return the number of tokens of each document.

    Raises:
        UserError: a document has an id that the target does not know, or more tokens than it has positions.
    """
    lengths: list[int] = []
    longest = target.positions
    for batch in split.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        column = batch["input_ids"].combine_chunks()
        rows = column.value_lengths().to_pylist()
        if max(rows) > longest:
            row = len(lengths) + rows.index(max(rows))
            raise UserError(
                f"corpus, {name} row {row}: {max(rows)} tokens, and {target.name} has {longest} positions; "
                "make the corpus again with a smaller max_length"
            )
        largest = pyarrow.compute.max(column.flatten()).as_py()
        if largest is not None and largest >= target.vocab_size:
            raise UserError(
                f"corpus, {name} rows {len(lengths)} to {len(lengths) + len(rows) - 1}: token id {largest}, "
                f"and {target.name} has {target.vocab_size}; make the corpus with the target's own tokenizer"
            )
        lengths += rows
    return lengths


def _check_disk(config: CollectConfig, parts: Sequence[_Collection], out: Path, console: Console) -> None:
    """Print how much will be written; raise UserError if it is too much."""
    total, stored = sum(part.bytes() for part in parts), sum(part.bytes(done=True) for part in parts)
    manifests = [part.manifest for part in parts]
    console.print(
        f"hidden states: {sum(m.documents for m in manifests):,} documents, "
        f"{sum(m.tokens for m in manifests):,} tokens: {_size(total)} in "
        f"{sum(m.n_shards for m in manifests)} shards in {out}"
        + (f"; {_size(stored)} are there already" if stored else "")
    )
    if total > config.max_disk_gb * 1e9:
        raise UserError(
            f"{out}: hidden states would take {_size(total)}, above hidden_states.max_disk_gb = "
            f"{config.max_disk_gb:g}; raise it, take fewer documents, or set hidden_states.mode to online"
        )
    require_free_disk(out, total - stored, "storing hidden states")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def _wait(missing: Callable[[], int], message: str, alive: Sequence[Path] = ()) -> None:
    """Return when nothing is missing; raise UserError if neither the number nor a file has changed for
    `PATIENCE_S`."""
    last, deadline = None, 0.0
    while n := missing():
        now = n, list(map(_changed, alive))
        if now != last:
            last, deadline = now, time.monotonic() + PATIENCE_S
        if time.monotonic() > deadline:
            raise UserError(message)
        time.sleep(0.2)


def _changed(file: Path) -> int:
    """Return the time of a file's last change in ns; 0 where there is none."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)
