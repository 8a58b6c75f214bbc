"""The b×b projector against the d×d eigendecomposition, and where gradients degenerate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from oracles.population import dense_projector, rate_matrix_loop
from poprisk._core.linalg.low_rank import LowRank, precondition
from poprisk._core.linalg.offdiagonal import offdiagonal_projector
from poprisk.errors import DataError
from poprisk.optim._estimators.rate import population_projector
from poprisk.optim.rules._gates import hard_gate

# eigenvectors of the small and the large problem agree to rounding over the gap, which is the positive eigenvalue
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def _batch(seed: int, b: int, d: int, signal: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(b, d) + signal * draw(d)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 9), d=st.integers(1, 12), duplicates=st.booleans())
def test_equals_the_dense_eigendecomposition(seed, b, d, duplicates):
    G = _batch(seed, b, d)
    if duplicates:
        G[b // 2 :] = G[0]
    P = torch.rand(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    M = offdiagonal_projector(G, P)
    expected, rate = dense_projector(rate_matrix_loop(G), P)
    assert_close(M.to_dense(), expected, **TIGHT)
    assert_close(M.rate, rate, **TIGHT)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 6), d=st.integers(1, 6), signal=st.sampled_from([0.0, 0.3, 3.0]))
def test_no_feasible_matrix_does_better(seed, b, d, signal):
    G = _batch(seed, b, d, signal)
    A = rate_matrix_loop(G)
    P = torch.rand(d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    M = population_projector(G, P)
    N = torch.linalg.qr(_batch(seed + 2, d, d))[0]
    shares = torch.rand(d, generator=torch.Generator().manual_seed(seed + 3), dtype=torch.float64)
    feasible = P.sqrt()[:, None] * (N * shares @ N.T) * P.sqrt()
    assert (feasible * A).sum() <= M.rate + 1e-12
    # The diagonal gate of Corollary thm:diagonal_gate is feasible too, and no other diagonal matrix does better.
    open_ = hard_gate(G.mean(dim=0), G.var(dim=0) / b, 1.0)
    best = (P * A.diag()).clamp_min(0).sum()
    assert (torch.diag(P * open_) * A).sum() <= M.rate + 1e-12
    assert_close((torch.diag(P * open_) * A).sum(), best, rtol=1e-9, atol=1e-12)
    assert M.rank <= 1
    slack = torch.diag(P) - M.to_dense()
    assert torch.linalg.eigvalsh(slack).min() >= -1e-12


@pytest.mark.parametrize("shape", [(2, 1), (2, 40), (7, 3), (5, 5)])
def test_shapes(shape):
    M = offdiagonal_projector(_batch(0, *shape))
    assert M.shape == (shape[1], shape[1])
    assert M.factor.shape == (shape[1], 1)
    v = _batch(1, 1, shape[1])[0]
    assert_close(M.matvec(v), M.to_dense() @ v)
    assert_close(M.matmat(v[:, None])[:, 0], M.to_dense() @ v)
    assert M.adjoint() is M


def test_identical_examples_give_the_projector_on_their_gradient():
    g = _batch(3, 1, 6)[0]
    M = offdiagonal_projector(g.expand(4, 6))
    assert_close(M.to_dense(), torch.outer(g, g) / (g @ g))
    assert_close(M.rate, g @ g)


@pytest.mark.parametrize(
    "G",
    [
        torch.zeros(3, 4, dtype=torch.float64),
        torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64),
        torch.eye(5, dtype=torch.float64) - 0.2,  # centred: nothing but noise
        torch.zeros(2, 0, dtype=torch.float64),
    ],
    ids=["zero", "opposite", "centred", "no-weights"],
)
def test_without_agreement_the_projector_is_zero(G):
    M = offdiagonal_projector(G, 2.0)
    assert M.rank == 0
    assert_close(M.to_dense(), torch.zeros(G.shape[1], G.shape[1], dtype=G.dtype))
    assert_close(M.rate, torch.zeros((), dtype=G.dtype))


def test_mutually_orthogonal_examples_still_have_one_direction():
    G = torch.eye(4, dtype=torch.float64)  # A = (11ᵀ - I)/12: the rate is 3/12 along the diagonal
    M = population_projector(G)
    assert_close(M.to_dense(), torch.full((4, 4), 0.25, dtype=torch.float64))
    assert_close(M.rate, torch.tensor(0.25, dtype=torch.float64))


def test_one_example_without_gradient_among_others():
    G = _batch(4, 5, 6)
    G[2] = 0
    expected, rate = dense_projector(rate_matrix_loop(G), torch.ones(6, dtype=torch.float64))
    M = offdiagonal_projector(G)
    assert_close(M.to_dense(), expected, **TIGHT)
    assert_close(M.rate, rate, **TIGHT)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_range_does_not_matter(scale):
    G = _batch(5, 4, 6).float()
    assert_close(offdiagonal_projector(G * scale).to_dense(), offdiagonal_projector(G).to_dense())


def test_closed_coordinates_stay_closed():
    P = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    M = offdiagonal_projector(_batch(6, 4, 3), P).to_dense()
    assert_close(M[1], torch.zeros(3, dtype=torch.float64))


def test_half_precision_is_computed_in_float32():
    M = offdiagonal_projector(_batch(7, 3, 4).bfloat16())
    assert M.dtype == torch.float32


@pytest.mark.parametrize(
    ("G", "P", "message"),
    [
        (torch.ones(1, 3), 1.0, "at least 2 examples, got 1"),
        (torch.ones(2, 3), torch.ones(2), r"diagonal \[3\], got shape \[2\]"),
        (torch.ones(2, 3), -1.0, "not negative"),
        (torch.ones(2, 3), float("nan"), "finite"),
        (torch.tensor([[1.0], [float("inf")]]), 1.0, "gradients must be finite"),
        (torch.tensor([[1.0], [float("nan")]]), 1.0, "gradients must be finite"),
    ],
)
def test_refusals(G, P, message):
    with pytest.raises(DataError, match=message):
        offdiagonal_projector(G, P)


@pytest.mark.parametrize("form", ["number", "scalar", "diagonal", "dense", "low-rank"])
def test_precondition_is_the_matrix_product(form):
    d, rows = 4, _batch(8, 3, 4)
    diagonal, matrix = torch.arange(1.0, 5, dtype=torch.float64), _batch(9, 4, 4)
    M, dense = {
        "number": (2.0, 2 * torch.eye(d, dtype=torch.float64)),
        "scalar": (torch.tensor(3.0, dtype=torch.float64), 3 * torch.eye(d, dtype=torch.float64)),
        "diagonal": (diagonal, torch.diag(diagonal)),
        "dense": (matrix, matrix),
        "low-rank": (LowRank(matrix[:, :2]), matrix[:, :2] @ matrix[:, :2].T),
    }[form]
    assert_close(precondition(M, rows), torch.stack([dense @ v for v in rows]))
    assert_close(precondition(M, rows[0]), dense @ rows[0])


@pytest.mark.parametrize("M", [torch.ones(3), torch.ones(3, 3), torch.ones(4, 3), LowRank(torch.ones(3, 1))])
def test_precondition_refuses_other_sizes(M):
    with pytest.raises(DataError, match=r"diagonal \[4\]"):
        precondition(M, torch.ones(2, 4))
