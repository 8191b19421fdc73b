"""Check that a MEDUSA drafter can grow its recipe's trees."""

from typing import TYPE_CHECKING

from drafttrain.run.recipe_trees import needs_calibration
from drafttrain.trees.parse import parse_policy, takes_classifier
from drafttrain.trees.policies import NGRAM, drafter_policy
from drafttrain.utils.errors import UserError

if TYPE_CHECKING:
    from drafttrain.run.recipe import Recipe


def check_medusa(recipe: "Recipe") -> None:
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
    trees = [drafter_policy(tree) for tree in recipe.evaluate.trees if tree != NGRAM]
    for tree in trees if recipe.evaluate.prompts else ():
        stand_in = Plain("P") if takes_classifier(tree) else None  # the classifier is not there yet
        if (depth := parse_policy(tree, None, stand_in).max_depth) > heads:
            raise UserError(
                f"evaluate.trees: must be at most drafter.heads {heads} tokens deep, got {tree} with {depth}"
            )
