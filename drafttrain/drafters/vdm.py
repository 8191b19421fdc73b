"""VDM, the vanilla draft model that EDD is compared with: the same single decoder layer over the same frozen
embeddings, without the target's states (EDD paper, Table 1). It is a small causal LM.
"""

import torch

from drafttrain.drafters.layered import LayeredDrafter
from drafttrain.drafters.model_config import DraftModelConfig
from drafttrain.target_lm.cache import KvCache


class VdmConfig(DraftModelConfig):
    model_type = "drafttrain_vdm"


class VdmModel(LayeredDrafter):
    """One causal decoder layer."""

    config_class = VdmConfig
    base_model_prefix = "vdm"

    def __init__(self, config: VdmConfig):
        super().__init__(config)
        self.post_init()

    def inputs(
        self, input_ids: torch.Tensor, tapped: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return self.embed_tokens(input_ids), None

    @torch.no_grad()
    def update(
        self, state: KvCache, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Append verified tokens; in a single layer a token's key and value depend only on the token."""
        self.read(state, self.embed_tokens(tokens), counts)
