"""Settings of a drafter, and the `config.json` in a drafter's folder."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

FORMAT_VERSION = 1
MODEL_TYPES = tuple(f"drafttrain_{kind}" for kind in ("edd", "vdm", "eagle", "medusa", "causal_lm"))
# Which target states a kind reads: chosen blocks (EDD), the last hidden state, or none.
READS_LAST = ("eagle", "medusa")
READS_NONE = ("vdm", "causal_lm")
ONE_LAYER = ("vdm", "eagle", "medusa")
LAYERED = ("edd", "vdm", "eagle")


@dataclass
class DrafterConfig:
    """What is chosen about a drafter.

    Attributes:
        kind: "edd"; "vdm", the vanilla draft model (EDD's layer without target states); "eagle" (the
            target's last hidden state and the next token's embedding, joined); "medusa" (heads on the last
            hidden state); "causal_lm" (any small Hugging Face LM of the target's vocabulary).
        tapped_blocks: target blocks whose outputs are EDD's soft prompts, from 0; negative counts from the
            end, and the number of blocks stands for the last hidden state, after the final norm. Several are
            joined by a trained projection. Other kinds read no blocks.
        layers: decoder layers of EDD; 1 is the paper's, and the other kinds have 1.
        draft_vocab_size: how many of the target's tokens can be drafted at most: the most frequent trained
            tokens of the corpus. null: all.
        anchor: EDD that joins each token with the newest verified state (ours).
        kv_heads: heads of keys and values of EDD, VDM and EAGLE. null: as many as the target has. EDD reads
            states through nothing else, and where the target shares them among queries (GQA) most of a state
            is lost: the EDD paper's targets share none.
        init: "random", or the number of the target block that the layers start from (negative from the end).
        train_embeddings: train the token embeddings instead of reading the target's.
        train_head: train the LM head, which starts from the target's.
        heads: MEDUSA's heads, one for each draft token.
        noise: EAGLE's noise, uniform within this distance, on the states it is trained with.
        input_norms: EAGLE with RMS norms on embedding, state and output, as in an MTP layer (C2T, Appendix
            F).
        model: folder or Hub id of the small LM ("causal_lm").
        lora_rank: train low-rank adapters of this rank in place of the small LM's weights; they are merged at
            the end. null: train the weights.
    """

    kind: Literal["edd", "vdm", "eagle", "medusa", "causal_lm"] = "edd"
    tapped_blocks: list[int] = field(default_factory=lambda: [-4])
    layers: int = 1
    anchor: bool = False
    kv_heads: int | None = None
    draft_vocab_size: int | None = 8192
    init: str | int = "random"
    train_embeddings: bool = False
    train_head: bool = True
    heads: int = 5
    noise: float = 0.1
    input_norms: bool = False
    model: str | None = None
    lora_rank: int | None = None

    def check(self) -> None:
        """Refuses what no drafter can be, whatever the target.

        Raises:
            UserError: the key and its remedy.
        """
        kind = self.kind
        if self.layers < 1:
            raise UserError(f"drafter.layers is {self.layers}: a drafter has at least 1")
        if self.layers > 1 and kind in ONE_LAYER:
            raise UserError(f"drafter.layers is {self.layers}, and {kind} has 1: leave it out")
        if kind == "edd" and not self.tapped_blocks:
            raise UserError("drafter.tapped_blocks is empty: name a block, such as [-4]")
        if self.kv_heads is not None and kind not in LAYERED:
            raise UserError(f"drafter.kv_heads is for {', '.join(LAYERED)}, and this is {kind}: leave it out")
        if self.kv_heads is not None and self.kv_heads < 1:
            raise UserError(
                f"drafter.kv_heads is {self.kv_heads}: name one above 0, or null for the target's number"
            )
        if self.kv_heads is not None and self.init != "random":
            raise UserError(
                "drafter.kv_heads: a layer that starts from a target block (init) has that block's heads; "
                "leave out one of the two"
            )
        if self.heads < 1:
            raise UserError(f"drafter.heads is {self.heads}: MEDUSA has at least 1")
        if not self.noise >= 0:  # NaN fails too
            raise UserError(f"drafter.noise is {self.noise}: it must be 0 or more")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise UserError(f"drafter.lora_rank is {self.lora_rank}: name one above 0, or null for none")
        if kind == "medusa" and not self.train_head:
            raise UserError("drafter.train_head is false, and MEDUSA's heads are all it has: leave it out")
        if (kind == "causal_lm") != (self.model is not None):
            raise UserError(
                "drafter.model names the small LM of kind causal_lm, and of no other: "
                + ("name a folder or Hub id" if kind == "causal_lm" else "leave it out")
            )
        foreign = {"anchor": "edd", "input_norms": "eagle", "lora_rank": "causal_lm"}
        for key, owner in foreign.items():
            if getattr(self, key) and kind != owner:
                raise UserError(f"drafter.{key} is for kind {owner}, and this is {kind}: leave it out")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise UserError(
                f"drafter.draft_vocab_size is {self.draft_vocab_size}: name one above 0, or null for all "
                "of the target's tokens"
            )
        if isinstance(self.init, str) and self.init != "random":
            raise UserError(f"drafter.init is {self.init}: it must be random or the number of a target block")


def drafter_folder(path: str | os.PathLike) -> Path:
    """The folder with a drafter's files: the given one, or the drafter in the folder of the stage train."""
    inner = Path(path) / "drafter"
    is_stage = not (Path(path) / "config.json").exists() and (inner / "config.json").exists()
    return inner if is_stage else Path(path)


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The `config.json` of a drafter's folder.

    Raises:
        UserError: there is none, or it is not that of a drafter of this format.
    """
    config = read_json(Path(folder) / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else "broken"
    if kind not in MODEL_TYPES:
        raise UserError(f"{folder}: holds a {kind} model; give the folder of a drafter or of its bundle")
    if config.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder}: drafter format {config.get('format_version')}, and this version reads "
            f"{FORMAT_VERSION}; export it again"
        )
    if not isinstance(config.get("target"), dict):
        raise UserError(f"{folder}/config.json: does not say which target it is for; export it again")
    return config
