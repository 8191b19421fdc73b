"""The base of all drafters: a Hugging Face model that belongs to one target, reads some of its states and
drafts over some of its tokens. Weights that stay the target's are not stored."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from drafttrain.drafters.config import FILES, DrafterConfig, read_config
from drafttrain.drafters.model_config import DraftModelConfig, check_identity
from drafttrain.kernels.linear import make_native
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.drafter import Drafter
from drafttrain.utils.errors import UserError, brief

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Prediction:
    """Predictions at N positions of packed rows in training.

    Attributes:
        states: input of the head, [N, H].
        head: weight of the head, [D, H].
        rows: bool [B, T], the N positions whose target state and next token are predicted.
        weight: of the loss between the distributions.
        state_weight: of the loss between `states` and the target's last hidden states.
    """

    states: torch.Tensor
    head: torch.Tensor
    rows: torch.Tensor
    weight: float = 1.0
    state_weight: float = 0.0


class DraftModel(PreTrainedModel, ABC):
    """Base class of drafters. Call `attach(target)` (or `load`) before drafting: it shares the weights that
    stay the target's; `AutoModel.from_pretrained` alone leaves NaN there.

    A subclass defines `__init__`, `forward`, `predictions` for training and the methods of `Drafter` for
    drafting; it registers the buffer `draft_to_target`. The weights of modules named `embed_tokens` and
    `lm_head` start from the target's, and stay the target's if `__init__` passes them to `freeze`.

    Attributes:
        max_depth: depth of the deepest node that it can draft; None for any depth.
        soft_prompts: whether training passes an attention over the target's states and over blocks of tokens;
            else over the tokens of a document.
        first_token: whether the first token of a document is an input.
        attends: whether training passes an attention at all.
    """

    config_class = DraftModelConfig
    max_depth: int | None = None
    soft_prompts = False
    first_token = True
    attends = True
    prune: Callable | None = None  # `Drafter.prune`, where a tree in flight can be kept
    _same_input = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))  # no queries: soft prompts have none

    draft_to_target: torch.Tensor  # int64 [D]

    def freeze(self, names: list[str]) -> None:
        """Mark weights as copies of the target's, which are not stored."""
        self._keys_to_ignore_on_save = self._keys_to_ignore_on_load_missing = set(names)

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "weight", None) is not None and self._is_frozen(module):
            nn.init.constant_(module.weight, torch.nan)  # makes a forgotten `attach` visible
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def _is_frozen(self, module: nn.Module) -> bool:
        """Return whether a module is a copy of the target's."""
        names = (name.removesuffix(".weight") for name in self._keys_to_ignore_on_save)
        return any(module is self.get_submodule(name) for name in names)

    # creating and loading

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @classmethod
    def create(cls, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> "DraftModel":
        """Return a model of this shape with random weights, to draft the tokens `draft_ids` [D].

        Raises:
            UserError: the target cannot have such a drafter.
        """
        return cls(cls.config_class.for_target(target, drafter, len(draft_ids)))

    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        """Copy the weights that start from the target's, and make `draft_ids` [D] the draft vocabulary."""
        modules = dict(self.named_children())
        with torch.no_grad():
            self.draft_to_target.copy_(draft_ids)
            if "embed_tokens" in modules:
                self.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
            if "lm_head" in modules:
                self.lm_head.weight.copy_(target.lm_head.weight[draft_ids.to(target.device)])
        self.attach(target)

    def share(self, target: FrozenTarget) -> None:
        """Take the frozen weights from the target. Embeddings are shared, not copied, where dtype and device
        agree."""
        if "embed_tokens.weight" in self._keys_to_ignore_on_save:
            own = next(p for name, p in self.named_parameters() if name not in self._keys_to_ignore_on_save)
            shared = target.model.get_input_embeddings().weight.detach().to(own.device, own.dtype)
            self.embed_tokens.weight = nn.Parameter(shared, requires_grad=False)  # [V, H]
        if "lm_head.weight" in self._keys_to_ignore_on_save:
            self.lm_head.weight.copy_(target.lm_head.weight[self.draft_to_target.to(target.device)])
            self.lm_head.weight.requires_grad_(False)

    def attach(self, target: FrozenTarget) -> "DraftModel":
        """Take the frozen weights from the target, and tap the blocks that the drafter reads.

        Raises:
            UserError: the drafter was made for a target of another shape or with another tokenizer.
        """
        check_identity(self.config.target, target)
        with torch.no_grad():
            self.share(target)
        target.tap(self.config.tapped_blocks)
        return self

    def pack(self) -> None:
        """Lay out the weights for drafting: native on a CPU with a compiler, else packed for oneDNN in bf16.

        The drafter cannot be trained afterwards.
        """
        if not make_native(self, narrow=True):  # reading its weights is most of a drafting step
            from drafttrain.target_lm.cpu_linear import pack_linears  # without a compiler

            pack_linears(self, self._same_input)

    def save_pretrained(self, *args, **kwargs) -> None:
        """Save under the model's own names, which training reads: a MoE's experts stay joined."""
        super().save_pretrained(*args, **{"save_original_format": False} | kwargs)

    def finish(self) -> None:
        """Prepare for saving after training: round matrices stored in int8 to their stored values."""
        if self.config.head_dtype or self.config.layers_dtype:
            from drafttrain.drafters.int8 import round_weights

            round_weights(self)

    @classmethod
    def load(
        cls, folder: str | os.PathLike, target: FrozenTarget, dtype: torch.dtype | None = None
    ) -> "DraftModel":
        """Load a drafter and share the target's frozen weights with it.

        Args:
            dtype: of the weights; None for the stored one.

        Raises:
            UserError: no drafter there, tensors are missing, unexpected, unreadable or out of range, or it
                belongs to another target.
        """
        from drafttrain.drafters.weights import read_tensors  # training from scratch reads none

        read_config(folder)
        try:
            config = cls.config_class.from_pretrained(folder)
            tensors = read_tensors(os.path.join(folder, FILES[1]))
            model, info = cls.from_pretrained(
                None, config=config, state_dict=tensors, output_loading_info=True, dtype=dtype or "auto"
            )
        except Exception as error:  # safetensors, transformers and torch raise many types for damaged files
            raise UserError(
                f"{folder}: cannot be loaded as a drafter ({brief(error)}); export it again"
            ) from error
        if info["missing_keys"] or info["unexpected_keys"]:  # transformers would use random values
            raise UserError(
                f"{folder}: missing tensors {sorted(info['missing_keys'])}, unexpected "
                f"{sorted(info['unexpected_keys'])}; damaged or of another version, export it again"
            )
        stored = (one for one in model.named_parameters() if one[0] not in model._keys_to_ignore_on_save)
        if broken := [name for name, weight in stored if not weight.isfinite().all()]:
            raise UserError(f"{folder}: weights must be finite, got others in {broken[0]}; train it again")
        ids, size = model.draft_to_target, model.config.target_vocab_size
        if ids.dtype != torch.long or ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise UserError(
                f"{folder}: draft_to_target must be ids below {size}, got others; export it again"
            )
        try:
            return model.to(target.device).attach(target).eval()
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None

    # training

    @abstractmethod
    def predictions(
        self,
        model: Callable[..., torch.Tensor],
        batch: dict[str, torch.Tensor],
        attend: Attend | None,
        wanted: torch.Tensor,
    ) -> list[Prediction]:
        """Return the predictions for a batch in training.

        Args:
            model: the drafter to call: wrapped by DDP or DeepSpeed, or itself.
            batch: rows of `PackedRows`, stacked, with the target's states: `input_ids`, `positions` and
                `document_start` [B, T], `tapped` [B, T, K·H]; the first index of each token's block,
                `block_start` [B, T], with soft prompts; seeds of random draws, `row_seeds`, int64 [B].
            attend: attention as described at `soft_prompts`; None if the drafter does not attend.
            wanted: bool [B, T], the inputs whose next tokens are trained.
        """

    # drafting

    top = Drafter.top

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.draft_to_target.take(ids)
