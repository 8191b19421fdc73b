"""A pipeline writes the text of the whole target, for any drafts and any cut."""

import itertools
import math
import random

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.kernels.build import variant
from drafttrain.pipeline.baselines import pp, slm, stpp
from drafttrain.pipeline.check import problems
from drafttrain.pipeline.member import Pace
from drafttrain.pipeline.program import pipedec
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.eagle2 import Eagle2Policy
from tests.pipeline.local import GREEDY, NEW, SAMPLED, Replay, decode, replaying


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)])
def test_one_token_at_a_time(members, texts, prompts, family, cuts):
    pipeline = members(family, cuts)
    for number, prompt in enumerate(prompts):
        for sampling in (GREEDY, SAMPLED):
            expected = texts(family, number, sampling)
            found = decode(pp, pipeline, prompt, sampling)
            assert found.tokens == expected
            assert found.timesteps == (NEW - 1) * len(cuts)
        stop = expected[7]
        ended = decode(pp, pipeline, prompt, sampling, stop=[stop])
        assert ended.tokens == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_small_lm_alone_writes_its_own_text(members, whole, folders, texts, prompts, family, alone):
    other = whole("qwen2")  # whose text it is not
    config = DrafterConfig(kind="causal_lm", model=str(folders[family]), draft_vocab_size=None)
    small = new_drafter(other, config, torch.arange(other.vocab_size)).eval()
    pipeline = members("qwen2", (2, 2), small, alone=alone)
    for number, prompt in enumerate(prompts):
        for sampling in (GREEDY, SAMPLED):
            expected = texts(family, number, sampling)
            found = decode(slm, pipeline, prompt, sampling)
            assert found.tokens == expected and found.timesteps == NEW - 1
            assert decode(slm, pipeline, prompt, sampling, new=1).tokens == expected[:1]
        stopped = decode(slm, pipeline, prompt, sampling, stop=expected[2:3])
        assert stopped.tokens == expected[: expected.index(expected[2]) + 1]


@pytest.mark.parametrize("mode", [pp, stpp, slm])
def test_declared_times_hold_the_device(members, whole, folders, prompts, mode, monkeypatch):
    """Else the work of several prompts at a time would overlap on it."""
    config = DrafterConfig(kind="causal_lm", model=str(folders["llama"]), draft_vocab_size=None)
    small = new_drafter(whole("llama"), config, torch.arange(512)).eval()
    [member], held = members("llama", (4,), small, policy=ChainPolicy(2)), []
    monkeypatch.setattr(Pace, "wait", lambda *given: held.append(member.computing.locked()))
    decode(mode, [member], prompts[0], depth=2)
    assert len(held) > 1 and all(held)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("cuts", [(4,), (2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("quality", ["right", "wrong", "half"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_tree_in_flight(members, whole, texts, prompts, family, cuts, quality, alone):
    taps, n = [0, 2], len(cuts)
    target, rng = whole(family, taps), random.Random(1)
    for number, prompt in enumerate(prompts):
        sampling = (GREEDY, SAMPLED)[(number + alone) % 2]
        expected = texts(family, number, sampling)
        coin = [rng.random() < 0.5 for _ in range(200)]
        right = {"right": [True] * 200, "wrong": [False] * 200, "half": coin}[quality]
        drafter = replaying(target, [*prompt, *expected], right)
        pipeline = members(family, cuts, drafter, taps, alone=alone)
        width, children = rng.choice([1, 3]), rng.choice([1, 4])
        if quality == "wrong":  # of four children one may be right by luck
            children = 1
        found = decode(pipedec, pipeline, prompt, sampling, width=width, children=children)
        assert found.tokens == expected
        if quality == "right" and n > 1:  # a hit is a timestep
            assert found.hits == NEW - 2 and found.timesteps == n + NEW - 2
        if quality == "wrong":  # a miss is n
            assert found.hits == 0 and found.timesteps == n * (NEW - 1)
        if quality == "half" and n > 1:  # with one stage the next layer is not there yet
            assert 0 < found.hits < NEW - 2


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("cuts", "groups"), [((4,), (1,)), ((2, 2), (1, 1)), ((1, 1, 1, 1), (1, 2, 1))])
@pytest.mark.parametrize("quality", ["right", "wrong", "half"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_tree_that_follows_the_prompt(
    members, whole, texts, prompts, family, cuts, groups, quality, layers
):
    """Of a drafter that reads no states: the first token costs a timestep, and may be a hit."""
    target, rng, n = whole(family), random.Random(5), len(groups)
    for number, prompt in enumerate(prompts):
        sampling = (GREEDY, SAMPLED)[(number + layers) % 2]
        expected, follows = texts(family, number, sampling), len(prompt) > 1
        coin = [rng.random() < 0.6 for _ in range(200)]
        right = {"right": [True] * 200, "wrong": [False] * 200, "half": coin}[quality]
        drafter = replaying(target, [*prompt, *expected], right)
        pipeline = members(family, cuts, drafter, [], groups=groups, alone=rng.random() < 0.5)
        tree = {"width": rng.choice([1, 3]), "children": rng.choice([1, 4]), "layers": layers}
        found = decode(pipedec, pipeline, prompt, sampling, **tree)
        assert found.tokens == expected and found.judged == NEW - 2 + follows
        if quality == "right" and n > 1 and follows:
            assert found.hits == NEW - 1 and found.timesteps == 1 + math.ceil((NEW - 1) / layers)
        if quality == "wrong":
            assert found.hits == 0 and found.timesteps == n * (NEW - 1) + follows
        if quality == "half" and n > 1:
            assert 0 < found.hits < NEW - 2 + follows
        for new in (1, 2):
            assert decode(pipedec, pipeline, prompt, sampling, new=new, **tree).tokens == expected[:new]
        stopped = decode(pipedec, pipeline, prompt, sampling, stop=expected[:1], **tree)
        assert stopped.tokens == expected[:1]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("cuts", [(4,), (2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("quality", ["right", "wrong", "half"])
@pytest.mark.parametrize(
    ("layers", "best_first"), [(2, False), (3, False), (30, False), (1, True), (2, True), (30, True)]
)
def test_several_layers_or_best_first(
    members, whole, texts, prompts, family, cuts, quality, layers, best_first
):
    target, rng, n = whole(family, [0, 2]), random.Random(3), len(cuts)
    for number, prompt in enumerate(prompts):
        sampling = (GREEDY, SAMPLED)[(number + layers) % 2]
        expected = texts(family, number, sampling)
        coin = [rng.random() < 0.7 for _ in range(200)]
        right = {"right": [True] * 200, "wrong": [False] * 200, "half": coin}[quality]
        drafter = replaying(target, [*prompt, *expected], right)
        pipeline = members(family, cuts, drafter, [0, 2], alone=rng.random() < 0.5)
        tree = {"width": rng.choice([1, 3]), "children": rng.choice([1, 4]), "layers": layers}
        tree["best_first"] = best_first
        if best_first and quality == "wrong":  # of four children one may be right by luck
            tree["children"] = 1
        found = decode(pipedec, pipeline, prompt, sampling, **tree)
        assert found.tokens == expected
        # the root, then all layers that were added while it was in a stage; with one stage they are too late
        if quality == "right" and (n > 1 or layers > 1):
            assert found.hits == NEW - 2 and found.timesteps == n + math.ceil((NEW - 2) / layers)
        if quality == "wrong":
            assert found.hits == 0 and found.timesteps == n * (NEW - 1)
        if quality == "half":
            assert (0 if n == layers == 1 else 1) <= found.hits < NEW - 2
            stop = rng.choice(expected[1:])
            ended = decode(pipedec, pipeline, prompt, sampling, stop=(stop,), **tree)
            assert ended.tokens == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("cuts", [(4,), (2, 1, 1)])
@pytest.mark.parametrize("policy", [ChainPolicy(3), Eagle2Policy(3, 4, 8)])
@pytest.mark.parametrize("alone", [False, True])
def test_a_static_tree(members, whole, texts, prompts, family, cuts, policy, alone):
    target, rng = whole(family, [0, 2]), random.Random(2)
    for number, prompt in enumerate(prompts):
        for sampling in (GREEDY, SAMPLED):
            expected = texts(family, number, sampling)
            coin = [rng.random() < 0.7 for _ in range(200)]
            drafter = replaying(target, [*prompt, *expected], coin)
            pipeline = members(family, cuts, drafter, [0, 2], alone=alone, policy=policy)
            found = decode(stpp, pipeline, prompt, sampling, depth=policy.max_depth)
            assert found.tokens == expected and found.timesteps < len(cuts) * NEW
            assert 0 < found.hits < NEW - 2
            stop = rng.choice(expected[1:])  # a draft, or the target's token after the path
            ended = decode(stpp, pipeline, prompt, sampling, stop=[stop], depth=policy.max_depth)
            assert ended.tokens == expected[: expected.index(stop) + 1]


def test_five_stages(members, whole, texts, prompts):
    taps, cuts, rng = [0, 3], (1, 1, 1, 1, 1), random.Random(6)
    target = whole("deep", taps)
    for number, prompt in enumerate(prompts):
        for sampling in (GREEDY, SAMPLED):
            expected = texts("deep", number, sampling)
            coin = [rng.random() < 0.6 for _ in range(200)]
            drafter = replaying(target, [*prompt, *expected], coin)
            plain = decode(pp, members("deep", cuts), prompt, sampling)
            static = decode(
                stpp, members("deep", cuts, drafter, taps, policy=ChainPolicy(3)), prompt, sampling, depth=3
            )
            flight = decode(pipedec, members("deep", cuts, drafter, taps), prompt, sampling)
            assert plain.tokens == static.tokens == flight.tokens == expected
            assert plain.timesteps == 5 * (NEW - 1) > flight.timesteps and 0 < flight.hits < NEW - 2


@pytest.mark.parametrize("groups", [(2, 2), (1, 3), (3, 1), (4,)])
def test_groups_share_a_layer(members, whole, texts, prompts, groups):
    target, expected = whole("llama", [0, 2]), texts("llama", 0)
    drafter = Replay(target, [[*prompts[0], *expected]], lambda *_: True)
    pipeline = members("llama", (1, 1, 1, 1), drafter, [0, 2], groups=groups)
    found = decode(pipedec, pipeline, prompts[0])
    assert found.tokens == expected and found.timesteps == len(groups) + NEW - 2


@pytest.mark.parametrize("kind", ["edd", "anchored", "vdm", "eagle", "causal_lm"])
@pytest.mark.parametrize("native", [False, True])
def test_every_kind_of_drafter(members, whole, folders, texts, prompts, kind, native):
    if native and variant() is None:
        pytest.skip("the native kernels need a C++ compiler and AVX2")
    settings = {
        "anchored": {"kind": "edd", "anchor": True},
        "causal_lm": {"kind": kind, "model": str(folders["llama"])},
    }
    config = DrafterConfig(**settings.get(kind, {"kind": kind}), draft_vocab_size=None)
    target = whole("llama")
    drafter = new_drafter(target, config, torch.arange(512)).eval()
    reads = getattr(drafter.config, "tapped_blocks", [])
    taps = [tap % target.n_blocks if tap < 0 else tap for tap in reads]
    if native:
        drafter.pack()
    hits = 0
    for number, prompt in enumerate(prompts):
        for width, children, layers in ((1, 1, 1), (5, 8, 1), (5, 8, 3)):
            found = decode(
                pipedec,
                members("llama", (2, 1, 1), drafter, taps, native=native),
                prompt,
                GREEDY,
                width,
                children,
                layers=layers,
            )
            assert found.tokens == texts("llama", number)
            hits += found.hits if layers == 1 else 0
    if (
        kind == "causal_lm"
    ):  # the target drafts for itself; more layers may lose its path to more probable ones
        assert hits == 2 * sum(NEW - 1 if len(prompt) > 1 else NEW - 2 for prompt in prompts)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("groups", [(1, 1, 1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("taps", [[0, 2], []])
def test_the_logs_keep_the_papers_rules(members, whole, texts, prompts, alone, groups, taps):
    rng, clock, follows = random.Random(4), itertools.count(), not taps
    text = [*prompts[0], *texts("llama", 0)]
    drafter = replaying(whole("llama", taps), text, [rng.random() < 0.7 for _ in range(200)])
    pipeline = members("llama", (1, 1, 1, 1), drafter, taps, groups=groups, alone=alone)
    for member in pipeline:
        member.clock = lambda: float(next(clock))
    decode(pipedec, pipeline, prompts[0])
    logs = [member.log for member in pipeline]
    assert problems(logs, groups, follows) == []
    assert problems(logs, groups, follows, over_network=True) == []  # which asks for less
    starts = {task[1:4]: task.start for log in logs for task in log if task.kind == "C"}
    assert (starts["dec", 1, 1] < starts["pre", 4, 0]) == follows  # the root, while the prompt is on its way
    if follows and len(groups) > 2:
        assert problems(logs, groups)  # which the paper's order does not have
    tasks = [task for log in logs for task in log]
    assert {task.kind for task in tasks} == {"C", "send", "receive", "V", "own"}
    sent = {(task.what, task.seq) for task in tasks if task.kind == "send"}
    computing = {task[1:4]: task for task in tasks if task.kind == "C"}
    assert {("pre", node, 0) for node in range(5)} < computing.keys()
    for task in tasks:
        kind, what, node, seq, *_ = task
        without = [[other for other in log if other is not task] for log in logs]
        early = [
            [other._replace(start=-2.0, end=-1.0) if other is task else other for other in log]
            for log in logs
        ]
        is_source = what == "dec" and 0 < node and (node, seq) in sent
        if kind in ("send", "receive") or is_source or what == "pre":  # others need it
            assert problems(without, groups, follows), task
        if kind == "V" and any(("dec", node, seq + 1) == other for other in computing):
            assert problems(without, groups, follows), task
        own = [of for of in ("dec", "sync") if (of, node, seq) in computing]
        waits = what in ("dec", "sync") or kind in ("send", "receive") or (what == "pre" and node > 1)
        if waits or (kind == "V" and ("dec" in own or (node and own))):
            for over_network in (False, True):
                assert problems(early, groups, follows, over_network), task
    sends = sorted((task.start, task) for task in tasks if (task.kind, task.what) == ("send", 1))
    for (_, task), (begin, _) in itertools.pairwise(sends):  # the first stage still sends as it sends again
        late = [[one._replace(end=begin + 0.5) if one is task else one for one in log] for log in logs]
        assert any("node 1: must be in one transfer" in line for line in problems(late, groups, follows))


class Planned(Replay):
    """Drafts two tokens after each node; the text's is the first or the second of them, or neither. No two
    nodes of a layer have the same joint probability."""

    # by place in the output
    probs = None, (0.6, 0.25), *[(0.7, 0.2), (0.5, 0.35), (0.6, 0.3)] * 9
    plan = (None, "first", "first", "neither", "second", *["first"] * 23)

    def expand(self, state, tree, frontier):
        log_probs = torch.full((*frontier.shape, self.draft_vocab_size), -20.0)
        begin = len(self.texts[0]) - NEW
        for i, node in enumerate(frontier[0].tolist()):
            place = state["seen"][0] + int(tree.depths[0, node]) + 1 - begin
            text = self.texts[0][begin:]
            token = text[place] if place < len(text) else 0
            others = [(token + k) % self.draft_vocab_size for k in (1, 2)]
            pair = {"first": (token, others[1]), "second": (others[0], token)}.get(self.plan[place], others)
            for drafted, p in zip(pair, self.probs[place]):
                log_probs[0, i, self.from_target[drafted]] = math.log(p)
        return log_probs


def test_figure_2(members, whole, texts, prompts):
    """Three stages, two children of each node, layers of three at most: the nodes that each stage runs in
    each timestep, worked out by hand for two hits, a miss, and a hit of the second child."""
    target = whole("llama", [0])
    drafter = Planned(target, [[*prompts[0], *texts("llama", 0)]], None)
    pipeline = members("llama", (2, 1, 1), drafter, [0])
    sizes = [[] for _ in pipeline]
    for member, own in zip(pipeline, sizes):

        def compute(flow, own=own, run=member.stage.compute):
            own.append(len(flow.tokens))
            return run(flow)

        member.stage.compute = compute
    decode(pipedec, pipeline, prompts[0], width=3, children=2)
    table = [[0, 0, 0] for _ in range(10)]
    for member, own in zip(pipeline, sizes):
        steps = [task for task in member.log if task[:2] == ("C", "dec") and task.node]
        for task, size in zip(steps, own, strict=True):
            if task.seq <= len(table):
                table[task.seq - 1][task.node - 1] = size
    assert table == [
        [1, 0, 0],  # the root
        [2, 1, 0],  # its two children
        [3, 2, 1],  # three of their four; the root leaves: the first child is its successor
        [3, 2, 1],  # what is below that child, and three of four nodes that were chosen after the cut
        [3, 2, 1],  # the second hit is followed by a miss
        [1, 0, 0],  # the tree begins again
        [2, 1, 0],
        [3, 2, 1],  # the second child, below which one node is left
        [2, 1, 1],  # and its two children
        [3, 2, 1],
    ]


def test_a_stop_token_inside_the_tree(members, whole, texts, prompts):
    expected = texts("llama", 2)
    drafter = Replay(whole("llama", [1]), [[*prompts[2], *expected]], lambda *_: True)
    pipeline = members("llama", (2, 2), drafter, [1])
    stop = expected[7]
    end = expected.index(stop) + 1
    assert decode(pipedec, pipeline, prompts[2], stop=[stop]).tokens == expected[:end]
    for new in (1, 2, 3):
        assert (
            decode(pipedec, members("llama", (2, 2), drafter, [1]), prompts[2], new=new).tokens
            == expected[:new]
        )
