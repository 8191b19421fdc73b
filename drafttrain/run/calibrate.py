"""The calibration stage: load a bundle and measure it on this machine."""

import contextlib
import os
from pathlib import Path

from rich.console import Console

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.calibration.calibration import FILE, Calibration
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.calibration.full import full_calibration
from drafttrain.calibration.quick import is_disturbed, quick_calibration
from drafttrain.data.prompts import Prompt, read_prompts
from drafttrain.report.pictures import draw_calibration
from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import make_out
from drafttrain.utils.machine import check_quiet
from drafttrain.utils.writing import write_json


def calibrate(
    config: CalibrateConfig,
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    classifier: str | os.PathLike | None = None,
) -> Calibration:
    """Measure a bundle on this machine; write `calibration.json` and its plots into the folder `out`.

    With `config.quick`, acceptance and confidence of the drafter come from the bundle's calibration, if any.

    Args:
        classifier: folder of a classifier to use instead of the bundle's, which need not have one.

    Raises:
        UserError: prompts, bundle or settings are unusable, or the machine is busy and `busy` is "refuse".
    """
    config.check()
    make_out(out)
    console = Console()
    prompts = [] if config.quick else _prompts(config)
    refuse = config.busy == "refuse"
    if (refuse or not config.quick) and (warning := check_quiet(refuse)):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    loaded = load_bundle(
        bundle, target=target, dtype=dtype, device=device, own_calibration=False, classifier=classifier
    )
    _check_depth(loaded)
    made = loaded.target, loaded.drafter, loaded.fingerprints
    if config.quick:
        own = None
        with contextlib.suppress(UserError):  # missing, or damaged and to be replaced
            own = Calibration.load(bundle)
        found = quick_calibration(*made, own, loaded.classifier)
        if is_disturbed(found):
            taken = f"other processes took {found.machine['load']:.1f} cores"
            console.print(f"[yellow]timings are poor:[/] {taken}", highlight=False)
    else:
        ids = [prompt.token_ids(loaded.target.tokenizer) for prompt in prompts]
        for prompt, prompt_ids in zip(prompts, ids):
            which = f"{config.prompts.path}: prompt {prompt.id}"
            loaded.target.check_length(prompt_ids, config.max_new_tokens, which)
        found = full_calibration(config, *made, ids, loaded.classifier, console)
    write_calibration(found, out)
    _show(found, console)
    return found


def _prompts(config: CalibrateConfig) -> list[Prompt]:
    """Read the prompts of a full calibration."""
    if config.prompts is None:
        raise UserError("calibrate.prompts: must be set, got null; name prompts that no benchmark uses")
    prompts = read_prompts(config.prompts.path, config.prompts.limit)
    if len(prompts) < 2:
        raise UserError(f"{config.prompts.path}: must hold >= 2 prompts, got 1; give some dozens")
    return prompts


def _check_depth(loaded: Bundle) -> None:
    if loaded.drafter.max_depth is not None:
        raise UserError(
            f"{loaded.name}: cannot be calibrated, as its {loaded.drafter.max_depth} heads run in one pass "
            "and cost does not depend on depth; write out the tree's settings"
        )


def write_calibration(found: Calibration, out: str | os.PathLike) -> None:
    """Write `calibration.json` and its pictures into the folder `out`."""
    write_json(Path(out) / FILE, found.to_json())
    draw_calibration(out)


def _show(found: Calibration, console: Console) -> None:
    costs, raw, scaled = found.costs, found.confidence["raw"]["all"], found.confidence["scaled"]["all"]
    largest = costs.target.sizes[-1]
    verify = ", ".join(f"{n}: {1000 * costs.target(n):.1f}" for n in (1, 8, 32, 128) if n <= largest)
    lines = [
        f"s_t: {verify} ms by tokens verified; s_d: {1000 * costs.draft(1):.2f} ms for one node, "
        f"{1000 * costs.draft(8):.2f} ms for 8; {1000 * found.step_overhead:.2f} ms of a step beside them",
        f"PCT expands a node from confidence {costs.draft(1) / costs.target(1):.3f} on; timed "
        f"{'is predicted to emit' if found.quick else 'emits'} {found.reached:.1f} tokens/s",
        f"confidence of {raw.tokens} judged tokens: ECE {raw.ece:.3f}, with temperature "
        f"{found.temperature:g} {scaled.ece:.3f}",
    ]
    if found.beta is not None:
        expanded = "it, too" if found.expand is None else f"one from {found.expand:.3g} on"
        lines.append(f"C2T verifies a node from confidence {found.beta:.3g} on, and expands {expanded}")
    for line in lines:
        console.print(line, highlight=False)
