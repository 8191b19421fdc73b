"""Read evaluation prompts from data sets of the Hugging Face Hub, with the `datasets` library."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console

from drafttrain.data.config import HUB
from drafttrain.data.prompt_rows import is_known, prompt_turns
from drafttrain.data.prompts import Prompt, make_prompts
from drafttrain.data.streams import without_nulls
from drafttrain.utils.errors import UserError, brief

SPLITS = ("test", "validation", "dev", "train")  # the default is the first of them that exists


def read_hub_prompts(source: str) -> list[Prompt]:
    """Read all prompts of one split, streamed. Rows with empty texts are left out, and their number is
    printed, because the user cannot fix them on the Hub.

    Args:
        source: `hub:org/dataset`, followed by `/config` where the data set has several configurations, and by
            `:split` for another split than the test split (`hub:openai/gsm8k/main:test`). In place of the
            name, a local folder that `datasets` can read may be given, followed by a configuration if the
            folder starts with `/`, `.` or `~`.

    Raises:
        UserError: there is no such data set, configuration or split, no network, or a row without a prompt.
    """
    name, config, split = parse_hub_source(source)
    try:
        split = split or _default_split(name, config)
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        prompts = make_prompts(_numbered(rows, source))
    except UserError:
        raise
    except Exception as error:  # datasets, its readers and the network raise all kinds
        if config is None and (listed := re.search(r"available configs: \[(.+)\]", str(error))):
            names = listed[1].replace("'", "")
            raise UserError(f"{source}: must end in /CONFIG, with one of {names}; add it") from None
        raise UserError(
            f"{source}: cannot be read ({brief(error)}); check the name and the network"
        ) from error
    if not prompts:
        raise UserError(f"{source}: no prompts in its split {split}; add another one, such as :train")
    return prompts


def parse_hub_source(source: str) -> tuple[str, str | None, str | None]:
    """Return name, configuration and split of a data set written as `hub:...`; None where not given.

    Raises:
        UserError: it has another form.
    """
    name, colon, split = source.removeprefix(HUB).rpartition(":")
    if not colon:
        name, split = split, ""
    if name.startswith(("/", ".", "~")):
        folder = Path(name).expanduser()
        if not folder.is_dir() and folder.parent.is_dir():
            return str(folder.parent), folder.name, split or None
        return str(folder), None, split or None
    if name and Path(name).is_dir():
        return name, None, split or None
    parts = name.split("/")
    if len(parts) > 3 or not all(parts):
        raise UserError(
            f"{source}: must be hub:org/dataset or hub:org/dataset/config; append :split for another split"
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or None


def _default_split(name: str, config: str | None) -> str:
    names = datasets.get_dataset_split_names(name, config)
    return next((split for split in SPLITS if split in names), names[0])


def _numbered(rows: Iterable[dict], source: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (number, source, value) of the rows that hold text, and print how many others were left out.

    Raises:
        UserError: a row that has the keys of no benchmark.
    """
    empty = 0
    for i, row in enumerate(rows, 1):
        place = f"{source}:row {i}"
        value = without_nulls(row)  # where files differ in keys, `datasets` fills in None
        try:
            prompt_turns(value, place)
        except UserError:
            if not is_known(row):
                raise
            empty += 1
            continue
        yield i, place, value
    if empty:
        message = f"{source}: left out {empty} rows without text"
        Console(stderr=True).print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)
