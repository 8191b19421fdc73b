"""The whole stage: counts, splits, determinism, preflight, files that are whole or absent."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.data import build
from drafttrain.data.build import build_corpus, check_measured
from drafttrain.data.config import CorpusConfig, PromptSet, Source
from drafttrain.data.conversation import Conversation
from drafttrain.data.corpus import load_corpus
from drafttrain.data.loss_mask import encode_conversation
from drafttrain.data.message import Message
from drafttrain.utils.disk import disk_problem
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import content_hash


def exchange(number: int, answer: str = "Hello!") -> dict:
    turns = [{"from": "human", "value": f"Tell me more {number}"}, {"from": "gpt", "value": answer}]
    return {"id": f"chat{number}", "conversations": turns}


def write(path: Path, rows: list) -> Source:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return Source(str(path))


def test_corpus_and_report(tmp_path, chatml):
    long_chat = {"id": "long", "conversations": exchange(0)["conversations"] * 6}
    blocked = {
        "id": "blocked",
        "conversations": [{"from": "human", "value": "No, thanks. " * 60}, *exchange(0)["conversations"][1:]],
    }
    rows = [
        *(exchange(i) for i in range(10)),
        exchange(3),  # a duplicate under the same id
        exchange(99),  # an evaluation prompt
        {"id": "none", "conversations": []},
        {"id": "question", "conversations": [{"from": "human", "value": "x"}]},
        long_chat,
        blocked,
    ]
    source = write(tmp_path / "chats.jsonl", rows)
    (tmp_path / "text.txt").write_text("Be brief. " * 50)
    (tmp_path / "prompts.txt").write_text("tell me MORE: 99")
    config = CorpusConfig(
        [source, Source(str(tmp_path / "text.txt"))],
        max_length=100,
        validation_fraction=0.2,
        exclude=[str(tmp_path / "prompts.txt")],
    )
    report = build_corpus(config, chatml, tmp_path / "corpus")
    splits, metadata = load_corpus(tmp_path / "corpus", chatml)

    chats, text = report.sources.values()
    assert (chats.read, chats.kept) == (16, 12)
    assert chats.skipped == {
        "duplicate": 1,
        "contains an evaluation prompt": 1,
        "no turns": 1,
        "no assistant turn": 1,
    }
    assert (text.read, text.kept) == (1, 1)
    for counts in (chats, text):
        assert counts.read == counts.kept + sum(counts.skipped.values())
    assert (report.cut, report.truncated, report.pieces_without_trained_tokens) == (2, 1, 1)
    assert metadata["counts"] == json.loads(json.dumps(report.as_dict()))

    assert list(splits) == ["train", "validation"]
    for name, counts in (("train", report.train), ("validation", report.validation)):
        assert splits[name].column_names == ["id", "input_ids", "loss_mask"]
        assert counts.examples == len(splits[name])
        assert counts.tokens == sum(map(len, splits[name]["input_ids"]))
        assert counts.trained_tokens == sum(sum(mask[1:]) for mask in splits[name]["loss_mask"])
        assert max(map(len, splits[name]["input_ids"])) <= 100
    # 13 conversations: 10 + the long chat + the blocked one + the document; 20 % of them are held out.
    ids = [{name.split("#")[0] for name in splits[split]["id"]} for split in splits]
    assert not ids[0] & ids[1]
    assert ids[0] | ids[1] == {f"chat{i}" for i in range(10)} | {"long", "text.txt"}
    assert len(ids[1]) == 3
    assert metadata["tokenizer"]["vocabulary"] == len(chatml)
    assert set(metadata["inputs"]) == {source.path, str(tmp_path / "text.txt"), str(tmp_path / "prompts.txt")}

    by_id = {row["id"]: row for split in splits.values() for row in split}
    expected = encode_conversation(
        chatml, Conversation("", [Message("user", "Tell me more 5"), Message("assistant", "Hello!")], "")
    )
    assert (by_id["chat5"]["input_ids"], by_id["chat5"]["loss_mask"]) == (
        expected.input_ids,
        expected.loss_mask,
    )
    assert sum(by_id["text.txt#0"]["loss_mask"]) == 100

    console = Console(record=True, width=120)
    console.print(report.table())
    shown = console.export_text()
    for words in (
        "skipped: duplicate",
        "contains an evaluation prompt",
        "cut at turns",
        "train trained tokens",
    ):
        assert words in shown


def test_generated_ids_reach_the_corpus(tmp_path, chatml):
    end = chatml.eos_token_id
    odd = [
        *chatml("Hel", add_special_tokens=False)["input_ids"],
        *chatml("lo!", add_special_tokens=False)["input_ids"],
    ]
    rows = [exchange(1), exchange(2)]
    rows[0]["conversations"][1]["token_ids"] = [*odd, end]
    rows[1]["conversations"][1]["token_ids"] = odd
    rows[1] |= {"finish_reason": "length", "temperature": 0.7}
    config = CorpusConfig([write(tmp_path / "a.jsonl", rows)], validation_fraction=0)
    build_corpus(config, chatml, tmp_path / "corpus")
    train = load_corpus(tmp_path / "corpus")[0]["train"]
    for row, expected in zip(train, ([*odd, end], odd), strict=True):
        assert [i for i, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on] == expected


def test_same_bytes_with_any_number_of_processes(tmp_path, chatml):
    source = write(tmp_path / "a.jsonl", [exchange(i, "Hello! " * (1 + i % 5)) for i in range(150)])
    folders = []
    for processes in (1, 2, 3):
        config = CorpusConfig([source], max_length=60, validation_fraction=0.1, seed=3, processes=processes)
        build_corpus(config, chatml, tmp_path / f"corpus{processes}")
        files = sorted(file for file in (tmp_path / f"corpus{processes}").rglob("*") if file.is_file())
        folders.append(
            [(file.relative_to(tmp_path / f"corpus{processes}"), file.read_bytes()) for file in files]
        )
    assert folders[0] == folders[1] == folders[2]
    assert len(folders[0]) == 8  # corpus.json, dataset_dict.json and three files for each split; nothing else


def test_seed_changes_the_split_only(tmp_path, chatml):
    source = write(tmp_path / "a.jsonl", [exchange(i) for i in range(40)])
    validations = []
    for seed in (0, 1):
        build_corpus(CorpusConfig([source], validation_fraction=0.25, seed=seed), chatml, tmp_path / "corpus")
        splits = load_corpus(tmp_path / "corpus")[0]
        validations.append(set(splits["validation"]["id"]))
        assert len(splits["train"]) == 30
        assert validations[-1] | set(splits["train"]["id"]) == {f"chat{i}" for i in range(40)}
    assert validations[0] != validations[1]


def test_pieces_of_one_chat_stay_together(tmp_path, chatml):
    rows = [exchange(i) | {"id": f"chat{i // 4}_{8 * (i % 4)}"} for i in range(80)]
    config = CorpusConfig([write(tmp_path / "a.jsonl", rows)], validation_fraction=0.2)
    build_corpus(config, chatml, tmp_path / "corpus")
    splits = load_corpus(tmp_path / "corpus")[0]
    chats = [{name.split("_")[0] for name in splits[split]["id"]} for split in splits]
    assert not chats[0] & chats[1]
    assert len(splits["validation"]) == 16


@pytest.mark.parametrize(
    "sizes, fraction, wanted", [([1, 1, 1], 0.02, 1), ([50, 2, 3], 0.02, 2), ([9], 0.5, 0)]
)
def test_small_splits(sizes, fraction, wanted):
    ids = [f"{'xyz'[group]}{piece}_{group}" for group, size in enumerate(sizes) for piece in [0] * size]
    held_out = build.held_out_groups(ids, fraction, seed=0)
    assert held_out.sum() == wanted
    assert not held_out.all()


def test_no_validation(tmp_path, chatml):
    config = CorpusConfig(
        [write(tmp_path / "a.jsonl", [exchange(i) for i in range(3)])], validation_fraction=0
    )
    build_corpus(config, chatml, tmp_path / "corpus")
    splits = load_corpus(tmp_path / "corpus", chatml)[0]
    assert {name: len(split) for name, split in splits.items()} == {"train": 3, "validation": 0}


def test_limit_and_two_sources(tmp_path, chatml):
    source = write(tmp_path / "a.jsonl", [{"conversations": []}, *(exchange(i) for i in range(20))])
    config = CorpusConfig(
        [Source(source.path, "sharegpt", 5), Source(source.path, "sharegpt", 7)], deduplicate=False
    )
    report = build_corpus(config, chatml, tmp_path / "corpus")
    assert [(counts.read, counts.kept) for counts in report.sources.values()] == [(6, 5), (8, 7)]
    assert report.train.examples + report.validation.examples == 12


# --------------------------------------------------------------------------------------------------- errors


def refuse(config, tokenizer, out, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        build_corpus(config, tokenizer, out)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not [file for file in out.parent.iterdir() if file.name.startswith(".")], (
        "a temporary folder is left"
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_row_stops_the_build(tmp_path, chatml, processes):
    rows = [exchange(i) for i in range(5)]
    rows[3]["conversations"][1]["token_ids"] = [10**6]
    config = CorpusConfig([write(tmp_path / "a.jsonl", rows)], processes=processes)
    refuse(config, chatml, tmp_path / "corpus", "a.jsonl:row 4: turn 2: token_ids: must be in 0..\\d+")
    rows[3]["conversations"][1]["from"] = "alien"
    write(tmp_path / "a.jsonl", rows)
    refuse(config, chatml, tmp_path / "corpus", "a.jsonl:row 4: turn 2: role must be one of .*, got 'alien'")


def test_only_rows_without_answers(tmp_path, chatml):
    rows = [{"conversations": exchange(i)["conversations"][:1]} for i in range(3)] + [{"conversations": []}]
    config = CorpusConfig([write(tmp_path / "a.jsonl", rows)])
    complaint = r"a.jsonl: no usable rows among 4 \(3 × no assistant turn, 1 × no turns\)"
    refuse(config, chatml, tmp_path / "corpus", complaint)


def test_only_evaluation_prompts(tmp_path, chatml):
    (tmp_path / "prompts.txt").write_text("Tell me more 1")
    config = CorpusConfig(
        [write(tmp_path / "a.jsonl", [exchange(1)])], exclude=[str(tmp_path / "prompts.txt")]
    )
    refuse(
        config,
        chatml,
        tmp_path / "corpus",
        "no rows but duplicates and evaluation prompts; add another source",
    )


@pytest.mark.parametrize("role", ["system", "tool"])
def test_an_evaluation_prompt_counts_in_any_turn_but_an_answer(role, tmp_path, chatml):
    passage = "The lighthouse keeper counted ships from the north every evening of that long summer."
    (tmp_path / "prompts.txt").write_text(passage)
    rows = [exchange(i) for i in range(3)]
    turns = rows[0]["conversations"]
    begun = [] if role == "system" else list(turns)  # a tool answers within a chat
    rows[0]["conversations"] = [*begun, {"from": role, "value": passage}, *turns]
    rows[1]["conversations"][1]["value"] = passage  # what a model answers is no prompt
    exclude = [str(tmp_path / "prompts.txt")]
    report = build_corpus(
        CorpusConfig([write(tmp_path / "a.jsonl", rows)], exclude=exclude), chatml, tmp_path / "corpus"
    )
    assert [counts.kept for counts in report.sources.values()] == [2]


def test_no_template(tmp_path, with_template):
    config = CorpusConfig([write(tmp_path / "a.jsonl", [exchange(1)])])
    refuse(config, with_template(None), tmp_path / "corpus", "no chat template")


def test_template_that_loses_the_answers(tmp_path, with_template):
    template = "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"
    config = CorpusConfig([write(tmp_path / "a.jsonl", [exchange(1)])])
    refuse(
        config,
        with_template(template),
        tmp_path / "corpus",
        "a.jsonl:row 1: must be a chat whose answers the template renders unchanged",
    )


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_answers_that_train_nothing(tmp_path, with_template):
    # The marks are there, but around nothing.
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %}{% endgeneration %}"
    )
    template += "{% endif %}{% endfor %}"
    config = CorpusConfig([write(tmp_path / "a.jsonl", [exchange(1)])])
    refuse(
        config,
        with_template(template),
        tmp_path / "corpus",
        "a.jsonl:row 1: no tokens to train in its assistant turns",
    )


def test_a_piece_without_an_answer_is_left_out_and_counted(tmp_path, chatml):
    """A tool was called without text, and the call is not in the row."""
    messages = [
        {"role": "user", "content": "Look it up. " * 20},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "Found."},
        {"role": "user", "content": "Say it again. " * 20},
        {"role": "assistant", "content": "Found. " * 20},
    ]
    config = CorpusConfig([write(tmp_path / "a.jsonl", [{"messages": messages}])], max_length=400)
    report = build_corpus(config, chatml, tmp_path / "corpus")
    assert report.pieces_without_trained_tokens == 1


def test_trained_fraction(tmp_path, with_template):
    generation = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = with_template(CHATML + generation)
    rows = [{"instruction": "Tell me more. " * 300, "output": "No"}]
    config = CorpusConfig([write(tmp_path / "a.jsonl", rows)], max_length=4000)
    refuse(
        config,
        tokenizer,
        tmp_path / "corpus",
        r"corpus: trained tokens must be 1 to 99 % .*, got 0\.\d\d %; .*first example.*'<\|im_start\|>user",
    )
    rows = [{"instruction": "x", "output": "Hello! " * 1500}]
    config = CorpusConfig([write(tmp_path / "a.jsonl", rows)], max_length=4000)
    refuse(config, tokenizer, tmp_path / "corpus", "corpus: trained tokens must .*, got 99.* %; .*⟦Hello!")


def test_plain_text_may_be_trained_as_a_whole(tmp_path, with_template):
    (tmp_path / "a.txt").write_text("Hello! " * 500)
    report = build_corpus(
        CorpusConfig([Source(str(tmp_path / "a.txt"))]), with_template(None), tmp_path / "corpus"
    )
    assert report.train.trained_tokens == report.train.tokens - report.train.examples


def test_max_length_below_every_prompt(tmp_path, chatml):
    config = CorpusConfig([write(tmp_path / "a.jsonl", [exchange(1)])], max_length=10)
    refuse(
        config,
        chatml,
        tmp_path / "corpus",
        "corpus.max_length: no tokens to train in 1 pieces of at most 10 tokens; raise it",
    )


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"sources": []}, "corpus.sources: must not be empty"),
        ({"max_length": 0}, "corpus.max_length: must be >= 2, got 0"),
        ({"processes": 0}, "corpus.processes: must be >= 1, got 0"),
        ({"validation_fraction": 1.0}, "corpus.validation_fraction: must be >= 0 and < 1, got 1.0"),
        (
            {"sources": [Source("a", max_conversations=0)]},
            "corpus.sources.max_conversations: must be >= 1, got 0",
        ),
    ],
)
def test_configuration(tmp_path, chatml, change, complaint):
    refuse(CorpusConfig(**({"sources": [Source("a")]} | change)), chatml, tmp_path / "corpus", complaint)


def test_full_disk(tmp_path, chatml, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "encode_raw", fail)
    config = CorpusConfig([write(tmp_path / "a.jsonl", [exchange(1)])])
    with pytest.raises(OSError) as error:
        build_corpus(config, chatml, tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert disk_problem(error.value, "corpus") == "corpus: no space left; free some and repeat"


def test_a_failed_build_keeps_the_old_corpus(tmp_path, chatml):
    source = write(tmp_path / "a.jsonl", [exchange(i) for i in range(5)])
    build_corpus(CorpusConfig([source]), chatml, tmp_path / "corpus")
    before = load_corpus(tmp_path / "corpus")[1]
    with pytest.raises(UserError):
        build_corpus(
            CorpusConfig([source, Source(str(tmp_path / "missing.json"))]), chatml, tmp_path / "corpus"
        )
    assert load_corpus(tmp_path / "corpus")[1] == before


def test_foreign_or_damaged_corpus(tmp_path, chatml, with_template):
    out = tmp_path / "corpus"
    with pytest.raises(UserError, match="corpus: no corpus.json there; run the corpus stage first"):
        load_corpus(out)
    build_corpus(CorpusConfig([write(tmp_path / "a.jsonl", [exchange(i) for i in range(5)])]), chatml, out)
    with pytest.raises(UserError, match="must be made with the chat template of"):
        load_corpus(out, with_template(CHATML))
    other = with_template(chatml.chat_template)
    other.add_tokens(["<new>"])
    with pytest.raises(
        UserError,
        match=r"must be made with the tokenizer of .*, got hash .*, not .*, vocabulary \d+, not \d+;",
    ):
        load_corpus(out, other)

    metadata = json.loads((out / "corpus.json").read_text())
    metadata["counts"]["train"]["examples"] += 1
    (out / "corpus.json").write_text(json.dumps(metadata))
    with pytest.raises(UserError, match="must have .* examples, got .*; build it again"):
        load_corpus(out)
    (out / "train" / "data-00000-of-00001.arrow").write_bytes(b"short")
    with pytest.raises(UserError, match="corpus: damaged"):
        load_corpus(out)
    (out / "corpus.json").write_text(json.dumps({"format_version": metadata["format_version"]}))
    with pytest.raises(UserError, match="damaged .corpus.json lacks keys.; build it again"):
        load_corpus(out)
    (out / "corpus.json").write_text(json.dumps(metadata | {"format_version": 99}))
    with pytest.raises(UserError, match="must be a corpus of format version 1"):
        load_corpus(out)


def test_a_corpus_with_measured_prompts_is_refused(tmp_path, chatml):
    source, out = write(tmp_path / "a.jsonl", [exchange(i) for i in range(9)]), tmp_path / "corpus"
    prompts, others = tmp_path / "prompts.txt", tmp_path / "others.txt"
    prompts.write_text("Tell me MORE: 3\ntell me more 7")
    others.write_text("Something else.")
    with pytest.raises(UserError) as raised:
        build_corpus(CorpusConfig([source]), chatml, out, sets(prompts, others))
    assert str(raised.value) == (
        "corpus.sources: must hold no conversation with a prompt that evaluate.prompts measures on, got 2 "
        f"with prompts of {prompts} (such as 'Tell me more 3'); add these files to corpus.exclude"
    )
    assert not out.exists()
    report = build_corpus(CorpusConfig([source], exclude=[str(prompts)]), chatml, out, sets(prompts))
    assert next(iter(report.sources.values())).kept == 7


def sets(*paths: Path) -> list[PromptSet]:
    return [PromptSet("own", str(path)) for path in paths]


def test_only_prompts_that_are_decoded_and_say_something_count(tmp_path, chatml):
    source, out = write(tmp_path / "a.jsonl", [exchange(i) for i in range(9)]), tmp_path / "corpus"
    rows = [
        {"turns": ["What is it?", "Tell me more 5"]},
        {"turns": ["Tell me more 3"]},
        {"turns": ["Go on."]},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_corpus(CorpusConfig([source]), chatml, out, [PromptSet("first", str(path), limit=1)])
    with pytest.raises(UserError, match="got 1 with prompts of .* .such as 'Tell me more 5'"):
        build_corpus(CorpusConfig([source]), chatml, out, [PromptSet("first", str(path), limit=1, turns=2)])
    with pytest.raises(UserError, match="got 1 with prompts of .* .such as 'Tell me more 3'"):
        build_corpus(CorpusConfig([source]), chatml, out, sets(path))
    with pytest.raises(UserError, match="such as 'Tell me more 3'"):  # as were not compared before
        check_measured(out, chatml, sets(path))


def test_prompts_that_are_named_later_are_looked_for_once(tmp_path, chatml, monkeypatch, capsys):
    source, out = write(tmp_path / "a.jsonl", [exchange(i) for i in range(9)]), tmp_path / "corpus"
    prompts, others = tmp_path / "prompts.txt", tmp_path / "others.txt"
    prompts.write_text("Tell me more 4")
    others.write_text("Something else.")
    config = CorpusConfig([source], validation_fraction=0.1)
    build_corpus(config, chatml, out, sets(others))
    before = content_hash(out)
    for _ in range(2):
        with pytest.raises(UserError, match="got 1 with prompts of .*prompts.txt .such as 'Tell me more 4'"):
            check_measured(out, chatml, sets(others, prompts))
    prompts.write_text("Tell me more 40")
    check_measured(out, chatml, sets(others, prompts))
    monkeypatch.setattr(build, "kept_conversations", lambda *names: pytest.fail("has been read"))
    check_measured(out, chatml, sets(others, prompts))
    assert content_hash(out) == before  # later stages do not depend on it
    prompts.write_text("Tell me more 4")
    for change in (lambda path: path.write_text("{}"), Path.unlink):
        change(Path(source.path))
        check_measured(out, chatml, sets(prompts))
        line = f"corpus: {prompts} cannot be compared with it, as {source.path} has changed or is gone since"
        assert line in capsys.readouterr().err.replace("\n", "")
