"""The figures of the machine: limits, columns and what is judged, with stubs and a tiny target."""

import copy
import importlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import Prompt
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, Measurement, MethodRun
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from studies import goals as figures
from studies.figures import (
    columns,
    limits,
    machine_quickstart,
    machine_speed,
    machine_start,
    machine_texts,
    machine_work,
)
from studies.goals import Run

ROOT = Path(__file__).parents[2]
TEXTS = ("The quick", "Once upon", "def main", "Janet has")
PROMPTS = [Prompt(str(i), [text]) for i, text in enumerate(TEXTS)]


@pytest.fixture
def script(monkeypatch, tmp_path):
    """studies/figures/machine.py, whose raw data go to a temporary folder."""
    module = importlib.import_module("studies.figures.machine")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(figures, "check_quiet", lambda refuse: None)
    monkeypatch.setattr(figures, "RAW", tmp_path / "raw")
    return module


@pytest.fixture
def target(tiny_llama):
    model, tokenizer = tiny_llama
    return FrozenTarget(copy.deepcopy(model), tokenizer, name="tiny")  # packing changes it


# limits


def test_interleaved_shares_are_medians_over_rounds(script, target, monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    shares = iter([0.1, 0.5, 0.3, 0.7, 0.2, 0.9])
    asked = []

    def share(weights, rate, products, seconds):
        [(n, times)] = seconds.items()
        asked.append((weights, products, n, len(times)))
        return {n: {"share": next(shares)}}

    monkeypatch.setattr(limits, "limit_shares", share)
    found = limits.interleaved_shares(target, 100, 1e9, [1, 5], rounds=3)
    assert found == {1: 0.2, 5: 0.7} and asked == [(100, 1e9, 1, 7), (100, 1e9, 5, 7)] * 3


def test_limit_share_takes_the_nearer_limit(script):
    rates = {"bytes_per_second": 1000.0, "products_per_second": 2000.0}
    shares = limits.limit_shares(100, **rates, seconds={1: [0.4, 0.25, 0.5], 8: [0.8]})
    assert shares[1] == {"share": 0.2 / 0.4, "limit_ms": 200, "forward_ms": 400}  # 200 bytes at 1000 a second
    assert shares[8] == {"share": 0.4 / 0.8, "limit_ms": 400, "forward_ms": 800}  # 800 products at 2000


def test_weights_that_a_forward_reads(script, target):
    expected = sum(w.numel() for w in target.base.layers.parameters() if w.ndim == 2)
    expected += target.lm_head.weight.numel()
    assert limits.weights_read(target) == expected
    target.pack()
    assert limits.weights_read(target) == expected


def test_rates_and_forwards_are_measured(script, target):
    rates = limits.streaming_rate(size=1 << 20)
    assert rates["sum"] > 0 and all(rate > 0 for rate in rates.values())
    assert limits.arithmetic_rate(torch.float32, sides=(32,)) > 0
    target.pack()
    for n in (1, 5):
        seconds = limits.forward_seconds(target, n, context=10, repeats=3)
        assert len(seconds) == 3 and min(seconds) > 0


def test_operations_count_products_forward_and_backward(script):
    layer, x = torch.nn.Linear(8, 16, bias=False), torch.ones(4, 8, requires_grad=True)
    assert limits.operations(lambda: layer(x).sum().backward()) == 3 * 2 * 4 * 8 * 16


# speed


def measurements(cpu_contention=0.0, best=0.5):
    """Three prompts, twice each, 4 tokens: plain 1 s, transformers 2 s, drafted `best` s, llama.cpp 0.8 s."""
    counts = {"prompts": 1, "new_tokens": 4, "steps": 3, "fresh_tokens": 3, "fresh_steps": 3.0}
    stats = DecodeStats(**counts, prefill_seconds=0.1, verify_seconds=0.3, seconds=0.5)
    seconds = {AUTOREGRESSIVE: 1.0, TRANSFORMERS: 2.0, "best": best, "llama.cpp f16": 0.8}
    runs = {
        name: MethodRun(taken, [1, 2, 3, 4], stats if name in (AUTOREGRESSIVE, "best") else None)
        for name, taken in seconds.items()
    }
    return [
        Measurement("mt_bench", str(i), 0, repeat, 5, runs, cpu_contention)
        for repeat in range(2)
        for i in range(3)
    ]


def test_speed_figures_are_per_token_with_intervals(script):
    found = machine_speed.speed_figures(measurements(), "best", None, {"transformers_dtype": "float32"})
    values = {name: figure["value"] for name, figure in found.items()}
    assert values == pytest.approx(
        {
            "ar_vs_transformers": 2.0,
            "best_vs_ar": 2.0,
            "ar_vs_llamacpp_f16": 0.8,
            "best_vs_llamacpp_f16": 1.6,
        }
    )
    for figure in found.values():
        assert figure["interval"] == pytest.approx([figure["value"]] * 2)
        assert figure["size"] == {"prompts": {"mt_bench": 3}, "repeats": 2}
        assert figure["transformers_dtype"] == "float32"
    assert set(found) == set(script.FIGURES["speed"])


def test_without_llamacpp_its_figures_are_skipped(script):
    found = machine_speed.speed_figures(measurements(), "best", "llama.cpp: no npm", {})
    for name in ("ar_vs_llamacpp_f16", "best_vs_llamacpp_f16"):
        assert found[name] == {"value": None, "skipped": "llama.cpp: no npm"}
    assert found["best_vs_ar"]["value"] == pytest.approx(2)


def test_speeds_of_a_busy_machine_are_flagged(script):
    found = machine_speed.speed_figures(measurements(cpu_contention=0.5), "best", None, {})
    assert all("other processes took 0.5 cores" in figure["flags"][-1] for figure in found.values())


def test_rival_runs_once_beside_our_measurements(script, target, monkeypatch, tmp_path):
    started = []

    class Running:
        described = {"kernel": "libggml-cpu-haswell.so"}
        seconds, forward_seconds = 4.0, 3.0

        def decode(self, ids, n):
            started[-1].append((len(ids), n))
            return MethodRun(0.125, [len(ids)])

    class Context:
        def __init__(self, *words):
            started.append([])

        def __enter__(self):
            return Running()

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(machine_speed.llamacpp, "running", Context)
    ids = [prompt.token_ids(target.tokenizer) for prompt in PROMPTS[:3]]
    ours = measurements()
    (tmp_path / "m").write_bytes(b"weights")
    for _ in range(2):  # the second one finds everything in the file
        rival = machine_speed.Rival(tmp_path, {"f16": tmp_path / "m"}, target, tmp_path / "llamacpp.json")
        found = rival.beside(ours, PROMPTS[:2], repeats=1)
        assert [one.prompt for one in found] == ["0", "1"] and {one.repeat for one in found} == {0}
        assert found[1].runs["llama.cpp f16"] == MethodRun(0.125, [len(ids[1])])
        assert found[1].runs["best"] == ours[1].runs["best"] and rival.described("f16") == {
            **Running.described,
            "forward_share": 0.75,
        }
    warm, *runs = started[0]
    assert len(started) == 1 and warm == (len(ids[0]), 8)
    assert runs == [(len(row), machine_speed.NEW_TOKENS) for row in ids[:2]]


# exactness


def test_texts_that_differ_are_counted(script, tiny_bundle, monkeypatch, tmp_path):
    loaded = load_bundle(tiny_bundle, dtype="float32")
    trees = {"chain": "chain:length=3", "ngram": "ngram"}
    target, proposers = loaded.target, {name: loaded.proposer(tree) for name, tree in trees.items()}
    cells = machine_texts.compare_texts(target, proposers, {"task": PROMPTS}, 8, tmp_path / "cells.json")
    assert len(cells) == 2 * 2 * 2 and all(cell == {"texts": 4, "differing": []} for cell in cells.values())

    decode_all, calls = machine_texts.decode_all, []

    def spoilt(target, proposer, ids, *words, max_rows, **options):
        outputs, stats = decode_all(target, proposer, ids, *words, max_rows=max_rows, **options)
        calls.append(max_rows)
        if max_rows == 4:
            outputs[1][-1] += 1
        return outputs, stats

    monkeypatch.setattr(machine_texts, "decode_all", spoilt)
    again = machine_texts.compare_texts(target, proposers, {"task": PROMPTS}, 8, tmp_path / "cells.json")
    assert again == cells and not calls  # nothing is decoded again
    found = machine_texts.compare_texts(target, proposers, {"task": PROMPTS}, 8, tmp_path / "other.json")
    assert found["task, chain, batch 4, seeded"] == {"texts": 4, "differing": ["1"]}
    assert found["task, chain, batch 1, seeded"] == {"texts": 4, "differing": []}


# dtype


def test_auto_is_judged_by_its_worst_work(script):
    def speeds(decode, train, collect, generate):
        return {"decode": decode, "train": train, "collect": collect, "generate": generate}

    rounds = {
        "float32": [speeds(10, 100, 50, 30), speeds(12, 90, 50, 30), speeds(11, 95, 50, 30)],
        "bfloat16": [speeds(22, 10, 40, 40), speeds(22, 10, 40, 40), speeds(5, 10, 40, 40)],
    }
    found = machine_work.dtype_figure(rounds, {"decoding": "bfloat16", "products": "float32"})
    shares = {name: work["share"] for name, work in found["works"].items()}
    assert shares == {"decode": 1, "train": 1, "collect": 1, "generate": 0.75} and found["value"] == 0.75


# start


def test_seconds_of_a_command(script):
    first, total = machine_start.command_seconds(["sh", "-c", "echo x; sleep 0.2; echo y"])
    assert 0 < first < total and total > 0.2
    for text in ("exit 0", "echo x; exit 3"):
        with pytest.raises(UserError, match="must print something, got status"):
            machine_start.command_seconds(["sh", "-c", text])


# columns


def test_a_column_runs_in_a_process_of_its_own(script, monkeypatch):
    seen = []

    def run(command, env, stdout):
        flag, module, name, folder, asked = command[1:]
        assert (flag, module) == ("-m", "studies.figures.machine")
        seen.append((name, env.get("ATEN_CPU_CAPABILITY"), env.get("ONEDNN_MAX_CPU_ISA")))
        script.measure_part(name, Path(folder), Run(**json.loads(asked)))
        return subprocess.CompletedProcess(command, 0)

    for name in columns.AVX2:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script, "describe_machine", lambda device: {"threads": 1})
    monkeypatch.setattr(columns, "subprocess", SimpleNamespace(run=run))  # git runs as before
    part = {"startup": lambda run, folder: {"startup_s": {"value": 3.0, "machine": {"dtype": "float32"}}}}
    monkeypatch.setattr(script, "PARTS", part)
    found = columns.column("startup")(Run("machine"))
    assert found["startup_s"]["value"] == 3.0 and found["startup_s"]["machine"]["dtype"] == "float32"
    assert found["startup_s"]["machine"]["threads"] == 1 and "load" in found["startup_s"]["machine"]
    assert set(columns.column("startup", avx2=True)(Run("machine"))) == {"startup_s_avx2"}
    assert seen == [("startup", None, None), ("startup", "avx2", "AVX2")]
    columns.column("startup")(Run("machine", resume=True))
    assert len(seen) == 2
    columns.column("startup")(Run("machine", resume=True, limit=3))  # something else was asked
    assert len(seen) == 3


def test_a_part_that_cannot_be_measured_says_why(script, monkeypatch, tmp_path):
    def refuse(run, folder):
        raise UserError("busy")

    monkeypatch.setattr(script, "PARTS", {"speed": refuse})
    script.measure_part("speed", tmp_path, Run("machine"))
    found = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert set(found) == set(script.FIGURES["speed"])
    assert all(figure["error"] == "busy" and figure["value"] is None for figure in found.values())
    rows = [figures.figure_row(name, ">= 1", found[name], figures.Size()) for name in found]
    figures.record("machine", rows)
    assert figures.read_rows(figures.RAW / "machine.jsonl") == {}  # an earlier record stays


def test_the_quickstart_is_not_missed_where_its_speed_cannot_be_measured(script, monkeypatch):
    monkeypatch.setattr(machine_quickstart, "fresh_run", lambda *words, **options: {"seconds": 1300.0})
    failed = {"quickstart_speed": {"value": None, "error": "busy", "failed": True}}
    monkeypatch.setattr(machine_quickstart, "in_process_of_its_own", lambda *words: failed)
    with pytest.raises(UserError, match="^busy$"):
        machine_quickstart.quickstart(Run("machine"))


def test_a_part_that_dies_is_an_error(script, monkeypatch):
    dead = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(columns.subprocess, "run", lambda command, env, stdout: dead)
    with pytest.raises(RuntimeError, match="startup ended with -9"):
        columns.column("startup")(Run("machine"))


# the quickstart


def summary(mismatches=0, accept_len=2.0, speedup=1.2):
    row = {"accept_len": accept_len, "speedup": speedup}
    lossless = {"mismatches": mismatches, "prompts": 16}
    return {"tree": "timed", "lossless": lossless, "tasks": {"all": {"timed": row}}}


@pytest.mark.parametrize(
    ("evaluated", "against_transformers", "avx2", "problem"),
    [
        (summary(), 1.3, False, None),
        (summary(mismatches=1), 1.3, False, "not lossless"),
        (summary() | {"lossless": None}, 1.3, False, "not lossless"),
        (summary(accept_len=1.7), 1.3, False, "accept_len below 1.8"),
        (summary(speedup=1.1), 1.3, False, "not more than 1.15 times plain decoding"),
        (summary(speedup=1.1), 1.3, True, None),
        (summary(), 1.1, True, "not more than 1.15 times transformers"),
    ],
)
def test_quickstart_is_judged_by_what_it_came_to(
    script, monkeypatch, evaluated, against_transformers, avx2, problem
):
    def fresh(kept, prefix, environment):
        assert environment == (columns.AVX2 if avx2 else {})
        (kept / "evaluation").mkdir()
        (kept / "evaluation/summary.json").write_text(json.dumps(evaluated))
        return 1300.0, 4_000_000_000

    speed = {"quickstart_speed": {"value": against_transformers, "transformers_dtype": "float32"}}
    monkeypatch.setattr(machine_quickstart, "fresh_quickstart", fresh)
    monkeypatch.setattr(machine_quickstart, "in_process_of_its_own", lambda *words: speed)
    found = machine_quickstart.quickstart(Run("machine"), avx2=avx2)
    figure = found["quickstart_wall_s_avx2" if avx2 else "quickstart_wall_s"]
    assert figure["value"] == 1300 and figure["ok"] is (problem is None) and figure["why"] == (problem or "")
    if not avx2:
        assert found["six_gb"]["value"] == 4 and found["six_gb"]["ok"] is (problem != "not lossless")


def test_one_core_needs_a_lossless_summary(script, monkeypatch):
    seen = {}

    def fresh(kept, prefix, words):
        seen.update(prefix=prefix, words=words)
        (kept / "evaluation").mkdir()
        (kept / "evaluation/summary.json").write_text(json.dumps(summary(seen["mismatches"])))
        (kept / "summary.json").write_text("{}")
        return 700.0, 1

    monkeypatch.setattr(machine_quickstart, "fresh_quickstart", fresh)
    monkeypatch.setattr(machine_quickstart.shutil, "which", lambda name: f"/usr/bin/{name}")
    for mismatches, value in ((0, 1.0), (2, 0.0)):
        seen["mismatches"] = mismatches
        assert machine_quickstart.one_core(Run("machine"))["one_core"]["value"] == value
    assert seen["prefix"][:2] == ["taskset", "-c"] and seen["words"] == ["--minutes", "10"]
    monkeypatch.setattr(machine_quickstart.shutil, "which", lambda name: None)
    assert "taskset" in machine_quickstart.one_core(Run("machine"))["one_core"]["skipped"]


def test_memory_is_limited_where_groups_can_be_made(script, tmp_path):
    with machine_quickstart.memory_limit(6e9, root=tmp_path / "absent") as prefix:
        assert prefix == []
    with machine_quickstart.memory_limit(6e9, root=tmp_path) as prefix:
        [group] = tmp_path.iterdir()
        assert (group / "memory.max").read_text() == "6000000000"
        done = subprocess.run([*prefix, "echo", "a b"], capture_output=True, text=True)
        assert done.stdout == "a b\n" and int((group / "cgroup.procs").read_text()) > 0


def test_every_figure_of_a_part_has_a_goal(script):
    names = [name for group in script.GROUPS for name in group.goals]
    assert len(names) == len(set(names))
    measured = {name for part, found in script.FIGURES.items() for name in found} - {"quickstart_speed"}
    assert {name.removesuffix("_avx2") for name in names} == measured | {
        "quickstart_wall_s",
        "six_gb",
        "one_core",
    }
    assert set(script.FIGURES) == set(script.PARTS)
