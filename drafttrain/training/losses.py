"""Forward KL from the target's distribution to the drafter's, without ever holding [B, T, V] logits.

Both heads are applied to a chunk of positions at a time, and the gradients with respect to the drafter's
states and its head are computed in the same pass, so memory is one chunk of logits for any number of
positions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from drafttrain.training.emphasis import Emphasis


# takes the target's probabilities and the log of the drafter's, fp32 [c, D]; returns the loss of each
# position [c, 1] and its gradient with respect to the drafter's logits [c, D]
Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _FusedHeadKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, teacher_states, teacher_logits, chunk, dtype, emphasis, divergence):
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        head = weight.to(dtype)  # [D, H]
        grad_states = torch.empty_like(states) if needs_states else None  # [N, H]
        # in fp32: the sum of many small bf16 numbers would lose most of them
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None  # [D, H]
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        agree = torch.zeros((), dtype=torch.float32, device=states.device)
        for start in range(0, states.shape[0], chunk):
            part = slice(start, start + chunk)
            x = states[part].to(dtype)  # [c, H]
            log_q = torch.log_softmax((x @ head.T).float(), dim=-1)  # [c, D]
            log_p = torch.log_softmax(teacher_logits(teacher_states[part]).float(), dim=-1)  # [c, D]
            # max, because argmax takes 4 times as long on a CPU
            best = log_p.max(-1).indices  # [c]
            right = best == log_q.max(-1).indices
            agree += right.sum()
            p = log_p.exp()
            weights = 1.0
            if emphasis is not None:
                p, weights = emphasis(start, p, best, right)  # [c, D], [c, 1]
                log_p = p.log().clamp(min=-1e4)  # 0 log 0 is 0
            if divergence is None:
                each, grad = p * (log_p - log_q), log_q.exp() - p  # [c, D]
            else:
                each, grad = divergence(p, log_q)  # [c, 1], [c, D]
            loss += (weights * each).sum()
            if needs_states or needs_weight:
                grad_logits = (weights * grad).to(dtype)  # [c, D]
                if needs_states:
                    grad_states[part] = (grad_logits @ head).to(states.dtype)
                if needs_weight:
                    grad_weight += (grad_logits.T @ x).float()
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(agree)
        return loss, agree

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_states, grad_weight = ctx.saved_tensors
        if grad_states is not None:
            grad_states = grad_states * grad_loss
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_states, grad_weight, None, None, None, None, None, None


def head_kl(
    states: torch.Tensor,
    weight: torch.Tensor,
    teacher_states: torch.Tensor,
    teacher_logits: Callable[[torch.Tensor], torch.Tensor],
    chunk: int = 1024,
    dtype: torch.dtype | None = None,
    emphasis: "Emphasis | None" = None,
    divergence: Divergence | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum D_KL(P_t || P_d) over positions (EDD paper, eq. 4), softmaxes and differences in fp32.

    Args:
        states: the drafter's states after its final norm [N, H].
        weight: the drafter's head [D, H].
        teacher_states: the target's states after its final norm [N, H].
        teacher_logits: the target's logits [c, D] over the draft vocabulary from a chunk of its states
            [c, H]. The softmax over them is P_t restricted to the draft vocabulary and renormalized.
        chunk: positions per pass.
        dtype: of the drafter's matrix products; None for that of its states.
        emphasis: changes the distributions and weights positions; None: neither.
        divergence: summed instead of D_KL.

    Returns:
        the summed loss and the number of positions where the two most likely tokens agree, both fp32 [].
    """
    if not torch.is_grad_enabled():  # parameters require a gradient even then
        states, weight = states.detach(), weight.detach()
    dtype = states.dtype if dtype is None else dtype
    how = chunk, dtype, emphasis, divergence
    return _FusedHeadKL.apply(states, weight, teacher_states, teacher_logits, *how)
