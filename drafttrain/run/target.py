"""The target of a run: what is loaded for the name that a recipe gives."""

from drafttrain.run.recipe import Recipe
from drafttrain.target_lm.known import is_known

PLACE = ".place.json"  # in the folder of the stage fetch-target


def target_model(recipe: Recipe) -> str:
    """Return the argument of `load_target`: the recipe's name, or the folder of a known one from the Hub."""
    if is_known(recipe.target.model) and recipe.target.source == "hub":
        from drafttrain.target_lm.fetch import fetch_target

        return str(fetch_target(recipe.target.model, "hub"))
    return recipe.target.model
