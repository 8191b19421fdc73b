"""Is the target's most probable token among a small LM's k most probable ones? On one long text and on short
ones (PipeDec, Figure 3).

    python -m studies.pipedec.top_k --target qwen1.5b.gguf --drafter qwen0.5b.gguf

Both models read the same text; at each position the target's greedy token is looked for.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from drafttrain.data.prompts import read_prompts
from drafttrain.target_lm.cache import CACHE_ARGUMENT
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import write_json
from studies import arguments

TEXTS = ("data/eval/rag.jsonl", "data/eval/drop.jsonl", "data/eval/summarization.jsonl")
LONG, SHORT, SHORT_TEXTS = 30_000, 80, 30  # tokens of the texts; how many short ones
KS = (1, 2, 4, 8, 16)
CHUNK = 1000  # tokens of a forward


def long_text(target: FrozenTarget, n_tokens: int) -> torch.Tensor:
    """Return the ids of passages one after the other, int64 [n].

    Raises:
        UserError: there are too few.
    """
    text = "\n\n".join(prompt.turns[0] for path in TEXTS for prompt in read_prompts(path))
    ids = torch.tensor(target.tokenizer(text)["input_ids"])
    if len(ids) < n_tokens:
        raise UserError(f"text: must have {n_tokens} tokens, got {len(ids)}; give fewer with --new-tokens")
    return ids[:n_tokens]


@torch.no_grad()
def top(model: PreTrainedModel, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k most probable tokens after each token of a text, int64 [n, k]."""
    found, past = [], None
    for chunk in ids.split(CHUNK):
        out = model(input_ids=chunk[None], use_cache=True, **{CACHE_ARGUMENT: past})
        past = out[CACHE_ARGUMENT]
        found.append(out.logits[0].topk(k).indices)
    return torch.cat(found)


def accuracy(target: FrozenTarget, small: FrozenTarget, texts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the share of positions at which the target's token is among the k most probable ones, by k."""
    inside, positions = dict.fromkeys(KS, 0), 0
    for ids in texts:
        wanted = top(target.model, ids, 1)  # [n, 1]
        drafted = top(small.model, ids, max(KS))  # [n, k]
        positions += len(ids)
        for k in KS:
            inside[k] += int((drafted[:, :k] == wanted).any(1).sum())
    return {"positions": positions, "accuracy": {k: n / positions for k, n in inside.items()}}


def compare(target: str, drafter: str, dtype: str, n_tokens: int = LONG) -> dict[str, Any]:
    """Compare two models on a long text and on short ones cut from it."""
    big, small = (load_target(name, dtype=dtype, device="cpu") for name in (target, drafter))
    ids = long_text(big, n_tokens)
    starts = range(0, n_tokens - SHORT + 1, max(1, n_tokens // SHORT_TEXTS))
    short = [ids[start : start + SHORT] for start in starts][:SHORT_TEXTS]
    return {"long": accuracy(big, small, [ids]), "short": accuracy(big, small, short)}


def study(args: Namespace) -> None:
    if args.target is None:
        raise UserError("--target: must be set, got nothing; name the larger model")
    found = compare(args.target, args.drafter, args.dtype, args.new_tokens)
    write_json(args.out / "top_k.json", found)
    for name, row in found.items():
        shares = ", ".join(f"{share:.4f} of {k}" for k, share in row["accuracy"].items())
        print(f"{name} ({row['positions']} positions): {shares}")


def main(argv: Sequence[str] | None = None) -> int:
    names = ("target", "drafter", "dtype", "new_tokens")
    return arguments.run(study, __doc__, argv, names, "runs/pipedec", dtype="bfloat16", new_tokens=LONG)


if __name__ == "__main__":
    arguments.start(main)
