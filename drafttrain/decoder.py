"""`SpeculativeDecoder`: text in, text out, faster than the target alone and with the same output.

decoder = SpeculativeDecoder.from_pretrained("path/to/bundle")
print(decoder.generate("Why is the sky blue?").text)
"""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedModel

from drafttrain.inference.decode import decode
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, Proposer, TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.inference.text import OutputText, Prompt, encode, is_batch, shown
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.policies import drafter_policy
from drafttrain.utils.errors import UserError

GREEDY = SamplingParams()


@dataclass
class Piece:
    """The output of one target forward for one prompt.

    Attributes:
        text: the new text; a character whose bytes are incomplete waits for a later piece.
        token_ids: the emitted tokens.
        drafted: how many of them, the first ones, were drafted.
        finish_reason: "stop" or "length" in the last piece, else None.
        prompt: index of the prompt it belongs to.
    """

    text: str
    token_ids: list[int]
    drafted: int
    finish_reason: str | None
    prompt: int = 0


@dataclass
class Result:
    """The whole output for one prompt.

    Attributes:
        text: the new text, without special tokens.
        token_ids: the new tokens, including a stop token.
        finish_reason: "stop" or "length"; with an `error`, "not_finite" or "".
        stats: counts and times.
        error: why decoding of this prompt failed; only set by `generate_many`, other methods raise.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: DecodeStats
    error: str | None = None


class SpeculativeDecoder:
    """Text generation with a target and a proposer, which drafts for it.

    Args:
        target: a FrozenTarget with a tokenizer, tapped at the blocks that the proposer reads.
        proposer: a drafter with a growth policy, or Self-Draft.
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer):
        if not isinstance(target, FrozenTarget):
            raise UserError(f"target: must be a FrozenTarget, got {shown(target)}; call from_pretrained")
        self.target, self.proposer = copy.copy(target), proposer  # no other drafter taps the copy

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        target: FrozenTarget | PreTrainedModel | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tree: str | TreePolicy | None = None,
        calibration: str | None = None,
        ngrams: str | None = None,
    ) -> "SpeculativeDecoder":
        """Load a bundle and its target.

        If the tree needs costs and the bundle's calibration is missing or of another machine or dtype, this
        machine is calibrated first. Where that is not possible, a warning is issued.

        Args:
            path: a bundle's folder or its Hub id.
            target: folder or Hub id, or a model loaded with transformers, whose modules are used unchanged:
                slower on a CPU than one that is loaded here. None: the one that the bundle names.
            dtype: "auto" (the fastest here), "bfloat16" or "float32", for a target that is loaded here.
            device: where to load it.
            tree: the growth policy of drafts, such as `ChainPolicy(4)`, or its name, such as `chain:length=4`
                or `timed` (`trees/parse.py`). None: the bundle's recommended one.
            calibration: `calibration.json` for `pct`, `timed` and `c2t`. None: the bundle's own.
            ngrams: folder of an n-gram cache, for `ngram` and `ngram+…`. None: the bundle's own.

        Raises:
            UserError: no bundle there, or it does not fit the target.
        """
        from drafttrain.bundle import load_bundle

        for name, place in {"path": path, "calibration": calibration or "", "ngrams": ngrams or ""}.items():
            if not isinstance(place, str | os.PathLike):
                raise UserError(f"{name}: must be a folder or Hub id, got {shown(place)}")
        if not isinstance(tree, str | TreePolicy | None):
            remedy = "give ChainPolicy(4) or chain:length=4"
            raise UserError(f"tree: must be a policy or its name, got {shown(tree)}; {remedy}")
        if target is not None:
            from drafttrain.inference.given import as_target

            target = as_target(target)
        bundle = load_bundle(path, target, dtype, device, calibration, ngrams=ngrams)
        tree = tree or bundle.tree
        if ngrams is not None and (isinstance(tree, TreePolicy) or drafter_policy(tree) == tree):
            raise UserError(f"ngrams: must come with tree ngram or ngram+POLICY, got tree {tree}; name one")
        if isinstance(tree, TreePolicy):
            return cls(bundle.target, TreeProposer(bundle.drafter, tree))
        decoder = cls(bundle.target, bundle.proposer(tree))
        if warning := bundle.warning(tree):
            warnings.warn(warning, stacklevel=2)
        return decoder

    @classmethod
    def self_draft(
        cls,
        target: FrozenTarget | PreTrainedModel | str,
        ngrams: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> "SpeculativeDecoder":
        """Load a target that drafts for itself, without a drafter.

        Args:
            target: a target, or its folder or Hub id.
            ngrams: folder that `build-ngrams` or `calibrate` wrote. None: n-grams of the context only.

        Raises:
            UserError: no such target or cache, or they do not fit each other.
        """
        from drafttrain.inference.given import as_target
        from drafttrain.self_draft.settings import load_self_draft
        from drafttrain.target_lm.loading import load_for_decoding

        target = as_target(target)
        if not isinstance(target, FrozenTarget):
            target = load_for_decoding(target, dtype=dtype, device=device)
        proposer = load_self_draft(target, ngrams)
        if proposer.warning:
            warnings.warn(proposer.warning, stacklevel=2)
        return cls(target, proposer)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        **draws: float | int | None,
    ) -> Result | list[Result]:
        """Decode with drafts until a stop token, a stop string or the limit.

        Args:
            prompt: a text, a chat, or token ids; or a list of such prompts, which are decoded together, each
                with the same output as alone.
            sampling: how tokens are drawn; greedily by default. The output is that of `autoregressive` with
                the same parameters; sampled with a `drawn` tree, another text of the same distribution.
            stop: strings that end the text and are not part of it.
            draws: temperature, top_p, top_k, seed, max_tokens, instead of `sampling`.

        Returns:
            a result, or one for each prompt of a list. Their statistics are shared: those of all prompts
            together, without the tokens after a stop string.

        Raises:
            UserError: a prompt has another type, is empty or too long for the target, or is a chat for a
                target without a chat template; a parameter is unknown or out of range.
        """
        return self._run(prompt, max_new_tokens, self.proposer, _sampling(sampling, draws), stop)

    def autoregressive(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        **draws: float | int | None,
    ) -> Result | list[Result]:
        """Decode without drafts, in the same loop: the baseline for speed."""
        return self._run(prompt, max_new_tokens, NoProposer(), _sampling(sampling, draws), stop)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 256,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: str | Sequence[str] = (),
        scheduler: "SchedulerConfig | None" = None,  # noqa: F821
        prefixes: bool = True,
        **draws: float | int | None,
    ) -> list[Result]:
        """Decode many prompts with SEED's scheduling, each with its own random draws. To sample one prompt
        several times, pass it several times with different seeds.

        Args:
            sampling: parameters for all prompts, or one for each.
            scheduler: settings of the scheduler. With a limit of at most `scheduler.short` tokens (16),
                prompts get no drafts.
            prefixes: prefill a prefix that prompts share only once; False: prefill each prompt in full.

        Returns:
            results in the order of the prompts; their statistics are shared.

        Raises:
            UserError: as `generate`.
        """
        from drafttrain.reasoning.config import SchedulerConfig  # only for many prompts
        from drafttrain.reasoning.scheduler import ScheduledDecoder

        if not isinstance(sampling, Sequence):
            sampling = _sampling(sampling, draws)
        elif draws:
            raise UserError(f"{next(iter(draws))}: must not be given beside sampling; put it in there")
        stored = {} if prefixes else {"prefixes": 0}
        decoder = ScheduledDecoder(self.target, self.proposer, scheduler or SchedulerConfig(), **stored)
        outputs = decoder.generate(prompts, sampling, _limit(max_new_tokens), _strings(stop))
        return [
            Result(one.text, list(one.token_ids), one.finish_reason, decoder.stats, one.error)
            for one in outputs
        ]

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int = 256,
        stats: DecodeStats | None = None,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        **draws: float | int | None,
    ) -> Iterator[Piece]:
        """Decode as `generate` does, and yield the tokens of each target forward once they are accepted.

        Args:
            stats: receives counts and times.
        """
        prompts = list(prompt) if is_batch(prompt) else [prompt]
        return self._pieces(prompts, max_new_tokens, self.proposer, stats, _sampling(sampling, draws), stop)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids. A text becomes one user turn of the chat template, if there is one.

        Raises:
            UserError: it is no prompt, an empty text, or has ids outside the vocabulary.
        """
        return encode(self.target, prompt)

    def _run(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        proposer: Proposer,
        sampling: SamplingParams,
        stop: str | Sequence[str],
    ) -> Result | list[Result]:
        stats, prompts = DecodeStats(), list(prompt) if is_batch(prompt) else [prompt]
        results = [Result("", [], "", stats) for _ in prompts]
        for piece in self._pieces(prompts, max_new_tokens, proposer, stats, sampling, stop):
            result = results[piece.prompt]
            result.text += piece.text
            result.token_ids += piece.token_ids
            result.finish_reason = piece.finish_reason or ""
        return results if is_batch(prompt) else results[0]

    def _pieces(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        proposer: Proposer,
        stats: DecodeStats | None,
        sampling: SamplingParams,
        stop: str | Sequence[str],
    ) -> Iterator[Piece]:
        ids = [self.encode(prompt) for prompt in prompts]
        strings, max_new_tokens = _strings(stop), _limit(max_new_tokens)
        stats, draws = stats or DecodeStats(), [sampling] * len(ids)
        texts = [OutputText(self.target.tokenizer, strings, stats) for _ in ids]
        for step in decode(self.target, proposer, ids, max_new_tokens, stats=stats, sampling=draws):
            for row in step.rows:
                text, tokens = texts[row.number].push(row)
                drafted = min(len(tokens), row.drafted)
                yield Piece(text, tokens, drafted, row.finish_reason, row.number)


def _strings(stop: object) -> Sequence[str]:
    strings = [stop] if isinstance(stop, str) else stop or ()
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise UserError(f"stop: must be a text or a list of texts, got {shown(stop)}")
    return strings


def _limit(max_new_tokens: object) -> int:
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise UserError(f"max_new_tokens: must be a whole number >= 1, got {max_new_tokens!r}")
    return max_new_tokens


def _sampling(sampling: SamplingParams | None, draws: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters, given as an object or one by one.

    Raises:
        UserError: both are given, or one is unknown or out of range.
    """
    known = [field.name for field in fields(SamplingParams)]
    if unknown := [name for name in draws if name not in known]:
        remedy = "write max_new_tokens" if unknown[0] == "max_length" else "leave it out"
        raise UserError(f"{unknown[0]}: must be one of {', '.join(known)}; {remedy}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling: must be SamplingParams, got {shown(sampling)}")
    if sampling is not None and draws:
        raise UserError(f"{next(iter(draws))}: must not be given beside sampling; put it in there")
    return SamplingParams(**draws) if sampling is None else sampling
