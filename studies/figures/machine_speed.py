"""Plain and drafted decoding against `generate` of transformers and llama.cpp."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from drafttrain.data.prompts import Prompt, Task, read_prompts, spread
from drafttrain.evaluation.measure import (
    MeasurementLog,
    autoregressive,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.methods import costs_of
from drafttrain.evaluation.metrics import (
    AUTOREGRESSIVE,
    CONTENDED,
    TRANSFORMERS,
    Measurement,
    MethodRun,
    cpu_contention,
    noise,
    ratio,
    ratio_interval,
    ratio_spread,
    tabulate,
)
from drafttrain.evaluation.stock import load_stock
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.machine import OtherLoad
from drafttrain.utils.provenance import content_hash, git_commit, versions
from drafttrain.utils.writing import write_json
from studies import llamacpp
from studies.figures.columns import AVX2
from studies.figures.machine_setting import DRAFTER, MT_BENCH, NEW_TOKENS, REPEATS, TUNING, in_dtype, load
from studies.goals import Measured, Run, size_of
from studies.policies import tune

CPU = torch.device("cpu")
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
BLOCK = 4  # prompts that we decode, and llama.cpp right after
RIVAL = "llama.cpp f16"


def speed(run: Run, folder: Path) -> Measured:
    """Time plain and drafted decoding, `generate` of transformers and llama.cpp over the same prompts,
    greedy."""
    run.check_quiet()
    loaded, quick = load(), run.quick
    target = loaded.target
    depends = [content_hash(DRAFTER), git_commit(), versions(), describe_machine(CPU, target.dtype)]
    depends += [costs_of(loaded, tree) for trees in TREES.values() for tree in trees]
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
        notes |= {"llamacpp": rival.described(llamacpp.F16), "q8_0": against_q8_0(q8_0, best)}
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
        path: file of what has been measured, which is not measured again for the same models, threads and
            release.
    """

    def __init__(self, install: Path, models: dict[str, Path], target: FrozenTarget, path: Path):
        self.install, self.models, self.target, self.path = install, models, target, path
        self.threads = torch.get_num_threads()
        files = {kind: [model.name, model.stat().st_size] for kind, model in models.items()}
        depends = fingerprint([str(install), files, self.threads, NEW_TOKENS, describe_machine(CPU)])
        known = read_json(path) if path.exists() else {}
        self.known: dict[str, Any] = known if known.get("depends") == depends else {"depends": depends}

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
        name = f"llama.cpp {kind}"
        keys = {f"{kind} {one.prompt} {one.repeat}": one for one in chosen}
        if missing := [key for key in keys if key not in self.known]:
            load = OtherLoad()
            stop = self.target.eos_token_ids
            with llamacpp.running(self.install, self.models[kind], stop, self.threads) as running:
                running.decode(ids[keys[missing[0]].prompt], 8)  # the first forwards of a process are slow
                for key in missing:
                    self.known[key] = asdict(running.decode(ids[keys[key].prompt], NEW_TOKENS))
                own = self.known.setdefault(f"described {kind}", {"forward_seconds": 0.0, "seconds": 0.0})
                own |= running.described
                own["forward_seconds"] += running.forward_seconds
                own["seconds"] += running.seconds
            taken = load.lap()  # its own time counts as ours once it has ended
            for key in missing:
                self.known[key]["cpu_contention"] = taken
            write_json(self.path, self.known)
        return [self._with(one, name, self.known[key]) for key, one in keys.items()]

    def described(self, kind: str) -> dict[str, Any]:
        """Return what ran, and the share of its time in forwards, over all prompts."""
        found = dict(self.known[f"described {kind}"])
        share = found.pop("forward_seconds") / found.pop("seconds")
        return {**found, "forward_share": share}

    @staticmethod
    def _with(one: Measurement, name: str, found: dict[str, Any]) -> Measurement:
        runs = {**one.runs, name: MethodRun(found["seconds"], found["token_ids"])}
        loads = [load for load in (one.cpu_contention, found["cpu_contention"]) if load is not None]
        return replace(one, runs=runs, cpu_contention=max(loads, default=None))


def against_q8_0(measured: Sequence[Measurement], best: str) -> dict[str, Any]:
    """Compare with llama.cpp's q8_0, whose weights have half the bytes, on some prompts."""
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
    """Return the figures of `speed` from its measurements.

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
        flags, repeats = [*rows[method].flags], ratio_spread(measured, base, method)
        flags += [flag for flag in noise(repeats, ratio(measured, base, method)) if base != AUTOREGRESSIVE]
        if not flags and busy > CONTENDED:
            flags.append(f"other processes took {busy:.1f} cores meanwhile")
        return {
            "value": ratio(measured, base, method),
            "interval": ratio_interval(measured, base, method),
            "repeats": repeats,
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
