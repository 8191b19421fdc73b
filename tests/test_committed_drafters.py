"""The drafters of model_cards/ draft as well as they did."""

from pathlib import Path

import pytest

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.trees.chain import ChainPolicy

ROOT = Path(__file__).parents[1]
# accept_len of chains of 5 on eight first turns of MT-bench, 64 tokens each, in fp32, when it was committed
RECORDED = {"smollm2-135m-edd": 1.708, "smollm2-135m-edd-anchored": 1.663}


def test_each_drafter_has_a_recorded_length():
    assert RECORDED.keys() == {folder.name for folder in (ROOT / "model_cards").iterdir()}


@pytest.mark.parametrize("name", RECORDED)
def test_accept_len_has_not_fallen(name, smollm2):
    bundle = load_bundle(ROOT / "model_cards" / name, target=str(smollm2), dtype="float32", device="cpu")
    prompts = read_prompts(ROOT / "data/eval/mt_bench.jsonl")
    ids = [prompt.token_ids(bundle.target.tokenizer) for prompt, _ in zip(prompts, range(8))]
    _, stats = decode_all(bundle.target, TreeProposer(bundle.drafter, ChainPolicy(5)), ids, 64)
    assert stats.accept_len >= 0.95 * RECORDED[name], stats.accept_len
