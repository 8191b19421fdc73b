"""Continuous batching gives each request what it would get alone, for all drafts and whoever waits."""

import copy
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.inference.decode import Request, Row, decode, decode_all, decode_requests
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, Proposer, TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError


def some_requests(count: int, temperature: float = 0.0) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            prompt_ids=[rng.randrange(3, 512) for _ in range(rng.randrange(1, 20))],
            max_new_tokens=rng.randrange(1, 14),
            sampling=SamplingParams(temperature, top_p=0.9, seed=i),
            id=f"request {i}",
        )
        for i in range(count)
    ]


def run(
    target: FrozenTarget,
    requests: Iterable[Request | None],
    proposer: Proposer | None = None,
    max_rows: int = 4,
    **options,
) -> dict[str, tuple[list[int], str]]:
    """Outputs and reasons by id, in the order in which they end."""
    ended: list[Row] = []
    for rows in decode_requests(target, proposer or NoProposer(), requests, max_rows, 64, **options):
        assert 0 < len(rows) <= max_rows
        ended += [row for row in rows if row.finish_reason]
    assert len({row.number for row in ended}) == len(ended)
    return {row.request.id: (row.output, row.finish_reason) for row in ended}


def edd(target: FrozenTarget) -> TreeProposer:
    """A random drafter that is sometimes right."""
    torch.manual_seed(3)
    settings = DrafterConfig(tapped_blocks=[-2])
    target.tap([-2])
    drafter = EddModel(EddConfig.for_target(target, settings, 400)).eval()
    drafter.initialize_from(target, settings, torch.arange(400))
    return TreeProposer(drafter, ChainPolicy(3))


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("max_rows, refill", [(1, 1), (3, 1), (4, 2), (16, 16)])
def test_greedy_batches_equal_greedy_alone(target, monkeypatch, max_rows, refill, drafting):
    """Rows are refilled at different times, stop at a token or at the limit, and share the cache."""
    requests = some_requests(11)
    free = [
        decode_all(target, NoProposer(), [r.prompt_ids], r.max_new_tokens, stop=())[0][0] for r in requests
    ]
    stop = max(free, key=len)[2]  # some requests meet it, others run to their limit
    monkeypatch.setattr(FrozenTarget, "eos_token_ids", {stop})
    found = run(target, requests, edd(target) if drafting else None, max_rows=max_rows, refill=refill)
    for request, tokens in zip(requests, free):
        stopped = stop in tokens
        expected = tokens[: tokens.index(stop) + 1] if stopped else tokens
        assert found[request.id] == (expected, "stop" if stopped else "length")
    assert {reason for _, reason in found.values()} == {"stop", "length"}


def test_a_seed_gives_the_same_sample_in_every_company(target):
    requests = some_requests(9, temperature=1.0)
    alone = {}
    for request in requests:
        alone |= run(target, [request], max_rows=1)
    assert run(target, requests, max_rows=9, refill=9) == alone
    assert run(target, requests[::-1], max_rows=4, refill=2) == alone
    assert run(target, requests, edd(target), max_rows=4) == alone
    greedy = run(target, some_requests(9), max_rows=9)
    assert sum(greedy[name] != alone[name] for name in alone) >= 5  # sampling did something
    other = replace(requests[0], sampling=SamplingParams(1.0, 0.9, seed=100), max_new_tokens=13)
    text = run(target, [other], max_rows=1)["request 0"][0]
    assert text[: len(alone["request 0"][0])] != alone["request 0"][0]


def test_a_seed_gives_the_text_that_decoding_a_list_of_prompts_gives(target):
    requests = some_requests(6, temperature=0.8)
    rule = AcceptMatching([request.sampling for request in requests])
    outputs, _ = decode_all(target, NoProposer(), [r.prompt_ids for r in requests], 13, accept=rule)
    found = run(target, [replace(request, max_new_tokens=13) for request in requests], max_rows=3, refill=2)
    assert [found[request.id][0] for request in requests] == outputs


class Dialogue:
    """Requests of which each but the first of a chain waits for the output before it."""

    def __init__(self, chains: int, turns: int):
        self.ready = [Request([5 + i], 3 + i, id=f"{i}.0") for i in range(chains)]
        self.turns, self.asked = turns, []

    def __iter__(self):
        while len(self.asked) < self.chains_left():
            if not self.ready:
                yield None
                continue
            self.asked.append(self.ready.pop(0))
            yield self.asked[-1]

    def chains_left(self) -> int:
        return 3 * self.turns

    def answered(self, row: Row) -> None:
        chain, turn = map(int, row.request.id.split("."))
        if turn + 1 < self.turns:
            prompt = [*row.request.prompt_ids, *row.output, 7]
            self.ready.append(Request(prompt, 3 + chain, id=f"{chain}.{turn + 1}"))


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("max_rows, refill", [(1, 1), (2, 1), (3, 3), (8, 1)])
def test_requests_that_wait_for_an_answer(llama, max_rows, refill, drafting):
    """Turns are asked when the turn before them has been answered, while other rows go on or all ended."""
    source, outputs = Dialogue(3, 4), {}
    proposer = edd(llama) if drafting else NoProposer()
    for rows in decode_requests(llama, proposer, source, max_rows, 64, stop=(), refill=refill):
        for row in rows:
            if row.finish_reason:
                outputs[row.request.id] = (row.request.prompt_ids, row.output)
                source.answered(row)
    assert len(outputs) == 12
    for chain in range(3):
        text = [5 + chain]
        for turn in range(4):
            prompt, output = outputs[f"{chain}.{turn}"]
            assert prompt == text
            assert output == decode_all(llama, NoProposer(), [prompt], 3 + chain, stop=())[0][0]
            text = [*prompt, *output, 7]


def test_waiting_for_nothing_is_an_error(llama):
    with pytest.raises(RuntimeError, match="none is running that it could wait for"):
        run(llama, [None])


def test_requests_are_taken_when_enough_rows_are_free(llama):
    """With refill 3 of 4 rows, three outputs have ended before the next prompts are encoded."""
    requests = [Request([5 + i], 3 + 2 * i, id=str(i)) for i in range(8)]
    running: list[int] = []
    for rows in decode_requests(llama, NoProposer(), requests, 4, 64, stop=(), refill=3):
        running.append(len([row for row in rows if len(row.output) == 1]) or -len(rows))
    # encoded: 4, then the next three once the first three have ended
    assert running[:9] == [4, -4, -4, -3, -3, -2, -2, 3, -4]


def test_long_prompts_are_encoded_in_parts(llama, monkeypatch):
    monkeypatch.setattr("drafttrain.inference.decode.PREFILL_TOKENS", 30)
    sizes = (9, 4, 10, 11, 29, 31, 2)
    requests = [Request([7] * n, 2, id=str(i)) for i, n in enumerate(sizes)]
    steps = decode_requests(llama, NoProposer(), requests, 7, 64, stop=())
    parts = [[len(row.request.prompt_ids) for row in rows] for rows in (next(steps) for _ in range(5))]
    assert parts[:4] == [[9, 4, 2], [10, 11], [29], [31]]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 5), "prompt 1: must have at least one token, got none"),
        (Request([5], 0), "max_new_tokens: must be at least 1, got 0"),
        (Request([5] * 500, 13), "prompt 1: .* the 512 positions .*, got 500"),
    ],
)
def test_bad_requests(llama, request_, words):
    with pytest.raises(UserError, match=words):
        run(llama, [Request([5], 4), request_])


def test_a_row_longer_than_foreseen_gets_room(llama):
    requests = [Request([5] * 4, 4, id="short"), Request([6] * 200, 4, id="long")]
    found = run(llama, requests, max_rows=2)  # of 64 tokens
    assert found["long"][0] == decode_all(llama, NoProposer(), [[6] * 200], 4)[0][0]
    assert found["short"][0] == decode_all(llama, NoProposer(), [[5] * 4], 4)[0][0]


def test_a_caller_ends_an_output(llama):
    """Its row is free in the next step, and the others go on."""
    requests = [Request([5 + i], 12, id=str(i)) for i in range(3)]
    outputs: dict[str, list[int]] = {}
    for rows in decode_requests(llama, NoProposer(), requests, 2, 64, stop=()):
        for row in rows:
            outputs[row.request.id] = row.output
            if row.number == 0 and len(row.output) == 4:
                row.finish_reason = "stop"
    expected = decode_all(llama, NoProposer(), [[5], [6], [7]], 12, stop=())[0]
    assert [outputs[str(i)] for i in range(3)] == [expected[0][:4], *expected[1:]]


def test_steps_of_a_list_of_prompts_end_outputs_too(llama):
    steps, ended = [], 0
    for step in decode(llama, NoProposer(), [[5], [6]], 9, stop=()):
        steps.append([len(tokens) for tokens in step.tokens])
        if len(steps) == 3:
            step.rows[1].finish_reason, ended = "stop", step.rows[1].number
    assert ended == 1 and steps == [[1, 1]] * 3 + [[1, 0]] * 6


# logits that are not finite


def poisoned(model, tokenizer, token: int) -> FrozenTarget:
    """A target in which a token's embedding is NaN."""
    model = copy.deepcopy(model)
    model.get_input_embeddings().weight.data[token] = float("nan")
    return FrozenTarget(model, tokenizer, "tiny")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafting", [False, True])
def test_what_takes_the_place_of_a_broken_row_is_untouched(tiny_llama, llama, drafting, temperature):
    """NaN is left in slots that the row's next, shorter request masks; a neighbour keeps them in view."""
    sampling = SamplingParams(temperature, seed=4)
    requests = [
        Request(list(range(100, 130)), 30, sampling, "neighbour"),
        Request([10, 11, 12], 30, sampling, "next"),
    ]
    alone = run(llama, requests, max_rows=1, stop=())
    poison = next(t for t in range(3, 512) if all(t not in output for output, _ in alone.values()))
    broken = Request([*range(200, 220), poison], 30, sampling, "broken")
    target = poisoned(*tiny_llama, poison)
    proposer = edd(target) if drafting else None
    stats = DecodeStats()
    requests.insert(1, broken)
    found = run(target, requests, proposer, max_rows=2, stop=(), stats=stats)
    assert found.pop("broken") == ([], "not_finite") and stats.prompts == 3
    assert found == alone and all(len(output) == 30 for output, _ in alone.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafting", [False, True])
def test_a_row_that_breaks_later_keeps_what_came_before(llama, monkeypatch, drafting, temperature, value):
    sampling = SamplingParams(temperature, seed=1)
    requests = [Request([5 + i], 12, sampling, str(i)) for i in range(3)]
    plain = run(llama, requests, stop=())
    text, others = plain["1"][0], {*plain["0"][0], *plain["2"][0]}
    at = next(i for i, t in enumerate(text) if 2 < i < 10 and t not in others and t not in text[:i])
    head, bad = llama.head, text[at]
    forward, fed = FrozenTarget.forward, []

    def noted(self, cache, tokens, *args):
        fed.append(tokens)
        return forward(self, cache, tokens, *args)

    def broken(final):
        """Logits after the token `bad` are not finite."""
        logits = head(final)
        if logits.ndim == 3 and fed[-1].shape == logits.shape[:2]:
            logits[..., 17] = logits[..., 17].masked_fill(fed[-1] == bad, value)
        return logits

    monkeypatch.setattr(FrozenTarget, "forward", noted)
    monkeypatch.setattr(llama, "head", broken)
    proposer = edd(llama) if drafting else None
    found = run(llama, requests, proposer, stop=())
    assert found["1"] == (text[: at + 1], "not_finite")
    assert found["0"] == plain["0"] and found["2"] == plain["2"]


def test_a_list_of_prompts_is_refused_by_a_broken_target(tiny_llama):
    target, poison = poisoned(*tiny_llama, 9), 9
    with pytest.raises(UserError, match="tiny: logits must be finite, got NaN .*float32; load it in another"):
        decode_all(target, NoProposer(), [[5], [poison]], 4)
