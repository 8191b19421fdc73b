"""A rank of `test_distributed.py`: runs several jobs over one connection."""

import json
import os
import sys
from pathlib import Path

import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.baselines import pp, stpp
from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.member import Layout, Member, Request
from drafttrain.pipeline.part import load_part
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.stage import Stage
from drafttrain.target_lm.loading import load_target
from drafttrain.trees.chain import ChainPolicy

MODES = {"pipedec": pipedec, "pp": pp, "stpp": stpp}
BLOCKS = (1, 1, 2)


def new_random_drafter(folder):
    """The drafter of all jobs: a random EDD decoder that reads two blocks."""
    target = load_target(str(folder), dtype="float32", device="cpu")
    torch.manual_seed(0)
    return new_drafter(target, DrafterConfig(tapped_blocks=[0, 2]), torch.arange(512)).eval()


def main(folder: Path, jobs: Path) -> None:
    """Run all jobs; rank 0 writes what they give."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    drafter = new_random_drafter(folder) if rank == 0 else None
    ranks = Ranks(rank, int(os.environ["WORLD_SIZE"]), 60)
    ranks.agree("folder", "00ff00ff12345678")
    first, results = sum(BLOCKS[: rank - 1]), []
    part = (
        load_part(str(folder), range(first, first + BLOCKS[rank - 1]), torch.float, taps=[0, 2])
        if rank
        else None
    )
    stage = part and Stage(part, 128)
    for job in json.loads(jobs.read_text()):
        layout = Layout(tuple(tuple(group) for group in job["groups"]))
        member = Member(rank, layout, stage, drafter, ChainPolicy(3), [(0, 1), (2, 3)], 128)
        sampling = SamplingParams(**job["sampling"])
        request = Request(job["prompt"], job["new"], (), sampling, *job["tree"])
        output = ranks.channel().run(MODES[job["mode"]](member, request))
        results.append([output.tokens, output.hits, output.timesteps])
    assert ranks.total([1, rank]) == [4, 6]
    ranks.close()
    if rank == 0:
        (jobs.parent / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
