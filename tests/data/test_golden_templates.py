"""Five families' templates against texts, tokens and masks written by hand."""

import pytest

from drafttrain.data.chat import encode_prompt
from drafttrain.data.conversation import Conversation
from drafttrain.data.loss_mask import encode_conversation
from drafttrain.data.message import Message
from tests.templates import family_tokenizer

CHAT = [
    Message("user", "Hi there"),
    Message("assistant", "Hello!"),
    Message("user", "Tell me more"),
    Message("assistant", "No, thanks."),
]
SYSTEM = Message("system", "Be brief.")

# Rendered text with the trained parts in ⟦⟧.
TEXTS = {
    (
        "llama2",
        False,
    ): "<s>[INST] Hi there [/INST]⟦ Hello! </s>⟧<s>[INST] Tell me more [/INST]⟦ No, thanks. </s>⟧",
    ("llama2", True): (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi there [/INST]⟦ Hello! </s>⟧"
        "<s>[INST] Tell me more [/INST]⟦ No, thanks. </s>⟧"
    ),
    ("llama3", False): (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nTell me more<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦No, thanks.<|eot_id|>⟧"
    ),
    ("llama3", True): (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nTell me more<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦No, thanks.<|eot_id|>⟧"
    ),
    ("vicuna", False): (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions. "
        "USER: Hi there ASSISTANT:⟦ Hello!</s>⟧USER: Tell me more ASSISTANT:⟦ No, thanks.</s>⟧"
    ),
    ("vicuna", True): (
        "<s>Be brief. USER: Hi there ASSISTANT:⟦ Hello!</s>⟧USER: Tell me more ASSISTANT:⟦ No, thanks.</s>⟧"
    ),
    ("qwen2.5", False): (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\nTell me more<|im_end|>\n<|im_start|>assistant\n⟦No, thanks.<|im_end|>⟧\n"
    ),
    ("qwen2.5", True): (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\nTell me more<|im_end|>\n<|im_start|>assistant\n⟦No, thanks.<|im_end|>⟧\n"
    ),
    ("smollm2", False): (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\nTell me more<|im_end|>\n<|im_start|>assistant\n⟦No, thanks.<|im_end|>⟧\n"
    ),
    ("smollm2", True): (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
        "<|im_start|>user\nTell me more<|im_end|>\n<|im_start|>assistant\n⟦No, thanks.<|im_end|>⟧\n"
    ),
}

# Tokens of the chat with a system turn; Ġ is a space and Ċ a line end, as byte-level tokenizers write them.
TOKENS = {
    "llama2": (
        "<s> [ INST ] Ġ<< SYS >> Ċ Be Ġbrief . Ċ <</ SYS >> Ċ Ċ Hi Ġthere Ġ[/ INST ] ⟦ ĠHello ! Ġ </s> ⟧ "
        "<s> [ INST ] ĠTell Ġme Ġmore Ġ[/ INST ] ⟦ ĠNo , Ġthanks . Ġ </s> ⟧"
    ),
    "llama3": (
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> Ċ Ċ Be Ġbrief . <|eot_id|> "
        "<|start_header_id|> user <|end_header_id|> Ċ Ċ Hi Ġthere <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ ⟦ Hello ! <|eot_id|> ⟧ "
        "<|start_header_id|> user <|end_header_id|> Ċ Ċ Tell Ġme Ġmore <|eot_id|> "
        "<|start_header_id|> assistant <|end_header_id|> Ċ Ċ ⟦ No , Ġthanks . <|eot_id|> ⟧"
    ),
    "vicuna": (
        "<s> Be Ġbrief . ĠUSER : ĠHi Ġthere ĠASSISTANT : ⟦ ĠHello ! </s> ⟧ "
        "USER : ĠTell Ġme Ġmore ĠASSISTANT : ⟦ ĠNo , Ġthanks . </s> ⟧"
    ),
    "qwen2.5": (
        "<|im_start|> system Ċ Be Ġbrief . <|im_end|> Ċ <|im_start|> user Ċ Hi Ġthere <|im_end|> Ċ "
        "<|im_start|> assistant Ċ ⟦ Hello ! <|im_end|> ⟧ Ċ "
        "<|im_start|> user Ċ Tell Ġme Ġmore <|im_end|> Ċ "
        "<|im_start|> assistant Ċ ⟦ No , Ġthanks . <|im_end|> ⟧ Ċ"
    ),
}
TOKENS["smollm2"] = TOKENS["qwen2.5"]


@pytest.mark.parametrize("with_system", [False, True])
def test_text_and_trained_text(family, with_system):
    tokenizer = family_tokenizer(family)
    messages = [SYSTEM, *CHAT] if with_system else CHAT
    encoded = encode_conversation(tokenizer, Conversation("a", messages, "here"))

    expected = TEXTS[family, with_system]
    assert tokenizer.decode(encoded.input_ids) == expected.replace("⟦", "").replace("⟧", "")
    trained = [i for i, on in zip(encoded.input_ids, encoded.loss_mask, strict=True) if on]
    assert tokenizer.decode(trained) == "".join(part.split("⟧")[0] for part in expected.split("⟦")[1:])


def test_ids_and_mask(family):
    tokenizer = family_tokenizer(family)
    encoded = encode_conversation(tokenizer, Conversation("a", [SYSTEM, *CHAT], "here"))

    tokens, mask, on = [], [], 0
    for token in TOKENS[family].split():
        if token in "⟦⟧":
            on = int(token == "⟦")
        else:
            tokens.append(token)
            mask.append(on)
    vocabulary = tokenizer.get_vocab()
    assert encoded.input_ids == [vocabulary[token] for token in tokens]
    assert encoded.loss_mask == mask


def test_prompt_is_the_start_of_the_conversation(family):
    tokenizer = family_tokenizer(family)
    ids = encode_conversation(tokenizer, Conversation("a", CHAT, "here"))
    for n_turns in (1, 3):
        prompt = encode_prompt(tokenizer, CHAT[:n_turns])
        assert ids.input_ids[: len(prompt)] == prompt
        assert ids.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_prompt_takes_dicts(family):
    tokenizer = family_tokenizer(family)
    dicts = [{"role": turn.role, "content": turn.content} for turn in CHAT[:1]]
    assert encode_prompt(tokenizer, dicts) == encode_prompt(tokenizer, CHAT[:1])
