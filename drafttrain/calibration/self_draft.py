"""`drafttrain tune-self-draft`: what Self-Draft needs to know of a target and a machine, found by decoding.

How likely candidates are accepted, by evidence; what a forward costs, by tokens; and with both, how many
branches, how long, and how strict a rate is fastest. The paper leaves that to a grid search (its conclusion).
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from sklearn.linear_model import LogisticRegression

from drafttrain.calibration.timing import WARM_UP, measure_verification
from drafttrain.errors import UserError
from drafttrain.evaluation.config import PromptSet
from drafttrain.evaluation.machine import check_quiet, describe_machine
from drafttrain.evaluation.measure import check_length
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.files import read_json, write_json
from drafttrain.inference.decode import decode_all
from drafttrain.inference.self_draft import SelfDraft, SelfDraftConfig
from drafttrain.inference.stats import DecodeStats
from drafttrain.ngrams.candidates import Evidence, Odds
from drafttrain.ngrams.corpus_cache import CorpusCache
from drafttrain.progress import counted
from drafttrain.target.frozen import FrozenTarget
from drafttrain.trees.costs import CostCurve

FILE = "self_draft.json"
FORMAT_VERSION = 1
CONTEXT = 256  # committed tokens behind which forwards are timed
ROUNDS = 15
WIDE = SelfDraftConfig(branches=2, budget=24, least=0.0)  # with which candidates are judged
BRANCHES = ((0, 6), (1, 4), (2, 5), (6, 6))  # N and L that are tried, the paper's last
STRICTNESS = (0.5, 0.8, 1.2, 1.8)  # times the rate reached, tried as the rate to beat


@dataclass
class TuneConfig:
    """How Self-Draft is tuned.

    Attributes:
        prompts: that no benchmark uses.
        max_new_tokens: of each.
        branches: N and L that are tried.
        strictness: rates that are tried, in terms of the rate reached.
        busy: on a machine that is busy: "refuse" or "warn".
    """

    prompts: PromptSet
    max_new_tokens: int = 96
    branches: tuple[tuple[int, int], ...] = BRANCHES
    strictness: tuple[float, ...] = STRICTNESS
    busy: str = "warn"


@dataclass
class SelfDraftSettings:
    """What `tune-self-draft` found; see `SelfDraft` for most of it.

    Attributes:
        machine: as `describe_machine` has it.
        made_for: fingerprint of the target.
        corpus: checksum of the n-gram cache; empty without one.
        tried: settings and tokens per second of all that was tried.
    """

    config: SelfDraftConfig = field(default_factory=SelfDraftConfig)
    odds: Odds = field(default_factory=Odds)
    verify: CostCurve | None = None
    rate: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    made_for: str = ""
    corpus: str = ""
    tried: list[dict[str, Any]] = field(default_factory=list)

    def proposer(self, target: FrozenTarget, corpus: CorpusCache | None) -> SelfDraft:
        """Self-Draft with these settings."""
        special = target.tokenizer.all_special_ids if target.tokenizer is not None else ()
        found = SelfDraft(self.config, target.vocab_size, special, corpus, self.odds, self.verify, self.rate)
        found.warning = self.foreign(target, corpus)
        return found

    def foreign(self, target: FrozenTarget, corpus: CorpusCache | None) -> str | None:
        """Says so in one line if they were found on another machine, in another type, for another target or
        with another n-gram cache than these."""
        if not self.machine:  # not tuned at all
            return None
        here = describe_machine(target.device)
        pairs = [(name, self.machine.get(name), here.get(name)) for name in ("processor", "gpu", "threads")]
        pairs.append(("dtype", self.dtype, str(target.dtype).removeprefix("torch.")))
        pairs.append(("target", self.made_for, target.fingerprint))
        pairs.append(("n-gram cache", self.corpus[:16] or "none", _corpus_hash(corpus)[:16] or "none"))
        for name, tuned, found in pairs:
            if tuned != found:
                return (
                    f"Self-Draft was tuned for {name} {tuned}, and this is {found}: trees may be of a wrong "
                    "size; run drafttrain tune-self-draft"
                )
        return None

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `self_draft.json`."""
        value = {"format_version": FORMAT_VERSION, **asdict(self)}
        value["odds"]["weights"] = [[*offer, weight] for offer, weight in sorted(self.odds.weights.items())]
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / FILE, value)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "SelfDraftSettings":
        """Reads what `save` wrote.

        Raises:
            UserError: it is damaged or of another format.
        """
        path = Path(folder) / FILE
        value = read_json(path)
        try:
            if value.pop("format_version") != FORMAT_VERSION:
                raise ValueError
            odds = value["odds"]
            odds["weights"] = {(source, m, rank): weight for source, m, rank, weight in odds["weights"]}
            odds["agreement"] = {int(number): weight for number, weight in odds["agreement"].items()}
            value["odds"] = Odds(**odds)
            value["config"] = SelfDraftConfig(**value["config"])
            value["rate"] = float(value["rate"])
            if value["verify"] is not None:
                value["verify"] = CostCurve(*(tuple(value["verify"][name]) for name in ("sizes", "seconds")))
                value["verify"](1)
            return cls(**value)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise UserError(
                f"{path}: damaged, or of another version; write it again with drafttrain tune-self-draft"
            ) from None


def tune_self_draft(
    config: TuneConfig, target: FrozenTarget, corpus: CorpusCache | None, out: str | os.PathLike
) -> SelfDraftSettings:
    """Finds the settings that are fastest on this machine; writes them to `self_draft.json` in `out`.

    Args:
        corpus: the n-gram cache that is to be used.

    Raises:
        UserError: the prompts are unusable, or the machine is busy and `busy` says refuse.
    """
    chats = read_prompts(config.prompts.path, config.prompts.limit)
    console = Console()
    if warning := check_quiet(refuse=config.busy == "refuse"):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    ids = [chat.token_ids(target.tokenizer) for chat in chats]
    for chat, prompt_ids in zip(chats, ids):
        which = f"{config.prompts.path}: prompt {chat.id}"
        check_length(target, prompt_ids, config.max_new_tokens, which)
    out = Path(out)
    try:  # before minutes are spent
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made a folder ({error.strerror}); name another") from None
    found = SelfDraftSettings(
        machine=describe_machine(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        made_for=target.fingerprint,
        corpus=_corpus_hash(corpus),
    )
    runs = 1 + len(config.branches) * len(config.strictness)
    with counted("tuning", WARM_UP + ROUNDS + runs * len(ids), console=console) as step:
        found.verify = measure_verification(target, CONTEXT, ROUNDS, step).cost()
        wide = replace(found, config=WIDE).proposer(target, corpus)
        stats = DecodeStats()
        for prompt_ids in ids:
            stats += decode_all(target, wide, [prompt_ids], config.max_new_tokens)[1]
            step()
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
                rate = strictness * (stats.new_tokens - stats.prompts) / _steps_seconds(stats)
                settings.append(replace(found, config=tried, rate=rate))
        totals = [DecodeStats() for _ in settings]
        for number, prompt_ids in enumerate(ids):
            for turn in range(len(settings)):  # by turns, so that a machine that slows down slows all
                i = (turn + number) % len(settings)
                proposer = settings[i].proposer(target, corpus)
                totals[i] += decode_all(target, proposer, [prompt_ids], config.max_new_tokens)[1]
                step()
    rates = [total.tokens_per_second for total in totals]
    best = settings[max(range(len(rates)), key=rates.__getitem__)]
    best.tried = [
        {
            "branches": one.config.branches,
            "branch_length": one.config.branch_length,
            "rate": round(one.rate, 2),
            "tokens_per_second": round(total.tokens_per_second, 2),
            "accept_len": round(total.accept_len, 3),
            "verify_tokens_per_step": round(total.verify_tokens / max(total.steps, 1), 2),
        }
        for one, total in zip(settings, totals)
    ]
    best.save(out)
    for row in best.tried:
        console.print(json.dumps(row), highlight=False, soft_wrap=True)
    console.print(
        f"fastest: {best.config.branches} branches of {best.config.branch_length}, rate {best.rate:.1f}; "
        f"written to {Path(out) / FILE}",
        highlight=False,
        soft_wrap=True,
    )
    return best


def fit_odds(judged: Counter[tuple[Evidence, bool]]) -> Odds:
    """The logistic model of candidates that were judged; `Odds` as it is if they were all accepted or all
    refused."""
    judged = {one: number for one, number in judged.items() if one[0][0][1]}  # branches matched nothing
    if len({accepted for _, accepted in judged}) < 2:
        return Odds()
    rows = [{offer: 1 for offer in evidence} | {len(evidence): 1} for evidence, _ in judged]
    names = sorted({name for row in rows for name in row}, key=str)
    place = {name: i for i, name in enumerate(names)}
    x = np.zeros((len(rows), len(names)))  # [judged, offers and numbers of offers]
    for i, row in enumerate(rows):
        x[i, [place[name] for name in row]] = 1
    accepted = [int(accepted) for _, accepted in judged]
    model = LogisticRegression(max_iter=1000).fit(x, accepted, sample_weight=list(judged.values()))
    weights = dict(zip(names, model.coef_[0].tolist()))
    return Odds(
        float(model.intercept_[0]),
        {name: weight for name, weight in weights.items() if isinstance(name, tuple)},
        {name: weight for name, weight in weights.items() if isinstance(name, int)},
    )


def _corpus_hash(corpus: CorpusCache | None) -> str:
    return "" if corpus is None else corpus.header["sha256"]


def _steps_seconds(stats: DecodeStats) -> float:
    return max(stats.seconds - stats.prefill_seconds, 1e-9)
