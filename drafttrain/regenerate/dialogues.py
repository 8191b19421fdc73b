"""Chats whose assistant turns are rewritten: their questions, the order of these, and the answers.

This module depends neither on files nor on the engine that answers.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from drafttrain.data.conversation import Conversation
from drafttrain.data.message import Message
from drafttrain.data.tidy import tidy
from drafttrain.hidden_states.store import Document
from drafttrain.inference.decode import Request


@dataclass
class ChatRequest(Request):
    """One turn to be answered; `messages` is the text of `prompt_ids`."""

    messages: list[Message] = field(default_factory=list)


@dataclass
class Completion:
    """The answer to a request.

    Attributes:
        id: the request's.
        token_ids: the stop token included.
        finish_reason: "stop", "length", "not_finite" (NaN or infinite logits) or "failed" (no reply from the
            server); only the first two are answers.
        states: hidden states of prompt and answer without its last token, if they are kept.
    """

    id: str
    token_ids: list[int]
    finish_reason: str
    states: Document | None = field(default=None, kw_only=True)


@dataclass
class Dialogue:
    """One conversation in progress.

    Attributes:
        id: unique in this run.
        source: "file.json:row 12", for messages.
        system: its system turn, if any.
        questions: the user turns in order.
        temperature: 0 for greedy, the same in all turns.
        tree_of: as in `Conversation`.
        answers: the target's turns so far.
        finish_reason: of the last answer: "stop" or "length".
        retokenized: whether the ids of an answer were made from its text.
        states: those of the last answer, until the next turn is asked.
    """

    id: str
    source: str
    system: list[Message]
    questions: list[str]
    temperature: float
    tree_of: str | None = None
    answers: list[Message] = field(default_factory=list)
    finish_reason: str = ""
    retokenized: bool = False
    states: Document | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether all questions are answered."""
        return len(self.answers) == len(self.questions)

    def said(self) -> list[Message]:
        """Return the messages so far: the system turn, and the answered questions with their answers."""
        turns = list(self.system)
        for question, answer in zip(self.questions, self.answers):
            turns += [Message("user", question), answer]
        return turns

    @property
    def asked(self) -> list[str]:
        """Return the texts that may hold an evaluation prompt: system and user turns, the tree's problem."""
        return self._turns() + ([self.tree_of] if self.tree_of else [])

    def _turns(self) -> list[str]:
        return [message.content for message in self.system] + self.questions

    def prompt(self) -> list[Message]:
        """Return the prompt of the next answer."""
        return [*self.said(), Message("user", self.questions[len(self.answers)])]

    def to_row(self) -> dict[str, Any]:
        """Return a ShareGPT row of the exchanges so far, with the ids of every answer."""
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        turns = [{"from": names[message.role], "value": message.content} for message in self.said()]
        for turn, message in zip(turns, self.said()):
            if message.token_ids is not None:
                turn["token_ids"] = message.token_ids
        row = {"id": self.id, "conversations": turns, "finish_reason": self.finish_reason}
        row["temperature"] = self.temperature
        if self.tree_of:
            row["tree_of"] = self.tree_of
        if self.retokenized:
            row["retokenized"] = True
        return row

    def matches(self, row: dict[str, Any]) -> bool:
        """Return whether an earlier row answers these questions, or the first ones, at this temperature."""
        turns = row.get("conversations", [])
        asked = [turn["value"] for turn in turns if turn["from"] != "gpt"]
        is_same = row.get("temperature") == self.temperature and asked == self._turns()[: len(asked)]
        return is_same and len(turns) > 1


def hashed(*parts: Any) -> int:
    """Return a number in [0, 2⁶⁴) that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def plan_dialogues(
    conversations: Iterable[Conversation],
    skipped: Counter,
    *,
    max_turns: int,
    greedy_fraction: float,
    temperature: float,
    seed: int,
    deduplicate: bool,
) -> Iterator[Dialogue]:
    """Yield the dialogues that the target is to answer, without the conversations' assistant turns.

    A chat ends before its first tool result, which answers a call that the target may not make. An id that
    occurs again gets a number ("x", "x#2", …), in reading order. Whether a chat is answered greedily depends
    only on seed and id.

    Args:
        conversations: as read.
        skipped: receives the reasons why conversations are left out.
        max_turns: user turns kept of each.
        greedy_fraction: share of chats with temperature 0; the others get `temperature`.
        deduplicate: leave out chats whose system and user turns have all occurred before.
    """
    ids: set[str] = set()
    copies: Counter[str] = Counter()  # numbers given out by id, so that none is tried twice
    prompts: set[int] = set()
    for conversation in conversations:
        name = conversation.id
        while name in ids:
            copies[conversation.id] += 1
            name = f"{conversation.id}#{copies[conversation.id] + 1}"
        ids.add(name)
        if conversation.is_text:
            skipped["plain text, no turns"] += 1
            continue
        system, questions = _questions(conversation)
        questions = questions[:max_turns]
        if not questions:
            skipped["no user turn"] += 1
            continue
        if deduplicate:
            prompt = hashed(*(message.content for message in system), len(system), *questions)
            if prompt in prompts:
                skipped["same prompt as an earlier one"] += 1
                continue
            prompts.add(prompt)
        is_greedy = hashed(seed, "greedy", name) < greedy_fraction * 2**64
        warmth = 0.0 if is_greedy else temperature
        yield Dialogue(name, conversation.source, system, questions, warmth, conversation.tree_of)


def _questions(conversation: Conversation) -> tuple[list[Message], list[str]]:
    """Return the system turns and the texts of the user turns, up to the first tool result."""
    turns = [
        Message("assistant", "…") if message.role == "assistant" else message
        for message in conversation.messages
    ]
    spoken = [message for message in turns if message.content.strip() or message.role == "tool"]
    if spoken and spoken[-1].role == "user":
        spoken.append(Message("assistant", "…"))  # a question at the end is to be answered as well
    tidied = tidy(replace(conversation, messages=spoken), Counter())
    if tidied is None:
        return [], []
    tool = next((i for i, message in enumerate(tidied.messages) if message.role == "tool"), None)
    kept = tidied.messages[:tool]
    system = [message for message in kept if message.role == "system"]
    return system, [message.content for message in kept if message.role == "user"]


class TurnQueue:
    """Iterator over the turns that can be asked now.

    A conversation that has begun goes on before others begin, so that few are unfinished when a limit or
    Ctrl-C ends the run. First turns are kept sorted by prompt length and taken from short to long, so that
    similar lengths follow each other, and filled up again once all are taken. It yields `ChatRequest`s, as
    `decode_requests` reads them: None means that all remaining turns wait for an answer.
    """

    def __init__(
        self,
        dialogues: Iterable[Dialogue],
        to_request: Callable[[Dialogue], ChatRequest | None],
        window: int,
    ):
        """
        Args:
            dialogues: taken as they are needed.
            to_request: makes the request of a dialogue's next turn; None gives the dialogue up.
            window: number of first turns that are sorted at a time.
        """
        self._fresh, self._to_request, self._window = iter(dialogues), to_request, window
        self._first: deque[ChatRequest] = deque()
        self._next: deque[ChatRequest] = deque()
        self._running: dict[str, Dialogue] = {}
        self._known: dict[str, Dialogue] = {}

    def __iter__(self) -> "TurnQueue":
        return self

    def __next__(self) -> ChatRequest | None:
        if not self._next and not self._first:
            self._add_fresh()
        if waiting := self._next or self._first:
            request = waiting.popleft()
            self._running[request.id] = self._known.pop(request.id)
            return request
        if any(len(dialogue.answers) + 1 < len(dialogue.questions) for dialogue in self._running.values()):
            return None
        raise StopIteration

    def answered(self, id: str) -> Dialogue:
        """Return the dialogue whose running turn was answered; it leaves the queue until `put`."""
        return self._running.pop(id)

    def put(self, dialogue: Dialogue) -> bool:
        """Queue a dialogue's next turn; return False when `to_request` gives it up."""
        request = self._to_request(dialogue)
        if request is None:
            return False
        self._known[dialogue.id] = dialogue
        self._next.append(request)
        return True

    def _add_fresh(self) -> None:
        while len(self._next) < self._window and (dialogue := next(self._fresh, None)) is not None:
            self.put(dialogue)
        self._first.extend(sorted(self._next, key=lambda request: len(request.prompt_ids)))
        self._next.clear()
