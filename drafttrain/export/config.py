"""Settings of the export stage."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ExportConfig:
    """What the bundle and its model card say beside what training recorded (section `export` of a recipe).

    Attributes:
        name: title of the model card. null: the recipe's name.
        license: licence of the drafter's weights, as the Hub spells it.
        base_model: Hub id of the target for the card's metadata. null: the target's name in the recipe.
        language: languages for the card's metadata.
        datasets: what the drafter was trained on, one line each, for the card.
        hub_datasets: Hub ids of data sets among them, for the card's metadata.
        command: the command that made it, for the card.
        hardware: what it was trained on, for the card. null: the machine that training recorded.
        notes: what else the card tells, one line each, such as how an n-gram cache was made.
        dtype: of the bundle's weights. "auto": "float32" where target.dtype is that, else "bfloat16".
        ngrams: folder of an n-gram cache that the bundle takes along. null: none.
    """

    name: str | None = None
    license: str = "apache-2.0"
    base_model: str | None = None
    language: str = "en"
    datasets: list[str] | None = None
    hub_datasets: list[str] | None = None
    command: str | None = None
    hardware: str | None = None
    notes: list[str] | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = field(default="auto", metadata={"settled": True})
    ngrams: str | None = None
