"""Self-Draft taken apart, on the real target (their Figures 1 and 5 to 8).

    python -m studies.self_draft ablation --limit 16   without corpus, text, recycling, branches; by category
    python -m studies.self_draft branches --limit 8    number and length of branches, from 2 to 20
    python -m studies.self_draft noise --limit 16      how much of plain decoding survives random tokens
    python -m studies.self_draft code --limit 8        speed on HumanEval and MBPP (of another --target)

`noise` wants `pip install sacrebleu rouge-score`. Tables go to standard output, raw numbers to
`runs/self_draft/<name>.json` (or --out). Nothing is tuned here.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import Prompt, Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog, drafting, measure
from drafttrain.evaluation.metrics import AUTOREGRESSIVE
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import describe_machine
from drafttrain.self_draft.prompt_lookup import PromptLookup
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.self_draft.settings import SETTINGS, SelfDraftSettings, open_corpus
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import write_json
from studies.policies import table

MT_BENCH = Path("data/eval/mt_bench.jsonl")
CODE = {"HumanEval": "data/eval/humaneval.jsonl.gz", "MBPP": "data/eval/mbpp.jsonl"}
NEW_TOKENS = 96
NOISE = (1, 2, 3, 4, 5, 6, 8, 10)  # random tokens after the prompt
SIZES = (2, 4, 6, 10, 20)  # numbers and lengths of branches
FULL = SelfDraftConfig(branches=6, branch_length=6, budget=12)
ABLATIONS: dict[str, tuple[dict[str, Any], bool]] = {  # what is changed, and whether the corpus stays
    "everything": ({}, True),
    "without corpus": ({}, False),
    "without text": ({"context": False}, True),
    "without recycling": ({"recycle": 0}, True),
    "without branches": ({"branches": 0}, True),
    "branches and corpus (the paper)": ({"context": False, "recycle": 0}, True),
    "text and corpus (prompt lookup with a corpus)": ({"recycle": 0, "branches": 0}, True),
    "text alone": ({"recycle": 0, "branches": 0}, False),
}


class Bench:
    """A target, its cache, and what decoding with a configuration comes to."""

    def __init__(self, target: FrozenTarget, ngrams: str):
        self.target, self.corpus = target, open_corpus(target, ngrams)
        if self.corpus is None:
            raise UserError(f"{ngrams}: no n-gram cache here; build one with drafttrain build-ngrams")
        has_settings = (Path(ngrams) / SETTINGS).exists()
        self.settings = SelfDraftSettings.load(ngrams) if has_settings else SelfDraftSettings()

    def proposer(self, config: SelfDraftConfig, corpus: bool = True) -> SelfDraft:
        settings = replace(self.settings, config=config, verify=None)
        return settings.proposer(self.target, self.corpus if corpus else None)

    def decode(self, proposer: SelfDraft, prompts: Sequence[Prompt]) -> DecodeStats:
        stats = DecodeStats()
        for prompt in prompts:
            ids = prompt.token_ids(self.target.tokenizer)
            stats += decode_all(self.target, proposer, [ids], NEW_TOKENS)[1]
        return stats


def ablation(bench: Bench, limit: int | None) -> dict[str, Any]:
    """accept_len of each configuration, on all prompts and by category of MT-bench."""
    prompts = spread(read_prompts(MT_BENCH), limit)
    lines = map(json.loads, MT_BENCH.read_text(encoding="utf-8").splitlines())
    category = {str(row["question_id"]): row["category"] for row in lines}
    names = sorted({category[prompt.id] for prompt in prompts})
    found: dict[str, Any] = {}
    print(f"{'':46} all   " + " ".join(f"{name[:8]:8}" for name in names))
    for title, (change, corpus) in ABLATIONS.items():
        row, total, by_source = {}, DecodeStats(), {}
        for name in names:
            proposer = bench.proposer(replace(FULL, **change), corpus)
            stats = bench.decode(proposer, [prompt for prompt in prompts if category[prompt.id] == name])
            row[name], total = stats.accept_len, total + stats
            for source, number in proposer.accepted.items():
                by_source[source] = by_source.get(source, 0) + number
        found[title] = {"accept_len": total.accept_len, "categories": row, "accepted_by_source": by_source}
        print(f"{title:46} {total.accept_len:.2f}  " + " ".join(f"{row[name]:8.2f}" for name in names))
    return found


def branches(bench: Bench, limit: int | None) -> dict[str, Any]:
    """accept_len, tokens per forward and tokens per second by number N and length L of branches, in the
    paper's setting."""
    prompts = spread(read_prompts(MT_BENCH), limit)
    found: dict[str, Any] = {}
    print("N   L   accept_len  verify_tokens  tokens/s")
    for number in SIZES:
        for length in SIZES:
            config = replace(
                FULL, branches=number, branch_length=length, gram=min(4, length), context=False, recycle=0
            )
            stats = bench.decode(bench.proposer(config), prompts)
            verified = stats.verify_tokens / max(stats.steps, 1)
            found[f"{number}x{length}"] = {
                "accept_len": stats.accept_len,
                "verify_tokens_per_step": verified,
                "tokens_per_second": stats.tokens_per_second,
            }
            row = f"{number:<3} {length:<3} {stats.accept_len:10.2f} {verified:14.1f}"
            print(f"{row} {stats.tokens_per_second:9.1f}", flush=True)
    return found


def noise(bench: Bench, limit: int | None) -> dict[str, Any]:
    """BLEU and ROUGE-L of answers after k random tokens, against the answer without them."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu import corpus_bleu
    except ImportError:
        raise UserError("noise: pip install sacrebleu rouge-score first") from None
    target, tokenizer = bench.target, bench.target.tokenizer
    prompts, scorer = spread(read_prompts(MT_BENCH), limit), RougeScorer(["rouge1", "rougeL"])
    special = set(tokenizer.all_special_ids)
    texts = [token for token in range(target.vocab_size) if token not in special]

    def answer(ids: list[int]) -> str:
        output = decode_all(target, NoProposer(), [ids], NEW_TOKENS)[0][0]
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


def code(bench: Bench, limit: int | None) -> dict[str, Any]:
    """Measure what ships, as it was tuned, against plain decoding and prompt lookup on code, interleaved."""
    target = bench.target
    methods = {
        AUTOREGRESSIVE: drafting(target, NoProposer()),
        "lookup": drafting(target, PromptLookup(10)),
        "ngram": drafting(target, bench.settings.proposer(target, bench.corpus)),
        "ngram, no corpus": drafting(target, bench.settings.proposer(target, None)),
    }
    found: dict[str, Any] = {}
    print(f"{'task':10} {'method':22} accept_len  tokens/s  speedup")
    for name, path in CODE.items():
        task = Task(name, spread(read_prompts(path), limit))
        with tempfile.TemporaryDirectory() as folder:
            log = MeasurementLog(Path(folder) / "measurements.jsonl", "")
            rows = table(measure(target, methods, task, log, NEW_TOKENS))
        found[name] = rows
        for method, row in rows.items():
            speed = row["tokens_per_second"] / rows[AUTOREGRESSIVE]["tokens_per_second"]
            numbers = f"{row['accept_len']:10.2f} {row['tokens_per_second']:9.1f} {speed:8.2f}"
            print(f"{name:10} {method:22} {numbers}", flush=True)
    return found


STUDIES = {"ablation": ablation, "branches": branches, "noise": noise, "code": code}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one study; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--ngrams", default="model_cards/smollm2-135m-edd", metavar="DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of MT-bench (default: all)")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--out", metavar="DIR", default="runs/self_draft")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit {args.limit}: at least 1 prompt is needed")
    try:
        target = load_for_decoding(args.target, dtype=args.dtype)
        target.tap([])
        found = STUDIES[args.study](Bench(target, args.ngrams), args.limit)
    except UserError as error:
        print(f"self_draft.py: {error}", file=sys.stderr)
        return 2
    Path(args.out).mkdir(parents=True, exist_ok=True)
    write_json(Path(args.out) / f"{args.study}.json", found)
    machine = describe_machine(target.device, target.dtype)
    write_json(Path(args.out) / f"{args.study}_machine.json", machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
