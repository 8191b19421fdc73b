"""Memory of each rank of a pipeline over its share of the weights and caches.

    python -m studies.pipedec.memory --recipe recipes/pipeline/smollm2-2.yaml

A rank's memory is what its process has more, once target, drafter and caches are loaded and a forward has
run: in pages of its own, and in resident ones of the files of weights that it maps. Its share: the weights of
its blocks, with the embeddings or the head, its blocks' cache, and the drafter's weights.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from drafttrain.pipeline.config import PipelineConfig
from drafttrain.utils.writing import write_json
from studies import ROOT, arguments
from studies.pipedec.modes import settings

ROOM = 2048


def study(args: Namespace) -> None:
    config = settings(args)
    if "RANK" in os.environ:
        print(json.dumps(measure(config, int(os.environ["RANK"]))))
        return
    rows = by_rank(sys.argv[1:], config.world_size)
    write_json(args.out / "memory.json", rows)
    for rank, row in enumerate(rows):
        own, share = row["bytes"] / 1e6, row["share"] / 1e6
        print(f"rank {rank}: {own:.0f} MB of {share:.0f}, {own / share:.3f}")


def by_rank(words: Sequence[str], world_size: int) -> list[dict[str, Any]]:
    """Measure each rank in a process of its own, one after the other."""
    command = [sys.executable, "-m", "studies.pipedec.memory", *words]
    rows = []
    for rank in range(world_size):
        environment = {**os.environ, "RANK": str(rank)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return rows


def resident(weights: Set[str]) -> tuple[int, int]:
    """Return the bytes of this process's pages in memory that no file holds, and of those that files of
    weights do, which are known by their real paths: those of the Hub are links to files of other names."""
    own, mapped, in_weights = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):  # a mapping begins: its addresses, rights, …, file
            in_weights = values[-1] in weights
        elif name == "Anonymous:":
            own += int(values[0])
        elif name == "Rss:" and in_weights:
            mapped += int(values[0])
    return 1024 * own, 1024 * mapped


def measure(config: PipelineConfig, rank: int) -> dict[str, Any]:
    """Load what a rank has; return its bytes, its share, and their dtype."""
    import gc

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401  imported before the first look

    from drafttrain.kernels.machine import dtype_name
    from drafttrain.kernels.team import native_team
    from drafttrain.pipeline.part import part_bytes
    from drafttrain.pipeline_decoder import cut, folders_of, load_member
    from drafttrain.target_lm.loading import choose_dtype, resolve_target
    from studies.weights import weights_by_address

    torch.set_num_threads(1)
    place = resolve_target(config.target)
    dtype = choose_dtype(place, config.dtype, "cpu", "decoding")
    torch.zeros(8, 8) @ torch.zeros(8, 8)
    gc.collect()
    places = folders_of(config, place).values()
    weights = {str(path.resolve()) for folder, pattern in places for path in folder.glob(pattern)}
    before = resident(weights)
    with native_team(1):
        me = load_member(config, place, dtype, rank, ROOM)
        target = AutoConfig.from_pretrained(place).get_text_config()
        share = 0
        if me.stage is not None:
            x = torch.arange(8) if me.stage.part.is_first else torch.zeros(8, target.hidden_size)
            me.stage.prefill(x)
            blocks, i = cut(config, target), me.layout.stages.index(rank)
            first = sum(blocks[:i])
            share += part_bytes(place, range(first, first + blocks[i]), dtype)
            kv = me.stage.cache.kv
            share += kv.numel() * kv.element_size()
        if me.drafter is not None:
            own = weights_by_address(me.drafter)
            if me.stage is not None and me.stage.part.is_first:  # which has the drafter's embeddings, too
                own = {
                    at: size for at, size in own.items() if at not in weights_by_address(me.stage.part.base)
                }
            share += sum(own.values())
    gc.collect()
    own, mapped = (after - earlier for after, earlier in zip(resident(weights), before))
    return {"bytes": own + mapped, "mapped": mapped, "share": share, "dtype": dtype_name(dtype)}


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("recipe", "limit", "set"), "runs/pipedec")


if __name__ == "__main__":
    arguments.start(main)
