"""A matrix in a file multiplies like one in memory, panel by panel."""

import numpy as np
import pytest
import torch

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.factor import spectrum_of_matrix
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk.errors import DataError
from poprisk.jobs._disk_matrix import DiskMatrix


def on_disk(tmp_path, K, **options):
    np.save(tmp_path / "K.npy", K.numpy())
    return DiskMatrix(tmp_path / "K.npy", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory_limit", [1, 1000, 2**20])
def test_products_are_those_of_the_matrix(tmp_path, dtype, memory_limit):
    dense, X, Y = torch.randn(23, 11, dtype=dtype), torch.randn(11, 3, dtype=dtype), torch.randn(23, 2, dtype=dtype)
    K = on_disk(tmp_path, dense, memory_limit=memory_limit)
    assert (K.shape, K.dtype, K.symmetric) == ((23, 11), dtype, False)
    torch.testing.assert_close(K @ X, dense @ X)
    torch.testing.assert_close(K.T @ Y, dense.T @ Y)
    assert torch.equal(K.to_dense(), dense)
    assert adjoint_mismatch(K) < 1e-5
    if memory_limit > 1:
        assert all(2 * panel.nbytes <= memory_limit for _, panel in K.panels())


def test_a_symmetric_matrix_serves_where_operators_and_where_matrices_are_taken(tmp_path):
    R = torch.randn(12, 12, dtype=torch.float64)
    dense = R @ R.T
    K = on_disk(tmp_path, dense, symmetric=True, memory_limit=500)
    assert K.T is K
    torch.testing.assert_close(top_eigenpairs(K, 2).values, torch.linalg.eigvalsh(dense).flip(0)[:2])
    torch.testing.assert_close(spectrum_of_matrix(K.mapped()).values.sum(), dense.trace(), rtol=1e-10, atol=1e-10)


def test_writing_to_the_mapped_tensor_leaves_the_file_alone(tmp_path):
    K = on_disk(tmp_path, torch.ones(3, 3))
    K.mapped().zero_()
    assert K.to_dense().sum() == 9


def test_what_is_no_matrix_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a matrix that can be memory-mapped"):
        DiskMatrix(tmp_path / "missing.npy")
    for wrong in (torch.ones(3), torch.ones(2, 2, dtype=torch.long)):
        with pytest.raises(DataError, match="must be a matrix of float32 or float64"):
            on_disk(tmp_path, wrong)
