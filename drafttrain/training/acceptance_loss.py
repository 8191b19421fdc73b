"""Train for the acceptance of drawn drafts.

A draft that is drawn from q is accepted with probability sum_x min(p(x), q(x)) where the target samples from
p (Leviathan et al. 2023, corollary 3.6), and all drafts of a chain with the product of these. So the loss of
a position is the negative logarithm of its acceptance. Where the target is certain, that is the KL; elsewhere
KL makes a drafter that cannot match p cover all of it, and acceptance does not. p is restricted to the draft
vocabulary and renormalized, as in `head_kl`, so where much of it is outside this is an approximation. Ours.
"""

import torch


def neg_log_acceptance(p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -log sum min(p, q) of each position [c, 1] and its gradient with respect to q's logits [c, D].

    Args:
        p: the target's distributions [c, D].
        log_q: the logarithms of the drafter's [c, D].
    """
    q = log_q.exp()
    is_below = q < p  # where the smaller of both grows with q
    accepted = torch.where(is_below, q, p).sum(-1, keepdim=True).clamp(min=1e-12)  # [c, 1]
    moving = torch.where(is_below, q, 0.0)  # [c, D]
    return -accepted.log(), (q * moving.sum(-1, keepdim=True) - moving) / accepted
