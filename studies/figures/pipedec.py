"""The figures of topic `pipedec`: a target cut into stages, with a tree in flight.

Four kinds of truth. Real: two ranks of one thread each. Paced: real ranks whose stages hold their device for
a declared time. Counts: hits and timesteps of trees grown against known texts, the same on any hardware.
Simulated: counts with times that are measured or declared. Prompts are ten of each of the paper's six tasks,
those of WMT14 named by --prompts wmt14=FILE; a larger target and its small LM are named by --pair, the other
pair is SmolLM2 with the committed EDD drafter. Cuts, width, children and static tree of real ranks are chosen
on tuning prompts.

Estimated minutes on 2 cores: `pipedec_vs_pp` 45, `pipedec_best_first_vs_pp` 30, `paced14_vs_pp` 50,
`paced14_layers_vs_stpp` and `paced14_best_first_vs_stpp` 20 each, `sim_error` 10 after `pipedec_vs_pp` and
`paced14_vs_pp`, the pair's counts 60 (`--resume` goes on), `pipeline_mismatches` 40, `top8_accuracy` 30, the
others 1 to 3.
"""

from drafttrain.data.prompts import read_prompts
from drafttrain.run.pipeline import LOST
from drafttrain.target_lm.loading import resolve_target
from drafttrain.utils.writing import write_json
from studies.arguments import BUNDLE, MT_BENCH
from studies.figures.machine_setting import in_dtype
from studies.figures.pipedec_counts import (
    BEST_FIRST_FIGURE,
    HIT_FIGURES,
    SIMULATED_FIGURES,
    best_first_figure,
    hit_figures,
    sampled_figure,
    simulated_figures,
    top8,
)
from studies.figures.pipedec_ranks import (
    RECIPE,
    REPEATS,
    paced,
    paced_best_first,
    paced_several,
    real,
    real_best_first,
    sim_error,
    sync,
)
from studies.goals import Group, Measured, Run, Size
from studies.pipedec import fault, memory, mismatches, tasks, upkeep
from studies.seed.pairs import load_pair

ALL_TASKS = dict.fromkeys((*tasks.FILES, tasks.BY_PATH), tasks.PROMPTS)
MISMATCH_PROMPTS, MISMATCH_TOKENS = 30, 48
GOALS = {
    "sim14_vs_pp": ">= 4.46",
    "sim14_vs_stpp": ">= 2.2",
    "hits_vs_static": ">= 1.0",
    "deep_hits": ">= 0.9",
    BEST_FIRST_FIGURE: ">= 2.2",
}


def update_prune(run: Run) -> Measured:
    """Time a stage and the drafter, which adds a layer, after a hit; the slower of both counts."""
    run.check_quiet()
    pair = load_pair("B", None, BUNDLE)
    found = upkeep.upkeep(pair, resolve_target(pair.target.name))
    notes = {f"{name}_ms": 1e3 * seconds for name, seconds in found.items()}
    slower = max(notes["stage_ms"], notes["drafter_ms"] + notes["growing_ms"])
    return {"update_prune_ms": {"value": slower, **notes, "machine": in_dtype(pair.target)}}


def rank_memory(run: Run) -> Measured:
    """Measure the memory of two ranks over their shares."""
    rows = memory.by_rank(["--recipe", RECIPE], 2)
    largest = max(rows, key=lambda row: row["bytes"])
    machine = {"dtype": largest["dtype"]}
    return {"rank_memory": {"value": largest["bytes"] / largest["share"], "ranks": rows, "machine": machine}}


def pipeline_mismatches(run: Run) -> Measured:
    """Count texts of all modes that are not the whole target's."""
    pair = load_pair("B", None, BUNDLE, dtype="float32")
    chosen = read_prompts(MT_BENCH, run.prompts(1, MISMATCH_PROMPTS))
    prompts = [prompt.token_ids(pair.target.tokenizer) for prompt in chosen]
    rows = mismatches.compare_both(pair, resolve_target(pair.target.name), prompts, MISMATCH_TOKENS)
    write_json(run.folder("pipedec_mismatches") / "mismatches.json", rows)
    notes = {
        "texts": sum(row["texts"] for row in rows),
        "size": {"prompts": {"mt_bench": len(prompts)}},
        "machine": in_dtype(pair.target),
    }
    return {"pipeline_mismatches": {"value": sum(row["differ"] for row in rows), **notes}}


def lost_ranks(run: Run) -> Measured:
    """Time how long the others take to end after the loss of a rank."""
    folder = run.folder("pipedec_fault")
    rows = [fault.lose(RECIPE, lost, how, folder) for how in fault.SIGNALS for lost in range(fault.RANKS)]
    spoken = all(len(row["said"]) == fault.RANKS - 1 and set(row["statuses"]) == {LOST} for row in rows)
    notes = {
        "ok": spoken,
        "why": "a rank did not end in one line",
        "timeout_s": fault.TIMEOUT,
        "rows": rows,
    }
    return {"fault_s": {"value": max(row["seconds"] for row in rows), **notes}}


GROUPS = [
    Group({"update_prune_ms": "<= 2"}, update_prune),
    Group({"rank_memory": "<= 1.15"}, rank_memory),
    Group({"fault_s": f"<= {fault.TIMEOUT + 5}"}, lost_ranks),
    Group({"sync_ms": "<= 1"}, sync),
    Group(
        {"pipeline_mismatches": "== 0"},
        pipeline_mismatches,
        long=True,
        size=Size({"mt_bench": MISMATCH_PROMPTS}),
    ),
    Group({"pipedec_vs_pp": ">= 1.15"}, real, long=True, size=Size(ALL_TASKS, REPEATS)),
    Group({"pipedec_best_first_vs_pp": ">= 1.15"}, real_best_first, long=True, size=Size(ALL_TASKS, REPEATS)),
    Group({"paced14_vs_pp": ">= 2.0", "paced14_vs_stpp": ">= 1.3"}, paced, long=True, size=Size(ALL_TASKS)),
    Group({"paced14_layers_vs_stpp": ">= 1.3"}, paced_several, long=True, size=Size(ALL_TASKS)),
    Group({"paced14_best_first_vs_stpp": ">= 1.3"}, paced_best_first, long=True, size=Size(ALL_TASKS)),
    Group({"sim_error": "<= 0.10"}, sim_error, long=True),
    Group(
        {name: GOALS[name] for name in SIMULATED_FIGURES}, simulated_figures, long=True, size=Size(ALL_TASKS)
    ),
    Group({BEST_FIRST_FIGURE: GOALS[BEST_FIRST_FIGURE]}, best_first_figure, long=True, size=Size(ALL_TASKS)),
    Group({name: GOALS[name] for name in HIT_FIGURES}, hit_figures, long=True, size=Size(ALL_TASKS)),
    Group({"sampling_slowdown": "<= 1.25"}, sampled_figure, long=True, size=Size(ALL_TASKS)),
    Group({"top8_accuracy": ">= 0.95"}, top8, long=True),
]
