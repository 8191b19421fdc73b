"""Base of drafters with decoder layers: the layer, its keys and values per sequence, and drafting.

A subclass defines the layers' inputs in training (`inputs`) and how verified text is read (`update`).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import Attend, DraftModel, Prediction
from drafttrain.drafters.model_config import DraftModelConfig
from drafttrain.kernels.blocks import BlockParts, NativeBlocks
from drafttrain.kernels.linear import NativeLinear
from drafttrain.target_lm.attention import grouped_attention
from drafttrain.target_lm.cache import KvCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree

LAST = "last"  # carried by states: the tapped states at each row's last verified token, [B, K·H]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to x [B, heads, n, dim] with cos, sin [B, 1, n, dim] (halves convention)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class DraftLayer(nn.Module):
    """A decoder layer of the target's architecture. Keys and values are separate from queries, because they
    may come from other states.

    Args:
        input_norm: whether it normalizes its input.
    """

    def __init__(self, config: DraftModelConfig, input_norm: bool = True):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps) if input_norm else nn.Identity()
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (rotated) and values [B, kv_heads, n, dim] of normalized states x [B, n, H]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return rotate(k, cos, sin), v

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return queries (rotated) [B, heads, n, dim] of normalized states x [B, n, H]."""
        shape = (*x.shape[:2], self.heads, self.head_dim)
        return rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)

    def parts(self) -> BlockParts:
        """Return the layer's parts for the native library, once its linear layers are native."""
        return BlockParts(
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.o_proj,
            self.gate_proj,
            self.up_proj,
            self.down_proj,
            *(
                getattr(norm, "weight", None)
                for norm in (self.input_layernorm, self.post_attention_layernorm, self.q_norm, self.k_norm)
            ),
        )

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Apply output projection, residuals and MLP; residual [..., H], attended [..., heads · dim]."""
        x = residual + self.o_proj(attended)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(self.act(self.gate_proj(h)) * self.up_proj(h))


class LayeredDrafter(DraftModel):
    """Token embeddings, decoder layers, a norm and a head over the draft vocabulary.

    Its state is a `KvCache`: keys and values of verified text and of the tree in flight. Those of the tree's
    node j are in slot `lengths[b] + j`, where the next `update` overwrites them.

    Args:
        input_norm, final_norm: whether layers normalize their input, and the last one's output is normalized.
    """

    def __init__(self, config: DraftModelConfig, input_norm: bool = True, final_norm: bool = True):
        super().__init__(config)
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.target_vocab_size, hidden)
        self.layers = nn.ModuleList(DraftLayer(config, input_norm) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps) if final_norm else nn.Identity()
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size))
        frozen = [] if config.train_embeddings else ["embed_tokens.weight"]
        self.freeze(frozen + ([] if config.train_head else ["lm_head.weight"]))
        self._rope: torch.Tensor | None = None
        self.native: NativeBlocks | None = None  # runs the layers once the drafter is packed, where it can

    # creating and loading

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        """Copy embeddings, head rows of `draft_ids` [D], final norm, and the layers if `drafter.init` names a
        block."""
        super().initialize_from(target, drafter, draft_ids)
        with torch.no_grad():
            if isinstance(self.norm, RMSNorm):
                self.norm.weight.copy_(target.base.norm.weight)
            for layer in self.layers:
                if drafter.init == "random":
                    layer.o_proj.weight.mul_(0.5)  # start close to the residual stream
                    layer.down_proj.weight.mul_(0.5)
                else:
                    block = target.blocks[int(drafter.init)].state_dict()
                    own = {
                        name.removeprefix("self_attn.").removeprefix("mlp."): block[name] for name in block
                    }
                    if isinstance(layer.input_layernorm, nn.Identity):
                        del own["input_layernorm.weight"]
                    layer.load_state_dict(own)

    # positions

    def rope(self, positions: torch.Tensor, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [B, 1, n, dim] at positions [B, n], from a growing table in the weights' dtype.

        Args:
            limit: the largest position + 1 or more, if known; reading their maximum from a GPU waits for it.
        """
        need = int(positions.max()) + 1 if limit is None else limit
        table, weight = self._rope, self.layers[0].post_attention_layernorm.weight
        if table is None or len(table) < need or (table.dtype, table.device) != (weight.dtype, weight.device):
            table = self._rope = self._rope_table(max(need, 1024) * 2, weight.dtype)
        cos, sin = table[positions].unbind(2)  # [B, n, dim]
        return cos[:, None], sin[:, None]

    def _rope_table(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return cos and sin of n positions, [n, 2, dim]."""
        parameters, dim = self.config.rope_parameters, self.config.head_dim
        weight = self.layers[0].post_attention_layernorm.weight
        device = weight.device
        if parameters.get("rope_type", "default") == "default":
            exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float) / dim
            inv_freq, scaling = parameters["rope_theta"] ** -exponents, 1.0  # [dim / 2]
        else:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config, device)
        angles = torch.arange(n, device=device, dtype=torch.float)[:, None] * inv_freq  # [n, dim / 2]
        angles = torch.cat((angles, angles), dim=-1)  # [n, dim]
        return (torch.stack((angles.cos(), angles.sin()), 1) * scaling).to(dtype)

    # training

    @abstractmethod
    def inputs(
        self, input_ids: torch.Tensor, tapped: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the first layer's input for packed rows, [B, T, H], and all layers' soft prompts, [B, T, H].

        Args:
            input_ids: [B, T].
            tapped: hidden states of the target [B, T, K·H].
            positions: [B, T].
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        tapped: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Return the head's inputs, [N, H], at the wanted tokens of packed rows.

        Args:
            input_ids: [B, T].
            tapped: hidden states of the target [B, T, K·H].
            positions: [B, T] positions in each document.
            attend: `attend(q, k, v) -> [B, heads, T, dim]`, attention with this step's mask over T tokens, or
                with soft prompts over 2·T keys: soft prompts first, then tokens.
            wanted: bool [B, T]; only these go through the last layer's MLP.
        """
        cos, sin = self.rope(positions, input_ids.shape[1])
        x, soft = self.inputs(input_ids, tapped, positions)  # [B, T, H]
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            keys, values = layer.keys_values(normed, cos, sin)  # [B, kv_heads, T, dim]
            if soft is not None:
                soft_k, soft_v = layer.keys_values(layer.input_layernorm(soft), cos, sin)
                keys = torch.cat((soft_k, keys), dim=2)  # [B, kv_heads, 2T, dim]
                values = torch.cat((soft_v, values), dim=2)
            attended = attend(layer.queries(normed, cos, sin), keys, values)  # [B, heads, T, dim]
            attended = attended.transpose(1, 2).flatten(2)  # [B, T, heads · dim]
            if i == len(self.layers) - 1:
                x, attended = x[wanted], attended[wanted]  # [N, …]
            x = layer.finish(x, attended)
        return self.norm(x)

    def predictions(self, model, batch, attend, wanted) -> list[Prediction]:
        states = model(batch["input_ids"], batch["tapped"], batch["positions"], attend, wanted)  # [N, H]
        return [Prediction(states, self.lm_head.weight, wanted)]

    # drafting

    def pack(self) -> None:
        super().pack()
        if isinstance(self.lm_head, NativeLinear) and self.config.hidden_act == "silu":
            config = self.config
            self.native = NativeBlocks(
                [layer.parts() for layer in self.layers],
                getattr(self.norm, "weight", None),
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.rms_norm_eps,
                self._native_rope,
            )

    def _native_rope(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.config.head_dim // 2  # both halves are equal
        cos, sin = self._rope_table(n, torch.float)[..., :half].unbind(1)
        return cos, sin

    def native_inputs(self, state: KvCache) -> tuple[Any, ...] | None:
        """Return the arguments of `kernels.drafting.Inputs` for what `draft_inputs` computes; None if there
        are none, or if `keep_outputs` has to be called."""
        own = type(self).draft_inputs, type(self).keep_outputs
        alone = own == (LayeredDrafter.draft_inputs, LayeredDrafter.keep_outputs)
        return (self.embed_tokens.weight,) if alone else None

    @property
    def states_dtype(self) -> torch.dtype:
        """Return the dtype in which hidden states are read and carried: the native forward takes fp32."""
        return self.layers[0].post_attention_layernorm.weight.dtype if self.native is None else torch.float

    def new_state(self, batch: int, max_len: int) -> KvCache:
        config, weight = self.config, self.layers[0].post_attention_layernorm.weight
        state = KvCache(config.layers, batch, max_len, weight.dtype, weight.device)
        state.allocate(config.num_key_value_heads, config.head_dim)
        return state

    def select_rows(self, state: KvCache, rows: torch.Tensor) -> KvCache:
        state.select_rows(rows)
        return state

    def append_rows(self, state: KvCache, other: KvCache) -> KvCache:
        state.append_rows(other)
        return state

    def prefix(self, state: KvCache, length: int, room: int, tapped: torch.Tensor) -> KvCache:
        twin = state.copy(length, room)
        twin.carried = {LAST: tapped[None].to(self.states_dtype)} if LAST in state.carried else {}
        return twin

    def join(self, states: Sequence[KvCache]) -> Any:
        from drafttrain.target_lm.joined import JoinedCache  # only for sequences of several callers

        return JoinedCache(states)

    def split(self, joined: Any, states: Sequence[KvCache]) -> None:
        joined.split()

    def read(self, state: KvCache, x: torch.Tensor, counts: torch.Tensor) -> None:
        """Append each layer's keys and values of verified x [B, n, H], the first counts[b] of each row."""
        n = x.shape[1]
        view = state.reserve(n)
        slots = state.lengths[:, None] + torch.arange(n, device=x.device)  # [B, n]
        if self.native is not None:
            self.native.keys_values(x.float().contiguous(), state.nodes(slots, slots), view)
            state.add(counts, n)
            return
        cos, sin = self.rope(slots, view)
        for i, layer in enumerate(self.layers):
            state.write(i, slots, *layer.keys_values(layer.input_layernorm(x), cos, sin))
        state.add(counts, n)

    @torch.no_grad()
    def prune(self, state: KvCache, root: torch.Tensor, tapped: torch.Tensor, keep: torch.Tensor) -> None:
        start = state.lengths
        self.update(state, root[None], tapped[None], torch.ones_like(start))  # into the root's slot
        state.keep_open(keep, start)

    def draft_inputs(
        self, state: Any, tree: TokenTree, frontier: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the first layer's input [B, f, H] for the frontier's nodes [B, f] and tokens [B, f]."""
        return self.embed_tokens(tokens)

    def keep_outputs(self, state: Any, frontier: torch.Tensor, states: torch.Tensor) -> None:
        """Store the head's inputs at the frontier's nodes, [B, f, H]; does nothing by default."""

    @torch.no_grad()
    def expand(self, state: KvCache, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, f, D] after the frontier's nodes (see `Drafter.expand`)."""
        states = self._read_frontier(state, tree, frontier)
        return torch.log_softmax(self.lm_head(states), dim=-1, dtype=torch.float)

    @torch.no_grad()
    def top(
        self, state: KvCache, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k most probable tokens after the frontier's nodes (see `Drafter.top`)."""
        if self.native is None:
            return super().top(state, tree, frontier, k)
        k = min(k, self.draft_vocab_size)
        keeps = type(self).keep_outputs is not LayeredDrafter.keep_outputs  # in torch's tensors
        if keeps or (inputs := self.native_inputs(state)) is None:
            return self.lm_head.top_log_probs(self._read_frontier(state, tree, frontier), k)
        from drafttrain.kernels.drafting import Inputs
        from drafttrain.kernels.step import draft_top

        nodes = tree.tokens, tree.depths, tree.ancestors()
        return draft_top(self.native, self.lm_head, Inputs(*inputs), state, nodes, frontier, k)

    @torch.no_grad()
    def grow_natively(self, grow: Callable, state: KvCache, *given: Any) -> Any:
        """Grow trees with a function of `kernels/growth.py` (see `Drafter`)."""
        if self.native is None or (inputs := self.native_inputs(state)) is None:
            return None
        from drafttrain.kernels.drafting import Inputs
        from drafttrain.kernels.growth import Parts

        return grow(Parts(self.native, self.lm_head, Inputs(*inputs), self.draft_to_target, state), *given)

    def _read_frontier(self, state: KvCache, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return the head's inputs at the frontier's nodes, [B, f, H], and write their keys and values."""
        view, starts = state.reserve(tree.width), state.lengths[:, None]  # [B, 1]
        slots = starts + frontier  # [B, f]
        positions = starts + tree.depths.gather(1, frontier)  # [B, f]
        tokens = tree.tokens.gather(1, frontier)  # [B, f]
        x = self.draft_inputs(state, tree, frontier, tokens)  # [B, f, H]
        ancestors = tree.ancestors().gather(1, frontier[..., None].expand(-1, -1, tree.width))  # [B, f, n]
        if self.native is not None:
            _, x = self.native(x.float(), state.nodes(positions, slots, ancestors), view)
            self.keep_outputs(state, frontier, x)
            return x
        from drafttrain.target_lm.stock_masks import allowed_slots  # not needed for native forwards

        cos, sin = self.rope(positions, view)
        allowed = allowed_slots(state.lengths, ancestors, view)[:, None]  # [B, 1, f, view]
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            state.write(i, slots, *layer.keys_values(normed, cos, sin))
            k, v = state.keys_values(i, view)
            q = layer.queries(normed, cos, sin)
            attended = grouped_attention(q, k, v, allowed)  # [B, f, heads, dim]
            x = layer.finish(x, attended.flatten(2))
        x = self.norm(x)
        self.keep_outputs(state, frontier, x)
        return x
