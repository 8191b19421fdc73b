"""Offline collection gives the states of a plain forward, after any interruption, however many take part."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.corpus import load_corpus
from drafttrain.hidden_states import collect as collect_module
from drafttrain.hidden_states.collect import _batches, collect, collect_states, encode_documents
from drafttrain.hidden_states.store import HiddenStateStore, read_manifest
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils import disk
from drafttrain.utils.errors import UserError

TAPPED = [-4, -2]
CONFIG = CollectConfig(mode="offline", batch_tokens=96, shard_tokens=128)
# Another process that collects the same; if asked, it kills itself where the n-th shard would get its name.
CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from datasets import DatasetDict
from transformers import AutoModelForCausalLM
from drafttrain.hidden_states.collect import CollectConfig, collect_states
from drafttrain.target_lm.model import FrozenTarget

torch.set_num_threads(1)
folder, out, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rename, renamed = os.replace, 0

def replace(source, goal):
    global renamed
    if "shard-" in str(goal):
        renamed += 1
        if renamed == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    rename(source, goal)

os.replace = replace
model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
target = FrozenTarget(model, None, "tiny", [-4, -2])
config = CollectConfig(mode="offline", batch_tokens=96, shard_tokens=128)
collect_states(config, target, DatasetDict.load_from_disk(str(folder / "corpus")), out)
"""


def rows_of(n: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (n,), generator=generator).tolist()
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in lengths]


def split_of(rows: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"id": [f"doc-{i}" for i in range(len(rows))], "input_ids": rows})


@pytest.fixture(scope="module")
def splits():
    return DatasetDict(train=split_of(rows_of(30, 1)), validation=split_of(rows_of(5, 2)))


@pytest.fixture
def target(tiny_llama):
    """The tiny Llama without its tokenizer, as the child process has it."""
    return FrozenTarget(deepcopy(tiny_llama[0]), None, "tiny", TAPPED)


@pytest.fixture(scope="module")
def whole(tiny_llama, splits, tmp_path_factory):
    """An uninterrupted collection by one process, and what a child process needs to do the same."""
    folder = tmp_path_factory.mktemp("whole")
    model = deepcopy(tiny_llama[0])
    model.save_pretrained(folder / "model")
    splits.save_to_disk(folder / "corpus")
    collect_states(CONFIG, FrozenTarget(model, None, "tiny", TAPPED), splits, folder / "states")
    return folder


def contents(out: Path) -> dict[str, bytes | None]:
    """Everything in a folder: bytes of files by name, None for folders."""
    return {
        str(path.relative_to(out)): path.read_bytes() if path.is_file() else None for path in out.rglob("*")
    }


def child(folder: Path, out: Path, kill_at: int = 0, **environment: str) -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    env = {
        **os.environ,
        **environment,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    words = [sys.executable, "-c", CHILD, str(folder), str(out), str(kill_at)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, as a share of the largest number."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_states_are_those_of_a_plain_forward(family, native, request):
    model, _ = request.getfixturevalue(family)
    target = FrozenTarget(deepcopy(model), None, "tiny", TAPPED)
    if native:
        target.pack()
    rows = [*rows_of(25, 3), []]
    seen = set()
    for index, states in encode_documents(target, rows, batch_tokens=200):
        plain = model(torch.tensor([rows[index]]), output_hidden_states=True)
        # entry 0 is the embedding and the last is after the final norm: -4 is the output of block 4 - 4 = 0
        tapped = torch.cat([plain.hidden_states[-4], plain.hidden_states[-2]], dim=-1)[0]
        assert distance(states.tapped, tapped) < 1e-5
        assert distance(states.final, plain.hidden_states[-1][0]) < 1e-5
        assert distance(target.head(states.final), plain.logits[0]) < 1e-5
        assert states.tokens.tolist() == rows[index]
        seen.add(index)
    assert seen == set(range(25))  # the empty one gives nothing


def test_stored_states(whole, splits, target):
    for name, split in splits.items():
        store = HiddenStateStore.open(whole / "states" / name, target_info(target), split)
        assert len(store) == len(split) and store.manifest.n_shards > 1 - (name == "validation")
        for index in range(len(split)):
            ids = split[index]["input_ids"]
            plain = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            document = store[index]
            assert document.tokens.tolist() == ids
            torch.testing.assert_close(
                document.tapped, torch.cat([plain[-4], plain[-2]], -1)[0].bfloat16(), atol=1e-4, rtol=1e-2
            )
            torch.testing.assert_close(document.final, plain[-1][0].bfloat16(), atol=1e-4, rtol=1e-2)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_batches(lengths, budget):
    batches = list(_batches(lengths, budget))
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n]
    for batch in batches:
        assert lengths[batch[-1]] == max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * lengths[batch[-1]] <= budget


def test_bytes_are_as_estimated_and_reported(target, splits, tmp_path, capsys):
    report = collect_states(CONFIG, target, splits, tmp_path)
    shards = list(tmp_path.rglob("shard-*"))
    real = sum(path.stat().st_size for path in shards)
    assert report.bytes < real < report.bytes + 512 * len(shards)
    assert report.tokens == sum(len(row) for split in splits.values() for row in split["input_ids"])
    assert (report.documents, report.skipped) == (35, 0)
    assert f"35 documents, {report.tokens:,} tokens" in capsys.readouterr().out


def test_lines_show_the_rate_of_whole_shards(target, splits, tmp_path, capsys, monkeypatch):
    """A split of one batch has no rate of its own between its documents."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic, clock.sleep = lambda: clock.now, lambda seconds: None
    write = collect_module.write_shard

    def in_two_seconds(*args):
        clock.now += 2.0
        write(*args)

    monkeypatch.setattr(collect_module, "time", clock)
    monkeypatch.setattr(collect_module, "write_shard", in_two_seconds)
    collect_states(CONFIG, target, splits, tmp_path)
    line = r"states, (\w+): ([\d,]+) of [\d,]+ tokens, ([\d,]+) tokens/s"
    printed = re.findall(line, capsys.readouterr().out)
    assert {name for name, *_ in printed} == set(splits) and len(printed) > len(splits)
    for split in splits:
        lines = [(done, rate) for name, done, rate in printed if name == split]
        for shards, (done, rate) in enumerate(lines, 1):
            assert rate == f"{int(done.replace(',', '')) / (2 * shards):,.0f}"


@pytest.mark.parametrize("kill_at", [1, 4])
def test_killed_and_resumed_equals_uninterrupted(whole, target, splits, tmp_path, kill_at):
    process = child(whole, tmp_path, kill_at)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, errors
    left = sorted(path.name for path in (tmp_path / "train").iterdir())
    assert sum(name.startswith("shard-") for name in left) == kill_at - 1
    assert f".shard-{kill_at - 1:05d}.tmp" in left
    with pytest.raises(UserError, match="interrupted"):
        HiddenStateStore.open(tmp_path / "train", target_info(target))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/shard-*")}
    collect_states(CONFIG, target, splits, tmp_path)
    assert contents(tmp_path) == contents(whole / "states")
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())  # not computed again


def test_two_processes_equal_one(whole, target, splits, tmp_path, monkeypatch):
    second = child(whole, tmp_path, RANK="1", WORLD_SIZE="2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    computed = []
    encode = target.encode

    def counted(ids, *rest):
        computed.append(ids.shape[0])
        return encode(ids, *rest)

    monkeypatch.setattr(target, "encode", counted)
    collect_states(CONFIG, target, splits, tmp_path)
    output, errors = second.communicate(timeout=600)
    assert second.returncode == 0, errors
    assert output == ""  # only the first one talks
    assert 0 < sum(computed) < 35
    assert contents(tmp_path) == contents(whole / "states")


def test_finished_collection_computes_nothing(whole, target, splits, tmp_path, monkeypatch):
    shutil.copytree(whole / "states", tmp_path / "out")
    monkeypatch.setattr(target, "encode", None)
    report = collect_states(CONFIG, target, splits, tmp_path / "out")
    assert report.tokens_per_second == 0
    assert contents(tmp_path / "out") == contents(whole / "states")


@pytest.mark.parametrize("size", [0, 100, -1])
def test_shard_cut_short_is_computed_again(whole, target, splits, tmp_path, size):
    out = shutil.copytree(whole / "states", tmp_path / "out")
    path = out / "train" / "shard-00002.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    for index in (1, 2):  # number 1 has its name already: killed just before its folder was to go
        (out / "train" / f".shard-0000{index}.tmp").mkdir()
    (out / "train" / ".shard-00002.tmp" / ".tmpAbCdEf").write_bytes(b"stale")
    (out / "train" / ".manifest.json.0123abcd.tmp").write_bytes(b"stale")
    collect_states(CONFIG, target, splits, out)
    assert contents(out) == contents(whole / "states")


def test_folder_of_another_collection_is_refused(whole, target, splits, tmp_path, tiny_qwen2):
    out = shutil.copytree(whole / "states", tmp_path / "out")
    others = {
        "architecture": (CONFIG, FrozenTarget(deepcopy(tiny_qwen2[0]), None, "other", TAPPED), splits),
        "tapped blocks": (CONFIG, FrozenTarget(deepcopy(target.model), None, "tiny", [-3]), splits),
        "corpus": (CONFIG, target, DatasetDict(train=splits["train"].select(range(29)))),
        "shard_tokens": (CollectConfig(batch_tokens=96, shard_tokens=100), target, splits),
    }
    for what, arguments in others.items():
        with pytest.raises(UserError, match=f"train: holds .* another .*{what}.*delete"):
            collect_states(*arguments, out)
    assert contents(out) == contents(whole / "states")


def test_disk_limits(target, splits, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="above hidden_states.max_disk_gb = 0.0001"):
        collect_states(CollectConfig(max_disk_gb=1e-4), target, splits, tmp_path / "out")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match="storing hidden states needs"):
        collect_states(CONFIG, target, splits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def poisoned(target: FrozenTarget, rows: list[list[int]], bad: list[int]) -> DatasetDict:
    """A corpus in which the documents `bad` hold a token whose embedding is NaN."""
    with torch.no_grad():
        target.base.embed_tokens.weight[511] = float("nan")
    rows = [[*row, 511, 7] if i in bad else row for i, row in enumerate(rows)]
    return DatasetDict(train=split_of(rows))


def test_document_with_nan_is_left_out(target, tmp_path, capsys):
    rows = rows_of(30, 4)
    splits = poisoned(target, rows, [11])
    report = collect_states(CONFIG, target, splits, tmp_path)
    assert report.skipped == 1
    assert "train row 11 (doc-11): NaN or infinite states; left out" in capsys.readouterr().out
    store = HiddenStateStore.open(tmp_path / "train", target_info(target), splits["train"])
    assert store.manifest.skipped == ["doc-11"]
    assert store.lengths.tolist() == [0 if i == 11 else len(row) for i, row in enumerate(rows)]
    assert [store[i].tokens.tolist() for i in range(30)] == [[] if i == 11 else r for i, r in enumerate(rows)]
    # the others are what they are without it, although they shared batches
    for index, states in encode_documents(target, [row for i, row in enumerate(rows) if i != 11], 4096):
        document = store[index + (index >= 11)]
        torch.testing.assert_close(document.final, states.final.bfloat16(), atol=1e-4, rtol=1e-2)


def test_too_many_nans(target, tmp_path):
    splits = poisoned(target, rows_of(30, 4), [2, 20, 25])
    for _ in range(2):  # a second attempt does not count again from the start
        with pytest.raises(UserError, match=r"2 of 30 documents have NaN.*doc-2.*max_skipped"):
            collect_states(CONFIG, target, splits, tmp_path)
    assert not read_manifest(tmp_path / "train").complete
    report = collect_states(
        CollectConfig(batch_tokens=96, shard_tokens=128, max_skipped=0.1), target, splits, tmp_path
    )
    assert report.skipped == 3


def test_corpus_that_does_not_fit_the_target(target, tmp_path):
    long = DatasetDict(train=split_of([[5] * 10, [5] * 513]))
    with pytest.raises(UserError, match="train row 1: 513 tokens, and tiny has 512 positions"):
        collect_states(CONFIG, target, long, tmp_path)
    foreign = DatasetDict(train=split_of([[5, 6], [5, 512]]))
    with pytest.raises(UserError, match="token id 512, and tiny has 512"):
        collect_states(CONFIG, target, foreign, tmp_path)


def test_an_empty_split_has_an_empty_store(target, tmp_path):
    """As of a corpus with one document: training says what is missing."""
    rows = split_of([[5] * 10])
    splits = DatasetDict(train=rows, validation=rows.select([]))
    report = collect_states(CONFIG, target, splits, tmp_path / "out", recorded=[tmp_path / "none"])
    assert report.tokens == 10 and read_manifest(tmp_path / "out" / "validation").complete


def test_processes_that_wait_in_vain_stop(target, splits, tmp_path, monkeypatch):
    monkeypatch.setattr(collect_module, "PATIENCE_S", 0.5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="the first process wrote no manifest"):
        collect_states(CONFIG, target, splits, tmp_path)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="other processes have stopped; run the same command again"):
        collect_states(CONFIG, target, splits, tmp_path)
    # one that works on a shard for longer is waited for
    polls, alive = [], tmp_path / ".alive-1"

    def missing() -> int:
        os.utime(alive, (len(polls), len(polls))) if alive.exists() else alive.touch()
        return int(polls.append(1) or len(polls) < 10)

    collect_module._wait(missing, "given up", [alive])
    monkeypatch.undo()
    collect_states(CONFIG, target, splits, tmp_path)  # one process can finish it
    assert not list(tmp_path.glob("train/.alive-*"))
    assert read_manifest(tmp_path / "train").complete


def test_from_a_target_folder_and_a_corpus_folder(tiny_llama, tmp_path, monkeypatch):
    model, tokenizer = tiny_llama
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {
            "id": f"chat{i}",
            "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text[::2]}],
        }
        for i, text in enumerate(
            ["a quick brown fox", "over the lazy dog", "speculative", "sixteen eggs in all"]
        )
    ]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    source = Source(str(tmp_path / "chats.json"))
    build_corpus(CorpusConfig([source], validation_fraction=0.25), tokenizer, tmp_path / "corpus")
    arguments = (str(tmp_path / "model"), [-4], tmp_path / "corpus", tmp_path / "out", "float32", "cpu")
    packed = []
    monkeypatch.setattr(FrozenTarget, "pack", packed.append)
    monkeypatch.setattr(collect_module, "variant", lambda: "amx_bf16")  # which torch uses better
    collect(CONFIG, *arguments[:3], tmp_path / "stock", "float32", "cpu")
    assert not packed
    monkeypatch.undo()
    report = collect(CONFIG, *arguments)
    target = load_target(arguments[0], "float32", "cpu")
    splits, _ = load_corpus(tmp_path / "corpus", target.tokenizer)
    assert report.documents == 4 and {name: len(split) for name, split in splits.items()}["validation"] == 1
    for name, split in splits.items():
        store = HiddenStateStore.open(tmp_path / "out" / name, target_info(target, [0]), split)
        for index, row in enumerate(split):
            assert store[index].tokens.tolist() == row["input_ids"]
            plain = model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
            assert distance(store[index].tapped.float(), plain[-4][0]) < 1e-2
