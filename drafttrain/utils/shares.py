"""Shares as reports show them."""


def below_all(share: float) -> float:
    """Return a share that is shown as 100% in whole percent only if it is 1."""
    return share if share >= 1 else min(share, 0.99)
