"""Pictures of a trained classifier beside what it is compared with."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from drafttrain.utils.files import save_figure

RELIABILITY = "classifier_reliability.png"
RECALL = "classifier_recall.png"


def plot_reliability(rows: dict[str, dict[str, Any]], folder: Path) -> None:
    """Share of accepted nodes by mean confidence in ten bins, a line for each method.

    Args:
        rows: `Quality` as JSON, by method and depth.
    """
    figure = Figure(figsize=(6, 5))
    axis = figure.subplots()
    for method, by_depth in rows.items():
        row = by_depth["all"]
        filled = [(mean, share) for n, mean, share in row["bins"] if n]
        axis.plot(*zip(*filled), marker=".", label=f"{method}: ECE {row['ece']:.4f}")
    axis.plot([0, 1], [0, 1], color="black", linewidth=1)
    axis.set_xlabel("confidence")
    axis.set_ylabel("accepted")
    axis.legend()
    save_figure(figure, folder / RELIABILITY)


def plot_recall(curves: dict[str, dict[str, Any]], folder: Path) -> None:
    """Recall of accepted nodes against the share of nodes called positive, a line for each method.

    Args:
        curves: as `recall_curve` gives them, by method.
    """
    figure = Figure(figsize=(6, 5))
    axis = figure.subplots()
    for method, curve in curves.items():
        axis.plot(curve["theta"], curve["recall"], label=method)
    axis.set_xscale("log")
    axis.set_xlabel("positive rate θ")
    axis.set_ylabel("recall")
    axis.set_ylim(0, 1)
    axis.legend()
    save_figure(figure, folder / RECALL)
