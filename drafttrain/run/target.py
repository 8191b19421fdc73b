"""The target of a run: what is loaded for a recipe's name, and where its first stage has found it."""

from pathlib import Path

from drafttrain.run.recipe import Recipe
from drafttrain.target_lm.known import is_known
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

PLACE = ".place.json"  # in the folder of the stage fetch-target


def recorded_target(corpus: str | Path) -> str:
    """Return the target of the run that a corpus folder belongs to.

    Raises:
        UserError: there is no such folder, or it is in no run.
    """
    if not (Path(corpus) / "corpus.json").is_file():
        raise UserError(f"{corpus}: no corpus here; give the folder that drafttrain corpus wrote")
    if (place := recorded_place(Path(corpus).parent / "target")) is None:
        raise UserError(f"{corpus}: must be in a run's folder that names its target; give it with --target")
    return str(place)


def recorded_place(folder: Path) -> Path | None:
    """Return where the target is that a run's first stage fetched, from that stage's folder."""
    record = folder / PLACE
    return Path(read_json(record)["place"]) if record.exists() else None


def target_model(recipe: Recipe) -> str:
    """Return what `load_target` is to load: the recipe's name, or the folder where that name can mean two."""
    if is_known(recipe.target.model) and recipe.target.source == "hub":
        from drafttrain.target_lm.fetch import fetch_target

        return str(fetch_target(recipe.target.model, "hub"))
    return recipe.target.model
