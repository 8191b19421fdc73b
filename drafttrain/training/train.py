"""Stage train: from a corpus, and stored hidden states if there are any, to a trained drafter."""

import math
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast
from datasets import Dataset
from rich.console import Console
from transformers import TrainerCallback, TrainingArguments

from drafttrain.data.corpus import load_corpus
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel
from drafttrain.drafters.new import new_drafter
from drafttrain.drafters.vocabulary import count_trained_tokens, draft_vocabulary
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.best import COMPUTED, STATE, KeepBest
from drafttrain.training.config import TrainingConfig
from drafttrain.training.outlook import doubts, doubts_about_vocabulary
from drafttrain.training.packing import PackedRows
from drafttrain.training.trainer import DraftTrainer
from drafttrain.training.trim_heap import TrimHeap
from drafttrain.training.validation import Validation
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.folders import new_folder
from drafttrain.utils.progress import counted
from drafttrain.utils.provenance import content_hashes
from drafttrain.utils.writing import write_json

if TYPE_CHECKING:
    from drafttrain.hidden_states.store import HiddenStateStore
    from drafttrain.training.emphasis import Emphasizing

ABSOLUTE_FOLDER = re.compile(r"(?<![\w.:/-])~?/(?:[\w.-]+/)*(?=[\w.-])")


class Clock(TrainerCallback):
    """Stop training after `max_minutes`, time before a resume included.

    All ranks use the first one's clock: they must stop at the same step, with the same learning rate.
    """

    def __init__(self, max_minutes: float | None, elapsed: float):
        self.limit = max_minutes * 60 if max_minutes else math.inf  # seconds
        self.before, self.started = elapsed, time.perf_counter()
        self.seconds = elapsed  # at the end of the last step

    def progress(self) -> float:
        """Return the share of the time limit used at the end of the last step; 0 without a limit."""
        return min(self.seconds / self.limit, 1.0)

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # a resumed state has its checkpoint's
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = self._elapsed()
        if args.world_size > 1 and self.limit < math.inf:
            self.seconds = broadcast(torch.tensor(self.seconds, device=args.device)).item()
        if self.seconds > self.limit:
            control.should_training_stop = control.should_save = True
        # a log line at each checkpoint and at the end, so that no counts are lost
        control.should_log |= control.should_save or control.should_training_stop

    def on_log(self, args, state, control, **kwargs):
        state.log_history[-1]["elapsed"] = self._elapsed()

    def _elapsed(self) -> float:
        return self.before + time.perf_counter() - self.started


class SealCheckpoint(TrainerCallback):
    """Record in each checkpoint how its steps were computed, and its hashes if one process writes it."""

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            files = content_hashes(folder) if args.world_size == 1 else {}
            write_json(folder / COMPUTED, {"bf16": args.bf16, "processes": args.world_size, "files": files})


class WarnOfVocabulary(TrainerCallback):
    """Warn after the first evaluation if the draft vocabulary lacks much of the target's probability."""

    def __init__(self, console: Console):
        self.console, self.is_done = console, False

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if not self.is_done:
            share = metrics.get("eval_lost_mass", 0.0)
            warn(self.console, doubts_about_vocabulary(share, "the target's probability"))
        self.is_done = True


class ShowSteps(TrainerCallback):
    """Advance the progress line by steps or by the clock, whichever ends the training first."""

    def __init__(self, clock: Clock, first: int, max_steps: int, advance: Callable[..., None]):
        """Show the progress of an attempt that starts from step `first`."""
        self.clock, self.max_steps, self.advance = clock, max_steps, advance
        self.before = max(first / max_steps, clock.progress())

    def on_step_end(self, args, state, control, **kwargs):
        share = max(state.global_step / self.max_steps, self.clock.progress())
        self.advance(1, (share - self.before, 1 - self.before))


def rate_schedule(config: TrainingConfig, max_steps: int, progress_of_time: Callable[[], float]):
    """Return a function from the number of optimizer steps done to the factor on the peak learning rate."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        done = (step - config.warmup_steps) / max(max_steps - config.warmup_steps, 1)
        done = min(max(done, progress_of_time()), 1.0)
        falls = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
        return 1 - falls[config.schedule] * (1 - config.final_lr_ratio)

    return factor


def train(
    config: TrainingConfig,
    drafter_config: DrafterConfig,
    target_model: str,
    corpus: str | os.PathLike,
    out: str | os.PathLike,
    hidden_states: str | os.PathLike | None = None,
    target_dtype: str = "auto",
    target_device: str = "auto",
    command: str | None = None,
) -> Path:
    """Train a drafter; write it to `out/drafter`, which is returned, and its log to `out/training_log.json`.

    An interrupted run continues from the last complete checkpoint in `out/checkpoints`, which also keeps the
    best drafter.

    Args:
        target_model: as for `load_target`.
        corpus: folder that `build_corpus` wrote.
        hidden_states: folder of stored states of that corpus; None: the target runs inside each step.
        target_dtype, target_device: as for `load_target`.
        command: the command line, for the drafter's record of its training.

    Raises:
        UserError: settings are invalid, corpus, store or `init_from` do not fit the target, the disk is too
            small, or the loss is no longer finite.
    """
    config.check()
    if config.max_steps == 0:
        raise UserError("training.max_steps: must be >= 1, or null for all epochs, to train, got 0; raise it")
    if config.deepspeed and not os.environ.get("RANK"):
        raise UserError(
            f"training.deepspeed: must be null in one process, got {config.deepspeed}; use torchrun"
        )
    out, seed = Path(out), config.seed or 0
    target = load_target(target_model, dtype=target_dtype, device=target_device)
    splits, made_from = load_corpus(corpus, target.tokenizer)
    drafter = start_drafter(config, drafter_config, target, splits["train"])
    packed = {
        name: PackedRows(split, config.row_length, seed, open_store(hidden_states, name, target, split))
        for name, split in splits.items()
    }
    rows = packed["train"]
    if (longest := max(one.longest for one in packed.values())) > (most := target.positions):
        raise UserError(f"corpus.max_length: must be <= {most}, the target's limit, got {longest}; lower it")
    resume, before = _checkpoint(config, out / "checkpoints")
    config = settle_bf16(config, target, resume)
    validation = Validation(config, target, packed["validation"])
    _require_disk(config, drafter, out)

    clock = Clock(config.max_minutes, before)
    arguments = training_arguments(config, out / "checkpoints", target.device)
    if arguments.device.type == "cuda" and arguments.device != target.device:  # which the Trainer chooses
        raise UserError(f"target.device: must be auto, got {target.device}; set CUDA_VISIBLE_DEVICES")
    max_steps = config.max_steps or planned_steps(config, len(rows), arguments.world_size)
    is_first = arguments.process_index == 0
    console = Console(quiet=not is_first)
    per_step = config.rows_per_batch * config.gradient_accumulation_steps * arguments.world_size
    warn(console, doubts(config, max_steps, per_step * config.row_length))
    warn(console, doubts_about_vocabulary(outside_share(drafter, splits["validation"]), "the held-out text"))
    keeper = KeepBest(out / "checkpoints", lambda line: warn(console, [line]))
    run = None
    if config.report_to == "wandb" and is_first:
        from drafttrain.training.wandb_run import start_wandb

        run = start_wandb(config, out)
    trainer = DraftTrainer(
        model=drafter,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,  # the Trainer requires one; `evaluate` reads its own validation data
        optimizers=(new_optimizer(config, drafter), None),
        callbacks=[clock, SealCheckpoint(), TrimHeap(), WarnOfVocabulary(console), keeper],
        target=target,
        block_length=tuple(config.block_length),
        kl_chunk=config.kl_chunk,
        mask_seed=seed,
        rate=rate_schedule(config, max_steps, clock.progress),
        loss=config.loss,
        emphasis=emphasis_for(config, drafter),
        evaluate_drafter=validation,
    )
    if resume and (read_json(resume / STATE)["global_step"] >= max_steps or clock.progress() == 1):
        from drafttrain.training.ended import take_up  # it was interrupted after its last step

        take_up(trainer, keeper, resume)
    else:
        first = read_json(resume / STATE)["global_step"] if resume else 0
        with counted("training", max_steps, console=console, done=first) as advance:
            trainer.add_callback(ShowSteps(clock, first, max_steps, advance))
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    last = trainer.state.global_step
    if not any("eval_loss" in one and one["step"] == last for one in trainer.state.log_history):
        trainer.evaluate()
    if is_first:
        _write(out, config, trainer, keeper, rows, made_from, command)
    trainer.accelerator.wait_for_everyone()  # no process returns before the folder is there
    if run:
        run.finish()
    return out / "drafter"


def _write(out: Path, config, trainer, keeper, rows, made_from, command) -> None:
    """Write the log and the chosen drafter."""
    drafter, last = trainer.model, trainer.state.global_step
    chosen = last if config.select == "last" else keeper.restore(drafter, trainer.state)
    drafter.config.training = training_summary(config, trainer, rows, made_from, command, chosen)
    write_json(out / "training_log.json", trainer.state.log_history)
    drafter.finish()
    with new_folder(out / "drafter") as folder:
        drafter.save_pretrained(folder)
    keeper.on_save(trainer.args, trainer.state, trainer.control)


def start_drafter(
    config: TrainingConfig, drafter_config: DrafterConfig, target: FrozenTarget, corpus: Dataset
) -> DraftModel:
    """Return a drafter that starts from the target, or from `config.init_from` with its shape and vocabulary.

    Weights are fp32; the frozen target's embeddings are converted once.
    """
    if config.init_from:
        from drafttrain.training.continued import continued_drafter  # few trainings need it

        return continued_drafter(config, drafter_config, target, corpus).train()
    counts = count_trained_tokens(corpus, target.vocab_size)
    size = min(drafter_config.draft_vocab_size or target.vocab_size, target.vocab_size)  # a limit
    draft_ids = draft_vocabulary(counts, size, target.eos_token_ids)
    torch.manual_seed(config.seed or 0)
    return new_drafter(target, drafter_config, draft_ids).train()


def outside_share(drafter: DraftModel, split: Dataset) -> float:
    """Return the share of a split's trained tokens that the drafter cannot draft."""
    counts = count_trained_tokens(split, drafter.config.target_vocab_size)  # [V]
    return 1 - float(counts[drafter.draft_to_target.numpy(force=True)].sum()) / max(int(counts.sum()), 1)


def warn(console: Console, lines: list[str]) -> None:
    """Print warnings without markup, because they may name paths."""
    for line in lines:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def new_optimizer(config: TrainingConfig, drafter: DraftModel) -> torch.optim.Optimizer | None:
    """Return the recipe's optimizer; None for AdamW, which the Trainer creates itself."""
    if config.optimizer == "adamw":
        return None
    from drafttrain.training.optimizer import MuonWithAdamW

    return MuonWithAdamW(drafter, config.lr, config.adam_betas, config.weight_decay, config.bf16)


def open_store(folder, name: str, target: FrozenTarget, split: Dataset) -> "HiddenStateStore | None":
    """Open the stored states of a corpus split and check them against target and corpus; None if online."""
    if folder is None:
        return None
    from drafttrain.hidden_states.store import HiddenStateStore  # only for offline training

    return HiddenStateStore.open(Path(folder) / name, target_info(target), split)


def planned_steps(config: TrainingConfig, n_rows: int, world_size: int) -> int:
    """Return the optimizer steps in all epochs, as the Trainer counts them."""
    batches = math.ceil(n_rows / (config.rows_per_batch * world_size))  # per process and epoch
    return math.ceil(math.ceil(batches / config.gradient_accumulation_steps) * config.epochs)


def training_arguments(
    config: TrainingConfig, folder: Path, device: torch.device | None = None
) -> TrainingArguments:
    """Return the recipe's settings as arguments of the transformers Trainer.

    Args:
        config: as `settle_bf16` returned it; DeepSpeed's `bf16.enabled: auto` follows it.
        folder: for checkpoints.
        device: the target's; None for a GPU if there is one.
    """
    deepspeed = None
    if config.deepspeed:
        from drafttrain.training.deepspeed_file import whole_settings  # only for launches with one

        deepspeed = whole_settings(config.deepspeed)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.max_steps or -1,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.rows_per_batch,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.lr,
        adam_beta1=config.adam_betas[0],
        adam_beta2=config.adam_betas[1],
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available() if device is None else device.type == "cpu",
        eval_strategy="steps",
        eval_steps=config.eval_steps,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        save_steps=config.save_steps,
        save_total_limit=config.save_total_limit,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        report_to=config.report_to,
        seed=config.seed or 0,
        deepspeed=deepspeed,
        disable_tqdm=True,  # `counted` shows the progress
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # no DataParallel: the target is on one device
    return arguments


def _checkpoint(config: TrainingConfig, folder: Path) -> tuple[Path | None, float]:
    """Return the checkpoint from which training continues, and its seconds; None and 0 without one."""
    if not any(folder.glob("checkpoint-*")):
        return None, 0.0
    from drafttrain.training.resuming import check_same_launch, elapsed, last_whole_checkpoint

    found = last_whole_checkpoint(folder)
    step = 0 if found is None else int(found.name.removeprefix("checkpoint-"))
    numbers = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    newer = sorted(int(number) for number in numbers if number.isdecimal() and int(number) > step)
    if newer and not int(os.environ.get("RANK") or 0):
        names = ", ".join(f"checkpoint-{number}" for number in newer)
        warnings.warn(f"{folder}: not whole: {names}; training goes on from step {step}", stacklevel=2)
    if found is None:
        return None, 0.0
    check_same_launch(config, found)
    return found, elapsed(found)


def settle_bf16(
    config: TrainingConfig, target: FrozenTarget, checkpoint: Path | None = None
) -> TrainingConfig:
    """Return the settings with `bf16: auto` resolved: to the checkpoint's value, else to bf16 if the target
    is in bf16.

    Raises:
        UserError: the checkpoint was trained in bf16 and the settings ask for fp32, or the other way round.
    """
    begun = None
    if checkpoint is not None:
        from drafttrain.training.resuming import begun_in_bf16

        begun = begun_in_bf16(config, checkpoint)
    if config.bf16 != "auto":
        return config
    return replace(config, bf16=target.dtype == torch.bfloat16 if begun is None else begun)


def emphasis_for(config: TrainingConfig, drafter: DraftModel) -> "Emphasizing | None":
    """Return what the loss weighs more than the papers do; None if nothing."""
    if not config.has_emphasis:
        return None
    from drafttrain.training.emphasis import emphasis_of  # not in the papers

    return emphasis_of(config, drafter.soft_prompts)


def _require_disk(config: TrainingConfig, drafter: DraftModel, out: Path) -> None:
    kept = [p for name, p in drafter.named_parameters() if name not in drafter._keys_to_ignore_on_save]
    stored, trained = sum(p.numel() for p in kept), sum(p.numel() for p in kept if p.requires_grad)
    checkpoint = 4 * stored + 2 * 4 * trained  # weights and two moments, fp32
    needed = (config.save_total_limit + 1) * checkpoint + 12 * stored  # the drafter, the best, a better one
    there = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    require_free_disk(out, max(needed - there, 0), "saving checkpoints")


def training_summary(
    config: TrainingConfig,
    trainer: DraftTrainer,
    rows: PackedRows,
    made_from: dict[str, Any],
    command: str | None,
    chosen: int,
) -> dict[str, Any]:
    """Return the record of a training for the drafter's config; `seconds` excludes evaluations. It is
    published, so it has only the last component of paths.

    Args:
        made_from: the corpus's `corpus.json`.
        command: the command line.
        chosen: step of the chosen drafter, whose evaluation is `final`.
    """
    history, dtype = trainer.state.log_history, torch.bfloat16 if trainer.args.bf16 else torch.float32
    steps = [entry for entry in history if entry.get("tokens_per_second")]
    evaluated = [entry for entry in history if "eval_loss" in entry and entry["step"] == chosen]
    settings = asdict(config)
    for name in ("eval_prompts", "init_from", "deepspeed"):
        settings[name] = settings[name] and Path(settings[name]).name
    sources = zip(made_from["config"]["sources"], made_from["counts"]["sources"].values(), strict=True)
    return {
        **settings,
        "command": command and ABSOLUTE_FOLDER.sub("", command),
        "steps": trainer.state.global_step,
        "chosen_step": chosen,
        "processes": trainer.args.world_size,
        "machine": describe_machine(trainer.args.device, dtype),
        "corpus_tokens": rows.tokens,
        "corpus_files": [
            {
                "name": Path(source["path"]).name,
                "conversations": counts["kept"],
                "sha256": made_from["inputs"][source["path"]],
            }
            for source, counts in sources
        ],
        "max_length": made_from["config"]["max_length"],
        "tokens": sum(entry["tokens"] for entry in steps),
        "seconds": round(sum(entry["tokens"] / entry["tokens_per_second"] for entry in steps), 1),
        "final": {key: value for key, value in evaluated[-1].items() if key.startswith("eval_")},
    }
