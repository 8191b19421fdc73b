"""Choose tokens as `generate` of transformers does: by its logits processors, stopping criteria and draws."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from drafttrain.inference.acceptance import AcceptanceRule, Accepted
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError, brief

BY_ROW = "prompt_ignore_length", "encoder_input_ids", "generated_ngrams"  # per-row values of processors


@dataclass
class AsTransformers(AcceptanceRule):
    """Acceptance rule that chooses tokens as `GenerationMixin._sample` does: each from the target's logits
    after the row's logits processors, greedily or with torch's generator, until a criterion ends the row.

    Every emitted token takes one draw, in order, so a single row gets the same draws as without drafts.

    Attributes:
        texts: token ids of each row, int64 [L], padding and prompt first; chosen tokens are appended.
        processors: logits processors of each row.
        criteria: stopping criteria of each row.
        samples: draw tokens; False: take the most probable one.
        scores, logits: processed and raw logits of the chosen tokens, fp32 [1, V] each, of the only row;
            None: not requested.
        ended: True for each row that a criterion has ended.
    """

    texts: list[torch.Tensor]
    processors: list[LogitsProcessorList]
    criteria: list[StoppingCriteriaList]
    samples: bool
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...] | None
    ended: list[bool]
    numbers: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        texts: Sequence[torch.Tensor],
        processors: LogitsProcessorList,
        criteria: list[StoppingCriteriaList],
        config: GenerationConfig,
        vocab_size: int,
    ) -> "AsTransformers":
        """Build the rule for texts, int64 [L] each, from what transformers has prepared for the whole batch.

        Args:
            criteria: of each row (`criteria_of_rows`).

        Raises:
            UserError: a processor runs the model itself, or its scores for a row depend on the other rows.
        """
        if len(texts) > 1:
            shape, generator = (len(texts), vocab_size), torch.Generator().manual_seed(0)
            noise = torch.randn(shape, generator=generator, dtype=torch.float).to(texts[0].device)  # [B, V]
            for one in processors:
                _require_rows(
                    one, "logits_processor", texts, lambda own, ids, rows: own(ids, noise[rows].clone())
                )
        own = [_of_row(processors, row, len(texts)) for row in range(len(texts))]
        scores, logits = (
            () if config.return_dict_in_generate and asked else None
            for asked in (config.output_scores, config.output_logits)
        )
        return cls(list(texts), own, criteria, bool(config.do_sample), scores, logits, [False for _ in texts])

    def set_active(self, numbers: Sequence[int]) -> None:
        """Set the rows that the next trees belong to."""
        self.numbers = numbers

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        paths, tokens = [], []
        for row, number in enumerate(self.numbers):
            path, token = self._walk(tree, logits[row], row, number)
            paths.append(path)
            tokens.append(token)
        return Accepted.of(paths, tokens, tree.tokens.device)

    def _walk(self, tree: TokenTree, logits: torch.Tensor, row: int, number: int) -> tuple[list[int], int]:
        """Return a row's accepted nodes from the root on, and the token after them, from logits [n, V]."""
        size = int(tree.sizes[row])
        drafted = list(zip(tree.parents[row, :size].tolist(), tree.tokens[row, :size].tolist()))
        path = [0]
        while True:
            token = self._choose(logits[path[-1]], number)
            child = next((i for i in range(1, size) if drafted[i] == (path[-1], token)), None)
            if child is None or self.ended[number]:
                return path, token
            path.append(child)

    def _choose(self, logits: torch.Tensor, number: int) -> int:
        text = self.texts[number][None]  # [1, L]
        # [1, V] on the text's device, as processors are; they get a clone, as they may write into it
        raw = logits[None].to(text.device, torch.float32, copy=True)
        scores = self.processors[number](text, raw.clone())  # [1, V]
        require(scores.shape == raw.shape, "logits_processor", "of one row at a time", list(scores.shape))
        token, best = scores.argmax(-1), scores.max()  # [1], []
        # raises torch's own error where processors leave no token or make NaN of finite logits
        if self.samples and (best.isfinite() or best == -torch.inf or raw[0, token].isfinite()):
            token = torch.multinomial(scores.softmax(-1), 1)[0]  # [1]
        self.texts[number] = torch.cat([self.texts[number], token])
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        self.ended[number] = ends_here(self.criteria[number], self.texts[number], self.scores)
        return int(token)


def criteria_of_rows(
    criteria: StoppingCriteriaList, texts: Sequence[torch.Tensor], loading: float
) -> list[StoppingCriteriaList]:
    """Return the stopping criteria of each row of texts, int64 [L] each: copies of a caller's own, which may
    keep state.

    Args:
        loading: seconds since transformers created them, which do not count for a time limit.

    Raises:
        UserError: whether a criterion ends a row depends on the other rows.
    """
    for one in criteria if len(texts) > 1 else ():
        _require_rows(one, "stopping_criteria", texts, lambda own, ids, rows: own(ids, None))

    def for_row(one: StoppingCriteria) -> StoppingCriteria:
        if isinstance(one, MaxTimeCriteria):
            one = copy.copy(one)
            one.initial_timestamp += loading
        return _copied(one) if len(texts) > 1 and not _is_known(one) else one

    return [StoppingCriteriaList(map(for_row, criteria)) for _ in texts]


def ends_here(
    criteria: StoppingCriteriaList, text: torch.Tensor, scores: tuple[torch.Tensor, ...] | None
) -> bool:
    """Return whether a criterion ends a row of text [L] at its last token."""
    ended = criteria(text[None], scores)  # [1]
    require(ended.numel() == 1, "stopping_criteria", "of one row at a time", list(ended.shape))
    return bool(ended)


def _is_known(one: Callable) -> bool:
    """Return whether a processor or criterion is one of transformers, which treat each row separately."""
    return type(one).__module__.startswith("transformers.")


def _copied(one: Callable) -> Callable:
    """Return a deep copy of a caller's processor or criterion that shares models, tokenizers and attributes
    that cannot be copied."""
    heavy = {id(value): value for value in _heavy(one, set())}
    try:
        return copy.deepcopy(one, dict(heavy))
    except Exception:  # of any kind: it may hold a lock or a generator
        twin = copy.copy(one)
    for name, value in getattr(one, "__dict__", {}).items() if twin is not one else ():  # not a function
        with contextlib.suppress(Exception):
            vars(twin)[name] = copy.deepcopy(value, dict(heavy))
    return twin


def _heavy(value: object, seen: set[int]) -> Iterator[object]:
    """Yield the models and tokenizers that an object holds, at any depth."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | PreTrainedTokenizerBase):
        yield value
        return
    inner = list(value.values()) if isinstance(value, dict) else []
    inner += value if isinstance(value, list | tuple | set) else ()
    inner += getattr(value, "__dict__", {}).values()
    for one in (*inner, getattr(value, "__self__", None)):  # of a bound method
        yield from _heavy(one, seen)


def _require_rows(
    one: Callable, what: str, texts: Sequence[torch.Tensor], call: Callable[..., torch.Tensor]
) -> None:
    """Require that a caller's processor or criterion gives the same results for several rows together as for
    each row alone.

    Args:
        what: name of the argument, for the error.
        texts: int64 [L] each.
        call: `call(copy, ids [b, L], rows)` returns the results [b, …] of a copy for a slice of the rows.

    Raises:
        UserError: it does not.
    """
    if _is_known(one):
        return
    ids, problem = torch.stack(list(texts)), type(one).__name__  # [B, L]
    near = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
    try:
        with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else []):
            whole, again = (call(_copied(one), ids, slice(None)).float() for _ in range(2))  # [B, …]
            parts = [call(_copied(one), ids[i : i + 1], slice(i, i + 1)).float() for i in range(len(ids))]
        alike = whole.shape[0] == len(ids) and all(part.shape[0] == 1 for part in parts)
        if torch.allclose(whole, again, **near):  # else it draws, and no two calls agree
            alike = alike and torch.allclose(whole, torch.cat(parts), **near)
    except Exception as error:  # raised by the caller's code
        alike, problem = False, f"{problem} ({brief(error)})"
    require(alike, what, "of one row at a time with several rows", problem)


def require(is_so: bool, what: str, constraint: str, got: object) -> None:
    """Raise a UserError that names `what`, its constraint and what was given, unless `is_so`."""
    if not is_so:
        raise UserError(
            f"{what}: must be {constraint}, got {got}; change it, or generate without custom_generate"
        )


def _of_row(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """Return the processors for one row of the batch; of several rows, each has copies.

    Raises:
        UserError: one runs the model itself.
    """
    own = LogitsProcessorList()
    for one in processors:
        if isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            require(False, "guidance_scale", "null", one.guidance_scale)
        if rows > 1:
            one = copy.copy(one) if _is_known(one) else _copied(one)  # some keep state
            if isinstance(one, PrefixConstrainedLogitsProcessor):
                # its function takes the number of the prompt, which may have several rows
                prompt, one._num_beams = row // one._num_beams, 1
                one._prefix_allowed_tokens_fn = partial(_for_prompt, one._prefix_allowed_tokens_fn, prompt)
            for name in BY_ROW:
                if isinstance(values := getattr(one, name, None), torch.Tensor | list):
                    prompt = row * len(values) // rows
                    setattr(one, name, values[prompt : prompt + 1])
                    one.batch_size = 1
        own.append(one)
    return own


def _for_prompt(allowed: Callable[[int, torch.Tensor], list[int]], prompt: int, _: int, text: torch.Tensor):
    return allowed(prompt, text)
