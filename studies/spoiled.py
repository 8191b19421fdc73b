"""Diagnose drafters that are spoiled on purpose: is the cause of each named?

    python -m studies.spoiled                 half an hour: two of the five are trained for it
    python -m studies.spoiled --limit 8

Three are the given bundle with something of its target or configuration changed: chat template, weights,
tapped block. Two are trained from scratch by recipes/scratch.yaml: with a draft vocabulary of 256 tokens, and
on conversations of at most 64 tokens. Prints what the diagnosis names of each; causes.json has all of it.
"""

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.bundle import load_bundle
from drafttrain.evaluation.diagnose import NAMED, diagnose
from drafttrain.run.recipe import load_recipe
from drafttrain.run.stages import STAGES
from drafttrain.run.workflow import Workflow
from drafttrain.target_lm.loading import resolve_target
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import content_hash, git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

PROMPTS = "data/tuning_prompts.jsonl"
RECIPE = "recipes/scratch.yaml"
NOISE = 0.05  # of a weight matrix's own standard deviation
VOCABULARY, SHORT = 256, 64
Spoiled = tuple[Path, Path]  # bundle and target


def another_template(bundle: Path, target: Path, out: Path) -> Spoiled:
    """Return the same bundle with a target whose chat template names other roles."""
    copy = _linked(target, out / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = tokenizer.get_chat_template().replace("<|im_start|>", "### ") + "{# other #}"
    tokenizer.save_pretrained(copy)
    return bundle, copy


def stale_weights(bundle: Path, target: Path, out: Path) -> Spoiled:
    """Return the same bundle with a target that has been trained on, as noise in its weights imitates."""
    copy = _linked(target, out / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((NOISE * weight.float().std() * noise).to(weight.dtype))
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(copy)
    return bundle, copy


def another_block(bundle: Path, target: Path, out: Path) -> Spoiled:
    """Return the bundle with another tapped block than it was trained on."""
    spoiled = Path(shutil.copytree(bundle, out / "bundle"))
    file = spoiled / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "tapped_blocks": [4]}), encoding="utf-8")
    return spoiled, target


def small_vocabulary(bundle: Path, target: Path, out: Path) -> Spoiled:
    """Return a drafter trained with a small draft vocabulary."""
    return _trained(out, "--drafter.draft_vocab_size", str(VOCABULARY)), target


def short_answers(bundle: Path, target: Path, out: Path) -> Spoiled:
    """Return a drafter trained on short conversations alone."""
    return _trained(out, "--corpus.max_length", str(SHORT), "--training.row_length", str(SHORT)), target


SPOILED: dict[str, tuple[Callable[[Path, Path, Path], Spoiled], set[str]]] = {  # and the causes that count
    "another template": (another_template, {"template"}),
    "stale weights": (stale_weights, {"weights"}),
    "another tapped block": (another_block, {"tapped blocks"}),
    "small vocabulary": (small_vocabulary, {"vocabulary"}),
    "short answers": (short_answers, {"long answers", "long contexts"}),
}


def diagnosed(bundle: Path, out: Path, limit: int | None) -> list[dict[str, Any]]:
    """Spoil and diagnose each; return rows of `cause`, the `named` ones, `hit`, accept_len and prompts. What
    the folder has of this bundle, limit and commit is not done again."""
    asked = {"bundle": content_hash(bundle), "limit": limit, "commit": git_commit()}
    record = out / "asked.json"
    if not record.exists() or read_json(record) != asked:
        for name in SPOILED:
            _file(out, name).unlink(missing_ok=True)
        write_json(record, asked)
    loaded = load_bundle(bundle)
    target, console = Path(resolve_target(loaded.target.name)), Console(file=sys.stderr, highlight=False)
    del loaded
    rows = []
    for name, (spoil, causes) in SPOILED.items():
        file = _file(out, name)
        if not file.exists():
            folder = file.with_suffix("")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            drafter, spoiled = spoil(bundle, target, folder)
            diagnose(str(drafter), PROMPTS, file, limit, target=str(spoiled), console=console)
        found = json.loads(file.read_text(encoding="utf-8"))
        named = [one["cause"] for one in found["changes"][:NAMED]]
        row = {"cause": name, "named": named, "hit": bool(causes & set(named))}
        rows.append({**row, "accept_len": found["accept_len"], "prompts": found["prompts"]})
    return rows


def _file(out: Path, name: str) -> Path:
    """Return where the diagnosis of a drafter goes."""
    return out / f"{name.replace(' ', '_')}.json"


def _linked(target: Path, copy: Path) -> Path:
    """Return a folder with links to all files of a target, for some to be replaced."""
    copy.mkdir()
    for file in target.iterdir():
        if file.suffix in (".safetensors", ".bin"):
            (copy / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copyfile(file, copy / file.name)
    return copy


def _trained(out: Path, *words: str) -> Path:
    """Train from scratch for five minutes; return the bundle."""
    overrides = ["--output", str(out / "run"), "--evaluate.prompts", "[]", *words]
    workflow = Workflow(load_recipe(RECIPE, overrides), STAGES)
    workflow.run()
    return Path(workflow.folder("export"))


def study(args: Namespace) -> None:
    rows = diagnosed(Path(args.bundle), args.out, args.limit)
    write_json(args.out / "causes.json", rows)
    print("| spoiled by | named | accept_len |\n|---|---|---|")
    for row in rows:
        print(f"| {row['cause']} | {', '.join(row['named'])} | {row['accept_len']:.2f} |")


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ["bundle", "limit"], out="runs/spoiled")


if __name__ == "__main__":
    arguments.start(main)
