"""Data sets of the Hub, with a local folder in their place."""

import pyarrow
import pytest
from pyarrow import parquet

from drafttrain.data.hub_prompts import parse_hub_source, read_hub_prompts
from drafttrain.data.prompts import Prompt
from drafttrain.utils.errors import UserError
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
        ("hub:/no/such/folder:dev", ("/no/such/folder", None, "dev")),
    ],
)
def test_spelling(source, expected):
    assert parse_hub_source(source) == expected


@pytest.mark.parametrize("source", ["hub:", "hub:a/b/c/d", "hub:a//b"])
def test_other_spellings_are_refused(source):
    with pytest.raises(UserError, match="must be hub:org/dataset or hub:org/dataset/config"):
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


@pytest.fixture
def wmt(tmp_path):
    """A data set as it is cloned from the Hub: Parquet files of two configurations, named in its card."""
    card = "---\nconfigs:\n"
    for pair in ("de-en", "fr-en"):
        (tmp_path / "wmt14" / pair).mkdir(parents=True)
        card += f"- config_name: {pair}\n  data_files:\n"
        for split in ("train", "validation", "test"):
            rows = [{"translation": {pair[:2]: split, "en": "x"}}, {"translation": {pair[:2]: "", "en": ""}}]
            file = f"{pair}/{split}-00000-of-00001.parquet"
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "wmt14" / file)
            card += f"  - split: {split}\n    path: {file.replace('00000', '*')}\n"
    (tmp_path / "wmt14" / "README.md").write_text(f"{card}---\n")
    return tmp_path / "wmt14"


def test_configurations(wmt, capsys):
    assert read_hub_prompts(f"hub:{wmt}/de-en") == [Prompt("1", ["Translate German to English: test"])]
    (prompt,) = read_hub_prompts(f"hub:{wmt}/fr-en:validation")
    assert prompt.turns == ["Translate French to English: validation"]
    assert f"hub:{wmt}/fr-en:validation: left out 1 rows without text" in capsys.readouterr().err
    with pytest.raises(UserError, match="must end in /CONFIG, with one of de-en, fr-en; add it"):
        read_hub_prompts(f"hub:{wmt}")
    with pytest.raises(UserError, match="hub:.*xx-en: cannot be read .*xx-en"):
        read_hub_prompts(f"hub:{wmt}/xx-en")


def test_a_configuration_that_is_no_folder(wmt):
    (wmt / "README.md").write_text(
        (wmt / "README.md").read_text().replace("config_name: de-en", "config_name: a")
    )
    assert read_hub_prompts(f"hub:{wmt}/a")[0].turns == ["Translate German to English: test"]


def test_no_network_is_an_error():  # the suite runs offline
    with pytest.raises(
        UserError, match="hub:nobody/nothing: cannot be read .*check the name and the network"
    ):
        read_hub_prompts("hub:nobody/nothing")
