"""The full calibration: costs of target and drafter on this machine, and how well the drafter's confidence
predicts acceptance."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from drafttrain.calibration.calibration import Calibration
from drafttrain.calibration.config import BETAS, C2T_TRIALS, STRICTNESS, CalibrateConfig
from drafttrain.calibration.judged import (
    Decoding,
    JudgedChains,
    JudgedTrees,
    PredictedPolicy,
    drafter_facts,
    step_overhead,
    steps_rate,
)
from drafttrain.calibration.timing import CONTEXTS, VERIFIED, WARM_UP, measure_costs
from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.trees.c2t import C2tPolicy
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.interface import Confidence
from drafttrain.trees.timed import TimedPolicy
from drafttrain.utils.machine import OtherLoad
from drafttrain.utils.progress import counted

ROUND_TOKENS = 2 * len(VERIFIED)  # new tokens that take about as long as a round of all sizes, for progress


def full_calibration(
    config: CalibrateConfig,
    target: FrozenTarget,
    drafter: DraftModel,
    fingerprints: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    classifier: Confidence | None = None,
    console: Console | None = None,
) -> Calibration:
    """Measure the costs of drafting and verifying here, and the reliability of confidence on decoded prompts.

    Args:
        fingerprints: of "target" and "drafter", for the record.
        prompts: token ids of each.
        classifier: C2T's classifier, whose thresholds are to be found.
        console: for progress.
    """
    runs = 2 + len(STRICTNESS) + (C2T_TRIALS if classifier else 0)
    rounds, tokens = len(CONTEXTS) * (WARM_UP + config.rounds), config.max_new_tokens
    work = rounds * ROUND_TOKENS + runs * len(prompts) * tokens
    load = OtherLoad()
    with counted("calibrating", work, "tokens", console or Console()) as step:
        on_round = partial(step, ROUND_TOKENS)
        curves = measure_costs(target, drafter, config.width, rounds=config.rounds, on_round=on_round)
        decoding = Decoding(target, drafter, prompts, tokens, partial(step, tokens))
        chains = JudgedChains(config.chain_length, target.eos_token_ids)
        decoding.run(chains, chains, chains.next_prompt)
        wide_policy = Eagle2Policy(config.width, max_depth=5, total=None)
        trees = JudgedTrees()
        wide = decoding.run(wide_policy, trees)
        rate = steps_rate(wide)
        tree = f"eagle2:top_k={config.width},max_depth=5,total=none"
        facts = drafter_facts(chains, trees, wide, tree)
        found = Calibration.of(target, fingerprints, curves, rate=rate, reached=rate, **facts)
        found.step_overhead = step_overhead(found, wide, wide_policy)
        found.rate, found.reached = _fastest_rate(found, decoding, config.width)
        if classifier:
            _find_thresholds(found, decoding, classifier, rate, config.width)
    found.machine["load"] = load.lap()
    return found


def _fastest_rate(found: Calibration, decoding: Decoding, width: int) -> tuple[float, float]:
    """Return the rate to beat with which `timed` is fastest, and the tokens per second with it.

    The rate to beat is, in theory, the rate reached. The curves leave some costs out, so trees that pay by
    them are a little too large, and stricter rates are tried as well.
    """
    reached, settings = {}, TimedPolicy.calibrated(found.costs)
    for rate in (strictness * found.rate for strictness in STRICTNESS):
        policy = TimedPolicy(**{**settings, "rate": rate, "follow": 0.0}, width=width)
        reached[rate] = steps_rate(decoding.run(policy))
    best = max(reached, key=reached.__getitem__)
    return best, reached[best]


def _find_thresholds(
    found: Calibration, decoding: Decoding, classifier: Confidence, rate: float, width: int
) -> None:
    """Set the thresholds of C2T with the most tokens per second by the measured costs.

    Args:
        rate: tokens per second of EAGLE-2 trees; thresholds that pay at multiples of it are tried.
    """
    predicted_rates, costs = {}, replace(found.costs, draft=found.costs.layer)  # C2T grows layer by layer
    pairs = [found.costs.worth(strictness * rate) for strictness in STRICTNESS]
    for beta, expand in [*((beta, None) for beta in BETAS), *pairs]:
        predicted = PredictedPolicy(C2tPolicy(classifier, beta, top_k=width, expand=expand), costs)
        stats = decoding.run(predicted)
        predicted_rates[beta, expand] = (stats.new_tokens - stats.prompts) / predicted.seconds
    found.beta, found.expand = max(predicted_rates, key=predicted_rates.__getitem__)
    found.top_k = width
    found.made_for["classifier"] = weights_hash(classifier)
