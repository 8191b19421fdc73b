"""The PDDL reader, the simulator against piles of blocks, and the plan checker on all stored plans."""

import random

import pytest

from drafttrain.data.prompts import read_rows
from drafttrain.reasoning.tasks.blocks import (
    ACTIONS,
    Blocks,
    actions_to_goal,
    check_plan,
    conditions,
    describe,
    in_words,
    read_action,
    read_pddl,
    read_plan,
    simulate,
)
from drafttrain.utils.errors import UserError

STORED = "data/eval/blocksworld_step_6.jsonl.gz"
PDDL = """(define (problem x) ; a comment
(:domain blocksworld-4ops) (:objects a b c)
(:init (handempty) (ontable A) (on b a) (ontable c) (clear b) (clear c))
(:goal (and (on a b))))"""


@pytest.fixture(scope="module")
def stored():
    rows = [row for _, _, row in read_rows(STORED)]
    problems = [read_pddl(row["pddl"], row["id"]) for row in rows]
    return [(row, p, read_plan(row["plan"], p, row["id"])) for row, p in zip(rows, problems)]


def possible(names):
    """All actions on some blocks, possible or not."""
    one = [(name, x) for name, n in ACTIONS.items() if n == 1 for x in names]
    return one + [
        (name, x, y) for name, n in ACTIONS.items() if n == 2 for x in names for y in names if x != y
    ]


class Piles:
    """Blocks as piles, lists from bottom to top, and what the hand holds: the slow reference."""

    def __init__(self, blocks: Blocks):
        above = {fact[2]: fact[1] for fact in blocks.start if fact[0] == "on"}
        self.hand = next((fact[1] for fact in blocks.start if fact[0] == "holding"), None)
        self.piles = []
        for fact in blocks.start:
            if fact[0] == "ontable":
                pile = [fact[1]]
                while pile[-1] in above:
                    pile.append(above[pile[-1]])
                self.piles.append(pile)

    def act(self, name, x, y=None) -> bool:
        """Change the piles if the action is possible; return whether it is."""
        pile = next((pile for pile in self.piles if pile[-1] == x), None)
        onto = next((pile for pile in self.piles if pile[-1] == y), None)
        if name == "pick-up" and self.hand is None and pile == [x]:
            self.piles.remove(pile)
            self.hand = x
        elif name == "unstack" and self.hand is None and pile and pile[-2:] == [y, x]:
            self.hand = pile.pop()
        elif name == "put-down" and self.hand == x:
            self.piles.append([x])
            self.hand = None
        elif name == "stack" and self.hand == x and onto:
            onto.append(x)
            self.hand = None
        else:
            return False
        return True

    def facts(self):
        found = {("ontable", pile[0]) for pile in self.piles} | {("clear", pile[-1]) for pile in self.piles}
        found |= {("on", y, x) for pile in self.piles for x, y in zip(pile, pile[1:])}
        return found | ({("holding", self.hand)} if self.hand else {("handempty",)})


def test_all_stored_plans_are_accepted(stored):
    assert len(stored) == 145
    for row, problem, plan in stored:
        assert len(plan) == 6 and check_plan(problem, plan) is None, row["id"]
        assert actions_to_goal(problem, plan) == 6
        assert row["prompt"] == describe(problem)


def test_each_is_refused_with_one_action_changed(stored):
    for _, problem, plan in stored:
        for i, (name, block, *_) in enumerate(plan):
            # an action for an empty hand in place of one for a full hand, and the reverse
            other = "put-down" if name in ("pick-up", "unstack") else "pick-up"
            reason = check_plan(problem, [*plan[:i], (other, block), *plan[i + 1 :]])
            assert reason is not None and reason.startswith(f"action {i + 1}, ")
            assert check_plan(problem, [*plan[:i], *plan[i + 1 :]]) is not None  # one left out


def test_simulator_and_checker_agree_with_piles(stored):
    draw = random.Random(0)
    for _, problem, plan in stored[::5]:
        changed = list(plan)
        changed[draw.randrange(6)] = draw.choice(possible(problem.names))
        piles = Piles(problem)
        accepted = all(piles.act(*action) for action in changed) and problem.goal <= piles.facts()
        assert (check_plan(problem, changed) is None) == accepted
    for _, problem, _ in stored[::12]:
        piles, state = Piles(problem), problem.start
        for _ in range(15):
            assert state == piles.facts()
            action = draw.choice([a for a in possible(problem.names) if conditions(a) <= state])
            refused = [a for a in possible(problem.names) if not conditions(a) <= state]
            assert not any(Piles.act(piles, *a) for a in refused)
            assert piles.act(*action)
            *_, state = simulate(Blocks(problem.names, state, problem.goal), [action])


def test_reasons():
    blocks = read_pddl(PDDL, "x")
    plan = read_plan("(unstack b a)\n(put-down b)\n(pick-up a)\n(stack a b)\n", blocks, "x")
    assert check_plan(blocks, plan) is None and actions_to_goal(blocks, plan) == 4
    assert check_plan(blocks, plan[:2]) == "the goal is not reached: not true that block a is on block b"
    assert check_plan(blocks, plan[2:]) == (
        "action 1, pick up block a, is not possible: it needs that block a is clear"
    )
    assert actions_to_goal(blocks, [*plan, ("unstack", "a", "b")]) == 4
    assert actions_to_goal(blocks, plan[2:]) is None


def test_description():
    assert describe(read_pddl(PDDL, "x")) == (
        "At the start the hand is empty, block b is clear, block c is clear, block a is on the table, block "
        "c is on the table, block b is on block a.\nThe goal: block a is on block b."
    )


@pytest.mark.parametrize(
    "text, action",
    [
        ("pick up block a", ("pick-up", "a")),
        ("Next, Pick-up the block B.", ("pick-up", "b")),
        ("put down a\n", ("put-down", "a")),
        ("(unstack b a)", ("unstack", "b", "a")),
        ("1. Unstack block b from on top of block a", ("unstack", "b", "a")),
        ("stack the block c on top of the block d, then stop", ("stack", "c", "d")),
        ("unstack block b from the top of block a", ("unstack", "b", "a")),
        ("stack block c on the top of the block d", ("stack", "c", "d")),
        ("stack c onto d", ("stack", "c", "d")),
        ("(put-down c)\n(pick-up d)", ("put-down", "c")),
        ("I would wait.", None),
        ("stack", None),
        ("", None),
    ],
)
def test_actions_in_words(text, action):
    assert read_action(text) == action


def test_actions_are_read_as_they_are_written():
    for action in possible("abcd"):
        assert read_action(in_words(action)) == read_action(f"({' '.join(action)})") == action
    for action in possible(["b-1", "b-2", "red_2"]):
        assert read_action(in_words(action)) == read_action(f"({' '.join(action)})") == action


def test_pddl_knows_no_case():
    blocks = read_pddl(PDDL.upper(), "x")
    assert blocks == read_pddl(PDDL, "x")
    assert read_plan("(STACK A B)\n(Pick-Up c)", blocks, "x") == [("stack", "a", "b"), ("pick-up", "c")]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("(define", "(defin", "x: PDDL must be one (define …) with matching parentheses, got '(defin"),
        ("(on a b))))", "(on a b))", "x: PDDL must be one (define …)"),
        (PDDL, "", "x: PDDL must be one (define …) with matching parentheses, got ''"),
        (PDDL, "define", "x: PDDL must be one (define …)"),
        (":init", ":start", "x: PDDL must have :init, got none"),
        ("(:goal (and (on a b)))", "", "x: PDDL must have :goal, got none"),
        ("(clear c)", "(near c)", "x: PDDL must have facts such as (on a b), got (near c)"),
        ("(clear c)", "clear", "x: PDDL must have facts such as (on a b), got clear"),
        ("(on b a)", "(on b)", "x: PDDL must have facts such as (on a b), got (on b)"),
        ("(on a b)", "(on a (b))", "x: PDDL must have facts such as (on a b), got (on a (b))"),
        ("(on a b)", "(on a z)", "x: PDDL must name blocks of :objects, got z in (on a z)"),
        ("(ontable c)", "", "x: PDDL must have one place for each block, got 2; fix :init"),
        ("(ontable c)", "(ontable c) (on c b)", "x: PDDL must have one place for each block, got 4"),
        ("(and (on a b))", "(and)", "x: PDDL must have facts in :goal, got none"),
        ("(ontable A)", "(on a b)", "pile up no block on itself, got (on a b) (on b a); fix :init"),
        ("(on a b)", "(on a b) (on b c) (on c a)", "got (on a b) (on b c) (on c a); fix :goal"),
        ("(on a b)", "(on c b) (on a a)", "x: PDDL must pile up no block on itself, got (on a a); fix :goal"),
    ],
)
def test_damaged_problems(old, new, message):
    with pytest.raises(UserError) as error:
        read_pddl(PDDL.replace(old, new), "x")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("(stack a e)", "x: plan must name blocks of the problem (a, b, c), got e"),
        ("(fly a)", "x: plan must have actions such as (stack a b), got '(fly a)'"),
        ("(stack a)", "x: plan must have actions such as (stack a b), got '(stack a)'"),
        ("()", "x: plan must have actions such as (stack a b), got '()'"),
    ],
)
def test_damaged_plans(text, message):
    with pytest.raises(UserError) as error:
        read_plan(text, read_pddl(PDDL, "x"), "x")
    assert str(error.value) == message
