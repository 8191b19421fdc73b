"""Load and adapt the trained drafter that a training starts from (`training.init_from`)."""

from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig, read_config
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.drafters.layered import LayeredDrafter
from drafttrain.drafters.model import DraftModel
from drafttrain.drafters.model_config import identity
from drafttrain.drafters.vocabulary import count_trained_tokens, draft_vocabulary
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.config import TrainingConfig
from drafttrain.training.start import check_continued

DAMPING = 1e-3  # of the least squares, relative to the mean diagonal of its products


def continued_drafter(
    config: TrainingConfig, drafter_config: DrafterConfig, target: FrozenTarget, corpus: Dataset
) -> DraftModel:
    """Load the drafter to start from, in fp32, and add the anchor, layers and vocabulary that the recipe asks
    for.

    Raises:
        UserError: there is none, or it is of another target, kind or shape.
    """
    check_continued(config, read_config(config.init_from), drafter_config)
    drafter = load_drafter(config.init_from, target, dtype=torch.float32)
    if drafter_config.anchor and not drafter.config.anchor:
        drafter = add_anchor(drafter).attach(target)
    if drafter_config.layers > drafter.config.layers:
        drafter = add_layers(drafter, drafter_config.layers).attach(target)
    drafter.config.target = identity(target)  # the one that it learns from now
    drafter.config.head_dtype = drafter_config.head_dtype
    drafter.config.layers_dtype = drafter_config.layers_dtype
    if config.init_draft_vocab_size is not None:
        counts = count_trained_tokens(corpus, target.vocab_size)
        known, size = drafter.draft_to_target.tolist(), config.init_draft_vocab_size
        set_vocabulary(drafter, target, resized_vocabulary(counts, size, known, target.eos_token_ids))
    return drafter


def set_vocabulary(drafter: LayeredDrafter, target: FrozenTarget, draft_ids: torch.Tensor) -> None:
    """Make `draft_ids` [D], ascending, the draft vocabulary; tokens that stay keep their rows of the head.

    New tokens get the target's rows, changed by the linear map that best fits how training changed the others
    (least squares). Next to a head that was trained for long, the target's unchanged rows give too large
    logits (docs/experiments/training.md, Draft vocabulary).
    """
    old = drafter.draft_to_target.cpu()  # [D']
    with torch.no_grad():
        head = target.lm_head.weight.float().cpu()  # [V, H]
        trained = drafter.lm_head.weight.float().cpu()  # [D', H]
        products = head[old].T @ head[old]  # [H, H]
        # damped: with few tokens the map would overfit
        products.diagonal().add_(DAMPING * products.diagonal().mean())
        change = torch.linalg.solve(products, head[old].T @ (trained - head[old]))  # [H, H]
        rows = head[draft_ids] + head[draft_ids] @ change  # [D, H]
        stays = torch.isin(old, draft_ids)  # [D']
        rows[torch.searchsorted(draft_ids, old[stays])] = trained[stays]
    weight = drafter.lm_head.weight
    drafter.lm_head.weight = nn.Parameter(rows.to(weight), requires_grad=weight.requires_grad)
    drafter.lm_head.out_features = drafter.config.draft_vocab_size = len(draft_ids)
    drafter.draft_to_target = draft_ids.to(drafter.draft_to_target.device)


def add_anchor(drafter: EddModel) -> EddModel:
    """Return an EDD drafter with an anchor that has no effect yet.

    Its drafts hardly change: an anchored drafter normalizes embeddings, so the layers' outputs are scaled by
    the same factor, taken from the median RMS of the embeddings (SmolLM2's are some 10 % off the median).
    (With embeddings left at SmolLM2's RMS of 0.2, the anchor's first steps are too large: the loss rises by a
    third.)
    """
    model = EddModel(EddConfig.from_dict(drafter.config.to_dict() | {"anchor": True}))
    model.load_state_dict(drafter.state_dict(), strict=False)
    with torch.no_grad():
        size = drafter.embed_tokens.weight.pow(2).mean(-1).sqrt().median().item()
        for layer in model.layers:
            for linear in (layer.o_proj, layer.down_proj):
                for parameter in linear.parameters():
                    parameter /= size
        model.anchor_fc.weight.copy_(torch.eye(*model.anchor_fc.weight.shape))  # the token alone
    return model.to(drafter.device)


def add_layers(drafter: EddModel, layers: int) -> EddModel:
    """Return an EDD drafter with `layers` layers that drafts as before: the new ones are copies of the last
    one that add nothing to their input yet."""
    model = EddModel(EddConfig.from_dict(drafter.config.to_dict() | {"layers": layers}))
    model.load_state_dict(drafter.state_dict(), strict=False)
    last = drafter.layers[-1].state_dict()
    with torch.no_grad():
        for layer in model.layers[drafter.config.layers :]:
            layer.load_state_dict(last)
            for linear in (layer.o_proj, layer.down_proj):
                for parameter in linear.parameters():
                    parameter.zero_()
    return model.to(drafter.device)


def resized_vocabulary(counts: np.ndarray, size: int, known: Sequence[int], always: set[int]) -> torch.Tensor:
    """Return `known` with the most frequent other tokens added, or without its least frequent ones.

    Args:
        counts, size: as for `draft_vocabulary`.
        known: target ids of the current vocabulary.
        always: tokens that a smaller vocabulary keeps (the stop tokens).

    Returns:
        target ids [size], ascending.
    """
    if size >= len(known):
        return draft_vocabulary(counts, size, known)
    among_known = np.full_like(counts, -1)  # [V]
    among_known[known] = counts[known]
    return draft_vocabulary(among_known, size, always)
