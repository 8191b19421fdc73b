"""Fixtures of the whole suite: two tiny random targets, the real SmolLM2, one thread, fixed seeds.

The tiny models are untied and have large weights. A random tied model repeats its input token with any
attention, and small weights give nearly uniform logits: either would let a greedy test pass with a wrong
mask.
"""

import os

# Before torch and transformers are imported: both read the environment at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.hasty import hasty_calibrations, short_looks

pytest_plugins = ["tests.decoding", "tests.gguf_files", "tests.templates"]  # fixtures of several folders

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tiny tokenizer learns its merges from these sentences; any other text falls back to bytes.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the sun is shining on the other side of the river.",
    "Could you please explain how speculative decoding makes a model faster without changing its output?",
    "A small model drafts several tokens, and the large model verifies all of them in a single forward.",
    "def main(arguments):\n    for index, value in enumerate(arguments):\n        print(index, value)\n",
    "Janet has 16 eggs, eats 3 of them, bakes 4 more into muffins and sells the rest for 2 dollars each.",
    "First, think about the question; then answer it step by step, and check whether the answer is right.",
    "Once upon a time there was a little girl who lived in a village near the forest with her grandmother.",
)
VOCABULARY_SIZE = 512


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 512 entries with a ChatML template; EOS `<|im_end|>`, PAD `<|endoftext|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        model_max_length=512,
    )


def tiny_model(config_class: type, model_class: type, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Four random blocks in fp32, hidden size 64, 4 query and 2 key/value heads, untied, eval mode."""
    config = config_class(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).float().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0: losing either would go unnoticed
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def pytest_collection_finish() -> None:
    """Keep what the imports have made out of later garbage collections: one follows each training, and to
    look through a million objects of modules takes longer than most trainings here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def steady_dtype():
    """`dtype: auto` is bfloat16 in this process, on any machine: its probe is tested in
    tests/kernels/test_dtype.py alone."""
    from drafttrain.kernels import dtype

    ms = {"float32": {1: 1.5, 16: 1.5, 128: 1.5}, "bfloat16": {1: 1.0, 16: 1.0, 128: 1.0}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtype, "timed", lambda hidden, intermediate, threads=None: dtype.Timings(ms))
        yield


@pytest.fixture(scope="session", autouse=True)
def short_look():
    """No test waits for two seconds to see whether the machine is busy."""
    with short_looks():
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, independent of what ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random Llama and its tokenizer. Shared by the session: do not change either."""
    tokenizer = tiny_tokenizer()
    return tiny_model(LlamaConfig, LlamaForCausalLM, tokenizer), tokenizer


@pytest.fixture(scope="session")
def tiny_qwen2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random Qwen2 and its tokenizer. Shared by the session: do not change either."""
    tokenizer = tiny_tokenizer()
    return tiny_model(Qwen2Config, Qwen2ForCausalLM, tokenizer), tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in the user's cache; downloaded when it is not there yet."""
    from drafttrain.target_lm.fetch import fetch_target

    return fetch_target("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_target_folder(tiny_llama, tmp_path_factory) -> Path:
    model, tokenizer = tiny_llama
    folder = tmp_path_factory.mktemp("evaluation") / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_target_folder) -> "FrozenTarget":  # noqa: F821
    """A copy of the shared model: taps and hooks do not reach other tests."""
    from drafttrain.target_lm.loading import load_target

    return load_target(str(tiny_target_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_target_folder, tmp_path_factory) -> Path:
    """A random EDD drafter over 200 of the target's 512 tokens."""
    from drafttrain.drafters.config import DrafterConfig
    from drafttrain.drafters.edd import EddConfig, EddModel
    from drafttrain.target_lm.loading import load_target

    target = load_target(str(tiny_target_folder), dtype="float32", device="cpu")
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, DrafterConfig(tapped_blocks=[-2]), 200))
    drafter.initialize_from(target, DrafterConfig(tapped_blocks=[-2]), torch.arange(200))
    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    drafter.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def hasty_calibration(calibrations, monkeypatch) -> Iterator[None]:
    """Short calibrations are shorter still, on any machine, and not kept in the user's cache."""
    from drafttrain.calibration import quick

    monkeypatch.setattr(quick, "cache_dir", lambda: calibrations)
    with hasty_calibrations():
        yield


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path) -> Path:
    """Four chats of two turns, in MT-bench's form."""
    rows = [
        {"question_id": 81 + i, "category": "x", "turns": [f"Question {i}: why?", f"And what about {i}?"]}
        for i in range(4)
    ]
    return write_jsonl(tmp_path / "questions.jsonl", rows)


def with_cheap_drafts(calibration: Path) -> Path:
    """Rewrite a calibration of a tiny target as if its drafter took a hundredth of the time: a tiny target's
    forward takes no longer than a drafting step, with which PCT cannot draft."""
    file = calibration / "calibration.json"
    values = json.loads(file.read_text())
    for curve in values["drafter"] + (values["growth"] or []):
        for name in ("lower", "median", "upper"):
            curve[name] = [seconds / 100 for seconds in curve[name]]
    file.write_text(json.dumps(values))
    return calibration
