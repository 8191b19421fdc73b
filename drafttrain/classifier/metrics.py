"""Measures of how well a confidence separates accepted nodes from others, over whole trees."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score, roc_curve

from drafttrain.calibration.calibration import Reliability
from drafttrain.calibration.confidence import reliability
from drafttrain.classifier.data import Rows

POINTS = 200  # points of a stored curve
RATES = (0.01, 0.02, 0.05, 0.1)  # positive rates at which recall is given; EAGLE-2 keeps 5 % as 50 of 1010


@dataclass
class Quality(Reliability):
    """Reliability of a confidence over some nodes, and its quality as a classifier.

    Attributes:
        recall: share of the accepted nodes whose confidence is above the threshold; None without any.
        theta: positive rate: share of all nodes whose confidence is above the threshold.
        auprc: area under precision against recall; None if there are only nodes of one kind.
    """

    recall: float | None
    theta: float
    auprc: float | None


def quality(confidence: np.ndarray, accepted: np.ndarray, threshold: float) -> Quality:
    """Compute the quality of confidences [N] for labels [N], at least one."""
    confidence = np.clip(confidence, 0, 1)  # products of rounded probabilities may exceed 1 by a little
    above, positives = confidence > threshold, int(accepted.sum())
    both = 0 < positives < len(accepted)
    return Quality(
        **asdict(reliability(confidence, accepted)),
        recall=float((above & accepted).sum()) / positives if positives else None,
        theta=float(above.mean()),
        auprc=float(average_precision_score(accepted, confidence)) if both else None,
    )


def by_depth(confidence: np.ndarray, rows: Rows, threshold: float) -> dict[str, Quality]:
    """Return the quality over all rows ("all") and at each depth."""
    found = {"all": quality(confidence, rows.accepted, threshold)}
    for depth in np.unique(rows.depth).tolist():
        here = rows.depth == depth
        found[str(depth)] = quality(confidence[here], rows.accepted[here], threshold)
    return found


def recall_curve(confidence: np.ndarray, accepted: np.ndarray) -> dict[str, Any]:
    """Return recall by positive rate as the threshold falls: `theta` and `recall`, POINTS each, and `at`, the
    recall at some positive rates."""
    false_rate, recall, _ = roc_curve(accepted, confidence, drop_intermediate=False)
    share = accepted.mean()
    theta = share * recall + (1 - share) * false_rate  # [thresholds]
    wanted = np.geomspace(max(theta[theta > 0].min(), 1e-4), 1, POINTS)
    return {
        "theta": wanted.tolist(),
        "recall": np.interp(wanted, theta, recall).tolist(),
        "at": {str(rate): float(np.interp(rate, theta, recall)) for rate in RATES},
    }
