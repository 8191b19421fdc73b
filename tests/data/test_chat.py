"""Ids and masks against slow references, spliced ids, cutting, odd templates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafttrain.data.chat import encode_prompt, template_hash, tokenizer_hash
from drafttrain.data.conversation import Conversation
from drafttrain.data.loss_mask import cut_at_turns, encode_conversation
from drafttrain.data.message import Message
from drafttrain.utils.errors import UserError
from tests.templates import LINES, SPECIAL, family_tokenizer

CHATML_START = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


def chat(*contents: str, source: str = "chats.json:row 7") -> Conversation:
    roles = ("user", "assistant")
    return Conversation("a", [Message(roles[i % 2], text) for i, text in enumerate(contents)], source)


def trained_text(tokenizer, encoded) -> str:
    return tokenizer.decode([i for i, on in zip(encoded.input_ids, encoded.loss_mask, strict=True) if on])


def chatml_reference(conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
    """Text and the character spans of the answers, put together by hand."""
    text, spans = CHATML_START, []
    for message in conversation.messages:
        text += f"<|im_start|>{message.role}\n"
        if message.role == "assistant":
            spans.append((len(text), len(text) + len(message.content) + len("<|im_end|>")))
        text += f"{message.content}<|im_end|>\n"
    return text, spans


# Some byte-level tokenizers trim white space from offsets (Llama-3), all split characters over tokens.
words = st.lists(
    st.sampled_from(["Hi", " there", "\n", "\n\n", "  ", "é", "😀", "日本", ".", "\t", "Hello"]), min_size=1
)
turn = words.map("".join).filter(str.strip)


@settings(max_examples=40)
@given(st.lists(turn, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0), st.booleans())
def test_mask_against_decoding_prefixes(turns, trim_offsets):
    tokenizer = family_tokenizer("smollm2")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    conversation = chat(*turns)
    encoded = encode_conversation(tokenizer, conversation)
    text, spans = chatml_reference(conversation)
    assert tokenizer.decode(encoded.input_ids) == text

    edges = [
        len(tokenizer.decode(encoded.input_ids[:i]).rstrip("\ufffd"))
        for i in range(len(encoded.input_ids) + 1)
    ]
    for i, on in enumerate(encoded.loss_mask):
        # A token that holds only a part of a character moves no edge until the character is whole.
        right = max(edges[i + 1], edges[i] + 1)
        assert on == any(edges[i] < end and right > start for start, end in spans)


@settings(max_examples=40)
@given(turn, turn, st.booleans())
def test_prompt_is_a_prefix_of_any_answer(question, answer, trim_offsets):
    tokenizer = family_tokenizer("smollm2")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    prompt = encode_prompt(tokenizer, [Message("user", question)])
    encoded = encode_conversation(tokenizer, chat(question, answer))
    assert encoded.input_ids[: len(prompt)] == prompt
    assert sum(encoded.loss_mask[: len(prompt)]) == 0
    assert encoded.loss_mask[len(prompt)] == 1


def test_prompt_that_ends_in_an_answers_beginning(family):
    """Its ids are those of the whole answer up to there, as transformers renders it."""
    tokenizer = family_tokenizer(family)
    turns = [Message("user", "Hi there"), Message("assistant", "Hello!"), Message("user", "Tell me more")]
    header = encode_prompt(tokenizer, turns)
    begun = encode_prompt(tokenizer, [*turns, Message("assistant", "No, thanks.")])
    text = tokenizer.decode(begun)
    assert text.startswith(tokenizer.decode(header)) and text.endswith("No, thanks.")
    rendered = tokenizer.apply_chat_template(
        [
            {"role": turn.role, "content": turn.content}
            for turn in [*turns, Message("assistant", "No, thanks.")]
        ],
        tokenize=False,
        continue_final_message=True,
    )
    assert begun == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_beginning_of_an_answer_that_a_template_hides(with_template):
    hiding = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(
        UserError, match="prompt: must be turns that the chat template renders, got user"
    ) as end:
        encode_prompt(with_template(hiding), [Message("user", "Hi there"), Message("assistant", "Hello!")])
    assert "\n" not in str(end.value)


def test_tokenizer_that_keeps_spaces_in_front_of_words():
    """A Llama-like tokenizer: "▁" before the first word, added only at the text's start."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(LINES * 3, trainers.BpeTrainer(special_tokens=special, show_progress=False))
    for family in ("llama2", "vicuna"):
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            chat_template=family_tokenizer(family).chat_template,
        )
        encoded = encode_conversation(wrapped, chat("Hi there", "Hello!", "Tell me more", "No, thanks."))
        end = " </s>" if family == "llama2" else "</s>"
        assert trained_text(wrapped, encoded) == f" Hello!{end} No, thanks.{end}"


def test_real_tokenizer(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    conversation = chat("What is 12 + 30?\n", "\n42 — café 😀.\n\nMore?", "No.", "Fine!")
    encoded = encode_conversation(tokenizer, conversation)
    text, spans = chatml_reference(conversation)
    assert tokenizer.decode(encoded.input_ids) == text
    assert trained_text(tokenizer, encoded) == "".join(text[start:end] for start, end in spans)
    messages = [{"role": m.role, "content": m.content} for m in conversation.messages[:1]]
    prompt = encode_prompt(tokenizer, messages)
    assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoded.input_ids[: len(prompt)] == prompt


# ------------------------------------------------------------------------------------------- generated ids


def odd_ids(tokenizer, text: str) -> list[int]:
    """Ids that spell a text byte by byte, as no tokenizer would."""
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [tokenizer.get_vocab()[symbol] for symbol in symbols]


def test_generated_ids_reach_the_corpus_unchanged(chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    conversation = chat("Hi there", "Hello!", "Tell me more", "No, thanks.")
    plain = encode_conversation(chatml, conversation)
    first, second = odd_ids(chatml, "Hello!") + [end], odd_ids(chatml, "No, thanks.") + [end]
    conversation.messages[1].token_ids, conversation.messages[3].token_ids = first, second
    encoded = encode_conversation(chatml, conversation)

    assert chatml.decode(encoded.input_ids) == chatml.decode(plain.input_ids)
    assert [i for i, on in zip(encoded.input_ids, encoded.loss_mask, strict=True) if on] == first + second
    assert encoded.input_ids.count(end) == plain.input_ids.count(end)
    prompt = encode_prompt(chatml, conversation.messages[:1])
    assert encoded.input_ids[: len(prompt) + len(first)] == prompt + first


def test_answer_that_hit_the_length_limit(chatml):
    """The template's end-of-turn token is there once, and is not trained: the target did not say it."""
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    conversation = chat("Hi there", "Hello!", "Tell me more", "No, thanks.")
    conversation.messages[1].token_ids = odd_ids(chatml, "Hello!")
    encoded = encode_conversation(chatml, conversation)
    assert chatml.decode(encoded.input_ids) == chatml.decode(
        encode_conversation(chatml, chat("Hi there", "Hello!", "Tell me more", "No, thanks.")).input_ids
    )
    assert trained_text(chatml, encoded) == "Hello!No, thanks.<|im_end|>"
    assert encoded.input_ids.count(end) == 5  # system, user, assistant, user, assistant


def test_generated_ids_that_start_with_a_line_end(chatml):
    """The text's "⏎⏎⏎" would be tokenized across the end of the prompt."""
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    conversation = chat("Hi there", "\n\nHello!")
    conversation.messages[1].token_ids = odd_ids(chatml, "\n\nHello!") + [end]
    encoded = encode_conversation(chatml, conversation)
    prompt = encode_prompt(chatml, conversation.messages[:1])
    expected = prompt + conversation.messages[1].token_ids
    assert encoded.input_ids[: len(expected)] == expected
    assert encoded.loss_mask == [0] * len(prompt) + [1] * (len(expected) - len(prompt)) + [0]


def test_generated_ids_in_llama2():
    tokenizer = family_tokenizer("llama2")
    conversation = chat("Hi there", "Hello!")
    ids = [*odd_ids(tokenizer, " Hello!"), tokenizer.eos_token_id]
    conversation.messages[1].token_ids = ids
    encoded = encode_conversation(tokenizer, conversation)
    prompt = encode_prompt(tokenizer, conversation.messages[:1])
    assert encoded.input_ids == prompt + ids
    assert encoded.loss_mask == [0] * len(prompt) + [1] * len(ids)


def test_half_a_character_at_the_length_limit(chatml):
    ids = odd_ids(chatml, "Hello 😀")[:-2]
    conversation = chat("Hi there", chatml.decode(ids).rstrip("\ufffd"))
    conversation.messages[1].token_ids = ids
    encoded = encode_conversation(chatml, conversation)
    assert [i for i, on in zip(encoded.input_ids, encoded.loss_mask, strict=True) if on] == ids


@pytest.mark.parametrize("ids", [[10**6], [-1], [300, 301, 302], ["a"]])
def test_ids_of_another_tokenizer(chatml, ids):
    conversation = chat("Hi there", "Hello!")
    conversation.messages[1].token_ids = ids
    with pytest.raises(
        UserError, match="row 7: turn 2: token_ids: must .*; use the tokenizer that made them"
    ):
        encode_conversation(chatml, conversation)


# ------------------------------------------------------------------------------------------------- cutting


def test_short_chat_is_one_piece(chatml):
    conversation = chat("Hi there", "Hello!")
    assert cut_at_turns(chatml, conversation, 500) == [encode_conversation(chatml, conversation)]


@pytest.mark.parametrize("max_length", [70, 100, 170])
@pytest.mark.parametrize("system", [[], [Message("system", "Be brief.")]])
def test_pieces_hold_as_many_exchanges_as_fit(chatml, max_length, system):
    contents = [
        ("Tell me more " * (1 + i % 3)).strip() if i % 2 == 0 else "No, thanks." * (i % 4) for i in range(20)
    ]
    messages = chat(*contents).messages
    pieces = cut_at_turns(chatml, Conversation("a", system + messages, "here"), max_length)

    def encode(rounds):
        return encode_conversation(
            chatml, Conversation("a", system + messages[2 * rounds[0] : 2 * rounds[-1] + 2], "")
        )

    expected, rounds = [], []
    for number in range(10):  # the slow reference: add exchanges one by one
        if rounds and len(encode([*rounds, number]).input_ids) > max_length:
            expected.append(encode(rounds))
            rounds = []
        rounds.append(number)
    expected.append(encode(rounds))
    assert len(expected) > 1
    assert pieces == expected


def test_exchange_longer_than_a_piece_is_truncated(chatml):
    conversation = chat("Hi there", "Hello!", "Tell me more", "No, thanks." * 20, "Hi there", "Hello!")
    pieces = cut_at_turns(chatml, conversation, 60)
    assert [piece.truncated for piece in pieces] == [False, True, False]
    whole = encode_conversation(chatml, chat("Tell me more", "No, thanks." * 20))
    assert (pieces[1].input_ids, pieces[1].loss_mask) == (whole.input_ids[:60], whole.loss_mask[:60])
    assert pieces[1].n_trained > 0


def test_prompt_longer_than_a_piece_trains_nothing(chatml):
    pieces = cut_at_turns(chatml, chat("Hi there " * 50, "Hello!", "Hi there", "Hello!"), 50)
    assert [(piece.truncated, piece.n_trained) for piece in pieces] == [(True, 0), (False, 3)]


def test_cutting_keeps_generated_ids(chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    conversation = chat(*["Hi there", "Hello!"] * 6)
    for message in conversation.messages[1::2]:
        message.token_ids = odd_ids(chatml, "Hello!") + [end]
    pieces = cut_at_turns(chatml, conversation, 90)
    assert len(pieces) > 1
    trained = [i for p in pieces for i, on in zip(p.input_ids, p.loss_mask, strict=True) if on]
    assert trained == (odd_ids(chatml, "Hello!") + [end]) * 6


def test_tool_turns_stay_with_their_exchange():
    tokenizer = family_tokenizer("qwen2.5")
    turns = [("user", "Hi there"), ("assistant", "{}"), ("tool", "Hello!"), ("assistant", "No, thanks.")]
    conversation = Conversation("a", [Message(*turn) for turn in turns * 3], "here")
    pieces = cut_at_turns(tokenizer, conversation, 90)
    assert [trained_text(tokenizer, piece) for piece in pieces] == ["{}<|im_end|>No, thanks.<|im_end|>"] * 3


# ----------------------------------------------------------------------------------------------- documents


def test_document_is_trained_as_a_whole(chatml):
    document = Conversation("a", [Message("text", "Tell me more. " * 30)], "here")
    whole = encode_conversation(chatml, document)
    assert chatml.decode(whole.input_ids) == "Tell me more. " * 30
    assert whole.loss_mask == [1] * len(whole.input_ids)
    pieces = cut_at_turns(chatml, document, 50)
    assert [len(piece.input_ids) for piece in pieces[:-1]] == [50] * (len(pieces) - 1)
    assert sum((piece.input_ids for piece in pieces), []) == whole.input_ids
    assert not any(piece.truncated for piece in pieces)


def test_document_with_special_tokens_around(chatml):
    bos = ("<|im_start|>", chatml.convert_tokens_to_ids("<|im_start|>"))
    chatml.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[bos]
    )
    try:
        pieces = cut_at_turns(chatml, Conversation("a", [Message("text", "Hi there " * 9)], "here"), 8)
    finally:
        chatml.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$A", special_tokens=[bos]
        )
    assert [piece.input_ids[0] for piece in pieces] == [bos[1]] * len(pieces)
    assert [piece.loss_mask for piece in pieces[:-1]] == [[0] + [1] * 7] * (len(pieces) - 1)


def test_plain_text_needs_no_template(with_template):
    tokenizer = with_template(None)
    assert encode_conversation(
        tokenizer, Conversation("a", [Message("text", "Hi there")], "here")
    ).loss_mask == [1, 1]
    assert template_hash(tokenizer) == "none"


# ------------------------------------------------------------------------------------------- odd templates

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: a thinking block before the last answer only; thoughts of earlier answers are cut out.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_no_template(with_template):
    with pytest.raises(UserError, match="no chat template.*chat_template.jinja"):
        encode_conversation(with_template(None), chat("Hi there", "Hello!"))
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(with_template(None), [Message("user", "Hi there")])


def test_template_that_refuses_system_turns(with_template):
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    ignore = CHATML.replace("messages %}", "messages if m.role != 'system' %}")
    messages = [Message("system", "Be brief."), *chat("Hi there", "Hello!").messages]
    joined = chat("Be brief.\n\nHi there", "Hello!")
    for template in (refuse, ignore):
        tokenizer = with_template(template)
        assert encode_conversation(tokenizer, Conversation("a", messages, "here")) == encode_conversation(
            tokenizer, joined
        )
        assert encode_prompt(tokenizer, messages[:2]) == encode_prompt(tokenizer, joined.messages[:1])


def test_cutting_where_system_turns_are_joined(with_template):
    tokenizer = with_template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    )
    messages = [Message("system", "Be brief."), *chat(*["Hi there", "Hello!"] * 5).messages]
    pieces = cut_at_turns(tokenizer, Conversation("a", messages, "here"), 45)
    assert len(pieces) > 1
    assert sum(tokenizer.decode(piece.input_ids).count("Hello!") for piece in pieces) == 5
    for piece in pieces:
        assert tokenizer.decode(piece.input_ids).startswith(
            "<|im_start|>user\nBe brief.\n\nHi there<|im_end|>"
        )


def test_template_that_refuses_tool_turns():
    tokenizer = family_tokenizer("llama2")
    turns = [("user", "Hi there"), ("assistant", "{}"), ("tool", "Hello!"), ("assistant", "No, thanks.")]
    encoded = encode_conversation(tokenizer, Conversation("a", [Message(*turn) for turn in turns], "here"))
    assert tokenizer.decode(encoded.input_ids) == (
        "<s>[INST] Hi there [/INST] {} </s><s>[INST] Hello! [/INST] No, thanks. </s>"
    )
    assert trained_text(tokenizer, encoded) == " {} </s> No, thanks. </s>"


def test_end_of_text_after_the_last_turn_only(with_template):
    """As Phi-3: without a generation prompt the text ends in a further token."""
    tokenizer = with_template(CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    encoded = encode_conversation(tokenizer, chat("Hi there", "Hello!", "Tell me more", "No, thanks."))
    assert trained_text(tokenizer, encoded) == "Hello!<|im_end|>No, thanks.<|im_end|>"


def test_end_of_turn_that_is_no_special_token(with_template):
    template = (
        "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n--\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:{% endif %}"
    )
    tokenizer = with_template(template)
    encoded = encode_conversation(tokenizer, chat("Hi there", "Hello!", "Tell me more", "No, thanks."))
    assert trained_text(tokenizer, encoded) == " Hello!\n-- No, thanks.\n--"


def test_no_end_of_turn_at_all(with_template):
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    encoded = encode_conversation(tokenizer, chat("Hi there", "Hello 😀", "Tell me more", "é"))
    assert trained_text(tokenizer, encoded) == " Hello 😀 é"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_generation_prompt_that_ends_in_a_space(with_template, trim_offsets):
    """A token of several spaces would reach over the start of the answer, and shows no width when trimmed."""
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert "ĠĠ" in tokenizer.get_vocab()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    conversation = chat("Hi there", "  Hello!")
    encoded = encode_conversation(tokenizer, conversation)
    prompt = encode_prompt(tokenizer, conversation.messages[:1])
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.loss_mask == [0] * len(prompt) + [1] * (len(encoded.input_ids) - len(prompt))
    assert trained_text(tokenizer, encoded) == "  Hello!<|im_end|>"


def test_text_of_the_template_before_the_answer_is_trained(with_template):
    tokenizer = with_template(THINKING)
    encoded = encode_conversation(tokenizer, chat("Hi there", "Hello!", "Tell me more", "No, thanks."))
    assert trained_text(tokenizer, encoded) == "Hello!<|im_end|><think>\n\n</think>\n\nNo, thanks.<|im_end|>"


def test_template_that_rewrites_earlier_turns(with_template):
    conversation = chat("Hi there", "<think>a</think>Hello!", "Tell me more", "No, thanks.")
    with pytest.raises(UserError, match=r"chats.json:row 7: .*\{% generation %\}"):
        encode_conversation(with_template(THINKING), conversation)
    marked = THINKING.replace("{{ m.content.split('</think>')[-1] }}", "{{ x }}")
    marked = marked.replace(
        "{{ x }}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1] }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>",
    )
    tokenizer = with_template(marked)
    encoded = encode_conversation(tokenizer, conversation)
    assert trained_text(tokenizer, encoded) == "Hello!<|im_end|>No, thanks.<|im_end|>"


def test_generation_prompt_that_no_answer_follows(with_template):
    """As DeepSeek-R1, whose generation prompt opens a thinking block that the finished chat does not show."""
    tokenizer = with_template(CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    with pytest.raises(UserError, match="row 7: must be a chat whose answers the template renders unchanged"):
        encode_conversation(tokenizer, chat("Hi there", "Hello!"))


def test_template_that_raises():
    with pytest.raises(
        UserError, match=r"row 7: must be turns that the chat template renders, got system user system"
    ):
        turns = [("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d")]
        encode_conversation(
            family_tokenizer("llama2"), Conversation("a", [Message(*t) for t in turns], "chats.json:row 7")
        )


def test_date_in_the_template_does_not_depend_on_the_day(with_template):
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    tokenizer = with_template(dated + "{{ date_string }}" + CHATML)
    ids = encode_prompt(tokenizer, [Message("user", "Hi there")])
    assert tokenizer.decode(ids).startswith("26 Jul 2024")


@pytest.mark.parametrize("start", ["", "\n"])
def test_date_that_the_template_asks_for_does_not_depend_on_the_day(start, with_template):
    """As Mistral-Small and SmolLM3, which take no date."""
    asked = (
        "{% set today = strftime_now('%Y-%m-%d') %}{{ today + ' ' + strftime_now(\"%A\").split('d')[0] }}\n"
    )
    dated = with_template(start + asked + CHATML)
    plain = with_template(start + "{{ '2024-07-26 Fri' }}\n" + CHATML)
    for messages in ([Message("user", "Hi there")], [Message("system", "s"), Message("user", "Hi there")]):
        assert encode_prompt(dated, messages) == encode_prompt(plain, messages)


# -------------------------------------------------------------------------------------------------- hashes


def test_hashes_tell_tokenizers_and_templates_apart(with_template):
    one, same, other = with_template(CHATML), with_template(CHATML), with_template(CHATML + " ")
    assert (tokenizer_hash(one), template_hash(one)) == (tokenizer_hash(same), template_hash(same))
    assert tokenizer_hash(one) == tokenizer_hash(other)
    assert template_hash(one) != template_hash(other)
    digits = with_template(CHATML)
    digits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert tokenizer_hash(digits) != tokenizer_hash(one)
    assert len({tokenizer_hash(family_tokenizer(family)) for family in SPECIAL}) == 4  # llama2 = vicuna


def test_hash_is_not_changed_by_use(chatml):
    before = tokenizer_hash(chatml)
    cut_at_turns(chatml, Conversation("a", [Message("text", "Hi there " * 30)], "here"), 10)
    assert tokenizer_hash(chatml) == before


@pytest.mark.parametrize(
    "template", [THINKING, CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")]
)
def test_generated_answers_that_the_template_changes(with_template, template):
    """Each is a piece, after the prompt that the model has read, in which earlier thoughts are cut out."""
    tokenizer = with_template(template)
    conversation = chat("Hi there", "<think>a</think>Hello!", "Tell me more", "<think>b</think>No, thanks.")
    with pytest.raises(UserError, match="renders unchanged"):
        cut_at_turns(tokenizer, conversation, 200)
    for message in conversation.messages[1::2]:
        message.token_ids = tokenizer(message.content)["input_ids"]
    end = tokenizer("<|im_end|>")["input_ids"]
    conversation.messages[1].token_ids += end
    pieces = cut_at_turns(tokenizer, conversation, 200)
    for index, piece in zip((1, 3), pieces, strict=True):
        prompt = encode_prompt(tokenizer, conversation.messages[:index])
        ids = conversation.messages[index].token_ids
        assert piece.input_ids == prompt + ids + (end if index == 3 else [])
        assert (
            piece.loss_mask == [0] * len(prompt) + [1] * len(ids) + [0] * (index == 3) and not piece.truncated
        )
    short = cut_at_turns(tokenizer, conversation, 8)
    assert all(len(piece.input_ids) == 8 and piece.truncated for piece in short)
