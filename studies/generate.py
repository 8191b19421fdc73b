"""`model.generate(custom_generate=drafttrain.generate)` against plain and assisted `generate`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

import drafttrain
from drafttrain.data.prompts import Prompt
from drafttrain.evaluation.measure import generate_batch
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies import ROOT

DISTRIBUTION = "tests/test_custom_generate.py::test_sampled_rows_have_the_distribution_of_generate"


def ours(bundle: Path) -> dict[str, Any]:
    """Return the options of `generate` for drafted decoding."""
    return {"custom_generate": drafttrain.generate, "drafter": str(bundle)}


def processed() -> dict[str, Any]:
    """Return options of `generate` that change logits by what the text has so far."""
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    return {
        "no_repeat_ngram_size": 4,
        "min_new_tokens": 32,
        "logits_processor": LogitsProcessorList([penalty]),
    }


def differing(
    model: PreTrainedModel,
    target: FrozenTarget,
    bundle: Path,
    tasks: dict[str, tuple[list[Prompt], int, bool]],
    max_new_tokens: int,
    path: Path,
) -> dict[str, dict[str, Any]]:
    """Generate with and without drafts; what the file has is not generated again.

    Args:
        tasks: by name: prompts, how many at once, and whether logits are processed.

    Returns:
        by task: `texts`, and ids of the `differing` ones.
    """
    cells: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}
    for name, (prompts, size, is_processed) in tasks.items():
        cell = cells.setdefault(name, {"texts": 0, "differing": []})
        for first in range(cell["texts"], len(prompts), size):
            chosen = prompts[first : first + size]
            ids = [prompt.token_ids(target.tokenizer) for prompt in chosen]
            options = processed() if is_processed else {}
            plain = generate_batch(model, target, ids, max_new_tokens, **options)
            drafted = generate_batch(model, target, ids, max_new_tokens, **options, **ours(bundle))
            pairs = zip(chosen, plain, drafted, strict=True)
            cell["differing"] += [prompt.id for prompt, one, other in pairs if one != other]
            cell["texts"] += len(chosen)
            write_json(path, cells)
    return cells


def distribution_holds(words: Sequence[str] = ()) -> bool:
    """Run the suite's test of 20,480 samples of a tiny model; return True if it passes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", DISTRIBUTION, *words]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
