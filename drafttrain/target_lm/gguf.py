"""Convert a GGUF file into a Hugging Face folder: bf16 safetensors, config, tokenizer and chat template.

transformers reads the file. This module corrects what it gets wrong and refuses what cannot be corrected:

- the weights stay marked as quantized unless asked otherwise, and could then be neither saved nor trained;
- the tokenizer loses SmolLM2's split of digits, Llama 3's `ignore_merges`, Qwen2's NFC normalization and, in
  older versions of transformers, the rule whether BOS is put in front;
- the rows that pad the vocabulary become tokens called `[PAD151665]` and so on;
- a tied model whose file stores the output matrix a second time comes out untied;
- scaled rotary frequencies (`rope_freqs.weight`, `rope_factors_*`, `rope.scaling.*`) are ignored; so are, for
  some architectures, their base, the attention scale of Gemma 2 27B and the biases of Llama's layers.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, ReaderTensor, TokenType
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError, brief, first_line

# Values of `tokenizer.ggml.pre` whose token ids are known to come out right. Those of the first group split
# off every digit before GPT-2's pattern applies; transformers knows the patterns of the others.
SINGLE_DIGITS = {"smollm", "starcoder", "refact"}
LLAMA3 = {"llama-bpe", "llama3", "llama-v3"}
QWEN2 = {"qwen2", "deepseek-r1-qwen"}
KNOWN_PRE_TOKENIZERS = SINGLE_DIGITS | LLAMA3 | QWEN2 | {"gpt-2"}

# Rows of two quantizations of one matrix differ by 4 % (Q8_0 and Q5_0) to 9 % (Q6_K and Q4_K) of their norm,
# rows of an untied model's input and output matrices by more than 100 %.
SAME_ROW_TOLERANCE = 0.25

GEMMA2_27B = 46  # blocks: the only Gemma 2 whose attention is not scaled by its head size

ELSEWHERE = "use the model's original folder or Hub id instead"


def convert_gguf(path: str | os.PathLike, folder: str | os.PathLike) -> dict[str, Any]:
    """Write the model, tokenizer and chat template of a GGUF file into an existing folder.

    Returns:
        Facts about the model: architecture, number of parameters, whether head and embedding are tied, number
        of tokens and number of embedding rows.

    Raises:
        UserError: the file is missing, truncated or no GGUF, holds an architecture, tokenizer or rope that
            would be converted wrongly, or the disk is full.
    """
    path = Path(path)
    metadata, tensors = read_gguf(path)
    require_free_disk(folder, 2 * int(sum(t.n_elements for t in tensors.values())), "the converted model")
    _check_sizes(path, metadata, tensors)
    try:
        tokenizer = _load_tokenizer(path, metadata)
        model = _load_model(path, metadata, tensors)
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers raise many kinds for damaged files
        raise UserError(f"{path}: cannot be converted ({brief(error)}); {ELSEWHERE}") from None
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(f"{path}: {len(tokenizer)} tokens but {rows} embedding rows; download the file again")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "architecture": metadata["general.architecture"],
        "parameters": model.num_parameters(),
        "tied": bool(model.config.tie_word_embeddings),
        "tokens": len(tokenizer),
        "embedding_rows": rows,
    }


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Return the metadata and the tensors (memory-mapped) of a GGUF file, each by name.

    Raises:
        UserError: the file is missing, truncated or no GGUF, or is not a whole language model.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UserError(f"{path}: not a whole GGUF file ({first_line(error)}); download it again") from None
    if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
        raise UserError(
            f"{path}: must be a whole file, got one of {parts} parts; join them with llama-gguf-split --merge"
        )
    for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"):
        if key not in metadata:
            raise UserError(f"{path}: no {key} in its metadata; give a GGUF file of a whole language model")
    return metadata, tensors


def _check_sizes(path: Path, metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> None:
    """Require that sizes in the metadata match the tensors, before a model of that size is made.

    Raises:
        UserError: they differ.
    """
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    table = tensors.get("token_embd.weight")
    found = {"block_count": len(blocks), "embedding_length": None if table is None else int(table.shape[0])}
    for key, size in found.items():
        stated = metadata.get(f"{metadata['general.architecture']}.{key}")
        if stated != size:
            raise UserError(
                f"{path}: {key}: must be {size}, as its tensors have it, got {stated}; download it again"
            )


def _load_tokenizer(path: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    own = kind == "llama" and metadata["general.architecture"] == "llama"  # others are read by other code
    if own and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        raise UserError(
            f"{path}: its texts would begin with a space (add_space_prefix is false); {ELSEWHERE}"
        )
    if kind == "gpt2" and pre not in KNOWN_PRE_TOKENIZERS:
        raise UserError(
            f"{path}: token ids could come out wrong with the pre-tokenizer {pre!r} "
            f"(known: {', '.join(sorted(KNOWN_PRE_TOKENIZERS))}); {ELSEWHERE}"
        )
    with _linked_alone(path) as folder:
        try:
            backend = AutoTokenizer.from_pretrained(
                folder, gguf_file=path.name, trust_remote_code=False
            ).backend_tokenizer
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{path}: cannot convert the tokenizer ({first_line(error)}); {ELSEWHERE}"
            ) from None

    tokens = metadata["tokenizer.ggml.tokens"]
    backend = _without_padding(backend, tokens, metadata.get("tokenizer.ggml.token_type"))
    if pre in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in LLAMA3:
        backend.model.ignore_merges = True
    elif pre in QWEN2:
        backend.normalizer = normalizers.NFC()

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            special[f"{name}_token"] = tokens[token_id]
    control = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    # Without this key, BOS goes in front for these two kinds.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in LLAMA3)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=bool(add_bos),
        add_eos_token=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=metadata[f"{metadata['general.architecture']}.context_length"],
        extra_special_tokens=[token for token in control if token not in special.values()],
        **special,
    )
    types = metadata.get("tokenizer.ggml.token_type") or []
    wanted = {tokens.index(token) for token in special.values()}
    wanted |= {token_id for token_id, kind in enumerate(types) if kind == TokenType.CONTROL}
    for token_id in sorted(wanted):  # transformers respells some tokens, such as those beyond ASCII
        if (found := tokenizer.convert_tokens_to_ids(tokens[token_id])) != token_id:
            name = tokens[token_id]
            raise UserError(f"{path}: special token {name} must have id {token_id}, got {found}; {ELSEWHERE}")
    return tokenizer


def _without_padding(backend: Tokenizer, tokens: list[str], types: list[int] | None) -> Tokenizer:
    """Remove the unused entries at the end, which only pad the vocabulary to a round number of rows."""
    used = len(tokens)
    while types and used and types[used - 1] == TokenType.UNUSED:
        used -= 1
    if used == len(tokens):
        return backend
    state = json.loads(backend.to_str())
    for token in tokens[used:]:
        state["model"]["vocab"].pop(token, None)
    return Tokenizer.from_str(json.dumps(state))


def _load_model(path: Path, metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> PreTrainedModel:
    kind = metadata["general.architecture"]
    if kind == "llama" and "llama.attention.head_count_kv" not in metadata:
        raise UserError(  # transformers would leave queries and keys in llama.cpp's order
            f"{path}: attention.head_count_kv: must be in its metadata, got none; {ELSEWHERE}"
        )
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    for key in ("scale_linear", "scaling.factor", "scaling.attn_factor"):
        if scaling == "none" and (factor := metadata.get(f"{kind}.rope.{key}", 1.0)) not in (0.0, 1.0):
            scaling = f"{key} {factor:g}"
    if scaling != "none" or any(name.startswith("rope_factors") for name in tensors):
        raise UserError(f"{path}: its rope scaling ({scaling}) would be lost; {ELSEWHERE}")
    with _linked_alone(path) as folder:
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
            )
        except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"{path}: cannot convert the weights ({first_line(error)}); {ELSEWHERE}"
            ) from None
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{path}: no weights for {', '.join(missing[:3])}; {ELSEWHERE}")
    rope, base = model.config.rope_parameters or {}, metadata.get(f"{kind}.rope.freq_base")
    found = rope.get("full_attention", rope).get("rope_theta") or 0.0
    if base is not None and not math.isclose(found, base, rel_tol=1e-5):
        raise UserError(f"{path}: its rope.freq_base ({base:g}) would be lost; {ELSEWHERE}")
    has_biases = any(name.endswith(".bias") for name, _ in model.named_parameters())
    if not has_biases and (lost := next((name for name in tensors if name.endswith(".bias")), None)):
        raise UserError(f"{path}: its biases ({lost}) would be lost; {ELSEWHERE}")
    if kind == "gemma2" and metadata["gemma2.block_count"] == GEMMA2_27B:
        model.config.query_pre_attn_scalar = model.config.hidden_size // model.config.num_attention_heads
    if "rope_freqs.weight" in tensors:
        _restore_llama3_rope(path, model, tensors["rope_freqs.weight"])
    if not model.config.tie_word_embeddings:
        _tie_again(model, tensors)
    # The file's free-text title lands in this attribute, where a path or Hub id belongs.
    model.config.__dict__.pop("_model_name_or_path", None)
    return model


@torch.no_grad()
def _tie_again(model: PreTrainedModel, tensors: dict[str, ReaderTensor]) -> None:
    """Tie head and embedding if they are two quantizations of one matrix; keep the finer one."""
    embedding = model.get_input_embeddings().weight  # [V, H]
    head = model.get_output_embeddings().weight  # [V, H]
    if embedding.shape != head.shape:
        return
    for one, other in zip(embedding.split(8192), head.split(8192)):
        distance = (one.float() - other.float()).norm(dim=1)  # [8192]
        if (distance > SAME_ROW_TOLERANCE * other.float().norm(dim=1)).any():
            return
    if tensors["output.weight"].n_bytes > tensors["token_embd.weight"].n_bytes:
        embedding.copy_(head)
    model.config.tie_word_embeddings = True
    model.tie_weights()


def _restore_llama3_rope(path: Path, model: PreTrainedModel, factors: ReaderTensor) -> None:
    """Restore the frequency scaling of Llama 3.1 and later in the config.

    The file holds the divisor of each frequency. The published models differ only in the largest divisor. If
    their three other parameters do not reproduce the file's divisors, it is refused instead of guessed.
    """
    divisors = torch.from_numpy(factors.data.copy()).float()  # [head_dim / 2]
    config = model.config
    theta = config.rope_parameters["rope_theta"]
    plain = 1 / theta ** (torch.arange(len(divisors)) / len(divisors))  # [head_dim / 2]
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # [head_dim / 2]
    if scaled.shape != plain.shape or not torch.allclose(scaled, plain / divisors, rtol=1e-3, atol=0):
        raise UserError(f"{path}: its rope_freqs are not those of a Llama 3; {ELSEWHERE}")


@contextmanager
def _linked_alone(path: Path) -> Iterator[str]:
    """Yield a temporary folder that links only this file: transformers reads other files in a folder, too."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.absolute())
        yield folder
