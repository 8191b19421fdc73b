"""The calibration stage: costs of target and drafter on this machine, and the drafter's confidence against
what the target accepts."""

import contextlib
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.calibration.calibration import FILE, Calibration
from drafttrain.calibration.config import BETAS, C2T_TRIALS, STRICTNESS, CalibrateConfig
from drafttrain.calibration.judged import (
    Decoding,
    JudgedChains,
    JudgedTrees,
    PredictedPolicy,
    judge,
    step_overhead,
    steps_rate,
)
from drafttrain.calibration.plots import plot_confidence, plot_costs
from drafttrain.calibration.quick import is_disturbed, quick_calibration
from drafttrain.calibration.timing import CONTEXTS, VERIFIED, WARM_UP, measure_costs
from drafttrain.errors import UserError
from drafttrain.evaluation.measure import MeasurementLog, check_length, drafting, measure
from drafttrain.evaluation.metrics import ratio_interval, tabulate
from drafttrain.evaluation.prompts import Task, read_prompts
from drafttrain.export.bundle import Bundle, load_bundle
from drafttrain.files import fingerprint, write_json
from drafttrain.machine import OtherLoad, check_quiet, describe_machine, dtype_name
from drafttrain.progress import counted
from drafttrain.provenance import versions
from drafttrain.target.frozen import weights_hash
from drafttrain.trees.c2t import C2tPolicy
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.timed import TimedPolicy

ROUND_TOKENS = 2 * len(VERIFIED)  # new tokens whose decoding takes about as long as a round of all sizes


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

    Args:
        classifier: folder of another classifier than the bundle's own, which it may lack.

    Raises:
        UserError: prompts, bundle or settings are unusable, or the machine is busy and `busy` says refuse.
    """
    config.check()
    if config.prompts is None:
        raise UserError("calibrate.prompts is missing: name a file of prompts that no benchmark uses")
    prompts = read_prompts(config.prompts.path, config.prompts.limit)
    if len(prompts) < 2:
        raise UserError(f"{config.prompts.path}: one prompt is too few to calibrate on; give some dozens")
    console = Console()
    if warning := check_quiet(refuse=config.busy == "refuse"):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    loaded = load_bundle(
        bundle, target=target, dtype=dtype, device=device, own_calibration=False, classifier=classifier
    )
    _check_depth(loaded)
    model, drafter = loaded.target, loaded.drafter
    ids = [prompt.token_ids(model.tokenizer) for prompt in prompts]
    for prompt, prompt_ids in zip(prompts, ids):
        which = f"{config.prompts.path}: prompt {prompt.id}"
        check_length(model, prompt_ids, config.max_new_tokens, which)
    runs = 2 + len(STRICTNESS) + (C2T_TRIALS if loaded.classifier else 0)
    rounds, tokens = len(CONTEXTS) * (WARM_UP + config.rounds), config.max_new_tokens
    work = rounds * ROUND_TOKENS + runs * len(ids) * tokens
    load = OtherLoad()
    with counted("calibrating", work, "tokens", console) as step:
        on_round = partial(step, ROUND_TOKENS)
        verified, drafted = measure_costs(
            model, drafter, config.width, rounds=config.rounds, on_round=on_round
        )
        decoding = Decoding(model, drafter, ids, tokens, partial(step, tokens))
        chains = JudgedChains(config.chain_length, model.eos_token_ids)
        decoding.run(chains, chains, chains.next_prompt)
        temperature, confidence = judge(chains.judged)
        full = Eagle2Policy(config.width, max_depth=5, total=None)
        judged_trees = JudgedTrees()
        wide = decoding.run(full, judged_trees)
        found = Calibration(
            machine=describe_machine(model.device, model.dtype),
            dtype=dtype_name(model.dtype),
            versions=versions(),
            measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            made_for=dict(loaded.fingerprints),
            target=verified,
            drafter=drafted,
            step_overhead=0.0,
            rate=steps_rate(wide),
            reached=steps_rate(wide),
            # 0 where nothing was accepted or nothing reached that depth: no probability can be 0 for good
            acceptance=[max(0.01, share) for share in wide.acceptance_by_depth] or [0.01],
            promise=judged_trees.promise(),
            tree=f"eagle2:top_k={config.width},max_depth=5,total=none",
            temperature=temperature,
            confidence=confidence,
        )
        found.step_overhead = step_overhead(found, wide, full)
        # The rate that a step has to beat is, in theory, the rate that such steps reach. What the curves
        # leave out makes trees that pay in theory a little too large, so stricter ones are tried as well.
        reached, settings = {}, found.costs.for_timed()
        for rate in (strictness * found.rate for strictness in STRICTNESS):
            policy = TimedPolicy(**{**settings, "rate": rate}, width=config.width)
            reached[rate] = steps_rate(decoding.run(policy))
        found.rate = max(reached, key=reached.__getitem__)
        found.reached = max(reached.values())
        if loaded.classifier:
            promised = {}
            pairs = [found.costs.worth(strictness * steps_rate(wide)) for strictness in STRICTNESS]
            for beta, expand in [*((beta, None) for beta in BETAS), *pairs]:
                policy = C2tPolicy(loaded.classifier, beta, top_k=config.width, expand=expand)
                predicted = PredictedPolicy(policy, found.costs)
                stats = decoding.run(predicted)
                promised[beta, expand] = (stats.new_tokens - stats.prompts) / predicted.seconds
            found.beta, found.expand = max(promised, key=promised.__getitem__)
            found.top_k = config.width
            found.made_for["classifier"] = weights_hash(loaded.classifier)
    found.machine["load"] = load.lap()
    write_calibration(found, out)
    _show(found, console)
    return found


def calibrate_quickly(
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    classifier: str | os.PathLike | None = None,
) -> Calibration:
    """Write the short calibration of a bundle on this machine into the folder `out`, as `calibrate` does.

    What belongs to the drafter is taken from the bundle's own calibration if it has one.

    Raises:
        UserError: the bundle is unusable.
    """
    console = Console()
    loaded = load_bundle(
        bundle, target=target, dtype=dtype, device=device, own_calibration=False, classifier=classifier
    )
    _check_depth(loaded)
    own = None
    with contextlib.suppress(UserError):  # missing, or damaged and to be replaced
        own = Calibration.load(bundle)
    made = loaded.target, loaded.drafter, loaded.fingerprints
    found = quick_calibration(*made, own, loaded.classifier)
    if is_disturbed(found):
        taken = found.machine["load"]
        console.print(f"[yellow]timings are poor:[/] other processes took {taken:.1f} cores", highlight=False)
    write_calibration(found, out)
    _show(found, console)
    return found


def quick_against_full(
    loaded: Bundle, full: Calibration, task: Task, folder: Path, **options: Any
) -> dict[str, Any]:
    """Make a short calibration and compare `timed` by it with `timed` by a full one, interleaved.

    Args:
        loaded: the bundle; what belongs to the drafter is taken from its own calibration if it has one.
        full: of `calibrate` on this machine.
        task: prompts to decode.
        folder: for the short calibration and the raw measurements.
        options: of `measure`, such as max_new_tokens and repeats.

    Returns:
        `seconds` that the short calibration took, `load` meanwhile, `rates` to beat and `tokens_per_second`
        of both, and `ratio`, the short one's tokens per second divided by the full one's, with `interval`.
    """
    begun = time.perf_counter()
    made = loaded.target, loaded.drafter, loaded.fingerprints
    quick = quick_calibration(*made, loaded.calibration, loaded.classifier)
    seconds = time.perf_counter() - begun
    write_json(folder / FILE, quick.to_json())
    both = {"quick": quick, "full": full}
    methods = {
        name: drafting(loaded.target, replace(loaded, calibration=found, is_given=True).proposer("timed"))
        for name, found in both.items()
    }
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([quick, full]))
    measured = measure(loaded.target, methods, task, log, **options)
    rows = tabulate(measured)
    speeds = {name: rows[name].tokens_per_second for name in both}
    return {
        "seconds": seconds,
        "load": quick.machine["load"],
        "rates": {name: found.rate for name, found in both.items()},
        "tokens_per_second": speeds,
        "ratio": speeds["quick"] / speeds["full"],
        "interval": ratio_interval(measured, "full", "quick"),
    }


def _check_depth(loaded: Bundle) -> None:
    if loaded.drafter.max_depth is not None:
        raise UserError(
            f"{loaded.name}: its drafter reaches {loaded.drafter.max_depth} tokens ahead at one cost, no "
            "curve tells how deep to draft: leave calibrate out and give the tree's settings"
        )


def write_calibration(found: Calibration, out: str | os.PathLike) -> None:
    """Write `calibration.json` and its plots into the folder `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, found.to_json())
    plot_costs(found, out)
    plot_confidence(found, out)


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
