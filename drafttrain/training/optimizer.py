"""Muon for the drafter's matrices with AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) orthogonalizes the momentum of a weight matrix, so that all its directions are
learned at one rate. Its step is scaled to the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable
for LLM Training", §2.2), so both share one learning rate. Embeddings, LM head and norms do not map hidden
states to hidden states and stay with AdamW.
"""

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over the matrices of a drafter's layers, fused AdamW over its other trained weights.

    Args:
        drafter: the module to train; weights without a gradient are left out.
        lr: peak learning rate of both.
        betas: AdamW's decay rates.
        weight_decay: decoupled decay of weights with two dimensions, in both.
    """

    def __init__(self, drafter: torch.nn.Module, lr: float, betas: tuple[float, float], weight_decay: float):
        trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        embeddings = {id(m.weight) for m in drafter.modules() if isinstance(m, torch.nn.Embedding)}
        is_table = {name: id(p) in embeddings or "lm_head" in name for name, p in trained.items()}
        matrices = [p for name, p in trained.items() if p.ndim == 2 and not is_table[name]]
        tables = [p for name, p in trained.items() if p.ndim == 2 and is_table[name]]
        rest = [p for p in trained.values() if p.ndim != 2]
        groups = [{"params": tables, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.parts = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        if groups:  # adapters alone have none
            self.parts.append(torch.optim.AdamW(groups, lr, betas, fused=True))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:
        """Take a step of both; they share their groups with this optimizer, so schedulers reach them."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
