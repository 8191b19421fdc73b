"""Warn of trainings that are unlikely to give a useful drafter, judged by measured ones.

accept_len was 1.4 to 1.6 after 200 steps of 2,048 tokens at rates of 1e-3 to 4e-3; the paper's rate of 1e-4
is for 70 M tokens (docs/experiments/training.md).
"""

from drafttrain.training.config import TrainingConfig

FEW_STEPS = 100
LOW_RATE, FEW_TOKENS = 5e-4, 10e6  # lower rates need more tokens
OUTSIDE = 0.1  # share of the target's probability outside the draft vocabulary


def doubts(config: TrainingConfig, steps: int, tokens_per_step: int) -> list[str]:
    """Return warnings for this number of optimizer steps, one line each."""
    lines = []
    if steps <= config.warmup_steps:
        lines.append(
            f"training.warmup_steps: {config.warmup_steps} in a training of {steps} steps, so the learning "
            "rate stays below its peak; lower it"
        )
    if config.init_from:  # fewer and smaller steps may be meant
        return lines
    if steps < FEW_STEPS:
        lines.append(
            f"{steps} optimizer steps: too few to learn to draft, hundreds are needed; give more text or "
            "training.epochs, or fewer training.rows_per_batch"
        )
    if config.lr < LOW_RATE and steps * tokens_per_step < FEW_TOKENS:
        lines.append(
            f"training.lr: {config.lr:g} is too low for {steps * tokens_per_step / 1e6:.2g} M tokens (the "
            "paper's 1e-4 is for 70 M); take 1e-3 to 2e-3"
        )
    return lines


def doubts_about_vocabulary(share: float, of_what: str) -> list[str]:
    """Return a warning if a large share of some text or probability cannot be drafted."""
    if share <= OUTSIDE:
        return []
    return [
        f"drafter.draft_vocab_size: {share:.0%} of {of_what} is outside the draft vocabulary and never "
        "drafted; raise it, or give more text like what is to be decoded"
    ]
