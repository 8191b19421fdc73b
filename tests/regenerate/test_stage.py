"""Regeneration against the slow way: one conversation, one turn, one full forward per token."""

import copy
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from drafttrain.data.chat import encode_prompt
from drafttrain.data.config import PromptSet, RegenerateConfig, Source
from drafttrain.data.conversation import Conversation
from drafttrain.data.loss_mask import encode_conversation
from drafttrain.data.message import Message
from drafttrain.data.readers import read_conversations
from drafttrain.inference.decode import decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.proposer import NoProposer
from drafttrain.regenerate import stage
from drafttrain.regenerate.dialogues import plan_dialogues
from drafttrain.regenerate.rewriting import Rewriting
from drafttrain.regenerate.stage import answer_conversations
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

QUESTIONS = [
    ["What is the fox doing?", "And the lazy dog?", "Where is the river?"],
    ["Explain speculative decoding."],
    ["def main(arguments):", "for index, value"],
    ["How many eggs are left?", "And how many muffins?", "For how many dollars?"],
    ["Once upon a time there was a little girl who lived in a village near the forest. Go on."],
    ["Think about the question; then answer it step by step."],
    ["one", "two", "three", "four", "five"],
    ["A small model drafts several tokens, and the large model", "verifies all of them"],
]
SMALL = {"max_new_tokens": 12, "max_prompt_tokens": 300, "max_turns": 3, "batch_rows": 3}


def chats(questions=QUESTIONS) -> list[dict]:
    """ShareGPT rows; every second one has a system turn, and none of the answers is the target's."""
    rows = []
    for number, turns in enumerate(questions):
        messages = [{"from": "system", "value": "Be brief."}] if number % 2 else []
        for turn in turns:
            messages += [{"from": "human", "value": turn}, {"from": "gpt", "value": "SOMEBODY ELSE'S WORDS"}]
        rows.append({"id": f"chat-{number}", "conversations": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def one_by_one(target, row: dict, max_turns: int, max_new_tokens: int) -> list[list[int]]:
    """Greedy answers to a row's questions: no cache, no batch, every prompt encoded from the start."""
    model, tokenizer, stop = target.model, target.tokenizer, target.eos_token_ids
    messages, answers = [], []
    for turn in row["conversations"]:
        if turn["from"] == "gpt" or len(answers) == max_turns:
            continue
        messages.append(Message({"human": "user"}.get(turn["from"], turn["from"]), turn["value"]))
        if turn["from"] == "system":
            continue
        ids = encode_prompt(tokenizer, messages)
        answer = []
        while len(answer) < max_new_tokens and not (answer and answer[-1] in stop):
            logits = model(torch.tensor([ids + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
        answers.append(answer)
        messages.append(Message("assistant", tokenizer.decode(answer, skip_special_tokens=True)))
    return answers


def stopping(model, tokenizer) -> FrozenTarget:
    """A target that ends its answers now and then, which a random model does not: many tokens end them."""
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(5, 512, 12)]
    return FrozenTarget(model, tokenizer, "tiny")


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def any_target(request) -> FrozenTarget:
    return stopping(*request.getfixturevalue(request.param))


@pytest.fixture
def target(tiny_llama) -> FrozenTarget:
    return stopping(*tiny_llama)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", chats())


def config_for(source: Path, **changes) -> RegenerateConfig:
    return RegenerateConfig(sources=[Source(str(source))], **{**SMALL, "greedy_fraction": 1.0, **changes})


def run(config: RegenerateConfig, out: Path, target: FrozenTarget, earlier=()):
    return answer_conversations(config, out, target, target.tokenizer, earlier, Console(quiet=True))


def interrupt(config: RegenerateConfig, out: Path, target: FrozenTarget, rows: int) -> str:
    """Press Ctrl-C once a run has written this many rows; returns what it prints."""
    write, left, console = Rewriting.write, [rows], Console(file=StringIO(), width=300)

    def counted(self, dialogue, row) -> None:
        write(self, dialogue, row)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rewriting, "write", counted)
        answer_conversations(config, out, target, target.tokenizer, console=console)
    return console.file.getvalue()


def test_evaluation_prompts_are_not_answered(target, source, tmp_path):
    """Nor kept where they were answered before the recipe named them."""
    held = tmp_path / "held.jsonl"
    write_jsonl(held, [{"id": "1", "turns": [QUESTIONS[4][0].upper()]}])
    whole = run(config_for(source), tmp_path / "out", target)
    for out in (tmp_path / "out", tmp_path / "new"):  # the first one again
        options = {"console": Console(quiet=True), "exclude": [str(held)]}
        report = answer_conversations(config_for(source), out, target, target.tokenizer, **options)
        assert report.is_balanced and report.skipped["contains an evaluation prompt"] == 1
        ids = [row["id"] for row in read_jsonl(out / "responses.jsonl")]
        assert "chat-4" not in ids and len(ids) == report.written == whole.written - 1
    measured = [PromptSet("held", str(held))]
    with pytest.raises(UserError, match=r"regenerate.sources: must hold no conversation .*corpus.exclude"):
        options = {"console": Console(quiet=True), "measured": measured}
        answer_conversations(config_for(source), tmp_path / "b", target, target.tokenizer, **options)
    options |= {"exclude": [str(held)]}
    assert answer_conversations(
        config_for(source), tmp_path / "b", target, target.tokenizer, **options
    ).written


def test_trees_of_evaluation_problems_are_not_answered(target, tmp_path):
    """Their prompts reword the problem, which goes along with the answers of the others."""
    problem = "How many eggs are left in the basket by the door now?"
    held = str(write_jsonl(tmp_path / "held.jsonl", [{"id": "1", "turns": [problem]}]))
    source = write_jsonl(tmp_path / "a.jsonl", [row | {"tree_of": problem} for row in chats([["Step 1"]])])
    options = {"console": Console(quiet=True), "measured": [PromptSet("held", held)]}
    with pytest.raises(UserError, match="regenerate.sources: must hold no conversation"):
        answer_conversations(config_for(source), tmp_path / "b", target, target.tokenizer, **options)
    run(config_for(source), tmp_path / "out", target)
    [answered] = read_conversations(tmp_path / "out" / "responses.jsonl")
    assert answered.tree_of == problem and answered.asked == ["Step 1", problem]


def test_prompts_that_are_not_asked_leave_nothing_out(target, tmp_path):
    """A later turn than max_turns; and ids that occur again keep their numbers."""
    long = "How many eggs are left in the basket by the door now?"
    held = str(write_jsonl(tmp_path / "held.jsonl", [{"id": "1", "turns": [long]}]))
    quiet = {"console": Console(quiet=True)}
    twice = write_jsonl(
        tmp_path / "twice.jsonl", [row | {"id": "x"} for row in chats([[long], ["And then?"]])]
    )
    for options in (quiet, quiet | {"exclude": [held]}):
        answer_conversations(config_for(twice), tmp_path / "out", target, target.tokenizer, **options)
    assert [row["id"] for row in read_jsonl(tmp_path / "out" / "responses.jsonl")] == ["x#2"]
    config = config_for(write_jsonl(tmp_path / "later.jsonl", chats([["And then?", long]])), max_turns=1)
    options = quiet | {"measured": [PromptSet("held", held)]}
    report = answer_conversations(config, tmp_path / "later", target, target.tokenizer, **options)
    assert report.written == 1 and not report.skipped


def test_an_id_that_every_row_has_is_numbered_quickly():
    """Some files have the name of their data set as the id of each row."""
    rows = [Conversation("x", [Message("user", str(i))], f"row {i}") for i in range(50_000)]
    rows.insert(2, Conversation("x#3", [Message("user", "another")], "row"))
    options = {"max_turns": 1, "greedy_fraction": 1.0, "temperature": 0.0, "seed": 0, "deduplicate": False}
    ids = [dialogue.id for dialogue in plan_dialogues(rows, Counter(), **options)]
    assert ids[:5] == ["x", "x#2", "x#3", "x#4", "x#5"] and len(set(ids)) == len(rows)


def test_greedy_answers_equal_one_by_one(any_target, source, tmp_path):
    report = run(config_for(source), tmp_path / "out", any_target)
    rows = read_jsonl(tmp_path / "out" / "responses.jsonl")
    assert [row["id"] for row in rows] == [f"chat-{i}" for i in range(len(QUESTIONS))]
    finishes = set()
    for row, before in zip(rows, chats()):
        answers = [turn for turn in row["conversations"] if turn["from"] == "gpt"]
        expected = one_by_one(any_target, before, 3, 12)
        assert [turn["token_ids"] for turn in answers] == expected
        for turn in answers:
            assert turn["value"] == any_target.tokenizer.decode(turn["token_ids"], skip_special_tokens=True)
        asked = [turn for turn in before["conversations"] if turn["from"] != "gpt"]
        kept = [turn for turn in row["conversations"] if turn["from"] != "gpt"]
        assert kept == asked[: len(kept)] and len(answers) == min(
            3, len(asked) - (asked[0]["from"] == "system")
        )
        stopped = answers[-1]["token_ids"][-1] in any_target.eos_token_ids
        assert row["finish_reason"] == ("stop" if stopped else "length") and row["temperature"] == 0
        finishes.add(row["finish_reason"])
    assert finishes == {"stop", "length"}
    assert report.turns == sum(min(3, len(turns)) for turns in QUESTIONS)
    assert report.tokens == sum(len(t.get("token_ids", [])) for row in rows for t in row["conversations"])
    assert report.read == report.written == report.greedy == len(QUESTIONS) and report.is_balanced


def test_later_prompts_hold_the_new_answers(target, source, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "drafttrain.regenerate.rewriting.encode_prompt",
        lambda tokenizer, messages: seen.append(list(messages)) or encode_prompt(tokenizer, messages),
    )
    run(config_for(source), tmp_path / "out", target)
    rows = {row["id"]: row["conversations"] for row in read_jsonl(tmp_path / "out" / "responses.jsonl")}
    prompts = [[message.content for message in messages] for messages in seen]
    assert not any("SOMEBODY" in text for prompt in prompts for text in prompt)
    values = [turn["value"] for turn in rows["chat-3"]]
    for length in (2, 4, 6):  # system, question; … and the answers before each question
        assert values[:length] in prompts


def test_sampling_depends_on_seed_and_id_alone(target, source, tmp_path):
    sampled = config_for(source, greedy_fraction=0.5, temperature=1.0, top_p=0.9)
    report = run(sampled, tmp_path / "a", target)
    assert 0 < report.greedy < report.written
    backwards = write_jsonl(tmp_path / "backwards.jsonl", chats()[::-1])
    other = replace(sampled, sources=[Source(str(backwards))], batch_rows=8)
    run(other, tmp_path / "b", target)
    run(replace(sampled, seed=1), tmp_path / "c", target)
    a, b, c = (read_jsonl(tmp_path / name / "responses.jsonl") for name in "abc")
    assert a == b[::-1]
    assert a != c and [row["id"] for row in a] == [row["id"] for row in c]
    assert all((row["temperature"] == 0) == (row["temperature"] != 1.0) for row in a)


def test_an_answers_seed_gives_its_text_in_decoding(target, source, tmp_path, monkeypatch):
    """Drafted or not, alone or in a batch: sampled answers are those of `decode` with the request's seed."""
    asked = []
    to_request = Rewriting.to_request
    monkeypatch.setattr(Rewriting, "to_request", lambda *args: asked.append(to_request(*args)) or asked[-1])
    run(config_for(source, greedy_fraction=0.0, temperature=0.9, top_p=0.9), tmp_path / "out", target)
    rows = read_jsonl(tmp_path / "out" / "responses.jsonl")
    answers = [turn["token_ids"] for row in rows for turn in row["conversations"] if turn["from"] == "gpt"]
    assert len(asked) == len(answers) > 10
    rule = AcceptMatching([request.sampling for request in asked])
    outputs, _ = decode_all(target, NoProposer(), [request.prompt_ids for request in asked], 12, accept=rule)
    assert sorted(outputs) == sorted(answers)


def test_resumes_from_a_half_written_line(target, source, tmp_path):
    config = config_for(source, greedy_fraction=0.5, temperature=1.0)
    run(config, tmp_path / "whole", target)
    whole = (tmp_path / "whole" / "responses.jsonl").read_bytes()

    out = tmp_path / "out"
    printed = interrupt(config, out, target, rows=4)
    assert "4 of 8 conversations are kept in" in printed and "the same command goes on from there" in printed
    assert not (out / "responses.jsonl").exists()
    partial = out / "responses.partial.jsonl"
    lines = partial.read_bytes().split(b"\n")
    assert len(lines) == 5 and not lines[-1]
    partial.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][: len(lines[3]) // 2])  # kill -9 in mid-line

    encoded = []
    target.head, head = lambda final: encoded.append(1) or head(final), target.head
    report = run(config, out, target)
    assert report.written == 8 and report.is_balanced and encoded
    assert (out / "responses.jsonl").read_bytes() == whole
    assert not partial.exists() and not (out / "failed.jsonl").exists()
    # nothing is left to do: the same call answers nothing again
    encoded.clear()
    assert run(config, out, target) == report and not encoded
    assert (out / "responses.jsonl").read_bytes() == whole


@pytest.mark.parametrize("cut", [b"", b"{", b'{"id": "chat-9"', '{"id": "é'.encode()[:-1]])
def test_any_half_line_is_cut_off(target, source, tmp_path, cut):
    config = config_for(source)
    interrupt(config, tmp_path / "out", target, rows=2)
    with open(tmp_path / "out" / "responses.partial.jsonl", "ab") as file:
        file.write(cut)
    interrupt(config, tmp_path / "out", target, rows=1)
    assert len(read_jsonl(tmp_path / "out" / "responses.partial.jsonl")) == 3  # every line can be read
    assert run(config, tmp_path / "out", target).written == 8


def test_a_damaged_line_is_named(target, source, tmp_path):
    interrupt(config_for(source), tmp_path / "out", target, rows=3)
    partial = tmp_path / "out" / "responses.partial.jsonl"
    lines = partial.read_bytes().split(b"\n")
    partial.write_bytes(b"\n".join([lines[0], lines[1][:-9], lines[2], b""]))
    with pytest.raises(UserError, match="responses.partial.jsonl: line 2 is damaged"):
        run(config_for(source), tmp_path / "out", target)


def test_every_row_is_accounted_for(target, tmp_path):
    human, gpt = {"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}
    rows = chats() + [
        {"id": "empty", "conversations": []},
        {"id": "no user", "conversations": [gpt]},
        {"id": "blank", "conversations": [{"from": "human", "value": "  \n"}, gpt]},
        {"id": "copy", "conversations": chats()[2]["conversations"]},
        {"id": "long", "conversations": [{"from": "human", "value": "word " * 500}, gpt]},
        {"id": "surrogate", "conversations": [{"from": "human", "value": "half \ud83d"}, gpt]},
        {"id": "unanswered", "conversations": [human]},
        {"id": "chat-0", "conversations": [{"from": "human", "value": "An id that is there already"}, gpt]},
        {
            "id": "tools",
            "conversations": [
                {**human, "value": "Look it up"},
                gpt,
                {"from": "tool", "value": ""},
                gpt,
                human,
            ],
        },
        {"id": "text", "text": "The quick brown fox."},
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    report = run(config_for(source), tmp_path / "out", target)
    assert report.skipped == {
        "no turns": 1,
        "no user turn": 2,
        "same prompt as an earlier one": 1,
        "prompt longer than max_prompt_tokens": 1,
        "plain text, no turns": 1,
    }
    assert (report.read, report.written, report.failed) == (18, 12, 0) and report.is_balanced
    written = {row["id"]: row for row in read_jsonl(tmp_path / "out" / "responses.jsonl")}
    assert list(written)[8:] == ["surrogate", "unanswered", "chat-0#2", "tools"]  # the surrogate was replaced
    assert len(written["tools"]["conversations"]) == 2
    saved = json.loads((tmp_path / "out" / "regenerate.json").read_text())
    assert saved["report"]["skipped"] == report.skipped and saved["report"]["written"] == 12
    assert run(replace(config_for(source), deduplicate=False), tmp_path / "all", target).written == 13


def test_sources_can_be_sampled(source, target, tmp_path):
    config = config_for(source, max_turns=2)
    config.sources = [Source(str(source), max_conversations=3), Source(str(source), "sharegpt", 2)]
    config.deduplicate = False
    report = run(config, tmp_path / "out", target)
    assert (report.read, report.written, report.turns) == (5, 5, 8)
    ids = [row["id"] for row in read_jsonl(tmp_path / "out" / "responses.jsonl")]
    assert ids == ["chat-0", "chat-1", "chat-2", "chat-0#2", "chat-1#2"]


def test_a_long_chat_ends_before_the_turn_that_does_not_fit(target, tmp_path):
    questions = [["one", "two", "three " * 60], ["one more"]]
    source = write_jsonl(tmp_path / "chats.jsonl", chats(questions))
    report = run(config_for(source, max_prompt_tokens=120), tmp_path / "out", target)
    rows = read_jsonl(tmp_path / "out" / "responses.jsonl")
    assert [len(row["conversations"]) for row in rows] == [4, 3]
    assert report.ended_early == 1 and report.turns == 3 and report.is_balanced
    # its row is left out once the prompt of the turn that it lacks is excluded
    held = str(write_jsonl(tmp_path / "held.jsonl", [{"id": "1", "turns": [questions[0][2]]}]))
    options = {"console": Console(quiet=True), "exclude": [held]}
    config = config_for(source, max_prompt_tokens=120)
    report = answer_conversations(config, tmp_path / "out", target, target.tokenizer, **options)
    assert report.written == 1 and report.is_balanced
    assert [row["id"] for row in read_jsonl(tmp_path / "out" / "responses.jsonl")] == ["chat-1"]


def test_logits_that_are_not_finite_fail_one_row_only(target, source, tmp_path):
    """One token's embedding is NaN; the rows that share the cache with it are untouched."""
    model = copy.deepcopy(target.model)
    (poison,) = target.tokenizer("\x07", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[poison] = float("nan")
    questions = [QUESTIONS[0], ["Ring the \x07 bell"], *QUESTIONS[1:]]
    poisoned = write_jsonl(tmp_path / "poisoned.jsonl", chats(questions))
    config = config_for(poisoned, batch_rows=2)
    broken = FrozenTarget(model, target.tokenizer, "tiny")
    report = run(config, tmp_path / "out", broken)
    assert (report.written, report.failed) == (8, 1) and report.is_balanced
    (failure,) = read_jsonl(tmp_path / "out" / "failed.jsonl")
    assert failure["id"] == "chat-1" and failure["turn"] == 1 and "not finite" in failure["reason"]
    assert failure["source"].endswith("poisoned.jsonl:row 2")
    for row in read_jsonl(tmp_path / "out" / "responses.jsonl"):
        before = next(chat for chat in chats(questions) if chat["id"] == row["id"])
        answers = [turn["token_ids"] for turn in row["conversations"] if turn["from"] == "gpt"]
        assert answers == one_by_one(target, before, 3, 12)
    # the same command tries what failed again
    report = run(config, tmp_path / "out", FrozenTarget(target.model, target.tokenizer, "tiny"))
    assert (report.written, report.failed) == (9, 0) and not (tmp_path / "out" / "failed.jsonl").exists()


def test_too_many_failures_stop_the_run(target, tmp_path):
    model = copy.deepcopy(target.model)
    model.get_output_embeddings().weight.data.fill_(float("nan"))
    source = write_jsonl(tmp_path / "chats.jsonl", chats([[f"question {i}"] for i in range(40)]))
    with pytest.raises(UserError, match=r"got 20 of 20 \(the target's logits are not finite"):
        run(config_for(source), tmp_path / "out", FrozenTarget(model, target.tokenizer, "tiny"))
    with pytest.raises(UserError, match="no answer to write"):
        run(
            config_for(source, max_failed=1.0),
            tmp_path / "out",
            FrozenTarget(model, target.tokenizer, "tiny"),
        )
    assert not (tmp_path / "out" / "responses.jsonl").exists()


def test_failures_of_a_short_run_are_judged_in_the_end(target, tmp_path):
    model = copy.deepcopy(target.model)
    (poison,) = target.tokenizer("\x07", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[poison] = float("nan")
    broken = FrozenTarget(model, target.tokenizer, "tiny")
    questions = [[f"Question {i}" + (" \x07" if i % 2 else "")] for i in range(8)]
    source = write_jsonl(tmp_path / "chats.jsonl", chats(questions))
    with pytest.raises(
        UserError, match="max_failed: failed conversations must be at most 0.1 of all, got 4 of 8"
    ):
        run(config_for(source), tmp_path / "out", broken)
    report = run(config_for(source, max_failed=0.5), tmp_path / "out", broken)
    assert (report.written, report.failed) == (4, 4)


def test_answers_of_other_weights_are_not_taken(target, source, tmp_path):
    model = copy.deepcopy(target.model)
    other = FrozenTarget(model, target.tokenizer, "tiny")
    for weight in model.parameters():
        weight.data *= 1.01
    first = run(config_for(source), tmp_path / "out", target)
    with pytest.raises(UserError, match="out: made with weights"):
        run(config_for(source), tmp_path / "out", other)
    options = {"earlier": [tmp_path / "out"], "console": Console(quiet=True)}
    found = answer_conversations(config_for(source), tmp_path / "new", other, target.tokenizer, **options)
    rows, before = (read_jsonl(tmp_path / name / "responses.jsonl") for name in ("new", "out"))
    assert found.written == first.written and rows != before
    record = tmp_path / "out" / stage.RECORD
    values = json.loads(record.read_text())
    del values["settings"]["weights"]  # as an earlier version has written it
    record.write_text(json.dumps(values))
    answer_conversations(config_for(source), tmp_path / "more", target, target.tokenizer, **options)
    assert read_jsonl(tmp_path / "more" / "responses.jsonl") == before
    assert run(config_for(source), tmp_path / "out", target).written == first.written


def test_answers_of_the_same_weights_by_another_name_are_taken(target, source, tmp_path):
    moved = FrozenTarget(target.model, target.tokenizer, "somewhere/else")
    first = run(config_for(source), tmp_path / "out", target)
    before = (tmp_path / "out" / "responses.jsonl").read_bytes()
    assert run(config_for(source), tmp_path / "out", moved).written == first.written
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == before


def test_a_limit_ends_the_run_with_what_is_there(target, source, tmp_path):
    console = Console(file=StringIO(), width=200)
    config = config_for(source, max_rows=5)
    report = answer_conversations(config, tmp_path / "out", target, target.tokenizer, console=console)
    assert "stopped at regenerate.max_rows (5); with a higher one" in console.file.getvalue()
    assert report.written == 5 and report.skipped == {"not reached before max_rows": 3} and report.is_balanced
    assert len(read_jsonl(tmp_path / "out" / "responses.jsonl")) == 5
    assert run(config_for(source), tmp_path / "out", target).written == 8  # and later the rest


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_max_rows_takes_the_first_ones_however_long(rows, target, source, tmp_path):
    run(config_for(source, max_rows=3, batch_rows=rows), tmp_path / "out", target)
    run(config_for(source), tmp_path / "whole", target)
    found, whole = (read_jsonl(tmp_path / name / "responses.jsonl") for name in ("out", "whole"))
    assert found == whole[:3]


def test_begun_conversations_go_on_before_others_begin(target, source, tmp_path, monkeypatch):
    """So that few of them are lost when a limit or Ctrl-C ends the run."""
    asked, to_request = [], Rewriting.to_request

    def noted(self, dialogue):
        asked.append(dialogue.id)
        return to_request(self, dialogue)

    monkeypatch.setattr(Rewriting, "to_request", noted)
    interrupt(config_for(source, batch_rows=1, max_minutes=60), tmp_path / "out", target, rows=4)
    assert asked[:3] == ["chat-0"] * 3 and len(set(asked)) <= 5


def test_a_limit_before_the_first_answer_is_no_error(target, source, tmp_path):
    console = Console(file=StringIO(), width=200)
    config = config_for(source, max_minutes=0)
    report = answer_conversations(config, tmp_path / "out", target, target.tokenizer, console=console)
    assert report.written == 0 and report.skipped == {"not reached before max_minutes": 8}
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == b""
    assert "no answer was finished before regenerate.max_minutes (0): the corpus" in console.file.getvalue()


def test_answers_of_an_earlier_run_are_taken_over(target, source, tmp_path):
    run(config_for(source), tmp_path / "old", target)
    old = read_jsonl(tmp_path / "old" / "responses.jsonl")
    old[0]["conversations"][1]["value"] = "MARK"
    write_jsonl(tmp_path / "old" / "responses.jsonl", old)
    more = write_jsonl(tmp_path / "more.jsonl", chats([*QUESTIONS[:3], ["Something else"], *QUESTIONS[4:]]))
    earlier = [tmp_path / "old", tmp_path / "nowhere"]
    report = run(config_for(more), tmp_path / "new", target, earlier)
    new = read_jsonl(tmp_path / "new" / "responses.jsonl")
    assert new[:3] == old[:3] and new[4:] == old[4:] and new[3] != old[3] and report.written == 8
    # other settings, other answers
    run(config_for(more, max_new_tokens=11), tmp_path / "short", target, earlier)
    assert read_jsonl(tmp_path / "short" / "responses.jsonl")[0]["conversations"][1]["value"] != "MARK"


def test_a_chat_that_goes_on_is_answered_from_where_it_was(target, source, tmp_path):
    run(config_for(source), tmp_path / "old", target)
    old = read_jsonl(tmp_path / "old" / "responses.jsonl")
    longer = [*QUESTIONS[:2], [*QUESTIONS[2], "Why?"], *QUESTIONS[3:]]
    assert len(QUESTIONS[2]) < SMALL["max_turns"]
    more = write_jsonl(tmp_path / "more.jsonl", chats(longer))
    report = run(config_for(more), tmp_path / "new", target, [tmp_path / "old"])
    new = read_jsonl(tmp_path / "new" / "responses.jsonl")
    alone = run(config_for(more), tmp_path / "alone", target)
    assert new == read_jsonl(tmp_path / "alone" / "responses.jsonl") and report.written == alone.written
    before = old[2]["conversations"]
    assert (
        new[2]["conversations"][: len(before)] == before and len(new[2]["conversations"]) == len(before) + 2
    )
    # where the next prompt is too long it stays as it was
    chat = chats([["a", "word " * 200, "b"]])
    long = write_jsonl(tmp_path / "long.jsonl", chat)
    run(config_for(long), tmp_path / "first", target)
    assert run(config_for(long), tmp_path / "second", target, [tmp_path / "first"]).written == 1
    found = [read_jsonl(tmp_path / name / "responses.jsonl") for name in ("first", "second")]
    assert found[0] == found[1] and len(found[0][0]["conversations"]) == 2


@pytest.mark.parametrize("damage", [None, "{", "[]"])
def test_a_record_that_is_lost_is_written_again_where_the_folder_is_known(damage, target, source, tmp_path):
    interrupt(config_for(source), tmp_path / "out", target, rows=3)
    record = tmp_path / "out" / "regenerate.json"
    record.unlink() if damage is None else record.write_text(damage)
    quiet = Console(quiet=True)
    arguments = config_for(source), tmp_path / "out", target, target.tokenizer
    report = answer_conversations(*arguments, [tmp_path / "out"], quiet, is_own=True)
    assert report.written == 8 and json.loads(record.read_text())["report"]["written"] == 8
    run(config_for(source), tmp_path / "alone", target)
    assert read_jsonl(tmp_path / "out/responses.jsonl") == read_jsonl(tmp_path / "alone/responses.jsonl")
    # answers of another folder whose record is damaged are not taken
    record.write_text(damage or "{")
    assert run(config_for(source), tmp_path / "new", target, [tmp_path / "out"]).written == 8


def test_what_was_made_otherwise_is_not_continued(target, source, tmp_path):
    interrupt(config_for(source), tmp_path / "out", target, rows=3)
    with pytest.raises(UserError, match="made with max_new_tokens 12, and now it is 13"):
        run(config_for(source, max_new_tokens=13), tmp_path / "out", target)
    changed = write_jsonl(tmp_path / "changed.jsonl", chats([["Quite another question"]] * 1))
    with pytest.raises(UserError, match="'chat-.' is not in the sources in this form"):
        run(config_for(changed), tmp_path / "out", target)
    record = tmp_path / "out" / "regenerate.json"
    for damage in ("{", "[]", '{"settings": 3}', None):
        record.unlink() if damage is None else record.write_text(damage)
        with pytest.raises(UserError, match="holds responses but no regenerate.json"):
            run(config_for(source), tmp_path / "out", target)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_prompt_tokens": 600}, "at most the 512 positions of tiny, got 612"),
        ({"max_cache_gb": 1e-6}, "raise max_cache_gb"),
        ({"greedy_fraction": 1.5}, "greedy_fraction: must be >= 0 and <= 1, got 1.5"),
        ({"temperature": -1}, "regenerate.temperature: must be >= 0, got -1"),
        ({"max_turns": 0}, "regenerate.max_turns: must be >= 1, got 0"),
        ({"sources": []}, "regenerate.sources: must not be empty"),
        ({"sources": [Source("nowhere.jsonl")]}, "nowhere.jsonl"),
    ],
)
def test_settings_that_cannot_work(target, source, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as error:
        run(replace(config_for(source), **change), tmp_path / "out", target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown(target, source, tmp_path, monkeypatch, is_terminal):
    monkeypatch.setattr("drafttrain.utils.progress.LOG_EVERY_S", 0.0)
    console = Console(file=StringIO(), force_terminal=is_terminal, width=120)
    answer_conversations(config_for(source), tmp_path / "out", target, target.tokenizer, console=console)
    text = console.file.getvalue()
    assert "8/8" in text if is_terminal else "regenerate: 8 of 8 conversations" in text
    assert "8 rows read = 8 written + 0 failed + 0 skipped" in text


def test_time_left_counts_answers_under_way(tiny_llama, source, tmp_path, monkeypatch):
    """Long before the first of equal answers is finished, the share of their tokens is known."""
    shares, lines = [], []

    @contextmanager
    def counted(*args):
        yield lambda n, work, note: (shares.append(work[0] / work[1]), lines.append(note))

    monkeypatch.setattr("drafttrain.regenerate.rewriting.counted", counted)
    config = config_for(source, max_new_tokens=20, max_turns=1)  # without a stop token all are as long
    report = run(config, tmp_path / "out", FrozenTarget(*tiny_llama, "tiny"))
    assert report.cut == report.written == 8 and report.tokens == 160
    assert shares[0] == config.batch_rows / 160 and shares == sorted(shares)
    assert shares[-1] == 1 and lines[-1].startswith("160 tokens, ")


def test_less_memory_means_fewer_rows(target, source, tmp_path):
    run(config_for(source, batch_rows=8), tmp_path / "a", target)
    rows = []
    new_cache, target.new_cache = target.new_cache, lambda batch, n: rows.append(batch) or new_cache(batch, n)
    bytes_per_row = 4 * 2 * 2 * 16 * 4 * 312  # blocks, keys and values, heads, head size, fp32, tokens
    run(config_for(source, batch_rows=8, max_cache_gb=2.5 * bytes_per_row / 1e9), tmp_path / "b", target)
    assert max(rows) == 2
    assert (tmp_path / "a/responses.jsonl").read_bytes() == (tmp_path / "b/responses.jsonl").read_bytes()


def test_the_corpus_trains_the_very_ids(target, source, tmp_path):
    run(config_for(source, greedy_fraction=0.0, temperature=1.5), tmp_path / "out", target)
    n_cut = 0
    for conversation in read_conversations(tmp_path / "out" / "responses.jsonl"):
        encoded = encode_conversation(target.tokenizer, conversation)
        trained = [token for token, mask in zip(encoded.input_ids, encoded.loss_mask) if mask]
        generated = [message.token_ids for message in conversation.messages if message.role == "assistant"]
        assert trained == [token for ids in generated for token in ids]
        # after an answer that did not end with it, the template's end-of-turn token is untrained
        ends = encoded.input_ids.count(target.tokenizer.eos_token_id)
        assert ends == len(conversation.messages)
        n_cut += sum(ids[-1] != target.tokenizer.eos_token_id for ids in generated)
    assert n_cut


def test_no_more_answers_are_taken_over_than_asked_for(target, source, tmp_path):
    run(config_for(source), tmp_path / "old", target)
    report = run(config_for(source, max_rows=3), tmp_path / "new", target, [tmp_path / "old"])
    old = read_jsonl(tmp_path / "old" / "responses.jsonl")
    assert read_jsonl(tmp_path / "new" / "responses.jsonl") == old[:3]
    assert report.written == 3 and report.skipped["not reached before max_rows"] == len(old) - 3


def test_longer_chats_that_are_not_reached_keep_to_the_rows_asked_for(target, tmp_path):
    """Their earlier answers are written in their place, but no more of them than `max_rows`."""
    long = [turns for turns in QUESTIONS if len(turns) > 1]
    short = write_jsonl(tmp_path / "short.jsonl", chats([turns[:1] for turns in long]))
    run(config_for(short), tmp_path / "old", target)
    config = config_for(write_jsonl(tmp_path / "long.jsonl", chats(long)), max_rows=2)
    report = run(config, tmp_path / "new", target, [tmp_path / "old"])
    assert report.written == len(read_jsonl(tmp_path / "new" / "responses.jsonl")) == 2 < len(long)
    assert report.is_balanced
