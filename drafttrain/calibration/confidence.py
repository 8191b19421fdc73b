"""Reliability of a drafter's confidence as the probability that its token is accepted.

Only tokens whose parents were all accepted are considered; those after a rejection are not (EDD paper, §4).
"""

from collections.abc import Sequence

import numpy as np

from drafttrain.calibration.calibration import BINS, Reliability

TEMPERATURES = tuple(round(0.5 + 0.05 * i, 2) for i in range(31))  # 0.5 to 2


def reliability(confidence: Sequence[float], accepted: Sequence[bool]) -> Reliability:
    """Compare confidences with outcomes, [tokens] each, at least one.

    A confidence of exactly 1 belongs to the last bin.
    """
    from sklearn.metrics import brier_score_loss, roc_auc_score  # imported here: it takes a second

    c, hit = np.asarray(confidence, dtype=float), np.asarray(accepted, dtype=bool)
    which = np.minimum((c * BINS).astype(int), BINS - 1)  # [tokens]
    bins: list[list[float | None]] = []
    ece = 0.0
    for i in range(BINS):
        inside = which == i
        n = int(inside.sum())
        if not n:
            bins.append([0, None, None])
            continue
        mean, share = float(c[inside].mean()), float(hit[inside].mean())
        ece += n / len(c) * abs(mean - share)
        bins.append([n, mean, share])
    auroc = float(roc_auc_score(hit, c)) if 0 < hit.sum() < len(hit) else None
    brier = float(brier_score_loss(hit, c, pos_label=True))
    return Reliability(len(c), float(hit.mean()), float(c.mean()), ece, auroc, brier, bins)


def best_temperature(confidence: np.ndarray, accepted: np.ndarray) -> float:
    """Return the temperature with the highest likelihood of the outcomes (Guo et al. 2017).

    Args:
        confidence: of each token at each of `TEMPERATURES`, [tokens, temperatures].
        accepted: bool [tokens].
    """
    p = np.clip(confidence, 1e-6, 1 - 1e-6)
    log_likelihood = np.where(accepted[:, None], np.log(p), np.log1p(-p)).sum(0)  # [temperatures]
    return TEMPERATURES[int(log_likelihood.argmax())]
