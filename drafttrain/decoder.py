"""`SpeculativeDecoder`: text in, text out, faster than the target alone and with the same output.

decoder = SpeculativeDecoder.from_pretrained("path/to/bundle")
print(decoder.generate("Why is the sky blue?").text)
"""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.conversation import Message
from drafttrain.inference.acceptance import AcceptMatching, accept_greedy
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import NoProposer, Proposer, TreeProposer
from drafttrain.inference.sampling import SamplingParams
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.interface import TreePolicy
from drafttrain.utils.errors import UserError
from drafttrain.utils.threads import limit_threads

# A user's text, a chat ({"role", "content"} dicts or Messages), or token ids, which are used unchanged.
Prompt = str | Sequence[Message | Mapping] | Sequence[int] | torch.Tensor
GREEDY = SamplingParams()
LENGTHS = ("max_tokens", "max_length")  # as vLLM and transformers call the limit


@dataclass
class Piece:
    """The output of one target forward for one prompt.

    Attributes:
        text: the new text; a character whose bytes are incomplete waits for a later piece.
        token_ids: the emitted tokens.
        drafted: how many of them, the first ones, were drafted.
        finish_reason: "stop" or "length" in the last piece, else None.
        prompt: index of its prompt, where several are decoded.
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
        finish_reason: "stop" or "length".
        stats: counts and times.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: DecodeStats


class SpeculativeDecoder:
    """Text generation with a target and a proposer, which drafts for it.

    Args:
        target: a FrozenTarget with a tokenizer, tapped at the blocks that the proposer reads.
        proposer: a drafter with a growth policy, or Self-Draft.
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer):
        if not isinstance(target, FrozenTarget):
            raise UserError(
                f"target: must be a FrozenTarget, got {_shown(target)}; call "
                "SpeculativeDecoder.from_pretrained"
            )
        self.target, self.proposer = target, proposer

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

        Trees that need costs are calibrated here first, where the bundle's own calibration is of another
        machine or dtype. Where that is not possible, a warning is issued.

        Args:
            path: a bundle's folder or its Hub id.
            target: folder or Hub id, or a model loaded with transformers, whose modules are used unchanged:
                slower on a CPU than one that is loaded here. None: the one that the bundle names.
            dtype: "auto" (the fastest here), "bfloat16" or "float32", for a target that is loaded here.
            device: where to load it.
            tree: the growth policy of drafts, such as `ChainPolicy(4)`, or its name, such as `chain:length=4`
                or `timed` (`trees/parse.py`). None: the one that the bundle recommends.
            calibration: `calibration.json` for `pct`, `timed` and `c2t`. None: the bundle's own.
            ngrams: folder of an n-gram cache, for `ngram` and `ngram+…`. None: the bundle's own.

        Raises:
            UserError: no bundle there, or it does not fit the target.
        """
        from drafttrain.bundle import load_bundle

        places = {"path": path, "calibration": calibration or "", "ngrams": ngrams or ""}
        for name, place in places.items():
            if not isinstance(place, str | os.PathLike):
                raise UserError(f"{name}: must be a folder or Hub id, got {_shown(place)}")
        _check_tree(tree)
        target = None if target is None else _as_target(target)
        bundle = load_bundle(
            path, target=target, dtype=dtype, device=device, calibration=calibration, ngrams=ngrams
        )
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
            ngrams: folder of `build-ngrams` or `tune-self-draft`. None: n-grams of the context alone.

        Raises:
            UserError: no such target or cache, or they do not fit each other.
        """
        from drafttrain.self_draft.settings import load_self_draft
        from drafttrain.target_lm.loading import load_for_decoding

        target = _as_target(target)
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
                the same parameters.
            stop: strings that end the text and are not part of it.
            draws: temperature, top_p, top_k, seed, instead of `sampling`.

        Returns:
            a result, or one for each prompt of a list. Their statistics are shared: those of all prompts
            together, including tokens decoded after a stop string while other prompts went on.

        Raises:
            UserError: a prompt is empty, has no chat template to go through, or is too long for the target; a
                parameter is unknown or out of range.
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
        prompts = list(prompt) if _is_batch(prompt) else [prompt]
        return self._pieces(prompts, max_new_tokens, self.proposer, stats, _sampling(sampling, draws), stop)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids. A text becomes one user turn of the chat template, if there is one.

        Raises:
            UserError: it is no prompt, is empty, or has ids outside the vocabulary.
        """
        tokenizer = self.target.tokenizer
        if isinstance(prompt, torch.Tensor):
            if prompt.ndim == 0 or prompt.numel() != prompt.shape[-1]:
                raise UserError(f"prompt: must be one row of token ids, got shape {list(prompt.shape)}")
            prompt = prompt.reshape(-1).tolist()
        if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
            raise _no_prompt(prompt)
        if isinstance(prompt, str) and not prompt:
            raise UserError("prompt: must not be empty; give it some text")
        if not isinstance(prompt, str) and all(type(token) is int for token in prompt):
            if outside := [token for token in prompt if not 0 <= token < self.target.vocab_size]:
                raise UserError(
                    f"prompt: token ids must be in 0..{self.target.vocab_size - 1}, got {outside[0]}"
                )
            return list(prompt)
        if not isinstance(prompt, str) and not all(isinstance(turn, Message | Mapping) for turn in prompt):
            raise _no_prompt(prompt)
        if tokenizer is None:
            name = self.target.name
            raise UserError(f"prompt: must be token ids, as {name} has no tokenizer, got {_shown(prompt)}")
        if not isinstance(prompt, str):
            for turn in prompt:
                fields = dict(turn) if isinstance(turn, Mapping) else vars(turn)
                if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
                    raise UserError(f"prompt: a turn's role and content must be texts, got {_shown(fields)}")
            return encode_prompt(tokenizer, prompt)
        if tokenizer.chat_template:
            return encode_prompt(tokenizer, [Message("user", prompt)])
        return tokenizer(prompt)["input_ids"]

    def _run(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        proposer: Proposer,
        sampling: SamplingParams,
        stop: str | Sequence[str],
    ) -> Result | list[Result]:
        stats, prompts = DecodeStats(), list(prompt) if _is_batch(prompt) else [prompt]
        results = [Result("", [], "", stats) for _ in prompts]
        for piece in self._pieces(prompts, max_new_tokens, proposer, stats, sampling, stop):
            result = results[piece.prompt]
            result.text += piece.text
            result.token_ids += piece.token_ids
            result.finish_reason = piece.finish_reason or ""
        return results if _is_batch(prompt) else results[0]

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
        strings = [stop] if isinstance(stop, str) else stop or ()
        if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
            raise UserError(f"stop: must be a text or a list of texts, got {_shown(stop)}")
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise UserError(f"max_new_tokens: must be a whole number >= 1, got {max_new_tokens!r}")
        texts = [(TextStream(self.target.tokenizer), StopStrings(strings)) for _ in ids]
        rule = AcceptMatching([sampling] * len(ids)) if sampling.temperature else accept_greedy
        running = set(range(len(ids)))
        for step in decode(self.target, proposer, ids, max_new_tokens, accept=rule, stats=stats):
            for number in sorted(running):
                tokens, reason = step.tokens[number], step.finish_reason[number]
                if tokens or reason:
                    piece = _piece(number, tokens, step.drafted[number], reason, *texts[number])
                    running -= {number} if piece.finish_reason else set()
                    yield piece
            if not running:  # with stop strings the loop does not know
                return


def _piece(
    number: int,
    tokens: list[int],
    drafted: int,
    reason: str | None,
    text: "TextStream",
    stops: "StopStrings",
) -> Piece:
    """Return the output of a step for a prompt, up to a stop string."""
    new_text = ""
    for i, token in enumerate(tokens, 1):
        new_text += stops.push(text.push([token]))
        if stops.found:
            return Piece(new_text, tokens[:i], min(i, drafted), "stop", number)
    if reason:
        new_text += stops.push(text.flush())
        new_text, reason = (new_text, "stop") if stops.found else (new_text + stops.flush(), reason)
    return Piece(new_text, tokens, drafted, reason, number)


def _is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is a list of prompts: of texts, of chats, or of token ids."""
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 2 and len(prompt) > 1
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Sequence) or not len(prompt):
        return False
    return all(isinstance(one, str | list | tuple | torch.Tensor) for one in prompt)


def _check_tree(tree: object) -> None:
    if not isinstance(tree, str | TreePolicy | None):
        raise UserError(
            f"tree: must be a policy or its name, got {_shown(tree)}; give ChainPolicy(4) or chain:length=4"
        )


def _as_target(target: object) -> FrozenTarget | str:
    """Return a target as `load_bundle` takes it; a model loaded with transformers is checked to verify trees.

    Raises:
        UserError: it is no target, has no name to find its tokenizer by, or does not verify trees.
    """
    from drafttrain.target_lm.loading import load_tokenizer
    from drafttrain.target_lm.tree_check import check_tree_support

    if isinstance(target, FrozenTarget):
        return target
    if isinstance(target, str | os.PathLike):
        return str(target)
    if not isinstance(target, PreTrainedModel):
        raise UserError(f"target: must be a folder, a Hub id or a loaded model, got {_shown(target)}")
    if not target.name_or_path:
        raise UserError("target: must know where its tokenizer is, got a model without name_or_path; set it")
    frozen = FrozenTarget(target, load_tokenizer(target.name_or_path), target.name_or_path)
    limit_threads()
    check_tree_support(frozen)
    return frozen


def _no_prompt(prompt: object) -> UserError:
    return UserError(
        "prompt: must be a text, a chat (dicts with role and content), token ids, or a list of such prompts, "
        f"got {_shown(prompt)}"
    )


def _shown(prompt: object) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sampling(sampling: SamplingParams | None, draws: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters given as an object or one by one.

    Raises:
        UserError: both are given, or one is unknown or out of range.
    """
    known = [field.name for field in fields(SamplingParams)]
    if unknown := [name for name in draws if name not in known]:
        remedy = "write max_new_tokens" if unknown[0] in LENGTHS else "leave it out"
        raise UserError(f"{unknown[0]}: must be one of {', '.join(known)}; {remedy}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling: must be SamplingParams, got {_shown(sampling)}")
    if sampling is not None and draws:
        raise UserError(f"{next(iter(draws))}: must not be given beside sampling; put it in there")
    return SamplingParams(**draws) if sampling is None else sampling


class StopStrings:
    """Pass text through up to the stop string that is complete first; hold back a possible beginning of one.

    Raises:
        UserError: a string is empty.
    """

    def __init__(self, strings: Sequence[str]):
        if not all(strings):
            raise UserError("stop: must not hold an empty text; leave it out")
        self.strings, self.found = list(strings), False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text and return what can no longer begin a stop string; set `found` when one is complete."""
        for character in text if self.strings else "":
            self._held += character  # one by one: the first complete string must not depend on pieces
            if complete := [string for string in self.strings if self._held.endswith(string)]:
                self.found = True
                given, self._held = self._held[: -max(map(len, complete))], ""
                return given
        self._held = self._held if self.strings else text
        keep = max((self._overlap(string) for string in self.strings), default=0)
        at = len(self._held) - keep
        given, self._held = self._held[:at], self._held[at:]
        return given

    def flush(self) -> str:
        """Return the text still held back, when no more follows."""
        given, self._held = self._held, ""
        return given

    def _overlap(self, string: str) -> int:
        """Return the length of the longest end of the held text that the string begins with."""
        longest = min(len(string) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if string.startswith(self._held[-n:])), 0)


class TextStream:
    """Decode tokens to text as they arrive; the pieces add up to the text of all tokens decoded at once.

    A token may hold part of a character, and its text may depend on the token before it. So each new token is
    decoded together with those of the last piece, and no text is returned while it ends in a replacement
    character.

    Args:
        tokenizer: None gives no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        self._given: list[int] = []  # tokens of the last piece
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        return "".join(self._next(token) for token in token_ids)

    def flush(self) -> str:
        """Return the text of the remaining tokens, including an incomplete character."""
        return self._give()

    def _next(self, token: int) -> str:
        self._waiting.append(token)
        return "" if self._decode(self._given + self._waiting).endswith("\ufffd") else self._give()

    def _give(self) -> str:
        text = self._decode(self._given + self._waiting)[len(self._decode(self._given)) :]
        # tokens without text of their own do not move the window: the next one is decoded after one with text
        self._given, self._waiting = self._waiting if text else self._given + self._waiting, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
