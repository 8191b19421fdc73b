"""Causal mask of a text."""

import torch


def causal(n: int, device: torch.device | str) -> torch.Tensor:
    """Return which tokens each token of a text sees, bool [n, n]: those before it and itself."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()
