"""Train drafters on the same states for as many steps, and compare what they reach.

Every kind gets the same learning rates to choose from, in short trainings judged on prompts of no benchmark;
with the best it is trained longer, from three seeds. Trained drafters and raw results are under
`runs/baselines/` (or --out); what is there is not trained again. --limit and --max-steps make all of it
smaller.
"""

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.data.prompts import read_prompts, spread
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.hidden_states.collect import collect
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.loading import load_for_decoding, load_tokenizer, resolve_target
from drafttrain.training.config import TrainingConfig
from drafttrain.training.train import train
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies.arguments import run
from studies.edd.curves import points

TARGET = "smollm2-135m-instruct"
RESPONSES = "data/train/responses.jsonl.gz"  # written by the target itself
CONVERSATIONS = 1600  # of them
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
TIE = 0.01  # of accept_len on 16 prompts: less is noise
SEEDS = (0, 1, 2)
LONG_CONVERSATIONS = 5000
LONG_STEPS = 2000
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
    eval_prompt_limit=16,
    logging_steps=50,
    save_steps=100,
    save_total_limit=1,
)


class Bench:
    """The folder of trained drafters and their results, and how they are trained and measured.

    Args:
        limit: prompts of each task.
        max_steps: optimizer steps of each training; None for those of the results.
        model: target, as `load_target` takes it.
        responses: its own answers, to train on.
        tasks: files of prompts by name.

    Attributes:
        new_tokens: of each answer that is drafted, at most.
    """

    def __init__(
        self,
        out: Path,
        limit: int,
        max_steps: int | None,
        model: str = TARGET,
        responses: str = RESPONSES,
        tasks: dict[str, str] | None = None,
    ):
        self.out, self.limit, self.max_steps = out, limit, max_steps
        self.model, self.responses, self.new_tokens = model, responses, NEW_TOKENS
        self.exclude = [*EXCLUDE, *(tasks or {}).values()]
        self.target = load_for_decoding(model)
        self.prompts = {
            task: [prompt.token_ids(self.target.tokenizer) for prompt in spread(read_prompts(path), limit)]
            for task, path in (tasks or TASKS).items()
        }

    def states(self, name: str, sources: list[Source], blocks: list[int]) -> dict[str, Path]:
        """Make a corpus of answers and the target's states over it, unless they are there.

        Raises:
            UserError: the corpus is of other answers.
        """
        corpus, states = self.out / name / "corpus", self.out / name / "states"
        corpus.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(corpus.parent / ".lock"):  # of other processes at the same study
            self._collect(sources, blocks, corpus, states)
        return {"corpus": corpus, "hidden_states": states}

    def _collect(self, sources: list[Source], blocks: list[int], corpus: Path, states: Path) -> None:
        if (record := corpus / "corpus.json").exists():
            before = [one["path"] for one in read_json(record)["config"]["sources"]]
            if (asked := [one.path for one in sources]) != before:
                paths = f"must be made from {', '.join(asked)}, got {', '.join(before)}"
                raise UserError(f"{corpus}: {paths}; remove it, or give another --out")
        else:
            config = CorpusConfig(sources, 1024, validation_fraction=0.01, exclude=self.exclude, processes=2)
            build_corpus(config, load_tokenizer(resolve_target(self.model)), corpus)
        config = CollectConfig(mode="offline", max_disk_gb=20)  # what is there is not computed again
        collect(config, resolve_target(self.model), blocks, corpus, states)

    def trained(
        self,
        name: str,
        drafter: DrafterConfig,
        training: TrainingConfig,
        made_from: dict[str, Path],
        decode: bool = True,
    ) -> dict[str, Any]:
        """Train a drafter and decode the tasks with it, unless it is a trial; the result of an earlier call
        is taken as far as it is for just this.

        Raises:
            UserError: the folder has a drafter of other settings, or of another target.
        """
        if self.max_steps is not None:
            training = replace(training, max_steps=self.max_steps, warmup_steps=min(40, self.max_steps // 4))
        folder = self.out / name
        asked = json.loads(json.dumps({"drafter": asdict(drafter), "training": asdict(training)}))
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # of other processes at the same study
            before = folder / "asked.json"
            known = read_json(before) if before.exists() else {}
            if known and (with_defaults(known), known.get("target", TARGET)) != (asked, self.model):
                raise UserError(f"{folder}: trained with other settings; remove it, or give another --out")
            write_json(before, asked | {"target": self.model})
            if not (folder / "result.json").exists():
                return self._train(folder, drafter, training, made_from, decode)
            found = read_json(folder / "result.json")
            return self._decoded(folder, found) if decode else found

    def _decoded(self, folder: Path, found: dict[str, Any]) -> dict[str, Any]:
        """Return a result with these tasks and as many prompts of them, decoded now unless it has just these.
        A result of other tasks, or of more prompts, stays in the file."""
        is_same = found.get("tasks", {}).keys() == self.prompts.keys()
        size = self.limit, self.new_tokens
        before = found["limit"], found.get("new_tokens", NEW_TOKENS)
        if is_same and size == before:
            return found
        tasks = self.accepted(folder / "drafter")
        again = found | {"tasks": tasks, "accept_len": total(tasks), "decoded_at": git_commit()}
        again |= {"limit": self.limit, "new_tokens": self.new_tokens}
        if not found.get("tasks") or (is_same and size > before):
            write_json(folder / "result.json", again)
        return again

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
            training, drafter, resolve_target(self.model), out=folder, target_dtype="bfloat16", **made_from
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
            "curve": points(read_json(folder / "training_log.json")),
            "tasks": self.accepted(place) if decode else {},
            "limit": self.limit,
            "new_tokens": self.new_tokens,
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
        """Decode each task with greedy chains of 5."""
        drafter = load_drafter(place, self.target, dtype=torch.bfloat16)
        found = {}
        for task, prompts in self.prompts.items():
            proposer = TreeProposer(drafter, parse_policy(CHAIN))
            stats, by_prompt = DecodeStats(), [[0, 0] for _ in prompts]
            begun: set[int] = set()  # the first token comes from the prompt's forward
            for step in decode(self.target, proposer, prompts, self.new_tokens, stats=stats, max_rows=ROWS):
                for i, tokens in enumerate(step.tokens):
                    if tokens and i in begun:
                        by_prompt[i] = [by_prompt[i][0] + len(tokens), by_prompt[i][1] + 1]
                    elif tokens:
                        begun.add(i)
            found[task] = {
                "prompts": len(prompts),
                "by_prompt": by_prompt,  # tokens emitted by steps, and steps
                "emitted": stats.new_tokens - stats.prompts,  # by steps: the first comes from the prompt
                "steps": stats.steps,
                "accept_len": stats.accept_len,
                "accept_len_nonrepeated": stats.accept_len_nonrepeated,
                "repetition": stats.repetition,
                "acceptance_by_depth": stats.acceptance_by_depth,
            }
        return found


def with_defaults(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier training, with those that did not exist then as they are by
    default."""
    defaults = {"drafter": asdict(DrafterConfig()), "training": asdict(TrainingConfig())}
    return {part: {**json.loads(json.dumps(defaults[part])), **asked[part]} for part in defaults}


def total(tasks: dict[str, dict[str, Any]]) -> float:
    """Return accept_len over all tasks together."""
    return sum(row["emitted"] for row in tasks.values()) / sum(row["steps"] for row in tasks.values())


def best_rate(bench: Bench, kind: str, made_from: dict[str, Path]) -> tuple[float, list[dict[str, Any]]]:
    """Return the learning rate of the best short trial, and all trials."""
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
    """Return the trial with the longest accept_len on the validation prompts, or, of those that come within
    `TIE` of it, the one with the lowest loss."""
    longest = max(trial["validation"]["eval_accept_len"] for trial in trials)
    level = [trial for trial in trials if trial["validation"]["eval_accept_len"] > longest - TIE]
    return min(level, key=lambda trial: trial["validation"]["eval_loss"])


def answers(bench: Bench) -> dict[str, Path]:
    """Return the states that all but `figure5` train on."""
    return bench.states("answers", [Source(bench.responses, max_conversations=CONVERSATIONS)], [-4])


def many_answers(bench: Bench) -> dict[str, Path]:
    """Return the states that the long trainings train on."""
    return bench.states("many", [Source(bench.responses, max_conversations=LONG_CONVERSATIONS)], [-4])


def several_seeds(
    bench: Bench,
    name: str,
    drafter: DrafterConfig,
    training: TrainingConfig,
    made_from: dict[str, Path],
    seeds: Sequence[int] = SEEDS,
) -> list[dict[str, Any]]:
    """Run the same training from several seeds."""
    return [
        bench.trained(f"{name}-seed{seed}", drafter, replace(training, seed=seed), made_from)
        for seed in seeds
    ]


def summarize(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return mean and range over seeds of accept_len, in all and by task."""
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
                for task in results[0]["tasks"]
            },
            "train_tokens": results[0]["tokens"],
            **_by_prompt(results),
        }
        for name, results in rows.items()
    }


def _by_prompt(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of each prompt by task and seed; nothing for results that have kept none."""
    counts = {
        task: [result["tasks"][task]["by_prompt"] for result in results]
        for task, row in results[0]["tasks"].items()
        if "by_prompt" in row
    }
    return {"by_prompt": counts} if counts else {}


def print_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Print a Markdown table."""
    names = list(next(iter(rows.values()))["tasks"])
    print(f"| drafter | lr | seeds | accept_len | range | {' | '.join(names)} |")
    print("|---" * (5 + len(names)) + "|")
    for name, row in rows.items():
        tasks = " | ".join(f"{row['tasks'][task]:.3f}" for task in names)
        low, high = row["range"]
        print(
            f"| {name} | {row['lr']:g} | {len(row['seeds'])} | {row['accept_len']:.3f} "
            f"| {low:.3f} to {high:.3f} | {tasks} |"
        )


def run_study(
    study: Callable[..., dict[str, Any]],
    doc: str,
    argv: Sequence[str] | None = None,
    kinds: Sequence[str] = (),
) -> int:
    """Run a study of trainings, write its result to --out and print its rows; return the exit status.

    Args:
        kinds: of drafters, for --kinds; none for a study whose work cannot be shared.
    """

    def measure(args: Namespace) -> None:
        if unknown := set(args.kinds or ()) - set(kinds):
            raise UserError(f"--kinds: must be some of {', '.join(kinds)}, got {', '.join(sorted(unknown))}")
        chosen = dict(text.partition("=")[::2] for text in args.tasks)
        bench = Bench(args.out, args.limit, args.max_steps, args.target, args.responses, chosen)
        wanted = {"kinds": args.kinds} if args.kinds else {}
        found = study(bench, **wanted)
        if not wanted:  # else it is a part of the study
            write_json(args.out / f"{study.__name__}.json", found)
        print_rows(found["rows"])

    names = ["target", "responses", "tasks", "limit", "max_steps", "kinds"]
    defaults = {"target": TARGET, "limit": 14}
    return run(measure, doc, argv, names, "runs/baselines", **defaults)
