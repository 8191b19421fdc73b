"""Plots of a calibration."""

from pathlib import Path

from matplotlib.figure import Figure

from drafttrain.calibration.calibration import BINS, Calibration
from drafttrain.utils.files import save_figure


def plot_costs(found: Calibration, folder: Path) -> None:
    """Write `costs.png`: milliseconds by tokens verified and by nodes expanded, with quartiles."""
    figure = Figure(figsize=(10, 4))
    axes = figure.subplots(1, 2)
    for axis, curves, what in (
        (axes[0], found.target, "tokens verified"),
        (axes[1], found.drafter, "nodes expanded"),
    ):
        for curve in curves:
            low, middle, high = ([1000 * s for s in row] for row in (curve.lower, curve.median, curve.upper))
            axis.plot(curve.sizes, middle, marker=".", label=f"{curve.context} tokens of context")
            axis.fill_between(curve.sizes, low, high, alpha=0.2)
        axis.set_xlabel(what)
        axis.set_ylabel("ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    axes[0].set_title("s_t: the target's forward")
    axes[1].set_title("s_d: one drafting step")
    save_figure(figure, folder / "costs.png")


def plot_confidence(found: Calibration, folder: Path) -> None:
    """Write `reliability.png`: share of accepted tokens by confidence, raw and scaled, and by depth."""
    figure = Figure(figsize=(14, 4))
    axes = figure.subplots(1, 3)
    for axis, kind in zip(axes, ("raw", "scaled")):
        row = found.confidence[kind]["all"]
        filled = [(i, share, n) for i, (n, _, share) in enumerate(row.bins) if n]
        centers = [(i + 0.5) / BINS for i, _, _ in filled]
        axis.bar(centers, [share for _, share, _ in filled], width=0.9 / BINS)
        axis.plot([0, 1], [0, 1], color="black", linewidth=1)
        temperature = 1 if kind == "raw" else found.temperature
        axis.set_title(f"temperature {temperature:g}: ECE {row.ece:.3f}, {row.tokens} tokens")
        axis.set_xlabel("confidence")
        axis.set_ylabel("accepted")
    depths = [depth for depth in found.confidence["raw"] if depth != "all"]
    for kind in ("raw", "scaled"):
        rows = [found.confidence[kind][depth] for depth in depths]
        axes[2].plot(depths, [row.ece for row in rows], marker=".", label=f"ECE, {kind}")
    axes[2].plot(depths, [found.confidence["raw"][d].accepted for d in depths], marker=".", label="accepted")
    axes[2].set_xlabel("depth")
    axes[2].set_ylim(0, 1)
    axes[2].legend()
    save_figure(figure, folder / "reliability.png")
