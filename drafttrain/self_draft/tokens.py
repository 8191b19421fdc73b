"""Tokenize sources of text into one file of token ids: one process reads and cleans, several encode."""

import os
import signal
import sys
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from drafttrain.data.conversation import Conversation
from drafttrain.data.loss_mask import cut_at_turns, encode_conversation
from drafttrain.self_draft.corpus_cache import token_dtype
from drafttrain.self_draft.counting import TokenFile
from drafttrain.utils.errors import UserError
from drafttrain.utils.parent import end_with

BATCH_CHARACTERS = 1 << 18  # of text that a process encodes at a time
MOST_TOKENS = (1 << 32) - 1  # counts and offsets are stored in 32 bits


@dataclass
class Texts:
    """Sizes of the tokenized texts.

    Attributes:
        ids: ids of the documents and conversations, in the order of the file.
        lengths: ids that each takes in the file, separators included.
        tokens: total number of tokens, without separators.
        words: words of the documents and assistant turns.
        composed: documents and assistant turns that Unicode normalization (NFC) has changed.
    """

    ids: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: int = 0
    words: int = 0
    composed: int = 0


def tokenize(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    processes: int,
    path: Path,
) -> tuple[TokenFile, Texts]:
    """Write the ids of all texts into a file: of documents everything, of chats the assistant's turns.

    Turns that come with the ids that a target generated keep these. Each stretch of text ends with the id
    `vocabulary`, a separator that is no token.

    Args:
        conversations: chats and texts, cleaned.
        processes: number of processes that encode; does not change the result.

    Raises:
        UserError: there are more tokens than a cache can count.
    """
    vocabulary = vocabulary_size(tokenizer)
    file, texts = TokenFile(path, vocabulary), Texts()
    with open(path, "wb") as out, ExitStack() as stack:
        encoded = _encoded(_batches(conversations), tokenizer, vocabulary, processes, stack)
        n_tokens = 0
        for batch in encoded:
            batch.tokens.tofile(out)
            n_tokens += len(batch.tokens)
            if n_tokens > MOST_TOKENS:
                raise UserError(
                    f"build-ngrams: must have at most {MOST_TOKENS} tokens, got more; leave out sources"
                )
            texts.ids += batch.texts.ids
            texts.lengths += batch.texts.lengths
            texts.tokens += batch.texts.tokens
            texts.words += batch.texts.words
            texts.composed += batch.texts.composed
    return file, texts


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the tokenizer's highest id; vocabularies may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


@dataclass
class _Encoded:
    tokens: np.ndarray
    texts: Texts


def _batches(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    batch: list[Conversation] = []
    size = 0
    for conversation in conversations:
        batch.append(conversation)
        size += sum(len(message.content) for message in conversation.messages)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(
    batches: Iterator[list[Conversation]],
    tokenizer: PreTrainedTokenizerBase,
    separator: int,
    processes: int,
    stack: ExitStack,
) -> Iterator[_Encoded]:
    """Yield the encoded batches in order, with few of them in memory at a time."""
    if processes == 1:
        yield from (_encode(batch, tokenizer, separator) for batch in batches)
        return
    pool = worker_pool(processes, stack, _set_encoder, tokenizer, separator)
    waiting: deque = deque()
    for batch in batches:
        waiting.append(pool.submit(_encode_there, batch))
        if len(waiting) > 2 * processes:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def worker_pool(processes: int, stack: ExitStack, prepare=None, *arguments) -> ProcessPoolExecutor:
    """Start processes that end with `stack` or this process, ignore Ctrl-C and begin with
    `prepare(*arguments)`."""
    pool = ProcessPoolExecutor(processes, initializer=_start_worker, initargs=(prepare, *arguments))
    stack.callback(pool.shutdown, cancel_futures=True)
    # all are started now, before a thread of a progress bar runs that a fork might break
    for done in [pool.submit(int) for _ in range(processes)]:
        done.result()
    return pool


def _start_worker(prepare, *arguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(os.getppid())
    if prepare is not None:
        prepare(*arguments)


_encoder: tuple[PreTrainedTokenizerBase, int] | None = None  # of a worker process


def _set_encoder(tokenizer: PreTrainedTokenizerBase, separator: int) -> None:
    global _encoder
    _encoder = tokenizer, separator


def _encode_there(batch: list[Conversation]) -> _Encoded:
    return _encode(batch, *_encoder)


def _encode(batch: list[Conversation], tokenizer: PreTrainedTokenizerBase, separator: int) -> _Encoded:
    texts, parts = Texts(), []
    for conversation in batch:
        messages = []
        for message in conversation.messages:
            counted = message.role in ("text", "assistant")
            if message.token_ids is None and not unicodedata.is_normalized("NFC", message.content):
                message = replace(message, content=unicodedata.normalize("NFC", message.content))
                texts.composed += counted
            if counted:
                texts.words += len(message.content.split())
            messages.append(message)
        conversation = replace(conversation, messages=messages)
        if conversation.is_text:
            pieces = [encode_conversation(tokenizer, conversation)]
        else:
            pieces = cut_at_turns(tokenizer, conversation, sys.maxsize)
        length = 0
        for piece in pieces:
            ids = np.array(piece.input_ids, token_dtype(separator))  # [T]
            counted = np.array(piece.loss_mask, bool)  # [T]
            texts.tokens += int(counted.sum())
            # each stretch that is not counted becomes one separator
            ids[~counted] = separator
            ids = ids[counted | np.concatenate([[False], counted[:-1]])]
            if len(ids) and ids[-1] != separator:
                ids = np.append(ids, ids.dtype.type(separator))
            parts.append(ids)
            length += len(ids)
        texts.ids.append(conversation.id)
        texts.lengths.append(length)
    return _Encoded(np.concatenate(parts), texts)
