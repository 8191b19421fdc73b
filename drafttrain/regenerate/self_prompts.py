"""Prompts that the target writes itself: it continues the user header of its own chat template.

A chat model that is shown nothing but the start of a user turn writes what its users tend to ask (Magpie,
Xu et al. 2024, §2). Such prompts carry no licence but the target's, and they suit its answers.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.data.chat import template_hash, tokenize, tokenizer_hash
from drafttrain.data.message import Message
from drafttrain.data.overlap import fold
from drafttrain.data.template import render
from drafttrain.inference.decode import Request
from drafttrain.inference.params import SamplingParams
from drafttrain.kernels.machine import dtype_name
from drafttrain.regenerate.engines import in_process
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import require_file
from drafttrain.utils.progress import counted
from drafttrain.utils.writing import write_text

MARK = "THE USER WRITES HERE"
SHORTEST = 15  # characters; "Hi!" teaches nothing


def user_header(target: FrozenTarget) -> list[int]:
    """Return token ids of an empty chat up to where the user's first words begin.

    Raises:
        UserError: no chat template, or one that changes the user's words.
    """
    text = render(target.tokenizer, [Message("user", MARK)], "the user header")
    if MARK not in text:
        raise UserError(
            f"{target.name}: its chat template changes the user's words; write the prompts yourself"
        )
    return tokenize(target.tokenizer, text[: text.index(MARK)])


def write_self_prompts(
    target: FrozenTarget,
    out: str | os.PathLike,
    number: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 0.95,
    max_new_tokens: int = 96,
    batch_rows: int = 128,
    console: Console | None = None,
) -> int:
    """Sample prompts from the target and store them as JSON lines {"id", "conversations"}, in ShareGPT form.

    Unfinished, very short and repeated ones are left out, so fewer than `number` remain. An interrupted call
    continues from `<out>.part`; `out` appears when all is done.

    Args:
        number: prompts to sample.
        seed: of the draws; prompt i depends on it and on i alone.

    Returns:
        prompts written.

    Raises:
        UserError: no chat template or one that changes the user's words, no room for a prompt in the target's
            context or the memory, or `<out>.part` is damaged or of other settings.
    """
    console, out = console or Console(stderr=True), Path(out)
    if out.is_dir():  # before anything is sampled
        raise UserError(f"out: must be a file, got the folder {out}; name a file in it")
    part = out.with_name(out.name + ".part")
    out.parent.mkdir(parents=True, exist_ok=True)
    made_by = {"target": target.fingerprint, "seed": seed, "temperature": temperature, "top_p": top_p}
    made_by |= {"max_new_tokens": max_new_tokens, "dtype": dtype_name(target.dtype)}
    made_by |= {"tokenizer": tokenizer_hash(target.tokenizer), "template": template_hash(target.tokenizer)}
    found = {i: prompt for i, prompt in _read_part(part, made_by) if i < number}
    header = user_header(target)
    requests = (
        Request(header, max_new_tokens, SamplingParams(temperature, top_p, seed=seed * 1_000_003 + i), str(i))
        for i in range(number)
        if i not in found
    )
    rows = max(min(batch_rows, number - len(found)), 1)
    engine = in_process(target, rows, len(header), max_new_tokens, None)
    with (
        open(part, "a", encoding="utf-8") as file,
        counted("prompts", number, "prompts", console, len(found)) as advance,
    ):
        if not file.tell():
            file.write(json.dumps(made_by) + "\n")
        for completion in engine(requests, lambda n_tokens: None):
            text = target.tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
            prompt = text if completion.finish_reason == "stop" else None
            found[int(completion.id)] = prompt
            file.write(json.dumps([int(completion.id), prompt], ensure_ascii=False) + "\n")
            file.flush()
            advance()
    kept: dict[str, tuple[int, str]] = {}
    for i in sorted(found):
        if found[i] and len(found[i]) >= SHORTEST:
            kept.setdefault(fold(found[i]), (i, found[i]))
    rows = [
        {"id": f"self-{seed}-{i}", "conversations": [{"from": "human", "value": prompt}]}
        for i, prompt in kept.values()
    ]
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    part.unlink()
    console.print(f"{out}: {len(kept)} prompts of {number} sampled", highlight=False, soft_wrap=True)
    return len(kept)


def _read_part(part: Path, made_by: dict[str, Any]) -> Iterator[tuple[int, str | None]]:
    """Yield the numbers and prompts that an interrupted call has sampled; cut off a half-written last line.

    Args:
        made_by: the settings that prompts depend on, which the first line holds.

    Raises:
        UserError: a damaged file, or one of another target or other settings.
    """
    if not part.exists():
        return
    require_file(part)
    whole = part.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    os.truncate(part, len(whole))
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        match row:
            case dict() if number == 1 and row != made_by:
                raise UserError(
                    f"{part}: must be of the same target, seed and sampling, got another call's; remove it"
                )
            case dict() if number == 1:
                continue
            case [int() as i, str() | None as prompt]:
                yield i, prompt
                continue
        raise UserError(f"{part}: line {number}: must be a number and a prompt, got others; remove the file")
