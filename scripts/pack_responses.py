"""Pack answers that `drafttrain regenerate` wrote into one Parquet file of prompts and token ids, as the
repository ships them: a fifth of the JSON's size, since an answer's text is left to the tokenizer.

python scripts/pack_responses.py runs/a/regenerated runs/b/regenerated --out data/train/answers.parquet
python scripts/pack_responses.py data/train/answers.parquet runs/c/regenerated --out more.parquet

A packed file may be among them: its rows come first, and others are added. Rows are sorted by id; a later
folder's answer with an earlier id or prompt (case and punctuation folded) is left out, and so are
conversations with a prompt of --exclude (default: the evaluation, tuning, validation and held-out prompts).
The same answers give the same bytes with the same pyarrow.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from drafttrain.data.overlap import EvaluationPrompts, fold
from drafttrain.regenerate.responses import read_rows
from drafttrain.utils.writing import whole_file

EXCLUDE = [
    "data/eval",
    "data/tuning_prompts.jsonl",
    "data/validation_prompts.jsonl",
    "data/heldout_prompts.jsonl",
]
TURN = pa.struct([("from", pa.string()), ("value", pa.string()), ("token_ids", pa.list_(pa.uint32()))])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("conversations", pa.list_(TURN)),
        ("finish_reason", pa.string()),
        ("temperature", pa.float32()),
    ]
)


def packed_rows(sources: Iterable[Path], exclude: Sequence[str]) -> Iterator[dict]:
    """Yield the rows of regeneration folders, finished or not, and of packed files, each id and each
    prompt once, answers as token ids alone."""
    seen, prompts = set(), EvaluationPrompts.read(exclude)
    for source in sources:
        for row in parquet.read_table(source).to_pylist() if source.is_file() else read_rows(source):
            asked = tuple(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
            folded = tuple(map(fold, asked))
            if row["id"] in seen or folded in seen or any(map(prompts.overlap, asked)):
                continue
            seen |= {row["id"], folded}
            turns = [
                turn | {"value": None} if turn.get("token_ids") else turn | {"token_ids": None}
                for turn in row["conversations"]
            ]
            yield {name: row[name] for name in SCHEMA.names} | {"conversations": turns}


def pack(sources: Iterable[Path], out: Path, exclude: Sequence[str] = ()) -> tuple[int, int]:
    """Write the file; return its conversations and the answers' tokens."""
    rows = sorted(packed_rows(sources, exclude), key=lambda row: row["id"])
    table = pa.Table.from_pylist(rows, SCHEMA)
    with whole_file(out) as file:
        # without dictionaries, which take more room than they save for ids that are nearly all different
        parquet.write_table(table, file, compression="zstd", compression_level=19, use_dictionary=False)
    tokens = sum(len(turn["token_ids"] or ()) for row in rows for turn in row["conversations"])
    return len(rows), tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "folders of `drafttrain regenerate`, or packed files"
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help=text)
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--exclude", nargs="*", default=EXCLUDE, help="files or folders of prompts")
    args = parser.parse_args()
    rows, tokens = pack(args.sources, args.out, args.exclude)
    print(f"{args.out}: {rows} conversations, {tokens} tokens in their answers")


if __name__ == "__main__":
    main()
