"""Speculative decoding inside `generate` of transformers:

    model.generate(**inputs, custom_generate=drafttrain.generate, drafter="FOLDER or user/name")

transformers prepares inputs, logits processors and stopping criteria as for its own loop (`_sample`), and
then calls our `generate` in place of that loop.
"""

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import EllipsisType, FrameType
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
)
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from drafttrain.decoder import SpeculativeDecoder
from drafttrain.drafters.config import drafter_folder
from drafttrain.inference.acceptance import AcceptanceRule, accept_greedy
from drafttrain.inference.as_transformers import AsTransformers, criteria_of_rows, ends_here, require
from drafttrain.inference.decode import Request, Row, decode_requests
from drafttrain.inference.given import as_target, file_times
from drafttrain.inference.text import shown
from drafttrain.target_lm import attention
from drafttrain.target_lm.cache import CACHE_ARGUMENT
from drafttrain.target_lm.loading import load_tokenizer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.twin import Look, is_plain, native_copy
from drafttrain.trees.interface import TreePolicy
from drafttrain.utils.errors import UserError

LOADED = "_drafttrain"  # attribute of a model that holds its `Loaded`
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
NO_GRAD = "decorate_context"  # name of the function that torch.no_grad puts around it
MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
HUB = "token", "cache_dir", "force_download", "local_files_only", "proxies"
CACHES = None, "dynamic", "dynamic_full"
STRETCHING = "dynamic", "longrope"  # rope types that rotate keys differently beyond some position
ROOM = 1024  # new tokens that KV caches are allocated for at first; few outputs reach their limit
KEPT = 4  # decoders kept per model; drafters are large
TAKEN = {"attention_mask", "position_ids", CACHE_ARGUMENT, "use_cache", "logits_to_keep", "cache_position"}


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | None = None,
    tree: str | TreePolicy | None = None,
    ngrams: str | None = None,
    calibration: str | None = None,
    native: bool = True,
    stop_strings: str | Sequence[str] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode with drafts in place of `GenerationMixin._sample`, with the same greedy output.

    For one row and the same state of torch's generator, sampled output is the same too; for several rows it
    has the same distribution. Both hold in fp32: in lower precision `generate` rounds differently, and texts
    diverge where two tokens are nearly tied. The drafter is loaded in the first call for a model, which stays
    unchanged. Calls for one model from several threads take turns. On a CPU a native copy of the weights
    decodes, several times faster than the model's modules, until the weights change.

    Args:
        input_ids: int64 [B, L], padded on the left.
        drafter: folder or Hub id of a bundle, or folder of a small LM. None: Self-Draft, from n-grams.
        tree: growth policy of the drafts, as `SpeculativeDecoder.from_pretrained` takes it.
        ngrams, calibration: folders, as `SpeculativeDecoder.from_pretrained` takes them.
        native: decode with a native copy if the model can run natively (`target_lm/twin.py`). False: run the
            model's own modules, which needs no memory for a copy.
        stop_strings: strings that end an output, in the text of the call's `tokenizer`; by default of the one
            in the model's folder or repository.
        model_kwargs: model inputs that transformers has prepared.

    Returns:
        int64 [B, L + longest output], padded on the right; or with return_dict_in_generate an output object,
        whose cache is None.

    Raises:
        UserError: an argument asks for something that speculative decoding does not support.
    """
    given = _tokenizer_of_caller()
    find = _loaded(model).tokenizer_of
    _add_stop_strings(stopping_criteria, stop_strings, lambda: find(model, None) if given is None else given)
    others = (drafter, tree, ngrams, calibration, native)
    return _generate(
        model, input_ids, logits_processor, stopping_criteria, generation_config, *others, **model_kwargs
    )


def _generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | None = None,
    tree: str | TreePolicy | None = None,
    ngrams: str | None = None,
    calibration: str | None = None,
    native: bool = True,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Run `generate` once stop strings have become criteria. It has no argument `stop_strings`: transformers
    passes them to a function that has one, and otherwise puts them into the generation config."""
    began, streamer = time.time(), _of_caller("streamer")
    _refuse(model, input_ids, stopping_criteria, generation_config, model_kwargs, streamer)
    loaded = _loaded(model)
    with loaded.lock, _own_attention(model):
        tokenizer = loaded.tokenizer_of(model, _tokenizer_of_caller())
        decoder = loaded.decoder(model, tokenizer, native, drafter, tree, ngrams, calibration)
        texts = list(input_ids.long())  # of each row: padding, prompt, output so far
        criteria = criteria_of_rows(stopping_criteria, texts, time.time() - began)
        rule: AcceptanceRule = accept_greedy
        if logits_processor or generation_config.do_sample or generation_config.return_dict_in_generate:
            size = decoder.target.vocab_size
            rule = AsTransformers.of(texts, logits_processor, criteria, generation_config, size)
        # a length criterion of the caller replaces the config's
        longest = stopping_criteria.max_length or generation_config.max_length
        limit = max(1, longest - input_ids.shape[1])
        mask = model_kwargs.get("attention_mask")
        kept = torch.ones_like(input_ids) if mask is None else mask
        requests = [Request(ids[row > 0].tolist(), limit) for ids, row in zip(texts, kept)]
        for rows in decode_requests(
            decoder.target,
            decoder.proposer,
            requests,
            len(requests),
            input_ids.shape[1] + min(limit, ROOM),
            stop=(),
            accept=rule,
        ):
            for row in rows:
                if row.finish_reason == "not_finite":
                    raise UserError(f"{decoder.target.name}: logits must be finite, got NaN or infinity")
                texts[row.number] = _emit(row, texts[row.number], criteria[row.number], rule, streamer)
    if streamer is not None:
        streamer.end()
    return _output(texts, rule, generation_config)


def generate_of_repository(
    model: PreTrainedModel,
    drafter: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | Sequence[str] | None | EllipsisType = ...,
    stopping_criteria: StoppingCriteriaList | None = None,
    revision: str | None = None,
    **arguments: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Run the whole of `generate` for `custom_generate="user/drafter"`: the entry point of the
    `custom_generate/generate.py` that is published with a drafter.

    Args:
        stop_strings: strings that end an output; they need the tokenizer. Default: the generation config's.
        revision: revision of the drafter on the Hub.
        arguments: all other arguments of `generate`.

    Raises:
        UserError: as `generate`, or there is no drafter.
    """
    if drafter is None:
        raise UserError('drafter: must be given, got none; add drafter="FOLDER or user/name"')
    for name in HUB:  # transformers has loaded this code with them, and passes them on
        if arguments.pop(name, None):
            raise UserError(
                f"{name}: must be left out with a drafter, got it; set HF_TOKEN, HF_HOME or "
                "HF_HUB_OFFLINE in the environment"
            )
    if revision is not None:
        free = not os.path.isdir(drafter) and "@" not in drafter
        require(free, "revision", "left out with a folder or name@revision as drafter", revision)
        drafter = f"{drafter}@{revision}"
    criteria = StoppingCriteriaList(stopping_criteria or [])
    configs = [arguments.get("generation_config"), model.generation_config]
    healing = arguments.get("token_healing", any(one and one.token_healing for one in configs))
    require(not healing, "token_healing", "off", True)
    if stop_strings is ...:
        stop_strings = next((one.stop_strings for one in configs if one and one.stop_strings), None)
    arguments["stop_strings"] = None  # else transformers asks for the tokenizer
    _add_stop_strings(criteria, stop_strings, lambda: tokenizer)
    arguments |= {"tokenizer": tokenizer, "drafter": drafter, "stopping_criteria": criteria}
    return model.generate(custom_generate=_generate, **arguments)


def _add_stop_strings(
    criteria: StoppingCriteriaList,
    strings: str | Sequence[str] | None,
    tokenizer: Callable[[], PreTrainedTokenizerBase | None],
) -> None:
    """Add the criterion that ends an output at these strings, unless the caller has passed one.

    Raises:
        UserError: there is no tokenizer, or something else in its place.
    """
    if strings and not any(type(one) is StopStringCriteria for one in criteria):
        if (found := tokenizer()) is None:
            raise UserError("tokenizer: must be given with stop_strings, got none")
        _require_tokenizer(found)
        criteria.append(StopStringCriteria(found, strings))


def _require_tokenizer(given: object) -> None:
    is_one = isinstance(given, PreTrainedTokenizerBase)
    require(is_one, "tokenizer", "one of transformers", shown(given))


def _emit(
    row: Row,
    text: torch.Tensor,
    criteria: StoppingCriteriaList,
    rule: AcceptanceRule,
    streamer: Any,
) -> torch.Tensor:
    """Append a row's new tokens to its text, up to the one at which a stopping criterion ends the row."""
    judged = isinstance(rule, AsTransformers)  # the rule applies criteria itself as it chooses tokens
    for token in row.tokens:
        text = torch.cat([text, text.new_tensor([token])])
        if streamer is not None:
            streamer.put(text[-1:].cpu())
        if not judged and ends_here(criteria, text, None):
            row.finish_reason = "stop"
            break
    if judged and rule.ended[row.number]:
        row.finish_reason = "stop"
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
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=rule.scores, logits=rule.logits)


def _loaded(model: PreTrainedModel) -> "Loaded":
    return model.__dict__.setdefault(LOADED, Loaded())


class Loaded:
    """Cache of a model's last decoders by the arguments of `generate`. Copies of the model start without any.

    Attributes:
        lock: held by the thread that is decoding.
        copied: what the model looked like when it was copied, and its native copy; None without a copy.
        tokenizer: the model's; `given` is the same object if a caller had to pass it.
        copies: whether to use a native copy; False if none can be made or the model changes, as in training.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.copied: tuple[Look, FrozenTarget] | None = None
        self.copies = True
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.given: PreTrainedTokenizerBase | None = None
        self.decoders: dict[tuple, tuple[list, SpeculativeDecoder]] = {}  # each with parts of the model

    def __reduce__(self) -> tuple:
        return Loaded, ()

    def decoder(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        native: bool,
        drafter: str | None,
        tree: str | TreePolicy | None,
        ngrams: str | None,
        calibration: str | None,
    ) -> SpeculativeDecoder:
        """Return the decoder for these arguments, loaded again if the model's head, device, dtype, forward,
        hooks or the files of a folder have changed, or if `tree` is another policy of the same `repr`.

        Raises:
            UserError: the drafter does not fit the model, or there is none of this name.
        """
        for name, place in (("drafter", drafter), ("ngrams", ngrams), ("calibration", calibration)):
            require(isinstance(place, str | os.PathLike | None), name, "a folder or Hub id", shown(place))
        target = self.native(model, tokenizer) if native else None
        key = target is None, drafter, repr(tree), ngrams, calibration  # policies cannot be hashed
        parts = [model.base_model, model.get_input_embeddings(), model.get_output_embeddings()]
        hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]  # no decoder calls them
        parts += [model.device, model.dtype, tree, vars(model).get("forward"), hooks]
        parts += file_times(drafter_folder(place) for place in (drafter, ngrams, calibration) if place)
        known = self.decoders.pop(key, None)
        if known is None or known[0] != parts:
            known = parts, _load(model, target, tokenizer, drafter, tree, ngrams, calibration)
        self.decoders[key] = known  # most recent last
        while len(self.decoders) > KEPT:
            del self.decoders[next(iter(self.decoders))]
        return known[1]

    def tokenizer_of(
        self, model: PreTrainedModel, given: PreTrainedTokenizerBase | None
    ) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the model's folder or repository, found in the first call.

        Args:
            given: tokenizer to return for a model that has none there.

        Raises:
            UserError: there is none, and none is given.
        """
        if None not in (given, self.given) and given is not self.given:  # another one instead of a wrong one
            self.tokenizer = self.copied = None
            self.decoders.clear()
        if self.tokenizer is None:
            problem = "the model has no name_or_path"
            if model.name_or_path:
                try:
                    self.tokenizer = load_tokenizer(model.name_or_path)
                    return self.tokenizer
                except UserError as error:
                    problem = str(error).partition(";")[0]
            if given is None:
                raise UserError(f"tokenizer: must be given, got none, and {problem}; add tokenizer=TOKENIZER")
            _require_tokenizer(given)
            self.tokenizer = self.given = given
        return self.tokenizer

    def native(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> FrozenTarget | None:
        """Return the native copy of the model, made in the first call; None if its own modules have to run.
        They do once the weights have changed: making a copy for every training step would not pay."""
        if not (self.copies and is_plain(model)):
            return None
        look = Look.at(model)
        if self.copied is None:
            copied = native_copy(model, tokenizer, model.name_or_path or type(model).__name__)
            if copied is not None:
                del vars(copied.model)[LOADED]  # a reference cycle would keep both alive after their last use
            self.copied = copied and (look, copied)
            self.copies = copied is not None
        elif self.copied[0] != look:
            self.copied, self.copies = None, False
            self.decoders.clear()
        return self.copied and self.copied[1]


def _load(
    model: PreTrainedModel,
    target: FrozenTarget | None,
    tokenizer: PreTrainedTokenizerBase,
    drafter: str | None,
    tree: str | TreePolicy | None,
    *others: str | None,
) -> SpeculativeDecoder:
    """Load a decoder without changing the model's training modes or torch's generator.

    Args:
        target: native copy of the model; None: decode with its own modules.
    """
    ngrams, calibration = others
    training = [module for module in model.modules() if module.training]
    try:
        with torch.random.fork_rng(devices=[]):  # a small LM is initialized before its weights are read
            target = as_target(model, tokenizer) if target is None else target
            if drafter is None:
                is_alone = tree is None and calibration is None
                require(is_alone, "drafter", "given with tree or calibration", None)
                decoder = SpeculativeDecoder.self_draft(target, ngrams)
            else:
                decoder = SpeculativeDecoder.from_pretrained(
                    drafter, target=target, tree=tree, calibration=calibration, ngrams=ngrams
                )
    finally:
        for module in training:
            module.training = True
    if decoder.proposer.draws:
        raise UserError(f"tree: must have deterministic candidates in generate, got {tree}")
    return decoder


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use our attention inside the block if the model supports it; restore the model's own afterwards."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    attention.use(model)
    try:
        yield
    finally:
        config._attn_implementation = before


def _refuse(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any,
) -> None:
    """Refuse models, inputs and settings that speculative decoding does not support.

    Raises:
        UserError: one of them is given.
    """
    mode = config.get_generation_mode(_of_caller("assistant_model"))
    require(mode in MODES, "generation mode", "greedy search or sampling", mode.value)
    require(not model.config.is_encoder_decoder, "model", "decoder-only", "an encoder-decoder model")
    require(not _of_caller("synced_gpus"), "synced_gpus", "off", True)
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    split = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model) or len(places) > 1
    require(not split, "model", "whole on one device", "one that ZeRO-3, FSDP or device_map splits")
    require(not torch.is_autocast_enabled(model.device.type), "autocast", "off", "on")
    require(config.use_cache, "use_cache", "on", config.use_cache)
    chunk = config.prefill_chunk_size
    require(chunk is None, "prefill_chunk_size", "null, as long prompts are split already", chunk)
    require(
        config.cache_implementation in CACHES, "cache_implementation", "dynamic", config.cache_implementation
    )
    for name in ("output_attentions", "output_hidden_states"):
        require(not getattr(config, name), name, "off, as a draft's are computed otherwise", True)
    one = len(input_ids) == 1
    for name in ("output_scores", "output_logits"):
        wanted = config.return_dict_in_generate and getattr(config, name)
        require(one or not wanted, name, "off with several rows", len(input_ids))
    require(one or streamer is None, "streamer", "left out with several rows", len(input_ids))
    # without a stop token transformers goes on with rows that have ended until all have
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    alike = all(isinstance(criterion, MaxLengthCriteria) for criterion in criteria)
    require(one or ends or alike, "eos_token_id", "given with stopping criteria and several rows", None)
    require(input_ids.shape[1] > 0, "input_ids", "at least one token", 0)
    text = model.config.get_text_config()
    known = bool(((input_ids >= 0) & (input_ids < text.vocab_size)).all())
    require(known, "input_ids", f"from 0 to {text.vocab_size - 1}", "others")
    rope, longest = getattr(text, "rope_parameters", None) or {}, criteria.max_length or config.max_length
    for one in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))):
        if one.get("rope_type") in STRETCHING:  # a tree's nodes would cross the limit before the text does
            limit = one.get("original_max_position_embeddings") or text.max_position_embeddings
            require(longest <= limit, "max_length", f"at most {limit} with this rope", longest)
    given = _of_caller("kwargs") or {}
    for name in ("past_key_values", CACHE_ARGUMENT):  # transformers would write to it
        require(given.get(name) is None, name, "left out", type(given.get(name)).__name__)
    prepare = vars(model).get("prepare_inputs_for_generation")  # PEFT's virtual tokens come in by it
    own = prepare is None or getattr(prepare, "__self__", None) is model
    require(own, "model", "one that prepares its inputs itself", prepare)
    others = [name for name, value in model_kwargs.items() if value is not None and name not in TAKEN]
    require(not others, "inputs", "token ids alone", ", ".join(others))
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        padded = mask.shape == input_ids.shape
        padded = padded and bool((mask.diff(dim=1) >= 0).all()) and bool((mask[:, -1] > 0).all())
        require(padded, "attention_mask", "[B, L] with padding on the left alone", list(mask.shape))
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        kept = torch.ones_like(input_ids) if mask is None else mask
        counted = positions.shape[-1] == input_ids.shape[1] and positions.ndim == 2
        counted = counted and bool((positions == kept.cumsum(1) - 1)[kept > 0].all())
        require(counted, "position_ids", "0, 1, 2, … in each row", "others")


def _of_caller(name: str) -> Any:
    """Return a local variable of the transformers `generate` that has called ours. transformers (5.23) passes
    named arguments of its own loop (`streamer`, `synced_gpus`) to that loop only."""
    frame = _frame_of_generate()
    return None if frame is None else frame.f_locals.get(name)


def _tokenizer_of_caller() -> Any:
    """Return the `tokenizer` that the transformers `generate` got. That removes it (5.24) before it looks for
    our arguments; the function of its `torch.no_grad` keeps it."""
    frame = _frame_of_generate()
    around = None if frame is None else frame.f_back
    if around is None or around.f_code.co_name != NO_GRAD:  # in other frames kwargs may be for another call
        return None
    return around.f_locals.get("kwargs", {}).get("tokenizer")


def _frame_of_generate() -> FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return frame
