"""The figures of topic `flagship`: what a published drafter is worth to those who download it.

Estimated minutes at full size on 2 cores: `edd_accept_len`, `best_accept_len_chain` and
`best_accept_len_tree` together 30 (nothing is timed), `joined_accept_len_tree` 20, `recipe_reproduces` as
long as the drafter's card says, `generate_mismatches` 40, `generate_vs_plain` and `generate_vs_assisted`
together 45 of a quiet machine, `diagnose_hits` 30.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.data.prompts import Prompt, Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog, drafting, measure, transformers_generate
from drafttrain.evaluation.metrics import (
    TRANSFORMERS,
    Measurement,
    noise,
    ratio,
    ratio_interval,
    ratio_spread,
    tabulate,
)
from drafttrain.evaluation.stock import load_stock
from drafttrain.inference.proposer import Proposer
from drafttrain.kernels.machine import dtype_name
from drafttrain.run.recipe import load_recipe
from drafttrain.run.stages import STAGES
from drafttrain.run.workflow import Workflow
from drafttrain.self_draft.hybrid import HybridProposer
from drafttrain.self_draft.proposer import SelfDraft
from drafttrain.target_lm.stock import load_stock_model
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, git_commit
from studies import generate
from studies.figures.machine_setting import DRAFTER, MT_BENCH, NEW_TOKENS, REPEATS, TUNING, load
from studies.figures.main import accept_len
from studies.goals import FIRST_TURNS, Group, Measured, Run, Size, size_of
from studies.spoiled import SPOILED, diagnosed

TASKS = {
    "mt_bench": (MT_BENCH, 80),
    "gsm8k": ("data/eval/gsm8k_test_80.jsonl", 80),
    "humaneval": ("data/eval/humaneval.jsonl.gz", 164),
}
# plain EDD, and the best variant
DRAFTERS = (str(DRAFTER), "model_cards/smollm2-135m-edd-anchored")
SHIPPED = "model_cards/smollm2-135m-edd-shipped"  # plain EDD that a clone can train; measured beside them
CHAIN = "chain:length=5"
TREES = tuple(f"eagle2:top_k={k},max_depth={depth},total=60" for k, depth in ((10, 6), (8, 8), (6, 10)))
NODES = 60  # of all of them, root excluded
FIRST = 80  # prompts of each task, for accept_len
EDD_RECIPE = "recipes/smollm2-edd.yaml"
LONGEST = 1.02  # accept_len of a drafter that is trained again over the committed one's
EXACT_TOKENS = 48
BATCHES = 1, 4
PROCESSED = 40  # prompts with logits processors
OURS = "drafttrain.generate"
ASSISTED = {  # how `generate` assists itself, chosen on the tuning prompts; there is no smaller SmolLM2
    **{f"prompt lookup, {n}": {"prompt_lookup_num_tokens": n} for n in (3, 5, 10)},
    **{f"early exit at {n}": {"assistant_early_exit": n} for n in (10, 20)},
}


def best_accept_len(run: Run) -> Measured:
    """Measure accept_len on MT-bench of plain EDD, and of the one of two drafters that is the best on the
    tuning prompts, with the other tasks and drafters beside it."""
    folder, found = run.folder("best_accept_len"), {}
    for name in (*DRAFTERS, SHIPPED):
        loaded = load_bundle(name, dtype="bfloat16")
        found[name] = accept_lengths(run, folder / Path(name).name, loaded, TASKS, ["mt_bench"])

    def best(figure: int) -> dict[str, Any]:
        rows = {name: lengths[figure] for name, lengths in found.items()}
        chosen = max(DRAFTERS, key=lambda name: rows[name]["tuning"])
        others = {name: row for name, row in rows.items() if name != chosen}
        return rows[chosen] | {"drafter": chosen, "others": others}

    plain = found[DRAFTERS[0]][0] | {"drafter": DRAFTERS[0], "others": {SHIPPED: found[SHIPPED][0]}}
    return {"edd_accept_len": plain, "best_accept_len_chain": best(0), "best_accept_len_tree": best(1)}


def joined_accept_len(run: Run) -> Measured:
    """Measure accept_len on MT-bench of trees of as many nodes in which the n-gram cache of the drafter's
    bundle drafts as well, likewise of the better one of two drafters."""
    folder, found = run.folder("joined_accept_len"), {}
    for name in DRAFTERS:
        loaded = load_bundle(name, dtype="bfloat16")
        grown = {f"ngram+{tree}": joined(loaded, tree) for tree in TREES}
        place = folder / Path(name).name
        [found[name]] = measured_lengths(run, place, loaded, grown, list(grown), TASKS, ["mt_bench"])
    chosen = max(DRAFTERS, key=lambda name: found[name]["tuning"])
    others = {name: row for name, row in found.items() if name != chosen}
    return {"joined_accept_len_tree": found[chosen] | {"drafter": chosen, "others": others}}


def joined(loaded: Bundle, tree: str) -> HybridProposer:
    """Return the drafter joined with its bundle's n-grams: of the nodes of both the most probable."""
    if loaded.ngrams is None:
        raise UserError(f"{loaded.name}: must have n-grams, got none; make them with drafttrain build-ngrams")
    config = replace(loaded.ngrams.config, budget=NODES, least=0.0, branches=0)
    ngrams = SelfDraft(
        config, loaded.target.vocab_size, loaded.ngrams.special, loaded.ngrams.corpus, loaded.ngrams.odds
    )
    promise = None if loaded.costs is None else loaded.costs.promise
    return HybridProposer(ngrams, loaded.proposer(tree), math.inf, 0.0, NODES, promise)


def reproduces(run: Run) -> Measured:
    """Train plain EDD by its recipe, and compare its accept_len with that of the committed drafter that the
    recipe made."""
    folder = run.folder("recipe_reproduces")
    overrides = ["--output", str(folder / "run"), "--evaluate.prompts", "[]"]
    workflow = Workflow(load_recipe(EDD_RECIPE, overrides), STAGES)
    workflow.run(last="train")
    committed = Path("model_cards") / workflow.recipe.export.name
    bundles = {"trained": workflow.folder("train") / "drafter", "committed": committed}
    rows = {name: accept_len(run, bundle, folder / name) for name, bundle in bundles.items()}
    lengths = {name: row["value"] for name, row in rows.items()}
    value = lengths["trained"] / lengths["committed"]
    missed = {} if value <= LONGEST else {"ok": False, "why": f"above {LONGEST}"}
    return {
        "recipe_reproduces": {
            "value": value,
            "accept_len": lengths,
            "size": rows["trained"]["size"],
            **missed,
        }
    }


def accept_lengths(
    run: Run,
    folder: Path,
    loaded: Bundle,
    tasks: Mapping[str, tuple[str, int]],
    counted: Collection[str],
) -> list[dict[str, Any]]:
    """Return accept_len with chains and with trees of 60 nodes, greedily; nothing is timed.

    The shape of the trees is chosen on tuning prompts; args as for `measured_lengths`.
    """
    proposers = {name: loaded.proposer(name) for name in (CHAIN, *TREES)}
    return measured_lengths(run, folder, loaded, proposers, TREES, tasks, counted)


def measured_lengths(
    run: Run,
    folder: Path,
    loaded: Bundle,
    proposers: Mapping[str, Proposer],
    shapes: Sequence[str],
    tasks: Mapping[str, tuple[str, int]],
    counted: Collection[str],
) -> list[dict[str, Any]]:
    """Return accept_len of each proposer. Of `shapes` only the one with the longest accept_len on the tuning
    prompts is measured; it comes last.

    Args:
        shapes: names of the proposers to choose one from.
        tasks: name -> (file, prompts at full size).
        counted: tasks whose prompts together make the value.
    """
    depends = fingerprint([content_hash(loaded.name), NEW_TOKENS, NODES, list(proposers)])
    grown = {name: drafting(loaded.target, proposer) for name, proposer in proposers.items()}
    tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=2, full=12)))
    log = MeasurementLog(folder / "tuning.jsonl", depends)
    tried = tabulate(measure(loaded.target, grown, tuning, log, NEW_TOKENS))
    tree = max(shapes, key=lambda name: tried[name].accept_len)
    counting = [*(name for name in proposers if name not in shapes), tree]
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([depends, tree]))
    measured: list[Measurement] = []
    for name, (path, _) in tasks.items():
        task = Task(name, spread(read_prompts(path), run.prompts(quick=2, full=FIRST)))
        methods = {name: grown[name] for name in counting}
        measured += measure(loaded.target, methods, task, log, NEW_TOKENS)

    def length(method: str) -> dict[str, Any]:
        rows = {name: tabulate([m for m in measured if m.task == name])[method] for name in tasks}
        first = tabulate([m for m in measured if m.task in counted])[method]
        return {
            "value": first.accept_len,
            "interval": first.accept_len_interval,
            "tasks": {name: row.accept_len for name, row in rows.items()},
            "intervals": {name: row.accept_len_interval for name, row in rows.items()},
            "tree": method,
            "tuning": tried[method].accept_len,
            "repetition": first.repetition,
            "without_repeats": first.accept_len_nonrepeated,
            "acceptance_by_depth": first.acceptance_by_depth,
            "size": size_of(measured),
        }

    return [length(name) for name in counting]


def generate_mismatches(run: Run) -> Measured:
    """Compare texts of `generate` with and without drafts: greedy in fp32, and sampled by a tiny model."""
    folder, target = run.folder("generate_texts"), load_bundle(DRAFTER, dtype="float32").target
    model = load_stock_model(target)
    chosen = {
        name: spread(read_prompts(path), run.prompts(quick=2, full=full))
        for name, (path, full) in TASKS.items()
    }
    cases: dict[str, tuple[list[Prompt], int, bool]] = {
        f"{name}, batch {size}": (prompts, size, False)
        for name, prompts in chosen.items()
        for size in BATCHES
    }
    some = spread(chosen["mt_bench"], run.prompts(quick=2, full=PROCESSED))
    cases["mt_bench, logits processors"] = (some, 1, True)
    depends = fingerprint([content_hash(DRAFTER), git_commit(), EXACT_TOKENS, run.limit, run.quick])
    cells = generate.differing(model, target, DRAFTER, cases, EXACT_TOKENS, folder / f"{depends}.json")
    is_same = generate.distribution_holds()
    return {
        "generate_mismatches": {
            "value": sum(len(cell["differing"]) for cell in cells.values()) + (not is_same),
            "texts": cells,
            "distribution_holds": is_same,
            "max_new_tokens": EXACT_TOKENS,
            "size": {"prompts": {name: len(prompts) for name, prompts in chosen.items()}},
        }
    }


def generate_speed(run: Run) -> Measured:
    """Decode with drafts, plainly and assisted, all by `generate` of one model, interleaved."""
    run.check_quiet()
    folder, target = run.folder("generate_speed"), load().target
    prompts = spread(read_prompts(MT_BENCH), run.prompts(quick=4, full=None))
    stock = load_stock(target, True, prompts[0].token_ids(target.tokenizer), folder)
    tries = {name: transformers_generate(target, stock.model, **how) for name, how in ASSISTED.items()}
    depends = [content_hash(DRAFTER), git_commit(), stock.dtype]
    tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=2, full=6)))
    log = MeasurementLog(folder / "tuning.jsonl", fingerprint(depends))
    speeds = {
        name: row.tokens_per_second
        for name, row in tabulate(measure(target, tries, tuning, log, NEW_TOKENS)).items()
    }
    best = max(speeds, key=speeds.__getitem__)
    methods = {
        TRANSFORMERS: transformers_generate(target, stock.model),
        best: tries[best],
        OURS: transformers_generate(target, stock.model, **generate.ours(DRAFTER)),
    }
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([depends, best]))
    task = Task("mt_bench", prompts)
    measured = measure(target, methods, task, log, NEW_TOKENS, 1 if run.quick else REPEATS)
    rows = tabulate(measured)
    notes = {
        "assisted": best,
        "tuning_tokens_per_second": speeds,
        "tokens_per_second": {name: row.tokens_per_second for name, row in rows.items()},
        "machine": {"dtype": dtype_name(stock.model.dtype)},
        "size": size_of(measured),
    }

    def over(base: str) -> dict:
        value, repeats = ratio(measured, base, OURS), ratio_spread(measured, base, OURS)
        flags = [*rows[OURS].flags, *noise(repeats, value)]
        return {
            "value": value,
            "interval": ratio_interval(measured, base, OURS),
            "repeats": repeats,
            **({"flags": flags} if flags else {}),
            **notes,
        }

    return {"generate_vs_plain": over(TRANSFORMERS), "generate_vs_assisted": over(best)}


def diagnose_hits(run: Run) -> Measured:
    """Count drafters spoiled on purpose whose cause the diagnosis names among the first three changes."""
    rows = diagnosed(DRAFTER, run.folder("spoiled", limit=run.limit), run.limit)
    size = {"prompts": {"tuning": min(row["prompts"] for row in rows)}}
    return {"diagnose_hits": {"value": sum(row["hit"] for row in rows), "drafters": rows, "size": size}}


GROUPS = [
    Group(
        {"edd_accept_len": ">= 2.3", "best_accept_len_chain": ">= 2.6", "best_accept_len_tree": ">= 3.4"},
        best_accept_len,
        size=Size(dict.fromkeys(TASKS, FIRST)),
    ),
    Group(
        {"joined_accept_len_tree": ">= 3.4"},
        joined_accept_len,
        size=Size(dict.fromkeys(TASKS, FIRST)),
    ),
    Group({"recipe_reproduces": ">= 0.98"}, reproduces, long=True, size=Size(FIRST_TURNS)),
    Group(
        {"generate_mismatches": "== 0"},
        generate_mismatches,
        size=Size({name: full for name, (_, full) in TASKS.items()}),
    ),
    Group(
        {"generate_vs_plain": ">= 1.5", "generate_vs_assisted": ">= 1.2"},
        generate_speed,
        size=Size(FIRST_TURNS, REPEATS),
    ),
    Group({"diagnose_hits": f">= {len(SPOILED)}"}, diagnose_hits, long=True, size=Size({"tuning": 40})),
]
