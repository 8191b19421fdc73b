"""`SpeculativeDecoder`: text in, text out, faster than the target alone and with the same output.

decoder = SpeculativeDecoder.from_pretrained("path/to/bundle")
print(decoder.generate("Why is the sky blue?").text)
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.conversation import Message
from drafttrain.inference.acceptance import AcceptMatching, accept_greedy
from drafttrain.inference.decode import Row, decode
from drafttrain.inference.proposer import NoProposer, Proposer, TreeProposer
from drafttrain.inference.sampling import SamplingParams
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.interface import TreePolicy
from drafttrain.utils.errors import UserError
from drafttrain.utils.threads import limit_threads

# A user's words, a chat ({"role", "content"} dicts or Messages), or token ids that are complete as they are.
Prompt = str | Sequence[Message | Mapping] | Sequence[int] | torch.Tensor
GREEDY = SamplingParams()


@dataclass
class Piece:
    """What one target forward emitted.

    Attributes:
        text: what can be printed so far; a character whose bytes are incomplete waits for a later piece.
        token_ids: tokens emitted in this step.
        drafted: how many of them, the first ones, were drafted.
        finish_reason: "stop" or "length" in the last piece, else None.
        prompt: number of its prompt, where several are decoded.
    """

    text: str
    token_ids: list[int]
    drafted: int
    finish_reason: str | None
    prompt: int = 0


@dataclass
class Result:
    """A finished output.

    Attributes:
        text: the new text, without special tokens.
        token_ids: the new tokens, a stop token included.
        finish_reason: "stop" or "length".
        stats: counts and times.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: DecodeStats


class SpeculativeDecoder:
    """A target and what drafts for it.

    Args:
        target: a FrozenTarget with a tokenizer, tapped at the blocks that the proposer reads.
        proposer: what drafts.
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer):
        self.target, self.proposer = target, proposer
        self.warning: str | None = None  # why drafts may be slower than they could be

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
        """Loads a bundle, and the target that it was made for.

        Args:
            path: a bundle's folder or its Hub id.
            target: where it is, or a model loaded with transformers, whose modules are used as they are:
                slower on a CPU than one that is loaded here. None: what the bundle names.
            dtype: "auto" (the fastest here), "bfloat16" or "float32", for a target that is loaded here.
            device: where to load it.
            tree: how drafts grow: a policy such as `ChainPolicy(4)`, or its name, such as `chain:length=4` or
                `timed` (`trees/parse.py`). None: what the bundle recommends.
            calibration: `calibration.json` for `pct`, `timed` and `c2t`. None: the bundle's own.
            ngrams: folder of an n-gram cache, for `ngram` and `ngram+…`. None: the bundle's own.

        Raises:
            UserError: no bundle there, or it does not fit the target.
        """
        from drafttrain.bundle import load_bundle

        _check_tree(tree)
        target = None if target is None else _as_target(target)
        bundle = load_bundle(
            path, target=target, dtype=dtype, device=device, calibration=calibration, ngrams=ngrams
        )
        if isinstance(tree, TreePolicy):
            return cls(bundle.target, TreeProposer(bundle.drafter, tree))
        decoder = cls(bundle.target, bundle.proposer(tree))
        decoder.warning = bundle.warning(tree)
        return decoder

    @classmethod
    def self_draft(
        cls,
        target: FrozenTarget | PreTrainedModel | str,
        ngrams: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
    ) -> "SpeculativeDecoder":
        """A target that drafts for itself, without any drafter.

        Args:
            target: it, or where it lies.
            ngrams: folder of `build-ngrams` or `tune-self-draft`. None: n-grams of the text at hand alone.

        Raises:
            UserError: no such target or cache, or they do not fit each other.
        """
        from drafttrain.self_draft.settings import load_self_draft
        from drafttrain.target_lm.loading import load_for_decoding

        target = _as_target(target)
        if not isinstance(target, FrozenTarget):
            target = load_for_decoding(target, dtype=dtype, device=device)
        decoder = cls(target, load_self_draft(target, ngrams))
        decoder.warning = decoder.proposer.warning
        return decoder

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
                as if alone.
            sampling: how tokens are drawn; greedily by default. The output is that of `autoregressive` with
                the same parameters.
            stop: strings that end the text; they and what follows are left out of it.
            draws: temperature, top_p, top_k, seed, instead of `sampling`.

        Returns:
            a result, or one for each prompt of a list; their statistics are those of all of them together,
            with what was decoded after a stop string while others went on.

        Raises:
            UserError: a prompt is empty, has no chat template to go through, or is too long for the target; a
                parameter is not known or out of range.
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
        """Decode without drafts, in the same loop: what speed is compared with."""
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
            stats: counts and times are added to it.
        """
        prompts = list(prompt) if _is_batch(prompt) else [prompt]
        return self._pieces(prompts, max_new_tokens, self.proposer, stats, _sampling(sampling, draws), stop)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Words go through the chat template as one user turn if the tokenizer has
        one."""
        tokenizer = self.target.tokenizer
        if isinstance(prompt, torch.Tensor):
            if prompt.ndim != 1 and len(prompt) != 1:
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
            raise UserError(f"{self.target.name} has no tokenizer: pass token ids instead of text")
        if not isinstance(prompt, str):
            for turn in prompt:
                if isinstance(turn, Mapping) and not {"role", "content"} <= turn.keys():
                    raise UserError(f"prompt: a turn must have role and content, got {_shown(dict(turn))}")
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
        strings = [stop] if isinstance(stop, str) else list(stop or ())
        if wrong := [string for string in strings if not isinstance(string, str)]:
            raise UserError(f"stop: must be a text or a list of texts, got {wrong[0]!r}")
        texts = [(TextStream(self.target.tokenizer), StopStrings(strings)) for _ in ids]
        rule = AcceptMatching([sampling] * len(ids)) if sampling.temperature else accept_greedy
        for step in decode(self.target, proposer, ids, max_new_tokens, accept=rule, stats=stats):
            for row in step.rows:
                piece = _piece(row, *texts[row.number])
                row.finish_reason = piece.finish_reason  # a stop string ends it as well
                yield piece


def _piece(row: Row, text: "TextStream", stops: "StopStrings") -> Piece:
    """Return what a step emitted for a prompt, up to a stop string."""
    new_text, reason = "", row.finish_reason
    for i, token in enumerate(row.tokens, 1):
        new_text += stops.push(text.push([token]))
        if stops.found:
            return Piece(new_text, row.tokens[:i], min(i, row.drafted), "stop", row.number)
    if reason:
        new_text += stops.push(text.flush())
        new_text, reason = (new_text, "stop") if stops.found else (new_text + stops.flush(), reason)
    return Piece(new_text, row.tokens, row.drafted, reason, row.number)


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
        UserError: it is no target, does not say where its tokenizer is, or does not verify trees.
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
        UserError: both, an unknown one, or one that is out of range.
    """
    known = [field.name for field in fields(SamplingParams)]
    if unknown := [name for name in draws if name not in known]:
        raise UserError(f"{unknown[0]}: must be one of {', '.join(known)}; leave it out")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise UserError(f"sampling: must be SamplingParams, got {_shown(sampling)}")
    if sampling is not None and draws:
        raise UserError(f"{next(iter(draws))}: must not be given beside sampling; put it in there")
    return SamplingParams(**draws) if sampling is None else sampling


class StopStrings:
    """Passes text through up to the string that is complete first, and holds back what may become one.

    Args:
        strings: none of them empty.

    Raises:
        UserError: one is.
    """

    def __init__(self, strings: Sequence[str]):
        if not all(strings):
            raise UserError("a stop string is empty, which every text ends with: leave it out")
        self.strings, self.found = list(strings), False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that no stop string can begin in any more; sets `found` when one is complete."""
        for character in text if self.strings else "":
            self._held += character  # one by one: which string is complete first must not depend on pieces
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
        """What is still held back, when no more text follows."""
        given, self._held = self._held, ""
        return given

    def _overlap(self, string: str) -> int:
        """Length of the longest end of the held text that the string begins with."""
        longest = min(len(string) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if string.startswith(self._held[-n:])), 0)


class TextStream:
    """Turns tokens into text as they come; what it gives adds up to decoding all of them at once.

    A token may hold part of a character, and what a token looks like may depend on the one before it. So each
    new token is decoded together with those of the last text given out, and while the result ends in a
    replacement character nothing is given out.

    Args:
        tokenizer: None gives no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        self._given: list[int] = []  # tokens of the last text given out
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        return "".join(self._next(token) for token in token_ids)

    def flush(self) -> str:
        """The text of what still waits, an unfinished character included."""
        return self._give()

    def _next(self, token: int) -> str:
        self._waiting.append(token)
        return "" if self._decode(self._given + self._waiting).endswith("\ufffd") else self._give()

    def _give(self) -> str:
        text = self._decode(self._given + self._waiting)[len(self._decode(self._given)) :]
        # tokens without text of their own leave the window unchanged: the next one needs one with text
        self._given, self._waiting = self._waiting if text else self._given + self._waiting, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
