"""How fast the bare target reads: what training and collecting are set against."""

import statistics
import time

import torch

from drafttrain.target_lm.model import FrozenTarget


@torch.no_grad()
def forward_speed(target: FrozenTarget, rows: int, length: int, repeats: int = 3) -> float:
    """Tokens per second of the target without LM head over full rows; the median of `repeats` forwards."""
    length = min(length, getattr(target.config, "max_position_embeddings", None) or length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (rows, length), generator=generator).to(
        target.device
    )  # [rows, length]
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        out = target.base(input_ids=ids, use_cache=False).last_hidden_state
        out[0, 0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return rows * length / statistics.median(seconds)
