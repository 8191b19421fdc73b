"""Shares as they are shown."""


def below_all(share: float) -> float:
    """Return a share that no rounding to whole percent makes all of it, unless it is."""
    return share if share >= 1 else min(share, 0.99)
