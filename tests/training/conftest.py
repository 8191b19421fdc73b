"""A tiny target on disk, a corpus of repetitive chats for it, and quick settings."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import load_from_disk
from torch.utils.data import default_collate
from transformers import LlamaForCausalLM

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.drafters.config import DrafterConfig
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.packed import causal_document_mask
from drafttrain.training.config import TrainingConfig
from drafttrain.training.packing import PackedRows
from drafttrain.training.train import train

QUESTIONS = ("Why is the sky blue?", "What is the sun?", "Who drafts tokens?", "Where is the river?")
ANSWERS = (
    "The sun is shining on the other side of the river, and the quick brown fox jumps.",
    "A small model drafts several tokens, and the large model verifies all of them.",
    "First, think about the question; then answer it step by step, and check the answer.",
)


@pytest.fixture(scope="session")
def target_folder(tiny_llama, tmp_path_factory) -> Path:
    model, tokenizer = tiny_llama
    folder = tmp_path_factory.mktemp("target") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tiny_llama, tmp_path_factory) -> Path:
    """120 chats of about 60 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    source = folder / "chats.jsonl"
    with open(source, "w", encoding="utf-8") as file:
        for i in range(120):
            turns = [
                {"from": "human", "value": f"{QUESTIONS[i % 4]} {i}"},
                {"from": "gpt", "value": f"{ANSWERS[i % 3]} {ANSWERS[i // 3 % 3]}"},
            ]
            file.write(json.dumps({"id": str(i), "conversations": turns}) + "\n")
    config = CorpusConfig(sources=[Source(str(source))], max_length=96, validation_fraction=0.1)
    build_corpus(config, tiny_llama[1], folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="session")
def small_lm_folder(tiny_llama, tmp_path_factory) -> Path:
    """A Llama of two narrow blocks with one table for embeddings and head, in the target's vocabulary."""
    config = copy.deepcopy(tiny_llama[0].config)
    config.num_hidden_layers, config.hidden_size, config.head_dim = 2, 32, 8
    config.intermediate_size, config.tie_word_embeddings = 64, True
    folder = tmp_path_factory.mktemp("small") / "lm"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    tiny_llama[1].save_pretrained(folder)
    return folder


@pytest.fixture
def target(target_folder):
    return load_target(str(target_folder), dtype="float32", device="cpu")


def quick(**settings) -> TrainingConfig:
    """Short steps in fp32, no evaluation before the end."""
    defaults = {
        "lr": 3e-3,
        "schedule": "constant",
        "rows_per_batch": 2,
        "row_length": 192,
        "max_steps": 4,
        "eval_steps": 1000,
        "eval_prompt_limit": 2,
        "eval_new_tokens": 8,
        "logging_steps": 1,
        "save_steps": 1000,
        "bf16": False,
    }
    return TrainingConfig(**{**defaults, **settings})


@pytest.fixture
def settings() -> Callable[..., TrainingConfig]:
    return quick


@pytest.fixture
def run_training(target_folder, corpus_folder, tmp_path) -> Callable[..., Path]:
    """Trains through `train`; returns the folder it wrote to."""

    def run(
        name: str = "run",
        target: Path | None = None,
        hidden_states: Path | None = None,
        drafter: DrafterConfig | None = None,
        corpus: Path | None = None,
        **settings,
    ) -> Path:
        out = tmp_path / name
        train(
            quick(**settings),
            drafter or DrafterConfig(tapped_blocks=[-2], draft_vocab_size=200),
            str(target or target_folder),
            corpus or corpus_folder,
            out,
            hidden_states=hidden_states,
            target_dtype="float32",
            target_device="cpu",
        )
        return out

    return run


@pytest.fixture(scope="session")
def taught_folder(tiny_llama, corpus_folder, tmp_path_factory) -> Path:
    """A tiny Llama that has learned the corpus by heart, so that there is something to draft."""
    tokenizer = tiny_llama[1]
    config = copy.deepcopy(tiny_llama[0].config)
    config.initializer_range = 0.05
    documents = load_from_disk(str(corpus_folder))["train"]
    rows = PackedRows(documents, 192, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(80):
            batch = default_collate([rows[(4 * step + i) % len(rows)] for i in range(4)])
            start, ids = batch["document_start"], batch["input_ids"]
            mask = causal_document_mask(start)[:, None]
            logits = model(input_ids=ids, attention_mask=mask, position_ids=batch["positions"]).logits
            trained = batch["loss_mask"].bool()[:, :-1]
            loss = F.cross_entropy(logits[:, :-1][trained], ids[:, 1:][trained])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert loss < 0.5
    folder = tmp_path_factory.mktemp("taught") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
