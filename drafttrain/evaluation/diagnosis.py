"""Find why drafts are rejected, by depth, kind of token and position, and what would raise accept_len.

All numbers come from a greedy decode with chains. A gain is an estimate: the accept_len of a chain whose
acceptance rate at each depth is that of the drafts that the cause does not affect, minus that of all drafts.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from drafttrain.evaluation.drafts import Draft

POSITIONS, CONTEXTS = (16, 32, 64, 128, 256), (64, 128, 256, 512, 1024, 2048)  # bounds of groups
PROBABILITIES, RANKS, TIMES = (0.2, 0.4, 0.6, 0.8), (1, 2, 4, 8, 16), (1, 4, 16)
FEW = 25  # drafts that a group needs to be judged
SURE = 3.0  # standard errors between two rates that are called different
CHILDREN = (2, 3, 5)  # children of each node, in the trees whose accept_len is estimated
LENGTHS = (8, 12)  # drafts of the longer chains whose accept_len is estimated
NUMBERS, POINTS, SPACE = "number", "punctuation", "space or line"
START, INSIDE = "start of a word", "inside a word"
# a line of code outside of a fence, in the languages most common in answers; x = 5 may be mathematics
CODE = re.compile(
    r"(def|class|for|while|if|elif|else|try|except|with|switch|function|public|private|static)\b.*[:{;]$"
    r"|from [\w.]+ import |import [\w.]+( as \w+)?$|return\b|#include\b|.*[=(].*;$|.*[{}]$"
    r"|(\t| {4})\s*[^\s\d*•-]"
)


@dataclass
class Group:
    """Drafts with something in common: their number, the share accepted, and their mean probability."""

    name: str
    drafts: int
    accepted: float
    probability: float


@dataclass
class Change:
    """A way to raise accept_len.

    Attributes:
        cause: a short name.
        why: what was observed.
        remedy: what to do.
        gain: estimated, in accept_len; None: not known.
        is_certain: whether the cause was found in files or by decoding, not estimated; such come first.
    """

    cause: str
    why: str
    remedy: str
    gain: float | None
    is_certain: bool = False


@dataclass
class Diagnosis:
    """Statistics of the drafts of a decode, and the changes that would raise accept_len.

    Attributes:
        accept_len: of the decode; if not known, of chains with the drafts' acceptance rate at each depth.
        kl, outside: means over the drafts, as in `Draft`.
        tables: groups of drafts, by the name of what they are grouped by.
        trees: estimated accept_len of a tree, by the number of children of each node on the path.
        chains: estimated accept_len of chains longer than the decoded ones, by their number of drafts.
        vocabulary_gain: estimated gain of accept_len if all tokens were in the draft vocabulary.
        changes: most helpful first.
    """

    accept_len: float
    prompts: int
    drafts: int
    kl: float
    outside: float
    tables: dict[str, list[Group]]
    trees: dict[int, float]
    chains: dict[int, float]
    vocabulary_gain: float
    changes: list[Change] = field(default_factory=list)


def diagnose_drafts(
    drafts: Sequence[Draft], max_length: int | None = None, accept_len: float | None = None
) -> Diagnosis:
    """Diagnose a decode from its drafts alone.

    Args:
        max_length: tokens of the longest text in training; None: not known.
        accept_len: of the decode; None: not known.
    """
    times = Counter(one.wanted for one in drafts)
    tables = {
        "depth": grouped(drafts, lambda one: str(one.depth)),
        "token": grouped(drafts, lambda one: kind_of_text(one.text)),
        "after": grouped(drafts, lambda one: "punctuation" if _ends_a_clause(one.before) else "other text"),
        "occurrences of the token": grouped(drafts, lambda one: _count(times[one.wanted], TIMES)),
        "in code": grouped(drafts, lambda one: "code" if is_in_code(one.before) else "other text"),
        "position in the answer": grouped(drafts, lambda one: _bin(one.position, POSITIONS)),
        "tokens before it": grouped(drafts, lambda one: _bin(one.context, CONTEXTS)),
        "probability of the draft": grouped(drafts, lambda one: _bin(one.probability, PROBABILITIES)),
        "rank of the target's token": grouped(drafts, _rank),
    }
    base = chain_len(drafts)
    trees = {n: chain_len(drafts, lambda one, n=n: one.rank is not None and one.rank < n) for n in CHILDREN}
    decoded = max((one.depth for one in drafts), default=0)
    chains = {n: chain_len(drafts, length=n) for n in LENGTHS if n > decoded}
    vocabulary_gain = chain_len(drafts, like=lambda one: one.rank is not None) - base
    found = [
        _vocabulary(drafts, vocabulary_gain),
        _later_depths(drafts, base),
        _later_positions(drafts, base),
        _longer_contexts(drafts, base, max_length),
        _weakest_kind(drafts, base),
    ]
    return Diagnosis(
        base if accept_len is None else accept_len,
        len({one.prompt for one in drafts}),
        len(drafts),
        sum(one.kl for one in drafts) / max(len(drafts), 1),
        sum(one.outside for one in drafts) / max(len(drafts), 1),
        tables,
        trees,
        chains,
        vocabulary_gain,
        ranked([one for one in found if one is not None]),
    )


def ranked(changes: Iterable[Change]) -> list[Change]:
    """Return changes, certain ones first, then by their gain."""
    return sorted(changes, key=lambda one: (not one.is_certain, -(one.gain or 0.0)))


def rate(drafts: Sequence[Draft], accepts: Callable[[Draft], bool] = lambda one: one.accepted) -> float:
    """Return the acceptance rate of drafts."""
    return sum(map(accepts, drafts)) / max(len(drafts), 1)


def chain_len(
    drafts: Sequence[Draft],
    accepts: Callable[[Draft], bool] = lambda one: one.accepted,
    like: Callable[[Draft], bool] = lambda one: True,
    length: int | None = None,
) -> float:
    """Return the accept_len of chains that have these drafts' acceptance rate at each depth.

    Args:
        accepts: whether a draft counts as accepted.
        like: selects the drafts that give the rate of a depth; if they are few, all drafts there do.
        length: drafts of a chain; beyond the decoded depths, the rate of the last depth with enough drafts
            holds. None: as many as were decoded.
    """
    decoded = max((one.depth for one in drafts), default=0)
    total, reached, last = 1.0, 1.0, 0.0
    for depth in range(1, (decoded if length is None else length) + 1):
        own = [one for one in drafts if one.depth == depth]
        chosen = [one for one in own if like(one)]
        own_rate = rate(chosen if len(chosen) >= FEW else own, accepts)
        if len(own) >= FEW:
            last = own_rate
        reached *= own_rate if depth <= decoded else last
        total += reached
    return total


def grouped(drafts: Sequence[Draft], key: Callable[[Draft], str]) -> list[Group]:
    """Group drafts by a key. Groups are sorted by the number that their name begins with; those without one
    follow, by name."""
    groups: dict[str, list[Draft]] = {}
    for draft in drafts:
        groups.setdefault(key(draft), []).append(draft)
    names = sorted(groups, key=lambda name: (float(name.split()[0]) if name[0].isdigit() else math.inf, name))
    return [
        Group(
            name,
            len(own := groups[name]),
            rate(own),
            sum(one.probability for one in own) / len(own),
        )
        for name in names
    ]


def differ(some: Sequence[Draft], others: Sequence[Draft]) -> bool:
    """Return whether the acceptance rate of `some` is more than `SURE` standard errors below `others`'."""
    if min(len(some), len(others)) < FEW:
        return False
    low, high = rate(some), rate(others)
    mean = rate([*some, *others])
    error = math.sqrt(mean * (1 - mean) * (1 / len(some) + 1 / len(others)))
    return high - low > SURE * error


def kind_of_text(text: str) -> str:
    """Return the kind of a token's text."""
    bare = text.strip()
    if not bare:
        return SPACE
    if any(letter.isdigit() for letter in bare):
        return NUMBERS
    if not any(letter.isalnum() for letter in bare):
        return POINTS
    return START if text[0].isspace() else INSIDE


def is_in_code(text: str) -> bool:
    """Return whether a text ends in code: in an open fence or, without any fence, after a line of code."""
    if "```" in text:
        return bool(text.count("```") % 2)
    lines = [line for line in text.splitlines() if line.strip()]
    return any(CODE.match(line) for line in lines[-2:])  # of which the last one may be unfinished


def _ends_a_clause(text: str) -> bool:
    return bool(text) and kind_of_text(text[-1]) == POINTS


def _bin(value: float, bounds: Sequence[float]) -> str:
    above = [bound for bound in bounds if bound > value]
    low = max((bound for bound in bounds if bound <= value), default=0)
    return f"{low:g} to {above[0]:g}" if above else f"{low:g} and more"


def _rank(draft: Draft) -> str:
    if draft.rank is None:
        return "outside the draft vocabulary"
    return _count(draft.rank + 1, RANKS)


def _count(n: int, bounds: Sequence[int]) -> str:
    """Return the name of the group of a number >= 1, such as "3 to 4"; a bound is a group's last number."""
    low = max((bound for bound in bounds if bound < n), default=0) + 1
    high = next((bound for bound in bounds if bound >= n), None)
    return f"{low} and more" if high is None else str(low) if low == high else f"{low} to {high}"


def _vocabulary(drafts: Sequence[Draft], gain: float) -> Change | None:
    missing = [one for one in drafts if one.rank is None]
    if len(missing) < FEW // 5:
        return None
    share = len(missing) / sum(not one.accepted for one in drafts)
    return Change(
        "vocabulary",
        f"{share:.0%} of the rejected drafts are where the target's token is outside the draft vocabulary",
        "a larger drafter.draft_vocab_size, or a corpus of the text that you decode",
        gain,
    )


def _later_depths(drafts: Sequence[Draft], base: float) -> Change | None:
    first, later = _split(drafts, lambda one: one.depth == 1)
    if not differ(later, first):
        return None
    reached, gain, share = 1.0, 1.0 - base, rate(first)
    for _ in range(max(one.depth for one in drafts)):
        reached *= share
        gain += reached
    return Change(
        "depth",
        f"first drafts are accepted at {share:.0%}, later ones that are reached at {rate(later):.0%}",
        "longer training.block_length, or fewer drafts per chain",
        gain,
    )


def _later_positions(drafts: Sequence[Draft], base: float) -> Change | None:
    """Compare the beginnings of answers with the rest, at each bound; report the one of the largest drop."""
    found = []
    for bound in POSITIONS:
        early, late = _split(drafts, lambda one, bound=bound: one.position < bound)
        if differ(late, early):
            found.append((rate(early) - rate(late), bound, early, late))
    if not found:
        return None
    _, bound, early, late = max(found, key=lambda one: one[0])
    return Change(
        "long answers",
        f"drafts are accepted at {rate(early):.0%} in the first {bound} tokens of an answer, at "
        f"{rate(late):.0%} later",
        "longer answers in the corpus: regenerate.max_new_tokens and corpus.max_length",
        chain_len(drafts, like=lambda one: one.position < bound) - base,
    )


def _longer_contexts(drafts: Sequence[Draft], base: float, max_length: int | None) -> Change | None:
    if max_length is None:
        return None
    short, long = _split(drafts, lambda one: one.context < max_length)
    if not differ(long, short):
        return None
    return Change(
        "long contexts",
        f"drafts are accepted at {rate(short):.0%} within the {max_length} tokens of training, at "
        f"{rate(long):.0%} beyond",
        "a larger corpus.max_length and training.row_length",
        chain_len(drafts, like=lambda one: one.context < max_length) - base,
    )


def _weakest_kind(drafts: Sequence[Draft], base: float) -> Change | None:
    kinds = {kind_of_text(one.text) for one in drafts}
    found = []
    for kind in sorted(kinds):
        own, others = _split(drafts, lambda one, kind=kind: kind_of_text(one.text) == kind)
        if differ(own, others):
            gain = chain_len(drafts, like=lambda one, kind=kind: kind_of_text(one.text) != kind) - base
            found.append((gain, kind, rate(own), rate(others)))
    if not found:
        return None
    gain, kind, own, others = max(found)
    return Change(
        f"tokens: {kind}",
        f"{kind}: {own:.0%} accepted, other tokens {others:.0%}",
        "more text with such tokens in the corpus",
        gain,
    )


def _split(drafts: Sequence[Draft], is_first: Callable[[Draft], bool]) -> tuple[list[Draft], list[Draft]]:
    return [one for one in drafts if is_first(one)], [one for one in drafts if not is_first(one)]
