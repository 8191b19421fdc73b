"""A writer of tiny GGUF files, as llama.cpp's converter would make them from a Hugging Face model."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2}


def _rows_as_in_gguf(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Llama's query and key rows in the file: the two rotary halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf_file(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pre: str | None = "smollm",
    quantization: dict[str, str] | None = None,
    replace: dict[str, numpy.ndarray | None] | None = None,
    metadata: dict[str, str | bool | float | int] | None = None,
    unused: int = 0,
) -> Path:
    """Writes a model and its byte-level tokenizer.

    Args:
        pre: `tokenizer.ggml.pre`.
        quantization: GGUF tensor name to quantization type; everything else is F32.
        replace: GGUF tensor name to other values, or None to leave the tensor out.
        metadata: further keys.
        unused: entries at the end of the vocabulary that are there only as padding.
    """
    config = model.config
    architecture = config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_name("A tiny title")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_vocab_size(config.vocab_size)

    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    tokens = tokens[: len(tokens) - unused] + [f"[PAD{index}]" for index in range(unused)]
    special = set(tokenizer.all_special_tokens)
    types = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    types[len(tokens) - unused :] = [TokenType.UNUSED] * unused
    known = set(tokens)
    merges = [pair for pair in state["merges"] if "".join(pair) in known]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for key, value in (metadata or {}).items():
        add = {
            bool: writer.add_bool,
            float: writer.add_float32,
            str: writer.add_string,
            int: writer.add_uint16,
        }
        add = add[type(value)]
        add(key, value)

    names = get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        weight = tensor.float().numpy()
        if architecture == "llama" and name.endswith("q_proj.weight"):
            weight = _rows_as_in_gguf(weight, config.num_attention_heads)
        if architecture == "llama" and name.endswith("k_proj.weight"):
            weight = _rows_as_in_gguf(weight, config.num_key_value_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight
    tensors.update(replace or {})
    for name, weight in tensors.items():
        if weight is None:
            continue
        kind = GGMLQuantizationType[(quantization or {}).get(name, "F32")]
        writer.add_tensor(name, quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    return write_gguf_file
