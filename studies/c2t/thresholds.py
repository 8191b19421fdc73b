"""C2T with one threshold or two, and with fewer children looked at, against PCT (ours).

python -m studies.c2t.thresholds --limit 16
"""

from argparse import Namespace
from collections.abc import Sequence

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.evaluate import try_trees
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.model import weights_hash
from drafttrain.utils.provenance import content_hash
from drafttrain.utils.writing import write_json
from studies.arguments import run, start
from studies.resuming import open_log

TUNING = "data/tuning_prompts.jsonl"
THRESHOLDS = ["pct:width=3,max_depth=8,min_confidence=0.06,threshold=0.16"]  # tuned on these prompts
THRESHOLDS += [f"c2t:beta=0.12,top_k={k}" for k in (15, 8, 6, 4)]
THRESHOLDS += ["c2t:beta=0.04,expand=0.16,top_k=4", "c2t:beta=0.06,expand=0.16,top_k=4"]
THRESHOLDS += ["c2t:beta=0.05,expand=0.22,top_k=4", "c2t:beta=0.09,expand=0.22,top_k=4"]


def study(args: Namespace) -> None:
    """Measure tokens per second of C2T with one threshold and with two, and with fewer children,
    against PCT on prompts of no benchmark."""
    loaded = load_bundle(args.bundle, target=args.target, dtype="bfloat16", classifier=args.classifier)
    task = Task("tuning", spread(read_prompts(args.prompts), args.limit))
    depends = [content_hash(args.bundle), THRESHOLDS, weights_hash(loaded.classifier)]
    log = open_log(args, "thresholds", depends)
    rows = try_trees(loaded, task, THRESHOLDS, log, max_new_tokens=args.new_tokens)
    machine = describe_machine(loaded.target.device, loaded.target.dtype)
    [pct] = [row for row in rows if row["tree"].startswith("pct")]
    for row in rows:
        row["over_pct"] = row["tokens_per_second"] / pct["tokens_per_second"]
        print({name: value if name == "tree" else round(value, 3) for name, value in row.items()})
        row["machine"] = machine
    write_json(args.out / "thresholds.json", rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return the exit status."""
    names = ("bundle", "target", "classifier", "prompts", "limit", "new_tokens", "resume")
    return run(study, __doc__, argv, names, out="runs/c2t", prompts=TUNING)


if __name__ == "__main__":
    start(main)
