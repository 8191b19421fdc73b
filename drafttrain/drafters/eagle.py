"""EAGLE: one decoder layer that predicts the target's last hidden states autoregressively, not tokens.

Its input at position j is the embedding of token j joined with the target's last hidden state at j - 1 (after
the final norm: the LM head's input); its output there predicts the state at j, which the head turns into the
distribution of token j + 1. While drafting, a node's own output replaces the state that the target has not
computed yet. Trained with uniform noise on the states, with smooth L1 on the states plus 0.1 times the
cross-entropy of the distributions (EAGLE paper, §3 and §4). The first token of a text has no state before it
and is not an input.

`input_norms` normalizes both inputs and the output, as in the layer of an MTP model (C2T paper, Appendix F).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.layered import LAST, LayeredDrafter, RMSNorm
from drafttrain.drafters.model import Prediction
from drafttrain.drafters.model_config import DraftModelConfig
from drafttrain.kernels.linear import NativeLinear, can_be_native
from drafttrain.target_lm.cache import KvCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree

DISTRIBUTION_WEIGHT = 0.1  # of the cross-entropy, beside 1 for smooth L1


class EagleConfig(DraftModelConfig):
    model_type = "drafttrain_eagle"
    reads = "last_state"

    noise: float = 0.1
    input_norms: bool = False

    @classmethod
    def shape(cls, target: FrozenTarget, drafter: DrafterConfig, draft_vocab_size: int) -> DraftModelConfig:
        """Return the config as `DraftModelConfig.shape` does. A layer from a random start, without
        `input_norms`, is a plain Llama layer for any target: EAGLE-1's layout has no other."""
        config = super().shape(target, drafter, draft_vocab_size)
        if drafter.init == "random" and not config.input_norms:
            config.qk_norm = config.output_bias = config.mlp_bias = False
        return config


OUTPUTS = "outputs"  # carried by the state while a tree grows: the layer's outputs at its nodes [B, n, H]


class EagleModel(LayeredDrafter):
    """EAGLE's autoregression head."""

    config_class = EagleConfig
    base_model_prefix = "eagle"
    first_token = False

    def __init__(self, config: EagleConfig):
        super().__init__(config, input_norm=config.input_norms, final_norm=config.input_norms)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.token_fc: NativeLinear | None = None  # embeddings' half of `fc`, once packed; `fc` has the other
        if config.input_norms:
            self.embed_norm = RMSNorm(hidden, config.rms_norm_eps)
            self.state_norm = RMSNorm(hidden, config.rms_norm_eps)
        else:
            self.embed_norm = self.state_norm = nn.Identity()
        self.post_init()

    def _join(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's input [B, n, H] for tokens [B, n] and the states before them [B, n, H]."""
        if self.token_fc is not None:
            embedded = self.embed_norm(self.embed_tokens(tokens).float())  # [B, n, H]
            return (self.token_fc(embedded) + self.fc(self.state_norm(states.float()))).to(self.states_dtype)
        embedded = self.embed_norm(self.embed_tokens(tokens))  # [B, n, H]
        return self.fc(torch.cat((embedded, self.state_norm(states.to(embedded.dtype))), dim=-1))

    # training

    def inputs(
        self, input_ids: torch.Tensor, tapped: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        before = F.pad(tapped[:, :-1], (0, 0, 1, 0))  # [B, T, H]
        before = before * (positions > 0)[..., None]  # nothing of the document before
        return self._join(input_ids, before), None

    def _noisy(self, tapped: torch.Tensor, row_seeds: torch.Tensor) -> torch.Tensor:
        """Return states [B, T, H] with noise. Each row has its own generator, so that its noise does not
        depend on the process and batch that it is in."""
        drawn = torch.empty_like(tapped)
        for row, seed in zip(drawn, row_seeds.tolist(), strict=True):
            row.uniform_(-1, 1, generator=torch.Generator(tapped.device).manual_seed(seed))
        return tapped + self.config.noise * drawn

    def predictions(self, model, batch, attend, wanted) -> list[Prediction]:
        wanted = wanted & (batch["positions"] > 0)
        if self.training and self.config.noise:
            batch = {**batch, "tapped": self._noisy(batch["tapped"], batch["row_seeds"])}
        [prediction] = super().predictions(model, batch, attend, wanted)
        prediction.weight, prediction.state_weight = DISTRIBUTION_WEIGHT, 1.0
        return [prediction]

    # drafting

    def pack(self) -> None:
        """Prepare the weights for drafting: `fc` is split in two, because siblings share a state."""
        if can_be_native(self.fc):
            halves = self.fc.weight.tensor_split(2, dim=1)
            self.token_fc, self.fc = (NativeLinear(one, narrow=True) for one in halves)
        super().pack()

    def native_inputs(self, state: KvCache) -> tuple[Any, ...]:
        norms = (getattr(norm, "weight", None) for norm in (self.embed_norm, self.state_norm))
        join, follow = zip((self.token_fc, self.fc), norms)
        return self.embed_tokens.weight, join, follow, state.carried[LAST], True

    @torch.no_grad()
    def update(
        self, state: KvCache, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Append verified tokens, each with the target's state before it."""
        tapped = tapped.to(self.states_dtype)  # [B, n, H]
        before = state.carried.get(LAST)  # [B, H]
        if before is None:  # the first token has none before it
            x, read = self._join(tokens[:, 1:], tapped[:, :-1]), counts - 1
        else:
            x, read = self._join(tokens, torch.cat((before[:, None], tapped[:, :-1]), 1)), counts
        self.read(state, x, read)
        state.carried = {LAST: tapped[torch.arange(len(tokens), device=tokens.device), counts - 1]}  # [B, H]

    def prefix(self, state: KvCache, length: int, room: int, tapped: torch.Tensor) -> KvCache:
        return super().prefix(state, length - 1, room, tapped)  # the first token has not been read

    def prune(self, state: KvCache, root: torch.Tensor, tapped: torch.Tensor, keep: torch.Tensor) -> None:
        outputs = state.carried[OUTPUTS]  # [1, n, H]; `update` drops them
        super().prune(state, root, tapped, keep)
        state.carried[OUTPUTS] = outputs[:, keep]

    def join(self, states: Sequence[KvCache]) -> Any:
        for state in states:  # their trees differ in width; `update` drops them anyway
            state.carried.pop(OUTPUTS, None)
        return super().join(states)

    def draft_inputs(
        self, state: KvCache, tree: TokenTree, frontier: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        last = state.carried[LAST][:, None]  # [B, 1, H]
        known = state.carried.get(OUTPUTS, last[:, :0])  # [B, m, H]
        outputs = F.pad(known, (0, 0, 0, tree.width - known.shape[1]))  # [B, n, H]
        state.carried[OUTPUTS] = outputs
        parents = tree.parents.gather(1, frontier)[..., None]  # [B, f, 1]
        before = outputs.gather(1, parents.clamp(min=0).expand(-1, -1, outputs.shape[-1]))  # [B, f, H]
        return self._join(tokens, torch.where(parents < 0, last, before))

    def keep_outputs(self, state: KvCache, frontier: torch.Tensor, states: torch.Tensor) -> None:
        state.carried[OUTPUTS].scatter_(1, frontier[..., None].expand_as(states), states)

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        """Initialize like `LayeredDrafter`; `fc` starts with the identity for states and a halved random part
        for embeddings."""
        super().initialize_from(target, drafter, draft_ids)
        hidden = self.config.hidden_size
        with torch.no_grad():
            self.fc.weight[:, :hidden] *= 0.5
            self.fc.weight[:, hidden:] = torch.eye(hidden)
