"""Table 7 of the C2T paper (Appendix F): another drafter's classifier, and one of few trees of this one.

python -m studies.c2t.table7 --bundle DIR --classifier DIR --trees runs/trees
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from drafttrain.classifier.config import ClassifierConfig
from drafttrain.classifier.data import VALIDATION
from drafttrain.classifier.dump import read_record
from drafttrain.classifier.model import Classifier
from drafttrain.classifier.train import train_classifier
from drafttrain.evaluation.sweep import compare_families, sweep
from drafttrain.utils.writing import write_json
from studies.arguments import run, start
from studies.c2t.table4 import prompts_file

BETAS = (0.45, 0.3, 0.18, 0.1, 0.05, 0.025)
FEW = 300  # trees, of as many steps, that a classifier for a new drafter gets


def study(args: Namespace) -> None:
    """Compare classifiers for a new drafter: what C2T verifies on MT-bench at equal accept_len by
    another drafter's classifier, by the same fine-tuned on few trees of this one, by one that learned from
    those alone and by plain joint probability, over one that learned from all trees of this drafter."""
    trees, classifier, out = Path(args.trees), args.classifier or args.bundle, args.out
    config = ClassifierConfig(features=Classifier.load(classifier).features)
    teaching = (1 - VALIDATION) * read_record(trees)["trees"]
    few = replace(config, share=min(1.0, FEW / max(teaching, 1)), batch_size=64)
    for name, settings, begun in (
        ("here", config, None),
        ("few trees", few, None),
        ("fine-tuned", few, classifier),
    ):
        train_classifier(settings, trees, out / name, start=begun, baselines=False)
    prompts, points = prompts_file(args), []
    for name, place in (
        ("here", out / "here"),
        ("few trees", out / "few trees"),
        ("fine-tuned", out / "fine-tuned"),
        ("elsewhere", classifier),
        ("joint", None),
    ):
        policies = [f"c2t:beta={beta}" if place else f"joint:threshold={beta}" for beta in BETAS]
        found, _ = sweep(
            args.bundle,
            prompts,
            policies,
            out / "sweeps" / name,
            reference=policies[0].partition(":")[0],
            max_new_tokens=args.new_tokens,
            classifier=place,
            rows=8,
        )
        points += [replace(point, tree=f"{name}:{point.tree.partition(':')[2]}") for point in found]
    compared = {found.family: asdict(found) for found in compare_families(points, "here")}
    for name, found in compared.items():
        print(f"{name}: {found['mean']:.3f} of the draft tokens that `here` verifies")
    write_json(out / "transfer.json", {"points": [asdict(p) for p in points], "over here": compared})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Table 7; return the exit status."""
    return run(
        study,
        __doc__,
        argv,
        ("bundle", "classifier", "trees", "prompts", "limit", "new_tokens"),
        out="runs/c2t",
    )


if __name__ == "__main__":
    start(main)
