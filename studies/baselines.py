"""EDD beside the drafters that its paper compares it with, trained on the same states for as many steps.

    python -m studies.baselines table1     EDD, EAGLE, MEDUSA-1 and VDM as chains of 5 (EDD paper, Table 1)
    python -m studies.baselines table3     without states, on tokens, with blocks of one length (Table 3)
    python -m studies.baselines figure5    EDD reading other blocks, on GSM8K train (Figure 5)
    python -m studies.baselines joined     EDD that reads the last hidden state, too
    python -m studies.baselines wide       EDD with as many heads of keys and values as of queries
    python -m studies.baselines started    EDD whose layer starts from one of the target's
    python -m studies.baselines anchored   EDD that joins each token with the newest verified state
    python -m studies.baselines long       EDD and EAGLE, five times as long on three times the text
    python -m studies.baselines equal      rivals and ablations as long, each at its best rate at that length
    python -m studies.baselines mtp        an MTP-style EAGLE (C2T paper, Appendix F), and anchored EDD
    python -m studies.baselines exports    drafters that other engines can serve: frozen heads, all tokens

Every kind gets the same learning rates to choose from, in short trainings judged on prompts of no benchmark;
with the best it is trained longer, from three seeds. `equal`, which the figures are of, chooses the rate in
trainings of the full length. Trained drafters and raw results lie under
`runs/baselines/` (or --out); what is there is not trained again. `--limit` and `--max-steps` make all of it
smaller; `--kinds` shares the work of table1, long and equal between processes.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.prompts import read_prompts, spread
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.hidden_states.collect import collect
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.loading import load_for_decoding, load_tokenizer, resolve_target
from drafttrain.training.config import TrainingConfig
from drafttrain.training.train import train
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import new_folder, read_json, write_json
from drafttrain.utils.provenance import git_commit

TARGET = "smollm2-135m-instruct"
RESPONSES = "data/train/responses.jsonl.gz"  # written by the target itself
CONVERSATIONS = 1600  # of them
MATH = "gsm8k"  # how ids of answers to GSM8K's training questions begin
TASKS = {
    "mt_bench": "data/eval/mt_bench.jsonl",
    "gsm8k": "data/eval/gsm8k_test_80.jsonl",
    "humaneval": "data/eval/humaneval.jsonl.gz",
}
EXCLUDE = [
    *TASKS.values(),
    "data/eval/summarization.jsonl",
    "data/eval/questions.jsonl",
    "data/eval/mbpp.jsonl",
    "data/tuning_prompts.jsonl",
    "data/validation_prompts.jsonl",
    "data/heldout_prompts.jsonl",
]
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
TRIAL_STEPS = 200  # in which a learning rate has to show itself
TIE = 0.01  # of accept_len on 24 prompts: less says nothing
SEEDS = (0, 1, 2)
LONG_CONVERSATIONS, LONG_STEPS = 5000, 2000
LONG_KINDS = ("edd", "eagle")
BLOCKS = (8, 18, 26, 29)  # of 30; 26 is the fourth-to-last
CHAIN = "chain:length=5"
NEW_TOKENS = 64
ROWS = 4  # prompts decoded at a time
DRAFTER = DrafterConfig(draft_vocab_size=8192)
TRAINING = TrainingConfig(
    optimizer="muon",
    schedule="cosine",
    final_lr_ratio=0.05,
    warmup_steps=40,
    adam_betas=(0.9, 0.95),
    rows_per_batch=2,
    row_length=1024,
    max_steps=400,
    block_length=(1, 6),
    eval_steps=10**6,  # at the end alone
    eval_prompts="data/validation_prompts.jsonl",
    eval_prompt_limit=24,
    logging_steps=50,
    save_steps=100,
    save_total_limit=1,
)
KINDS = ("edd", "eagle", "medusa", "vdm")
# what `equal` trains: settings of the drafter and of its training that differ from EDD's
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "edd": ({}, {}),
    "eagle": ({"kind": "eagle"}, {}),
    "eagle-mtp": ({"kind": "eagle", "input_norms": True}, {}),
    "medusa": ({"kind": "medusa"}, {}),
    "vdm": ({"kind": "vdm"}, {}),  # EDD without the target's states, too
    "edd-ce": ({}, {"loss": "ce"}),
    "edd-fixed5": ({}, {"block_length": (5, 5)}),
}


class Bench:
    """Where trained drafters and their results lie.

    Args:
        limit: prompts of each task.
        max_steps: optimizer steps of each training; None for those of the results.
    """

    def __init__(self, out: Path, limit: int, max_steps: int | None):
        self.out, self.limit, self.max_steps = out, limit, max_steps
        self.target = load_for_decoding(TARGET)
        self.prompts = {
            task: [prompt.token_ids(self.target.tokenizer) for prompt in spread(read_prompts(path), limit)]
            for task, path in TASKS.items()
        }

    def states(self, name: str, responses: str, most: int | None, blocks: list[int]) -> dict[str, Path]:
        """A corpus of answers and the target's states over it."""
        corpus, states = self.out / name / "corpus", self.out / name / "states"
        corpus.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(corpus.parent / ".lock"):  # of other processes at the same study
            self._collect(responses, most, blocks, corpus, states)
        return {"corpus": corpus, "hidden_states": states}

    @staticmethod
    def _collect(responses: str, most: int | None, blocks: list[int], corpus: Path, states: Path) -> None:
        if not (corpus / "corpus.json").exists():
            sources = [Source(responses, max_conversations=most)]
            config = CorpusConfig(sources=sources, validation_fraction=0.01, exclude=EXCLUDE, processes=2)
            build_corpus(config, load_tokenizer(resolve_target(TARGET)), corpus)
        config = CollectConfig(mode="offline", max_disk_gb=20)
        collect(config, resolve_target(TARGET), blocks, corpus, states)  # what is there is not computed again

    def trained(
        self,
        name: str,
        drafter: DrafterConfig,
        training: TrainingConfig,
        made_from: dict[str, Path],
        decode: bool = True,
    ) -> dict[str, Any]:
        """Trains a drafter and decodes the tasks with it, unless it is a trial; the result of an earlier call
        for just this is taken."""
        if self.max_steps is not None:
            training = replace(training, max_steps=self.max_steps, warmup_steps=min(40, self.max_steps // 4))
        folder = self.out / name
        asked = json.loads(json.dumps({"drafter": asdict(drafter), "training": asdict(training)}))
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # of other processes at the same study
            before = folder / "asked.json"
            if before.exists() and with_defaults(read_json(before)) != asked:
                raise UserError(f"{folder}: trained with other settings; remove it, or give another --out")
            write_json(folder / "asked.json", asked)
            if (folder / "result.json").exists():
                found = read_json(folder / "result.json")
                if not decode or found["limit"] == self.limit:
                    return found
            return self._train(folder, drafter, training, made_from, decode)

    def _train(
        self,
        folder: Path,
        drafter: DrafterConfig,
        training: TrainingConfig,
        made_from: dict[str, Path],
        decode: bool,
    ) -> dict[str, Any]:
        name = folder.name
        print(f"training {name}", file=sys.stderr, flush=True)
        place = train(
            training, drafter, resolve_target(TARGET), out=folder, target_dtype="bfloat16", **made_from
        )
        summary = read_json(place / "config.json")["training"]
        result = {
            "name": name,
            "kind": drafter.kind,
            "lr": training.lr,
            "seed": training.seed,
            "validation": summary["final"],
            "tokens": summary["tokens"],
            "seconds": summary["seconds"],
            "tasks": self.accepted(place) if decode else {},
            "limit": self.limit,
            "machine": summary["machine"],
            "commit": git_commit(),
        }
        if decode:
            result["accept_len"] = total(result["tasks"])
        write_json(folder / "result.json", result)
        shown = result.get("accept_len", summary["final"]["eval_accept_len"])
        print(f"{name}: accept_len {shown:.3f}", file=sys.stderr, flush=True)
        return result

    def accepted(self, place: Path) -> dict[str, dict[str, Any]]:
        """Real greedy chains of 5 on each task."""
        drafter = load_drafter(place, self.target, dtype=torch.bfloat16)
        found = {}
        for task, prompts in self.prompts.items():
            proposer = TreeProposer(drafter, parse_policy(CHAIN))
            stats = decode_all(self.target, proposer, prompts, NEW_TOKENS, max_rows=ROWS)[1]
            found[task] = {
                "prompts": len(prompts),
                "emitted": stats.new_tokens - stats.prompts,  # by steps: the first comes from the prompt
                "steps": stats.steps,
                "accept_len": stats.accept_len,
                "accept_len_nonrepeated": stats.accept_len_nonrepeated,
                "repetition": stats.repetition,
                "acceptance_by_depth": stats.acceptance_by_depth,
            }
        return found


def with_defaults(asked: dict[str, Any]) -> dict[str, Any]:
    """Settings of an earlier training, with those that did not exist then as they are by default."""
    defaults = {"drafter": asdict(DrafterConfig()), "training": asdict(TrainingConfig())}
    return {part: {**json.loads(json.dumps(defaults[part])), **asked[part]} for part in defaults}


def total(tasks: dict[str, dict[str, Any]]) -> float:
    """accept_len over all tasks together."""
    return sum(row["emitted"] for row in tasks.values()) / sum(row["steps"] for row in tasks.values())


def best_rate(bench: Bench, kind: str, made_from: dict[str, Path]) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate of the best short trial, and all trials."""
    trials = [
        bench.trained(
            f"{kind}-trial-{rate:g}",
            replace(DRAFTER, kind=kind),
            replace(TRAINING, lr=rate, seed=0, max_steps=TRIAL_STEPS),
            made_from,
            decode=False,
        )
        for rate in RATES
    ]
    return best(trials)["lr"], trials


def best(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trial with the longest accept_len on the validation prompts, or, of those that come within `TIE` of
    it, the one with the lowest loss."""
    longest = max(trial["validation"]["eval_accept_len"] for trial in trials)
    level = [trial for trial in trials if trial["validation"]["eval_accept_len"] > longest - TIE]
    return min(level, key=lambda trial: trial["validation"]["eval_loss"])


def answers(bench: Bench) -> dict[str, Path]:
    """The states that all but `figure5` train on."""
    return bench.states("answers", RESPONSES, CONVERSATIONS, [-4])


def several_seeds(
    bench: Bench,
    name: str,
    drafter: DrafterConfig,
    training: TrainingConfig,
    made_from: dict[str, Path],
    seeds: Sequence[int] = SEEDS,
) -> list[dict[str, Any]]:
    """The same training from several seeds."""
    return [
        bench.trained(f"{name}-seed{seed}", drafter, replace(training, seed=seed), made_from)
        for seed in seeds
    ]


def table1(bench: Bench, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Each kind at its best learning rate, three seeds."""
    made_from, rows, rates = answers(bench), {}, {}
    for kind in kinds:
        rate, trials = best_rate(bench, kind, made_from)
        rates[kind] = {f"{trial['lr']:g}": trial["validation"]["eval_accept_len"] for trial in trials}
        rows[kind] = several_seeds(
            bench, kind, replace(DRAFTER, kind=kind), replace(TRAINING, lr=rate), made_from
        )
    return {"rows": summarize(rows), "validation accept_len by rate": rates}


def table3(bench: Bench) -> dict[str, Any]:
    """EDD with one thing left out."""
    made_from = answers(bench)
    full = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0])
    rows = {"everything": several_seeds(bench, "edd", DRAFTER, full, made_from)}
    none = replace(TRAINING, lr=best_rate(bench, "vdm", made_from)[0])
    rows["no target states"] = several_seeds(bench, "vdm", replace(DRAFTER, kind="vdm"), none, made_from)
    for what, name, change in (
        ("cross-entropy with the text", "edd-ce", {"loss": "ce"}),
        ("blocks of 5", "edd-fixed5", {"block_length": (5, 5)}),
    ):
        ablated = replace(full, **change)
        rows[what] = several_seeds(bench, name, DRAFTER, ablated, made_from)
    return {"rows": summarize(rows)}


def figure5(bench: Bench) -> dict[str, Any]:
    """EDD on other blocks' outputs."""
    math = bench.out / "gsm8k_answers.jsonl"
    if not math.exists():
        write_math(Path(RESPONSES), math)
    made_from, rows = bench.states("math", str(math), None, list(BLOCKS)), {}
    rate = best_rate(bench, "edd", answers(bench))[0]
    for block in BLOCKS:
        drafter = replace(DRAFTER, tapped_blocks=[block], draft_vocab_size=4096)
        name = f"edd-block{block}-seed0"
        training = replace(TRAINING, lr=rate, seed=0, warmup_steps=20)
        rows[f"block {block}"] = [bench.trained(name, drafter, training, made_from)]
    return {"rows": summarize(rows)}


def write_math(responses: Path, out: Path) -> None:
    """The answers to GSM8K's training questions."""
    with gzip.open(responses, "rt", encoding="utf-8") as lines:
        kept = [line for line in lines if json.loads(line)["id"].startswith(MATH)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(kept), encoding="utf-8")


def wide(bench: Bench) -> dict[str, Any]:
    """EDD whose keys and values hold as many numbers as a state has, as with the EDD paper's targets."""
    made_from = answers(bench)
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0])
    drafter = replace(DRAFTER, kv_heads=bench.target.config.num_attention_heads)
    found = several_seeds(bench, "edd-wide", drafter, training, made_from)
    return {"rows": summarize({f"EDD, {drafter.kv_heads} heads": found})}


def started(bench: Bench) -> dict[str, Any]:
    """EDD whose layer starts from the target's first block, which reads embeddings, as its queries do;
    from the one behind the tapped block, which reads its states; and from the last, which the head reads."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0], seed=0)
    n = bench.target.n_blocks
    for block in (0, n - 3, n - 1):
        found = bench.trained(f"edd-from{block}-seed0", replace(DRAFTER, init=block), training, made_from)
        rows[f"EDD from block {block}"] = [found]
    return {"rows": summarize(rows)}


def anchored(bench: Bench) -> dict[str, Any]:
    """EDD with `anchor`, from the fourth-to-last block alone and with the last hidden state beside it."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0])
    for name, taps in (("edd-anchored", [-4]), ("edd-anchored-joined", [-4, bench.target.n_blocks])):
        drafter = replace(DRAFTER, anchor=True, tapped_blocks=taps)
        rows[name] = several_seeds(bench, name, drafter, training, made_from)
    return {"rows": summarize(rows)}


def long(bench: Bench, kinds: Sequence[str] = LONG_KINDS) -> dict[str, Any]:
    """EDD and EAGLE with more steps on more text, at the learning rates of the short trainings."""
    short, rows = answers(bench), {}
    made_from = bench.states("many", RESPONSES, LONG_CONVERSATIONS, [-4])
    for kind in kinds:
        rate = best_rate(bench, kind, short)[0]
        training = replace(TRAINING, lr=rate, max_steps=LONG_STEPS, eval_steps=LONG_STEPS // 4)
        rows[kind] = several_seeds(bench, f"{kind}-long", replace(DRAFTER, kind=kind), training, made_from)
    return {"rows": summarize(rows)}


def equal(bench: Bench, kinds: Sequence[str] = tuple(EQUAL)) -> dict[str, Any]:
    """Rivals and ablations, trained for one length on the same text, each at the rate that is best at that
    length."""
    made_from = bench.states("many", RESPONSES, LONG_CONVERSATIONS, [-4])
    rows, rates = {}, {}
    for name in kinds:
        shape, changes = EQUAL[name]
        drafter, training = replace(DRAFTER, **shape), replace(TRAINING, max_steps=LONG_STEPS, **changes)
        trials = {
            rate: bench.trained(
                f"{name}-equal-{rate:g}-seed{SEEDS[0]}",
                drafter,
                replace(training, lr=rate, seed=SEEDS[0]),
                made_from,
            )
            for rate in RATES
        }
        rate = best(list(trials.values()))["lr"]
        rates[name] = {f"{one['lr']:g}": one["validation"]["eval_accept_len"] for one in trials.values()}
        more = replace(training, lr=rate)
        found = several_seeds(bench, f"{name}-equal-{rate:g}", drafter, more, made_from, SEEDS[1:])
        rows[name] = [trials[rate], *found]
    return {"rows": summarize(rows), "validation accept_len by rate": rates}


def mtp(bench: Bench) -> dict[str, Any]:
    """EAGLE with the norms of an MTP layer, and anchored EDD, which norms the same inputs; both at the
    highest rate, without trials of their own."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=RATES[-1], seed=0)
    for name, drafter in (
        ("mtp", replace(DRAFTER, kind="eagle", input_norms=True)),
        ("edd-anchored-fast", replace(DRAFTER, anchor=True)),
    ):
        rows[name] = [bench.trained(f"{name}-seed0", drafter, training, made_from)]
    return {"rows": summarize(rows)}


def joined(bench: Bench) -> dict[str, Any]:
    """EDD that reads the last hidden state beside the fourth-to-last block, which is ours."""
    made_from = answers(bench)
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0], seed=0)
    drafter = replace(DRAFTER, tapped_blocks=[-4, bench.target.n_blocks])
    found = bench.trained("edd-joined-seed0", drafter, training, made_from)
    return {"rows": summarize({"EDD, two taps": [found]})}


def exports(bench: Bench) -> dict[str, Any]:
    """EAGLE and VDM with the target's own head, which then draft all of its tokens."""
    made_from, rows = answers(bench), {}
    for kind in ("eagle", "vdm"):
        training = replace(TRAINING, lr=best_rate(bench, kind, made_from)[0], seed=0)
        drafter = replace(DRAFTER, kind=kind, train_head=False)
        rows[f"{kind}, the target's head"] = [
            bench.trained(f"{kind}-frozen-seed0", drafter, training, made_from)
        ]
        draft_all_tokens(bench.out / f"{kind}-frozen-seed0/drafter", bench.out / f"{kind}-served")
    return {"rows": summarize(rows)}


def draft_all_tokens(drafter: Path, out: Path) -> None:
    """A copy of a drafter that reads the target's head, over all of the target's tokens."""
    settings, tensors = read_json(drafter / "config.json"), load_file(drafter / "model.safetensors")
    settings["draft_vocab_size"] = settings["target_vocab_size"]
    tensors["draft_to_target"] = torch.arange(settings["target_vocab_size"])
    with new_folder(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", settings)


def summarize(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Mean and range over seeds of accept_len, in all and by task."""
    return {
        name: {
            "lr": results[0]["lr"],
            "seeds": [result["seed"] for result in results],
            "accept_len": statistics.mean(result["accept_len"] for result in results),
            "range": [min(r["accept_len"] for r in results), max(r["accept_len"] for r in results)],
            "fresh": statistics.mean(
                row["accept_len_nonrepeated"] for result in results for row in result["tasks"].values()
            ),
            "validation": statistics.mean(r["validation"]["eval_accept_len"] for r in results),
            "tasks": {
                task: statistics.mean(result["tasks"][task]["accept_len"] for result in results)
                for task in TASKS
            },
            "train_tokens": results[0]["tokens"],
        }
        for name, results in rows.items()
    }


def print_rows(rows: dict[str, dict[str, Any]]) -> None:
    """A Markdown table."""
    print(f"| drafter | lr | seeds | accept_len | range | {' | '.join(TASKS)} |")
    print("|---" * (5 + len(TASKS)) + "|")
    for name, row in rows.items():
        tasks = " | ".join(f"{row['tasks'][task]:.3f}" for task in TASKS)
        low, high = row["range"]
        print(
            f"| {name} | {row['lr']:g} | {len(row['seeds'])} | {row['accept_len']:.3f} "
            f"| {low:.3f} to {high:.3f} | {tasks} |"
        )


STUDIES = {
    study.__name__: study
    for study in (table1, table3, figure5, joined, wide, started, anchored, long, equal, mtp, exports)
}


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--limit", type=positive, default=14, metavar="N", help="prompts of each task")
    parser.add_argument("--max-steps", type=positive, metavar="N", help="optimizer steps of each training")
    parser.add_argument("--kinds", nargs="+", choices=list(EQUAL), help="of table1, long or equal")
    parser.add_argument("--out", type=Path, default=Path("runs/baselines"), metavar="DIR")
    args = parser.parse_args()
    try:
        bench = Bench(args.out, args.limit, args.max_steps)
        shared = args.study in ("table1", "long", "equal")
        wanted = {"kinds": args.kinds} if shared and args.kinds else {}
        found = STUDIES[args.study](bench, **wanted)
    except UserError as error:
        print(f"baselines: {error}", file=sys.stderr)
        return 2
    if not wanted:  # else it is a part of the study
        write_json(args.out / f"{args.study}.json", found)
    print_rows(found["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
