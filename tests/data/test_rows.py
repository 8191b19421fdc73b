"""Rows of every format and spelling that real files have."""

import json
from collections import Counter

import pytest

from drafttrain.data.rows import is_exchange, row_to_conversation
from drafttrain.utils.errors import UserError


def read(row, format="auto"):
    skipped, repairs = Counter(), Counter()
    conversation = row_to_conversation(row, format, "file.json:3", "file.json:row 3", skipped, repairs)
    assert (conversation is None) == bool(skipped)
    return conversation, skipped, repairs


def turns(row, format="auto"):
    conversation, _, _ = read(row, format)
    return [(message.role, message.content) for message in conversation.messages]


def test_sharegpt_roles():
    spellings = {
        "system": ["system"],
        "user": ["human", "user", "Human", " USER "],
        "assistant": ["gpt", "assistant", "chatgpt", "bing", "bard", "function_call"],
        "tool": ["tool", "observation"],
    }
    for role, names in spellings.items():
        for name in names:
            assert turns({"conversations": [{"from": name, "value": "x"}]}) == [(role, "x")]


def test_sharegpt_row():
    row = {"id": "abc_8", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": ""}]}
    conversation, _, _ = read(row)
    assert (conversation.id, conversation.source) == ("abc_8", "file.json:row 3")
    assert turns(row) == [("user", "hi"), ("assistant", "")]
    assert turns({"conversation_id": 5, "system": "be", "prompt": "hi", "response": "no", **row})[0] == (
        "system",
        "be",
    )
    assert read({"conversations": row["conversations"]})[0].id == "file.json:3"


def test_ids_as_generated():
    row = {
        "conversations": [
            {"from": "human", "value": "a", "token_ids": [9]},
            {"from": "gpt", "value": "b", "token_ids": [1, 2]},
        ]
    }
    assert [message.token_ids for message in read(row)[0].messages] == [None, [1, 2]]


def test_what_a_question_is_about_is_part_of_it():
    for question, answer in (("instruction", "response"), ("question", "answer"), ("question", "response")):
        row = {question: "Who?", "context": "Ann sings.", answer: "Ann."}
        assert turns(row) == [("user", "Who?\n\nAnn sings."), ("assistant", "Ann.")]
        assert turns(row | {"context": ""}) == [("user", "Who?"), ("assistant", "Ann.")]
    row = {"system_prompt": "Be brief.", "question": "Who?", "response": "Ann."}
    assert turns(row) == [("system", "Be brief."), ("user", "Who?"), ("assistant", "Ann.")]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_what_is_left_out_is_counted(key):
    asked = {"role": "user", "content": "Who?"}
    row = {"messages": [asked, {"role": "assistant", "content": "Ann.", key: "She sings."}], "tools": [{}]}
    conversation, _, repairs = read(row)
    assert [message.content for message in conversation.messages] == ["Who?", "Ann."]
    assert repairs == {"reasoning beside answers left out": 1, "definitions of tools left out": 1}


def test_answers_that_are_not_to_be_learned_are_counted():
    for weight in (1, 0):
        answer = {"role": "assistant", "content": "Ann.", "weight": weight}
        asked = {"role": "user", "content": "Who?", "weight": 0}
        _, skipped, repairs = read({"messages": [asked, answer]})
        assert not skipped and repairs == ({} if weight else {"answers of weight 0 kept": 1})


def test_openai_messages():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {
        "messages": [
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "c"},
            {"role": "assistant", "content": None, "function_call": {"name": "g"}},
            {"role": "function", "content": None},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        ]
    }
    assert turns(row) == [
        ("system", "be"),
        ("user", "a\nb"),
        ("assistant", json.dumps(call["function"])),
        ("tool", "c"),
        ("assistant", '{"name": "g"}'),
        ("tool", ""),
        ("assistant", "Let me see.\n" + json.dumps(call["function"])),
    ]
    assert turns({"task_id": 7, "traj": row["messages"][:1]}) == [("system", "be")]
    row["messages"][1]["content"].append({"type": "image_url", "image_url": "x"})
    with pytest.raises(UserError, match="row 3: turn 2: content: must be text in all parts"):
        read(row)


def test_answers_labelled_as_bad():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read({"messages": messages, "label": True})[0] is not None
    assert read({"messages": messages, "label": False})[1] == {"answer labelled as bad": 1}


@pytest.mark.parametrize(
    "empty", ["", " ", "No input", "Noinput", "<no input>", "No Input.", "noinput", None]
)
def test_alpaca_without_input(empty):
    row = {"instruction": "Do.", "input": empty, "output": "Done."}
    assert turns(row) == [("user", "Do."), ("assistant", "Done.")]


def test_alpaca_with_system_and_history():
    row = {"instruction": "And now?", "output": "Three.", "system": "Count."}
    row["history"] = [["Begin.", "One."], ["Go on.", "Two."]]
    assert turns(row) == [
        ("system", "Count."),
        *[("user", "Begin."), ("assistant", "One."), ("user", "Go on."), ("assistant", "Two.")],
        *[("user", "And now?"), ("assistant", "Three.")],
    ]
    assert turns(row | {"history": []})[1:] == [("user", "And now?"), ("assistant", "Three.")]
    for wrong in ([["Begin."]], ["Begin."], [["Begin.", 3]]):
        assert turns(row | {"history": wrong})[1:] == [("user", "And now?"), ("assistant", "Three.")]


def test_single_exchanges():
    row = {"instruction": "Add.", "input": "no inputs here: 1, 2", "response": "3"}
    assert turns(row) == [("user", "Add.\n\nno inputs here: 1, 2"), ("assistant", "3")]
    assert turns({"instruction": "Add."}) == [("user", "Add."), ("assistant", "")]
    assert turns({"question": "How many?", "answer": "1+1=<<1+1=2>>2\n#### 2"})[1] == (
        "assistant",
        "1+1=2\n#### 2",
    )
    assert turns({"prompt": "a", "completion": "b"}) == [("user", "a"), ("assistant", "b")]


def test_moss_turns_in_numerical_order():
    chat = {
        f"turn_{i}": {"Human": f"<|Human|>: q{i}<eoh>\n", "MOSS": f"<|MOSS|>: a{i}<eom>\n", "Commands": "x"}
        for i in (1, 10, 9)
    }
    row = {"conversation_id": "m", "meta_instruction": "You are MOSS", "chat": chat}
    assert [text for _, text in turns(row)] == ["q1", "a1", "q9", "a9", "q10", "a10"]


def test_text_rows():
    assert turns({"text": "words"}) == [("text", "words")]
    assert turns({"text": "words", "instruction": "x", "output": "y"}, "text") == [("text", "words")]


def test_empty_rows_are_counted():
    assert read({"id": "x", "conversations": []})[1] == {"no turns": 1}


def test_lone_surrogates():
    row = json.loads(r'{"id": "\udc00", "text": "half \ud83d, whole \ud83d\ude00"}')
    conversation, _, repairs = read(row)
    assert conversation.messages[0].content == "half \ufffd, whole 😀"
    assert (conversation.id, repairs) == ("\ufffd", {"broken characters replaced": 1})


def test_html_answers():
    dump = '<div class="markdown prose"><p>Use <code>a</code>:</p></div>'
    row = {"conversations": [{"from": "human", "value": dump}, {"from": "gpt", "value": dump}]}
    conversation, _, repairs = read(row)
    assert [message.content for message in conversation.messages] == [dump, "Use `a`:"]
    assert repairs == {"HTML answers turned into Markdown": 1}
    row["conversations"][1]["token_ids"] = [1, 2]  # of this very text
    assert turns(row) == [("user", dump), ("assistant", dump)]


@pytest.mark.parametrize(
    "row, format, complaint",
    [
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            "auto",
            "turn 1: role must be one of .*, got 'alien'; fix or remove the turn",
        ),
        ({"conversations": [{"value": "x"}]}, "auto", "turn 1: role must be one of .*, got None"),
        (
            {"conversations": [{"from": "gpt", "value": 5}]},
            "auto",
            "turn 1: content: must be text, got a int",
        ),
        ({"conversations": ["x"]}, "auto", "turn 1: must be an object with role and text, got a str"),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
            "auto",
            "turn 1: tool calls: must be a list of objects, got a list",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": "x"}]},
            "auto",
            "turn 1: tool calls: must be a list of objects, got a list",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "x", "token_ids": 5}]},
            "auto",
            "turn 1: token_ids: must be a list, got a int",
        ),
        ({"chat": {"turn_1": "x"}}, "auto", "turn_1: must be an object with Human and MOSS, got a str"),
        ({"chat": {"turn_1": {"Human": 5}}}, "auto", "turn_1: content: must be text, got a int"),
        (["x"], "auto", "must be a JSON object, got a list"),
        ({"a": 1, "b": 2}, "auto", "must have conversations, .* format auto, got a, b; rename"),
        (
            {"instruction": "a", "output": "b"},
            "sharegpt",
            "must have .* the keys of format sharegpt, got instruction, output;",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "alpaca",
            "must have .* the keys of format alpaca, got messages;",
        ),
    ],
)
def test_bad_rows(row, format, complaint):
    with pytest.raises(UserError, match=f"^file.json:row 3: {complaint}") as caught:
        read(row, format)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["conversations", "traj", "chat", "instruction", "question", "prompt"])
def test_rows_of_exchanges(key):
    assert is_exchange({"id": 1, key: None}) and not is_exchange({"id": 1, f"{key}s of it": []})


def test_rows_of_text_are_no_exchanges():
    assert not is_exchange({"text": "prompt", "id": "question"}) and not is_exchange({})
