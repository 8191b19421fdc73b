"""Prompts written by the target itself."""

import json

import pytest

from drafttrain.data.readers import read_conversations
from drafttrain.regenerate.self_prompts import user_header, write_self_prompts
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError


def test_the_header_ends_where_the_users_words_begin(tiny_llama):
    target = FrozenTarget(*tiny_llama, name="tiny")
    text = target.tokenizer.decode(user_header(target))
    assert text.endswith("<|im_start|>user\n")
    assert "assistant" not in text


def test_same_prompts_after_an_interruption(tiny_llama, tmp_path):
    target = FrozenTarget(*tiny_llama, name="tiny")
    options = {"number": 12, "max_new_tokens": 40, "temperature": 2.0, "top_p": 1.0, "batch_rows": 4}
    n = write_self_prompts(target, tmp_path / "whole.jsonl", **options)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert n == whole.count(b"\n")
    part = tmp_path / "again.jsonl.part"
    part.write_text(
        json.dumps([3, None]) + "\n" + '[5, "half a li', encoding="utf-8"
    )  # killed while it wrote
    write_self_prompts(target, tmp_path / "again.jsonl", **options)
    again = {json.loads(line)["id"] for line in (tmp_path / "again.jsonl").read_text().splitlines()}
    expected = {json.loads(line)["id"] for line in whole.decode().splitlines()} - {"self-0-3"}
    assert again == expected
    assert not part.exists()
    if n:  # what is written can be read as conversations without answers
        assert all(c.messages[0].role == "user" for c in read_conversations(tmp_path / "whole.jsonl"))


def test_a_folder_is_refused_before_anything_is_sampled(tiny_llama, tmp_path):
    target = FrozenTarget(*tiny_llama, name="tiny")
    with pytest.raises(UserError, match="out: must be a file, got the folder .*; name a file in it"):
        write_self_prompts(target, tmp_path, number=2)
    assert not [*tmp_path.iterdir()]


def test_prompts_of_another_call_are_not_continued(tiny_llama, tmp_path, monkeypatch):
    target = FrozenTarget(*tiny_llama, name="tiny")
    part = tmp_path / "p.jsonl.part"

    def killed(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("drafttrain.regenerate.self_prompts.write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            write_self_prompts(target, tmp_path / "p.jsonl", 4, max_new_tokens=8)
    before = part.read_bytes()
    for other in ({"seed": 1}, {"temperature": 0.5}, {"max_new_tokens": 9}):
        with pytest.raises(UserError, match="must be of the same target, seed and sampling"):
            write_self_prompts(target, tmp_path / "p.jsonl", 4, **{"max_new_tokens": 8, **other})
    assert part.read_bytes() == before
    write_self_prompts(target, tmp_path / "p.jsonl", 4, max_new_tokens=8)
    assert not part.exists()


def test_fewer_prompts_after_an_interruption(tiny_llama, tmp_path, monkeypatch):
    target = FrozenTarget(*tiny_llama, name="tiny")
    options = {"max_new_tokens": 40, "temperature": 2.0, "top_p": 1.0}

    def killed(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("drafttrain.regenerate.self_prompts.write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            write_self_prompts(target, tmp_path / "p.jsonl", 12, **options)
    write_self_prompts(target, tmp_path / "p.jsonl", 5, **options)
    write_self_prompts(target, tmp_path / "q.jsonl", 5, **options)
    assert (tmp_path / "p.jsonl").read_bytes() == (tmp_path / "q.jsonl").read_bytes()
