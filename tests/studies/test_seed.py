"""Studies of SEED: what is measured, and how."""

import time
from types import SimpleNamespace

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.kernels.linear import is_available
from drafttrain.trees.parse import parse_policy
from studies.seed import methods, overlap, paced, table1
from studies.seed.methods import SERIAL_AR, Grown, row, seconds_per_token
from studies.seed.pairs import Pair

pytestmark = pytest.mark.skipif(not is_available(), reason="the studies time the native forward")


@pytest.fixture(scope="module")
def pair(tiny_bundle):
    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    return Pair("tiny", bundle.target, bundle.drafter)


def grown(method: str, seconds: float, repeat: int = 0) -> Grown:
    return Grown("gsm8k", "1", method, repeat, seconds, 100, 50, 10, 1.5, 3, 6, True, None)


def test_every_row_of_table_1_has_a_tree_of_the_papers_shape():
    for task, (chains, trees) in table1.K_CONFIGS.items():
        rows = table1.methods(task)
        assert rows[0].name == SERIAL_AR and rows[0].tree is None
        for k_config in (*chains, *trees):
            names = [one for one in rows if str(k_config) in one.name]
            assert len(names) == 3  # SD or MCSD, SEED, SEED batched
            for one in names:
                assert parse_policy(one.tree).k_config == k_config
        assert {one.scheduler.sequences for one in rows} == {1, 3}


def test_seconds_per_token_are_medians_over_repeats():
    trees = [grown("SD", 1.0, 0), grown("SD", 3.0, 0), grown("SD", 8.0, 1), grown("SD", 3.0, 2)]
    assert seconds_per_token(trees) == pytest.approx(0.03)
    text = table1.table([grown(SERIAL_AR, 3.0), grown("SD", 2.0)])
    assert "| gsm8k | SD | 1.50 | 50.0 | 1.50 |" in text and row(trees[0])["seconds"] == 1.0


def test_interrupted_tables_are_resumed(pair, tmp_path, monkeypatch):
    made = []

    def interleave(pair, rows, task, limit, repeat, note, done):
        if (task, "1", SERIAL_AR, repeat) not in done:
            made.append((task, repeat))
            note(Grown(task, "1", SERIAL_AR, repeat, 1.0, 100, 50, 10, 1.0, 0, 0, None, None))

    monkeypatch.setattr(methods, "interleave", interleave)
    raw = tmp_path / "raw.jsonl"
    first = methods.collect(pair, table1.methods, {"gsm8k": 1}, 1, raw)
    again = methods.collect(pair, table1.methods, {"gsm8k": 1, "writing": 1}, 1, raw, resume=True)
    assert made == [("gsm8k", 0), ("writing", 0)] and again[:1] == first and len(again) == 2


def test_paced_work_holds_its_device_for_the_declared_time():
    pace, tree = paced.Paced(), SimpleNamespace(width=33, depths=torch.tensor([[0, 1, 2]]))
    branch = SimpleNamespace(tree=tree)
    began = time.perf_counter()
    pace.drafted(began, [branch] * 9)  # two steps of 4 ms, for two groups of sequences
    assert time.perf_counter() - began >= 0.016
    began = time.perf_counter()
    pace.verified(began, [tree])  # 33 tokens are two forwards
    assert time.perf_counter() - began >= 0.080
    pace.prefilled(began - 1.0, 5)
    assert (pace.pieces, pace.late) == (3, 1) and pace.lateness[0] >= 0.9


def test_what_drafting_and_verifying_cost_is_measured_in_three_ways(pair, monkeypatch):
    monkeypatch.setattr(overlap, "CONTEXT", 24)
    table = overlap.measure(pair, rounds=1)
    assert {"s_t(1)", "s_t(29)", "s_d(1)", "s_d(8)"} <= set(table)
    for found in table.values():
        assert len(found) >= 2 and "1 thread, beside the other" in found and min(found.values()) > 0
