"""All ranks of a pipeline in one process, and drafters that know the text."""

import torch

from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.member import Request
from drafttrain.pipeline.transport import run_locally
from tests.decoding import ReplayDrafter

NEW = 14  # more than twice the 6 positions that Mistral sees here
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


class Replay(ReplayDrafter):
    """Drafts what the target will write, where it is right."""

    def prune(self, state, root, tapped, keep):
        self.update(state, root[None], tapped[None], torch.ones(1, dtype=torch.long))


def replaying(target, text, right):
    """A drafter that is right at the positions marked in `right`."""
    return Replay(target, [text], lambda row, position: right[position])


def decode(
    mode,
    members,
    prompt,
    sampling=GREEDY,
    width=4,
    children=4,
    new=NEW,
    stop=(),
    depth=5,
    layers=1,
    best_first=False,
):
    """Return the output at rank 0; all ranks have the same tokens."""
    request = Request(prompt, new, stop, sampling, width, children, depth, layers, best_first)
    outputs = run_locally([mode(member, request) for member in members])
    assert all(output.tokens == outputs[0].tokens for output in outputs)
    return outputs[0]
