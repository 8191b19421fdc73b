"""The second pass over a corpus: encode the conversations of an Arrow file, in several processes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import tokenizer_hash
from drafttrain.data.conversation import Conversation
from drafttrain.data.loss_mask import cut_at_turns
from drafttrain.data.message import Message
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint

_RAW = Features({name: Value("string") for name in ("id", "source", "messages")})
_ENCODED = Features(
    {
        "id": Value("string"),
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("int8")),
        "row": Value("int32"),
        "n_tokens": Value("int32"),
        "n_trained": Value("int32"),
        "is_text": Value("bool"),
        "truncated": Value("bool"),
    }
)


def write_raw(conversations: Iterable[Conversation], path: Path) -> tuple[list[str], int, str]:
    """Write the Arrow file that `encode_raw` reads; return ids, number of bytes and a fingerprint."""
    ids, n_bytes, digest = [], 0, hashlib.sha256()
    with ArrowWriter(path=str(path), features=_RAW, writer_batch_size=256) as writer:
        for conversation in conversations:
            turns = [[message.role, message.content, message.token_ids] for message in conversation.messages]
            messages = json.dumps(turns, ensure_ascii=False)
            digest.update(f"{conversation.id}\n{messages}\n".encode())
            writer.write({"id": conversation.id, "source": conversation.source, "messages": messages})
            ids.append(conversation.id)
            n_bytes += len(messages.encode())
        writer.finalize()
    return ids, n_bytes, digest.hexdigest()


def encode_raw(
    raw: Path, digest: str, tokenizer: PreTrainedTokenizerBase, max_length: int, processes: int
) -> Dataset:
    """Encode an Arrow file of conversations in their order, each as one or more rows.

    Args:
        raw: the file that `write_raw` wrote.
        digest: its fingerprint.
        tokenizer: of the target.
        max_length: longest row, in tokens.
        processes: number of encoding processes; does not change the result.

    Returns:
        Rows with `id`, `input_ids`, `loss_mask`, `row` (index of the conversation), `n_tokens`, `n_trained`,
        `is_text` and `truncated`.

    Raises:
        UserError: as `cut_at_turns`, or a chat whose assistant turns leave no token to train.
    """
    dataset = Dataset.from_file(str(raw))
    return dataset.map(
        _encode_batch,
        batched=True,
        batch_size=64,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns=dataset.column_names,
        features=_ENCODED,
        num_proc=min(processes, len(dataset)) if processes > 1 else None,
        cache_file_name=str(raw.with_name("encoded.arrow")),
        load_from_cache_file=False,
        # By default datasets hashes the pickled tokenizer, which differs from one time to the next.
        new_fingerprint=fingerprint([digest, tokenizer_hash(tokenizer), max_length]),
        desc="tokenizing",
    )


def _encode_batch(
    batch: dict[str, list], indices: list[int], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list]:
    out: dict[str, list] = {name: [] for name in _ENCODED}
    for index, id, source, turns in zip(
        indices, batch["id"], batch["source"], batch["messages"], strict=True
    ):
        messages = [Message(*turn) for turn in json.loads(turns)]
        conversation = Conversation(id, messages, source)
        pieces = cut_at_turns(tokenizer, conversation, max_length)
        is_text = conversation.is_text
        # a single piece may have none, as of a question whose call of a tool had no text
        if not is_text and not any(piece.n_trained or piece.truncated for piece in pieces):
            raise UserError(f"{source}: no tokens to train in its assistant turns; check the chat template")
        for number, piece in enumerate(pieces):
            out["id"].append(id if len(pieces) == 1 else f"{id}#{number}")
            out["input_ids"].append(piece.input_ids)
            out["loss_mask"].append(piece.loss_mask)
            out["row"].append(index)
            out["n_tokens"].append(len(piece.input_ids))
            out["n_trained"].append(piece.n_trained)
            out["is_text"].append(is_text)
            out["truncated"].append(piece.truncated)
    return out


def check_trained_fraction(encoded: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require that between 1 % and 99 % of the chats' tokens are trained.

    Another share means that template and data do not fit (for example chats that were rendered already, given
    as one turn). Plain text is trained as a whole and not checked.

    Raises:
        UserError: the share is outside 1–99 %; the message shows the start of the first example.
    """
    chats = np.flatnonzero(~np.asarray(encoded["is_text"]))
    if not len(chats):
        return
    n_tokens = int(np.asarray(encoded["n_tokens"])[chats].sum())
    n_trained = int(np.asarray(encoded["n_trained"])[chats].sum())
    if not 0.01 <= n_trained / n_tokens <= 0.99:
        example = encoded[int(chats[0])]
        shown = "".join(
            f"⟦{text}⟧" if trained else text
            for text, trained in trained_runs(tokenizer, example["input_ids"], example["loss_mask"])
        )
        raise UserError(
            f"corpus: trained tokens must be 1 to 99 % of the chats' {n_tokens} tokens, got "
            f"{100 * n_trained / n_tokens:.2f} %; check roles and chat template in the first example, "
            f"trained parts in ⟦⟧: {shown[:400]!r}"
        )


def trained_runs(
    tokenizer: PreTrainedTokenizerBase, input_ids: list[int], loss_mask: list[int]
) -> list[tuple[str, bool]]:
    """Return an example's text as runs of trained and of untrained tokens: (text, whether trained)."""
    edges = [0] + [i for i in range(1, len(loss_mask)) if loss_mask[i] != loss_mask[i - 1]] + [len(loss_mask)]
    # Decoded from the start each time: the text of a token depends on those before it.
    texts = [tokenizer.decode(input_ids[:edge], clean_up_tokenization_spaces=False) for edge in edges]
    return [
        (after[len(before) :], bool(loss_mask[edge]))
        for before, after, edge in zip(texts, texts[1:], edges, strict=False)
        if after != before
    ]
