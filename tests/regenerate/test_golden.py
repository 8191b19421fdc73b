"""Greedy answers token for token as they were recorded when regeneration had a decode engine of its own."""

import copy
import json
from pathlib import Path

import torch
from rich.console import Console

from drafttrain.data.config import RegenerateConfig, Source
from drafttrain.regenerate.stage import answer_conversations
from drafttrain.target_lm.model import FrozenTarget

RECORDED = Path(__file__).with_name("golden.json")
QUESTIONS = (
    ["What is the fox doing?", "And the lazy dog?", "Where is the river?"],
    ["Explain speculative decoding."],
    ["def main(arguments):", "for index, value"],
    ["How many eggs are left?", "And how many muffins?", "For how many dollars?"],
    ["Once upon a time there was a little girl who lived in a village near the forest. Go on."],
    ["Think about the question; then answer it step by step."],
    ["one", "two", "three"],
)


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy whose weights do not depend on the order in which transformers draws them."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(11)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.data.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.2 * noise)
    return model


def test_greedy_answers_are_the_recorded_ones(tiny_llama, tmp_path):
    model, tokenizer = filled(tiny_llama[0]), tiny_llama[1]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(5, 512, 12)]
    source = tmp_path / "chats.jsonl"
    rows = [
        {"id": f"chat-{i}", "conversations": [{"from": "human", "value": turn} for turn in turns]}
        for i, turns in enumerate(QUESTIONS)
    ]
    for row in rows:  # every question has an answer, which is replaced
        row["conversations"] = [
            turn for asked in row["conversations"] for turn in (asked, {"from": "gpt", "value": "Yes."})
        ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    limits = {"max_new_tokens": 40, "max_prompt_tokens": 400, "batch_rows": 4}
    config = RegenerateConfig([Source(str(source))], greedy_fraction=1.0, **limits)
    target = FrozenTarget(model, tokenizer, "tiny")
    answer_conversations(config, tmp_path / "out", target, tokenizer, console=Console(quiet=True))
    written = (tmp_path / "out" / "responses.jsonl").read_text(encoding="utf-8").split("\n")
    answers = {
        row["id"]: [turn["token_ids"] for turn in row["conversations"] if turn["from"] == "gpt"]
        for row in map(json.loads, filter(None, written))
    }
    assert answers == json.loads(RECORDED.read_text(encoding="utf-8"))
