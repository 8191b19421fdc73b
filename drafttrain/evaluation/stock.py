"""The target as transformers runs it, the baseline of speed, in the dtype in which it is fastest there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafttrain.evaluation.measure import Method, transformers_generate
from drafttrain.kernels import dtype as probe
from drafttrain.kernels.machine import describe_machine, dtype_name
from drafttrain.kernels.timings import ROWS, TORCH
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.stock import load_stock_model
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.provenance import versions
from drafttrain.utils.writing import write_json

FILE = "transformers.json"  # in the folder of a measurement: the choice, which a resumed one keeps
PROMPT = 16  # tokens of the prompt that the dtypes are tried on: long prompts are left to the probe
FIRST_TOKENS, MOST_TOKENS = 4, 64  # decoded in the first run, and in a run at most
PATIENCE_S, ENOUGH_S = 4.0, 1.0  # seconds that make a run valid: the first, which includes warm-up; a later
HOPELESS = 3  # times as slow as the other dtype at the products of a prompt: not tried


@dataclass(frozen=True)
class Stock:
    """A model as transformers loads it.

    Attributes:
        model: the loaded model.
        tokens_per_second: of `generate` in each dtype that was tried; empty where none was.
    """

    model: PreTrainedModel
    tokens_per_second: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Return its dtype as it is recorded, such as "bfloat16"."""
        return dtype_name(self.model.dtype)

    def describe(self) -> dict[str, Any]:
        """Return what is recorded with a measurement."""
        return {"dtype": self.dtype, "tokens_per_second": self.tokens_per_second}


def load_stock(
    target: FrozenTarget, fastest: bool, prompt_ids: Sequence[int], folder: Path | None = None
) -> Stock:
    """Load the model that `generate` of transformers is measured with.

    Args:
        fastest: choose the dtype in which `generate` is fastest here, where the target is on a CPU. Otherwise
            the target's own is used.
        prompt_ids: of the prompt that the dtypes are tried on.
        folder: where the choice is stored; for the same target on the same machine it is used again.
    """
    model = load_stock_model(target)
    if not fastest or target.device.type != "cpu" or model is target.model:
        return Stock(model)
    made_for = fingerprint([target.fingerprint, describe_machine(target.device, target.dtype), versions()])
    match read_json(folder / FILE) if folder and (folder / FILE).exists() else None:
        case {"made_for": str() as before, "dtype": str() as name, "tokens_per_second": dict() as rates}:
            if before == made_for:
                return Stock(convert(model, getattr(torch, name)), rates)
    rates = {}
    for dtype in _candidates(target):
        decode = transformers_generate(target, model=convert(model, dtype))
        rates[dtype_name(dtype)] = _rate(decode, list(prompt_ids[:PROMPT]))
    best = getattr(torch, max(rates, key=rates.__getitem__))
    if model.dtype != best:
        # loaded again because the other dtype may have rounded the weights; one copy at a time
        del model, decode
        model = convert(load_stock_model(target), best)
    stock = Stock(model, rates)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {"made_for": made_for, **stock.describe()})
    return stock


def convert(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with its weights in a dtype, converted in place; buffers such as the frequencies of
    rotary embeddings keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _candidates(target: FrozenTarget) -> list[torch.dtype]:
    """Return the dtypes worth trying, the target's own first: in that one its weights are not rounded."""
    text = target.config.get_text_config()
    sizes = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    ms = probe.timed(*sizes).ms
    rows = max(ROWS)
    least = min(ms[name].get(rows, float("inf")) for name in TORCH)
    usable = [dtype for name, dtype in TORCH.items() if ms[name].get(rows, float("inf")) <= HOPELESS * least]
    return sorted(usable, key=lambda dtype: dtype != target.dtype)


def _rate(decode: Method, prompt_ids: list[int]) -> float:
    """Measure tokens per second, with few tokens if the dtype is slow."""
    tokens, enough = FIRST_TOKENS, PATIENCE_S
    while (taken := decode(prompt_ids, tokens)).seconds < enough and tokens < MOST_TOKENS:
        tokens, enough = 2 * tokens, ENOUGH_S
    return len(taken.token_ids) / taken.seconds
