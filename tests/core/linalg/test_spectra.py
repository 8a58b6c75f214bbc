"""Eigenpairs against known spectra: null spaces, copies, clusters, twelve decades; and what the residuals prove."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from poprisk._core.linalg.matrices import declare_symmetric, diagonal, from_dense, from_functions, zeros
from poprisk._core.linalg.spectra import Eigenpairs, top_eigenpairs
from poprisk.errors import DataError, DeviceError, HyperparameterError

F64, F32 = torch.float64, torch.float32
# relative to the largest eigenvalue: a few roundings of products with n = 500 terms
ROUNDING = {F64: 1e-13, F32: 5e-6}


def eigenvectors(n: int, r: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, r, generator=torch.Generator().manual_seed(seed), dtype=F64))[0]


def operator(values: torch.Tensor, n: int, dtype=F64, seed: int = 0):
    """An n×n operator with these eigenvalues, the rest 0, known by products that are counted."""
    U, d = eigenvectors(n, len(values), seed).to(dtype), values.to(dtype).unsqueeze(1)
    count = [0]

    def matmat(X):
        count[0] += X.shape[1]
        return U @ (d * (U.T @ X))

    return from_functions(matmat, None, (n, n), dtype, symmetric=True), U, count


def leading(values: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(k)]).sort(descending=True).values[:k]


def check(pairs: Eigenpairs, spectrum: torch.Tensor, n: int, k: int, tolerance: float) -> None:
    """All that must hold of any result for a positive semidefinite operator."""
    dtype = pairs.values.dtype
    scale = max(spectrum.abs().max().item(), 1e-30)
    rounding = ROUNDING[dtype] * scale
    true = leading(spectrum, k)
    values = pairs.values.double()
    assert pairs.converged
    assert pairs.residuals.max() <= tolerance * scale
    assert (values.diff() <= 0).all()
    assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(k, dtype=dtype), rtol=0, atol=ROUNDING[dtype])
    # Nothing is missed, copies counted: what remains open below the tolerance cannot hide more than the tolerance.
    assert (values - true).abs().max() <= max(pairs.joint_bound, 2 * tolerance * scale) + rounding
    if tolerance < 1e-8:  # far beyond the tolerance the values themselves are right to rounding
        assert (values - true).abs().max() <= 1e-11 * scale
    everything = torch.cat([spectrum, spectrum.new_zeros(int(n > len(spectrum)))])
    nearest = (values.unsqueeze(1) - everything).abs().min(dim=1).values
    assert (nearest <= pairs.residuals.double() + rounding).all()


SPECTRA = {
    "rank 5": torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=F64),
    "polynomial": torch.arange(1, 101, dtype=F64) ** -1.0,
    "flat bulk": torch.linspace(1.0, 0.5, 120, dtype=F64),
    "twelve decades": torch.logspace(0, -12, 40, dtype=F64),
    "thirty equal": torch.cat([torch.ones(30, dtype=F64), torch.full((60,), 0.5, dtype=F64)]),
    "pairs": torch.arange(1, 41, dtype=F64).repeat_interleave(2) / 40,
    "cluster": torch.cat([1 + 1e-9 * torch.arange(12, dtype=F64), torch.linspace(0.8, 0.1, 50, dtype=F64)]),
    "one giant": torch.tensor([1e6] + [1.0] * 30, dtype=F64),
    "projector": torch.ones(7, dtype=F64),
    "zero": torch.zeros(3, dtype=F64),
}


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", SPECTRA)
def test_twenty_pairs_of_500(name, dtype):
    A, _, count = operator(SPECTRA[name], 500, dtype)
    tolerance = 1e-10 if dtype == F64 else 1e-3
    pairs = top_eigenpairs(A, 20, tolerance=tolerance)
    check(pairs, SPECTRA[name], 500, 20, tolerance)
    assert pairs.products == count[0]


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_beyond_the_rank_there_are_zeros_and_it_says_so(dtype):
    A, U, _ = operator(SPECTRA["rank 5"], 500, dtype)
    pairs = top_eigenpairs(A, 20)
    assert pairs.nonzero == 5
    assert torch.equal(pairs.values[5:], torch.zeros(15, dtype=dtype))
    assert (U.T @ pairs.vectors[:, 5:]).abs().max() <= ROUNDING[dtype]  # the zeros come with vectors of the null space
    assert pairs.products <= 60  # 25 to start, a few to see that nothing is left, 20 for the certificate
    nothing = top_eigenpairs(zeros(50, dtype=dtype), 3)
    assert torch.equal(nothing.values, torch.zeros(3, dtype=dtype))
    assert torch.equal(nothing.residuals, torch.zeros(3, dtype=dtype))
    assert nothing.nonzero == 0
    assert nothing.converged


def test_twelve_decades_are_resolved_to_rounding_of_the_largest():
    A, _, _ = operator(SPECTRA["twelve decades"], 300)
    pairs = top_eigenpairs(A, 40, tolerance=1e-13)
    assert (pairs.values - SPECTRA["twelve decades"]).abs().max() <= 5e-15
    assert pairs.nonzero == 40


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), data=st.data())
def test_random_spectra_with_repetitions(seed, n, data):
    k = data.draw(st.integers(1, n))
    distinct = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.5 + 1e-9, 1.0, 3.0]), min_size=n, max_size=n))
    spectrum = torch.tensor(distinct, dtype=F64)
    A, _, _ = operator(spectrum, n, seed=seed)
    check(top_eigenpairs(A, k, tolerance=1e-11), spectrum, n, k, 1e-11)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_all_pairs_of_a_tiny_operator(n):
    values = torch.arange(1, n + 1, dtype=F64)
    pairs = top_eigenpairs(operator(values, n)[0], n)
    assert_close(pairs.values, values.flip(0))
    assert pairs.products == 2 * n  # the whole space, and the certificate


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_indefinite_operators(which):
    M = torch.randn(60, 60, generator=torch.Generator().manual_seed(0), dtype=F64)
    M = M + M.T
    values = torch.linalg.eigvalsh(M)
    expected = {
        "largest": values.flip(0),
        "smallest": values,
        "magnitude": values[values.abs().argsort(descending=True)],
    }[which][:5]
    pairs = top_eigenpairs(from_dense(M), 5, which=which)
    assert pairs.converged
    assert_close(pairs.values, expected)
    assert_close(M @ pairs.vectors, pairs.vectors * pairs.values, rtol=0, atol=1e-6)


def test_the_certificate_is_a_bound_long_before_convergence():
    spectrum = SPECTRA["flat bulk"]
    A, _, count = operator(spectrum, 400)
    pairs = top_eigenpairs(A, 10, max_products=45)
    assert not pairs.converged
    assert pairs.products == count[0] <= 45
    everything = torch.cat([spectrum, torch.zeros(1, dtype=F64)])
    nearest = (pairs.values.unsqueeze(1) - everything).abs().min(dim=1).values
    assert (nearest <= pairs.residuals + 1e-14).all()
    assert (pairs.values <= leading(spectrum, 10) + 1e-14).all()  # Ritz values lie below, one by one
    assert pairs.residuals.min() > 1e-4  # the bound is put to the test, not vacuous
    assert pairs.residuals.max() < 0.5


def test_residuals_are_those_of_the_vectors():
    A, _, _ = operator(SPECTRA["polynomial"], 200)
    pairs = top_eigenpairs(A, 6, tolerance=1e-3)
    recomputed = (A.matmat(pairs.vectors) - pairs.vectors * pairs.values).norm(dim=0)
    assert_close(pairs.residuals, recomputed, rtol=1e-6, atol=1e-14)


def test_kato_temple_sharpens_the_bound_when_the_gap_is_known():
    values = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=F64)
    A, _, _ = operator(values, 100)
    pairs = top_eigenpairs(A, 3, tolerance=0.05)
    error = (pairs.values - values[:3]).abs()
    gaps = torch.ones(3, dtype=F64) - error  # from each value to all eigenvalues but its own
    assert (error <= pairs.error_bounds(gaps) + 1e-14).all()
    assert torch.equal(pairs.error_bounds(), pairs.residuals)
    assert_close(pairs.error_bounds(1e9), pairs.residuals.square() / 1e9)
    assert torch.equal(pairs.error_bounds(0.0), pairs.residuals)


def test_kato_temple_holds_where_it_bites():
    # one rotated vector of diag(1, 0): value cos², residual sin·cos, and r²/gap is the error itself
    angle = torch.tensor(0.1, dtype=F64)
    v = torch.stack([angle.cos(), angle.sin()]).unsqueeze(1)
    value = angle.cos() ** 2
    residual = angle.sin() * angle.cos()
    pairs = Eigenpairs(value[None], v, residual[None], 1, True)
    assert_close(pairs.error_bounds(value.item()), (1 - value)[None])
    assert pairs.error_bounds()[0] > 9 * (1 - value)


def test_a_warm_start_is_cheap_when_right_and_harmless_when_wrong():
    A, U, count = operator(SPECTRA["polynomial"], 400)
    cold = top_eigenpairs(A, 10).products
    right = top_eigenpairs(A, 10, initial=U[:, :10])
    assert right.products < 0.8 * cold
    check(right, SPECTRA["polynomial"], 400, 10, 1e-7)
    for start in (10, 50, 90):  # exact eigenvectors, but not the leading ones
        count[0] = 0
        wrong = top_eigenpairs(A, 10, initial=U[:, start : start + 10])
        check(wrong, SPECTRA["polynomial"], 400, 10, 1e-7)
        assert wrong.products == count[0]


def test_compressing_the_space_costs_products_and_not_accuracy():
    A, _, _ = operator(SPECTRA["flat bulk"], 400)
    roomy, tight = top_eigenpairs(A, 10), top_eigenpairs(A, 10, max_basis=60, max_products=2000)
    check(tight, SPECTRA["flat bulk"], 400, 10, 1e-7)
    assert tight.products > roomy.products


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize("seed", range(6))
def test_copies_are_found_at_loose_tolerances_too(seed, tolerance):
    """Few distinct eigenvalues exhaust a Krylov space early; growing by fewer directions lost copies just here."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = (torch.rand(50, generator=generator, dtype=F64) * 5).ceil() / 5
    A, _, _ = operator(spectrum, 600, seed=seed)
    check(top_eigenpairs(A, 11, tolerance=tolerance), spectrum, 600, 11, tolerance)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale):
    A, _, _ = operator(SPECTRA["pairs"], 100, F32)
    pairs, scaled = top_eigenpairs(A, 5), top_eigenpairs(scale * A, 5)
    assert_close(scaled.values / scale, pairs.values)
    assert scaled.converged


@pytest.mark.parametrize("distance", [1e-6, 0.3], ids=["near", "far"])
def test_a_surrogate_is_searched_and_the_operator_itself_certified(distance):
    """A near one saves all products but the certificate's; a far one costs only its own, the result is as good."""
    values = SPECTRA["polynomial"]
    A, U, count = operator(values, 500)
    twist = torch.randn(500, 500, generator=torch.Generator().manual_seed(4), dtype=F64)
    rough = U @ (values.unsqueeze(1) * U.T) + distance * (twist @ twist.T) / 500
    pairs = top_eigenpairs(A, 10, tolerance=1e-3, surrogate=from_dense(rough, symmetric=True))
    check(pairs, values, 500, 10, 1e-3)
    assert pairs.products == count[0]
    assert pairs.surrogate_products >= 15
    assert (pairs.products == 10) == (distance < 1e-3)
    few = top_eigenpairs(A, 10, tolerance=1e-3, surrogate=from_dense(rough, symmetric=True), max_products=34)
    assert few.products <= 34
    assert not few.converged, "34 products are too few for the surrogate as well, and the residuals tell"


def test_a_surrogate_of_another_kind_is_refused():
    A = diagonal(torch.ones(4))
    for other in (diagonal(torch.ones(5)), diagonal(torch.ones(4, dtype=F64)), from_dense(torch.ones(4, 4).triu())):
        with pytest.raises(DataError, match="a surrogate must be symmetric"):
            top_eigenpairs(A, 2, surrogate=other)


def test_results_are_reproducible_and_leave_the_global_stream_alone():
    A, _, _ = operator(SPECTRA["polynomial"], 100)
    state = torch.get_rng_state()
    first, second = top_eigenpairs(A, 4), top_eigenpairs(A, 4)
    assert torch.equal(first.vectors, second.vectors)
    assert torch.equal(torch.get_rng_state(), state)
    other = top_eigenpairs(A, 4, generator=torch.Generator().manual_seed(7))
    assert_close(other.values, first.values)
    assert not torch.equal(other.vectors, first.vectors)


def test_progress_is_told_every_round():
    seen = []
    A, _, _ = operator(SPECTRA["polynomial"], 200)
    pairs = top_eigenpairs(A, 5, progress=lambda products, converged: seen.append((products, converged)))
    assert seen[0][0] == 10
    assert [products for products, _ in seen] == sorted({products for products, _ in seen})
    assert seen[-1] == (pairs.products - 5, 5)


def test_products_that_carry_a_graph_are_cut_from_it():
    M = torch.diag(torch.arange(1.0, 9, dtype=F64)).requires_grad_()
    pairs = top_eigenpairs(from_dense(M, symmetric=True), 2)
    assert not pairs.values.requires_grad
    assert_close(pairs.values, torch.tensor([8.0, 7.0], dtype=F64))


EYE = diagonal(torch.ones(20, dtype=F64))
LOPSIDED = from_dense(torch.triu(torch.ones(20, 20, dtype=F64)))


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: top_eigenpairs(LOPSIDED, 2), DataError, "not known to be one"),
        (lambda: top_eigenpairs(declare_symmetric(LOPSIDED), 2), DataError, "said to be symmetric, but"),
        (lambda: top_eigenpairs(EYE * float("nan"), 2), DataError, "must be finite"),
        (lambda: top_eigenpairs(EYE, 0), HyperparameterError, "between 1 and 20"),
        (lambda: top_eigenpairs(EYE, 21), HyperparameterError, "between 1 and 20"),
        (lambda: top_eigenpairs(EYE, 2, tolerance=1e-17), HyperparameterError, "tolerance must lie between"),
        (lambda: top_eigenpairs(EYE, 2, tolerance=1.0), HyperparameterError, "tolerance must lie between"),
        (lambda: top_eigenpairs(EYE, 2, max_products=8), HyperparameterError, "at least 9 for k = 2: 7 for the start"),
        (lambda: top_eigenpairs(EYE, 2, max_basis=9), HyperparameterError, "max_basis must be at least 14"),
        (lambda: top_eigenpairs(EYE, 2, oversampling=0), HyperparameterError, "positive whole number, got 0"),
        (lambda: top_eigenpairs(diagonal(torch.ones(9).bfloat16()), 2), DataError, "float32 or float64"),
        (lambda: top_eigenpairs(EYE, 2, initial=torch.ones(3, 1, dtype=F64)), DataError, r"matrix \[20, j\]"),
        (lambda: top_eigenpairs(EYE, 2, initial=torch.ones(20, 1)), DataError, "in torch.float32"),
        (lambda: top_eigenpairs(EYE, 2, initial=torch.full((20, 1), torch.inf, dtype=F64)), DataError, "finite"),
        (lambda: top_eigenpairs(EYE, 2, initial=torch.ones(20, 1, dtype=F64, device="meta")), DeviceError, "on cpu"),
    ],
)
def test_refusals(attempt, error, message):
    with pytest.raises(error, match=message):
        attempt()
