"""What all drafters are: a Hugging Face model that belongs to one target, reads some of its states and drafts
over some of its tokens. Weights that stay the target's are not stored."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from drafttrain.drafters.config import DrafterConfig, read_config
from drafttrain.drafters.model_config import DraftModelConfig, check_identity
from drafttrain.kernels.linear import make_native
from drafttrain.target_lm.cpu_linear import pack_linears
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.drafter import Drafter
from drafttrain.utils.errors import UserError, brief

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Prediction:
    """What a drafter says of some positions of packed rows in training.

    Attributes:
        states: what its head reads, [N, H].
        head: the head, [D, H].
        ahead: position t foretells the token at t + 1 + ahead.
        rows: bool [B, T], the N positions t + ahead: the target's state there and the token after it are
            what is foretold.
        weight: of the difference between the distributions in the loss.
        state_weight: of the difference between `states` and the target's last hidden states.
    """

    states: torch.Tensor
    head: torch.Tensor
    rows: torch.Tensor
    ahead: int = 0
    weight: float = 1.0
    state_weight: float = 0.0


class DraftModel(PreTrainedModel, ABC):
    """A drafter without its method. It needs `attach(target)` (or `load`) before it drafts: that lends it the
    weights which stay the target's; `AutoModel.from_pretrained` alone leaves NaN there.

    Attributes:
        max_depth: how deep its trees can be; None for any depth.
        soft_prompts: whether training gives `forward` an attention over the target's states and over blocks
            of tokens; else over the tokens of a document.
        first_token: whether the first token of a document is an input.
        attends: whether training gives `predictions` an attention at all.
    """

    config_class = DraftModelConfig
    max_depth: int | None = None
    soft_prompts = False
    first_token = True
    attends = True
    _same_input = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))  # no queries: soft prompts have none

    draft_to_target: torch.Tensor  # int64 [D]

    def freeze(self, names: list[str]) -> None:
        """Notes which weights are copies of the target's, and so not stored."""
        self._keys_to_ignore_on_save = self._keys_to_ignore_on_load_missing = set(names)

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "weight", None) is not None and self._is_frozen(module):
            nn.init.constant_(module.weight, torch.nan)  # a forgotten `attach` is loud
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def _is_frozen(self, module: nn.Module) -> bool:
        """Whether a module is a copy of the target's."""
        names = (name.removesuffix(".weight") for name in self._keys_to_ignore_on_save)
        return any(module is self.get_submodule(name) for name in names)

    # making and loading

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @abstractmethod
    def initialize_from(self, target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> None:
        """Copies what starts from the target, and makes `draft_ids` [D] the draft vocabulary."""

    def grow_vocabulary(self, target: FrozenTarget, draft_ids: torch.Tensor) -> None:
        """Makes `draft_ids` [D] the draft vocabulary, the tokens of the present one among them.

        Raises:
            UserError: this kind of drafter cannot.
        """
        raise UserError(
            f"training.init_draft_vocab_size: the vocabulary of a {self.config.model_type} drafter does not "
            "grow; leave it out"
        )

    def lend(self, target: FrozenTarget) -> None:
        """Takes the frozen weights from the target."""

    def attach(self, target: FrozenTarget) -> "DraftModel":
        """Takes the frozen weights from the target, and taps it.

        Raises:
            UserError: the drafter was made for a target of another shape or with another tokenizer.
        """
        check_identity(self.config.target, target)
        with torch.no_grad():
            self.lend(target)
        target.tap(self.config.tapped_blocks)
        return self

    def pack(self) -> None:
        """Lay out the weights for drafting: native on a CPU with a compiler, else packed for oneDNN in bf16.

        No training after it.
        """
        if not make_native(self):
            pack_linears(self, self._same_input)

    def finish(self) -> None:
        """Called once when training has ended, before the drafter is saved."""

    @classmethod
    def load(
        cls, folder: str | os.PathLike, target: FrozenTarget, dtype: torch.dtype | None = None
    ) -> "DraftModel":
        """Loads a drafter and lends it the target's frozen weights.

        Args:
            dtype: of the weights; None for the stored one.

        Raises:
            UserError: no drafter there, tensors are missing, unexpected or unreadable, or it belongs to
                another target.
        """
        read_config(folder)
        try:
            model, info = cls.from_pretrained(folder, output_loading_info=True, dtype=dtype or "auto")
        except Exception as error:  # safetensors, transformers and torch raise many kinds for damaged files
            raise UserError(
                f"{folder}: cannot be loaded as a drafter ({brief(error)}); export it again"
            ) from error
        if info["missing_keys"] or info["unexpected_keys"]:  # transformers goes on with random numbers
            raise UserError(
                f"{folder}: missing tensors {sorted(info['missing_keys'])}, unexpected "
                f"{sorted(info['unexpected_keys'])}; damaged or of another version, export it again"
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
        """What the drafter foretells of a batch in training.

        Args:
            model: the drafter as it is called: wrapped by DDP or DeepSpeed, or itself.
            batch: rows of `PackedRows`, stacked, with the target's states and, where the step has blocks, the
                index at which each token's begins, `block_start` [B, T]; and what a drafter draws at random
                in training comes from `row_seeds`, int64 [B].
            attend: attention as `soft_prompts` says; None where the drafter does not attend.
            wanted: bool [B, T], the inputs whose next tokens are trained.
        """

    # drafting

    top = Drafter.top

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.draft_to_target.take(ids)
