"""Who answers: the target in this process, or a server. Both take requests and yield completions alike."""

from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.config import ServerConfig
from drafttrain.data.conversation import Message
from drafttrain.data.template import end_of_turn_text, template_of
from drafttrain.inference.batched import Completion, generate_batch
from drafttrain.regenerate.dialogues import ChatRequest
from drafttrain.regenerate.openai_client import OpenAIClient
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

CPU_CACHE_BYTES = 4e9

# (requests, on_step) -> completions; see `generate_batch`
Engine = Callable[[Iterable[ChatRequest | None], Callable[[int], None]], Iterator[Completion]]


def in_process(
    target: FrozenTarget, rows: int, max_prompt_tokens: int, max_new_tokens: int, max_cache_gb: float | None
) -> Engine:
    """The target itself, with `rows` answers at once or as many as memory allows.

    Args:
        max_cache_gb: for keys and values (10^9 bytes); None: half of what is free on the GPU, 4 on a CPU.

    Raises:
        UserError: the target's context or the memory has no room for one answer.
    """
    max_len = max_prompt_tokens + max_new_tokens
    context = getattr(target.config, "max_position_embeddings", None)
    if context is not None and max_len > context:
        raise UserError(
            f"regenerate: max_prompt_tokens + max_new_tokens is {max_len}, and {target.name} has room for "
            f"{context} tokens; lower one of them"
        )
    bytes_per_row = _bytes_per_token(target) * max_len
    if max_cache_gb is not None:
        budget = max_cache_gb * 1e9
    elif target.device.type == "cuda":
        budget = torch.cuda.mem_get_info(target.device)[0] / 2
    else:
        budget = CPU_CACHE_BYTES
    rows = min(rows, int(budget // bytes_per_row))
    if rows < 1:
        raise UserError(
            f"regenerate: one answer of up to {max_len} tokens needs {bytes_per_row / 1e9:.3g} GB of keys "
            f"and values, and {budget / 1e9:.3g} GB are allowed; raise max_cache_gb or lower max_new_tokens"
        )
    refill = max(1, rows // 8)
    return lambda requests, on_step: generate_batch(target, requests, rows, max_len, refill, on_step)


def _bytes_per_token(target: FrozenTarget) -> int:
    """Measured, because configs name the sizes of keys and values differently."""
    cache = target.new_cache(1, 1)
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)  # [1, 1]
    target.forward(cache, token, token[0], token == 0)
    return cache.kv.numel() * cache.kv.element_size()


def server(
    config: ServerConfig,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    top_p: float,
    tell: Callable[[str], None],
) -> Engine:
    """An OpenAI-compatible server, after a small request that shows whether it can be used.

    Args:
        temperature, top_p: of that request.
        tell: receives what the user ought to know about the server.

    Raises:
        UserError: as `OpenAIClient.probe`.
    """
    end_of_turn = end_of_turn_text(tokenizer, template_of(tokenizer))
    end_ids = tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
    client = OpenAIClient(config, tokenizer, end_ids)
    messages = [Message("user", "Count from one to ten.")]
    client.probe(
        ChatRequest(
            "probe", encode_prompt(tokenizer, messages), 8, temperature, top_p, seed=0, messages=messages
        )
    )
    for note in client.notes:
        tell(f"{client.base_url}: {note}")
    return client.generate
