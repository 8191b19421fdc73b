"""The context cache of Self-Draft: what followed what in the text at hand, the newest first.

Every n-gram of the prompt, of the accepted text, of the target's branches and of what it said behind rejected
drafts is put in, under its prefixes of 1 … `longest` tokens. A prefix of one token is the paper's key; the
longer ones tell which of many entries continues the present text. Prefixes and the followers of each are
bounded, the least recently used go first (Self-Draft paper, "Self-Draft Model Forward").
"""

from collections.abc import Sequence

PROMPT, ACCEPTED, BRANCH, RECYCLED = "prompt", "accepted", "branch", "recycled"


class ContextCache:
    """N-grams of one sequence.

    Args:
        longest: tokens of the longest prefix.
        followers: kept for each prefix.
        prefixes: kept in all.
    """

    def __init__(self, longest: int = 4, followers: int = 8, prefixes: int = 100_000):
        self.longest, self.followers, self.prefixes = longest, followers, prefixes
        self._entries: dict[tuple[int, ...], dict[int, str]] = {}  # follower: source; the newest last

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: Sequence[int], source: str, known: int = 1) -> None:
        """Puts in every n-gram of consecutive tokens.

        Args:
            source: where they come from, told by `after`.
            known: the first so many tokens are only prefixes: n-grams that end in them are in already.
        """
        for end in range(max(known, 1), len(tokens)):
            for start in range(max(0, end - self.longest), end):
                self._note(tuple(tokens[start:end]), tokens[end], source)
        while len(self._entries) > self.prefixes:
            del self._entries[next(iter(self._entries))]

    def _note(self, prefix: tuple[int, ...], token: int, source: str) -> None:
        found = self._entries.pop(prefix, None) or {}
        found.pop(token, None)
        found[token] = source
        if len(found) > self.followers:
            del found[next(iter(found))]
        self._entries[prefix] = found

    def after(self, suffix: Sequence[int], longest: int | None = None) -> tuple[int, list[tuple[int, str]]]:
        """What followed the longest end of a text that is known here.

        Args:
            suffix: the text so far, or its end.
            longest: look up no longer ends than this.

        Returns:
            length of that end (0 if none is known), and (token, source) pairs, the newest first.
        """
        most = min(len(suffix), self.longest if longest is None else longest)
        for length in range(most, 0, -1):
            if (found := self._entries.get(tuple(suffix[-length:]))) is not None:
                return length, list(reversed(found.items()))
        return 0, []
