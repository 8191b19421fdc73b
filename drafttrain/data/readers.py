"""Conversations and documents out of files, folders and archives, one at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.data.config import Format
from drafttrain.data.conversation import Conversation, Message
from drafttrain.data.documents import clean_document
from drafttrain.data.rows import row_to_conversation
from drafttrain.data.streams import (
    Stream,
    open_streams,
    read_json_values,
    read_jsonl,
    read_parquet,
    read_text,
)
from drafttrain.utils.errors import UserError

_JSON_LINES = (".jsonl", ".ndjson")
_ROWS = (".json", ".parquet", *_JSON_LINES)
_TEXT = (".txt", ".text")


@dataclass
class ReadReport:
    """What became of the rows (documents) of one source; `read == kept + sum of skipped`, always.

    Attributes:
        read: rows seen.
        kept: conversations yielded.
        skipped: reason → number of rows.
        repairs: what was changed → how often.
        files_left_out: name ending → files of a folder or archive that are no training data.
        cleaned: what `clean_document` changed in documents → how often.
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
    """Reads chats or documents from a file, a folder or an archive.

    Files may be JSON (an array or one object), JSON lines, Parquet or plain text, each also gzipped, and may
    lie in a folder, a zip or a tar archive. Turns come as they are (`conversation.tidy` mends them), so that
    prompts without an answer can be read too.

    Args:
        path: what to read.
        format: "sharegpt" (`conversations` with `from`/`value`; MOSS too), "messages" (OpenAI), "alpaca"
            (`instruction`, `input`, `output`/`response`; also `question`/`answer` and `prompt`/`response`),
            "text" (each file, or each row's `text`, is a document), "oanc" (the same, known to be prose:
            see `clean_document`), or "auto": by file name and each row's keys.
        report: receives the counts.

    Raises:
        UserError: unreadable, cut off or empty input, rows that are not of the format, unknown roles. The
            message names file and row.
    """
    report = ReadReport() if report is None else report
    for stream in open_streams(path):
        for row, value in _values(stream, format, report):
            report.read += 1
            source = f"{stream.source}:row {row}" if row else stream.source
            name = f"{stream.name}:{row}" if row else stream.name
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
        raise UserError(
            f"{path}: holds no rows and no documents; expected .json, .jsonl, .parquet or .txt files"
        )


def _values(stream: Stream, format: Format, report: ReadReport) -> Iterator[tuple[int, Any]]:
    """(row, decoded JSON) pairs of one file, or (0, text) for a document."""
    suffix = stream.suffix
    if not stream.given and (stream.is_companion or suffix not in _ROWS + _TEXT):
        report.files_left_out[suffix or "no suffix"] += 1
    elif suffix in _JSON_LINES:
        yield from read_jsonl(stream)
    elif suffix == ".json":
        yield from read_json_values(stream)
    elif suffix == ".parquet":
        yield from read_parquet(stream)
    elif format in ("text", "oanc") or suffix in _TEXT:
        if format not in ("auto", "text", "oanc"):
            raise UserError(f"{stream.source}: a {suffix} file is no {format} file; use format text or auto")
        yield 0, read_text(stream)
    elif format != "auto":
        yield from read_json_values(stream)  # JSON lines too
    else:
        raise UserError(
            f"{stream.source}: the ending {suffix!r} does not tell what it holds; name it .json, .jsonl, "
            ".parquet or .txt, or give the source a format"
        )
