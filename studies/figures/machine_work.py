"""How near forwards and training come to the machine's limits; whether `auto` chooses the faster dtype."""

import json
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict

from drafttrain.hidden_states.collect import collect_states
from drafttrain.hidden_states.store import HiddenStateStore
from drafttrain.kernels.machine import dtype_name
from drafttrain.run.recipe import load_recipe
from drafttrain.run.speeds import measure_speeds
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.loading import choose_dtype, load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.packing import PackedRows
from drafttrain.training.speed import train_some
from drafttrain.training.train import start_drafter
from drafttrain.utils.writing import write_json
from studies.figures import limits
from studies.figures.machine_setting import (
    RECIPE,
    REPEATS,
    in_dtype,
    load,
)
from studies.goals import Measured, Run

CPU = torch.device("cpu")
SPEED_ROUNDS = 3  # of each dtype


def limit_share(run: Run, folder: Path) -> Measured:
    """Time forwards of 1, 5 and 8 tokens against what reading and multiplying take at least."""
    run.check_quiet()
    target = load().target
    read, dtype = limits.streaming_rate(), limits.native_arithmetic()
    products = limits.arithmetic_rate(dtype)
    seconds: dict[int, list[float]] = {1: [], 5: [], 8: []}
    for _ in range(REPEATS):  # interleaved, so that a machine that slows down slows all of them
        for n, times in seconds.items():
            times += limits.forward_seconds(target, n)
    again = limits.streaming_rate()
    rates = {name: max(read[name], again[name]) for name in read}
    weights = limits.weights_read(target)
    shares = limits.limit_shares(weights, max(rates.values()), products, seconds)
    interleaved = limits.interleaved_shares(target, weights, products, list(seconds))
    write_json(folder / "raw.json", {"seconds": seconds, "streaming": [read, again], "products": products})
    return {
        "limit_share": {
            "value": min(one["share"] for one in shares.values()),
            "tokens": {str(n): one for n, one in shares.items()},
            "by_turns": {str(n): share for n, share in interleaved.items()},
            "weights": weights,
            "gigabytes_per_second": {name: rate / 1e9 for name, rate in rates.items()},
            "gigaproducts_per_second": products / 1e9,
            "products_in": dtype_name(dtype),
            "context": limits.CONTEXT,
            "machine": in_dtype(target),
        }
    }


def auto_vs_best_dtype(run: Run, folder: Path) -> Measured:
    """Interleave fp32 and bf16, and measure the share of the better one's speed that `auto` has chosen."""
    run.check_quiet()
    model = load_recipe(RECIPE).target.model
    rounds: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
    for _ in range(1 if run.quick else SPEED_ROUNDS):
        for dtype, found in rounds.items():
            words = ["--target.dtype", dtype, "--training.bf16", json.dumps(dtype == "bfloat16")]
            found.append(asdict(measure_speeds(load_recipe(RECIPE, words), model)))
    write_json(folder / "rounds.json", rounds)
    chosen = {work: dtype_name(choose_dtype(model, "auto", "cpu", work)) for work in ("decoding", "products")}
    size = {"repeats": len(rounds["float32"])}
    return {"auto_vs_best_dtype": {**dtype_figure(rounds, chosen), "size": size}}


def dtype_figure(rounds: dict[str, list[dict[str, float]]], chosen: dict[str, str]) -> dict[str, Any]:
    """Return the worst share, over kinds of work, of the chosen dtype's median speed in that of the faster
    one.

    Args:
        rounds: speeds of each round, by dtype.
        chosen: dtype by `work` of `resolve_dtype`.
    """
    kinds = {"decode": "decoding", "train": "products", "collect": "products", "generate": "products"}
    works = {}
    for name, work in kinds.items():
        rates = {dtype: statistics.median(one[name] for one in found) for dtype, found in rounds.items()}
        share = rates[chosen[work]] / max(rates.values())
        works[name] = {"share": share, "auto": chosen[work], "tokens_per_second": rates}
    return {"value": min(work["share"] for work in works.values()), "works": works}


def training(run: Run, folder: Path) -> Measured:
    """Time training over stored states against the limit that fp32 products set to it."""
    run.check_quiet()
    recipe = load_recipe(RECIPE)
    config = replace(recipe.training, max_minutes=None, gradient_accumulation_steps=1)
    target = load_target(recipe.target.model)
    documents = random_documents(target, config.rows_per_batch * 4, config.row_length)
    drafter = start_drafter(config, recipe.drafter, target, documents)
    states = folder / "states"
    if not states.exists():
        collect_states(CollectConfig(mode="offline"), target, DatasetDict(train=documents), states)
    store = HiddenStateStore.open(states / "train", target_info(target), documents)
    rows = PackedRows(documents, config.row_length, 0, store)

    def train(steps: int) -> float:
        return train_some(config, drafter, target, rows, steps, 0, folder)

    rates = [train(2) for _ in range(1 if run.quick else REPEATS)]
    per_token = limits.operations(lambda: train(1)) / (2 * config.rows_per_batch * config.row_length)
    shutil.rmtree(states)
    limit = 2 * limits.arithmetic_rate(torch.float32) / per_token
    return {
        "train_tokens_per_s": {
            "value": statistics.median(rates) / limit,
            "tokens_per_second": rates,
            "limit_tokens_per_second": limit,
            "gigaflop_per_token": per_token / 1e9,
            "size": {"repeats": len(rates)},
            "machine": in_dtype(target),
        }
    }


def random_documents(target: FrozenTarget, n: int, length: int) -> Dataset:
    """Return documents of random tokens, all of them trained on: whole rows without padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (n, length), generator=generator).tolist()
    columns = {"id": [str(i) for i in range(n)], "input_ids": ids, "loss_mask": [[1] * length] * n}
    return Dataset.from_dict(columns)
