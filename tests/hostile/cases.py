"""A small world of real files, and the hostile cases of it."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from drafttrain.classifier.model import Classifier
from drafttrain.run.cli import main
from studies import ROOT
from studies.tiny_model import write
from tests.hostile import runner
from tests.hostile.environments import environments
from tests.hostile.mutations import (
    Mutation,
    archive,
    json_file,
    json_lines,
    pickles,
    remote_code,
    safetensors_file,
    template,
    yaml_file,
    zipped,
)
from tests.hostile.runner import Case

CHATS = ROOT / "data/train/conversations.jsonl"
FULL = "runs/full"  # a run of all stages, below the world
MAKING = 300.0  # seconds for such a run
GENERATE = (
    "generate",
    "--target",
    "{world}/target",
    "--dtype",
    "float32",
    "--prompt",
    "Hi",
    "--max-new-tokens",
    "4",
)
WITH_BUNDLE = (*GENERATE, "--bundle", "{world}/bundle")
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": (*WITH_BUNDLE, "--tree", "chain:length=2"),
    "generate, calibrated": (*WITH_BUNDLE, "--tree", "timed", "--calibration", "{world}/calibration"),
    "generate, c2t": (*WITH_BUNDLE, "--tree", "c2t:beta=0.2"),
    "generate, n-grams": (*GENERATE, "--ngrams", "{world}/ngrams"),
    "corpus": ("run", "{world}/recipe.yaml", "--until", "corpus", "--output", "{out}/run"),
    "plan": ("run", "{world}/recipe.yaml", "--dry-run", "--output", "{out}/run"),
    "plan, all stages": ("run", "{world}/full.yaml", "--dry-run", "--output", "{out}/run"),
    "report": ("report", "{world}/benchmark", "--out", "{out}/report.html"),
    "build-ngrams": (
        "build-ngrams",
        "{world}/chats.jsonl",
        "--target",
        "{world}/target",
        "--out",
        "{out}/ngrams",
    ),
    "push": (
        *("push", f"{{world}}/{FULL}/bundle", "--repo", "user/name", "--dry-run"),
        *("--out", "{out}/push"),
    ),
    "run, again": ("run", "{world}/full.yaml"),
    "build-ngrams, archive": (
        *("build-ngrams", "{world}/chats.zip", "--target", "{world}/target"),
        *("--out", "{out}/ngrams"),
    ),
}
SOME = [partial(json_file, limit=10)]  # for files of which there are many, or that take a run to read
JSON, YAML, LINES = [json_file], [yaml_file], [json_lines]
CONFIG, TENSORS = [json_file, remote_code], [safetensors_file, pickles]
READ = {  # command -> files that it reads, with the kinds of their mutations
    "generate": {
        "bundle/config.json": CONFIG,
        "bundle/model.safetensors": TENSORS,
        "target/config.json": CONFIG,
        "target/tokenizer_config.json": CONFIG,
        "target/chat_template.jinja": [template],
        "target/generation_config.json": JSON,
        "target/model.safetensors": TENSORS,
    },
    "generate, calibrated": {"calibration/calibration.json": JSON},
    "generate, n-grams": {"ngrams/ngrams.json": JSON},
    "corpus": {"chats.jsonl": LINES},
    "plan": {"recipe.yaml": YAML},
    "plan, all stages": {"full.yaml": YAML},
    "report": {"benchmark/measurements.jsonl": LINES, "benchmark/benchmark.json": JSON},
    "build-ngrams": {"chats.jsonl": LINES},
    "build-ngrams, archive": {"chats.zip": [archive]},
    "generate, c2t": {
        "bundle/classifier.json": SOME,
        "bundle/classifier.safetensors": TENSORS,
    },
    "push": {f"{FULL}/bundle/eval.json": SOME, f"{FULL}/bundle/config.json": SOME},
    "run, again": {
        f"{FULL}/.hashes.json": SOME,
        f"{FULL}/target/.place.json": SOME,
        f"{FULL}/corpus/stage.json": SOME,
        f"{FULL}/corpus/corpus.json": SOME,
        f"{FULL}/hidden_states/train/manifest.json": SOME,
        f"{FULL}/hidden_states/train/shard-00000.safetensors": TENSORS,
        f"{FULL}/drafter/drafter/model.safetensors": TENSORS,
        f"{FULL}/evaluation/summary.json": SOME,
    },
}

OPTIONAL = {
    "target/generation_config.json",
    "target/tokenizer_config.json",
    "target/chat_template.jinja",
    "benchmark/benchmark.json",
}  # read where they are there
FULL_RECIPE = {  # of all stages, with the world as working folder
    "target": {"model": "target", "dtype": "float32"},
    "regenerate": {
        "sources": [{"path": "chats.jsonl", "max_conversations": 4}],
        "max_new_tokens": 6,
        "max_turns": 1,
        "batch_rows": 2,
    },
    "corpus": {
        "sources": [{"path": "chats.jsonl"}],
        "max_length": 300,
        "validation_fraction": 0.2,
        "processes": 1,
    },
    "drafter": {"draft_vocab_size": 128},
    "training": {
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "logging_steps": 1,
        "rows_per_batch": 1,
        "row_length": 512,
        "bf16": False,
    },
    "hidden_states": {"mode": "offline", "shard_tokens": 1000},
    "classifier": {
        "prompts": {"name": "few", "path": "prompts.jsonl"},
        "max_new_tokens": 6,
        "epochs": 2,
        "top_k": 3,
        "max_depth": 3,
    },
    "calibrate": {"quick": True},
    "evaluate": {
        "prompts": [{"name": "few", "path": "prompts.jsonl"}],
        "trees": ["chain:length=2"],
        "max_new_tokens": 6,
        "lossless_prompts": 1,
        "lossless_new_tokens": 6,
        "busy": "warn",
    },
    "export": {"base_model": "user/target", "license": "apache-2.0"},
    "output": FULL,
}
UNUSED = ("embed",)  # of a tensor's name: one wrong value of it may never be read


def make(folder: Path) -> None:
    """Write the world by the commands themselves.

    Raises:
        RuntimeError: a command fails.
    """
    write(folder)
    Classifier(["P", "d"], 8).save(folder / "bundle", {})  # untrained, as the drafter is
    with open(CHATS, encoding="utf-8") as file:
        (folder / "chats.jsonl").write_text("".join(itertools.islice(file, 12)), encoding="utf-8")
    (folder / "chats.zip").write_bytes(zipped({"chats.jsonl": (folder / "chats.jsonl").read_bytes()}))
    prompts = [{"id": str(i), "prompt": text} for i, text in enumerate(("Why is it so?", "Count to ten."))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    recipe = {
        "target": {"model": "target", "dtype": "float32"},  # cases run in their copy of the world
        "corpus": {"sources": [{"path": "chats.jsonl"}], "max_length": 512},
        "drafter": {"draft_vocab_size": 128},
        "training": {"max_steps": 2},
        "output": "runs",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    bundle, target = ["--target", str(folder / "target"), "--dtype", "float32"], str(folder / "bundle")
    prompts_at = str(folder / "prompts.jsonl")
    short = ["--max-new-tokens", "8"]
    for words in (
        ["build-ngrams", str(folder / "chats.jsonl"), *bundle[:2], "--out", str(folder / "ngrams")],
        ["calibrate", target, *bundle, "--quick", *short, "--out", str(folder / "calibration")],
        ["benchmark", "--method", target, "--task", prompts_at, *bundle, *short, "--trees", "chain:length=2"]
        + ["--out", str(folder / "benchmark"), "--repeats", "1", "--busy", "warn"],
    ):
        if status := main(words):
            raise RuntimeError(f"{words}: must end with 0, got {status}")
    (folder / "full.yaml").write_text(yaml.safe_dump(FULL_RECIPE, sort_keys=False))
    log = folder.with_name(f"{folder.name}.log")
    if runner.wait(runner.start(["run", "full.yaml"], log, folder), MAKING) != 0:
        raise RuntimeError(f"full.yaml: must run: {log.read_text()[-2000:]}")


def cases(world: Path, share: int = 1) -> Iterator[Case]:
    """Yield all cases, or one of `share` of each file's."""
    for command, files in READ.items():
        for file, kinds in files.items():
            found = [one for kind in kinds for one in kind((world / file).read_bytes())]
            for mutation in found[::share]:
                yield Case(command, file, expected(file, mutation), COMMANDS[command])
    yield from environments(COMMANDS)[::share]


def expected(file: str, mutation: Mutation) -> Mutation:
    """Return the mutation with what this file's readers have to make of it."""
    lenient = file.startswith(FULL) and "bundle" not in file  # what a run has made it makes again
    lenient |= file in OPTIONAL and mutation.name in ("removed", "is empty dict", "link to itself")
    lenient |= any(word in mutation.name for word in UNUSED) and mutation.name.startswith("NaN")
    return replace(mutation, must_fail=mutation.must_fail and not lenient)
