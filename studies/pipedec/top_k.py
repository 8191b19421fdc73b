"""Is the target's most probable token among a small LM's k most probable ones? On one long text and on short
ones (PipeDec, Figure 3).

    python -m studies.pipedec.top_k --target qwen1.5b.gguf --drafter qwen0.5b.gguf
    python -m studies.pipedec.top_k --target qwen1.5b.gguf --drafter qwen0.5b.gguf --texts code answers

Both models read the same text, passages or this package's source; at each position the target's greedy token
is looked for. Answers are the target's own greedy ones to prompts of the paper's tasks, as in the paper.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.target_lm.cache import CACHE_ARGUMENT
from drafttrain.target_lm.loading import load_for_decoding, load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import write_json
from studies import ROOT, arguments
from studies.pipedec.tasks import read_tasks

TEXTS = ("data/eval/rag.jsonl", "data/eval/drop.jsonl", "data/eval/summarization.jsonl")
LONG, SHORT, SHORT_TEXTS = 30_000, 80, 30  # tokens of the texts; how many short ones
KS = (1, 2, 4, 8, 16)
CHUNK = 1000  # tokens of a forward
ANSWER = 64  # tokens at most


def passages() -> str:
    """Return passages one after the other."""
    return "\n\n".join(prompt.turns[0] for path in TEXTS for prompt in read_prompts(path))


def code() -> str:
    """Return the source of this package, in the order of its paths."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "drafttrain").rglob("*.py")))


def long_text(target: FrozenTarget, text: str, n_tokens: int) -> torch.Tensor:
    """Return the first ids of a text, int64 [n].

    Raises:
        UserError: there are too few.
    """
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
    both = [(top(target.model, ids, 1), top(small.model, ids, max(KS))) for ids in texts]
    return shares(*map(torch.cat, zip(*both)))


def shares(wanted: torch.Tensor, drafted: torch.Tensor) -> dict[str, Any]:
    """Return the share of tokens [n, 1] that are among the first k drafted ones [n, 16], by k."""
    return {
        "positions": len(wanted),
        "accuracy": {k: float((drafted[:, :k] == wanted).any(1).double().mean()) for k in KS},
    }


def compare(
    target: str, drafter: str, dtype: str, n_tokens: int = LONG, text: str | None = None
) -> dict[str, Any]:
    """Compare two models on a long text and on short ones cut from it, passages unless it is given."""
    big, small = (load_target(name, dtype=dtype, device="cpu") for name in (target, drafter))
    ids = long_text(big, passages() if text is None else text, n_tokens)
    starts = range(0, n_tokens - SHORT + 1, max(1, n_tokens // SHORT_TEXTS))
    short = [ids[start : start + SHORT] for start in starts][:SHORT_TEXTS]
    return {"long": accuracy(big, small, [ids]), "short": accuracy(big, small, short)}


def on_answers(target: str, drafter: str, dtype: str, limit: int = 10) -> dict[str, Any]:
    """Look for the tokens of the target's own greedy answers.

    Args:
        limit: prompts of each task.
    """
    big = load_for_decoding(target, dtype=dtype, device="cpu")
    chosen = (prompt for prompts in read_tasks({}, limit).values() for prompt in prompts)
    prompts = [prompt.token_ids(big.tokenizer) for prompt in chosen]
    answers, _ = decode_all(big, NoProposer(), prompts, ANSWER)
    del big  # before the other one is loaded
    small = load_target(drafter, dtype=dtype, device="cpu")
    drafted = [
        top(small.model, torch.tensor([*prompt, *answer[:-1]]), max(KS))[len(prompt) - 1 :]  # [n, k]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return shares(torch.tensor(sum(answers, []))[:, None], torch.cat(drafted))


def study(args: Namespace) -> None:
    if args.target is None:
        raise UserError("--target: must be set, got nothing; name the larger model")
    models = args.target, args.drafter, args.dtype
    for text in args.texts:
        if text == "answers":
            found = {"answers": on_answers(*models)}
        else:
            found = compare(*models, args.new_tokens, code() if text == "code" else None)
        write_json(args.out / ("top_k.json" if text == "passages" else f"top_k_{text}.json"), found)
        for name, row in found.items():
            words = ", ".join(f"{share:.4f} of {k}" for k, share in row["accuracy"].items())
            print(f"{text}, {name} ({row['positions']} positions): {words}")


def main(argv: Sequence[str] | None = None) -> int:
    names = ("target", "drafter", "dtype", "new_tokens", "texts")
    return arguments.run(study, __doc__, argv, names, "runs/pipedec", dtype="bfloat16", new_tokens=LONG)


if __name__ == "__main__":
    arguments.start(main)
