"""Examples on the terminal."""

import json

import pytest
from rich.console import Console

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.encode import trained_runs
from drafttrain.data.view import view_corpus
from drafttrain.utils.errors import UserError
from tests.conftest import CHATML
from tests.templates import family_tokenizer


@pytest.fixture
def corpus(tmp_path, chatml):
    rows = [{"instruction": f"Tell [bold]{i}", "output": "Héllo 😀!"} for i in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    build_corpus(
        CorpusConfig([Source(str(tmp_path / "a.json"))], validation_fraction=0.3), chatml, tmp_path / "corpus"
    )
    return tmp_path / "corpus"


def shown(corpus, tokenizer, **options) -> Console:
    console = Console(
        record=True, width=100, force_terminal=True, color_system="standard", file=open("/dev/null", "w")
    )
    view_corpus(corpus, tokenizer, console=console, **options)
    return console


def trained_text(console) -> str:
    """Return the HTML of what is shown as trained, without the legend."""
    html = console.export_html(inline_styles=True, clear=False)
    spans = [part.partition("</span>")[0] for part in html.split("<span")[1:] if "font-weight: bold" in part]
    return "\n".join(text.partition(">")[2] for text in spans[1:])


def test_trained_tokens_stand_out(corpus, chatml):
    console = shown(corpus, chatml, n=2, seed=1)
    colored = trained_text(console)
    assert "Héllo 😀!&lt;|im_end|&gt;" in colored
    assert "Tell" not in colored and "assistant" not in colored
    text = console.export_text()
    assert text.count("Héllo") == 2
    assert "Tell [bold]" in text  # not taken for markup
    assert "tokens, " in text


def test_seed_and_split_choose_the_examples(corpus, chatml):
    def text(**options):
        return shown(corpus, chatml, n=1, **options).export_text()

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(5)}) > 1
    assert "validation[" in text(split="validation")
    assert shown(corpus, chatml, n=99).export_text().count("Héllo") == 6


def test_what_a_template_adds_is_shown(tmp_path):
    """A default system prompt that the chat does not have, as the target will read it."""
    qwen = family_tokenizer("qwen2.5")
    rows = [{"instruction": "Hi there", "output": "Hello!"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    config = CorpusConfig([Source(str(tmp_path / "a.json"))], validation_fraction=0)
    build_corpus(config, qwen, tmp_path / "corpus")
    console = shown(tmp_path / "corpus", qwen, n=1)
    assert trained_text(console) == "Hello!&lt;|im_end|&gt;"
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>"
    assert f"<|im_start|>system\n{system}\n<|im_start|>user\nHi there" in console.export_text()


def test_thoughts_are_shown_and_trained(tmp_path, with_template):
    """The tokens that mark a thought may be special, which decoding often leaves out, or merely added."""
    answer = "<think>\nA fox is red.\n</think>\n\nRed."
    rows = [{"instruction": "The fox?", "output": answer}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    config = CorpusConfig([Source(str(tmp_path / "a.json"))], validation_fraction=0)
    for special in (False, True):
        tokenizer = with_template(CHATML)
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
        folder = tmp_path / f"corpus {special}"
        build_corpus(config, tokenizer, folder)
        console = shown(folder, tokenizer, n=1)
        assert answer in console.export_text(clear=False)
        trained = trained_text(console)
        for line in ("&lt;think&gt;", "A fox is red.", "&lt;/think&gt;", "Red."):
            assert line in trained
        assert "fox?" not in trained


def test_other_tokenizer(corpus, with_template):
    with pytest.raises(UserError, match="must be made with"):
        view_corpus(corpus, with_template("{{ messages }}"))


def test_runs(chatml):
    ids = chatml("Hi there😀Hello!", add_special_tokens=False)["input_ids"]
    n = len(chatml("Hi there😀", add_special_tokens=False)["input_ids"])
    mask = [0] * n + [1] * (len(ids) - n)
    assert trained_runs(chatml, ids, mask) == [("Hi there😀", False), ("Hello!", True)]
    assert trained_runs(chatml, ids, [1] * len(ids)) == [("Hi there😀Hello!", True)]
