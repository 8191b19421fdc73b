"""Texts decoded with drafts, alone and in batches, against plain ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafttrain.data.prompts import Prompt, read_prompts, spread
from drafttrain.inference.acceptance import accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.provenance import content_hash, git_commit
from drafttrain.utils.writing import write_json
from studies.figures.machine_setting import DRAFTER, MT_BENCH, in_dtype, load
from studies.goals import Measured, Run

CPU = torch.device("cpu")
TEXTS = {  # that drafting must not change, and how many of each
    "mt_bench": (MT_BENCH, 80),
    "gsm8k": ("data/eval/gsm8k_test_80.jsonl", 40),
    "humaneval": ("data/eval/humaneval.jsonl.gz", 40),
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
EXACT_TOKENS = 48


def drafted_equals_plain(run: Run, folder: Path) -> Measured:
    """Compare texts decoded with drafts, alone and four at once, greedy and seeded, with plain ones alone."""
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
