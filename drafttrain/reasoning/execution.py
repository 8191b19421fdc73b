"""One run of scheduled speculative execution (SEED paper, §4, Algorithm 2): its queues, its threads and what
each forward of the target runs.

A prompt that is to be encoded and a draft that is ready run in the same forward (a mixed batch): reading the
weights once for both saves the forward of the draft.

Where drafting and verifying overlap, the target's thread runs forwards alone. What follows from a forward
(acceptance, the caller's code, the start of sequences) happens while the next one runs.
"""

import itertools
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from drafttrain.inference.acceptance import rule_for
from drafttrain.inference.decode import Request, Row, check_request, emit, trim
from drafttrain.inference.many import judge_many, propose_many, update_many
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.reasoning.branches import POLL, Branch, Pace, Rounds
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.reasoning.cores import own_cores, own_stream
from drafttrain.reasoning.prefixes import Encoding, PrefixStore
from drafttrain.reasoning.timeline import DRAFTER, TARGET, Timeline
from drafttrain.target_lm.model import TargetStates
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


@dataclass(eq=False)
class Admitted:
    """A request whose prompt is being encoded.

    Attributes:
        number: index of the request.
        seconds: that encoding the prompt has taken.
    """

    number: int
    request: Request
    prompt: Encoding
    seconds: float = 0.0


@dataclass
class Forward:
    """One forward of the target.

    Attributes:
        prompts: requests whose prompts it encodes, or the next chunk of them.
        branches: whose drafts it verifies.
        encoded: those of the prompts that it encodes to their end.
        tokens: that it runs of each prompt.
        outputs: the target's states and logits [1, n, V] at the nodes of each draft.
        ended: clock time at its end.
        seconds: that it takes, with the wait for its drafts.
    """

    prompts: list[Admitted]
    branches: list[Branch]
    encoded: list[Admitted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outputs: list[tuple[TargetStates, torch.Tensor]] = field(default_factory=list)
    ended: float = 0.0
    seconds: float = 0.0


@dataclass
class Execution:
    """State of one call of `ScheduledDecoder.decode`, whose attributes it shares.

    Attributes:
        threads: of the target, and of all drafting together, where they overlap.
        shares_ngrams: sequences of one prompt draft from each other's n-grams.
        requests: that wait for prefill, with their numbers.
        admitted: requests whose prompts are being encoded.
        siblings: by prompt, what its first session has learned, while requests of this prompt wait.
        waiting: number of waiting requests of each prompt.
        live: number of branches that are encoded and have not ended.
        failed: those of them whose drafts have failed, until they are ended.
        mistake: of the user's, which drafting has met, such as a damaged n-gram cache.
        added: number of requests so far.
        is_beside: whether a forward runs in another thread.
        marked: clock time from which `lap` counts.
    """

    config: SchedulerConfig
    store: PrefixStore
    pace: Pace
    timeline: Timeline
    threads: tuple[int | None, int]
    shares_ngrams: bool
    stop: frozenset[int]
    on_tokens: Callable[[Row], None]
    on_end: Callable[[Branch], Sequence[Request]]
    requests: deque[tuple[int, Request]] = field(default_factory=deque)
    admitted: list[Admitted] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)
    branches: list[Branch] = field(default_factory=list)
    siblings: dict[tuple[int, ...], Any] = field(default_factory=dict)
    waiting: Counter[tuple[int, ...]] = field(default_factory=Counter)
    live: int = 0
    failed: list[Branch] = field(default_factory=list)
    mistake: UserError | None = None
    added: int = 0
    is_beside: bool = False

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
        """Return the seconds since the mark, and set it to now. Beside a forward, whose time this is, do
        nothing and return 0."""
        if self.is_beside:
            return 0.0
        before, self.marked = self.marked, time.perf_counter()
        return self.marked - before

    # the two ways to run

    def in_turns(self) -> None:
        """Alternate between drafting for all that wait and target forwards, each on all threads."""
        rounds = self.rounds
        while self.live or self.requests or self.admitted:
            self.admit_copies()
            if rounds.to_draft and not rounds.ready:
                waiting = rounds.take(rounds.to_draft, everything=True)
                for group in [waiting] if self.joined else [[branch] for branch in waiting]:
                    self.draft(group, DRAFTER)
                    _charge([branch for branch in group if branch.is_drafted] or group, self.lap())
            self._admit_next()
            if forward := self._next_forward(wait=True):
                self._run(forward)
                self._arrive(forward)
                self._finish(forward)
            self._end_failed()

    def overlapped(self) -> None:
        """Verify in a thread of the target's what worker threads draft (processes V and D(n) of Algorithm 2).
        This thread chooses what the target runs next, and accepts drafts."""
        rounds, drafting = self.rounds, self.threads[1]
        each, at_once = (drafting, 1) if self.joined else (1, drafting)
        cores = threading.Semaphore(at_once)
        to_run: queue.SimpleQueue[Forward | None] = queue.SimpleQueue()
        has_run: queue.SimpleQueue[Forward | BaseException] = queue.SimpleQueue()
        runner = threading.Thread(target=self._run_forwards, args=(to_run, has_run), daemon=True)
        crew = [
            threading.Thread(target=self._work, args=(f"drafter {i}", each, cores), daemon=True)
            for i in range(1 if self.joined else self.config.sequences)
        ]
        try:
            for worker in [runner, *crew]:
                worker.start()
            running: Forward | None = None
            while self.live or self.requests or self.admitted:
                self.admit_copies()
                self._admit_next()
                if running:
                    self._arrive(_next_of(has_run))
                done, running = running, self._next_forward(wait=running is None)
                self.is_beside = running is not None
                if running:
                    self._hand_over(running, to_run)
                if done:
                    self._finish(done)
                    done = None  # it holds the caches of prompts
                self._end_failed()
        finally:
            rounds.close()
            to_run.put(None)
            while runner.is_alive():  # its forward cannot be interrupted, and another run must not meet it
                runner.join(POLL)
            end = time.monotonic() + 2.0
            for worker in filter(threading.Thread.is_alive, crew):
                worker.join(max(0.0, end - time.monotonic()))

    def _hand_over(self, forward: Forward, to_run: queue.SimpleQueue) -> None:
        """Let the target's thread run a forward."""
        if self.on_gpu:
            for branch in forward.branches:  # here, as growing gives memory of this stream back to it
                branch.session.cache.reserve(branch.tree.width)
        self._wait_for_gpu()  # the target's stream reads what this one has written
        to_run.put(forward)

    def _run_forwards(self, to_run: queue.SimpleQueue, has_run: queue.SimpleQueue) -> None:
        """Run forwards of a queue until there is None or one fails: the loop of the target's thread."""
        target = self.store.target
        try:
            with torch.no_grad(), own_cores(target, self.threads[0]), own_stream(target.device):
                while forward := to_run.get():
                    self._run(forward)
                    has_run.put(forward)
                    del forward  # it holds the caches of prompts
        except BaseException as error:  # the main thread raises it
            has_run.put(error)

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
        return self.config.sequences - self.live - len(self.admitted)

    def admit_copies(self) -> None:
        """Start requests, first come, first served, as long as their prompts are in the prefix cache."""
        while self.requests and self.free > 0 and self.store.holds(self.requests[0][1].prompt_ids):
            self._start(self._admit([0]))

    def _admit_next(self) -> None:
        """Begin to encode prompts, up to the limit of sequences, or one prompt (verifier `one`), unless
        prompts are being encoded."""
        if not self.admitted and self.requests and self.free > 0:
            self.admitted = self._admit(self._next())

    def _next_forward(self, wait: bool) -> Forward | None:
        """Return what the target runs next: prompts that are being encoded and drafts that are ready, or one
        draft (verifier `one`). None if there is neither.

        Args:
            wait: for a draft, if no prompt is being encoded.
        """
        rounds, branches = self.rounds, []
        if rounds.ready or (wait and self.live and not self.admitted):
            branches = rounds.take(rounds.ready, self.batched)
        self.failed += [branch for branch in branches if branch.error]
        drafted = [branch for branch in branches if not branch.error]
        return Forward(self.admitted, drafted) if self.admitted or drafted else None

    def _arrive(self, forward: Forward) -> None:
        """Take note of a forward that has run: prompts that it has encoded to their end need no other."""
        forward.encoded = [one for one in forward.prompts if not one.prompt.left]
        self.admitted = [one for one in self.admitted if one not in forward.encoded]
        # not the time that the caller has taken beside it
        forward.seconds = max(0.0, forward.ended - self.marked)
        self.is_beside, self.marked = False, time.perf_counter()

    def _finish(self, forward: Forward) -> None:
        """Accept the drafts of a forward, emit their tokens, and start the requests that it has encoded."""
        nodes = [branch.tree.width for branch in forward.branches]
        each = forward.seconds / max(sum(forward.tokens) + sum(nodes), 1)
        for one, n in zip(forward.prompts, forward.tokens):
            one.seconds += n * each
        self._accept(forward)
        _charge(forward.branches, sum(nodes) * each + self.lap())
        for branch in forward.branches:
            root, step = branch.session.root, DecodeStats()
            emit([branch.row], branch.tree, branch.verified.accepted, root, self.stop, step)
            emitted = len(branch.row.tokens)
            if emitted:
                self.on_tokens(branch.row)
            branch.count(step, emitted)
        self._go_on(forward.branches)
        self.lap()  # the time before was spent in the caller's code and is charged to no branch
        if forward.encoded:
            self._start(forward.encoded)

    def _end_failed(self) -> None:
        """End the branches whose drafts have failed.

        Raises:
            UserError: for a reason that the user can remove: no branch is to end with it.
        """
        if self.mistake is not None:
            raise self.mistake
        while self.failed:
            self._end(self.failed.pop(0))
        self.lap()

    def _next(self) -> list[int]:
        """Return the indices of the waiting requests whose prompts are encoded next."""
        if not self.batched:
            return [0]
        return self.store.together([one.prompt_ids for _, one in itertools.islice(self.requests, self.free)])

    def _admit(self, numbers: Sequence[int]) -> list[Admitted]:
        """Take waiting requests by their indices, and begin to encode their prompts."""
        taken = [self.requests[i] for i in numbers]
        for i in reversed(numbers):
            del self.requests[i]
        requests = [request for _, request in taken]
        prompts = self.store.begin([one.prompt_ids for one in requests], [_room(one) for one in requests])
        return [Admitted(*pair, prompt) for pair, prompt in zip(taken, prompts)]

    def _run(self, forward: Forward) -> None:
        """Run a forward of the target."""
        prompts, branches = [one.prompt for one in forward.prompts], forward.branches
        sessions, trees = [branch.session for branch in branches], [branch.tree for branch in branches]
        limit, before = self.config.chunk if branches else None, [one.left for one in prompts]
        with ExitStack() as spans:
            numbers = [one.number for one in forward.prompts], [branch.row.number for branch in branches]
            for what, own in zip(("prefill", "verify"), numbers):
                if own:
                    spans.enter_context(self.timeline.span(TARGET, what, own))
            began = self.timeline.clock()
            forward.outputs = self.store.encode(prompts, limit, sessions, trees)
            self._wait_for_gpu()  # acceptance may read the outputs in another stream
            forward.tokens = [n - one.left for n, one in zip(before, prompts)]
            self.pace.forwarded(began, sum(forward.tokens), trees)
        forward.ended = time.perf_counter()

    def _accept(self, forward: Forward) -> None:
        if not forward.branches:
            return
        for branch in forward.branches:
            branch.accept.set_active([0])
        sessions, trees, accept = zip(*((b.session, b.tree, b.accept) for b in forward.branches))
        for branch, verified in zip(forward.branches, judge_many(sessions, trees, accept, forward.outputs)):
            branch.verified, branch.tree = verified, verified.tree
        self._wait_for_gpu()  # drafts are made in another stream
        forward.outputs = []

    def _wait_for_gpu(self) -> None:
        if self.on_gpu:
            torch.cuda.current_stream(self.store.target.device).synchronize()

    def _start(self, admitted: list[Admitted]) -> None:
        """Start the branches of requests whose prompts are encoded; each emits its first token."""
        store, requests = self.store, [one.request for one in admitted]
        encoded, rooms = [one.prompt.encoded for one in admitted], [_room(one) for one in requests]
        proposers = [
            store.proposer.twin() if request.max_new_tokens > self.config.short else NoProposer()
            for request in requests
        ]
        accept = [rule_for([one.sampling], proposer.draws) for one, proposer in zip(requests, proposers)]
        drafted = [one.number for one, own in zip(admitted, proposers) if not isinstance(own, NoProposer)]
        with self.timeline.span(DRAFTER, "prefill", drafted) if drafted else nullcontext():
            store.read(encoded, rooms, proposers)
        sessions = store.sessions(encoded, rooms, accept, proposers)
        rows = [Row(one.number, one.request) for one in admitted]
        branches = [Branch(*each) for each in zip(rows, sessions, accept)]
        if self.shares_ngrams:
            self._share_ngrams(branches)
        self.branches += branches
        self.live += len(branches)
        each = self.lap() / len(branches)
        for one, branch in zip(admitted, branches):
            branch.row.add(branch.session.root.tolist(), self.stop)
            branch.stats.prompts = 1
            branch.stats.prompt_tokens = len(branch.row.request.prompt_ids)
            branch.stats.new_tokens = len(branch.row.tokens)
            branch.stats.seconds = branch.stats.prefill_seconds = one.seconds + each
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
                if isinstance(error, UserError):
                    self.mistake = error
                if len(branches) == 1 or self.mistake:
                    for branch in branches:
                        branch.fail(error)
                    return
        for branch in branches:
            self._draft([branch], name, cores)

    def _propose(self, branches: list[Branch]) -> None:
        judged = [branch for branch in branches if branch.verified is not None]
        if judged:
            update_many([branch.session for branch in judged], [branch.verified for branch in judged])
            self._wait_for_gpu()  # before the verdicts' memory is given to others
            for branch in judged:  # a draft that is retried must not update with them again
                branch.verified = None
        rows, sessions = [branch.row for branch in branches], [branch.session for branch in branches]
        seeds, positions = zip(*((row.request.sampling.seed, len(row.output)) for row in rows))
        trees = propose_many(sessions, seeds, positions)
        for branch, tree in zip(branches, trees):
            branch.tree = trim(tree, [branch.row])
        self._wait_for_gpu()  # another stream reads the trees

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


def _next_of(has_run: "queue.SimpleQueue[Forward | BaseException]") -> Forward:
    """Return the next forward that has run; wait for one, and notice Ctrl-C meanwhile.

    Raises:
        BaseException: the forward has failed.
    """
    found = None
    while found is None:
        with suppress(queue.Empty):
            found = has_run.get(timeout=POLL)
    if isinstance(found, Forward):
        return found
    try:
        raise found
    finally:
        del found  # or the error would hold this frame, which holds the error


def _charge(branches: Sequence[Branch], seconds: float) -> None:
    """Divide seconds equally among branches."""
    for branch in branches:
        branch.stats.seconds += seconds / len(branches)


def _room(request: Request) -> int:
    """Return the most tokens that a request's prompt and output have together."""
    return len(request.prompt_ids) + request.max_new_tokens
