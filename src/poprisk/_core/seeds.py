"""Random streams that do not touch: one seed for each purpose."""

import hashlib


def stream(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose, so that no two draws share random numbers.

    >>> stream(0, "weights") != stream(0, "labels"), stream(0, "weights") == stream(0, "weights")
    (True, True)
    """
    return int.from_bytes(hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:7], "big")
