"""Problem files, prompts with the paper's slots, scores and checks of the three tasks."""

import json
from decimal import Decimal
from itertools import permutations

import pytest

from drafttrain.data.prompts import read_rows
from drafttrain.reasoning.config import SearchConfig
from drafttrain.reasoning.reason import reason
from drafttrain.reasoning.tasks import TASKS, blocks
from drafttrain.reasoning.tasks import blocksworld as bw
from drafttrain.reasoning.tasks.gsm8k import Gsm8k, final_number
from drafttrain.reasoning.tasks.task import Problem
from drafttrain.reasoning.tasks.writing import Writing, end_sentences_kept
from drafttrain.utils.errors import UserError
from tests.reasoning.toys import Scripted

FILES = {
    "gsm8k": "data/eval/gsm8k_test.jsonl.gz",
    "writing": "data/eval/creative_writing.jsonl.gz",
    "blocksworld": "data/eval/blocksworld_step_6.jsonl.gz",
}
EGGS = Problem("1", "How many eggs are left?", "18")
SENTENCES = ("It rained.", "Nobody came!", 'She said "no".', "It’s over.")
STORY = Problem("w", "…", SENTENCES)
PASSAGE = "One day it rained.\n\nStill; nobody came.\n\n  She said “no”. \n\nWell - it's over!"
THOUGHT = {"sub_question": "How many are sold?", "sub_answer": "16 - 3 = 13."}


@pytest.mark.parametrize("name, count", [("gsm8k", 1319), ("writing", 100), ("blocksworld", 145)])
def test_problems_of_the_repository(name, count):
    problems = TASKS[name]().read(FILES[name])
    assert len(problems) == len({problem.id for problem in problems}) == count
    assert len(TASKS[name]().read(FILES[name], 4)) == 4


def test_sentences_of_creative_writing():
    problems = Writing().read(FILES["writing"])
    for problem in problems:
        assert " ".join(problem.text.split()) == " ".join(problem.reference)
        assert sum(text[-1] in ".!?\"”'’" for text in problem.reference) >= 3


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("other", FILES)
def test_a_file_of_another_task_is_refused(name, other):
    if name != other:
        with pytest.raises(UserError, match=rf"^{FILES[other]}:.*must be a problem of {name} with") as error:
            TASKS[name]().read(FILES[other])
        assert "\n" not in str(error.value)


BLOCKS = {"prompt": "p", "pddl": bw.TURNED, "plan": "(unstack a b)\n(put-down a)\n(pick-up b)\n(stack b c)"}


@pytest.mark.parametrize(
    "name, row, message",
    [
        (
            "gsm8k",
            {"question": "How many?", "answer": "So it is 5."},
            "answer must end with #### and",
        ),
        ("gsm8k", {"question": "How many?", "answer": "#### many"}, "answer must end with #### and"),
        ("gsm8k", {"question": "How many?", "answer": "2 * 3 = 6\n####"}, "answer must end with #### and"),
        ("gsm8k", {"question": "How many?", "answer": "It is 5.\n#### five"}, "answer must end with ####"),
        ("gsm8k", {"id": "a\0b", "question": "?", "answer": "#### 1"}, "id must be the name of a file"),
        (
            "gsm8k",
            {"question": "", "answer": "#### 1"},
            "must be a problem of gsm8k with question and",
        ),
        ("gsm8k", ["How many?"], "must be a problem of gsm8k with question and answer, got list"),
        ("writing", {"prompt": "a", "end_sentences": ["a."]}, "end_sentences must be 4 texts, got 1 values"),
        ("writing", {"prompt": "a", "end_sentences": [1, 2, 3, 4]}, "end_sentences must be 4 texts"),
        ("blocksworld", BLOCKS | {"pddl": "(define (problem"}, "PDDL must be one (define …)"),
        (
            "blocksworld",
            BLOCKS | {"plan": "(pick-up z)"},
            "plan must name blocks of the problem (a, b, c), got",
        ),
        ("blocksworld", BLOCKS | {"plan": "(pick-up b)"}, "plan must reach the goal, got one where action 1"),
        (
            "blocksworld",
            BLOCKS | {"plan": ""},
            "must be a problem of blocksworld with prompt and",
        ),
    ],
)
def test_damaged_problems(name, row, message, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError) as error:
        TASKS[name]().read(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, row",
    [
        ("gsm8k", {"id": "a\ud83d", "question": "How many \ud83d?", "answer": "#### 3"}),
        ("writing", {"id": "\ud83d", "prompt": "\ud83d", "end_sentences": ["One \ud83d."] * 4}),
    ],
)
def test_broken_characters_are_replaced(name, row, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [problem] = TASKS[name]().read(path)
    assert "\ufffd" in problem.id and "\ufffd" in problem.text
    assert f"{problem.id} {problem.text} {problem.reference}".encode()


def test_an_empty_file(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"none.jsonl"):
        Gsm8k().read(tmp_path / "none.jsonl")


# GSM8K


@pytest.mark.parametrize(
    "text, number",
    [
        ("So 9 * 2 = 18.\n#### 18", 18),
        ("#### 1,234.50 dollars", Decimal("1234.5")),
        ("#### -$7", -7),
        ("She has 3 left, worth $1,000.", 1000),
        ("It is 5.\n#### five", 5),
        ("none", None),
    ],
)
def test_final_numbers(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    "text, score",
    [
        ("8", 8),
        ("Rating: 10.", 10),
        ("8/10", 8),
        ("7.5", 7.5),
        ("**8** out of 10", 8),
        ("I would give it a 9.", 9),
        ("Very good.\nRating: 8", 8),
        ("Based on the above, the rating is 8", 8),
        ("It is right, so the rating I'd give this answer is **9**/10.", 9),
        ("There is no rating. 5 steps are missing", None),
        ("Question 1 is a 9", None),
        ("1st of all", None),
        ("1,000", None),
        ("-3", None),
        ("0", None),
        ("11", None),
        ("good", None),
        ("", None),
    ],
)
def test_scores_of_gsm8k(text, score):
    assert Gsm8k().score(text) == score


def test_a_thought_of_gsm8k_takes_two_calls_with_the_slots_of_the_paper():
    asking = Gsm8k().think(EGGS, [THOUGHT])
    asked = next(asking)
    for slot in (EGGS.text, *THOUGHT.values()):  # initial prompt, state
        assert slot in asked.prompt
    asked = asking.send("\n What do they cost?\nMore text")
    assert EGGS.text in asked.prompt and "What do they cost?\n" in asked.prompt
    assert "More text" not in asked.prompt and THOUGHT["sub_answer"] not in asked.prompt
    with pytest.raises(StopIteration) as end:
        asking.send(" 13 * 2 = 26.\n")
    assert end.value.value == {"sub_question": "What do they cost?", "sub_answer": "13 * 2 = 26."}
    assert Gsm8k().judge(EGGS, [THOUGHT]).begin == "Rating: "
    judged = Gsm8k().judge(EGGS, [THOUGHT, end.value.value]).prompt
    assert EGGS.text in judged and "What do they cost?" in judged and "13 * 2 = 26." in judged
    assert THOUGHT["sub_question"] not in judged


def test_a_tree_of_gsm8k():
    def script(prompt, number):
        if prompt.endswith("Next question:"):
            return f"Question {number}?"
        if prompt.endswith("Answer:"):
            return f"It is {prompt[prompt.index('Question ') + 9]}."
        if prompt.endswith("Write the number only."):
            return "9" if "Question 1?" in prompt else "I do not know"
        return "All in all\n#### 18"

    model = Scripted(script)
    trace = reason("gsm8k", EGGS, model)
    calls = trace.rounds[0]["calls"]
    assert [call["begin"] for call in calls] == ["", "", "Rating: "] * 3
    assert trace.leaf == [1, 1, 1] and trace.without_score == 6
    assert trace.result == {"success": True, "answer": "18", "reference": "18"}
    assert [len(calls) for calls in model.rounds] == [3, 3, 3] * 3 + [1]
    assert model.rounds[-1][0].messages.count("Question 1?") == 3
    seeds = [call.sampling.seed for calls in model.rounds for call in calls]
    assert len(set(seeds)) == len(seeds) == 28
    assert all(call.sampling.temperature == 1 for calls in model.rounds for call in calls)


# creative writing


def test_end_sentences_kept():
    assert end_sentences_kept(PASSAGE, SENTENCES) == 4
    assert end_sentences_kept(PASSAGE.replace("\n\n", "\n"), SENTENCES) == 4
    assert end_sentences_kept(PASSAGE.replace("came", "went"), SENTENCES) == 3
    assert end_sentences_kept("\n\n".join(reversed(PASSAGE.split("\n\n"))), SENTENCES) == 0
    assert end_sentences_kept("It rained. Then it stopped.", SENTENCES) == 0
    assert end_sentences_kept("It trained.", ("Rained.",)) == 0  # whole words
    assert end_sentences_kept("", SENTENCES) == 0


@pytest.mark.parametrize(
    "text, score",
    [
        (" 7\nThe first paragraph leads to the second.", 7),
        ("It flows. Coherency score: 7", 7),
        ("It flows.\nCoherency score: I would give it an 8", 8),
        ("The score of the first part is 3.\nCoherency score: **9**/10", 9),
        ("coherency score: 0", None),
        (" The coherency score for this text is **8**.", 8),
        (" The passage flows well. The coherency score is 9.", 9),
        ("It flows, so it has a coherency score of 8.", 8),
        ("It flows. The coherency score for the passage would be 7", 7),
        ("It flows. The coherency score of the four paragraphs is 8", 8),
        ("It flows. The coherency score of the 4 paragraphs", None),
        ("It does not flow. A coherency score of 1 to 10 is asked for; the coherency score is 2", 2),
        ("It flows. The coherency score needs no words. 5 of them", None),
        (" The paragraphs fit well, and there are 4 of them.", None),
        (" The text has 4 paragraphs", None),
        ("N/A. 5 sentences", None),
        ("", None),
    ],
)
def test_scores_of_writing(text, score):
    assert Writing().score(text) == score


@pytest.mark.parametrize(
    "text, plan, passage",
    [
        ("Plan: rain.\n\nPassage:\nOne.\n\nTwo.", "rain.", "One.\n\nTwo."),
        ("**Plan:** rain\n**Passage:** One.", "rain", "One."),
        ("One.\n\nTwo.", "", "One.\n\nTwo."),
    ],
)
def test_a_tree_of_writing(text, plan, passage):
    def script(prompt, number):
        if prompt.startswith("Here is a text"):
            return f"Fine. Coherency score: {len(prompt) % 10 + 1}"
        return text if "Think of a plan" in prompt else PASSAGE

    model = Scripted(script)
    trace = reason("writing", STORY, model)
    assert [len(calls) for calls in model.rounds] == [3, 3, 1]
    assert trace.states[1]["thoughts"] == ({"plan": plan, "passage": passage},)
    assert all(sentence in model.rounds[0][0].messages for sentence in SENTENCES)
    assert passage in model.rounds[1][0].messages and "rain" not in model.rounds[1][0].messages
    assert plan in model.rounds[2][0].messages and SENTENCES[3] in model.rounds[2][0].messages
    assert trace.result == {"success": True, "end_sentences_kept": 4, "of": 4}


# Blocksworld


def test_demonstrations_are_right():
    stored = {problem.reference for problem in bw.Blocksworld().read(FILES["blocksworld"])}
    known = [blocks.read_pddl(pddl, "") for pddl, _ in bw.DEMONSTRATIONS]
    plans = [blocks.read_plan(plan, one, "") for one, (_, plan) in zip(known, bw.DEMONSTRATIONS)]
    for problem, plan in zip(known, plans):
        assert blocks.check_plan(problem, plan) is None
        assert blocks.actions_to_goal(problem, plan) == len(plan)
        for names in permutations(problem.names):
            other = dict(zip(problem.names, names))
            start, goal = ({(f[0], *(other[x] for x in f[1:])) for f in facts}
                           for facts in (problem.start, problem.goal))  # fmt: skip
            assert blocks.Blocks(problem.names, frozenset(start), frozenset(goal)) not in stored
    for number, taken, action, verdict in bw.VERDICTS:
        assert (blocks.read_action(action) == plans[number][taken]) == (verdict == "good")


@pytest.mark.parametrize(
    "text, score",
    [
        *(("Good.", 1), ("verdict: bad", 0), ("goodness", None), ("", None)),
        *(("Not good, block a is on it.", 0), ("not a bad one", 1), ("Bad, not good.", 0)),
        *(("It isn't good", 0), ("It isn’t bad", 1), ("The next action is **good**", 1)),
        *(("A plan can be good", None), ("No good", None)),
    ],
)
def test_verdicts(text, score):
    assert bw.Blocksworld().score(text) == score


def test_prompts_of_blocksworld_have_the_slots_of_the_paper():
    [problem] = bw.Blocksworld().read(FILES["blocksworld"], 1)
    thoughts = [{"action": "pick up block b"}, {"action": "stack block b on block c"}]
    prompt = bw.generator_prompt(problem, thoughts)
    assert bw.RULES in prompt and problem.text in prompt and "pick up block b\nstack block b on" in prompt
    assert prompt.endswith("Next action:") and prompt.count("[PROBLEM]") == 3
    assert bw.NOTHING in bw.generator_prompt(problem, [])
    prompt = bw.evaluator_prompt(problem, thoughts)
    assert bw.RULES in prompt and "[NEXT ACTION]\nstack block b on block c\n[VERDICT]" in prompt
    assert prompt.count(" good\n") == prompt.count(" bad\n") == 2


def plan_model(actions):
    """Return a model of which every second thought is the next action of a plan."""

    def script(prompt, number):
        done = prompt[prompt.rindex("[PROBLEM]") :].partition("[PLAN")[2].partition("\n")[2]
        state = [line for line in done.split("\n") if blocks.read_action(line)]
        if prompt.endswith("Next action:"):
            wanted = (*actions, "pick up block a")[len(state)]
            return wanted if number == 1 else "put down block d, I think"
        return "good" if state == actions[: len(state)] else "bad"

    return Scripted(script)


def test_trees_of_blocksworld_find_the_plan():
    rows = [row for _, _, row in read_rows(FILES["blocksworld"])]
    for row in rows[::20]:
        problem = bw.Blocksworld().problem(row["id"], row, "")
        actions = [blocks.in_words(a) for a in blocks.read_plan(row["plan"], problem.reference, "")]
        trace = reason("blocksworld", problem, plan_model(actions))
        assert trace.result == {"success": True, "plan": actions, "reason": None}


@pytest.mark.parametrize(
    "texts, reason_",
    [
        (["pick up block b"], "action 1, pick up block b, is not possible: it needs that block b is clear"),
        (
            ["unstack block a from block b", "wait"],
            "the goal is not reached: not true that block b is on block c",
        ),
        (["unstack block z from block b"], "action 1, unstack block z from block b, is not possible"),
    ],
)
def test_plans_that_fail(texts, reason_):
    problem = bw.Blocksworld().problem("1", BLOCKS, "x")
    *thoughts, closing = [{"action": text} for text in texts]
    result = bw.Blocksworld().check(problem, thoughts, closing)
    assert result["success"] is False and result["reason"].startswith(reason_) and result["plan"] == texts


def test_a_plan_ends_at_the_goal():
    problem = bw.Blocksworld().problem("1", BLOCKS, "x")
    actions = [blocks.in_words(a) for a in blocks.read_plan(BLOCKS["plan"], problem.reference, "x")]
    *thoughts, closing = [{"action": text} for text in [*actions, "pick up block a", "fly"]]
    result = bw.Blocksworld().check(problem, thoughts, closing)
    assert result == {"success": True, "plan": actions, "reason": None}


def test_limits_of_answers():
    model = Scripted(lambda prompt, number: "1")
    reason("gsm8k", EGGS, model, SearchConfig(max_new_tokens=20, steps=1))
    assert [calls[0].max_new_tokens for calls in model.rounds] == [20, 20, 16, 20]
