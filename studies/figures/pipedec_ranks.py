"""The figures of topic `pipedec` from processes: real and paced ranks, and how well both are simulated."""

import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain import SpeculativeDecoder
from drafttrain.data.prompts import read_prompts
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.outlook import KnownText, encoded, known_texts
from drafttrain.pipeline.replay import replay, replay_policy
from drafttrain.pipeline.simulate import Machines, pipedec_jobs, pp_jobs, stpp_jobs, total_seconds
from drafttrain.pipeline.simulate import run as simulated
from drafttrain.run.simulate import read_costs
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies import ROOT, arguments
from studies.figures.machine_setting import in_dtype
from studies.goals import Measured, Run
from studies.pipedec import modes, pacing, tasks, tuning
from studies.pipedec.ratios import Name, ratio
from studies.seed.pairs import load_pair

RECIPE = "recipes/pipeline/smollm2-2.yaml"
REPEATS, NEW_TOKENS, PACED_TOKENS, TUNING_PROMPTS, TUNING_TOKENS = 3, 128, 24, 6, 64
PACED = {  # of paced ranks
    "stages.threads": 1,
    "drafter_rank": "alone",
    "pace.stage_ms": 60,
    "pace.draft_ms": 15,
    "max_new_tokens": PACED_TOKENS,
    "probe": "false",
}
PACED_STAGES, ALL_PROMPTS = (4, 7, 8, 14), 14  # one prompt of each task but with the last
PACED_TREES = "paced.json"  # width, children, layers and tree of paced ranks
SIMULATED = (4, 7, 14)
LATE = 0.01  # share of paced pieces of work that may be late
REAL, BEST_FIRST_RAW, PACED_RAW = "pipedec_real", "pipedec_real_best_first", "pipedec_paced_{}"
COSTS = "costs_{}_{}"  # of the real ranks in a mode, after a repeat


def real(run: Run) -> Measured:
    """Time two ranks of one thread each, all modes in turn, each with what was the fastest on tuning
    prompts. After each repeat they are calibrated, for `sim_error`: a machine's speed changes by the hour."""
    run.check_quiet()
    folder, best, prompts = _tuned_ranks(run, REAL)
    keys = {**shape(best), "tree": best["stpp"]["tree"], "max_new_tokens": NEW_TOKENS}
    cut = {mode: best[mode]["cut"] for mode in modes.MODES}
    repeats = 1 if run.limit else REPEATS
    for repeat in range(1, repeats + 1):
        measured = modes.run_modes(RECIPE, folder / "prompts.jsonl", keys, cut, repeat, folder)
        for mode in modes.MODES:
            calibrated(folder / COSTS.format(mode, repeat), real_keys(best, mode))
    seconds = {mode: modes.per_token(measured["rows"], mode) for mode in modes.MODES}
    notes = {
        "pipedec_vs_stpp": ratio(seconds["stpp"], seconds["pipedec"]),
        "settings": {mode: best[mode] for mode in modes.MODES},
        "tokens_per_second": {mode: rate(own) for mode, own in seconds.items()} | one_process(folder),
        "hit_rate": hit_rate(measured["rows"]),
        "size": {"prompts": tasks.sizes(prompts), "repeats": repeats},
        **agreement(measured),
    }
    return {"pipedec_vs_pp": ratio(seconds["pp"], seconds["pipedec"]) | notes}


def real_best_first(run: Run) -> Measured:
    """Time best-first trees (ours) against plain pipelining on two ranks."""
    run.check_quiet()
    folder, best, prompts = _tuned_ranks(run, BEST_FIRST_RAW)
    own = best["best_first"]
    keys = {key: own[key] for key in ("width", "children", "layers")}
    keys |= {"best_first": "true", "max_new_tokens": NEW_TOKENS}
    cut, wanted = {"pp": best["pp"]["cut"], "pipedec": own["cut"]}, ("pp", "pipedec")
    repeats = 1 if run.limit else REPEATS
    measured = modes.run_modes(RECIPE, folder / "prompts.jsonl", keys, cut, repeats, folder, wanted)
    seconds = {mode: modes.per_token(measured["rows"], mode) for mode in wanted}
    notes = {
        "settings": {"pp": best["pp"], "pipedec": own},
        "tuned_pipedec": best["pipedec"],
        "tokens_per_second": {mode: rate(own) for mode, own in seconds.items()},
        "hit_rate": hit_rate(measured["rows"]),
        "size": {"prompts": tasks.sizes(prompts), "repeats": repeats},
        **agreement(measured),
    }
    return {"pipedec_best_first_vs_pp": ratio(seconds["pp"], seconds["pipedec"]) | notes}


def _tuned_ranks(run: Run, name: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the folder of a figure of two ranks, what was the fastest on tuning prompts, and the prompts."""
    folder, prompts = run.folder(name), tasks.read_tasks(run.more_prompts, run.prompts(1, tasks.PROMPTS))
    if not (folder / tuning.RAW).exists():
        start(
            "studies.pipedec.tuning", "--recipe", RECIPE, "--limit", str(TUNING_PROMPTS), "--out", str(folder)
        )
    tasks.write_prompts(prompts, folder / "prompts.jsonl")
    return folder, read_json(folder / tuning.RAW)["best"], prompts


def real_keys(best: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the keys of two real ranks in a mode; every mode has a cut of its own."""
    return {**shape(best), "tree": best["stpp"]["tree"], "stages.blocks": best[mode]["cut"]}


def shape(best: Mapping[str, Any]) -> dict[str, int]:
    """Return width and children that tuning chose."""
    return {key: best["pipedec"][key] for key in ("width", "children")}


def rate(seconds: Mapping[Name, float]) -> float:
    """Return tokens per second over prompts."""
    return len(seconds) / sum(seconds.values())


def hit_rate(rows: Sequence[dict[str, Any]]) -> float:
    """Return the share of tokens in the tree in flight; a text's first and last are not looked for."""
    own = [row for row in rows if row["mode"] == "pipedec"]
    return sum(row["hits"] for row in own) / sum(max(len(row["tokens"]) - 2, 0) for row in own)


def agreement(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return notes that overrule a goal: other texts than PP's, or too many late pieces of work."""
    same, late = modes.same_texts(measured["rows"]), measured["late"]
    problems = [] if same else ["texts differ between modes"]
    problems += [f"{late:.2%} of the paced pieces of work were late"] if late > LATE else []
    return {"late": late, "machine": measured["machine"], "ok": not problems, "why": "; ".join(problems)}


def one_process(folder: Path) -> dict[str, float]:
    """Return tokens per second of one process with all cores over the same prompts: what a machine on which
    the target fits should use instead."""
    decoder = SpeculativeDecoder.from_pretrained(arguments.BUNDLE, dtype="bfloat16", tree="timed")
    prompts = tasks.read_written(folder / "prompts.jsonl", decoder.target.tokenizer)
    ways = {"one process": decoder.autoregressive, "one process, drafted": decoder.generate}
    taken: dict[str, dict[Name, float]] = {name: {} for name in ways}
    for generate in ways.values():  # the first forwards are slow
        generate(next(iter(prompts.values())), 8)
    for prompt, ids in prompts.items():
        for name, generate in ways.items():
            began = time.perf_counter()
            n_tokens = len(generate(ids, NEW_TOKENS).token_ids)
            taken[name][prompt] = (time.perf_counter() - began) / n_tokens
    return {name: rate(seconds) for name, seconds in taken.items()}


def paced(run: Run) -> Measured:
    """Time ranks whose stages hold their device for a declared time, the same in all modes."""
    run.check_quiet()
    found, size = {}, {}
    trees = tuned(run.folder(PACED_RAW.format("trees")) / PACED_TREES, PACED_STAGES, (1,))
    for n in PACED_STAGES:
        limit = run.prompts(1, tasks.PROMPTS) if n == ALL_PROMPTS else 1
        prompts = tasks.read_tasks(run.more_prompts, limit)
        folder = run.folder(PACED_RAW.format(n))
        tasks.write_prompts(prompts, folder / "prompts.jsonl")
        keys = paced_keys(trees, n)
        found[n] = modes.run_modes(RECIPE, folder / "prompts.jsonl", keys, {}, 1, folder)
        size = {"prompts": tasks.sizes(prompts)}
    ratios = {n: against(measured["rows"]) for n, measured in found.items()}
    by_stages = {
        n: {"pp": own["pp"]["value"], "stpp": own["stpp"]["value"], "hit_rate": hit_rate(found[n]["rows"])}
        for n, own in ratios.items()
    }
    notes = {
        "by_stages": by_stages,
        "settings": paced_keys(trees, ALL_PROMPTS),
        "size": size,
        **agreement(found[ALL_PROMPTS]),
    }
    last = ratios[ALL_PROMPTS]
    return {"paced14_vs_pp": last["pp"] | notes, "paced14_vs_stpp": last["stpp"] | notes}


def paced_several(run: Run) -> Measured:
    """Time trees that grow by several layers in a timestep (ours) against static trees, on paced ranks."""
    return {"paced14_layers_vs_stpp": _paced_ours(run, "several", pacing.SEVERAL, best_first=False)}


def paced_best_first(run: Run) -> Measured:
    """Time best-first trees (ours) against static trees, on paced ranks."""
    return {"paced14_best_first_vs_stpp": _paced_ours(run, "best_first", (), best_first=True)}


def _paced_ours(run: Run, name: str, layers: Sequence[int], best_first: bool) -> dict[str, Any]:
    run.check_quiet()
    prompts = tasks.read_tasks(run.more_prompts, run.prompts(1, tasks.PROMPTS))
    folder = run.folder(PACED_RAW.format(name))
    tasks.write_prompts(prompts, folder / "prompts.jsonl")
    trees = tuned(folder / PACED_TREES, (ALL_PROMPTS,), layers, best_first)
    keys = paced_keys(trees, ALL_PROMPTS)
    measured = modes.run_modes(RECIPE, folder / "prompts.jsonl", keys, {}, 1, folder, ("stpp", "pipedec"))
    seconds = {mode: modes.per_token(measured["rows"], mode) for mode in ("stpp", "pipedec")}
    notes = {
        "hit_rate": hit_rate(measured["rows"]),
        "settings": keys,
        "size": {"prompts": tasks.sizes(prompts)},
    }
    return ratio(seconds["stpp"], seconds["pipedec"]) | notes | agreement(measured)


def tuned(
    path: Path, stages: Sequence[int], layers: Sequence[int], best_first: bool = False
) -> dict[str, dict[str, Any]]:
    """Return width, children, layers and static tree by the number of stages, chosen on tuning prompts unless
    the file has them.

    Args:
        layers, best_first: as `pacing.choose` takes them.
    """
    if not path.exists():
        pair = load_pair("B", None, arguments.BUNDLE)
        prompts = [p.token_ids(pair.target.tokenizer) for p in read_prompts(tasks.TUNING, TUNING_PROMPTS)]
        texts = known_texts(
            pair.target, pair.drafter.config.tapped_blocks, prompts, TUNING_TOKENS, SamplingParams()
        )
        pace = PACED["pace.stage_ms"], PACED["pace.draft_ms"]
        write_json(
            path, {n: pacing.choose(pair.drafter, texts, n, *pace, layers, best_first) for n in stages}
        )
    return read_json(path)


def paced_keys(trees: Mapping[str, Mapping[str, Any]], stages: int) -> dict[str, Any]:
    """Return the keys of some number of paced ranks."""
    chosen = {key: trees[str(stages)][key] for key in ("width", "children", "layers", "tree")}
    best_first = str(trees[str(stages)]["best_first"]).lower()
    return {**PACED, **chosen, "best_first": best_first, "stages.ranks": stages}


def against(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the speed of PipeDec over each other mode."""
    own = modes.per_token(rows, "pipedec")
    return {base: ratio(modes.per_token(rows, base), own) for base in ("pp", "stpp")}


# simulated against measured


def sim_error(run: Run) -> Measured:
    """Simulate what was measured, with the costs of the same ranks on tuning prompts and the trees' real
    course; the value is the largest deviation of a mode's seconds per token after the prompt. Those of real
    ranks are simulated with the costs after each repeat; the median counts, as of the repeats themselves.

    Raises:
        UserError: `pipedec_vs_pp` or `paced14_vs_pp` has not been measured here.
    """
    run.check_quiet()
    folder = run.folder("pipedec_sim_error")
    real_folder, *paced_folders = (
        run.folder_of(name) for name in (REAL, *(PACED_RAW.format(n) for n in SIMULATED))
    )
    best = read_json(real_folder / tuning.RAW)["best"]
    runs = {}
    for mode in modes.MODES:
        runs[f"real 2, {mode}"] = real_folder, real_keys(best, mode), (mode,)
    trees = read_json(run.folder_of(PACED_RAW.format("trees")) / PACED_TREES)
    for n, place in zip(SIMULATED, paced_folders):
        runs[f"paced {n}"] = place, paced_keys(trees, n), modes.MODES
    pair, errors = load_pair("B", None, arguments.BUNDLE), {}
    for name, (place, keys, wanted) in runs.items():
        rows, costs = read_json(place / modes.RAW)["rows"], [folder / name.replace(" ", "_")]
        if place == real_folder:
            costs = [place / COSTS.format(*wanted, repeat + 1) for repeat in {row["repeat"] for row in rows}]
        paths = [calibrated(one, keys) for one in costs]
        prompts = tasks.read_written(place / "prompts.jsonl", pair.target.tokenizer)
        rows = [row for row in rows if tuple(row["prompt"].split("/", 1)) in prompts]  # it may have more
        texts = {tuple(row["prompt"].split("/", 1)): row["tokens"] for row in rows}
        if place == real_folder:
            size = {"prompts": dict(Counter(task for task, _ in prompts))}
            size["repeats"] = 1 + max(row["repeat"] for row in rows)
        taps = pair.drafter.config.tapped_blocks
        answers = [texts[one] for one in prompts]
        limit = NEW_TOKENS if place == real_folder else PACED_TOKENS
        known = dict(zip(prompts, encoded(pair.target, taps, prompts.values(), answers, limit)))
        for mode in wanted:
            measured = modes.per_token(rows, mode, "decoding")
            machines = [read_costs(str(path)).machines(mode) for path in paths]
            times = predicted(pair, known, mode, keys, machines, int(keys.get("stages.ranks", 2)))
            expected = sum(times[prompt] for prompt in measured)
            errors[f"{name.split(',')[0]} {mode}"] = expected / sum(measured.values()) - 1
    worst = max(errors.values(), key=abs)
    notes = {"errors": errors, "machine": in_dtype(pair.target), "size": size}
    return {"sim_error": {"value": abs(worst), **notes}}


def calibrated(folder: Path, keys: Mapping[str, Any]) -> Path:
    """Return the file with the costs of these ranks, measured unless it is there."""
    if not (folder / "costs.json").exists():
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        words += ["--limit", "3", "--max_new_tokens", "48", "--out", str(folder)]
        start("drafttrain.run.cli", "pipeline", RECIPE, "--calibrate", *words)
    return folder / "costs.json"


def predicted(
    pair,
    known: Mapping[Name, KnownText],
    mode: str,
    keys: Mapping[str, Any],
    machines: Sequence[Machines],
    stages: int,
) -> dict[Name, float]:
    """Return the simulated seconds per token of each text, the median over descriptions of the machines."""
    found = {}
    for name, text in known.items():
        tokens, own = len(text.answer) - 1, (text.prompt, text.answer, text.tapped)
        if not tokens:
            continue
        if mode == "pp":
            jobs = [pp_jobs(one, tokens) for one in machines]
        elif mode == "stpp":
            rounds = replay_policy(pair.drafter, *own, parse_policy(keys["tree"]))
            jobs = [stpp_jobs(one, [(r.drafted, r.nodes) for r in rounds]) for one in machines]
        else:
            shape = (int(keys.get(key, 1)) for key in ("width", "children", "layers"))
            trace = replay(pair.drafter, *own, stages, *shape, limit=text.limit)
            jobs = [pipedec_jobs(one, trace) for one in machines]
        found[name] = statistics.median(total_seconds(simulated([one])) for one in jobs) / tokens
    return found


def sync(run: Run) -> Measured:
    """Time messages and upkeep at the end of a timestep of two ranks, layers of eight nodes."""
    run.check_quiet()
    keys = {"width": 8, "children": 8}
    path = calibrated(run.folder("pipedec_sync"), keys)
    costs = read_costs(str(path))
    notes = {
        "machine": read_json(path)["machine"],
        "with_own_work_ms": 1e3 * costs.sync,
        "hop_ms": 1e3 * costs.hop[costs.sizes.index(8)],
    }
    return {"sync_ms": {"value": 1e3 * costs.waiting, **notes}}


def start(module: str, *words: str) -> None:
    """Run a module in a process of its own, which starts ranks.

    Raises:
        UserError: it fails.
    """
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, stdout=2)
    if done.returncode:
        raise UserError(f"{module}: must end with 0, got {done.returncode}; see its messages above")
