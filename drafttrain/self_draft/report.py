"""The report of a corpus cache: its sources, its n-grams, and how often it is right."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from drafttrain.data.report import CorpusReport
from drafttrain.self_draft.corpus_cache import DATA, CorpusCache
from drafttrain.self_draft.tokens import Texts

REPORT = "report.json"
SHOWN = 20  # most frequent n-grams of each length
MOST_LOOKUPS = 200_000  # held-out positions that are looked up at most: takes seconds
CANDIDATES = 4


def hit_rate(cache: CorpusCache, held_out: Sequence[np.ndarray]) -> list[dict[str, int]]:
    """Count how often the most frequent continuations of the longest suffix contain the next token.

    Args:
        held_out: stretches of token ids that the cache has not seen.

    Returns:
        for each length of the suffix found, from 0 (none) to gram - 1: `positions`, `top_1` and `top_4`, the
        positions at which the next token is the first candidate, or among the first four.
    """
    rows = [
        {"matched": matched, "positions": 0, "top_1": 0, f"top_{CANDIDATES}": 0}
        for matched in range(cache.gram)
    ]
    looked_up = 0
    for stretch in held_out:
        tokens = stretch.tolist()
        for at in range(1, len(tokens)):
            matches = cache.next_tokens(tokens[max(0, at - cache.max_prefix) : at], CANDIDATES)
            row = rows[matches.matched]
            row["positions"] += 1
            row["top_1"] += matches.tokens[:1] == [tokens[at]]
            row[f"top_{CANDIDATES}"] += tokens[at] in matches.tokens
            looked_up += 1
            if looked_up == MOST_LOOKUPS:
                return rows
    return rows


def describe(
    cache: CorpusCache,
    tokenizer: PreTrainedTokenizerBase,
    sources: CorpusReport,
    texts: Texts,
    distinct: Sequence[int],
    hits: Sequence[dict[str, int]],
) -> dict[str, Any]:
    """Return the report of a cache as a plain dict.

    Args:
        distinct: number of n-grams of each length whose prefix is frequent enough, rare ones included.
        hits: from `hit_rate`.
    """
    levels = range(1, cache.gram + 1)
    frequent = cache.arrays["count", 1] >= cache.header["min_count"]  # level 1 holds the others too
    kept = [int(frequent.sum()), *cache.shape.sizes[1:]]
    n_bytes = (cache.path / DATA).stat().st_size
    plain = sources.as_dict()["sources"]
    return {
        "texts": len(texts.ids),
        "words": texts.words,
        "tokens": texts.tokens,
        "tokens_counted": cache.header["tokens"],
        "unicode_composed": texts.composed,
        "sources": [{"name": Path(path).name, **values} for path, values in plain.items()],
        "ngrams": [
            {"length": length, "distinct": distinct[length - 1], "kept": kept[length - 1]}
            for length in levels
        ],
        "bytes": n_bytes,
        "bytes_per_ngram": round(n_bytes / max(1, sum(kept)), 3),
        "hits": list(hits),
        "most_frequent": [
            [
                {"tokens": tokens, "text": tokenizer.decode(tokens), "count": count}
                for tokens, count in cache.most_frequent(length, SHOWN)
            ]
            for length in levels
        ],
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    table = Table("", "count", title="text", title_justify="left")
    table.columns[1].justify = "right"
    total: Counter = Counter()
    for source in report["sources"]:
        cleaned = dict(source["cleaned"])
        total.update({"rows and documents read": source["read"], "kept": source["kept"]})
        total.update({name: cleaned.pop(name, 0) for name in ("characters read", "characters kept")})
        total.update({f"skipped: {reason}": number for reason, number in source["skipped"].items()})
        total.update(source["repairs"])
        total.update(cleaned)
        for suffix, number in source["files_left_out"].items():
            total[f"files left out ({suffix})"] += number
    total["texts written in composed characters (NFC)"] = report["unicode_composed"]
    for name in ("words", "tokens", "tokens_counted"):
        total[name.replace("_counted", " counted, the others held out")] = report[name]
    for name, number in total.items():
        if number:
            table.add_row(name.replace("[", "\\["), f"{number:,}")
    console.print(table)

    table = Table("length", "distinct", "kept", "most frequent", title="n-grams", title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    for row, examples in zip(report["ngrams"], report["most_frequent"]):
        shown = "  ".join(f"{example['text']!r}" for example in examples[:10])
        table.add_row(
            str(row["length"]), f"{row['distinct']:,}", f"{row['kept']:,}", shown.replace("[", "\\[")
        )
    console.print(table)
    console.print(f"{report['bytes'] / 1e6:.1f} MB, {report['bytes_per_ngram']} bytes per n-gram")

    positions = sum(row["positions"] for row in report["hits"])
    if positions:
        table = Table("suffix found", "positions", "top 1", f"top {CANDIDATES}", title_justify="left")
        table.title = "held-out text: is the next token among the candidates?"
        for row in (*reversed(report["hits"]), _sum(report["hits"])):
            number = row["positions"]
            rates = [f"{row[name] / number:.1%}" if number else "" for name in ("top_1", f"top_{CANDIDATES}")]
            table.add_row(str(row["matched"]), f"{number / positions:.1%}", *rates)
        console.print(table)


def _sum(rows: Sequence[dict[str, int]]) -> dict[str, Any]:
    return {
        "matched": "all",
        **{name: sum(row[name] for row in rows) for name in rows[0] if name != "matched"},
    }
