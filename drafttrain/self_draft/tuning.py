"""`drafttrain calibrate --target MODEL`: Self-Draft's settings for a target and a machine, found by decoding.

Measures acceptance of candidates by features and seconds of a forward by tokens; with both, tries number and
length of branches and rates to beat. The paper leaves these to a grid search (its conclusion).
"""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from sklearn.linear_model import LogisticRegression

from drafttrain.calibration.calibration import machine_of
from drafttrain.calibration.judged import steps_rate
from drafttrain.calibration.timing import WARM_UP, measure_verification
from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import dtype_name
from drafttrain.self_draft.candidates import CandidateModel, Features
from drafttrain.self_draft.corpus_cache import DATA, FILE, CorpusCache
from drafttrain.self_draft.proposer import SelfDraftConfig
from drafttrain.self_draft.settings import SETTINGS, SelfDraftSettings, corpus_hash
from drafttrain.self_draft.tune_config import TuneConfig
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.machine import OtherLoad, check_quiet
from drafttrain.utils.progress import counted

CONTEXT = 256  # committed tokens before the timed forwards
ROUNDS = 15
WIDE = SelfDraftConfig(branches=2, budget=24, least=0.0)  # to record acceptance with


def tune_self_draft(
    config: TuneConfig, target: FrozenTarget, corpus: CorpusCache | None, out: str | os.PathLike
) -> SelfDraftSettings:
    """Find the fastest settings on this machine; write them to `self_draft.json` in `out`.

    Args:
        corpus: the n-gram cache to use; it is copied to `out` if it is elsewhere, as both are used from one
            folder.

    Raises:
        UserError: the prompts are unusable, `out` holds another n-gram cache, or the machine is busy and
            `busy` is "refuse".
    """
    chats = read_prompts(config.prompts.path, config.prompts.limit)
    console = Console()
    if warning := check_quiet(refuse=config.busy == "refuse"):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    ids = [chat.token_ids(target.tokenizer) for chat in chats]
    for chat, prompt_ids in zip(chats, ids):
        which = f"{config.prompts.path}: prompt {chat.id}"
        target.check_length(prompt_ids, config.max_new_tokens, which)
    out = Path(out)
    try:  # before minutes are spent
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made a folder ({error.strerror}); name another") from None
    if (out / FILE).exists() and corpus_hash(CorpusCache.open(out)) != corpus_hash(corpus):
        raise UserError(f"{out}: must hold no other n-gram cache; name another folder, or that cache")
    found = SelfDraftSettings(
        machine=machine_of(target),
        dtype=dtype_name(target.dtype),
        made_for=target.fingerprint,
        corpus=corpus_hash(corpus),
    )
    runs = 1 + len(config.branches) * len(config.strictness)
    load = OtherLoad()
    with counted("tuning", WARM_UP + ROUNDS + runs * len(ids), console=console) as step:
        found.verify = measure_verification(target, CONTEXT, ROUNDS, step).cost()
        wide = replace(found, config=WIDE).proposer(target, corpus)
        stats = DecodeStats()
        for prompt_ids in ids:
            stats += decode_all(target, wide, [prompt_ids], config.max_new_tokens)[1]
            step()
        if stats.new_tokens == stats.prompts:  # the prefills give one token each
            raise UserError(
                f"{config.prompts.path}: must give answers of two tokens or more, got none; give others"
            )
        found.odds = fit_odds(wide.judged)
        settings = []
        for branches, length in config.branches:
            for strictness in config.strictness:
                tried = replace(
                    SelfDraftConfig(budget=WIDE.budget, least=0.0),
                    branches=branches,
                    branch_length=length,
                    gram=min(SelfDraftConfig.gram, length),
                )
                settings.append(replace(found, config=tried, rate=strictness * steps_rate(stats)))
        totals = [DecodeStats() for _ in settings]
        for number, prompt_ids in enumerate(ids):
            for turn in range(len(settings)):  # interleaved, so that a machine that slows down slows all
                i = (turn + number) % len(settings)
                proposer = settings[i].proposer(target, corpus)
                totals[i] += decode_all(target, proposer, [prompt_ids], config.max_new_tokens)[1]
                step()
    found.machine["load"] = load.lap()
    rates = [total.tokens_per_second for total in totals]
    best = settings[max(range(len(rates)), key=rates.__getitem__)]
    best.tried = [
        {
            "branches": one.config.branches,
            "branch_length": one.config.branch_length,
            "rate": round(one.rate, 2),
            "tokens_per_second": round(total.tokens_per_second, 2),
            "accept_len": round(total.accept_len, 3),
            "verify_tokens_per_step": round(total.verify_per_step, 2),
        }
        for one, total in zip(settings, totals)
    ]
    if corpus is not None and not (out / FILE).exists():
        for name in (DATA, FILE):  # the header last: without it there is no cache
            shutil.copyfile(corpus.path / name, out / name)
    best.save(out)
    for row in best.tried:
        console.print(json.dumps(row), highlight=False, soft_wrap=True)
    console.print(
        f"fastest: {best.config.branches} branches of {best.config.branch_length}, rate {best.rate:.1f}; "
        f"written to {Path(out) / SETTINGS}",
        highlight=False,
        soft_wrap=True,
    )
    return best


def fit_odds(judged: Counter[tuple[Features, bool]]) -> CandidateModel:
    """Fit the logistic model of judged candidates; the default one if all were accepted or all rejected."""
    judged = {one: number for one, number in judged.items() if one[0][0][1]}  # only offers of caches
    if len({accepted for _, accepted in judged}) < 2:
        return CandidateModel()
    rows = [{offer: 1 for offer in evidence} | {len(evidence): 1} for evidence, _ in judged]
    names = sorted({name for row in rows for name in row}, key=str)
    place = {name: i for i, name in enumerate(names)}
    x = np.zeros((len(rows), len(names)))  # [judged, offers and numbers of offers]
    for i, row in enumerate(rows):
        x[i, [place[name] for name in row]] = 1
    accepted = [int(accepted) for _, accepted in judged]
    model = LogisticRegression(max_iter=1000).fit(x, accepted, sample_weight=list(judged.values()))
    weights = dict(zip(names, model.coef_[0].tolist()))
    return CandidateModel(
        float(model.intercept_[0]),
        {name: weight for name, weight in weights.items() if isinstance(name, tuple)},
        {name: weight for name, weight in weights.items() if isinstance(name, int)},
    )
