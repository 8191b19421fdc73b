"""`drafttrain new-recipe`: a short recipe with comments for one's own target and chats, ready to run.

The recipe states no licence unless the user gives one. Some of the chats' prompts are held out, to measure
the drafter on prompts that it was not trained on.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from drafttrain.data.overlap import is_common
from drafttrain.data.prompts import spread
from drafttrain.data.readers import read_conversations
from drafttrain.target_lm.known import SMOLLM2, is_known
from drafttrain.utils.errors import UserError, did_you_mean
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_text

MOST_HELD_OUT = 32  # prompts to measure on
SPACING = 10  # at most one chat in this many is held out
LENGTH = 1024  # tokens of a row, and of prompt and answer together
FEW = 5000  # conversations below which a few epochs are too little training
TEMPLATE = "new_recipe.yaml.jinja"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def new_recipe(
    target: str,
    chats: Sequence[str],
    out: str | None = None,
    kind: str = "edd",
    keep_answers: bool = False,
    base_model: str | None = None,
    license: str | None = None,
) -> None:
    """Write a recipe and a file of held-out prompts next to it, and print what to run next.

    Args:
        target: what `load_target` takes.
        chats: files, folders or archives of conversations.
        out: the file to write. None: named after the target.
        kind: of the drafter: "edd", "eagle", "medusa" or "vdm", which need nothing but a target.
        keep_answers: train on the answers in the chats instead of the target's own.
        base_model: Hub id of the target, for the model card.
        license: of the drafter's weights, for the model card.

    Raises:
        UserError: chats cannot be read, or a file to write exists.
    """
    file = Path(out or f"{Path(target).absolute().name.removesuffix('.gguf').lower()}.yaml")
    _refuse_existing(file, file)
    held_out = file.with_suffix(".prompts.jsonl")
    _require_target(target)
    prompts, n, documents = _read(chats)
    positions = _positions(target)
    # A prompt that is too long would abort the measurement; tokens have >= 2 bytes, half is for the answer.
    most = min(positions, 2 * LENGTH)  # a target that is not a local folder has unknown positions
    short = [prompt for prompt in prompts if len(prompt.encode()) <= most and not is_common(prompt)]
    taken = spread(short, min(MOST_HELD_OUT, len(short) // SPACING))
    keep_answers = keep_answers or not prompts  # documents have nothing to answer
    text = _render(
        target=target,
        chats=chats if keep_answers else [path for path in chats if path not in documents],
        documents=documents,
        file=shlex.quote(str(file)),
        kind=kind,
        length=min(LENGTH, positions),
        keep_answers=keep_answers,
        prompts=str(held_out) if taken else None,
        epochs=3 if n >= FEW else 10,
        tree="chain:length=3" if kind == "medusa" else "timed",
        base_model=base_model,
        license=license,
    )
    rows = ({"id": str(i), "prompt": prompt} for i, prompt in enumerate(taken))
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if held_out.exists() and held_out.read_bytes() != content.encode():  # equal: left by a killed call
        _refuse_existing(file, held_out)
    print(f"{file}: for {n} conversations")
    if taken:
        write_text(held_out, content)
        print(f"{held_out}: {len(taken)} of their prompts, to measure on")
    write_text(file, text)
    print(f"next:\n  drafttrain run {shlex.quote(str(file))} --dry-run")


def _require_target(name: str) -> None:
    """Require a known target's name, the file or folder of a target, or a well-formed Hub id.

    Raises:
        UserError: it is none of these.
    """
    place = Path(os.path.expanduser(name))
    if place.is_dir() and not (place / "config.json").is_file():
        raise UserError(f"--target: must be a folder with a config.json, got {name}")
    if not (is_known(name) or place.exists() or HUB_ID.fullmatch(name)):
        hint = did_you_mean(name, [SMOLLM2], f"{SMOLLM2} is known by name")
        raise UserError(f"--target: must be a folder, a .gguf file or a Hub id user/name, got {name}; {hint}")


def _refuse_existing(file: Path, path: Path) -> None:
    if path.exists():
        raise UserError(f"--out: must name a new file, got {file}; {path} exists")


def _read(paths: Sequence[str]) -> tuple[list[str], int, list[str]]:
    """Return the distinct first user turns, the number of conversations, and the paths without any turn."""
    prompts, n, documents = {}, 0, []
    for path in paths:
        has_turns = False
        for conversation in read_conversations(path):
            n += 1
            has_turns = has_turns or not conversation.is_text
            users = [message.content for message in conversation.messages if message.role == "user"]
            if users and users[0].strip():
                prompts[users[0]] = None
        documents += [] if has_turns else [path]
    return list(prompts), n, documents


def _positions(target: str) -> float:
    """Return the number of positions of a target in a local folder; infinity for others.

    Raises:
        UserError: its config is damaged.
    """
    file = Path(os.path.expanduser(target)) / "config.json"
    known = read_json(file) if file.is_file() else {}
    positions = known.get("max_position_embeddings") or math.inf if isinstance(known, dict) else None
    if not isinstance(positions, int | float):
        raise UserError(f"{file}: must be the config of a model; give a folder that save_pretrained wrote")
    return positions


def _render(**values: Any) -> str:
    environment = Environment(keep_trailing_newline=True)
    environment.filters["value"] = lambda value: yaml.safe_dump([value], width=math.inf).strip()[2:]
    template = (files("drafttrain.run") / TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(template).render(values)
