"""The context cache of Self-Draft: n-grams of the current text, the newest first.

Every n-gram of the prompt, of the accepted text, of the target's branches and of its predictions after
rejected drafts is added under its prefixes of 1 … `longest` tokens. A prefix of one token is the paper's key;
longer ones distinguish its entries by the text before. Prefixes and the followers of each are bounded, the
least recently used are dropped first (Self-Draft paper, "Self-Draft Model Forward").
"""

from collections import OrderedDict
from collections.abc import Sequence

PROMPT, ACCEPTED, BRANCH, RECYCLED = "prompt", "accepted", "branch", "recycled"


class ContextCache:
    """Bounded cache of the n-grams of one sequence.

    Args:
        longest: tokens of the longest prefix.
        followers: followers kept for each prefix, at most.
        prefixes: prefixes kept, at most.
    """

    def __init__(self, longest: int = 4, followers: int = 8, prefixes: int = 50_000):
        self.longest, self.followers, self.prefixes = longest, followers, prefixes
        # prefix: {follower: source}, newest last in both; not a plain dict, which finds its oldest key slowly
        self._entries: OrderedDict[tuple[int, ...], dict[int, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: Sequence[int], source: str, known: int = 1) -> None:
        """Add every n-gram of consecutive tokens.

        Args:
            source: label of these n-grams, which `after` returns.
            known: number of first tokens that only serve as prefixes: n-grams that end in them are known.
        """
        for end in range(max(known, 1), len(tokens)):
            self.add_after(tokens[max(0, end - self.longest) : end], tokens[end : end + 1], source)

    def add_after(self, text: Sequence[int], tokens: Sequence[int], source: str) -> None:
        """Add tokens, each as a follower of a text; the last one counts as the newest."""
        text = tuple(text[-self.longest :])
        for start in range(len(text)):
            found = self._entries.setdefault(text[start:], {})
            self._entries.move_to_end(text[start:])
            for token in tokens:
                found.pop(token, None)
                found[token] = source
            while len(found) > self.followers:
                del found[next(iter(found))]
        while len(self._entries) > self.prefixes:
            self._entries.popitem(last=False)

    def after(self, suffix: Sequence[int]) -> tuple[int, list[tuple[int, str]]]:
        """Return the followers of the longest known suffix of a text.

        Args:
            suffix: the text so far, or its end.

        Returns:
            length of that suffix (0 for none), and (token, source) pairs, the newest first.
        """
        for length in range(min(len(suffix), self.longest), 0, -1):
            if (found := self._entries.get(tuple(suffix[-length:]))) is not None:
                return length, list(reversed(found.items()))
        return 0, []
