"""The store: what goes in comes out, and nothing else is taken for it."""

import dataclasses
import errno
import json
from copy import deepcopy
from unittest import mock

import pytest
import torch
from datasets import Dataset, Sequence, Value
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from drafttrain.hidden_states import shards as shards_module
from drafttrain.hidden_states.fingerprints import corpus_fingerprint
from drafttrain.hidden_states.shards import plan_shards, write_shard
from drafttrain.hidden_states.store import (
    Document,
    HiddenStateStore,
    Manifest,
    open_shard,
    read_manifest,
    shard_path,
)
from drafttrain.target_lm.config import stored_bytes
from drafttrain.target_lm.info import TargetInfo, target_info
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils import writing
from drafttrain.utils.errors import UserError

HIDDEN, TAPPED = 6, 2
INFO = TargetInfo("Llama", HIDDEN, 4, 32, [0, 2], "w" * 16, "t" * 16)
LENGTHS = [5, 0, 1, 12, 7, 3, 9, 2]  # document 1 was skipped
SPLIT = Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(LENGTHS)]})


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    return [
        Document(
            tokens=torch.full((n,), i),
            tapped=torch.randn(n, TAPPED * HIDDEN, generator=generator).bfloat16(),
            final=torch.randn(n, HIDDEN, generator=generator).bfloat16(),
        )
        for i, n in enumerate(LENGTHS)
    ]


@pytest.fixture
def folder(tmp_path):
    """A complete store of eight documents in three shards."""
    bounds = plan_shards(LENGTHS, 20)
    manifest = Manifest("t", INFO, corpus_fingerprint(SPLIT), "float32", len(LENGTHS), sum(LENGTHS), bounds)
    every = documents()
    for k in range(manifest.n_shards):
        write_shard(tmp_path, k, manifest, every[bounds[k] : bounds[k + 1]], ["one"] if k == 0 else [])
    manifest.complete, manifest.skipped = True, ["one"]
    manifest.write(tmp_path)
    return tmp_path


def same(a: Document, b: Document) -> bool:
    fields = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Document)]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in fields)


def test_round_trip(folder):
    store = HiddenStateStore.open(folder, INFO, SPLIT)
    assert store.manifest.bounds == [0, 4, 7, 8]
    assert len(store) == len(LENGTHS) and store.lengths.tolist() == LENGTHS
    for index in (
        7,
        0,
        3,
        4,
        1,
        6,
        2,
        5,
        -1,
        -8,
    ):  # first and last of each shard, the empty one, from the end
        assert same(store[index], documents()[index])
    assert store[1].tapped.shape == (0, TAPPED * HIDDEN)
    with pytest.raises(IndexError):
        store[8]
    assert len(list(store)) == len(LENGTHS)


def test_shards_are_plain_safetensors(folder):
    tensors = load_file(shard_path(folder, 1))
    every = documents()[4:7]
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "tokens": torch.int32,
        "tapped": torch.bfloat16,
        "final": torch.bfloat16,
        "offsets": torch.int64,
    }
    assert tensors["offsets"].tolist() == [0, 7, 10, 19]
    assert torch.equal(tensors["tokens"].long(), torch.cat([d.tokens for d in every]))
    assert torch.equal(tensors["tapped"], torch.cat([d.tapped for d in every]))
    assert torch.equal(tensors["final"], torch.cat([d.final for d in every]))


def test_forked_workers_read_the_same(folder):
    store = HiddenStateStore.open(folder, INFO)
    loader = DataLoader(
        store, batch_size=None, shuffle=False, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert all(same(read, written) for read, written in zip(loader, documents(), strict=True))


def test_bytes_are_as_estimated(folder):
    real = sum(path.stat().st_size for path in folder.glob("shard-*"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("shard-*"))
    assert real == headers + stored_bytes(sum(LENGTHS), len(LENGTHS), 3, HIDDEN, TAPPED)
    assert headers < 3 * 512


def test_states_may_be_stored_in_fp32(folder, tmp_path):
    """Bit for bit; a store in bf16 keeps the key that it had before there was a choice."""
    written = [dataclasses.replace(one, tapped=one.tapped.float() * 1.001) for one in documents()]
    place, bounds = tmp_path / "wide", [0, len(written)]
    place.mkdir()
    args = ("t", INFO, corpus_fingerprint(SPLIT), "float32", len(LENGTHS), sum(LENGTHS), bounds)
    manifest, narrow = Manifest(*args, stored="float32"), Manifest(*args)
    assert manifest.key != narrow.key == Manifest(*args, stored="bfloat16").key
    written = [dataclasses.replace(one, final=one.final.float() * 1.001) for one in written]
    write_shard(place, 0, manifest, written, ["one"])
    manifest.complete, manifest.skipped = True, ["one"]
    manifest.write(place)
    store = HiddenStateStore.open(place, INFO, SPLIT)
    assert all(same(read, one) for read, one in zip(store, written, strict=True))
    (path,) = place.glob("shard-*")
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    expected = stored_bytes(sum(LENGTHS), len(LENGTHS), 1, HIDDEN, TAPPED, "float32")
    assert path.stat().st_size == header + expected


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60))
def test_plan_is_greedy_and_covers_all(lengths, budget):
    bounds = plan_shards(lengths, budget)
    assert bounds[0] == 0 and bounds[-1] == len(lengths) and bounds == sorted(set(bounds))
    for first, last in zip(bounds, bounds[1:]):
        tokens = [n for n in lengths[first:last] if n]
        assert sum(tokens) <= budget or len(tokens) == 1
        if last < len(lengths):  # the next document would not have fitted
            assert sum(tokens) + lengths[last] > budget


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "Qwen2"),
        ("hidden_size", 8),
        ("n_blocks", 5),
        ("vocab_size", 33),
        ("tapped_blocks", [0, 1]),
        ("weights", "x" * 16),
        ("tokenizer", "x" * 16),
    ],
)
def test_another_target_is_refused(folder, name, value):
    with pytest.raises(UserError, match=name.replace("_", " ")) as error:
        HiddenStateStore.open(folder, dataclasses.replace(INFO, **{name: value}))
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("wanted", [[2], [0], [2, 0], [], [4], [4, 0], [2, 4, 0, 2]])
def test_a_store_gives_the_blocks_that_are_wanted_in_their_order(folder, wanted):
    """Some of those it holds, or all in another order; block 4, after the last, is the final state."""
    store = HiddenStateStore.open(folder, dataclasses.replace(INFO, tapped_blocks=wanted), SPLIT)
    for index, whole in enumerate(documents()):
        states = {0: whole.tapped[:, :HIDDEN], 2: whole.tapped[:, HIDDEN:], 4: whole.final}
        expected = torch.cat([whole.tapped[:, :0], *(states[block] for block in wanted)], 1)
        assert same(store[index], dataclasses.replace(whole, tapped=expected))


@pytest.mark.parametrize("wanted", [[1], [0, 1], [2, 0, 3], [4, 3]])
def test_a_store_without_a_wanted_block_is_refused(folder, wanted):
    with pytest.raises(
        UserError, match=r"tapped blocks \(\[0, 2\] in the store, .* collect .* again"
    ) as error:
        HiddenStateStore.open(folder, dataclasses.replace(INFO, tapped_blocks=wanted), SPLIT)
    assert str(wanted) in str(error.value) and "\n" not in str(error.value)


def test_another_corpus_is_refused(folder):
    with pytest.raises(UserError, match="another corpus"):
        HiddenStateStore.open(folder, INFO, SPLIT.select(range(7)))


def test_unfinished_store_is_refused(folder):
    manifest = read_manifest(folder)
    manifest.complete = False
    manifest.write(folder)
    with pytest.raises(UserError, match="interrupted"):
        HiddenStateStore.open(folder, INFO)


def test_missing_manifest_is_refused(tmp_path):
    with pytest.raises(UserError, match="manifest.json: no such file, .*collect them first"):
        HiddenStateStore.open(tmp_path, INFO)


@pytest.mark.parametrize("change", [{"format_version": 99}, {"bounds": None}, {"surplus": 1}])
def test_manifest_of_another_version_is_refused(folder, change):
    path = folder / "manifest.json"
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    with pytest.raises(UserError, match="manifest.json: .*collect again"):
        HiddenStateStore.open(folder, INFO)


def damage(path, how):
    data = path.read_bytes()
    match how:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "one byte short":
            path.write_bytes(data[:-1])
        case "half a header":
            path.write_bytes(data[:40])
        case "no header":
            path.write_bytes(b"\xff" * len(data))
        case "one byte more":
            path.write_bytes(data + b"\0")
        case "another shard":
            path.write_bytes(shard_path(path.parent, 0).read_bytes())
        case "another collection":
            path.write_bytes(data.replace(read_manifest(path.parent).key.encode(), b"0" * 16))


@pytest.mark.parametrize(
    "how",
    [
        "gone",
        "empty",
        "one byte short",
        "half a header",
        "no header",
        "one byte more",
        "another shard",
        "another collection",
    ],
)
def test_damaged_shard_is_refused(folder, how):
    path = shard_path(folder, 1)
    assert open_shard(folder, 1, read_manifest(folder)) is not None
    damage(path, how)
    assert open_shard(folder, 1, read_manifest(folder)) is None
    with pytest.raises(UserError, match="shard-00001.safetensors: missing or damaged"):
        HiddenStateStore.open(folder, INFO)


def test_shard_cut_short_while_in_use(folder):
    store = HiddenStateStore.open(folder, INFO)
    damage(shard_path(folder, 1), "one byte short")
    with pytest.raises(UserError, match="shard-00001.safetensors: the file was cut short"):
        store[6]


def test_full_disk(folder, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def fill(tensors, path, metadata):
        path.with_name("of safetensors").write_bytes(b"half a shard")
        raise full

    manifest, before = read_manifest(folder), shard_path(folder, 2).read_bytes()
    monkeypatch.setattr(shards_module, "save_file", fill)
    with pytest.raises(UserError, match="shard-00002.*No space left.*free some space"):
        write_shard(folder, 2, manifest, documents()[7:], [])
    monkeypatch.setattr(writing.os, "fsync", mock.Mock(side_effect=full))
    with pytest.raises(UserError, match="manifest.json: .*No space left"):
        manifest.write(folder)
    assert shard_path(folder, 2).read_bytes() == before and read_manifest(folder) == manifest
    assert not list(folder.glob(".*"))


def test_writing_twice_gives_the_same_bytes(folder):
    before = shard_path(folder, 0).read_bytes()
    write_shard(folder, 0, read_manifest(folder), documents()[:4], ["one"])
    assert shard_path(folder, 0).read_bytes() == before


def test_corpus_fingerprint():
    rows = [[1, 2, 3], [], [4], [5, 6]]
    split = Dataset.from_dict({"input_ids": rows, "loss_mask": rows})
    key = corpus_fingerprint(split)
    assert corpus_fingerprint(split.cast_column("input_ids", Sequence(Value("int32")))) == key
    # through an index mapping, as `select` and `shuffle` leave it
    assert corpus_fingerprint(split.select([3, 2, 1, 0]).select([3, 2, 1, 0])) == key
    for other in (
        [[1, 2], [3], [4], [5, 6]],
        [[4], [], [1, 2, 3], [5, 6]],
        rows[:3],
        [[1, 2, 3], [4], [5, 7]],
    ):
        assert corpus_fingerprint(Dataset.from_dict({"input_ids": other})) != key


def test_target_info_knows_its_target(tiny_llama):
    model, tokenizer = tiny_llama

    def info(change=None, dtype=torch.float32):
        copy = LlamaForCausalLM(deepcopy(model.config)).to(torch.float32)
        copy.load_state_dict(model.state_dict())
        if change:
            change(copy)
        return target_info(FrozenTarget(copy.to(dtype), tokenizer, "tiny", [-4, -2]))

    def tune(copy):
        with torch.no_grad():
            copy.model.layers[2].mlp.up_proj.weight += 0.01

    def turn(copy):
        copy.config.rope_parameters = {**copy.config.rope_parameters, "rope_theta": 1e6}

    ours = info()
    assert (ours.hidden_size, ours.n_blocks, ours.vocab_size, ours.tapped_blocks) == (64, 4, 512, [0, 2])
    assert info() == ours and info(dtype=torch.bfloat16) == ours  # the same weights in another type
    assert info(tune).weights != ours.weights
    assert info(turn).weights != ours.weights
