"""Show what a timestep of each rank is made of: its tasks, and the time between them.

    python -m studies.pipedec.timestep --recipe recipes/pipeline/smollm2-2.yaml --limit 2

Decodes prompts in mode pipedec and prints, for every rank, the median milliseconds of a timestep, each task
in its log, and each gap between two of them (waiting, and what is not logged); timestep_RANK.json in --out.
"""

import os
import statistics
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from drafttrain.pipeline.member import Task
from drafttrain.pipeline_decoder import PipelineDecoder
from drafttrain.run.pipeline import end_with_parent, start
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.pipedec.modes import settings


def study(args: Namespace) -> None:
    config = settings(args)
    if "RANK" not in os.environ:
        if start(config.world_size, [sys.executable, "-m", "studies.pipedec.timestep", *sys.argv[1:]]):
            sys.exit(2)
        return
    end_with_parent()
    parts: dict[str, list[float]] = defaultdict(list)
    with PipelineDecoder(replace(config, mode="pipedec")) as pipeline:
        pipeline.decode("pipedec", pipeline.prompts[0][1])  # the first forwards of a process are slow
        for _, request in pipeline.prompts:
            pipeline.decode("pipedec", request)
            for name, seconds in spent(pipeline.me.log):
                parts[name].append(1e3 * seconds)
        found = {name: statistics.median(taken) for name, taken in parts.items()}
        write_json(args.out / f"timestep_{pipeline.rank}.json", found)
        lines = [f"{name:40} {ms:6.2f} ms, {len(parts[name])} times" for name, ms in found.items()]
        for rank in range(config.world_size):  # one after the other
            pipeline.ranks.gather([0.0])
            if rank == pipeline.rank:
                print("\n".join([f"rank {rank}", *lines]), flush=True)


def spent(log: Sequence[Task]) -> list[tuple[str, float]]:
    """Return names and seconds of timesteps, tasks and the gaps between them, without those of the prompt."""
    tasks = sorted((task for task in log if task.seq), key=lambda task: task.start)
    ends = [task.end for task in tasks if task.kind == "V"]
    found = [("timestep", b - a) for a, b in pairwise(ends)]
    found += [(_name(task), task.end - task.start) for task in tasks if task.kind != "V"]
    return found + [(f"{_name(a)} to {_name(b)}", b.start - a.end) for a, b in pairwise(tasks)]


def _name(task: Task) -> str:
    own = {("C", "dec", 0): "draft", ("C", "sync", 0): "cut the tree", ("V", "finish", task.node): "end"}
    what = own.get(task[:3])
    return what or (task.kind if task.kind in ("send", "receive") else str(task.what))


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("recipe", "limit", "set"), "runs/pipedec/timestep")


if __name__ == "__main__":
    arguments.start(main)
