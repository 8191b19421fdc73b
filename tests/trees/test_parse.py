"""Policies as recipes and the command line name them."""

import dataclasses

import pytest

from drafttrain.trees.c2t import C2tPolicy, Plain
from drafttrain.trees.cape import CapePolicy
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import EXAMPLE_COSTS, AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.parse import parse_policy, takes_classifier, takes_costs, uses_calibration
from drafttrain.trees.pct import PctPolicy
from drafttrain.trees.policies import drafter_policy
from drafttrain.trees.static import StaticPolicy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.utils.errors import UserError

CURVE = CostCurve((1, 8), (0.02, 0.03))
COSTS = Costs(CostCurve((1,), (0.001,)), CURVE, CURVE, 80.0, (0.6, 0.5), AcceptanceCurve())


@pytest.mark.parametrize(
    "text, policy",
    [
        ("chain:length=4", ChainPolicy(4)),
        ("static:k_config=3-2", StaticPolicy.from_k_config((3, 2))),
        ("paths:paths=0-1-01", StaticPolicy([(0,), (1,), (0, 1)])),
        ("vct", StaticPolicy.vanilla()),
        ("vct:width=2,depth=2", StaticPolicy.vanilla(2, 2)),
        ("eagle1", StaticPolicy.eagle1()),
        ("cape:max_depth=3,bounds=0.5,widths=4-1", CapePolicy(3, (0.5,), (4, 1))),
        ("eagle2:top_k=4,total=none", Eagle2Policy(4, 6, None)),
        ("pct:width=3", PctPolicy(0.001, 0.02, width=3)),
        ("pct:draft_seconds=0.002", PctPolicy(0.002, 0.02)),
        ("pct:threshold=0.2", PctPolicy(threshold=0.2)),
        (
            "timed:max_depth=3",
            TimedPolicy(COSTS.draft, CURVE, 80.0, (0.6, 0.5), AcceptanceCurve(), max_depth=3),
        ),
        ("c2t:beta=0.3,top_k=10", C2tPolicy(Plain("P"), 0.3, 10, 15, 10)),
        ("c2t:layer_k=none,max_depth=6", C2tPolicy(Plain("P"), 0.5, 15, None, 6)),
        ("c2t_chain", C2tPolicy(Plain("P"), 0.85, 1, 1, 10)),
        ("joint:threshold=0.1,layer_k=5", C2tPolicy(Plain("P"), 0.1, 15, 5, 10)),
        ("dymax", C2tPolicy(Plain("p"), 0.3, 1, 1, 10)),
        ("dyjoint:threshold=0.1,max_depth=4", C2tPolicy(Plain("P"), 0.1, 1, 1, 4)),
    ],
)
def test_names(text, policy):
    assert parse_policy(text, COSTS, Plain("P")) == policy


@pytest.mark.parametrize(
    "tree, policy",
    [
        ("ngram", ""),
        ("ngram+timed:width=3", "timed:width=3"),
        ("ngram+c2t", "c2t"),
        ("ngram+", ""),
        ("ngram+ngram", "ngram"),
        ("timed", "timed"),
        ("ngrams", "ngrams"),
    ],
)
def test_what_a_tree_with_n_grams_needs_is_what_its_policy_needs(tree, policy):
    assert drafter_policy(tree) == policy
    assert takes_costs(tree) == takes_costs(policy) and takes_classifier(tree) == takes_classifier(policy)
    assert uses_calibration(tree, COSTS) == uses_calibration(policy, COSTS)


@pytest.mark.parametrize(
    "text, settings, calibrated",
    [
        ("c2t", {"beta": 0.06, "expand": 0.3, "top_k": 4}, True),
        ("c2t:top_k=15,max_depth=6", {"beta": 0.06, "expand": 0.3, "top_k": 15, "max_depth": 6}, True),
        ("c2t:expand=none", {"beta": 0.06, "top_k": 4}, True),
        ("c2t:beta=0.2", {"beta": 0.2}, False),  # the paper's, even if another was calibrated
        ("c2t:beta=0.2,expand=0.4", {"beta": 0.2, "expand": 0.4}, False),
        ("c2t_chain", {"beta": 0.85, "top_k": 1, "layer_k": 1}, False),
    ],
)
def test_thresholds_of_c2t(text, settings, calibrated):
    costs = dataclasses.replace(COSTS, beta=0.06, expand=0.3, top_k=4)
    assert parse_policy(text, costs, Plain("P")) == C2tPolicy(Plain("P"), **settings)
    assert uses_calibration(text, costs) == calibrated


def test_a_threshold_of_none_is_that_of_the_costs():
    assert parse_policy("pct:threshold=none", COSTS) == parse_policy("pct", COSTS)
    assert uses_calibration("pct:threshold=none", COSTS) and not uses_calibration("pct:threshold=0.2", COSTS)


@pytest.mark.parametrize("text", ["pct:draft_seconds=3", "pct:verify_seconds=1e-6"])
def test_what_is_written_out_is_compared_with_real_costs_alone(text):
    assert isinstance(parse_policy(text, EXAMPLE_COSTS), PctPolicy)


@pytest.mark.parametrize(
    "text, message",
    [
        ("timd", "there is no policy 'timd'; did you mean timed"),
        ("best", "there is no policy 'best'; choose one of chain, static"),
        ("chain", "length is missing; write them after a colon"),
        ("pct", "draft_seconds, verify_seconds: missing; run drafttrain calibrate"),
        ("timed", "run drafttrain calibrate"),
        ("c2t", "needs a classifier; train one with drafttrain c2t"),
        ("c2t_chain:beta=0.5", "train one with drafttrain c2t"),
        ("joint:threshold=1", "beta: must be > 0 and < 1, got 1.0"),
        ("dymax:beta=0.3", "must have settings of threshold=…, max_depth=…, got 'beta=0.3'"),
        ("eagle2:topk=3", "did you mean top_k"),
        ("eagle2:top_k", "must have settings of .* got 'top_k'"),
        ("chain:length=x", "length: must be int, got 'x'"),
        ("chain:length=2,length=8", "length: must be given once, got it again; keep one"),
        ("pct:draft_seconds=inf", "draft_seconds: must be"),
        ("vct:width=1,depth=100000", "depth: must be >= 0 and at most 128, got 100000"),
        ("vct:depth=-5", "depth: must be >= 0 and at most 128, got -5"),
        ("eagle2:top_k=128", "top_k: must grow at most 4096 nodes .* got 82048 with top_k 128 and"),
        ("vct:width=8,depth=5", "k_config: must be .* at most 4096 nodes"),
        ("drawn:k_config=128-128-128", "k_config: must be at most 4096 nodes, got 2113665"),
        ("chain:length=-1", "length: must be >= 0 and <= 128, got -1"),
        ("chain:length=1" + 400 * "0", "length: must be >= 0 and <= 128, got 1000"),
        ("cape:max_depth=128,widths=128-4-2-1", "widths: must give at most 4096 nodes, got 16385 with max_d"),
        ("cape:bounds=0.3-x", "bounds: must be tuple.*, got '0.3-x'"),
        ("timed:draft_seconds=1", "draft_seconds: must be"),
        ("pct:draft_seconds=1,verify_seconds=nan", "verify_seconds: must be"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["eagle2:top_k=0", "pct:width=0,threshold=0.2", "timed:width=0"])
def test_no_children(text):
    with pytest.raises(UserError, match="must be >= 1 and <= 128, got 0"):
        parse_policy(text, COSTS)
