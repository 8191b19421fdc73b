"""One run of scheduled speculative execution (SEED paper, §4, Algorithm 2): its queues, its threads and what
each forward of the target runs.

A prompt that is to be encoded and a draft that is ready run in the same forward (a mixed batch): reading the
weights once for both saves the forward of the draft.
"""

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from drafttrain.inference.acceptance import rule_for
from drafttrain.inference.decode import Request, Row, check_request, emit, trim
from drafttrain.inference.many import judge_many, propose_many, update_many
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.reasoning.branches import Branch, Pace, Rounds
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.reasoning.cores import own_cores, own_stream
from drafttrain.reasoning.prefixes import PrefixStore, Reading
from drafttrain.reasoning.timeline import DRAFTER, TARGET, Timeline
from drafttrain.target_lm.model import TargetStates
from drafttrain.trees.tree import TokenTree


@dataclass
class Execution:
    """State of one call of `ScheduledDecoder.decode`, whose attributes it shares.

    Attributes:
        threads: of all drafting together, where it overlaps with verifying.
        shares_ngrams: sequences of one prompt draft from each other's n-grams.
        requests: that wait for prefill, with their numbers.
        taken, readings: requests whose prompts are being encoded, with their numbers, and these prompts.
        reading_seconds: that this has taken.
        siblings: by prompt, what its first session has learned, while requests of this prompt wait.
        waiting: number of waiting requests of each prompt.
        live: number of branches that are encoded and have not ended.
        added: number of requests so far.
        marked: clock time from which `lap` counts.
    """

    config: SchedulerConfig
    store: PrefixStore
    pace: Pace
    timeline: Timeline
    threads: int
    shares_ngrams: bool
    stop: frozenset[int]
    on_tokens: Callable[[Row], None]
    on_end: Callable[[Branch], Sequence[Request]]
    requests: deque[tuple[int, Request]] = field(default_factory=deque)
    taken: list[tuple[int, Request]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    reading_seconds: float = 0.0
    rounds: Rounds = field(default_factory=Rounds)
    branches: list[Branch] = field(default_factory=list)
    siblings: dict[tuple[int, ...], Any] = field(default_factory=dict)
    waiting: Counter[tuple[int, ...]] = field(default_factory=Counter)
    live: int = 0
    added: int = 0

    def __post_init__(self) -> None:
        self.joined, self.batched = self.config.drafting == "joined", self.config.verifier == "batched"
        self.on_gpu = self.store.target.device.type == "cuda"
        self.marked = time.perf_counter()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests for prefill, before those that wait already.

        Raises:
            UserError: a prompt is empty or too long.
        """
        numbered = list(enumerate(requests, self.added))
        self.added += len(numbered)
        for number, request in numbered:
            check_request(self.store.target, request, number)
            if self.shares_ngrams:
                self.waiting[tuple(request.prompt_ids)] += 1
        self.requests.extendleft(reversed(numbered))

    def lap(self) -> float:
        """Return the seconds since the mark, and set it to now."""
        before, self.marked = self.marked, time.perf_counter()
        return self.marked - before

    # the two ways to run

    def in_turns(self) -> None:
        """Alternate between drafting for all that wait and target forwards, each on all threads."""
        rounds = self.rounds
        while self.live or self.requests or self.taken:
            self.admit_copies()
            if rounds.to_draft and not rounds.ready:
                waiting = rounds.take(rounds.to_draft, everything=True)
                for group in [waiting] if self.joined else [[branch] for branch in waiting]:
                    self.draft(group, DRAFTER)
                    _charge([branch for branch in group if branch.is_drafted] or group, self.lap())
            self.advance()

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
            while self.live or self.requests or self.taken:
                self.admit_copies()
                self.advance()
        finally:
            rounds.close()
            end = time.monotonic() + 2.0
            for worker in filter(threading.Thread.is_alive, crew):
                worker.join(max(0.0, end - time.monotonic()))

    def _work(self, name: str, threads: int, cores: threading.Semaphore) -> None:
        """Draft for waiting branches until the rounds are closed: the loop of a worker thread."""
        rounds, target = self.rounds, self.store.target
        with torch.no_grad(), own_cores(target, threads), own_stream(target.device):
            # no time limit: the caller's code or a long prefill may delay verification
            while waiting := rounds.take(rounds.to_draft, everything=self.joined, patience=math.inf):
                self.draft(waiting, name, cores)

    # what they consist of

    @property
    def free(self) -> int:
        """Return how many requests may start."""
        return self.config.sequences - self.live - len(self.taken)

    def admit_copies(self) -> None:
        """Start requests, first come, first served, as long as their prompts are in the prefix cache."""
        while self.requests and self.free and self.store.holds(self.requests[0][1].prompt_ids):
            self._start([self.requests.popleft()])

    def advance(self) -> None:
        """Run the target once: over prompts that wait, up to the limit of sequences, and drafts that are
        ready. Verifier `one`: over one prompt and one draft. Wait for a draft only if no prompt waits."""
        if not self.taken:
            self._take_requests()
        rounds, branches = self.rounds, []
        if rounds.ready or (self.live and not self.taken):
            branches = rounds.take(rounds.ready, self.batched)
        failed = [branch for branch in branches if branch.error]
        drafted = [branch for branch in branches if not branch.error]
        if self.taken or drafted:
            self._run_target(drafted)
        for branch in drafted:
            root, step = branch.session.root, DecodeStats()
            emit([branch.row], branch.tree, branch.verified.accepted, root, self.stop, step)
            emitted = len(branch.row.tokens)
            if emitted:
                self.on_tokens(branch.row)
            branch.count(step, emitted)
        self._go_on(drafted)
        for branch in failed:
            self._end(branch)
        self.lap()  # the time before was spent in the caller's code and is charged to no branch
        if self.taken and not any(reading.left for reading in self.readings):
            taken, readings, seconds = self.taken, self.readings, self.reading_seconds
            self.taken, self.readings, self.reading_seconds = [], [], 0.0
            self._start(taken, readings, seconds)

    def _take_requests(self) -> None:
        """Take the requests, if any may start, whose prompts are encoded next."""
        if not self.requests or not self.free:
            return
        numbers = [0]
        if self.batched:
            prompts = [one.prompt_ids for _, one in itertools.islice(self.requests, self.free)]
            numbers = self.store.together(prompts)
        self.taken = [self.requests[i] for i in numbers]
        for i in reversed(numbers):
            del self.requests[i]
        self.readings = self._begin(self.taken)

    def _begin(self, taken: list[tuple[int, Request]]) -> list[Reading]:
        return self.store.begin([request.prompt_ids for _, request in taken], _rooms(taken))

    def _run_target(self, branches: list[Branch]) -> None:
        """Run prompts and drafts of branches through the target, and accept drafts. The seconds are divided
        among prompts and drafts by tokens."""
        sessions, trees = [branch.session for branch in branches], [branch.tree for branch in branches]
        nodes, known = sum(tree.width for tree in trees), self.store.encoded
        limit = self.config.chunk if branches else None
        with ExitStack() as spans:
            numbers = [number for number, _ in self.taken], [branch.row.number for branch in branches]
            for what, own in zip(("prefill", "verify"), numbers):
                if own:
                    spans.enter_context(self.timeline.span(TARGET, what, own))
            began = self.timeline.clock()
            outputs = self.store.encode(self.readings, limit, sessions, trees)
            if self.on_gpu:  # its work ends as acceptance reads it
                self._accept(branches, outputs)
            tokens = self.store.encoded - known
            self.pace.forwarded(began, tokens, trees)
        if not self.on_gpu:
            self._accept(branches, outputs)
        seconds = self.lap()
        reading = seconds * tokens / (tokens + nodes) if branches else seconds
        self.reading_seconds += reading
        _charge(branches, seconds - reading)

    def _accept(self, branches: list[Branch], outputs: Sequence[tuple[TargetStates, torch.Tensor]]) -> None:
        if not branches:
            return
        for branch in branches:
            branch.accept.set_active([0])
        sessions, trees, accept = zip(*((b.session, b.tree, b.accept) for b in branches))
        for branch, verified in zip(branches, judge_many(sessions, trees, accept, outputs)):
            branch.verified, branch.tree = verified, verified.tree
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def _start(
        self,
        taken: list[tuple[int, Request]],
        readings: list[Reading] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Start the branches of these requests; each emits its first token.

        Args:
            readings: their prompts, encoded. None: they are in the prefix cache.
            seconds: that encoding them took.
        """
        store, rooms = self.store, _rooms(taken)
        encoded = [reading.encoded for reading in readings or self._begin(taken)]
        requests = [request for _, request in taken]
        proposers = [
            store.proposer.twin() if request.max_new_tokens > self.config.short else NoProposer()
            for request in requests
        ]
        accept = [rule_for([one.sampling], proposer.draws) for one, proposer in zip(requests, proposers)]
        drafted = [n for (n, _), one in zip(taken, proposers) if not isinstance(one, NoProposer)]
        with self.timeline.span(DRAFTER, "prefill", drafted) if drafted else nullcontext():
            store.read(encoded, rooms, proposers)
        sessions = store.sessions(encoded, rooms, accept, proposers)
        branches = [Branch(Row(*pair), *rest) for pair, *rest in zip(taken, sessions, accept)]
        if self.shares_ngrams:
            self._share_ngrams(branches)
        self.branches += branches
        self.live += len(branches)
        seconds += self.lap()
        _charge(branches, seconds)
        for branch in branches:
            branch.row.add(branch.session.root.tolist(), self.stop)
            branch.stats.prompts = 1
            branch.stats.prompt_tokens = len(branch.row.request.prompt_ids)
            branch.stats.new_tokens = len(branch.row.tokens)
            branch.stats.prefill_seconds = seconds / len(branches)
            if branch.row.tokens:
                self.on_tokens(branch.row)
        self._go_on(branches)
        self.lap()

    def _share_ngrams(self, branches: list[Branch]) -> None:
        """Let new branches of one prompt draft from the n-grams that the first of them has learned."""
        for branch in branches:
            prompt, state = tuple(branch.row.request.prompt_ids), branch.session.state
            self.waiting[prompt] -= 1
            own = self.store.proposer.learned(state) if branch.is_drafted else None
            if own is not None and self.siblings.setdefault(prompt, own) is not own:
                self.store.proposer.share(state, self.siblings[prompt])
            if not self.waiting[prompt]:
                del self.waiting[prompt]
                self.siblings.pop(prompt, None)

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
                self.pace.drafted(began, branches)
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

    def _go_on(self, branches: list[Branch]) -> None:
        """Queue the branches that continue for drafting, and end the others."""
        # decided before queueing: a draft that fails at once would end its branch here and again in its turn
        ended = [branch for branch in branches if not branch.is_going]
        self.rounds.put(self.rounds.to_draft, [branch for branch in branches if branch not in ended])
        for branch in ended:
            self._end(branch)

    def _end(self, branch: Branch) -> None:
        """Release a branch that has ended, and queue the requests that follow from it."""
        branch.free()
        self.live -= 1
        self.add(self.on_end(branch))


def _charge(branches: Sequence[Branch], seconds: float) -> None:
    """Divide seconds equally among branches."""
    for branch in branches:
        branch.stats.seconds += seconds / len(branches)


def _rooms(taken: Sequence[tuple[int, Request]]) -> list[int]:
    """Return the most tokens that each request's prompt and output have together."""
    return [len(request.prompt_ids) + request.max_new_tokens for _, request in taken]
