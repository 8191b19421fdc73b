"""Damaged and hostile versions of files, by kind of file.

Each mutation has a name, the new bytes, and whether a command that needs the file must refuse it: some
changes of values are allowed to go through, but none may end in a traceback or a hang.
"""

import copy
import gzip
import io
import json
import math
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

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
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # several times as fast
DEEP = 100_000
TENSORS = 6  # of a file that are spoiled


@dataclass(frozen=True)
class Mutation:
    """A changed file.

    Attributes:
        content: None removes the file; "folder", "fifo" and "link" put that in its place.
        must_fail: whether a command that reads the file has to refuse it.
        beside: further files in its folder, by name.
    """

    name: str
    content: bytes | str | None
    must_fail: bool = True
    beside: tuple[tuple[str, bytes], ...] = ()

    def apply(self, path: Path) -> None:
        """Change a file."""
        path.unlink()
        for name, content in self.beside:
            (path.parent / name).write_bytes(content)
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


def json_file(content: bytes, limit: int = 10) -> Iterator[Mutation]:
    """Yield damaged JSON and changed values of a JSON file, at up to `limit` places."""
    yield from any_file(content)
    yield Mutation("deep list", b"[" * DEEP)
    yield Mutation("deep closed list", b"[" * DEEP + b"]" * DEEP)
    yield Mutation("many digits", b"9" * 10_000)
    for name in ("null", "text", "list", "zero"):
        yield Mutation(f"is {name}", json.dumps(WRONG[name]).encode())
    yield Mutation("is empty dict", b"{}")
    yield Mutation("twice", content + content)
    value = json.loads(content)
    for place in places(value, limit):
        yield Mutation(f"without {shown(place)}", encoded(without(value, place)), False)
        for name, wrong in WRONG.items():
            yield Mutation(f"{shown(place)} {name}", encoded(changed(value, place, wrong)), False)


def yaml_file(content: bytes, limit: int = 25) -> Iterator[Mutation]:
    """Yield damaged YAML and changed values of it, at up to `limit` places."""
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
    value = yaml.safe_load(content)
    for place in places(value, limit):
        yield Mutation(f"without {shown(place)}", dumped(without(value, place)), False)
        for name, wrong in WRONG.items():
            yield Mutation(f"{shown(place)} {name}", dumped(changed(value, place, wrong)), False)


def json_lines(content: bytes, limit: int = 10) -> Iterator[Mutation]:
    """Yield damaged lines of a .jsonl file."""
    yield from any_file(content)
    first, _, rest = content.partition(b"\n")
    for mutation in json_file(first, limit):
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
    for name in names[:: max(1, -(-len(names) // TENSORS))]:
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


class Command:
    """An object whose pickle runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("touch ran",)


EVIL = b"import os\nos.system('touch ran')\nclass Evil:\n    pass\n"


def pickles(content: bytes) -> Iterator[Mutation]:
    """Yield weights that are pickles."""
    evil = pickle.dumps(Command())
    for name in ("pytorch_model.bin", "model.pt", "adapter_model.bin"):
        yield Mutation(f"{name} in its place", None, beside=((name, evil),))
    yield Mutation("is a pickle", evil)
    yield Mutation("pickle beside it", content + b"\0", beside=(("pytorch_model.bin", evil),))


def remote_code(content: bytes) -> Iterator[Mutation]:
    """Yield configs that name code of their own."""
    value, file = json.loads(content), (("evil.py", EVIL),)
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    auto = {name: "evil.Evil" for name in classes}
    yield Mutation("auto_map", encoded({**value, "auto_map": auto}), False, file)
    yield Mutation(
        "auto_map, new type", encoded({**value, "auto_map": auto, "model_type": "evil"}), False, file
    )
    other = {**value, "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    yield Mutation("tokenizer of its own", encoded(other), False, file)
    yield Mutation("custom generation", encoded({**value, "custom_generate": "evil"}), False, file)


def template(content: bytes) -> Iterator[Mutation]:
    """Yield chat templates that do not end, explode, raise or reach for what is outside."""
    yield from any_file(content)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    double = (
        "{% set n = namespace(x='xxxxxxxxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    )
    outside = "''.__class__.__mro__[1].__subclasses__()"
    programs = {
        "endless": loop,
        "endless after the turns": content.decode() + loop,
        "doubling": double,
        "doubling, shown": double + "{{ n.x }}",
        "long output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "long text": "{{ 'x' * 10 ** 11 }}",
        "wide": "{{ 'x'.ljust(10 ** 11) }}",
        "large power": "{{ 10 ** (10 ** 10) }}",
        "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "raises": "{{ raise_exception('first line\nsecond line') }}",
        "divides by zero": "{{ 1 // 0 }}",
        "attributes": "{{ " + outside + " }}",
        "globals": "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
        "import": "{% import 'os' as os %}{{ os.system('touch ran') }}",
        "include": "{% include '/etc/passwd' %}",
        "no end of a block": "{% for a in messages %}",
        "unknown filter": "{{ messages | nothing }}",
        "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "deep blocks": "{% if true %}" * 300 + "x" + "{% endif %}" * 300,
    }
    for name, text in programs.items():
        yield Mutation(name, text.encode(), must_fail=name not in ("attributes", "globals", "deep blocks"))
    yield Mutation("undefined", b"{{ messages[99].content }}x", False)


def archive(content: bytes) -> Iterator[Mutation]:
    """Yield archives that reach outside, are encrypted, or hold each other."""
    yield from any_file(content)
    row = b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n'
    for name in ("../ran", "/tmp/../ran", "a/../../ran", "ran\0.jsonl", "../ran.jsonl", "a" * 300 + ".jsonl"):
        yield Mutation(f"member {name[:20]!r}", zipped({name: row}), False)
    yield Mutation("no member", zipped({}))
    yield Mutation("itself", zipped({"inner.zip": content}), False)
    yield Mutation("a tar", tarred("../ran.jsonl", row), False)
    flags = bytearray(zipped({"x.jsonl": row}))
    at = flags.index(b"PK\x01\x02") + 8
    flags[6] |= 1
    flags[at] |= 1
    yield Mutation("encrypted", bytes(flags))


def gzipped(content: bytes) -> Iterator[Mutation]:
    """Yield damaged .gz files, and one that is a thousand times as large as it looks."""
    yield from any_file(content)
    yield Mutation("wrong checksum", content[:-8] + b"\0" * 8)
    yield Mutation("bytes after its end", content + b"x" * 100, False)
    yield Mutation("bomb", gzip.compress(b"\0" * (1 << 30), 1))
    yield Mutation("bomb in a row", gzip.compress(b'{"x": "' + b" " * (1 << 28) + b'"}\n', 1), False)
    yield Mutation("not compressed", gzip.decompress(content))


def parquet_file(content: bytes) -> Iterator[Mutation]:
    """Yield damaged and unsuitable tables."""
    yield from any_file(content)
    yield Mutation("no footer", content[:-8])
    yield Mutation("footer too long", content[:-8] + struct.pack("<I", 1 << 31) + b"PAR1")
    yield Mutation("zeros in its middle", content[:200] + b"\0" * 200 + content[400:], False)
    for name, table in {
        "no rows": {"conversations": []},
        "no columns": {},
        "other columns": {"a": [1], "b": ["x"]},
        "numbers": {"conversations": [1, 2]},
        "nulls": {"conversations": [None, None]},
        "lists of lists": {"conversations": [[[]]]},
    }.items():
        yield Mutation(name, parquet(table))


def gguf_file(content: bytes) -> Iterator[Mutation]:
    """Yield damaged GGUF files."""
    yield from any_file(content)
    at = {"version": (4, "<I"), "number of tensors": (8, "<Q"), "number of keys": (16, "<Q")}
    for name, (place, kind) in at.items():
        for value in (0, 1, 2, 1 << 31):
            number = struct.pack(kind, value)
            yield Mutation(
                f"{name} {value}", content[:place] + number + content[place + len(number) :], False
            )
    for name in (b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count"):
        place = content.index(name) + len(name) + 4
        for value in (0, 7, (1 << 32) - 1):
            number = struct.pack("<I", value)
            yield Mutation(f"{name.decode()} {value}", content[:place] + number + content[place + 4 :])
    place = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4
    for value in (0, 1, 1 << 40):
        number = struct.pack("<Q", value)
        yield Mutation(f"tokens {value}", content[: place + 4] + number + content[place + 12 :])
    yield Mutation("other magic", b"GGML" + content[4:])
    yield Mutation("no data", content[: -len(content) // 3])


def parquet(columns: dict[str, list]) -> bytes:
    """Return a table."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    """Return a zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as found:
        for name, content in members.items():
            found.writestr(name, content)
    return file.getvalue()


def tarred(name: str, content: bytes) -> bytes:
    """Return a tar archive of one file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as found:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        found.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def tensors(header: dict[str, Any], data: bytes) -> bytes:
    """Return a safetensors file."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def places(value: Any, limit: int) -> list[tuple]:
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
    twin, part = _copied(value, place)
    part[place[-1]] = wrong
    return twin


def without(value: Any, place: tuple) -> Any:
    """Return a copy without the value at a place."""
    twin, part = _copied(value, place)
    del part[place[-1]]
    return twin


def _copied(value: Any, place: tuple) -> tuple[Any, Any]:
    """Return a copy of a value, apart from the original along the path to a place, and the part of the copy
    that holds the place."""
    twin = part = copy.copy(value)
    for key in place[:-1]:
        part[key] = copy.copy(part[key])
        part = part[key]
    return twin, part


def encoded(value: Any) -> bytes:
    """Return JSON, with NaN and infinity as Python writes them."""
    return json.dumps(value).encode()


def dumped(value: Any) -> bytes:
    """Return YAML."""
    return yaml.dump(value, Dumper=DUMPER, sort_keys=False).encode()


def shown(place: tuple) -> str:
    """Return the path of a value."""
    return ".".join(map(str, place))
