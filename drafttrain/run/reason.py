"""`drafttrain reason`: grow a tree of thoughts for each problem of a recipe."""

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.run.commands import add_keys
from drafttrain.run.options import option
from drafttrain.utils.locks import locked

if TYPE_CHECKING:
    from drafttrain.reasoning.config import ReasonConfig
    from drafttrain.reasoning.interface import Generate
    from drafttrain.reasoning.scheduler import ScheduledDecoder

PREFIX_TOKENS = 8192  # of encoded prompts that are kept


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
    with locked(config.out):
        grow(config, scheduled(config))


def grow(config: "ReasonConfig", generate: "Generate") -> dict[str, Any]:
    """Grow all trees; write traces, a page for each of them and sums over them, and print a line for each.

    Returns:
        the sums, as in `summary.json`.

    Raises:
        UserError: as `reason_from`.
    """
    from drafttrain.reasoning.picture import summary, to_html
    from drafttrain.reasoning.reason import reason_from, trace_file
    from drafttrain.reasoning.trace import Trace, totals
    from drafttrain.utils.writing import write_json, write_text

    traces = []

    def note(trace: Trace) -> None:
        page = trace_file(Path(config.out), trace.problem["id"]).with_suffix(".html")
        write_text(page, to_html(trace))
        print(f"{trace.problem['id']}: {summary(trace)}", flush=True)
        traces.append(trace)

    reason_from(config, generate, note)
    sums = totals(traces)
    write_json(Path(config.out) / "summary.json", sums)
    print(", ".join(f"{key.replace('_', ' ')} {value:.6g}" for key, value in sums.items()))
    return sums


def scheduled(config: "ReasonConfig") -> "Generate":
    """Return a function that decodes calls as the recipe's scheduler says.

    Target and drafter are loaded by the first call: problems are read before it, and trees that are finished
    need none.
    """
    decoder = functools.cache(lambda: _decoder(config))
    return lambda calls, then: decoder().answer(calls, then)


def _decoder(config: "ReasonConfig") -> "ScheduledDecoder":
    from drafttrain.decoder import SpeculativeDecoder
    from drafttrain.inference.proposer import NoProposer
    from drafttrain.reasoning.scheduler import ScheduledDecoder
    from drafttrain.target_lm.loading import load_for_decoding

    if config.drafter is None:
        target, proposer = load_for_decoding(config.target, dtype=config.dtype), NoProposer()
    else:
        loaded = SpeculativeDecoder.from_pretrained(
            config.drafter, config.target, dtype=config.dtype, tree=config.tree
        )
        target, proposer = loaded.target, loaded.proposer
    prefixes = PREFIX_TOKENS if config.prefixes else 0
    return ScheduledDecoder(target, proposer, config.scheduler, prefixes)
