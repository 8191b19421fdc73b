"""One call of the regeneration stage: what is pending, what comes back, and where it is written.

It does not depend on the engine that answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.conversation import Conversation
from drafttrain.data.message import Message
from drafttrain.data.overlap import OVERLAP, EvaluationPrompts, MeasuredPrompts, not_excluded
from drafttrain.data.readers import ReadReport, read_conversations
from drafttrain.hidden_states.recording import Recordings
from drafttrain.inference.params import SamplingParams
from drafttrain.regenerate.dialogues import (
    ChatRequest,
    Completion,
    Dialogue,
    TurnQueue,
    hashed,
    plan_dialogues,
)
from drafttrain.regenerate.engines import Engine
from drafttrain.regenerate.openai_client import Reply
from drafttrain.regenerate.responses import RegenerateReport, ResponseFile
from drafttrain.utils.errors import UserError
from drafttrain.utils.progress import counted

if TYPE_CHECKING:
    from drafttrain.data.config import PromptSet, RegenerateConfig

SORTED = 8  # first turns that are asked in order of their length, per answer under way
ENOUGH_TO_JUDGE = 20  # failures from which their share is compared with max_failed
FEW = 3  # failures that are accepted at the end regardless of their share


class _LimitReached(Exception):
    """Raised when a limit is reached; the message is its name."""


def plan(
    config: RegenerateConfig,
    skipped: Counter,
    prompts: EvaluationPrompts,
    measured: MeasuredPrompts,
) -> tuple[dict[str, Dialogue], set[str], int]:
    """Return the conversations of all sources by id, in order, the ids of those that hold evaluation prompts,
    and the number of rows read.

    Args:
        skipped: counts the reasons for which rows are left out.
        prompts: conversations that hold one of these are left out.
        measured: prompts that none of the other conversations may hold.

    Raises:
        UserError: a conversation holds a measured prompt, or there are none to answer.
    """
    reports = [ReadReport() for _ in config.sources]

    def conversations() -> Iterator[Conversation]:
        for source, report in zip(config.sources, reports):
            rows = read_conversations(source.path, source.format, report)
            yield from islice(rows, source.max_conversations)

    names = ("max_turns", "greedy_fraction", "temperature", "seed", "deduplicate")
    options = {name: getattr(config, name) for name in names}
    dialogues, excluded = {}, set()
    for found in plan_dialogues(conversations(), skipped, **options):
        if len(prompts) and any(map(prompts.overlap, found.asked)):
            skipped[OVERLAP] += 1
            excluded.add(found.id)
            continue
        measured.look(found.asked)
        dialogues[found.id] = found
    measured.check("regenerate.sources")
    for report in reports:
        skipped.update(report.skipped)
    if not dialogues:
        raise UserError(
            f"{config.sources[0].path}: no conversation to answer ({counts(skipped)}); name other sources"
        )
    return dialogues, excluded, sum(report.read for report in reports)


class Rewriting:
    """The conversations that are still to be answered, the counts of the others, and the files of answers."""

    def __init__(
        self,
        config: RegenerateConfig,
        out: Path,
        tokenizer: PreTrainedTokenizerBase,
        recordings: Recordings | None = None,
        exclude: Sequence[str] = (),
        measured: Sequence[PromptSet] = (),
    ):
        self.config, self.tokenizer, self.recordings = config, tokenizer, recordings
        self.skipped, self.failures = Counter(), Counter()
        prompts, refused = EvaluationPrompts.read(exclude), MeasuredPrompts(not_excluded(measured, exclude))
        self.pending, self.excluded, n_read = plan(config, self.skipped, prompts, refused)
        self.order = list(self.pending)  # ids as read
        self.report = RegenerateReport(read=n_read)
        self.file = ResponseFile(out)
        self.tried = 0
        self.taken: set[str] = set()  # ids of dialogues that continue another run's answers
        self.begun: set[str] = set()  # ids of dialogues that this call has asked
        self.limit = ""  # name of the limit that ended it early

    def recover(self) -> None:
        """Count the rows that an earlier call has written, and remove them from `pending`."""
        for row in self.file.recover():
            dialogue = self.pending.pop(row["id"], None)
            if row["id"] in self.excluded:
                continue  # answered before one of its prompts was excluded; `finish` leaves it out
            if dialogue is None or not dialogue.matches(row):
                raise UserError(
                    f"{self.file.partial}: conversation {row['id']!r} is not in the sources in this form: "
                    "they have changed; choose another folder or remove this one"
                )
            self.report.add(row, len(dialogue.questions))

    def take_over(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows of another run that answer what is pending here, up to `max_rows`."""
        for row in rows:
            if self.is_full():
                break
            dialogue = self.pending.get(row["id"])
            if dialogue is not None and dialogue.matches(row):
                row |= {"tree_of": dialogue.tree_of} if dialogue.tree_of else {}  # earlier versions lack it
                turns = [turn for turn in row["conversations"] if turn["from"] == "gpt"]
                said = [Message("assistant", turn["value"], turn.get("token_ids")) for turn in turns]
                if len(said) == len(dialogue.questions) or self._is_too_long(replace(dialogue, answers=said)):
                    self.write(dialogue, row)
                elif len(said) > len(dialogue.answers):  # there are questions that the other run did not have
                    dialogue.answers, dialogue.retokenized = said, row.get("retokenized", False)
                    dialogue.finish_reason = row.get("finish_reason", "")
                    self.taken.add(dialogue.id)

    def _is_too_long(self, dialogue: Dialogue) -> bool:
        """Return whether the prompt of a dialogue's next turn is longer than `max_prompt_tokens`."""
        return len(encode_prompt(self.tokenizer, dialogue.prompt())) > self.config.max_prompt_tokens

    def answer(self, engine: Engine, console: Console) -> None:
        """Answer until nothing is pending or a limit is reached, which `limit` then names.

        Raises:
            UserError: too many conversations failed.
        """
        config, begun = self.config, time.monotonic()
        self.tried = 0
        under_way = config.server.concurrency if config.server else config.batch_rows
        # the time must not run out before the longer prompts: only a few at a time are sorted then
        window = under_way if config.max_minutes is not None else SORTED * under_way
        turns = TurnQueue(self._waiting(), self.to_request, window)
        earlier = len(self.order) - len(self.pending)
        with counted("regenerate", len(self.order), "conversations", console, earlier) as advance:
            shown = _Shown(self, advance)

            def on_step(n_tokens: int) -> None:
                shown.add(n_tokens)
                if config.max_minutes is not None and time.monotonic() - begun > 60 * config.max_minutes:
                    raise _LimitReached("max_minutes")

            try:
                self.check_rows()
                with closing(engine(turns, on_step)) as completions:
                    for completion in completions:
                        self.receive(completion, turns)
                        self.check_rows()
                shown.add(0)
            except _LimitReached as reached:
                self.limit = str(reached)
            except BaseException:
                console.print(escape(self.state()), highlight=False, soft_wrap=True)
                raise
        for dialogue in [self.pending[id] for id in self.pending if id in self.taken]:
            if self.is_full():
                break
            self.write(dialogue, dialogue.to_row())  # without the answers that were not reached
        if self.pending:
            self.skipped[f"not reached before {self.limit}"] += len(self.pending)

    def _waiting(self) -> Iterator[Dialogue]:
        """Yield what is pending, in order, until as many have begun as `max_rows` has room for: of more,
        those with the shortest answers would be kept."""
        done = self.report.written + self.report.failed
        for id in list(self.pending):
            if self.config.max_rows is not None and done + len(self.begun) >= self.config.max_rows:
                return
            yield self.pending[id]

    def check_rows(self) -> None:
        """Check that there are fewer conversations than `max_rows`, those of earlier calls included.

        Raises:
            _LimitReached: there are not.
        """
        if self.is_full() and self.pending:
            raise _LimitReached("max_rows")

    def is_full(self) -> bool:
        """Return whether there are `max_rows` conversations."""
        done = self.report.written + self.report.failed
        return self.config.max_rows is not None and done >= self.config.max_rows

    def finish(self) -> None:
        """Complete the report and make `responses.jsonl`.

        Raises:
            UserError: too many conversations failed, or none was answered without a limit as the reason.
        """
        report = self.report
        report.skipped, report.failures = dict(self.skipped), dict(self.failures)
        if not report.is_balanced:
            raise RuntimeError(f"rows have been lost or doubled, which is an error in drafttrain: {report}")
        self.check_failed(FEW + 1, report.written + report.failed)
        if not report.written and (self.failures or not self.limit):
            raise UserError(
                f"{self.file.folder}: no answer to write ({counts(self.failures + self.skipped)}); "
                "remove the cause"
            )
        self.file.finish(self.order)

    def state(self) -> str:
        """Return a line on what an interrupted call has kept."""
        return (
            f"{len(self.file.places)} of {len(self.order)} conversations are kept in {self.file.partial}, "
            "and the same command goes on from there"
        )

    def to_request(self, dialogue: Dialogue) -> ChatRequest | None:
        """Return the request of a dialogue's next turn; None where the prompt is too long, which ends it."""
        turn, messages = len(dialogue.answers), dialogue.prompt()
        try:
            prompt_ids = encode_prompt(self.tokenizer, messages)
        except UserError as error:
            raise UserError(f"{dialogue.source}: {error}") from None
        if len(prompt_ids) > self.config.max_prompt_tokens:
            if turn:
                self.write(dialogue, dialogue.to_row())
            else:
                self.skipped["prompt longer than max_prompt_tokens"] += 1
                del self.pending[dialogue.id]
            return None
        self.begun.add(dialogue.id)
        sampling = SamplingParams(
            temperature=dialogue.temperature,
            top_p=self.config.top_p if dialogue.temperature else 1.0,
            seed=hashed(self.config.seed, turn, dialogue.id) % 2**31,  # servers take 31 bits
        )
        return ChatRequest(prompt_ids, self.config.max_new_tokens, sampling, dialogue.id, messages)

    def receive(self, completion: Completion, turns: TurnQueue) -> None:
        """Add an answer to its dialogue and queue the next turn, or write the dialogue."""
        dialogue = turns.answered(completion.id)
        if completion.finish_reason not in ("stop", "length"):
            self.fail(dialogue, completion)
            return
        ids = completion.token_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        dialogue.answers.append(Message("assistant", text, ids))
        dialogue.finish_reason, dialogue.states = completion.finish_reason, completion.states
        dialogue.retokenized |= isinstance(completion, Reply) and completion.retokenized
        if dialogue.is_finished:
            self.write(dialogue, dialogue.to_row())
        elif turns.put(dialogue):
            dialogue.states = None  # the next turn's states include them

    def write(self, dialogue: Dialogue, row: dict[str, Any]) -> None:
        """Write the row of a dialogue, and its hidden states if they are kept."""
        self.file.append(row)
        if dialogue.states is not None:
            self.recordings.add(dialogue.states)
        self.report.add(row, len(dialogue.questions))
        self.tried += 1
        del self.pending[dialogue.id]

    def close(self) -> None:
        """Write the hidden states that are still in memory, and close the files."""
        if self.recordings is not None:
            self.recordings.flush()
        self.file.close()

    def fail(self, dialogue: Dialogue, completion: Completion) -> None:
        """Record a dialogue whose turn got no answer; write it if it has another run's answers.

        Raises:
            UserError: too many conversations failed.
        """
        if dialogue.id in self.taken:
            self.write(dialogue, dialogue.to_row())
            return
        reason = "the target's logits are not finite; try another dtype"
        if isinstance(completion, Reply):
            reason = completion.error
        turn = len(dialogue.answers) + 1
        self.file.append_failure(
            {"id": dialogue.id, "source": dialogue.source, "turn": turn, "reason": reason}
        )
        self.failures[reason] += 1
        self.report.failed += 1
        self.tried += 1
        del self.pending[dialogue.id]
        self.check_failed(ENOUGH_TO_JUDGE, self.tried)

    def check_failed(self, enough: int, tried: int) -> None:
        """Compare the share of failures among conversations that were tried with `max_failed`, if there are
        enough failures.

        Raises:
            UserError: it is larger.
        """
        failed = self.report.failed
        if failed >= enough and failed > self.config.max_failed * tried:
            raise UserError(
                f"regenerate.max_failed: failed conversations must be at most {self.config.max_failed:g} of "
                f"all, got {failed} of {tried} ({counts(self.failures)}); remove the cause, or raise it"
            )


class _Shown:
    """The progress line of a call: its tokens, and how many are still to come."""

    def __init__(self, run: Rewriting, advance: Callable[..., None]):
        self.run, self.advance, self.begun = run, advance, time.monotonic()
        self.pending, self.written, self.tokens = len(run.pending), run.report.tokens, 0
        turns = sum(len(dialogue.questions) for dialogue in run.pending.values())
        self.longest = run.config.max_new_tokens * turns / max(self.pending, 1)  # of a conversation
        self.shown = 0

    def add(self, n_tokens: int) -> None:
        """Count tokens that were emitted, and show the conversations finished with them.

        The mean length is estimated as all tokens over the conversations finished: those that finish first
        are the short ones, and the others are still under way.
        """
        self.tokens += n_tokens
        config, left, seconds = self.run.config, len(self.run.pending), time.monotonic() - self.begun
        finished, mean = self.pending - left, self.longest
        if finished:
            mean = min(mean, self.tokens / finished)
        if config.max_rows is not None:
            left = min(left, config.max_rows - self.run.report.written - self.run.report.failed)
        share = self.tokens / max(self.run.report.tokens - self.written + left * mean, self.tokens, 1)
        if config.max_minutes:
            share = max(share, seconds / (60 * config.max_minutes))
        note = f"{self.tokens:,} tokens, {self.tokens / max(seconds, 1e-6):,.0f} tokens/s"
        self.advance(finished - self.shown, (share, 1.0), note)
        self.shown = finished


def counts(reasons: Counter) -> str:
    """Return the most frequent reasons in one line."""
    return "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common(5)) or "no reason known"
