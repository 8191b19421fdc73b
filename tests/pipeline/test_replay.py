"""A replay has the hits and the timesteps of the pipeline itself."""

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.program import Request, pipedec
from drafttrain.pipeline.replay import replay
from drafttrain.pipeline.transport import run_locally

NEW = 24


@pytest.mark.parametrize("kind", ["edd", "eagle", "causal_lm"])
@pytest.mark.parametrize(("width", "children"), [(1, 1), (4, 3), (12, 512)])
def test_hits_and_timesteps(members, whole, folders, prompts, kind, width, children):
    settings = {"model": str(folders["llama"])} if kind == "causal_lm" else {}
    target = whole("llama")
    drafter = new_drafter(
        target, DrafterConfig(kind=kind, draft_vocab_size=None, **settings), torch.arange(512)
    ).eval()
    taps = [
        tap % (target.n_blocks + 1) if tap >= 0 else tap % target.n_blocks
        for tap in drafter.config.tapped_blocks
    ]
    target.tap(taps)
    hits = 0
    for cuts in ((4,), (2, 2), (1, 1, 1, 1)):
        pipeline = members("llama", cuts, drafter, taps)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.6, top_p=0.9, top_k=80, seed=5)):
            request = Request(prompts[2], NEW, (), sampling, width, children)
            output = run_locally([pipedec(member, request) for member in pipeline])[0]
            text = torch.tensor([[*prompts[2], *output.tokens]])
            states = target.encode(text, torch.zeros_like(text))
            trace = replay(drafter, prompts[2], output.tokens, states.tapped[0], len(cuts), width, children)
            assert (trace.hits, len(trace.steps)) == (output.hits, output.timesteps)
            assert trace.tokens == NEW - 1
            hits += trace.hits
            if len(cuts) == 1:
                assert trace.hits == 0  # the next layer is not there yet when the root's token is
    assert hits or kind != "causal_lm"
