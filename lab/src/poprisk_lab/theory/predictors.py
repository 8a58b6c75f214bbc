r"""How good any predictor of test displacements can be: its worst error, and when an exact one exists."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import Bound, Coupling, Transfer, operator_norm, require_length, require_shape
from poprisk.operators._coupling import rank_of, ratio

Predictor = Callable[[Float[Tensor, "N"]], Float[Tensor, "M"]]
"""Any map from training displacements to test displacements."""

# Rounding errors of ‖C_Q‖, per root of its dimension, that the two sides of a comparison may differ by.
_PROBE_MARGIN = 100.0


@dataclass(frozen=True, eq=False)
class PredictorError:
    r"""A certified lower bound on the worst error of a predictor, beside the floor under all predictors."""

    at_least: float
    r"""The largest ratio met: :math:`\operatorname{Err}(\Psi)` is at least this."""
    floor: float
    r""":math:`\|R_\perp\|`, the infimum of Err over all predictors (``cor:linear_predictor_optimal``)."""
    direction: Float[Tensor, "N"]
    """The h at which the largest ratio was met."""
    probes: int
    """Directions tried, both signs counted."""
    rounding: float = 0.0
    r"""By how much at_least may lie below the floor: rounding of :math:`C_Q`, and the predictor's odd part at the
    direction of the floor, whose train displacement counts as 0 but is so only up to what is resolved."""


def predictor_error(
    coupling: Coupling,
    predictor: Predictor,
    *,
    scales: tuple[float, ...] = (0.1, 1.0, 10.0),
    random_probes: int = 32,
    directions: Float[Tensor, "N k"] | None = None,
    generator: torch.Generator | None = None,
) -> PredictorError:
    r"""A lower bound on Err of any predictor, linear or not (``def:normalized_channels``).

    .. math:: \operatorname{Err}(\Psi) = \sup_{h \notin \ker W} \|G h - \Psi(D h)\| / \sqrt{h^\top W h}

    The supremum is tried at the directions that decide it for some predictor: the right singular vectors of
    :math:`R_\perp`, which no predictor can see, those of :math:`C_Q`, random ones, and any given; each with both signs
    (the argument of ``cor:linear_predictor_optimal`` needs the pair) and at several sizes, as a nonlinear predictor
    is not homogeneous. What is returned is attained, so it is a lower bound whatever the predictor; for linear
    predictors ``whitened_error`` gives the supremum itself.

    Args:
        coupling: The window.
        predictor: Maps a training displacement [N] to a test displacement [M].
        scales: Root dissipations :math:`\sqrt{h^\top W h}` to try.
        random_probes: Random directions of the signal channel.
        directions: More directions h, for instance the gradient at the start; parts in the reservoir are dropped.
        generator: Source of the random directions; default: one with a fixed seed.

    Raises:
        DataError: the signal channel is empty, or the predictor returns another shape.
        HyperparameterError: no scale, or one that is not positive.

    >>> from poprisk.operators import dissipation_channels
    >>> R, D = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([4.0, 0.0]))
    >>> coupling = Coupling(dissipation_channels(R, D, torch.tensor([[2.0, 3.0]])))
    >>> error = predictor_error(coupling, lambda x: torch.tanh(x[:1]))
    >>> error.at_least >= error.floor == 3.0
    True
    """
    c = coupling.channels
    if not scales or not all(scale > 0 for scale in scales):
        raise HyperparameterError(f"scales must be positive root dissipations, at least one, got {scales}")
    if not c.rank:
        raise DataError("the signal channel is empty: there is no direction to measure a predictor on")
    probes = _probes(coupling, random_probes, directions, generator)
    best, best_h = -1.0, c.vectors[:, 0]
    for z in probes.T:
        for scale in scales:
            for sign in (1.0, -1.0):
                x = sign * scale * z
                guess = predictor(c.reduced_train @ x)
                require_length(guess, c.reduced_test.shape[0], "what the predictor returns")
                ratio = (c.reduced_test @ x - guess).norm().item() / scale
                if ratio > best:
                    best, best_h = ratio, c.vectors @ (x / c.roots)
    rounding = _PROBE_MARGIN * torch.finfo(c.roots.dtype).eps * len(c.vectors) ** 0.5 * c.visibility_norm**0.5
    rounding += _odd_part_where_blind(coupling, predictor, scales)
    return PredictorError(best, coupling.remainder_norm, best_h, 2 * len(scales) * probes.shape[1], rounding)


def nonlinear_bound(error: PredictorError) -> Bound:
    r"""No predictor, linear or not, beats the remainder: :math:`\|R_\perp\| \le \operatorname{Err}(\Psi)`.

    Eq. ``nonlinear_gap_identity``. The right side is itself a lower bound on Err, so the inequality is proved where it
    holds.
    """
    return Bound("nonlinear", "eq:nonlinear_gap_identity", "algebra", error.floor, error.at_least, error.rounding)


@dataclass(frozen=True)
class TransferEquivalences:
    r"""The four statements of Eq. ``exact_screen_equivalences`` as numbers: all are 0 (to rounding), or none is.

    They differ in what rounding does to them. The first weighs all directions of the signal channel alike; the other
    three weigh them by how far they move the outputs, and are the ones to read where the spectrum of W is long.
    """

    remainder: float
    r""":math:`\|R_\perp\| / \|C_Q\|`."""
    kernel_inclusion: float
    r""":math:`\|G N\| / \|G\|` for an orthonormal basis N of ker D: 0 means ker D ⊆ ker G."""
    range_inclusion: float
    r""":math:`\min_X \|D^\top X - G^\top\| / \|G\|`: 0 means range(Gᵀ) ⊆ range(Dᵀ)."""
    semidefinite_order: float
    r"""The largest eigenvalue of :math:`G^\top G - \lambda D^\top D`, in coordinates in which D is the identity on its
    row space, over λ; at most 0 means that the order holds."""
    order_constant: float
    r""":math:`\lambda = \Sigma_Q^2`, the smallest one that can serve."""


def transfer_equivalences(coupling: Coupling, *, rank_cutoff: float | None = None) -> TransferEquivalences:
    r"""Check :math:`R_\perp = 0` in four ways (``cor:transfer_equivalences``).

    Args:
        coupling: A window with dense transfers.
        rank_cutoff: Singular values of D at most this share of its largest one count as 0; by default 10·N·eps.

    Raises:
        DataError: the transfers are not dense matrices.

    >>> from poprisk.operators import dissipation_channels
    >>> R, D = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([4.0, 0.0]))
    >>> seen, unseen = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    >>> transfer_equivalences(Coupling(dissipation_channels(R, D, seen))).kernel_inclusion
    0.0
    >>> transfer_equivalences(Coupling(dissipation_channels(R, D, unseen))).kernel_inclusion
    1.0
    """
    D, G = _dense(coupling.channels.train_transfer), _dense(coupling.channels.test_transfer)
    U, s, Vt = torch.linalg.svd(D)
    k = rank_of(s, D, rank_cutoff)
    unseen = G @ Vt[k:].T
    G_D_pinv = ((G @ Vt[:k].T) / s[:k]) @ U[:, :k].T
    constant = operator_norm(G_D_pinv) ** 2
    return TransferEquivalences(
        remainder=coupling.relative_remainder,
        kernel_inclusion=ratio(operator_norm(unseen), operator_norm(G)),
        range_inclusion=ratio(operator_norm(G_D_pinv @ D - G), operator_norm(G)),
        # In units of ‖D‖; for D = 0 any unit serves.
        semidefinite_order=_order_violation(G_D_pinv @ U[:, :k], unseen / s[:1] if k else unseen, constant),
        order_constant=constant,
    )


def transfer_norm(
    train_transfer: Float[Tensor, "N N2"],
    test_transfer: Float[Tensor, "M columns"],
    *,
    rank_cutoff: float | None = None,
) -> float:
    r""":math:`\Sigma_Q = \|G D^\dagger\|`, the Lipschitz norm of the predictor when it is exact.

    Args:
        train_transfer: D.
        test_transfer: G.
        rank_cutoff: Singular values of D at most this share of its largest one count as 0; by default 10·N·eps.

    >>> transfer_norm(torch.diag(torch.tensor([4.0, 0.0])), torch.tensor([[2.0, 0.0]]))
    0.5
    """
    N = train_transfer.shape[1]
    require_shape(train_transfer, (N, N), "train_transfer")
    require_shape(test_transfer, (test_transfer.shape[0], N), "test_transfer")
    _, s, Vt = torch.linalg.svd(train_transfer)
    k = rank_of(s, train_transfer, rank_cutoff)
    return operator_norm((test_transfer @ Vt[:k].T) / s[:k])


def _probes(
    coupling: Coupling, random_probes: int, directions: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Unit vectors of the signal channel, in the eigenbasis of W and whitened: z with h = W^{†/2} z."""
    c = coupling.channels
    blind = torch.linalg.svd(coupling.reduced_remainder, full_matrices=False)[2].T
    loudest = torch.linalg.svd(c.reduced_test, full_matrices=False)[2].T
    generator = generator or torch.Generator(c.roots.device).manual_seed(0)
    # Drawn where the generator lives: one of the CPU serves channels on any device, with the same numbers.
    noise = torch.randn(c.rank, random_probes, generator=generator, dtype=c.roots.dtype, device=generator.device)
    blocks = [blind, loudest, noise.to(c.roots.device)]
    if directions is not None:
        require_shape(directions, (c.vectors.shape[0], directions.shape[1]), "directions")
        blocks.append(c.roots.unsqueeze(1) * (c.vectors.T @ directions))
    Z = torch.cat(blocks, dim=1)
    sizes = Z.norm(dim=0)
    return Z[:, sizes > 0] / sizes[sizes > 0]


def _odd_part_where_blind(coupling: Coupling, predictor: Predictor, scales: tuple[float, ...]) -> float:
    """‖Ψ(D h) - Ψ(-D h)‖/2 per root dissipation, at the direction h in ker D that decides the floor.

    The argument for the floor has Ψ(D h) = Ψ(-D h) there. Directions that count as ker D have train displacements of
    the size of rounding, and a steep predictor tells their signs apart.
    """
    c = coupling.channels
    if not c.unresolved or not coupling.reduced_remainder.numel():
        return 0.0
    blind = c.train_right[:, c.train_rank :]
    z = blind @ (blind.T @ torch.linalg.svd(coupling.reduced_remainder, full_matrices=False)[2][0])
    x = c.reduced_train @ z
    return min((predictor(s * x) - predictor(-s * x)).norm().item() / (2 * s) for s in scales)


def _order_violation(seen: Tensor, unseen: Tensor, constant: float) -> float:
    """The largest eigenvalue of GᵀG - λDᵀD in coordinates in which D is the identity on its row space, relative.

    A change of coordinates keeps signs (Sylvester), and λDᵀD, which can be far above GᵀG in size, is not formed.
    """
    Y = torch.cat([seen, unseen], dim=1)
    order = Y.T @ Y
    order.diagonal()[: seen.shape[1]] -= constant
    scale = constant + operator_norm(unseen) ** 2
    return ratio(torch.linalg.eigvalsh(order)[-1].item(), scale)


def _dense(X: Transfer) -> Tensor:
    if not isinstance(X, Tensor):
        raise DataError("the four equivalences need D and G as matrices, got operators: call to_dense() on them")
    return X
