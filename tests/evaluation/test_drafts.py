"""The drafts that are noted are those of the shipped decode loop."""

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.evaluation.drafts import tried_drafts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy

PROMPTS = ([5, 9, 33, 7], [11, 4], [8, 8, 8, 90, 3])


@pytest.mark.parametrize("kind", ["edd", "eagle", "medusa", "vdm"])
def test_as_in_the_decode_loop(kind, tiny_llama):
    target = FrozenTarget(*tiny_llama, "tiny")
    settings = DrafterConfig(kind=kind, tapped_blocks=[-2], draft_vocab_size=100)
    torch.manual_seed(0)
    drafter = new_drafter(target, settings, torch.arange(0, 300, 3)).eval()
    own = DecodeStats()
    drafts = tried_drafts(target, drafter, PROMPTS, 3, 24, own)
    texts, stats = decode_all(target, TreeProposer(drafter, ChainPolicy(3)), PROMPTS, 24)
    assert sum(one.accepted for one in drafts) == stats.new_tokens - stats.steps - len(PROMPTS)
    assert (own.steps, own.new_tokens, own.accept_len) == (stats.steps, stats.new_tokens, stats.accept_len)
    for one in drafts:
        text = texts[one.prompt]
        assert text[one.position] == one.wanted
        assert one.context == len(PROMPTS[one.prompt]) + one.position
        assert (one.rank is None) == (one.wanted % 3 != 0 or one.wanted >= 300)
        assert one.rank == 0 if one.accepted else one.rank != 0
        assert 0 < one.probability <= 1 and one.kl >= -1e-4 and 0 <= one.outside <= 1
        assert target.tokenizer.decode([one.wanted]) == one.text
