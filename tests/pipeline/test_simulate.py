"""Simulated times against formulas."""

import itertools
import random
from dataclasses import replace

import pytest

from drafttrain.pipeline.replay import Timestep, Trace
from drafttrain.pipeline.simulate import (
    Link,
    Machines,
    pipedec_jobs,
    pp_jobs,
    run,
    side_by_side,
    stpp_jobs,
    timestep_seconds,
    total_seconds,
)
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.errors import UserError


def machines(n: int, seed: int = 0, sync: float = 0.0, draft: float = 0.01) -> Machines:
    """Stages and links of different speeds."""
    rng = random.Random(seed)
    stages = [CostCurve((1, 4, 32), sorted(rng.uniform(0.01, 0.2) for _ in range(3))) for _ in range(n)]
    links = [Link(rng.uniform(1, 100), rng.uniform(0, 0.001), 4096) for _ in range(n - 1)]
    return Machines(stages, links, CostCurve((1, 32), (draft, draft)), sync)


@pytest.mark.parametrize("n", [1, 2, 5, 14])
def test_pp_is_the_sum_of_all(n):
    m = machines(n)
    token = sum(stage(1) for stage in m.stages) + sum(link(1) for link in m.links)
    assert total_seconds(run([pp_jobs(m, 9)])) == pytest.approx(9 * token, rel=1e-12)


@pytest.mark.parametrize("draft", [0.001, 0.5])
def test_every_hit_costs_the_slowest_part(draft):
    m = machines(5, draft=draft)
    trace = Trace([Timestep([3], [3, 3, 3, 2, 1], 1, 1)] * 20)
    slowest = max(stage(n) for stage, n in zip(m.stages, [3, 3, 3, 2, 1]))
    sending = max(link(n) for link, n in zip(m.links, [3, 3, 3, 2]))
    assert total_seconds(run([pipedec_jobs(m, trace)])) == pytest.approx(
        20 * max(draft, slowest + sending), rel=1e-12
    )


def test_beside_the_prompt_a_timestep_costs_what_it_takes_longer_than_a_token():
    curve = CostCurve((1, 8), (0.1, 0.1))
    m = Machines([curve] * 3, [Link(1e9, 0.02, 1)] * 2, CostCurve((1, 8), (0.05, 0.15)), sync=0.01)
    after = Timestep([1], [1, 1, 1], 1, 1)
    short, long = Timestep([1], [1, 0, 0]), Timestep([8], [8, 1, 0])
    [(_, seconds)] = pipedec_jobs(m, Trace([after], [short, short]))
    assert seconds == pytest.approx(0.13 + 0.02, rel=1e-6)  # the last group sends nothing on
    [(_, seconds)] = pipedec_jobs(m, Trace([after], [short, long]))
    assert seconds == pytest.approx(0.13 + 0.05, rel=1e-6)


def test_the_tree_beside_the_prompt_takes_memory_from_it():
    together, alone, none = CostCurve((1,), (0.4,)), CostCurve((1,), (0.2,)), lambda tokens: 0.0
    free = CostCurve((1,), (0.0,))
    m = Machines([together] * 2, [none], free, sync=0.01, alone=[alone] * 2, draft_alone=free, beside=True)
    [(_, seconds)] = pipedec_jobs(m, Trace([Timestep([], [1, 0], 1, 0)], [Timestep([1], [1, 0])]))
    assert seconds == pytest.approx(0.21 + 0.4 - 0.2)


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9])
def test_the_gain_over_pp_follows_the_hit_rate(hit_rate):
    """n / (C (h + (1 - h) n)), C the price of a layer over that of a token."""
    n, price, rng = 7, 1.3, random.Random(0)
    curve = CostCurve((1, 8), (0.1, 0.1 * price))
    m = Machines([curve] * n, [Link(1e9, 0.0, 1)] * (n - 1), CostCurve((1,), (0.0,)))
    trace, tokens = Trace(), 4000
    for _ in range(tokens):  # a layer of 8 nodes is always somewhere in the pipeline
        steps = 1 if rng.random() < hit_rate else n
        trace.steps += [Timestep([8], [8] * n) for _ in range(steps)]
    gain = total_seconds(run([pp_jobs(m, tokens)])) / total_seconds(run([pipedec_jobs(m, trace)]))
    assert gain == pytest.approx(n / (price * (hit_rate + (1 - hit_rate) * n)), rel=0.05)


def test_a_static_tree_drafts_and_verifies_in_turn():
    m = machines(3)
    rounds = [((1, 4, 4), 9), ((1,), 2)]
    expected = sum(m.draft(f) for drafted, _ in rounds for f in drafted)
    for _, nodes in rounds:
        expected += sum(stage(nodes) for stage in m.stages) + sum(link(nodes) for link in m.links)
    assert total_seconds(run([stpp_jobs(m, rounds)])) == pytest.approx(expected, rel=1e-12)


def test_requests_fill_the_pipeline():
    stage = CostCurve((1,), (1.0,))
    m = Machines([stage] * 4, [Link(1.0, 0.0, 0)] * 3, CostCurve((1,), (0.0,)))
    one = total_seconds(run([pp_jobs(m, 5)]))
    assert one == 20
    assert (
        total_seconds(run([pp_jobs(m, 5) for _ in range(4)], at_once=4)) == 23
    )  # the last one starts 3 later
    assert total_seconds(run([pp_jobs(m, 5) for _ in range(4)], at_once=1)) == 80
    events = run([pp_jobs(m, 5) for _ in range(6)], at_once=3)
    for resource, found in itertools.groupby(
        sorted(events, key=lambda e: (e.resource, e.start)), lambda e: e.resource
    ):
        found = list(found)
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(found)), resource


def test_resting_stages_cost_nothing():
    m = machines(3, sync=0.004)
    assert timestep_seconds(m, [], [0, 0, 1]) == pytest.approx(m.stages[2](1) + 0.004)
    assert timestep_seconds(m, [1], [1, 0, 0]) == pytest.approx(
        max(m.draft(1), m.stages[0](1) + m.links[0](1)) + 0.004
    )
    assert timestep_seconds(m, [1, 4, 4] * 99, [1, 0, 0]) == pytest.approx(
        99 * (m.draft(1) + 2 * m.draft(4)) + 0.004
    )


def test_machines_that_share_a_memory_are_faster_while_others_rest():
    """Two that fill it take as long as one after the other; three slow each other down by how many work."""
    assert side_by_side([[(2.0, 4.0)], [(1.0, 2.0)]]) == [3.0, 2.0]
    assert side_by_side([[(1.0, 2.0), (1.0, 2.0)], [(1.0, 2.0)]]) == [3.0, 2.0]
    assert side_by_side([[(2.0, 4.0)], []]) == [2.0, 0.0]
    assert side_by_side([[(1.0, 3.0)], [(1.0, 3.0)], [(1.0, 3.0)]]) == [3.0, 3.0, 3.0]
    assert side_by_side([[(1.0, 3.0)], [(1.0, 3.0)], []]) == [2.0, 2.0, 0.0]
    assert side_by_side([[(0.0, 0.0), (1.0, 2.0)], [(4.0, 5.0)]]) == [2.0, 4.4]  # two fifths by 2
    assert side_by_side([[(3.0, 3.0)], [(1.0, 1.0), (1.0, 1.0)]]) == [3.0, 2.0]
    assert side_by_side([[(1.0, 9.0)]]) == [1.0]


def test_after_a_miss_the_only_stage_at_work_has_the_memory_to_itself():
    together, alone, none = CostCurve((1,), (0.4,)), CostCurve((1,), (0.2,)), lambda tokens: 0.0
    draft, draft_alone = CostCurve((1,), (0.04,)), CostCurve((1,), (0.01,))
    more = {"beside": True, "alone": [alone] * 2, "draft_alone": draft_alone}
    m = Machines([together] * 2, [none], draft, **more)
    assert timestep_seconds(m, [], [1, 0]) == pytest.approx(0.2)
    assert timestep_seconds(m, [1], [1, 0]) == pytest.approx(0.21)
    # the second stage ends first, and a tenth of the first one's work is left
    assert timestep_seconds(m, [1], [1, 1]) == pytest.approx(0.4 + 0.02)
    apart = replace(m, beside=False)
    assert timestep_seconds(apart, [1], [0, 0]) == pytest.approx(0.01)
    assert timestep_seconds(apart, [1], [0, 1]) == pytest.approx(0.025 + (1 - 0.025 / 0.3) * 0.2)


def test_a_drafter_beside_the_first_stage_and_a_broadcast_take_their_time():
    m = machines(3, sync=0.004)
    beside = replace(m, beside=True, broadcast=0.002)
    first = m.draft(2) + m.stages[0](2)
    rest = max(m.stages[1](1), m.stages[2](1))
    sending = max(m.links[0](2), m.links[1](1))
    assert timestep_seconds(beside, [2], [2, 1, 1]) == pytest.approx(max(first, rest) + sending + 0.004)
    assert timestep_seconds(beside, [], [2, 1, 1]) == pytest.approx(timestep_seconds(m, [], [2, 1, 1]))
    token = sum(stage(1) for stage in m.stages) + sum(link(1) for link in m.links)
    assert total_seconds(run([pp_jobs(beside, 9)])) == pytest.approx(9 * (token + 0.002), rel=1e-12)


def test_links_have_to_match_the_stages():
    with pytest.raises(UserError, match="links: must be one fewer than the 2 stages, got 2"):
        Machines([CostCurve((1,), (1.0,))] * 2, [Link(1, 0, 1)] * 2, CostCurve((1,), (1.0,)))
