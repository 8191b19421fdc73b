"""Settings of stage train."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

NO_CHANGE = {"changes_output": False}


@dataclass
class TrainingConfig:
    """Training of a drafter (section `training` of a recipe).

    Attributes:
        optimizer: "adamw" (the paper's), or "muon" for the layers' matrices with AdamW for the rest, which
            learns more from each token; not under DeepSpeed.
        lr: peak learning rate. The paper's 1e-4 suits 70 M tokens; small budgets need 1e-3 or more.
        epochs: passes over the corpus.
        max_steps: optimizer steps, in place of `epochs`. null: epochs decide. 0: take `init_from` without
            training, which needs neither corpus nor hidden states.
        max_minutes: limit of training time, evaluations and resumed time included. null: none.
        rows_per_batch: packed rows in one forward pass of one process.
        row_length: tokens in a packed row; a batch holds at most rows_per_batch x row_length tokens.
        gradient_accumulation_steps: forward passes per optimizer step.
        schedule: decay of the rate after the warm-up, by steps or, with max_minutes, by time if that is
            further.
        final_lr_ratio: rate at the end, as a share of the peak rate (linear and cosine).
        warmup_steps: optimizer steps over which the rate rises from 0.
        adam_betas: AdamW's decay rates of both moments.
        weight_decay: decoupled weight decay; with muon only of weights with two dimensions.
        max_grad_norm: gradients are scaled down to this norm.
        block_length: shortest and longest draft block; L is drawn for each row and step (EDD: 5 to 10).
        loss: "kl", from the target's distribution to the drafter's (EDD, eq. 4); "ce", cross-entropy with
            the text's tokens; "acceptance", the negative log-probability that a sampled draft is accepted.
            EAGLE adds a tenth of it to smooth L1 on its states, MEDUSA sums it over heads.
        argmax_share: share of cross-entropy with the target's top-1 token in the loss; for EDD. 0: none.
        unreached_weight: weight of positions that greedy drafts do not reach, because an earlier draft of
            the block is not the target's top-1 token; for EDD. 1 is the paper's.
        failed_weight: weight of the first position of each block where the current top-1 token is not the
            target's: the drafter learns most from its own mistakes; for EDD. 1 is the paper's.
        kl_chunk: positions whose logits exist at once; 256 stays in a CPU cache and was fastest there.
        eval_steps: optimizer steps between evaluations (held-out loss and real accept_len).
        eval_prompts: JSONL with the prompts on which accept_len is measured during training.
            null: prompts of the corpus's validation split.
        eval_prompt_limit: how many of them.
        eval_new_tokens: tokens decoded per prompt; the first comes from the prompt, without a draft.
        eval_draft_length: length of the drafted chains.
        select: the drafter to keep: "accept_len", that of the evaluation with the highest accept_len (the
            last within its standard error over the prompts), or "last".
        logging_steps: optimizer steps between log lines.
        save_steps: optimizer steps between checkpoints.
        save_total_limit: checkpoints kept.
        seed: seed of initialization, order and block masks. null: the recipe's seed.
        bf16: compute in bf16 (autocast); weights stay fp32. "auto": if the target is in bf16 here; a
            training keeps the dtype it was begun in.
        report_to: "wandb" or "none".
        wandb_mode: "offline" needs no account; "online" uploads.
        init_from: folder of a trained drafter to start from (not a resume: optimizer and step count are new).
            Its shape and draft vocabulary are kept, not those of section drafter, which must not name another
            kind, kv_heads or intermediate_size; `drafter.anchor: true` adds an anchor to EDD without one, and
            `drafter.layers` adds layers to EDD with fewer.
        init_draft_vocab_size: new size of the draft vocabulary of `init_from`: the corpus's most frequent
            other tokens are added, or its own least frequent ones dropped. null: unchanged.
        deepspeed: path of a DeepSpeed JSON file; launch with `deepspeed scripts/train_drafter.py …`.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = setting(1e-4, gt=0)
    epochs: float = setting(1.0, gt=0)
    max_steps: int | None = setting(None, ge=0)
    max_minutes: float | None = setting(None, gt=0)
    rows_per_batch: int = setting(8, ge=1)
    row_length: int = setting(512, ge=2, le=1 << 20)
    gradient_accumulation_steps: int = setting(1, ge=1)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    final_lr_ratio: float = setting(0.0, ge=0, le=1)
    warmup_steps: int = setting(0, ge=0)
    adam_betas: tuple[float, float] = setting((0.9, 0.999), ge=0, lt=1)
    weight_decay: float = setting(0.0, ge=0)
    max_grad_norm: float = setting(1.0, gt=0)
    block_length: tuple[int, int] = setting((5, 10), ge=1)
    loss: Literal["kl", "ce", "acceptance"] = "kl"
    argmax_share: float = setting(0.0, ge=0, le=1)
    unreached_weight: float = setting(1.0, ge=0, le=1)
    failed_weight: float = setting(1.0, ge=1)
    kl_chunk: int = setting(256, ge=1)
    eval_steps: int = setting(200, ge=1)
    eval_prompts: str | None = None
    eval_prompt_limit: int = setting(16, ge=1)
    eval_new_tokens: int = setting(64, ge=2)
    eval_draft_length: int = setting(5, ge=1, le=100)
    select: Literal["accept_len", "last"] = "accept_len"
    logging_steps: int = setting(10, ge=1, metadata=NO_CHANGE)
    save_steps: int = setting(200, ge=1, metadata=NO_CHANGE)
    save_total_limit: int = setting(2, ge=1, metadata=NO_CHANGE)
    seed: int | None = setting(None, ge=0, lt=1 << 32)
    bf16: bool | Literal["auto"] = setting("auto", metadata={"settled": True})
    report_to: Literal["none", "wandb"] = setting("none", metadata=NO_CHANGE)
    wandb_mode: Literal["offline", "online"] = setting("offline", metadata=NO_CHANGE)
    init_from: str | None = None
    init_draft_vocab_size: int | None = setting(None, ge=1)
    deepspeed: str | None = setting(None, metadata=NO_CHANGE)

    @property
    def has_emphasis(self) -> bool:
        """Return whether the loss has weights that the papers do not have."""
        return self.argmax_share > 0 or self.unreached_weight < 1 or self.failed_weight > 1

    def check(self) -> None:
        """Validate the settings and the DeepSpeed file.

        Raises:
            UserError: a value out of range, or settings that exclude each other.
        """
        check_ranges(self, "training")
        if self.max_steps == 0 and self.init_from is None:
            raise UserError("training.max_steps: must be >= 1 without training.init_from, got 0; name one")
        if self.block_length[0] > self.block_length[1]:
            raise UserError(
                f"training.block_length: must be shortest, longest block, got {list(self.block_length)}"
            )
        torch = version("torch")
        if self.optimizer == "muon" and tuple(map(int, torch.split(".")[:2])) < (2, 9):
            raise UserError(f"training.optimizer: must be adamw with torch < 2.9, got muon with {torch}")
        if self.init_draft_vocab_size is not None and (self.init_from is None or self.max_steps == 0):
            why = "training.init_from" if self.init_from is None else "training (training.max_steps: 0)"
            raise UserError(
                f"training.init_draft_vocab_size: must be null without {why}, got "
                f"{self.init_draft_vocab_size}; a new drafter has drafter.draft_vocab_size"
            )
        if self.deepspeed:
            from drafttrain.training.deepspeed_file import check_deepspeed  # only for launches with one

            check_deepspeed(self)
