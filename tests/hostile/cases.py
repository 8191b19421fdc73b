"""A small world of real files, and the hostile cases of it."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from drafttrain.run.cli import main
from studies import ROOT
from studies.tiny_model import write
from tests.hostile.mutations import (
    Mutation,
    json_file,
    json_lines,
    safetensors_file,
    yaml_file,
)
from tests.hostile.runner import Case

CHATS = ROOT / "data/train/conversations.jsonl"
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
    "generate, n-grams": (*GENERATE, "--ngrams", "{world}/ngrams"),
    "corpus": ("run", "{world}/recipe.yaml", "--until", "corpus", "--output", "{out}/run"),
    "plan": ("run", "{world}/recipe.yaml", "--dry-run", "--output", "{out}/run"),
    "report": ("report", "{world}/benchmark", "--out", "{out}/report.html"),
    "build-ngrams": (
        "build-ngrams",
        "{world}/chats.jsonl",
        "--target",
        "{world}/target",
        "--out",
        "{out}/ngrams",
    ),
}
JSON, YAML, LINES, TENSORS = json_file, yaml_file, json_lines, safetensors_file
READ = {  # command -> files that it reads, with their kinds
    "generate": {
        "bundle/config.json": JSON,
        "bundle/model.safetensors": TENSORS,
        "target/config.json": JSON,
        "target/tokenizer_config.json": JSON,
        "target/generation_config.json": JSON,
        "target/model.safetensors": TENSORS,
    },
    "generate, calibrated": {"calibration/calibration.json": JSON},
    "generate, n-grams": {"ngrams/ngrams.json": JSON},
    "corpus": {"chats.jsonl": LINES},
    "plan": {"recipe.yaml": YAML},
    "report": {"benchmark/measurements.jsonl": LINES, "benchmark/benchmark.json": JSON},
    "build-ngrams": {"chats.jsonl": LINES},
}
OPTIONAL = {
    "target/generation_config.json",
    "target/tokenizer_config.json",
    "benchmark/benchmark.json",
}  # read where they are there
UNUSED = ("embed",)  # of a tensor's name: one wrong value of it may never be read


def make(folder: Path) -> None:
    """Write the world by the commands themselves.

    Raises:
        RuntimeError: a command fails.
    """
    write(folder)
    with open(CHATS, encoding="utf-8") as file:
        (folder / "chats.jsonl").write_text("".join(itertools.islice(file, 12)), encoding="utf-8")
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


def cases(world: Path, share: int = 1) -> Iterator[Case]:
    """Yield all cases, or one of `share` of each file's."""
    for command, files in READ.items():
        for file, kind in files.items():
            found = list(kind((world / file).read_bytes()))
            for mutation in found[::share]:
                yield Case(command, file, expected(file, mutation), COMMANDS[command])


def expected(file: str, mutation: Mutation) -> Mutation:
    """Return the mutation with what this file's readers have to make of it."""
    lenient = file in OPTIONAL and mutation.name in ("removed", "is empty dict", "link to itself")
    lenient |= any(word in mutation.name for word in UNUSED) and mutation.name.startswith("NaN")
    return Mutation(mutation.name, mutation.content, mutation.must_fail and not lenient)
