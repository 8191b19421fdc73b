"""Traces of trees of thoughts as training text: all that the target has written, and no measured problem."""

import json
import runpy

import pytest

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.corpus import load_corpus
from drafttrain.data.readers import ReadReport, read_conversations
from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.interface import Answer, in_rounds
from drafttrain.reasoning.reason import reason
from drafttrain.reasoning.tasks import TASKS
from drafttrain.reasoning.trace import totals
from drafttrain.utils.errors import UserError

SENTENCES = ["The door was open.", "Nobody came by.", "Rain fell on the roof.", "He knew it was late."]
ROW = {"prompt": " ".join(SENTENCES), "end_sentences": SENTENCES}


class Recorded:
    """A model that answers with its number, a stop text and more after it, and fails now and then."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls, self.answered = tokenizer, 0, []

    def __call__(self, calls):
        return [self._answer(call) for call in calls]

    def _answer(self, call):
        self.calls += 1
        if self.calls % 7 == 3:
            return Answer("", error="not finite")
        text = f"It is {self.calls}."
        ids = tuple(self.tokenizer.encode(f"{text}\n\nAnd"))
        if call.max_new_tokens > 16:  # others get no drafts
            self.answered.append((call, text, ids))
        return Answer(text, ids)


@pytest.fixture
def traced(tmp_path, chatml):
    """Return a folder with a trace, and the calls that were answered in it."""
    model = Recorded(chatml)
    problem = TASKS["writing"]().problem("one", ROW, "row 1")
    reason("writing", problem, in_rounds(model), SearchConfig(seed=3), tmp_path / "traces" / "one.json")
    (tmp_path / "traces" / "summary.json").write_text(json.dumps(totals([])))
    return tmp_path / "traces", model.answered


def test_each_answered_call_is_a_chat(traced):
    folder, answered = traced
    report = ReadReport()
    read = list(read_conversations(folder, report=report))
    assert len(read) == len(answered) == report.kept == report.read == 5
    assert len({one.id for one in read}) == len(read) and any(call.begin for call, _, _ in answered)
    expected = [
        (call.messages, call.begin + text, None if call.begin else list(ids)) for call, text, ids in answered
    ]
    got = [(one.messages[0].content, one.messages[1].content, one.messages[1].token_ids) for one in read]
    assert sorted(got, key=str) == sorted(expected, key=str)


def test_packed_traces_make_the_same_corpus(traced, chatml, tmp_path, monkeypatch):
    """The answers of one prompt are kept, each with its ids; those of evaluation problems are not."""
    folder, answered = traced
    for file in folder.glob("one.json"):
        trace = json.loads(file.read_text())
        trace["settings"]["target"] = "its target"
        file.write_text(json.dumps(trace))
    script = runpy.run_path("scripts/pack_responses.py")
    monkeypatch.setitem(script["traced_rows"].__globals__, "load_tokenizer", lambda name: chatml)
    out = tmp_path / "thoughts.parquet"
    n, tokens = script["pack"]([], out, traces=[folder])
    assert n == len(answered) and tokens == sum(len(ids) for call, _, ids in answered if not call.begin)
    corpora = []
    for path in (folder, out):
        config = CorpusConfig([Source(str(path))], max_length=4096, validation_fraction=0.0)
        build_corpus(config, chatml, tmp_path / f"{path.name} corpus")
        rows = load_corpus(tmp_path / f"{path.name} corpus", chatml)[0]["train"]
        corpora.append(sorted((row["input_ids"], row["loss_mask"]) for row in rows))
    assert corpora[0] == corpora[1]
    (tmp_path / "eval.jsonl").write_text(json.dumps(ROW))
    config = CorpusConfig([Source(str(out))], max_length=4096, exclude=[str(tmp_path / "eval.jsonl")])
    with pytest.raises(UserError, match="no rows but duplicates and evaluation prompts"):
        build_corpus(config, chatml, tmp_path / "corpus")
    with pytest.raises(UserError, match="must have an answer, got none but excluded ones"):
        script["pack"]([], out, [str(tmp_path / "eval.jsonl")], traces=[folder])
    with pytest.raises(UserError, match="must be a folder of traces, got none"):
        script["pack"]([], out, traces=[tmp_path / "nowhere"])


def test_other_rows_with_rounds_are_no_traces(tmp_path):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": turns, "rounds": 3, "trees": 1}))
    assert [one.messages[1].content for one in read_conversations(tmp_path / "a.jsonl")] == ["ho"]


def test_turns_of_packed_traces_keep_their_roles(traced, chatml, tmp_path, monkeypatch):
    """A call may be a chat of several turns."""
    folder, _ = traced
    file = folder / "one.json"
    trace = json.loads(file.read_text())
    roles = ["system", "user", "assistant", "user"]
    for entry in trace["rounds"]:
        for call in entry["calls"]:
            call["prompt"] = [{"role": role, "content": f"A turn of the {role}."} for role in roles]
    trace["settings"]["target"] = "its target"
    file.write_text(json.dumps(trace))
    script = runpy.run_path("scripts/pack_responses.py")
    monkeypatch.setitem(script["traced_rows"].__globals__, "load_tokenizer", lambda name: chatml)
    script["pack"]([], tmp_path / "thoughts.parquet", traces=[folder])
    read = next(read_conversations(tmp_path / "thoughts.parquet"))
    assert [message.role for message in read.messages] == [*roles, "assistant"]


def test_ids_of_another_tokenizer_are_refused(traced, chatml, tmp_path):
    file = traced[0] / "one.json"
    trace = json.loads(file.read_text())
    for entry in trace["rounds"]:
        for call in entry["calls"]:
            call["token_ids"] = call["token_ids"][::-1]
    file.write_text(json.dumps(trace))
    with pytest.raises(UserError, match="token_ids: must decode to 'It is"):
        build_corpus(CorpusConfig([Source(str(traced[0]))], max_length=4096), chatml, tmp_path / "corpus")


def test_generated_ids_are_trained_with_what_ended_them(traced, chatml, tmp_path):
    folder, answered = traced
    build_corpus(CorpusConfig([Source(str(folder))], max_length=4096), chatml, tmp_path / "corpus")
    splits, _ = load_corpus(tmp_path / "corpus", chatml)
    trained = {
        tuple(token for token, on in zip(row["input_ids"], row["loss_mask"]) if on)
        for split in splits.values()
        for row in split
    }
    assert {ids for call, _, ids in answered if not call.begin} <= trained


def test_trees_of_evaluation_problems_are_left_out(traced, chatml, tmp_path):
    """All of them: this task's prompts have its sentences one by one, and its scores' none of them."""
    folder, _ = traced
    (tmp_path / "eval.jsonl").write_text(json.dumps(ROW))
    config = CorpusConfig([Source(str(folder))], max_length=4096, exclude=[str(tmp_path / "eval.jsonl")])
    with pytest.raises(UserError, match="no rows but duplicates and evaluation prompts"):
        build_corpus(config, chatml, tmp_path / "corpus")


@pytest.mark.parametrize(
    "damage", [lambda t: t.pop("problem"), lambda t: t["rounds"][0]["calls"][0].pop("text")]
)
def test_damaged_trace(traced, damage):
    file = traced[0] / "one.json"
    trace = json.loads(file.read_text())
    damage(trace)
    file.write_text(json.dumps(trace))
    with pytest.raises(UserError, match=r"one\.json:row 1: damaged trace .*; remove it"):
        list(read_conversations(file))
