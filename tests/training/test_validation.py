"""Measured during training: held-out loss, lost mass and the accept_len of the shipped decode loop."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.training.packing import PackedRows
from drafttrain.training.validation import TEXT_PROMPT, Validation, ratio_error, validation_prompts
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError


@pytest.fixture
def split(corpus_folder):
    return load_from_disk(str(corpus_folder))["validation"]


@pytest.fixture
def drafter(target):
    config = DrafterConfig(tapped_blocks=[-2], draft_vocab_size=200)
    drafter = EddModel(EddConfig.for_target(target, config, 200))
    drafter.initialize_from(target, config, torch.arange(100, 300))
    return drafter


def test_measures_the_same_each_time(settings, target, split, drafter):
    validation = Validation(settings(), target, PackedRows(split, 192, 0))
    first = validation(drafter)
    torch.manual_seed(5)
    assert validation(drafter) == first
    assert first["loss"] > 0 and 0 <= first["top1_agreement"] <= 1
    assert first["accept_len"] >= 1


def test_held_out_rows_are_not_those_of_the_longest_documents_alone(settings, target, split, drafter):
    rows = PackedRows(split, 192, 0)
    rows.rows = rows.rows * 40  # more than are looked at
    read = []
    rows_of = PackedRows.__getitem__

    class Noted(PackedRows):
        def __getitem__(self, index):
            read.append(index)
            return rows_of(self, index)

    rows.__class__ = Noted
    Validation(settings(), target, rows).held_out(drafter)
    assert read == sorted({*read}) and len(read) == 16 and read[-1] >= len(rows) * 15 // 16


def test_lost_mass_is_what_the_draft_vocabulary_misses(settings, target, split, drafter):
    got = Validation(settings(kl_chunk=50), target, PackedRows(split, 192, 0)).held_out(drafter)
    lost, positions = 0.0, 0
    for document in split:
        ids, mask = document["input_ids"], document["loss_mask"]
        probs = target.model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        for i in range(len(ids) - 1):
            if mask[i + 1]:
                lost += 1 - probs[i, 100:300].sum().item()
                positions += 1
    assert got["lost_mass"] == pytest.approx(lost / positions, rel=1e-4)


def test_acceptance_is_that_of_the_decode_loop(settings, target, split, drafter):
    config = settings(eval_prompt_limit=3, eval_draft_length=4, eval_new_tokens=10)
    validation = Validation(config, target, PackedRows(split, 192, 0))
    emitted, forwards = [], []
    for prompt in validation.prompts:
        _, stats = decode_all(target, TreeProposer(drafter, ChainPolicy(4)), [prompt], 10)
        emitted, forwards = [*emitted, stats.new_tokens - 1], [*forwards, stats.steps]
    found, expected = validation.acceptance(drafter), sum(emitted) / sum(forwards)
    assert found["accept_len"] == pytest.approx(expected)
    rest = [own - expected * steps for own, steps in zip(emitted, forwards)]
    error = (3 / 2 * sum(one**2 for one in rest)) ** 0.5 / sum(forwards)
    assert found["accept_len_error"] == pytest.approx(error)


def test_the_error_of_a_ratio_is_its_spread_over_samples():
    rng = np.random.default_rng(0)
    steps = rng.integers(10, 60, (4000, 16)).astype(float)
    tokens = steps * rng.normal(2.0, 0.3, (4000, 16))
    spread = (tokens.sum(1) / steps.sum(1)).std()
    errors = [ratio_error(*both) for both in zip(tokens[:500], steps[:500])]
    assert np.mean(errors) == pytest.approx(spread, rel=0.05)
    assert ratio_error(tokens[0, :1], steps[0, :1]) == ratio_error(np.zeros(2), np.zeros(2)) == 0.0


def test_prompts_end_where_training_begins(settings, target, split):
    prompts = validation_prompts(settings(eval_prompt_limit=3), target, PackedRows(split, 192, 0))
    assert len(prompts) == 3
    for prompt, document in zip(prompts, split):
        n = len(prompt)
        assert prompt == document["input_ids"][:n]
        assert document["loss_mask"][:n] == [0] * n and document["loss_mask"][n] == 1
        assert target.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")


def test_prompts_from_plain_text(settings, target):
    text = Dataset.from_dict({"id": ["a"], "input_ids": [list(range(3, 83))], "loss_mask": [[1] * 80]})
    prompts = validation_prompts(settings(), target, PackedRows(text, 192, 0))
    assert prompts == [list(range(3, 3 + TEXT_PROMPT))]


def test_prompts_from_a_file(settings, target, split, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Why {i}? " + "x" * 900 * (i == 1)}) + "\n" for i in range(4))
    )
    config = settings(eval_prompts=str(path), eval_prompt_limit=2)
    prompts = validation_prompts(config, target, PackedRows(split, 192, 0))
    texts = [target.tokenizer.decode(prompt) for prompt in prompts]  # the second one is too long
    assert [text.split("\n")[1].split("?")[0] for text in texts] == ["Why 0", "Why 2"]
    assert all(text.endswith("<|im_start|>assistant\n") for text in texts)


def test_an_empty_split_is_refused(settings, target):
    empty = Dataset.from_dict({"id": ["a"], "input_ids": [[1]], "loss_mask": [[1]]}).select([])
    with pytest.raises(UserError, match="must have a validation split, .* raise corpus.validation_fraction"):
        Validation(settings(), target, PackedRows(empty, 192, 0))
