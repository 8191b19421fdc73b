"""A replay has the hits and the timesteps of the pipeline itself."""

from dataclasses import replace

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.decode import decode_all
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import TreeProposer
from drafttrain.pipeline.baselines import stpp
from drafttrain.pipeline.member import Request
from drafttrain.pipeline.outlook import cut, known_texts, outlook
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.replay import replay, replay_policy, replay_static
from drafttrain.pipeline.simulate import Link, Machines
from drafttrain.pipeline.transport import run_locally
from drafttrain.trees.costs import CostCurve
from drafttrain.trees.expand import next_layer
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.tree import TokenTree

NEW = 14


@pytest.mark.parametrize("kind", ["edd", "eagle", "causal_lm", "noisy_lm"])
@pytest.mark.parametrize(("width", "children", "layers"), [(1, 1, 1), (4, 3, 3), (12, 512, 1)])
@pytest.mark.parametrize("best_first", [False, True])
def test_hits_and_timesteps(
    members, whole, folders, prompts, kind, width, children, layers, best_first, monkeypatch
):
    monkeypatch.setattr("drafttrain.pipeline.replay._TOGETHER", 3)
    settings = (
        {"kind": kind} if kind in ("edd", "eagle") else {"kind": "causal_lm", "model": str(folders["llama"])}
    )
    target = whole("llama")
    drafter = new_drafter(target, DrafterConfig(**settings, draft_vocab_size=None), torch.arange(512)).eval()
    if kind == "noisy_lm":  # right now and then
        noise = torch.Generator().manual_seed(0)
        for weight in drafter.parameters():
            weight.data += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    taps = [
        tap % (target.n_blocks + 1) if tap >= 0 else tap % target.n_blocks
        for tap in drafter.config.tapped_blocks
    ]
    target.tap(taps)
    hits = looked_for = 0
    for cuts in ((4,), (2, 2), (1, 1, 1, 1)):
        pipeline = members("llama", cuts, drafter, taps)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.6, top_p=0.9, top_k=80, seed=5)):
            request = Request(prompts[2], NEW, (), sampling, width, children, 5, layers, best_first)
            output = run_locally([pipedec(member, request) for member in pipeline])[0]
            text = torch.tensor([[*prompts[2], *output.tokens]])
            states = target.encode(text, torch.zeros_like(text))
            tree = len(cuts), width, children, layers
            known = drafter, prompts[2], output.tokens, states.tapped[0]
            trace = replay(*known, *tree, best_first=best_first)
            assert (trace.hits, len(trace.steps)) == (output.hits, output.timesteps)
            assert ran(pipeline) == [[step.drafted, step.nodes] for step in (*trace.beside, *trace.steps)]
            assert trace.tokens == NEW - 1 + (not taps) and output.judged == trace.tokens - 1
            assert len(trace.beside) == (0 if taps else len(cuts) - 1)
            if not best_first:
                skipped = replay(*known, *tree, skip_lost=True)
                assert [(s.tokens, s.hits) for s in skipped.steps] == [
                    (s.tokens, s.hits) for s in trace.steps
                ]
                empty = not taps and any(not step.tokens for step in trace.steps[len(cuts) :])
                assert trace.hits < output.judged or empty or skipped == trace  # no layer was lost
            hits, looked_for = hits + trace.hits, looked_for + output.judged
            if len(cuts) == layers == 1:
                assert trace.hits == 0  # the next layer is not there yet when the root's token is
    assert hits or kind not in ("causal_lm", "noisy_lm")
    assert hits < looked_for or kind != "noisy_lm"


def ran(pipeline):
    """Return what the logs of ranks, one per group, say of each timestep, as a `Timestep` has it."""
    tasks = [task for member in pipeline for task in member.log if (task.kind, task.what) == ("C", "dec")]
    steps = [[[], [0] * len(pipeline)] for _ in range(max(task.seq for task in tasks))]
    for task in tasks:
        if task.node:
            [steps[task.seq - 1][1][task.node - 1]] = task.nodes
        else:
            steps[task.seq - 1][0] = list(task.nodes)
    return steps


@pytest.mark.parametrize("best_first", [False, True])
def test_a_text_that_a_stop_token_ends(members, whole, folders, prompts, best_first):
    """Trees are as deep as the limit allows, not as the text, whose end nobody knows."""
    target = whole("llama")
    config = DrafterConfig(kind="causal_lm", model=str(folders["llama"]), draft_vocab_size=None)
    drafter, cuts = new_drafter(target, config, torch.arange(512)).eval(), (1, 1, 1, 1)
    tree = 3, 2, 5, 1, best_first
    for place in range(2, 8):
        requests = [Request(prompts[2], NEW, (), SamplingParams(), *tree)]
        whole_text = run_locally([pipedec(one, requests[0]) for one in members("llama", cuts, drafter)])[0]
        stop = (whole_text.tokens[place],)
        request = Request(prompts[2], NEW, stop, SamplingParams(), *tree)
        output = run_locally([pipedec(one, request) for one in members("llama", cuts, drafter)])[0]
        known = drafter, prompts[2], output.tokens, torch.zeros(len(prompts[2]) + len(output.tokens), 0)
        how = len(cuts), 3, 2, 1, False, best_first
        trace, short = replay(*known, *how, limit=NEW), replay(*known, *how)
        assert (trace.hits, len(trace.steps)) == (output.hits, output.timesteps)
        assert sum(map(sum, (step.nodes for step in trace.steps))) >= sum(
            map(sum, (step.nodes for step in short.steps))
        )


@pytest.mark.parametrize(("stages", "width", "children", "layers"), [(8, 8, 4, 1), (5, 4, 3, 3)])
def test_lost_layers_of_the_committed_drafter(stages, width, children, layers):
    """Which reads states, and is right now and then."""
    bundle = load_bundle("model_cards/smollm2-135m-edd", dtype="float32", own_calibration=False)
    prompt = bundle.target.tokenizer("Why is the sky blue? The sky is")["input_ids"]
    taps = bundle.drafter.config.tapped_blocks
    [text] = known_texts(bundle.target, taps, [prompt], 32, SamplingParams())
    known = bundle.drafter, prompt, text.answer, text.tapped, stages, width, children, layers
    trace, skipped = replay(*known), replay(*known, skip_lost=True)
    assert [(s.tokens, s.hits) for s in skipped.steps] == [(s.tokens, s.hits) for s in trace.steps]
    assert 0.3 * trace.tokens < trace.hits < 0.95 * trace.tokens
    nodes, estimated = (sum(sum(step.nodes) for step in one.steps) for one in (trace, skipped))
    assert estimated == pytest.approx(nodes, rel=0.1)


@pytest.mark.parametrize(("depth", "width", "children"), [(1, 1, 1), (3, 4, 3), (4, 6, 512)])
def test_static_trees_emit_the_text(whole, prompts, depth, width, children):
    """Against decoding with a policy that grows the same trees."""
    target = whole("llama", [0])
    drafter = new_drafter(
        target, DrafterConfig(tapped_blocks=[0], draft_vocab_size=None), torch.arange(512)
    ).eval()
    target.tap(drafter.config.tapped_blocks)

    class Policy(TreePolicy):
        max_depth = depth
        sizes = []

        def grow(self, drafter, state, root):
            tree, frontier = TokenTree.root_only(root), torch.zeros(1, 1, dtype=torch.long)
            for _ in range(depth):
                log_probs, ids = drafter.top(state, tree, frontier, children)
                before = tree.width
                tree = next_layer(tree, frontier, log_probs, drafter.to_target(ids), width)
                frontier = torch.arange(before, tree.width)[None]
            self.sizes.append(tree.width)
            return tree

    policy = Policy()
    policy.sizes.clear()
    [text], stats = decode_all(target, TreeProposer(drafter, policy), [prompts[2]], NEW, stop=())
    ids = torch.tensor([[*prompts[2], *text]])
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped[0]
    rounds = replay_static(drafter, prompts[2], text, tapped, depth, width, children)
    assert len(rounds) == stats.steps == len(policy.sizes)
    assert [one.nodes for one in rounds] == policy.sizes  # also at the end, where not all nodes can be hits
    assert all(one.hits <= one.judged <= min(one.hits + 1, depth) for one in rounds)


@pytest.mark.parametrize(
    ("tree", "drafted"),
    [("chain:length=3", [1, 1, 1]), ("eagle2:top_k=2,max_depth=3,total=4", [1, 2, 2])],
)
def test_a_policy_replayed_has_the_rounds_of_the_pipeline(members, whole, prompts, tree, drafted):
    target, policy = whole("llama", [0]), parse_policy(tree)
    drafter = new_drafter(
        target, DrafterConfig(tapped_blocks=[0], draft_vocab_size=None), torch.arange(512)
    ).eval()
    target.tap(drafter.config.tapped_blocks)
    pipeline = members("llama", (2, 2), drafter, [0], policy=policy)
    request = Request(prompts[2], NEW, (), SamplingParams(), depth=policy.max_depth)
    output = run_locally([stpp(member, request) for member in pipeline])[0]
    ids = torch.tensor([[*prompts[2], *output.tokens]])
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped[0]
    rounds = replay_policy(drafter, prompts[2], output.tokens, tapped, policy)
    assert 2 * len(rounds) == output.timesteps and sum(one.hits for one in rounds) == output.hits
    assert sum(one.judged for one in rounds) == output.judged
    assert all(one.drafted == drafted for one in rounds)


def test_the_hit_rate_of_a_simulation_counts_no_answers_of_one_token(whole, folders, prompts):
    """Of answers of n tokens, n - 1 may be in the tree if it follows the prompt: all but the last."""
    target = whole("llama")
    settings = DrafterConfig(kind="causal_lm", model=str(folders["llama"]), draft_vocab_size=None)
    drafter = new_drafter(target, settings, torch.arange(512)).eval()
    whole_text, one = known_texts(target, [], [prompts[2]] * 2, 8, SamplingParams())
    one = replace(one, answer=one.answer[:1])
    whole_target = Machines([CostCurve((1,), (0.4,))], [], CostCurve((1,), (0.1,)))
    described = dict.fromkeys(("pp", "stpp", "pipedec", "single"), cut(whole_target, 3, Link(10.0, 0.0, 64)))
    rates = [
        row.hit_rate
        for texts in ([whole_text], [whole_text, one, one])
        for row in outlook(drafter, texts, [described], 4, 4)
    ]
    assert rates[0] == rates[1] > 0.5  # it drafts what its target would say
