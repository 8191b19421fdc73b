"""Estimates of a stage before it runs (`--dry-run`): tokens, parameters, memory, disk.

Models are built on the meta device, so nothing is loaded. What is only known after an earlier stage (the
target's shape before it is fetched, the corpus's tokens before it is built) is read from the recipe's section
`plan`, estimated from file sizes, or left out.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drafttrain.calibration.config import C2T_TRIALS
from drafttrain.classifier.config import ROW_BYTES
from drafttrain.data.config import PromptSet, Source
from drafttrain.data.message import Message
from drafttrain.data.prompts import Task, read_prompts
from drafttrain.data.readers import read_conversations
from drafttrain.drafters import registration as _drafters  # noqa: F401 - so that `AutoConfig` knows them
from drafttrain.drafters.auto import model_class
from drafttrain.drafters.causal_lm import CausalLmConfig, with_adapters
from drafttrain.drafters.config import DrafterConfig
from drafttrain.regenerate.responses import RESPONSES
from drafttrain.run.recipe import PlanConfig, Recipe
from drafttrain.run.recorded import recorded_place
from drafttrain.run.stages import ANSWERS, drafter_shape, stored_blocks
from drafttrain.target_lm.config import stored_bytes
from drafttrain.target_lm.fetch import known_folder
from drafttrain.target_lm.known import is_known
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.outlook import doubts
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, usable

Folders = dict[str, Path]
Estimate = dict[str, str]
KNOWN_DOWNLOAD = {"pypi": "98 MB", "hub": "270 MB"}
SAMPLE = 200  # conversations from which the length of the others is estimated
BYTES_PER_TOKEN = 4.5  # of JSON chats, punctuation of the JSON included; SmolLM2's tokenizer
CHARACTERS = 4  # characters of text per token
ROW_TOKENS = 20  # tokens that correspond to a row's JSON keys and id
COMPRESSION = {".gz": 3.0, ".zip": 3.0, ".tgz": 3.0, ".parquet": 3.5, ".bz2": 4.0, ".xz": 4.0}  # of such text
RESPONSE_BYTES = 11  # bytes per token of regenerated JSON: its text and its id
OPTIMIZER_BYTES = 16  # per trained parameter: fp32 weight, gradient and both moments of Adam


def fetch_target(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate the download of a known target, and of others whose shape the recipe's plan names."""
    source = recipe.target.source
    if not is_known(recipe.target.model):
        if (target := _target(recipe, folders)) is None:
            return {"parameters": _no_target(recipe)}
        is_there = recipe.plan.target_config is None or Path(os.path.expanduser(recipe.target.model)).exists()
        return {} if is_there else {"download": f"about {_bytes(_target_bytes(recipe, target))}"}
    return {"download": "none: in the cache" if known_folder(source).exists() else KNOWN_DOWNLOAD[source]}


def regenerate(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate the tokens generated at most, their disk, and the memory of target and KV cache."""
    config = recipe.regenerate
    estimate = {"prompts read": f"about {_count(_source_tokens(config.sources))} tokens"}
    if config.max_rows:
        most = config.max_rows * config.max_turns * config.max_new_tokens
        estimate["new tokens"] = f"at most {_count(most)}"
        estimate["disk"] = f"at most {_bytes(RESPONSE_BYTES * most)}"
    if config.keep_states and config.server is None and recipe.hidden_states.mode == "offline":
        estimate["hidden states"] = f"kept, at most {recipe.hidden_states.max_disk_gb:g} GB"
    if config.max_minutes:
        estimate["time"] = f"at most {config.max_minutes:g} min"
    if config.server is None and (target := _target(recipe, folders)):
        weights, cache = _target_bytes(recipe, target), config.max_cache_gb or 4
        room = fits(recipe.plan, weights + 1e9 * cache)
        estimate["memory"] = f"{_bytes(weights)} + at most {cache:g} GB of keys and values{room}"
    return estimate


def corpus(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate tokens and disk, from the size of the sources and of what `regenerate` answers."""
    if recipe.plan.corpus_tokens:
        tokens, about = recipe.plan.corpus_tokens, "about "
    else:
        tokens, about = _recipe_tokens(recipe, folders)
    return {
        "tokens": f"{about}{_count(tokens)}",
        "disk": f"{about}{_bytes(5 * tokens)}",
    }  # int32 id, int8 mask


def collect(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate tokens of the corpus, and disk of its hidden states."""
    tokens, about = _corpus_tokens(recipe, folders)
    estimate = {"tokens": f"{about}{_count(tokens)}"}
    if target := _target(recipe, folders):
        sizes = target.hidden_size, len(stored_blocks(recipe)), recipe.hidden_states.dtype
        disk = stored_bytes(tokens, 0, 0, *sizes)
        estimate["disk"] = f"{about}{_bytes(disk)} (max_disk_gb {recipe.hidden_states.max_disk_gb:g})"
        weights = _target_bytes(recipe, target)
        estimate["memory"] = _bytes(weights) + fits(recipe.plan, weights)
    return estimate


def train(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate parameters, tokens, optimizer steps, memory and disk of training.

    Raises:
        UserError: the target cannot have such a drafter.
    """
    config = recipe.training
    if config.max_steps == 0:
        return {"steps": "none, init_from is taken"}
    tokens, about = _corpus_tokens(recipe, folders)
    tokens_per_step = config.rows_per_batch * config.row_length * config.gradient_accumulation_steps
    tokens_per_step *= recipe.plan.devices
    steps = config.max_steps or math.ceil(tokens * config.epochs / tokens_per_step)
    about = "" if config.max_steps else about or "about "
    limit = f", at most {config.max_minutes:g} min" if config.max_minutes else ""
    estimate = {
        "tokens": f"{about}{_count(steps * tokens_per_step)}",
        "steps": f"{about}{_count(steps)}{limit}",
    }
    if warnings := doubts(config, steps, tokens_per_step):
        estimate["WARNING"] = "\nWARNING: ".join(warnings)
    target = _target(recipe, folders)
    if target is None:
        return estimate | {"parameters": _no_target(recipe)}
    drafter = drafter_shape(recipe)
    sizes = drafter_parameters(drafter, target)
    if sizes is None:
        return estimate | {"parameters": f"unknown: drafter.model {drafter.model} is not found here"}
    trained, stored = sizes
    frozen = stored if drafter.lora_rank else 0  # the small LM itself, in fp32, in addition to its adapters
    vocabulary = min(drafter.draft_vocab_size or target.vocab_size, target.vocab_size)
    # fp32 logits of target and drafter, their log-probabilities and the gradient
    logits = 4 * 4 * config.kl_chunk * vocabulary + 4 * config.kl_chunk * target.vocab_size
    teacher = _target_bytes(recipe, target)  # offline as well: it measures accept_len while training
    # a dozen fp32 activations of a layer's width per token that backward needs
    activations = 4 * 12 * _width(drafter, target) * config.rows_per_batch * config.row_length
    estimate["parameters"] = f"{_count(trained)} trained, {_count(stored)} stored"
    memory = teacher + OPTIMIZER_BYTES * trained + 4 * frozen + logits + activations
    estimate["memory"] = f"about {_bytes(memory)}{fits(recipe.plan, memory)}"
    checkpoint = 12 * trained + 4 * frozen
    estimate["disk"] = _bytes((config.save_total_limit + 1) * checkpoint + 12 * stored)  # the best, too
    return estimate


def export(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate disk of the bundle."""
    target = _target(recipe, folders)
    shape = drafter_shape(recipe)
    sizes = drafter_parameters(shape, target) if target else None
    if sizes is None:
        return {}
    size = 4 if recipe.export.dtype == "float32" else 2
    tokens = min(shape.draft_vocab_size or target.vocab_size, target.vocab_size)
    head = tokens * target.hidden_size if shape.train_head else 0
    embeddings = target.vocab_size * target.hidden_size if shape.train_embeddings else 0
    int8 = head if shape.head_dtype else 0
    int8 += sizes[1] - tokens - head - embeddings if shape.layers_dtype else 0  # all but a few norms
    return {"disk": _bytes(size * (sizes[1] - int8) + int8)}


def classifier(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate upper bounds of trees, nodes and disk: their sizes if no draft is accepted."""
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
    """Name the prompts, and how often each is decoded."""
    if recipe.calibrate.quick:
        return {"prompts": "built-in", "time": "some seconds"}
    prompts = recipe.calibrate.prompts
    times = 6 + (C2T_TRIALS if recipe.classifier.prompts else 0)
    return {"prompts": f"{prompts.name} {prompts.limit or 'all'}", "decoded": f"{times} times each"}


def ngrams(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate the text that is counted, and name the prompts that Self-Draft is tuned on."""
    if sources := recipe.ngrams.sources:
        tokens, about = _source_tokens(sources), "about "
    else:
        tokens, about = _recipe_tokens(recipe, folders)
    estimate, prompts = {"tokens": f"{about}{_count(tokens)}"}, recipe.calibrate.prompts
    if prompts is not None:
        estimate["tuned on"] = f"{prompts.name} {prompts.limit or 'all'}"
    return estimate


def evaluate(recipe: Recipe, folders: Folders) -> Estimate:
    """Estimate tokens to decode at most; prompt sets without a limit are read and counted."""
    config = recipe.evaluate
    names = ", ".join(f"{prompts.name} {prompts.limit or 'all'}" for prompts in config.prompts)
    answers = config.repeats * sum(map(_answers, config.prompts))
    tokens = answers * config.max_new_tokens
    estimate = {"prompts": names, "tokens per method": f"at most {_count(tokens)}"}
    target = _target(recipe, folders)
    if target is None or recipe.plan.device_memory_gb is None:
        return estimate
    # transformers holds a second copy of the target, and both are fp32 while outputs are compared
    memory = 2 * (4 * _parameters(target) if config.lossless_prompts else _target_bytes(recipe, target))
    return estimate | {"memory": f"about {_bytes(memory)}{fits(recipe.plan, memory)}"}


def fits(plan: PlanConfig, n_bytes: float) -> str:
    """Return the note after a memory estimate: the memory of a device, and whether it is enough. A target is
    not split over devices: each process holds all of it."""
    if plan.device_memory_gb is None:
        return ""
    if n_bytes <= plan.device_memory_gb * 1e9:
        return f" of {plan.device_memory_gb:g} GB"
    return f", MORE than the {plan.device_memory_gb:g} GB of a device"


def drafter_parameters(drafter: DrafterConfig, target: FrozenTarget) -> tuple[int, int] | None:
    """Return the numbers of trained and of stored parameters; None if the drafter's small LM is not found.

    Only the adapters of a small LM that has some are trained, and they are stored merged into it. The map of
    the draft vocabulary is stored but not trained.

    Raises:
        UserError: the target cannot have such a drafter.
    """
    size = min(drafter.draft_vocab_size or target.vocab_size, target.vocab_size)
    if drafter.model is not None:
        if (lm := _small_lm(drafter.model)) is None:
            return None
        stored = sum(p.numel() for p in lm.parameters()) + size
        with torch.device("meta"):
            lm = with_adapters(lm, drafter.lora_rank) if drafter.lora_rank else lm
        return sum(p.numel() for p in lm.parameters() if p.requires_grad), stored
    kind = model_class(drafter.kind)
    with torch.device("meta"):
        model = kind(kind.config_class.shape(target, drafter, size))
    frozen = model._keys_to_ignore_on_save
    trained = sum(p.numel() for name, p in model.named_parameters() if name not in frozen)
    return trained, trained + size


def _width(drafter: DrafterConfig, target: FrozenTarget) -> int:
    """Return the hidden size of a drafter times its layers."""
    if drafter.model is not None:
        config = _small_lm(drafter.model).config.get_text_config()
        return config.hidden_size * config.num_hidden_layers
    return target.hidden_size * drafter.layers


def _small_lm(place: str) -> PreTrainedModel | None:
    """Return a folder's, Hub id's or drafter folder's small LM without weights; None if it is not found."""
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            is_drafter = isinstance(config, CausalLmConfig)
            return AutoModelForCausalLM.from_config(config.lm_config() if is_drafter else config)
    except (OSError, ValueError):
        return None


def _target(recipe: Recipe, folders: Folders) -> FrozenTarget | None:
    """Return the target without weights; while it is missing, in the shape that the plan names; else None.

    Raises:
        UserError: the plan names a folder without a config.json.
    """
    place = recorded_place(folders["fetch-target"]) if "fetch-target" in folders else None
    if place is None:
        known = is_known(recipe.target.model)
        place = Path(os.path.expanduser(recipe.target.model))
        place = known_folder(recipe.target.source) if known else place
        if recipe.plan.target_config is not None and not place.exists():
            place = Path(recipe.plan.target_config)
            if not (place / "config.json").is_file():
                raise UserError(f"plan.target_config: {place} has no config.json; name a folder that has one")
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return FrozenTarget(AutoModelForCausalLM.from_config(config), None, str(place))
    except (OSError, ValueError, UserError):
        return None


def _no_target(recipe: Recipe) -> str:
    """Return the note in place of a drafter's parameters while the target's shape is unknown."""
    return f"unknown: target {recipe.target.model} is not found here; fetch it or name plan.target_config"


def _target_bytes(recipe: Recipe, target: FrozenTarget) -> int:
    return _parameters(target) * (4 if recipe.target.dtype == "float32" else 2)


def _parameters(target: FrozenTarget) -> int:
    return sum(p.numel() for p in target.model.parameters())


def _corpus_tokens(recipe: Recipe, folders: Folders) -> tuple[int, str]:
    """Return (tokens, "") of a corpus that is built, else tokens and "planned ", "about " or "at most "."""
    record = folders["corpus"] / "corpus.json"
    if record.exists():
        with usable(record, "run the stage corpus again"):
            return int(read_json(record)["counts"]["train"]["tokens"]), ""
    if recipe.plan.corpus_tokens is not None:
        return recipe.plan.corpus_tokens, "planned "
    return _recipe_tokens(recipe, folders)


def _recipe_tokens(recipe: Recipe, folders: Folders) -> tuple[int, str]:
    """Estimate the tokens of the corpus from its sources and the target's answers: "about ", or "at most "
    while the answers are still to be generated."""
    tokens, config = _source_tokens(recipe.corpus.sources), recipe.regenerate
    if config is None:
        return tokens, "about "
    beside = folders["corpus"].parent if "corpus" in folders else Path(recipe.output)
    there = (folders.get("regenerate") or beside / ANSWERS) / RESPONSES
    if there.is_file():
        return tokens + round(there.stat().st_size / RESPONSE_BYTES), "about "
    left = config.max_rows
    for source in config.sources:
        rows, prompt, answers = _asked(source, config.max_turns)
        rows = rows if left is None else min(rows, left)
        left = None if left is None else left - rows
        tokens += round(rows * (prompt + answers * config.max_new_tokens))
    return tokens, "at most "


def _asked(source: Source, max_turns: int) -> tuple[int, float, float]:
    """Return a source's number of conversations and their mean tokens of user turns and turns to answer."""
    some = list(islice(read_conversations(source.path, source.format), SAMPLE))
    if not some:
        return 0, 0.0, 0.0
    asked = [[m for m in one.messages if m.role == "user"][:max_turns] for one in some]
    prompt = sum(len(m.content) / CHARACTERS for turns in asked for m in turns) / len(some)
    whole = sum(_message_tokens(m) for one in some for m in one.messages) / len(some)
    rows = len(some)
    if rows == SAMPLE:  # there are more, by the size of all
        rows = max(rows, round(_tokens_of(replace(source, max_conversations=None)) / (whole + ROW_TOKENS)))
    limit = source.max_conversations
    return min(rows, limit or rows), prompt, sum(map(len, asked)) / len(some)


def _message_tokens(message: Message) -> float:
    return len(message.token_ids) if message.token_ids else len(message.content) / CHARACTERS


def _answers(prompts: PromptSet) -> int:
    """Return the maximum number of chat turns of a prompt set."""
    return Task.read(prompts).n_turns if prompts.limit is None else prompts.limit * prompts.turns


def _source_tokens(sources: Iterable[Source]) -> int:
    return sum(map(_tokens_of, sources))


def _tokens_of(source: Source) -> int:
    """Estimate a source's tokens from its size, or from its first conversations if only some are used."""
    path, n_bytes = Path(source.path), 0.0
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            n_bytes += file.stat().st_size * COMPRESSION.get(file.suffix, 1.0)
    tokens = round(n_bytes / BYTES_PER_TOKEN)
    if source.max_conversations is None:
        return tokens
    some = islice(read_conversations(source.path, source.format), min(source.max_conversations, SAMPLE))
    sizes = [sum(map(_message_tokens, conversation.messages)) for conversation in some]
    return min(tokens, round(source.max_conversations * sum(sizes) / max(len(sizes), 1)))


def _count(n: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if n >= size:
            return f"{n / min(size, 1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{n:,.0f}"


def _bytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{max(n / 1e6, 0.1):.1f} MB"


_STAGES = (fetch_target, regenerate, corpus, collect, train, classifier, calibrate, ngrams, evaluate, export)


def estimate(stage: str, recipe: Recipe, folders: Folders) -> Estimate:
    """Return the estimate of the stage of this name, as text by quantity.

    Raises:
        UserError: the recipe's settings do not fit the target or each other.
    """
    found = {function.__name__.replace("_", "-"): function for function in _STAGES}
    return found[stage](recipe, folders)
