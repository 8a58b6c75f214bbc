"""Kernels from rounded rows: within their bound of the float64 kernel, in tiles of any size, at any scale of rows."""

import pytest
import torch
from kernel_models import make, naive_jacobian
from torch import nn
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.precision import Precision, error_bound
from poprisk.operators._kernels.rounded import RoundedRows, contract_rounded, panel_layout
from poprisk.operators._kernels.rounded_kernel import measured_error, rounded_kernel
from poprisk.operators._kernels.tangent import cross_kernel, kernel_tiles, train_kernel
from poprisk.operators._kernels.tiles import Tile, on_host, tiled_kernel

MODELS = ["convolutions", "transformer", "words"]


def scaled_error(found, expected, rows, columns):
    """The largest |ΔK_ij| / √(K_ii K_jj)."""
    return ((found.double() - expected).abs() / (rows.sqrt()[:, None] * columns.sqrt())).max().item()


def smallest(*arguments) -> int:
    """The limit named in the refusal of one that is too small."""
    with pytest.raises(HyperparameterError, match="smallest limit that works") as caught:
        kernel_tiles(*arguments, precision="float16", memory=1)
    return int(str(caught.value).split("too little: ")[1].split()[0])


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", MODELS)
def test_every_precision_keeps_its_bound_against_the_naive_float64_kernel(name, precision):
    model, w, x = make(name, n=6)
    J = naive_jacobian(model, x)
    K = J @ J.T
    found = rounded_kernel(model, w, x, precision=precision, examples=6)
    error = scaled_error(found.kernel, K, K.diagonal(), K.diagonal())
    assert found.kernel.dtype == torch.float32
    assert torch.equal(found.kernel, found.kernel.T)
    assert error <= found.bound
    assert found.measured == pytest.approx(error, rel=1e-6, abs=1e-12)
    if precision in (Precision.FLOAT16, Precision.BFLOAT16):
        assert error > 1e-7  # rows were rounded indeed


@pytest.mark.parametrize("name", MODELS)
def test_tiles_under_a_memory_limit_cover_the_kernel(name):
    model, w, x = make(name, n=9)
    q, s = x[:4], x[4:]
    expected, diagonal = cross_kernel(model, w, q, s), train_kernel(model, w, x).diagonal()
    p = len(diagonal) // 9
    least = smallest(model, w, q, s)
    for limit in (least, 4 * least):
        covered, found = torch.zeros_like(expected), torch.zeros_like(expected)
        for tile in on_host(kernel_tiles(model, w, q, s, precision="float16", memory=limit)):
            found[tile.rows, tile.columns] = tile.block.double()
            covered[tile.rows, tile.columns] += 1
            assert tile.bound == pytest.approx(9.8e-4, rel=0.1)
        assert (covered == 1).all()
        assert scaled_error(found, expected, diagonal[: 4 * p], diagonal[4 * p :]) <= 1e-3
    assert measured_error(model, w, found, q, s, examples=9) <= 1e-3


def test_symmetric_tiles_come_on_and_above_the_diagonal_once():
    model, w, x = make("multilayer", n=9)
    K = train_kernel(model, w, x)
    found, count = torch.zeros_like(K), 0
    for tile in kernel_tiles(model, w, x, precision="float16", memory=smallest(model, w, x)):
        count += 1
        assert tile.rows.start <= tile.columns.start
        found[tile.rows, tile.columns] += tile.block.double()
        if tile.rows != tile.columns:
            found[tile.columns, tile.rows] += tile.block.T.double()
    assert count > 3
    assert scaled_error(found, K, K.diagonal(), K.diagonal()) <= 1e-3


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rows_far_outside_the_range_of_float16_keep_the_bound(scale):
    module = nn.Linear(40, 1, bias=False)
    x = scale * torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 0, 40)
    x[4] = 0.0  # a row without gradient
    model = FlatModel(module, "squared")
    found = rounded_kernel(model, model.weights, x, precision="float16", examples=1)
    K = x.double() @ x.double().T
    assert scaled_error(found.kernel[:4, :4], K[:4, :4], K.diagonal()[:4], K.diagonal()[:4]) <= found.bound
    assert (found.kernel[4] == 0).all()


def test_bounds_hold_for_rows_made_to_reach_them():
    """Equal entries are all rounded the same way; one other entry moves the norm, and with it how far."""
    layout = panel_layout([4096])
    for precision, u in ((Precision.FLOAT16, 2.0**-11), (Precision.BFLOAT16, 2.0**-8)):
        errors = []
        for other in torch.linspace(0.0, 30.0, 200):
            row = torch.ones(1, 1, 4096)
            row[0, 0, 0] = other
            rows = RoundedRows.empty(precision, layout, 1, torch.device("cpu"))
            rows.fill(0, [row], ())
            exact = row.double().square().sum()
            errors.append(float((contract_rounded(rows, rows).double() - exact).abs() / exact))
        assert u < max(errors) <= error_bound(precision, 4096, layout.width)


def test_a_preconditioner_and_low_precision_together():
    model, w, x = make("convolutions", n=5)
    M = torch.rand(model.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    K = train_kernel(model, w, x, preconditioner=M)
    found = rounded_kernel(model, w, x, precision="bfloat16x3", preconditioner=M, examples=5)
    assert scaled_error(found.kernel, K, K.diagonal(), K.diagonal()) <= found.bound
    assert found.measured <= found.bound


def test_chunks_on_still_inputs_are_those_on_the_inputs_themselves():
    for name in ("convolutions", "words"):
        model, w, x = make(name, n=8)
        arguments = (model, w, x[:4], x[4:])
        plain, replayed = (tiled_kernel(*arguments, precision="float16", graphs=graphs) for graphs in (False, True))
        for one, other in zip(plain.tiles(), replayed.tiles(), strict=True):
            assert_close(other.block, one.block, rtol=0, atol=0)
        again = [tile.block for _ in range(3) for tile in replayed.tiles()]
        assert_close(again[-1], again[0], rtol=0, atol=0)


def test_refusals_name_what_is_possible():
    model, w, x = make("multilayer", n=3)
    with pytest.raises(HyperparameterError, match="float16"):
        kernel_tiles(model, w, x, precision="float8")
    with pytest.raises(HyperparameterError, match="layer factors"):
        kernel_tiles(model, w, x, precision="float16", method=Method.VECTOR_PRODUCTS)
    with pytest.raises(HyperparameterError, match="positive number of bytes"):
        rounded_kernel(model, w, x, memory=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", list(Precision))
def test_on_a_gpu_captured_and_not(precision):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.Flatten())
    module = nn.Sequential(*layers, nn.LazyLinear(2)).eval()
    module(torch.zeros(1, 3, 12, 12))
    model = FlatModel(module.cuda(), "squared")
    x = torch.randn(70, 3, 12, 12, device="cuda")
    tiles: dict[bool, list[Tile]] = {}
    for graphs in (False, True):
        tiled = tiled_kernel(model, model.weights, x, precision=precision, memory=2**26, graphs=graphs)
        tiles[graphs] = list(on_host(tiled.tiles()))
    for one, other in zip(tiles[False], tiles[True], strict=True):
        assert one.block.device.type == "cpu"
        assert_close(other.block, one.block, rtol=1e-4, atol=1e-4 * float(one.block.abs().max()))
    found = rounded_kernel(model, model.weights, x, precision=precision, examples=20)
    assert found.measured <= found.bound + 1e-5
