"""Open a corpus that `build.py` has written; training imports this without the code that builds one."""

from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_from_disk
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import template_hash, tokenizer_hash
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json

FORMAT_VERSION = 1


def load_corpus(
    path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[DatasetDict, dict[str, Any]]:
    """Open a corpus.

    Args:
        path: folder that `build_corpus` wrote.
        tokenizer: if given, must be the one that the corpus was made with, including its template.

    Returns:
        The splits, and the contents of `corpus.json`.

    Raises:
        UserError: no corpus, an incomplete one, or one made with another tokenizer or chat template.
    """
    path = Path(path)
    if not (path / "corpus.json").is_file():
        raise UserError(f"{path}: no corpus.json there; run the corpus stage first")
    metadata = read_json(path / "corpus.json")
    if not isinstance(metadata, dict) or metadata.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: must be a corpus of format version {FORMAT_VERSION}; build it again")
    if not {"tokenizer", "template_hash", "counts"} <= metadata.keys():
        raise UserError(f"{path}: damaged (corpus.json lacks keys); build it again")
    if tokenizer is not None:
        _check_tokenizer(path, metadata, tokenizer)
    try:
        splits = load_from_disk(str(path))
        sizes = {name: len(splits[name]) for name in splits}
    except Exception as error:  # datasets and pyarrow raise many kinds for damaged files
        raise UserError(f"{path}: damaged ({brief(error)}); build it again") from None
    expected = {name: metadata["counts"][name]["examples"] for name in ("train", "validation")}
    if sizes != expected:
        raise UserError(f"{path}: must have {expected} examples, got {sizes}; build it again")
    return splits, metadata


def tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the properties of a tokenizer that a corpus depends on, for `corpus.json`."""
    return {
        "hash": tokenizer_hash(tokenizer),
        "vocabulary": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _check_tokenizer(path: Path, metadata: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    theirs, ours = metadata["tokenizer"], tokenizer_facts(tokenizer)
    if theirs != ours:
        differing = ", ".join(
            f"{name} {theirs.get(name)}, not {ours[name]}" for name in ours if theirs.get(name) != ours[name]
        )
        raise UserError(
            f"{path}: must be made with the tokenizer of {tokenizer.name_or_path}, got {differing}; build it "
            "again"
        )
    if metadata["template_hash"] != template_hash(tokenizer):
        raise UserError(
            f"{path}: must be made with the chat template of {tokenizer.name_or_path}; build it again"
        )
