"""`drafttrain pipeline --simulate`: how fast a pipeline would be, by the number of its stages."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.pipeline.config import SimulateConfig

if TYPE_CHECKING:
    from drafttrain.drafters.model import DraftModel
    from drafttrain.target_lm.model import FrozenTarget
    from drafttrain.trees.costs import CostCurve

CONTEXT, ROUNDS = 256, 7  # of what is measured here


def simulate(recipe: str, overrides: Sequence[str]) -> None:
    """Count the hits of pipelines and simulate their speed; print a table by the number of stages.

    Raises:
        UserError: recipe, target, drafter or prompts cannot be used.
    """
    import torch

    from drafttrain.data.prompts import read_prompts
    from drafttrain.inference.params import SamplingParams
    from drafttrain.kernels.machine import describe_machine
    from drafttrain.pipeline.outlook import as_rows, as_table, known_texts, machines, outlook
    from drafttrain.pipeline.simulate import Link
    from drafttrain.run.recipe import load_settings
    from drafttrain.utils.files import write_json

    config = load_settings(SimulateConfig, recipe, overrides)
    prompts = read_prompts(config.prompts, config.limit)
    target, drafter = _load(config)
    ids = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids):
        target.check_length(tokens, config.max_new_tokens, prompt.id)
    costs = _costs(config, target, drafter)
    taps = getattr(drafter.config, "tapped_blocks", [])
    sampling = SamplingParams(**asdict(config.sampling))
    texts = known_texts(target, taps, ids, config.max_new_tokens, sampling)
    link = Link(config.link.gbit, config.link.ms / 1e3, 2 * target.hidden_size)  # states travel in 16 bits
    rows = []
    for stages in config.stages:
        described = machines(stages, *costs, link, config.sync_ms / 1e3)
        rows.append(outlook(drafter, texts, described, config.width, config.children))
    machine = describe_machine(torch.device("cpu"), target.dtype)
    curves = {
        name: [list(curve.sizes), list(curve.seconds)] for name, curve in zip(("target", "draft"), costs)
    }
    found = {"machine": machine, "curves": curves, "recipe": asdict(config), "rows": as_rows(rows)}
    Path(config.out).mkdir(parents=True, exist_ok=True)
    write_json(Path(config.out) / "simulation.json", found)
    print(as_table(rows))


def _load(config: SimulateConfig) -> tuple["FrozenTarget", "DraftModel"]:
    from drafttrain.bundle import load_bundle
    from drafttrain.pipeline.part import require_frontier

    bundle = load_bundle(config.drafter, target=config.target, dtype=config.dtype, own_calibration=False)
    require_frontier(bundle.drafter, config.drafter)
    return bundle.target, bundle.drafter


def _costs(
    config: SimulateConfig, target: "FrozenTarget", drafter: "DraftModel"
) -> tuple["CostCurve", "CostCurve"]:
    """Return seconds of the target by tokens and of a drafting step by nodes: given, or measured here."""
    import torch

    from drafttrain.calibration.timing import fitting_context, measure_costs
    from drafttrain.trees.costs import CostCurve

    found = []
    for points in (config.target_ms, config.draft_ms):
        sizes = points and tuple(int(size) for size, _ in points)
        found.append(points and CostCurve(sizes, tuple(ms / 1e3 for _, ms in points)))
    if None not in found:
        return found[0], found[1]
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        contexts = [fitting_context(target, CONTEXT, [max(32, config.width)])]
        measured = measure_costs(target, drafter, config.children, contexts, ROUNDS)
    finally:
        torch.set_num_threads(before)
    curves = [curve.cost() for [curve] in measured]
    return found[0] or curves[0], found[1] or curves[1]
