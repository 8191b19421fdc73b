"""`drafttrain reason`: grow a tree of thoughts for each problem of a recipe."""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.run.commands import add_keys
from drafttrain.run.options import option
from drafttrain.utils.folders import make_out
from drafttrain.utils.locks import locked

if TYPE_CHECKING:
    from drafttrain.reasoning.config import ReasonConfig
    from drafttrain.reasoning.interface import Answer, Call, Generate, Then
    from drafttrain.target_lm.model import FrozenTarget

PREFIX_TOKENS = 8192  # tokens of prompts whose KV cache is kept


def reason_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "RECIPE", "YAML file; --key VALUE or --section.key VALUE overrides a value")
    add_keys(parser, lambda given: _settings())


def _settings() -> type:
    from drafttrain.reasoning.config import ReasonConfig

    return ReasonConfig


def reason(args: argparse.Namespace) -> None:
    """Grow trees of thoughts for the problems of a task."""
    from drafttrain.run.recipe import load_settings

    config = load_settings(_settings(), args.recipe, args.overrides)
    with locked(config.out), _warnings_in_one_line():
        make_out(config.out)
        grow(config, lambda: scheduled(config))


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each `UserWarning` as one line of stderr when it occurs; a run may last for hours."""
    with warnings.catch_warnings():
        as_python_does = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if not issubclass(category, UserWarning):  # not meant for users: its place is what matters
                as_python_does(message, category, *place)
                return
            print(f"drafttrain: warning: {' '.join(str(message).splitlines())}", file=sys.stderr, flush=True)

        warnings.showwarning = show
        yield


def grow(config: "ReasonConfig", load: Callable[[], "Generate"]) -> dict[str, Any]:
    """Grow all trees; write a trace and a page for each, and sums over all; print a line for each.

    Args:
        load: returns the function that answers calls; used once all traces are read, if a tree is unfinished.

    Returns:
        the sums, as in `summary.json`.

    Raises:
        UserError: as `reason_from`.
    """
    from drafttrain.reasoning.picture import summary, to_html
    from drafttrain.reasoning.reason import SUMMARY, reason_from, trace_file
    from drafttrain.reasoning.trace import Trace, totals
    from drafttrain.utils.writing import write_json, write_text

    traces, before, total = [], {}, 0  # finished traces; those of earlier runs whose turn has not come, by id

    def begin(problems: int, finished: Sequence[Trace]) -> "Generate":
        nonlocal total
        total = problems
        before.update((trace.problem["id"], trace) for trace in finished)
        ready = f"{problems} problems, {len(finished)} finished before"
        print(f"{ready}; traces and pages: {config.out}", flush=True)
        return load()

    def note(trace: Trace) -> None:
        page = trace_file(Path(config.out), trace.problem["id"]).with_suffix(".html")
        write_text(page, to_html(trace))
        traces.append(trace)
        before.pop(trace.problem["id"], None)
        count = f"{len(traces)} of {total}, " if total else ""
        print(f"{count}problem {trace.problem['id']}: {summary(trace)}", flush=True)

    try:
        reason_from(config, begin, note)
    finally:  # also if the run is interrupted
        sums = totals(whole := [*traces, *before.values()])
        if whole:
            write_json(Path(config.out) / SUMMARY, sums)
    print(", ".join(f"{key.replace('_', ' ')} {value:.6g}" for key, value in sums.items()))
    return sums


def scheduled(config: "ReasonConfig") -> "Generate":
    """Load target and drafter, and return a function that decodes calls as set in `config.scheduler`."""
    from drafttrain.decoder import SpeculativeDecoder
    from drafttrain.inference.proposer import NoProposer
    from drafttrain.reasoning.branches import HangingWorker
    from drafttrain.reasoning.scheduler import ScheduledDecoder
    from drafttrain.target_lm.loading import load_for_decoding
    from drafttrain.utils.errors import UserError, brief

    if config.drafter is not None:
        loaded = SpeculativeDecoder.from_pretrained(
            config.drafter, config.target, dtype=config.dtype, tree=config.tree
        )
    elif config.tree is not None:  # n-grams alone
        loaded = SpeculativeDecoder.self_draft(config.target, dtype=config.dtype)
    else:
        loaded = SpeculativeDecoder(load_for_decoding(config.target, dtype=config.dtype), NoProposer())
    _warn_of_thinking(loaded.target)
    prefixes = PREFIX_TOKENS if config.prefixes else 0
    decoder = ScheduledDecoder(loaded.target, loaded.proposer, config.scheduler, prefixes)

    def answer(calls: Sequence["Call"], then: "Then") -> list["Answer"]:
        try:
            return decoder.answer(calls, then)
        except HangingWorker as error:
            raise UserError(
                f"scheduler.overlap: must be false here, got {config.scheduler.overlap} ({brief(error)}); "
                "repeat the command with --scheduler.overlap false, it continues the run"
            ) from error

    return answer


def _warn_of_thinking(target: "FrozenTarget") -> None:
    """Warn of a target that thinks before each answer, unless its template's default is not to."""
    from drafttrain.data.message import Message
    from drafttrain.data.template import render, template_of

    if "<think>" not in template_of(target.tokenizer):
        return
    begun = render(target.tokenizer, [Message("user", "Hello.")], target.name, generation_prompt=True)
    if "</think>" not in begun:  # templates that leave thinking out close it themselves
        warnings.warn(
            f"{target.name}: its template makes it think before it answers, and thoughts and scores are read "
            "from what comes first; use a copy whose chat_template.jinja leaves thinking out",
            stacklevel=2,
        )
