"""Features of a drafted node, for C2T's policies and classifiers."""

from collections.abc import Sequence

from drafttrain.utils.errors import UserError

# Named as in the C2T paper, if they are in it: joint probability of the path (P), entropy of the
# distribution that the node comes from, in nats over the top 1000 (H), depth, 1 for the root's children (d);
# the node's own probability given its parent (p), its place among its siblings from 0 (rank).
FEATURES = ("P", "H", "d", "p", "rank")


def check_features(features: Sequence[str], section: str = "") -> None:
    """Require at least one of `FEATURES`, each at most once.

    Args:
        section: section of the recipe, for the error message.

    Raises:
        UserError: there is none, an unknown one, or one twice.
    """
    if not features or len(set(features)) < len(features) or not set(features) <= set(FEATURES):
        key = f"{section}.features" if section else "features"
        raise UserError(
            f"{key}: must be some of {','.join(FEATURES)}, each once, got {','.join(map(str, features))}"
        )
