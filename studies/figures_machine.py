"""What the machine lets decoding, training and the quickstart reach, natively and as if it had AVX2 alone.

Each group runs in a process of its own, for the second column with torch, oneDNN, our kernels and llama.cpp
limited to AVX2. Estimated minutes at full size on 2 cores, natively and with AVX2: `limit_share` 1 and 1;
speed (`ar_vs_transformers` and what follows it) 17 and 25; `drafted_equals_plain` 15 and 20;
`auto_vs_best_dtype` 4 and 6; training 2, with AVX2 only; `startup_s` 1; `quick_calibration_s` 4; the
quickstart 24 and 25; `one_core` 11.
"""

import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Prompt, Task, read_prompts, spread
from drafttrain.evaluation.measure import (
    MeasurementLog,
    autoregressive,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.metrics import (
    AUTOREGRESSIVE,
    CONTENDED,
    TRANSFORMERS,
    Measurement,
    MethodRun,
    cpu_contention,
    ratio,
    ratio_interval,
    ratio_spread,
    tabulate,
)
from drafttrain.evaluation.stock import load_stock
from drafttrain.hidden_states.collect import collect_states
from drafttrain.hidden_states.store import HiddenStateStore
from drafttrain.inference.acceptance import AcceptMatching, accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.inference.sampling import SamplingParams
from drafttrain.kernels.machine import describe_machine
from drafttrain.run.calibrate import calibrate
from drafttrain.run.recipe import load_recipe
from drafttrain.run.speeds import measure_speeds
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.loading import choose_dtype, load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.packing import PackedRows
from drafttrain.training.speed import train_some
from drafttrain.training.train import start_drafter
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json, write_json
from drafttrain.utils.machine import OtherLoad, dtype_name
from drafttrain.utils.provenance import content_hash, git_commit, versions
from studies import llamacpp
from studies import machine_limits as limits
from studies.calibrations import quick_against_full
from studies.goals import FIRST_TURNS, Group, Measured, Run, Size, run_and_watch, size_of
from studies.policies import tune

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
DRAFTER = Path("model_cards/smollm2-135m-edd")
RECIPE = "recipes/quickstart.yaml"
TUNING = "data/tuning_prompts.jsonl"
MT_BENCH = "data/eval/mt_bench.jsonl"
TEXTS = {  # that drafting must not change, and how many of each
    "mt_bench": (MT_BENCH, 80),
    "gsm8k": ("data/eval/gsm8k_test_80.jsonl", 40),
    "humaneval": ("data/eval/humaneval.jsonl.gz", 40),
}
NEW_TOKENS, EXACT_TOKENS = 96, 48
REPEATS = 3
TREES = {  # what may be the fastest, chosen on the tuning prompts
    "timed": ["timed:width=3", "timed:width=4"],
    "pct": ["pct:width=3,max_depth=6,min_confidence=0.05"],
    "eagle2": ["eagle2:top_k=3,max_depth=4,total=8"],
    "ngram": ["ngram", "ngram+timed:width=3"],
}
# Tried only after best_vs_ar had missed its goal (1.40), so these never decide a figure: they are reported
# beside it.
LATER_TREES = {
    "pct-tuned": [
        "pct:width=3,max_depth=10,min_confidence=0.05,threshold=0.2",
        "pct:width=2,max_depth=8,min_confidence=0.08,threshold=0.25",
    ],
}
DRAFTED = {  # whose texts are compared with plain ones
    "chain": "chain:length=4",
    "eagle2": "eagle2:top_k=4,max_depth=5,total=12",
    "pct": "pct:width=3,max_depth=6,min_confidence=0.05",
    "timed": "timed:width=3",
    "c2t": "c2t",
    "ngram": "ngram",
}
SAMPLED = SamplingParams(temperature=1.0)
BLOCK = 4  # prompts that we decode, and llama.cpp right after
RIVAL = "llama.cpp f16"
SPEED_ROUNDS = 3  # of each dtype
ONE_CORE_MINUTES = 10


# columns


def column(part: str, avx2: bool = False) -> Callable[[Run], Measured]:
    """Return what measures a part's figures in a process of its own, under their names in one column."""

    def run_column(run: Run) -> Measured:
        suffix = "_avx2" if avx2 else ""
        folder = run.folder(f"machine_{part}{suffix}")
        found = in_process_of_its_own(part, run, folder, AVX2 if avx2 else {})
        return {f"{name}{suffix}": figure for name, figure in found.items()}

    return run_column


def in_process_of_its_own(part: str, run: Run, folder: Path, environment: Mapping[str, str]) -> Measured:
    """Measure a part in another process; a finished one of a resumed run is not measured again.

    Raises:
        RuntimeError: it failed; its messages are on standard error.
    """
    out = folder / "figures.json"
    asked = {"limit": run.limit, "quick": run.quick}
    if run.resume and out.exists():
        done = read_json(out)
        if done["asked"] == asked and all("error" not in one for one in done["figures"].values()):
            return done["figures"]
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", __spec__.name, part, str(folder), json.dumps(asdict(run))]
    status = subprocess.run(command, env={**os.environ, **environment}, stdout=2).returncode
    if status:
        raise RuntimeError(f"{part} ended with {status}; see the messages above")
    return read_json(out)["figures"]


def measure_part(part: str, folder: Path, run: Run) -> None:
    """Measure a part in this process and write its figures, each with the machine they hold for."""
    load = OtherLoad()
    try:
        found = PARTS[part](run, folder)
    except UserError as error:
        found = {name: {"value": None, "error": str(error)} for name in FIGURES[part]}
    machine = {**describe_machine(CPU), "load": load.lap()}
    for figure in found.values():
        figure["machine"] = {**machine, **figure.get("machine", {})}
    asked = {"limit": run.limit, "quick": run.quick}
    write_json(folder / "figures.json", {"asked": asked, "figures": found})


def load(bundle: Path = DRAFTER) -> Bundle:
    """A bundle in the mode that users get without options."""
    return load_bundle(bundle, dtype="auto")


def in_dtype(target: FrozenTarget) -> dict[str, str]:
    """The dtype of what was measured, for the record of the machine."""
    return {"dtype": dtype_name(target.dtype)}


# limits of the machine


def limit_share(run: Run, folder: Path) -> Measured:
    """Forwards of 1, 5 and 8 tokens against what reading and multiplying take at least."""
    run.check_quiet()
    target = load().target
    read, dtype = limits.streaming_rate(), limits.native_arithmetic()
    products = limits.arithmetic_rate(dtype)
    seconds: dict[int, list[float]] = {1: [], 5: [], 8: []}
    for _ in range(REPEATS):  # by turns, so that a machine that slows down slows all of them
        for n, times in seconds.items():
            times += limits.forward_seconds(target, n)
    again = limits.streaming_rate()
    rates = {name: max(read[name], again[name]) for name in read}
    weights = limits.weights_read(target)
    shares = limits.limit_shares(weights, max(rates.values()), products, seconds)
    by_turns = limits.interleaved_shares(target, weights, products, list(seconds))
    write_json(folder / "raw.json", {"seconds": seconds, "streaming": [read, again], "products": products})
    return {
        "limit_share": {
            "value": min(one["share"] for one in shares.values()),
            "tokens": {str(n): one for n, one in shares.items()},
            "by_turns": {str(n): share for n, share in by_turns.items()},
            "weights": weights,
            "gigabytes_per_second": {name: rate / 1e9 for name, rate in rates.items()},
            "gigaproducts_per_second": products / 1e9,
            "products_in": dtype_name(dtype),
            "context": limits.CONTEXT,
            "machine": in_dtype(target),
        }
    }


# speed


def speed(run: Run, folder: Path) -> Measured:
    """Plain and drafted decoding, `generate` of transformers and llama.cpp over the same prompts, greedy."""
    run.check_quiet()
    loaded, quick = load(), run.quick
    target = loaded.target
    depends = [content_hash(DRAFTER), git_commit(), versions(), describe_machine(CPU, target.dtype)]
    tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=2, full=6)))
    log = MeasurementLog(folder / "tuning.jsonl", fingerprint(depends))
    chosen, speeds = tune(loaded, tuning, log, NEW_TOKENS, TREES | LATER_TREES)
    best = max((chosen[name] for name in TREES), key=speeds.__getitem__)
    later = max((chosen[name] for name in LATER_TREES), key=speeds.__getitem__)
    prompts = spread(read_prompts(MT_BENCH), run.prompts(quick=4, full=None))
    stock = load_stock(target, True, prompts[0].token_ids(target.tokenizer), folder)
    methods = {
        AUTOREGRESSIVE: autoregressive(target),
        TRANSFORMERS: transformers_generate(target, model=stock.model),
        best: drafting(target, loaded.proposer(best)),
        later: drafting(target, loaded.proposer(later)),
    }
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([depends, best, later, stock.dtype]))
    repeats = 1 if quick else REPEATS
    limited = os.environ.get("ATEN_CPU_CAPABILITY") == AVX2["ATEN_CPU_CAPABILITY"]
    rival, missing = None, None
    try:
        rival = Rival(llamacpp.install(avx2=limited), llamacpp.models(), target, folder / "llamacpp.json")
    except UserError as error:
        missing = str(error)
        print(f"without llama.cpp: {missing}", file=sys.stderr)
    measured: list[Measurement] = []
    for first in range(0, len(prompts), BLOCK):
        block = Task("mt_bench", prompts[first : first + BLOCK])
        part = measure(target, methods, block, log, NEW_TOKENS, repeats)
        measured += part if rival is None else rival.beside(part, block.prompts)
    notes = {"transformers_dtype": stock.dtype, "transformers_tokens_per_second": stock.tokens_per_second}
    if rival is not None:
        q8_0 = rival.beside(measured, spread(prompts, 20), llamacpp.Q8_0, 1)
        notes |= {"llamacpp": rival.described, "q8_0": against_q8_0(q8_0, best)}
    notes["tried_later"] = {
        "tree": later,
        "vs_ar": ratio(measured, AUTOREGRESSIVE, later),
        "interval": ratio_interval(measured, AUTOREGRESSIVE, later),
    }
    found = speed_figures(measured, best, missing, {**notes, "machine": in_dtype(target)})
    write_json(folder / "speed.json", {"tree": best, "speeds": speeds, "figures": found})
    return found


class Rival:
    """llama.cpp, started for some prompts at a time, so that our own runs have the machine for themselves.

    Args:
        install: folder of `llamacpp.install`.
        models: GGUF files by kind.
        path: file of what has been measured, which is not measured again.
    """

    def __init__(self, install: Path, models: dict[str, Path], target: FrozenTarget, path: Path):
        self.install, self.models, self.target, self.path = install, models, target, path
        self.known: dict[str, Any] = read_json(path) if path.exists() else {}
        self.described: dict[str, Any] = {}

    def beside(
        self,
        measured: Sequence[Measurement],
        prompts: Sequence[Prompt],
        kind: str = llamacpp.F16,
        repeats: int | None = None,
    ) -> list[Measurement]:
        """Return the measurements of these prompts with llama.cpp among their methods.

        Args:
            repeats: take the first ones of the measurements only.
        """
        ids = {prompt.id: prompt.token_ids(self.target.tokenizer) for prompt in prompts}
        chosen = [one for one in measured if one.prompt in ids and (repeats is None or one.repeat < repeats)]
        name, threads = f"llama.cpp {kind}", torch.get_num_threads()
        keys = {f"{kind} {one.prompt} {one.repeat}": one for one in chosen}
        if missing := [key for key in keys if key not in self.known]:
            load = OtherLoad()
            stop = self.target.eos_token_ids
            with llamacpp.running(self.install, self.models[kind], stop, threads) as running:
                running.decode(ids[keys[missing[0]].prompt], 8)  # the first forwards of a process are slow
                for key in missing:
                    self.known[key] = asdict(running.decode(ids[keys[key].prompt], NEW_TOKENS))
                share = running.forward_seconds / running.seconds
                self.known["described"] = {**running.described, "forward_share": share}
            taken = load.lap()  # its own time counts as ours once it has ended
            for key in missing:
                self.known[key]["cpu_contention"] = taken
            write_json(self.path, self.known)
        self.described = self.known["described"]
        return [self._with(one, name, self.known[key]) for key, one in keys.items()]

    @staticmethod
    def _with(one: Measurement, name: str, found: dict[str, Any]) -> Measurement:
        runs = {**one.runs, name: MethodRun(found["seconds"], found["token_ids"])}
        loads = [load for load in (one.cpu_contention, found["cpu_contention"]) if load is not None]
        return replace(one, runs=runs, cpu_contention=max(loads, default=None))


def against_q8_0(measured: Sequence[Measurement], best: str) -> dict[str, Any]:
    """llama.cpp's q8_0, whose weights have half the bytes, on some prompts."""
    name = f"llama.cpp {llamacpp.Q8_0}"
    return {
        "prompts": len(measured),
        "tokens_per_second": tabulate(measured)[name].tokens_per_second,
        "ar_vs_q8_0": ratio(measured, name, AUTOREGRESSIVE),
        "best_vs_q8_0": ratio(measured, name, best),
    }


def speed_figures(
    measured: Sequence[Measurement], best: str, missing: str | None, notes: dict[str, Any]
) -> Measured:
    """The figures of `speed` from its measurements.

    Args:
        missing: why llama.cpp is not among the methods.
    """
    rows = tabulate(measured)
    common = {
        "tree": best,
        "tokens_per_second": {name: row.tokens_per_second for name, row in rows.items()},
        "identical": {name: row.identical for name, row in rows.items()},
        "accept_len": rows[best].accept_len,
        "size": size_of(measured),
        **notes,
    }
    busy = cpu_contention(measured) or 0.0

    def against(base: str, method: str) -> dict[str, Any]:
        flags = [*rows[method].flags]
        if not flags and busy > CONTENDED:
            flags.append(f"other processes took {busy:.1f} cores meanwhile")
        return {
            "value": ratio(measured, base, method),
            "interval": ratio_interval(measured, base, method),
            "repeats": ratio_spread(measured, base, method),
            **({"flags": flags} if flags else {}),
            **common,
        }

    found = {
        "ar_vs_transformers": against(TRANSFORMERS, AUTOREGRESSIVE),
        "best_vs_ar": against(AUTOREGRESSIVE, best),
    }
    for name, method in (("ar_vs_llamacpp_f16", AUTOREGRESSIVE), ("best_vs_llamacpp_f16", best)):
        found[name] = {"value": None, "skipped": missing} if missing else against(RIVAL, method)
    return found


# exactness


def drafted_equals_plain(run: Run, folder: Path) -> Measured:
    """Texts decoded with drafts, alone and four at once, greedy and seeded, against plain ones alone."""
    loaded = load()
    tasks = {
        name: spread(read_prompts(path), run.prompts(quick=3, full=full))
        for name, (path, full) in TEXTS.items()
    }
    proposers = {name: loaded.proposer(tree) for name, tree in DRAFTED.items()}
    tokens = 24 if run.quick else EXACT_TOKENS
    counts = {name: len(prompts) for name, prompts in tasks.items()}
    mode = describe_machine(CPU, loaded.target.dtype)
    depends = fingerprint([content_hash(DRAFTER), git_commit(), DRAFTED, tokens, counts, mode])
    cells = compare_texts(loaded.target, proposers, tasks, tokens, folder / f"{depends}.json")
    judged = sum(cell["texts"] for cell in cells.values())
    differing = {name: cell["differing"] for name, cell in cells.items() if cell["differing"]}
    return {
        "drafted_equals_plain": {
            "value": 1 - sum(map(len, differing.values())) / judged,
            "texts": judged,
            "differing": differing,
            "trees": DRAFTED,
            "max_new_tokens": tokens,
            "size": {"prompts": counts},
            "machine": in_dtype(loaded.target),
        }
    }


def compare_texts(
    target: FrozenTarget,
    proposers: dict[str, Proposer],
    tasks: dict[str, list[Prompt]],
    max_new_tokens: int,
    path: Path,
) -> dict[str, dict[str, Any]]:
    """Decode every task with every proposer; what the file has is not decoded again.

    Returns:
        by "task, policy, batch, greedy or seeded": `texts`, and ids of the `differing` prompts.
    """
    cells: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}
    for task, prompts in tasks.items():
        ids = [prompt.token_ids(target.tokenizer) for prompt in prompts]
        for mode, sampled in (("greedy", False), ("seeded", True)):
            names = {
                f"{task}, {policy}, batch {size}, {mode}": (policy, size)
                for policy in proposers
                for size in (1, 4)
            }
            left = {name: cell for name, cell in names.items() if name not in cells}
            if not left:
                continue

            def decode(proposer: Proposer, size: int, ids=ids, sampled=sampled) -> list[list[int]]:
                rule = accept_greedy
                if sampled:
                    rule = AcceptMatching([replace(SAMPLED, seed=number) for number in range(len(ids))])
                return decode_all(target, proposer, ids, max_new_tokens, accept=rule, max_rows=size)[0]

            plain = decode(NoProposer(), 1)
            for name, (policy, size) in left.items():
                drafted = decode(proposers[policy], size)
                pairs = zip(prompts, plain, drafted, strict=True)
                differing = [prompt.id for prompt, one, other in pairs if one != other]
                cells[name] = {"texts": len(prompts), "differing": differing}
                write_json(path, cells)
    return cells


# dtype and training


def auto_vs_best_dtype(run: Run, folder: Path) -> Measured:
    """Speeds in fp32 and in bf16, by turns, and what share of the better one `auto` has by its choice."""
    run.check_quiet()
    model = load_recipe(RECIPE).target.model
    rounds: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
    for _ in range(1 if run.quick else SPEED_ROUNDS):
        for dtype, found in rounds.items():
            words = ["--target.dtype", dtype, "--training.bf16", json.dumps(dtype == "bfloat16")]
            found.append(asdict(measure_speeds(load_recipe(RECIPE, words), model)))
    write_json(folder / "rounds.json", rounds)
    chosen = {work: dtype_name(choose_dtype(model, "auto", "cpu", work)) for work in ("decoding", "products")}
    size = {"repeats": len(rounds["float32"])}
    return {"auto_vs_best_dtype": {**dtype_figure(rounds, chosen), "size": size}}


def dtype_figure(rounds: dict[str, list[dict[str, float]]], chosen: dict[str, str]) -> dict[str, Any]:
    """The worst share, over kinds of work, of the chosen dtype's median speed in that of the faster one.

    Args:
        rounds: speeds of each round, by dtype.
        chosen: dtype by `work` of `resolve_dtype`.
    """
    kinds = {"decode": "decoding", "train": "products", "collect": "products", "generate": "products"}
    works = {}
    for name, work in kinds.items():
        rates = {dtype: statistics.median(one[name] for one in found) for dtype, found in rounds.items()}
        share = rates[chosen[work]] / max(rates.values())
        works[name] = {"share": share, "auto": chosen[work], "tokens_per_second": rates}
    return {"value": min(work["share"] for work in works.values()), "works": works}


def training(run: Run, folder: Path) -> Measured:
    """Training over stored states against the limit that fp32 products set to it."""
    run.check_quiet()
    recipe = load_recipe(RECIPE)
    config = replace(recipe.training, max_minutes=None, gradient_accumulation_steps=1)
    target = load_target(recipe.target.model)
    documents = random_documents(target, config.rows_per_batch * 4, config.row_length)
    drafter = start_drafter(config, recipe.drafter, target, documents)
    states = folder / "states"
    if not states.exists():
        collect_states(CollectConfig(mode="offline"), target, DatasetDict(train=documents), states)
    store = HiddenStateStore.open(states / "train", target_info(target), documents)
    rows = PackedRows(documents, config.row_length, 0, store)

    def train(steps: int) -> float:
        return train_some(config, drafter, target, rows, steps, 0, folder)

    rates = [train(2) for _ in range(1 if run.quick else REPEATS)]
    per_token = limits.operations(lambda: train(1)) / (2 * config.rows_per_batch * config.row_length)
    shutil.rmtree(states)
    limit = 2 * limits.arithmetic_rate(torch.float32) / per_token
    return {
        "train_tokens_per_s": {
            "value": statistics.median(rates) / limit,
            "tokens_per_second": rates,
            "limit_tokens_per_second": limit,
            "gigaflop_per_token": per_token / 1e9,
            "size": {"repeats": len(rates)},
            "machine": in_dtype(target),
        }
    }


def random_documents(target: FrozenTarget, n: int, length: int) -> Dataset:
    """Documents of random tokens, all of them trained on: whole rows without padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (n, length), generator=generator).tolist()
    columns = {"id": [str(i) for i in range(n)], "input_ids": ids, "loss_mask": [[1] * length] * n}
    return Dataset.from_dict(columns)


# start and calibration


def startup(run: Run, folder: Path) -> Measured:
    """From the command to its first token, and to its help; medians, after one that warms the disk."""
    run.check_quiet()
    words = [sys.executable, "-m", "drafttrain.run.cli", "generate"]
    answer = [*words, "--bundle", str(DRAFTER), "--prompt", "Why is the sky blue?", "--max-new-tokens", "8"]
    commands = {"help": [*words, "--help"], "first_token": answer}
    repeats = 1 if run.quick else 5
    seconds = {
        name: [command_seconds(command) for _ in range(1 + repeats)][1:] for name, command in commands.items()
    }
    help_s = statistics.median(total for _, total in seconds["help"])
    token_s = statistics.median(first for first, _ in seconds["first_token"])
    return {
        "startup_s": {
            "value": token_s,
            "help_s": help_s,
            "seconds": seconds,
            "ok": help_s <= 1.0,
            "why": f"the help takes {help_s:.2f} s, more than 1.0",
            "size": {"repeats": repeats},
        }
    }


def command_seconds(command: Sequence[str]) -> tuple[float, float]:
    """Seconds until a command writes the first byte to standard output, and until it ends.

    Raises:
        UserError: it fails, or writes nothing.
    """
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        output = process.stdout.read(1)
        first = time.perf_counter() - started
        output += process.stdout.read()
    if process.returncode or not output:
        raise UserError(f"{' '.join(command[1:4])}: must print something, got status {process.returncode}")
    return first, time.perf_counter() - started


def quick_calibration(run: Run, folder: Path) -> Measured:
    """The short calibration's seconds, and `timed` by it against `timed` by a full one."""
    run.check_quiet()
    prompts = PromptSet("tuning", TUNING, 8 if run.quick else 24)
    config = CalibrateConfig(prompts=prompts, rounds=5 if run.quick else 15, busy=run.busy)
    full = calibrate(config, DRAFTER, folder / "full", dtype="auto")
    loaded, n = load(), run.prompts(quick=4, full=20)
    task = Task("mt_bench", spread(read_prompts(MT_BENCH), n))
    repeats = 1 if run.quick else REPEATS
    found = quick_against_full(loaded, full, task, folder, max_new_tokens=NEW_TOKENS, repeats=repeats)
    return {
        "quick_calibration_s": {
            "value": found["seconds"],
            **{name: found[name] for name in ("ratio", "interval", "rates", "tokens_per_second")},
            "ok": found["ratio"] >= 0.95,
            "why": f"timed by it has {found['ratio']:.3f} of the speed by a full one",
            "size": {"prompts": {"mt_bench": len(task.prompts)}, "repeats": repeats},
            "machine": in_dtype(loaded.target),
        }
    }


# the quickstart


def fresh_quickstart(
    kept: Path,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
) -> tuple[float, int]:
    """Run the quickstart script in a fresh clone with an empty cache, installation included.

    Args:
        kept: folder for its log, summary, evaluation and bundle.
        prefix: words before the command.
        environment: variables besides the present ones.
        words: arguments of the script.

    Returns:
        seconds, and the most bytes that its processes held.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "drafttrain"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        variables = {**os.environ, "DRAFTTRAIN_CACHE": f"{folder}/cache", **(environment or {})}
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)
        command = [*prefix, "bash", "scripts/quickstart.sh", *words]
        status, seconds, peak = run_and_watch(command, clone, variables, kept / "log.txt")
        if status != 0:
            raise RuntimeError(f"scripts/quickstart.sh ended with {status}; see {kept / 'log.txt'}")
        output = clone / "runs/quickstart"
        for name in ("summary.json", "bundle", "evaluation"):
            if (output / name).is_dir():
                shutil.copytree(output / name, kept / name, dirs_exist_ok=True)
            else:
                shutil.copyfile(output / name, kept / name)
    return seconds, peak


def fresh_run(kept: Path, prefix: Sequence[str] = (), **options: Any) -> dict[str, float]:
    """`fresh_quickstart`, once for a resumed run."""
    record = kept / "run.json"
    if not record.exists():
        seconds, peak = fresh_quickstart(kept, prefix, **options)
        write_json(record, {"seconds": seconds, "peak_gb": peak / 1e9})
    return read_json(record)


def quickstart(run: Run, avx2: bool = False) -> Measured:
    """The quickstart's time and memory in a fresh clone, and what it came to."""
    suffix, environment = ("_avx2", AVX2) if avx2 else ("", {})
    kept = run.folder(f"machine_quickstart{suffix}")
    with memory_limit(6e9) as prefix:
        done = fresh_run(kept, prefix, environment=environment)
    speed = in_process_of_its_own("quickstart_speed", run, kept, environment)["quickstart_speed"]
    facts = quickstart_facts(read_json(kept / "evaluation/summary.json"), speed)
    failed = unmet(facts, least_speedup=1.05 if avx2 else 1.15)
    judged = {**facts, "ok": not failed, "why": "; ".join(failed), "machine": speed.get("machine", {})}
    found = {f"quickstart_wall_s{suffix}": {"value": done["seconds"], **judged}}
    if not avx2:
        broken = [] if facts["lossless"] else ["not lossless"]
        limited = "a cgroup" if prefix else "nothing: no cgroup can be made here"
        notes = {"limited_by": limited, "ok": not broken, "why": "; ".join(broken)}
        found["six_gb"] = {"value": done["peak_gb"], **notes}
    return found


def quickstart_facts(summary: dict[str, Any], speed: dict[str, Any]) -> dict[str, Any]:
    """What the quickstart's own evaluation found, with the speed against transformers in its best dtype."""
    row, lossless = summary["tasks"]["all"][summary["tree"]], summary["lossless"]
    return {
        "tree": summary["tree"],
        "lossless": bool(lossless) and lossless["mismatches"] == 0,
        "lossless_prompts": lossless["prompts"] if lossless else 0,
        "accept_len": row["accept_len"],
        "best_vs_ar": row["speedup"],
        "best_vs_transformers": speed["value"],
        "transformers_dtype": speed.get("transformers_dtype"),
    }


def unmet(facts: dict[str, Any], least_speedup: float) -> list[str]:
    """List the conditions of the quickstart that do not hold."""
    checks = {
        "not lossless": facts["lossless"],
        "accept_len below 1.8": facts["accept_len"] >= 1.8,
        f"not more than {least_speedup} times plain decoding": facts["best_vs_ar"] > least_speedup,
        "not more than 1.15 times transformers": (facts["best_vs_transformers"] or 0) > 1.15,
    }
    return [problem for problem, holds in checks.items() if not holds]


def quickstart_speed(run: Run, folder: Path) -> Measured:
    """The quickstart's bundle with its tree against transformers in its best dtype, on some first turns."""
    loaded = load(folder / "bundle")
    target = loaded.target
    prompts = spread(read_prompts(MT_BENCH), run.prompts(quick=4, full=20))
    stock = load_stock(target, True, prompts[0].token_ids(target.tokenizer), folder)
    methods = {
        TRANSFORMERS: transformers_generate(target, model=stock.model),
        loaded.tree: drafting(target, loaded.proposer()),
    }
    log = MeasurementLog(folder / "measurements.jsonl", content_hash(folder / "bundle"))
    measured = measure(target, methods, Task("mt_bench", prompts), log, NEW_TOKENS)
    return {
        "quickstart_speed": {
            "value": ratio(measured, TRANSFORMERS, loaded.tree),
            "interval": ratio_interval(measured, TRANSFORMERS, loaded.tree),
            "transformers_dtype": stock.dtype,
            "transformers_tokens_per_second": stock.tokens_per_second,
            "machine": in_dtype(target),
        }
    }


def one_core(run: Run) -> Measured:
    """The quickstart on one core: 1 if its summary is there and nothing was lost."""
    if shutil.which("taskset") is None:
        return {"one_core": {"value": None, "skipped": "no taskset, which keeps a command on one core"}}
    kept = run.folder("machine_one_core")
    prefix = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    done = fresh_run(kept, prefix, words=["--minutes", str(ONE_CORE_MINUTES)])
    lossless = read_json(kept / "evaluation/summary.json")["lossless"]
    held = (kept / "summary.json").exists() and bool(lossless) and lossless["mismatches"] == 0
    return {"one_core": {"value": float(held), "wall_s": done["seconds"], "minutes": ONE_CORE_MINUTES}}


@contextlib.contextmanager
def memory_limit(size: float, root: Path = Path("/sys/fs/cgroup")):
    """Give the words before a command that limit its memory and that of its children; none where no group
    with a limit can be made, which takes cgroup v2 and a right that most users lack."""
    group = root / f"drafttrain-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield []
        return
    try:
        (group / "memory.max").write_text(f"{math.floor(size)}")
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    except OSError:
        yield []
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


PARTS: dict[str, Callable[[Run, Path], Measured]] = {
    "limit_share": limit_share,
    "speed": speed,
    "drafted_equals_plain": drafted_equals_plain,
    "auto_vs_best_dtype": auto_vs_best_dtype,
    "training": training,
    "startup": startup,
    "quick_calibration": quick_calibration,
    "quickstart_speed": quickstart_speed,
}
FIGURES = {
    "limit_share": ["limit_share"],
    "speed": ["ar_vs_transformers", "ar_vs_llamacpp_f16", "best_vs_llamacpp_f16", "best_vs_ar"],
    "drafted_equals_plain": ["drafted_equals_plain"],
    "auto_vs_best_dtype": ["auto_vs_best_dtype"],
    "training": ["train_tokens_per_s"],
    "startup": ["startup_s"],
    "quick_calibration": ["quick_calibration_s"],
    "quickstart_speed": ["quickstart_speed"],
}
SPEEDS = Size(FIRST_TURNS, REPEATS)
EXACT = Size({name: n for name, (_, n) in TEXTS.items()})
GROUPS = [
    Group({"limit_share": ">= 0.65"}, column("limit_share")),
    Group({"limit_share_avx2": ">= 0.65"}, column("limit_share", avx2=True)),
    Group(
        {
            "ar_vs_transformers": ">= 1.8",
            "ar_vs_llamacpp_f16": ">= 1.0",
            "best_vs_llamacpp_f16": ">= 1.4",
            "best_vs_ar": ">= 1.6",
        },
        column("speed"),
        size=SPEEDS,
    ),
    Group(
        {
            "ar_vs_transformers_avx2": ">= 2.5",
            "ar_vs_llamacpp_f16_avx2": ">= 1.0",
            "best_vs_llamacpp_f16_avx2": ">= 1.4",
            "best_vs_ar_avx2": ">= 1.4",
        },
        column("speed", avx2=True),
        size=SPEEDS,
    ),
    Group({"drafted_equals_plain": "== 1.0"}, column("drafted_equals_plain"), size=EXACT),
    Group({"drafted_equals_plain_avx2": "== 1.0"}, column("drafted_equals_plain", avx2=True), size=EXACT),
    Group({"auto_vs_best_dtype": ">= 0.97"}, column("auto_vs_best_dtype"), long=True, size=Size(repeats=3)),
    Group(
        {"auto_vs_best_dtype_avx2": ">= 0.97"},
        column("auto_vs_best_dtype", avx2=True),
        long=True,
        size=Size(repeats=3),
    ),
    Group(
        {"train_tokens_per_s_avx2": ">= 0.5"}, column("training", avx2=True), long=True, size=Size(repeats=3)
    ),
    Group({"startup_s": "<= 4"}, column("startup"), size=Size(repeats=3)),
    Group({"quick_calibration_s": "<= 15"}, column("quick_calibration"), long=True, size=Size(repeats=3)),
    Group({"quickstart_wall_s": "<= 1500", "six_gb": "<= 6"}, quickstart, long=True),
    Group({"quickstart_wall_s_avx2": "<= 1500"}, partial(quickstart, avx2=True), long=True),
    Group({"one_core": "== 1"}, one_core, long=True),
]


if __name__ == "__main__":
    os.chdir(ROOT)
    name, place, asked = sys.argv[1:]
    measure_part(name, Path(place), Run(**json.loads(asked)))
