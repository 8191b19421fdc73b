"""`drafttrain pipeline --simulate` and `drafttrain.simulate`: how fast a pipeline would be, by the number of
its stages."""

import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.pipeline.config import SimulateConfig
from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import make_out
from drafttrain.utils.locks import locked

if TYPE_CHECKING:
    from drafttrain.drafters.model import DraftModel
    from drafttrain.pipeline.measure import PipelineCosts
    from drafttrain.pipeline.outlook import Row
    from drafttrain.pipeline.simulate import Machines
    from drafttrain.target_lm.model import FrozenTarget

MODES = "pp", "stpp", "pipedec"
CONTEXT, ROUNDS = 256, 7  # tokens of context and rounds of the timings that are measured here


def print_simulation(config: SimulateConfig) -> None:
    """Simulate pipelines: print a table by the number of stages, and write its rows to `out`.

    Raises:
        UserError: target, drafter or prompts cannot be used.
    """
    from drafttrain.pipeline.outlook import as_table
    from drafttrain.utils.writing import write_json

    with locked(config.out):
        make_out(config.out)
        rows, inputs = _simulate(config, _show)
        found = {**inputs, "rows": [asdict(row) for row in rows]}
        write_json(Path(config.out) / "simulation.json", found)
        print(as_table(rows))


def _show(step: str) -> None:
    print(f"drafttrain: {step}", file=sys.stderr, flush=True)


def simulate(config: SimulateConfig) -> list["Row"]:
    """Count the hits of pipelines and simulate their speed.

    Returns:
        seconds per token in each mode and the hits, for each number of stages in the config. Nothing is
        written to `out`.

    Raises:
        UserError: a setting is out of range, or target, drafter or prompts cannot be used.
    """
    config.check()
    rows, _ = _simulate(config, lambda step: None)
    return rows


def _simulate(config: SimulateConfig, note: Callable[[str], None]) -> tuple[list["Row"], dict[str, Any]]:
    """Return the rows of `simulate`, and what they were computed from: machine, costs and settings.

    Args:
        note: called with each step that is done.
    """
    import torch

    from drafttrain.data.prompts import read_prompts
    from drafttrain.inference.params import SamplingParams
    from drafttrain.kernels.machine import describe_machine
    from drafttrain.pipeline.outlook import cut, known_texts, outlook, sent_bytes
    from drafttrain.pipeline.simulate import Link

    prompts = read_prompts(config.prompts, config.limit)
    if config.costs is not None:  # before seconds are spent on loading
        read_costs(config.costs)
    target, drafter = _load(config)
    if config.costs is not None and (most := max(config.stages)) > target.n_blocks:
        raise UserError(
            f"stages: must be <= {target.n_blocks}, the target's blocks, beside costs, got {most}; name fewer"
        )
    ids = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids):
        target.check_length(tokens, config.max_new_tokens, prompt.id)
    whole, curves = _costs(config, target, drafter)
    taps = getattr(drafter.config, "tapped_blocks", [])
    sampling = SamplingParams(**asdict(config.sampling))
    texts = known_texts(target, taps, ids, config.max_new_tokens, sampling)
    is_described = config.costs is None and config.target_ms is not None
    size = 2 * target.hidden_size if is_described else sent_bytes(target)  # described: 16 bits
    link = Link(config.link.gbit, config.link.ms / 1e3, size)
    note("texts are decoded")
    described = ({mode: cut(one, n, link) for mode, one in whole.items()} for n in config.stages)
    tree, rows = (config.width, config.children, config.layers, config.best_first), []
    for row in outlook(drafter, texts, described, *tree, config.concurrency):
        rows.append(row)
        note(f"{len(rows)} of {len(config.stages)}: {row.stages} stages")
    machine = describe_machine(torch.device("cpu"), target.dtype) | {"threads": config.threads}
    return rows, {"machine": machine, **curves, "recipe": asdict(config)}


def _load(config: SimulateConfig) -> tuple["FrozenTarget", "DraftModel"]:
    from drafttrain.bundle import load_bundle
    from drafttrain.pipeline.part import require_frontier

    # the costs of this machine's CPU are simulated
    given = {"target": config.target, "dtype": config.dtype, "device": "cpu"}
    bundle = load_bundle(config.drafter, own_calibration=False, **given)
    require_frontier(bundle.drafter, config.drafter)
    if config.children > (size := bundle.drafter.draft_vocab_size):
        raise UserError(f"children: must be <= {size}, the drafter's vocabulary, got {config.children}")
    return bundle.target, bundle.drafter


def _costs(
    config: SimulateConfig, target: "FrozenTarget", drafter: "DraftModel"
) -> tuple[dict[str, "Machines"], dict[str, Any]]:
    """Return the machines of the whole target by mode, given in the recipe, or measured here or by
    `drafttrain pipeline --calibrate`; and the costs themselves, to be written."""
    import torch

    from drafttrain.calibration.timing import VERIFIED, fitting_context, measure_costs
    from drafttrain.pipeline.simulate import Machines
    from drafttrain.trees.costs import CostCurve

    if config.costs is not None:
        costs = read_costs(config.costs, target.n_blocks)
        machines = {mode: costs.machines(mode, config.concurrency) for mode in MODES}
        return machines | {"single": costs.machines("stpp")}, {"costs": asdict(costs)}
    found = {}
    for name, points in (("target", config.target_ms), ("draft", config.draft_ms)):
        sizes = points and tuple(int(size) for size, _ in points)
        found[name] = points and CostCurve(sizes, tuple(ms / 1e3 for _, ms in points))
    if None in found.values():
        before = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        try:
            contexts = [fitting_context(target, CONTEXT, VERIFIED)]
            measured = measure_costs(target, drafter, config.children, contexts, ROUNDS)[:2]
        finally:
            torch.set_num_threads(before)
        found = {name: found[name] or curve.cost() for name, [curve] in zip(found, measured)}
    whole = Machines([found["target"]], [], found["draft"], config.sync_ms / 1e3)
    curves = {name: [list(curve.sizes), list(curve.seconds)] for name, curve in found.items()}
    return dict.fromkeys((*MODES, "single"), whole), {"curves": curves}


def read_costs(path: str, n_blocks: int | None = None) -> "PipelineCosts":
    """Read the costs that `drafttrain pipeline --calibrate` has written.

    Args:
        n_blocks: blocks of the target that they must be for. None: any target's.

    Raises:
        UserError: no such file, costs of another target, or seconds that are not positive and finite.
    """
    from drafttrain.pipeline.measure import PipelineCosts
    from drafttrain.utils.files import read_json
    from drafttrain.utils.types import fits

    wanted = "a file of drafttrain pipeline --calibrate"
    try:
        found = read_json(path)
    except UserError:
        raise UserError(
            f"costs: must be {wanted}, got {path}, which is missing or no JSON; name its costs.json"
        ) from None
    found = found if isinstance(found, dict) else {}
    parts = fields(PipelineCosts)
    needed = (one.name for one in parts if one.default is one.default_factory is MISSING)
    if missing := [name for name in needed if name not in found]:
        raise UserError(f"costs: must be {wanted}, got {path} without {missing[0]}")
    costs = PipelineCosts(**{one.name: found[one.name] for one in parts if one.name in found})
    blocks = found.get("blocks")  # of each rank; a file of an earlier version may lack them
    whole = fits(blocks, list[int] | None) and fits(costs, PipelineCosts)
    if whole and None not in (n_blocks, blocks) and sum(blocks) != n_blocks:
        raise UserError(
            f"costs: must be of a target with {n_blocks} blocks, got {path} of one with {sum(blocks)}; "
            "calibrate a pipeline of this target"
        )
    if whole:
        sizes = costs.sizes
        times = [*costs.groups, *costs.alone, costs.judging, costs.draft, costs.draft_alone]
        messages = [*costs.hop, costs.broadcast, costs.sync, costs.waiting, costs.round, costs.token]
        whole = bool(sizes) and 0 < sizes[0] and sizes == sorted(set(sizes)) and len(costs.hop) == len(sizes)
        whole = whole and all(len(row) == len(sizes) and min(row) > 0 for row in times)
        whole = whole and min(messages) >= 0
    if not whole:
        raise UserError(
            f"costs: must have positive, finite seconds for ascending sizes, got others in {path}; "
            "calibrate again"
        )
    return costs
