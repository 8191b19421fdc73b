"""Files, archives, lines and JSON; damaged input of every kind."""

import gzip
import io
import json
import tarfile
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from drafttrain.data import streams
from drafttrain.data.streams import (
    Stream,
    open_streams,
    read_json_values,
    read_jsonl,
    read_lines,
    read_parquet,
    read_text,
)
from drafttrain.utils.errors import UserError


def stream(data: bytes, name: str = "a.json") -> Stream:
    return Stream(f"folder/{name}", name, io.BytesIO(data), given=True)


def names(path) -> dict[str, bytes]:
    return {s.name: s.bytes.read() for s in open_streams(path)}


def test_plain_and_gzipped_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"two"))
    assert names(tmp_path / "a.txt") == {"a.txt": b"one"}
    assert names(tmp_path / "b.json.gz") == {"b.json": b"two"}
    (given,) = open_streams(tmp_path / "b.json.gz")
    assert (given.suffix, given.given, given.source) == (".json", True, str(tmp_path / "b.json.gz"))


def test_suffixes_in_capitals(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "A.JSON.GZ").write_bytes(gzip.compress(b"[1]"))
    (tmp_path / "B.JSON.GZ").write_bytes(gzip.compress(b"[2]"))
    assert names(tmp_path) == {"part/A.JSON": b"[1]", "B.JSON": b"[2]"}
    assert [stream.suffix for stream in open_streams(tmp_path)] == [".json", ".json"]


def test_folder_with_archives_in_an_order_of_names_alone(tmp_path):
    for i in range(20):
        (tmp_path / f"part{i // 10}").mkdir(exist_ok=True)
        (tmp_path / f"part{i // 10}" / f"{i}.txt").write_bytes(str(i).encode())
    (tmp_path / ".hidden.txt").write_bytes(b"no")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("inner/c.txt", b"c")
        archive.writestr("__MACOSX/inner/c.txt", b"no")
        archive.writestr("d.json.gz", gzip.compress(b"d"))
    found = names(tmp_path)
    assert found == {f"part{i // 10}/{i}.txt": str(i).encode() for i in range(20)} | {
        "z.zip/inner/c.txt": b"c",
        "z.zip/d.json": b"d",
    }
    order = [name for name in found if name.startswith("part")]
    assert len({name.split("/")[0] for name in order[:8]}) == 2, "the first files are a sample of both parts"
    assert order != sorted(order)
    assert list(names(tmp_path)) == list(found)


def test_tar(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in ("x/1.json", "x/.2.json"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
    assert names(tmp_path / "a.tar.gz") == {"x/1.json": b"{}"}


def test_lines_split_at_line_feeds_only():
    text = 'a\u2028b\n\n  \n"c\u0085d"\r\ne\x0cf'
    assert list(read_lines(stream(text.encode()))) == [
        (1, "a\u2028b\n"),
        (4, '"c\u0085d"\r\n'),
        (5, "e\x0cf"),
    ]
    rows = [{"value": "one\u2028two\u0085three"}, {"value": "x"}]
    data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    assert list(read_jsonl(stream(data))) == [(1, rows[0]), (2, rows[1])]


def test_byte_order_mark():
    assert read_text(stream(b"\xef\xbb\xbfhi")) == "hi"
    assert list(read_jsonl(stream(b"\xef\xbb\xbf{}\n"))) == [(1, {})]
    assert list(read_json_values(stream(b"\xef\xbb\xbf[{}]"))) == [(1, {})]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_values(indent):
    rows = [{"id": i, "text": 'ä "日本" 😀 ] } ,' * i, "list": [i, None, [True]]} for i in range(6)]
    expected = list(enumerate(rows, 1))
    array = json.dumps(rows, ensure_ascii=False, indent=indent).encode()
    assert list(read_json_values(stream(array))) == expected
    assert list(read_json_values(stream(b" \n" + array + b"\n\n"))) == expected
    assert list(read_json_values(stream(json.dumps(rows[3], ensure_ascii=False).encode()))) == [(1, rows[3])]
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    assert list(read_json_values(stream(lines))) == expected
    assert list(read_json_values(stream(b"[]"))) == []


def test_array_cut_off_anywhere():
    array = json.dumps([{"a": "b"}, {"a": ["c", 1]}]).encode()
    for length in range(1, len(array)):
        with pytest.raises(UserError, match=r"^folder/a.json:?.*cut off"):
            list(read_json_values(stream(array[:length])))


@pytest.mark.parametrize("array, commas", [(b"[1 2]", 0), (b"[{}\n{}]", 0), (b"[1,, 2]", 2)])
def test_array_without_commas_between(array, commas):
    with pytest.raises(UserError, match=rf"^folder/a.json:row 1: must be .* one comma, got {commas};"):
        list(read_json_values(stream(array)))


def test_parquet_without_nulls(tmp_path):
    rows = [{"a": 1, "b": None, "c": [{"d": "é", "e": None}]}, {"a": None, "b": {"f": None}, "c": []}]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.write(path, "a.parquet")
    for place in (path, tmp_path / "b.zip"):
        (values,) = (list(read_parquet(one)) for one in open_streams(place))
        assert values == [(1, {"a": 1, "c": [{"d": "é"}]}), (2, {"b": {}, "c": []})]


def test_damaged_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": "words" * 99}]), path)
    for data in (path.read_bytes()[:-9], b"words", b""):
        with pytest.raises(
            UserError, match="a.parquet: damaged, or no Parquet file .*; fetch it again"
        ) as error:
            list(read_parquet(stream(data, "a.parquet")))
        assert "\n" not in str(error.value)


def test_json_errors_name_the_row():
    with pytest.raises(UserError, match=r"folder/a.json:row 3: not JSON"):
        list(read_json_values(stream(b'[{"a": 1}, {"a": 2}, {"a": oops}, {"a": 4}]')))
    with pytest.raises(UserError, match="text after the closing bracket"):
        list(read_json_values(stream(b"[{}] {}")))
    with pytest.raises(UserError, match=r"folder/a.jsonl:row 4: not JSON.*fix or remove the row") as caught:
        list(read_jsonl(stream(b'{}\n\n{}\n{"a"\n{}\n', "a.jsonl")))
    assert "cut off" not in str(caught.value)
    with pytest.raises(UserError, match=r"row 2: .*cut off"):
        list(read_jsonl(stream(b'{}\n{"a": "b', "a.jsonl")))


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5_000])
def test_json_beyond_the_limits_of_python(value):
    with pytest.raises(UserError, match="^folder/a.json:row 2: ") as caught:
        list(read_jsonl(stream(f'{{"a": 1}}\n{{"a": {value}\n'.encode())))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="^folder/a.json:row 2: ") as caught:
        list(read_json_values(stream(f'[{{"a": 1}}, {{"a": {value}}}]'.encode())))
    assert "\n" not in str(caught.value)


def test_not_utf8():
    bad = '{"a": "caf\xe9"}'.encode("latin1")
    with pytest.raises(UserError, match=r"folder/a.jsonl:row 2: not UTF-8 \(byte 0xe9.*iconv"):
        list(read_jsonl(stream(b"{}\n" + bad, "a.jsonl")))
    with pytest.raises(UserError, match=r"folder/a.json: not UTF-8"):
        list(read_json_values(stream(bad)))
    with pytest.raises(UserError, match=r"folder/a.txt: not UTF-8"):
        read_text(stream(bad, "a.txt"))
    with pytest.raises(UserError, match="not UTF-8"):  # the last byte starts a character that never ends
        list(read_json_values(stream(b'{"a": "\xc3')))


def test_damaged_archives(tmp_path):
    random_text = bytes(range(256)) * 200
    gz = gzip.compress(random_text)
    (tmp_path / "cut.txt.gz").write_bytes(gz[: len(gz) // 2])
    (tmp_path / "false.txt.gz").write_bytes(b"this is no gzip file")
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as archive:
        archive.writestr("a.txt", random_text)
    whole = (tmp_path / "whole.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.zip").write_bytes(whole[:5000] + b"?" + whole[5001:])
    (tmp_path / "cut.tar.gz").write_bytes(gz[: len(gz) // 2])
    for name in ("cut.txt.gz", "false.txt.gz", "cut.zip", "flipped.zip", "cut.tar.gz"):
        with pytest.raises(UserError, match=f"{name}.*: damaged or cut off .*fetch the file again") as caught:
            for s in open_streams(tmp_path / name):
                with streams.readable(s.source):
                    s.bytes.read()
        assert "\n" not in str(caught.value)


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(UserError, match="nothing.json: no such file or folder"):
        list(open_streams(tmp_path / "nothing.json"))
    with zipfile.ZipFile(tmp_path / "locked.zip", "w") as archive:
        archive.writestr("a.txt", b"x")
    data = bytearray((tmp_path / "locked.zip").read_bytes())
    for signature, flags in (
        (b"PK\x03\x04", 6),
        (b"PK\x01\x02", 8),
    ):  # set the encryption bit in both headers
        data[data.index(signature) + flags] |= 1
    (tmp_path / "locked.zip").write_bytes(data)
    with pytest.raises(UserError, match=r"locked.zip/a.txt: cannot be read \(.*password"):
        list(open_streams(tmp_path / "locked.zip"))
