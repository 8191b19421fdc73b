"""Continuous batching gives each request what it would get alone; samples follow their distribution."""

import random

import pytest

from drafttrain.inference.batched import Request, generate_batch
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.target_lm.model import FrozenTarget


def some_requests(count: int, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            id=f"request {i}",
            prompt_ids=[rng.randrange(3, 512) for _ in range(rng.randrange(1, 20))],
            max_new_tokens=rng.randrange(1, 14),
            temperature=temperature,
            top_p=0.9,
            seed=i,
        )
        for i in range(count)
    ]


def run(target: FrozenTarget, requests: list[Request], **options) -> dict[str, tuple[list[int], str]]:
    done = list(generate_batch(target, requests, max_len=64, **options))
    assert len(done) == len(requests)
    return {completion.id: (completion.token_ids, completion.finish_reason) for completion in done}


@pytest.mark.parametrize("max_rows, refill", [(1, 1), (3, 1), (4, 2), (16, 16)])
def test_greedy_batches_equal_greedy_alone(target, monkeypatch, max_rows, refill):
    """Rows are refilled at different times, stop at a token or at the limit, and share the cache."""
    requests = some_requests(11)
    free = [
        decode_all(target, NoProposer(), [r.prompt_ids], r.max_new_tokens, stop=())[0][0] for r in requests
    ]
    stop = max(free, key=len)[2]  # some requests meet it, others run to their limit
    monkeypatch.setattr(FrozenTarget, "eos_token_ids", {stop})
    found = run(target, requests, max_rows=max_rows, refill=refill)
    for request, tokens in zip(requests, free):
        stopped = stop in tokens
        wanted = tokens[: tokens.index(stop) + 1] if stopped else tokens
        assert found[request.id] == (wanted, "stop" if stopped else "length")
    assert {reason for _, reason in found.values()} == {"stop", "length"}


def test_a_seed_gives_the_same_sample_in_every_company(target):
    requests = some_requests(9, temperature=1.0)
    alone = {}
    for request in requests:
        alone |= run(target, [request], max_rows=1, refill=1)
    assert run(target, requests, max_rows=9, refill=9) == alone
    assert run(target, requests[::-1], max_rows=4, refill=2) == alone
    greedy = run(target, some_requests(9), max_rows=9)
    assert sum(greedy[name] != alone[name] for name in alone) >= 5  # sampling did something
    requests[0].seed += 100
    requests[0].max_new_tokens = 13
    other = run(target, requests[:1], max_rows=1)["request 0"][0]
    assert other[: len(alone["request 0"][0])] != alone["request 0"][0]


def test_prompts_without_room_are_reported(llama):
    requests = [Request("long", [5] * 60, 5), Request("empty", [], 5), Request("fits", [5] * 59, 5)]
    found = run(llama, requests, max_rows=2)
    assert found["long"] == found["empty"] == ([], "too_long")
    assert 0 < len(found["fits"][0]) <= 5


def test_a_finished_row_does_not_fill_the_cache(llama, monkeypatch):
    """The first row ends at the last slot, while two others go on for long."""
    monkeypatch.setattr(FrozenTarget, "eos_token_ids", set())
    requests = [Request("full", [5] * 61, 3), Request("a", [6] * 4, 40), Request("b", [7] * 4, 40)]
    found = run(llama, requests, max_rows=3, refill=3)
    assert [len(found[name][0]) for name in ("full", "a", "b")] == [3, 40, 40]


def test_every_emitted_token_is_counted(llama, monkeypatch):
    monkeypatch.setattr(FrozenTarget, "eos_token_ids", set())
    requests, counted = some_requests(7), []
    found = run(llama, requests, max_rows=3, refill=2, on_step=counted.append)
    assert sum(len(tokens) for tokens, _ in found.values()) == sum(
        request.max_new_tokens for request in requests
    )
    # the first token of each comes with its prompt, outside the steps
    assert sum(counted) == sum(request.max_new_tokens - 1 for request in requests)
