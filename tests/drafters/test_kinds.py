"""Every kind drafts exactly, in batches whose rows end and are refilled, and is loaded as it was saved."""

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.kinds import KINDS, load_drafter
from drafttrain.errors import UserError
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.trees.named import parse_policy

NATIVE = [kind for kind in KINDS if kind != "causal_lm"]
TREES = ("chain:length=3", "eagle2:top_k=3,max_depth=3,total=7")


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", NATIVE)
def test_drafts_are_exact(kind, tree, make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target, kind=kind)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 1, 9, 3, 12)]
    expected = decode_all(target, NoProposer(), prompts, 12)[0]
    proposer = TreeProposer(drafter, parse_policy(tree))
    for max_rows in (None, 2, 1):
        assert decode_all(target, proposer, prompts, 12, max_rows=max_rows)[0] == expected


@pytest.mark.parametrize("kind", NATIVE)
def test_saves_and_loads(kind, make_target, make_drafter, tmp_path):
    target = make_target("qwen2")
    drafter = make_drafter(target, kind=kind)
    drafter.save_pretrained(tmp_path)
    again = load_drafter(tmp_path, target)
    assert type(again) is KINDS[kind] and again.config.tapped_blocks == drafter.config.tapped_blocks
    for (name, ours), theirs in zip(drafter.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "vdm", "layers": 2}, "drafter.layers is 2, and vdm has 1"),
        ({"kind": "medusa", "train_head": False}, "MEDUSA's heads are all it has"),
        ({"kind": "medusa", "heads": 0}, "drafter.heads is 0"),
        ({"kind": "eagle", "noise": -1.0}, "drafter.noise is -1.0"),
        ({"kind": "causal_lm"}, "drafter.model .* name a folder or Hub id"),
        ({"kind": "vdm", "model": "x"}, "drafter.model .* leave it out"),
        ({"kind": "edd", "input_norms": True}, "drafter.input_norms is for kind eagle, and this is edd"),
        ({"kind": "vdm", "anchor": True}, "drafter.anchor is for kind edd, and this is vdm"),
        ({"kind": "eagle", "lora_rank": 4}, "drafter.lora_rank is for kind causal_lm"),
        ({"kind": "causal_lm", "model": "x", "lora_rank": 0}, "drafter.lora_rank is 0"),
        ({"kind": "medusa", "kv_heads": 2}, "drafter.kv_heads is for edd, vdm, eagle, and this is medusa"),
        ({"kv_heads": 2, "init": -1}, "drafter.kv_heads: .* leave out one of the two"),
    ],
)
def test_settings_that_no_drafter_has_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        DrafterConfig(**settings).check()
