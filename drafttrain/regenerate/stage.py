"""The regeneration stage: read conversations, and write the same questions with the target's answers.

A drafter learns to predict the target, so the target's own text teaches it far more per token than any other.
Every assistant turn is replaced, one after the other: the prompt of turn k holds the new turns before it. The
target runs here (`inference.decode`) or on any OpenAI-compatible server. Rows are appended as they come, so
no finished row is lost, and the same command continues where it was stopped.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import template_hash, tokenizer_hash
from drafttrain.data.config import PromptSet, RegenerateConfig
from drafttrain.hidden_states.recording import Recordings, StateRecorder, recording_of, states_folder
from drafttrain.regenerate import engines
from drafttrain.regenerate.responses import PARTIAL, RESPONSES, RegenerateReport, read_rows
from drafttrain.regenerate.rewriting import Rewriting
from drafttrain.target_lm.loading import load_for_decoding, load_tokenizer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json

RECORD = "regenerate.json"


@dataclass
class KeptStates:
    """Which hidden states of the target are kept while it answers.

    Attributes:
        blocks: blocks whose outputs are kept, as `drafter.tapped_blocks`; final states are always kept.
        dtype: "bfloat16" or "float32".
        max_bytes: limit of disk space; states that do not fit are not kept.
        shard_tokens: in one file, which is in memory until it is written.
    """

    blocks: Sequence[int]
    dtype: str
    max_bytes: float
    shard_tokens: int


def regenerate(
    config: RegenerateConfig,
    model: str,
    out: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    earlier: Iterable[str | Path] = (),
    kept: KeptStates | None = None,
    is_own: bool = False,
    exclude: Sequence[str] = (),
    measured: Sequence[PromptSet] = (),
) -> RegenerateReport:
    """Load the target, or its tokenizer alone where a server generates, and call `answer_conversations`.

    Args:
        model, dtype, device: as `load_for_decoding`.
    """
    config.check()
    given = {"earlier": earlier, "is_own": is_own, "exclude": exclude, "measured": measured}
    if config.server is not None:
        return answer_conversations(config, out, None, load_tokenizer(model), **given)
    target = load_for_decoding(model, dtype, device)
    return answer_conversations(config, out, target, target.tokenizer, kept=kept, **given)


def answer_conversations(
    config: RegenerateConfig,
    out: str | Path,
    target: FrozenTarget | None,
    tokenizer: PreTrainedTokenizerBase,
    earlier: Iterable[str | Path] = (),
    console: Console | None = None,
    kept: KeptStates | None = None,
    is_own: bool = False,
    exclude: Sequence[str] = (),
    measured: Sequence[PromptSet] = (),
) -> RegenerateReport:
    """Answer conversations with the target and write `responses.jsonl` (ShareGPT rows with token ids).

    A folder that holds a part of the result, or a result with failed conversations, is continued.

    Args:
        config: what to answer, and how.
        out: folder to write or to continue.
        target: answers in process; None with `config.server`.
        tokenizer: the target's.
        earlier: folders of earlier runs, finished or not: answers made with the same settings are taken over.
        console: for the progress bar and the counts; default: standard error.
        kept: the states to keep in `states_folder(out)`, which the target is tapped for. None: no states.
        is_own: the folder's rows are known to have been made with these settings, even if its record is lost.
        exclude: files of evaluation prompts, as in `corpus.exclude`: conversations with one are not answered.
        measured: prompts that the drafter will be measured on: no other conversation may hold one.

    Raises:
        UserError: sources that cannot be read, a folder made with other settings, a prompt limit for which
            the target's context has no room, a server that is out of reach, too many failures, a full disk.
    """
    config.check()
    console, out, earlier = console or Console(stderr=True), Path(out), [Path(folder) for folder in earlier]
    settings = _settings(config, target, tokenizer)
    if not (is_own and _recorded(out) is None):
        _refuse_other_settings(out, settings)
    recorder = recordings = None
    if target is not None and kept is not None:
        recordings = _recordings(kept, target, out, [one for one in earlier if _is_alike(one, settings)])
        recorder = StateRecorder(recordings)
        target.tap([*kept.blocks, target.n_blocks])  # the last one is the final state
    run = Rewriting(config, out, tokenizer, recordings, exclude, measured)
    write_json(out / RECORD, {"settings": settings, "report": None})
    try:
        run.recover()
        for folder in earlier:
            if _is_alike(folder, settings):
                run.take_over(read_rows(folder))
        if run.pending:
            run.answer(_engine(config, target, tokenizer, len(run.pending), console, recorder), console)
        run.finish()
    finally:
        run.close()
        if recordings is not None and recordings.problem is not None:
            note = f"{recordings.problem}; further hidden states are not kept but computed later"
            console.print(escape(note), style="yellow", highlight=False, soft_wrap=True)
    write_json(out / RECORD, {"settings": settings, "report": asdict(run.report)})
    console.print(escape(f"{out / RESPONSES}: {run.report.describe()}"), highlight=False, soft_wrap=True)
    if run.limit:
        limit = f"regenerate.{run.limit} ({getattr(config, run.limit):g})"
        notice = f"stopped at {limit}; with a higher one the other conversations are answered as well"
        if not run.report.written:
            notice = f"no answer was finished before {limit}: the corpus is made of its other sources"
        console.print(notice, style="yellow", highlight=False, soft_wrap=True)
    return run.report


def _recordings(kept: KeptStates, target: FrozenTarget, out: Path, earlier: Sequence[Path]) -> Recordings:
    """Begin or continue the recording of states next to the answers; those of earlier ones, which are taken
    over, are moved here."""
    folder = states_folder(out)
    last = next((one for one in map(states_folder, reversed(earlier)) if one.exists()), None)
    if last is not None and not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(last, folder)
    made_of = recording_of(target, kept.blocks, kept.dtype)
    return Recordings(folder, made_of, kept.max_bytes, kept.shard_tokens)


def _engine(
    config: RegenerateConfig,
    target: FrozenTarget | None,
    tokenizer: PreTrainedTokenizerBase,
    n_pending: int,
    console: Console,
    recorder: StateRecorder | None,
) -> engines.Engine:
    if config.server is None:
        rows = min(config.batch_rows, n_pending)
        limits = (config.max_prompt_tokens, config.max_new_tokens, config.max_cache_gb)
        return engines.in_process(target, rows, *limits, recorder)
    temperature = config.temperature if config.greedy_fraction < 1 else 0.0

    def report(note: str) -> None:
        console.print(escape(note), style="yellow", highlight=False, soft_wrap=True)

    return engines.server(config.server, tokenizer, temperature, config.top_p if temperature else 1.0, report)


def _settings(
    config: RegenerateConfig, target: FrozenTarget | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the settings that an answer depends on; folders made with others are not continued."""
    names = ("max_turns", "max_new_tokens", "max_prompt_tokens", "greedy_fraction")
    names += ("temperature", "top_p", "seed")
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    if target is None:
        settings["target"] = config.server.model or "the server's only model"
        settings["endpoint"] = config.server.endpoint
        if config.server.model is None:  # which may be another for another target with this tokenizer
            settings["tokenizer_of"] = Path(tokenizer.name_or_path).name
    else:
        settings |= {"target": target.name, "weights": target.fingerprint}
        settings["dtype"] = str(target.dtype).removeprefix("torch.")
    return settings | {"tokenizer": tokenizer_hash(tokenizer), "template": template_hash(tokenizer)}


def _refuse_other_settings(out: Path, settings: dict[str, Any]) -> None:
    """Require that responses in a folder were made with these settings.

    Raises:
        UserError: one of them differs, or the folder's record is missing or damaged.
    """
    if _recorded(out) is None:
        if any((out / name).exists() for name in (RESPONSES, PARTIAL)):
            raise UserError(
                f"{out}: holds responses but no {RECORD} that can be read; choose another folder or remove "
                "this one"
            )
        return
    if (found := _difference(out, settings)) is not None:
        name, before = found
        raise UserError(
            f"{out}: made with {name} {before}, and now it is {settings.get(name)}; go back to that, choose "
            "another folder or remove this one"
        )


def _recorded(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder's settings and counts; None if it is missing or damaged."""
    with contextlib.suppress(UserError):
        found = read_json(folder / RECORD)
        if isinstance(found, dict) and isinstance(found.get("settings"), dict):
            return found
    return None


def _is_alike(folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether a folder's answers were made with these settings."""
    return _recorded(folder) is not None and _difference(folder, settings) is None


def _difference(folder: Path, settings: dict[str, Any]) -> tuple[str, Any] | None:
    """Return a setting that has changed since a folder with a record was made, and its value then; None if
    none has."""
    before = _recorded(folder)["settings"]
    unknown = {"weights", "tokenizer_of"} - before.keys()  # to earlier versions
    if "weights" in before and "weights" in settings:
        unknown.add("target")  # the same weights may have another name now
    names = (name for name in {**before, **settings} if name not in unknown)
    other = (name for name in names if before.get(name) != settings.get(name))
    return next(((name, before.get(name)) for name in other), None)
