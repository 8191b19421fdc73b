"""Figure 7 of the C2T paper (Appendix B.4): fine-tuning against a shift of the threshold.

python -m studies.c2t.figure7 --classifier DIR --trees runs/trees
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from drafttrain.classifier.config import ClassifierConfig
from drafttrain.classifier.data import read_rows, split_by_tree
from drafttrain.classifier.metrics import recall_curve
from drafttrain.classifier.model import Classifier
from drafttrain.classifier.train import predict, train_classifier
from drafttrain.utils.writing import write_json
from studies.arguments import run, start


def study(args: Namespace) -> None:
    """Compare recall at equal positive rates on these trees, of a classifier that learned elsewhere, of
    the same fine-tuned on a tenth of them, and of one that learned here. Where the first two agree at equal
    rates, fine-tuning has moved the threshold and little else."""
    trees, start_from, out = Path(args.trees), args.classifier or args.bundle, args.out
    config = ClassifierConfig(features=Classifier.load(start_from).features)
    tuned, fresh = out / "tuned", out / "fresh"
    train_classifier(replace(config, share=0.1), trees, tuned, start=start_from, baselines=False)
    train_classifier(config, trees, fresh, baselines=False)
    _, held_out = split_by_tree(read_rows(trees, config.features), config.seed)
    found = {}
    for name, folder in (("elsewhere", start_from), ("fine-tuned", tuned), ("here", fresh)):
        confidence = predict(Classifier.load(folder), held_out.x)
        curve = recall_curve(confidence, held_out.accepted)
        found[name] = {"at": curve["at"], "mean_confidence": float(confidence.mean())}
        print(name, found[name])
    write_json(out / "shift.json", {"config": asdict(config), **found})


def main(argv: Sequence[str] | None = None) -> int:
    """Compare them; return the exit status."""
    return run(study, __doc__, argv, ("bundle", "classifier", "trees"), out="runs/c2t")


if __name__ == "__main__":
    start(main)
