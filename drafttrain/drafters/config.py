"""The kinds of drafters, their settings, and the `config.json` in a drafter's folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.ranges import setting

FORMAT_VERSION = 1
FILES = ("config.json", "model.safetensors")  # of a drafter, without results and calibrations
PREFIX = "drafttrain_"  # of a kind's `model_type`


class Kind(NamedTuple):
    """A kind of drafter. Its class is named, not imported: recipes are checked before torch is loaded.

    Attributes:
        model: module in `drafttrain.drafters`, and class.
        settings: keys of `DrafterConfig` that it reads besides `draft_vocab_size`.
    """

    model: str
    settings: tuple[str, ...] = ()


# settings of kinds with decoder layers of the target's shape
LAYER = (
    "kv_heads",
    "intermediate_size",
    "init",
    "train_embeddings",
    "train_head",
    "head_dtype",
    "layers_dtype",
)
KINDS = {
    "edd": Kind("edd.EddModel", ("tapped_blocks", "layers", "anchor", *LAYER)),
    "vdm": Kind("vdm.VdmModel", LAYER),
    "eagle": Kind("eagle.EagleModel", ("noise", "input_norms", *LAYER)),
    "medusa": Kind("medusa.MedusaModel", ("heads",)),
    "causal_lm": Kind("causal_lm.CausalLmModel", ("model", "lora_rank")),
}
# for every kind; all but EDD ignore `tapped_blocks`, so that a recipe changes its kind with one key
COMMON = ("kind", "draft_vocab_size", "tapped_blocks")


@dataclass
class DrafterConfig:
    """Kind and shape of a drafter (section `drafter` of a recipe).

    Attributes:
        kind: "edd"; "vdm", the vanilla draft model (EDD's layer without target states); "eagle" (the
            target's last hidden state and the next token's embedding, joined); "medusa" (heads on the last
            hidden state); "causal_lm" (any small Hugging Face LM of the target's vocabulary).
        tapped_blocks: target blocks whose outputs are EDD's soft prompts, from 0; negative counts from the
            end, and the number of blocks means the last hidden state, after the final norm. Several are
            joined by a trained projection. Other kinds read no blocks.
        layers: decoder layers of EDD; the paper, VDM and EAGLE have 1.
        draft_vocab_size: largest size of the draft vocabulary: the most frequent trained tokens of the
            corpus. null: all.
        anchor: join each token of EDD with the newest verified state (ours).
        kv_heads: key and value heads of EDD, VDM and EAGLE. null: as many as the target has. EDD reads states
            only through them, and with grouped-query attention (GQA) most of a state is lost; the EDD
            paper's targets have no GQA.
        intermediate_size: of the layers' MLPs, in EDD, VDM and EAGLE. null: the target's. Most of a layer's
            weights are there, so a smaller size trains and drafts faster.
        init: "random", or the number of the target block that the layers start from (negative from the end).
        train_embeddings: train the token embeddings instead of reading the target's.
        train_head: train the LM head, which starts from the target's.
        head_dtype: of the LM head in the bundle. int8: half as large as in bfloat16, with a scale for
            each token; `AutoModel` alone cannot read it. null: as the other weights.
        layers_dtype: of the layers' and projections' matrices in the bundle, like `head_dtype`.
        heads: MEDUSA's heads, one for each depth of a tree.
        noise: bound of the uniform noise on EAGLE's input states in training.
        input_norms: RMS norms on EAGLE's embedding, state and output, as in an MTP layer (C2T, Appendix F).
        model: folder or Hub id of the small LM ("causal_lm").
        lora_rank: train low-rank adapters of this rank instead of the small LM's weights; they are merged at
            the end. null: train the weights.
    """

    kind: str = "edd"
    tapped_blocks: list[int] = setting(default_factory=lambda: [-4])
    layers: int = setting(1, ge=1, le=1000)
    anchor: bool = False
    kv_heads: int | None = setting(None, ge=1)
    intermediate_size: int | None = setting(None, ge=1)
    draft_vocab_size: int | None = setting(8192, ge=1)
    init: str | int = "random"
    train_embeddings: bool = False
    train_head: bool = True
    head_dtype: Literal["int8"] | None = None
    layers_dtype: Literal["int8"] | None = None
    heads: int = setting(5, ge=1, le=100)
    noise: float = setting(0.1, ge=0)
    input_norms: bool = False
    model: str | None = None
    lora_rank: int | None = setting(None, ge=1, le=1 << 16)

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the keys that a drafter of this kind reads, besides `draft_vocab_size`."""
        return KINDS[self.kind].settings

    def check(self) -> None:
        """Validate the settings that do not depend on the target.

        Raises:
            UserError: an unknown kind, a value out of range, or a setting of another kind.
        """
        from drafttrain.drafters.settings import check_settings  # not needed for decoding

        check_settings(self)


def drafter_folder(path: str | os.PathLike) -> Path:
    """Return the folder with a drafter's files: the given one, or `drafter` in the folder of stage train."""
    inner = Path(path) / "drafter"
    is_stage = not (Path(path) / "config.json").exists() and (inner / "config.json").exists()
    return inner if is_stage else Path(path)


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """Return the `config.json` of a drafter's folder.

    Raises:
        UserError: there is none, or it is not that of a drafter of this format.
    """
    config = read_json(Path(folder) / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else "broken"
    if kind not in [f"{PREFIX}{name}" for name in KINDS]:
        raise UserError(f"{folder}: holds a {kind} model; give the folder of a drafter or of its bundle")
    if config.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder}: format_version: must be {FORMAT_VERSION}, got {config.get('format_version')}; export "
            "it again"
        )
    if not isinstance(config.get("target"), dict):
        raise UserError(f"{folder}/config.json: does not name its target; export it again")
    return config


def kind_of(config: dict[str, Any]) -> str:
    """Return the kind in a drafter's `config.json`."""
    return str(config.get("model_type")).removeprefix(PREFIX)
