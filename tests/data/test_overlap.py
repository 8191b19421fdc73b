"""Evaluation prompts in training data."""

import json
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from drafttrain.data.overlap import EvaluationPrompts, fold
from drafttrain.data.prompts import read_prompts, read_rows
from drafttrain.utils.errors import UserError

DATA = Path(__file__).parents[2] / "data"
LONG = "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning."


def test_whole_and_contained_prompts():
    prompts = EvaluationPrompts(["Continue.", LONG])
    for text in (
        "continue",
        LONG,
        LONG.upper().replace("'", "’"),
        f"Solve this:\n{LONG}\nThink!",
        "Continue.\n\nthe second paragraph",
        "Hi\n\nContinue.",
        "Hi\n\nContinue.\n\nthe third paragraph",
    ):
        assert prompts.overlap(text)
    for text in (
        "Please continue.",
        LONG.replace("16", "17"),
        LONG[:40],
        f"x{LONG[1:]}",
        "",
        "Continue. And stop.",
    ):
        assert not prompts.overlap(text)


words = st.lists(st.sampled_from("a b c".split()), min_size=1, max_size=30).map(" ".join)


@settings(max_examples=60)
@given(st.lists(words, max_size=4), words)
def test_against_searching_every_prompt(prompts, text):
    expected = any(p == text or (len(p.split()) >= 10 and f" {p} " in f" {text} ") for p in prompts)
    assert EvaluationPrompts(prompts).overlap(text) == expected


def test_fold():
    assert fold("  It’s_5.0 Été\n(ok) ") == "it s 5 0 été ok"


def test_files_of_every_benchmark(tmp_path):
    (tmp_path / "mt.jsonl").write_text(json.dumps({"question_id": 81, "turns": ["one", "two"]}) + "\n")
    (tmp_path / "gsm.jsonl").write_text(json.dumps({"question": "three", "answer": "x"}))
    (tmp_path / "he.json").write_text(json.dumps([{"prompt": "four", "test": "x"}, "five"]))
    (tmp_path / "lines.txt").write_text("six\nseven\n")
    (tmp_path / "mbpp.jsonl").write_text(json.dumps({"text": "eight", "test_list": ["x"], "code": "x"}))
    files = [tmp_path / name for name in ("mt.jsonl", "gsm.jsonl", "he.json", "lines.txt", "mbpp.jsonl")]
    prompts = EvaluationPrompts.read(files)
    assert all(prompts.overlap(word) for word in "one two three four five six seven eight".split())
    assert len(prompts) == 8
    assert len(EvaluationPrompts.read([tmp_path])) == 8
    assert not prompts.overlap("x")
    assert len(EvaluationPrompts.read([])) == 0


def test_the_words_of_a_row_count_not_the_request_around_them(tmp_path):
    sentence = "the quick brown fox jumps over the lazy dog and sleeps until {}"
    rows = [
        {"article": sentence.format("noon"), "highlights": "x"},
        {"translation": {"de": sentence.format("drei"), "en": "x"}},
        {"passage": sentence.format("four"), "question": "When?"},
        {"article": "", "highlights": "nothing to leave out"},
        {"context": sentence.format("five"), "completion": " x"},
        {"question": sentence.format("six"), "choices": ["x", "y"], "answer": 0},
        {"instruction": sentence.format("seven"), "output": "x"},
        {"conversations": [{"from": "human", "value": sentence.format("eight")}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "trivia.txt").write_text("Who was it?\t['x', 'y']\n")
    (tmp_path / "folder").mkdir()
    table = pyarrow.Table.from_pylist([{"question": sentence.format("nine"), "answer": "x"}])
    parquet.write_table(table, tmp_path / "folder" / "test-00000-of-00001.parquet")
    (tmp_path / "folder" / "qa.csv").write_text(f"question,answer\n{sentence.format('ten')},x\n")
    (tmp_path / "lines.list").write_text("Eleven lines.\n")
    names = ("rows.jsonl", "trivia.txt", "folder", "lines.list")
    prompts = EvaluationPrompts.read([tmp_path / name for name in names])
    for end in "noon drei four five six seven eight nine ten".split():
        assert prompts.overlap(f"Please: {sentence.format(end)}!")
    assert prompts.overlap("Who was it?") and prompts.overlap("When?") and prompts.overlap("Eleven lines")
    assert not prompts.overlap("x") and not prompts.overlap(sentence.format("midnight"))


@pytest.mark.parametrize("name", ["bench.jl", "bench.jsonlines", "bench"])
def test_rows_of_an_unusual_suffix_are_read_as_the_benchmark_reads_them(name, tmp_path):
    rows = [{"question_id": 81, "turns": ["one", "two"]}, {"question_id": 82, "turns": ["three"]}]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.turns for prompt in read_prompts(tmp_path / name)] == [["one", "two"], ["three"]]
    prompts = EvaluationPrompts.read([tmp_path / name])
    assert all(prompts.overlap(word) for word in ("one", "two", "three")) and len(prompts) == 3


@pytest.mark.parametrize("line", ["[INST] Who was it?", "{{name}}, who are you?", "[1] a footnote"])
def test_lines_that_begin_like_json_are_lines(line, tmp_path):
    (tmp_path / "prompts.md").write_text(f"{line}\nAnother line\n")
    assert EvaluationPrompts.read([tmp_path / "prompts.md"]).overlap(line)


def test_bad_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["x"]}\n{"other": 1}\n')
    with pytest.raises(UserError, match="a.jsonl:row 2: no text under turns, question or prompt"):
        EvaluationPrompts.read([tmp_path / "a.jsonl"])
    (tmp_path / "a.jsonl").write_text('{"turns": ["x"]}\n{"prompt": 3}\n')
    with pytest.raises(UserError, match="a.jsonl:row 2: no prompt in it"):
        EvaluationPrompts.read([tmp_path / "a.jsonl"])
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(UserError, match="b.txt: no prompts in it"):
        EvaluationPrompts.read([tmp_path / "b.txt"])
    with pytest.raises(UserError, match="no such file"):
        EvaluationPrompts.read([tmp_path / "c.txt"])


def test_the_evaluation_prompts_of_the_repository_are_found():
    prompts = EvaluationPrompts.read([DATA / "eval"])
    names = {"gsm8k_test": "question", "creative_writing": "prompt", "blocksworld_step_6": "prompt"}
    for name, key in names.items():
        rows = [row for _, _, row in read_rows(DATA / "eval" / f"{name}.jsonl.gz")]
        assert all(prompts.overlap(f"Please answer.\n{row[key].upper()}\nThink first.") for row in rows)
    assert all(prompts.overlap(f"Solve {row['pddl']}") for row in rows)  # of Blocksworld
    assert not prompts.overlap("At the start the hand is empty, block a is clear, and that is all.")


def test_scripts_without_spaces():
    assert fold("请解释，量子") == "请 解 释 量 子" and fold("ﬁne ２") == "fine 2"
    prompts = EvaluationPrompts(["请解释量子力学的基本原理。"])
    assert prompts.overlap("你好，请解释量子力学的基本原理！谢谢") and not prompts.overlap("请解释量子力学")
    assert EvaluationPrompts(["Cafe\u0301 au lait?"]).overlap("café au lait")


def test_a_first_paragraph_ends_with_any_empty_line():
    prompts = EvaluationPrompts(["Name three colours."])
    for between in ("\n\n", "\r\n\r\n", "\n \t\n"):
        assert prompts.overlap(f"Name three colours.{between}Use English.")
    assert not prompts.overlap("Name three colours.\nUse English.")


def test_a_folder_with_files_of_mmlu_and_others(tmp_path):
    """Only MMLU's own other splits are left out."""
    row = "What is it?,a,b,c,d,A\n"
    for name in ("test/x_test.csv", "val/x_val.csv", "dev/x_dev.csv", "auxiliary_train/y.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(row)
    (tmp_path / "possibly_contaminated_urls.txt").write_text("a page\n")
    (tmp_path / "mt.jsonl").write_text(json.dumps({"question_id": 81, "turns": ["one", "two"]}) + "\n")
    values = [value for _, _, value in read_rows(tmp_path)]
    assert len(values) == 2 and {"question_id": 81, "turns": ["one", "two"]} in values


def test_all_texts_of_the_first_turn_are_compared(tmp_path):
    from drafttrain.data.config import PromptSet
    from drafttrain.data.overlap import MeasuredPrompts

    sentence = "the quick brown fox jumps over the lazy dog and sleeps until {}"
    rows = [
        {"passage": sentence.format("noon"), "question": sentence.format("when")},
        {"prompt": sentence.format("one"), "pddl": sentence.format("two")},
        {"turns": [sentence.format("first"), sentence.format("second")]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for end, is_measured in [
        ("noon", True),
        ("when", True),
        ("two", True),
        ("first", True),
        ("second", False),
    ]:
        prompts = MeasuredPrompts([PromptSet("a", str(tmp_path / "rows.jsonl"), turns=1)])
        prompts.look([f"Please: {sentence.format(end)}!"])
        if is_measured:
            with pytest.raises(UserError, match="1 with prompts of"):
                prompts.check()
        else:
            prompts.check()


def test_two_sets_of_one_file_are_both_compared(tmp_path):
    from drafttrain.data.config import PromptSet
    from drafttrain.data.overlap import MeasuredPrompts

    path = tmp_path / "mt.jsonl"
    rows = [{"turns": [f"question number {i} of this file", f"and then {i} of them"]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = MeasuredPrompts([PromptSet("a", str(path), turns=2), PromptSet("b", str(path), 1)])
    prompts.look(["and then 3 of them"])
    with pytest.raises(UserError, match="1 with prompts of"):
        prompts.check()
