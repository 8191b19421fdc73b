"""EDD, the effective draft decoder: one decoder layer that reads the target's hidden states as soft prompts.

Keys and values come from the hidden states of everything verified *and* from the token embeddings of the
current block (the root and the drafts after it); queries come from token embeddings only, so nothing is ever
computed at soft-prompt positions but a key and a value (EDD paper, §3.1, eq. 2-3). Position of hidden state i
and of token i is i.

`layers` > 1 goes beyond the paper: each further layer projects its own keys and values from the same hidden
states.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from drafttrain.drafters.config import DrafterConfig, DraftModelConfig
from drafttrain.drafters.layered import KvState, LayeredDrafter
from drafttrain.target.frozen import FrozenTarget


class EddConfig(DraftModelConfig):
    model_type = "drafttrain_edd"

    def __init__(self, **kwargs: Any):  # transformers makes a dataclass of a config without one
        super().__init__(**kwargs)


class EddModel(LayeredDrafter):
    """The drafter of the EDD paper."""

    config_class = EddConfig
    base_model_prefix = "edd"
    soft_prompts = True

    def __init__(self, config: EddConfig):
        super().__init__(config)
        taps, hidden = len(config.tapped_blocks), config.hidden_size
        self.fc = nn.Linear(taps * hidden, hidden, bias=False) if taps > 1 else nn.Identity()
        self.post_init()

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        super().initialize_from(target, drafter, draft_ids)
        if isinstance(self.fc, nn.Linear):  # start from the mean of the tapped blocks
            taps, hidden = len(self.config.tapped_blocks), self.config.hidden_size
            with torch.no_grad():
                self.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) / taps)

    def inputs(
        self, input_ids: torch.Tensor, tapped: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed_tokens(input_ids)  # [B, T, H]
        return x, self.fc(tapped.to(x.dtype))

    @torch.no_grad()
    def observe(
        self, state: KvState, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Appends verified hidden states as soft prompts. Tokens are not read: the states tell of them."""
        self.read(state, self.fc(tapped.to(state.kv.dtype)), counts)


AutoConfig.register(EddConfig.model_type, EddConfig)
AutoModel.register(EddConfig, EddModel)
