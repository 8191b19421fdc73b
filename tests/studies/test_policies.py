"""Tuning and comparing growth policies."""

import pytest

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import Prompt, Task
from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.evaluation.proposers import usable_proposers
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from studies.policies import GRIDS, LARGE, compare, table, tune

TASK = Task("a", [Prompt("1", ["One?"]), Prompt("2", ["Two?"])])


def test_every_setting_that_is_tried_exists():
    flat = CostCurve((1,), (0.01,))
    costs = Costs(CostCurve((1,), (0.001,)), flat, flat, 50.0, (0.5,), AcceptanceCurve())
    for trees in [*GRIDS.values(), list(LARGE.values())]:
        for tree in trees:
            assert parse_policy(tree, costs).max_depth > 0


def test_the_fastest_of_each_is_compared(tiny_bundle, tmp_path):
    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    grids = {"chain": ["chain:length=1", "chain:length=3"], "cape": ["cape:max_depth=2"]}
    log = MeasurementLog(tmp_path / "log", "key")
    chosen, speeds = tune(bundle, TASK, log, 6, grids)
    assert chosen["cape"] == "cape:max_depth=2" and list(speeds) == [t for g in grids.values() for t in g]
    assert speeds[chosen["chain"]] == max(speeds[tree] for tree in grids["chain"])
    found = compare(bundle, chosen, [TASK], log, 6, repeats=2)
    rows = table(found["a"])
    assert list(rows) == [AUTOREGRESSIVE, TRANSFORMERS, "chain", "cape"]
    assert rows["chain"]["repeats"] == 2 and rows["chain"]["identical"] == 1
    low, high = rows["chain"]["speedup_interval"]
    assert low <= rows["chain"]["speedup"] <= high or low == pytest.approx(high)
    assert rows[AUTOREGRESSIVE]["speedup_interval"] == [1.0, 1.0]


def test_what_cannot_be_used_here_is_left_out(tiny_bundle):
    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    slow = "pct:draft_seconds=2,verify_seconds=1"
    with pytest.warns(UserWarning, match="is left out: .* draft_seconds: must be < verify_seconds"):
        assert list(usable_proposers(bundle, ["chain:length=1", slow])) == ["chain:length=1"]
    with pytest.warns(UserWarning), pytest.raises(UserError, match="drafting pays only where"):
        usable_proposers(bundle, [slow])
