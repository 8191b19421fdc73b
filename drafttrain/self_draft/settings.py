"""Tuned settings of Self-Draft, and loading it from a folder with settings, an n-gram cache, or both."""

import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.kernels.difference import machine_difference
from drafttrain.kernels.machine import dtype_name
from drafttrain.self_draft.candidates import CandidateModel
from drafttrain.self_draft.corpus_cache import FILE as CORPUS
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json

SETTINGS = "self_draft.json"
FORMAT_VERSION = 1


@dataclass
class SelfDraftSettings:
    """Result of `tune_self_draft`; `SelfDraft` documents the attributes that are not listed here.

    Attributes:
        machine: from `machine_of`.
        made_for: fingerprint of the target.
        corpus: checksum of the n-gram cache; empty without one.
        tried: settings that were tried, with their tokens per second.
    """

    config: SelfDraftConfig = field(default_factory=SelfDraftConfig)
    odds: CandidateModel = field(default_factory=CandidateModel)
    verify: CostCurve | None = None
    rate: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    made_for: str = ""
    corpus: str = ""
    tried: list[dict[str, Any]] = field(default_factory=list)

    def proposer(self, target: FrozenTarget, corpus: CorpusCache | None) -> SelfDraft:
        """Return Self-Draft with these settings."""
        special = target.tokenizer.all_special_ids if target.tokenizer is not None else ()
        found = SelfDraft(self.config, target.vocab_size, special, corpus, self.odds, self.verify, self.rate)
        found.warning = self.foreign(target, corpus)
        return found

    def foreign(self, target: FrozenTarget, corpus: CorpusCache | None) -> str | None:
        """Return a warning, in one line, if the settings were tuned on another machine, in another dtype, for
        another target or with another n-gram cache; else None."""
        if not self.machine:  # not tuned at all
            return None
        from drafttrain.calibration.calibration import machine_of  # for tuned settings alone

        difference = machine_difference(self.machine, machine_of(target))
        pairs = [("dtype", self.dtype, dtype_name(target.dtype))]
        pairs.append(("target", self.made_for, target.fingerprint))
        pairs.append(("n-gram cache", self.corpus[:16] or "none", corpus_hash(corpus)[:16] or "none"))
        for name, tuned, found in pairs:
            if difference is None and tuned != found:
                difference = f"{name} {tuned}, and this is {found}"
        place = "--out DIR" if corpus is None else "--ngrams DIR"
        return difference and (
            f"Self-Draft was tuned for {difference}: trees may be of a wrong size; run drafttrain "
            f"calibrate --target MODEL {place} --prompts FILE"
        )

    def numbers(self) -> list[float]:
        """Return all numbers of the candidate model and the costs, which have to be finite."""
        model, verify = self.odds, self.verify
        found = [model.bias, model.rate, *model.weights.values(), *model.agreement.values(), self.rate]
        return found if verify is None else [*found, *verify.sizes, *verify.seconds]

    def save(self, folder: str | os.PathLike) -> None:
        """Write `self_draft.json`."""
        value = {"format_version": FORMAT_VERSION, **asdict(self)}
        value["odds"]["weights"] = [[*offer, weight] for offer, weight in sorted(self.odds.weights.items())]
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / SETTINGS, value)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "SelfDraftSettings":
        """Read `self_draft.json`.

        Raises:
            UserError: it is damaged or of another format.
        """
        path = Path(folder) / SETTINGS
        value = read_json(path)
        try:
            if value.pop("format_version") != FORMAT_VERSION:
                raise ValueError
            odds = value["odds"]
            odds["weights"] = {(source, m, rank): weight for source, m, rank, weight in odds["weights"]}
            odds["agreement"] = {int(number): weight for number, weight in odds["agreement"].items()}
            value["odds"] = CandidateModel(**odds)
            value["config"] = SelfDraftConfig(**value["config"])
            value["rate"] = float(value["rate"])
            if value["verify"] is not None:
                value["verify"] = CostCurve(*(tuple(value["verify"][name]) for name in ("sizes", "seconds")))
                value["verify"](1)
            found = cls(**value)
            if not all(isinstance(getattr(found, name), str) for name in ("dtype", "made_for", "corpus")):
                raise ValueError
            if not isinstance(found.machine, dict) or not all(map(_is_number, found.numbers())):
                raise ValueError
            return found
        except (AttributeError, IndexError, KeyError, TypeError, UserError, ValueError):
            raise UserError(
                f"{path}: damaged, or of another version; write it again with drafttrain calibrate"
            ) from None


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def holds_self_draft(folder: str | os.PathLike) -> bool:
    """Return whether a folder has a cache or settings in it."""
    return any((Path(folder) / name).is_file() for name in (CORPUS, SETTINGS))


def load_self_draft(target: FrozenTarget, folder: str | os.PathLike | None = None) -> SelfDraft:
    """Load Self-Draft for a target.

    Args:
        folder: output of `build-ngrams`, of `calibrate`, or of both. None: n-grams of the current text alone,
            with default settings.

    Raises:
        UserError: the folder has neither, one is damaged, or the cache is of another tokenizer.
    """
    if folder is None:
        return SelfDraftSettings().proposer(target, None)
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"ngrams: must be a folder, got {folder!r}")
    if not holds_self_draft(folder):
        raise UserError(
            f"{folder}: neither an n-gram cache nor settings of Self-Draft; make one with drafttrain "
            "build-ngrams or drafttrain calibrate"
        )
    settings = SelfDraftSettings.load(folder) if (Path(folder) / SETTINGS).is_file() else SelfDraftSettings()
    return settings.proposer(target, open_corpus(target, folder))


def open_corpus(target: FrozenTarget, folder: str | os.PathLike) -> CorpusCache | None:
    """Open the n-gram cache in a folder, if there is one.

    Raises:
        UserError: it is damaged, or of another tokenizer.
    """
    if not (Path(folder) / CORPUS).is_file():
        return None
    return CorpusCache.open(folder, target.tokenizer_hash)


def corpus_hash(corpus: CorpusCache | None) -> str:
    """Return the checksum of an n-gram cache; empty without one."""
    return "" if corpus is None else corpus.header["sha256"]
