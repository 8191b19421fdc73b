"""Drafted decoding inside `generate` of transformers:

    model.generate(**inputs, custom_generate=drafttrain.generate, drafter="FOLDER or user/name")

transformers prepares inputs, logits processors and stopping criteria as for its own loop (`_sample`), and
calls `generate` here in its place.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from drafttrain.decoder import SpeculativeDecoder
from drafttrain.inference.acceptance import AcceptanceRule, Accepted, accept_greedy
from drafttrain.inference.decode import Request, Row, decode_requests
from drafttrain.target_lm.cache import CACHE_ARGUMENT
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

LOADED = "_drafttrain_decoders"  # attribute of a model: its decoders by what they were loaded with
MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
CACHES = None, "dynamic", "dynamic_full"
BY_ROW = "prompt_ignore_length", "encoder_input_ids", "generated_ngrams"  # what processors keep for each row
TAKEN = {"attention_mask", "position_ids", CACHE_ARGUMENT, "use_cache", "logits_to_keep", "cache_position"}


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | None = None,
    tree: str | None = None,
    ngrams: str | None = None,
    calibration: str | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode with drafts in place of `GenerationMixin._sample`, with the same greedy output; with one row the
    same sampled output for the same state of torch's generator, with several the same distribution.

    The drafter is loaded in the first call for a model, which stays unchanged.

    Args:
        input_ids: int64 [B, L], padded on the left.
        drafter: a bundle's folder or Hub id, or that of a small LM. None: n-grams draft.
        tree: growth policy of the drafts, as `SpeculativeDecoder.from_pretrained` takes it.
        ngrams, calibration: folders, likewise.
        model_kwargs: what transformers has prepared for the model.

    Returns:
        int64 [B, L + longest output], padded on the right; or with return_dict_in_generate an output object,
        whose cache is None.

    Raises:
        UserError: something is asked for that drafted decoding does not do.
    """
    streamer = _of_caller("streamer")
    _refuse(model, input_ids, generation_config, model_kwargs, streamer)
    decoder = _decoder(model, drafter, tree, ngrams, calibration)
    texts = list(input_ids)  # of each row: padding, prompt, output so far
    rule: AcceptanceRule = accept_greedy
    if logits_processor or generation_config.do_sample or generation_config.return_dict_in_generate:
        rule = AsTransformers(
            list(texts),
            [_of_row(logits_processor, row, len(texts)) for row in range(len(texts))],
            bool(generation_config.do_sample),
        )
    limit = generation_config.max_length - input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones_like(input_ids) if mask is None else mask
    requests = [Request(ids[row > 0].tolist(), limit) for ids, row in zip(texts, kept)]
    for rows in decode_requests(
        decoder.target,
        decoder.proposer,
        requests,
        len(requests),
        generation_config.max_length,
        stop=(),
        accept=rule,
    ):
        for row in rows:
            if row.finish_reason == "not_finite":
                raise UserError(f"{decoder.target.name}: logits must be finite, got NaN or infinity")
            texts[row.number] = _emit(row, texts[row.number], stopping_criteria, rule, streamer)
    if streamer is not None:
        streamer.end()
    return _output(texts, rule, generation_config)


def generate_of_repository(
    model: PreTrainedModel,
    drafter: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | Sequence[str] | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **arguments: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Run the whole of `generate` for `custom_generate="user/drafter"`, as a published drafter's own
    `custom_generate/generate.py` does.

    Args:
        stop_strings: end an output, and need the tokenizer; transformers passes neither to a callable.
        arguments: all others of `generate`.

    Raises:
        UserError: as `generate`, or there is no drafter.
    """
    if drafter is None:
        raise UserError('drafter: must be given, got none; add drafter="FOLDER or user/name"')
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if stop_strings is not None:
        if tokenizer is None:
            raise UserError("tokenizer: must be given with stop_strings, got none")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return model.generate(custom_generate=generate, drafter=drafter, stopping_criteria=criteria, **arguments)


@dataclass
class AsTransformers(AcceptanceRule):
    """Choose tokens as `GenerationMixin._sample` does: from the scores that the logits processors make of the
    target's logits, each along the path of its own row, greedily or by torch's generator.

    Every emitted token takes one draw, in order. So one row draws what it would draw without drafts.

    Attributes:
        texts: of each row, int64 [L], padding and prompt first; they grow with what is chosen.
        processors: of each row.
        samples: draw, or take the best.
        scores, logits: of each row's tokens, processed and not, fp32 [V].
    """

    texts: list[torch.Tensor]
    processors: list[LogitsProcessorList]
    samples: bool
    scores: list[list[torch.Tensor]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    numbers: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.scores, self.logits = [[] for _ in self.texts], [[] for _ in self.texts]

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which rows the next trees are of."""
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
            if child is None:
                return path, token
            path.append(child)

    def _choose(self, logits: torch.Tensor, number: int) -> int:
        raw = logits[None].to(copy=True, dtype=torch.float32)  # [1, V]; processors may write into it
        text = self.texts[number][None].to(raw.device)  # [1, L]
        scores = self.processors[number](text, raw.clone())  # [1, V]
        if self.samples and raw.max().isfinite():
            token = torch.multinomial(scores.softmax(-1), 1)[0]  # [1]
        else:
            token = scores.argmax(-1)  # [1]
        self.texts[number] = torch.cat([self.texts[number], token.to(self.texts[number].device)])
        self.scores[number].append(scores[0])
        self.logits[number].append(raw[0])
        return int(token)


def _emit(
    row: Row,
    text: torch.Tensor,
    criteria: StoppingCriteriaList,
    rule: AcceptanceRule,
    streamer: Any,
) -> torch.Tensor:
    """Append a row's new tokens to its text, up to the one with which a criterion ends it."""
    begun = len(row.output) - len(row.tokens)
    for done, token in enumerate(row.tokens, begun + 1):
        text = torch.cat([text, text.new_tensor([token])])
        if streamer is not None:
            streamer.put(text[-1:].cpu())
        scores = None
        if isinstance(rule, AsTransformers):
            scores = tuple(one[None] for one in rule.scores[row.number][:done])
        if criteria(text[None], scores).all():
            row.finish_reason = "stop"
            break
    return text


def _output(
    texts: list[torch.Tensor], rule: AcceptanceRule, config: GenerationConfig
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    length = max(map(len, texts))
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    sequences = texts[0].new_full((len(texts), length), pad)  # [B, L]
    for row, text in zip(sequences, texts):
        row[: len(text)] = text
    if not config.return_dict_in_generate:
        return sequences
    made = {}
    for name, asked in (("scores", config.output_scores), ("logits", config.output_logits)):
        if asked:
            first = len(rule.texts[0]) - len(rule.scores[0])  # of the output
            made[name] = tuple(one[None] for one in getattr(rule, name)[0][: length - first])
    return GenerateDecoderOnlyOutput(sequences=sequences, **made)


def _decoder(model: PreTrainedModel, drafter: str | None, *how: str | None) -> SpeculativeDecoder:
    """Return the decoder of a model, loaded once, and leave the model as trainable as it was."""
    tree, ngrams, calibration = how
    found, key = model.__dict__.setdefault(LOADED, {}), (drafter, *how)
    if key not in found:
        trainable = [weight for weight in model.parameters() if weight.requires_grad]
        training = model.training
        try:
            if drafter is None:
                _require(
                    tree is None and calibration is None, "drafter", "given with tree or calibration", None
                )
                decoder = SpeculativeDecoder.self_draft(model, ngrams)
            else:
                decoder = SpeculativeDecoder.from_pretrained(
                    drafter, target=model, tree=tree, calibration=calibration, ngrams=ngrams
                )
        finally:
            model.train(training)
            for weight in trainable:
                weight.requires_grad_(True)
        if decoder.proposer.draws:
            raise UserError(f"tree: must have deterministic candidates in generate, got {tree}")
        found[key] = decoder
    return found[key]


def _refuse(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any,
) -> None:
    """Refuse what drafted decoding does not do.

    Raises:
        UserError: it is asked for.
    """
    mode = config.get_generation_mode(_of_caller("assistant_model", 3))
    _require(mode in MODES, "generation mode", "greedy search or sampling", mode.value)
    _require(not model.config.is_encoder_decoder, "model", "decoder-only", "an encoder-decoder model")
    _require(not _of_caller("synced_gpus", 3), "synced_gpus", "off", True)
    _require(config.use_cache, "use_cache", "on", config.use_cache)
    _require(
        config.cache_implementation in CACHES, "cache_implementation", "dynamic", config.cache_implementation
    )
    for name in ("output_attentions", "output_hidden_states"):
        _require(not getattr(config, name), name, "off, as a draft's are computed otherwise", True)
    one = len(input_ids) == 1
    for name in ("output_scores", "output_logits"):
        wanted = config.return_dict_in_generate and getattr(config, name)
        _require(one or not wanted, name, "off with several rows", len(input_ids))
    _require(one or streamer is None, "streamer", "left out with several rows", len(input_ids))
    _require(input_ids.shape[1] > 0, "input_ids", "at least one token", 0)
    cache = model_kwargs.get(CACHE_ARGUMENT)
    length = 0 if cache is None else int(cache.get_seq_length())
    _require(length == 0, CACHE_ARGUMENT, "empty", f"{length} tokens")
    others = [name for name, value in model_kwargs.items() if value is not None and name not in TAKEN]
    _require(not others, "inputs", "token ids alone", ", ".join(others))
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        padded = mask.ndim == 2 and bool((mask.diff(dim=1) >= 0).all()) and bool((mask[:, -1] > 0).all())
        _require(padded, "attention_mask", "[B, L] with padding on the left alone", list(mask.shape))
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        kept = torch.ones_like(input_ids) if mask is None else mask
        _require(
            bool((positions == kept.cumsum(1) - 1)[kept > 0].all()),
            "position_ids",
            "0, 1, 2, … in each row",
            "others",
        )


def _require(is_so: bool, what: str, constraint: str, got: object) -> None:
    if not is_so:
        raise UserError(
            f"{what}: must be {constraint}, got {got}; change it, or generate without custom_generate"
        )


def _of_row(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """Return the processors for one of several rows alone.

    Raises:
        UserError: one runs the model itself.
    """
    own = LogitsProcessorList()
    for one in processors:
        if isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            _require(False, "guidance_scale", "null", one.guidance_scale)
        if rows > 1:
            one = copy.copy(one)  # some keep what they have seen
            if isinstance(one, PrefixConstrainedLogitsProcessor):  # its function is asked for a row by number
                one._prefix_allowed_tokens_fn = partial(_for_row, one._prefix_allowed_tokens_fn, row)
            for name in BY_ROW:
                if (
                    isinstance(values := getattr(one, name, None), torch.Tensor | list)
                    and len(values) == rows
                ):
                    setattr(one, name, values[row : row + 1])
        own.append(one)
    return own


def _for_row(allowed: Callable[[int, torch.Tensor], list[int]], row: int, _: int, text: torch.Tensor):
    return allowed(row, text)


def _of_caller(name: str, depth: int = 2) -> Any:
    """Return an argument of the `generate` that has called ours. transformers (5.23) takes what its own loop
    knows by name (`streamer`, `synced_gpus`) out of the arguments and gives it to no other."""
    frame = sys._getframe(depth)
    return frame.f_locals.get(name) if frame.f_code.co_name == "generate" else None
