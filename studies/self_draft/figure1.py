"""Figure 1 of the Self-Draft paper: how much of plain decoding survives random tokens after the prompt.

pip install sacrebleu rouge-score
python -m studies.self_draft.figure1 --limit 16
"""

import random
import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.utils.errors import UserError
from studies.arguments import start
from studies.self_draft.bench import Bench, run_study

NOISE = (1, 2, 3, 4, 5, 6, 8, 10)  # random tokens after the prompt


def noise(bench: Bench, args: Namespace) -> dict[str, Any]:
    """Measure BLEU and ROUGE-L of answers after k random tokens, against the answer without them."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu import corpus_bleu
    except ImportError:
        raise UserError("noise: pip install sacrebleu rouge-score first") from None
    target, tokenizer = bench.target, bench.target.tokenizer
    prompts, scorer = spread(read_prompts(args.prompts), args.limit), RougeScorer(["rouge1", "rougeL"])
    special = set(tokenizer.all_special_ids)
    texts = [token for token in range(target.vocab_size) if token not in special]

    def answer(ids: list[int]) -> str:
        output = decode_all(target, NoProposer(), [ids], args.new_tokens)[0][0]
        return tokenizer.decode(output, skip_special_tokens=True)

    plain = [answer(prompt.token_ids(tokenizer)) for prompt in prompts]
    found: dict[str, Any] = {}
    print("k   BLEU  ROUGE-1  ROUGE-L")
    for k in NOISE:
        draws = random.Random(k)
        noisy = [answer([*prompt.token_ids(tokenizer), *draws.choices(texts, k=k)]) for prompt in prompts]
        scores = [scorer.score(*pair) for pair in zip(plain, noisy)]
        row = {"bleu": corpus_bleu(noisy, [plain]).score / 100}
        row |= {
            name: statistics.mean(score[name].fmeasure for score in scores) for name in ("rouge1", "rougeL")
        }
        found[str(k)] = row
        print(f"{k:<3} {row['bleu']:.3f} {row['rouge1']:8.3f} {row['rougeL']:8.3f}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Figure 1; return the exit status."""
    return run_study(noise, __doc__, argv, ("prompts",))


if __name__ == "__main__":
    start(main)
