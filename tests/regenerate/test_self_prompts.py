"""Prompts written by the target itself."""

import json

from drafttrain.data.readers import read_conversations
from drafttrain.regenerate.self_prompts import user_header, write_self_prompts
from drafttrain.target_lm.model import FrozenTarget


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
