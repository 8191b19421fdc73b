"""Whole files through the readers, with counts."""

import gzip
import json
import os
import tarfile
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from drafttrain.data.readers import ReadReport, read_conversations
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import content_hash

CHAT = {"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}


def read(path, format="auto"):
    report = ReadReport()
    conversations = list(read_conversations(path, format, report))
    assert report.kept == len(conversations)
    assert report.read == report.kept + sum(report.skipped.values())
    return conversations, report


def test_one_corpus_in_every_wrapping(tmp_path):
    array, lines = json.dumps([CHAT, CHAT], indent=1), f"{json.dumps(CHAT)}\n{json.dumps(CHAT)}\n"
    (tmp_path / "a.json").write_text(array)
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(array.encode()))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "e.dump").write_text(lines)
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.writestr("x/g.json", array)
    with tarfile.open(tmp_path / "h.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "b.jsonl", "i.jsonl")
    expected = None
    for name in ("a.json", "b.jsonl", "c.json.gz", "d.jsonl.gz", "e.dump", "f.zip", "h.tar.gz"):
        conversations, report = read(tmp_path / name, "sharegpt" if name == "e.dump" else "auto")
        got = [(c.id, c.messages) for c in conversations]
        expected = expected or got
        assert got == expected and report.read == 2
    conversations, _ = read(tmp_path / "f.zip")
    assert conversations[1].source == f"{tmp_path}/f.zip/x/g.json:row 2"
    conversations, report = read(tmp_path)
    assert len(conversations) == 12
    assert report.files_left_out == {".dump": 1}


def test_parquet(tmp_path):
    rows = [  # as tatsu-lab/alpaca has them on the Hub
        {"instruction": "Name it.", "input": "", "output": "It.", "text": "Below is an instruction …"},
        {"instruction": "Name it.", "input": "a cat", "output": "Cat.", "text": "Below is an instruction …"},
    ]
    (tmp_path / "data").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / "train-00000-of-00001.parquet")
    conversations, _ = read(tmp_path)
    said = [[message.content for message in chat.messages] for chat in conversations]
    assert said == [["Name it.", "It."], ["Name it.\n\na cat", "Cat."]]
    chats = [  # two kinds of turns: every turn has the keys of both
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "chats.parquet")
    said = [[m.content for m in chat.messages] for chat in read(tmp_path / "chats.parquet")[0]]
    assert said == [["a", "b"], ["c", "d"]]


def test_documents_of_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "oanc.zip", "w") as archive:
        archive.writestr("part/one.txt", "  First [ 1 ] line.\n")
        archive.writestr("part/two.txt", " \n\u00ad\n")
        archive.writestr("part/two.anc", "<xml/>")
        archive.writestr("README.txt", "about")
        archive.writestr("categories.txt", "one a\ntwo b")
    conversations, report = read(tmp_path / "oanc.zip", "oanc")
    (document,) = conversations
    assert document.is_text and document.messages[0].content == "First line."
    assert (document.id, document.source) == ("part/one.txt", f"{tmp_path}/oanc.zip/part/one.txt")
    assert report.skipped == {"empty document": 1}
    assert report.files_left_out == {".anc": 1, ".txt": 2}


def test_text_file_and_text_rows(tmp_path):
    (tmp_path / "a.txt").write_text("Some words.")
    assert read(tmp_path / "a.txt")[0][0].messages[0].content == "Some words."
    assert read(tmp_path / "a.txt", "text")[0][0].is_text
    (tmp_path / "notes").write_text("Some words.")
    assert read(tmp_path / "notes", "text")[0][0].is_text
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": " "}\n')
    conversations, report = read(tmp_path / "b.jsonl", "text")
    assert [c.id for c in conversations] == ["b.jsonl:1"]
    assert report.skipped == {"empty document": 1}


def test_rows_without_turns_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(row) for row in (CHAT, {"conversations": []}, CHAT))
    )
    _, report = read(tmp_path / "a.jsonl")
    assert (report.read, report.kept, report.skipped) == (3, 2, {"no turns": 1})


@pytest.mark.parametrize(
    "name, content, format, complaint",
    [
        ("a.json", "", "auto", "a.json: no rows"),
        ("a.json", "[]", "auto", "a.json: no rows"),
        ("a.jsonl", "\n\n", "auto", "a.jsonl: no rows"),
        ("a.txt", "x", "sharegpt", "a.txt: format must be text or auto for a .txt file, got sharegpt"),
        ("a.bin", "x", "auto", "a.bin: suffix must be .json, .jsonl, .parquet or .txt, got '.bin'"),
        ("a.json", json.dumps([CHAT, {"z": 1}]), "auto", "a.json:row 2: must have .*, got z;"),
    ],
)
def test_bad_input(tmp_path, name, content, format, complaint):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=complaint):
        read(tmp_path / name, format)


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes on POSIX")
def test_names_of_files_that_are_not_utf8(tmp_path):
    (tmp_path / "texts").mkdir()
    place = os.fsencode(tmp_path / "texts") + b"/caf\xe9.txt"
    with open(place, "w") as file:
        file.write("A document.")
    for path in (tmp_path / "texts", os.fsdecode(place)):
        [one] = read_conversations(path)
        assert one.id == "caf\ufffd.txt" and one.source.encode()
    assert len(content_hash(tmp_path / "texts")) == 16


def test_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no rows and no documents in it"):
        read(tmp_path)
