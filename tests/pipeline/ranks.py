"""A rank of `test_distributed.py`: runs several jobs over one connection."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.baselines import pp, slm, stpp
from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.member import Layout, Member, Request
from drafttrain.pipeline.part import load_part
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.simulate import Link
from drafttrain.pipeline.stage import Stage
from drafttrain.target_lm.loading import load_target
from drafttrain.trees.chain import ChainPolicy

MODES = {"pipedec": pipedec, "pp": pp, "stpp": stpp, "slm": slm}
BLOCKS = (1, 1, 2)


def new_drafters(folder):
    """The drafters of the jobs: by True a random EDD decoder that reads two blocks, by False the target."""
    target = load_target(str(folder), dtype="float32", device="cpu")
    torch.manual_seed(0)
    edd = DrafterConfig(tapped_blocks=[0, 2])
    small = DrafterConfig(kind="causal_lm", model=str(folder), draft_vocab_size=None)
    return {
        reads: new_drafter(target, config, torch.arange(512)).eval()
        for reads, config in ((True, edd), (False, small))
    }


def main(folder: Path, jobs: Path) -> None:
    """Run all jobs; rank 0 writes what they give, and each rank what it has done and how long each job took.

    A job's `link` holds for all jobs with one, whose channel is another than that of the rest.
    """
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    drafters = new_drafters(folder) if rank == 0 else {}
    ranks = Ranks(rank, int(os.environ["WORLD_SIZE"]), 300)
    ranks.agree("folder", "00ff00ff12345678")
    first, results, logs, seconds = sum(BLOCKS[: rank - 1]), [], [], []
    part = (
        load_part(str(folder), range(first, first + BLOCKS[rank - 1]), torch.float, taps=[0, 2])
        if rank
        else None
    )
    stage = part and Stage(part, 128)
    for job in json.loads(jobs.read_text()):
        layout = Layout(tuple(tuple(group) for group in job["groups"]))
        reads = job["reads_states"]
        taps = [(0, 1), (2, 3)] if reads else []
        if stage is not None:
            stage.part.taps = [block for block, owner in taps if owner == rank]
        member = Member(rank, layout, stage, drafters.get(reads), ChainPolicy(3), taps, 128)
        sampling = SamplingParams(**job["sampling"])
        request = Request(job["prompt"], job["new"], (), sampling, *job["tree"])
        ranks.link = Link(**job["link"]) if job["link"] else None
        channel, started = ranks.channel(1 if job["link"] else 0), time.monotonic()
        output = channel.run(MODES[job["mode"]](member, request))
        seconds.append(time.monotonic() - started)
        results.append([output.tokens, output.hits, output.timesteps])
        logs.append(member.log)
    assert ranks.total([1, rank]) == [4, 6]
    ranks.close()
    (jobs.parent / f"logs{rank}.json").write_text(json.dumps(logs))
    (jobs.parent / f"seconds{rank}.json").write_text(json.dumps(seconds))
    if rank == 0:
        (jobs.parent / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
