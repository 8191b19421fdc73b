"""Check that the other sections of a recipe provide what its trees need.

Policies import torch, which takes seconds, so trees are checked last, when a recipe has no other mistake.
"""

from typing import TYPE_CHECKING

from drafttrain.trees.parse import takes_classifier, takes_costs, uses_calibration
from drafttrain.trees.policies import drafter_policy
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
        from drafttrain.run.medusa_trees import check_medusa  # other kinds do without

        check_medusa(recipe)
    for needs, is_made, remedy in (
        (needs_calibration, recipe.calibrate.is_asked, "calibrate.prompts or calibrate.quick"),
        (takes_classifier, recipe.classifier.prompts is not None, "classifier.prompts"),
        (lambda tree: drafter_policy(tree) != tree, recipe.ngrams is not None, "section ngrams"),
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
