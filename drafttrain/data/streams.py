"""Read files, folders and archives as streams of bytes, lines and JSON values.

Input that is unreadable, cut off or not UTF-8 becomes a `UserError` that names the file and, if there is one,
the row. Nothing is unpacked to disk, and rows are decoded one at a time.
"""

import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import require_file

_BLANK = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n,]*")  # between values
JSON_LINES = (".jsonl", ".ndjson")
TEXT = (".txt", ".text")
# Beginnings of the names of text files that describe a collection and are not documents of it.
_COMPANIONS = ("readme", "license", "licence", "copying", "notice", "categories")


@dataclass
class Stream:
    """One file's bytes, to be read before the next stream is requested.

    Attributes:
        source: the file's full name, for messages ("chats.zip/part/a.json").
        name: its name relative to the given path ("part/a.json"), without ".gz".
        bytes: the decompressed bytes.
        given: whether it is the given path itself rather than a file in a folder or an archive.
    """

    source: str
    name: str
    bytes: IO[bytes]
    given: bool

    @property
    def suffix(self) -> str:
        """Return ".json", ".txt", …, in lower case."""
        return PurePosixPath(self.name).suffix.lower()

    @property
    def is_companion(self) -> bool:
        """Return whether this is a text file that describes its folder or archive, such as README.txt."""
        stem = PurePosixPath(self.name).stem.lower()
        return not self.given and self.suffix in TEXT and stem.startswith(_COMPANIONS)


def open_streams(path: str | Path) -> Iterator[Stream]:
    """Open a file, every file of a folder, or every member of a zip or tar archive (also gzipped).

    Files of folders and zip archives are ordered by a hash of their names. This mixes subfolders, so that the
    first n files are a sample of the whole collection.

    Raises:
        UserError: the path does not exist, or an archive is damaged, cut off or encrypted.
    """
    path = Path(path)
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
        for name in _mixed(files):
            with readable(str(files[name])):
                for stream in _open_file(files[name]):
                    folder = PurePosixPath(name).parent if stream.given else PurePosixPath(name)
                    yield Stream(stream.source, str(folder / stream.name), stream.bytes, given=False)
    else:
        yield from _open_file(path)


def _open_file(path: Path) -> Iterator[Stream]:
    source, name = str(path), path.name.lower()
    require_file(path)
    with readable(source):
        if name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for member in _mixed(n for n in archive.namelist() if not n.endswith("/")):
                    with readable(f"{source}/{member}"), archive.open(member) as file:
                        yield _member(source, member, file)
        elif name.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(path) as archive:
                for entry in archive:
                    if entry.isfile() and _wanted(entry.name):
                        yield _member(source, entry.name, archive.extractfile(entry))
        else:
            with gzip.open(path) if name.endswith(".gz") else open(path, "rb") as file:
                inner = path.name[:-3] if name.endswith(".gz") else path.name
                yield Stream(source, inner, file, given=True)


def _member(source: str, name: str, file: IO[bytes]) -> Stream:
    if name.lower().endswith(".gz"):
        return Stream(f"{source}/{name}", name[:-3], gzip.open(file), given=False)
    return Stream(f"{source}/{name}", name, file, given=False)


def _wanted(name: str) -> bool:
    return not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


def _mixed(names) -> list[str]:
    return sorted(filter(_wanted, names), key=lambda name: hashlib.sha256(os.fsencode(name)).digest())


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turn the exceptions of reading a file into a `UserError` that starts with `where`."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{where}: no such file or folder") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{where}: not UTF-8 (byte 0x{byte:02x} at {error.start}); convert the file, "
            "for example with iconv -f latin1 -t utf-8"
        ) from None
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{where}: damaged or cut off ({brief(error)}); fetch the file again") from None
    except (OSError, RuntimeError, NotImplementedError) as error:  # zipfile: encrypted, unknown compression
        raise UserError(f"{where}: cannot be read ({brief(error)}); give another file") from None


def read_values(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) pairs of a Parquet, JSON-lines or JSON file, by its suffix; JSON is the default.

    Raises:
        UserError: damaged, cut off or not UTF-8.
    """
    if stream.suffix == ".parquet":
        return read_parquet(stream)
    return read_jsonl(stream) if stream.suffix in JSON_LINES else read_json_values(stream)


def read_text(stream: Stream) -> str:
    """Return the whole file as text.

    Raises:
        UserError: damaged or not UTF-8.
    """
    with readable(stream.source):
        return stream.bytes.read().decode("utf-8-sig")


def read_lines(stream: Stream) -> Iterator[tuple[int, str]]:
    r"""Yield (row, line) pairs, rows from 1, split at "\n" only, without blank lines.

    `str.splitlines` would also split rows at U+2028 and the like, which are legal inside JSON strings.

    Raises:
        UserError: damaged or not UTF-8; names the row.
    """
    row = 0
    while True:
        with readable(f"{stream.source}:row {row + 1}"):
            raw = stream.bytes.readline()
            if not raw:
                return
            line = raw.decode("utf-8-sig" if row == 0 else "utf-8")
        row += 1
        if line.strip():
            yield row, line


def read_jsonl(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) pairs of a JSON-lines file.

    Raises:
        UserError: a row is not JSON.
    """
    for row, line in read_lines(stream):
        try:
            yield row, json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
            cut = "" if line.endswith("\n") else " (the file seems cut off here: fetch it again)"
            raise UserError(
                f"{stream.source}:row {row}: not JSON: {error}{cut}; fix or remove the row"
            ) from None


def read_json_values(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) pairs of a JSON file: the elements of one array, or successive values.

    The whole text is held in memory; its rows are decoded one at a time.

    Raises:
        UserError: not JSON, or cut off; names the row.
    """
    text, decoder, row = read_text(stream), json.JSONDecoder(), 0
    position = _BLANK.match(text).end()
    in_array = text.startswith("[", position)
    position = _BLANK.match(text, position + in_array).end()
    while position < len(text) and not (in_array and text[position] == "]"):
        row += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
            problem = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(
                f"{stream.source}:row {row}: not JSON, or cut off ({problem}); fix it or fetch it again"
            ) from None
        yield row, value
        between = _SEPARATOR.match(text, position)
        position = between.end()
        is_open = in_array and position < len(text) and text[position] != "]"
        if is_open and between[0].count(",") != 1:
            raise UserError(
                f"{stream.source}:row {row}: must be followed by one comma, got "
                f"{between[0].count(',')}; fix the file"
            )
    if in_array and position == len(text):
        raise UserError(f"{stream.source}: cut off after row {row} (no closing bracket); fetch it again")
    if text[position + in_array :].strip():
        raise UserError(f"{stream.source}: text after the closing bracket; fix the file")


def read_parquet(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) pairs of a Parquet file, without the keys that hold null, as JSON would lack them.

    Raises:
        UserError: damaged, or not a Parquet file.
    """
    import pyarrow  # imported here, as only Parquet files need it
    from pyarrow import parquet

    with readable(stream.source):
        # members of archives may not be able to seek
        raw = stream.bytes if isinstance(stream.bytes, io.BufferedReader) else io.BytesIO(stream.bytes.read())
    row = 0
    try:
        for batch in parquet.ParquetFile(raw).iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                row += 1
                yield row, without_nulls(value)
    except (pyarrow.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
        raise UserError(
            f"{stream.source}: damaged, or no Parquet file ({brief(error)}); fetch it again"
        ) from None


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold null, at any depth: tables have all keys in every row."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
