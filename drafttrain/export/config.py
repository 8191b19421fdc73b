"""Settings of the export stage."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class ExportConfig:
    """Facts for the bundle's model card that training does not record (section `export` of a recipe).

    Attributes:
        name: title of the model card. null: the recipe's name.
        license: licence of the drafter's weights, as the Hub spells it. null: not stated; `push` asks for it.
        base_model: Hub id of the target. null: the target's name in the recipe; `push` asks for it where that
            is no Hub id.
        language: languages for the card's metadata.
        datasets: what the drafter was trained on, one line each.
        hub_datasets: Hub ids of data sets among them, for the card's metadata.
        command: the command that trained the drafter. null: the one that training recorded.
        hardware: what it was trained on. null: the machine that training recorded.
        notes: further lines for the card, such as how an n-gram cache was made.
        dtype: dtype of the bundle's weights. "auto": "float32" if target.dtype is float32, else "bfloat16".
        ngrams: folder of an n-gram cache to put into the bundle. null: none.
    """

    name: str | None = None
    license: str | None = None
    base_model: str | None = None
    language: str = "en"
    datasets: list[str] | None = None
    hub_datasets: list[str] | None = None
    command: str | None = None
    hardware: str | None = None
    notes: list[str] | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    ngrams: str | None = None
