"""Settings of the training stage."""

from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from drafttrain.drafters.config import DrafterConfig
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json


@dataclass
class TrainingConfig:
    """How a drafter is trained (section `training` of a recipe).

    Attributes:
        optimizer: "adamw" (the paper's), or "muon" for the layers' matrices with AdamW for the rest, which
            learns more from each token; not under DeepSpeed.
        lr: peak learning rate. The paper's 1e-4 suits 70 M tokens; small budgets need 1e-3 or more.
        epochs: passes over the corpus.
        max_steps: stop after so many optimizer steps. null: epochs decide. 0: take `init_from` without
            training, which needs neither corpus nor hidden states.
        max_minutes: stop after so many minutes of training, evaluations and resumed time included. null: no
            limit.
        rows_per_batch: packed rows in one forward pass of one process.
        row_length: tokens in a packed row; a batch holds at most rows_per_batch x row_length tokens.
        gradient_accumulation_steps: forward passes per optimizer step.
        schedule: course of the rate after the warm-up, over steps or, with max_minutes, over time if that is
            further.
        final_lr_ratio: share of the peak rate that is left at the end (linear and cosine).
        warmup_steps: optimizer steps over which the rate rises from 0.
        adam_betas: AdamW's decay rates of both moments.
        weight_decay: decoupled weight decay; with muon only of weights with two dimensions.
        max_grad_norm: gradients are scaled down to this norm.
        block_length: shortest and longest draft block; L is drawn anew at each step (EDD: 5 to 10).
        loss: "kl", from the target's distribution to the drafter's (EDD, eq. 4), or "ce", cross-entropy with
            the text's tokens. EAGLE adds a tenth of it to smooth L1 on its states, MEDUSA sums it over heads.
        kl_chunk: positions whose logits exist at once; 256 stays in a CPU cache and was fastest there.
        eval_steps: optimizer steps between evaluations (held-out loss and real accept_len).
        eval_prompts: JSONL with the prompts on which accept_len is measured during training.
            null: prompts of the corpus's validation split.
        eval_prompt_limit: how many of them.
        eval_new_tokens: tokens decoded per prompt.
        eval_draft_length: length of the chains drafted there.
        logging_steps: optimizer steps between log lines.
        save_steps: optimizer steps between checkpoints.
        save_total_limit: checkpoints kept.
        seed: seed of initialization, order and block masks. null: the recipe's seed.
        bf16: compute in bf16 (autocast); weights stay fp32. "auto": unless target.dtype is float32, or comes
            to that on this machine; a training keeps what it was begun with.
        report_to: "wandb" or "none".
        wandb_mode: "offline" needs no account; "online" uploads.
        init_from: folder of a trained drafter to start from (not a resume: optimizer and step count are new).
            Its shape and draft vocabulary hold, not those of the section drafter, which must name no other
            kind, anchor or kv_heads.
        init_draft_vocab_size: add the corpus's most frequent tokens to the vocabulary of `init_from` until it
            has this size. null: as it is.
        deepspeed: path of a DeepSpeed JSON file; launch with `deepspeed scripts/train_drafter.py …`.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-4
    epochs: float = 1.0
    max_steps: int | None = None
    max_minutes: float | None = None
    rows_per_batch: int = 8
    row_length: int = 512
    gradient_accumulation_steps: int = 1
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    final_lr_ratio: float = 0.0
    warmup_steps: int = 0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    block_length: tuple[int, int] = (5, 10)
    loss: Literal["kl", "ce"] = "kl"
    kl_chunk: int = 256
    eval_steps: int = 200
    eval_prompts: str | None = None
    eval_prompt_limit: int = 16
    eval_new_tokens: int = 64
    eval_draft_length: int = 5
    logging_steps: int = field(default=10, metadata={"changes_output": False})
    save_steps: int = 200
    save_total_limit: int = 2
    seed: int | None = None
    bf16: bool | Literal["auto"] = field(default="auto", metadata={"settled": True})
    report_to: Literal["none", "wandb"] = field(default="none", metadata={"changes_output": False})
    wandb_mode: Literal["offline", "online"] = field(default="offline", metadata={"changes_output": False})
    init_from: str | None = None
    init_draft_vocab_size: int | None = None
    deepspeed: str | None = field(default=None, metadata={"changes_output": False})

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        may_be_0 = ("final_lr_ratio", "warmup_steps", "weight_decay", "seed", "max_steps")
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not value >= 0 or (value == 0 and name not in may_be_0):  # NaN fails too
                    at_least = "0 or more" if name in may_be_0 else "above 0"
                    raise UserError(f"training.{name} is {value}: it must be {at_least}")
        if self.max_steps == 0 and self.init_from is None:
            raise UserError("training.max_steps: must be >= 1 without training.init_from, got 0; name one")
        if self.final_lr_ratio > 1:
            raise UserError(f"training.final_lr_ratio is {self.final_lr_ratio}: it must lie within 0 and 1")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise UserError(f"training.adam_betas is {list(self.adam_betas)}: each must lie within 0 and 1")
        low, high = self.block_length
        if not 1 <= low <= high:
            raise UserError(f"training.block_length is {low} to {high}: name the shorter first, at least 1")
        if self.row_length < 2:
            raise UserError(f"training.row_length is {self.row_length}: a row needs at least 2 tokens")
        torch = version("torch")
        if self.optimizer == "muon" and tuple(map(int, torch.split(".")[:2])) < (2, 9):
            raise UserError(f"training.optimizer: must be adamw with torch < 2.9, got muon with {torch}")
        if self.init_draft_vocab_size is not None and self.init_from is None:
            raise UserError(
                "training.init_draft_vocab_size goes with training.init_from, which is not set: use "
                "drafter.draft_vocab_size for a new drafter"
            )
        if self.deepspeed:
            if self.optimizer == "muon":
                raise UserError(
                    "training.optimizer is muon, which needs whole matrices, and DeepSpeed's ZeRO cuts them: "
                    "set it to adamw, or launch with torchrun and without training.deepspeed"
                )
            settings = read_json(self.deepspeed)
            zero = settings.get("zero_optimization", {}) if isinstance(settings, dict) else None
            stage = zero.get("stage", 0) if isinstance(zero, dict) else None
            if not isinstance(stage, int):
                raise UserError(
                    f"{self.deepspeed}: no DeepSpeed file, or its zero_optimization.stage is no number; see "
                    "recipes/deepspeed"
                )
            if stage > 2:
                raise UserError(
                    f"{self.deepspeed}: ZeRO stage 3 scatters the drafter's weights, which a drafter this "
                    "small does not need; use stage 2"
                )


def check_continued(init_from: str, stored: dict[str, Any], drafter_config: DrafterConfig) -> None:
    """Refuses to start from a drafter of another kind or shape than the section drafter asks for. What the
    section leaves out is the old drafter's to say.

    Args:
        stored: the `config.json` of that drafter.

    Raises:
        UserError: that.
    """
    kind = stored["model_type"].removeprefix("drafttrain_")
    if kind != drafter_config.kind or drafter_config.lora_rank is not None:
        asked = "adapters" if kind == drafter_config.kind else drafter_config.kind
        raise UserError(
            f"training.init_from: {init_from} is a drafter of kind {kind}, trained on as it is, and the "
            f"section drafter asks for {asked}: set drafter.kind to {kind} without lora_rank"
        )
    shape = {"anchor": stored.get("anchor", False), "kv_heads": stored.get("num_key_value_heads")}
    for key, there in shape.items():
        asked = getattr(drafter_config, key)
        if asked and asked != there:
            raise UserError(
                f"training.init_from: {init_from} has {key} {str(there).lower()}, trained on as it is, and "
                f"the section drafter asks for {str(asked).lower()}: leave drafter.{key} out"
            )
