"""Chat templates are programs: everything they can do ends in one line."""

import pytest

from drafttrain.data import template
from drafttrain.data.chat import encode_prompt
from drafttrain.data.message import Message
from drafttrain.data.template import render
from drafttrain.utils.errors import UserError
from tests.conftest import tiny_tokenizer

CHAT = [Message("user", "Hello")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 s"),
        (
            "{% set n = namespace(x='xxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}x",
            "MemoryError|more than 0.3 s",
        ),
        ("{{ 'x' * 2000 }}", "2,000 characters, at most 1,000 are taken"),
        ("{{ 'x' * 10 ** 12 }}", "MemoryError"),
        ("{{ 10 ** (10 ** 10) }}", "MemoryError|more than 0.3 s"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ raise_exception('one\ntwo') }}", r"\(one two\)"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "."),
    ],
)
def test_what_a_template_may_do(text, reason, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 0.3)
    monkeypatch.setattr(template, "LONGEST", 1000)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    with pytest.raises(UserError, match=reason) as found:
        render(tokenizer, CHAT, "prompt")
    assert "\n" not in str(found.value) and str(found.value).startswith("prompt: must be turns")


@pytest.mark.parametrize("text", ["You are brief.", "{% for m in messages %}{{ m.role }}{% endfor %}"])
def test_a_template_without_the_users_turns(text):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    with pytest.raises(UserError, match="chat template must show the user's turns"):
        encode_prompt(tokenizer, CHAT)


def test_a_template_that_wants_a_system_turn(monkeypatch):
    tokenizer = tiny_tokenizer()
    start = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    tokenizer.chat_template = start + tokenizer.chat_template
    assert encode_prompt(tokenizer, [Message("system", "Be brief."), *CHAT])
    with pytest.raises(UserError, match="system first"):
        encode_prompt(tokenizer, CHAT)
