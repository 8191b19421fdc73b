"""The scripts that make the text that the repository ships, and the corpus that is read from it."""

import gzip
import itertools
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import parquet

from drafttrain.data.build import build_corpus
from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.corpus import load_corpus
from drafttrain.data.loss_mask import fill_texts
from drafttrain.data.overlap import EvaluationPrompts, fold
from drafttrain.data.prompts import read_rows
from drafttrain.data.readers import read_conversations
from drafttrain.reasoning.tasks.blocks import Blocks, check_plan, read_pddl
from drafttrain.reasoning.tasks.blocksworld import Blocksworld
from drafttrain.utils.errors import UserError
from drafttrain.utils.hashes import sha256_file

SCRIPTS = Path(__file__).parent.parent / "scripts"
WRITING = "data/eval/creative_writing.jsonl.gz"


def script(name: str) -> dict:
    return runpy.run_path(str(SCRIPTS / name))


def answered(folder: Path, tokenizer, answers: dict[str, str]) -> Path:
    """Write a regeneration folder with one conversation for each id and answer."""
    folder.mkdir(parents=True)
    rows = []
    for id, answer in answers.items():
        ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        turns = [
            {"from": "human", "value": f"Question {id}?"},
            {"from": "gpt", "value": answer, "token_ids": ids},
        ]
        rows.append({"id": id, "conversations": turns, "finish_reason": "stop", "temperature": 0.0})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    record = {"settings": {"tokenizer": tokenizer_hash(tokenizer)}, "report": None}
    (folder / "regenerate.json").write_text(json.dumps(record))
    (folder / "responses.partial.jsonl").write_text(text + '{"id": "half')  # the process died while writing
    return folder


def test_packed_answers_make_the_same_corpus_as_the_json(tmp_path, chatml):
    first = answered(tmp_path / "a", chatml, {"x": "One.", "y": "Two, and more."})
    second = answered(tmp_path / "b", chatml, {"y": "Another answer.", "z": "Three."})
    out = tmp_path / "answers.parquet"
    pack = script("pack_responses.py")["pack"]
    n_rows, n_tokens = pack([first, second], out)
    rows = parquet.read_table(out).to_pylist()
    assert [row["id"] for row in rows] == ["x", "y", "z"]
    assert n_rows == 3 and n_tokens == sum(len(row["conversations"][1]["token_ids"]) for row in rows)
    assert all(row["conversations"][1]["value"] is None for row in rows)
    again = tmp_path / "again.parquet"
    pack([first, second], again)
    assert again.read_bytes() == out.read_bytes()
    third = answered(tmp_path / "c", chatml, {"w": "Four.", "x": "Five.", "X": "Six."})
    assert pack([third], again, without=[out])[0] == 1  # x is there, and "Question X?" has been asked
    assert [row["id"] for row in parquet.read_table(again).to_pylist()] == ["w"]
    (tmp_path / "prompts.txt").write_text("question Y")
    assert pack([first, second], again, [str(tmp_path / "prompts.txt")])[0] == 2

    whole = [line for line in (first / "responses.partial.jsonl").read_text().splitlines()[:2]]
    whole += [(second / "responses.partial.jsonl").read_text().splitlines()[1]]
    (tmp_path / "answers.jsonl").write_text("\n".join(whole) + "\n")
    corpora = []
    for name in ("answers.parquet", "answers.jsonl"):
        config = CorpusConfig([Source(str(tmp_path / name))], max_length=64, validation_fraction=0.0)
        build_corpus(config, chatml, tmp_path / f"{name} corpus")
        corpora.append(load_corpus(tmp_path / f"{name} corpus", chatml)[0]["train"])
    assert corpora[0].to_list() == corpora[1].to_list()
    assert sum(corpora[0][0]["loss_mask"]) == len(rows[0]["conversations"][1]["token_ids"])


def test_two_answers_to_one_prompt_are_no_duplicates_and_other_tokenizers_are_refused(tmp_path, chatml):
    turns = [
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "token_ids": chatml("Because.")["input_ids"]},
    ]
    other = [turns[0], {"from": "gpt", "token_ids": chatml("Who knows?")["input_ids"]}]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": str(i), "conversations": c}) + "\n" for i, c in enumerate([turns, other, turns])
        )
    )
    report = build_corpus(
        CorpusConfig([Source(str(path))], max_length=64, validation_fraction=0.0), chatml, tmp_path / "c"
    )
    assert report.sources[str(path)].skipped == {"duplicate": 1}

    turns[1]["token_ids"] = [10**6]
    path.write_text(json.dumps({"id": "0", "conversations": turns}))
    conversation = next(read_conversations(path))
    with pytest.raises(
        UserError, match="row 1: turn 2: token_ids: must be in 0..\\d+; use the tokenizer that made them$"
    ):
        fill_texts(chatml, conversation, tokenizer_hash(chatml))


def test_packed_answers_of_another_target_are_refused(tmp_path, chatml):
    folder = answered(tmp_path / "a", chatml, {"x": "One.", "y": "Two."})
    record = {"settings": {"tokenizer": "another"}, "report": None}
    (folder / "regenerate.json").write_text(json.dumps(record))
    out = tmp_path / "answers.parquet"
    script("pack_responses.py")["pack"]([folder], out)
    config = CorpusConfig([Source(str(out))], max_length=64, validation_fraction=0.0)
    with pytest.raises(
        UserError, match="turn 2: token_ids: must be of the target's tokenizer, got another's; .*regenerate"
    ):
        build_corpus(config, chatml, tmp_path / "corpus")


def test_training_prompts_leave_evaluation_out(tmp_path):
    prompts = script("training_prompts.py")
    tasks = [
        {"task_id": i, "text": f"Task {i}.", "test_list": [f"assert f({i})"]} for i in (10, 11, 510, 511)
    ]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    rows = list(prompts["mbpp_tasks"](tmp_path / "mbpp.jsonl"))
    assert [row["id"] for row in rows] == ["mbpp-10", "mbpp-511"]
    assert rows[0]["conversations"][0]["value"] == "Task 10. Your code should pass this test:\n\nassert f(10)"

    for part in ("news", "novels"):
        (tmp_path / "oanc" / part).mkdir(parents=True)
        for number in range(3):
            text = "\n\n".join(f"{part} {number} {i} ".capitalize() + "word " * 80 for i in range(4))
            (tmp_path / "oanc" / part / f"{number}.txt").write_text(text)
    drawn = list(prompts["passages"](tmp_path / "oanc", 6, {"news/1"}, 0))
    assert drawn == list(prompts["passages"](tmp_path / "oanc", 6, {"news/1"}, 0))
    texts = [row["conversations"][0]["value"] for row in drawn]
    assert sum("News" in text for text in texts) == 3 and not any("News 1" in text for text in texts)
    assert all(text.split("\n\n")[0] in prompts["REQUESTS"] for text in texts)


@pytest.mark.parametrize("option", ["--gsm8k", "--mbpp", "--oasst", "--oanc"])
def test_sources_of_training_prompts_that_are_missing(option, tmp_path, capsys):
    main, out = script("training_prompts.py")["main"], tmp_path / "prompts.jsonl.gz"
    with pytest.raises(SystemExit) as error:
        main([option, str(tmp_path / "nowhere"), "--out", str(out)])
    assert error.value.code == 2 and not out.exists()
    printed = capsys.readouterr().err
    assert printed.startswith("training_prompts: ") and "nowhere" in printed and printed.count("\n") == 1


def test_packed_files_that_are_missing(tmp_path, chatml):
    folder = answered(tmp_path / "a", chatml, {"x": "One."})
    with pytest.raises(UserError, match="nowhere.*name a file that this script wrote"):
        script("pack_responses.py")["pack"](
            [folder], tmp_path / "out.parquet", without=[tmp_path / "nowhere"]
        )


def test_prompts_are_written_whole(tmp_path):
    written, out = script("written_prompts.py"), tmp_path / "prompts.jsonl.gz"
    written["main"](["--number", "20", "--out", str(out)])
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 20
    with pytest.raises(SystemExit):
        written["main"](["--number", "0", "--out", str(out)])
    with pytest.raises(SystemExit):
        script("training_problems.py")["main"](
            ["--gsm8k", "a", "--oanc", "b", "--number", "-1", "--out", str(tmp_path / "problems")]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl.gz"]


def test_the_shipped_answers_hold_no_evaluation_prompt_and_their_hash_is_the_documented_one():
    data = SCRIPTS.parent / "data"
    names = ("eval", "tuning_prompts.jsonl", "validation_prompts.jsonl", "heldout_prompts.jsonl")
    prompts = EvaluationPrompts.read([str(data / name) for name in names])
    files = [data / f"train/answers{part}.parquet" for part in ("", "_2", "_3", "_4", "_5")]
    rows = [row for path in files for row in parquet.read_table(path).to_pylist()]
    assert len(rows) > 10_000 and len({row["id"] for row in rows}) == len(rows)
    # some of their prompts are in the first three as well
    for name in ("qwen2.5-coder-0.5b", "thoughts", "thoughts_2"):
        files.append(data / f"train/{name}.parquet")
        rows += parquet.read_table(files[-1]).to_pylist()
    asked = [row["conversations"][0]["value"] for row in rows]
    assert not [prompt for prompt in asked if prompts.overlap(prompt)]
    sentences = {fold(text) for row in read_rows_of(WRITING) for text in row["end_sentences"]}
    tasks = [row for row in rows if row["id"].startswith("writing/")]
    lines = {fold(line[3:]) for row in tasks for line in row["conversations"][0]["value"].split("\n")}
    assert len(tasks) > 500 and len(sentences) > 50 and not lines & sentences
    documented = (data / "README.md").read_text(encoding="utf-8")
    assert all(sha256_file(path) in documented for path in files)


@pytest.mark.parametrize("name", ["responses.jsonl.gz", "self_prompts.jsonl.gz", "conversations.jsonl"])
def test_the_shipped_chats_hold_no_benchmark_prompt_and_their_hash_is_the_documented_one(name):
    data = SCRIPTS.parent / "data"
    prompts = EvaluationPrompts.read([str(data / "eval")])
    chats = list(read_conversations(data / "train" / name))
    asked = [message.content for chat in chats for message in chat.messages if message.role == "user"]
    assert len(asked) >= 500 and not [prompt for prompt in asked if prompts.overlap(prompt)]
    assert sha256_file(data / "train" / name) in (data / "README.md").read_text(encoding="utf-8")


def test_written_prompts_are_each_another_and_none_of_an_evaluation():
    prompts = script("written_prompts.py")["prompts"]
    drawn = list(prompts(3000, 1))
    assert drawn == list(prompts(3000, 1)) and drawn[:20] != list(prompts(20, 2))
    requests = [request for _, request in drawn]
    assert len(set(requests)) == 3000 and not any("{" in request for request in requests)
    assert min(Counter(kind for kind, _ in drawn).values()) > 200
    names = ("eval", "tuning_prompts.jsonl", "validation_prompts.jsonl", "heldout_prompts.jsonl")
    evaluation = EvaluationPrompts.read([str(SCRIPTS.parent / "data" / name) for name in names])
    assert not [request for request in requests if evaluation.overlap(request)]


def test_gsm8k_and_oasst_prompts(tmp_path):
    prompts = script("training_prompts.py")
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write(json.dumps({"question": "How many?", "answer": "3\n#### 3"}) + "\n")
    row = next(prompts["exchanges"](tmp_path / "train.jsonl.gz", "gsm8k-train"))
    assert row == {"id": "gsm8k-train-0", "conversations": [{"from": "human", "value": "How many?"}]}
    (tmp_path / "o.json").write_text(json.dumps({"prompts": [{"prompt": "Why? ", "results": []}]}))
    row = next(prompts["oasst_prompts"](tmp_path / "o.json"))
    assert row["conversations"][0]["value"] == "Why?"


def test_training_problems_are_others_than_the_stored_ones(tmp_path):
    problems = script("training_problems.py")
    tuned = read_rows_of("data/tuning_gsm8k.jsonl")
    other = {"question": "How many legs have four cats and three birds together?", "answer": "#### 22"}
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*tuned, other]))
    assert [row["question"] for row in problems["gsm8k"](path, 0)] == [other["question"]]

    rows, again, others = (list(itertools.islice(problems["blocksworld"](seed), 12)) for seed in (0, 0, 1))
    assert rows == again and rows != others and len({row["prompt"] for row in rows}) == len(rows)
    read = [Blocksworld().problem(row["id"], row, "row") for row in rows]  # which checks its plan
    stored = [
        read_pddl(row["pddl"], "stored") for row in read_rows_of("data/eval/blocksworld_step_6.jsonl.gz")
    ]
    forms = {problems["without_names"](blocks) for blocks in stored}
    assert len(forms) > 50
    for problem, row in zip(read, rows):
        assert problems["without_names"](problem.reference) not in forms
        assert row["plan"].count("\n") == 6 and problem.text == row["prompt"]


def test_stored_problems_are_found_under_other_names():
    problems = script("training_problems.py")
    row = read_rows_of("data/eval/blocksworld_step_6.jsonl.gz")[0]
    renamed = re.sub(r"\b([a-d])\b", lambda found: "dcab"["abcd".index(found[1])], row["pddl"])
    first, second = (problems["without_names"](read_pddl(text, "row")) for text in (row["pddl"], renamed))
    assert renamed != row["pddl"] and first == second
    known = read_pddl(row["pddl"], "row")
    other = Blocks(known.names, known.start, frozenset({("on", "d", "c")}))
    assert problems["without_names"](other) != first


@pytest.mark.parametrize("seed", range(20))
def test_shortest_plans(seed):
    """A plan reaches its goal, and no shorter one does."""
    problems = script("training_problems.py")
    draw = random.Random(seed)
    goal = frozenset(fact for fact in problems["placed"]("abc", draw) if fact[0] == "on")
    blocks = Blocks(("a", "b", "c"), frozenset(problems["placed"]("abc", draw)), goal)
    plan = problems["shortest_plan"](blocks, 12)
    assert check_plan(blocks, plan) is None and problems["shortest_plan"](blocks, len(plan) - 1) == []


def read_rows_of(path: str) -> list[dict]:
    return [row for _, _, row in read_rows(SCRIPTS.parent / path)]
