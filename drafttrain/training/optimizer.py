"""Muon for the drafter's matrices with AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) orthogonalizes the momentum of a weight matrix, so that all its directions are
learned at one rate. Its step is scaled to the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable
for LLM Training", §2.2), so both go by one learning rate. Embeddings, LM head and norms are no maps from
hidden states to hidden states and stay with AdamW.
"""

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over the matrices of a drafter's layers, fused AdamW over its other trained weights.

    Args:
        drafter: the module to train; what needs no gradient is left out.
        lr: peak learning rate of both.
        betas: AdamW's decay rates.
        weight_decay: decoupled decay of weights with two dimensions, in both.
    """

    def __init__(self, drafter: torch.nn.Module, lr: float, betas: tuple[float, float], weight_decay: float):
        trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        matrices = [p for name, p in trained.items() if p.ndim == 2 and not _is_table(name)]
        tables = [p for name, p in trained.items() if p.ndim == 2 and _is_table(name)]
        rest = [p for p in trained.values() if p.ndim != 2]
        muon = torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": tables, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr, betas, fused=True)
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: None = None) -> None:
        """One step of both; they share their groups with this optimizer, so schedulers reach them."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def _is_table(name: str) -> bool:
    """Whether rows of this weight stand for tokens."""
    return any(table in name for table in ("embed_tokens", "lm_head"))
