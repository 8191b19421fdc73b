"""The C2T paper's analyses, for a drafter and a classifier of your own.

    python -m studies.c2t_analysis heatmaps     probability, acceptance, bias by entropy and rank (Figure 2)
    python -m studies.c2t_analysis surfaces     what the classifier makes of P and H, by depth (Figures 9, 10)
    python -m studies.c2t_analysis sizes        EAGLE-1, EAGLE-2 and C2T at trees of one size (Appendix A)
    python -m studies.c2t_analysis drafting     where drafting spends its time (Appendix E.1)
    python -m studies.c2t_analysis thresholds   one threshold or two, and fewer children, against PCT (ours)
    python -m studies.c2t_analysis shift        fine-tuning against a shift of the threshold (Appendix B.4)
    python -m studies.c2t_analysis transfer     another drafter's classifier, one of few trees (Appendix F)

heatmaps, shift and transfer read trees of `drafttrain dump-trees`. Numbers and pictures go to --out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from drafttrain.bundle import load_bundle
from drafttrain.classifier.config import ClassifierConfig
from drafttrain.classifier.data import VALIDATION, read_rows, split_by_tree
from drafttrain.classifier.dump import read_record
from drafttrain.classifier.metrics import recall_curve
from drafttrain.classifier.model import Classifier
from drafttrain.classifier.train import predict, train_classifier
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.evaluate import try_trees
from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.evaluation.sweep import compare_families, sweep
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.model import weights_hash
from drafttrain.trees import c2t as c2t_module
from drafttrain.trees.c2t import C2tPolicy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, save_figure, write_json
from drafttrain.utils.provenance import content_hash

ROOT = Path(__file__).resolve().parent.parent
MT_BENCH = "data/eval/mt_bench.jsonl"
ENTROPIES = (0, 1, 2, 3, 4, 5, 6, np.inf)  # bounds of the rows of Figure 2, in nats
NEW_TOKENS = 96
BETAS = (0.45, 0.3, 0.18, 0.1, 0.05, 0.025)
FEW = 300  # trees, of as many steps, that a classifier for a new drafter gets
TUNING = "data/tuning_prompts.jsonl"
THRESHOLDS = ["pct:width=3,max_depth=8,min_confidence=0.06,threshold=0.16"]  # tuned on these prompts
THRESHOLDS += [f"c2t:beta=0.12,top_k={k}" for k in (15, 8, 6, 4)]
THRESHOLDS += ["c2t:beta=0.04,expand=0.16,top_k=4", "c2t:beta=0.06,expand=0.16,top_k=4"]
THRESHOLDS += ["c2t:beta=0.05,expand=0.22,top_k=4", "c2t:beta=0.09,expand=0.22,top_k=4"]


def heatmaps(trees: Path, out: Path) -> None:
    """Figure 2 over the root's children, whose parent is always accepted."""
    rows = read_rows(trees, ("p", "H", "rank"))
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
    figure = Figure(figsize=(13, 3.6))
    labels = [f"{low:g}–{high:g}" for low, high in zip(ENTROPIES[:-2], ENTROPIES[1:])] + ["> 6"]
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
    save_figure(figure, out / "heatmaps.png")
    tables = {
        name: [[None if np.isnan(x) else float(x) for x in row] for row in values]
        for name, values in maps.items()
    }
    write_json(out / "heatmaps.json", {"entropy": labels, "nodes": counts.astype(int).tolist(), **tables})
    most_likely = maps["bias"][:, 0]
    for label, bias, n in zip(labels, most_likely, counts[:, 0]):
        if n:
            off = "too sure" if bias > 0 else "too unsure"
            print(f"entropy {label}: the most probable token is {off} by {abs(bias):.3f} ({int(n)} trees)")


def surfaces(model: Classifier, out: Path) -> None:
    """Confidence over joint probability and entropy at depths 1, 3 and 6, and its contours."""
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
        confidence = model.judge(np.stack([features[name] for name in model.features], -1))
        drawn = axis.contourf(p, entropy, confidence, levels=np.linspace(0, 1, 21))
        lines = axis.contour(p, entropy, confidence, levels=[0.05, 0.1, 0.2, 0.5], colors="white")
        axis.clabel(lines)
        axis.set_title(f"depth {depth}")
        axis.set_xlabel("joint probability")
        axis.set_ylabel("entropy")
        figure.colorbar(drawn, ax=axis)
    save_figure(figure, out / "surfaces.png")


def sizes(bundle: str, classifier: str | None, limit: int | None, out: Path) -> None:
    """Appendix A: EAGLE-2 at EAGLE-1's 25 nodes and at 60, and C2T."""
    prompts = spread(read_prompts(MT_BENCH), limit)
    path = out / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "prompt": p.turns[0]}) + "\n" for p in prompts))
    trees = ["eagle1", "eagle2:top_k=10,max_depth=6,total=25", "eagle2:top_k=10,max_depth=6,total=60"]
    trees += [f"c2t:beta={beta}" for beta in (0.2, 0.1, 0.05, 0.03)]
    sweep(
        bundle,
        PromptSet("MT-bench", str(path)),
        trees,
        out / "sizes",
        max_new_tokens=NEW_TOKENS,
        classifier=classifier,
    )


def drafting(bundle: str, classifier: str | None, limit: int | None, out: Path) -> None:
    """Appendix E.1: drafter, entropy, classifier and the rest, in ms per step, for C2T and EAGLE-2."""
    loaded = load_bundle(bundle, dtype="bfloat16", classifier=classifier)
    if loaded.classifier is None:
        raise UserError(f"{bundle}: has no classifier; train one, or name a folder with --classifier")
    ids = [p.token_ids(loaded.target.tokenizer) for p in spread(read_prompts(MT_BENCH), limit)]
    spent = {"entropy": 0.0, "classifier": 0.0}

    def clocked(name: str, function):
        def call(*args):
            started = time.perf_counter()
            found = function(*args)
            spent[name] += time.perf_counter() - started
            return found

        return call

    class Clocked:
        features = loaded.classifier.features
        judge = staticmethod(clocked("classifier", loaded.classifier.judge))

    rows, plain = {}, c2t_module.top_entropy
    c2t_module.top_entropy = clocked("entropy", plain)
    try:
        for name, proposer in (
            ("c2t:beta=0.1", TreeProposer(loaded.drafter, C2tPolicy(Clocked(), 0.1))),
            ("eagle2:top_k=4,max_depth=5,total=12", loaded.proposer("eagle2:top_k=4,max_depth=5,total=12")),
        ):
            decode_all(loaded.target, proposer, [ids[0]], 16)
            spent.update(entropy=0.0, classifier=0.0)
            runs = [decode_all(loaded.target, proposer, [prompt], NEW_TOKENS)[1] for prompt in ids]
            stats = sum(runs[1:], runs[0])
            parts = {"drafter": stats.draft_model_seconds, **spent}
            parts["rest"] = stats.draft_seconds - sum(parts.values())
            parts["verify"] = stats.verify_seconds
            rows[name] = {part: 1000 * seconds / stats.steps for part, seconds in parts.items()}
            rows[name]["verified"] = stats.verify_tokens / stats.steps
            rows[name]["accept_len"] = stats.accept_len
            print(name, {key: round(value, 3) for key, value in rows[name].items()})
    finally:
        c2t_module.top_entropy = plain
    machine = describe_machine(loaded.target.device, loaded.target.dtype)
    write_json(out / "drafting.json", rows)
    write_json(out / "drafting_machine.json", machine)


def thresholds(bundle: str, classifier: str | None, limit: int | None, out: Path) -> None:
    """Tokens per second of C2T with one threshold and with two, and with fewer children looked at, against
    PCT, on prompts of no benchmark."""
    loaded = load_bundle(bundle, dtype="bfloat16", classifier=classifier)
    task = Task("tuning", spread(read_prompts(TUNING), limit))
    depends = [content_hash(bundle), THRESHOLDS, limit, weights_hash(loaded.classifier)]
    log = MeasurementLog(out / "thresholds.jsonl", fingerprint(depends))
    rows = try_trees(loaded, task, THRESHOLDS, log, max_new_tokens=NEW_TOKENS)
    machine = describe_machine(loaded.target.device, loaded.target.dtype)
    [pct] = [row for row in rows if row["tree"].startswith("pct")]
    for row in rows:
        row["over_pct"] = row["tokens_per_second"] / pct["tokens_per_second"]
        print({name: value if name == "tree" else round(value, 3) for name, value in row.items()})
        row["machine"] = machine
    write_json(out / "thresholds.json", rows)


def shift(trees: Path, start: str, out: Path) -> None:
    """Appendix B.4: recall at equal positive rates on these trees, of a classifier that learned elsewhere, of
    the same fine-tuned on a tenth of them, and of one that learned here. Where the first two agree at equal
    rates, fine-tuning has moved the threshold and little else."""
    config = ClassifierConfig(features=Classifier.load(start).features)
    tuned, fresh = out / "tuned", out / "fresh"
    train_classifier(replace(config, share=0.1), trees, tuned, start=start, baselines=False)
    train_classifier(config, trees, fresh, baselines=False)
    _, held_out = split_by_tree(read_rows(trees, config.features), config.seed)
    found = {}
    for name, folder in (("elsewhere", start), ("fine-tuned", tuned), ("here", fresh)):
        confidence = predict(Classifier.load(folder), held_out.x)
        curve = recall_curve(confidence, held_out.accepted)
        found[name] = {"at": curve["at"], "mean_confidence": float(confidence.mean())}
        print(name, found[name])
    write_json(out / "shift.json", {"config": asdict(config), **found})


def transfer(bundle: str, classifier: str, trees: Path, limit: int | None, out: Path) -> None:
    """Appendix F, and a classifier for a new drafter: what C2T verifies on MT-bench at equal accept_len by
    another drafter's classifier, by the same fine-tuned on few trees of this one, by one that learned from
    those alone and by plain joint probability, over one that learned from all trees of this drafter."""
    config = ClassifierConfig(features=Classifier.load(classifier).features)
    teaching = (1 - VALIDATION) * read_record(trees)["trees"]
    few = replace(config, share=min(1.0, FEW / max(teaching, 1)), batch_size=64)
    for name, settings, start in (
        ("here", config, None),
        ("few trees", few, None),
        ("fine-tuned", few, classifier),
    ):
        train_classifier(settings, trees, out / name, start=start, baselines=False)
    path = out / "prompts.jsonl"
    prompts = spread(read_prompts(MT_BENCH), limit)
    path.write_text("".join(json.dumps({"id": p.id, "prompt": p.turns[0]}) + "\n" for p in prompts))
    points = []
    for name, place in (
        ("here", out / "here"),
        ("few trees", out / "few trees"),
        ("fine-tuned", out / "fine-tuned"),
        ("elsewhere", classifier),
        ("joint", None),
    ):
        policies = [f"c2t:beta={beta}" if place else f"joint:threshold={beta}" for beta in BETAS]
        found, _ = sweep(
            bundle,
            PromptSet("MT-bench", str(path)),
            policies,
            out / "sweeps" / name,
            reference=policies[0].partition(":")[0],
            max_new_tokens=NEW_TOKENS,
            classifier=place,
            rows=8,
        )
        points += [replace(point, tree=f"{name}:{point.tree.partition(':')[2]}") for point in found]
    compared = {found.family: asdict(found) for found in compare_families(points, "here")}
    for name, found in compared.items():
        print(f"{name}: {found['mean']:.3f} of the draft tokens that `here` verifies")
    write_json(out / "transfer.json", {"points": [asdict(p) for p in points], "over here": compared})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the analyses; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    choices = ("heatmaps", "surfaces", "sizes", "drafting", "thresholds", "shift", "transfer")
    parser.add_argument("what", choices=choices)
    parser.add_argument("--bundle", default="model_cards/smollm2-135m-edd", metavar="DIR")
    parser.add_argument("--classifier", metavar="DIR", help="default: the bundle's")
    parser.add_argument("--trees", default="runs/trees", metavar="DIR", help="of dump-trees")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts, at equal distances (default: all)")
    parser.add_argument("--out", default="runs/c2t", metavar="DIR")
    args = parser.parse_args(argv)
    out, model = Path(args.out), args.classifier or args.bundle
    out.mkdir(parents=True, exist_ok=True)
    try:
        if args.what == "heatmaps":
            heatmaps(Path(args.trees), out)
        elif args.what == "surfaces":
            surfaces(Classifier.load(model), out)
        elif args.what == "sizes":
            sizes(args.bundle, args.classifier, args.limit, out)
        elif args.what == "drafting":
            drafting(args.bundle, args.classifier, args.limit, out)
        elif args.what == "thresholds":
            thresholds(args.bundle, args.classifier, args.limit, out)
        elif args.what == "transfer":
            transfer(args.bundle, model, Path(args.trees), args.limit, out)
        else:
            shift(Path(args.trees), model, out)
    except UserError as error:
        print(f"c2t_analysis.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
