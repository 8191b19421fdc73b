"""Pack answers that `drafttrain regenerate` wrote into one Parquet file of prompts and token ids, as the
repository ships them: a fifth of the JSON's size, since an answer's text is left to the tokenizer.

python scripts/pack_responses.py runs/a/regenerated runs/b/regenerated --out data/train/answers.parquet
python scripts/pack_responses.py runs/c/regenerated --without data/train/answers.parquet --out more.parquet
python scripts/pack_responses.py --traces runs/thoughts/gsm8k runs/thoughts/writing --out thoughts.parquet

Rows are sorted by id; a later folder's answer with an earlier id or prompt (case and punctuation folded) is
left out, and so are those of --without, packed files that exist already, and conversations with a prompt of
--exclude (default: the evaluation, tuning, validation and held-out prompts). In traces of `drafttrain reason`
each answer with drafts is a row: the thoughts of a state are several answers to one prompt. The same answers
give the same bytes with the same pyarrow.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.overlap import EvaluationPrompts, fold
from drafttrain.data.thoughts import rows_of_trees
from drafttrain.reasoning.reason import SUMMARY
from drafttrain.reasoning.trace import Trace
from drafttrain.regenerate.responses import read_rows
from drafttrain.regenerate.stage import RECORD
from drafttrain.target_lm.loading import load_tokenizer
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, usable
from drafttrain.utils.writing import whole_file

EXCLUDE = [
    "data/eval",
    "data/tuning_prompts.jsonl",
    "data/validation_prompts.jsonl",
    "data/heldout_prompts.jsonl",
]
TURN = pa.struct([("from", pa.string()), ("value", pa.string()), ("token_ids", pa.list_(pa.uint32()))])
NAMES = {"user": "human", "assistant": "gpt"}  # ShareGPT's, where they differ
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("conversations", pa.list_(TURN)),
        ("finish_reason", pa.string()),
        ("temperature", pa.float32()),
        ("tokenizer_hash", pa.string()),  # of the ids: without texts nothing else names the target
    ]
)


def packed_rows(folders: Iterable[Path], exclude: Sequence[str], without: Iterable[Path]) -> Iterator[dict]:
    """Yield the rows of regeneration folders, finished or not, each id and each prompt once, answers as token
    ids alone.

    Raises:
        UserError: a folder without the record of a regeneration, or an unreadable file in `without`.
    """
    seen, prompts = set(), EvaluationPrompts.read(exclude)
    for row in known_rows(without):
        seen |= {row["id"], tuple(map(fold, asked(row)))}
    for folder in folders:
        made_by = read_json(folder / RECORD)["settings"]["tokenizer"]
        for row in read_rows(folder):
            folded, problem = tuple(map(fold, asked(row))), row.get("tree_of")
            asks = [*asked(row), problem] if problem else asked(row)
            if row["id"] in seen or folded in seen or any(map(prompts.overlap, asks)):
                continue
            seen |= {row["id"], folded}
            turns = [
                turn | {"value": None} if "token_ids" in turn else turn | {"token_ids": None}
                for turn in row["conversations"]
            ]
            kept = {name: row[name] for name in SCHEMA.names[:-1]}
            kept |= {"conversations": turns, "tokenizer_hash": made_by}
            yield kept | {"tree_of": problem} if problem else kept


def known_rows(without: Iterable[Path]) -> Iterator[dict]:
    """Yield ids and conversations of the rows of packed files.

    Raises:
        UserError: an unreadable file.
    """
    for path in without:
        with usable(path, "name a file that this script wrote"):
            yield from parquet.read_table(path, columns=["id", "conversations"]).to_pylist()


def traced_rows(folders: Iterable[Path], exclude: Sequence[str], without: Iterable[Path]) -> Iterator[dict]:
    """Yield the answers in folders of traces that drafts are made for, as token ids where they have them.

    Raises:
        UserError: a folder without traces, a damaged one, one without the name of its target, or an
            unreadable file in `without`.
    """
    prompts, hashes, seen = EvaluationPrompts.read(exclude), {}, {row["id"] for row in known_rows(without)}
    for folder in folders:
        paths = [path for path in sorted(folder.glob("*.json")) if path.name != SUMMARY]
        if not paths:
            raise UserError(f"{folder}: must be a folder of traces, got none; name out of drafttrain reason")
        for path in paths:
            trace = Trace.load(path)
            if not (target := trace.settings.get("target")):
                raise UserError(f"{path}: must name its target, got none; make it with drafttrain reason")
            if target not in hashes:
                hashes[target] = tokenizer_hash(load_tokenizer(target))
            for row in rows_of_trees(asdict(trace), str(path)) or ():
                *turns, answer = row["messages"]
                ids = answer.get("token_ids")
                conversation = [
                    {
                        "from": NAMES.get(turn["role"], turn["role"]),
                        "value": turn["content"],
                        "token_ids": None,
                    }
                    for turn in turns
                ]
                conversation.append(
                    {"from": "gpt", "value": None if ids else answer["content"], "token_ids": ids}
                )
                packed = {
                    "id": f"{trace.task}/{row['id']}",
                    "conversations": conversation,
                    "finish_reason": row["finish_reason"],
                    "temperature": trace.settings["sampling"]["temperature"],
                    "tokenizer_hash": hashes[target],
                    "tree_of": row["tree_of"],
                }
                asks = [*asked(packed), row["tree_of"]]
                if packed["id"] not in seen and not any(map(prompts.overlap, asks)):
                    yield packed


def asked(row: dict) -> list[str]:
    """Return the user turns of a row's conversation."""
    return [turn["value"] for turn in row["conversations"] if turn["from"] == "human"]


def pack(
    folders: Iterable[Path],
    out: Path,
    exclude: Sequence[str] = (),
    without: Iterable[Path] = (),
    traces: Iterable[Path] = (),
) -> tuple[int, int]:
    """Write the file; return the numbers of its conversations and of the tokens of answers stored as ids.

    Raises:
        UserError: as `packed_rows` and `traced_rows`, or no answer is left.
    """
    found = itertools.chain(packed_rows(folders, exclude, without), traced_rows(traces, exclude, without))
    rows, schema = sorted(found, key=lambda row: row["id"]), SCHEMA
    if not rows:
        raise UserError(f"{out}: must have an answer, got none but excluded ones; name other folders")
    if any("tree_of" in row for row in rows):
        schema = SCHEMA.append(pa.field("tree_of", pa.string()))
    table = pa.Table.from_pylist(rows, schema)
    with whole_file(out) as file:
        # without dictionaries, which take more room than they save for ids that are nearly all different
        parquet.write_table(table, file, compression="zstd", compression_level=19, use_dictionary=False)
    tokens = sum(len(turn["token_ids"] or ()) for row in rows for turn in row["conversations"])
    return len(rows), tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", default=[], help="of `drafttrain regenerate`")
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="folders of `drafttrain reason`")
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--exclude", nargs="*", default=EXCLUDE, help="files or folders of prompts")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="packed files of other answers")
    args = parser.parse_args()
    if not args.folders and not args.traces:
        parser.error("name folders of answers, or of traces after --traces")
    try:
        rows, tokens = pack(args.folders, args.out, args.exclude, args.without, args.traces)
    except UserError as error:
        parser.exit(2, f"pack_responses: {error}\n")
    print(f"{args.out}: {rows} conversations, {tokens} tokens in their answers")


if __name__ == "__main__":
    main()
