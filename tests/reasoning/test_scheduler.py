"""Scheduled decoding: who is verified when, and texts that depend on seeds alone."""

import gc
import itertools
import os
import random
import signal
import threading
import time
import warnings
import weakref
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.bundle import load_bundle
from drafttrain.data.message import Message
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.eagle import EagleConfig, EagleModel
from drafttrain.inference import many
from drafttrain.inference.acceptance import accept_greedy
from drafttrain.inference.decode import Request, decode_all
from drafttrain.inference.many import propose_many, run_target_many
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.inference.session import judge, prefill
from drafttrain.kernels import team
from drafttrain.kernels.linear import is_available
from drafttrain.reasoning import execution
from drafttrain.reasoning import prefixes as prefix_store
from drafttrain.reasoning.branches import Branch, HangingWorker, Pace, Rounds
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.reasoning.interface import Call
from drafttrain.reasoning.prefixes import PrefixStore
from drafttrain.reasoning.scheduler import ScheduledDecoder
from drafttrain.self_draft.hybrid import HybridProposer
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.target_lm.cache import KvCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.twin import native_copy
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.sampled import SampledTreePolicy
from drafttrain.utils.errors import UserError

pytestmark = pytest.mark.skipif(
    not is_available(), reason="torch's operators round the rows of a forward differently"
)
PROMPTS = [
    [3, 14, 15, 92, 65],
    [3, 14, 15, 92, 65],  # a sample of the same prompt
    [3, 14, 15, 7],
    [20] * 12,
    [30, 31, 32],
    [3, 14, 15, 92, 65, 8, 8],
    [9, 9],
    [41, 5, 41, 5, 41, 5],
]
NEW = 12
scheduling = partial(SchedulerConfig, short=0)
WAYS = [
    scheduling(verifier, drafting, overlap=overlap)
    for verifier in ("one", "batched")
    for drafting in ("each", "joined")
    for overlap in (False, True)
]
DRAWN = "drawn:k_config=3-2-1"


def name(way: SchedulerConfig) -> str:
    return f"{way.verifier}-{way.drafting}-{'overlap' if way.overlap else 'turns'}"


@pytest.fixture(scope="module")
def loaded(tiny_bundle):
    return load_bundle(tiny_bundle, dtype="float32", device="cpu")


def requests(temperature: float, n: int = len(PROMPTS)) -> list[Request]:
    """One of them ends early, and each has a seed of its own."""
    return [
        Request(prompt, NEW if i != 2 else 3, SamplingParams(temperature, seed=i))
        for i, prompt in enumerate(PROMPTS[:n])
    ]


def texts(target, proposer, asked, config=None, **options) -> list[list[int]]:
    decoder = ScheduledDecoder(target, proposer, config or scheduling(), **options)
    branches = decoder.decode(asked, stop=())
    assert all(branch.error is None for branch in branches)
    return [branch.row.output for branch in branches]


def serial(target, asked) -> list[list[int]]:
    """The slow, obvious way: each request by itself, without drafts."""
    return [
        decode_all(
            target, NoProposer(), [one.prompt_ids], one.max_new_tokens, stop=(), sampling=[one.sampling]
        )[0][0]
        for one in asked
    ]


@pytest.fixture(scope="module")
def plain(loaded):
    """Texts of plain decoding of `requests`, by temperature."""
    return {temperature: serial(loaded.target, requests(temperature)) for temperature in (0.0, 1.0)}


@pytest.fixture(scope="module")
def drawn_alone(loaded):
    """Texts of `requests(1.0)` with drawn candidates, each request by itself."""
    return [texts(loaded.target, proposer_of(loaded, DRAWN), [one])[0] for one in requests(1.0)]


def proposer_of(loaded, kind: str):
    if kind == "n-grams":
        return SelfDraft(SelfDraftConfig(), loaded.target.vocab_size)
    if kind == "hybrid":
        drafter = TreeProposer(loaded.drafter, parse_policy("chain:length=3"))
        return HybridProposer(SelfDraft(SelfDraftConfig(), loaded.target.vocab_size), drafter)
    return NoProposer() if kind == "none" else TreeProposer(loaded.drafter, parse_policy(kind))


KINDS = ["none", "chain:length=3", "static:k_config=2-2-1", "n-grams", "hybrid"]


@pytest.mark.parametrize("way", WAYS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_texts_of_plain_decoding(loaded, plain, kind, way):
    """Greedily and with seeds, for one to eight sequences at a time: each kind and each way has them all."""
    first = WAYS.index(way) + KINDS.index(kind)
    for temperature, expected in plain.items():
        asked = requests(temperature)
        for sequences in (1 + (first + step) % 8 for step in (0, 2, 7)):
            config = replace(way, sequences=sequences)
            assert texts(loaded.target, proposer_of(loaded, kind), asked, config) == expected


@pytest.mark.parametrize("kind", ["eagle", "lm"])
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_other_drafters_give_the_texts_of_plain_decoding(loaded, plain, tiny_target_folder, kind, way):
    """With caches of their own, for all numbers of sequences that are decoded at a time together."""
    loaded.target.tap([-1] if kind == "eagle" else [-2])
    proposer = proposers(loaded, tiny_target_folder)[kind]
    for temperature, sequences in ((0.0, 1 + WAYS.index(way)), (1.0, 8 - WAYS.index(way))):
        config = replace(way, sequences=sequences)
        assert texts(loaded.target, proposer.twin(), requests(temperature), config) == plain[temperature]
    loaded.target.tap([-2])


@pytest.mark.parametrize("kind", ["chain:length=3", "hybrid"])
@pytest.mark.parametrize("apart", [False, True])
def test_caches_are_those_of_sequences_that_go_on(loaded, kind, apart, monkeypatch):
    """Also of the first sequence of a prompt, whose n-grams others of the same prompt share, next to it or
    after all others."""
    alive, found, make = weakref.WeakSet(), [], KvCache.__init__
    monkeypatch.setattr(KvCache, "__init__", lambda cache, *sizes: alive.add(cache) or make(cache, *sizes))
    asked = requests(1.0) * 2 if apart else [one for one in requests(1.0) for _ in range(2)]

    class Counts(Pace):
        def drafted(self, began, branches):
            found.append(len(alive))

    for sequences in (1, 3):
        found.clear()
        config = scheduling("one", "each", sequences, overlap=False)
        texts(loaded.target, proposer_of(loaded, kind), asked, config, prefixes=0, pace=Counts())
        assert max(found) <= 2 * sequences


@pytest.mark.parametrize("kind", ["none", DRAWN])
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_texts_that_have_ended_leave_no_caches(loaded, kind, way):
    """Nothing waits for the garbage collector: it counts objects, not their bytes."""

    def caches() -> int:
        return sum(issubclass(type(one), KvCache) for one in gc.get_objects())

    gc.collect()
    before = caches()
    gc.disable()
    try:
        decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, kind), way, prefixes=0)
        ended = decoder.decode(requests(1.0), stop=())
        assert len(ended) == len(PROMPTS) and caches() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_drawn_candidates_give_texts_that_depend_on_seeds_alone(loaded, drawn_alone, way):
    asked, proposer = requests(1.0), proposer_of(loaded, DRAWN)
    # a draft's numbers belong to its sequence's seed and to how many it has had
    for sequences in (2, 8):
        config = replace(way, sequences=sequences)
        assert texts(loaded.target, proposer.twin(), asked, config) == drawn_alone


@cache
def markov(tokens: int):
    """A target over some tokens whose next one depends on the last one alone, and its probabilities
    [tokens, tokens]. It runs natively, which is several times faster for many small trees."""
    config = LlamaConfig(
        vocab_size=tokens, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
        model.lm_head.weight.normal_(std=0.3)
        logits = model(torch.arange(tokens)[:, None]).logits[:, 0]  # [tokens, tokens]
    target = native_copy(model, None, f"{tokens} tokens")
    assert target is not None
    return target, logits.double().softmax(-1)


class Adversary(Drafter):
    """Drafts by a table; draft token j is the target's token last - j, and its token 0 is never
    drafted."""

    def __init__(self, kind: str, probs: torch.Tensor):
        self.last, self.draft_vocab_size = len(probs) - 1, len(probs) - 1
        log_p = probs[:, 1:].flip(-1).float().log().log_softmax(-1)  # [last, D]
        never, sure = torch.full((2, self.draft_vocab_size), -torch.inf)  # [D] each
        never[[0, 3]], sure[:] = 0.0, -90.0
        sure[0] = 0.0
        self.table = {
            "right": log_p,
            "wrong": (-3 * log_p).log_softmax(-1),
            "uniform": torch.zeros_like(log_p).log_softmax(-1),
            "two alone": (log_p + never).log_softmax(-1),
            "sure": sure.expand_as(log_p).log_softmax(-1),
        }[kind]

    def new_state(self, batch, max_len):
        return ()

    def select_rows(self, state, rows):
        return ()

    def prefix(self, state, length, room, tapped):
        return ()

    def join(self, states):
        return ()

    def split(self, joined, states):
        pass

    def update(self, state, tokens, tapped, counts):
        pass

    def to_target(self, ids):
        return self.last - ids

    def expand(self, state, tree, frontier):
        return self.table[tree.tokens.gather(1, frontier)]


TOGETHER = scheduling("batched", "joined", sequences=64)
ADVERSARIES = ["right", "wrong", "uniform", "two alone", "sure"]
CHAINS, BUSHES = ("1-1-1", "1-1-1-1", "1-1-1-1-1"), ("2-2-1", "4-2-1-1", "2-2-1-1")
DISTRIBUTIONS = [  # shapes of Table 1, and with a threshold
    *((k, 6, TOGETHER, kind) for k in CHAINS + BUSHES for kind in ADVERSARIES),
    *(("8-2-1-1-1", 12, TOGETHER, kind) for kind in ADVERSARIES),  # eight children need more tokens
    *(("2-2-1-1-1,threshold=0.2", 6, TOGETHER, kind) for kind in ("wrong", "two alone")),
    ("2-2-1", 6, scheduling("one", "joined", sequences=32), "two alone"),
]


@pytest.mark.parametrize(("k_config", "tokens", "way", "kind"), DISTRIBUTIONS)
def test_scheduled_draws_have_the_targets_distribution(k_config, tokens, way, kind):
    """20,480 tokens of 128 sequences: Pearson's statistic of which token follows which."""
    target, probs = markov(tokens)
    proposer = TreeProposer(Adversary(kind, probs), parse_policy(f"drawn:k_config={k_config}"))
    asked = [Request([number % tokens], 161, SamplingParams(1.0, seed=number)) for number in range(128)]
    counts = torch.zeros(tokens, tokens, dtype=torch.double)
    for text in texts(target, proposer, asked, way):
        for last, token in itertools.pairwise(text):
            counts[last, token] += 1
    expected = counts.sum(1, keepdim=True) * probs
    assert counts.sum() == 20480 and expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-4, tokens * (tokens - 1))


def queued_in_order(numbers, put):
    """Return a `Rounds.put` that lets drafts reach the queue in the order of these numbers, then in any."""
    waiting, turn = list(numbers), threading.Condition()

    def put_in_turn(rounds, queue, branches):
        if queue is not rounds.ready:
            put(rounds, queue, branches)
            return
        [number] = [branch.row.number for branch in branches]
        with turn:  # held until the draft is queued, or the next one might get there first
            turn.wait_for(lambda: waiting[:1] in ([], [number]), 60)
            put(rounds, queue, branches)
            if number in waiting:
                waiting.remove(number)
            turn.notify_all()

    return put_in_turn


@pytest.mark.parametrize("verifier", ["one", "batched"])
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("chain:length=3", 0.0), ("chain:length=3", 1.0), (DRAWN, 1.0), ("n-grams", 1.0), ("hybrid", 0.0)],
)
def test_texts_are_the_same_in_every_order_of_arrival(loaded, kind, temperature, verifier, monkeypatch):
    asked = requests(temperature, 3)[:2] + requests(temperature, 4)[3:]
    expected = texts(loaded.target, proposer_of(loaded, kind), asked)
    config = scheduling(verifier, "each", sequences=3, overlap=True, threads=(1, 3))
    put = Rounds.put
    for order in itertools.permutations(range(3)):
        forced = [*order, *order[::-1]]
        monkeypatch.setattr(Rounds, "put", queued_in_order(forced, put))
        decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, kind), config)
        with pytest.warns(UserWarning, match="threads: must add up to"):
            branches = decoder.decode(asked, stop=())
        assert [branch.row.output for branch in branches] == expected
        verdicts = [span.sequences for span in decoder.timeline.spans if span.what == "verify"]
        assert list(itertools.chain(*verdicts))[: len(forced)] == forced
        assert verifier == "batched" or {len(numbers) for numbers in verdicts} == {1}


def test_texts_are_the_same_with_random_delays(loaded):
    class Delays(Pace):
        draws = random.Random(5)

        def drafted(self, began, branches):
            time.sleep(self.draws.random() * 2e-3)

        def forwarded(self, began, tokens, trees):
            self.drafted(began, [])

    for kind in ("chain:length=3", DRAWN):
        asked = requests(1.0)
        expected = texts(loaded.target, proposer_of(loaded, kind), asked)
        for way in WAYS:
            if way.overlap:
                config = replace(way, sequences=4)
                assert (
                    texts(loaded.target, proposer_of(loaded, kind), asked, config, pace=Delays()) == expected
                )


class Slow(Pace):
    """The first draft of this sequence takes until four drafts of others have been verified."""

    def __init__(self, slow: int):
        self.slow, self.verified, self.enough = slow, 0, threading.Event()

    def drafted(self, began, branches):
        if any(branch.row.number == self.slow for branch in branches):
            assert self.enough.wait(60)

    def forwarded(self, began, tokens, trees):
        self.verified += len(trees)
        if self.verified >= 4:
            self.enough.set()


def noted_drafts(monkeypatch) -> list[int]:
    """Return a list of the sequences whose drafts are queued, in the order of the queue."""
    drafts, put = [], Rounds.put

    def noted(self, queue, branches):
        with self.changed:  # two workers may end drafts at the same time: the queue decides
            if queue is self.ready:
                drafts.extend(branch.row.number for branch in branches)
            put(self, queue, branches)

    monkeypatch.setattr(Rounds, "put", noted)
    return drafts


@pytest.mark.parametrize("drafting", ["each", "joined"])
def test_first_come_is_first_served_and_drafts_wait_for_their_verdict(loaded, drafting, monkeypatch):
    drafts = noted_drafts(monkeypatch)
    config = scheduling("one", drafting, sequences=3, overlap=True)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=3"), config)
    decoder.decode(requests(1.0, 6), stop=())
    verdicts = [span.sequences[0] for span in decoder.timeline.spans if span.what == "verify"]
    assert drafts == verdicts  # the order of the queue
    spans = [span for span in decoder.timeline.spans if span.what != "prefill"]
    for number in range(6):  # a draft begins only when the verdict before it has ended
        own = sorted((span for span in spans if number in span.sequences), key=lambda span: span.begin)
        assert [span.what for span in own] == ["draft", "verify"] * (len(own) // 2)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(own) if a.what == "verify")


def test_who_waits_for_a_core_does_not_draft(loaded, monkeypatch):
    """Three workers share one core."""
    call, ended = execution.propose_many, []

    def slow(*given):
        time.sleep(0.02)
        found = call(*given)
        ended.append(time.perf_counter())  # it has the core still
        return found

    monkeypatch.setattr(execution, "propose_many", slow)
    monkeypatch.setattr(ScheduledDecoder, "_threads", lambda self: (1, 1))
    config = scheduling("one", "each", sequences=3, overlap=True)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=1"), config)
    decoder.decode(requests(0.0, 3), stop=())
    timeline = decoder.timeline
    begins = sorted(one.begin + timeline.started for one in timeline.spans if one.what == "draft")
    assert len(begins) == len(ended) > 10
    assert all(begin > end for begin, end in zip(begins[1:], ended))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_callers_time_is_charged_to_nobody(loaded, overlap):
    """Also where it is longer than the forward that runs beside it, and where a draft has failed."""

    class Failing(Pace):
        def drafted(self, began, branches):
            if branches[0].row.number == 1:
                raise OSError("no memory")

    config = scheduling("one", "each", sequences=2, overlap=overlap)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config, pace=Failing())
    slept = []

    def sleep(branch):
        time.sleep(0.1)
        slept.append(0.1)
        return []

    branches = decoder.decode(requests(0.0, 4), stop=(), on_tokens=sleep, on_end=sleep)
    assert [branch.error is not None for branch in branches] == [False, True, False, False]
    # forwards take milliseconds
    assert len(slept) > 15 and sum(branch.stats.seconds for branch in branches) < sum(slept) / 2


def test_an_error_of_the_target_ends_the_run_and_leaves_nothing(loaded, monkeypatch):
    """Neither threads nor caches, which the error's traceback might hold."""

    class Broken(Pace):
        def forwarded(self, began, tokens, trees):
            if trees:
                raise MemoryError("no memory")

    def caches() -> int:
        return sum(issubclass(type(one), KvCache) for one in gc.get_objects())

    gc.collect()
    before, threads = caches(), set(threading.enumerate())
    config = scheduling("one", "each", sequences=3, overlap=True)
    gc.disable()
    try:
        decoder = ScheduledDecoder(
            loaded.target, proposer_of(loaded, "chain:length=2"), config, 0, pace=Broken()
        )
        with pytest.raises(MemoryError, match="no memory") as raised:
            decoder.decode(requests(0.0, 3), stop=())
        assert set(threading.enumerate()) == threads
        del raised
        assert caches() == before
    finally:
        gc.enable()


def test_a_target_thread_that_cannot_start_ends_the_run(loaded, monkeypatch):
    def broken(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(execution, "own_stream", broken)
    config = scheduling("one", "joined", sequences=2, overlap=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        ScheduledDecoder(loaded.target, NoProposer(), config).decode(requests(0.0, 2), stop=())


def test_a_forward_that_runs_ends_before_ctrl_c_is_raised(loaded):
    """A caller that tries again must not meet it."""
    ended = []

    class Long(Pace):
        def forwarded(self, began, tokens, trees):
            if trees:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(2.5)
                ended.append(len(trees))

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    config = scheduling("one", "each", sequences=1, overlap=True)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config, pace=Long())
    try:
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(requests(0.0, 1), stop=())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == [1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_caller_in_inference_mode_gets_the_same_texts(tiny_llama, overlap):
    target = FrozenTarget(*tiny_llama, "tiny")  # torch's operators: the native ones write by address
    asked, config = requests(1.0, 4), scheduling("one", "each", sequences=2, overlap=overlap)
    expected = texts(target, proposer_of(None, "none"), asked, config)
    with torch.inference_mode():
        assert texts(target, proposer_of(None, "none"), asked, config) == expected


def test_a_slow_drafter_delays_nobody_else(loaded, monkeypatch):
    """While one sequence drafts, the others are verified again and again; once its draft is there, only those
    come first that have waited longer."""
    drafts = noted_drafts(monkeypatch)
    config = scheduling("one", "each", sequences=3, overlap=True)
    asked = [replace(one, max_new_tokens=24) for one in requests(0.0, 1) + requests(0.0, 5)[3:]]
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=1"), config, pace=Slow(0))
    assert not any(branch.error for branch in decoder.decode(asked, stop=()))
    verdicts = [span.sequences[0] for span in decoder.timeline.spans if span.what == "verify"]
    assert 0 not in verdicts[:4] and drafts == verdicts


def test_threads_without_overlap_have_no_effect_and_say_so(loaded):
    config = scheduling("one", "each", overlap=False, threads=(1, 1))
    with pytest.warns(UserWarning, match="threads: must be null where drafting and verifying take turns"):
        found = texts(loaded.target, NoProposer(), requests(0.0, 1), config)
    assert found == serial(loaded.target, requests(0.0, 1))


def test_a_hanging_worker_is_noticed(monkeypatch):
    monkeypatch.setattr("drafttrain.reasoning.branches.POLL", 0.05)
    rounds = Rounds()
    with pytest.raises(RuntimeError, match="a worker hangs"):
        rounds.take(rounds.ready, everything=False, patience=0.3)


@pytest.mark.parametrize("way", [way for way in WAYS if way.overlap], ids=name)
def test_a_worker_that_blocks_ends_the_run(loaded, way, monkeypatch):
    """In time, although it holds the only core that others wait for; once it goes on, all threads end."""
    take, call, released = Rounds.take, execution.propose_many, threading.Event()
    monkeypatch.setattr("drafttrain.reasoning.branches.POLL", 0.05)
    monkeypatch.setattr(Rounds, "take", lambda *given, **more: take(*given, **{"patience": 0.3} | more))
    monkeypatch.setattr(ScheduledDecoder, "_threads", lambda self: (1, 1))
    monkeypatch.setattr(execution, "propose_many", lambda *given: released.wait(60) and call(*given))
    proposer, config = proposer_of(loaded, "chain:length=2"), replace(way, sequences=3)
    decoder = ScheduledDecoder(loaded.target, proposer, config)
    before, started = set(threading.enumerate()), time.monotonic()
    try:
        with pytest.raises(HangingWorker, match=r"no draft and no verdict for 0\.3 s: a worker hangs"):
            decoder.decode(requests(0.0, 3), stop=())
        assert time.monotonic() - started < 20
        crew = set(threading.enumerate()) - before
        assert len(crew) == (1 if way.drafting == "joined" else 3)
    finally:
        released.set()
    for worker in crew:
        worker.join(20)
    assert not any(worker.is_alive() for worker in crew)


def test_idle_workers_wait_for_as_long_as_a_verdict_takes(loaded, monkeypatch):
    """A caller's work after an answer, or a long prompt, is no draft that hangs."""
    take = Rounds.take
    impatient, slept = {"patience": 2.0}, []
    monkeypatch.setattr("drafttrain.reasoning.branches.POLL", 0.05)
    monkeypatch.setattr(Rounds, "take", lambda self, *given, **more: take(self, *given, **impatient | more))

    class Long(Pace):
        def forwarded(self, began, tokens, trees):
            if trees and not slept:
                slept.append(time.sleep(2.5))

    asked = [replace(one, max_new_tokens=3) for one in requests(0.0, 2)]
    config = replace(scheduling("one", "joined", sequences=2, overlap=True), short=0)
    found = texts(loaded.target, proposer_of(loaded, "chain:length=2"), asked, config, pace=Long())
    assert found == serial(loaded.target, asked)


@pytest.mark.parametrize("error", [OSError("the disk is on fire\nand so is the log"), SystemExit("no more")])
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_a_worker_that_raises_ends_its_branch_alone(loaded, way, error):
    """A worker that is cancelled, too. Where the main thread drafts, its own exit ends the run."""

    class Failing(Pace):
        def drafted(self, began, branches):
            if any(branch.row.number == 1 for branch in branches):
                raise error

    asked = requests(0.0, 3)
    decoder = ScheduledDecoder(
        loaded.target, proposer_of(loaded, "chain:length=2"), replace(way, sequences=1), pace=Failing()
    )
    if isinstance(error, SystemExit) and not way.overlap:
        with pytest.raises(SystemExit, match="no more"):
            decoder.decode(asked, stop=())
        return
    branches = decoder.decode(asked, stop=())
    assert branches[1].error == f"{type(error).__name__}: {error}".splitlines()[0]
    assert branches[1].row.finish_reason is None
    expected = serial(loaded.target, asked)
    for i in (0, 2):
        assert branches[i].error is None and branches[i].row.output == expected[i]


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_a_mistake_of_the_users_ends_the_run(loaded, way):
    """Such as a damaged n-gram cache: an answer that ends with it would be kept for good."""

    class Damaged(Pace):
        def drafted(self, began, branches):
            raise UserError("ngrams.bin: damaged; build it again")

    proposer = proposer_of(loaded, "chain:length=2")
    decoder = ScheduledDecoder(loaded.target, proposer, replace(way, sequences=2), pace=Damaged())
    with pytest.raises(UserError, match="ngrams.bin: damaged"):
        decoder.decode(requests(0.0, 3), stop=())


@pytest.mark.parametrize("way", [way for way in WAYS if way.drafting == "joined"], ids=name)
def test_of_drafts_that_fail_together_only_those_end_that_fail_alone(loaded, way):
    class Failing(Pace):
        def drafted(self, began, branches):
            if any(branch.row.number == 1 for branch in branches):
                raise OSError("no memory")

    asked = requests(0.0, 4)
    proposer, expected = proposer_of(loaded, "chain:length=2"), serial(loaded.target, asked)
    decoder = ScheduledDecoder(loaded.target, proposer, replace(way, sequences=4), pace=Failing())
    branches = decoder.decode(asked, stop=())
    assert [branch.error for branch in branches] == [None, "OSError: no memory", None, None]
    assert all(branch.row.output == text for branch, text in zip(branches, expected) if not branch.error)


@pytest.mark.parametrize("failing", ["update", "propose"])
@pytest.mark.parametrize("kind", ["chain:length=3", DRAWN, "hybrid", "lm"])
def test_joined_drafts_that_fail_are_drafted_one_by_one(
    loaded, tiny_target_folder, kind, failing, monkeypatch
):
    """The drafts are the same: what the drafter had read before it failed, it does not read again."""
    lm = load_bundle(tiny_target_folder, target=loaded.target, dtype="float32", device="cpu")
    config, call, failed = scheduling("batched", "joined", overlap=False), getattr(TreeProposer, failing), []

    def decode() -> tuple:
        proposer = lm.proposer("chain:length=3") if kind == "lm" else proposer_of(loaded, kind)
        decoder = ScheduledDecoder(loaded.target, proposer, config, prefixes=0)
        branches = decoder.decode(requests(1.0), stop=())
        return [branch.row.output for branch in branches], decoder.stats.granted, decoder.stats.offered

    expected = decode()

    def broken(self, state, given, *more):
        if len(given) > 1 and (failing == "propose" or given.shape[1] < 6):  # no prompts, which must be read
            failed.append(given)
            if failing == "propose":
                call(self, state, given, *more)
            raise MemoryError
        return call(self, state, given, *more)

    monkeypatch.setattr(TreeProposer, failing, broken)
    assert decode() == expected and failed


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_nan_beside_others_ends_its_sequence_alone(loaded, monkeypatch, way):
    """Sequences that are verified, and drafted for, together with it."""
    asked, judged = requests(0.0, 5), []
    expected = serial(loaded.target, asked)

    def broken(session, tree, accept, states, logits):
        if not any(one is session for one in judged):
            judged.append(session)
            logits = logits * torch.nan if len(judged) == 2 else logits
        return judge(session, tree, accept, states, logits)

    for module in ("many", "session"):
        monkeypatch.setattr(f"drafttrain.inference.{module}.judge", broken)
    decoder = ScheduledDecoder(
        loaded.target, proposer_of(loaded, "chain:length=2"), replace(way, sequences=5)
    )
    branches = decoder.decode(asked, stop=())
    [lost] = [branch.row.number for branch in branches if branch.row.finish_reason == "not_finite"]
    assert len(judged) == 5 and not any(branch.error for branch in branches)
    others = [branch.row for branch in branches if branch.row.number != lost]
    assert all(row.output == expected[row.number] for row in others)


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_in_one_sequence_ends_it_alone(loaded, monkeypatch, overlap):
    asked = requests(0.0, 3)
    expected = serial(loaded.target, asked)
    head, calls = type(loaded.target).head, itertools.count()

    def broken(self, final):
        logits = head(self, final)
        if next(calls) == 1:
            logits[...] = torch.nan
        return logits

    monkeypatch.setattr(type(loaded.target), "head", broken)
    config = scheduling("one", "each", sequences=1, overlap=overlap)
    branches = ScheduledDecoder(
        loaded.target, proposer_of(loaded, "chain:length=2"), config, prefixes=0
    ).decode(asked, stop=())
    assert branches[0].row.finish_reason == "not_finite"
    assert [branch.row.output for branch in branches[1:]] == expected[1:]


def test_ctrl_c_ends_all_threads(loaded):
    class Interrupting(Pace):
        def forwarded(self, began, tokens, trees):
            if trees:
                raise KeyboardInterrupt

    before, started = threading.active_count(), time.monotonic()
    config = scheduling("one", "each", sequences=3, overlap=True)
    decoder = ScheduledDecoder(
        loaded.target, proposer_of(loaded, "chain:length=2"), config, pace=Interrupting()
    )
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(requests(0.0, 3), stop=())
    assert threading.active_count() == before and time.monotonic() - started < 20


@pytest.mark.parametrize("way", [way for way in WAYS if way.overlap], ids=name)
def test_a_signal_ends_all_threads_though_many_wait_to_draft(loaded, way):
    """Each of forty drafts takes 0.3 s, one after the other."""

    class Sleepy(Pace):
        def drafted(self, began, branches):
            time.sleep(0.3)

    asked = [Request([5, number], 500, SamplingParams(seed=number)) for number in range(40)]
    config = replace(way, sequences=40)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config, pace=Sleepy())
    before, handler = threading.active_count(), signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, press)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(asked, stop=())
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)
    timer.join()
    assert time.monotonic() - pressed[0] < 6 and threading.active_count() == before


@pytest.mark.parametrize("drafting", ["each", "joined"])
@pytest.mark.parametrize("threads", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("native", [True, False])
def test_each_worker_has_the_threads_that_were_asked_for(
    loaded, tiny_llama, native, threads, drafting, monkeypatch
):
    class Counting(Pace):
        seen = set()

        def forwarded(self, began, tokens, trees):
            self.seen.add(("target", team.team_size()))

        def drafted(self, began, branches):
            self.seen.add(("drafter", team.team_size()))

    monkeypatch.setattr(team.cores, "fit", lambda threads: threads)  # with any other load
    target = loaded.target if native else FrozenTarget(*tiny_llama, "tiny")
    proposer = proposer_of(loaded, "chain:length=2" if native else "n-grams")
    config, pace = scheduling("one", drafting, sequences=3, overlap=True, threads=threads), Counting()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "scheduler.threads: must add up")
        ScheduledDecoder(target, proposer, config, pace=pace).decode(requests(0.0, 3), stop=())
    each = threads[1] if drafting == "joined" else 1  # one sequence per worker, as many as there are threads
    assert pace.seen == {("target", threads[0]), ("drafter", each)}


@pytest.mark.parametrize("kind", ["none", "chain:length=3", DRAWN, "n-grams"])
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_calls_that_follow_get_the_texts_of_calls_that_are_made_at_once(loaded, kind, way):
    """Each call begins with the text of the one before it; the texts are those of one round after the other,
    and what an answer took adds up."""
    sampled = [SamplingParams(1.0, seed=i) for i in range(9)]
    firsts = [Call(PROMPTS[i], limit, sampled[i]) for i, limit in enumerate((3, 14, 6))]

    def after(number: int, text: str) -> list[Call]:
        return [Call(f"{text} {number}", 2 + number, sampled[number + 3])] if number < 6 else []

    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, kind), replace(way, sequences=3))
    made, expected = list(firsts), []
    for round_begin in (0, 3, 6):
        expected += decoder.answer(made[round_begin:])
        made += [call for i in range(3) for call in after(round_begin + i, expected[round_begin + i].text)]
    # the numbers of calls are those of the order in which they are made, which time decides
    numbers = list(range(3))

    def then(number: int, answer) -> list[Call]:
        calls = after(numbers[number], answer.text)
        numbers.extend(numbers[number] + 3 for _ in calls)
        return calls

    decoder.stats, began = type(decoder.stats)(), time.perf_counter()
    found = decoder.answer(firsts, then)
    seconds = time.perf_counter() - began
    assert sorted(numbers) == list(range(9))
    assert {numbers[i]: one.text for i, one in enumerate(found)} == {
        i: one.text for i, one in enumerate(expected)
    }
    total = sum((one.stats for one in found), type(decoder.stats)())
    assert (total.new_tokens, total.prompts, total.granted) == (
        decoder.stats.new_tokens, 9, decoder.stats.granted,
    )  # fmt: skip
    least = -1 if way.overlap else 0  # a copy that starts while a forward runs takes no time
    assert all(least < one.stats.prefill_seconds <= one.stats.seconds for one in found)
    assert 0 < decoder.stats.seconds <= seconds
    assert total.seconds == pytest.approx(decoder.stats.seconds)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_that_follows_begins_while_others_go_on(loaded, overlap):
    config = scheduling("one", "each", sequences=2, overlap=overlap)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config)
    calls = [Call(PROMPTS[0], limit, SamplingParams()) for limit in (2, 200)]
    decoder.answer(calls, lambda number, answer: [calls[0]] if number in (0, 2) else [])
    begins = {s.sequences[0]: s.begin for s in decoder.timeline.spans if s.what == "prefill"}
    ends = {s.sequences[0]: s.end for s in decoder.timeline.spans if s.what == "verify"}
    assert begins[0] < begins[2] < begins[3] < ends[1] and ends[0] <= begins[2] and ends[2] <= begins[3]


@pytest.mark.parametrize("overlap", [False, True])
def test_spans_of_the_target_are_its_forwards_alone(loaded, monkeypatch, overlap):
    """The drafter reads prompts in spans of its own, and acceptance belongs to nobody. With overlap both may
    happen beside a forward, in another thread."""
    others, threads = [], {}

    def timed(module, function):
        call = getattr(module, function)

        def noted(*given):
            threads.setdefault(function, set()).add(threading.current_thread())
            began = time.perf_counter()
            found = call(*given)
            others.append((function, began, time.perf_counter()))
            return found

        monkeypatch.setattr(module, function, noted)

    timed(PrefixStore, "encode")
    timed(prefix_store, "read_many")
    timed(many, "judge")
    config = scheduling("batched", "joined", sequences=3, overlap=overlap)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config)
    decoder.decode(requests(0.0, 3), stop=())
    timeline = decoder.timeline
    spans = [one for one in timeline.spans if one.who == "target"]
    assert threads["read_many"] == threads["judge"] == {threading.current_thread()} and len(spans) > 10
    assert len(threads["encode"]) == 1 and overlap == (threads["encode"] != threads["judge"])
    for function, began, ended in others:
        begin, end = began - timeline.started, ended - timeline.started
        if function == "encode":
            assert any(span.begin <= begin and end <= span.end for span in spans)
        else:
            assert overlap or all(span.end <= begin or end <= span.begin for span in spans)
    read = [one for one in timeline.spans if (one.who, one.what) == ("drafter", "prefill")]
    assert sorted(number for span in read for number in span.sequences) == [0, 1, 2]


@pytest.mark.parametrize("verifier", ["one", "batched"])
def test_drafts_are_accepted_while_the_target_runs_the_next_ones(loaded, verifier, monkeypatch):
    """The second forward over a draft ends only once the tokens of the first one have been emitted."""
    begun, ready, accepted = (threading.Event() for _ in range(3))
    put = Rounds.put

    class Held(Pace):
        forwards = 0

        def drafted(self, began, branches):
            assert branches[0].row.number == 0 or begun.wait(20)

        def forwarded(self, began, tokens, trees):
            if trees:
                begun.set()
                self.forwards += 1
                assert (ready if self.forwards == 1 else accepted).wait(20)

    def noted(rounds, queue, branches):
        put(rounds, queue, branches)
        if queue is rounds.ready and branches[0].row.number == 1:
            ready.set()

    pace, emitted = Held(), []

    def on_tokens(row):
        emitted.append(row.number)
        if len(emitted) == 3:  # both have emitted a first token
            accepted.set()

    monkeypatch.setattr(Rounds, "put", noted)
    config = scheduling(verifier, "each", sequences=2, overlap=True)
    asked = requests(1.0, 2)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=3"), config, pace=pace)
    branches = decoder.decode(asked, stop=(), on_tokens=on_tokens)
    assert [branch.row.output for branch in branches] == serial(loaded.target, asked) and pace.forwards > 4


def test_a_call_that_cannot_be_decoded_is_answered_and_followed(loaded):
    decoder, seen = ScheduledDecoder(loaded.target, NoProposer()), []
    too_long = Call([5] * 100_000, 4, SamplingParams())
    fine = Call(PROMPTS[0], 4, SamplingParams())

    def then(number, answer):
        seen.append((number, answer.error is not None))
        return {0: [too_long, fine], 2: [fine]}.get(number, [])

    answers = decoder.answer([fine, too_long], then)
    assert sorted(seen) == [(0, False), (1, True), (2, True), (3, False), (4, False)]
    assert [one.error is not None for one in answers] == [False, True, True, False, False]
    assert answers[0].text == answers[3].text == answers[4].text != ""
    alone = ScheduledDecoder(loaded.target, NoProposer()).answer([too_long])[0].error
    assert answers[1].error == answers[2].error == alone and "prompt 1" not in alone


def test_many_calls_that_cannot_be_decoded_follow_each_other(loaded):
    decoder = ScheduledDecoder(loaded.target, NoProposer())
    empty = Call([], 4, SamplingParams())
    answers = decoder.answer([empty], lambda number, answer: [empty] if number < 2000 else [])
    assert len(answers) == 2001 and all("at least one token" in one.error for one in answers)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_fails_after_an_answer_ends_all_threads(loaded, overlap):
    def then(number, answer):
        raise OSError("full")

    before = threading.active_count()
    config = scheduling("one", "each", sequences=3, overlap=overlap)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config)
    with pytest.raises(OSError, match="full"):
        decoder.answer([Call(prompt, 4, SamplingParams()) for prompt in PROMPTS[:3]], then)
    assert threading.active_count() == before


def test_calls_that_follow_come_first(loaded):
    """Before those that wait already: what they begin with is still stored."""
    decoder = ScheduledDecoder(loaded.target, NoProposer(), scheduling("one", "each", sequences=1))
    call = Call(PROMPTS[0], 2, SamplingParams())
    decoder.answer([call] * 3, lambda number, answer: [call, call] if number == 0 else [])
    order = [span.sequences for span in decoder.timeline.spans if span.what == "verify"]
    assert order == [(0,), (3,), (4,), (1,), (2,)]


def test_stop_strings_and_errors_reach_the_caller(loaded):
    target = loaded.target
    decoder = ScheduledDecoder(target, proposer_of(loaded, "chain:length=2"))
    plain = decoder.generate(["Hello", [5, 6, 7]], max_new_tokens=12)
    assert [output.finish_reason for output in plain] == ["length", "length"] and plain[0].text
    cut = plain[0].text[len(plain[0].text) // 2 :][:2]
    [stopped] = decoder.generate(["Hello"], max_new_tokens=12, stop=[cut])
    assert stopped.finish_reason == "stop" and stopped.text == plain[0].text[: plain[0].text.index(cut)]
    with pytest.raises(UserError, match="sampling: must be one or 2"):
        decoder.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(UserError, match="prompt 1: must have at least one token"):
        decoder.decode([Request([1], 4), Request([], 4)])


def test_an_answer_that_fails_keeps_the_text_that_was_held_back(loaded, monkeypatch):
    """A stop text may have begun where a worker failed."""
    way = scheduling("one", "each", overlap=False)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), way)
    [whole] = decoder.answer([Call("Hello", 24, SamplingParams())])
    propose, calls = TreeProposer.propose, []

    def failing(self, state, root):
        calls.append(root)
        if len(calls) == 3:
            raise MemoryError
        return propose(self, state, root)

    monkeypatch.setattr(TreeProposer, "propose", failing)
    [cut] = decoder.answer([Call("Hello", 24, SamplingParams(), stop=(whole.text + "?",))])
    assert cut.error and 0 < len(cut.token_ids) < 24
    assert cut.text == loaded.target.tokenizer.decode(cut.token_ids, skip_special_tokens=True) != ""


def test_tokens_after_a_stop_text_never_were(loaded, tiny_target_folder, monkeypatch):
    """Statistics with drafts, all of them right, are those of the tokens of the answers."""
    small = load_bundle(tiny_target_folder, target=loaded.target, dtype="float32", device="cpu")
    count, cut_steps = Branch.count, []

    def noting(branch, step, emitted):
        cut_steps.append(len(branch.row.tokens) < emitted)
        count(branch, step, emitted)

    monkeypatch.setattr(Branch, "count", noting)
    [plain] = ScheduledDecoder(loaded.target, NoProposer()).generate(["Hello"], max_new_tokens=12)
    tokenizer = loaded.target.tokenizer
    for kept in range(2, 10):
        cut = tokenizer.decode(plain.token_ids[kept - 1 : kept + 1], skip_special_tokens=True)
        if not cut.strip() or plain.text.count(cut) != 1:
            continue
        for tree in ("static:k_config=4-3-2", "chain:length=5"):
            decoder = ScheduledDecoder(loaded.target, small.proposer(tree), scheduling())
            [answer] = decoder.generate(["Hello"], max_new_tokens=12, stop=[cut])
            stats = decoder.stats
            assert answer.finish_reason == "stop" and answer.token_ids == plain.token_ids[: kept + 1]
            assert stats.new_tokens == answer.stats.new_tokens == len(answer.token_ids)
            assert sum(stats.granted) <= stats.new_tokens - stats.prompts
            assert stats.repeated_tokens + stats.fresh_tokens == stats.new_tokens - 1
            assert all(granted <= offered for granted, offered in zip(stats.granted, stats.offered))
    assert any(cut_steps)


def test_a_draft_that_fails_while_another_ends_ends_its_branch_once(loaded):
    """The caller takes its time with an answer, while a worker fails with the others' next drafts."""
    failed = threading.Event()

    class Failing(Pace):
        def drafted(self, began, branches):
            if any(len(branch.row.output) > 1 for branch in branches):
                failed.set()
                raise OSError("no memory")

    ends = []

    def on_end(branch):
        ends.append(branch.row.number)
        if branch.row.number == 0:
            assert failed.wait(20)
            time.sleep(0.1)  # until they are among those that wait
        return ()

    asked = [Request(PROMPTS[i], n) for i, n in ((3, 2), (4, NEW), (6, NEW))]
    config = scheduling("batched", "joined", sequences=3, overlap=True)
    proposer = proposer_of(loaded, "chain:length=1")
    decoder = ScheduledDecoder(loaded.target, proposer, config, pace=Failing())
    branches = decoder.decode(asked, stop=(), on_end=on_end)
    assert sorted(ends) == [0, 1, 2] and branches[0].row.finish_reason == "length"
    assert branches[1].error == branches[2].error == "OSError: no memory"


@pytest.mark.parametrize("kind", ["n-grams", "hybrid"])
def test_samples_of_one_prompt_draft_from_each_other(loaded, kind):
    """With the same text everywhere, and more of the draft accepted."""
    asked = [Request(PROMPTS[0], 40, SamplingParams(1.0, seed=seed)) for seed in (3, 3, 4, 3)]
    asked.append(Request(PROMPTS[3], 40, SamplingParams(1.0, seed=3)))
    expected, accept_len = serial(loaded.target, asked), {}
    for shared in (True, False):
        config = scheduling("one", "each", sequences=1, overlap=False, shared_ngrams=shared)
        for prefixes in (0, 8192):
            decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, kind), config, prefixes)
            assert [branch.row.output for branch in decoder.decode(asked, stop=())] == expected
            accept_len[shared] = decoder.stats.accept_len
    assert accept_len[True] > accept_len[False] + 0.3
    begun = [replace(one, max_new_tokens=NEW) for one in asked * 2]
    for way in WAYS:  # several threads write to one cache
        found = texts(loaded.target, proposer_of(loaded, kind), begun, way)
        assert found == [text[:NEW] for text in expected * 2]


def test_sequences_of_other_prompts_share_nothing(loaded):
    found = {}

    class Looks(Pace):
        def drafted(self, began, branches):
            found.update({branch.row.number: branch.session.state[0].sources for branch in branches})

    texts(loaded.target, proposer_of(loaded, "n-grams"), requests(1.0), scheduling("one"), pace=Looks())
    sources = [found[number] for number in range(len(PROMPTS))]
    assert sources[0] is sources[1] and len({id(one) for one in sources}) == len(PROMPTS) - 1


def test_drawn_candidates_share_no_ngrams(loaded):
    drawn = proposer_of(loaded, DRAWN)
    with pytest.raises(
        UserError, match="scheduler.shared_ngrams: must be false or auto with drawn candidates"
    ):
        ScheduledDecoder(loaded.target, drawn, scheduling(shared_ngrams=True))
    assert not ScheduledDecoder(loaded.target, drawn).shares_ngrams
    assert ScheduledDecoder(loaded.target, proposer_of(loaded, "n-grams")).shares_ngrams


def test_answers_go_on_from_their_beginning(loaded, monkeypatch):
    """A chat's last turn, or for a base model the end of the text; no part of the answer's own text."""
    target, greedy = loaded.target, SamplingParams()
    decoder = ScheduledDecoder(target, NoProposer())
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Score:"}]
    [begun] = decoder.answer([Call("Hello", 8, greedy, begin="Score:")])
    [same] = decoder.answer([Call([Message("user", "Hello")], 8, greedy, begin="Score:")])
    [given] = decoder.generate([chat], max_new_tokens=8)
    assert begun == same == given and begun.text and "Score:" not in begun.text
    assert begun != decoder.answer([Call("Hello", 8, greedy)])[0]
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    [text] = decoder.answer([Call("Hello", 8, greedy, begin="Score:")])
    assert text == decoder.answer([Call("Hello\n\nScore:", 8, greedy)])[0]


def test_drawn_trees_that_cannot_be_are_refused(loaded):
    with pytest.raises(UserError, match=r"k_config: must be at most candidates \(3\), got 4"):
        parse_policy("drawn:k_config=2-4,candidates=3")
    with pytest.raises(UserError, match=r"k_config: must be at most \d+, the drafter's vocabulary, got 600"):
        TreeProposer(loaded.drafter, parse_policy("drawn:k_config=600,candidates=600"))
    with pytest.raises(UserError, match="k_config: must have a number for each layer, got none"):
        SampledTreePolicy(k_config=())
    with pytest.raises(UserError, match="k_config: .*>= 1"):
        parse_policy("drawn:k_config=2-0")
    with pytest.raises(UserError, match=r"must be a deterministic one after ngram\+, got drawn candidates"):
        HybridProposer(SelfDraft(SelfDraftConfig(), 512), TreeProposer(loaded.drafter, parse_policy(DRAWN)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(verifier="two"), "scheduler.verifier: must be one of one, batched, got two"),
        (dict(drafting="none"), "scheduler.drafting: must be one of each, joined, got none"),
        (dict(sequences=0), "scheduler.sequences: must be >= 1 and <= 1024, got 0"),
        (dict(threads=(1, 0)), "scheduler.threads: must be two numbers >= 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        scheduling(**settings)


@pytest.mark.parametrize("kind", ["chain:length=3", DRAWN, "n-grams", "hybrid"])
def test_prefixes_are_encoded_once_and_change_nothing(loaded, kind):
    asked = requests(1.0)
    found, stores = [], []
    for capacity in (0, 20, 8192):
        decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, kind), scheduling(), capacity)
        found.append([branch.row.output for branch in decoder.decode(asked, stop=())])
        stores.append(decoder.store)
    assert found[0] == found[1] == found[2]
    total = sum(map(len, PROMPTS))
    assert [store.encoded + store.shared for store in stores] == [total] * 3
    assert stores[0].shared == 0 < stores[1].shared <= stores[2].shared
    assert sum(len(one.tokens) for one in stores[1].kept) <= 20


FAMILY = [
    [3, 14, 15, 92, 65],
    [3, 14, 15, 92, 65, 8, 9, 7],  # longer
    [3, 14, 15],
    [3, 14, 15, 92, 65],  # the same
    [3],
    [70, 71, 72, 73],
    [3, 14, 15, 20, *range(30, 60)],
    [3, 14, 15, 20, *range(30, 50), 9],
]


def assert_fresh(ours, fresh, n: int, same=torch.equal) -> None:
    """Require that a session has the first token, and the target's and the drafter's cache, of one that was
    encoded alone."""
    assert ours.root == fresh.root and int(fresh.cache.lengths) == n
    for one, other in ((ours.cache, fresh.cache), (ours.state, fresh.state)):
        one, other = getattr(one, "cache", one), getattr(other, "cache", other)
        length = int(other.lengths)
        assert one.lengths == length >= n - 1  # EAGLE's has nothing of the first token
        assert same(one.kv[..., :length, :], other.kv[..., :length, :])


def proposers(loaded, tiny_target_folder) -> dict:
    """With caches of each kind: EDD's, EAGLE's, and those of a small LM."""
    eagle_config = EagleConfig.for_target(loaded.target, DrafterConfig(kind="eagle"), 200)
    torch.manual_seed(0)
    eagle = EagleModel(eagle_config)
    eagle.initialize_from(loaded.target, DrafterConfig(kind="eagle"), torch.arange(200))
    eagle.pack()
    return {
        "edd": proposer_of(loaded, "chain:length=3"),
        "eagle": TreeProposer(eagle, parse_policy("chain:length=3")),
        "lm": load_bundle(tiny_target_folder, target=loaded.target, dtype="float32").proposer(
            "chain:length=3"
        ),
    }


def begin(store, prompts, max_len, accept, proposers):
    """Return a session of each prompt, as the scheduler begins them."""
    encodings = store.begin(prompts, max_len)
    while any(one.left for one in encodings):
        assert store.encode(encodings) == []
    encoded = [one.encoded for one in encodings]
    store.read(encoded, max_len, proposers)
    return store.sessions(encoded, max_len, accept, proposers)


@pytest.mark.parametrize("kind", ["edd", "eagle", "lm"])
@pytest.mark.parametrize("capacity", [8192, 12, 0])
def test_sessions_from_the_store_equal_fresh_ones(loaded, tiny_target_folder, kind, capacity):
    """Bit for bit, encoded one by one and together, after what is known and from nothing."""
    target = loaded.target
    target.tap([-1] if kind == "eagle" else [-2])
    proposer = proposers(loaded, tiny_target_folder)[kind]
    fresh = [prefill(target, proposer, [prompt], 80, accept_greedy) for prompt in FAMILY]
    for size in (1, 3, 8):
        store, first = PrefixStore(target, proposer, capacity), 0
        while first < len(FAMILY):
            some = FAMILY[first : first + size]
            n = len(some)
            found = begin(store, some, [80] * n, [accept_greedy] * n, [proposer] * n)
            for ours, its, prompt in zip(found, fresh[first:], some):
                assert_fresh(ours, its, len(prompt))
            first += n
        assert store.encoded + store.shared == sum(map(len, FAMILY))
    target.tap([-2])


@pytest.mark.parametrize("capacity", [8192, 0])
def test_long_prompts_are_encoded_in_stretches(loaded, capacity, monkeypatch):
    """No mask is wider than a stretch; together, alone and after what is known, bit for bit."""
    target, proposer = loaded.target, proposer_of(loaded, "chain:length=3")
    fresh = [prefill(target, proposer, [prompt], 80, accept_greedy) for prompt in FAMILY]
    monkeypatch.setattr(prefix_store, "STRETCH", 5)
    masks, run = [], target.forward_many

    def noted(caches, tokens, orders, seen):
        masks.extend(map(len, seen))
        return run(caches, tokens, orders, seen)

    monkeypatch.setattr(target, "forward_many", noted)
    for size in (1, len(FAMILY)):
        store = PrefixStore(target, proposer, capacity)
        for first in range(0, len(FAMILY), size):
            some = FAMILY[first : first + size]
            n = len(some)
            found = begin(store, some, [80] * n, [accept_greedy] * n, [proposer] * n)
            for ours, its, prompt in zip(found, fresh[first:], some):
                assert_fresh(ours, its, len(prompt))
    assert max(masks) == 5


def test_a_stock_target_encodes_several_prompts_in_one_forward(tiny_llama, loaded):
    """Up to rounding: torch's operators round the rows of a forward differently."""
    target = FrozenTarget(*tiny_llama, "llama", tapped_blocks=[-2])
    proposer = proposer_of(loaded, "chain:length=3")
    fresh = [prefill(target, proposer, [prompt], 80, accept_greedy) for prompt in FAMILY]
    calls = []
    hook = target.base.register_forward_hook(lambda *_: calls.append(1))
    store, n = PrefixStore(target, proposer, 8192), len(FAMILY)
    found = begin(store, FAMILY, [80] * n, [accept_greedy] * n, [proposer] * n)
    assert calls == [1]
    hook.remove()
    for ours, its, prompt in zip(found, fresh, FAMILY):
        assert_fresh(ours, its, len(prompt), partial(torch.allclose, atol=1e-5))
    asked = requests(1.0)
    plain = texts(target, NoProposer(), asked, scheduling("one", "each", sequences=1))
    assert texts(target, proposer_of(loaded, "chain:length=3"), asked) == plain


@pytest.mark.parametrize("kind", ["edd", "eagle", "lm"])
def test_a_prompt_is_read_by_the_drafter_when_it_is_drafted_for(loaded, tiny_target_folder, kind):
    """Every second session gets no drafts; the others equal fresh ones."""
    target, none = loaded.target, NoProposer()
    target.tap([-1] if kind == "eagle" else [-2])
    proposer = proposers(loaded, tiny_target_folder)[kind]
    family = FAMILY + FAMILY[::-1]
    fresh = [prefill(target, proposer, [prompt], 80, accept_greedy) for prompt in family]
    for capacity, size, first in itertools.product((8192, 12, 0), (1, 3), (0, 1)):
        store = PrefixStore(target, proposer, capacity)
        drafts = [none if number % 2 == first else proposer for number in range(len(family))]
        for number in range(0, len(family), size):
            part = slice(number, number + size)
            n = len(family[part])
            found = begin(store, family[part], [80] * n, [accept_greedy] * n, drafts[part])
            for ours, its, prompt, drafter in zip(found, fresh[part], family[part], drafts[part]):
                if drafter is none:
                    assert ours.root == its.root and ours.state is None
                else:
                    assert_fresh(ours, its, len(prompt))
        assert store.encoded + store.shared == sum(map(len, family))
    target.tap([-2])


def test_what_the_drafter_has_not_read_to_its_end_is_read_again(loaded, monkeypatch):
    proposer = proposer_of(loaded, "chain:length=3")
    store, prompt = PrefixStore(loaded.target, proposer, 8192), FAMILY[0]
    begin(store, [prompt], [80], [accept_greedy], [NoProposer()])
    given = [prompt], [80], [accept_greedy], [proposer]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("drafttrain.reasoning.prefixes.read_many", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(store, *given)
    [fresh] = [prefill(loaded.target, proposer, [prompt], 80, accept_greedy)]
    assert_fresh(begin(store, *given)[0], fresh, len(prompt))


@pytest.mark.parametrize("kind", ["chain:length=3", DRAWN, "n-grams"])
@pytest.mark.parametrize("way", [*WAYS[::3], scheduling("one", "each", sequences=1)], ids=name)
def test_short_answers_get_no_drafts(loaded, kind, way):
    asked = [replace(one, max_new_tokens=NEW if i % 2 else 6) for i, one in enumerate(requests(1.0))]
    plain = serial(loaded.target, asked)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, kind), replace(way, short=6))
    branches = decoder.decode(asked, stop=())
    drafted = texts(loaded.target, proposer_of(loaded, kind), asked, way)
    for number, branch in enumerate(branches):
        is_short = asked[number].max_new_tokens <= 6
        assert branch.is_drafted != is_short
        assert branch.row.output == (plain if is_short else drafted)[number]
    drafts = {n for span in decoder.timeline.spans if span.what == "draft" for n in span.sequences}
    assert drafts == {branch.row.number for branch in branches if branch.is_drafted}


def test_a_prompt_longer_than_the_store_is_not_kept(loaded):
    store = PrefixStore(loaded.target, NoProposer(), 20)
    for prompt in (FAMILY[0], FAMILY[6], FAMILY[6]):
        begin(store, [prompt], [60], [accept_greedy], [NoProposer()])
    assert [one.tokens for one in store.kept] == [FAMILY[0]] and len(FAMILY[6]) > 20
    assert store.shared == 2 * 3  # what both begin with


def test_the_oldest_prompts_make_room_for_a_new_one(loaded):
    """A prompt that is asked for again is a new one."""
    store = PrefixStore(loaded.target, NoProposer(), 12)
    a, b, c, d, long = [10] * 4, [20] * 4, [30] * 4, [40] * 4, [50] * 8
    kept = []
    for prompt in (a, b, c, a, d, b, long):
        begin(store, [prompt], [60], [accept_greedy], [NoProposer()])
        kept.append([one.tokens for one in store.kept])
    assert kept == [[a], [a, b], [a, b, c], [b, c, a], [c, a, d], [a, d, b], [b, long]]
    assert store.shared == len(a)  # b had been dropped when it was asked for again


def test_a_kept_prompt_holds_no_memory_of_the_others(loaded):
    """Prompts that were encoded in one forward have rows of common tensors."""
    store, n = PrefixStore(loaded.target, NoProposer(), 8192), len(FAMILY)
    begin(store, FAMILY, [60] * n, [accept_greedy] * n, [NoProposer()] * n)
    assert len(store.kept) > 1
    for one in store.kept:
        for tensor in (one.tapped, one.logits):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_prompts_wait_for_what_they_can_copy(loaded):
    store = PrefixStore(loaded.target, NoProposer(), 8192)
    common = list(range(100, 140))
    prompts = [common + [1, 2], common + [3, 4], common + [1, 2], [7] * 40, common[:10] + [5]]
    assert store.together(prompts) == [0, 3, 4]  # ten tokens are not worth a forward of their own
    begin(store, [prompts[0]], [60], [accept_greedy], [NoProposer()])
    assert store.together(prompts[1:]) == [0, 1, 2, 3]  # the same prompt costs nothing, the others little
    long = [[i] * 200 for i in range(1, 6)]
    assert store.together(long) == [0, 1]  # 512 tokens
    assert store.together([[8] * 600, [9] * 5]) == [0]
    assert PrefixStore(loaded.target, NoProposer(), 0).together(prompts) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("prefixes", [0, 8192])
def test_prompts_are_encoded_together_where_drafts_are_verified_together(loaded, plain, prefixes):
    class Prompts(Pace):
        def __init__(self):
            self.tokens = []

        def forwarded(self, began, tokens, trees):
            if tokens:
                self.tokens.append(tokens)

    asked = requests(1.0)
    different = len({tuple(one.prompt_ids) for one in asked}) if prefixes else 8
    for verifier, forwards in (("one", different), ("batched", 2 if prefixes else 1)):
        pace = Prompts()
        decoder = ScheduledDecoder(
            loaded.target, NoProposer(), scheduling(verifier, sequences=8), prefixes, pace
        )
        branches = decoder.decode(asked, stop=())
        assert [branch.row.output for branch in branches] == plain[1.0]
        assert len(pace.tokens) == forwards and sum(pace.tokens) == decoder.store.encoded
        spans = [span.sequences for span in decoder.timeline.spans if span.what == "prefill"]
        encoded = sorted(number for span in spans for number in span)  # `one` begins copies without a forward
        assert len(encoded) == len(set(encoded)) == (different if verifier == "one" else 8)
        assert len(spans) == forwards


@pytest.mark.parametrize("kind", ["edd", "eagle", "lm"])
@pytest.mark.parametrize(("stretch", "limit"), [(2048, None), (5, None), (2048, 4), (2048, 100)])
def test_drafts_are_verified_in_the_forward_that_encodes_prompts(
    loaded, tiny_target_folder, kind, stretch, limit, monkeypatch
):
    """Bit for bit as apart, in stretches and chunks, too."""
    monkeypatch.setattr(prefix_store, "STRETCH", stretch)
    target = loaded.target
    target.tap([-1] if kind == "eagle" else [-2])
    proposer = proposers(loaded, tiny_target_folder)[kind]
    for prompts in (FAMILY[3:4], FAMILY[4:]):  # the first one can be copied: nothing but the drafts runs
        made = []
        for mixed in (False, True):
            store = PrefixStore(target, proposer, 8192)
            rooms, rules = [80] * len(prompts), [accept_greedy] * len(prompts)
            own = begin(store, FAMILY[:2], [80] * 2, [accept_greedy] * 2, [proposer] * 2)
            trees = propose_many(own, [0, 1], [1, 1])
            encodings = store.begin(prompts, rooms)
            outputs = store.encode(encodings, limit, own, trees) if mixed else run_target_many(own, trees)
            while any(one.left for one in encodings):
                assert store.encode(encodings, limit) == []
            encoded = [one.encoded for one in encodings]
            verified = many.judge_many(own, trees, [accept_greedy] * 2, outputs)
            store.read(encoded, rooms, [proposer] * len(prompts))
            new = store.sessions(encoded, rooms, rules, [proposer] * len(prompts))
            made.append((own, verified, new))
        for (apart, one), (joined, other) in zip(*(zip(*each[:2]) for each in made)):
            assert one.accepted.path.tolist() == other.accepted.path.tolist()
            assert torch.equal(one.logits, other.logits) and torch.equal(one.tapped, other.tapped)
            length = int(apart.cache.lengths)
            assert joined.root == apart.root and joined.cache.lengths == length
            assert torch.equal(joined.cache.kv[..., :length, :], apart.cache.kv[..., :length, :])
        for prompt, apart, joined in zip(prompts, made[0][2], made[1][2]):
            assert_fresh(joined, apart, len(prompt))
    target.tap([-2])


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_a_prompt_that_waits_and_a_draft_that_is_ready_run_in_one_forward(loaded, way, chunk):
    class Forwards(Pace):
        def __init__(self):
            self.kinds = []

        def forwarded(self, began, tokens, trees):
            self.kinds.append((tokens, len(trees)))

    # none can be copied, and each answer ends while others go on
    asked = [
        Request([number] * 9, 4 + 3 * number, SamplingParams(1.0, seed=number)) for number in range(1, 7)
    ]
    pace = Forwards()
    config = replace(way, sequences=3, chunk=chunk)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, DRAWN), config, pace=pace)
    branches = decoder.decode(asked, stop=())
    assert sum(tokens for tokens, _ in pace.kinds) == decoder.store.encoded == 9 * len(asked)
    alone = [texts(loaded.target, proposer_of(loaded, DRAWN), [one], way)[0] for one in asked]
    assert [branch.row.output for branch in branches] == alone
    mixed = [(tokens, trees) for tokens, trees in pace.kinds if tokens and trees]
    assert chunk is None or all(tokens <= chunk for tokens, _ in mixed)
    least = 5 if way.verifier == "one" else 3  # all prompts but the first one or, encoded together, three
    assert way.overlap or len(mixed) >= least  # with overlap time decides
    assert way.verifier == "batched" or max(trees for _, trees in pace.kinds) == 1
    forwards = {(s.begin, s.what) for s in decoder.timeline.spans if s.who == "target"}
    assert len(forwards) == len(pace.kinds) + len(mixed)  # a mixed one has two spans
    assert decoder.timeline.busy() <= 1


def test_the_seconds_of_a_mixed_forward_are_divided_by_tokens(loaded):
    class Long(Pace):
        def forwarded(self, began, tokens, trees):
            if tokens and trees:
                assert (tokens, [tree.width for tree in trees]) == (30, [3])
                time.sleep(0.33)

    first, second = (Request(prompt, limit) for prompt, limit in (([5, 6], 30), ([7] * 30, 2)))
    config = scheduling("one", "each", sequences=2, overlap=False)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config, pace=Long())
    drafted, encoded = (branch.stats for branch in decoder.decode([first, second], stop=()))
    assert encoded.prefill_seconds >= 0.3 and drafted.seconds >= 0.03
    assert drafted.seconds + encoded.seconds == pytest.approx(decoder.stats.seconds)


def test_a_prompt_that_is_encoded_begins_while_another_one_is_encoded_in_chunks(loaded):
    first, second = Request([1] * 3, 40), Request([2] * 3, 4)
    short, long = Request([3] * 3, 6), Request([4] * 30, 6)
    config = replace(scheduling("batched", "joined", sequences=3, overlap=False), chunk=2)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config)
    branches = decoder.decode(
        [first, second], stop=(), on_end=lambda branch: [short, long] if branch.row.number == 1 else []
    )
    found, asked = [branch.row.output for branch in branches], [first, second, short, long]
    assert found == serial(loaded.target, asked)
    begins = {
        (number, what): [
            s.begin for s in decoder.timeline.spans if (s.who, s.what) == who and number in s.sequences
        ]
        for number in (2, 3)
        for what, who in (("prompt", ("target", "prefill")), ("draft", ("drafter", "draft")))
    }
    assert len(begins[3, "prompt"]) > 10  # in chunks of two tokens
    assert begins[2, "draft"][0] < begins[3, "prompt"][-1] < begins[3, "draft"][0]


def test_nan_after_a_prompt_that_runs_beside_drafts_ends_its_own_branch(loaded, monkeypatch):
    asked = [Request([number] * 9, 4 + 3 * number) for number in range(1, 5)]
    expected, heads, beside = serial(loaded.target, asked), prefix_store.heads, []

    def broken(target, finals):
        logits = heads(target, finals)
        if finals[0].ndim == 2:  # the last states of a prompt
            beside.append(len(finals) - 1)
            if len(beside) == 3:
                logits[0][...] = torch.nan
        return logits

    monkeypatch.setattr(prefix_store, "heads", broken)
    config = scheduling("one", "joined", sequences=2, overlap=False)
    decoder = ScheduledDecoder(loaded.target, proposer_of(loaded, "chain:length=2"), config)
    branches = decoder.decode(asked, stop=())
    assert beside == [0, 1, 1, 1]
    assert [branch.row.finish_reason for branch in branches] == ["length", "length", "not_finite", "length"]
    expected[2] = []
    assert [branch.row.output for branch in branches] == expected


def test_small_lm_drafts_unchanged(tiny_target_folder, loaded, plain):
    """An untrained LM, over the whole vocabulary: the target itself accepts all of its own drafts."""
    bundle = load_bundle(tiny_target_folder, target=loaded.target, dtype="float32", device="cpu")
    assert bundle.drafter.draft_vocab_size == len(loaded.target.tokenizer)
    for way, temperature in itertools.product(WAYS, plain):
        decoder = ScheduledDecoder(
            loaded.target, bundle.proposer("chain:length=3"), replace(way, sequences=4)
        )
        branches = decoder.decode(requests(temperature), stop=())
        assert [branch.row.output for branch in branches] == plain[temperature]
        assert temperature or decoder.stats.accept_len > 2
