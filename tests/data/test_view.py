"""Examples on the terminal."""

import json

import pytest
from rich.console import Console

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.encode import trained_runs
from drafttrain.data.view import view_corpus
from drafttrain.utils.errors import UserError


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


def test_trained_tokens_stand_out(corpus, chatml):
    console = shown(corpus, chatml, n=2, seed=1)
    html = console.export_html(inline_styles=True, clear=False)
    colored = [part.split("</span>")[0] for part in html.split("<span")[1:] if "font-weight: bold" in part]
    assert any("Héllo 😀!&lt;|im_end|&gt;" in part for part in colored)
    assert not any("Tell" in part or "assistant" in part for part in colored)
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


def test_other_tokenizer(corpus, with_template):
    with pytest.raises(UserError, match="must be made with"):
        view_corpus(corpus, with_template("{{ messages }}"))


def test_runs(chatml):
    ids = chatml("Hi there😀Hello!", add_special_tokens=False)["input_ids"]
    n = len(chatml("Hi there😀", add_special_tokens=False)["input_ids"])
    mask = [0] * n + [1] * (len(ids) - n)
    assert trained_runs(chatml, ids, mask) == [("Hi there😀", False), ("Hello!", True)]
    assert trained_runs(chatml, ids, [1] * len(ids)) == [("Hi there😀Hello!", True)]
