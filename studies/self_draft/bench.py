"""Decode with configurations of Self-Draft, and the frame of its studies. Nothing is tuned."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import Prompt
from drafttrain.inference.decode import decode_all
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import describe_machine
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.self_draft.settings import SETTINGS, SelfDraftSettings, open_corpus
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import write_json
from studies.arguments import run

TARGET = "smollm2-135m-instruct"
NAMES = ("target", "ngrams", "dtype", "limit", "new_tokens")
FULL = SelfDraftConfig(branches=6, branch_length=6, budget=12)


class Bench:
    """A target and its n-gram cache, to decode with configurations of Self-Draft."""

    def __init__(self, target: FrozenTarget, ngrams: str):
        self.target, self.corpus = target, open_corpus(target, ngrams)
        if self.corpus is None:
            raise UserError(f"{ngrams}: no n-gram cache here; build one with drafttrain build-ngrams")
        has_settings = (Path(ngrams) / SETTINGS).exists()
        self.settings = SelfDraftSettings.load(ngrams) if has_settings else SelfDraftSettings()

    def proposer(self, config: SelfDraftConfig, corpus: bool = True) -> SelfDraft:
        settings = replace(self.settings, config=config, verify=None)
        return settings.proposer(self.target, self.corpus if corpus else None)

    def decode(self, proposer: SelfDraft, prompts: Sequence[Prompt], new_tokens: int) -> DecodeStats:
        stats = DecodeStats()
        for prompt in prompts:
            ids = prompt.token_ids(self.target.tokenizer)
            stats += decode_all(self.target, proposer, [ids], new_tokens)[1]
        return stats


def run_study(
    study: Callable[[Bench, Namespace], dict[str, Any]],
    doc: str,
    argv: Sequence[str] | None,
    names: Sequence[str],
) -> int:
    """Run a study and write what it found, and the machine, to --out; return the exit status.

    Args:
        names: arguments besides `NAMES`.
    """

    def measure(args: Namespace) -> None:
        target = load_for_decoding(args.target, dtype=args.dtype)
        target.tap([])
        found = study(Bench(target, args.ngrams), args)
        write_json(args.out / f"{study.__name__}.json", found)
        machine = describe_machine(target.device, target.dtype)
        write_json(args.out / f"{study.__name__}_machine.json", machine)

    return run(measure, doc, argv, (*NAMES, *names), "runs/self_draft", target=TARGET)
