"""Scheduled speculative execution (SEED paper, §4, Algorithm 2): several sequences draft, one target verifies
first come, first served, and a sequence drafts again only once its draft has been verified.

The target verifies `one` draft at a time (as in the paper) or all waiting drafts, `batched` in one forward.
Drafts are made for `each` sequence alone (as in the paper) or `joined`, in one forward for all that wait.
With `overlap` drafting and verifying run at the same time; without it they take turns on all threads. The
text of a sequence depends on none of this: every draw depends only on its seed and position.
"""

import itertools
import math
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from drafttrain.data.message import Message
from drafttrain.inference.acceptance import rule_for
from drafttrain.inference.decode import Request, Row, check_request, emit, trim
from drafttrain.inference.many import judge_many, propose_many, run_target_many, update_many
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.inference.text import OutputText, Prompt, encode, shown
from drafttrain.reasoning.branches import AnswerText, Branch, Pace, Rounds
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.reasoning.cores import own_cores, own_stream
from drafttrain.reasoning.interface import Answer, Call, Then
from drafttrain.reasoning.prefixes import PrefixStore
from drafttrain.reasoning.timeline import DRAFTER, TARGET, Timeline
from drafttrain.target_lm.model import FrozenTarget, TargetStates
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

GREEDY = SamplingParams()


@dataclass
class ScheduledDecoder:
    """Decoder of many prompts at once on one target, by scheduled speculative execution.

    Attributes:
        proposer: drafts for all sequences; one copy of a drafter's weights serves them.
        config: how sequences share target, drafter and machine.
        prefixes: capacity of the prefix cache in tokens; prefixes that prompts share are encoded once. 0: no
            cache.
        pace: hooks that run after each piece of work.
        timeline: who was busy when, in the last call.
        stats: of all sequences that have ended so far; the only times are `seconds` and `prefill_seconds`.
    """

    target: FrozenTarget
    proposer: Proposer
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    prefixes: int = 8192
    pace: Pace = field(default_factory=Pace)
    timeline: Timeline = field(default_factory=Timeline)
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __post_init__(self) -> None:
        if self.config.shared_ngrams is True and self.proposer.draws:
            raise UserError(
                "scheduler.shared_ngrams: must be false or auto with drawn candidates, got true; n-grams "
                "have no probabilities to draw from"
            )
        self.store = PrefixStore(self.target, self.proposer, self.prefixes)

    @property
    def overlaps(self) -> bool:
        """Return whether drafting and verifying run at the same time."""
        overlap = self.config.overlap
        return self.target.device.type == "cuda" if overlap == "auto" else overlap

    @property
    def shares_ngrams(self) -> bool:
        """Return whether sequences of one prompt draft from each other's n-grams."""
        return self.config.shared_ngrams is not False and not self.proposer.draws

    @torch.no_grad()
    def decode(
        self,
        requests: Sequence[Request],
        stop: Sequence[int] | None = None,
        on_tokens: Callable[[Row], None] = lambda row: None,
        on_end: Callable[[Branch], Sequence[Request]] = lambda branch: (),
    ) -> list[Branch]:
        """Decode requests, and those that `on_end` adds; return their ended branches, in the order in which
        the requests were made.

        Args:
            stop: tokens that end an output. None: the target's own.
            on_tokens: called with a row whenever it has new tokens; may set its `finish_reason` to end it,
                and then remove the tokens after its end.
            on_end: called with a branch that has ended; returns requests to decode next. The number of its
                row is the index of its request, with those that `on_end` has added counted.

        Raises:
            UserError: a prompt is empty, or longer than the target's positions.
        """
        stop = frozenset(self.target.eos_token_ids if stop is None else stop)
        self.timeline = Timeline(self.timeline.clock)
        threads = self._threads()
        run = _Run(self, stop, on_tokens, on_end, threads[1])
        run.add(requests)
        with own_cores(self.target, threads[0]):
            run.overlapped() if self.overlaps else run.in_turns()
        return sorted(run.branches, key=lambda branch: branch.row.number)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
    ) -> list[Answer]:
        """Decode prompts (texts, chats or token ids); return their outputs in the same order.

        Args:
            sampling: one for all prompts, or one for each.
            stop: strings that end a text and are not part of it.

        Raises:
            UserError: a prompt has another type, is empty or too long for the target.
        """
        if isinstance(prompts, str):
            raise UserError("prompts: must be a list, got a single text; put it in brackets")
        if not isinstance(prompts, Sequence | torch.Tensor):
            raise UserError(f"prompts: must be a list of prompts, got {shown(prompts)}")
        draws = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if wrong := [one for one in draws if not isinstance(one, SamplingParams)]:
            raise UserError(f"sampling: must be SamplingParams for each prompt, got {shown(wrong[0])}")
        if len(draws) != len(prompts):
            raise UserError(f"sampling: must be one or {len(prompts)}, as many as prompts, got {len(draws)}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        calls = [Call(*each, stop) for each in zip(prompts, [max_new_tokens] * len(prompts), draws)]
        return self.answer(calls, strict=True)

    def answer(
        self,
        calls: Sequence[Call],
        then: Then = lambda number, answer: (),
        strict: bool = False,
    ) -> list[Answer]:
        """Decode calls, and those that follow from their answers, to texts; return the answers in the order
        in which the calls were made. A failed call has the reason as `error`: a prompt that is too long, NaN,
        a worker that failed.

        Args:
            then: returns the calls that follow from an answer. They are decoded before those that wait
                already, as their prefixes may still be in the prefix cache.
            strict: raise the error of a bad prompt, in place of answering its call with it.
        """
        answers: list[Answer | None] = []
        decoded: dict[int, AnswerText] = {}  # calls that have not ended, by number of the request
        requested = itertools.count()

        def numbered(calls: Sequence[Call]) -> Iterable[tuple[int, Call]]:
            first = len(answers)
            answers.extend([None] * len(calls))
            return enumerate(calls, first)

        def make(calls: Sequence[Call]) -> list[Request]:
            """Return the calls' requests; those with a bad prompt are answered and followed up at once."""
            requests, waiting = [], deque(numbered(calls))
            while waiting:
                number, call = waiting.popleft()
                try:
                    prompt = encode(self.target, self._prompt(call))
                    request = Request(prompt, call.max_new_tokens, call.sampling)
                    check_request(self.target, request, number)
                except UserError as error:
                    if strict:
                        raise
                    reason = str(error).removeprefix(f"prompt {number}: ")  # it depends on other calls
                    answers[number] = Answer("", finish_reason="", error=reason)
                    waiting.extend(numbered(then(number, answers[number])))
                    continue
                requests.append(request)
                decoded[next(requested)] = AnswerText(number, OutputText(self.target.tokenizer, call.stop))
            return requests

        def end(branch: Branch) -> list[Request]:
            text = decoded.pop(branch.row.number)
            answers[text.number] = text.answer(branch)
            return make(then(text.number, answers[text.number]))

        self.decode(make(calls), on_tokens=lambda row: decoded[row.number].push(row), on_end=end)
        return answers

    def _prompt(self, call: Call) -> Prompt:
        """Return a call's prompt with the beginning of its answer, if there is one; for a base model, which
        has no chat template, both are joined as one text."""
        if not call.begin:
            return call.messages
        tokenizer = self.target.tokenizer
        if isinstance(call.messages, str) and tokenizer is not None and not tokenizer.chat_template:
            return f"{call.messages}\n\n{call.begin}"
        chat = [Message("user", call.messages)] if isinstance(call.messages, str) else call.messages
        return [*chat, Message("assistant", call.begin)]

    def _threads(self) -> tuple[int | None, int]:
        """Return the numbers of threads of the target and of drafting: (None, 1) if they take turns on all
        threads, else the config's or half of the cores each."""
        if not self.overlaps:
            if self.config.threads:
                warnings.warn(
                    f"scheduler.threads: must be null where drafting and verifying take turns, got "
                    f"{self.config.threads}; they have no effect without scheduler.overlap true",
                    stacklevel=4,
                )
            return None, 1
        cores = torch.get_num_threads()
        target, drafting = self.config.threads or (max(1, cores - cores // 2), max(1, cores // 2))
        if target + drafting > max(cores, 2):  # each needs one
            warnings.warn(
                f"scheduler.threads: must add up to at most {cores} cores, got {target} and {drafting}; "
                "they will wait for each other",
                stacklevel=4,
            )
        return target, drafting


@dataclass
class _Run:
    """State of one call of `ScheduledDecoder.decode`.

    Attributes:
        threads: of all drafting together, where it overlaps with verifying.
        requests: that wait for prefill, with their numbers.
        siblings: by prompt, what its first session has learned, while requests of this prompt wait.
        waiting: number of waiting requests of each prompt.
        live: number of branches that are encoded and have not ended.
        added: number of requests so far.
        marked: clock time from which `charge` counts the seconds of branches.
    """

    decoder: ScheduledDecoder
    stop: frozenset[int]
    on_tokens: Callable[[Row], None]
    on_end: Callable[[Branch], Sequence[Request]]
    threads: int
    requests: deque[tuple[int, Request]] = field(default_factory=deque)
    rounds: Rounds = field(default_factory=Rounds)
    branches: list[Branch] = field(default_factory=list)
    siblings: dict[tuple[int, ...], Any] = field(default_factory=dict)
    waiting: Counter[tuple[int, ...]] = field(default_factory=Counter)
    live: int = 0
    added: int = 0

    def __post_init__(self) -> None:
        self.config, self.timeline = self.decoder.config, self.decoder.timeline
        self.joined, self.batched = self.config.drafting == "joined", self.config.verifier == "batched"
        self.marked = time.perf_counter()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests for prefill, before those that wait already.

        Raises:
            UserError: a prompt is empty or too long.
        """
        numbered = list(enumerate(requests, self.added))
        self.added += len(numbered)
        for number, request in numbered:
            check_request(self.decoder.target, request, number)
            if self.decoder.shares_ngrams:
                self.waiting[tuple(request.prompt_ids)] += 1
        self.requests.extendleft(reversed(numbered))

    def charge(self, branches: Sequence[Branch]) -> float:
        """Divide the seconds since the mark equally among branches, and return each one's share."""
        now = time.perf_counter()
        each, self.marked = (now - self.marked) / len(branches), now
        for branch in branches:
            branch.stats.seconds += each
        return each

    def mark(self) -> None:
        """Set the mark to now: the time before was spent in the caller's code and is charged to no branch."""
        self.marked = time.perf_counter()

    # the two ways to run

    def in_turns(self) -> None:
        """Alternate between drafting for all that wait and verifying their drafts, each on all threads."""
        rounds = self.rounds
        self.admit()
        while self.live:
            if not rounds.ready:
                waiting = rounds.take(rounds.to_draft, everything=True)
                for group in [waiting] if self.joined else [[branch] for branch in waiting]:
                    self.draft(group, DRAFTER)
                    self.charge([branch for branch in group if branch.is_drafted] or group)
            self.verify(rounds.take(rounds.ready, self.batched))

    def overlapped(self) -> None:
        """Verify in this thread what worker threads draft (processes V and D(n) of Algorithm 2)."""
        rounds = self.rounds
        each, at_once = (self.threads, 1) if self.joined else (1, self.threads)
        cores = threading.Semaphore(at_once)
        workers = 1 if self.joined else self.config.sequences
        crew = [
            threading.Thread(target=self._work, args=(f"drafter {i}", each, cores), daemon=True)
            for i in range(workers)
        ]
        try:
            for worker in crew:
                worker.start()
            self.admit()
            while self.live:
                self.verify(rounds.take(rounds.ready, self.batched))
        finally:
            rounds.close()
            end = time.monotonic() + 2.0
            for worker in filter(threading.Thread.is_alive, crew):
                worker.join(max(0.0, end - time.monotonic()))

    def _work(self, name: str, threads: int, cores: threading.Semaphore) -> None:
        """Draft for waiting branches until the rounds are closed: the loop of a worker thread."""
        rounds, target = self.rounds, self.decoder.target
        with torch.no_grad(), own_cores(target, threads), own_stream(target.device):
            # no time limit: the caller's code or a long prefill may delay verification
            while waiting := rounds.take(rounds.to_draft, everything=self.joined, patience=math.inf):
                self.draft(waiting, name, cores)

    # what they consist of

    def admit(self) -> None:
        """Prefill waiting requests up to the limit of sequences, one by one or, if the verifier is batched,
        several in one forward; each emits its first token."""
        store, requests = self.decoder.store, self.requests
        while requests and self.live < self.config.sequences:
            numbers = [0]
            if self.batched:
                free = itertools.islice(requests, self.config.sequences - self.live)
                numbers = store.together([request.prompt_ids for _, request in free])
            taken = [requests[i] for i in numbers]
            for i in reversed(numbers):
                del requests[i]
            self._encode(taken)

    def _encode(self, taken: list[tuple[int, Request]]) -> None:
        """Prefill these numbered requests in one forward, and start their branches."""
        decoder = self.decoder
        numbers, requests = zip(*taken)
        prompts = [request.prompt_ids for request in requests]
        rooms = [len(request.prompt_ids) + request.max_new_tokens for request in requests]
        proposers = [
            decoder.proposer.twin() if request.max_new_tokens > self.config.short else NoProposer()
            for request in requests
        ]
        accept = [rule_for([one.sampling], proposer.draws) for one, proposer in zip(requests, proposers)]
        store, known = decoder.store, decoder.store.encoded
        with self.timeline.span(TARGET, "prefill", numbers):
            began = self.timeline.clock()
            encoded = store.encode(prompts, rooms)
            decoder.pace.prefilled(began, store.encoded - known)
        drafted = [n for n, one in zip(numbers, proposers) if not isinstance(one, NoProposer)]
        with self.timeline.span(DRAFTER, "prefill", drafted) if drafted else nullcontext():
            store.read(encoded, rooms, proposers)
        sessions = store.sessions(encoded, rooms, accept, proposers)
        branches = [Branch(Row(*pair), *rest) for pair, *rest in zip(taken, sessions, accept)]
        if decoder.shares_ngrams:
            for prompt, session, branch in zip(map(tuple, prompts), sessions, branches):
                self.waiting[prompt] -= 1
                own = decoder.proposer.learned(session.state) if branch.is_drafted else None
                if own is not None and self.siblings.setdefault(prompt, own) is not own:
                    decoder.proposer.share(session.state, self.siblings[prompt])
                if not self.waiting[prompt]:
                    del self.waiting[prompt]
                    self.siblings.pop(prompt, None)
        self.branches += branches
        self.live += len(branches)
        each = self.charge(branches)
        for branch in branches:
            branch.row.add(branch.session.root.tolist(), self.stop)
            branch.stats.prompts = 1
            branch.stats.prompt_tokens = len(branch.row.request.prompt_ids)
            branch.stats.new_tokens = len(branch.row.tokens)
            branch.stats.prefill_seconds = each
            if branch.row.tokens:
                self.on_tokens(branch.row)
        self._go_on(branches)

    def draft(self, branches: list[Branch], name: str, cores: threading.Semaphore | None = None) -> None:
        """Draft for branches, after updating the proposer with what was verified, and queue them for
        verification. A branch that fails is queued as well: it is ended in its turn."""
        for branch in branches:
            if not branch.is_drafted:
                branch.tree = TokenTree.root_only(branch.session.root)
        if drafted := [branch for branch in branches if branch.is_drafted]:
            self._draft(drafted, name, cores)
        self.rounds.put(self.rounds.ready, branches)

    def _draft(self, branches: list[Branch], name: str, cores: threading.Semaphore | None) -> None:
        """Draft for branches in one forward; if that fails, one by one, so that only the failing ones end."""
        with ExitStack() as span:
            try:
                with cores or nullcontext():
                    if self.rounds.closed:  # after an error or Ctrl-C nobody waits for drafts
                        return
                    numbers = [branch.row.number for branch in branches]
                    span.enter_context(self.timeline.span(name, "draft", numbers))
                    began = self.timeline.clock()
                    self._propose(branches)
                self.decoder.pace.drafted(began, branches)
                return
            except BaseException as error:  # of any kind: the other branches go on
                if cores is None and not isinstance(error, Exception):  # Ctrl-C, in the main thread
                    raise
                if len(branches) == 1:
                    branches[0].fail(error)
                    return
        for branch in branches:
            self._draft([branch], name, cores)

    def _propose(self, branches: list[Branch]) -> None:
        judged = [branch for branch in branches if branch.verified is not None]
        if judged:
            update_many([branch.session for branch in judged], [branch.verified for branch in judged])
            if branches[0].session.target.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # before the verdicts' memory is given to others
            for branch in judged:  # a draft that is retried must not update with them again
                branch.verified = None
        rows, sessions = [branch.row for branch in branches], [branch.session for branch in branches]
        seeds, positions = zip(*((row.request.sampling.seed, len(row.output)) for row in rows))
        trees = propose_many(sessions, seeds, positions)
        for branch, tree in zip(branches, trees):
            branch.tree = trim(tree, [branch.row])
        if branches[0].session.target.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # another stream reads the trees

    def verify(self, branches: list[Branch]) -> None:
        """Verify the drafts of branches in target forwards, and emit the accepted tokens."""
        failed = [branch for branch in branches if branch.error]
        branches = [branch for branch in branches if not branch.error]
        if branches:
            self._judge(branches)
            self.charge(branches)
            for branch in branches:
                root, step = branch.session.root, DecodeStats()
                accepted = branch.verified.accepted
                emit([branch.row], branch.tree, accepted, root, self.stop, step)
                emitted = len(branch.row.tokens)
                if emitted:
                    self.on_tokens(branch.row)
                branch.count(step, emitted)
        self._go_on(branches)
        for branch in failed:
            self._end(branch)
        self.mark()
        self.admit()

    def _judge(self, branches: list[Branch]) -> None:
        sessions, trees = [b.session for b in branches], [b.tree for b in branches]
        with self.timeline.span(TARGET, "verify", [branch.row.number for branch in branches]):
            began = self.timeline.clock()
            outputs = run_target_many(sessions, trees)
            if on_gpu := self.decoder.target.device.type == "cuda":  # its work ends as acceptance reads it
                self._accept(branches, outputs)
            self.decoder.pace.verified(began, trees)
        if not on_gpu:
            self._accept(branches, outputs)

    def _accept(self, branches: list[Branch], outputs: Sequence[tuple[TargetStates, torch.Tensor]]) -> None:
        for branch in branches:
            branch.accept.set_active([0])
        sessions, trees, accept = zip(*((b.session, b.tree, b.accept) for b in branches))
        for branch, verified in zip(branches, judge_many(sessions, trees, accept, outputs)):
            branch.verified, branch.tree = verified, verified.tree
        if self.decoder.target.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _go_on(self, branches: list[Branch]) -> None:
        """Queue the branches that continue for drafting, and end the others."""
        # decided before queueing: a draft that fails at once would end its branch here and again in its turn
        ended = [branch for branch in branches if not branch.is_going]
        self.rounds.put(self.rounds.to_draft, [branch for branch in branches if branch not in ended])
        for branch in ended:
            self._end(branch)
        self.mark()

    def _end(self, branch: Branch) -> None:
        """Release a branch that has ended, and queue the requests that follow from it."""
        branch.free()
        self.live -= 1
        self.decoder.stats += branch.stats
        self.add(self.on_end(branch))
