"""After a run the committed keys and values of every stage are those of a plain forward over the text."""

import pytest
import torch
from transformers import DynamicCache

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.kernels.build import variant
from drafttrain.pipeline.baselines import pp, stpp
from drafttrain.pipeline.program import pipedec
from drafttrain.target_lm.cache import CACHE_ARGUMENT
from drafttrain.trees.chain import ChainPolicy
from tests.pipeline.local import GREEDY, NEW, SAMPLED, Replay, decode

CUTS = (1, 2, 1)


def require_plain_keys(pipeline, target, text, layers=1) -> None:
    """Require those of all tokens of a text but the last ones, which are of no further use."""
    plain = DynamicCache()  # without the config: it keeps what has left a sliding window, too
    target.model(input_ids=torch.tensor([text]), use_cache=True, **{CACHE_ARGUMENT: plain})
    for member in pipeline:
        cache = member.stage.cache
        n = int(cache.lengths[0])
        assert len(text) > n >= len(text) - 1 - layers
        for place, block in enumerate(member.stage.part.blocks):
            keys, values = cache.keys_values(place, n)
            layer = plain.layers[block]
            torch.testing.assert_close(keys, layer.keys[:, :, :n], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, layer.values[:, :, :n], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("quality", [True, False])
@pytest.mark.parametrize(
    ("mode", "groups", "tree"),
    [
        (pp, None, {}),
        (stpp, None, {"depth": 3}),
        (pipedec, None, {}),
        (pipedec, None, {"layers": 3}),
        (pipedec, (1, 2), {}),
        (pipedec, None, {"best_first": True}),
        (pipedec, (2, 1), {"best_first": True, "layers": 2}),
    ],
)
def test_of_every_mode(members, whole, texts, prompts, family, sampling, quality, mode, groups, tree):
    target, expected = whole(family, [1]), texts(family, 0, sampling)
    text = [*prompts[0], *expected]
    drafter = Replay(target, [text], lambda *_: quality)
    policy = ChainPolicy(3) if mode is stpp else None
    pipeline = members(family, CUTS, drafter, [1], groups=groups, policy=policy)
    assert decode(mode, pipeline, prompts[0], sampling, **tree).tokens == expected
    require_plain_keys(pipeline, target, text, tree.get("layers", 1))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("best_first", [False, True])
def test_of_a_tree_that_follows_the_prompt(
    members, whole, folders, texts, prompts, native, family, layers, best_first
):
    """The target drafts for itself: nearly all tokens are hits."""
    if native and variant() is None:
        pytest.skip("the native kernels need a C++ compiler and AVX2")
    target = whole(family)
    config = DrafterConfig(kind="causal_lm", model=str(folders[family]), draft_vocab_size=None)
    drafter = new_drafter(target, config, torch.arange(512)).eval()
    if native:
        drafter.pack()
    for number, sampling in ((0, GREEDY), (2, SAMPLED)):
        expected, pipeline = texts(family, number, sampling), members(family, CUTS, drafter, native=native)
        found = decode(pipedec, pipeline, prompts[number], sampling, layers=layers, best_first=best_first)
        assert found.tokens == expected and found.hits > (NEW // 2 if sampling is GREEDY else 0)
        require_plain_keys(pipeline, target, [*prompts[number], *expected], layers)
