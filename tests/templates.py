"""Small tokenizers with the chat templates of five model families."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "data" / "templates"
# family → (bos, eos, further special tokens)
SPECIAL = {
    "llama2": ("<s>", "</s>", []),
    "vicuna": ("<s>", "</s>", []),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "qwen2.5": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>"]),
    "smollm2": ("<|im_start|>", "<|im_end|>", ["<|endoftext|>"]),
}
# Each word often enough to become one token: expectations can then be written by hand.
LINES = [
    "Hi there", "Hello!", "Tell me more", "No, thanks.", "Be brief.", "system", "user", "assistant", " Hello",
    " No", "USER: Hi there ASSISTANT: Hello", "USER: Tell me more ASSISTANT: No", "[INST] <<SYS>>",
    "<</SYS>>", " [/INST]", " Tell", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face", "A chat between a curious user",
    " and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to",
    " the user's questions.", "in 2024", "a    b", "[INST] Hi there", "[INST] Tell me more", ". USER: Hi",
]  # fmt: skip


def byte_level_tokenizer(special: list[str], **options) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@lru_cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    bos, eos, further = SPECIAL[family]
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return byte_level_tokenizer([bos, eos, *further], bos_token=bos, eos_token=eos, chat_template=template)


@pytest.fixture(scope="session", params=list(SPECIAL))
def family(request) -> str:
    return request.param


@pytest.fixture
def with_template() -> Callable[[str], PreTrainedTokenizerFast]:
    """A tokenizer with ChatML's special tokens and the given template."""

    def make(template: str | None) -> PreTrainedTokenizerFast:
        special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
        return byte_level_tokenizer(
            special, bos_token=special[0], eos_token=special[1], chat_template=template
        )

    return make


@pytest.fixture
def chatml() -> PreTrainedTokenizerFast:
    """ChatML with a default system prompt, as SmolLM2."""
    return family_tokenizer("smollm2")
