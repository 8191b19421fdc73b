"""`drafttrain pipeline`: decode prompts with a target that is spread over processes.

The command starts all ranks on this machine. Where RANK and WORLD_SIZE are set (torchrun) it is one of them.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drafttrain.pipeline.config import PipelineConfig, SimulateConfig
from drafttrain.run.commands import add_keys
from drafttrain.run.options import option
from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import make_out
from drafttrain.utils.locks import locked
from drafttrain.utils.parent import end_with

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from drafttrain.pipeline.member import Output
    from drafttrain.pipeline_decoder import PipelineDecoder

T = TypeVar("T", PipelineConfig, SimulateConfig)
COSTS = "costs.json"
SHOWN = ("mode", "prompts", "tokens", "tokens_per_second", "hit_rate", "timesteps_per_token")
PARENT = "DRAFTTRAIN_PARENT"  # environment variable: the process that has started a rank
LATE = 0.05  # share of paced work that took too long, above which the summary is doubtful
LOST = 1  # exit status if a rank is lost; 2 is for the user's mistakes
GRACE = 5.0  # seconds in which the other ranks may report why they end, too


def pipeline_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "RECIPE", "YAML file; --key VALUE or --section.key VALUE overrides a value")
    text = "count hits and simulate time instead, by a recipe such as recipes/pipeline/simulate.yaml"
    option(parser, "--simulate", text)
    text = f"measure stages, drafter and messages on these ranks instead; {COSTS} in out, for --simulate"
    option(parser, "--calibrate", text)
    option(parser, "--dry-run", "show the bytes of each rank and what a pipeline could gain, load nothing")
    add_keys(parser, lambda given: SimulateConfig if "simulate" in given else PipelineConfig)


def pipeline(args: argparse.Namespace) -> int | None:
    """Decode with a target that is spread over processes."""
    # read when torch is imported, here and in the ranks: else it prints its retries and C++ frames before
    # the line of a lost connection
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    chosen = [name for name in ("simulate", "calibrate", "dry_run") if name in args]
    if len(chosen) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
        raise UserError(f"{first}: must not be given beside {second}; run one after the other")
    if "simulate" in args:
        from drafttrain.run.simulate import print_simulation

        return print_simulation(_settings(args, SimulateConfig))
    config = _settings(args, PipelineConfig)
    if "dry_run" in args:
        return show_plan(config)
    if "calibrate" in args and config.drafter is None:
        raise UserError(f"{args.recipe}: drafter: must be set for --calibrate, got null; name a bundle")
    if (os.environ.get("RANK") or "0") == "0":  # which writes the results; before any rank starts
        make_out(config.out)
        if not Path(config.prompts).exists():
            got = f"{config.prompts}, which does not exist"
            raise UserError(f"{args.recipe}: prompts: must be a file or a folder, got {got}; name another")
    if not os.environ.get("RANK"):
        if config.world_size > (os.cpu_count() or 1):  # whose start takes minutes
            from drafttrain.pipeline_decoder import cut
            from drafttrain.target_lm.loading import load_config, resolve_target

            cut(config, load_config(resolve_target(config.target)).get_text_config())
        words = ["-m", "drafttrain.run.cli", "pipeline", args.recipe, *args.overrides]
        words += ["--calibrate"] if "calibrate" in args else []
        with locked(config.out):
            return start(config.world_size, [sys.executable, *words])
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # end at once: Python would wait for the next message
        signal.signal(number, signal.SIG_DFL)
    try:
        shown = calibrate_rank(config) if "calibrate" in args else run_rank(config)
    except UserError as error:
        from drafttrain.pipeline.distributed import LostRank

        print(f"drafttrain: {error}", file=sys.stderr, flush=True)
        # at once: the threads of a lost connection would abort the process at its end
        os._exit(LOST if isinstance(error, LostRank) else 2)
    if shown is not None:
        print(shown, flush=True)
    return None


def _settings(args: argparse.Namespace, wanted: type[T]) -> T:
    """Read the settings of a recipe of ranks or, with `SimulateConfig`, of a simulation.

    Raises:
        UserError: as `load_settings`; the recipe is of the other kind; prompts or out are not set.
    """
    from drafttrain.run.recipe import load_settings

    def fits(cls: type) -> bool:
        try:
            load_settings(cls, args.recipe)
        except UserError:
            return False
        return True

    try:
        config = load_settings(wanted, args.recipe, args.overrides)
    except UserError:
        [other] = {PipelineConfig, SimulateConfig} - {wanted}
        if fits(wanted) or not fits(other):
            raise
        kinds = {PipelineConfig: "of ranks", SimulateConfig: "of a simulation (--simulate)"}
        words = f"must be a recipe {kinds[wanted]}, got one {kinds[other]}"
        raise UserError(f"{args.recipe}: {words}; name another one") from None
    for name, what in (("prompts", "a file"), ("out", "a folder")):
        if getattr(config, name) is None and "dry_run" not in args:
            raise UserError(f"{args.recipe}: {name}: must be set, got null; name {what}")
    return config


def show_plan(config: PipelineConfig) -> None:
    """Print the blocks and bytes of each rank, and an upper bound of `pipedec` over `pp` by hit rate.

    Raises:
        UserError: the target cannot be split into such stages.
    """
    from drafttrain.bundle import find_bundle, is_plain_lm
    from drafttrain.pipeline.part import part_bytes
    from drafttrain.pipeline_decoder import DRAFT_SLOTS, ROOM, cut, layout_of
    from drafttrain.target_lm.loading import choose_dtype, load_config, resolve_target

    place = resolve_target(config.target)
    target = load_config(place).get_text_config()
    dtype = choose_dtype(place, config.dtype, config.device, "decoding")
    blocks, layout = cut(config, target), layout_of(config)
    heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    room = ROOM + config.max_new_tokens + DRAFT_SLOTS
    caches = config.concurrency + 1 if config.concurrency > 1 and config.mode != "pipedec" else 1
    drafter = 0
    if config.drafts:
        is_lm = is_plain_lm(config.drafter)
        files = Path((resolve_target if is_lm else find_bundle)(config.drafter)).glob("*.safetensors")
        drafter = sum(file.stat().st_size for file in files)
        drafter += 0 if is_lm else _outer_bytes(target, dtype, layout.drafter in layout.stages)
    print("| rank | blocks | weights, MB | cache, MB | drafter, MB |\n|---|---|---|---|---|")
    for rank in range(config.world_size):
        weights = cache = 0
        which = "none"
        if rank in layout.stages:
            i = layout.stages.index(rank)
            first = sum(blocks[:i])
            which = f"{first} to {first + blocks[i] - 1}"
            weights = part_bytes(place, range(first, first + blocks[i]), dtype)
            cache = caches * 2 * blocks[i] * room * heads * dim * dtype.itemsize
        own = drafter if rank == layout.drafter else 0
        sizes = " | ".join(f"{size / 1e6:.1f}" for size in (weights, cache, own))
        print(f"| {rank} | {which} | {sizes} |")
    if config.stages.blocks == "measured":
        print("\nstages.blocks: measured at the start; these are balanced by weights")
    if config.mode != "pipedec":
        return
    n = len(layout.groups)
    gains = ", ".join(f"{n / (hit + (1 - hit) * n):.2f} at {hit}" for hit in (0.7, 0.8, 0.9, 1.0))
    print(f"\npipedec over pp at most, by the hit rate, where a layer costs what a token does: {gains}")


def _outer_bytes(target: "PreTrainedConfig", dtype: "torch.dtype", is_beside: bool) -> int:
    """Return the bytes of the target's embeddings and head, which a drafter reads; beside the first stage it
    reads that one's embeddings."""
    matrices = 2 - bool(target.tie_word_embeddings) - is_beside
    return target.vocab_size * target.hidden_size * dtype.itemsize * matrices


def end_with_parent() -> None:
    """Make this rank end as soon as the process that started it (`start`) has ended."""
    if (parent := os.environ.get(PARENT)) is not None:
        end_with(int(parent))


def start(world_size: int, command: Sequence[str]) -> int:
    """Start all ranks on this machine, each with this command, and wait for them. If one fails, the others
    are ended.

    Returns:
        the exit status: 0 if all succeeded, else the highest one of the ranks, at least `LOST`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    address[PARENT] = str(os.getpid())
    ranks = [
        # a separate session: Ctrl-C reaches only this process, which then ends the ranks
        subprocess.Popen(
            command,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    try:
        while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
            time.sleep(0.05)
        named = _report_killed(ranks)
        _wait(ranks, GRACE)
        _report_killed(ranks, named)
        failed = [rank.returncode for rank in ranks if rank.returncode]  # by a signal: below 0
        return max([LOST, *failed]) if failed else 0
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        _wait(ranks, GRACE)


def _report_killed(ranks: Sequence[subprocess.Popen], named: Set[int] = frozenset()) -> set[int]:
    """Name the ranks that a signal has ended, which could not report it themselves; return them.

    Args:
        named: ranks that have been named before.
    """
    killed = {rank for rank, process in enumerate(ranks) if (process.returncode or 0) < 0}
    for rank in sorted(killed - named):
        number = -ranks[rank].returncode
        why = ", perhaps for lack of memory; --dry-run shows what each rank takes"
        why = why if number == signal.SIGKILL else "; see what the other ranks say"
        print(f"drafttrain: rank {rank}: was ended by signal {number}{why}", file=sys.stderr, flush=True)
    return killed


def _wait(ranks: Sequence[subprocess.Popen], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)


def run_rank(config: PipelineConfig) -> str | None:
    """Decode all prompts of a recipe as one of its ranks.

    Returns:
        at rank 0 the line to print, else None; the results are written to `out`.

    Raises:
        UserError: as `PipelineDecoder`.
    """
    from drafttrain.pipeline_decoder import PipelineDecoder

    rows = []
    with PipelineDecoder(config) as decoder:
        started = time.perf_counter()
        if config.concurrency > 1 and config.mode != "pipedec":
            outputs = decoder.decode_all(config.mode, [r for _, r in decoder.prompts], config.concurrency)
            rows = [_row(name, output) for (name, _), output in zip(decoder.prompts, outputs)]
        else:
            for name, request in decoder.prompts:
                begun = time.perf_counter()
                output = decoder.decode(config.mode, request)
                rows.append(_row(name, output, time.perf_counter() - begun))
                if decoder.rank == 0:
                    print(f"prompt {name}: {rows[-1]['tokens_per_second']:.1f} tokens/s", flush=True)
        seconds = time.perf_counter() - started
        held, late = decoder.paced()
        late = late / held if held else None
        if decoder.rank == 0:  # before the connection ends, which may fail
            summary = _write(config, rows, seconds, late, decoder)
    if decoder.rank:
        return None
    if late is not None and late > LATE:
        keys = [f"pace.{name}" for name, value in asdict(config.pace).items() if value is not None]
        remedy = f"raise {' or '.join(keys)}"
        print(f"drafttrain: pace: {late:.0%} of the work took longer; {remedy}", file=sys.stderr)
    shown = {key: summary[key] for key in SHOWN if summary[key] is not None} | {"out": config.out}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())


def calibrate_rank(config: PipelineConfig) -> str | None:
    """Measure this pipeline as one of its ranks.

    Returns:
        at rank 0 the table to print, else None; the costs are written to `out`.

    Raises:
        UserError: as `PipelineDecoder`.
    """
    from drafttrain.pipeline.measure import measure
    from drafttrain.pipeline_decoder import PipelineDecoder
    from drafttrain.utils.writing import write_json

    with PipelineDecoder(replace(config, mode="pipedec")) as decoder:  # its parts make up the other modes
        if decoder.rank == 0:
            print("drafttrain: measuring; this takes a minute or more", file=sys.stderr, flush=True)
        costs = measure(decoder.me, decoder.ranks, [r for _, r in decoder.prompts], decoder.hidden_size)
        of = {"blocks": decoder.blocks, "machine": decoder.machine(), "recipe": asdict(config)}
    if decoder.rank:
        return None
    path = Path(config.out) / COSTS
    write_json(path, {**asdict(costs), **of})
    lines = [
        "| tokens | " + " | ".join(f"group {i + 1}, ms" for i in range(len(costs.groups))) + " | draft, ms |"
    ]
    lines.append("|---" * (len(costs.groups) + 2) + "|")
    for i, size in enumerate(costs.sizes):
        times = [*(group[i] for group in costs.groups), costs.draft[i]]
        lines.append(f"| {size} | " + " | ".join(f"{1e3 * seconds:.2f}" for seconds in times) + " |")
    end = f"a message {1e3 * costs.hop[0]:.2f} ms, the end of a timestep {1e3 * costs.end:.2f} ms; {path}"
    return "\n".join([*lines, "", end])


def _row(name: str, output: "Output", seconds: float | None = None) -> dict[str, Any]:
    row = {
        "prompt": name,
        "token_ids": output.tokens,
        "timesteps": output.timesteps,
        "judged": output.judged,
        "hits": output.hits,
    }
    if seconds is not None:  # the prompt was decoded alone
        row |= {"seconds": round(seconds, 6), "tokens_per_second": round(len(output.tokens) / seconds, 3)}
    return row


def _write(
    config: PipelineConfig,
    rows: Sequence[dict[str, Any]],
    seconds: float,
    late: float | None,
    decoder: "PipelineDecoder",
) -> dict[str, Any]:
    from drafttrain.utils.writing import write_json

    out = Path(config.out)
    tokens = sum(len(row["token_ids"]) for row in rows)
    judged = sum(row["judged"] for row in rows)
    summary = {
        "mode": config.mode,
        "prompts": len(rows),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 3),
        "hit_rate": round(sum(row["hits"] for row in rows) / judged, 4) if judged else None,
        "timesteps_per_token": round(sum(row["timesteps"] for row in rows) / max(tokens - len(rows), 1), 4),
        # share of the paced pieces of work that took longer than declared
        "late": None if late is None else round(late, 4),
        "blocks": decoder.blocks,
        "machine": decoder.machine(),
    }
    write_json(out / "results.json", list(rows))
    write_json(out / "summary.json", summary)
    return summary
