"""Loss for the acceptance of sampled drafts.

A draft sampled from q is accepted with probability sum_x min(p(x), q(x)) if the target samples from p
(Leviathan et al. 2023, corollary 3.6), and all drafts of a chain with the product of these. So the loss of a
position is the negative logarithm of its acceptance. If the target is certain, it equals the KL; elsewhere,
the KL makes a drafter that cannot match p cover all of it, and this loss does not. p is restricted to the
draft vocabulary and renormalized, as in `head_kl`: an approximation if much of it is outside. Ours.
"""

import torch


def neg_log_acceptance(p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -log sum min(p, q) of each position [c, 1] and its gradient with respect to q's logits [c, D].

    Args:
        p: the target's distributions [c, D].
        log_q: the logarithms of the drafter's distributions [c, D].
    """
    q = log_q.exp()
    is_below = q < p  # where min(p, q) grows with q
    accepted = torch.where(is_below, q, p).sum(-1, keepdim=True).clamp(min=1e-12)  # [c, 1]
    moving = torch.where(is_below, q, 0.0)  # [c, D]
    return -accepted.log(), (q * moving.sum(-1, keepdim=True) - moving) / accepted
