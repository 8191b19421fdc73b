"""Drafters that are spoiled on purpose: the diagnosis names what was done to each."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.drafters.config import DrafterConfig
from drafttrain.evaluation.diagnose import NAMED, diagnose
from drafttrain.training.train import train
from tests.training.conftest import quick

TAP, VOCABULARY = [-2], 200


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    questions = ("Why is the sky blue?", "What is the sun?", "Who drafts tokens?", "Where is the river?")
    rows = [{"id": str(i), "prompt": f"{questions[i % 4]} {i}"} for i in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(run_training, target, name, **settings):
    plan = {"max_steps": 60, "drafter": DrafterConfig(tapped_blocks=TAP, draft_vocab_size=VOCABULARY)}
    return run_training(name, target=target, **{**plan, **settings}) / "drafter"


def changes(drafter, target, prompts, tmp_path):
    out = tmp_path / "diagnosis.json"
    found = diagnose(str(drafter), str(prompts), out, target=str(target), dtype="float32", max_new_tokens=40)
    assert json.loads(out.read_text())["accept_len"] == found.accept_len
    return found


@pytest.fixture(scope="module")
def good(taught_folder, corpus_folder, tmp_path_factory):
    shape = DrafterConfig(tapped_blocks=TAP, draft_vocab_size=VOCABULARY)
    out = tmp_path_factory.mktemp("good")
    return train(quick(max_steps=60), shape, str(taught_folder), corpus_folder, out, target_dtype="float32")


def test_a_training_that_ended_too_soon(good, taught_folder, prompts, tmp_path):
    """Its log is beside the drafter of a training, and with the files of a bundle."""
    folder = shutil.copytree(good.parent, tmp_path / "training")
    log = [{"step": n, "eval_accept_len": 1 + n / 4} for n in range(1, 9)]
    (folder / "training_log.json").write_text(json.dumps(log))
    found = changes(folder / "drafter", taught_folder, prompts, tmp_path)
    assert "training" in [change.cause for change in found.changes]


def test_a_small_vocabulary(run_training, taught_folder, prompts, tmp_path):
    shape = DrafterConfig(tapped_blocks=TAP, draft_vocab_size=24)
    spoiled = trained(run_training, taught_folder, "small", drafter=shape)
    assert changes(spoiled, taught_folder, prompts, tmp_path).changes[0].cause == "vocabulary"


def test_another_template(good, taught_folder, prompts, tmp_path):
    other = shutil.copytree(taught_folder, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = tokenizer.get_chat_template().replace("user", "human") + "{# other #}"
    tokenizer.save_pretrained(other)
    assert changes(good, other, prompts, tmp_path).changes[0].cause == "template"


def test_easier_prompts_do_not_hide_another_template(good, taught_folder, prompts, tmp_path):
    """Its cost is not known then: accept_len is above that of the validation prompts."""
    easier, other = (
        shutil.copytree(a, tmp_path / b) for a, b in ((good, "easier"), (taught_folder, "other"))
    )
    config = json.loads((easier / "config.json").read_text())
    config["training"]["final"]["eval_accept_len"] = 1.0
    (easier / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = tokenizer.get_chat_template() + "{# other #}"
    tokenizer.save_pretrained(other)
    [found] = changes(easier, other, prompts, tmp_path).changes
    assert (found.cause, found.gain) == ("template", None)


def test_stale_weights_of_the_target(good, taught_folder, prompts, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(taught_folder)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    other = shutil.copytree(taught_folder, tmp_path / "other")
    model.save_pretrained(other)
    found = changes(good, other, prompts, tmp_path).changes[0]
    assert found.cause == "weights" and found.gain > 0


def test_another_tapped_block(good, taught_folder, prompts, tmp_path):
    config = json.loads((good / "config.json").read_text())
    own = config["tapped_blocks"]
    spoiled = shutil.copytree(good, tmp_path / "spoiled")
    (spoiled / "config.json").write_text(json.dumps({**config, "tapped_blocks": [0]}))
    found = changes(spoiled, taught_folder, prompts, tmp_path).changes[0]
    assert found.cause == "tapped blocks" and f"tapped_blocks: {own}" in found.remedy


def test_short_answers_alone(run_training, taught_folder, corpus_folder, prompts, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(taught_folder)
    source = corpus_folder.parent / "chats.jsonl"
    config = CorpusConfig(sources=[Source(str(source))], max_length=40, validation_fraction=0.1)
    build_corpus(config, tokenizer, tmp_path / "short")
    spoiled = trained(run_training, taught_folder, "short_answers", corpus=tmp_path / "short")
    found = changes(spoiled, taught_folder, prompts, tmp_path)
    assert {"long answers", "long contexts"} & {one.cause for one in found.changes[:NAMED]}


def test_a_good_one(good, taught_folder, prompts, tmp_path):
    found = changes(good, taught_folder, prompts, tmp_path)
    assert not found.changes and found.accept_len > 5
