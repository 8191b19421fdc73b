"""Every form of prompt file, the files that the repository brings, and what is refused."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from drafttrain.corpus.chat import encode_prompt
from drafttrain.corpus.conversation import Message
from drafttrain.errors import UserError
from drafttrain.evaluation.prompts import (
    CODE_REQUEST,
    MBPP_REQUEST,
    Prompt,
    PromptSet,
    Task,
    first_of_each,
    read_prompts,
)

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


def test_text_files_hold_a_prompt_per_line(tmp_path):
    (tmp_path / "p.txt").write_text("First?\n\n  Second?\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(tmp_path / "p.txt")] == [["First?"], ["Second?"]]


def test_arrays_gzip_and_limit(tmp_path):
    rows = [{"prompt": f"p{i}"} for i in range(5)]
    with gzip.open(tmp_path / "p.json.gz", "wt", encoding="utf-8") as file:
        json.dump(rows, file)
    assert [p.turns[0] for p in read_prompts(tmp_path / "p.json.gz", limit=3)] == ["p0", "p1", "p2"]


def test_ids_are_unique(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"id": "same", "prompt": str(i)} for i in range(3)))
    assert [prompt.id for prompt in read_prompts(path)] == ["same", "same#2", "same#3"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "p.jsonl:row 2: no prompt in it"),
        ('{"turns": []}\n', "row 1: no prompt in it"),
        ('{"prompt": 3}\n', "row 1: no prompt in it"),
        ('["a"]\n', "row 1: a list in place of a JSON object"),
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
        ("mbpp.jsonl", 80, 1, "You are an expert Python programmer, and here is your task: Write a"),
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
    assert digest in line and any(licence in line for licence in ("MIT", "Apache-2.0", "OANC:", "CC BY 4.0"))


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
