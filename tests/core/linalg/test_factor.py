"""Factors, pseudo-inverse square roots and projectors against dense decompositions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.factor import spectrum_of_eigenpairs, spectrum_of_factor, spectrum_of_matrix, tsqr_append
from poprisk._core.linalg.low_rank import LowRank
from poprisk._core.linalg.matrices import from_dense
from poprisk._core.linalg.projectors import (
    OrthogonalProjector,
    epsilon_projectors,
    inverse_square_root,
    null_projector,
    range_projector,
)
from poprisk._core.linalg.spectra import Eigenpairs, top_eigenpairs
from poprisk.errors import DataError, HyperparameterError

F64 = torch.float64
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def matrix(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=F64)


def with_roots(roots: torch.Tensor, n: int, rows: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A factor F with these singular values, and its right vectors."""
    r = len(roots)
    U, V = (torch.linalg.qr(matrix(seed + i, size, r))[0] for i, size in enumerate((rows or n, n)))
    return U * roots @ V.T, V


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 8), sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_appending_blocks_is_one_gram_matrix(seed, n, sizes):
    blocks = [matrix(seed + i, size, n) for i, size in enumerate(sizes)]
    R = None
    for block in blocks:
        R = tsqr_append(R, block)
    rows = torch.cat(blocks)
    assert R.shape == (min(len(rows), n), n)
    assert_close(R.T @ R, rows.T @ rows, **EXACT)
    assert torch.equal(R, R.triu())
    assert (R.diagonal() >= 0).all()


def test_many_rows_go_through_in_pieces():
    rows = matrix(0, 5000, 3)
    assert_close(tsqr_append(None, rows).T @ tsqr_append(None, rows), rows.T @ rows, **EXACT)


def test_a_factor_keeps_what_the_gram_matrix_loses():
    roots = torch.logspace(0, -12, 25, dtype=F64)  # eigenvalues over 24 decades
    F, V = with_roots(roots, 40, rows=400)
    R = None
    for block in F.split(33):
        R = tsqr_append(R, block)
    spectrum = spectrum_of_factor(R)
    assert (spectrum.roots[:25] - roots).abs().max() <= 2e-15
    gram = spectrum_of_matrix(R.T @ R)
    assert (gram.roots[:25] - roots).abs().max() > 1e-10
    assert inverse_square_root(spectrum).rank == 25
    assert inverse_square_root(gram).rank < 17  # roots above about 1e-7 only
    signal = range_projector(spectrum)
    assert_close(signal.to_dense(), V @ V.T, rtol=0, atol=1e-3)  # the weakest vector is known to rounding over 1e-12


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 9),
    rank=st.integers(0, 9),
    kept_as=st.sampled_from(["matrix", "factor"]),
)
def test_inverse_square_root_has_its_defining_properties(seed, n, rank, kept_as):
    rank = min(rank, n)
    roots = torch.linspace(2.0, 0.5, rank, dtype=F64)
    F, V = with_roots(roots, n, seed=seed)
    W = F.T @ F
    root = inverse_square_root(W if kept_as == "matrix" else spectrum_of_factor(tsqr_append(None, F)))
    M, P = root.to_dense(), V @ V.T
    assert root.rank == rank
    assert_close(M, M.T, **EXACT)
    assert_close(M @ W @ M, P, **EXACT)
    assert_close(M @ M, torch.linalg.pinv(W, rtol=1e-9, hermitian=True), **EXACT)
    assert_close(root.signal.to_dense(), P, **EXACT)
    assert_close(root.reservoir.to_dense(), torch.eye(n, dtype=F64) - P, **EXACT)
    assert adjoint_mismatch(root) < 1e-13


def test_the_cutoff_is_relative_stated_and_respected():
    W = torch.diag(torch.tensor([4.0, 1.0, 0.04, 0.0], dtype=F64))
    for cutoff, rank in ((0.0, 3), (0.005, 3), (0.01, 2), (0.02, 2), (0.25, 1), (0.3, 1)):
        root = inverse_square_root(W, cutoff)
        assert root.rank == rank
        assert root.cutoff == cutoff * 4.0
        assert root.signal.rank + root.reservoir.rank == 4
    assert inverse_square_root(W).cutoff == pytest.approx(4 * 4 * torch.finfo(F64).eps)
    assert inverse_square_root(spectrum_of_factor(W.sqrt())).cutoff == pytest.approx(
        4 * (4 * torch.finfo(F64).eps) ** 2
    )


def test_nothing_at_all():
    root = inverse_square_root(torch.zeros(3, 3))
    assert root.rank == 0
    assert torch.equal(root @ torch.ones(3), torch.zeros(3))
    assert torch.equal(root.reservoir @ torch.ones(3), torch.ones(3))
    assert spectrum_of_factor(torch.zeros(0, 3)).largest == 0.0
    assert range_projector(spectrum_of_factor(torch.zeros(0, 3))).rank == 0


@pytest.mark.parametrize("project", [range_projector, null_projector])
def test_projectors_are_projectors(project):
    W = LowRank(matrix(0, 6, 2)).to_dense()
    P = project(W)
    assert isinstance(P, OrthogonalProjector)
    assert P.rank == {range_projector: 2, null_projector: 4}[project]
    assert_close((P @ P).to_dense(), P.to_dense(), **EXACT)
    assert_close(P.to_dense() @ W, W if project is range_projector else torch.zeros_like(W), **EXACT)
    assert_close((P + P.complement()).to_dense(), torch.eye(6, dtype=F64), **EXACT)
    assert P.symmetric


@pytest.mark.parametrize(("epsilon", "rank"), [(0.0, 3), (0.5, 2), (1.0, 1), (1.5, 1), (5.0, 0)])
def test_epsilon_projectors_cut_at_an_absolute_threshold(epsilon, rank):
    W = torch.diag(torch.tensor([2.0, 1.0, 0.5, 0.0]))
    signal, reservoir = epsilon_projectors(W, epsilon)
    assert (signal.rank, reservoir.rank) == (rank, 4 - rank)
    assert_close(signal.to_dense(), torch.diag((W.diag() > epsilon).float()))
    inside = reservoir.to_dense() @ W @ reservoir.to_dense()
    assert torch.linalg.eigvalsh(inside).max() <= epsilon + 1e-6


def test_leading_pairs_serve_where_they_reach_and_refuse_beyond():
    values = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5], dtype=F64)
    V = torch.linalg.qr(matrix(0, 30, 5))[0]
    A = from_dense(V * values @ V.T, symmetric=True)
    spectrum = spectrum_of_eigenpairs(top_eigenpairs(A, 3, tolerance=1e-10))
    root = inverse_square_root(spectrum, 0.3)
    expected = inverse_square_root(A.to_dense(), 0.3)
    assert root.rank == 2
    assert_close(root.to_dense(), expected.to_dense(), **EXACT)
    assert epsilon_projectors(spectrum, 3.0).signal.rank == 2
    with pytest.raises(DataError, match="known down to 2 only, got a threshold of 1"):
        epsilon_projectors(spectrum, 1.0)
    assert inverse_square_root(spectrum).rank == 2  # the third may have a twin that was not computed
    whole = spectrum_of_eigenpairs(top_eigenpairs(A, 8, tolerance=1e-10))
    assert inverse_square_root(whole).rank == 5
    assert_close(inverse_square_root(whole).to_dense(), inverse_square_root(A.to_dense()).to_dense(), **EXACT)


def test_float32_roots_below_its_squares():
    spectrum = spectrum_of_factor(torch.diag(torch.tensor([1.0, 1e-4])) * 1e-20)
    assert spectrum.count_above(0.0) == 2
    assert_close(inverse_square_root(spectrum, 0.0).roots, torch.tensor([1e-20, 1e-24]), rtol=1e-5, atol=0)


NAN = torch.full((2, 2), float("nan"))


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: spectrum_of_matrix(torch.diag(torch.tensor([1.0, -1.0]))), DataError, "positive semidefinite"),
        (lambda: spectrum_of_matrix(torch.tensor([[1.0, 1.0], [0.0, 1.0]])), DataError, "must be symmetric"),
        (lambda: spectrum_of_matrix(NAN), DataError, "finite entries"),
        (lambda: spectrum_of_factor(NAN), DataError, "finite entries"),
        (lambda: tsqr_append(None, NAN), DataError, "must be finite"),
        (lambda: tsqr_append(torch.eye(2, dtype=F64), torch.eye(2)), DataError, "factor and rows must agree"),
        (lambda: inverse_square_root(torch.eye(2), 1.0), HyperparameterError, r"\[0, 1\)"),
        (lambda: inverse_square_root(torch.eye(2), -0.1), HyperparameterError, r"\[0, 1\)"),
        (lambda: epsilon_projectors(torch.eye(2), -1.0), DataError, "must not be negative"),
        (lambda: epsilon_projectors(torch.eye(2), float("nan")), DataError, "must not be negative"),
        (
            lambda: spectrum_of_eigenpairs(Eigenpairs(-torch.ones(1), torch.ones(1, 1), torch.zeros(1), 1, True)),
            DataError,
            "descend to 0",
        ),
    ],
)
def test_refusals(attempt, error, message):
    with pytest.raises(error, match=message):
        attempt()
