"""The training stage as a whole: it learns, resumes bit for bit, and refuses what it cannot train."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerState

from drafttrain.drafters.config import KINDS, DrafterConfig
from drafttrain.drafters.edd import EddModel
from drafttrain.hidden_states.collect import collect
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.kernels import dtype
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training import config, trainer
from drafttrain.training.deepspeed_file import whole_settings
from drafttrain.training.resuming import last_whole_checkpoint
from drafttrain.training.train import (
    Clock,
    ShowSteps,
    planned_steps,
    rate_schedule,
    settle_bf16,
    train,
    training_arguments,
)
from drafttrain.training.trainer import DraftTrainer
from drafttrain.training.validation import Validation
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json


def weights(out) -> dict[str, torch.Tensor]:
    return load_file(out / "drafter" / "model.safetensors")


def log_of(out) -> list[dict]:
    return json.loads((out / "training_log.json").read_text())


def losses(out) -> list[float]:
    return [entry["loss"] for entry in log_of(out) if "loss" in entry]


def record_of(out) -> list[dict]:
    """The log without what the clock decides."""
    timed = ("elapsed", "runtime", "per_second")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in log_of(out)
    ]


def assert_equal_weights(one, other) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_close_weights(one, other, atol=2e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=0, msg=name)


# it learns


def test_learns_to_draft(run_training, taught_folder):
    out = run_training(
        target=taught_folder, max_steps=60, eval_steps=20, eval_new_tokens=24, eval_prompt_limit=6
    )
    log = log_of(out)
    loss = losses(out)
    assert len(loss) == 60 and sum(loss[-5:]) < 0.05 * sum(loss[:5])
    evaluated = [entry for entry in log if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [20, 40, 60]  # and not a second time at the end
    held_out = [entry["eval_loss"] for entry in evaluated]
    assert held_out == sorted(held_out, reverse=True)
    assert evaluated[-1]["eval_accept_len"] > 3 and evaluated[-1]["eval_top1_agreement"] > 0.9
    assert 0 <= evaluated[-1]["eval_lost_mass"] < 0.01

    training = json.loads((out / "drafter" / "config.json").read_text())["training"]
    assert training["steps"] == 60 and training["lr"] == 3e-3 and training["seed"] is None
    assert training["tokens"] == sum(entry["tokens"] for entry in log if "tokens" in entry)
    (file,) = training["corpus_files"]
    assert file["conversations"] > 0 and len(file["sha256"]) == 64 and "/" not in file["name"]
    assert training["machine"]["threads"] == 1 and training["machine"]["device"] == "cpu"
    assert training["processes"] == 1 and training["optimizer"] == "adamw"
    assert training["tokens"] > training["corpus_tokens"] and training["seconds"] > 0
    assert training["final"]["eval_accept_len"] == evaluated[-1]["eval_accept_len"]

    target = load_target(str(taught_folder), dtype="float32", device="cpu")
    drafter = EddModel.load(out / "drafter", target)
    assert drafter.draft_vocab_size == 200
    assert target.eos_token_ids <= set(drafter.draft_to_target.tolist())
    prompt = target.tokenizer("<|im_start|>user\nWho drafts tokens?")["input_ids"]
    drafted, stats = decode_all(target, TreeProposer(drafter, ChainPolicy(5)), [prompt], 40)
    assert drafted == decode_all(target, NoProposer(), [prompt], 40)[0] and stats.accept_len > 2


def test_documents_beyond_the_positions_of_the_target_are_refused(run_training, target_folder, tmp_path):
    folder = shutil.copytree(target_folder, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    with pytest.raises(UserError, match="corpus.max_length: must be <= 16, the target's limit, got"):
        run_training(target=folder, max_steps=1)


def test_trains_over_stored_states(run_training, corpus_folder, target_folder, tmp_path):
    """The losses of a whole training, up to the rounding of the states to bf16."""
    stored = tmp_path / "states"
    collect(CollectConfig(), str(target_folder), [-2], corpus_folder, stored, dtype="float32")
    online = losses(run_training("online", max_steps=5))
    offline = losses(run_training("offline", max_steps=5, hidden_states=stored))
    assert online != offline
    assert online == pytest.approx(offline, rel=0.01)


@pytest.mark.parametrize(
    ("drafter", "exact"),
    [
        (DrafterConfig(tapped_blocks=[-2, 0], draft_vocab_size=200), [2, 0]),
        (DrafterConfig(kind="eagle", draft_vocab_size=200), []),
    ],
    ids=["edd", "eagle"],
)
def test_a_store_of_more_blocks_trains_the_same(
    drafter, exact, run_training, corpus_folder, target_folder, tmp_path
):
    """As one that holds what the drafter reads, in its order; EAGLE reads the final states alone."""
    for name, blocks in (("exact", exact), ("more", [0, 1, -2])):
        collect(CollectConfig(), str(target_folder), blocks, corpus_folder, tmp_path / name, dtype="float32")
    one, other = (
        run_training(f"of_{name}", max_steps=3, drafter=drafter, hidden_states=tmp_path / name)
        for name in ("exact", "more")
    )
    assert_equal_weights(weights(one), weights(other))


def test_bf16_and_two_layers_train(run_training):
    drafter = DrafterConfig(tapped_blocks=[-2, 0], layers=2, draft_vocab_size=None, init=2)
    out = run_training(drafter=drafter, bf16=True, max_steps=12)
    loss = losses(out)
    assert sum(loss[-3:]) < sum(loss[:3])
    stored = weights(out)
    assert stored["lm_head.weight"].shape == (512, 64)
    assert stored["layers.1.q_proj.weight"].dtype == torch.float32


def test_emphasis_changes_the_loss_from_the_first_step(run_training):
    plain, less, mixed, more = (
        losses(run_training(name, max_steps=1, logging_steps=1, **keys))[0]
        for name, keys in (
            ("plain", {}),
            ("less", {"unreached_weight": 0.0}),
            ("mixed", {"argmax_share": 0.9}),
            ("more", {"failed_weight": 3.0}),
        )
    )
    assert less < 0.9 * plain < 1.1 * plain < more and abs(mixed - plain) > 0.01
    with pytest.raises(UserError, match="must be 0, 1 and 1 with a drafter without blocks"):
        eagle = DrafterConfig(kind="eagle", draft_vocab_size=200)
        run_training("eagle", drafter=eagle, max_steps=1, unreached_weight=0.5)


# resume


RESUMED = {kind: DrafterConfig(kind=kind, tapped_blocks=[-2], draft_vocab_size=200) for kind in KINDS} | {
    "anchored": DrafterConfig(tapped_blocks=[-2], anchor=True, draft_vocab_size=200),
    "eagle": DrafterConfig(kind="eagle", noise=0.5, draft_vocab_size=200),
    "lora": DrafterConfig(kind="causal_lm", lora_rank=4, draft_vocab_size=200),
}


@pytest.mark.parametrize(("kind", "optimizer"), [("edd", "muon"), *((kind, "adamw") for kind in RESUMED)])
def test_resumes_bit_for_bit_after_a_kill(kind, optimizer, run_training, small_lm_folder, monkeypatch):
    """Killed in step 8, with checkpoints every 5 steps and a learning rate that falls."""
    plan = {"max_steps": 10, "schedule": "linear", "save_steps": 5, "warmup_steps": 2, "logging_steps": 3}
    plan |= {"gradient_accumulation_steps": 2, "rows_per_batch": 1, "optimizer": optimizer}
    small = str(small_lm_folder) if "model" in RESUMED[kind].settings else None
    plan["drafter"] = dataclasses.replace(RESUMED[kind], model=small)
    whole = run_training("whole", **plan)

    real = DraftTrainer.compute_loss

    def dying(self, *args, **kwargs):
        if self.state.global_step == 7:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DraftTrainer, "compute_loss", dying)
    with pytest.raises(KeyboardInterrupt):
        run_training("killed", **plan)
    monkeypatch.undo()
    begin = DraftTrainer._get_num_items_in_batch

    def disturbed(self, *args):  # something else draws from the process's random state
        torch.rand(7)
        return begin(self, *args)

    monkeypatch.setattr(DraftTrainer, "_get_num_items_in_batch", disturbed)
    resumed = run_training("killed", **plan)

    assert_equal_weights(weights(whole), weights(resumed))
    assert losses(whole) == losses(resumed)
    assert record_of(whole) == record_of(resumed)
    assert [e["step"] for e in log_of(resumed) if "loss" in e] == [3, 5, 6, 9, 10]

    def tokens(out):
        return [e["tokens"] for e in log_of(out) if "tokens" in e]

    assert tokens(whole) == tokens(resumed)  # nothing counted twice or lost


def test_five_steps_and_five_more_are_ten(run_training):
    ten = run_training("ten", max_steps=10)
    run_training("parts", max_steps=5)
    parts = run_training("parts", max_steps=10)
    assert_equal_weights(weights(ten), weights(parts))


def test_a_finished_training_is_not_trained_further(run_training):
    first = weights(run_training(max_steps=3))
    out = run_training(max_steps=3)
    assert_equal_weights(first, weights(out))
    assert len(losses(out)) == 3


def test_half_written_checkpoints_are_passed_over(run_training):
    whole = run_training("whole", max_steps=6, save_steps=3)
    out = run_training("out", max_steps=3, save_steps=3)
    checkpoints = out / "checkpoints"
    for number, state in ((4, None), (5, '{"global_step": 5, "log_')):
        half = checkpoints / f"checkpoint-{number}"
        shutil.copytree(checkpoints / "checkpoint-3", half)
        (half / "model.safetensors").write_bytes(b"cut")
        (half / "trainer_state.json").unlink()
        if state:
            (half / "trainer_state.json").write_text(state)
    (checkpoints / "checkpoint-backup").mkdir()
    for number, name in (
        (6, "model.safetensors"),
        (7, "optimizer.pt"),
        (8, "rng_state.pth"),
    ):  # a disk that lost the end of a file
        half = checkpoints / f"checkpoint-{number}"
        shutil.copytree(checkpoints / "checkpoint-3", half)
        os.truncate(half / name, (half / name).stat().st_size // 2)
        (half / "computed.json").unlink()  # as of several processes, which record no hashes
    assert last_whole_checkpoint(checkpoints) == checkpoints / "checkpoint-3"
    run_training("out", max_steps=6, save_steps=3)
    assert_equal_weights(weights(whole), weights(out))


def test_a_checkpoint_with_other_bytes_is_skipped(run_training):
    out = run_training("out", max_steps=6, save_steps=2, save_total_limit=3)
    last = last_whole_checkpoint(out / "checkpoints")
    assert last.name == "checkpoint-6"
    content = bytearray((last / "model.safetensors").read_bytes())
    content[-1] ^= 1  # whole by its length
    (last / "model.safetensors").write_bytes(content)
    before = last_whole_checkpoint(out / "checkpoints")
    assert before.name == "checkpoint-4"
    (before / "computed.json").write_text("[]")
    assert last_whole_checkpoint(out / "checkpoints").name == "checkpoint-2"


@pytest.mark.parametrize("gone", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_the_optimizers_state_is_skipped(gone, run_training):
    """Also one of several processes, without hashes: the Trainer would begin it again without a word."""
    out = run_training("out", max_steps=4, save_steps=2, save_total_limit=3)
    for number in (2, 4):
        (out / "checkpoints" / f"checkpoint-{number}" / "computed.json").unlink()
    (out / "checkpoints" / "checkpoint-4" / gone).unlink()
    assert last_whole_checkpoint(out / "checkpoints").name == "checkpoint-2"
    with pytest.warns(UserWarning, match="not whole: checkpoint-4; training goes on from step 2"):
        run_training("out", max_steps=4, save_steps=2, save_total_limit=3)


def test_no_checkpoint():
    from pathlib import Path

    assert last_whole_checkpoint(Path("/nonexistent")) is None


def test_init_from_is_no_resume(run_training):
    first = run_training("first", max_steps=3)
    second = run_training("second", max_steps=2, lr=1e-9, init_from=str(first / "drafter"))
    assert len(losses(second)) == 2
    assert_close_weights(weights(first), weights(second), atol=1e-6)


# one step, however it is split


@pytest.mark.parametrize(("kind", "split"), [("edd", (2, 2)), ("edd", (1, 4)), ("eagle", (1, 4))])
def test_accumulation_equals_a_bigger_batch(kind, split, run_training):
    rows, accumulation = split
    plan = {"drafter": RESUMED[kind], "max_steps": 5}
    whole = run_training("whole", rows_per_batch=4, **plan)
    parts = run_training("parts", rows_per_batch=rows, gradient_accumulation_steps=accumulation, **plan)
    assert losses(whole) == pytest.approx(losses(parts), rel=1e-5)
    assert_close_weights(weights(whole), weights(parts))


# the clock and the rate


def test_stops_when_the_time_is_up(run_training):
    out = run_training(max_steps=100_000, max_minutes=1e-6, logging_steps=50)
    assert [entry["step"] for entry in log_of(out) if "loss" in entry] == [1]
    assert last_whole_checkpoint(out / "checkpoints").name == "checkpoint-1"


def test_a_kill_in_the_last_evaluation_costs_no_step(run_training, monkeypatch):
    """When the time was up, the last checkpoint is evaluated and saved, and nothing is trained further."""
    plan = {"max_steps": 100_000, "max_minutes": 1e-6}

    def dying(self, drafter):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "__call__", dying)
        with pytest.raises(KeyboardInterrupt):
            run_training(**plan)
    out = run_training(**plan)
    log = log_of(out)
    assert [entry["step"] for entry in log if "loss" in entry] == [1]
    assert [entry["train_loss"] for entry in log if "train_loss" in entry] == [log[0]["loss"]]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [1]
    stored = load_file(out / "checkpoints" / "checkpoint-1" / "model.safetensors")
    assert_equal_weights(stored, weights(out))


def test_time_before_a_resume_counts():
    clock = Clock(max_minutes=1, elapsed=45)
    assert clock.progress() == 0.75
    assert Clock(max_minutes=None, elapsed=45).progress() == 0


def test_progress_is_of_steps_or_of_the_clock():
    clock, seen = Clock(max_minutes=1, elapsed=6), []
    steps = ShowSteps(clock, first=2, max_steps=10, advance=lambda n, work: seen.append(work))
    for step, seconds in ((3, 10), (4, 45)):
        clock.seconds = seconds
        steps.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert seen == [pytest.approx((0.1, 0.8)), pytest.approx((0.75 - 0.2, 0.8))]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rate(schedule, settings):
    config = settings(schedule=schedule, warmup_steps=4, final_lr_ratio=0.1)
    factor = rate_schedule(config, 24, lambda: 0.0)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    half = {"constant": 1, "linear": 0.55, "cosine": 0.55}[schedule]
    assert factor(14) == pytest.approx(half)
    assert factor(24) == pytest.approx(1 if schedule == "constant" else 0.1)
    assert factor(30) == factor(24)
    late = rate_schedule(config, 24, lambda: 0.5)  # more of the time has passed than of the steps
    assert late(5) == pytest.approx(half) and late(19) == pytest.approx(factor(19))


@pytest.mark.parametrize(("rows", "accumulation", "epochs"), [(1, 1, 1.0), (4, 3, 2.0), (5, 2, 0.5)])
def test_planned_steps_are_the_trainers(rows, accumulation, epochs, run_training, monkeypatch):
    """The learning rate ends where the Trainer ends."""
    seen = []
    monkeypatch.setattr(
        "drafttrain.training.train.planned_steps", lambda *args: seen.append(planned_steps(*args)) or seen[0]
    )
    out = run_training(
        max_steps=None, epochs=epochs, rows_per_batch=rows, gradient_accumulation_steps=accumulation
    )
    state = json.loads((last_whole_checkpoint(out / "checkpoints") / "trainer_state.json").read_text())
    assert state["max_steps"] == state["global_step"] == seen[0]


# bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0}, "training.lr: must be > 0, got 0"),
        ({"lr": float("nan")}, "training.lr: must be > 0 and < inf, got nan"),
        ({"warmup_steps": -1}, "training.warmup_steps: must be >= 0, got -1"),
        ({"final_lr_ratio": 1.5}, "training.final_lr_ratio: must be >= 0 and <= 1, got 1.5"),
        ({"adam_betas": (0.9, 1.0)}, "training.adam_betas: must be >= 0 and < 1, got"),
        ({"rows_per_batch": 0}, "training.rows_per_batch: must be >= 1, got 0"),
        ({"max_minutes": -1}, "training.max_minutes: must be > 0, got -1"),
        ({"max_steps": 0}, "training.max_steps: must be >= 1 without training.init_from, got 0"),
        ({"block_length": (10, 5)}, "training.block_length: must be shortest, longest block, got .10, 5."),
        ({"row_length": 64}, "training.row_length: must be >= .* got 64"),
        ({"eval_new_tokens": 600}, "training.eval_new_tokens: must fit after a prompt .* got 600"),
        ({"init_from": "/nonexistent"}, "/nonexistent/config.json: no such file"),
        (
            {"max_steps": 0, "init_from": "x", "init_draft_vocab_size": 9},
            r"init_draft_vocab_size: must be null without training \(training.max_steps: 0\), got 9",
        ),
        ({"deepspeed": "/nonexistent.json"}, "/nonexistent.json: no such file"),
    ],
)
def test_impossible_settings_are_refused(settings, words, run_training):
    with pytest.raises(UserError, match=words):
        run_training(**settings)


def test_muon_in_an_old_torch_is_an_error(run_training, monkeypatch):
    monkeypatch.setattr(config, "version", lambda name: "2.8.1+cpu")
    with pytest.raises(
        UserError, match="training.optimizer: must be adamw with torch < 2.9, got muon with 2.8"
    ):
        run_training(optimizer="muon")


@pytest.mark.parametrize(
    "text", ["[]", '{"zero_optimization": null}', '{"zero_optimization": {"stage": "auto"}}']
)
def test_what_is_no_deepspeed_file_is_refused(text, run_training, tmp_path):
    (tmp_path / "zero.json").write_text(text)
    with pytest.raises(UserError, match="zero.json: zero_optimization.stage: must be 0, 1 or 2, got"):
        run_training(deepspeed=str(tmp_path / "zero.json"))


def test_a_checkpoint_of_deepspeed_is_not_continued_without(run_training):
    out = run_training(max_steps=2, save_steps=2)
    (out / "checkpoints" / "checkpoint-2" / "global_step2").mkdir()
    with pytest.raises(UserError, match="begun with DeepSpeed and would continue without"):
        run_training(max_steps=4)


def test_a_training_by_several_processes_is_not_continued_by_one(run_training):
    out = run_training(max_steps=2, save_steps=2)
    computed = out / "checkpoints" / "checkpoint-2" / "computed.json"
    computed.write_text(json.dumps(json.loads(computed.read_text()) | {"processes": 2}))
    with pytest.raises(UserError, match="begun by 2 processes and would continue by 1; launch it as before"):
        run_training(max_steps=4)


def test_a_training_keeps_what_it_was_begun_with(run_training, monkeypatch):
    """`bf16: auto` on another machine, and a training that is asked to change."""
    out = run_training(bf16=True, max_steps=2, save_steps=2)
    slow = {"float32": {1: 1.0, 16: 1.0, 128: 1.0}, "bfloat16": {1: 9.0, 16: 9.0, 128: 9.0}}
    monkeypatch.setattr(dtype, "timed", lambda *sizes: dtype.Timings(slow))
    with pytest.raises(UserError, match="bf16: must be true, as .*checkpoint-2 was trained, got false"):
        run_training(bf16=False, max_steps=4)
    run_training(bf16="auto", max_steps=4)
    assert len(json.loads((out / "training_log.json").read_text())) > 3
    assert json.loads((out / "drafter" / "config.json").read_text())["training"]["bf16"] is True
    fresh = run_training("fresh", bf16="auto", max_steps=1)
    assert json.loads((fresh / "drafter" / "config.json").read_text())["training"]["bf16"] is False


def test_a_float32_target_is_not_trained_in_bf16(target_folder, settings, monkeypatch):
    """Not even where bf16 is faster, unless the settings ask for it."""
    fast = {"float32": {1: 9.0, 16: 9.0, 128: 9.0}, "bfloat16": {1: 1.0, 16: 1.0, 128: 1.0}}
    monkeypatch.setattr(dtype, "timed", lambda *sizes: dtype.Timings(fast))
    wide, narrow = (load_target(str(target_folder), name, "cpu") for name in ("float32", "bfloat16"))
    assert settle_bf16(settings(bf16="auto"), wide).bf16 is False
    assert settle_bf16(settings(bf16=True), wide).bf16 is True
    assert settle_bf16(settings(bf16="auto"), narrow).bf16 is True


@pytest.mark.parametrize("bf16", [True, False])
def test_deepspeed_follows(bf16, settings, tmp_path):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    for name in ("zero1.json", "zero2.json"):
        found = HfTrainerDeepSpeedConfig(str(Path(__file__).parents[2] / "recipes" / "deepspeed" / name))
        found.trainer_config_process(training_arguments(settings(bf16=bf16), tmp_path))
        assert found.config["bf16"]["enabled"] is bf16


def test_what_a_deepspeed_file_leaves_out_is_the_recipes(settings, tmp_path):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    path = tmp_path / "zero.json"
    for text, stage in (("{}", 0), ('{"zero_optimization": {"stage": 1}}', 1)):
        path.write_text(text)
        found = HfTrainerDeepSpeedConfig(whole_settings(str(path)))
        recipe = settings(bf16=True, rows_per_batch=3, gradient_accumulation_steps=2, max_grad_norm=0.5)
        found.trainer_config_process(training_arguments(recipe, tmp_path))
        found.trainer_config_finalize(training_arguments(recipe, tmp_path), None, 1)
        assert (
            found.config["gradient_clipping"] == 0.5 and found.config["zero_optimization"]["stage"] == stage
        )
        assert found.config["train_micro_batch_size_per_gpu"] == 3 and found.config["train_batch_size"] == 6
        assert found.config["gradient_accumulation_steps"] == 2 and found.config["bf16"]["enabled"] is True


def test_a_source_listed_twice_is_no_trouble(target_folder, corpus_folder, tmp_path, settings):
    made = json.loads((corpus_folder / "corpus.json").read_text())
    sources = made["config"]["sources"] * 2
    counts = list(made["counts"]["sources"].values())[0]
    made["config"]["sources"] = sources
    made["counts"]["sources"] = {"a": counts, "a (again)": counts}
    shutil.copytree(corpus_folder, tmp_path / "corpus")
    (tmp_path / "corpus" / "corpus.json").write_text(json.dumps(made))
    drafter = DrafterConfig(tapped_blocks=[-2], draft_vocab_size=200)
    config = settings(max_steps=1, init_from=None)
    train(config, drafter, str(target_folder), tmp_path / "corpus", tmp_path / "out", None, "float32", "cpu")
    training = json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())["training"]
    assert len(training["corpus_files"]) == 2 and training["max_length"] == made["config"]["max_length"]


def test_zero_3_is_refused(run_training, tmp_path):
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(UserError, match="zero3.json: zero_optimization.stage: must be 0, 1 or 2, got 3"):
        run_training(deepspeed=str(tmp_path / "zero3.json"))


def test_muon_under_deepspeed_is_refused(run_training, tmp_path):
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(UserError, match="training.optimizer: must be adamw under DeepSpeed"):
        run_training(deepspeed=str(tmp_path / "zero2.json"), optimizer="muon")


def test_nan_is_an_error(run_training, target_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = torch.nan
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (target_folder / name).exists():
            shutil.copy(target_folder / name, broken)
    with pytest.raises(UserError, match="finite states, got NaN or infinity for all tokens of 3 batches"):
        run_training(target=broken)
    assert not (tmp_path / "run" / "drafter").exists()


def test_a_loss_that_is_not_finite_is_an_error(run_training, monkeypatch):
    loss_of = trainer.draft_loss

    def broken(*given):
        found = loss_of(*given)
        return dataclasses.replace(found, total=found.total * torch.nan)

    monkeypatch.setattr(trainer, "draft_loss", broken)
    with pytest.raises(UserError, match="loss: must be finite, got nan at step 0; lower training.lr"):
        run_training()


def test_single_batches_without_finite_states_are_counted(run_training, monkeypatch):
    """Two in a row, one that is fine, and two again end nothing."""
    encode, calls = FrozenTarget.encode, []

    def sometimes(self, *given):
        states = encode(self, *given)
        calls.append(1)
        if len(calls) % 3:
            states.final.fill_(torch.nan), states.tapped.fill_(torch.nan)
        return states

    monkeypatch.setattr(FrozenTarget, "encode", sometimes)
    out = run_training(max_steps=5, logging_steps=1, eval_steps=5, gradient_accumulation_steps=1)
    log = read_json(out / "training_log.json")
    left_out = ["not_finite" in one for one in log if "loss" in one]
    assert left_out == [True, True, False, True, True]


def test_a_store_of_other_blocks_is_refused(run_training, corpus_folder, target_folder, tmp_path):
    stored = tmp_path / "states"
    collect(CollectConfig(), str(target_folder), [0], corpus_folder, stored, dtype="float32")
    with pytest.raises(UserError, match="tapped blocks"):
        run_training(hidden_states=stored)


def test_a_full_disk_is_an_error_before_training(run_training, monkeypatch):
    import drafttrain.utils.disk

    usage = shutil.disk_usage("/")._replace(free=10_000)
    monkeypatch.setattr(drafttrain.utils.disk.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="saving checkpoints needs .* GB and the disk has"):
        run_training()


def test_a_resumed_training_needs_no_room_for_what_it_has_written(run_training, monkeypatch):
    asked = []
    monkeypatch.setattr("drafttrain.training.train.require_free_disk", lambda out, n, what: asked.append(n))
    out = run_training(max_steps=2, save_steps=1)
    there = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    run_training(max_steps=3, save_steps=1)
    assert asked == [asked[0], asked[0] - there] and there > asked[0] / 2


@pytest.mark.parametrize("kind", ["edd", "causal_lm", "lora"])
def test_the_disk_asked_for_is_what_checkpoints_hold(kind, run_training, small_lm_folder, monkeypatch):
    """Weights in fp32, those that stay the target's left out, and two moments of what is trained; beside the
    checkpoints the best weights, better ones until a checkpoint knows of them, and the drafter's."""
    asked = []
    monkeypatch.setattr("drafttrain.training.train.require_free_disk", lambda out, n, what: asked.append(n))
    small = str(small_lm_folder) if "model" in RESUMED[kind].settings else None
    out = run_training(drafter=dataclasses.replace(RESUMED[kind], model=small), max_steps=1, save_steps=1)
    checkpoint = out / "checkpoints" / "checkpoint-1"
    stored = load_file(checkpoint / "model.safetensors")
    numbers = sum(tensor.numel() for name, tensor in stored.items() if name != "draft_to_target")
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    moments = sum(state[name].numel() for state in states for name in ("exp_avg", "exp_avg_sq"))
    assert asked == [3 * 4 * (numbers + moments) + 12 * numbers]
    assert (moments < numbers) == (kind == "lora")


def test_wandb_writes_a_run_without_an_account(run_training, monkeypatch):
    """Offline, into the stage's own folder; the file holds the metrics by name."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = run_training(max_steps=2, report_to="wandb")
    (run,) = (out / ".wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    names = (b"eval/accept_len", b"train/top1_agreement", b"train/loss")
    deadline = time.monotonic() + 60  # wandb's own process may still be writing
    while not all(name in file.read_bytes() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("train_micro_batch_size_per_gpu", 4), ("gradient_accumulation_steps", 3), ("gradient_clipping", 0.5)],
)
def test_a_deepspeed_file_with_other_values_is_refused(key, value, tmp_path):
    path = tmp_path / "zero.json"
    settings = {"optimizer": "adamw", "rows_per_batch": 2, "deepspeed": str(path)}
    for good in ("auto", {"train_micro_batch_size_per_gpu": 2}.get(key, 1)):
        path.write_text(json.dumps({key: good}))
        config.TrainingConfig(**settings).check()
    path.write_text(json.dumps({key: value}))
    with pytest.raises(UserError, match=f"{key}: must be auto, or .* as in the recipe, got {value}"):
        config.TrainingConfig(**settings).check()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, 'scheduler: must be left out, .*, got {"type": "WarmupLR"}'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer: must be left out"),
        ({"train_batch_size": 16}, "train_batch_size: must be auto, got 16"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: must be auto, got true; training.bf16 decides"),
        ({"fp16": {"enabled": True}}, "fp16.enabled: must be auto, got true"),
        ({"fp16": 3}, "fp16.enabled: must be auto, got 3"),
    ],
)
def test_what_a_deepspeed_file_must_leave_to_the_recipe(settings, problem, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=problem):
        config.TrainingConfig(optimizer="adamw", bf16=False, deepspeed=str(path)).check()


def test_deepspeed_wants_a_launcher(run_training):
    zero = str(Path(__file__).parents[2] / "recipes" / "deepspeed" / "zero2.json")
    with pytest.raises(UserError, match="training.deepspeed: must be null in one process, got .*zero2"):
        run_training(deepspeed=zero)


def test_wandb_s_own_errors_are_one_line(tmp_path, monkeypatch):
    import wandb

    from drafttrain.training.wandb_run import start_wandb

    def refuse(**settings):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(
        UserError, match="training.wandb_mode: .*, got online .No API key configured"
    ) as found:
        start_wandb(config.TrainingConfig(wandb_mode="online"), tmp_path)
    assert "\n" not in str(found.value)


def test_a_resumed_training_saves_and_logs_as_its_settings_say():
    state = TrainerState(max_steps=90, save_steps=30, logging_steps=7)  # of the checkpoint
    args = SimpleNamespace(save_steps=20, logging_steps=5, eval_steps=40)
    Clock(None, 0.0).on_train_begin(args, state, None)
    assert (state.save_steps, state.logging_steps, state.eval_steps) == (20, 5, 40)
