"""Forward KL from the target's distribution to the drafter's, without ever holding [B, T, V] logits.

Both heads are applied to a chunk of positions at a time, and the gradients with respect to the drafter's
states and its head are computed in the same pass. Memory is one chunk of fp32 logits, and the gradients of a
segment of chunks, whose products with states and head are made at once, for any number of positions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from drafttrain.kernels.divergence import divergence as native_divergence

if TYPE_CHECKING:
    from drafttrain.training.emphasis import Emphasis

SEGMENT = 1 << 25  # numbers in the logits' gradients of a segment: 64 MB in bf16

# takes the target's probabilities and the log of the drafter's, fp32 [c, D]; returns the loss of each
# position [c, 1] and its gradient with respect to the drafter's logits [c, D]
Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _FusedHeadKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, teacher_states, teacher_logits, chunk, dtype, emphasis, divergence):
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        head, n = weight.to(dtype), len(states)  # [D, H]
        grad_states = torch.empty_like(states) if needs_states else None  # [N, H]
        grad_weight = None  # [D, H] fp32: the sum of many small bf16 numbers would lose most of them
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        agree = torch.zeros((), dtype=torch.float32, device=states.device)
        segment = chunk * max(SEGMENT // (len(weight) * chunk), 1)  # positions
        grads = head.new_empty(min(segment, n), len(weight))  # [s, D]
        for first in range(0, n, segment):
            end = min(first + segment, n)
            x = states[first:end].to(dtype)  # [s, H]
            for start in range(first, end, chunk):
                part = slice(start - first, min(start + chunk, end) - first)
                logits = torch.mm(x[part], head.T, out=grads[part])  # [c, D]
                teacher = teacher_logits(teacher_states[start : start + chunk])  # [c, D]
                plain = emphasis is None and divergence is None
                fused = native_divergence(logits, teacher) if plain else None
                if fused is not None:  # `logits` are their gradient now
                    losses, same = fused
                    loss += losses.sum()
                    agree += same.sum()
                    continue
                each, right, grad = _divergence(logits, teacher, start, emphasis, divergence)
                loss += each
                agree += right
                grads[part] = grad
            grad_logits = grads[: end - first]  # [s, D]
            if needs_states:
                grad_states[first:end] = grad_logits @ head
            if needs_weight:
                product = (grad_logits.T @ x).float()
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
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


def _divergence(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    start: int,
    emphasis: "Emphasis | None",
    divergence: Divergence | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed loss of a chunk that begins at position `start`, the positions where both have their
    largest logit at one place, and the gradient with respect to the drafter's logits [c, D]."""
    log_q = torch.log_softmax(logits.float(), dim=-1)  # [c, D]
    log_p = torch.log_softmax(teacher.float(), dim=-1)  # [c, D]
    # max, because argmax takes 4 times as long on a CPU
    best = log_p.max(-1).indices  # [c]
    right = best == log_q.max(-1).indices
    p, weights = log_p.exp(), 1.0
    if emphasis is not None:
        p, weights = emphasis(start, p, best, right)  # [c, D], [c, 1]
        log_p = p.log().clamp(min=-1e4)  # 0 log 0 is 0
    if divergence is None:
        each, grad = p * (log_p - log_q), log_q.exp() - p  # [c, D]
    else:
        each, grad = divergence(p, log_q)  # [c, 1], [c, D]
    return (weights * each).sum(), right.sum(), weights * grad


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
