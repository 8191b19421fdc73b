"""The drafter of the best evaluation is the one that is taken."""

import itertools
import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from drafttrain.data.build import build_corpus
from drafttrain.data.config import CorpusConfig, Source
from drafttrain.training.best import best_evaluation
from drafttrain.training.validation import Validation
from drafttrain.utils.files import read_json
from tests.training.conftest import QUESTIONS


def weights(out):
    return load_file(out / "drafter" / "model.safetensors")


def are_equal(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def judge_by(monkeypatch, *accept_lens):
    """Let the evaluations find these lengths one after the other; nothing depends on what is learned."""
    found = itertools.chain(accept_lens, itertools.repeat(accept_lens[-1]))
    monkeypatch.setattr(Validation, "acceptance", lambda self, drafter: {"accept_len": next(found)})


def evaluations(out) -> list[dict]:
    return [entry for entry in read_json(out / "training_log.json") if "eval_loss" in entry]


EVERY_TWO = {"max_steps": 6, "eval_steps": 2, "save_steps": 2}


def test_a_lower_loss_does_not_choose_where_accept_len_falls(run_training, monkeypatch):
    judge_by(monkeypatch, 2.0)
    early = run_training("early", **{**EVERY_TWO, "max_steps": 2})
    judge_by(monkeypatch, 2.0, 1.9, 1.8)
    out = run_training("out", **EVERY_TWO)
    losses = [entry["eval_loss"] for entry in evaluations(out)]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
    assert are_equal(weights(out), weights(early))
    record = read_json(out / "drafter" / "config.json")["training"]
    assert (record["chosen_step"], record["steps"], record["final"]["eval_accept_len"]) == (2, 6, 2.0)
    # the last one is kept beside it, and is taken where it is asked for
    judge_by(monkeypatch, 2.0, 1.9, 1.8)
    last = run_training("last", **EVERY_TWO, select="last")
    assert not are_equal(weights(last), weights(early))
    kept = load_file(out / "checkpoints" / "checkpoint-6" / "model.safetensors")
    assert are_equal({name: kept[name] for name in weights(last)}, weights(last))


def test_an_interrupted_training_knows_its_best(run_training, monkeypatch, capsys):
    def interrupted(name):
        with pytest.MonkeyPatch.context() as patch:
            judge_by(patch, 2.0, 1.9)
            run_training(name, **{**EVERY_TWO, "max_steps": 4})
        shutil.rmtree(place := early.parent / name / "drafter")
        return place.parent

    judge_by(monkeypatch, 2.0)
    early = run_training("early", **{**EVERY_TWO, "max_steps": 2})
    interrupted("resumed")
    judge_by(monkeypatch, 1.8)
    assert are_equal(weights(run_training("resumed", **EVERY_TWO)), weights(early))
    # without the best one the best of later steps is taken, with a warning
    out = interrupted("robbed")
    shutil.rmtree(out / "checkpoints" / "best-2")
    judge_by(monkeypatch, 1.8)
    capsys.readouterr()
    robbed = run_training("robbed", **EVERY_TWO)
    assert "best-2: must hold the best drafter so far (accept_len 2.000), got none" in capsys.readouterr().out
    assert read_json(robbed / "drafter" / "config.json")["training"]["chosen_step"] == 6


def test_the_best_of_the_others_is_kept_over_later_ends(run_training, monkeypatch):
    """The best one is lost; the next best one stays, also where a training has ended after its last step."""
    judge_by(monkeypatch, 3.0)
    out = run_training("out", **{**EVERY_TWO, "max_steps": 2})
    shutil.rmtree(out / "checkpoints" / "best-2")
    for steps, accept_len in ((4, 2.5), (6, 2.0), (6, 2.0)):
        shutil.rmtree(out / "drafter")
        judge_by(monkeypatch, accept_len)
        run_training("out", **{**EVERY_TWO, "max_steps": steps})
        assert read_json(out / "drafter" / "config.json")["training"]["chosen_step"] == 4


def test_a_best_that_no_checkpoint_knows_of_takes_no_other_s_place(run_training, monkeypatch, capsys):
    """Killed between a better evaluation and the checkpoint after it."""
    between = {"max_steps": 8, "eval_steps": 2, "save_steps": 4}
    judge_by(monkeypatch, 1.0, 2.0)
    early = run_training("early", **{**between, "max_steps": 4})
    lengths = iter([1.0, 2.0, 2.5])

    def killed(self, drafter):
        try:
            return {"accept_len": next(lengths)}
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(Validation, "acceptance", killed)
    with pytest.raises(KeyboardInterrupt):
        run_training("out", **between)
    kept = early.parent / "out" / "checkpoints"
    assert {path.name for path in kept.glob("best-*")} == {"best-4", "best-6"}
    judge_by(monkeypatch, 1.5, 1.0)
    capsys.readouterr()
    out = run_training("out", **between)
    assert "must hold the best drafter" not in capsys.readouterr().out
    assert are_equal(weights(out), weights(early))
    assert [path.name for path in kept.glob("best-*")] == ["best-4"]


def test_a_damaged_best_is_not_taken(run_training, monkeypatch, capsys):
    judge_by(monkeypatch, 2.0, 1.9)
    out = run_training("out", **{**EVERY_TWO, "max_steps": 4})
    shutil.rmtree(out / "drafter")
    (out / "checkpoints" / "best-2" / "model.safetensors").write_bytes(b"no weights")
    judge_by(monkeypatch, 1.8)
    out = run_training("out", **EVERY_TWO)
    assert "best-2: must be readable, got" in capsys.readouterr().out
    assert read_json(out / "drafter" / "config.json")["training"]["chosen_step"] == 6


@pytest.mark.parametrize(
    ("lengths", "lost", "chosen"),
    [
        ([1.0, 2.0, 1.5], (), 2),
        ([1.0, 2.0, 1.985, 1.9], (), 3),  # as good, and later
        ([1.0, 2.0, 1.985, 2.005], (), 4),
        ([3.0, 2.0, 2.5], (1,), 3),
        ([3.0, 2.0, 1.9], (1, 2), 3),
        ([3.0], (1,), None),
        ([None], (), None),
        ([], (), None),
    ],
)
def test_the_best_evaluation(lengths, lost, chosen):
    log = [
        {"step": i + 1, "eval_accept_len": length, "eval_accept_len_error": 0.02}
        for i, length in enumerate(lengths)
    ]
    found = best_evaluation(TrainerState(log_history=[{"step": 1, "loss": 9.0}, *log]), lost)
    assert (found and found["step"]) == chosen


def test_an_evaluation_without_an_error_must_have_the_highest():
    log = [{"step": i, "eval_accept_len": length} for i, length in ((1, 2.0), (2, 2.0), (3, 1.999))]
    assert best_evaluation(TrainerState(log_history=log))["step"] == 2


def test_a_drafter_that_forgets_is_not_taken(run_training, taught_folder, tiny_llama, tmp_path):
    """Nothing is replaced here: on strange text the loss falls, while drafts for the prompts get worse."""
    rng, source = random.Random(0), tmp_path / "strange.jsonl"
    words = "zinc lava mole jump tent quiz fork salt wolf barn".split()
    with open(source, "w", encoding="utf-8") as file:
        for i in range(60):
            answer = " ".join(rng.choices(words, k=24))
            turns = [{"from": "human", "value": f"Words {i}"}, {"from": "gpt", "value": answer}]
            file.write(json.dumps({"id": str(i), "conversations": turns}) + "\n")
    config = CorpusConfig(sources=[Source(str(source))], max_length=96, validation_fraction=0.1)
    build_corpus(config, tiny_llama[1], tmp_path / "strange")
    prompts = tmp_path / "prompts.jsonl"
    asked = [f"{question} {i}" for i in range(2) for question in QUESTIONS]
    prompts.write_text(
        "".join(json.dumps({"id": str(i), "prompt": one}) + "\n" for i, one in enumerate(asked))
    )
    decoded = {"eval_prompts": str(prompts), "eval_prompt_limit": 8, "eval_new_tokens": 24}
    able = run_training("able", target=taught_folder, max_steps=60, lr=1e-2, **decoded)
    out = run_training(
        "out",
        target=taught_folder,
        corpus=tmp_path / "strange",
        init_from=str(able / "drafter"),
        lr=1e-2,
        max_steps=24,
        eval_steps=6,
        **decoded,
    )
    first, *_, last = evaluations(out)
    assert last["eval_loss"] < first["eval_loss"] and last["eval_accept_len"] < first["eval_accept_len"] - 0.2
    record = read_json(out / "drafter" / "config.json")["training"]
    assert record["chosen_step"] == first["step"] and record["steps"] == last["step"]
