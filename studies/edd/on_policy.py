"""A round on what the drafter drafts badly, against as much text drawn at random (ours).

    python -m studies.edd.on_policy

EDD is trained and drafts the first turns of its own training text, for real. The target answers some of them
again: those where accept_len was lowest, or as many others. Training goes on with these answers beside the
first ones, for as many steps each time.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.bundle import load_bundle
from drafttrain.data.config import RegenerateConfig, Source
from drafttrain.data.prompts import Prompt, Task
from drafttrain.data.readers import read_conversations
from drafttrain.evaluation.sweep import count_tokens
from drafttrain.regenerate.responses import RESPONSES
from drafttrain.regenerate.stage import regenerate
from drafttrain.target_lm.loading import resolve_target
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json, write_text
from studies.arguments import start
from studies.edd.bench import (
    CHAIN,
    CONVERSATIONS,
    DRAFTER,
    NEW_TOKENS,
    RATES,
    TRAINING,
    Bench,
    answers,
    run_study,
    summarize,
)

SHARE = 0.25  # of the prompts that are answered again
FAILED = 3.0  # `training.failed_weight` of the last row
ROWS = 8  # prompts drafted for at a time
# no greedy answers: those would be the first ones again
ANSWERS = RegenerateConfig(
    max_turns=1, max_new_tokens=256, max_prompt_tokens=320, greedy_fraction=0.0, seed=1
)


def on_policy(bench: Bench) -> dict[str, Any]:
    """Train EDD that goes on with the same text, with new answers to prompts drawn at random, and with new
    answers where it drafted worst, plain and with more weight on drafts that fail; one seed."""
    text = answers(bench)
    first = bench.trained("edd-plain-seed0", DRAFTER, replace(TRAINING, lr=RATES[2], seed=0), text)
    place = bench.out / "edd-plain-seed0/drafter"
    prompts = first_turns(bench)
    counts = drafted(bench, place, prompts)
    hard = hardest(counts, SHARE)
    drawn = np.random.default_rng(0).choice(len(prompts), len(hard), replace=False)
    made_from = {"same": text}
    for name, chosen in (("random", sorted(drawn.tolist())), ("hardest", hard)):
        made_from[name] = answered(bench, name, [prompts[i] for i in chosen])
    rows = {"EDD before the round": [first]}
    more = replace(TRAINING, lr=RATES[1], seed=0, init_from=str(place))
    for name, of, changes in (
        ("the same text", "same", {}),
        ("and new answers at random", "random", {}),
        ("and new answers to the hardest", "hardest", {}),
        (f"the hardest, failed_weight {FAILED:g}", "hardest", {"failed_weight": FAILED}),
    ):
        run = f"edd-round-{of}{'-failed' if changes else ''}-seed0"
        rows[name] = [bench.trained(run, DRAFTER, replace(more, **changes), made_from[of])]
    return {"rows": summarize(rows), "accept_len of the hardest": shown(counts, hard)}


def first_turns(bench: Bench) -> list[Prompt]:
    """Return what the answers of `bench.answers` were given to."""
    found = []
    for chat in islice(read_conversations(bench.responses), CONVERSATIONS):
        question = next(message.content for message in chat.messages if message.role == "user")
        found.append(Prompt(chat.id, [question]))
    return found


def drafted(bench: Bench, place: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Decode prompts with greedy chains of a drafter; return `Point.by_prompt`, that of an earlier call if
    there was one."""
    kept = bench.out / "on_policy.counts.json"
    if not kept.exists():
        loaded = load_bundle(place, bench.model, "bfloat16")
        counts = count_tokens(loaded, CHAIN, Task("text", list(prompts)), ROWS, NEW_TOKENS, CHAIN)[1]
        write_json(kept, counts)
    return read_json(kept)


def hardest(counts: Sequence[Sequence[int]], share: float) -> list[int]:
    """Return which prompts had the lowest accept_len, in their order.

    Args:
        counts: `Point.by_prompt`; prompts without a step are left out.
        share: of all prompts.
    """
    judged = [i for i, (_, steps, _) in enumerate(counts) if steps]
    judged.sort(key=lambda i: counts[i][0] / counts[i][1])
    return sorted(judged[: round(share * len(counts))])


def shown(counts: Sequence[Sequence[int]], chosen: Sequence[int]) -> dict[str, float]:
    """Return accept_len of chosen prompts and of all."""
    parts = {"chosen": [counts[i] for i in chosen], "all": counts}
    return {name: sum(c[0] for c in part) / sum(c[1] for c in part) for name, part in parts.items()}


def answered(bench: Bench, name: str, prompts: Sequence[Prompt]) -> dict[str, Path]:
    """Let the target answer prompts again; return the states of these answers and the first ones."""
    folder = bench.out / f"round-{name}"
    asked = [
        {"id": f"{prompt.id}-again", "conversations": [{"from": "human", "value": prompt.turns[0]}]}
        for prompt in prompts
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in asked))
    config = replace(ANSWERS, sources=[Source(str(folder / "prompts.jsonl"))])
    regenerate(config, resolve_target(bench.model), folder / "answers", "bfloat16")
    sources = [Source(bench.responses, max_conversations=CONVERSATIONS)]
    sources.append(Source(str(folder / "answers" / RESPONSES)))
    return bench.states(f"round-{name}", sources, [-4])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(on_policy, __doc__, argv)


if __name__ == "__main__":
    start(main)
