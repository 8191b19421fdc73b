"""`drafttrain build-ngrams`: build the corpus cache of Self-Draft from sources of text.

Three steps, each in bounded memory: the texts become one file of token ids (`tokens.py`); its n-grams are
counted in parts (`counting.py`); the parts are joined into the arrays of the cache. The arrays and the header
depend on inputs and settings, never on the number of processes or the memory allowed.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from drafttrain.data.build import held_out_groups, unmeasured_conversations
from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.config import CorpusConfig, PromptSet
from drafttrain.data.report import CorpusReport
from drafttrain.self_draft.config import NgramConfig
from drafttrain.self_draft.corpus_cache import DATA, FILE, FORMAT_VERSION, CorpusCache, Shape, padded
from drafttrain.self_draft.counting import (
    BLOCK,
    BYTES_PER_POSITION,
    Counted,
    Part,
    TokenFile,
    count_part,
    plan_parts,
    token_counts,
)
from drafttrain.self_draft.report import REPORT, describe, hit_rate, print_report
from drafttrain.self_draft.settings import SETTINGS
from drafttrain.self_draft.tokens import Texts, tokenize, worker_pool
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import new_folder
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.manifest import is_ours, write_manifest
from drafttrain.utils.progress import counted
from drafttrain.utils.provenance import content_hash
from drafttrain.utils.writing import write_json

SMALLEST_PART = 1 << 20  # occurrences; counted within a second


def build_ngrams(
    config: NgramConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    measured: Sequence[PromptSet] = (),
    keys: tuple[str, str] = ("ngrams.sources", "ngrams.exclude"),
) -> dict[str, Any]:
    """Build a corpus cache and print its report; `out` appears, or is replaced, only at the end.

    Args:
        tokenizer: the target's tokenizer.
        out: folder to write: the cache and `report.json`.
        measured: prompts that the target will be measured on with the cache.
        keys: keys of a recipe for the sources and for the excluded files, for errors.

    Returns:
        the report.

    Raises:
        UserError: a setting or a source is unusable, a text holds a measured prompt, the text repeats
            nothing, or `out` holds something else.
    """
    config.check()
    _check_place(Path(out))
    console, sources = Console(stderr=True), CorpusReport()
    try:
        with new_folder(out) as folder:
            work = folder / "work"
            work.mkdir()
            kept = unmeasured_conversations(corpus_of(config), tokenizer, sources, measured, keys)
            file, texts = tokenize(kept, tokenizer, config.processes, work / "tokens")
            held_out = take_out(file, texts, config.held_out)
            facts = {"tokenizer_hash": tokenizer_hash(tokenizer), **_origin(config)}
            cache, distinct = write_cache(config, file, folder, facts, console)
            shutil.rmtree(work)
            report = describe(cache, tokenizer, sources, texts, distinct, hit_rate(cache, held_out))
            write_json(folder / REPORT, report)
            write_manifest(folder)
    except BrokenProcessPool:
        raise UserError(
            "build-ngrams: a process was killed, probably for lack of memory; lower memory or processes"
        ) from None
    print_report(report, Console(file=sys.stdout))
    return report


def corpus_of(config: NgramConfig) -> CorpusConfig:
    """Return a corpus with the sources and exclusions of a cache, and otherwise with defaults."""
    return CorpusConfig(sources=config.sources, exclude=config.exclude)


def write_cache(
    config: NgramConfig, file: TokenFile, folder: Path, facts: dict[str, Any], console: Console
) -> tuple[CorpusCache, list[int]]:
    """Count the n-grams of a file of token ids and write the cache into a folder.

    Args:
        file: its folder receives the counts of the parts.
        facts: for the header, `tokenizer_hash` at least.

    Returns:
        the cache, and the number of n-grams of each length with a frequent prefix, rare ones included.

    Raises:
        UserError: nothing is repeated, or the disk is too small.
    """
    counts = token_counts(file)
    parts, counted = _count(config, file, counts, console)
    distinct = [int((counts > 0).sum()), *np.sum([part.distinct for part in counted], axis=0).tolist()]
    sizes = [file.vocabulary, *np.sum([part.kept for part in counted], axis=0).tolist()]
    if not sizes[1]:
        raise UserError(
            f"build-ngrams: no two tokens follow each other {config.min_count} times in "
            f"{int(counts.sum())} tokens; add text, or lower --min-count"
        )
    require_free_disk(folder, 14 * sum(sizes), "the cache")
    shape = _join(folder / DATA, file, counts, parts, sizes, config.top)
    header = {
        "format_version": FORMAT_VERSION,
        "vocabulary": shape.vocabulary,
        "gram": config.gram,
        "min_count": config.min_count,
        "top": shape.top,
        "entries": shape.sizes,
        "heavy": shape.heavy,
        "tokens": int(counts.sum()),
        "sha256": sha256_file(folder / DATA),
        **facts,
    }
    write_json(folder / FILE, header)
    return CorpusCache.open(folder), distinct


def _origin(config: NgramConfig) -> dict[str, Any]:
    """Return the sources of a cache for its header, without folder names, as it may be published."""
    return {
        "sources": [
            {
                "name": Path(source.path).name,
                "format": source.format,
                "max_conversations": source.max_conversations,
                "hash": content_hash(source.path),
            }
            for source in config.sources
        ],
        "excluded": [content_hash(path) for path in config.exclude],
        "held_out": config.held_out,
        "cleaning": "drafttrain/data/documents.py: clean_document; Unicode NFC; equal texts once",
    }


def _check_place(out: Path) -> None:
    """Require that `out` is absent, empty, or a cache outside of a bundle: nothing else may be replaced."""
    is_empty = out.is_dir() and not any(out.iterdir())
    is_cache = (out / FILE).is_file() and is_ours(out, {FILE, DATA, REPORT, SETTINGS})
    if out.exists() and not (is_cache or is_empty):
        raise UserError(f"{out}: holds something else than an n-gram cache; name another folder with --out")


def take_out(file: TokenFile, texts: Texts, share: float) -> list[np.ndarray]:
    """Hold out a share of the texts: overwrite them with separators, and return their stretches of ids. Of a
    few texts, of which one would be a larger share, none is held out."""
    if share * len(texts.ids) < 1:
        return []
    chosen = np.flatnonzero(held_out_groups(texts.ids, share, seed=0))
    ends = np.cumsum(texts.lengths)
    tokens, stretches = file.open("r+"), []
    for index in chosen.tolist():
        text = tokens[ends[index] - texts.lengths[index] : ends[index]]
        edges = np.flatnonzero(text == file.vocabulary)
        stretches += [part[:-1] for part in np.split(np.array(text), edges + 1) if len(part)]
        text[:] = file.vocabulary
    return stretches


def _count(
    config: NgramConfig, file: TokenFile, counts: np.ndarray, console: Console
) -> tuple[list[Part], list[Counted]]:
    """Plan the parts and count each; return both in order."""
    fitting = int(config.memory * 1e9 / config.processes / BYTES_PER_POSITION)
    shared = int(counts.sum()) // (2 * config.processes)  # so that all processes are busy until the end
    most = max(1, min(fitting, max(shared, SMALLEST_PART)))
    parts = plan_parts(file, counts, config.min_count, most, file.path.parent)
    count = partial(count_part, file, counts=counts, gram=config.gram, min_count=config.min_count)
    with ExitStack() as stack:
        many = config.processes > 1 and len(parts) > 1
        run = worker_pool(config.processes, stack).map if many else map
        step = stack.enter_context(counted("counting n-grams", len(parts), "parts", console))
        found = []
        for result in run(count, parts):
            found.append(result)
            step()
        return parts, found


def _join(
    path: Path, file: TokenFile, counts: np.ndarray, parts: Sequence[Part], sizes: Sequence[int], top: int
) -> Shape:
    """Write the arrays of a cache: those of its parts joined, then the ranked children of heavy entries."""
    gram = len(sizes)
    plain = Shape(file.vocabulary, top, tuple(sizes), ())
    with open(path, "wb") as out:
        for name, level, dtype, _ in plain.arrays():
            if name == "children":
                chunks = _offsets(parts, level, sizes[level - 1])
            elif level == 1:
                chunks = [counts.astype(dtype)]
            else:
                chunks = (np.fromfile(part.file(name, level), dtype) for part in parts)
            _write(out, chunks)
    cache = CorpusCache(path.parent, {}, plain, np.asarray(np.memmap(path, np.uint8, mode="r")))
    heavy = []
    with open(path, "ab") as out:
        for level in range(1, gram):
            entries, ranked = _rank(cache, level, top)
            _write(out, [entries])
            _write(out, [ranked])
            heavy.append(len(entries))
    return Shape(file.vocabulary, top, tuple(sizes), tuple(heavy))


def _write(out: BinaryIO, chunks: Iterable[np.ndarray]) -> None:
    """Append an array, given in chunks, and its padding to a file."""
    n_bytes = 0
    for chunk in chunks:
        out.write(chunk)
        n_bytes += chunk.nbytes
    out.write(bytes(padded(n_bytes) - n_bytes))


def _offsets(parts: Sequence[Part], level: int, size: int) -> Iterator[np.ndarray]:
    """Yield the `children` array of a level in chunks, from the numbers of children in the parts."""
    numbers = (np.fromfile(part.file("children", level), "<u4") for part in parts)
    if level == 1:  # every part has all tokens; the followers of a frequent one may be in several parts
        numbers = iter([sum(numbers, np.zeros(size, np.int64))])
    begin = 0
    for number in numbers:
        ends = begin + np.cumsum(number, dtype=np.int64)
        yield (ends - number).astype("<u4")
        begin = int(ends[-1]) if len(ends) else begin
    yield np.array([begin], "<u4")


def _rank(cache: CorpusCache, level: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of a level with more than `top` children [h], and their most frequent [h * top]."""
    children, counts = cache.arrays["children", level], cache.arrays["count", level + 1]
    entries, ranked = [], []
    for at in range(0, len(children) - 1, BLOCK):
        many = np.flatnonzero(np.diff(children[at : at + BLOCK + 1]) > top) + at
        for entry in many.tolist():
            start, end = int(children[entry]), int(children[entry + 1])
            order = np.argsort(-counts[start:end].astype(np.int64), kind="stable")
            ranked.append(order[:top] + start)
        entries.append(many)
    return (
        np.concatenate(chunk).astype("<u4") if chunk else np.empty(0, "<u4") for chunk in (entries, ranked)
    )
