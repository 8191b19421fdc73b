"""Read conversations and documents from files, folders and archives, one at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.data.config import Format
from drafttrain.data.conversation import Conversation
from drafttrain.data.documents import clean_document
from drafttrain.data.message import Message
from drafttrain.data.rows import row_to_conversation, well_formed
from drafttrain.data.streams import JSON_LINES, TEXT, Stream, open_streams, read_text, read_values
from drafttrain.utils.errors import UserError

_ROWS = (".json", ".parquet", *JSON_LINES)


@dataclass
class ReadReport:
    """Counts of the rows or documents of one source; at the end, `read` is `kept` plus the sum of `skipped`.

    Attributes:
        read: rows seen.
        kept: conversations yielded, or, in a corpus's report, kept.
        skipped: number of rows by reason.
        repairs: number of changes by kind.
        files_left_out: number of files in a folder or archive that are no training data, by suffix.
        cleaned: number of changes that `clean_document` made, by kind.
    """

    read: int = 0
    kept: int = 0
    skipped: Counter = field(default_factory=Counter)
    repairs: Counter = field(default_factory=Counter)
    files_left_out: Counter = field(default_factory=Counter)
    cleaned: Counter = field(default_factory=Counter)


def read_conversations(
    path: str | Path, format: Format = "auto", report: ReadReport | None = None
) -> Iterator[Conversation]:
    """Read chats or documents from a file, a folder or an archive.

    Files may be JSON (an array or one object), JSON lines, Parquet or plain text, each also gzipped, and may
    be in a folder, a zip or a tar archive. The order of turns is not repaired (`tidy.tidy` does that), so
    that prompts without an answer can be read too.

    Args:
        path: file, folder or archive.
        format: "sharegpt" (`conversations` with `from`/`value`; MOSS too), "messages" (OpenAI), "alpaca"
            (`instruction`, `input`, `output`/`response`; also `question`/`answer` and `prompt`/`response`),
            "text" (each file, or each row's `text`, is a document), "oanc" (the same, known to be prose: see
            `clean_document`), or "auto": by file name and each row's keys.
        report: receives the counts.

    Raises:
        UserError: input that is unreadable, cut off or empty, rows of another format, unknown roles. The
            message names file and row.
    """
    report = ReadReport() if report is None else report
    for stream in open_streams(path):
        for row, value in _values(stream, format, report):
            report.read += 1
            source, name = stream.source, stream.name
            if row:
                source, name = f"{source}:row {row}", f"{name}:{row}"
            source, name = well_formed(source), well_formed(name)  # of a file whose name is not UTF-8
            if isinstance(value, str) and not row:
                conversation = Conversation(name, [Message("text", value)], source)
            else:
                counts = (report.skipped, report.repairs)
                conversation = row_to_conversation(value, format, name, source, *counts)
            if conversation is None:
                continue
            if conversation.is_text:
                raw = conversation.messages[0].content
                text = clean_document(raw, prose=format == "oanc", counts=report.cleaned)
                if not text:
                    report.skipped["empty document"] += 1
                    continue
                conversation.messages[0].content = text
            report.kept += 1
            yield conversation
    if report.read == 0:
        raise UserError(f"{path}: no rows and no documents in it; give .json, .jsonl, .parquet or .txt files")


def _values(stream: Stream, format: Format, report: ReadReport) -> Iterator[tuple[int, Any]]:
    """Yield (row, decoded JSON) pairs of one file, or (0, text) for a document."""
    suffix = stream.suffix
    if not stream.given and (stream.is_companion or suffix not in (*_ROWS, *TEXT)):
        report.files_left_out[suffix or "no suffix"] += 1
    elif suffix in _ROWS:
        for row, value in read_values(stream):
            calls = None
            if isinstance(value, dict) and ("rounds" in value or "trees" in value):
                from drafttrain.data.thoughts import rows_of_trees

                calls = rows_of_trees(value, f"{stream.source}:row {row}")
            yield from ((row, call) for call in ([value] if calls is None else calls))
    elif format in ("text", "oanc") or suffix in TEXT:
        if format not in ("auto", "text", "oanc"):
            raise UserError(
                f"{stream.source}: format must be text or auto for a {suffix} file, got {format}; change it"
            )
        yield 0, read_text(stream)
    elif format != "auto":
        yield from read_values(stream)
    else:
        raise UserError(
            f"{stream.source}: suffix must be .json, .jsonl, .parquet or .txt, got {suffix!r}; rename the "
            "file, or give the source a format"
        )
