"""The file of regenerated conversations while it is being made, and the counts of its rows.

Rows are appended to `responses.partial.jsonl` as they come, in whole lines even if the process is killed.
When all are there they are put into the order of the input and the file becomes `responses.jsonl`.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import require_file

RESPONSES, PARTIAL, FAILED = "responses.jsonl", "responses.partial.jsonl", "failed.jsonl"


@dataclass
class RegenerateReport:
    """Counts of the rows by outcome; at the end, `read == written + failed + sum of skipped`.

    Attributes:
        read: rows of the sources.
        written: conversations in `responses.jsonl`.
        failed: conversations in `failed.jsonl`, with the reason.
        skipped: reason → rows that were not tried.
        failures: reason → conversations.
        turns: answers written.
        tokens: their tokens, end-of-turn tokens included.
        greedy: conversations answered greedily.
        cut: conversations whose last answer ended at max_new_tokens.
        ended_early: conversations with fewer turns than asked for, because of max_prompt_tokens.
        retokenized: conversations with token ids that were made from the text.
    """

    read: int = 0
    written: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    tokens: int = 0
    greedy: int = 0
    cut: int = 0
    ended_early: int = 0
    retokenized: int = 0

    @property
    def is_balanced(self) -> bool:
        """Return whether every row that was read is counted once."""
        return self.read == self.written + self.failed + sum(self.skipped.values())

    def add(self, row: dict[str, Any], n_asked: int) -> None:
        """Count a written row, of whose conversation `n_asked` turns were to be answered."""
        answers = [turn for turn in row["conversations"] if turn["from"] == "gpt"]
        self.written += 1
        self.turns += len(answers)
        self.tokens += sum(len(turn["token_ids"]) for turn in answers)
        self.greedy += row["temperature"] == 0
        self.cut += row["finish_reason"] == "length"
        self.ended_early += len(answers) < n_asked
        self.retokenized += row.get("retokenized", False)

    def describe(self) -> str:
        """Return the counts in a few lines."""
        lines = [
            f"{self.read} rows read = {self.written} written + {self.failed} failed + "
            f"{sum(self.skipped.values())} skipped",
            f"{self.turns} answers, {self.tokens} tokens; {self.greedy} conversations greedy, {self.cut} "
            f"ended at max_new_tokens, {self.ended_early} at max_prompt_tokens",
        ]
        for name, reasons in (("skipped", self.skipped), ("failed", self.failures)):
            lines += [f"{name}: {count} x {reason}" for reason, count in Counter(reasons).most_common()]
        if self.failed:
            lines.append(f"see {FAILED}; the same command tries them again, in a run with --again")
        if self.retokenized:
            lines.append(
                f"{self.retokenized} conversations tokenized from text: the server returned no token ids"
            )
        return "\n  ".join(lines)


class ResponseFile:
    """The rows of one output folder.

    Attributes:
        places: id → (first byte, number of bytes) of each row in the partial file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.final, self.partial, self.failed = folder / RESPONSES, folder / PARTIAL, folder / FAILED
        self.places: dict[str, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None
        self._failures: IO[bytes] | None = None

    def recover(self) -> Iterator[dict[str, Any]]:
        """Open the file, cut off a half-written last line and yield the rows that are there.

        Earlier failures are forgotten: those conversations are tried again.

        Raises:
            UserError: a line before the last one is damaged, or an id occurs twice.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.final.exists():
            # With both, the process died between making one and removing the other: the final one is whole.
            os.replace(self.final, self.partial)
        require_file(self.partial)
        self._file = open(self.partial, "ab+")
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        start = 0
        for number, line in enumerate(iter(self._file.readline, b""), 1):
            row = _parse(line)
            if row is None:
                if start + len(line) < end:
                    raise UserError(f"{self.partial}: line {number} is damaged; remove it and run again")
                break
            if row["id"] in self.places:
                raise UserError(f"{self.partial}: line {number}: id {row['id']!r} occurs twice; remove one")
            self.places[row["id"]] = (start, len(line))
            start += len(line)
            yield row
        self._file.truncate(start)
        self._failures = open(self.failed, "wb")

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; once this returns, the row survives the end of the process.

        Raises:
            UserError: the disk is full.
        """
        start = self._file.seek(0, os.SEEK_END)
        self.places[row["id"]] = (start, _write(self._file, row))

    def append_failure(self, row: dict[str, Any]) -> None:
        """Write the entry of a conversation that failed into `failed.jsonl`."""
        _write(self._failures, row)

    def finish(self, order: Sequence[str]) -> None:
        """Make `responses.jsonl`, its rows in the given order of ids; remove an empty `failed.jsonl`.

        Raises:
            UserError: the disk is full.
        """
        temporary = self.folder / f".{RESPONSES}.tmp"
        try:
            with open(temporary, "wb") as file:
                for start, size in (self.places[id] for id in order if id in self.places):
                    self._file.seek(start)
                    file.write(self._file.read(size))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.final)
        except OSError as error:
            raise UserError(_cannot_write(self.final, error)) from None
        finally:
            temporary.unlink(missing_ok=True)
        self.close()
        self.partial.unlink()

    def close(self) -> None:
        """Close the files, from which `recover` continues; remove an empty `failed.jsonl`."""
        for file in (self._file, self._failures):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk, which was reported when the row was written
                    file.close()
        if self.failed.exists() and self.failed.stat().st_size == 0:
            self.failed.unlink()


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole rows of another run's folder, finished or not, without changing it."""
    for path in (folder / RESPONSES, folder / PARTIAL):
        if path.exists():
            require_file(path)
            with open(path, "rb") as file:
                yield from (row for line in file if (row := _parse(line)) is not None)
            return


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if the line is cut off or damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("id"), str) else None


def _write(file: IO[bytes], row: dict[str, Any]) -> int:
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    try:
        file.write(line)
        file.flush()
    except OSError as error:
        raise UserError(_cannot_write(Path(file.name), error)) from None
    return len(line)


def _cannot_write(path: Path, error: OSError) -> str:
    return (
        f"{path}: cannot be written ({error.strerror}); free some disk space and run the same command again"
    )
