"""Every form of prompt file, the files that the repository brings, and what is refused."""

import csv
import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from drafttrain.data.chat import encode_prompt
from drafttrain.data.config import PromptSet
from drafttrain.data.message import Message
from drafttrain.data.prompt_rows import CODE_REQUEST, MBPP_REQUEST, MMLU_REQUEST
from drafttrain.data.prompts import Prompt, Task, first_of_each, read_prompts
from drafttrain.utils.errors import UserError

DATA = Path(__file__).parents[2] / "data"


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"question_id": 81, "turns": ["a?", "b?"], "reference": ["x"]}, Prompt("81", ["a?", "b?"])),
        ({"question": "How many?", "answer": "3\n#### 3"}, Prompt("1", ["How many?"])),
        (
            {"task_id": "HumanEval/0", "prompt": "\n\ndef f():\n", "entry_point": "f"},
            Prompt("HumanEval/0", [CODE_REQUEST + "def f():\n"]),
        ),
        (
            {"task_id": 11, "text": "Add.", "code": "x", "test_list": ["assert f(1)", "assert f(2)"]},
            Prompt("11", [MBPP_REQUEST.format(task="Add.", tests="assert f(1)\nassert f(2)")]),
        ),
        (
            {"task_id": 2, "prompt": "Subtract.", "test_list": ["assert g(1)"]},
            Prompt("2", [MBPP_REQUEST.format(task="Subtract.", tests="assert g(1)")]),
        ),
        ({"question": {"text": "who?", "tokens": ["who"]}}, Prompt("1", ["who?"])),
        ({"question": "who sang it", "answer": ["A", "B"]}, Prompt("1", ["who sang it"])),
        (
            {"context": "Passage: x\nQuestion: y\nAnswer:", "completion": " z", "ref_text": "z|zz"},
            Prompt("1", ["Passage: x\nQuestion: y\nAnswer:"]),
        ),
        (
            {"passage": "x", "question": "y", "answers_spans": {"spans": ["z"]}},
            Prompt("1", ["Passage: x\nQuestion: y\nAnswer:"]),
        ),
        ({"id": "a", "article": "News. ", "highlights": "N"}, Prompt("a", ["Summarize: News."])),
        (
            {"translation": {"de": "Guten Tag", "en": "Good day"}},
            Prompt("1", ["Translate German to English: Guten Tag"]),
        ),
        (
            {"translation": {"fr": "Bonjour", "xx": "?"}},
            Prompt("1", ["Translate French to xx: Bonjour"]),
        ),
        (
            {"question": "1 + 1?", "choices": ["1", "2"], "subject": "abstract_algebra", "answer": 1},
            Prompt(
                "1",
                [MMLU_REQUEST.format(subject="abstract algebra", question="1 + 1?", choices="A. 1\nB. 2")],
            ),
        ),
        (
            {"question": "How many?", "choices": list(range(10))},  # as many as MMLU-Pro has
            Prompt(
                "1",
                [
                    MMLU_REQUEST.format(
                        subject="general knowledge",
                        question="How many?",
                        choices="\n".join(f"{letter}. {n}" for n, letter in enumerate("ABCDEFGHIJ")),
                    )
                ],
            ),
        ),
        ({"category": "qa", "turns": ["a?"]}, Prompt("1", ["a?"], group="qa")),
        ({"category": "math", "turns": ["a?", "b?"]}, Prompt("1", ["a?", "b?"], group="mt_bench")),
        ({"category": "math", "turns": ["a?"]}, Prompt("1", ["a?"], group="math")),  # EAGLE's GSM8K
        (
            {"prompt": ["a?", "b?"], "prompt_id": 7, "category": "stem", "reference": []},
            Prompt("7", ["a?", "b?"], group="mt_bench"),
        ),
        ({"example_id": 5, "question_text": "who?", "question_tokens": ["who"]}, Prompt("5", ["who?"])),
        (
            {"translation": {"de": "Hallo", "en": "Hi", "fr": None}},
            Prompt("1", ["Translate German to English: Hallo"]),
        ),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": ""}]},
            Prompt("1", ["Hi"]),
        ),
        ({"instruction": "Name it.", "output": "It", "label": False}, Prompt("1", ["Name it."])),
        ({"id": "", "prompt": "Say hi."}, Prompt("1", ["Say hi."])),
        ({"category": "", "turns": ["a?"]}, Prompt("1", ["a?"])),
        ({"instruction": "Name it.", "input": "<noinput>"}, Prompt("1", ["Name it."])),
        ({"prompt": "Say hi."}, Prompt("1", ["Say hi."])),
        ({"id": "p7", "prompt": "Line\u2028separator"}, Prompt("p7", ["Line\u2028separator"])),
        (
            {
                "id": "c",
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "One?"},
                    {"from": "gpt", "value": "answer"},
                    {"from": "human", "value": "Two?"},
                    {"from": "gpt", "value": "answer"},
                ],
            },
            Prompt("c", ["One?", "Two?"], system="Be brief."),
        ),
        ({"messages": [{"role": "user", "content": "Hi"}]}, Prompt("1", ["Hi"])),
        ({"instruction": "Name it.", "input": "", "output": "it"}, Prompt("1", ["Name it."])),
    ],
)
def test_forms(tmp_path, row, expected):
    assert read_prompts(write(tmp_path / "p.jsonl", row)) == [expected]


def test_half_a_surrogate_pair_is_replaced(tmp_path):  # JSON can escape it, tokenizers fail at it
    (tmp_path / "p.jsonl").write_text('{"id": "\\ud83d", "prompt": "Half \\ud83d a pair."}\n')
    assert read_prompts(tmp_path / "p.jsonl") == [Prompt("\ufffd", ["Half \ufffd a pair."])]


def test_text_files_hold_a_prompt_per_line(tmp_path):
    (tmp_path / "p.txt").write_text("First?\n\n  Second?\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(tmp_path / "p.txt")] == [["First?"], ["Second?"]]


def test_trivia_qa_has_answers_after_a_tab(tmp_path):
    text = "Who?\t['A', 'B']\nWhat?\t\"['\"\"C\"\"']\"\nLine\u2028separator\t['x']\nnot\ttrivia\n"
    (tmp_path / "topics.txt").write_text(text, encoding="utf-8")
    prompts = read_prompts(tmp_path / "topics.txt")
    assert [p.turns[0] for p in prompts] == ["Who?", "What?", "Line\u2028separator", "not\ttrivia"]


@pytest.fixture
def mmlu(tmp_path) -> Path:
    """An archive as MMLU's is, with cells of several lines."""
    with zipfile.ZipFile(tmp_path / "mmlu.zip", "w") as archive:
        for split, rows in (("dev", 1), ("val", 2), ("test", 3)):
            for subject in ("anatomy", "us_law"):
                line = '"Is it, or\nnot, {}?",yes,"no, ""never""",0,1,B\r\n'
                text = "".join(line.format(i) for i in range(rows))
                archive.writestr(f"data/{split}/{subject}_{split}.csv", text)
        archive.writestr("data/README.txt", "not a prompt\n")
    return tmp_path / "mmlu.zip"


def test_mmlu_is_its_test_split(mmlu, tmp_path):
    prompts = read_prompts(mmlu)
    assert sorted(p.id for p in prompts) == [
        f"{s}_test-{i}" for s in ("anatomy", "us_law") for i in (1, 2, 3)
    ]
    text = next(p.turns[0] for p in prompts if p.id == "us_law_test-2")
    choices = 'A. yes\nB. no, "never"\nC. 0\nD. 1'
    assert text == MMLU_REQUEST.format(subject="us law", question="Is it, or\nnot, 1?", choices=choices)
    zipfile.ZipFile(mmlu).extractall(tmp_path / "unpacked")
    assert len(read_prompts(tmp_path / "unpacked/data/val")) == 4  # another split, asked for


def test_tables_with_a_header(tmp_path):
    path = tmp_path / "cnn.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "article", "highlights"], ["x1", 'Lines,\n“one” and "two"', "h"]])
    assert read_prompts(path) == [Prompt("x1", ['Summarize: Lines,\n“one” and "two"'])]
    (tmp_path / "alpaca.csv").write_text("instruction,input,output\nName it.,a cat,It\n")
    assert read_prompts(tmp_path / "alpaca.csv") == [Prompt("1", ["Name it.\n\na cat"])]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b\n", "x.csv:row 1: must be a header with .* or as in MMLU, got 'a, b'; write"),
        ("turns,category\n\"['a' 'b']\",stem\n", "x.csv:row 1: must be a header"),  # a list in a cell
        ("Q?,a,b,c,d,B\nQ?,a,b,c,d,E\n", "x.csv:row 2: must be as in MMLU .*, got 6 cells; write"),
        ("question,answer\nq,a\nq\n", "x.csv:row 2: must have 2 cells as the header, got 1; fix it"),
        ("question,answer\n,a\n", "x.csv:row 1: no prompt in it"),
    ],
)
def test_other_tables_are_refused(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "x.csv")


def test_parquet(tmp_path):
    rows = [
        {"translation": {"cs": "Dobrý den", "en": "Good day"}},
        {"translation": {"cs": "Ano\u2028ne", "en": "y"}},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test-00000-of-00001.parquet")
    prompts = read_prompts(tmp_path / "test-00000-of-00001.parquet")
    assert [p.turns for p in prompts] == [
        ["Translate Czech to English: Dobrý den"],
        ["Translate Czech to English: Ano\u2028ne"],
    ]
    with pytest.raises(
        UserError, match="must not be a folder of Parquet files, .*; name one of them, .* hub:"
    ):
        read_prompts(tmp_path)


def test_files_with_all_in_one_value(tmp_path):
    drop = {
        "nfl_1": {"passage": "P.", "qa_pairs": [{"question": "a?", "query_id": "q1"}], "wiki_url": "u"},
        "nfl_2": {"passage": "R.", "qa_pairs": [{"question": "b?"}, {"question": "c?", "query_id": "q3"}]},
    }
    (tmp_path / "drop_dataset_dev.json").write_text(json.dumps(drop))
    assert read_prompts(tmp_path / "drop_dataset_dev.json") == [
        Prompt("q1", ["Passage: P.\nQuestion: a?\nAnswer:"]),
        Prompt("2", ["Passage: R.\nQuestion: b?\nAnswer:"]),
        Prompt("q3", ["Passage: R.\nQuestion: c?\nAnswer:"]),
    ]
    trivia = {"Data": [{"Question": "Who?", "QuestionId": "tc_33", "Answer": {}}], "Domain": "Web"}
    (tmp_path / "web-dev.json").write_text(json.dumps(trivia, indent=1))
    assert read_prompts(tmp_path / "web-dev.json") == [Prompt("tc_33", ["Who?"])]


def test_other_files_beside_prompts_in_a_folder_are_not_read(tmp_path):
    for name in ("README.md", "readme.txt", "LICENSE", "load.py", ".gitattributes"):
        (tmp_path / name).write_text("words\n")
    write(tmp_path / "question.jsonl", {"question_id": 1, "turns": ["a?"]})
    assert read_prompts(tmp_path) == [Prompt("1", ["a?"])]


def test_spec_bench_comes_apart_by_group():
    groups = ["mt_bench", "qa", "mt_bench", "rag", None]
    task = Task("spec", [Prompt(str(i), ["?"] * 2, group=group) for i, group in enumerate(groups)], 2)
    parts = task.parts()
    assert [(p.name, [one.id for one in p.prompts], p.turns) for p in parts] == [
        ("spec/mt_bench", ["0", "2"], 2),
        ("spec/qa", ["1"], 2),
        ("spec/rag", ["3"], 2),
        ("spec/other", ["4"], 2),
    ]
    assert parts[0].parts() == [parts[0]]


def test_arrays_gzip_and_limit(tmp_path):
    rows = [{"prompt": f"p{i}"} for i in range(5)]
    with gzip.open(tmp_path / "p.json.gz", "wt", encoding="utf-8") as file:
        json.dump(rows, file)
    assert [p.turns[0] for p in read_prompts(tmp_path / "p.json.gz", limit=3)] == ["p0", "p1", "p3"]


def test_ids_are_unique(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"id": "same", "prompt": str(i)} for i in range(3)))
    assert [prompt.id for prompt in read_prompts(path)] == ["same", "same#2", "same#3"]
    path = write(tmp_path / "q.jsonl", *({"id": id, "prompt": "?"} for id in ("x", "x#3", "x")))
    assert [prompt.id for prompt in read_prompts(path)] == ["x", "x#3", "x#4"]
    for name in ("a", "b", "c"):  # three files that count from 0, as EAGLE's
        (tmp_path / "eagle" / name).mkdir(parents=True)
        write(
            tmp_path / "eagle" / name / "question.jsonl",
            *({"question_id": i, "turns": ["?"]} for i in (0, 1)),
        )
    assert len({prompt.id for prompt in read_prompts(tmp_path / "eagle")}) == 6


def test_ids_are_unique_over_files(tmp_path):
    (tmp_path / "parts").mkdir()
    for name in "abcd":
        write(tmp_path / "parts" / f"{name}.jsonl", {"prompt": f"{name} 1"}, {"prompt": f"{name} 2"})
    prompts = read_prompts(tmp_path / "parts")
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 8
    assert [prompt.id for prompt in prompts[:4]] == ["1", "2", "1#1", "2#2"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no prompts in it; give rows"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "p.jsonl:row 2: no prompt in it"),
        ('{"turns": []}\n', "row 1: no prompt in it"),
        ('{"words": "a"}\n', "row 1: no prompt in it; give it one under turns, question or prompt"),
        ('{"text": "a"}\n', "row 1: no prompt in it"),
        ('{"prompt": 3}\n', "row 1: no prompt in it"),
        ('{"prompt": [{"role": "user", "content": "a?"}]}\n', "row 1: no prompt in it"),
        ('{"prompt": []}\n', "row 1: no prompt in it"),
        ('{"article": 3}\n', "row 1: no prompt in it"),
        ('{"translation": {"de": "x"}}\n', "row 1: no prompt in it"),
        ('{"passage": null, "question": "a?"}\n', "row 1: no prompt in it"),
        ('{"passage": "a", "question": ""}\n', "row 1: no prompt in it"),
        ('{"question": "a?", "choices": "[1, 2]"}\n', "row 1: no prompt in it"),
        ('{"question": "", "choices": ["1", "2"]}\n', "row 1: no prompt in it"),
        ('{"text": "a", "test_list": "assert f(1)"}\n', "row 1: no prompt in it"),
        ('{"text": "", "test_list": ["assert f(1)"]}\n', "row 1: no prompt in it"),
        ('{"turns": ["a?", ""]}\n', "row 1: no prompt in it"),
        ('["a"]\n', "row 1: must be a JSON object, got a list; fix or remove the row"),
        ('{"prompt": "a"}\n{"prompt": "b', "row 2: not JSON"),
    ],
)
def test_bad_files_are_refused_by_row(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_prompts(tmp_path / "p.jsonl")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


# the files of the repository


@pytest.mark.parametrize(
    "name, count, turns, first",
    [
        ("mt_bench.jsonl", 80, 2, "Compose an engaging travel blog post"),
        ("gsm8k_test_80.jsonl", 80, 1, "Janet\u2019s ducks lay 16 eggs per day."),
        ("gsm8k_test.jsonl.gz", 1319, 1, "Janet\u2019s ducks lay 16 eggs per day."),
        ("creative_writing.jsonl.gz", 100, 1, "It isn't difficult to do a handstand if you just"),
        ("blocksworld_step_6.jsonl.gz", 145, 1, "At the start the hand is empty, block a is clear,"),
        ("mbpp.jsonl", 80, 1, "You are an expert Python programmer, and here is your task: Write a"),
        ("drop.jsonl", 80, 1, "Passage: In the city, the age distribution of the population"),
        (
            "mmlu.jsonl",
            80,
            1,
            "Answer this multiple choice question about abstract algebra, and say why.\n\n",
        ),
        ("nq_open.jsonl", 80, 1, "when was the last time anyone was on the moon"),
        ("rag.jsonl", 40, 1, "Some researchers state that forests do not only provide benefits"),
        ("humaneval.jsonl.gz", 164, 1, "Complete the code I provided.\n\nfrom typing import List"),
    ],
)
def test_benchmarks_of_the_repository(name, count, turns, first):
    prompts = read_prompts(DATA / "eval" / name)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == count
    assert all(len(prompt.turns) == turns for prompt in prompts)
    assert prompts[0].turns[0].startswith(first)


@pytest.mark.parametrize("path", sorted((DATA / "eval").iterdir()), ids=lambda path: path.name)
def test_readme_has_every_checksum(path):
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    line = next(
        line for line in (DATA / "README.md").read_text().splitlines() if f"eval/{path.name}`" in line
    )
    assert digest in line and any(
        licence in line for licence in ("MIT", "Apache-2.0", "OANC:", "CC BY 4.0", "CC BY-SA")
    )


# chats


def test_chat_with_answers(tiny_llama):
    _, tokenizer = tiny_llama
    prompt = Prompt("a", ["One?", "Two?"], system="Be brief.")
    chat = [Message("system", "Be brief."), Message("user", "One?")]
    assert prompt.token_ids(tokenizer) == encode_prompt(tokenizer, chat)
    chat += [Message("assistant", "First."), Message("user", "Two?")]
    assert prompt.token_ids(tokenizer, ["First."]) == encode_prompt(tokenizer, chat)


def test_base_models_continue_the_text(tiny_llama):
    class Base:
        chat_template = None

        def __call__(self, text):
            return {"input_ids": [len(text)]}

    assert Prompt("a", ["abc"]).token_ids(Base()) == [3]


# tasks


def test_tasks(tmp_path):
    path = write(tmp_path / "p.jsonl", {"turns": ["a", "b"]}, {"turns": ["c"]}, {"turns": ["d", "e"]})
    task = Task.read(PromptSet("name", str(path), limit=2, turns=2))
    assert (task.name, len(task.prompts), task.n_turns) == ("name", 2, 3)


@pytest.mark.parametrize("n, taken", [(0, []), (1, [1]), (4, [2, 2]), (5, [3, 2]), (6, [4, 2]), (99, [7, 2])])
def test_first_of_each_takes_turns(n, taken):
    tasks = [
        Task(name, [Prompt(str(i), ["?"]) for i in range(count)], turns=2)
        for name, count in (("a", 7), ("b", 2))
    ]
    share = first_of_each(tasks, n)
    assert [len(task.prompts) for task in share] == taken
    assert all(task.prompts == whole.prompts[: len(task.prompts)] for task, whole in zip(share, tasks))
