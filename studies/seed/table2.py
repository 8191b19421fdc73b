"""Table 2 of the SEED paper: thought generator and state evaluator apart, with and without tree attention.

    python -m studies.seed.table2

Whole trees of GSM8K, pair B, verifier `one`. Without tree attention drafts are chains, one candidate at each
of four positions; with it they are trees of the same depth with 4, 2, 1 and 1 candidates. For each component:
α, the share of judged positions at which a candidate was accepted, and seconds per new token of serial AR
divided by SEED's, of this component's calls alone. The closing generation counts as a thought.
"""

from argparse import Namespace
from collections.abc import Sequence

from studies import arguments
from studies.seed.comparison import interval, of, seconds_per_token, total
from studies.seed.methods import (
    EVALUATOR,
    GENERATOR,
    SERIAL_AR,
    Grown,
    Method,
    collect,
    drawn,
    scheduled,
    serial,
)
from studies.seed.pairs import DEFAULTS, load_pair

CHAIN, TREE = (1, 1, 1, 1), (4, 2, 1, 1)
WITHOUT, WITH = f"SEED {CHAIN}", f"SEED {TREE}"
TASK, PROBLEMS, REPEATS = "gsm8k", 8, 3
COMPONENTS = (GENERATOR, EVALUATOR)


def methods(task: str = TASK) -> list[Method]:
    """Return the methods of the table; the components of serial AR are what speedups refer to. Short answers
    get drafts, too: the acceptance of the evaluator's is asked for."""
    trees = ((WITHOUT, CHAIN), (WITH, TREE))
    return [serial(SERIAL_AR, None), *(scheduled(name, drawn(*k), "one", short=0) for name, k in trees)]


def gain(found: Sequence[Grown], component: str) -> float:
    """Return α with tree attention / α without; 1 where nothing was accepted."""
    parts = [total(of(found, method), component) for method in (WITH, WITHOUT)]
    with_tree, without = (part.granted / max(part.offered, 1) for part in parts)
    return with_tree / without if without else 1.0


def speedup(found: Sequence[Grown], method: str, component: str) -> float:
    """Return a component's speed to serial AR's."""
    base, own = (seconds_per_token(of(found, name), component) for name in (SERIAL_AR, method))
    return base / own


def smaller_gain(found: Sequence[Grown]) -> float:
    """Return the gain of the component that gains less."""
    return min(gain(found, component) for component in COMPONENTS)


def summarize(found: Sequence[Grown]) -> dict:
    """Return both gains, the smaller one with its interval over problems, and the rows of the table."""
    rows = [
        {
            "component": component,
            "tree_attention": method == WITH,
            "alpha": (part := total(of(found, method), component)).granted / max(part.offered, 1),
            "accept_len": (part.tokens - part.calls) / max(part.steps, 1),
            "speedup": speedup(found, method, component),
            "tokens": part.tokens,
        }
        for component in COMPONENTS
        for method in (WITHOUT, WITH)
    ]
    return {
        "value": smaller_gain(found),
        "interval": interval(found, smaller_gain),
        "gains": {component: gain(found, component) for component in COMPONENTS},
        "rows": rows,
    }


def table(found: Sequence[Grown]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| component | tree attention | α | accept_len | speedup | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in summarize(found)["rows"]:
        words = "yes" if row["tree_attention"] else "no"
        numbers = " | ".join(f"{row[key]:.2f}" for key in ("alpha", "accept_len", "speedup"))
        lines.append(f"| {row['component']} | {words} | {numbers} | {row['tokens']} |")
    return "\n".join(lines)


def study(args: Namespace) -> None:
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)
    raw = args.out / f"table2_{pair.name}.jsonl"
    print(table(collect(pair, methods, {TASK: args.limit or PROBLEMS}, REPEATS, raw, args.resume)))


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype", "limit", "resume")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", **DEFAULTS)


if __name__ == "__main__":
    arguments.start(main)
