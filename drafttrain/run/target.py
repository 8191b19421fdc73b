"""The target of a run: what is loaded for a recipe's name."""

from drafttrain.run.recipe import Recipe
from drafttrain.target_lm.known import is_known

PLACE = ".place.json"  # in the folder of the stage fetch-target


def target_model(recipe: Recipe) -> str:
    """Return what `load_target` is to load: the recipe's name, or the folder where that name can mean two."""
    if is_known(recipe.target.model) and recipe.target.source == "hub":
        from drafttrain.target_lm.fetch import fetch_target

        return str(fetch_target(recipe.target.model, "hub"))
    return recipe.target.model
