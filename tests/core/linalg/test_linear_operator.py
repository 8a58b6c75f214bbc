"""The algebra against dense matrices, adjoints by the dot-product test, and the door."""

import random

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.low_rank import LowRank
from poprisk._core.linalg.matrices import (
    declare_symmetric,
    diagonal,
    from_dense,
    from_functions,
    horizontal_stack,
    identity,
    vertical_stack,
    zeros,
)
from poprisk._core.linalg.offdiagonal import offdiagonal_projector
from poprisk._core.linalg.operator import LinearOperator
from poprisk.errors import DataError, DeviceError

F64 = torch.float64
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def matrix(seed: int, rows: int, columns: int, dtype=F64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def functions(M: torch.Tensor) -> LinearOperator:
    return from_functions(lambda X: M @ X, lambda Y: M.T @ Y, (M.shape[0], M.shape[1]), M.dtype)


def leaf(rng: random.Random, rows: int, columns: int) -> tuple[LinearOperator, torch.Tensor]:
    M = matrix(rng.randrange(10**6), rows, columns)
    kinds = ["dense", "functions", "zeros"] + (["identity", "diagonal", "low rank"] if rows == columns else [])
    match rng.choice(kinds):
        case "dense":
            return from_dense(M), M
        case "functions":
            return functions(M), M
        case "zeros":
            return zeros(rows, columns, dtype=F64), torch.zeros(rows, columns, dtype=F64)
        case "identity":
            return identity(rows, dtype=F64), torch.eye(rows, dtype=F64)
        case "diagonal":
            return diagonal(M.diag()), torch.diag(M.diag())
        case _:
            return LowRank(M[:, :2]), M[:, :2] @ M[:, :2].T


def expression(rng: random.Random, depth: int, rows: int, columns: int) -> tuple[LinearOperator, torch.Tensor]:
    """A random tree over the whole algebra, and the dense matrix it stands for."""
    if depth == 0:
        return leaf(rng, rows, columns)
    grow = lambda r, c: expression(rng, depth - 1, r, c)  # noqa: E731
    operation = rng.choice(["chain", "sum", "difference", "multiple", "adjoint", "vertical", "horizontal"])
    if operation == "chain":
        inner = rng.randint(1, 5)
        (A, M), (B, N) = grow(rows, inner), grow(inner, columns)
        return A @ B, M @ N
    if operation in ("sum", "difference"):
        (A, M), (B, N) = grow(rows, columns), grow(rows, columns)
        return (A + B, M + N) if operation == "sum" else (A - B, M - N)
    if operation == "multiple":
        A, M = grow(rows, columns)
        return rng.choice(
            [(2.5 * A, 2.5 * M), (A / 4, M / 4), (-A, -M), (torch.tensor(3.0) * A, 3 * M), (A * 2, 2 * M)]
        )
    if operation == "adjoint":
        A, M = grow(columns, rows)
        return A.T, M.T
    if operation == "vertical" and rows > 1:
        split = rng.randint(1, rows - 1)
        (A, M), (B, N) = grow(split, columns), grow(rows - split, columns)
        return vertical_stack([A, B]), torch.cat([M, N])
    if operation == "horizontal" and columns > 1:
        split = rng.randint(1, columns - 1)
        (A, M), (B, N) = grow(rows, split), grow(rows, columns - split)
        return horizontal_stack([A, B]), torch.cat([M, N], dim=1)
    return grow(rows, columns)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), depth=st.integers(0, 3), rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_every_expression_is_its_dense_matrix(seed, depth, rows, columns):
    A, M = expression(random.Random(seed), depth, rows, columns)
    assert A.shape == (rows, columns)
    assert A.dtype == F64
    X, Y = matrix(seed, columns, 3), matrix(seed + 1, rows, 2)
    assert_close(A.matmat(X), M @ X, **EXACT)
    assert_close(A @ X, M @ X, **EXACT)
    assert_close(A @ X[:, 0], M @ X[:, 0], **EXACT)
    assert_close(A.matvec(X[:, 0]), M @ X[:, 0], **EXACT)
    assert_close(A.T @ Y, M.T @ Y, **EXACT)
    assert_close(Y.T @ A, Y.T @ M, **EXACT)
    assert_close(Y[:, 0] @ A, Y[:, 0] @ M, **EXACT)
    assert_close(A.to_dense(), M, **EXACT)
    assert_close(A.adjoint().adjoint().to_dense(block_size=2), M, **EXACT)
    assert adjoint_mismatch(A) < 1e-13
    if A.symmetric:
        assert_close(M, M.T, **EXACT)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_laws_of_the_algebra(seed):
    rng = random.Random(seed)
    A, B, C = (expression(rng, 2, 4, 4)[0] for _ in range(3))
    same = lambda left, right: assert_close(left.to_dense(), right.to_dense(), **EXACT)  # noqa: E731
    same((A @ B) @ C, A @ (B @ C))
    same((A + B) + C, A + (B + C))
    same(A @ (B + C), A @ B + A @ C)
    same((A @ B).T, B.T @ A.T)
    same((2 * A) @ B, A @ (2 * B))
    same(A - A, zeros(4, dtype=F64))
    same(A @ identity(4, dtype=F64), A)


def test_symmetry_is_seen_through_the_algebra():
    A, S = functions(matrix(0, 5, 3)), LowRank(matrix(1, 3, 2))
    D = diagonal(matrix(2, 5, 1)[:, 0])
    for symmetric in (A @ A.T, A.T @ A, A @ S @ A.T, A @ (S + 2 * S) @ A.T, -(D + A @ A.T), A @ A.T @ A @ A.T, D @ D):
        assert symmetric.symmetric
        assert symmetric.T is symmetric
        assert_close(symmetric.to_dense(), symmetric.to_dense().T)
    for general in (A, A.T, D @ A, A @ A.T @ D, D @ diagonal(matrix(3, 5, 1)[:, 0])):
        assert not general.symmetric
    assert zeros(3).symmetric
    assert not zeros(3, 2).symmetric
    assert offdiagonal_projector(torch.ones(2, 3)).symmetric
    assert from_dense(matrix(4, 3, 3)).symmetric is False
    assert from_dense(torch.eye(3)).symmetric is True


def test_an_adjoint_undone_is_the_operator_itself():
    A = functions(matrix(0, 4, 3))
    assert A.T.T is A


def test_declared_symmetry_takes_the_operator_at_its_word():
    M = matrix(0, 4, 4)
    A = declare_symmetric(functions(M))
    assert A.T is A
    assert adjoint_mismatch(A) > 1e-3  # and the dot-product test finds the lie
    S = declare_symmetric(functions(M + M.T))
    assert adjoint_mismatch(S) < 1e-13
    assert declare_symmetric(S) is S


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (F64, 1e-14)])
def test_the_dot_product_test_separates_right_from_wrong(dtype, bar):
    M = matrix(0, 300, 200, dtype)
    assert adjoint_mismatch(functions(M)) < bar
    off = M.clone()
    off[:, 7] *= 1.05  # one column in 200, wrong by 5%
    wrong = from_functions(lambda X: M @ X, lambda Y: off.T @ Y, (300, 200), dtype)
    assert adjoint_mismatch(wrong, 32) > 20 * bar
    assert adjoint_mismatch(zeros(3, 4, dtype=dtype)) == 0.0
    assert adjoint_mismatch(functions(M * float("nan"))) != adjoint_mismatch(functions(M * float("nan")))  # NaN


def test_the_dot_product_test_leaves_the_global_stream_alone():
    state = torch.get_rng_state()
    adjoint_mismatch(identity(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_dense_blocks_do_not_matter():
    M = matrix(0, 7, 11)
    for size in (1, 3, 11, 100, None):
        assert_close(functions(M).to_dense(size), M)
    assert functions(M[:, :0]).to_dense().shape == (7, 0)


def test_products_are_differentiable():
    M = matrix(0, 3, 4).requires_grad_()
    x = matrix(1, 4, 1)[:, 0]
    (from_dense(M) @ x).sum().backward()
    assert_close(M.grad, x.expand(3, 4))


def test_identity_does_not_hand_out_its_input():
    X = torch.ones(2, 1)
    (identity(2) @ X).zero_()
    assert_close(X, torch.ones(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_scipy_sees_the_same_operator(dtype):
    M = matrix(0, 5, 3, dtype)
    A = functions(M).to_scipy()
    assert A.dtype == M.numpy().dtype
    x, X, Y = np.arange(3.0), np.ones((3, 2))[::-1], np.ones((5, 2))
    np.testing.assert_allclose(A @ x, M.numpy() @ x, rtol=1e-5)
    np.testing.assert_allclose(A @ X, M.numpy() @ X, rtol=1e-5)
    np.testing.assert_allclose(A.rmatmat(Y), M.numpy().T @ Y, rtol=1e-5)
    np.testing.assert_allclose(A.matvec(x[:, None]), M.numpy() @ x[:, None], rtol=1e-5)
    np.testing.assert_allclose((A.H @ A) @ x, M.numpy().T @ (M.numpy() @ x), rtol=1e-5)


def test_scipy_solvers_run_on_it():
    M = matrix(0, 30, 30)
    A = from_dense(M @ M.T + torch.eye(30, dtype=F64))
    values = scipy.sparse.linalg.eigsh(A.to_scipy(), k=3, return_eigenvectors=False)
    expected = torch.linalg.eigvalsh(A.to_dense())[-3:]
    assert_close(torch.from_numpy(np.sort(values)), expected)
    with pytest.raises(DataError, match="no bfloat16"):
        from_dense(torch.eye(2).bfloat16()).to_scipy()


def test_low_rank_joins_the_algebra():
    M = LowRank(matrix(0, 4, 2))
    A = functions(matrix(1, 3, 4))
    assert isinstance(M, LinearOperator)
    assert_close((A @ M @ A.T).to_dense(), A.to_dense() @ M.to_dense() @ A.to_dense().T)


A23 = functions(matrix(0, 2, 3))
ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: A23 @ torch.ones(2, dtype=F64), DataError, r"shape \[3, k\], got \[2, 1\]"),
        (lambda: A23 @ torch.ones(2, 3, dtype=F64), DataError, r"\[3, k\], got \[2, 3\]"),
        (lambda: A23 @ torch.ones(3, 1, 1, dtype=F64), DataError, "vector or a matrix, got 3 axes"),
        (lambda: A23 @ torch.ones(3), DataError, "torch.float64, got torch.float32"),
        (lambda: A23.matmat(torch.ones(3, 1)), DataError, "torch.float64, got torch.float32"),
        (lambda: A23 @ torch.ones(3, dtype=torch.complex128), DataError, "real, got torch.complex128"),
        (lambda: A23 @ torch.ones(3, dtype=torch.int64), DataError, "floating-point dtype, got torch.int64"),
        (lambda: A23 @ torch.ones(3, dtype=F64, device=ELSEWHERE), DeviceError, "on cpu, got one on meta"),
        (lambda: A23 @ A23, DataError, "columns of A must be the rows of B"),
        (lambda: A23 + A23.T, DataError, "one shape"),
        (lambda: A23 - identity(2, dtype=F64), DataError, "one shape"),
        (lambda: A23 + zeros(2, 3), DataError, "one dtype"),
        (lambda: A23 @ identity(3), DataError, "one dtype"),
        (lambda: A23 + zeros(2, 3, dtype=F64, device=ELSEWHERE), DeviceError, "one device"),
        (lambda: 1j * A23, DataError, "factor must be real"),
        (lambda: A23 * torch.tensor(1j), DataError, "factor must be real"),
        (lambda: A23 * torch.ones(3), DataError, r"one number, got a tensor \[3\]"),
        (lambda: from_dense(torch.ones(2, 2, dtype=torch.complex64)), DataError, "real, got torch.complex64"),
        (lambda: from_dense(torch.ones(2, 2, dtype=torch.int32)), DataError, "floating-point dtype"),
        (lambda: from_dense(torch.ones(2)), DataError, "needs a matrix, got 1 axes"),
        (lambda: from_dense(torch.ones(2, 3), symmetric=True), DataError, "symmetric matrix is square"),
        (lambda: diagonal(torch.ones(2, 2)), DataError, "a diagonal is a vector"),
        (lambda: identity(2, dtype=torch.complex64), DataError, "must be real"),
        (lambda: zeros(-1), DataError, "must not be negative"),
        (lambda: from_functions(torch.neg, None, (2, 2), F64), DataError, "pass either rmatmat"),
        (lambda: from_functions(torch.neg, torch.neg, (2, 2), F64, symmetric=True), DataError, "one adjoint"),
        (lambda: from_functions(torch.neg, None, (2, 3), F64, symmetric=True), DataError, "is square"),
        (lambda: declare_symmetric(A23), DataError, "is square"),
        (lambda: vertical_stack([]), DataError, "at least one operator"),
        (lambda: vertical_stack([A23, A23.T]), DataError, "share their columns"),
        (lambda: horizontal_stack([A23, A23.T]), DataError, "share their columns"),
        (lambda: vertical_stack([A23, zeros(1, 3)]), DataError, "one dtype"),
    ],
)
def test_refused_at_the_door(attempt, error, message):
    with pytest.raises(error, match=message):
        attempt()


def test_a_wrong_function_is_named_even_inside_a_chain():
    wrong = from_functions(lambda X: X[:1], lambda Y: Y, (2, 2), F64)
    with pytest.raises(DataError, match=r"<Functions 2x2 float64 on cpu>.*\[2, 3\].*got \[1, 3\]"):
        A23.T @ wrong @ torch.ones(2, 3, dtype=F64)


@pytest.mark.parametrize("other", [None, "A", [1.0]])
def test_foreign_things_are_type_errors(other):
    for attempt in (lambda: A23 @ other, lambda: A23 + other, lambda: A23 - other, lambda: A23 * other):
        with pytest.raises(TypeError):
            attempt()


def test_an_operator_without_adjoint_says_so():
    class Forward(LinearOperator):
        shape, dtype, device = (2, 2), F64, torch.device("cpu")

        def _matmat(self, X):
            return X

    with pytest.raises(NotImplementedError, match="Forward is not symmetric"):
        Forward().T @ torch.ones(2, dtype=F64)
