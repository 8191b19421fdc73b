"""Engines that answer requests: the target in this process, or a server."""

from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.data.answers import end_of_turn_ids
from drafttrain.data.chat import encode_prompt
from drafttrain.data.config import ServerConfig
from drafttrain.data.message import Message
from drafttrain.hidden_states.recording import StateRecorder
from drafttrain.inference.decode import Request, decode_requests
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.session import DRAFT_SLOTS
from drafttrain.regenerate.dialogues import ChatRequest, Completion
from drafttrain.regenerate.openai_client import OpenAIClient
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

CPU_CACHE_BYTES = 4e9

# (requests as `decode_requests` takes them, called with the number of tokens of each step) -> completions
Engine = Callable[[Iterable[ChatRequest | None], Callable[[int], None]], Iterator[Completion]]


def in_process(
    target: FrozenTarget,
    rows: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_cache_gb: float | None,
    recorder: StateRecorder | None = None,
) -> Engine:
    """Return the engine that runs the target here, with `rows` answers at once, or fewer if memory is short.

    Args:
        max_cache_gb: of the KV cache (10^9 bytes); None: half of the free GPU memory, 4 on a CPU.
        recorder: keeps the target's states, for the completions.

    Raises:
        UserError: the target's context or the memory has no room for one answer.
    """
    max_len = max_prompt_tokens + max_new_tokens
    if max_len > (context := target.positions):
        raise UserError(
            f"regenerate: max_prompt_tokens + max_new_tokens must be at most the {context} positions of "
            f"{target.name}, got {max_len}; lower one of them"
        )
    bytes_per_row = _bytes_per_token(target) * (max_len + DRAFT_SLOTS)
    if max_cache_gb is not None:
        budget = max_cache_gb * 1e9
    elif target.device.type == "cuda":
        budget = torch.cuda.mem_get_info(target.device)[0] / 2
    else:
        budget = CPU_CACHE_BYTES
    rows = min(rows, int(budget // bytes_per_row))
    if rows < 1:
        raise UserError(
            f"regenerate: keys and values of one answer of up to {max_len} tokens must fit into "
            f"{budget / 1e9:.3g} GB, got {bytes_per_row / 1e9:.3g} GB; raise max_cache_gb, lower "
            "max_new_tokens or free memory"
        )

    def answer(requests: Iterable[Request | None], on_step: Callable[[int], None]) -> Iterator[Completion]:
        refill = max(1, rows // 8)  # prompts encoded together cost less than one by one
        proposer = recorder or NoProposer()
        for step in decode_requests(target, proposer, requests, rows, max_len, refill=refill):
            on_step(sum(len(row.tokens) for row in step))
            for place, row in enumerate(step, -len(step)):  # rows that were just encoded are the last ones
                if row.finish_reason:
                    tokens = [*row.request.prompt_ids, *row.output]
                    states = recorder and recorder.document(place, tokens)
                    yield Completion(row.request.id, row.output, row.finish_reason, states=states)

    return answer


def _bytes_per_token(target: FrozenTarget) -> int:
    """Measure the size of a token's keys and values, as the sizes have other names in each config."""
    cache = target.new_cache(1, 1)
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)  # [1, 1]
    target.forward(cache, token, token[0], token == 0)
    return cache.kv.numel() * cache.kv.element_size()


def server(
    config: ServerConfig,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    top_p: float,
    report: Callable[[str], None],
) -> Engine:
    """Return the engine that asks an OpenAI-compatible server, after a small request to check it.

    Args:
        temperature, top_p: of that request.
        report: receives what the user should know about the server.

    Raises:
        UserError: as `OpenAIClient.probe`.
    """
    client = OpenAIClient(config, tokenizer, end_of_turn_ids(tokenizer))
    messages = [Message("user", "Count from one to ten.")]
    prompt_ids, sampling = encode_prompt(tokenizer, messages), SamplingParams(temperature, top_p)
    client.probe(ChatRequest(prompt_ids, 8, sampling, "probe", messages))
    for note in client.notes:
        report(f"{client.base_url}: {note}")
    return client.generate
