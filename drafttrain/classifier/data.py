"""Rows of labelled trees in memory: read as plain columns, split by tree, negatives thinned out."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.model_selection import train_test_split

from drafttrain.classifier.dump import read_record
from drafttrain.utils.errors import UserError, brief

VALIDATION = 0.05  # share of the trees


class NothingToLearn(UserError):
    """Error of valid trees that are too few or of one label, as with a drafter too weak to be accepted."""


@dataclass
class Rows:
    """Labelled nodes of trees, as columns.

    Attributes:
        x: features, fp32 [N, F].
        joint: joint probability, fp32 [N], also where it is none of the features.
        accepted: labels, bool [N].
        tree: which tree each node belongs to, int32 [N].
        depth: depth of each node, int8 [N].
    """

    x: np.ndarray
    joint: np.ndarray
    accepted: np.ndarray
    tree: np.ndarray
    depth: np.ndarray

    def __len__(self) -> int:
        return len(self.accepted)

    def take(self, which: np.ndarray) -> "Rows":
        """Return the rows that a mask or indices select."""
        columns = (self.x, self.joint, self.accepted, self.tree, self.depth)
        return Rows(*(column[which] for column in columns))


def read_rows(folder: str | os.PathLike, features: Sequence[str]) -> Rows:
    """Read all rows of a dump.

    Raises:
        UserError: no dump, a damaged or unfinished file, a feature it lacks, NaN, no rows, or rows of one
            label only.
    """
    folder = Path(folder)
    record = read_record(folder)
    if not record.get("finished", True):
        raise UserError(
            f"{folder}: must be a finished dump, got an interrupted one; run drafttrain c2t again"
        )
    shards = record["shards"]
    total = sum(shard["rows"] for shard in shards)
    rows = Rows(
        np.empty((total, len(features)), np.float32),
        np.empty(total, np.float32),
        np.empty(total, bool),
        np.empty(total, np.int32),
        np.empty(total, np.int8),
    )
    at = 0
    for shard in shards:
        table = _read_shard(folder / shard["file"], features)
        if table.num_rows != shard["rows"]:
            raise UserError(
                f"{folder / shard['file']}: {table.num_rows} rows in place of {shard['rows']}; run the same "
                "drafttrain c2t again, which repeats it"
            )
        part = slice(at, at + table.num_rows)
        for i, name in enumerate(features):
            rows.x[part, i] = table[name].to_numpy()
        names = {"P": rows.joint, "accepted": rows.accepted, "tree": rows.tree, "d": rows.depth}
        for name, column in names.items():
            column[part] = table[name].to_numpy()
        at += table.num_rows
    if not total:
        raise NothingToLearn(f"{folder}: holds no nodes; grow trees of more prompts")
    if broken := int((~(np.isfinite(rows.x).all(1) & np.isfinite(rows.joint))).sum()):
        raise UserError(
            f"{folder}: {broken} rows hold NaN or infinity, which drafttrain c2t leaves out; grow them again"
        )
    check_labels(rows, str(folder))
    return rows


def check_labels(rows: Rows, which: str, is_part: bool = False) -> None:
    """Raise NothingToLearn if all rows have the same label; `which` names them in the message."""
    accepted = int(rows.accepted.sum())
    if accepted in (0, len(rows)):
        found = f"{which}: must hold accepted and rejected nodes, got {accepted} accepted of {len(rows)}"
        remedy = "take more prompts" if accepted or is_part else "train the drafter further"
        raise NothingToLearn(f"{found}; {remedy}")


def _read_shard(path: Path, features: Sequence[str]) -> pa.Table:
    wanted = list(dict.fromkeys([*features, "P", "accepted", "tree", "d"]))
    try:
        known = pq.read_schema(path)
        if missing := [name for name in wanted if name not in known.names]:
            raise UserError(f"{path}: has no columns {', '.join(missing)}; dump the trees again")
        return pq.read_table(path, columns=wanted)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the same drafttrain c2t again") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path}: cannot be read ({brief(error)}); run the same drafttrain c2t again, which repeats it"
        ) from None


def split_by_tree(rows: Rows, seed: int, share: float = 1.0) -> tuple[Rows, Rows]:
    """Split rows into those to train and to validate on; the nodes of a tree stay together.

    Args:
        share: share of the trees not held out to train on, for fine-tuning on little data.

    Raises:
        NothingToLearn: too few trees, or one of the two lacks a label.
    """
    trees = np.unique(rows.tree)
    if len(trees) * share < 2:
        raise NothingToLearn(
            f"{len(trees)} trees are too few to train on {share:g} of them and validate; take more prompts"
        )
    others, held_out = train_test_split(trees, test_size=VALIDATION, random_state=seed)
    # the same trees are held out for every share, so that classifiers can be compared on them
    if share < 1:
        others = np.random.default_rng(seed).permutation(others)[: max(1, int(len(others) * share))]
    validating = np.isin(rows.tree, held_out)
    training = ~validating if share == 1 else np.isin(rows.tree, others)
    parts = rows.take(training), rows.take(validating)
    for part, name in zip(parts, ("trees to train on", "trees to validate on")):
        check_labels(part, name, is_part=True)
    return parts


def thin_negatives(rows: Rows, per_positive: float, seed: int) -> tuple[Rows, float]:
    """Keep all accepted rows and, for each, `per_positive` rejected rows drawn at random.

    Returns:
        the rows, and the share of the negatives kept. Odds of acceptance among these rows are the true
        ones divided by that share.
    """
    positives, negatives = np.flatnonzero(rows.accepted), np.flatnonzero(~rows.accepted)
    kept = min(len(negatives), max(1, round(per_positive * len(positives))))
    drawn = np.random.default_rng(seed).choice(negatives, kept, replace=False, shuffle=False)
    return rows.take(np.sort(np.concatenate([positives, drawn]))), kept / len(negatives)
