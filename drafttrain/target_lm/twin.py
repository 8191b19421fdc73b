"""Native copy of a model that a program has loaded; the model's own modules stay unchanged."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.kernels.linear import can_be_native
from drafttrain.target_lm.attention import NAME
from drafttrain.target_lm.model import CONFIG_KEYS, FrozenTarget
from drafttrain.target_lm.native import can_run_natively
from drafttrain.target_lm.tree_check import free_memory
from drafttrain.utils.threads import limit_threads

STOCK = "torch.nn.modules.", "transformers.models.", "transformers.activations"  # where modules are defined
CAPTURING = "transformers.utils.output_capturing"  # its hooks are allowed: they do nothing unless asked
ATTENTIONS = NAME, "sdpa", "eager"
SETTINGS = "scaling", "variance_epsilon", "attention_scaling"  # attributes of modules that forwards read
SHARE = 0.5  # of the free memory: the most that a copy may take


@dataclass(frozen=True)
class Look:
    """Snapshot of everything that decides a model's outputs, to notice when the model changes.

    Attributes:
        modules: name, class and settings of each module.
        tensors: name, dtype, shape, address, version counter and checksum of each weight and buffer. The
            counter misses writes through `.data`; the checksum takes as long as decoding one token.
        config: the config values that decide a forward.
    """

    modules: tuple[tuple, ...]
    tensors: tuple[tuple, ...]
    config: str

    @classmethod
    def at(cls, model: PreTrainedModel) -> "Look":
        """Return a snapshot of a model."""
        config = model.config.get_text_config()
        return cls(
            tuple(
                (name, type(one), *(getattr(one, key, None) for key in SETTINGS))
                for name, one in _parts(model)
            ),
            tuple(map(_facts, model.named_parameters())) + tuple(map(_facts, model.named_buffers())),
            repr([getattr(config, key, None) for key in (*CONFIG_KEYS, "num_hidden_layers")]),
        )


def native_copy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> FrozenTarget | None:
    """Return a target with a native copy of a model's linear layers, which takes as much memory again; its
    embeddings and norms are shared with the model. The model is not changed.

    Returns None if the native forward would differ from the model's (on a GPU, for unsupported architectures,
    with hooks, adapters or modules that are not transformers', or while dropout is on), and if the copy would
    take more than half of the free memory.
    """
    config = model.config.get_text_config()
    if not (is_plain(model) and _has_stock_blocks(model) and can_run_natively(model.base_model, config)):
        return None
    linears = {id(m): m for _, m in _parts(model) if isinstance(m, nn.Linear)}
    if sum(m.weight.nbytes for m in linears.values()) > SHARE * free_memory(model.device):
        return None
    limit_threads()
    target = FrozenTarget(_twin(model, {}), tokenizer, name)
    target.pack()
    return None if target.native is None else target  # None: its outputs differ from the stock ones


def is_plain(model: PreTrainedModel) -> bool:
    """Return whether a forward of the model runs transformers' own modules and nothing else."""
    attention = model.config.get_text_config()._attn_implementation
    return (
        attention in ATTENTIONS
        and can_be_native(model.get_output_embeddings())
        and all(
            type(module).__module__.startswith(STOCK)
            and not module._forward_pre_hooks
            and all(getattr(hook, "__module__", "") == CAPTURING for hook in module._forward_hooks.values())
            and "forward" not in vars(module)  # offloading and compilers replace it there
            and not (module.training and _drops(module))
            for _, module in [("", model), *_parts(model)]
        )
    )


def _has_stock_blocks(model: PreTrainedModel) -> bool:
    """Return whether the model has all blocks of its config, each with the same modules as a new block."""
    base, config = model.base_model, model.config.get_text_config()
    blocks = getattr(base, "layers", ())
    if (
        not 0 < len(blocks) == config.num_hidden_layers
        or type(model.get_input_embeddings()) is not nn.Embedding
    ):
        return False
    with torch.device("meta"):
        new = [type(block)(config, number) for number, block in enumerate(blocks)]
    same_norm = type(getattr(base, "norm", None)) is type(getattr(new[0], "input_layernorm", None))
    return same_norm and all(_kinds(a) == _kinds(b) for a, b in zip(blocks, new, strict=True))


def _kinds(block: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in block.named_modules()]


def _parts(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the modules that a forward runs, with their names."""
    return [
        *model.base_model.named_modules(prefix="base"),
        *model.get_output_embeddings().named_modules(prefix="head"),
    ]


def _drops(module: nn.Module) -> bool:
    share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0)
    return bool(share)


def _facts(named: tuple[str, torch.Tensor]) -> tuple:
    name, tensor = named
    version = None if tensor.is_inference() else tensor._version
    return name, tensor.dtype, tensor.shape, tensor.data_ptr(), version, _sum(tensor)


def _sum(weight: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits, read as int64 where its size and offset allow it, else as bytes:
    the sum over rows, each multiplied by a different odd number."""
    flat = weight.detach().contiguous().view(-1).view(torch.uint8)  # [bytes]
    whole = len(flat) % 8 == flat.storage_offset() % 8 == 0
    words = flat.view(torch.int64) if whole else flat  # [w]
    rows = len(weight) if weight.ndim > 1 and len(words) % len(weight) == 0 else len(words)
    sums = words.view(rows, -1).sum(1)  # [rows]; wraps around
    return int((sums * torch.arange(1, 2 * rows, 2)).sum())


def _twin(module: nn.Module, weights: dict[int, nn.Parameter]) -> nn.Module:
    """Return a copy of a module and its submodules that shares their weights and buffers, so that replacing a
    module in the copy does not change the original.

    Args:
        weights: copied parameters by the id of the original, so that tied ones stay tied.
    """

    def of(weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None:
            return None
        return weights.setdefault(id(weight), nn.Parameter(weight.detach(), requires_grad=False))

    copied = type(module).__new__(type(module))
    copied.__dict__ = {
        **vars(module),
        "_parameters": {name: of(weight) for name, weight in module._parameters.items()},
        "_buffers": dict(module._buffers),
        "_modules": {
            name: None if child is None else _twin(child, weights) for name, child in module._modules.items()
        },
    }
    return copied
