"""Signal channel, reservoir, C_S, C_Q and Γ_Q: identities on synthetic runs, closed forms of the linear model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from oracles.linear_model import linear_operators
from oracles.run_operators import operators_of, quadratic_run, random_steps
from poprisk._core.linalg.factor import spectrum_of_eigenpairs, spectrum_of_factor, tsqr_append
from poprisk._core.linalg.matrices import from_dense
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def channels_of(ops, **options):
    return dissipation_channels(tensor(ops.W_factor), tensor(ops.D), tensor(ops.G), **options)


def norm(X: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(X, 2).item()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), squared=st.booleans(), momentum=st.booleans(), never_drawn=st.integers(0, 3))
def test_definitions_and_the_factorization_of_both_transfers(seed, squared, momentum, never_drawn):
    ops = operators_of(random_steps(seed, squared=squared, momentum=momentum, never_drawn=never_drawn))
    c = channels_of(ops)
    values, V = np.linalg.eigh(ops.W)
    keep = values > 1e-9 * values[-1]
    inverse_root = tensor((V[:, keep] * values[keep] ** -0.5) @ V[:, keep].T)
    assert c.rank == keep.sum() <= 6 - never_drawn
    assert_close(c.roots.square(), tensor(values[keep][::-1]), rtol=1e-7, atol=1e-12)
    assert_close(c.train_channel, tensor(ops.D) @ inverse_root, **EXACT)
    assert_close(c.test_channel, tensor(ops.G) @ inverse_root, **EXACT)
    assert_close(c.visibility_gramian, inverse_root @ tensor(ops.G.T @ ops.G) @ inverse_root, **EXACT)
    assert c.visibility_norm == pytest.approx(norm(c.visibility_gramian))
    # thm:coupling_factorization: D = C_S W^{1/2}, G = C_Q W^{1/2}; it needs ker W inside both kernels.
    root = tensor((V * np.sqrt(np.clip(values, 0, None))) @ V.T)
    assert_close(c.train_channel @ root, tensor(ops.D), rtol=1e-7, atol=1e-7)
    assert_close(c.test_channel @ root, tensor(ops.G), rtol=1e-7, atol=1e-7)
    h = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert c.dissipation(h) == pytest.approx((h @ tensor(ops.W) @ h).item(), rel=1e-10)
    assert_close(c.signal @ h + c.reservoir @ h, h)


def test_the_reservoir_is_invisible_and_needs_the_preconditioner_through_momentum():
    steps = random_steps(3, never_drawn=2)
    ops = operators_of(steps)
    c = channels_of(ops)
    assert c.reservoir.rank == 2
    assert norm(tensor(ops.G) @ c.reservoir.to_dense()) / norm(tensor(ops.G)) < 1e-13
    # A gate closed at the step of its gradient and open at the next: with M in place of M̃ the reservoir would be seen.
    two = quadratic_run(2, count=2, batch=5, n=5).steps
    two[0].M = np.zeros_like(two[0].M)
    two[1].S = np.zeros_like(two[1].S)
    ops = operators_of(two)
    with_own = np.vstack([np.sqrt(step.M)[:, None] * F for step, F in zip(two, ops.F, strict=True)])
    wrong = dissipation_channels(tensor(with_own), tensor(ops.D), tensor(ops.G))
    right = channels_of(ops)
    assert norm(tensor(ops.G)) > 1e-3
    assert norm(tensor(ops.G) @ wrong.reservoir.to_dense()) == pytest.approx(norm(tensor(ops.G)))
    assert norm(tensor(ops.G) @ right.reservoir.to_dense()) < 1e-13


def test_duplicated_inputs_are_an_exact_reservoir():
    run = quadratic_run(5, n=5, batch=5, rule="gd", duplicate=True)
    ops = operators_of(run.steps)
    c = channels_of(ops)
    assert c.reservoir.rank == 1
    difference = torch.zeros(5, dtype=torch.float64)
    difference[0], difference[-1] = 0.5**0.5, -(0.5**0.5)
    assert_close(c.reservoir @ difference, difference, **EXACT)
    assert norm(tensor(ops.G) @ c.reservoir.to_dense()) < 1e-12 * norm(tensor(ops.G))


def test_the_transfer_projector_is_onto_the_rows_of_the_train_channel():
    ops = operators_of(random_steps(1, never_drawn=1))
    D = tensor(ops.D)
    low = D - torch.outer(D[:, 0], torch.eye(6, dtype=torch.float64)[0])  # D forgets one direction
    c = dissipation_channels(tensor(ops.W_factor), low, tensor(ops.G))
    P = c.transfer_projector.to_dense()
    C_S = c.train_channel
    assert c.rank == 5
    assert c.unresolved == 1
    assert c.smallest_train_root < 1e-12
    assert_close(C_S @ P, C_S, **EXACT)
    assert_close(P, torch.linalg.pinv(C_S, rtol=1e-10) @ C_S, **EXACT)
    assert (P @ C_S - C_S).norm() > 0.1  # and not onto its columns, which the paper says


@pytest.mark.parametrize("n", [4, 9])
def test_closed_forms_of_the_linear_model(n):
    """Erratum: as T → ∞ the visibility gramian is 2n Γ_0 with Γ_0 = K† K_SQ K_QS K†, not Γ_0."""
    rng = np.random.default_rng(0)
    X, X_test = rng.normal(size=(n, 6)), rng.normal(size=(3, 6))
    ops = linear_operators(X, X_test, T=1e4)
    c = channels_of(ops)
    assert c.rank == ops.rank == min(n, 6)
    assert_close(c.visibility_gramian, tensor(2 * n * ops.A.T @ ops.A), rtol=1e-8, atol=1e-8)
    # C_S = √(2n) ((1 - x)/(1 + x))^{1/2} on each eigenvector, with x = e^{-Tσ²/n}
    T = 0.7
    rates = np.exp(-T * np.linalg.svd(X, compute_uv=False) ** 2 / n)
    expected = np.sqrt(2 * n * (1 - rates) / (1 + rates))
    c = channels_of(linear_operators(X, X_test, T))
    assert_close(c.train_roots, tensor(expected[: c.rank]), **EXACT)
    assert c.smallest_train_root == pytest.approx(expected[c.rank - 1])
    # A training set of its own as test set: whitened, its displacement is C_S on the eigenvectors.
    ops = linear_operators(X, X_test, T)
    assert_close(c.whiten(tensor(ops.D)), c.train_channel @ c.vectors, rtol=1e-7, atol=1e-8)
    assert_close(torch.linalg.svdvals(c.whiten(tensor(ops.D)))[: c.rank], tensor(expected[: c.rank]), **EXACT)


def test_a_factor_reaches_below_the_root_of_rounding():
    """A direction with λ = 1e-18 λ_1 is kept from the factor; in W it is not there."""
    rng = np.random.default_rng(1)
    V = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    roots = np.array([1.0, 1e-3, 1e-6, 1e-9, 0.0])
    R, L = tensor(roots[:, None] * V.T), rng.normal(size=(5, 5))
    G = tensor(L @ (roots[:, None] * V.T))
    c = dissipation_channels(R, G, G)
    assert c.rank == 4
    assert_close(c.roots, tensor(roots[:4]), rtol=1e-6, atol=0)
    assert_close(c.reduced_test.abs(), tensor(np.abs(L[:, :4])), rtol=1e-5, atol=1e-5)
    from_gram = np.linalg.eigvalsh(R.numpy().T @ R.numpy())
    assert abs(from_gram[1] - 1e-18) > 1e-18


def test_it_takes_operators_spectra_and_the_leading_part_alone():
    ops = operators_of(random_steps(7, N=12, d=20, count=6))
    full = channels_of(ops)
    R, D, G = tensor(ops.W_factor), tensor(ops.D), tensor(ops.G)
    triangle = tsqr_append(None, R)
    for factor in (triangle, spectrum_of_factor(R)):
        other = dissipation_channels(factor, from_dense(D), from_dense(G))
        assert_close(other.visibility_gramian, full.visibility_gramian, **EXACT)
        assert_close(other.train_channel, full.train_channel, **EXACT)
    pairs = top_eigenpairs(from_dense(tensor(ops.W), symmetric=True), k=4)
    leading = dissipation_channels(spectrum_of_eigenpairs(pairs), from_dense(D), from_dense(G))
    assert leading.rank in (3, 4)  # the last one marks what is not known
    P = full.spectrum.vectors[:, : leading.rank]
    assert_close(leading.test_channel, full.test_channel @ P @ P.T, rtol=1e-6, atol=1e-6)


def test_cutoffs_are_what_they_say():
    R = torch.diag(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
    D = torch.diag(torch.tensor([1.0, 0.01, 1e-9], dtype=torch.float64))
    assert dissipation_channels(R, D, D).rank == 3
    c = dissipation_channels(R, D, D, cutoff=0.009)
    assert (c.rank, c.cutoff) == (2, pytest.approx(0.009))
    assert dissipation_channels(R, D, D).train_rank == 3
    assert dissipation_channels(R, D, D, rank_cutoff=1e-3).train_rank == 2
    signal, reservoir = dissipation_channels(R, D, D).split_at(0.005)
    assert (signal.rank, reservoir.rank) == (2, 1)
    empty = dissipation_channels(torch.zeros(2, 3).double(), D, D)
    assert (empty.rank, empty.visibility_norm, empty.smallest_train_root, empty.unresolved) == (0, 0.0, 0.0, 0)


def test_what_does_not_fit_is_refused():
    R, D, G = torch.eye(3).double(), torch.eye(3).double(), torch.ones(2, 3).double()
    with pytest.raises(DataError, match=r"train_transfer.*\[3, 3\], got \[2, 2\]"):
        dissipation_channels(R, D[:2, :2], G)
    with pytest.raises(DataError, match=r"test_transfer.*\[2, 3\], got \[2, 2\]"):
        dissipation_channels(R, D, G[:, :2])
    with pytest.raises(DataError, match=r"must agree, got .*float32"):
        dissipation_channels(R, D.float(), G)
    with pytest.raises(DataError, match="must be finite"):
        dissipation_channels(R, D * torch.nan, G)
    with pytest.raises(HyperparameterError, match=r"cutoff must lie in \[0, 1\)"):
        dissipation_channels(R, D, G, cutoff=1.0)
    with pytest.raises(HyperparameterError, match="rank_cutoff"):
        dissipation_channels(R, D, G, rank_cutoff=-0.1)
    with pytest.raises(DataError, match=r"h must be a vector \[3\]"):
        dissipation_channels(R, D, G).dissipation(torch.ones(2).double())
