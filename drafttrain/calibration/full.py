"""The full calibration: costs of target and drafter on this machine, and how well the drafter's confidence
predicts what the target accepts."""

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

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
from drafttrain.calibration.timing import CONTEXTS, VERIFIED, WARM_UP, measure_costs
from drafttrain.drafters.model import DraftModel
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.trees.c2t import C2tPolicy, Confidence
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.utils.files import write_json
from drafttrain.utils.machine import OtherLoad, dtype_name
from drafttrain.utils.progress import counted
from drafttrain.utils.provenance import versions

ROUND_TOKENS = 2 * len(VERIFIED)  # new tokens whose decoding takes about as long as a round of all sizes


def full_calibration(
    config: CalibrateConfig,
    target: FrozenTarget,
    drafter: DraftModel,
    fingerprints: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    classifier: Confidence | None = None,
    console: Console | None = None,
) -> Calibration:
    """Measure what drafting and verifying cost here, and judge the drafter's confidence on decoded prompts.

    Args:
        fingerprints: of "target" and "drafter", for the record.
        prompts: token ids of each.
        classifier: to look for the thresholds of C2T.
        console: where progress goes.
    """
    runs = 2 + len(STRICTNESS) + (C2T_TRIALS if classifier else 0)
    rounds, tokens = len(CONTEXTS) * (WARM_UP + config.rounds), config.max_new_tokens
    work = rounds * ROUND_TOKENS + runs * len(prompts) * tokens
    load = OtherLoad()
    with counted("calibrating", work, "tokens", console or Console()) as step:
        on_round = partial(step, ROUND_TOKENS)
        verified, drafted = measure_costs(
            target, drafter, config.width, rounds=config.rounds, on_round=on_round
        )
        decoding = Decoding(target, drafter, prompts, tokens, partial(step, tokens))
        chains = JudgedChains(config.chain_length, target.eos_token_ids)
        decoding.run(chains, chains, chains.next_prompt)
        temperature, confidence = judge(chains.judged)
        full = Eagle2Policy(config.width, max_depth=5, total=None)
        judged_trees = JudgedTrees()
        wide = decoding.run(full, judged_trees)
        found = Calibration(
            machine=describe_machine(target.device, target.dtype),
            dtype=dtype_name(target.dtype),
            versions=versions(),
            measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            made_for=dict(fingerprints),
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
        reached, settings = {}, TimedPolicy.calibrated(found.costs)
        for rate in (strictness * found.rate for strictness in STRICTNESS):
            policy = TimedPolicy(**{**settings, "rate": rate}, width=config.width)
            reached[rate] = steps_rate(decoding.run(policy))
        found.rate = max(reached, key=reached.__getitem__)
        found.reached = max(reached.values())
        if classifier:
            promised = {}
            pairs = [found.costs.worth(strictness * steps_rate(wide)) for strictness in STRICTNESS]
            for beta, expand in [*((beta, None) for beta in BETAS), *pairs]:
                policy = C2tPolicy(classifier, beta, top_k=config.width, expand=expand)
                predicted = PredictedPolicy(policy, found.costs)
                stats = decoding.run(predicted)
                promised[beta, expand] = (stats.new_tokens - stats.prompts) / predicted.seconds
            found.beta, found.expand = max(promised, key=promised.__getitem__)
            found.top_k = config.width
            found.made_for["classifier"] = weights_hash(classifier)
    found.machine["load"] = load.lap()
    return found


def write_calibration(found: Calibration, out: str | os.PathLike) -> None:
    """Write `calibration.json` and its plots into the folder `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, found.to_json())
    plot_costs(found, out)
    plot_confidence(found, out)
