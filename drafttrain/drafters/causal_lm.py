"""A small causal LM with the target's vocabulary as drafter, distilled or unchanged: any that transformers
loads. It reads tokens, not the target's states.

With `lora_rank`, low-rank adapters (peft) are trained instead of its weights and merged at the end.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel, Prediction
from drafttrain.drafters.model_config import TOKENIZER_PROBE, DraftModelConfig, identity
from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.linear import NativeLinear, make_native
from drafttrain.target_lm import attention
from drafttrain.target_lm.cache import CACHE_ARGUMENT, TreeCache
from drafttrain.target_lm.cpu_linear import pack_linears
from drafttrain.target_lm.joined import JoinedCache
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.native import can_run_natively, native_blocks
from drafttrain.target_lm.packed import run_packed
from drafttrain.target_lm.stock_masks import allowed_slots, attention_mask
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

NONE = -2  # token and parent of a node that has not been read; the root's parent is -1
FEW = 16  # verified tokens that may wait for the next root's forward; more are run at once, as a prompt is


class CausalLmConfig(DraftModelConfig):
    """Config of the small LM (`lm`), its name, and the rank of the adapters it was trained with."""

    model_type = "drafttrain_causal_lm"

    lm: dict[str, Any] = field(default_factory=dict)
    lm_name: str | None = None
    lora_rank: int | None = None

    def lm_config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(**self.lm)


def _check_head(small: FrozenTarget, name: str) -> None:
    """Validate that logits are the plain output of a linear head: drafting reads only its weight.

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
    """Return the LM with low-rank adapters on all linear layers but its head; only they are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), lm)


@dataclass
class CausalLmState:
    """Keys and values of verified tokens, followed by those of the tree in flight, and the newest verified
    tokens, which the next root's forward reads.

    Attributes:
        unread: int64 [B, m], of which the first counts[b] are valid.
        counts: int64 [B].
        nodes: tokens and parents of the tree's nodes that have been read, NONE for others, int64 [B, 2, n].
            Node j is in slot j after the verified ones.
    """

    cache: TreeCache
    unread: torch.Tensor
    counts: torch.Tensor
    nodes: torch.Tensor

    @classmethod
    def all_read(cls, cache: TreeCache) -> "CausalLmState":
        counts = torch.zeros_like(cache.lengths)  # [B]
        return cls(cache, counts[:, None][:, :0], counts, counts[:, None, None].expand(-1, 2, 1)[..., :0])

    def keep(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Append verified tokens [B, m], of which the first counts[b] are valid. Those that are nodes which
        have been read keep their keys and values; the rest become `unread`."""
        words, parents = self.nodes.unbind(1)  # [B, n] each
        n, m = words.shape[1], tokens.shape[1]
        order = torch.arange(m, device=tokens.device).expand_as(tokens)  # [B, m]
        valid = order < counts[:, None]  # [B, m]
        path, known = torch.zeros_like(tokens), torch.zeros_like(counts)  # [B, m], [B]
        if n:
            node = torch.full_like(counts, -1)  # [B] above the root
            going = torch.ones_like(counts, dtype=torch.bool)  # [B]
            for i in range(m):
                child = (parents == node[:, None]) & (words == tokens[:, i, None])  # [B, n]
                going = going & valid[:, i] & child.any(1)
                node = child.byte().argmax(1)
                path[:, i], known = torch.where(going, node, 0), known + going
            self.cache.commit(path, known)
        rest = counts - known  # [B]
        width = int(rest.max())
        later = (known[:, None] + order[:, :width]).clamp(max=m - 1)  # [B, w]
        self.unread, self.counts, self.nodes = tokens.gather(1, later), rest, self.nodes[..., :0]


def _stack(parts: Sequence[torch.Tensor], value: int = 0) -> torch.Tensor:
    """Concatenate tensors [b, ..., m] of different m, padded on the right."""
    m = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, m - part.shape[-1]), value=value) for part in parts])


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
        self.draft_head: nn.Module | None = None  # over the draft vocabulary, once it is packed
        self.freeze([])
        self.post_init()

    @classmethod
    def create(cls, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> "CausalLmModel":
        """Load the LM that `drafter.model` names, in fp32, to draft the tokens `draft_ids` [D].

        Raises:
            UserError: there is none, its tokenizer is not the target's, it has fewer learned positions than
                the target or lacks tokens of `draft_ids`, or it changes logits after its head.
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
                f"drafter.model: must have all {int(draft_ids.max()) + 1} tokens of {target.name}, got "
                f"{drafter.model} with {small.vocab_size}; name a larger LM, or train it with a "
                "drafter.draft_vocab_size"
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
        head = nn.Linear(self._head.in_features, self.draft_vocab_size, bias=False, device="meta")
        head.weight = self._head.weight  # without a copy of the whole vocabulary
        if self.draft_vocab_size < len(head.weight):
            head.weight = nn.Parameter(head.weight[self.draft_to_target], requires_grad=False)
        if not make_native(base, narrow=True):  # drafting is bound by reading its weights
            pack_linears(base)
            self.draft_head = head
        else:
            self.draft_head = NativeLinear(head.weight, narrow=True)
            self.native = native_blocks(base, config) if is_known else None

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

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens with 0 in place of those that the target has added to the small LM's vocabulary."""
        n = self.lm.get_input_embeddings().num_embeddings
        return tokens.masked_fill(tokens >= n, 0) if n < self.config.target_vocab_size else tokens

    # training

    def forward(self, input_ids: torch.Tensor, document_start: torch.Tensor, wanted: torch.Tensor):
        """Return the head's inputs, [N, H], at the wanted tokens, bool [B, T], of packed rows [B, T]."""
        config = self.lm.config.get_text_config()
        states = run_packed(self.lm.base_model, config, self._known(input_ids), document_start)
        return states[wanted]

    def predictions(self, model, batch, attend, wanted) -> list[Prediction]:
        states = model(batch["input_ids"], batch["document_start"], wanted)  # [N, H]
        return [Prediction(states, self._head.weight[self.draft_to_target], wanted)]

    # drafting

    def new_state(self, batch: int, max_len: int) -> CausalLmState:
        weight = self._head.weight
        layers = self.lm.config.get_text_config().num_hidden_layers
        return CausalLmState.all_read(TreeCache(layers, batch, max_len, weight.dtype, weight.device))

    def select_rows(self, state: CausalLmState, rows: torch.Tensor) -> CausalLmState:
        state.cache.select_rows(rows)
        return CausalLmState(state.cache, state.unread[rows], state.counts[rows], state.nodes[rows])

    def append_rows(self, state: CausalLmState, other: CausalLmState) -> CausalLmState:
        state.cache.append_rows(other.cache)
        counts = torch.cat([state.counts, other.counts])
        unread, nodes = _stack([state.unread, other.unread]), _stack([state.nodes, other.nodes], NONE)
        return CausalLmState(state.cache, unread, counts, nodes)

    def prefix(self, state: CausalLmState, length: int, room: int, tapped: torch.Tensor) -> CausalLmState:
        if state.unread.shape[1]:
            self._read(state, state.unread, state.counts)
        return CausalLmState.all_read(state.cache.copy(length, room))

    def join(self, states: Sequence[CausalLmState]) -> CausalLmState:
        cache = JoinedCache([state.cache for state in states])
        counts = torch.cat([state.counts for state in states])
        unread, nodes = [state.unread for state in states], [state.nodes for state in states]
        return CausalLmState(cache, _stack(unread), counts, _stack(nodes, NONE))

    def split(self, joined: CausalLmState, states: Sequence[CausalLmState]) -> None:
        sizes = [len(state.counts) for state in states]
        parts = (joined.unread, joined.counts, joined.nodes)
        for state, unread, counts, nodes in zip(states, *(part.split(sizes) for part in parts)):
            state.unread, state.counts, state.nodes = unread[:, : int(counts.max())], counts, nodes

    @torch.no_grad()
    def update(
        self, state: CausalLmState, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Append verified tokens [B, n]: a prompt is run at once, up to `FEW` tokens with the next root."""
        if state.unread.shape[1]:
            self._read(state, state.unread, state.counts)
        if state.cache.longest() and tokens.shape[1] <= FEW:
            state.keep(tokens, counts)
        else:
            self._read(state, tokens, counts)

    def prune(
        self, state: CausalLmState, root: torch.Tensor, tapped: torch.Tensor, keep: torch.Tensor
    ) -> None:
        state.cache.advance(keep)  # the root's key depends on verified tokens alone
        state.nodes = state.nodes[..., :0]

    def _read(self, state: CausalLmState, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Run tokens [B, n] after those in the cache, and commit the first counts[b] of each row."""
        cache, n = state.cache, tokens.shape[1]
        cache.reserve(n)
        slots, _ = cache.open(n)  # [B, n]
        self._run(state, tokens, slots, slots, causal(n, tokens.device))
        cache.add(counts, n)
        state.unread, state.counts = tokens[:, :0], torch.zeros_like(counts)
        state.nodes = state.nodes[..., :0]

    @torch.no_grad()
    def expand(self, state: CausalLmState, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, f, D] after the frontier's nodes (see `Drafter.expand`)."""
        logits = self._logits(self._read_frontier(state, tree, frontier))
        return torch.log_softmax(logits, dim=-1, dtype=torch.float)

    @torch.no_grad()
    def top(
        self, state: CausalLmState, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k most probable tokens after the frontier's nodes (see `Drafter.top`)."""
        if not isinstance(self.draft_head, NativeLinear):
            return super().top(state, tree, frontier, k)
        states = self._read_frontier(state, tree, frontier)
        return self.draft_head.top_log_probs(states, min(k, self.draft_vocab_size))

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [B, f, D] of the draft vocabulary after the head's inputs [B, f, H]."""
        if isinstance(self.draft_head, NativeLinear):
            return self.draft_head.product(states)
        states = states.to(self._head.weight.dtype)
        if self.draft_head is not None:
            return self.draft_head(states)
        return self._head(states)[..., self.draft_to_target]

    def _read_frontier(self, state: CausalLmState, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return the head's inputs at the frontier's nodes, [B, f, H], and write their keys and values."""
        facts = torch.stack([tree.tokens, tree.parents], 1)  # [B, 2, n]
        is_read = torch.zeros_like(tree.tokens, dtype=torch.bool).scatter_(1, frontier, True)  # [B, n]
        # padded for new nodes; cropped when a new, smaller tree begins
        known = F.pad(state.nodes, (0, tree.width - state.nodes.shape[2]), value=NONE)  # [B, 2, n]
        state.nodes = torch.where(is_read[:, None], facts, known)
        if state.unread.shape[1]:
            return self._read_root(state, tree.tokens[:, 0])
        cache, n = state.cache, tree.width
        cache.reserve(n)
        starts = cache.lengths[:, None]  # [B, 1]
        slots = starts + frontier  # [B, f]
        cache.open_at(slots, cache.longest() + n)
        ancestors = tree.ancestors().gather(1, frontier[..., None].expand(-1, -1, n))  # [B, f, n]
        tokens = tree.tokens.gather(1, frontier)  # [B, f]
        return self._run(state, tokens, starts + tree.depths.gather(1, frontier), slots, ancestors)

    def _read_root(self, state: CausalLmState, root: torch.Tensor) -> torch.Tensor:
        """Run the unread tokens and then the roots [B]; return the head's inputs at the roots, [B, 1, H].

        In a row with fewer unread tokens than others the root follows them, in the slot of a tree's root, and
        padding goes to slots that nothing else uses.
        """
        cache, unread, counts = state.cache, state.unread, state.counts
        m = unread.shape[1]
        cache.reserve(2 * m + 1)
        order = torch.arange(m, device=root.device).expand_as(unread)  # [B, m]
        is_padding = order >= counts[:, None]  # [B, m]
        steps = torch.cat([order, counts[:, None]], 1)  # [B, m + 1] slots after the verified ones
        places = torch.cat([torch.where(is_padding, m + 1 + order, order), counts[:, None]], 1)  # [B, m + 1]
        width = torch.arange(2 * m + 1, device=root.device)  # [w]
        seen = (width <= steps[..., None]) & (width <= counts[:, None, None])  # [B, m + 1, w]
        seen |= width == places[..., None]
        start = cache.lengths[:, None]  # [B, 1]
        cache.open_at(start + places, cache.longest() + 2 * m + 1)
        tokens = torch.cat([unread, root[:, None]], 1)  # [B, m + 1]
        states = self._run(state, tokens, start + steps, start + places, seen)
        cache.commit(order, counts)
        state.unread, state.counts = unread[:, :0], torch.zeros_like(counts)
        return states[:, -1:]

    def _run(
        self,
        state: CausalLmState,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        ancestors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the head's inputs [B, n, H] for tokens [B, n] at positions and slots [B, n]. Each sees the
        verified slots and, after them, those marked in `ancestors`, bool [B, n, w] or [n, w]."""
        config, cache, view = self.lm.config.get_text_config(), state.cache, state.cache.view
        tokens = self._known(tokens)
        if self.native is not None:
            cache.allocate(self.native.kv_heads, self.native.head_dim)
            x = self.lm.get_input_embeddings().weight[tokens].float()  # [B, n, H]
            return self.native(x, cache.nodes(positions, slots, ancestors), view)[1]
        allowed = allowed_slots(cache.lengths, ancestors, view)  # [B, n, view]
        # for sliding windows: slots are the positions of verified tokens, and a tree is far from the edge
        kv_positions = torch.arange(view, device=tokens.device).expand(len(tokens), view)  # [B, view]
        mask = attention_mask(allowed, kv_positions, positions, config, self._head.weight.dtype)
        if not getattr(config, "rope_parameters", None):
            # learned positions end; drafts beyond the last one are cut off before they are verified
            positions = positions.clamp(max=config.max_position_embeddings - 1)
        return self.lm.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
        ).last_hidden_state


def as_drafter(path: str | os.PathLike, target: FrozenTarget) -> DraftModel:
    """Load a small LM to draft unchanged, over the whole vocabulary of the target.

    Raises:
        UserError: no LM there, or one that does not fit the target (see `CausalLmModel.create`).
    """
    tokens = len(target.tokenizer) if target.tokenizer else target.vocab_size  # the rows beyond are padding
    config = DrafterConfig(kind="causal_lm", draft_vocab_size=None, model=str(path))
    drafter = CausalLmModel.create(target, config, torch.arange(tokens))
    for weight in drafter.parameters():  # not the buffers: rotary frequencies stay in fp32
        weight.data = weight.data.to(target.dtype)
    return drafter.to(target.device).eval()
