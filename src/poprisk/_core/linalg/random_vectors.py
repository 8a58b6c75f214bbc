"""Random vectors for probes and starts, from an explicit generator, on the operator's device."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.store import content_key
from poprisk.errors import HyperparameterError

Distribution = Literal["rademacher", "gaussian", "sphere"]


def default_generator(device: torch.device) -> torch.Generator:
    """A generator of our own with a fixed seed: the result is reproducible and the global stream is left alone."""
    return torch.Generator(device).manual_seed(0)


def gaussian(n: int, k: int, generator: torch.Generator, like: Tensor) -> Float[Tensor, "n k"]:
    """Independent standard normal entries in the dtype and on the device of ``like``.

    Drawn where the generator lives, so that a CPU generator serves a GPU operator with the same numbers everywhere.
    """
    return torch.randn(n, k, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


def probes(
    n: int, k: int, distribution: Distribution, generator: torch.Generator, like: Tensor
) -> Float[Tensor, "n k"]:
    r"""Random vectors ω with :math:`E[\omega \omega^\top] = I`.

    Random signs have the least variance for most operators; ``sphere`` is uniform on that of radius :math:`\sqrt n`.

    >>> probes(3, 2, "rademacher", torch.Generator().manual_seed(0), torch.zeros(1)).abs().sum()
    tensor(6.)
    """
    if distribution == "rademacher":
        bits = torch.randint(0, 2, (n, k), generator=generator, device=generator.device)
        return (2 * bits - 1).to(like)
    if distribution not in ("gaussian", "sphere"):
        raise HyperparameterError(
            f"distribution must be 'rademacher', 'gaussian' or 'sphere', got {distribution!r}: try 'rademacher'"
        )
    Omega = gaussian(n, k, generator, like)
    return Omega * (n**0.5 / Omega.norm(dim=0)) if distribution == "sphere" else Omega


def probe_columns(
    n: int, start: int, stop: int, columns: str, seed: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "n k"]:
    """Columns ``start`` … ``stop`` of the identity, or of an infinite sequence of random probes.

    Each probe has a seed of its own, so that the same probes come from any start.

    Raises:
        HyperparameterError: unknown kind of columns.

    >>> whole = probe_columns(5, 0, 4, "rademacher", seed=7)
    >>> torch.equal(whole[:, 2:], probe_columns(5, 2, 4, "rademacher", seed=7))
    True
    """
    X = torch.zeros(n, stop - start, dtype=dtype)
    if columns == "identity":
        X[start:stop].fill_diagonal_(1)
        return X
    if columns not in ("rademacher", "gaussian", "sphere"):
        raise HyperparameterError(
            f"columns must be 'identity', 'rademacher', 'gaussian' or 'sphere', got {columns!r}: try 'rademacher'"
        )
    for place in range(start, stop):
        generator = torch.Generator().manual_seed(int(content_key([seed, place])[:12], 16))
        X[:, place - start] = probes(n, 1, columns, generator, X).squeeze(1)
    return X
