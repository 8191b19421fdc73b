"""Measure in some seconds how fast this machine runs the work of each stage.

The stages' own code is timed, at sizes that grow until a run takes about a second, so that a slow machine
has little to do.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from rich.console import Console

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.evaluation.measure import Method, autoregressive, drafting, transformers_generate
from drafttrain.evaluation.stock import load_stock
from drafttrain.hidden_states.collect import collect_states
from drafttrain.hidden_states.store import HiddenStateStore
from drafttrain.inference.decode import Request
from drafttrain.regenerate.engines import in_process
from drafttrain.run.budget import Speeds
from drafttrain.run.recipe import Recipe
from drafttrain.run.stages import stored_blocks
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.packing import PackedRows
from drafttrain.training.speed import train_some
from drafttrain.training.train import start_drafter

ENOUGH_S = 1.0  # a run this long is a valid measurement
PATIENCE_S = 4.0  # the first run includes warming up: it has to be this long
DOCUMENT = 64  # tokens of the documents that are collected and trained on
ROWS = (1, 8, 32, 128)  # answers generated at once
PROMPT, STEPS = 16, 4  # tokens of prompts, and how many are emitted after the first


def measure_speeds(recipe: Recipe, model: str) -> Speeds:
    """Measure the speeds of a recipe's stages, with the drafter that its training starts from.

    Args:
        model: what `load_target` takes.

    Raises:
        UserError: target, drafter or tuning prompts are unusable.
    """
    place = {"dtype": recipe.target.dtype, "device": recipe.target.device}
    begun = time.perf_counter()
    target = load_target(model, **place)
    load_seconds = time.perf_counter() - begun
    generate, rows = _generating(target)
    collect, train = _training(recipe, target)
    del target  # the bundle loads one that is laid out for decoding
    loaded = load_bundle(recipe.training.init_from, target=model, own_calibration=False, **place)
    ids = read_prompts(recipe.evaluate.tune_prompts.path, 1)[0].token_ids(loaded.target.tokenizer)
    stock = load_stock(loaded.target, recipe.target.dtype == "auto", ids)
    ids, tree = ids[:PROMPT], recipe.evaluate.trees[0]
    decode, draft, transformers = (
        _decoding(method, ids)
        for method in (
            autoregressive(loaded.target),
            drafting(loaded.target, loaded.proposer(tree)),
            transformers_generate(loaded.target, model=stock.model),
        )
    )
    return Speeds(load_seconds, generate, rows, collect, train, decode, transformers, draft)


def per_second(run: Callable[[int], int], sizes: Sequence[int]) -> float:
    """Return the units per second of the first run that takes long enough to be valid, else of the last.

    Args:
        run: does work of a given size and returns its number of units, such as tokens.
        sizes: ascending.
    """
    speed = 0.0
    for number, size in enumerate(sizes):
        begun = time.perf_counter()
        units = run(size)
        seconds = time.perf_counter() - begun
        speed = units / max(seconds, 1e-9)
        if seconds > (ENOUGH_S if number else PATIENCE_S):
            break
    return speed


def _decoding(method: Method, prompt_ids: list[int]) -> float:
    return per_second(lambda tokens: len(method(prompt_ids, tokens).token_ids), (2, 8, 32, 64))


class _Enough(Exception):
    """Raised to end a generation early."""


def _generating(target: FrozenTarget) -> tuple[float, int]:
    """Return (tokens per second, rows) of the number of rows at which answering random prompts is fastest;
    prefill is not timed."""
    generator = torch.Generator().manual_seed(0)
    best, best_rows = 0.0, ROWS[0]
    for rows in ROWS:
        ids = torch.randint(target.vocab_size, (rows, PROMPT), generator=generator).tolist()
        times: list[float] = []
        emitted: list[int] = []

        def on_step(n_tokens: int, times=times, emitted=emitted) -> None:
            times.append(time.perf_counter())
            emitted.append(n_tokens)
            if len(times) > 1 and times[-1] - times[0] > ENOUGH_S:
                raise _Enough

        requests = [Request(row, 1 + STEPS) for row in ids]
        engine = in_process(target, rows, PROMPT, 1 + STEPS, None)
        begun = time.perf_counter()
        try:
            list(engine(requests, on_step))
        except _Enough:
            pass
        if len(times) > 1:
            speed = sum(emitted[1:]) / (times[-1] - times[0])
            if speed > best:
                best, best_rows = speed, rows
        if best and time.perf_counter() - begun > PATIENCE_S / 2:  # four times as many come next
            break
    return best, best_rows


def _training(recipe: Recipe, target: FrozenTarget) -> tuple[float, float]:
    """Return the tokens per second of storing hidden states, and of training on them."""
    config = replace(recipe.training, max_minutes=None, gradient_accumulation_steps=1)
    target.tap(stored_blocks(recipe))
    drafter = start_drafter(config, recipe.drafter, target, _documents(target, 1))
    with tempfile.TemporaryDirectory() as folder:

        def collect(n: int) -> int:
            return _store(recipe, target, _documents(target, n), Path(folder) / f"{n} documents")[1]

        def train(rows: int, length: int) -> float:
            documents = _documents(target, rows * max(1, length // DOCUMENT))
            store, _ = _store(recipe, target, documents, Path(folder) / f"{rows} rows of {length}")
            some = replace(config, rows_per_batch=rows, row_length=length)
            packed = PackedRows(documents, length, 0, store)
            return train_some(some, drafter, target, packed, steps=1, seed=0, folder=Path(folder))

        collecting = per_second(collect, (1, 4, 16, 64))
        rows, length = recipe.training.rows_per_batch, recipe.training.row_length
        training = train(1, DOCUMENT)
        if 2 * rows * length / training < 2 * PATIENCE_S:  # two steps, of which one is timed
            training = train(rows, length)
    return collecting, training


def _store(
    recipe: Recipe, target: FrozenTarget, documents: Dataset, folder: Path
) -> tuple[HiddenStateStore, int]:
    """Store the hidden states of documents; return the store and the number of tokens."""
    splits, quiet = DatasetDict(train=documents), Console(quiet=True)
    report = collect_states(recipe.hidden_states, target, splits, folder, quiet)
    return HiddenStateStore.open(folder / "train", target_info(target), documents), report.tokens


def _documents(target: FrozenTarget, n: int) -> Dataset:
    """Return n chats of random tokens; the loss mask covers the second half of each."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(target.vocab_size, (n, DOCUMENT), generator=generator).tolist()
    mask = [0] * (DOCUMENT // 2) + [1] * (DOCUMENT - DOCUMENT // 2)
    return Dataset.from_dict({"id": [str(i) for i in range(n)], "input_ids": ids, "loss_mask": [mask] * n})
