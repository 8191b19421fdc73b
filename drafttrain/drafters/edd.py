"""EDD, the effective draft decoder: one decoder layer that reads the target's hidden states as soft prompts.

Keys and values come from the hidden states of everything verified *and* from the token embeddings of the
current block (the root and the drafts after it); queries come from token embeddings only, so soft-prompt
positions need only a key and a value (EDD paper, §3.1, eq. 2-3). Hidden state i and token i have position i.

`layers` > 1 goes beyond the paper: each further layer projects its own keys and values from the same hidden
states. So does `anchor`: every token of a block is joined with the newest verified state, the one before the
block, as EAGLE joins a token with the state before it. Here the state is always the target's own, in training
and in drafting.
"""

from typing import Any

import torch
from torch import nn

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.layered import LAST, LayeredDrafter, RMSNorm
from drafttrain.drafters.model import Prediction
from drafttrain.drafters.model_config import DraftModelConfig
from drafttrain.kernels.linear import NativeLinear, can_be_native
from drafttrain.target_lm.cache import KvCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree


class EddConfig(DraftModelConfig):
    model_type = "drafttrain_edd"
    reads = "tapped_blocks"

    anchor: bool = False


class EddModel(LayeredDrafter):
    """The drafter of the EDD paper."""

    config_class = EddConfig
    base_model_prefix = "edd"
    soft_prompts = True

    def __init__(self, config: EddConfig):
        super().__init__(config)
        taps, hidden = len(config.tapped_blocks), config.hidden_size
        if not taps:
            raise ValueError("tapped_blocks: must name a block, got none")
        self.fc = nn.Linear(taps * hidden, hidden, bias=False) if taps > 1 else nn.Identity()
        self.token_fc: NativeLinear | None = None  # embeddings' half of `anchor_fc`, once packed
        if config.anchor:
            self.embed_norm = RMSNorm(hidden, config.rms_norm_eps)
            self.anchor_norm = RMSNorm(taps * hidden, config.rms_norm_eps)
            self.anchor_fc = nn.Linear((1 + taps) * hidden, hidden, bias=False)
        self.post_init()

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        super().initialize_from(target, drafter, draft_ids)
        taps, hidden = len(self.config.tapped_blocks), self.config.hidden_size
        with torch.no_grad():
            if isinstance(self.fc, nn.Linear):  # start from the mean of the tapped blocks
                self.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) / taps)
            if self.config.anchor:  # and from the mean of embedding and states
                self.anchor_fc.weight.copy_(torch.eye(hidden).repeat(1, 1 + taps) / (1 + taps))

    def _join(self, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return inputs [B, n, H] of tokens [B, n] and states before their blocks [B, n, K·H], 0 for none."""
        embedded = self.embed_norm(self.embed_tokens(tokens))  # [B, n, H]
        return self.anchor_fc(torch.cat((embedded, self.anchor_norm(anchors.to(embedded.dtype))), dim=-1))

    # training

    def inputs(
        self, input_ids: torch.Tensor, tapped: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.anchor:
            tapped, anchors = tapped.chunk(2, dim=-1)  # [B, T, K·H] each
            x = self._join(input_ids, anchors)  # [B, T, H]
        else:
            x = self.embed_tokens(input_ids)  # [B, T, H]
        return x, self.fc(tapped.to(x.dtype))

    def predictions(self, model, batch, attend, wanted) -> list[Prediction]:
        if self.config.anchor:  # the wrapped model takes one tensor of states
            tapped, start = batch["tapped"], batch["block_start"]  # [B, T, K·H], [B, T]
            before = (start - 1).clamp(min=0)[..., None].expand(-1, -1, tapped.shape[-1])
            is_first = start == batch["document_start"]  # [B, T]
            anchors = tapped.gather(1, before).masked_fill(is_first[..., None], 0)  # [B, T, K·H]
            batch = {**batch, "tapped": torch.cat((tapped, anchors), dim=-1)}
        return super().predictions(model, batch, attend, wanted)

    # drafting

    def pack(self) -> None:
        """Prepare the weights for drafting: `anchor_fc` is split, because drafts share an anchor."""
        if self.config.anchor and can_be_native(self.anchor_fc):
            tokens, anchors = self.anchor_fc.weight.tensor_split([self.config.hidden_size], dim=1)
            self.token_fc, self.anchor_fc = (NativeLinear(one, narrow=True) for one in (tokens, anchors))
        super().pack()

    @torch.no_grad()
    def update(
        self, state: KvCache, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Append verified hidden states as soft prompts. Tokens are not read."""
        tapped = tapped.to(self.states_dtype)  # [B, n, K·H]
        self.read(state, self.fc(tapped), counts)
        if self.config.anchor:
            state.carried[LAST] = tapped[
                torch.arange(len(tapped), device=tapped.device), counts - 1
            ]  # [B, K·H]

    def native_inputs(self, state: KvCache) -> tuple[Any, ...]:
        embed = self.embed_tokens.weight
        if not self.config.anchor:
            return (embed,)
        join, follow = (self.token_fc, self.embed_norm.weight), (self.anchor_fc, self.anchor_norm.weight)
        return embed, join, follow, self._anchors(state)

    def draft_inputs(
        self, state: KvCache, tree: TokenTree, frontier: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        if not self.config.anchor:
            return super().draft_inputs(state, tree, frontier, tokens)
        if self.token_fc is None:
            return self._join(tokens, self._anchors(state)[:, None].expand(-1, tokens.shape[1], -1))
        embedded = self.embed_norm(self.embed_tokens(tokens).float())  # [B, f, H]
        anchors = self.anchor_fc(self.anchor_norm(self._anchors(state).float()))  # [B, H]
        return (self.token_fc(embedded) + anchors[:, None]).to(self.states_dtype)

    def _anchors(self, state: KvCache) -> torch.Tensor:
        """Return the state at each row's last verified token, [B, K·H]; 0 before the first."""
        if LAST in state.carried:
            return state.carried[LAST]
        width = len(self.config.tapped_blocks) * self.config.hidden_size
        return torch.zeros(state.batch, width, dtype=self.states_dtype, device=state.device)
