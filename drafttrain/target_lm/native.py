"""Native forward of a target, or of a small LM that drafts, for the architectures that it supports.

Other architectures keep the stock modules, with native linear layers in them.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafttrain.kernels.blocks import BlockParts, NativeBlocks, Nodes
from drafttrain.kernels.linear import can_be_native

BLOCKS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # others change with the length of the text
TOLERANCE = 1e-3  # of the standard deviation of what a block adds; fp32 rounding gives 1e-5
PREFIX = 9  # committed tokens before the tree of the check
PARENTS = (-1, 0, 0, 1, 2, 4, 3)  # two branches with interleaved nodes
PATHS = ((0, 1, 3, 6), (0, 2, 4, 5))


def can_run_natively(base: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Return whether `native_blocks` supports the architecture of a language model without its head, and all
    its linear layers can be native."""
    blocks = getattr(base, "layers", ())
    kinds = {type(block).__name__ for block in blocks}
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    linears = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        len(blocks) > 0
        and kinds <= BLOCKS
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in STATIC_ROPE
        and rope.get("partial_rotary_factor", 1.0) in (None, 1.0)
        and all(block.self_attn.scaling == block.self_attn.head_dim**-0.5 for block in blocks)
        and len({block.input_layernorm.variance_epsilon for block in blocks}) == 1
        # Llama ignores the window in its config, and Mistral applies it to layers of any type
        and not (window and "LlamaDecoderLayer" in kinds)
        and not (window and types and "MistralDecoderLayer" in kinds)
        and all(can_be_native(m) for m in linears)
        and len({m.weight.dtype for m in linears}) == 1
    )


def native_blocks(base: PreTrainedModel, config: PreTrainedConfig, final: bool = True) -> NativeBlocks:
    """Return the native blocks of a language model whose linear layers are native already.

    Args:
        final: whether to include the norm after the blocks.
    """
    attention, norm = base.layers[0].self_attn, base.layers[0].input_layernorm

    def rope(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = base.rotary_emb(torch.zeros(1).float(), torch.arange(n)[None])  # [1, n, head_dim]
        half = cos.shape[-1] // 2  # both halves are equal
        return cos[0, :, :half], sin[0, :, :half]

    return NativeBlocks(
        [_parts(block, _window(config, i)) for i, block in enumerate(base.layers)],
        base.norm.weight if final else None,
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        norm.variance_epsilon,
        rope,
    )


def _window(config: PreTrainedConfig, block: int) -> int:
    """Return the number of positions that a block's tokens see, themselves included; 0: all."""
    types = getattr(config, "layer_types", None)
    slides = types is None or "sliding" in types[block]
    return (getattr(config, "sliding_window", None) or 0) if slides else 0


def _parts(block: nn.Module, window: int) -> BlockParts:
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return BlockParts(
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        block.input_layernorm.weight,
        block.post_attention_layernorm.weight,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        window,
    )


class NativeCheck:
    """Comparison of native blocks with the stock modules in fp32, on a tree after a prefix: for the first
    block of each kind of attention, and the last block.

    The stock outputs are computed on construction, before the linear layers become native.
    """

    @torch.no_grad()
    def __init__(self, base: PreTrainedModel, config: PreTrainedConfig):
        kinds = getattr(config, "layer_types", None) or ["all"] * len(base.layers)
        self.blocks = sorted({kinds.index(kind) for kind in set(kinds)} | {len(kinds) - 1})
        generator = torch.Generator().manual_seed(0)
        nodes = PREFIX + len(PARENTS)
        self.inputs = torch.randn(1, nodes, config.hidden_size, generator=generator).float()  # [1, p + n, H]
        self.expected = [self._stock(base, config, i) for i in self.blocks]  # [paths][p + l, H]

    def _stock(self, base: PreTrainedModel, config: PreTrainedConfig, number: int) -> list[torch.Tensor]:
        block, window, outputs = copy.deepcopy(base.layers[number]).float(), _window(config, number), []
        for path in PATHS:
            x = torch.cat([self.inputs[:, :PREFIX], self.inputs[:, [PREFIX + i for i in path]]], 1)
            order = torch.arange(x.shape[1])  # [T]
            seen = order[:, None] >= order  # [T, T]
            if window:
                seen &= order > order[:, None] - window
            mask = torch.zeros(1, 1, *seen.shape).float().masked_fill(~seen, torch.finfo(torch.float).min)
            rope = base.rotary_emb(x, order[None])
            out = block(x, attention_mask=mask, position_ids=order[None], position_embeddings=rope)
            outputs.append((out[0] if isinstance(out, tuple) else out)[0])
        return outputs

    @torch.no_grad()
    def error(self, native: NativeBlocks) -> float:
        """Return the largest root-mean-square difference of a node's output, as a share of the standard
        deviation of what the block adds to its input; NaN if an output is NaN."""
        n, errors = len(PARENTS), []
        seen = torch.eye(n, dtype=torch.bool)  # [n, n]
        for node, parent in enumerate(PARENTS[1:], 1):
            seen[node] |= seen[parent]
        depths = seen.sum(1)[None] - 1  # [1, n]
        order, rounds = torch.arange(PREFIX), native.round_inputs
        for number, expected in zip(self.blocks, self.expected):
            kv = torch.zeros(len(native.parts), 2, 1, native.kv_heads, PREFIX + n, native.head_dim).float()
            prefix, tree = self.inputs[:, :PREFIX].clone(), self.inputs[:, PREFIX:].clone()
            native.round_inputs, run = False, {"reach": PREFIX + n, "blocks": range(number, number + 1)}
            try:
                causal = order[:, None] >= order
                slots = PREFIX + torch.arange(n)[None]
                native(prefix, Nodes.of_batch(kv, torch.tensor([0]), order[None], order[None], causal), **run)
                native(tree, Nodes.of_batch(kv, torch.tensor([PREFIX]), PREFIX + depths, slots, seen), **run)
            finally:
                native.round_inputs = rounds
            for path, wanted in zip(PATHS, expected):
                got = torch.cat([prefix[0], tree[0, list(path)]])  # [p + l, H]
                added = torch.cat([self.inputs[0, :PREFIX], self.inputs[0, [PREFIX + i for i in path]]])
                difference = (got - wanted).square().mean(-1).sqrt().max()
                errors.append(difference / (wanted - added).std())
        return float(torch.stack(errors).max())
