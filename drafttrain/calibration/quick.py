"""The short calibration: measure the costs of target and drafter on this machine in some seconds, for growth
policies of a bundle whose calibration comes from another machine, or is missing.

Curves and the time of a step are measured at few sizes and on few steps. The drafter's acceptance and
confidence are taken from the bundle's own calibration, or else measured on a few built-in prompts. The rate
of `timed` and the thresholds of C2T follow from both without decoding.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial

from drafttrain.calibration.calibration import CONTEXT, Calibration, machine_of
from drafttrain.calibration.judged import Decoding, JudgedChains, drafter_facts, step_overhead
from drafttrain.calibration.replay import RecordedTrees, best_rate
from drafttrain.calibration.timing import fitting_context, measure_costs
from drafttrain.data.chat import encode_prompt
from drafttrain.data.message import Message
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.build import sources_hash
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.interface import Confidence
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import cache_dir, fingerprint
from drafttrain.utils.machine import BUSY, OtherLoad, check_quiet
from drafttrain.utils.provenance import versions
from drafttrain.utils.writing import write_json

VERIFIED = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)  # tokens
EXPANDED = (1, 2, 4, 8, 16)  # nodes
ROUNDS = 9
CURVE_SECONDS, TREE_SECONDS, CHAIN_SECONDS = 4.0, 4.0, 2.0  # time limits
WIDTH, DEPTH, NODES, CHAIN = 4, 5, 24, 8  # of trees and chains
TREE = f"eagle2:top_k={WIDTH},max_depth={DEPTH},total={NODES}"
NEW_TOKENS = 32  # for each prompt
FACTS = ("acceptance", "promise", "tree", "temperature", "confidence")  # independent of the machine
LOOK = 0.5  # seconds of watching whether the machine is still busy
PROMPTS = (
    "Why do the leaves of many trees change their color in autumn?",
    "Write a Python function that returns the second largest number of a list.",
    "A train leaves at 9:40 and arrives at 12:15. How long does it take? Explain each step.",
    "Summarize the plot of a story about a lost dog in three sentences.",
    "Give me five tips for learning a new language.",
    "Write a short letter to a friend who has moved to another city.",
)


def quick_calibration(
    target: FrozenTarget,
    drafter: Drafter,
    fingerprints: dict[str, str],
    own: Calibration | None = None,
    classifier: Confidence | None = None,
) -> Calibration:
    """Measure a short calibration, and once more if other processes disturbed it.

    Args:
        fingerprints: of "target" and "drafter".
        own: a calibration from elsewhere, for the drafter's acceptance and confidence; ignored if it is of
            another target or drafter.
        classifier: C2T's classifier, whose thresholds are set.

    Raises:
        UserError: the target has too few positions, or answers the built-in prompts with one token.
    """
    if own is not None and any(own.made_for[name] != fingerprints[name] for name in fingerprints):
        own = None
    found = _measure(target, drafter, fingerprints, own)
    if is_disturbed(found):
        found = _measure(target, drafter, fingerprints, own)
    if classifier is not None:
        found.beta, found.expand = found.costs.worth(found.reached)
        found.top_k = WIDTH
        found.made_for["classifier"] = weights_hash(classifier)
    return found


def is_disturbed(found: Calibration) -> bool:
    """Return whether other processes took cores while this was measured."""
    return (found.machine["load"] or 0.0) > BUSY


def _measure(
    target: FrozenTarget, drafter: Drafter, fingerprints: dict[str, str], own: Calibration | None
) -> Calibration:
    load = OtherLoad()
    context = fitting_context(target, CONTEXT, VERIFIED)
    options = {"verified": VERIFIED, "expanded": EXPANDED, "seconds": CURVE_SECONDS}
    curves = measure_costs(target, drafter, WIDTH, (context,), ROUNDS, **options)
    policy, recorded = Eagle2Policy(WIDTH, max_depth=DEPTH, total=NODES), RecordedTrees()
    stats = _decode(target, drafter, TREE_SECONDS, lambda decoding: decoding.run(policy, recorded), 1)
    if own is not None:
        facts = {name: getattr(own, name) for name in FACTS}
    else:
        chains = JudgedChains(CHAIN, target.eos_token_ids)
        run = partial(Decoding.run, policy=chains, accept=chains, before_prompt=chains.next_prompt)
        _decode(target, drafter, CHAIN_SECONDS, run, 2)
        facts = drafter_facts(chains, recorded, stats, TREE)
    found = Calibration.of(target, fingerprints, curves, rate=1.0, reached=1.0, quick=True, **facts)
    found.step_overhead = step_overhead(found, stats, policy)
    found.rate = 1 / found.costs.verify(1)
    found.rate, found.reached = best_rate(recorded.trees, found.costs, WIDTH)
    found.machine["load"] = load.lap()
    return found


def _decode(
    target: FrozenTarget,
    drafter: Drafter,
    seconds: float,
    run: Callable[[Decoding], DecodeStats],
    halves: int,
) -> DecodeStats:
    """Decode the built-in prompts one by one, at least two, until the time limit.

    Args:
        halves: 2 for drafts of even and of odd prompts, which `judge` compares; 1 for drafts of any.

    Raises:
        UserError: the target answers with single tokens, which need no drafts.
    """
    begun, total, drafted = time.perf_counter(), DecodeStats(), set()
    for number, text in enumerate(PROMPTS):
        if number > 1 and len(drafted) >= halves and time.perf_counter() - begun > seconds:
            break
        if target.tokenizer.chat_template:
            ids = encode_prompt(target.tokenizer, [Message("user", text)])
        else:  # a base model continues the text
            ids = target.tokenizer(text)["input_ids"]
        ids = ids[: int(min(len(ids), target.positions - NEW_TOKENS - CHAIN))]
        one = run(Decoding(target, drafter, [ids], NEW_TOKENS, lambda: None))
        total += one
        drafted |= {number % 2} if one.new_tokens > 1 else set()
    if len(drafted) < halves:
        raise UserError(
            f"calibration: {target.name} must answer the built-in prompts with more than one token, got "
            "single ones; run drafttrain calibrate with --prompts FILE"
        )
    return total


def calibration_here(
    target: FrozenTarget,
    drafter: Drafter,
    fingerprints: dict[str, str],
    reason: str,
    own: Calibration | None = None,
    classifier: Confidence | None = None,
) -> Calibration:
    """Return the short calibration for this machine, from the user's cache if it is there.

    One that other processes disturbed is used as long as the machine is busy, and measured again once it is
    not. Progress and reason are printed to standard error.

    Args:
        reason: why it is needed, for the message.

    Raises:
        UserError: as `quick_calibration`.
    """
    depends = [machine_of(target), fingerprints, versions()]
    depends.append(None if classifier is None else weights_hash(classifier))
    depends.append(None if own is None else [getattr(own, name) for name in FACTS if name != "confidence"])
    depends.append(sources_hash())  # as the costs of the native forward may change
    depends.append("drafters in bytes, growth in one call")  # what made drafters faster
    path = cache_dir() / "calibrations" / f"{fingerprint(depends)}.json"
    if os.path.isfile(path):  # False, too, if the cache cannot be read
        try:
            kept = Calibration.load(path)
            if not is_disturbed(kept):
                return kept
            if check_quiet(refuse=False, seconds=LOOK):
                _say(f"{path} was disturbed; it is used as long as the machine is busy")
                return kept
            reason = f"{path} was disturbed, and now the machine is quiet"
        except UserError:
            reason = f"{path} is damaged"
    _say(f"{reason}; calibrating for this machine, once, which takes some seconds")
    begun = time.perf_counter()
    found = quick_calibration(target, drafter, fingerprints, own, classifier)
    done = f"calibrated in {time.perf_counter() - begun:.1f} s"
    if is_disturbed(found):
        done += f", while other processes took {found.machine['load']:.1f} cores"
    try:
        write_json(path, found.to_json())
    except OSError as error:
        _say(f"{done}; {path.parent}: cannot be written ({error.strerror}), so it is measured each time")
        return found
    _say(f"{done}, kept in {path}{' until the machine is quiet' if is_disturbed(found) else ''}")
    return found


def _say(line: str) -> None:
    print(f"calibration: {line}", file=sys.stderr, flush=True)
