"""Compare outputs with and without drafts, and distinguish near-ties of the target from bugs.

In fp32 greedy output must equal plain decoding token by token, up to exact ties. In bf16 the shape of a
forward alone changes logits by some tenths, so outputs differ from near-ties on. Which gap counts as a tie is
measured: the same token is forwarded with different numbers of other tokens, and the differences of its
logits are rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafttrain.data.prompts import Task
from drafttrain.evaluation.measure import MeasurementLog, generate_batch
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, Measurement, MethodRun
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.stock import load_stock_model

DRAFTING = "drafting"
METHODS = (AUTOREGRESSIVE, TRANSFORMERS, DRAFTING)
BATCH = 8
WIDTHS = (1, 4, 8)  # tokens per forward, for the rounding of the same token
AT_LEAST = 16  # tokens that are forwarded at these widths
BEST = 10  # most probable tokens whose rounding counts: small logits far from the best ones round less


@dataclass
class Difference:
    """The first place where two outputs differ.

    Attributes:
        position: index of the first differing token among the new ones.
        expected, found: the two tokens there; -1 where an output had ended.
        top2: the target's two most probable tokens at this place, from one forward over everything before it.
        gap: difference of their logits.
        below_best: distance of the worse of the two differing tokens from the best logit; None where an
            output had ended. Up to the noise it is a tie, above that a bug.
        logit_std: standard deviation of the logits, to compare the gap with.
        noise: largest change of a difference of two logits by rounding, measured here (`rounding_noise`).
    """

    position: int
    expected: int
    found: int
    top2: list[int]
    gap: float
    below_best: float | None
    logit_std: float
    noise: float

    def is_tie(self) -> bool:
        """Return True if rounding alone can have decided between the two tokens."""
        return self.below_best is not None and self.below_best <= self.noise


@torch.no_grad()
def rounding_noise(target: FrozenTarget, prompt_ids: Sequence[int], tokens: Sequence[int]) -> float:
    """Measure how much rounding changes the difference of two logits after a prompt and some new tokens.

    The same text is forwarded by the stock model at once, by ours at once, and with the new tokens (the last
    16 at least) 1, 4 and 8 at a time over a cache. Exact arithmetic would give the same logits each time.

    Returns:
        the largest change, between any two of these forwards, of a difference of two logits among the best.
    """
    text = [*prompt_ids, *tokens]
    ids = torch.tensor([text], device=target.device)  # [1, n]
    rows = [
        target.model(input_ids=ids, use_cache=False).logits[0, -1].float(),  # [V]
        target.head(target.encode(ids, torch.zeros_like(ids)).final[0, -1]).float(),  # [V]
    ]
    new = max(1, min(len(prompt_ids), len(text) - AT_LEAST))
    for width in WIDTHS:
        cache = target.new_cache(1, len(text))
        parts = [text[:new], *(text[start : start + width] for start in range(new, len(text), width))]
        for part in parts:
            order = torch.arange(len(part), device=target.device)  # [w]
            seen = order[:, None] >= order  # [w, w]
            states = target.forward(cache, torch.tensor([part], device=target.device), order, seen)
            cache.commit(order[None], torch.tensor([len(part)], device=target.device))
        rows.append(target.head(states.final[0, -1]).float())  # [V]
    best = rows[0].topk(min(BEST, target.vocab_size)).indices  # [10]
    logits = torch.stack([row[best] for row in rows])  # [5, 10]
    changes = logits[:, None] - logits  # [5, 5, 10]
    return (changes.amax(-1) - changes.amin(-1)).max().item()


@torch.no_grad()
def first_difference(
    target: FrozenTarget, prompt_ids: Sequence[int], expected: Sequence[int], output: Sequence[int]
) -> Difference | None:
    """Return the first difference between two continuations of a prompt; None if they are equal."""
    if list(expected) == list(output):
        return None
    pairs = zip([*expected, -1], [*output, -1])
    position = next(i for i, (a, b) in enumerate(pairs) if a != b)
    ids = torch.tensor([[*prompt_ids, *expected[:position]]], device=target.device)  # [1, n]
    logits = target.head(target.encode(ids, torch.zeros_like(ids)).final[0, -1]).float()  # [V]
    best = logits.topk(2)
    tokens = [list(text)[position] if position < len(text) else -1 for text in (expected, output)]
    gap = (best.values[0] - best.values[1]).item()
    below_best = (best.values[0] - logits[tokens].min()).item() if min(tokens) >= 0 else None
    noise = rounding_noise(target, prompt_ids, expected[:position])
    return Difference(position, *tokens, best.indices.tolist(), gap, below_best, logits.std().item(), noise)


def check_lossless(
    target: FrozenTarget,
    proposer: Proposer,
    tasks: Sequence[Task],
    max_new_tokens: int,
    log: MeasurementLog,
    on_turn: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Compare drafting, our autoregressive decoding and `generate` of transformers, first turns only.

    All three decode `BATCH` prompts at once: nothing is timed here, and in fp32 a row does not depend on its
    batch (`batch_mismatches`).

    Returns:
        `prompts`, `mismatches` (prompts whose output with drafts differs from plain decoding),
        `transformers_mismatches` (the same for `generate`), `dtype`, and `differences` with the place of each
        and the target's top-2 logit gap there.
    """
    model = load_stock_model(target)
    prompts, mismatched, differences = 0, dict.fromkeys((TRANSFORMERS, DRAFTING), 0), []
    for task in tasks:
        for first in range(0, len(task.prompts), BATCH):
            group = task.prompts[first : first + BATCH]
            ids = [prompt.token_ids(target.tokenizer) for prompt in group]
            decoded = [log.find(task.name, prompt.id, 0, 0, METHODS) for prompt in group]
            if None in decoded:
                for prompt, prompt_ids in zip(group, ids):
                    target.check_length(prompt_ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")
                outputs = (
                    decode_all(target, NoProposer(), ids, max_new_tokens)[0],
                    generate_batch(model, target, ids, max_new_tokens),
                    decode_all(target, proposer, ids, max_new_tokens)[0],
                )
                for i, (prompt, prompt_ids) in enumerate(zip(group, ids)):
                    if decoded[i] is not None:
                        continue
                    runs = {name: MethodRun(0.0, rows[i]) for name, rows in zip(METHODS, outputs)}
                    decoded[i] = Measurement(task.name, prompt.id, 0, 0, len(prompt_ids), runs)
                    log.add(decoded[i])
            for measurement, prompt_ids in zip(decoded, ids):
                texts = {name: run.token_ids for name, run in measurement.runs.items()}
                expected = texts.pop(AUTOREGRESSIVE)
                prompts += 1
                for name, text in texts.items():
                    mismatched[name] += text != expected
                for name, text in texts.items():
                    if difference := first_difference(target, prompt_ids, expected, text):
                        where = {"task": task.name, "prompt": measurement.prompt, "method": name}
                        differences.append(where | asdict(difference))
                on_turn()
    dtype = dtype_name(target.dtype)
    return {
        "prompts": prompts,
        "mismatches": mismatched[DRAFTING],
        "transformers_mismatches": mismatched[TRANSFORMERS],
        "dtype": dtype,
        "differences": differences,
    }
