"""The same results wherever the operator lives, from generators on either side."""

import pytest
import torch
from torch.testing import assert_close

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.factor import spectrum_of_factor, tsqr_append
from poprisk._core.linalg.matrices import from_dense
from poprisk._core.linalg.projectors import epsilon_projectors, inverse_square_root
from poprisk._core.linalg.singular import top_singular_triplets
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk._core.linalg.trace import hutchinson_diagonal, hutchinson_trace, hutchpp_trace, xdiag, xtrace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def factor(device: str) -> torch.Tensor:
    F = torch.randn(12, 80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return F.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_spectra(device):
    F = factor(device)
    A = from_dense(F)
    expected = torch.linalg.svdvals(factor("cpu"))
    pairs, triplets = top_eigenpairs(A.T @ A, 20), top_singular_triplets(A, 12)
    assert pairs.vectors.device == triplets.left.device == F.device
    assert_close(pairs.values[:12].cpu(), expected**2)
    assert_close(triplets.values.cpu(), expected)
    assert pairs.nonzero == 12
    assert adjoint_mismatch(A @ A.T @ A) < 1e-13
    scipy = (A.T @ A).to_scipy()
    assert_close(torch.from_numpy(scipy @ pairs.vectors[:, 0].cpu().numpy()), (F.T @ F @ pairs.vectors[:, 0]).cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_factors_and_projectors(device):
    F = factor(device)
    spectrum = spectrum_of_factor(tsqr_append(None, F))
    root = inverse_square_root(spectrum)
    M = root.to_dense()
    assert M.device == F.device
    assert_close(M @ F.T @ F @ M, root.signal.to_dense())
    assert epsilon_projectors(spectrum, 0.0).reservoir.rank == 68


@pytest.mark.parametrize("where", ["cpu", "operator"])
@pytest.mark.parametrize("device", DEVICES)
def test_estimators(device, where):
    F = factor(device)
    A = from_dense(F.T @ F)
    diagonal = A.to_dense().diagonal()
    source = torch.Generator(device if where == "operator" else "cpu").manual_seed(1)
    for estimator in (hutchinson_trace, hutchpp_trace, xtrace):
        estimate = estimator(A, 60, generator=source)
        assert abs(estimate.value - diagonal.sum()) <= 4 * estimate.standard_error + 1e-9
    for estimator in (hutchinson_diagonal, xdiag):
        estimate = estimator(A, 60, generator=source)
        assert estimate.value.device == F.device
        assert ((estimate.value - diagonal).abs() <= 5 * estimate.standard_error + 1e-9).all()
