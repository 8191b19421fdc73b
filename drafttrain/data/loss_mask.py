"""Encode a conversation as token ids and a loss mask, with the tokenizer's own chat template.

`answers.py` finds every assistant turn in the rendered text, and the tokenizer's offsets map it to tokens.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from drafttrain.data.answers import RenderedOtherwise, answer_spans, end_of_turn_ids
from drafttrain.data.chat import tokenize
from drafttrain.data.conversation import Conversation
from drafttrain.data.message import Message
from drafttrain.data.template import adapt_roles, render
from drafttrain.utils.errors import UserError


@dataclass
class Encoded:
    """Token ids of one example.

    Attributes:
        input_ids: ids of the whole example.
        loss_mask: 1 on the tokens of all assistant turns including the end-of-turn token, else 0; in plain
            text 1 on every token except special ones that the tokenizer adds.
        truncated: whether the example ends early because a single exchange was too long.
    """

    input_ids: list[int]
    loss_mask: list[int]
    truncated: bool = False

    @property
    def n_trained(self) -> int:
        """Return the number of tokens with a loss; the first token is never predicted."""
        return sum(self.loss_mask[1:])


def encode_conversation(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Encoded:
    """Render a conversation with the chat template and mark the assistant's tokens.

    Where an assistant turn has `token_ids`, they are used instead of its tokenized text; an end-of-turn token
    that was not generated (length limit) is added but not trained.

    Raises:
        UserError: no chat template, a template that renders turns differently once others follow and has no
            `{% generation %}` marks, a tokenizer without offsets, or `token_ids` of another tokenizer.
    """
    if conversation.is_text:
        return _text_pieces(tokenizer, conversation, max_length=None)[0]
    return _encode_chat(tokenizer, conversation)[0]


def cut_at_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, max_length: int
) -> list[Encoded]:
    """Encode a conversation in pieces of at most `max_length` tokens, cut before user turns.

    Each piece has as many exchanges (a user turn and the answers to it) as fit, is rendered separately and
    repeats the system prompt. A single exchange that is too long is truncated at `max_length` and flagged; if
    its prompt alone fills the piece, it trains no token, which callers check. Documents are cut into windows
    of `max_length` tokens.

    Where the template changes answers (it drops earlier thinking) and all answers have `token_ids`, each
    answer becomes a piece, after the prompt that the model has read.

    Raises:
        UserError: as `encode_conversation`.
    """
    if conversation.is_text:
        return _text_pieces(tokenizer, conversation, max_length)
    try:
        whole, starts = _encode_chat(tokenizer, conversation)
    except RenderedOtherwise:
        if any(one.role == "assistant" and one.token_ids is None for one in conversation.messages):
            raise
        return [_cut(piece, max_length) for piece in _single_answers(tokenizer, conversation)]
    if len(whole.input_ids) <= max_length:
        return [whole]

    messages = conversation.messages
    first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
    system = messages[:first]
    rounds = [i for i, message in enumerate(messages) if message.role == "user" and i >= first]
    # The end of each exchange in the whole chat; a separate piece needs at least as many tokens.
    edges = [starts[i] for i in rounds[1:]] + [len(whole.input_ids)]
    rounds.append(len(messages))
    pieces, begin = [], 0
    while begin < len(rounds) - 1:
        end, edge = begin + 1, edges[begin - 1] if begin else 0
        while end < len(rounds) - 1 and edges[end] - edge <= max_length:
            end += 1
        while True:
            turns = system + messages[rounds[begin] : rounds[end]]
            piece = _encode_chat(tokenizer, replace(conversation, messages=turns))[0]
            if len(piece.input_ids) <= max_length or end == begin + 1:
                break
            end -= 1
        pieces.append(_cut(piece, max_length))
        begin = end
    return pieces


def _cut(piece: Encoded, max_length: int) -> Encoded:
    if len(piece.input_ids) <= max_length:
        return piece
    return Encoded(piece.input_ids[:max_length], piece.loss_mask[:max_length], truncated=True)


def _single_answers(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[Encoded]:
    """Return one example per answer: the rendered prompt, then the answer's `token_ids`."""
    messages, source = adapt_roles(tokenizer, conversation.messages), conversation.source
    end_ids = end_of_turn_ids(tokenizer)
    pieces = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            _check_ids(tokenizer, message, f"{source}: turn {index + 1}")
            before = render(tokenizer, messages[:index], source, generation_prompt=True)
            prompt, (answer, trained) = tokenize(tokenizer, before), _ended(message.token_ids, end_ids)
            pieces.append(Encoded(prompt + answer, [0] * len(prompt) + trained))
    return pieces


def _ended(token_ids: list[int], end_ids: list[int]) -> tuple[list[int], list[int]]:
    """Return generated ids that end with the end-of-turn token, and their loss mask: 0 on that token if it
    had to be added."""
    missing = end_ids if end_ids and token_ids[-len(end_ids) :] != end_ids else []
    return [*token_ids, *missing], [1] * len(token_ids) + [0] * len(missing)


def _encode_chat(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> tuple[Encoded, dict[int, int]]:
    """Return an encoded chat and, by index of each user message, the token at which its exchange starts."""
    messages = adapt_roles(tokenizer, conversation.messages)
    source = conversation.source
    text = render(tokenizer, messages, source)
    spans = answer_spans(tokenizer, messages, text, source)
    ids, lefts, rights = _with_offsets(tokenizer, text)
    end_ids = end_of_turn_ids(tokenizer)

    out, mask, starts = [], [], {}
    position = 0  # in ids
    after_answer = 0  # in out
    shift = len(conversation.messages) - len(messages)  # a system turn joined to the first user turn
    for index, message in enumerate(messages):
        if message.role == "user":
            starts[index + shift] = after_answer
        if index not in spans:
            continue
        start, end = spans[index]
        first, last = bisect_right(rights, start), bisect_left(lefts, end)
        prompt, answer, rest = ids[position:first], ids[first:last], []
        inside = lefts[first] >= start if answer else True
        if not inside:
            # One token spans the start of the answer. At inference the prompt ends there, so prompt and
            # answer are tokenized separately.
            prompt = prompt + tokenize(tokenizer, text[lefts[first] : start])
            answer = tokenize(tokenizer, text[start:end])
        trained = [1] * len(answer)
        if message.token_ids is not None:
            _check_ids(tokenizer, message, f"{source}: turn {index + 1}")
            answer, trained = _ended(message.token_ids, end_ids)
        if (message.token_ids is not None or not inside) and last > first and rights[last - 1] > end:
            rest = tokenize(tokenizer, text[end : rights[last - 1]])  # rest of a token that spans the end
        out += prompt + answer
        mask += [0] * len(prompt) + trained
        after_answer = len(out)
        out += rest
        mask += [0] * len(rest)
        position = last
    out += ids[position:]
    mask += [0] * (len(ids) - position)
    return Encoded(out, mask), starts


def _with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int], list[int]]:
    """Return a text's ids, and each token's left and right edge in the text; edges never decrease.

    Some byte-level tokenizers trim spaces from offsets (a token of spaces gets an empty span at its end), so
    a token's left edge is at most the right edge of the previous one.
    """
    try:
        encoding = tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
    except NotImplementedError:
        raise UserError(
            f"{tokenizer.name_or_path}: must be a tokenizer with character offsets; convert it to "
            "tokenizer.json (transformers does when it saves a fast tokenizer)"
        ) from None
    offsets = encoding["offset_mapping"]
    rights = [end for _, end in offsets]
    lefts = list(map(min, (start for start, _ in offsets), [0, *rights]))
    return encoding["input_ids"], lefts, rights


def _check_ids(tokenizer: PreTrainedTokenizerBase, message: Message, where: str) -> None:
    """Require that generated ids decode to the text of their turn.

    Raises:
        UserError: they do not.
    """
    remedy = "use the tokenizer that made them, or remove the ids to have the text tokenized"
    text = decode_answer(tokenizer, message.token_ids, where, remedy)
    if _words(text) != _words(message.content):
        raise _other_text(message, text, where, remedy)


def _other_text(message: Message, text: str, where: str, remedy: str) -> UserError:
    return UserError(
        f"{where}: token_ids: must decode to {message.content[:40]!r}, got {text[:40]!r}; {remedy}"
    )


def fill_texts(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, hash: str) -> None:
    """Set the text of answers from their token ids: where the file has ids alone, or where, in a tree of
    thoughts, the text was cut before a stop text that the ids still have.

    Args:
        hash: of the tokenizer.

    Raises:
        UserError: ids of another tokenizer, or ids that this one does not have.
    """
    for number, message in enumerate(conversation.messages, 1):
        if message.token_ids and (not message.content or conversation.tree_of):
            where, remedy = f"{conversation.source}: turn {number}", "use the tokenizer that made them"
            if conversation.tokenizer not in (None, hash):
                raise UserError(
                    f"{where}: token_ids: must be of the target's tokenizer, got another's; let the target "
                    "answer these prompts (drafttrain regenerate)"
                )
            text = decode_answer(tokenizer, message.token_ids, where, remedy)
            if not _words(text).startswith(_words(message.content)):
                raise _other_text(message, text, where, remedy)
            message.content = text


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int], where: str, remedy: str) -> str:
    """Return the text of generated ids, without the end-of-turn token.

    Raises:
        UserError: ids that the tokenizer does not have; the message ends with `remedy`.
    """
    if not all(isinstance(token, int) and 0 <= token < len(tokenizer) for token in ids):
        raise UserError(f"{where}: token_ids: must be in 0..{len(tokenizer) - 1}; {remedy}")
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _words(text: str) -> str:
    # An answer cut off within a character decodes to U+FFFD, which some programs strip.
    return "".join(text.replace("\ufffd", "").split())


def _text_pieces(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, max_length: int | None
) -> list[Encoded]:
    """Encode a document in windows of `max_length` tokens, each with the tokenizer's special tokens."""
    options = {"return_attention_mask": False, "return_special_tokens_mask": True, "verbose": False}
    if max_length is not None:
        options |= {"truncation": True, "max_length": max_length, "return_overflowing_tokens": True}
    windows = tokenizer([conversation.messages[0].content], **options)
    return [
        Encoded(ids, [1 - special for special in mask])
        for ids, mask in zip(windows["input_ids"], windows["special_tokens_mask"], strict=True)
    ]
