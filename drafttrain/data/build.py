"""The corpus stage: turn sources into a `datasets` folder of token ids and loss masks.

The first pass streams the sources, repairs, de-duplicates and filters rows, and writes conversations to an
Arrow file. The second encodes that file in several processes. The result depends on inputs, configuration and
seed, not on the number of processes.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import template_hash, tokenizer_hash
from drafttrain.data.config import CorpusConfig, PromptSet, Source
from drafttrain.data.conversation import Conversation
from drafttrain.data.corpus import FORMAT_VERSION, tokenizer_facts
from drafttrain.data.encode import check_trained_fraction, encode_raw, write_raw
from drafttrain.data.loss_mask import fill_texts
from drafttrain.data.measured import hash_input, not_compared, note_changed, note_compared
from drafttrain.data.overlap import OVERLAP, EvaluationPrompts, MeasuredPrompts, not_excluded
from drafttrain.data.readers import ReadReport, read_conversations
from drafttrain.data.report import CorpusReport, SplitCounts
from drafttrain.data.tidy import split_groups, tidy
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.folders import new_folder
from drafttrain.utils.writing import write_json

LIBRARIES = ("datasets", "markdownify", "tokenizers", "transformers")  # a corpus depends on them
_DUPLICATE = "duplicate"


def build_corpus(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    measured: Sequence[PromptSet] = (),
) -> CorpusReport:
    """Build a corpus and print its counts.

    Writes a `DatasetDict` with the splits train and validation, columns `id` (string), `input_ids` (int32)
    and `loss_mask` (int8, 1 = trained), and `corpus.json`. `out` is created or replaced only at the end.

    Args:
        config: sources, limits and filters.
        tokenizer: of the target.
        out: folder to write.
        measured: prompts that the drafter will be measured on.

    Raises:
        UserError: input that cannot be read or trained on, a chat template that hides the answers, a trained
            share of the chats outside 1–99 %, a conversation with a measured prompt, too little room on the
            disk.
    """
    config.check()
    report = CorpusReport()
    with new_folder(out) as folder:
        work = folder / "work"
        work.mkdir()
        raw = work / "raw.arrow"
        ids, n_bytes, digest = write_raw(unmeasured_conversations(config, tokenizer, report, measured), raw)
        # Tokens take 1 to 1.5 bytes per character of text, and are written twice.
        require_free_disk(folder, 3 * n_bytes, "the corpus")
        encoded = encode_raw(raw, digest, tokenizer, config.max_length, config.processes)
        splits = _split(encoded, ids, config, report)
        check_trained_fraction(encoded, tokenizer)
        # An empty split gets one file too: without any it could not be loaded again.
        splits.save_to_disk(folder, num_shards={"train": None, "validation": 1})
        write_json(folder / "corpus.json", _metadata(config, tokenizer, report))
        note_compared(folder, measured)
        del encoded, splits
        shutil.rmtree(work)
    Console(stderr=True).print(report.table())
    return report


def check_measured(
    corpus: str | Path, tokenizer: PreTrainedTokenizerBase, measured: Sequence[PromptSet]
) -> None:
    """Require that a corpus holds no conversation with one of these prompts. Its sources are read again for
    prompts that it was not compared with yet; if a source has changed or is gone, a line is printed instead.

    Raises:
        UserError: a conversation holds one, or as `unmeasured_conversations`.
    """
    new = not_compared(corpus, measured)
    if not new:
        return
    metadata = read_json(Path(corpus) / "corpus.json")
    if note_changed("corpus", new, metadata["inputs"].items()):
        return
    settings = metadata["config"]
    config = CorpusConfig(**{**settings, "sources": [Source(**source) for source in settings["sources"]]})
    for _ in unmeasured_conversations(config, tokenizer, CorpusReport(), new):
        pass
    note_compared(corpus, new)


# ------------------------------------------------------------------------------------------------ reading


def unmeasured_conversations(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: CorpusReport,
    measured: Sequence[PromptSet],
    keys: tuple[str, str] = ("corpus.sources", "corpus.exclude"),
) -> Iterator[Conversation]:
    """Yield the kept conversations, and raise an error at the end if some of them hold a measured prompt.

    Args:
        measured: prompts that the drafter will be measured on.
        keys: the recipe's keys of the sources and of the files that are excluded, for the error message.

    Raises:
        UserError: some hold one, a file of prompts is unreadable, or as `kept_conversations`.
    """
    prompts = MeasuredPrompts(not_excluded(measured, config.exclude))
    for conversation in kept_conversations(config, tokenizer, report):
        prompts.look(conversation.asked)
        yield conversation
    prompts.check(*keys)


def kept_conversations(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, report: CorpusReport
) -> Iterator[Conversation]:
    """Yield the tidied conversations of all sources that are kept; fill in the report and show progress.

    Raises:
        UserError: a source is unreadable or has no usable rows, or ids of another tokenizer.
    """
    prompts = EvaluationPrompts.read(config.exclude)
    seen: set[bytes] = set()
    made_by = tokenizer_hash(tokenizer)
    columns = (
        SpinnerColumn(),
        TextColumn("reading {task.description}: {task.completed:,}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for source in config.sources:
            # Two sources may name the same path, for example with different formats.
            key = source.path
            while key in report.sources:
                key += " (again)"
            counts = report.sources[key] = ReadReport()
            task = progress.add_task(source.path, total=None)
            n_kept = 0
            for conversation in read_conversations(source.path, source.format, counts):
                fill_texts(tokenizer, conversation, made_by)
                kept = _screen(conversation, counts, prompts, seen if config.deduplicate else None)
                if kept is not None:
                    n_kept += 1
                    progress.update(task, completed=n_kept)
                    yield kept
                    if n_kept == source.max_conversations:
                        break
            counts.kept = n_kept
            unusable = {
                reason: n for reason, n in counts.skipped.items() if reason not in (_DUPLICATE, OVERLAP)
            }
            if sum(unusable.values()) == counts.read:
                reasons = ", ".join(f"{n} × {reason}" for reason, n in sorted(unusable.items()))
                raise UserError(
                    f"{source.path}: no usable rows among {counts.read} ({reasons}); give chats with a user "
                    "turn and an assistant turn that answers it"
                )
    if not any(counts.kept for counts in report.sources.values()):
        paths = ", ".join(source.path for source in config.sources)
        raise UserError(f"{paths}: no rows but duplicates and evaluation prompts; add another source")


def _screen(
    conversation: Conversation, counts: ReadReport, prompts: EvaluationPrompts, seen: set[bytes] | None
) -> Conversation | None:
    """Return the conversation to encode, or count the reason for leaving it out and return None."""
    tidied = tidy(conversation, counts.repairs, counts.skipped)
    if tidied is None:
        return None
    if len(prompts) and any(map(prompts.overlap, tidied.asked)):
        counts.skipped[OVERLAP] += 1
        return None
    if seen is not None:
        words = [[m.role, " ".join(m.content.split())] for m in tidied.messages]
        digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=16).digest()
        if digest in seen:
            counts.skipped[_DUPLICATE] += 1
            return None
        seen.add(digest)
    return tidied


# --------------------------------------------------------------------------------------------- splitting


def _split(encoded: Dataset, ids: list[str], config: CorpusConfig, report: CorpusReport) -> DatasetDict:
    """Return the training and validation examples, without pieces that train no token; fill in the report."""
    row = np.asarray(encoded["row"])  # [examples] index of the conversation
    n_tokens, n_trained = np.asarray(encoded["n_tokens"]), np.asarray(encoded["n_trained"])  # [examples]
    report.cut = int((np.bincount(row) > 1).sum())
    report.truncated = int(np.sum(encoded["truncated"]))
    report.pieces_without_trained_tokens = int((n_trained == 0).sum())
    held_out = held_out_groups(ids, config.validation_fraction, config.seed)[row]  # [examples] bool

    splits = {}
    for name, chosen in (("train", ~held_out), ("validation", held_out)):
        indices = np.flatnonzero(chosen & (n_trained > 0))
        counts = SplitCounts(len(indices), int(n_tokens[indices].sum()), int(n_trained[indices].sum()))
        setattr(report, name, counts)
        splits[name] = encoded.select(indices).select_columns(["id", "input_ids", "loss_mask"])
    if not report.train.examples:
        raise UserError(
            f"corpus.max_length: no tokens to train in {len(row)} pieces of at most {config.max_length} "
            "tokens; raise it"
        )
    return DatasetDict(splits)


def held_out_groups(ids: list[str], fraction: float, seed: int) -> np.ndarray:
    """Return which conversations are held out for validation, bool [conversations]; groups stay together.

    Groups are drawn in the order of a hash of seed and name, so that adding data moves few of them to the
    other split. A group with more conversations than are still wanted is skipped; if all are skipped, the
    smallest is taken. At least one group is left for training.
    """
    groups = split_groups(ids)
    names, sizes = np.unique(groups, return_counts=True)
    wanted = 0 if fraction == 0 or len(names) < 2 else max(1, round(fraction * len(ids)))
    order = sorted(range(len(names)), key=lambda i: hashlib.sha256(f"{seed}:{names[i]}".encode()).digest())
    chosen: list[str] = []
    left = wanted
    for i in order:
        if sizes[i] <= left and len(chosen) < len(names) - 1:
            chosen.append(names[i])
            left -= sizes[i]
    if wanted and not chosen:
        chosen = [names[min(order, key=lambda i: sizes[i])]]
    return np.isin(groups, chosen)


# ----------------------------------------------------------------------------------------------- metadata


def _metadata(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, report: CorpusReport
) -> dict[str, Any]:
    settings = asdict(config)
    del settings["processes"]  # does not change the corpus
    inputs = [source.path for source in config.sources] + list(config.exclude)
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer_facts(tokenizer),
        "template_hash": template_hash(tokenizer),
        "config": settings,
        "inputs": {path: hash_input(path) for path in dict.fromkeys(inputs)},
        "counts": report.as_dict(),
        "versions": {name: version(name) for name in LIBRARIES},
    }
