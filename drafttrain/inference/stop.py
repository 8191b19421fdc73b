"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from drafttrain.inference.decode import Row
from drafttrain.inference.stats import DecodeStats
from drafttrain.inference.text import TextStream
from drafttrain.utils.errors import UserError


class StopStrings:
    """Filter that passes text through up to the first complete stop string and holds back what may begin one.

    Args:
        stats: receives the counts of an output that a string ends; None: the caller counts it.

    Raises:
        UserError: a string is empty, or there is no tokenizer, and so no text.
    """

    def __init__(
        self,
        strings: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
        stats: DecodeStats | None = None,
    ):
        if not all(strings):
            raise UserError("stop: must not hold an empty text; leave it out")
        if tokenizer is None:
            raise UserError("stop: must be left out for a target without a tokenizer; its output has no text")
        self.strings, self.stats, self.found = list(strings), stats, False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text and return what can no longer begin a stop string; set `found` when one is complete."""
        for character in text:
            self._held += character  # one by one: the first complete string must not depend on pieces
            if complete := [string for string in self.strings if self._held.endswith(string)]:
                self.found = True
                given, self._held = self._held[: -max(map(len, complete))], ""
                return given
        keep = max((self._overlap(string) for string in self.strings), default=0)
        at = len(self._held) - keep
        given, self._held = self._held[:at], self._held[at:]
        return given

    def flush(self) -> str:
        """Return the text still held back, at the end of the output."""
        given, self._held = self._held, ""
        return given

    def _overlap(self, string: str) -> int:
        """Return the length of the longest suffix of the held text with which the string begins."""
        longest = min(len(string) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if string.startswith(self._held[-n:])), 0)

    def read(self, stream: TextStream, row: Row) -> tuple[str, list[int]]:
        """Return the text that a row's last forward adds, and its tokens; a stop string ends the row."""
        text = ""
        for i, token in enumerate(row.tokens, 1):
            text += self.push(stream.push([token]))
            if self.found:
                if self.stats is not None:
                    count_end(row, i, self.stats)
                row.finish_reason = "stop"
                return text, row.tokens[:i]
        if row.finish_reason:
            text += self.push(stream.flush())
            if self.found:
                row.finish_reason = "stop"
            else:
                text += self.flush()
        return text, row.tokens


def count_end(row: Row, kept: int, stats: DecodeStats) -> None:
    """Count an output that a stop string has ended. Take the tokens after it out of the statistics: the step
    that emitted them has counted them, and their repetition too if the output ended in that step.

    Args:
        kept: tokens of the last forward that are part of the output.
    """
    if row.finish_reason is not None:
        whole = DecodeStats()
        whole.count_repetition(row.output, row.step_sizes)
        stats.repeated_tokens -= whole.repeated_tokens
        stats.fresh_tokens -= whole.fresh_tokens
        stats.fresh_steps -= whole.fresh_steps
    if cut := len(row.tokens) - kept:
        del row.output[-cut:]
        row.step_sizes[-1] = kept
        stats.new_tokens -= cut
        accepted = min(kept, row.drafted)
        for depth in range(accepted, row.drafted):
            stats.granted[depth] -= 1
        for depth in range(accepted, row.drafted + row.rejected):
            stats.offered[depth] -= 1
    stats.count_repetition(row.output, row.step_sizes)
