"""The classifier of `drafttrain c2t`: trained on labelled trees, and compared with simpler ones.

Accepted nodes are rare (a handful of a thousand), so negatives are thinned out for training. The odds of the
thinned rows are too high by 1 / share of the negatives kept; the logarithm of that share is subtracted from
the logit in training and left out afterwards, so that the stored network gives probabilities of whole trees.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from drafttrain.classifier.config import ClassifierConfig
from drafttrain.classifier.data import Rows, read_rows, split_by_tree, thin_negatives
from drafttrain.classifier.dump import read_record
from drafttrain.classifier.metrics import by_depth, recall_curve
from drafttrain.classifier.model import Classifier
from drafttrain.utils.progress import counted
from drafttrain.utils.provenance import versions
from drafttrain.utils.writing import write_json

REPORT = "classifier_report.json"
CHUNK = 1 << 18  # rows of one forward without gradients


def train_classifier(
    config: ClassifierConfig,
    trees: str | os.PathLike,
    out: str | os.PathLike,
    start: str | os.PathLike | None = None,
    baselines: bool = True,
) -> dict[str, Any]:
    """Train on the trees of a dump; write the classifier and `classifier_report.json`.

    Args:
        trees: folder of `write_trees`.
        out: folder to write to, such as a bundle's.
        start: folder of a classifier to fine-tune; its features, scaling and size are kept, except the
            scaling of features that have been constant so far.
        baselines: also compare with logistic regression and gradient boosting.

    Returns:
        the report.

    Raises:
        UserError: trees or settings are unusable.
    """
    config.check()
    console, out = Console(), Path(out)
    torch.manual_seed(config.seed)
    model = (
        Classifier.load(start).requires_grad_(True) if start else Classifier(config.features, config.hidden)
    )
    began = time.perf_counter()
    training, validation = split_by_tree(read_rows(trees, model.features), config.seed, config.share)
    n_training = len(training)
    sample, kept = thin_negatives(training, config.negatives, config.seed)
    del training  # millions of rows
    if start:
        model.fit_unused_scale(torch.from_numpy(sample.x))
    else:
        share = sample.accepted.mean() * kept / (1 + sample.accepted.mean() * (kept - 1))
        model.fit_scale(torch.from_numpy(sample.x), float(share))
    lr = config.lr or (1e-4 if start else 1e-3)
    with counted("training", config.epochs, "epochs") as step:
        history = fit(model, sample, validation, config, lr, kept, step)
    seconds = time.perf_counter() - began
    methods = {"C2T": predict(model, validation.x), "joint probability": validation.joint}
    if baselines:
        methods |= fit_baselines(sample, validation, kept, config.seed)
    rows = {
        name: {depth: asdict(row) for depth, row in by_depth(c, validation, config.threshold).items()}
        for name, c in methods.items()
    }
    curves = {name: recall_curve(c, validation.accepted) for name, c in methods.items()}
    record = {
        **asdict(config),
        "features": model.features,
        "hidden": model.hidden,
        "lr": lr,
        "fine_tuned_from": None if start is None else str(Path(start).name),
        "negatives_kept": kept,
        "rows": n_training,
        "sampled_rows": len(sample),
        "validation_rows": len(validation),
        "trees": read_record(Path(trees))["made_from"],
        "seconds": round(seconds, 3),
        "versions": versions(),
    }
    report = {"training": record, "history": history, "rows": rows, "curves": curves}
    model.save(out, record)
    write_json(out / REPORT, report)
    _show(report, config.threshold, console)
    return report


def fit(
    model: Classifier,
    sample: Rows,
    validation: Rows,
    config: ClassifierConfig,
    lr: float,
    kept: float,
    on_epoch: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Train a classifier on thinned rows with Adam and binary cross-entropy.

    Args:
        kept: share of the negatives that thinning has kept.

    Returns:
        loss on the thinned rows, and recall and positive rate on the validation trees, after each epoch.
    """
    x, y = torch.from_numpy(sample.x), torch.from_numpy(sample.accepted).float()  # [N, F], [N]
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    order = torch.Generator().manual_seed(config.seed)
    history = []
    for epoch in range(1, config.epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(y), generator=order).split(config.batch_size):  # [n]
            logits = model.logits(x[batch]) - math.log(kept)  # [n] for the odds of the thinned rows
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        above = predict(model, validation.x) > config.threshold  # [N]
        recall = (above & validation.accepted).sum() / validation.accepted.sum()
        history.append(
            {"epoch": epoch, "loss": total / len(y), "recall": float(recall), "theta": float(above.mean())}
        )
        on_epoch()
    model.eval().requires_grad_(False)
    return history


@torch.no_grad()
def predict(model: Classifier, x: np.ndarray) -> np.ndarray:
    """Return the confidence of rows, fp32 [N], from features [N, F]."""
    return torch.cat([torch.sigmoid(model.logits(part)) for part in torch.from_numpy(x).split(CHUNK)]).numpy()


def fit_baselines(sample: Rows, validation: Rows, kept: float, seed: int) -> dict[str, np.ndarray]:
    """Return confidences [N] of the validation rows by simpler models, corrected for thinning alike."""
    models = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "gradient boosting": HistGradientBoostingClassifier(random_state=seed),
    }
    found = {}
    for name, model in models.items():
        model.fit(sample.x, sample.accepted)
        p = model.predict_proba(validation.x)[:, 1]  # [N]
        found[name] = p * kept / (p * kept + 1 - p)  # the odds times the share of negatives left
    return found


def _show(report: dict[str, Any], threshold: float, console: Console) -> None:
    record = report["training"]
    title = f"{record['validation_rows']} nodes of validation trees, threshold {threshold:g}"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("depth", "recall", "θ", "AUROC", "AUPRC", "ECE", "Brier"):
        table.add_column(head, justify="right", no_wrap=True)
    for method, rows in report["rows"].items():
        for depth, row in rows.items():
            if depth == "all" or method == "C2T":
                names = ("recall", "theta", "auroc", "auprc", "ece", "brier")
                cells = ["" if row[name] is None else f"{row[name]:.4f}" for name in names]
                table.add_row(method, depth, *cells)
    console.print(table)
    for method, curve in report["curves"].items():
        at = ", ".join(f"{recall:.3f} at θ {rate}" for rate, recall in curve["at"].items())
        console.print(f"{method}: recall {at}", highlight=False, soft_wrap=True)
    console.print(
        f"trained on {record['sampled_rows']} of {record['rows']} rows ({record['negatives_kept']:.4f} of "
        f"the negatives) in {record['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
