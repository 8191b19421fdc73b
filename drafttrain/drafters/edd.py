"""EDD, the effective draft decoder: one decoder layer that reads the target's hidden states as soft prompts.

Keys and values come from the hidden states of everything verified *and* from the token embeddings of the
current block (the root and the drafts after it); queries come from token embeddings only, so nothing is ever
computed at soft-prompt positions but a key and a value (EDD paper, §3.1, eq. 2-3). Position of hidden state i
and of token i is i.

`layers` > 1 goes beyond the paper: each further layer projects its own keys and values from the same hidden
states.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.drafters.edd_config import DrafterConfig, EddConfig, check_identity, read_config
from drafttrain.errors import UserError
from drafttrain.target.attention import grouped_attention
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.packed import pack_linears
from drafttrain.trees.tree import TokenTree

__all__ = ["DrafterConfig", "EddConfig", "EddModel", "EddState"]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [B, heads, n, dim] with cos, sin [B, 1, n, dim] (halves convention)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class DraftLayer(nn.Module):
    """A decoder layer of the target's architecture whose keys and values come from two streams."""

    def __init__(self, config: EddConfig):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
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
        """Keys (rotated) and values [B, kv_heads, n, dim] of normed states x [B, n, H]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return rotate(k, cos, sin), v

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries (rotated) [B, heads, n, dim] of normed states x [B, n, H]."""
        shape = (*x.shape[:2], self.heads, self.head_dim)
        return rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP; residual [..., H], attended [..., heads · dim]."""
        x = residual + self.o_proj(attended)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(self.act(self.gate_proj(h)) * self.up_proj(h))


@dataclass
class EddState:
    """Keys and values of soft prompts and of the current block; `lengths` [B] soft prompts per row.

    The K/V of node j of the tree lies in slot `lengths[b] + j`, where the next observation overwrites it.
    """

    kv: torch.Tensor  # [layers, 2, B, kv_heads, max_len, dim]
    lengths: torch.Tensor  # [B]
    rows: torch.Tensor  # [B, 1]

    def reserve(self, n: int) -> int:
        """Makes room for n slots behind each row's soft prompts; returns the number of slots then in view."""
        view = int(self.lengths.max()) + n
        missing = view - self.kv.shape[4]
        if missing > 0:  # a tree reaches beyond the longest output: rare, so a copy is fine
            self.kv = F.pad(self.kv, (0, 0, 0, max(missing, 64)))
        return view


class EddModel(PreTrainedModel):
    """The drafter. As a `Drafter` it needs `attach(target)` (or `load`) first, which lends it the weights
    that stay the target's; `AutoModel.from_pretrained` alone leaves NaN there."""

    config_class = EddConfig
    base_model_prefix = "edd"

    def __init__(self, config: EddConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.target_vocab_size, hidden)
        taps = len(config.tapped_blocks)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False) if taps > 1 else nn.Identity()
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size))
        frozen = [] if config.train_embeddings else ["embed_tokens.weight"]
        frozen += [] if config.train_head else ["lm_head.weight"]
        self._keys_to_ignore_on_save = self._keys_to_ignore_on_load_missing = set(frozen)
        self._rope: torch.Tensor | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "weight", None) is not None and self._is_frozen(module):
            nn.init.constant_(module.weight, torch.nan)  # a forgotten `attach` is loud
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def _is_frozen(self, module: nn.Module) -> bool:
        """Whether a module is a copy of the target's, and so not stored."""
        config = self.config
        return (module is self.embed_tokens and not config.train_embeddings) or (
            module is self.lm_head and not config.train_head
        )

    # making and loading

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        """Copies what starts from the target: embeddings, head rows of `draft_ids` [D], final norm, and the
        layers where `drafter.init` names a block."""
        with torch.no_grad():
            self.draft_to_target.copy_(draft_ids)
            self.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
            self.lm_head.weight.copy_(target.lm_head.weight[draft_ids.to(target.device)])
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
                    layer.load_state_dict(own)
            if isinstance(self.fc, nn.Linear):  # start from the mean of the tapped blocks
                taps, hidden = len(self.config.tapped_blocks), self.config.hidden_size
                self.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) / taps)
        self.attach(target)

    def grow_vocabulary(self, target: FrozenTarget, draft_ids: torch.Tensor) -> None:
        """Makes `draft_ids` [D] the draft vocabulary, the tokens of the present one among them. Head rows of
        tokens that are new start from the target's, the others stay."""
        with torch.no_grad():
            rows = target.lm_head.weight[draft_ids.to(target.device)].to(self.lm_head.weight)  # [D, H]
            rows[torch.searchsorted(draft_ids, self.draft_to_target.cpu())] = self.lm_head.weight
        self.lm_head.weight = nn.Parameter(rows, requires_grad=self.lm_head.weight.requires_grad)
        self.lm_head.out_features = self.config.draft_vocab_size = len(draft_ids)
        self.draft_to_target = draft_ids.to(self.draft_to_target.device)

    def attach(self, target: FrozenTarget) -> "EddModel":
        """Takes the frozen weights from the target, and taps it. Embeddings are shared, not copied, where
        dtype and device agree.

        Raises:
            UserError: the drafter was made for a target of another shape or with another tokenizer.
        """
        config = self.config
        check_identity(config.target, target)
        with torch.no_grad():
            if not config.train_embeddings:
                weight, own = target.model.get_input_embeddings().weight.detach(), self.embed_tokens.weight
                shared = weight.to(self.norm.weight.device, own.dtype)  # [V, H]
                self.embed_tokens.weight = nn.Parameter(shared, requires_grad=False)
            if not config.train_head:
                self.lm_head.weight.copy_(target.lm_head.weight[self.draft_to_target.to(target.device)])
                self.lm_head.weight.requires_grad_(False)
        target.tap(config.tapped_blocks)
        return self

    def pack(self) -> None:
        """Lays out the weights for drafting, where that is faster (bf16 on a CPU); no training after it."""
        # queries stand alone: soft prompts have none
        pack_linears(self, (("k_proj", "v_proj"), ("gate_proj", "up_proj")))

    @classmethod
    def load(
        cls, folder: str | os.PathLike, target: FrozenTarget, dtype: torch.dtype | None = None
    ) -> "EddModel":
        """Loads a drafter and lends it the target's frozen weights.

        Args:
            dtype: of the weights; None for the stored one.

        Raises:
            UserError: no drafter there, tensors are missing, unexpected or unreadable, or it belongs to
                another target.
        """
        read_config(folder)
        try:
            model, info = cls.from_pretrained(folder, output_loading_info=True, dtype=dtype or "auto")
        except Exception as error:  # safetensors, transformers and torch raise many kinds for damaged files
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{folder}: cannot be loaded as an EDD drafter ({reason}); export it again"
            ) from error
        if info["missing_keys"] or info["unexpected_keys"]:  # transformers goes on with random numbers
            raise UserError(
                f"{folder}: missing tensors {sorted(info['missing_keys'])}, unexpected "
                f"{sorted(info['unexpected_keys'])}; damaged or of another version, export it again"
            )
        try:
            return model.to(target.device).attach(target).eval()
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None

    # positions

    def rope(self, positions: torch.Tensor, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [B, 1, n, dim] at positions [B, n], from a table in the type of the weights that grows.

        Args:
            limit: all positions are below it, where the caller knows; asking a GPU for their maximum waits.
        """
        need = int(positions.max()) + 1 if limit is None else limit
        table, weight = self._rope, self.norm.weight
        if table is None or len(table) < need or (table.dtype, table.device) != (weight.dtype, weight.device):
            table = self._rope = self._rope_table(max(need, 1024) * 2)
        cos, sin = table[positions].unbind(2)  # [B, n, dim]
        return cos[:, None], sin[:, None]

    def _rope_table(self, n: int) -> torch.Tensor:
        """cos and sin of n positions, [n, 2, dim]."""
        parameters, dim, weight = self.config.rope_parameters, self.config.head_dim, self.norm.weight
        device = weight.device
        if parameters.get("rope_type", "default") == "default":
            exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float) / dim
            inv_freq, scaling = parameters["rope_theta"] ** -exponents, 1.0  # [dim / 2]
        else:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config, device)
        angles = torch.arange(n, device=device, dtype=torch.float)[:, None] * inv_freq  # [n, dim / 2]
        angles = torch.cat((angles, angles), dim=-1)  # [n, dim]
        return (torch.stack((angles.cos(), angles.sin()), 1) * scaling).to(weight.dtype)

    # training

    def forward(
        self,
        input_ids: torch.Tensor,
        tapped: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """States after the final norm [N, H] at the wanted tokens of packed rows.

        Args:
            input_ids: [B, T].
            tapped: hidden states of the target [B, T, K·H].
            positions: [B, T] positions in each document.
            attend: `attend(q, k, v) -> [B, heads, T, dim]`, attention under the block mask of this step, over
                2·T keys: hidden states first, tokens after them.
            wanted: bool [B, T]; only these are carried through the last layer's MLP.
        """
        cos, sin = self.rope(positions)
        x = self.embed_tokens(input_ids)  # [B, T, H]
        soft = self.fc(tapped.to(x.dtype))  # [B, T, H]
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            soft_k, soft_v = layer.keys_values(layer.input_layernorm(soft), cos, sin)
            block_k, block_v = layer.keys_values(normed, cos, sin)
            keys = torch.cat((soft_k, block_k), dim=2)  # [B, kv_heads, 2T, dim]
            values = torch.cat((soft_v, block_v), dim=2)
            attended = attend(layer.queries(normed, cos, sin), keys, values)  # [B, heads, T, dim]
            attended = attended.transpose(1, 2).flatten(2)  # [B, T, heads · dim]
            if i == len(self.layers) - 1:
                x, attended = x[wanted], attended[wanted]  # [N, …]
            x = layer.finish(x, attended)
        return self.norm(x)

    # drafting

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.draft_to_target[ids]

    def new_state(self, batch: int, max_len: int) -> EddState:
        config, weight = self.config, self.norm.weight
        shape = (config.layers, 2, batch, config.num_key_value_heads, max_len, config.head_dim)
        kv = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        lengths = torch.zeros(batch, dtype=torch.long, device=weight.device)
        return EddState(kv=kv, lengths=lengths, rows=torch.arange(batch, device=weight.device)[:, None])

    def keep_rows(self, state: EddState, rows: torch.Tensor) -> EddState:
        return EddState(state.kv.index_select(2, rows), state.lengths[rows], state.rows[: len(rows)])

    def put_rows(self, state: EddState, rows: torch.Tensor, other: EddState) -> None:
        used = int(other.lengths.max())
        state.kv[:, :, rows, :, :used] = other.kv[..., :used, :]
        state.lengths[rows] = other.lengths

    @torch.no_grad()
    def observe(
        self, state: EddState, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Appends verified hidden states as soft prompts. Tokens are not read: the states tell of them."""
        n = tapped.shape[1]
        view = state.reserve(n)
        slots = state.lengths[:, None] + torch.arange(n, device=tapped.device)  # [B, n]
        cos, sin = self.rope(slots, view)
        soft = self.fc(tapped.to(state.kv.dtype))  # [B, n, H]
        for i, layer in enumerate(self.layers):
            k, v = layer.keys_values(layer.input_layernorm(soft), cos, sin)
            self._write(state, i, slots, k, v)
        state.lengths = state.lengths + counts

    @staticmethod
    def _write(state: EddState, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for which, new in ((0, k), (1, v)):
            kept = state.kv[layer, which]  # [B, kv_heads, max_len, dim]
            if len(slots) == 1:
                kept.index_copy_(2, slots[0], new)
            else:
                kept.transpose(1, 2).index_put_((state.rows, slots), new.transpose(1, 2))

    @staticmethod
    def _seen(state: EddState, tree: TokenTree, frontier: torch.Tensor, view: int) -> torch.Tensor:
        """Which of the slots in view the frontier's nodes attend to, bool [B, f, view]."""
        n = tree.width
        ancestors = tree.ancestors().gather(1, frontier[..., None].expand(-1, -1, n))  # [B, f, n]
        if len(frontier) == 1:  # the block ends where the view does
            return F.pad(ancestors, (view - n, 0), value=True)
        slots = torch.arange(view, device=frontier.device)  # [view]
        seen = slots < state.lengths[:, None]  # [B, view]
        seen = seen[:, None].expand(-1, frontier.shape[1], -1).clone()  # [B, f, view]
        block = state.lengths[:, None] + slots[:n]  # [B, n]
        return seen.scatter_(2, block[:, None].expand_as(ancestors), ancestors)

    @torch.no_grad()
    def expand(self, state: EddState, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, f, D] after the frontier's nodes (see `Drafter.expand`)."""
        view, starts = state.reserve(tree.width), state.lengths[:, None]  # [B, 1]
        seen = self._seen(state, tree, frontier, view)[:, None]  # [B, 1, f, view]
        slots = starts + frontier  # [B, f]
        cos, sin = self.rope(starts + tree.depths.gather(1, frontier), view)
        tokens = tree.tokens.gather(1, frontier)  # [B, f]
        x = self.embed_tokens(tokens)  # [B, f, H]
        for i, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            self._write(state, i, slots, *layer.keys_values(normed, cos, sin))
            k, v = state.kv[i, 0, :, :, :view], state.kv[i, 1, :, :, :view]
            q = layer.queries(normed, cos, sin)
            attended = grouped_attention(q, k, v, seen)  # [B, f, heads, dim]
            x = layer.finish(x, attended.flatten(2))
        return torch.log_softmax(self.lm_head(self.norm(x)), dim=-1, dtype=torch.float)


AutoConfig.register(EddConfig.model_type, EddConfig)
AutoModel.register(EddConfig, EddModel)
