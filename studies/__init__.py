"""Tables and figures of the papers, and the project's own figures with their goals; not product."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent


def save_figure(figure: "Figure", path: Path, dpi: int = 100) -> None:
    """Write a matplotlib figure as a PNG file, whole or not at all."""
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=dpi, bbox_inches="tight")  # a legend may be below the axes
    os.replace(temporary, path)
