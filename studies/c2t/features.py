"""How few draft tokens any judge of some features could verify: gradient boosting in the classifier's place.

    python -m studies.c2t.features --trees runs/trees

On trees of `drafttrain c2t` as they are: a judge takes the nodes above a threshold, and the nodes that
it takes per tree are divided by those that joint probability takes for as many accepted ones, for whole trees
and for chains of the most probable tokens. A third of the prompts judges, the others teach. Roots are those
of decoding with full trees, which are fewer than a small tree comes to where drafting is easy, so this tells
features apart and predicts no sweep.

Beside the features of `trees/c2t.py`: the entropy below the root (H1), how far the output has come (place),
and how many tokens of the trees before were accepted (last, and recent: the mean of the last three).
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from drafttrain.classifier.data import Rows, read_rows
from drafttrain.classifier.dump import read_record
from drafttrain.trees.features import FEATURES
from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import write_json
from studies.arguments import run, start

KNOWN = (*FEATURES, "H1", "place", "last", "recent")
SETS = (
    ("P", "d"),
    ("P", "H", "d"),
    ("P", "d", "p", "rank"),
    ("P", "H", "d", "p", "rank"),
    ("P", "H", "d", "p", "rank", "H1", "place"),
    ("P", "H", "d", "last", "recent"),
    KNOWN,
)
SEEDS = (0, 1, 2)
LEAST = 0.002  # joint probability of the nodes that are looked at; no threshold here comes so low
ACCEPTED = {"trees": np.linspace(0.6, 1.5, 10), "chains": np.linspace(0.5, 1.1, 7)}  # nodes per tree


def known_features(rows: Rows, per_prompt: int) -> np.ndarray:
    """Return all of `KNOWN`, fp32 [N, F], of rows sorted by tree.

    Args:
        per_prompt: numbers of trees that belong to one prompt.
    """
    numbers, first, of = np.unique(rows.tree, return_index=True, return_inverse=True)
    accepted = np.bincount(of, rows.accepted)  # [trees]
    prompt = numbers // per_prompt
    last, recent = np.full(len(numbers), -1.0), np.full(len(numbers), -1.0)
    for i in range(1, len(numbers)):
        before = [j for j in range(max(0, i - 3), i) if prompt[j] == prompt[i]]
        if before:
            last[i], recent[i] = accepted[i - 1], accepted[before].mean()
    entropy = rows.x[first, FEATURES.index("H")]  # the first node is below the root
    of_tree = np.stack([entropy, numbers % per_prompt, last, recent], 1)  # [trees, 4]
    return np.concatenate([rows.x, of_tree[of]], 1, dtype=np.float32)


def chain_nodes(rows: Rows) -> np.ndarray:
    """Return which nodes are the most probable child of the most probable child and so on, bool [N]."""
    joint, p, rank = (rows.x[:, FEATURES.index(name)] for name in ("P", "p", "rank"))
    found = np.zeros(len(rows), bool)
    above = np.ones(int(rows.tree.max()) + 1)  # joint probability of each tree's chain so far
    for depth in range(1, int(rows.depth.max()) + 1):
        place = np.flatnonzero((rows.depth == depth) & (rank == 0))
        expected = above[rows.tree[place]] * p[place]
        place = place[np.isclose(joint[place], expected, rtol=1e-4, atol=0)]
        place = place[np.unique(rows.tree[place], return_index=True)[1]]
        found[place] = True
        above[:] = np.nan  # a tree that does not go on
        above[rows.tree[place]] = joint[place]
    return found


def taken(score: np.ndarray, accepted: np.ndarray, trees: int, at: np.ndarray) -> np.ndarray:
    """Return the nodes per tree that a judge takes to get `at` accepted ones per tree.

    Args:
        score, accepted: of the nodes [N].
        trees: that they are from.
    """
    order = np.argsort(-score, kind="stable")
    return np.interp(at, accepted[order].cumsum() / trees, np.arange(1, len(order) + 1) / trees)


def fixed_size(rows: Rows, trees: int, at: np.ndarray) -> np.ndarray:
    """Return the same for as many nodes in each tree, by joint probability: EAGLE-2's rerank."""
    order = np.lexsort((-rows.joint, rows.tree))
    new = np.diff(rows.tree[order], prepend=-1) != 0
    starts = np.flatnonzero(new)
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))  # [N] from 0
    by_place = np.bincount(place, rows.accepted[order])  # accepted nodes at each place
    return np.interp(at, by_place.cumsum() / trees, np.arange(1, len(by_place) + 1))


def compare(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    """Return ratios to joint probability, for trees and chains, by features."""
    rows = read_rows(folder, FEATURES)
    rows = rows.take(np.argsort(rows.tree, kind="stable"))
    per_prompt = read_record(folder)["made_from"]["max_new_tokens"]
    x, judging = known_features(rows, per_prompt), rows.tree // per_prompt % 3 == 0
    trees = len(np.unique(rows.tree[judging]))
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name, which in (("trees", np.ones(len(rows), bool)), ("chains", chain_nodes(rows))):
        which &= rows.joint > LEAST
        mine, columns, held_out, at = rows.take(which), x[which], judging[which], ACCEPTED[name]
        labels, judged = mine.accepted, mine.take(held_out)
        if len(np.unique(labels[~held_out])) < 2 or not judged.accepted.any():
            raise UserError(f"{folder}: too few trees to judge features by; dump those of more prompts")
        at = at[at <= judged.accepted.sum() / trees]  # no judge gets more
        if not len(at):
            raise UserError(f"{folder}: the drafter has too few accepted nodes per tree to judge features by")
        base = taken(judged.joint, judged.accepted, trees, at)
        found[name] = {"joint probability": {"nodes": base.tolist(), "at": at.tolist()}}
        if name == "trees":
            found[name]["as many nodes in each"] = summary(fixed_size(judged, trees, at) / base)
        for features in SETS:
            place = [KNOWN.index(feature) for feature in features]
            ratios = []
            for seed in SEEDS:
                model = HistGradientBoostingClassifier(
                    max_iter=120,
                    learning_rate=0.06,
                    max_leaf_nodes=16,
                    min_samples_leaf=200,
                    l2_regularization=1.0,
                    early_stopping=False,
                    random_state=seed,
                )
                drawn = np.random.default_rng(seed).random(len(labels)) < 0.8  # so that seeds differ
                teaching = ~held_out & drawn
                model.fit(columns[teaching][:, place], labels[teaching])
                score = model.predict_proba(columns[held_out][:, place])[:, 1]
                ratios.append(taken(score, judged.accepted, trees, at) / base)
            found[name][",".join(features)] = summary(np.mean(ratios, 0), ratios)
            print(f"{name}: {','.join(features)}: {np.mean(ratios):.3f}", flush=True)
    return found


def summary(ratio: np.ndarray, seeds: Sequence[np.ndarray] = ()) -> dict[str, object]:
    """Return ratios to joint probability, and the mean of each seed's."""
    return {
        "mean": float(ratio.mean()),
        "at each": ratio.tolist(),
        "seeds": [float(one.mean()) for one in seeds],
    }


def study(args: Namespace) -> None:
    """Compare the features on the trees of --trees."""
    write_json(args.out / "features.json", compare(Path(args.trees)))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; return the exit status."""
    return run(study, __doc__, argv, ("trees",), out="runs/c2t")


if __name__ == "__main__":
    start(main)
