"""States kept while the target answers are those that collecting computes, wherever a drafter reads them."""

import copy
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from datasets import DatasetDict
from rich.console import Console
from torch.utils.data import default_collate

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, RegenerateConfig, Source
from drafttrain.data.corpus import load_corpus
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.hidden_states import recording
from drafttrain.hidden_states.collect import CollectReport, collect_states
from drafttrain.hidden_states.recording import TAIL, RecordedStates, Recordings, recording_of, states_folder
from drafttrain.hidden_states.store import HiddenStateStore, open_shard
from drafttrain.regenerate.rewriting import Rewriting
from drafttrain.regenerate.stage import KeptStates, answer_conversations
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.masks import random_blocks
from drafttrain.training.packing import PackedRows
from drafttrain.training.trainer import draft_loss, with_states
from drafttrain.utils.errors import UserError

BLOCKS = [-2, 0]
KEPT = KeptStates(BLOCKS, "float32", 1e9, 128)
COLLECT = CollectConfig(mode="offline", dtype="float32", shard_tokens=128)


@pytest.fixture(params=["own modules", "native"])
def target(tiny_llama, request) -> FrozenTarget:
    """A target that ends its answers now and then; many tokens end them."""
    model, tokenizer = tiny_llama
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(5, 512, 12)]
    target = FrozenTarget(model, tokenizer, "tiny")
    if request.param == "native":
        target.pack()
    return target


@pytest.fixture
def config(tmp_path) -> RegenerateConfig:
    """Twelve chats, every fourth of two turns: its first answer is read again as text, in other tokens."""
    turns = [["What is the fox doing?", "And the dog?"][: 1 + (i % 4 == 3)] for i in range(12)]
    rows = [
        {"id": str(i), "conversations": [{"from": "human", "value": f"{i}. {text}"} for text in texts]}
        for i, texts in enumerate(turns)
    ]
    for row in rows:  # ShareGPT rows take turns
        answer = {"from": "gpt", "value": "…"}
        row["conversations"] = [turn for user in row["conversations"] for turn in (user, answer)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [Source(str(path))]
    return RegenerateConfig(sources, max_turns=3, max_new_tokens=12, max_prompt_tokens=400, batch_rows=5)


def answer(config: RegenerateConfig, target: FrozenTarget, out: Path, kept: KeptStates = KEPT) -> Path:
    answer_conversations(config, out, target, target.tokenizer, console=Console(quiet=True), kept=kept)
    return states_folder(out)


def corpus_of(target: FrozenTarget, responses: Path, folder: Path, **settings) -> DatasetDict:
    sources = [Source(str(responses / "responses.jsonl"))]
    config = CorpusConfig(sources, validation_fraction=0.2, **settings)
    build_corpus(config, target.tokenizer, folder)
    return load_corpus(folder, target.tokenizer)[0]


def collected(
    target: FrozenTarget, splits: DatasetDict, out: Path, recorded: Path | None = None
) -> tuple[CollectReport, HiddenStateStore]:
    target.tap(BLOCKS)
    report = collect_states(COLLECT, target, splits, out, Console(quiet=True), [recorded] if recorded else [])
    return report, HiddenStateStore.open(out / "train", target_info(target), splits["train"])


def opened(target: FrozenTarget, folder: Path) -> RecordedStates:
    return RecordedStates.open([folder], recording_of(target, BLOCKS, "float32"), 1 << 20)


def test_recorded_states_are_the_computed_ones_where_they_are_read(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    report, found = collected(target, splits, tmp_path / "found", folder)
    plain, computed = collected(target, splits, tmp_path / "computed")
    assert plain.reused == 0 and report.tokens == plain.tokens
    lengths = [len(row["input_ids"]) for split in splits.values() for row in split]
    assert sum(sorted(lengths)[:8]) <= report.reused < report.tokens  # of nine of one turn
    zeros = 0
    for i, row in enumerate(splits["train"]):
        a, b = found[i], computed[i]
        assert a.tokens.tolist() == b.tokens.tolist() == row["input_ids"]
        last = max(t for t, trained in enumerate(row["loss_mask"]) if trained)
        torch.testing.assert_close(a.tapped[:last], b.tapped[:last], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a.final[:last], b.final[:last], atol=1e-4, rtol=1e-4)
        for states, other in zip(a.final[last:], b.final[last:]):
            assert not states.any() or torch.allclose(states, other, atol=1e-4, rtol=1e-4)
        zeros += not a.final[-1].any()
    assert len(found) > zeros > len(found) / 2  # those that were computed have all


def test_recorded_states_are_linked_and_not_stored_twice(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    report, linked = collected(target, splits, tmp_path / "linked", folder)
    names = {path.name for path in (tmp_path / "linked/train").glob("recorded-*")}
    assert len(names) == len(list(folder.glob("shard-*")))
    shards = [
        open_shard(tmp_path / "linked/train", i, linked.manifest) for i in range(linked.manifest.n_shards)
    ]
    own = sum(shard.tensors["final"][1][0] for shard in shards)
    assert 0 < own < linked.manifest.tokens - report.reused / 2
    states = [(one.tapped, one.final) for one in linked]
    shutil.rmtree(folder)  # the store has them still
    again, found = collected(target, splits, tmp_path / "linked")
    assert again.tokens_per_second == 0 and len(found) == len(states)
    for document, (tapped, final) in zip(found, states):
        assert torch.equal(document.tapped, tapped) and torch.equal(document.final, final)
    # one that is cut short is missed, and its documents are computed
    victim = tmp_path / "linked/train" / min(names)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(UserError, match="shard-.*: missing or damaged; run the same collection again"):
        HiddenStateStore.open(tmp_path / "linked/train", target_info(target), splits["train"])
    repaired, found = collected(target, splits, tmp_path / "linked")
    assert repaired.tokens_per_second > 0
    last = max(t for t, trained in enumerate(splits["train"][0]["loss_mask"]) if trained)
    torch.testing.assert_close(found[0].final[:last], states[0][1][:last], atol=1e-4, rtol=1e-4)


def test_a_recording_with_another_byte_is_not_read(target, config, tmp_path):
    """Of the same size: in a store it would be linked again, as often as somebody repaired that."""
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    whole = collected(target, splits, tmp_path / "whole", folder)[0]
    victim = sorted(folder.glob("shard-*"))[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)  # into the file that the store has as well
    again, found = collected(target, splits, tmp_path / "again", folder)
    assert 0 < again.reused < whole.reused and again.bytes > whole.bytes
    for i, row in enumerate(splits["train"]):
        last = max(t for t, trained in enumerate(row["loss_mask"]) if trained)
        computed = collected_alone(target, row)
        torch.testing.assert_close(found[i].final[:last], computed[:last], atol=1e-4, rtol=1e-4)


def collected_alone(target: FrozenTarget, row: dict) -> torch.Tensor:
    target.tap(BLOCKS)
    ids = torch.tensor([row["input_ids"]])
    return target.encode(ids, torch.zeros_like(ids)).final[0]


def test_files_that_no_shard_reads_any_more_go(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    report, store = collected(target, splits, tmp_path / "store", folder)
    own = sum(shard.stat().st_size for shard in (tmp_path / "store").glob("*/shard-*"))
    assert report.bytes < own < report.bytes * 2 + 20_000  # headers; the recorded files are not counted
    for path in (tmp_path / "store/train").glob("shard-*"):
        path.unlink()
    (tmp_path / "store/train/.recorded-x.tmp").touch()
    shutil.rmtree(folder)
    settings = replace(COLLECT, kept_in=[str(tmp_path / "out")])  # gone, as it may once states are collected
    target.tap(BLOCKS)
    collect_states(settings, target, splits, tmp_path / "store", Console(quiet=True))
    assert not [path for path in (tmp_path / "store/train").iterdir() if "recorded" in path.name]


def test_recorded_states_are_copied_where_they_cannot_be_linked(target, config, tmp_path, monkeypatch):
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    linked = collected(target, splits, tmp_path / "linked", folder)[1]

    def another_disk(*args):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(recording.os, "link", another_disk)
    copied = collected(target, splits, tmp_path / "copied", folder)[1]
    assert not list((tmp_path / "copied/train").glob("recorded-*"))
    assert not list((tmp_path / "copied/train").glob(".recorded-*"))
    for a, b in zip(linked, copied, strict=True):
        assert torch.equal(a.tapped, b.tapped) and torch.equal(a.final, b.final)


def test_states_of_several_folders_are_found(target, config, tmp_path):
    """As of two processes that answer half of the prompts each."""
    lines = Path(config.sources[0].path).read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:6]), ("b", lines[6:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        answer(replace(config, sources=[Source(str(tmp_path / f"{name}.jsonl"))]), target, tmp_path / name)
    target.tap(BLOCKS)
    responses = [Source(str(tmp_path / name / "responses.jsonl")) for name in "ab"]
    build_corpus(CorpusConfig(responses, validation_fraction=0.2), target.tokenizer, tmp_path / "corpus")
    splits = load_corpus(tmp_path / "corpus", target.tokenizer)[0]
    reused = []
    for names in ("a", "b", "ab"):
        settings = replace(COLLECT, kept_in=[str(tmp_path / name) for name in names])
        reused.append(
            collect_states(settings, target, splits, tmp_path / f"of_{names}", Console(quiet=True)).reused
        )
    assert min(reused) > 0 and reused[0] + reused[1] == reused[2]

    def refused(answers: str, match: str) -> None:
        with pytest.raises(UserError, match=match):
            settings = replace(COLLECT, kept_in=[str(tmp_path / answers)])
            collect_states(settings, target, splits, tmp_path / "refused", Console(quiet=True))

    refused(
        "c",
        "hidden_states.kept_in: must name folders of answers with states.*got .*c without any; ",
    )
    target.tap([-1])
    refused("a", "hidden_states.kept_in: must .* got .*a with those of other ones; take the settings")


def test_a_store_with_recorded_states_is_for_its_loss_masks(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    other = splits["train"].map(lambda row: {"loss_mask": [1] * len(row["input_ids"])})
    for name, place in (("a", folder), ("b", None)):
        collected(target, splits, tmp_path / name, place)
    info = target_info(target)
    assert HiddenStateStore.open(tmp_path / "b/train", info, other)
    others = DatasetDict(train=other, validation=splits["validation"])
    for place in (folder, None):  # collecting again, as one might try, does not make it one for these tokens
        with pytest.raises(UserError, match="train: made for other trained tokens; delete it and collect"):
            HiddenStateStore.open(tmp_path / "a/train", info, other)
        with pytest.raises(UserError, match="train: holds .* for other trained tokens; delete the folder"):
            collected(target, others, tmp_path / "a", place)
    # an interrupted collection that goes on without them has some of them
    shutil.rmtree(folder)
    (tmp_path / "a/train/shard-00000.safetensors").unlink()
    collected(target, splits, tmp_path / "a", folder)
    with pytest.raises(UserError, match="train: made for other trained tokens; delete"):
        HiddenStateStore.open(tmp_path / "a/train", info, other)


def test_the_loss_does_not_read_what_is_not_recorded(target, config, tmp_path):
    """Zeros at the end of documents and the real states there give the same loss and gradients."""
    folder = answer(config, target, tmp_path / "out")
    splits = corpus_of(target, tmp_path / "out", tmp_path / "corpus")
    stores = (
        collected(target, splits, tmp_path / "a", folder)[1],
        collected(target, splits, tmp_path / "b")[1],
    )
    shape = DrafterConfig(tapped_blocks=BLOCKS, draft_vocab_size=200, anchor=True)
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, shape, 200))
    drafter.initialize_from(target, shape, torch.arange(100, 300))
    found = []
    for store in stores:
        rows = PackedRows(splits["train"], 512, 0, store)
        batch = default_collate([rows[i] for i in range(len(rows))])
        layout = random_blocks(batch["document_start"], 1, 6, torch.Generator().manual_seed(0))
        batch = with_states(target, batch)
        drafter.zero_grad()
        loss = draft_loss(drafter, drafter, target, batch, layout, chunk=64, bf16=False).total
        loss.backward()
        gradients = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients])
    assert found[0][0] > 0
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_an_interrupted_run_keeps_its_states_and_goes_on(target, config, tmp_path, monkeypatch):
    write, rows = Rewriting.write, []

    def interrupted(self, dialogue, row):
        write(self, dialogue, row)
        rows.append(row)
        if len(rows) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Rewriting, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(config, target, tmp_path / "out")
    folder = states_folder(tmp_path / "out")
    before = set(opened(target, folder).places)
    assert len(before) == 5
    shards = len(list(folder.glob("shard-*")))
    monkeypatch.undo()
    answer(config, target, tmp_path / "out")
    assert len(opened(target, folder).places) == 12 and before < set(opened(target, folder).places)
    # a shard that is cut short is as good as none
    shard = sorted(folder.glob("shard-*"))[shards]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert set(opened(target, folder).places) == before


def test_states_of_other_blocks_or_dtypes_are_not_read_and_make_room(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    for blocks, dtype in (([-1], "float32"), (BLOCKS, "bfloat16")):
        assert not RecordedStates.open([folder], recording_of(target, blocks, dtype), 1 << 20).places
    first = replace(config, max_rows=4)
    answer(first, target, tmp_path / "other")
    answer(config, target, tmp_path / "other", KeptStates([-1], "float32", 1e9, 128))
    folder = states_folder(tmp_path / "other")
    assert not opened(target, folder).places
    assert len(RecordedStates.open([folder], recording_of(target, [-1], "float32"), 1 << 20).places) == 8


def test_no_more_is_kept_than_there_is_room_for(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "whole")
    size = sum(file.stat().st_size for file in folder.glob("shard-*"))
    small = answer(config, target, tmp_path / "small", KeptStates(BLOCKS, "float32", size / 2, 128))
    kept = sum(file.stat().st_size for file in small.glob("shard-*"))
    assert size / 4 < kept < size / 2 + 1000  # and its header
    answers = [(tmp_path / name / "responses.jsonl").read_bytes() for name in ("whole", "small")]
    assert answers[0] == answers[1]


def test_a_document_that_goes_on_after_its_recording_is_computed(target, config, tmp_path):
    recorded = opened(target, answer(config, target, tmp_path / "out"))
    place = next(iter(recorded.places.values()))
    ids = place.shard.read("tokens", place.first, place.first + place.rows).tolist()
    untrained = [0] * (len(ids) + TAIL)
    assert recorded.find(ids, untrained).document(ids).final.shape[0] == len(ids)
    longer = recorded.find([*ids, 7], [0] * len(ids) + [1])  # its own token
    assert longer.document([*ids, 7]).final[-1].eq(0).all()
    assert (
        recorded.find([*ids, 7, 8], [0] * len(ids) + [1, 1]) is None
    )  # the second one needs the state at it
    assert recorded.find([*ids, *[7] * TAIL], untrained) is not None
    assert recorded.find([*ids, *[7] * (TAIL + 1)], [*untrained, 0]) is None
    assert recorded.find([*ids[:-1], 7], untrained) is None


def test_a_document_that_the_corpus_has_cut_has_its_states(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    whole = corpus_of(target, tmp_path / "out", tmp_path / "whole")
    most = min(len(row["input_ids"]) for row in whole["train"]) + 3
    splits = corpus_of(target, tmp_path / "out", tmp_path / "cut", max_length=most)
    lengths = [len(row["input_ids"]) for split in splits.values() for row in split]
    assert max(lengths) == most and lengths.count(most) > len(lengths) / 2
    report, found = collected(target, splits, tmp_path / "found", folder)
    assert report.reused > report.tokens / 2
    computed = collected(target, splits, tmp_path / "computed")[1]
    for i, row in enumerate(splits["train"]):
        n = len(row["input_ids"]) if len(row["input_ids"]) == most else 1
        torch.testing.assert_close(found[i].final[:n], computed[i].final[:n], atol=1e-4, rtol=1e-4)


def test_a_full_disk_ends_the_recording_and_nothing_else(target, config, tmp_path, monkeypatch):
    def full(*args):
        raise UserError("x: cannot be written (No space left on device)")

    out, console = tmp_path / "out", Console(file=StringIO(), width=200)
    monkeypatch.setattr(recording, "write_shard", full)
    answer_conversations(config, out, target, target.tokenizer, console=console, kept=KEPT)
    monkeypatch.undo()
    assert "(No space left on device); further hidden states are not kept but computed later" in (
        console.file.getvalue()
    )
    answer(config, target, tmp_path / "whole")
    answers = [(tmp_path / name / "responses.jsonl").read_bytes() for name in ("out", "whole")]
    assert answers[0] == answers[1] and not opened(target, states_folder(out)).places


def test_states_of_earlier_answers_come_along_with_them(target, config, tmp_path):
    """As when a limit is raised: the stage's folder is another one then."""
    answer(replace(config, max_rows=4), target, tmp_path / "before")
    out, quiet = tmp_path / "after", Console(quiet=True)
    answer_conversations(config, out, target, target.tokenizer, [tmp_path / "before"], quiet, KEPT)
    assert len(opened(target, states_folder(out)).places) == 12
    assert not states_folder(tmp_path / "before").exists()


def test_what_cannot_be_read_is_begun_again(target, config, tmp_path):
    folder = answer(config, target, tmp_path / "out")
    shards = sorted(folder.glob("shard-*"))
    assert len(shards) > 2
    first = opened(target, folder).places
    shards[1].write_bytes(b"")  # those after it are not read either, and make room
    (folder / ".shard-00007.tmp").mkdir()
    recordings = Recordings(folder, recording_of(target, BLOCKS, "float32"), 1e9, 128)
    assert [path.name for path in sorted(folder.glob("*shard-*"))] == [shards[0].name]
    assert recordings.n_shards == 1 and set(opened(target, folder).places) < set(first)
    (folder / "manifest.json").write_text("{")
    assert Recordings(folder, recording_of(target, BLOCKS, "float32"), 1e9, 128).n_shards == 0
