"""Is the output really the same? And where it is not: a near-tie of the target, or a bug?

In fp32 greedy output must equal plain decoding token by token, up to exact ties. In bf16 the shape of a
forward alone changes logits by some tenths, so outputs part at near-ties; the gap between the two best logits
tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafttrain.evaluation.measure import MeasurementLog, check_length, generate_batch
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, Measurement, MethodRun
from drafttrain.evaluation.prompts import Task
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.loading import load_stock_model
from drafttrain.target.probe import TOLERANCE

METHODS = (AUTOREGRESSIVE, TRANSFORMERS, "drafting")
BATCH = 8


@dataclass
class Difference:
    """Where two outputs part.

    Attributes:
        position: index of the first differing token among the new ones.
        expected, found: the two tokens there; -1 where an output had ended.
        top2: the target's two most probable tokens at this place, from one forward over everything before it.
        gap: difference of their logits.
        behind: how far the worse of the two differing tokens is behind the best logit; None where an output
            had ended. Within the rounding of the type it is a tie, above that a bug.
        logit_std: standard deviation of the logits, to compare the gap with.
    """

    position: int
    expected: int
    found: int
    top2: list[int]
    gap: float
    behind: float | None
    logit_std: float

    def is_tie(self, dtype: torch.dtype) -> bool:
        """Whether rounding alone can have decided: both tokens are within what the same token's logits were
        seen to differ by when it is forwarded in another company."""
        return self.behind is not None and self.behind < TOLERANCE[dtype] * self.logit_std


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
    behind = (best.values[0] - logits[tokens].min()).item() if min(tokens) >= 0 else None
    return Difference(position, *tokens, best.indices.tolist(), gap, behind, logits.std().item())


def check_lossless(
    target: FrozenTarget,
    proposer: Proposer,
    tasks: Sequence[Task],
    max_new_tokens: int,
    log: MeasurementLog,
    on_turn: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Compares drafting, our autoregressive decoding and `transformers` `generate`, first turns only.

    All three decode `BATCH` prompts at once: nothing is timed here, and in fp32 a row does not depend on its
    batch (`batch_mismatches`).

    Returns:
        `prompts`, `mismatches` (prompts on which not all three agree), `dtype`, and `differences` with the
        place of each and the target's top-2 logit gap there.
    """
    model = load_stock_model(target)
    prompts, mismatched, differences = 0, 0, []
    for task in tasks:
        for first in range(0, len(task.prompts), BATCH):
            group = task.prompts[first : first + BATCH]
            ids = [prompt.token_ids(target.tokenizer) for prompt in group]
            found = [log.find(task.name, prompt.id, 0, 0, METHODS) for prompt in group]
            if None in found:
                for prompt, prompt_ids in zip(group, ids):
                    check_length(target, prompt_ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")
                outputs = (
                    decode_all(target, NoProposer(), ids, max_new_tokens)[0],
                    generate_batch(model, target, ids, max_new_tokens),
                    decode_all(target, proposer, ids, max_new_tokens)[0],
                )
                for i, (prompt, prompt_ids) in enumerate(zip(group, ids)):
                    runs = {
                        name: MethodRun(0.0, rows[i]) for name, rows in zip(METHODS, outputs)
                    }  # not timed
                    found[i] = Measurement(task.name, prompt.id, 0, 0, len(prompt_ids), runs)
                    log.add(found[i])
            for measurement, prompt_ids in zip(found, ids):
                outputs = {name: run.token_ids for name, run in measurement.runs.items()}
                expected = outputs.pop(AUTOREGRESSIVE)
                prompts += 1
                mismatched += any(output != expected for output in outputs.values())
                for name, output in outputs.items():
                    if difference := first_difference(target, prompt_ids, expected, output):
                        where = {"task": task.name, "prompt": measurement.prompt, "method": name}
                        differences.append(where | asdict(difference))
                on_turn()
    dtype = str(target.dtype).removeprefix("torch.")
    return {"prompts": prompts, "mismatches": mismatched, "dtype": dtype, "differences": differences}
