"""A small causal LM of the target's vocabulary as drafter, distilled or unchanged: any that transformers
loads. It reads tokens alone.

With `lora_rank` low-rank adapters are trained in place of its weights (peft), and merged at the end.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel, Prediction
from drafttrain.drafters.model_config import TOKENIZER_PROBE, DraftModelConfig, identity
from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.linear import make_native
from drafttrain.target_lm import attention
from drafttrain.target_lm.cache import TreeCache, attention_mask
from drafttrain.target_lm.cpu_linear import pack_linears
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget, run_packed
from drafttrain.target_lm.native import can_run_natively, native_blocks
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


class CausalLmConfig(DraftModelConfig):
    """With the small LM's own config as `lm`, its name, and the rank of the adapters it was trained with."""

    model_type = "drafttrain_causal_lm"

    lm: dict[str, Any] = field(default_factory=dict)
    lm_name: str | None = None
    lora_rank: int | None = None

    def lm_config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(**self.lm)


def _check_head(small: FrozenTarget, name: str) -> None:
    """Require logits that are the head's products: drafting reads the head alone.

    Raises:
        UserError: the LM scales or caps them, or adds a bias.
    """
    keys = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    changed = [key for key in keys if getattr(small.config, key, None) not in (None, 1, 1.0)]
    changed += ["a bias of the head"] if small.lm_head.bias is not None else []
    if changed:
        raise UserError(
            f"drafter.model: must be an LM with a plain linear head, got {name} with {changed[0]}"
        )


def with_adapters(lm: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Return the LM with low-rank adapters at all linear layers but its head; only they are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), lm)


@dataclass
class CausalLmState:
    """Keys and values of everything verified, followed by those of the tree in flight."""

    cache: TreeCache


class CausalLmModel(DraftModel):
    """The small LM, restricted to the draft vocabulary."""

    config_class = CausalLmConfig
    base_model_prefix = "causal_lm"
    attends = False

    def __init__(self, config: CausalLmConfig):
        super().__init__(config)
        self.lm = AutoModelForCausalLM.from_config(config.lm_config())
        attention.use(self.lm)
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size))
        self.native: NativeBlocks | None = None  # runs the LM once it is packed, where it can
        self.freeze([])
        self.post_init()

    @classmethod
    def create(cls, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> "CausalLmModel":
        """Return the LM that `drafter.model` names, in fp32, to draft the tokens `draft_ids` [D].

        Raises:
            UserError: there is none, its tokenizer is not the target's, it has fewer positions or tokens than
                the target needs, or it changes logits after its head.
        """
        small = load_target(drafter.model, dtype=torch.float32, device="cpu")
        _check_head(small, drafter.model)
        own, theirs = (getattr(lm.config, "max_position_embeddings", None) for lm in (small, target))
        if own and theirs and own < theirs and not getattr(small.config, "rope_parameters", None):
            raise UserError(
                f"drafter.model: must have the {theirs} positions of {target.name}, got {drafter.model} with "
                f"{own} learned ones"
            )
        if target.tokenizer:
            ids = [made(TOKENIZER_PROBE)["input_ids"] for made in (small.tokenizer, target.tokenizer)]
            if ids[0] != ids[1]:
                raise UserError(
                    f"drafter.model: must have the tokenizer of {target.name}, which reads "
                    f"{TOKENIZER_PROBE!r} as {ids[1]}, got {drafter.model}, which reads {ids[0]}"
                )
        if int(draft_ids.max()) >= small.vocab_size:
            raise UserError(
                f"drafter.model: must have all {target.vocab_size} tokens of {target.name}, got "
                f"{drafter.model} with {small.vocab_size}; set drafter.draft_vocab_size, or name a larger LM"
            )
        settings = small.model.config.to_dict()
        for name in ("dtype", "_name_or_path"):  # it computes in the dtype it is loaded in; paths are private
            settings.pop(name, None)
        config = CausalLmConfig(
            target=identity(target),
            target_vocab_size=target.vocab_size,
            draft_vocab_size=len(draft_ids),
            hidden_size=small.hidden_size,
            lm=settings,
            lm_name=Path(drafter.model).name,
            lora_rank=drafter.lora_rank,
        )
        model = cls(config)
        model.lm.load_state_dict(small.model.state_dict())
        if drafter.lora_rank is not None:
            model.lm = with_adapters(model.lm, drafter.lora_rank)
        return model

    def pack(self) -> None:
        base, config = self.lm.base_model, self.lm.config.get_text_config()
        is_known = can_run_natively(base, config)  # before its layers are replaced
        if not make_native(base):
            pack_linears(base)
        elif is_known:
            self.native = native_blocks(base, config)

    def finish(self) -> None:
        """Merge adapters into the weights."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for name, module in list(self.lm.named_modules()):
            if isinstance(module, BaseTunerLayer):
                module.merge()
                parent, _, child = name.rpartition(".")
                setattr(self.lm.get_submodule(parent), child, module.get_base_layer())

    @property
    def _head(self) -> nn.Module:
        return self.lm.get_output_embeddings()

    # training

    def forward(self, input_ids: torch.Tensor, document_start: torch.Tensor, wanted: torch.Tensor):
        """Return the head's inputs, [N, H], at the wanted tokens, bool [B, T], of packed rows [B, T]."""
        states = run_packed(self.lm.base_model, self.lm.config.get_text_config(), input_ids, document_start)
        return states[wanted]

    def predictions(self, model, batch, attend, wanted) -> list[Prediction]:
        states = model(batch["input_ids"], batch["document_start"], wanted)  # [N, H]
        return [Prediction(states, self._head.weight[self.draft_to_target], wanted)]

    # drafting

    def new_state(self, batch: int, max_len: int) -> CausalLmState:
        weight = self._head.weight
        layers = self.lm.config.get_text_config().num_hidden_layers
        dtype = weight.dtype if self.native is None else torch.float
        return CausalLmState(TreeCache(layers, batch, max_len, dtype, weight.device))

    def select_rows(self, state: CausalLmState, rows: torch.Tensor) -> CausalLmState:
        state.cache.select_rows(rows)
        return state

    def replace_rows(self, state: CausalLmState, rows: torch.Tensor, other: CausalLmState) -> None:
        state.cache.replace_rows(rows, other.cache)

    @torch.no_grad()
    def update(
        self, state: CausalLmState, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Run verified tokens [B, n] after those in the cache."""
        cache, (batch, n) = state.cache, tokens.shape
        order = torch.arange(n, device=tokens.device)  # [n]
        cache.reserve(n)
        slots, _ = cache.open(n)  # [B, n]
        causal = (order <= order[:, None]).expand(batch, n, n)
        self._run(state, tokens, slots, slots, causal)
        cache.commit(order.expand(batch, n), counts)

    @torch.no_grad()
    def expand(self, state: CausalLmState, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, f, D] after the frontier's nodes (see `Drafter.expand`)."""
        cache, n = state.cache, tree.width
        cache.reserve(n)
        starts = cache.lengths[:, None]  # [B, 1]
        slots = starts + frontier  # [B, f]
        cache.open_at(slots, int(cache.lengths.max()) + n)
        ancestors = tree.ancestors().gather(1, frontier[..., None].expand(-1, -1, n))  # [B, f, n]
        tokens = tree.tokens.gather(1, frontier)  # [B, f]
        states = self._run(state, tokens, starts + tree.depths.gather(1, frontier), slots, ancestors)
        logits = self._head(states.to(self._head.weight.dtype))[..., self.draft_to_target]  # [B, f, D]
        return torch.log_softmax(logits, dim=-1, dtype=torch.float)

    def _run(
        self,
        state: CausalLmState,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        ancestors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the head's inputs [B, n, H] for tokens [B, n] at positions and slots [B, n]. Each sees the
        verified slots and, after them, those of `ancestors`, bool [B, n, w]."""
        config, cache, view = self.lm.config.get_text_config(), state.cache, state.cache.view
        starts = cache.lengths[:, None]  # [B, 1]
        if self.native is not None:
            cache.allocate(self.native.kv_heads, self.native.head_dim)
            x = self.lm.get_input_embeddings().weight[tokens].float()  # [B, n, H]
            return self.native(x, cache.kv, cache.lengths, positions, slots, ancestors, view)[1]
        every = torch.arange(view, device=tokens.device)  # [view]
        seen = (every < starts)[:, None].expand(-1, tokens.shape[1], -1).clone()  # [B, n, view]
        after = starts + torch.arange(ancestors.shape[2], device=tokens.device)  # [B, w]
        seen.scatter_(2, after[:, None].expand_as(ancestors), ancestors)
        # a window counts positions; those of verified tokens are their slots, and a tree is far from its edge
        mask = attention_mask(
            seen, every.expand(len(tokens), view), positions, config, self._head.weight.dtype
        )
        return self.lm.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
