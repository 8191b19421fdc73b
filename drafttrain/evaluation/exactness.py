"""Is the output really the same? And where it is not: a near-tie of the target, or a bug?

In fp32 greedy output must equal plain decoding token by token, up to exact ties. In bf16 the shape of a
forward alone changes logits by some tenths, so outputs part at near-ties; the gap between the two best logits
tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafttrain.evaluation.measure import (
    MeasurementLog,
    autoregressive,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.evaluation.prompts import Task
from drafttrain.inference.proposer import Proposer
from drafttrain.target.frozen import FrozenTarget


@dataclass
class Difference:
    """Where two outputs part.

    Attributes:
        position: index of the first differing token among the new ones.
        expected, found: the two tokens there; -1 where an output had ended.
        top2: the target's two most probable tokens at this place, from one forward over everything before it.
        gap: difference of their logits. Within the rounding of the type it is a tie, above that a bug.
        logit_std: standard deviation of the logits, to compare the gap with.
    """

    position: int
    expected: int
    found: int
    top2: list[int]
    gap: float
    logit_std: float


@torch.no_grad()
def first_difference(
    target: FrozenTarget, prompt_ids: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    """Compares two continuations of a prompt; None if they are equal."""
    if list(expected) == list(found):
        return None
    pairs = zip([*expected, -1], [*found, -1])
    position = next(i for i, (a, b) in enumerate(pairs) if a != b)
    ids = torch.tensor([[*prompt_ids, *expected[:position]]], device=target.device)  # [1, n]
    logits = target.head(target.encode(ids, torch.zeros_like(ids)).final[0, -1]).float()  # [V]
    best = logits.topk(2)
    tokens = [list(output)[position] if position < len(output) else -1 for output in (expected, found)]
    gap = (best.values[0] - best.values[1]).item()
    return Difference(position, *tokens, best.indices.tolist(), gap, logits.std().item())


def check_lossless(
    target: FrozenTarget,
    proposer: Proposer,
    tasks: Sequence[Task],
    max_new_tokens: int,
    log: MeasurementLog,
    on_turn: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Compares drafting, our autoregressive decoding and `transformers` `generate`, first turns only.

    Returns:
        `prompts`, `mismatches` (prompts on which not all three agree), `dtype`, and `differences` with the
        place of each and the target's top-2 logit gap there.
    """
    methods = {
        AUTOREGRESSIVE: autoregressive(target),
        TRANSFORMERS: transformers_generate(target),
        "drafting": drafting(target, proposer),
    }
    prompts, mismatched, differences = 0, 0, []
    for task in tasks:
        task = Task(task.name, task.prompts)
        chats = {prompt.id: prompt for prompt in task.prompts}
        for found in measure(target, methods, task, log, max_new_tokens, on_turn=on_turn):
            outputs = {name: run.token_ids for name, run in found.runs.items()}
            expected = outputs.pop(AUTOREGRESSIVE)
            prompts += 1
            mismatched += any(output != expected for output in outputs.values())
            for name, output in outputs.items():
                ids = chats[found.prompt].token_ids(target.tokenizer)
                if difference := first_difference(target, ids, expected, output):
                    where = {"task": task.name, "prompt": found.prompt, "method": name}
                    differences.append(where | asdict(difference))
    dtype = str(target.dtype).removeprefix("torch.")
    return {"prompts": prompts, "mismatches": mismatched, "dtype": dtype, "differences": differences}
