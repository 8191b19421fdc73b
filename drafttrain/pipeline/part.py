"""Part of a target for one stage of a pipeline: a range of its blocks, loaded without the others.

The part is the same architecture with fewer blocks, so transformers' own modules run it, or the native
library where it knows them. The first part has the embeddings, the last one the final norm and the head (a
tied matrix is in both).
"""

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from drafttrain.drafters.model import DraftModel
from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.linear import NativeLinear, make_native
from drafttrain.target_lm import attention
from drafttrain.target_lm.cache import CACHE_ARGUMENT, TreeCache
from drafttrain.target_lm.loading import load_config, load_tokenizer
from drafttrain.target_lm.model import (
    FrozenTarget,
    scale_logits,
    target_fingerprint,
    tensors_hash,
)
from drafttrain.target_lm.native import can_run_natively, native_blocks
from drafttrain.target_lm.stock_masks import allowed_slots, attention_mask
from drafttrain.target_lm.tree_check import SUPPORTED_LAYERS
from drafttrain.utils.errors import UserError, first_line
from drafttrain.utils.files import read_json, require_file, usable

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAMPLES, SAMPLE = 64, 4096  # places in each file of weights that ranks compare, and bytes of each
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configs with experts
NEEDED = ("layers", "embed_tokens", "norm", "rotary_emb")  # attributes that a model needs to be cut


class TargetPart:
    """Some blocks of a frozen target, run over the nodes of a tree after a KV cache of these blocks.

    Args:
        model: the blocks, and the embeddings, norm and head where it has them.
        blocks: their numbers in the whole target.
        n_blocks: of the whole target.
        taps: numbers in the whole target of blocks whose outputs are tapped; blocks of other parts are
            ignored. `n_blocks` means the state after the final norm.
    """

    def __init__(self, model: PreTrainedModel, blocks: range, n_blocks: int, taps: Sequence[int] = ()):
        self.model, self.blocks, self.n_blocks = model.eval().requires_grad_(False), blocks, n_blocks
        self.config, self.base = model.config, model.base_model
        weight = next(self.base.layers[0].parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == n_blocks
        self.taps = [tap for tap in taps if tap in blocks or (self.is_last and tap == n_blocks)]
        attention.use(model)
        self.native: NativeBlocks | None = None
        self.head: nn.Module = model.get_output_embeddings()
        self._tapped: dict[int, torch.Tensor] = {}
        for tap in self.taps:
            if tap < n_blocks:
                self.base.layers[tap - blocks.start].register_forward_hook(self._keep(tap))

    def _keep(self, tap: int) -> Callable:
        def hook(module: nn.Module, args, output) -> None:
            self._tapped[tap] = output[0] if isinstance(output, tuple) else output  # [1, n, H]

        return hook

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of the states that it passes to the next part."""
        return self.dtype if self.native is None else torch.float

    def pack(self, shared: Sequence[torch.Tensor] = ()) -> None:
        """Switch to the native library, if it supports the architecture.

        Args:
            shared: tensors that other modules use as well, which are not copied.
        """
        if can_run_natively(self.base, self.config) and make_native(self.base):
            if self.is_last:
                self.head = NativeLinear(self.head.weight, self.head.bias)
                self.model.set_output_embeddings(self.head)  # else the model would keep the row-major one
            unmap(self.model, shared)
            self.native = native_blocks(self.base, self.config, final=self.is_last)

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """Let native layers compute in fp32, with unchanged weights; stock modules keep their dtype."""
        layers = [self.native] if self.native else []
        layers += [self.head] if isinstance(self.head, NativeLinear) else []
        rounds = [layer.round_inputs for layer in layers]
        for layer in layers:
            layer.round_inputs = False
        try:
            yield
        finally:
            for layer, before in zip(layers, rounds):
                layer.round_inputs = before

    def new_cache(self, max_len: int, dtype: torch.dtype | None = None) -> TreeCache:
        """Return an empty cache of these blocks for one sequence; dtype None: that of the weights."""
        cache = TreeCache(len(self.blocks), 1, max_len, dtype or self.dtype, self.device)
        cache.allocate(self.config.num_key_value_heads, self.base.layers[0].self_attn.head_dim)
        return cache

    @torch.no_grad()
    def run(
        self,
        cache: TreeCache,
        x: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        first: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the nodes first … first + n - 1 of a tree, whose earlier nodes have been run.

        Args:
            x: tokens int64 [1, n] for the first part, else the states after the part before, [1, n, H].
            depths: of the nodes, int64 [n].
            ancestors: bool [n, first + n], each node's ancestors and itself.

        Returns:
            states after the last block (in the last part after the final norm), [1, n, H], and the tapped
            ones, [1, n, taps · H].
        """
        n = depths.shape[0]
        view = cache.reserve(first + n)
        slots = cache.lengths[:, None] + first + torch.arange(n, device=depths.device)  # [1, n]
        positions = cache.lengths[:, None] + depths  # [1, n]
        if self.is_first:
            x = self.base.embed_tokens(x)  # [1, n, H]
        if self.native is not None:
            inner = [tap - self.blocks.start for tap in self.taps if tap < self.n_blocks]
            x = x.float().clone()  # overwritten by the blocks
            nodes = cache.nodes(positions, slots, ancestors)
            tapped, final = self.native(x, nodes, view, taps=inner, final=self.is_last)
            out = x if final is None else final
            parts = iter(tapped.split(x.shape[-1], -1))  # [1, n, H] each
            found = [out if tap == self.n_blocks else next(parts) for tap in self.taps]
            return out, torch.cat(found, -1) if found else tapped
        x = x.to(self.dtype)  # native blocks before these pass on fp32
        cache.open_at(slots, view)
        allowed = allowed_slots(cache.lengths, ancestors, view)  # [1, n, view]
        kv_positions = torch.arange(view, device=depths.device)[None]  # [1, view]
        if getattr(self.config, "sliding_window", None):
            kv_positions = self._positions(cache, view, first, slots, positions)
        out = self.base(
            inputs_embeds=x,
            attention_mask=attention_mask(allowed, kv_positions, positions, self.config, x.dtype),
            position_ids=positions,
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
        ).last_hidden_state
        found = [out if tap == self.n_blocks else self._tapped.pop(tap) for tap in self.taps]
        return out, torch.cat(found, -1) if found else out[..., :0]

    @staticmethod
    def _positions(
        cache: TreeCache, view: int, first: int, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the positions of the tokens in all slots in view [1, view], which the cache carries for the
        nodes in flight."""
        known = cache.carried.get("positions", positions[:, :0])[:, :first]  # [1, first]
        cache.carried["positions"] = torch.cat([known, positions], 1)  # [1, first + n]
        verified = torch.arange(view - cache.carried["positions"].shape[1], device=slots.device)[None]
        return torch.cat([verified, cache.carried["positions"]], 1)  # [1, view]

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of states after the final norm [..., H]; only in the last part."""
        return scale_logits(self.config, self.head(final))


def load_part(
    place: str,
    blocks: range,
    dtype: torch.dtype,
    taps: Sequence[int] = (),
    rounded: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> TargetPart:
    """Load some blocks of a target from its folder to a device. Only their tensors are read.

    Args:
        rounded: dtype that weights are rounded to before they become `dtype`; None: they are not.

    Raises:
        UserError: the target cannot be cut, has no such blocks, or its weights are missing, damaged, of other
            shapes than its config says, or no safetensors.
    """
    config = _text_config(place)
    n_blocks = config.num_hidden_layers
    if not 0 <= blocks.start < blocks.stop <= n_blocks:
        raise UserError(
            f"stages.blocks: must be within the {n_blocks} blocks of {place}, got {blocks.start} to "
            f"{blocks.stop - 1}"
        )
    model = _without_weights(place, config, blocks, dtype)
    base = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=model.config)  # its buffers are computed, not stored
    sources = {
        name: _source(name, base.base_model_prefix or "model", blocks.start) for name in model.state_dict()
    }
    tensors = _read(Path(place), sources, tied=bool(config.tie_word_embeddings))
    _fill(place, model, {name: tensor.to(rounded or dtype).to(dtype) for name, tensor in tensors.items()})
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:  # not stored, as Gemma's
        raise UserError(
            f"{place}: must have no buffers besides its weights to be cut, got {empty[0]}; use another target"
        )
    if len(blocks) < n_blocks:
        _require_unchanged_states(place, model)
    return TargetPart(model.to(device), blocks, n_blocks, taps)


def unmap(module: nn.Module, shared: Sequence[torch.Tensor] = ()) -> None:
    """Copy a module's tensors out of the files of weights that they are mapped from: a file's pages stay in
    memory as long as one tensor of it is used.

    Args:
        shared: tensors that other modules use as well, which are not copied.
    """
    copies = {(one.data_ptr(), one.shape): one.data for one in shared}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.data_ptr(), tensor.shape
        if place not in copies:
            own = copies[place] = tensor.clone()
            copies[own.data_ptr(), own.shape] = own  # a tied parameter is met again, as its copy
        return copies[place]

    module._apply(copied)


def sample_hash(folder: Path, weights: str) -> str:
    """Return a fingerprint of a model's weights: the sizes and some bytes of the files that match the pattern
    `weights`, so that ranks can compare large models quickly."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob(weights)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for i in range(SAMPLES):
                file.seek(i * max(size - SAMPLE, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def require_frontier(drafter: DraftModel, name: str) -> None:
    """Require a drafter that can draft any number of tokens ahead, and keep a tree in flight.

    Raises:
        UserError: it cannot.
    """
    if drafter.prune is None:
        raise UserError(
            f"drafter: must keep a tree in flight, got {name} without prune; write it, or use mode pp"
        )
    if drafter.max_depth is not None:
        raise UserError(
            f"drafter: must draft any number of tokens ahead, got {name}, which drafts at most "
            f"{drafter.max_depth}; use EDD, EAGLE, VDM or a small LM"
        )


def load_shell(
    place: str,
    dtype: torch.dtype,
    embeddings: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> FrozenTarget:
    """Load what a drafter reads of its target: config, tokenizer, embeddings, head, and the identity of the
    weights; the blocks stay on disk.

    Args:
        embeddings: of the first stage [V, H] on the device, which are shared with it; None: they are loaded.

    Raises:
        UserError: as `load_part`.
    """
    config = load_config(place)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    outer = {id(inputs.weight), id(head.weight), *map(id, head.parameters())}
    outer -= set() if embeddings is None else {id(inputs.weight)}
    names = [name for name, weight in model.named_parameters() if id(weight) in outer]
    tensors = _read(Path(place), {name: name for name in names}, tied=False)
    _fill(place, model, {name: tensor.to(device, dtype) for name, tensor in tensors.items()})
    if embeddings is not None:
        inputs.weight = nn.Parameter(embeddings, requires_grad=False)
    model.tie_weights()
    target = FrozenTarget(model, load_tokenizer(place), place)
    stored = sorted(name for name, _ in model.named_parameters())
    weights = tensors_hash((name, _read(Path(place), {name: name}, tied=False)[name]) for name in stored)
    target.__dict__["fingerprint"] = target_fingerprint(weights, target.config)
    return target


def stop_tokens(place: str, eos: int | None) -> tuple[int, ...]:
    """Return every token that ends a generation of the target in this folder.

    Args:
        eos: the tokenizer's, None without one.
    """
    found = {eos}
    for reader in (AutoConfig, GenerationConfig):
        try:
            ids = reader.from_pretrained(place).eos_token_id
        except OSError:  # a folder need not have a generation config
            continue
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(found - {None}))


def part_bytes(place: str, blocks: range, dtype: torch.dtype) -> int:
    """Return the bytes of the weights of some blocks, with the embeddings, norm and head of the first and the
    last; nothing is loaded."""
    model = _without_weights(place, _text_config(place), blocks, dtype)
    return sum(weight.numel() * weight.element_size() for weight in {*model.parameters()})


def _text_config(place: str) -> PreTrainedConfig:
    """Load the config of a target, which must be a language model alone.

    Raises:
        UserError: the language model is one of several parts, or has layers that cannot be cut.
    """
    config = load_config(place)
    if config.get_text_config() is not config:
        raise UserError(
            f"{place}: must be a language model alone to be cut, got {config.model_type}, of which one is a "
            "part; save that part as a model of its own"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    kinds |= {"ALiBi"} if getattr(config, "alibi", False) else set()
    kinds |= {"experts"} if any(getattr(config, name, None) for name in EXPERTS) else set()
    if kinds:
        raise UserError(
            f"{place}: must have full or sliding-window attention and no experts to be cut, got "
            f"{', '.join(sorted(kinds))}; use another target"
        )
    return config


def _without_weights(
    place: str, config: PreTrainedConfig, blocks: range, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the part's modules on the meta device, without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config_of(config, blocks), dtype=dtype)
    base = model.base_model
    if missing := [name for name in NEEDED if not hasattr(base, name)]:
        raise UserError(
            f"{place}: must have blocks that can be cut apart, got a {type(model).__name__} without "
            f"{missing[0]}; use a model of the Llama, Mistral or Qwen kind"
        )
    if blocks.start > 0:
        base.embed_tokens = nn.Identity()
    if blocks.stop < config.num_hidden_layers:
        base.norm = model.lm_head = nn.Identity()
    return model


def _config_of(config: PreTrainedConfig, blocks: range) -> PreTrainedConfig:
    """Return the config of a part: its number of blocks, and of settings of each block (`layer_types`, or
    `no_rope_layers` of SmolLM3) those of its own."""
    part = copy.deepcopy(config)
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(part, name, value[blocks.start : blocks.stop])
    part.num_hidden_layers = len(blocks)
    return part


@torch.no_grad()
def _require_unchanged_states(place: str, model: PreTrainedModel) -> None:
    """Require that nothing but the blocks and the norm changes the states of a part, as each part would do it
    again.

    Raises:
        UserError: something does, as in Granite, which scales embeddings before the first block.
    """
    base = model.base_model
    blocks, norm = base.layers, base.norm
    states = torch.ones(1, 1, model.config.hidden_size, dtype=model.dtype)
    base.layers, base.norm = nn.ModuleList(), nn.Identity()
    try:
        out = base(inputs_embeds=states, use_cache=False).last_hidden_state
    finally:
        base.layers, base.norm = blocks, norm
    if not torch.equal(out, states):
        raise UserError(
            f"{place}: must change states in blocks alone to be cut, got a {type(model).__name__}, which "
            "scales them before; use a model of the Llama, Mistral or Qwen kind"
        )


def _fill(place: str, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a model without weights some tensors by their names; they are not copied.

    Raises:
        UserError: one has another shape than the config says.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise UserError(
                f"{place}: {name} is stored as {list(tensor.shape)} and config.json wants "
                f"{list(shapes[name])}; put the files of one model into the folder"
            )
    model.load_state_dict(tensors, assign=True, strict=False)


def _source(name: str, prefix: str, first: int) -> str:
    """Return the name that a part's tensor has in the checkpoint of the whole target."""
    found = re.match(rf"({re.escape(prefix)}\.layers\.)(\d+)(\..*)", name)
    return f"{found[1]}{int(found[2]) + first}{found[3]}" if found else name


def _read(folder: Path, sources: Mapping[str, str], tied: bool) -> dict[str, torch.Tensor]:
    """Read tensors by their names in the checkpoint."""
    if (folder / INDEX).exists():
        with usable(folder / INDEX, "fetch it again"):
            stored = read_json(folder / INDEX).get("weight_map", {})
            files = {name: Path(file) for name, file in stored.items()}
    elif (folder / SINGLE).exists():
        with _opened(folder / SINGLE) as file:
            files = dict.fromkeys(file.keys(), SINGLE)
    else:
        raise UserError(f"{folder}: must hold safetensors, got none; save the model with save_pretrained")
    embeddings = next((name for name in files if name.endswith("embed_tokens.weight")), None)
    wanted = {}
    for name, source in sources.items():
        if source not in files and tied and name == "lm_head.weight":
            source = embeddings
        if source not in files:
            raise UserError(f"{folder}: no weights for {source}; the checkpoint is incomplete")
        wanted[name] = source
    found: dict[str, torch.Tensor] = {}
    for path in sorted({files[source] for source in wanted.values()}):
        with _opened(folder / path) as file:
            here, sources = set(file.keys()), {s for s in wanted.values() if files[s] == path}
            if gone := sorted(sources - here):
                raise UserError(f"{folder / path}: no weights for {gone[0]}, unlike {INDEX}; fetch it again")
            read = {s: file.get_tensor(s) for s in sources}
        if codes := [s for s, one in read.items() if not one.is_floating_point() or one.element_size() < 2]:
            raise UserError(
                f"{folder}: weights must be of 16 or 32 bits to be cut, got {read[codes[0]].dtype} in "
                f"{codes[0]}; use the model's unquantized files"
            )
        found |= {name: read[source] for name, source in wanted.items() if source in read}
    return found


def _opened(path: Path) -> safe_open:
    require_file(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); fetch it again") from error
