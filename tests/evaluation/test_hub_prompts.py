"""Data sets of the Hub, with a local folder in their place."""

import pytest

from drafttrain.errors import UserError
from drafttrain.evaluation.hub_prompts import parse_hub_source, read_hub_prompts
from drafttrain.evaluation.prompts import Prompt
from tests.conftest import write_jsonl


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "data"
    place.mkdir()
    write_jsonl(place / "train.jsonl", [{"id": "a", "question": "seen?"}])
    rows = [{"id": None, "question": "One?"}, {"id": "b", "question": "Two?"}]
    write_jsonl(place / "test.jsonl", rows)
    return place


def test_the_test_split_is_read_unless_another_is_asked_for(folder):
    assert read_hub_prompts(f"hub:{folder}") == [Prompt("1", ["One?"]), Prompt("b", ["Two?"])]
    assert read_hub_prompts(f"hub:{folder}:train") == [Prompt("a", ["seen?"])]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("hub:openai/gsm8k", ("openai/gsm8k", None, None)),
        ("hub:openai/gsm8k:train", ("openai/gsm8k", None, "train")),
        ("hub:wmt/wmt14/de-en", ("wmt/wmt14", "de-en", None)),
        ("hub:abisee/cnn_dailymail/3.0.0:validation", ("abisee/cnn_dailymail", "3.0.0", "validation")),
        ("hub:squad", ("squad", None, None)),
    ],
)
def test_spelling(source, expected):
    assert parse_hub_source(source) == expected


@pytest.mark.parametrize("source", ["hub:", "hub:a/b/c/d", "hub:a//b"])
def test_other_spellings_are_refused(source):
    with pytest.raises(UserError, match="write hub:org/dataset"):
        parse_hub_source(source)


def test_mistakes_are_one_line(folder):
    for name in ("train", "test"):
        write_jsonl(folder / f"{name}.jsonl", [{"number": 3}])
    for source, message in (
        (f"hub:{folder}:nothing", "Bad split"),
        (f"hub:{folder}", "row 1: no prompt in it"),
    ):
        with pytest.raises(UserError, match=message) as error:
            read_hub_prompts(source)
        assert "\n" not in str(error.value) and source in str(error.value)


def test_no_network_is_said():  # the suite runs offline
    with pytest.raises(
        UserError, match="hub:nobody/nothing: cannot be read .*check the name and the network"
    ):
        read_hub_prompts("hub:nobody/nothing")
