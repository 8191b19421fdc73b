"""Tiny targets in folders, cut into stages."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from drafttrain.inference.acceptance import rule_for
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.pipeline.member import Layout, Member
from drafttrain.pipeline.part import TargetPart, load_part
from drafttrain.pipeline.stage import Stage
from drafttrain.target_lm.model import FrozenTarget
from tests.conftest import tiny_model, tiny_tokenizer
from tests.pipeline.local import GREEDY, NEW

ROOM = 128


@pytest.fixture(scope="session")
def folders(tiny_llama, tiny_qwen2, tmp_path_factory) -> dict[str, Path]:
    """Folders of tiny targets by family; Mistral's sees 6 positions, the deep one has five blocks, the short
    one has positions for a prompt of 9 tokens and `NEW` more."""
    tokenizer = tiny_tokenizer()

    class Windowed(MistralConfig):
        def __init__(self, **settings):
            super().__init__(**{"sliding_window": 6, **settings})

    class Deep(LlamaConfig):
        def __init__(self, **settings):
            super().__init__(**{**settings, "num_hidden_layers": 5})

    class Short(LlamaConfig):
        def __init__(self, **settings):
            super().__init__(**{**settings, "max_position_embeddings": 9 + NEW})

    models = {
        "llama": tiny_llama[0],
        "deep": tiny_model(Deep, LlamaForCausalLM, tokenizer),
        "short": tiny_model(Short, LlamaForCausalLM, tokenizer),
        "qwen2": tiny_qwen2[0],
        "mistral": tiny_model(Windowed, MistralForCausalLM, tokenizer),
    }
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp("targets") / name
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture(scope="session")
def whole(folders) -> Callable[..., FrozenTarget]:
    """The whole target of a family, in fp32."""

    def load(family: str, taps=()) -> FrozenTarget:
        model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float)
        return FrozenTarget(model, None, family, taps)

    return load


@pytest.fixture(scope="session")
def texts(whole, prompts) -> Callable[..., list[int]]:
    """Texts of plain decoding of the whole target, by family, prompt and parameters."""
    known = {}

    def write(family, number, sampling=GREEDY, new=NEW):
        key = family, number, sampling, new
        if key not in known:
            rule = rule_for([sampling], draws=False)
            target = whole(family)
            [known[key]], _ = decode_all(target, NoProposer(), [prompts[number]], new, stop=(), accept=rule)
        return known[key]

    return write


@pytest.fixture
def members(folders) -> Callable[..., list[Member]]:
    """All ranks of a pipeline: `cuts` has the number of blocks of each stage, `groups` that of stages in each
    group. The drafter is on rank 0, beside the first stage unless it is `alone`. `spoil` changes the parts
    before they are packed.

    Pipelines of one test that are cut alike have the same weights, and caches of their own.
    """
    known: dict[tuple, list[TargetPart]] = {}

    def load(family, cuts, taps, native, dtype, spoil, device) -> list[TargetPart]:
        firsts = (sum(cuts[:i]) for i in range(len(cuts)))
        blocks = [range(first, first + n) for first, n in zip(firsts, cuts)]
        parts = [load_part(str(folders[family]), some, dtype, taps=taps, device=device) for some in blocks]
        if spoil is not None:
            spoil(parts)
        if native:
            for part in parts:
                part.pack()
        return parts

    def make(
        family,
        cuts,
        drafter=None,
        taps=(),
        groups=None,
        native=False,
        alone=False,
        policy=None,
        dtype=torch.float,
        spoil=None,
        device="cpu",
    ) -> list[Member]:
        ranks = list(range(alone, len(cuts) + alone))
        sizes = list(groups or [1] * len(cuts))
        grouped = tuple(tuple(ranks[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes)))
        layout, key = Layout(grouped), (family, cuts, tuple(taps), native, dtype, spoil, device)
        if key not in known:
            known[key] = load(*key)
        parts = known[key]
        owners = [next(r for r, p in zip(ranks, parts) if tap in p.taps) for tap in taps]
        places = [None] * alone + [Stage(part, ROOM) for part in parts]
        return [
            Member(rank, layout, stage, drafter if rank == 0 else None, policy, list(zip(taps, owners)), ROOM)
            for rank, stage in enumerate(places)
        ]

    return make
