"""From files of text to a cache: what is counted, what is reported, the same bytes however it is made."""

import json
import random
import re
import shlex
import zipfile
from pathlib import Path

import pytest

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.config import Source
from drafttrain.data.conversation import Conversation
from drafttrain.data.loss_mask import encode_conversation
from drafttrain.data.message import Message
from drafttrain.run.cli import main
from drafttrain.self_draft import build
from drafttrain.self_draft import tuning as self_draft
from drafttrain.self_draft.build import build_ngrams
from drafttrain.self_draft.config import NgramConfig
from drafttrain.self_draft.corpus_cache import DATA, FILE, CorpusCache
from drafttrain.utils.errors import UserError
from drafttrain.utils.manifest import MANIFEST
from tests.conftest import SENTENCES, write_jsonl


@pytest.fixture
def tokenizer(tiny_llama):
    return tiny_llama[1]


@pytest.fixture
def texts(tmp_path):
    """A hundred documents of the sentences that the tokenizer knows, in one archive."""
    chance = random.Random(0)
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        for number in range(100):
            text = " ".join(chance.choices(SENTENCES, k=chance.randint(1, 9)))
            archive.writestr(f"part{number % 3}/{number}.txt", f"{number}: {text}")
    return tmp_path / "texts.zip"


def chat(number, answer, **more):
    turns = [{"from": "human", "value": f"Question {number}?"}, {"from": "gpt", "value": answer, **more}]
    return {"id": f"chat-{number}", "conversations": turns}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_bytes_for_any_number_of_processes_and_memory(texts, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("drafttrain.self_draft.tokens.BATCH_CHARACTERS", 5000)
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat(i, SENTENCES[i % 7]) for i in range(30)])
    made = []
    for processes, memory in ((1, 1.0), (3, 1.0), (2, 1e-5), (1, 1e-9)):
        sources = [Source(str(texts)), Source(str(chats))]
        config = NgramConfig(sources, processes=processes, memory=memory)
        build_ngrams(config, tokenizer, tmp_path / "out")
        made.append(contents(tmp_path / "out"))
    assert made[0] == made[1] == made[2] == made[3] and made[0].keys() == {
        DATA,
        FILE,
        "report.json",
        MANIFEST,
    }
    cache = CorpusCache.open(tmp_path / "out", tokenizer_hash(tokenizer))
    cache.verify()
    assert min(cache.shape.sizes[1:]) > 100 and not list(tmp_path.glob(".*"))
    assert str(tmp_path) not in (made[0][FILE] + made[0]["report.json"]).decode()


def test_many_parts_are_counted(texts, tokenizer, tmp_path, monkeypatch):
    """The memory of the test above cuts the work, and cuts what follows a frequent token too."""
    planned = []
    real = build.plan_parts
    monkeypatch.setattr(build, "plan_parts", lambda *args: planned.append(real(*args)) or planned[-1])
    build_ngrams(NgramConfig([Source(str(texts))], memory=1e-5, processes=1), tokenizer, tmp_path / "out")
    parts, width = planned[0], len(tokenizer) + 1
    assert len(parts) > 20 and parts[0].begin == 0 and parts[-1].end == (width - 1) * width
    assert all(part.end == after.begin for part, after in zip(parts, parts[1:]))
    assert any(part.begin % width for part in parts)


def test_answers_are_counted_and_questions_are_not(tokenizer, tmp_path):
    rows = [chat(number, "A small model drafts several tokens") for number in range(3)]
    generated = [*tokenizer("Jan")["input_ids"], *tokenizer("et")["input_ids"], tokenizer.eos_token_id]
    rows += [chat(number, "Janet", token_ids=generated) for number in range(3, 8)]
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    config = NgramConfig([Source(str(source))], gram=3, held_out=0.0, processes=1)
    report = build_ngrams(config, tokenizer, tmp_path / "out")
    cache = CorpusCache.open(tmp_path / "out")
    assert cache.next_tokens(tokenizer("Question")["input_ids"], 5).matched == 0
    for at in range(1, len(generated)):
        matches = cache.next_tokens(generated[:at], 1)
        assert (matches.tokens, matches.counts) == ([generated[at]], [5])
    assert cache.next_tokens(generated, 5).matched == 0  # nothing follows the end of a turn
    messages = [Message("user", "Question 0?"), Message("assistant", "A small model drafts several tokens")]
    answer = encode_conversation(tokenizer, Conversation("", messages, ""))
    assert report["tokens_counted"] == 3 * sum(answer.loss_mask) + 5 * len(generated)
    assert report["words"] == 3 * 6 + 5


def test_texts_are_cleaned_and_the_report_says_how(tokenizer, tmp_path, capsys):
    lines = ["   The quick brown fox [ 1 2 ] jumps over the lazy dog while the", "   sun is shi\u00adning."]
    with zipfile.ZipFile(tmp_path / "oanc.zip", "w") as archive:
        for number in range(5):
            archive.writestr(f"{number}.txt", "\n" * number + f"Cafe\u0301 {number}\n\n" + "\n".join(lines))
        archive.writestr("again.txt", "Cafe\u0301 0\n\n" + "\n".join(lines))
        archive.writestr("blank.txt", " \n")
        archive.writestr("notes.xml", "<x/>")
    words = ["build-ngrams", "--prose", str(tmp_path / "oanc.zip"), "--target", "x", "--out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafttrain.target_lm.loading.load_tokenizer", lambda name: tokenizer)
        assert main([*words, str(tmp_path / "out"), "--held-out", "0.2", "--gram", "4", "--top", "3"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (source,) = report["sources"]
    assert (source["name"], source["read"], source["kept"]) == ("oanc.zip", 7, 5)
    assert source["skipped"] == {"duplicate": 1, "empty document": 1}
    assert source["files_left_out"] == {".xml": 1}
    for kind in (
        "wrapped lines joined",
        "citation marks removed",
        "control characters and soft hyphens removed",
    ):
        assert source["cleaned"][kind] == 6
    assert report["unicode_composed"] == report["texts"] == 5
    cache = CorpusCache.open(tmp_path / "out")
    text = "Café 0\n\nThe quick brown fox jumps over the lazy dog while the sun is shining."
    ids = tokenizer(text)["input_ids"]
    for at in range(len(tokenizer("Café 0")["input_ids"]) + 1, len(ids)):
        assert ids[at] in cache.next_tokens(ids[:at], 3).tokens
    assert cache.header["sources"][0]["name"] == "oanc.zip" and cache.header["top"] == 3
    held_out = {row["matched"]: row for row in report["hits"]}
    assert 0 < held_out[3]["top_1"] <= held_out[3]["top_4"] <= held_out[3]["positions"]
    assert [row["length"] for row in report["ngrams"]] == [1, 2, 3, 4]
    assert all(row["kept"] <= row["distinct"] for row in report["ngrams"])
    assert report["most_frequent"][3][0]["count"] == 4
    shown = capsys.readouterr().out
    for part in ("skipped: duplicate", "wrapped lines joined", "bytes per n-gram", "suffix found", "' the'"):
        assert part in shown


def test_evaluation_prompts_stay_out(tokenizer, tmp_path):
    prompt = "Could you please explain how speculative decoding makes a model faster?"
    (tmp_path / "prompts.txt").write_text(prompt + "\n")
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{prompt} {number}")
        (tmp_path / f"kept{number}.txt").write_text(f"{SENTENCES[0]} {number}")
    sources = [Source(str(tmp_path / f"{name}.txt")) for name in (0, 1, 2, "kept0", "kept1", "kept2")]
    config = NgramConfig(sources, [str(tmp_path / "prompts.txt")], held_out=0.0, processes=1)
    build_ngrams(config, tokenizer, tmp_path / "out")
    cache = CorpusCache.open(tmp_path / "out")
    assert cache.next_tokens(tokenizer(" speculative")["input_ids"], 1, 1).matched == 0
    assert cache.next_tokens(tokenizer(SENTENCES[0])["input_ids"][:5], 1).matched == 4
    assert len(cache.header["excluded"]) == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sources": []}, "SOURCE: must name at least one file"),
        ({"gram": 1}, "gram: must be >= 2 and <= 16, got 1"),
        ({"gram": 17}, "gram: must be >= 2 and <= 16, got 17"),
        ({"min_count": 0}, "min_count: must be >= 1, got 0"),
        ({"top": 0}, "top: must be >= 1, got 0"),
        ({"processes": 0}, "processes: must be >= 1 and <= 1024, got 0"),
        ({"memory": 0.0}, "memory: must be > 0, got 0.0"),
        ({"held_out": 1.0}, "held_out: must be >= 0 and < 1, got 1.0"),
        ({"sources": [Source("nowhere.txt")]}, "nowhere.txt: no such file or folder"),
        ({"sources": [Source("blank.txt")]}, "blank.txt: no usable rows among 1"),
        (
            {"sources": [Source("short.txt")]},
            "no two tokens follow each other 2 times in .* tokens; add text",
        ),
        ({"sources": [Source("folder")]}, "folder: no rows and no documents in it"),
        ({"sources": [Source("foreign.jsonl")]}, "row 1: turn 2: token_ids: must decode to"),
        ({"sources": [Source("foreign.jsonl")], "processes": 2}, "row 1: turn 2: token_ids: must decode to"),
    ],
)
def test_mistakes(changes, message, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "short.txt").write_text("abcdef")
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "foreign.jsonl", [chat(0, "Janet", token_ids=[5, 6])])
    before = sorted(tmp_path.iterdir())
    config = NgramConfig(**{"sources": [Source("short.txt")], "processes": 1, **changes})
    with pytest.raises(UserError, match=message) as caught:
        build_ngrams(config, tokenizer, tmp_path / "out")
    assert "\n" not in str(caught.value) and sorted(tmp_path.iterdir()) == before


def test_only_a_cache_is_replaced(texts, tokenizer, tmp_path, monkeypatch):
    config = NgramConfig([Source(str(texts))], processes=1)
    with pytest.raises(UserError, match="holds something else than an n-gram cache"):
        build_ngrams(config, tokenizer, tmp_path)
    with pytest.raises(UserError, match="texts.zip: holds something else"):
        build_ngrams(config, tokenizer, texts)
    (tmp_path / "bundle").mkdir()
    for name in (FILE, "config.json", "model.safetensors"):
        (tmp_path / "bundle" / name).touch()
    with pytest.raises(UserError, match="bundle: holds something else"):
        build_ngrams(config, tokenizer, tmp_path / "bundle")
    assert (tmp_path / "bundle" / "model.safetensors").exists()
    (tmp_path / "out").mkdir()
    build_ngrams(config, tokenizer, tmp_path / "out")
    before = contents(tmp_path / "out")

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "count_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_ngrams(config, tokenizer, tmp_path / "out")
    assert contents(tmp_path / "out") == before and not list(tmp_path.glob(".*"))


def test_the_page_about_it(smollm2, tmp_path, monkeypatch, capsys):
    """The commands and the code of docs/self_draft.md run unchanged, only shorter."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    page = (
        (root / "docs" / "self_draft.md")
        .read_text(encoding="utf-8")
        .replace("runs/ngrams", f"{tmp_path}/out")
    )
    (command,) = re.findall(r"^drafttrain (build-ngrams .*)$", page, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "to help you" in capsys.readouterr().out
    monkeypatch.setattr(self_draft, "ROUNDS", 1)
    (command,) = re.findall(r"^drafttrain (calibrate .*)$", page, re.MULTILINE)
    assert main([*shlex.split(command), "--limit", "1", "--max-new-tokens", "8"]) == 0
    (command,) = re.findall(r"^drafttrain (generate --target \S+ --ngrams .*)$", page, re.MULTILINE)
    assert main([*shlex.split(command), "--max-new-tokens", "12"]) == 0
    assert "accept_len" in capsys.readouterr().out
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code.replace('blue?")', 'blue?", 12)'), "docs/self_draft.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    assert 1 <= names["shorter"].matched < names["matches"].matched == 4


def test_generated_answers_that_the_template_changes_are_counted(tokenizer, tmp_path, monkeypatch):
    """As Qwen3, whose template cuts out the thoughts of earlier answers: the generated ids count."""
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    answers = [f"<think>{SENTENCES[i]}</think>{SENTENCES[i + 1]}" for i in (0, 2)]
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    turns = []
    for i in range(2):
        turns += [
            {"from": "human", "value": f"Question {i}?"},
            {"from": "gpt", "value": answers[i], "token_ids": ids[i]},
        ]
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"id": "a", "conversations": turns}])
    config = NgramConfig([Source(str(chats))], min_count=1, held_out=0.0, processes=1)
    build_ngrams(config, tokenizer, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    # all of both answers, and no separators
    assert report["tokens"] == report["tokens_counted"] == sum(map(len, ids))
