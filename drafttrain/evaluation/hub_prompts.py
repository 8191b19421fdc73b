"""Evaluation prompts out of data sets of the Hugging Face Hub, through the `datasets` library."""

from pathlib import Path

import datasets

from drafttrain.errors import UserError, brief
from drafttrain.evaluation.prompts import Prompt, make_prompts

PREFIX = "hub:"
SPLITS = ("test", "validation", "dev", "train")  # the first that there is, where none is asked for


def read_hub_prompts(source: str) -> list[Prompt]:
    """All prompts of one split, streamed.

    Args:
        source: `hub:org/dataset`, with `/config` behind it where the data set has several and `:split` where
            its test split is not what is wanted (`hub:openai/gsm8k/main:test`). A local folder that
            `datasets` can read may stand in place of the name.

    Raises:
        UserError: there is no such data set, configuration or split, no network, or a row without a prompt.
    """
    name, config, split = parse_hub_source(source)
    try:
        split = split or _default_split(name, config)
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        numbered = ((i, f"{source}:row {i}", _plain(row)) for i, row in enumerate(rows, 1))
        prompts = make_prompts(numbered)
    except UserError:
        raise
    except Exception as error:  # datasets, its readers and the network raise all kinds
        raise UserError(
            f"{source}: cannot be read ({brief(error)}); check the name and the network"
        ) from error
    if not prompts:
        raise UserError(f"{source}: its split {split} holds no prompts; name another one behind a colon")
    return prompts


def parse_hub_source(source: str) -> tuple[str, str | None, str | None]:
    """Name, configuration and split of what `hub:...` names.

    Raises:
        UserError: it is spelled differently.
    """
    name, colon, split = source.removeprefix(PREFIX).rpartition(":")
    if not colon:
        name, split = split, ""
    if name and Path(name).is_dir():
        return name, None, split or None
    parts = name.split("/")
    if len(parts) > 3 or not all(parts):
        raise UserError(f"{source}: write hub:org/dataset, hub:org/dataset/config or either with :split")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or None


def _default_split(name: str, config: str | None) -> str:
    names = datasets.get_dataset_split_names(name, config)
    return next((split for split in SPLITS if split in names), names[0])


def _plain(row: dict) -> dict:
    """The row without columns that are empty: where files differ in keys, `datasets` fills in None."""
    return {key: value for key, value in row.items() if value is not None}
