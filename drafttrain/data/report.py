"""Counts of the rows that were read for a corpus."""

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from drafttrain.data.readers import ReadReport


@dataclass
class SplitCounts:
    """Size of one split: examples, tokens, and trained tokens."""

    examples: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass
class CorpusReport:
    """Counts of a corpus, in which every row that was read appears.

    For each source, rows read = kept + skipped; kept conversations become examples: one each, more where
    `cut`, minus `pieces_without_trained_tokens`.

    Attributes:
        sources: counts of rows by path; `skipped` includes duplicates and overlaps with evaluation prompts.
        cut: conversations that became several examples.
        truncated: examples that end early because a single exchange was longer than `max_length`.
        pieces_without_trained_tokens: pieces dropped because a prompt filled them, or one token was left.
        train, validation: sizes of the splits.
    """

    sources: dict[str, ReadReport] = field(default_factory=dict)
    cut: int = 0
    truncated: int = 0
    pieces_without_trained_tokens: int = 0
    train: SplitCounts = field(default_factory=SplitCounts)
    validation: SplitCounts = field(default_factory=SplitCounts)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for `corpus.json`."""
        plain = asdict(replace(self, sources={}))
        plain["sources"] = {
            path: {
                name: dict(sorted(value.items())) if isinstance(value, Counter) else value
                for name, value in vars(source).items()
            }
            for path, source in self.sources.items()
        }
        return plain

    def table(self) -> Table:
        """Return the counts for a terminal."""
        table = Table("", "count", title="corpus", title_justify="left")
        table.columns[1].justify = "right"

        def add(name: str, count: int) -> None:
            table.add_row(name, f"{count:,}")

        for path, source in self.sources.items():
            table.add_row(f"[bold]{path.replace('[', chr(92) + '[')}", "")
            add("  read", source.read)
            add("  kept", source.kept)
            for reason, count in sorted(source.skipped.items()):
                add(f"  skipped: {reason}", count)
            for change, count in sorted((source.repairs + source.cleaned).items()):
                add(f"  {change}", count)
            for suffix, count in sorted(source.files_left_out.items()):
                add(f"  files left out ({suffix})", count)
        table.add_section()
        add("conversations cut at turns", self.cut)
        add("examples truncated", self.truncated)
        add("pieces without a trained token", self.pieces_without_trained_tokens)
        table.add_section()
        for name, split in (("train", self.train), ("validation", self.validation)):
            add(f"{name} examples", split.examples)
            add(f"{name} tokens", split.tokens)
            add(f"{name} trained tokens", split.trained_tokens)
        return table
