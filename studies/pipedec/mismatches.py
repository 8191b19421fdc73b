"""Do all modes write what the whole target writes? In fp32, greedy and sampled, for one to four stages; trees
in flight grow by one layer in a timestep, by three, and best-first. The committed EDD drafter drafts, which
reads the target's states, and then, for two and four stages, the target for itself, so that trees follow the
prompt.

All ranks of a pipeline are stepped in one process, so that a machine with two cores can hold four; the
processes of `tests/pipeline/test_distributed.py` run the same programs. Every core has a pipeline of its own.
"""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from drafttrain.drafters.causal_lm import as_drafter
from drafttrain.inference.decode import decode_all
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.pipeline.config import balanced
from drafttrain.pipeline.member import Layout, Member, Request
from drafttrain.pipeline.part import load_part, stop_tokens
from drafttrain.pipeline.stage import Stage
from drafttrain.pipeline.transport import run_locally
from drafttrain.pipeline_decoder import MODES
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.threads import usable_cores
from studies.pipedec.modes import MODES as NAMES
from studies.seed.pairs import Pair

STAGES, LM_STAGES = (1, 2, 3, 4), (2, 4)
GROWTH = ((1, False), (3, False), (1, True), (3, True))  # layers, best_first
TREE, WIDTH, CHILDREN = "eagle2:top_k=3,max_depth=4,total=8", 4, 4
DRAWS = {"greedy": SamplingParams(), "sampled": SamplingParams(0.6, top_p=0.9, top_k=80, seed=1)}
Rows = list[dict[str, Any]]


def compare_both(pair: Pair, place: str, prompts: Sequence[list[int]], new_tokens: int) -> Rows:
    """Compare with the pair's drafter, and with the target, whose files are at `place`, in its stead; return
    how many texts of each way differ from the whole target's."""
    small = as_drafter(place, pair.target)
    small.pack()
    by_drafter = (pair, STAGES), (replace(pair, drafter=small, source=place), LM_STAGES)
    both = [(own, n) for own, stages in by_drafter for n in stages]
    texts = {
        name: decode_all(pair.target, NoProposer(), prompts, new_tokens, sampling=[one] * len(prompts))[0]
        for name, one in DRAWS.items()
    }
    jobs = [lambda own=own, n=n: compare(own, place, prompts, new_tokens, texts, n) for own, n in both]
    forks = multiprocessing.get_context("fork")  # which share the weights
    with ProcessPoolExecutor(usable_cores(), forks, _begin, (jobs,)) as pool:
        return [row for rows in pool.map(_do, range(len(jobs))) for row in rows]


_jobs: Sequence[Callable[[], Rows]] = ()  # of a process


def _begin(jobs: Sequence[Callable[[], Rows]]) -> None:
    global _jobs
    _jobs = jobs
    torch.set_num_threads(1)  # a fork has none of its parent's threads


def _do(job: int) -> Rows:
    return _jobs[job]()


@torch.no_grad()
def compare(
    pair: Pair,
    place: str,
    prompts: Sequence[list[int]],
    new_tokens: int,
    texts: Mapping[str, Sequence[list[int]]],
    n: int,
) -> Rows:
    """Decode all prompts with `n` stages in all ways, and compare with the whole target's texts."""
    taps = list(getattr(pair.drafter.config, "tapped_blocks", []))
    room = max(map(len, prompts)) + new_tokens + 64
    policy, n_blocks, rows = parse_policy(TREE), pair.target.n_blocks, []
    stop = stop_tokens(place, pair.target.tokenizer.eos_token_id)
    sizes = balanced(n_blocks, n, 0.0)
    layout, members = Layout(tuple((rank,) for rank in range(n))), []
    ends = [sum(sizes[: i + 1]) for i in range(n)]
    owners = [next(r for r, end in enumerate(ends) if tap < end or end == n_blocks) for tap in taps]
    for rank, end in enumerate(ends):
        part = load_part(place, range(end - sizes[rank], end), torch.float, taps=taps)
        part.pack()
        drafter = pair.drafter if rank == 0 else None
        members.append(
            Member(rank, layout, Stage(part, room), drafter, policy, list(zip(taps, owners)), room)
        )
    for name, sampling in DRAWS.items():
        ways = [(mode, *how) for mode in NAMES for how in (GROWTH if mode == "pipedec" else GROWTH[:1])]
        for mode, layers, best_first in ways:
            differ, program = 0, MODES[mode]
            for prompt, text in zip(prompts, texts[name]):
                tree = WIDTH, CHILDREN, policy.max_depth, layers, best_first
                base = Request(prompt, new_tokens, stop, sampling, *tree)
                output = run_locally([program(member, replace(base)) for member in members])[0]
                differ += output.tokens != text
            way = {"follows": not taps, "stages": n, "mode": mode, "layers": layers}
            way |= {"best_first": best_first, "draws": name}
            rows.append(way | {"texts": len(prompts), "differ": differ})
            print(rows[-1], flush=True)
    return rows
