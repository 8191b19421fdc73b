"""`SpeculativeDecoder`: text in, text out, faster than the target alone and with the same output.

decoder = SpeculativeDecoder.from_pretrained("path/to/bundle")
print(decoder.generate("Why is the sky blue?").text)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from drafttrain.corpus.chat import encode_prompt
from drafttrain.corpus.conversation import Message
from drafttrain.errors import UserError
from drafttrain.inference.acceptance import AcceptSampled, accept_greedy
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.inference.sampling import SamplingParams
from drafttrain.inference.stats import DecodeStats
from drafttrain.target.frozen import FrozenTarget

# A user's words, a chat ({"role", "content"} dicts or Messages), or token ids that are complete as they are.
Prompt = str | Sequence[Message | Mapping] | Sequence[int]
GREEDY = SamplingParams()


@dataclass
class Piece:
    """What one target forward emitted.

    Attributes:
        text: what can be printed so far; a character whose bytes are incomplete waits for a later piece.
        token_ids: tokens emitted in this step.
        drafted: how many of them, the first ones, were drafted.
        finish_reason: "stop" or "length" in the last piece, else None.
    """

    text: str
    token_ids: list[int]
    drafted: int
    finish_reason: str | None


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
        target: FrozenTarget | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tree: str | None = None,
        calibration: str | None = None,
        ngrams: str | None = None,
    ) -> "SpeculativeDecoder":
        """Loads a bundle, and the target that it was made for.

        Args:
            path: a bundle's folder or its Hub id.
            target: the target or where it lies. None: what the bundle names.
            dtype: "auto" (the fastest here), "bfloat16" or "float32", for a target that is loaded here.
            device: where to load it.
            tree: how drafts grow, such as `chain:length=4` or `timed` (`trees/named.py`). None: what the
                bundle recommends.
            calibration: `calibration.json` for `pct`, `timed` and `c2t`. None: the bundle's own.
            ngrams: folder of an n-gram cache, for `ngram` and `ngram+…`. None: the bundle's own.

        Raises:
            UserError: no bundle there, or it does not fit the target.
        """
        from drafttrain.export.bundle import load_bundle  # export reads files; inference only takes objects

        bundle = load_bundle(
            path, target=target, dtype=dtype, device=device, calibration=calibration, ngrams=ngrams
        )
        decoder = cls(bundle.target, bundle.proposer(tree))
        decoder.warning = bundle.warning(tree)
        return decoder

    @classmethod
    def self_draft(
        cls,
        target: FrozenTarget | str,
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
        from drafttrain.export.self_draft import load_self_draft
        from drafttrain.target.loading import load_for_decoding

        if not isinstance(target, FrozenTarget):
            target = load_for_decoding(target, dtype=dtype, device=device)
        decoder = cls(target, load_self_draft(target, ngrams))
        decoder.warning = decoder.proposer.warning
        return decoder

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> Result:
        """Decodes with drafts until a stop token, a stop string or the limit.

        Args:
            sampling: how tokens are drawn; greedily by default. The output is that of `autoregressive` with
                the same parameters.
            stop: strings that end the text; they and what follows are left out of it.

        Raises:
            UserError: the prompt is empty, has no chat template to go through, or is too long for the target.
        """
        return self._run(prompt, max_new_tokens, self.proposer, sampling, stop)

    def autoregressive(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> Result:
        """The same without drafts, in the same loop: what speed is compared with."""
        return self._run(prompt, max_new_tokens, NoProposer(), sampling, stop)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        stats: DecodeStats | None = None,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Like `generate`, but yields what each target forward brings as soon as it is accepted.

        Args:
            stats: counts and times are added to it.
        """
        return self._pieces(prompt, max_new_tokens, self.proposer, stats, sampling, stop)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Words go through the chat template as one user turn if the tokenizer has
        one."""
        tokenizer = self.target.tokenizer
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return list(prompt)
        if not isinstance(prompt, str) and not all(isinstance(turn, Message | Mapping) for turn in prompt):
            raise UserError(
                "a prompt is one text, one chat (dicts with role and content) or one list of token ids; "
                "call once for each of several prompts"
            )
        if tokenizer is None:
            raise UserError(f"{self.target.name} has no tokenizer: pass token ids instead of text")
        if not isinstance(prompt, str):
            return encode_prompt(tokenizer, prompt)
        if tokenizer.chat_template:
            return encode_prompt(tokenizer, [Message("user", prompt)])
        return tokenizer(prompt)["input_ids"]

    def _run(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        proposer: Proposer,
        sampling: SamplingParams,
        stop: Sequence[str],
    ) -> Result:
        stats = DecodeStats()
        pieces = list(self._pieces(prompt, max_new_tokens, proposer, stats, sampling, stop))
        token_ids = [token for piece in pieces for token in piece.token_ids]
        return Result("".join(piece.text for piece in pieces), token_ids, pieces[-1].finish_reason, stats)

    def _pieces(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        proposer: Proposer,
        stats: DecodeStats | None,
        sampling: SamplingParams,
        stop: Sequence[str],
    ) -> Iterator[Piece]:
        text, stops = TextStream(self.target.tokenizer), StopStrings(stop)
        rule = AcceptSampled([sampling]) if sampling.temperature else accept_greedy
        ids = [self.encode(prompt)]
        for step in decode(self.target, proposer, ids, max_new_tokens, accept=rule, stats=stats):
            tokens, reason, new_text = step.tokens[0], step.finish_reason[0], ""
            for i, token in enumerate(tokens, 1):
                new_text += stops.push(text.push([token]))
                if stops.found:
                    yield Piece(new_text, tokens[:i], min(i, step.drafted[0]), "stop")
                    return
            if reason:
                new_text += stops.push(text.flush())
                new_text, reason = (new_text, "stop") if stops.found else (new_text + stops.flush(), reason)
            yield Piece(new_text, tokens, step.drafted[0], reason)


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
        # tokens without text of their own leave the window as it is: the next one needs a neighbour with text
        self._given, self._waiting = self._waiting if text else self._given + self._waiting, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
