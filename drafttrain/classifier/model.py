"""The C2T classifier, which predicts acceptance of a drafted node from a few numbers of the tree alone."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from drafttrain.trees.features import check_features
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json, require_file
from drafttrain.utils.writing import write_json

FILE = "classifier.json"
WEIGHTS = "classifier.safetensors"
FORMAT_VERSION = 1


class Classifier(nn.Module):
    """Network F -> h -> 1 with ReLU and a sigmoid (C2T paper, §4.1) that standardizes its F features itself.

    Args:
        features: names of `trees.features.FEATURES`, in order.
        hidden: h, hidden units.
    """

    def __init__(self, features: Sequence[str] = ("P", "H", "d"), hidden: int = 48):
        super().__init__()
        check_features(features)
        if hidden < 1:
            raise UserError(f"hidden: must be >= 1, got {hidden}")
        self.features, self.hidden = tuple(features), hidden
        self.inner = nn.Linear(len(self.features), hidden)
        self.outer = nn.Linear(hidden, 1)
        self.register_buffer("mean", torch.zeros(len(self.features)))
        self.register_buffer("std", torch.ones(len(self.features)))
        # weights that `predict` multiplies with
        self._folded: tuple[np.ndarray, np.ndarray, np.ndarray, float] | None = None

    def fit_scale(self, x: torch.Tensor, accepted_share: float) -> None:
        """Set the scaling of the features from rows x [N, F], and the output bias from the share accepted.

        A feature that is constant in these rows is ignored, also where it differs later.
        """
        is_same = self._set_scale(x, torch.ones_like(self.mean, dtype=torch.bool))
        with torch.no_grad():
            self.inner.weight[:, is_same] = 0.0  # and stays: an input of 0 has no gradient
            self.outer.bias.fill_(math.log(accepted_share / (1 - accepted_share)))

    def fit_unused_scale(self, x: torch.Tensor) -> None:
        """Set the scaling of the features that were constant in all earlier training from rows x [N, F], so
        that further training can use them. No prediction changes, as their weights are 0."""
        self._set_scale(x, self.inner.weight.detach().eq(0).all(0))

    def _set_scale(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Set the scaling of chosen features, bool [F]; return which are constant in the rows, bool [F]."""
        std = x.std(0, correction=0)  # [F]
        is_same = std < 1e-6
        mean = torch.where(is_same, x[0], x.mean(0))  # the scaled input of a constant is 0 exactly
        self.mean.copy_(torch.where(chosen, mean, self.mean))
        self.std.copy_(torch.where(chosen, std.masked_fill(is_same, 1.0), self.std))
        self._folded = None
        return is_same

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-odds of acceptance [...] from unscaled features [..., F]."""
        scaled = (x - self.mean) / self.std  # [..., F]
        return self.outer(torch.relu(self.inner(scaled))).squeeze(-1)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return confidence C, fp32 [...], from features fp32 [..., F] (eq. 4), for growth policies. The
        weights must not change afterwards unless `train()` is called first."""
        if self._folded is None:
            self._folded = self._fold()
        weight, bias, outer, outer_bias = self._folded
        hidden = x.reshape(-1, x.shape[-1]) @ weight  # [n, h]
        hidden += bias
        np.maximum(hidden, 0.0, out=hidden)
        odds = hidden @ outer  # [n] logarithm of the odds against
        odds += outer_bias
        return np.exp(-np.logaddexp(0.0, odds)).reshape(x.shape[:-1])

    @torch.no_grad()
    def _fold(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Return weights [F, h] and bias [h] of the first layer with the scaling folded in, and those of the
        second with their sign turned, [h] and a number."""
        weight = self.inner.weight / self.std  # [h, F]
        bias = self.inner.bias - weight @ self.mean  # [h]
        arrays = (weight.T, bias, -self.outer.weight[0])
        return *(np.ascontiguousarray(array.cpu().numpy()) for array in arrays), -float(self.outer.bias)

    def train(self, mode: bool = True) -> "Classifier":
        self._folded = None
        return super().train(mode)

    def save(self, folder: str | os.PathLike, training: dict[str, Any]) -> None:
        """Write `classifier.safetensors` and `classifier.json` into a folder.

        Args:
            training: how it was trained, for the record.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{WEIGHTS}.tmp"
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, temporary)
        temporary.chmod(0o644)  # safetensors writes files that only the owner can read
        (folder / FILE).unlink(missing_ok=True)  # else an interruption leaves new weights with old features
        temporary.replace(folder / WEIGHTS)
        described = {"format_version": FORMAT_VERSION, "features": self.features, "hidden": self.hidden}
        write_json(folder / FILE, {**described, "training": training})

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Classifier":
        """Load a classifier that `save` wrote.

        Raises:
            UserError: missing, damaged, or of another format.
        """
        folder = Path(folder)
        remedy = "train it again with drafttrain c2t"
        described = read_json(folder / FILE)
        if not isinstance(described, dict) or described.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{folder / FILE}: no classifier of format {FORMAT_VERSION}; {remedy}")
        try:
            model = cls(described["features"], described["hidden"])
            require_file(folder / WEIGHTS)
            tensors = load_file(folder / WEIGHTS)
            model.load_state_dict(tensors)
        except UserError as error:
            raise UserError(f"{folder / FILE}: {error}") from None
        except (KeyError, TypeError, OSError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{folder / WEIGHTS}: cannot be read ({brief(error)}); {remedy}") from None
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"{folder / WEIGHTS}: holds numbers that are not finite; {remedy}")
        return model.eval().requires_grad_(False)
