"""The frozen target: any `AutoModelForCausalLM`, read through forward hooks and driven with 4-D masks.

No modelling files are vendored and nothing is monkey-patched: blocks are tapped by hooks, trees are verified
by passing an explicit mask and explicit positions, and the LM head is applied separately to the rows read.
"""

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from threading import get_ident

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.data.chat import tokenizer_hash
from drafttrain.kernels.blocks import NativeBlocks, Nodes
from drafttrain.kernels.linear import NativeLinear, can_be_native, make_native
from drafttrain.kernels.team import native_team
from drafttrain.target_lm import attention
from drafttrain.target_lm.cache import CACHE_ARGUMENT, TreeCache
from drafttrain.target_lm.native import TOLERANCE, NativeCheck, can_run_natively, native_blocks
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint

# Config keys that decide a forward; not the whole config, as new versions of transformers add keys to it.
CONFIG_KEYS = (
    "hidden_act",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)


def weights_hash(model: nn.Module) -> str:
    """Return a hash of evenly spaced numbers of every parameter: cheap, and different after fine-tuning."""
    return tensors_hash(sorted(model.named_parameters()))


def tensors_hash(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of up to 64 evenly spaced numbers of each tensor; tensors come in the order of names.

    Numbers are rounded to bf16 first, so that a model has the same hash in any dtype.
    """
    digest = hashlib.sha256()
    for name, weight in tensors:
        step = -(-weight.numel() // 64)
        sample = weight.detach().flatten()[::step].to("cpu", torch.bfloat16)  # [<= 64]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def target_fingerprint(weights: str, config: PreTrainedConfig) -> str:
    """Return a target's fingerprint, from the hash of its weights and the `CONFIG_KEYS` of its config."""
    return fingerprint([weights, {key: getattr(config, key, None) for key in CONFIG_KEYS}])


@dataclass
class TargetStates:
    """Hidden states of a forward: `tapped` [B, n, K·H] (outputs of the tapped blocks, concatenated) and
    `final` [B, n, H] (after the final norm: the input of the LM head)."""

    tapped: torch.Tensor
    final: torch.Tensor


def scale_logits(config: PreTrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    """Scale logits as some architectures do after the head: Gemma soft-caps, Cohere and Granite scale."""
    cap = getattr(config, "final_logit_softcapping", None)
    if getattr(config, "logit_scale", None) is not None:
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    return logits if cap is None else cap * torch.tanh(logits / cap)


def block_number(block: int, n_blocks: int) -> int:
    """Return a block's number, counted from 0. Negative numbers count from the end; `n_blocks` means the
    state after the final norm, as in `hidden_states` of transformers."""
    return block + n_blocks if block < 0 else block


def max_positions(config: PreTrainedConfig) -> float:
    """Return the most tokens that a text may have, given a target's text config; infinite without a limit.

    For longrope these are its original positions: beyond them it rotates all keys of a forward differently,
    also those of shorter texts and drafts.
    """
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))):
        if one.get("rope_type") == "longrope":
            limit = min(limit, one.get("original_max_position_embeddings") or limit)
    return limit


class FrozenTarget:
    """Causal LM with frozen weights that verifies trees and provides hidden states.

    Args:
        model: the language model; its parameters are frozen here.
        tokenizer: its tokenizer.
        name: folder or Hub id, for messages and for the drafter's config.
        tapped_blocks: blocks whose outputs are wanted, numbered from 0; negative numbers count from the end
            (-4 is block L - 4, `hidden_states[-4]` of transformers).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        tapped_blocks: Sequence[int] = (),
    ):
        self.model, self.tokenizer, self.name = model.eval().requires_grad_(False), tokenizer, name
        self.config = model.config.get_text_config()
        attention.use(model)
        self.base, self.lm_head = model.base_model, model.get_output_embeddings()
        self.embed = model.get_input_embeddings()
        self.is_packed = False
        self.native: NativeBlocks | None = None  # runs the blocks once the target is packed, where it can
        blocks = getattr(self.base, "layers", None)
        if blocks is None:
            blocks = getattr(self.base, "h", None)
        if blocks is None or self.lm_head is None:
            raise UserError(
                f"{name}: a {type(model).__name__} has no list of decoder blocks or no LM head where "
                "drafttrain looks for them (`layers` or `h`); use a decoder-only causal LM"
            )
        self.blocks: nn.ModuleList = blocks
        self.tap(tapped_blocks)
        self.read_head: nn.Module = self.lm_head

    # sizes

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def eos_token_ids(self) -> set[int]:
        """Return all tokens that end a generation: of generation config, config and tokenizer."""
        generation = getattr(self.model, "generation_config", None)
        found = [getattr(generation, "eos_token_id", None), self.config.eos_token_id]
        found.append(getattr(self.tokenizer, "eos_token_id", None))
        ids: set[int] = set()
        for item in found:
            ids.update(item if isinstance(item, (list, tuple)) else [] if item is None else [item])
        return ids

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the weights and of the config keys that decide a forward."""
        return target_fingerprint(weights_hash(self.model), self.config)

    @cached_property
    def tokenizer_hash(self) -> str | None:
        """Return the hash of the tokenizer, which drafters and n-gram caches must match; None without one."""
        return None if self.tokenizer is None else tokenizer_hash(self.tokenizer)

    def pack(self) -> None:
        """Lay out the weights for decoding: native on a CPU with a compiler, else packed for oneDNN in bf16.

        Afterwards forwards over trees are native if the architecture is known. They compute in fp32, except
        for weights, keys and values (and the inputs of bf16 products). `lm_head` keeps its plain weight,
        which embeddings may share and drafters read.
        """
        if self.is_packed:
            return
        if can_be_native(self.lm_head):
            with native_team():  # otherwise torch's threads spin after each small operator of the check
                self._make_native()
        else:
            self._pack_linears()

    def _pack_linears(self) -> None:
        from drafttrain.target_lm.cpu_linear import PackedLinear, can_pack, pack_linears  # without a compiler

        if can_pack(self.lm_head):
            _ = self.fingerprint  # computed while the weights can be read
            pack_linears(self.base)
            self.read_head, self.is_packed = PackedLinear(self.lm_head.weight, self.lm_head.bias), True

    def _make_native(self) -> None:
        _ = self.fingerprint  # computed while the weights can be read
        knows = can_run_natively(self.base, self.config)
        check = NativeCheck(self.base, self.config) if knows else None
        make_native(self.base)
        self.read_head = NativeLinear(self.lm_head.weight, self.lm_head.bias)
        self.is_packed = True
        if check is None:
            return
        native = native_blocks(self.base, self.config)
        if (error := check.error(native)) <= TOLERANCE:  # false for NaN
            self.native = native
        else:
            warnings.warn(
                f"{self.name}: the native forward differs from the stock one by {error:.2g} of its standard "
                "deviation; the stock one is used, which is slower",
                stacklevel=3,
            )

    def own_cores(self, threads: int | None = None) -> AbstractContextManager[None]:
        """Give the cores to native forwards, as `native_team` does; do nothing for stock forwards."""
        return nullcontext() if self.native is None else native_team(threads)

    @property
    def timed_modules(self) -> tuple[nn.Module, nn.Module]:
        """Return the modules whose calls make up the target's forward: blocks and head."""
        return self.native or self.base, self.read_head

    # lengths

    @property
    def positions(self) -> float:
        """Return the most tokens that a text may have (`max_positions`)."""
        return max_positions(self.config)

    def fits(self, prompt_ids: Sequence[int], max_new_tokens: int) -> bool:
        """Return whether prompt and new tokens fit into the target's positions."""
        return len(prompt_ids) + max_new_tokens <= self.positions

    def check_length(self, prompt_ids: Sequence[int], max_new_tokens: int, which: str) -> None:
        """Require that prompt and new tokens fit into the target's positions.

        Raises:
            UserError: they do not; the message names the prompt by `which`.
        """
        if not self.fits(prompt_ids, max_new_tokens):
            raise UserError(
                f"{which}: prompt and new tokens must fit into the {self.positions} "
                f"positions of {self.name}, got {len(prompt_ids)} + {max_new_tokens}; remove it or lower "
                "max_new_tokens"
            )

    # taps

    def tap(self, blocks: Sequence[int]) -> None:
        """Choose the blocks whose outputs the next forwards return, instead of those of an earlier call.
        `n_blocks` is the state after the final norm. Drafters that share a target but read different
        blocks call this before their turn.

        Raises:
            UserError: no such block.
        """
        for block in blocks:
            if not -self.n_blocks <= block <= self.n_blocks:
                raise UserError(
                    f"tapped_blocks: must be within the {self.n_blocks} blocks of {self.name}, got {block}"
                )
        self.tapped_blocks = [block_number(block, self.n_blocks) for block in blocks]

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect the outputs of the tapped blocks. Hooks exist only inside the block and record only this
        thread, because the caller's model may also be trained, copied, or run by others."""
        taps: dict[int, torch.Tensor] = {}  # [B, n, H] each
        thread = get_ident()

        def keep(block: int, module: nn.Module, args: tuple, output) -> None:
            if get_ident() == thread:
                taps[block] = output[0] if isinstance(output, tuple) else output

        inner = set(self.tapped_blocks) - {self.n_blocks}
        hooks = [self.blocks[block].register_forward_hook(partial(keep, block)) for block in inner]
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()

    def _states(self, taps: dict[int, torch.Tensor], final: torch.Tensor) -> TargetStates:
        taps[self.n_blocks] = final
        found = [taps[block] for block in self.tapped_blocks]
        tapped = found[0] if len(found) == 1 else torch.cat(found, dim=-1) if found else final[..., :0]
        return TargetStates(tapped=tapped, final=final)

    # forwards

    @torch.no_grad()
    def encode(self, input_ids: torch.Tensor, document_start: torch.Tensor) -> TargetStates:
        """Return the states of packed rows, without the LM head, for training and collection.

        Args:
            input_ids: [B, T].
            document_start: index in its row at which each token's document begins [B, T]; a token sees its
                own document up to itself.
        """
        from drafttrain.target_lm.packed import CPU_TOKENS, causal_document_mask, run_packed

        rows = max(1, CPU_TOKENS // input_ids.shape[1])
        if self.native is not None:
            order = torch.arange(input_ids.shape[1])  # [T]
            cache = self.new_cache(*input_ids.shape)
            cache.allocate(self.native.kv_heads, self.native.head_dim)
            seen = causal_document_mask(document_start)  # [B, T, T]
            positions = order - document_start  # [B, T]
            nodes = cache.nodes(positions, order.expand_as(input_ids), seen)
            return self._run_native(input_ids, nodes, len(order))
        if self.device.type == "cpu" and len(input_ids) > rows:
            parts = [self.encode(*part) for part in zip(input_ids.split(rows), document_start.split(rows))]
            return TargetStates(*(torch.cat(x) for x in zip(*((p.tapped, p.final) for p in parts))))
        with self._tapped() as taps:
            return self._states(taps, run_packed(self.base, self.config, input_ids, document_start))

    @torch.no_grad()
    def forward(
        self, cache: TreeCache, tokens: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor
    ) -> TargetStates:
        """Run the nodes of a tree (or the tokens of a prompt) after each row's committed tokens.

        Keys and values stay in the slots after the committed ones until `cache.commit`.

        Args:
            tokens: [B, n].
            depths: [B, n] or [n], distance from the first uncommitted position (0 for the root).
            ancestors: bool [B, n, n] or [n, n], each node's ancestors and itself.
        """
        batch, n = tokens.shape
        slots, view = cache.open(n)
        positions = cache.lengths[:, None] + depths  # [B, n]
        if self.native is not None:
            cache.allocate(self.native.kv_heads, self.native.head_dim)
            return self._run_native(tokens, cache.nodes(positions, slots, ancestors), view)
        from drafttrain.target_lm.stock_masks import allowed_slots, attention_mask  # not with native forwards

        allowed = allowed_slots(cache.lengths, ancestors, view)  # [B, n, view]
        kv_positions = torch.arange(view, device=tokens.device).expand(batch, view)  # [B, view]
        if getattr(self.config, "sliding_window", None):
            kv_positions = kv_positions.scatter(1, slots, positions)
        mask = attention_mask(allowed, kv_positions, positions, self.config, self.dtype)
        arguments = {"attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
        with self._tapped() as taps:
            out = self.base(input_ids=tokens, use_cache=True, **arguments)
        return self._states(taps, out.last_hidden_state)

    @torch.no_grad()
    def forward_many(
        self,
        caches: Sequence[TreeCache],
        tokens: Sequence[torch.Tensor],
        depths: Sequence[torch.Tensor],
        ancestors: Sequence[torch.Tensor],
    ) -> list[TargetStates]:
        """Run the nodes of several trees, each after its own cache, in one forward without padding.

        Stock models with sliding windows, and those that take no custom attention function, run once for each
        cache.

        Args:
            tokens, depths, ancestors: for each cache, as `forward` takes them.
        """
        trees = list(zip(caches, tokens, depths, ancestors, strict=True))
        alone = self.native is None and not attention.attends_within_documents(self.config)
        if alone or len(trees) == 1:
            return [self.forward(*tree) for tree in trees]
        parts, views = [], []
        for cache, tree, steps, seen in trees:
            slots, view = cache.open(tree.shape[1])
            positions = (cache.lengths[:, None] + steps).expand_as(tree)  # [B, n]
            parts.append((cache, slots, positions, seen))
            views.append(view)
        flat = torch.cat([tree.flatten() for tree in tokens])  # [N]
        if self.native is not None:
            for cache in caches:
                cache.allocate(self.native.kv_heads, self.native.head_dim)
            nodes = Nodes.join(
                [cache.nodes(positions, slots, seen) for cache, slots, positions, seen in parts]
            )
            states = self._run_native(flat, nodes, max(views))
        else:
            from drafttrain.target_lm.apart import run_apart  # not with native forwards

            with self._tapped() as taps:
                states = self._states(taps, run_apart(self.base, flat, parts, views, self.dtype))
            states = TargetStates(states.tapped[0], states.final[0])
        sizes = [tree.numel() for tree in tokens]
        split = zip(tokens, states.tapped.split(sizes), states.final.split(sizes))
        return [
            TargetStates(tapped.view(*tree.shape, -1), final.view(*tree.shape, -1))
            for tree, tapped, final in split
        ]

    def _run_native(self, tokens: torch.Tensor, nodes: Nodes, reach: int) -> TargetStates:
        """Run nodes with tokens [B, n] or [N] in the native blocks; all positions are below `reach`."""
        inner = [block for block in self.tapped_blocks if block < self.n_blocks]
        x = self.embed.weight[tokens].float()  # [..., H]
        tapped, final = self.native(x, nodes, reach, taps=inner)
        if len(inner) < len(self.tapped_blocks):  # the state after the final norm is among them
            parts = iter(tapped.split(self.hidden_size, dim=-1))
            taps = [final if block == self.n_blocks else next(parts) for block in self.tapped_blocks]
            tapped = taps[0] if len(taps) == 1 else torch.cat(taps, dim=-1)  # [..., K·H]
        return TargetStates(tapped, final)

    def head(self, final: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of final states [..., H], scaled and capped as in the model."""
        return self.scale_logits(self.read_head(final))

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap logits as the model does after the head."""
        return scale_logits(self.config, logits)

    def new_cache(self, batch: int, max_len: int) -> TreeCache:
        """Return an empty cache with room for `max_len` tokens in each of `batch` rows."""
        return TreeCache(self.n_blocks, batch, max_len, self.dtype, self.device)
