"""Tiny targets and drafters for them."""

import copy
from collections.abc import Callable

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel
from drafttrain.drafters.new import new_drafter
from drafttrain.target_lm.model import FrozenTarget

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="session")
def make_target(request) -> Callable[[str, str], FrozenTarget]:
    """A tiny target by family ("llama", "qwen2") and rope type; each call gives a model of its own."""

    def make(family: str = "llama", rope: str = "default") -> FrozenTarget:
        model, tokenizer = request.getfixturevalue(f"tiny_{family}")
        config = copy.deepcopy(model.config)
        config.rope_parameters = dict(ROPES[rope])
        copied = type(model)(config).float()
        copied.load_state_dict(model.state_dict())
        return FrozenTarget(copied, tokenizer, f"tiny {family}")

    return make


@pytest.fixture(scope="session")
def make_drafter() -> Callable[..., DraftModel]:
    """A random fp32 drafter over every second token of a target; keywords are those of `DrafterConfig`."""

    def make(target: FrozenTarget, seed: int = 0, **settings) -> DraftModel:
        config = DrafterConfig(**{"tapped_blocks": [-2], **settings})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drafter = new_drafter(target, config, torch.arange(0, target.vocab_size, 2))
            for parameter in drafter.get_submodule(
                "layers" if hasattr(drafter, "layers") else ""
            ).parameters():
                if parameter.ndim == 1:  # norms start at 1 and biases at 0: losing either would go unnoticed
                    parameter.data += 0.2 * torch.randn_like(parameter)
        return drafter.eval()

    return make
