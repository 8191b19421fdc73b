"""`drafttrain pipeline`: decode prompts with a target that is spread over processes.

The command starts all ranks on this machine. Where RANK and WORLD_SIZE are set (torchrun) it is one of them.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.pipeline.config import PipelineConfig, SimulateConfig, balanced
from drafttrain.run.commands import add_keys
from drafttrain.run.options import option
from drafttrain.utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from drafttrain.drafters.model import DraftModel
    from drafttrain.pipeline.distributed import Ranks
    from drafttrain.pipeline.program import Layout, Member, Output, Request
    from drafttrain.pipeline.simulate import Link

DRAFT_SLOTS = 64  # of a cache, for trees in flight
SHOWN = ("mode", "prompts", "tokens", "tokens_per_second", "hit_rate", "timesteps_per_token")
PARENT = "DRAFTTRAIN_PARENT"  # environment variable: the process that has started a rank
GRACE = 5.0  # seconds in which other ranks may say why they end, too


def pipeline_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "RECIPE", "YAML file; --key VALUE or --section.key VALUE overrides a value")
    text = "count hits and simulate time instead, by a recipe such as recipes/pipeline/simulate.yaml"
    option(parser, "--simulate", text)
    add_keys(parser, lambda given: SimulateConfig if "simulate" in given else PipelineConfig)


def pipeline(args: argparse.Namespace) -> int | None:
    """Decode with a target that is spread over processes."""
    from drafttrain.run.recipe import load_settings
    from drafttrain.run.simulate import simulate

    if "simulate" in args:
        return simulate(args.recipe, args.overrides)
    config = load_settings(PipelineConfig, args.recipe, args.overrides)
    if "RANK" not in os.environ:
        words = ["-m", "drafttrain.run.cli", "pipeline", args.recipe, *args.overrides]
        return start(config.world_size, [sys.executable, *words])
    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if world_size != config.world_size:
        raise UserError(f"WORLD_SIZE: must be {config.world_size}, as the recipe's stages, got {world_size}")
    end_with_parent()
    try:
        summary = run_rank(config, int(os.environ["RANK"]))
    except UserError as error:
        print(f"drafttrain: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # the threads of a lost connection would abort the process at its end
    if summary is not None:
        print(", ".join(f"{key.replace('_', ' ')} {summary[key]}" for key in SHOWN), flush=True)
    return None


def end_with_parent() -> None:
    """End this rank when the process that has started it by `start` has ended."""
    if (parent := os.environ.get(PARENT)) is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start(world_size: int, command: Sequence[str]) -> int:
    """Start all ranks on this machine, each by this command, and wait for them; when one fails the others
    end.

    Returns:
        the exit status: that of the first rank that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    address[PARENT] = str(os.getpid())
    ranks = [
        # in a session of its own: Ctrl-C ends this process, which ends them
        subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank)}, start_new_session=True)
        for rank in range(world_size)
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed := [rank.returncode for rank in ranks if rank.returncode]:
                _wait(ranks, GRACE)
                return failed[0]
            time.sleep(0.05)
        return next((rank.returncode for rank in ranks if rank.returncode), 0)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        _wait(ranks, GRACE)


def _wait(ranks: Sequence[subprocess.Popen], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)


@dataclass
class Joined:
    """A rank that is connected to the others. All ranks make the same calls, in the same order.

    Attributes:
        prompts: of the recipe, by their ids.
    """

    me: "Member"
    ranks: "Ranks"
    prompts: list[tuple[str, "Request"]]
    dtype: "torch.dtype"
    threads: int

    def decode(self, mode: str, request: "Request") -> "Output":
        """Decode a prompt in a mode.

        Raises:
            UserError: another rank is lost.
        """
        from drafttrain.pipeline.program import pipedec, pp, stpp

        modes: dict[str, Callable] = {"pipedec": pipedec, "stpp": stpp, "pp": pp}
        return self.ranks.channel().run(modes[mode](self.me, request))

    def decode_all(self, mode: str, requests: "Sequence[Request]", at_once: int) -> "list[Output]":
        """Decode prompts, `at_once` of them at the same time: while one waits for a stage, others use it.

        Raises:
            UserError: another rank is lost.
        """
        from drafttrain.kernels.team import native_team
        from drafttrain.pipeline.program import pp, stpp

        if at_once == 1 or mode == "pipedec":  # which has all stages for one prompt
            return [self.decode(mode, request) for request in requests]
        members = [self.me.twin() for _ in range(at_once)]
        outputs: list[Output | None] = [None] * len(requests)

        def work(turn: int) -> None:
            with native_team(self.threads):
                for i in range(turn, len(requests), at_once):
                    program = {"pp": pp, "stpp": stpp}[mode](members[turn], requests[i])
                    outputs[i] = self.ranks.channel(turn + 1).run(program)

        with ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(work, turn) for turn in range(at_once)]:
                done.result()
        return outputs

    def late(self) -> float:
        """Return the share of all ranks' paced pieces of work that took longer than declared."""
        paces = self.me.stage_pace, self.me.draft_pace
        held, late = self.ranks.total([sum(pace.held for pace in paces), sum(pace.late for pace in paces)])
        return late / max(held, 1)

    def machine(self) -> dict[str, Any]:
        """Describe this machine, as one rank uses it."""
        import torch

        from drafttrain.kernels.machine import describe_machine

        return {**describe_machine(torch.device("cpu"), self.dtype), "threads": self.threads}


@contextmanager
def join(config: PipelineConfig, rank: int) -> Iterator[Joined]:
    """Be one rank of a pipeline, whose others are started elsewhere.

    Raises:
        UserError: target, drafter or prompts cannot be used, the ranks differ, or one of them is lost.
    """
    import torch

    from drafttrain.kernels.team import native_team
    from drafttrain.pipeline.distributed import Ranks
    from drafttrain.pipeline.probe import check_cut, probe, probe_ids
    from drafttrain.pipeline.program import Pace
    from drafttrain.target_lm.loading import choose_dtype, resolve_target
    from drafttrain.utils.files import fingerprint
    from drafttrain.utils.provenance import versions
    from drafttrain.utils.threads import usable_cores

    here = int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size))  # ranks on this machine
    threads = config.stages.threads or max(1, usable_cores() // here)
    torch.set_num_threads(threads)
    place = resolve_target(config.target)
    dtype = choose_dtype(place, config.dtype, "cpu", "decoding")
    prompts = _prompts(config, place)
    room = max(len(request.tokens) for _, request in prompts) + config.max_new_tokens + DRAFT_SLOTS
    me = load_member(config, place, dtype, rank, room)
    ranks = Ranks(rank, config.world_size, config.timeout_s, _link(config, place))
    ranks.agree("recipe and versions", fingerprint([asdict(config), versions()]))
    me.stage_pace, me.draft_pace = (
        Pace(None if ms is None else ms / 1e3) for ms in (config.pace.stage_ms, config.pace.draft_ms)
    )
    with native_team(threads):
        if config.probe:
            ids = probe_ids(place)
            check_cut(me, ranks.channel().run(probe(me, ids)), place, ids)
        yield Joined(me, ranks, prompts, dtype, threads)
    ranks.close()


def _link(config: PipelineConfig, place: str) -> "Link | None":
    from transformers import AutoConfig

    from drafttrain.pipeline.simulate import Link

    if config.link is None:
        return None
    hidden = AutoConfig.from_pretrained(place).get_text_config().hidden_size
    return Link(config.link.gbit, config.link.ms / 1e3, 2 * hidden)  # states would travel in 16 bits


def run_rank(config: PipelineConfig, rank: int) -> dict[str, Any] | None:
    """Decode all prompts of a recipe as one of its ranks.

    Returns:
        at rank 0 the summary, which is in `out` too.

    Raises:
        UserError: as `join`.
    """
    rows = []
    with join(config, rank) as pipeline:
        started = time.perf_counter()
        if config.concurrency > 1:
            outputs = pipeline.decode_all(config.mode, [r for _, r in pipeline.prompts], config.concurrency)
            rows = [_row(name, output) for (name, _), output in zip(pipeline.prompts, outputs)]
        else:
            for name, request in pipeline.prompts:
                begun = time.perf_counter()
                output = pipeline.decode(config.mode, request)
                rows.append(_row(name, output, time.perf_counter() - begun))
                if rank == 0:
                    print(f"{name}: {rows[-1]['tokens_per_second']:.1f} tokens/s", flush=True)
        seconds = time.perf_counter() - started
        late, machine = pipeline.late(), pipeline.machine()
    return _write(config, rows, seconds, machine, late) if rank == 0 else None


def load_member(config: PipelineConfig, place: str, dtype: "torch.dtype", rank: int, room: int) -> "Member":
    """Load what a rank needs of target and drafter.

    Args:
        room: tokens for which caches get room at once; longer ones take time.

    Raises:
        UserError: the target cannot be cut so, or the drafter does not fit it or keeps no tree in flight.
    """
    from transformers import AutoConfig

    from drafttrain.pipeline.part import load_part
    from drafttrain.pipeline.program import Member
    from drafttrain.pipeline.stage import Stage
    from drafttrain.trees.parse import parse_policy

    target_config = AutoConfig.from_pretrained(place).get_text_config()
    n_blocks, alone = target_config.num_hidden_layers, config.drafter_rank == "alone"
    blocks = config.stages.blocks or balanced(n_blocks, config.stages.ranks, _head_in_blocks(target_config))
    if sum(blocks) != n_blocks:
        raise UserError(
            f"stages.blocks: must add up to the {n_blocks} blocks of {config.target}, got {blocks}"
        )
    layout = _layout(config, alone)
    ends = [sum(blocks[: i + 1]) for i in range(len(blocks))]
    drafter = _drafter(config, place, dtype) if config.drafter and rank == layout.drafter else None
    taps = _taps(config, n_blocks)
    owners = [next(r for r, end in zip(layout.stages, ends) if tap < end or end == n_blocks) for tap in taps]
    stage = None
    if rank in layout.stages:
        i = layout.stages.index(rank)
        part = load_part(place, range(ends[i] - blocks[i], ends[i]), dtype, taps=taps)
        part.pack()
        stage = Stage(part, room)
    policy = parse_policy(config.tree) if drafter else None
    return Member(rank, layout, stage, drafter, policy, list(zip(taps, owners)), room)


def _layout(config: PipelineConfig, alone: bool) -> "Layout":
    from drafttrain.pipeline.program import Layout

    ranks = list(range(alone, config.stages.ranks + alone))
    sizes = config.stages.groups or [1] * len(ranks)
    return Layout(tuple(tuple(ranks[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))))


def _head_in_blocks(config: "PreTrainedConfig") -> float:
    """Return the weights of the head over those of a block."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    block = 2 * hidden * dim * (heads + kv_heads) + 3 * hidden * config.intermediate_size
    return config.vocab_size * hidden / block


def _taps(config: PipelineConfig, n_blocks: int) -> list[int]:
    """Return the blocks of the target that the drafter reads; every rank has to know them."""
    from drafttrain.bundle import find_bundle, is_plain_lm
    from drafttrain.drafters.config import read_config
    from drafttrain.target_lm.model import block_number

    if config.drafter is None or is_plain_lm(config.drafter):
        return []
    stored = read_config(find_bundle(config.drafter)).get("tapped_blocks", [])
    return [block_number(block, n_blocks) for block in stored]


def _drafter(config: PipelineConfig, place: str, dtype: "torch.dtype") -> "DraftModel":
    from drafttrain.bundle import find_bundle, is_plain_lm
    from drafttrain.drafters.auto import load_drafter
    from drafttrain.drafters.causal_lm import as_drafter
    from drafttrain.pipeline.part import load_shell, require_frontier

    shell = load_shell(place, dtype)
    if is_plain_lm(config.drafter):
        drafter = as_drafter(config.drafter, shell)
    else:
        drafter = load_drafter(find_bundle(config.drafter), shell, dtype)
    require_frontier(drafter, config.drafter)
    drafter.pack()
    return drafter


def _prompts(config: PipelineConfig, place: str) -> list[tuple[str, "Request"]]:
    from transformers import AutoConfig

    from drafttrain.data.prompts import read_prompts
    from drafttrain.inference.params import SamplingParams
    from drafttrain.pipeline.part import stop_tokens
    from drafttrain.pipeline.program import Request
    from drafttrain.target_lm.loading import load_tokenizer
    from drafttrain.trees.parse import parse_policy

    tokenizer, sampling = load_tokenizer(place), SamplingParams(**asdict(config.sampling))
    depth = parse_policy(config.tree).max_depth
    limit = AutoConfig.from_pretrained(place).get_text_config().max_position_embeddings
    found, stop = [], stop_tokens(place, tokenizer.eos_token_id)
    for prompt in read_prompts(config.prompts, config.limit):
        shape = config.width, config.children, depth
        ids = prompt.token_ids(tokenizer)
        if len(ids) + config.max_new_tokens > limit:
            raise UserError(
                f"{prompt.id}: prompt and new tokens must fit into the {limit} positions of "
                f"{config.target}, got {len(ids)} + {config.max_new_tokens}; remove it or lower "
                "max_new_tokens"
            )
        found.append((prompt.id, Request(ids, config.max_new_tokens, stop, sampling, *shape)))
    return found


def _row(name: str, output: "Output", seconds: float | None = None) -> dict[str, Any]:
    row = {
        "prompt": name,
        "token_ids": output.tokens,
        "timesteps": output.timesteps,
        "hits": output.hits,
    }
    if seconds is not None:  # of a prompt that was alone
        row |= {"seconds": round(seconds, 6), "tokens_per_second": round(len(output.tokens) / seconds, 3)}
    return row


def _write(
    config: PipelineConfig,
    rows: Sequence[dict[str, Any]],
    seconds: float,
    machine: dict[str, Any],
    late: float,
) -> dict[str, Any]:
    from drafttrain.utils.files import write_json

    out = Path(config.out)
    tokens = sum(len(row["token_ids"]) for row in rows)
    judged = sum(max(len(row["token_ids"]) - 2, 0) for row in rows)  # not the first token, nor the last
    summary = {
        "mode": config.mode,
        "prompts": len(rows),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 3),
        "hit_rate": round(sum(row["hits"] for row in rows) / max(judged, 1), 4),
        "timesteps_per_token": round(sum(row["timesteps"] for row in rows) / max(tokens - len(rows), 1), 4),
        "late": round(late, 4),  # share of the paced pieces of work that took longer than declared
        "machine": machine,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", list(rows))
    write_json(out / "summary.json", summary)
    return summary
