"""A tiny target on disk with a random drafter for it, and files of prompts."""

import json
from pathlib import Path

import pytest
import torch

from drafttrain.drafters.edd import DrafterConfig, EddConfig, EddModel
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.loading import load_target


@pytest.fixture(scope="session")
def tiny_target_folder(tiny_llama, tmp_path_factory) -> Path:
    model, tokenizer = tiny_llama
    folder = tmp_path_factory.mktemp("evaluation") / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_target_folder) -> FrozenTarget:
    """A copy of the shared model: taps and hooks do not reach other tests."""
    return load_target(str(tiny_target_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_target_folder, tmp_path_factory) -> Path:
    """A random EDD drafter over 200 of the target's 512 tokens."""
    target = load_target(str(tiny_target_folder), dtype="float32", device="cpu")
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, DrafterConfig(tapped_blocks=[-2]), 200))
    drafter.initialize_from(target, DrafterConfig(tapped_blocks=[-2]), torch.arange(200))
    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    drafter.save_pretrained(folder)
    return folder


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
