"""What a stage will take, told before it runs (`--dry-run`): tokens, parameters, memory, disk.

Models are built on the meta device, so nothing is loaded. What only an earlier stage can tell (the target's
shape before it is fetched, the corpus's tokens before it is built) is left out or estimated from file sizes.
"""

import dataclasses
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.calibration.stage import C2T_TRIALS
from drafttrain.classifier.dump import ROW_BYTES
from drafttrain.corpus.build import Source
from drafttrain.corpus.readers import read_conversations
from drafttrain.drafters.config import DrafterConfig
from drafttrain.errors import UserError
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.files import read_json
from drafttrain.recipe import Recipe
from drafttrain.target.fetch import is_known, known_folder
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.store import stored_bytes

Folders = dict[str, Path]
Estimate = dict[str, str]
KNOWN_DOWNLOAD = {"pypi": "98 MB", "hub": "270 MB"}
SAMPLE = 200  # conversations that tell how long the others are
BYTES_PER_TOKEN = 4.5  # of JSON chats, punctuation of the JSON included; SmolLM2's tokenizer
COMPRESSION = {".gz": 3.0, ".zip": 3.0, ".tgz": 3.0, ".bz2": 4.0, ".xz": 4.0}  # of such text
PLACE = ".place.json"  # in the folder of the stage fetch-target
OPTIMIZER_BYTES = 16  # per trained parameter: fp32 weight, gradient and both moments of Adam


def fetch_target(recipe: Recipe, folders: Folders) -> Estimate:
    """Download of a known target; of others only their own folder or the Hub could tell."""
    source = recipe.target.source
    if not is_known(recipe.target.model):
        return {}
    return {"download": "none: in the cache" if known_folder(source).exists() else KNOWN_DOWNLOAD[source]}


def regenerate(recipe: Recipe, folders: Folders) -> Estimate:
    """Tokens to generate at most, and memory of target and key/value cache."""
    config = recipe.regenerate
    estimate = {"prompts read": f"about {_count(_source_tokens(config.sources))} tokens"}
    if config.max_rows:
        most = config.max_rows * config.max_turns * config.max_new_tokens
        estimate["new tokens"] = f"at most {_count(most)}"
    if config.max_minutes:
        estimate["time"] = f"at most {config.max_minutes:g} min"
    if config.server is None and (target := _target(recipe, folders)):
        cache = f"{config.max_cache_gb or 4:g} GB"
        estimate["memory"] = f"{_bytes(_target_bytes(recipe, target))} + at most {cache} of keys and values"
    return estimate


def corpus(recipe: Recipe, folders: Folders) -> Estimate:
    """Tokens and disk, from the size of the sources."""
    tokens = _source_tokens(recipe.corpus.sources)
    if not tokens:
        return {}
    return {"tokens": f"about {_count(tokens)}", "disk": f"about {_bytes(5 * tokens)}"}  # int32 id, int8 mask


def collect(recipe: Recipe, folders: Folders) -> Estimate:
    """Tokens of the corpus, and disk of its hidden states."""
    tokens, about = _corpus_tokens(recipe, folders)
    estimate = {"tokens": f"{about}{_count(tokens)}"}
    if target := _target(recipe, folders):
        disk = stored_bytes(tokens, 0, 0, target.hidden_size, len(stored_blocks(recipe)))
        estimate["disk"] = f"{about}{_bytes(disk)} (max_disk_gb {recipe.hidden_states.max_disk_gb:g})"
        estimate["memory"] = _bytes(_target_bytes(recipe, target))
    return estimate


def train(recipe: Recipe, folders: Folders) -> Estimate:
    """Parameters, tokens, optimizer steps, memory and disk of training."""
    config = recipe.training
    tokens, about = _corpus_tokens(recipe, folders)
    tokens_per_step = config.rows_per_batch * config.row_length * config.gradient_accumulation_steps
    steps = config.max_steps or math.ceil(tokens * config.epochs / tokens_per_step)
    about = "" if config.max_steps else about or "about "
    limit = f", at most {config.max_minutes:g} min" if config.max_minutes else ""
    estimate = {
        "tokens": f"{about}{_count(steps * tokens_per_step)}",
        "steps": f"{about}{_count(steps)}{limit}",
    }
    target = _target(recipe, folders)
    if target is None:
        return estimate
    drafter = drafter_shape(recipe)
    trained, stored = drafter_parameters(drafter, target)
    vocabulary = min(drafter.draft_vocab_size or target.vocab_size, target.vocab_size)
    # fp32 logits of target and drafter, their log-probabilities and the gradient
    logits = 4 * 4 * config.kl_chunk * vocabulary + 4 * config.kl_chunk * target.vocab_size
    teacher = 4 * target.vocab_size * target.hidden_size
    if recipe.hidden_states.mode == "online":
        teacher = max(teacher, _target_bytes(recipe, target))
    # a dozen fp32 activations of a layer's width per token that backward needs
    activations = 4 * 12 * target.hidden_size * drafter.layers * config.rows_per_batch * config.row_length
    estimate["parameters"] = f"{_count(trained)} trained, {_count(stored)} stored"
    estimate["memory"] = f"about {_bytes(teacher + OPTIMIZER_BYTES * trained + logits + activations)}"
    estimate["disk"] = _bytes((config.save_total_limit + 1) * 12 * trained + 4 * stored)
    return estimate


def export(recipe: Recipe, folders: Folders) -> Estimate:
    """Disk of the bundle: bf16 weights."""
    target = _target(recipe, folders)
    return {"disk": _bytes(2 * drafter_parameters(drafter_shape(recipe), target)[1])} if target else {}


def classifier(recipe: Recipe, folders: Folders) -> Estimate:
    """Trees, their nodes and disk at most: so many if no draft is accepted."""
    config = recipe.classifier
    trees = len(read_prompts(config.prompts.path, config.prompts.limit)) * config.max_new_tokens
    estimate = {"prompts": f"{config.prompts.name} {config.prompts.limit or 'all'}"}
    estimate["trees"] = f"at most {_count(trees)}"
    size, target = drafter_shape(recipe).draft_vocab_size, _target(recipe, folders)
    if target is not None:
        size = min(size or target.vocab_size, target.vocab_size)
    if size is not None:
        rows = trees * config.dump_config().nodes(size)
        estimate["rows"] = f"at most {_count(rows)}"
        estimate["disk"] = f"at most {_bytes(rows * ROW_BYTES)}, less as it is compressed"
    return estimate


def calibrate(recipe: Recipe, folders: Folders) -> Estimate:
    """Which prompts are decoded how often."""
    prompts = recipe.calibrate.prompts
    times = 6 + (C2T_TRIALS if recipe.classifier.prompts else 0)
    return {"prompts": f"{prompts.name} {prompts.limit or 'all'}", "decoded": f"{times} times each"}


def evaluate(recipe: Recipe, folders: Folders) -> Estimate:
    """Tokens to decode at most, where every prompt set says how many prompts it has."""
    config = recipe.evaluate
    names = ", ".join(f"{prompts.name} {prompts.limit or 'all'}" for prompts in config.prompts)
    if any(prompts.limit is None for prompts in config.prompts):
        return {"prompts": names}
    answers = config.repeats * sum(prompts.limit * prompts.turns for prompts in config.prompts)
    return {"prompts": names, "tokens per method": f"at most {_count(answers * config.max_new_tokens)}"}


def drafter_parameters(drafter: DrafterConfig, target: FrozenTarget) -> tuple[int, int]:
    """(trained parameters, stored numbers) of a drafter.

    Trained are layers of the target's shape, a final norm, what joins several states, and embeddings and
    head if the recipe says so; MEDUSA has a matrix and a head for each token ahead. The map of the draft
    vocabulary is stored only.
    """
    hidden, taps = target.hidden_size, len(drafter.tapped_blocks)
    size = min(drafter.draft_vocab_size or target.vocab_size, target.vocab_size)
    if drafter.kind == "medusa":
        trained = drafter.heads * (hidden * hidden + hidden + hidden * size)
        return trained, trained + size
    if drafter.kind == "causal_lm":
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(drafter.model))
        trained = sum(p.numel() for p in lm.parameters())
        return trained, trained + size
    trained = drafter.layers * sum(p.numel() for p in target.blocks[0].parameters()) + hidden
    trained += hidden * target.vocab_size if drafter.train_embeddings else 0
    trained += hidden * size if drafter.train_head else 0
    if drafter.kind == "edd":
        trained += taps * hidden * hidden if taps > 1 else 0
    elif drafter.kind == "eagle":
        trained += 2 * hidden * hidden + 2 * hidden * (1 if drafter.input_norms else -1)
    return trained, trained + size


def stored_blocks(recipe: Recipe) -> list[int]:
    """Blocks whose outputs a store holds: what the drafter reads, unless the recipe names others. The final
    states are always there."""
    if recipe.hidden_states.tapped_blocks is not None:
        return recipe.hidden_states.tapped_blocks
    shape = drafter_shape(recipe)
    return shape.tapped_blocks if shape.kind == "edd" else []


def drafter_shape(recipe: Recipe) -> DrafterConfig:
    """The drafter's shape: that of `training.init_from` where there is one."""
    if not recipe.training.init_from:
        return recipe.drafter
    stored = read_json(Path(recipe.training.init_from) / "config.json")
    names = [item.name for item in dataclasses.fields(DrafterConfig) if item.name in stored]
    kind = stored["model_type"].removeprefix("drafttrain_")
    shape = DrafterConfig(**{name: stored[name] for name in names}, kind=kind)
    grown = recipe.training.init_draft_vocab_size
    return shape if grown is None else dataclasses.replace(shape, draft_vocab_size=grown)


def recorded_place(folder: Path) -> Path | None:
    """Where the target is that a run's first stage fetched, from that stage's folder."""
    record = folder / PLACE
    return Path(read_json(record)["place"]) if record.exists() else None


def _target(recipe: Recipe, folders: Folders) -> FrozenTarget | None:
    """The target without weights; None while its folder is not there."""
    place = recorded_place(folders["fetch-target"]) if "fetch-target" in folders else None
    if place is None:
        known = is_known(recipe.target.model)
        place = known_folder(recipe.target.source) if known else Path(recipe.target.model)
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True)
        with torch.device("meta"):
            return FrozenTarget(AutoModelForCausalLM.from_config(config), None, str(place))
    except (OSError, ValueError, UserError):
        return None


def _target_bytes(recipe: Recipe, target: FrozenTarget) -> int:
    return sum(p.numel() for p in target.model.parameters()) * (4 if recipe.target.dtype == "float32" else 2)


def _corpus_tokens(recipe: Recipe, folders: Folders) -> tuple[int, str]:
    """(tokens, "") of a corpus that is built; (tokens, "about ") from the sources' size otherwise."""
    record = folders["corpus"] / "corpus.json"
    if record.exists():
        counts: dict[str, Any] = read_json(record)["counts"]
        return counts["train"]["tokens"], ""
    sources = recipe.corpus.sources + (recipe.regenerate.sources if recipe.regenerate else [])
    return _source_tokens(sources), "about "


def _source_tokens(sources: Iterable[Source]) -> int:
    return sum(map(_tokens_of, sources))


def _tokens_of(source: Source) -> int:
    """Tokens of a source by its size; by its first conversations where only some of them are taken."""
    path, n_bytes = Path(source.path), 0.0
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            n_bytes += file.stat().st_size * COMPRESSION.get(file.suffix, 1.0)
    tokens = round(n_bytes / BYTES_PER_TOKEN)
    if source.max_conversations is None:
        return tokens
    some = islice(read_conversations(source.path, source.format), min(source.max_conversations, SAMPLE))
    sizes = [sum(len(m.token_ids or m.content) / (1 if m.token_ids else 4) for m in c.messages) for c in some]
    return min(tokens, round(source.max_conversations * sum(sizes) / max(len(sizes), 1)))


def _count(n: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if n >= size:
            return f"{n / min(size, 1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{n:,.0f}"


def _bytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{max(n / 1e6, 0.1):.1f} MB"
