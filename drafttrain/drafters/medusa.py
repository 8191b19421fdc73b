"""MEDUSA-1: heads on the target's last hidden state, each for one token further ahead (Medusa paper, §2.2).

Head i reads the state at position t, after the target's final norm, through a residual block and predicts
token t + 2 + i; the target's own head predicts t + 1. While drafting, t is the last verified token, t + 1 the
root, and head i gives the nodes of depth i + 1, the same for any parent: trees are Cartesian products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel, Prediction
from drafttrain.drafters.model_config import DraftModelConfig
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

DECAY = 0.8  # of the weight of each further head in the loss (Medusa paper, eq. 1)


class MedusaConfig(DraftModelConfig):
    model_type = "drafttrain_medusa"
    reads = "last_state"

    heads: int = 5


@dataclass
class MedusaState:
    """The last verified state of each row, [B, H], and the heads' log-probabilities, [B, heads, D]."""

    last: torch.Tensor
    log_probs: torch.Tensor | None = None


class MedusaModel(DraftModel):
    """MEDUSA's heads over the draft vocabulary."""

    config_class = MedusaConfig
    base_model_prefix = "medusa"
    _same_input = ()
    attends = False

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        hidden, size = config.hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(config.heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, size, bias=False) for _ in range(config.heads))
        self.register_buffer("draft_to_target", torch.arange(size))
        self.max_depth = config.heads
        self.freeze([])
        self.post_init()

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        """Initialize all heads as the target's: blocks that add nothing, and its rows for `draft_ids` [D]."""
        super().initialize_from(target, drafter, draft_ids)
        with torch.no_grad():
            for block, head in zip(self.blocks, self.lm_heads):
                nn.init.zeros_(block.weight)
                head.weight.copy_(target.lm_head.weight[draft_ids.to(target.device)])

    def _read(self, states: torch.Tensor, head: int) -> torch.Tensor:
        """Return the input of head number `head` from the target's states [..., H]."""
        return states + nn.functional.silu(self.blocks[head](states))

    # training

    def forward(self, states: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return the inputs of all heads, [N, H], from the target's last states [B, T, H]: head i reads
        the positions sources[i], bool [B, T]."""
        states = states.to(self.blocks[0].weight.dtype)
        return torch.cat([self._read(states[source], i) for i, source in enumerate(sources)])

    def predictions(self, model, batch, attend, wanted) -> list[Prediction]:
        starts, sources, rows = batch["document_start"], [], []
        for head in range(self.config.heads):
            offset = head + 1
            source = torch.zeros_like(wanted)  # [B, T]
            same = starts[:, offset:] == starts[:, :-offset]
            source[:, :-offset] = wanted[:, offset:] & same
            sources.append(source)
            rows.append(torch.roll(source, offset, dims=1))  # the last ones are False: nothing wraps around
        states = model(batch["tapped"], sources).split([int(source.sum()) for source in sources])
        return [
            Prediction(states[i], self.lm_heads[i].weight, rows[i], weight=DECAY**i)
            for i in range(self.config.heads)
        ]

    # drafting

    def new_state(self, batch: int, max_len: int) -> MedusaState:
        weight = self.blocks[0].bias
        last = torch.zeros(batch, self.config.hidden_size, dtype=weight.dtype, device=weight.device)
        return MedusaState(last)

    def select_rows(self, state: MedusaState, rows: torch.Tensor) -> MedusaState:
        return MedusaState(state.last[rows])

    def append_rows(self, state: MedusaState, other: MedusaState) -> MedusaState:
        return self.join([state, other])

    def prefix(self, state: MedusaState, length: int, room: int, tapped: torch.Tensor) -> MedusaState:
        return MedusaState(tapped[None].to(state.last.dtype))

    def join(self, states: Sequence[MedusaState]) -> MedusaState:
        return MedusaState(torch.cat([state.last for state in states]))

    def split(self, joined: MedusaState, states: Sequence[MedusaState]) -> None:
        for state, last in zip(states, joined.last.split([len(state.last) for state in states])):
            state.last, state.log_probs = last, None

    @torch.no_grad()
    def update(
        self, state: MedusaState, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Store the state of the last verified token."""
        rows = torch.arange(len(tapped), device=tapped.device)
        state.last, state.log_probs = tapped[rows, counts - 1].to(state.last.dtype), None

    @torch.no_grad()
    def expand(self, state: MedusaState, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, f, D] after the frontier's nodes: those of the head for their depth.

        Raises:
            UserError: the tree is deeper than the number of heads.
        """
        depths = tree.depths.gather(1, frontier)  # [B, f]
        if int(depths.max()) >= self.config.heads:
            raise UserError(
                f"tree: must be at most {self.config.heads} tokens deep, the number of MEDUSA heads, got "
                f"{int(depths.max()) + 1}"
            )
        if state.log_probs is None:
            logits = [head(self._read(state.last, i)) for i, head in enumerate(self.lm_heads)]
            state.log_probs = torch.log_softmax(torch.stack(logits, 1), dim=-1, dtype=torch.float)
        return state.log_probs.gather(1, depths[..., None].expand(-1, -1, state.log_probs.shape[-1]))
