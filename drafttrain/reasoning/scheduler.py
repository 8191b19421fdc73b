"""Scheduled speculative execution (SEED paper, §4, Algorithm 2): several sequences draft, one target verifies
first come, first served, and a sequence drafts again only once its draft has been verified.

The target verifies `one` draft at a time (as in the paper) or all waiting drafts, `batched` in one forward.
Drafts are made for `each` sequence alone (as in the paper) or `joined`, in one forward for all that wait.
With `overlap` drafting and verifying run at the same time; without it they take turns on all threads. The
text of a sequence depends on none of this: every draw depends only on its seed and position.
"""

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from drafttrain.data.message import Message
from drafttrain.inference.decode import Request, Row, check_request
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.inference.text import OutputText, Prompt, encode, shown
from drafttrain.reasoning.branches import AnswerText, Branch, Pace
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.reasoning.cores import own_cores
from drafttrain.reasoning.execution import Execution
from drafttrain.reasoning.interface import Answer, Call, Then
from drafttrain.reasoning.prefixes import PrefixStore
from drafttrain.reasoning.timeline import Timeline
from drafttrain.target_lm.model import FrozenTarget
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

        def end(branch: Branch) -> Sequence[Request]:
            self.stats += branch.stats
            return on_end(branch)

        run = Execution(
            config=self.config,
            store=self.store,
            pace=self.pace,
            timeline=self.timeline,
            threads=threads,
            shares_ngrams=self.shares_ngrams,
            stop=stop,
            on_tokens=on_tokens,
            on_end=end,
        )
        run.add(requests)
        # where they overlap, the target has a thread of its own, and this one takes a core for moments
        cores = own_cores(self.target, 1 if self.overlaps else None)
        # inference mode belongs to one thread, and others write the caches that are made here
        with torch.inference_mode(False), torch.no_grad(), cores:
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

    __call__ = answer  # so that a decoder is a `Generate`

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
