"""Figures 9 and 10 of the C2T paper (Appendix D): the classifier's confidence over P and H, by depth.

python -m studies.c2t.figures9_10
"""

from argparse import Namespace
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from drafttrain.classifier.model import Classifier
from drafttrain.utils.errors import UserError
from studies import save_figure
from studies.arguments import run, start


def study(args: Namespace) -> None:
    """Draw the confidence over joint probability and entropy at depths 1, 3 and 6, and its contours."""
    model = Classifier.load(args.classifier or args.bundle)
    axes = np.linspace(0.001, 1, 120), np.linspace(0, 7, 120)
    p, entropy = (grid.astype(np.float32) for grid in np.meshgrid(*axes, indexing="ij"))
    figure = Figure(figsize=(13, 3.8))
    for axis, depth in zip(figure.subplots(1, 3), (1, 3, 6)):
        features = {"P": p, "H": entropy, "d": np.full_like(p, depth)}
        missing = set(model.features) - set(features)
        if missing:
            raise UserError(
                f"surfaces are drawn over P, H and d; this classifier reads {', '.join(missing)} too"
            )
        confidence = model.predict(np.stack([features[name] for name in model.features], -1))
        drawn = axis.contourf(p, entropy, confidence, levels=np.linspace(0, 1, 21))
        lines = axis.contour(p, entropy, confidence, levels=[0.05, 0.1, 0.2, 0.5], colors="white")
        axis.clabel(lines)
        axis.set_title(f"depth {depth}")
        axis.set_xlabel("joint probability")
        axis.set_ylabel("entropy")
        figure.colorbar(drawn, ax=axis)
    save_figure(figure, args.out / "surfaces.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figures; return the exit status."""
    return run(study, __doc__, argv, ("bundle", "classifier"), out="runs/c2t")


if __name__ == "__main__":
    start(main)
