"""Blocksworld: a reader of its PDDL problems, a simulator of the four actions, and a checker of plans.

Only the part of PDDL that the instances use is read: objects without types, facts, and a goal that is a fact
or a conjunction of facts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drafttrain.utils.errors import UserError

Fact = tuple[str, ...]  # ("on", "a", "b")
Action = tuple[str, ...]  # ("stack", "a", "b")

PREDICATES = {"handempty": 0, "clear": 1, "ontable": 1, "holding": 1, "on": 2}  # number of blocks of each
ACTIONS = {"pick-up": 1, "put-down": 1, "unstack": 2, "stack": 2}
HAND_EMPTY = ("handempty",)
PHRASES = {
    "handempty": "the hand is empty",
    "clear": "block {} is clear",
    "ontable": "block {} is on the table",
    "holding": "the hand holds block {}",
    "on": "block {} is on block {}",
    "pick-up": "pick up block {}",
    "put-down": "put down block {}",
    "unstack": "unstack block {} from block {}",
    "stack": "stack block {} on block {}",
}
_BLOCK = r"\s+(?:the\s+)?(?:block\s+)?(\w+(?:-\w+)*)"
_ONTO = r"(?:\s+(?:from|off|onto|on|(?:the\s+)?top|of))*"
_SPOKEN = re.compile(
    rf"\(?\b(?:(pick[- ]?up|put[- ]?down){_BLOCK}|(unstack|stack){_BLOCK}{_ONTO}{_BLOCK})", re.IGNORECASE
)


@dataclass(frozen=True)
class Blocks:
    """A problem: some blocks, where they are, and what has to hold in the end.

    Attributes:
        names: of the blocks, in the file's order.
        start: all facts that hold at the start.
        goal: facts that have to hold in the end.
    """

    names: tuple[str, ...]
    start: frozenset[Fact]
    goal: frozenset[Fact]


def read_pddl(text: str, source: str) -> Blocks:
    """Parse the PDDL text of a problem.

    Args:
        source: name of the text, for errors.

    Raises:
        UserError: the text is damaged or is no Blocksworld problem.
    """
    parts = {}
    for part in _parse(text, source)[1:]:
        if isinstance(part, list) and part and isinstance(part[0], str):
            parts[part[0]] = part[1:]
    for name in (":objects", ":init", ":goal"):
        if not parts.get(name):
            raise UserError(f"{source}: PDDL must have {name}, got none; fetch the file again")
    names = tuple(name for name in parts[":objects"] if isinstance(name, str))
    goal = parts[":goal"][0]
    conjunction = goal[1:] if isinstance(goal, list) and goal[:1] == ["and"] else parts[":goal"]
    start = frozenset(_fact(item, names, source) for item in parts[":init"])
    places = sorted(fact[1] for fact in start if fact[0] in ("on", "ontable", "holding"))
    if places != sorted(names):
        raise UserError(f"{source}: PDDL must have one place for each block, got {len(places)}; fix :init")
    wanted = frozenset(_fact(item, names, source) for item in conjunction)
    if not wanted:
        raise UserError(f"{source}: PDDL must have facts in :goal, got none; fetch the file again")
    for part, facts in ((":init", start), (":goal", wanted)):
        if circle := _circle(facts):
            found = " ".join(f"(on {block} {under})" for block, under in circle)
            raise UserError(f"{source}: PDDL must pile up no block on itself, got {found}; fix {part}")
    return Blocks(names, start, wanted)


def read_plan(text: str, blocks: Blocks, source: str) -> list[Action]:
    """Return the actions of a plan such as "(pick-up a)\\n(stack a b)\\n".

    Raises:
        UserError: an unknown action or block.
    """
    plan = []
    for line in filter(None, map(str.strip, text.lower().split("\n"))):  # PDDL knows no case
        name, *names = line.strip("()").split() or [""]
        if ACTIONS.get(name) != len(names):
            raise UserError(f"{source}: plan must have actions such as (stack a b), got {line!r}")
        if unknown := [block for block in names if block not in blocks.names]:
            known = ", ".join(blocks.names)
            raise UserError(f"{source}: plan must name blocks of the problem ({known}), got {unknown[0]}")
        plan.append((name, *names))
    return plan


def read_action(text: str) -> Action | None:
    """Return the first action in a model's text, in words or PDDL; None if there is none."""
    if not (match := _SPOKEN.search(text)):
        return None
    name, *blocks = (part.lower() for part in match.groups() if part)
    return (re.sub(r"(pick|put)[- ]?", r"\1-", name), *blocks)


def in_words(item: Fact | Action) -> str:
    """Return a fact or an action in English."""
    return PHRASES[item[0]].format(*item[1:])


def describe(blocks: Blocks) -> str:
    """Return a problem in English, in an order that does not depend on its file's."""
    start = ", ".join(in_words(fact) for fact in _ordered(blocks.start))
    goal = ", ".join(in_words(fact) for fact in _ordered(blocks.goal))
    return f"At the start {start}.\nThe goal: {goal}."


def conditions(action: Action) -> frozenset[Fact]:
    """Return the preconditions of an action, all of which stop holding when it is carried out."""
    name, block, *below = action
    if name == "pick-up":
        return frozenset({("clear", block), ("ontable", block), HAND_EMPTY})
    if name == "put-down":
        return frozenset({("holding", block)})
    if name == "stack":
        return frozenset({("holding", block), ("clear", *below)})
    return frozenset({("on", block, *below), ("clear", block), HAND_EMPTY})


def effects(action: Action) -> frozenset[Fact]:
    """Return the facts that an action makes true."""
    name, block, *below = action
    if name == "pick-up":
        return frozenset({("holding", block)})
    if name == "put-down":
        return frozenset({("ontable", block), ("clear", block), HAND_EMPTY})
    if name == "stack":
        return frozenset({("on", block, *below), ("clear", block), HAND_EMPTY})
    return frozenset({("holding", block), ("clear", *below)})


def simulate(blocks: Blocks, plan: Sequence[Action]) -> Iterator[frozenset[Fact]]:
    """Yield the facts at the start and after each action, up to the first one that is not possible."""
    state = blocks.start
    yield state
    for action in plan:
        if not conditions(action) <= state:
            return
        state = state - conditions(action) | effects(action)
        yield state


def check_plan(blocks: Blocks, plan: Sequence[Action]) -> str | None:
    """Return why a plan fails; None: all its actions are possible, and the goal holds after the last."""
    states = list(simulate(blocks, plan))
    if len(states) <= len(plan):
        action = plan[len(states) - 1]
        missing = _ordered(conditions(action) - states[-1])[0]
        return f"action {len(states)}, {in_words(action)}, is not possible: it needs that {in_words(missing)}"
    if missing := _ordered(blocks.goal - states[-1]):
        return f"the goal is not reached: not true that {in_words(missing[0])}"
    return None


def actions_to_goal(blocks: Blocks, plan: Sequence[Action]) -> int | None:
    """Return the number of actions of a plan after which the goal holds first; None if it never does."""
    return next((n for n, state in enumerate(simulate(blocks, plan)) if blocks.goal <= state), None)


def _ordered(facts: frozenset[Fact]) -> list[Fact]:
    """Return facts in the order of `PREDICATES`, then of the blocks' names."""
    order = list(PREDICATES)
    return sorted(facts, key=lambda fact: (order.index(fact[0]), fact))


def _parse(text: str, source: str) -> list:
    """Return a PDDL text as nested lists of words in lower case."""
    stack: list[list] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", re.sub(r";.*", "", text).lower()):
        if word == "(":
            stack.append([])
        elif word == ")" and len(stack) > 1:
            stack[-2].append(stack.pop())
        else:
            stack[-1].append(word)
    [top, *unclosed] = stack
    if unclosed or len(top) != 1 or top[0][:1] != ["define"]:
        raise UserError(f"{source}: PDDL must be one (define …) with matching parentheses, got {text[:40]!r}")
    return top[0]


def _fact(item: object, names: Sequence[str], source: str) -> Fact:
    words = tuple(item) if isinstance(item, list) and all(isinstance(word, str) for word in item) else ()
    if not words or PREDICATES.get(words[0]) != len(words) - 1:
        raise UserError(f"{source}: PDDL must have facts such as (on a b), got {_shown(item)}")
    if unknown := [word for word in words[1:] if word not in names]:
        raise UserError(f"{source}: PDDL must name blocks of :objects, got {unknown[0]} in {_shown(item)}")
    return words


def _circle(facts: frozenset[Fact]) -> list[tuple[str, ...]]:
    """Return (block, block below it) pairs that form a cycle; empty if every pile ends."""
    pairs = {fact[1:] for fact in facts if fact[0] == "on"}
    while pairs:
        above, below = map(set, zip(*pairs))
        inner = {(block, under) for block, under in pairs if block in below and under in above}
        if inner == pairs:
            break
        pairs = inner
    return sorted(pairs)


def _shown(item: object) -> str:
    return f"({' '.join(map(_shown, item))})" if isinstance(item, list) else str(item)
