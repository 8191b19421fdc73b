"""A small world of real files, and the hostile cases of it."""

import gzip
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml
from transformers import AutoTokenizer, LlamaForCausalLM

from drafttrain.classifier.model import Classifier
from drafttrain.run.cli import main
from studies import ROOT
from studies.tiny_model import write
from tests.gguf_files import write_gguf_file
from tests.hostile import runner
from tests.hostile.environments import environments
from tests.hostile.mutations import (
    Mutation,
    archive,
    gguf_file,
    gzipped,
    json_file,
    json_lines,
    parquet,
    parquet_file,
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
BENCHMARK = (
    *("benchmark", "--method", "{world}/bundle", "--task", "{world}/prompts.jsonl"),
    *("--target", "{world}/target", "--dtype", "float32", "--max-new-tokens", "8"),
    *("--trees", "chain:length=2", "--repeats", "1", "--busy", "warn"),
)
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
    **{
        f"build-ngrams, {kind}": (
            *("build-ngrams", f"{{world}}/{file}", "--target", "{world}/target"),
            *("--out", "{out}/ngrams"),
        )
        for kind, file in (("archive", "chats.zip"), ("gzip", "chats.jsonl.gz"), ("parquet", "chats.parquet"))
    },
    "generate, GGUF": (*GENERATE[:1], "--target", "{world}/target.gguf", *GENERATE[3:]),
    "benchmark": (*BENCHMARK, "--out", "{out}/benchmark"),
    "benchmark, again": (*BENCHMARK, "--out", "{world}/runs/benchmark"),
    "reason": ("reason", "{world}/reason.yaml", "--out", "{out}/reason"),
    "reason, again": ("reason", "{world}/reason.yaml", "--out", "{world}/runs/reason"),
    "simulate": ("pipeline", "--simulate", "{world}/simulate.yaml", "--out", "{out}/simulation"),
    "pipeline": ("pipeline", "{world}/pipeline.yaml", "--dry-run", "--out", "{out}/pipeline"),
    "new-recipe": (
        *("new-recipe", "--target", "{world}/target", "--chats", "{world}/chats.jsonl"),
        *("--out", "{out}/mine.yaml"),
    ),
    "train, continued": (
        *("run", "{world}/full.yaml", "--only", "train", "--training.init_from", "{world}/drafter"),
        *("--output", f"{{world}}/{FULL}", "--again", "train"),
    ),
}
# for files of which there are many, or that take a run to read
SOME, SOME_LINES = [partial(json_file, limit=4)], [partial(json_lines, limit=3)]
SOME_YAML = [partial(yaml_file, limit=6)]
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
    "build-ngrams, gzip": {"chats.jsonl.gz": [gzipped]},
    "build-ngrams, parquet": {"chats.parquet": [parquet_file]},
    "generate, GGUF": {"target.gguf": [gguf_file]},
    "benchmark": {"prompts.jsonl": SOME_LINES, "target/tokenizer.json": SOME},
    "benchmark, again": {
        "runs/benchmark/measurements.jsonl": SOME_LINES,
        "runs/benchmark/benchmark.json": SOME,
    },
    "reason": {"reason.yaml": SOME_YAML, "problems.jsonl": SOME_LINES},
    "reason, again": {"runs/reason/1.json": SOME},
    "simulate": {"simulate.yaml": SOME_YAML},
    "pipeline": {"pipeline.yaml": SOME_YAML},
    "new-recipe": {"chats.jsonl": SOME_LINES},
    "train, continued": {"drafter/config.json": SOME, "drafter/model.safetensors": TENSORS},
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
        "keep_states": True,
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
        "prompts": {"name": "few", "path": "others.jsonl"},
        "max_new_tokens": 6,
        "epochs": 2,
        "top_k": 3,
        "max_depth": 3,
    },
    "calibrate": {"quick": True},
    "ngrams": {"processes": 1},
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
    prompts = [
        {"id": str(i), "prompt": text} for i, text in enumerate(("Why is it so?", "Count to ten, please."))
    ]
    for name in ("prompts.jsonl", "others.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in prompts))
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
        ["calibrate", target, *bundle, "--quick", "--out", str(folder / "calibration")],
        ["benchmark", "--method", target, "--task", prompts_at, *bundle, *short, "--trees", "chain:length=2"]
        + ["--out", str(folder / "benchmark"), "--repeats", "1", "--busy", "warn"],
    ):
        if status := main(words):
            raise RuntimeError(f"{words}: must end with 0, got {status}")
    (folder / "full.yaml").write_text(yaml.safe_dump(FULL_RECIPE, sort_keys=False))
    write_other_formats(folder)
    write_tiny_recipes(folder)
    log = folder.with_name(f"{folder.name}.log")
    for words in (
        ["run", "full.yaml"],
        [word.format(world=folder) for word in COMMANDS["benchmark, again"]],
        [word.format(world=folder) for word in COMMANDS["reason, again"]],
    ):
        if runner.call(words, log, folder) != 0:
            raise RuntimeError(f"{words}: must run: {log.read_text()[-2000:]}")
    shutil.copytree(folder / FULL / "drafter" / "drafter", folder / "drafter")


def write_other_formats(folder: Path) -> None:
    """Write the target as GGUF, and the chats as zip, gzip and Parquet."""
    content = (folder / "chats.jsonl").read_bytes()
    (folder / "chats.zip").write_bytes(zipped({"chats.jsonl": content}))
    (folder / "chats.jsonl.gz").write_bytes(gzip.compress(content))
    rows = [json.loads(line) for line in content.splitlines()]
    (folder / "chats.parquet").write_bytes(parquet({key: [row[key] for row in rows] for key in rows[0]}))
    place = folder / "target"
    model, tokenizer = LlamaForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    write_gguf_file(folder / "target.gguf", model, tokenizer)


def write_tiny_recipes(folder: Path) -> None:
    """Write recipes of `reason` and `pipeline` for the world, and the problem of one."""
    problem = {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    (folder / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    own = {"target": "target", "dtype": "float32"}
    for name, recipe in (
        ("reason", "reasoning/gsm8k"),
        ("simulate", "pipeline/simulate"),
        ("pipeline", "pipeline/smollm2-2"),
    ):
        values = yaml.safe_load((ROOT / f"recipes/tiny/{recipe}.yaml").read_text()) | {"out": f"runs/{name}"}
        values |= own if "dtype" in values else {"target": "target", "drafter": "bundle"}
        if "prompts" in values:
            values |= {"prompts": "prompts.jsonl", "drafter": "bundle"}
        if "task" in values:
            values["task"]["path"] = "problems.jsonl"
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


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
    lenient = file.startswith("runs") and "bundle" not in file  # what a command has made it makes again
    lenient |= file in OPTIONAL and mutation.name in ("removed", "is empty dict", "link to itself")
    lenient |= file.endswith((".yaml", ".jsonl")) and mutation.name == "cut in half"  # may be whole lines
    lenient |= "template" in file and mutation.name in ("folder", "fifo", "empty")  # no template
    lenient |= any(word in mutation.name for word in UNUSED) and mutation.name.startswith("NaN")
    return replace(mutation, must_fail=mutation.must_fail and not lenient)
