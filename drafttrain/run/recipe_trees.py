"""Check that the other sections of a recipe provide what its trees need.

Policies import torch, which takes seconds, so trees are checked last, when a recipe has no other mistake.
"""

from typing import TYPE_CHECKING

from drafttrain.trees.parse import parse_policy, takes_classifier, takes_costs, uses_calibration
from drafttrain.utils.errors import UserError

if TYPE_CHECKING:
    from drafttrain.run.recipe import Recipe


def check_trees(recipe: "Recipe") -> None:
    """Validate `evaluate.trees`.

    Raises:
        UserError: there is no such tree, or the recipe does not make what it needs.
    """
    recipe.evaluate.check_trees()
    if "heads" in recipe.drafter.settings:
        _check_medusa(recipe)
    for needs, is_made, remedy in (
        (needs_calibration, recipe.calibrate.is_asked, "calibrate.prompts or calibrate.quick"),
        (takes_classifier, recipe.classifier.prompts is not None, "classifier.prompts"),
    ):
        trees = [tree for tree in recipe.evaluate.trees if needs(tree)]
        if trees and not is_made:
            raise UserError(f"evaluate.trees: must come with {remedy} for {trees[0]}, got none")


def needs_calibration(tree: str) -> bool:
    """Return whether a tree needs a calibration: C2T does not, nor a tree whose settings are all given."""
    if takes_classifier(tree) or not takes_costs(tree):
        return False
    from drafttrain.trees.costs import EXAMPLE_COSTS  # other trees do without

    return uses_calibration(tree, EXAMPLE_COSTS)


def _check_medusa(recipe: "Recipe") -> None:
    """Refuse trees that depend on the cost of depth, or are deeper than MEDUSA has heads."""
    if trees := [tree for tree in recipe.evaluate.trees if needs_calibration(tree)]:
        raise UserError(
            f"evaluate.trees: must not depend on costs for medusa, got {trees[0]}; its heads cost the same "
            "at any depth"
        )
    from drafttrain.trees.c2t import Plain

    heads, classifier = recipe.drafter.heads, recipe.classifier
    if recipe.training.init_from:  # as many heads as that drafter has
        return
    if classifier.prompts is not None and classifier.max_depth > heads:
        raise UserError(
            f"classifier.max_depth: must be <= drafter.heads {heads}, got {classifier.max_depth}; set it"
        )
    for tree in recipe.evaluate.trees if recipe.evaluate.prompts else ():
        stand_in = Plain("P") if takes_classifier(tree) else None  # the classifier is not there yet
        if (depth := parse_policy(tree, None, stand_in).max_depth) > heads:
            raise UserError(
                f"evaluate.trees: must be at most drafter.heads {heads} tokens deep, got {tree} with {depth}"
            )
