"""Muon for the drafter's matrices with AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) orthogonalizes the momentum of a weight matrix, so that all its directions are
learned at one rate. Its step is scaled to the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable
for LLM Training", §2.2), so both share one learning rate. Embeddings, LM head and norms do not map hidden
states to hidden states, so AdamW trains them.
"""

from typing import Any

import torch

A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic step (Jordan et al. 2024), as in torch
STEPS = 5


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a matrix [m, n] near 1 by Newton-Schulz steps, in its own dtype.

    A step X <- (A + B·S + C·S²) X with S = X Xᵀ multiplies X by a polynomial of S, and S by its square. So
    for a long matrix all steps are computed with the small S alone, and X is multiplied once, by their
    product. S has the squares of the singular values, for which fp32 is enough and bf16 is not.
    """
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)  # [k, l], k <= l
    if x.shape[1] < 1.5 * x.shape[0]:
        for _ in range(STEPS):
            gram = x @ x.T  # [k, k]
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    else:
        gram, product = x @ x.T, None  # [k, k]
        for step in range(STEPS):
            factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)
            factor.diagonal().add_(A)
            product = factor if product is None else factor @ product
            if step < STEPS - 1:
                gram = factor @ (factor @ gram)
        x = product @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Fp32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with products in fp32, for machines on which these are faster.

    torch uses bf16, which on a CPU may take twice (AVX-512 without AMX) or 90 times (AVX2) as long.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = self.state[p]["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                step = orthogonalize(p.grad.lerp(momentum, group["momentum"]))  # Nesterov's
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(step, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over the matrices of a drafter's layers, fused AdamW over its other trained weights.

    Args:
        drafter: the module to train; weights without a gradient are left out.
        lr: peak learning rate of both.
        betas: AdamW's decay rates.
        weight_decay: decoupled decay of weights with two dimensions, in both.
        bf16: whether Muon's products are in bf16.
    """

    def __init__(
        self,
        drafter: torch.nn.Module,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        bf16: bool,
    ):
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
            muon = torch.optim.Muon if bf16 else Fp32Muon
            self.parts.append(muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
        if groups:  # none if only adapters are trained
            self.parts.append(torch.optim.AdamW(groups, lr, betas, fused=True))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:
        """Take a step of both; they share their groups with this optimizer, so schedulers affect them."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
