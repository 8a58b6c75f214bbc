"""Singular triplets against dense SVD: wide and tall, rank-deficient, repeated, graded; and their certificates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from poprisk._core.linalg.matrices import from_dense, from_functions, zeros
from poprisk._core.linalg.singular import SingularTriplets, top_singular_triplets
from poprisk.errors import DataError, HyperparameterError

F64, F32 = torch.float64, torch.float32
ROUNDING = {F64: 1e-13, F32: 5e-6}


def operator(values: torch.Tensor, rows: int, columns: int, dtype=F64, seed: int = 0):
    """An operator with these singular values, the rest 0, known by products that are counted."""
    generator = torch.Generator().manual_seed(seed)
    basis = lambda n: torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=F64))[0].to(dtype)  # noqa: E731
    U, V, s = basis(rows), basis(columns), values.to(dtype).unsqueeze(1)
    count = [0]

    def forward(X):
        count[0] += X.shape[1]
        return U @ (s * (V.T @ X))

    def backward(Y):
        count[0] += Y.shape[1]
        return V @ (s * (U.T @ Y))

    return from_functions(forward, backward, (rows, columns), dtype), U, V, count


def check(found: SingularTriplets, A, spectrum: torch.Tensor, k: int, tolerance: float) -> None:
    dtype = found.values.dtype
    scale = max(spectrum.max().item(), 1e-30)
    true = torch.cat([spectrum, spectrum.new_zeros(k)]).sort(descending=True).values[:k]
    assert found.converged
    assert max(found.left_residuals.max(), found.right_residuals.max()) <= tolerance * scale
    for basis in (found.left, found.right):
        assert_close(basis.T @ basis, torch.eye(k, dtype=dtype), rtol=0, atol=ROUNDING[dtype])
    assert (found.values.double() - true).abs().max() <= 2 * tolerance * scale + ROUNDING[dtype] * scale
    everything = torch.cat([spectrum, spectrum.new_zeros(1)])
    nearest = (found.values.double().unsqueeze(1) - everything).abs().min(dim=1).values
    assert (nearest <= found.residuals.double() + ROUNDING[dtype] * scale).all()
    Av, Atu = A.matmat(found.right), A.T.matmat(found.left)
    rounding = 10 * ROUNDING[dtype] * scale
    assert_close(found.left_residuals, (Av - found.left * found.values).norm(dim=0), rtol=1e-3, atol=rounding)
    assert_close(found.right_residuals, (Atu - found.right * found.values).norm(dim=0), rtol=1e-3, atol=rounding)


SPECTRA = {
    "rank 5": torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=F64),
    "polynomial": torch.arange(1, 81, dtype=F64) ** -1.0,
    "twelve decades": torch.logspace(0, -12, 40, dtype=F64),
    "thirty equal": torch.cat([torch.ones(30, dtype=F64), torch.full((40,), 0.5, dtype=F64)]),
    "zero": torch.zeros(2, dtype=F64),
}


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (250, 250)], ids=["tall", "wide", "square"])
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", SPECTRA)
def test_twelve_triplets(name, dtype, shape):
    A, _, _, count = operator(SPECTRA[name], *shape, dtype)
    tolerance = 1e-10 if dtype == F64 else 1e-3
    found = top_singular_triplets(A, 12, tolerance=tolerance)
    assert found.products == count[0]
    check(found, A, SPECTRA[name], 12, tolerance)


def test_twelve_decades_are_not_squared():
    """Through the eigenvalues of AᵀA everything below 1e-8 would be noise."""
    A, _, _, _ = operator(SPECTRA["twelve decades"], 120, 90)
    found = top_singular_triplets(A, 40, tolerance=1e-13)
    assert (found.values - SPECTRA["twelve decades"]).abs().max() <= 5e-15
    assert found.nonzero == 40
    squared = torch.linalg.eigvalsh(A.to_dense().T @ A.to_dense()).clamp(min=0).sqrt().flip(0)[:40]
    assert (squared - SPECTRA["twelve decades"]).abs().max() > 1e-10


def test_beyond_the_rank():
    A, _, V, _ = operator(SPECTRA["rank 5"], 200, 300)
    found = top_singular_triplets(A, 12)
    assert found.nonzero == 5
    assert torch.equal(found.values[5:], torch.zeros(7, dtype=F64))
    assert (V.T @ found.right[:, 5:]).abs().max() < 1e-13
    nothing = top_singular_triplets(zeros(4, 6), 4)
    assert nothing.nonzero == 0
    assert nothing.converged


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 25), columns=st.integers(1, 25), data=st.data())
def test_small_dense_matrices(seed, rows, columns, data):
    k = data.draw(st.integers(1, min(rows, columns)))
    M = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=F64)
    if data.draw(st.booleans()):
        M[:, columns // 2 :] = M[:, :1]  # rank-deficient, with a repeated direction
    found = top_singular_triplets(from_dense(M), k, tolerance=1e-11)
    check(found, from_dense(M), torch.linalg.svdvals(M), k, 1e-11)
    assert_close(found.values, torch.linalg.svdvals(M)[:k], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300)], ids=["tall", "wide"])
def test_warm_starts_and_compression(shape):
    A, _, V, count = operator(SPECTRA["polynomial"], *shape)
    cold = top_singular_triplets(A, 8).products
    count[0] = 0
    warm = top_singular_triplets(A, 8, initial=V[:, :8])
    assert warm.products == count[0] < cold
    wrong = top_singular_triplets(A, 8, initial=V[:, 8:16])
    tight = top_singular_triplets(A, 8, max_basis=40, max_products=2000)
    for found in (warm, wrong, tight):
        check(found, A, SPECTRA["polynomial"], 8, 1e-7)


def test_the_budget_holds_and_the_certificate_is_still_a_bound():
    spectrum = torch.linspace(1.0, 0.5, 100, dtype=F64)
    A, _, _, count = operator(spectrum, 200, 150)
    found = top_singular_triplets(A, 6, max_products=60)
    assert found.products == count[0] <= 60
    assert not found.converged
    nearest = (found.values.unsqueeze(1) - spectrum).abs().min(dim=1).values
    assert (nearest <= found.residuals + 1e-14).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale):
    A, _, _, _ = operator(SPECTRA["polynomial"], 90, 120, F32)
    found, scaled = top_singular_triplets(A, 4), top_singular_triplets(scale * A, 4)
    assert_close(scaled.values / scale, found.values)
    assert scaled.converged
    assert (scaled.residuals > 0).all()


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda A: top_singular_triplets(A, 6), HyperparameterError, "between 1 and 5"),
        (lambda A: top_singular_triplets(A, 1, max_products=5), HyperparameterError, "10 for the start"),
        (lambda A: top_singular_triplets(A * float("inf"), 1), DataError, "must be finite"),
        (lambda A: top_singular_triplets(A, 1, initial=torch.ones(5, 1, dtype=F64)), DataError, r"\[9, j\]"),
    ],
)
def test_refusals(attempt, error, message):
    with pytest.raises(error, match=message):
        attempt(from_dense(torch.ones(5, 9, dtype=F64)))
