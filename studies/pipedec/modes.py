"""PP, STPP and PipeDec on the same ranks, prompt by prompt in turn (PipeDec, Figure 5).

    python -m studies.pipedec.modes --recipe recipes/pipeline/smollm2-2.yaml --limit 8
    python -m studies.pipedec.modes --recipe recipes/pipeline/smollm2-2.yaml --limit 8 --cut pp=19,11 \
        --cut pipedec=16,14
    python -m studies.pipedec.modes --recipe recipes/pipeline/smollm2-2.yaml --limit 4 --set stages.ranks=14 \
        --set drafter_rank=alone --set pace.stage_ms=40 --set pace.draft_ms=10

Every rank is a process with its own cores, or with `pace` a device that is held for declared times. Seconds
are those of decoding with the prompt; a timing of a mode is followed by one of the next mode, and the order
changes with each prompt and repeat. Every prompt is written to modes.json in --out; --resume goes on.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import read_prompts
from drafttrain.pipeline.config import PipelineConfig
from drafttrain.pipeline_decoder import PipelineDecoder
from drafttrain.run.pipeline import end_with_parent, start
from drafttrain.run.recipe import load_settings
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies import ROOT, arguments
from studies.pipedec.ratios import Name, ratio

MODES = ("pp", "stpp", "pipedec")
RAW = "modes.json"


def study(args: Namespace) -> None:
    config, path = settings(args), args.out / RAW
    asked = setting(config, args.mode or MODES, cuts(args.cut))
    if "RANK" not in os.environ:
        if args.resume and path.exists() and read_json(path).get("asked", asked) != asked:
            raise UserError(
                f"{path}: must be of these settings, modes and cuts, got others; leave out --resume"
            )
        command = [sys.executable, "-m", "studies.pipedec.modes", *sys.argv[1:]]
        if start(config.world_size, command):
            sys.exit(2)
        return
    end_with_parent()
    measure(config, asked["modes"], asked["cut"], args.repeats, path, args.resume)


def setting(
    config: PipelineConfig, wanted: Sequence[str], cut: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return what all rows of a file must have in common, as JSON has it."""
    own = {key: value for key, value in asdict(config).items() if key not in ("prompts", "limit", "out")}
    return json.loads(json.dumps({"config": own, "modes": wanted, "cut": cut}))


def settings(args: Namespace) -> PipelineConfig:
    """Return the recipe with what is laid over it."""
    words = [f"--{pair}" for pair in args.set]
    words += ["--limit", str(args.limit)] if args.limit else []
    return load_settings(PipelineConfig, args.recipe, words)


def cuts(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the blocks of each rank by mode, from texts such as pp=19,11.

    Raises:
        UserError: it is none of that form.
    """
    found = {}
    for text in texts:
        mode, _, numbers = text.partition("=")
        if mode not in MODES or not all(number.isdecimal() for number in numbers.split(",")):
            raise UserError(f"--cut: must be like pp=19,11 with one of {', '.join(MODES)}, got {text}")
        found[mode] = [int(number) for number in numbers.split(",")]
    return found


def measure(
    config: PipelineConfig,
    wanted: Sequence[str],
    cut: Mapping[str, Sequence[int]],
    repeats: int,
    path: Path,
    resume: bool,
) -> None:
    """Decode all prompts in the wanted modes as one of the ranks; rank 0 writes the file and shows the
    ratios."""
    found = {"rows": [], "asked": setting(config, wanted, cut)}
    if resume and path.exists():
        found = read_json(path)
    done = {(row["prompt"], row["repeat"]) for row in found["rows"]}
    loaded = next((mode for mode in wanted if mode != "pp"), "pp")  # which needs no drafter
    with PipelineDecoder(replace(config, mode=loaded)) as pipeline:
        by_mode = {mode: pipeline.recut(cut[mode]) if mode in cut else pipeline for mode in wanted}
        for mode, decoder in by_mode.items():  # the first forwards of a process are slow
            decoder.decode(mode, pipeline.prompts[0][1])
        found["machine"] = pipeline.machine()
        before = found.setdefault("paced", [0, 0])  # of the runs that this one goes on with
        begun = pipeline.paced()
        for repeat in range(repeats):
            for number, (name, request) in enumerate(pipeline.prompts):
                if (name, repeat) in done:
                    continue
                for turn in range(len(wanted)):
                    mode = wanted[(turn + number + repeat) % len(wanted)]
                    began = time.perf_counter()
                    output = by_mode[mode].decode(mode, request)
                    seconds = time.perf_counter() - began
                    row = {"prompt": name, "repeat": repeat, "mode": mode, **vars(output)}
                    found["rows"].append({**row, "decoding": output.seconds, "seconds": seconds})
                now = zip(before, pipeline.paced(), begun)
                found["paced"] = [earlier + counted - warming for earlier, counted, warming in now]
                if pipeline.rank == 0:
                    write_json(path, found)
                    print(f"repeat {repeat + 1}, {number + 1} of {len(pipeline.prompts)}", flush=True)
    held, late = found["paced"]
    if held or "late" not in found:
        found["late"] = late / max(held, 1)
    if pipeline.rank == 0:
        write_json(path, found)
        show(found["rows"], wanted, found["late"])


def run_modes(
    recipe: str,
    prompts: Path,
    keys: Mapping[str, Any],
    cut: Mapping[str, Sequence[int]],
    repeats: int,
    out: Path,
    wanted: Sequence[str] = MODES,
) -> dict[str, Any]:
    """Start all ranks, and return what they have measured of these prompts and repeats; what the folder has
    already is not measured again.

    Args:
        keys: of the recipe, laid over it.

    Raises:
        UserError: a rank has failed, or the folder has measurements of other settings.
    """
    words = [f"{key}={value}" for key, value in {**keys, "prompts": prompts, "limit": "null"}.items()]
    command = [
        sys.executable,
        "-m",
        "studies.pipedec.modes",
        "--recipe",
        recipe,
        "--out",
        str(out),
        "--resume",
    ]
    command += ["--repeats", str(repeats), *(part for word in words for part in ("--set", word))]
    command += [part for mode in wanted for part in ("--mode", mode)]
    for mode, blocks in cut.items():
        command += ["--cut", f"{mode}={','.join(map(str, blocks))}"]
    if status := subprocess.run(command, cwd=ROOT, stdout=2).returncode:
        raise UserError(f"{out}: the ranks must end with 0, got {status}; see their messages above")
    found, ids = read_json(out / RAW), {prompt.id for prompt in read_prompts(prompts)}
    found["rows"] = [row for row in found["rows"] if row["prompt"] in ids and row["repeat"] < repeats]
    return found


def per_token(rows: Sequence[dict[str, Any]], mode: str, what: str = "seconds") -> dict[Name, float]:
    """Return the seconds per token of each prompt in a mode, the median over repeats.

    Args:
        what: "seconds", or "decoding" for those after the prompt and its token.
    """
    taken: dict[Name, list[float]] = {}
    for row in rows:
        tokens = len(row["tokens"]) - (what == "decoding")
        if row["mode"] == mode and tokens:
            task, _, prompt = row["prompt"].partition("/")
            taken.setdefault((task, prompt), []).append(row[what] / tokens)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def show(rows: Sequence[dict[str, Any]], wanted: Sequence[str], late: float) -> None:
    """Print the speed of each mode over that of the first, and whether all have written the same."""
    base = per_token(rows, wanted[0])
    for mode in wanted[1:]:
        found = ratio(base, per_token(rows, mode))
        interval = "{:.3f} to {:.3f}".format(*found["interval"])
        print(f"{mode}: {found['value']:.3f} ({interval}) times as fast as {wanted[0]} ({len(base)} prompts)")
    print(f"texts are {'the same' if same_texts(rows) else 'different'} in all modes; ", end="")
    print(f"{late:.2%} of the paced pieces of work were late")


def same_texts(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether every prompt has one text in all modes and repeats."""
    texts = {(row["prompt"], tuple(row["tokens"])) for row in rows}
    return len(texts) == len({row["prompt"] for row in rows})


def main(argv: Sequence[str] | None = None) -> int:
    names = ("recipe", "limit", "repeats", "set", "mode", "cut", "resume")
    return arguments.run(study, __doc__, argv, names, "runs/pipedec")


if __name__ == "__main__":
    arguments.start(main)
