"""Figure 2 of the C2T paper: the drafter's probability, acceptance and their difference by entropy and rank.

python -m studies.c2t.figure2 --trees runs/trees
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from drafttrain.classifier.data import read_rows
from drafttrain.utils.writing import write_json
from studies import save_figure
from studies.arguments import run, start

ENTROPIES = (0, 1, 2, 3, 4, 5, 6, np.inf)  # bounds of the rows of Figure 2, in nats


def draw(maps: dict[str, np.ndarray], labels: list[str], path: Path) -> None:
    """Draw each map [entropies, ranks], the bias in two colors around 0."""
    figure = Figure(figsize=(13, 3.6))
    for axis, (name, values) in zip(figure.subplots(1, 3), maps.items()):
        if name == "bias":
            most = np.nanmax(np.abs(values))
            image = axis.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
        else:
            image = axis.imshow(np.log10(np.maximum(values, 1e-4)), aspect="auto", vmin=-4, vmax=0)
        axis.set_title(name if name == "bias" else f"{name}, log10")
        axis.set_xlabel("rank")
        axis.set_yticks(range(len(labels)), labels)
        figure.colorbar(image, ax=axis)
    save_figure(figure, path)


def study(args: Namespace) -> None:
    """Map probability, acceptance and their difference over the root's children, whose parent is accepted."""
    rows = read_rows(Path(args.trees), ("p", "H", "rank"))
    first = rows.take(rows.depth == 1)
    p, entropy, rank = first.x.T  # [N] each
    ranks = int(rank.max()) + 1
    shape = (len(ENTROPIES) - 1, ranks)
    place = (np.digitize(entropy, ENTROPIES[1:-1]), rank.astype(int))
    counts, probability, accepted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(counts, place, 1)
    np.add.at(probability, place, p)
    np.add.at(accepted, place, first.accepted)
    with np.errstate(invalid="ignore"):
        maps = {"probability": probability / counts, "accepted": accepted / counts}
    maps["bias"] = maps["probability"] - maps["accepted"]
    labels = [f"{low:g}–{high:g}" for low, high in zip(ENTROPIES[:-2], ENTROPIES[1:])] + ["> 6"]
    draw(maps, labels, args.out / "heatmaps.png")
    tables = {
        name: [[None if np.isnan(x) else float(x) for x in row] for row in values]
        for name, values in maps.items()
    }
    write_json(
        args.out / "heatmaps.json", {"entropy": labels, "nodes": counts.astype(int).tolist(), **tables}
    )
    most_likely = maps["bias"][:, 0]
    for label, bias, n in zip(labels, most_likely, counts[:, 0]):
        if n:
            off = "too sure" if bias > 0 else "too unsure"
            print(f"entropy {label}: the most probable token is {off} by {abs(bias):.3f} ({int(n)} trees)")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw Figure 2; return the exit status."""
    return run(study, __doc__, argv, ("trees",), out="runs/c2t")


if __name__ == "__main__":
    start(main)
