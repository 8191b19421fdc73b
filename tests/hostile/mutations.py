"""Damaged and hostile versions of files, by kind of file.

Each mutation has a name, the new bytes, and whether a command that needs the file must refuse it: some
changes of values are allowed to go through, but none may end in a traceback or a hang.
"""

import copy
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRONG: dict[str, Any] = {  # for any value of a JSON or YAML file
    "null": None,
    "text": "x",
    "empty text": "",
    "negative": -1,
    "zero": 0,
    "huge": 10**30,
    "fraction": 0.5,
    "infinite": math.inf,
    "NaN": math.nan,
    "list": [],
    "nested list": [[[]]],
    "dict": {},
    "true": True,
    "NUL": "a\0b",
    "newline": "a\nb",
}
DEEP = 100_000


@dataclass(frozen=True)
class Mutation:
    """A changed file.

    Attributes:
        content: None removes the file; "folder", "fifo" and "link" put that in its place.
        must_fail: whether a command that reads the file has to refuse it.
    """

    name: str
    content: bytes | str | None
    must_fail: bool = True

    def apply(self, path: Path) -> None:
        """Change a file."""
        import os

        path.unlink()
        if self.content == "folder":
            path.mkdir()
        elif self.content == "fifo":
            os.mkfifo(path)
        elif self.content == "link":
            path.symlink_to(path)
        elif self.content is not None:
            path.write_bytes(self.content)


def any_file(content: bytes) -> Iterator[Mutation]:
    """Yield what can happen to any file."""
    yield Mutation("removed", None)
    yield Mutation("folder", "folder")
    yield Mutation("fifo", "fifo")
    yield Mutation("link to itself", "link")
    yield Mutation("empty", b"")
    yield Mutation("cut in half", content[: len(content) // 2])
    yield Mutation("zeros", b"\0" * len(content))
    yield Mutation("random bytes", bytes((i * 97 + 13) % 256 for i in range(4096)))
    yield Mutation("UTF-16", b"\xff\xfe" + "{}".encode("utf-16-le"))


def json_file(content: bytes, known: bool = True) -> Iterator[Mutation]:
    """Yield damaged JSON and changed values of a JSON file."""
    yield from any_file(content)
    yield Mutation("deep list", b"[" * DEEP)
    yield Mutation("deep closed list", b"[" * DEEP + b"]" * DEEP)
    yield Mutation("many digits", b"9" * 10_000)
    for name in ("null", "text", "list", "zero"):
        yield Mutation(f"is {name}", json.dumps(WRONG[name]).encode())
    yield Mutation("is empty dict", b"{}")
    yield Mutation("twice", content + content)
    value = json.loads(content)
    for place in places(value):
        yield Mutation(f"without {shown(place)}", encoded(without(value, place)), False)
        for name, wrong in WRONG.items():
            yield Mutation(f"{shown(place)} {name}", encoded(changed(value, place, wrong)), False)


def yaml_file(content: bytes) -> Iterator[Mutation]:
    """Yield damaged YAML."""
    yield from any_file(content)
    yield Mutation("tab", content + b"\n\tx: 1\n")
    yield Mutation("tag", content + b"\nx: !!python/object/apply:os.system ['touch ran']\n")
    yield Mutation("unknown tag", content + b"\nx: !thing 1\n")
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    yield Mutation("aliases", content + b"\n" + bomb.encode())
    yield Mutation("alias of itself", content + b"\nx: &x [*x]\n")
    yield Mutation("deep", b"[" * 3000)
    yield Mutation("twice the same key", content + b"\n" + content)
    yield Mutation("several documents", content + b"\n---\n" + content)
    yield Mutation("many digits", content + b"\nseed: " + b"9" * 10_000 + b"\n")


def json_lines(content: bytes) -> Iterator[Mutation]:
    """Yield damaged lines of a .jsonl file."""
    yield from any_file(content)
    first, _, rest = content.partition(b"\n")
    for mutation in json_file(first):
        if isinstance(mutation.content, bytes):
            yield Mutation(f"line 1: {mutation.name}", mutation.content + b"\n" + rest, False)
    yield Mutation("long line", b'{"x": "' + b"a" * 3_000_000 + b'"}\n' + content, False)
    yield Mutation("carriage returns", content.replace(b"\n", b"\r"), False)


def safetensors_file(content: bytes) -> Iterator[Mutation]:
    """Yield damaged headers and values of a file of tensors."""
    yield from any_file(content)
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    yield Mutation("header too long", struct.pack("<Q", 1 << 62) + content[8:])
    yield Mutation("header past the end", struct.pack("<Q", len(content)) + content[8:])
    yield Mutation("no data", content[: 8 + length])
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        yield Mutation(f"without {name}", tensors({k: v for k, v in header.items() if k != name}, data))
        other = copy.deepcopy(header)
        other[name]["shape"] = [1, *other[name]["shape"]]
        yield Mutation(f"{name} of another shape", tensors(other, data))
        begin, end = header[name]["data_offsets"]
        if header[name]["dtype"] in ("F32", "BF16", "F16"):
            nan = {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\0\x7e"}[header[name]["dtype"]]
            spoiled = data[:begin] + nan + data[begin + len(nan) :]
            yield Mutation(f"NaN in {name}", tensors(header, spoiled))
    renamed = {("x" + name if name == names[0] else name): value for name, value in header.items()}
    yield Mutation("a tensor renamed", tensors(renamed, data))


def tensors(header: dict[str, Any], data: bytes) -> bytes:
    """Return a safetensors file."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def places(value: Any, limit: int = 60) -> list[tuple]:
    """Return the paths of values within a JSON value: all keys, and the first element of lists."""
    found: list[tuple] = []

    def walk(part: Any, path: tuple) -> None:
        inner = (
            part.items() if isinstance(part, dict) else enumerate(part[:1]) if isinstance(part, list) else ()
        )
        for key, below in inner:
            found.append((*path, key))
            walk(below, (*path, key))

    walk(value, ())
    return found[:: max(1, -(-len(found) // limit))]


def changed(value: Any, place: tuple, wrong: Any) -> Any:
    """Return a copy with another value at a place."""
    twin = copy.deepcopy(value)
    part = twin
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = wrong
    return twin


def without(value: Any, place: tuple) -> Any:
    """Return a copy without the value at a place."""
    twin = copy.deepcopy(value)
    part = twin
    for key in place[:-1]:
        part = part[key]
    del part[place[-1]]
    return twin


def encoded(value: Any) -> bytes:
    """Return JSON, with NaN and infinity as Python writes them."""
    return json.dumps(value).encode()


def shown(place: tuple) -> str:
    """Return the path of a value."""
    return ".".join(map(str, place))
