"""Derivatives, kernels and operators of one run: on a GPU what they are on the CPU."""

from functools import partial

import pytest
import torch
from networks import build, draw
from torch.testing import assert_close

from poprisk._core.autodiff.segment import SegmentJacobian
from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._kernels.drift import kernel_drift
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.products import kernel_operator
from poprisk.operators._kernels.tangent import cross_kernel, train_kernel
from poprisk.operators._kernels.timescales import timescales
from poprisk.operators._window import Window
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

# torch says so once when the first product of a process runs in a thread of its backward pass.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ["mlp", "smooth cnn", "transformer"]
WIDTHS = {"mlp": 3, "smooth cnn": 3, "transformer": 5}


def recorded(kind: str):
    everything = draw(kind, 9)
    targets = torch.randint(WIDTHS[kind], (6,), generator=torch.Generator().manual_seed(5))
    problem = Problem(build, "cross_entropy", everything[:6], targets, arguments={"kind": kind})
    rule = partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated"), lr=0.2, weight_decay=0.05)
    return train(problem, rule, 4, batch_size=3, dtype=torch.float64, progress=False), problem, everything[6:]


def on(device: str, kind: str):
    """The model and examples there; the run itself is read to the CPU wherever it was recorded."""
    run, problem, test_inputs = recorded(kind)
    there = problem.to(device)
    return run, there, there.model(torch.float64), test_inputs.to(device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_products_and_kernels(device, kind):
    run, problem, model, test_inputs = on(device, kind)
    w = run.weights(2).to(device)
    J = model.output_jacobian(w, problem.inputs).flatten(0, 1)
    V = torch.randn(model.size, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    assert_close(model.jvp(w, problem.inputs, V), J @ V)
    assert_close(model.vjp(w, problem.inputs, J @ V), J.T @ J @ V)
    K = J @ J.T
    for method in (Method.AUTO, Method.JACOBIAN_CONTRACTION, Method.VECTOR_PRODUCTS):
        assert_close(train_kernel(model, w, problem.inputs, method=method), K)
    J_Q = model.output_jacobian(w, test_inputs).flatten(0, 1)
    assert_close(cross_kernel(model, w, test_inputs, problem.inputs), J_Q @ J.T)
    operator = kernel_operator(model, w, problem.inputs)
    assert_close(operator @ K, K @ K)
    segment = SegmentJacobian(model, w, run.weights(3).to(device), problem.inputs)
    assert_close(segment @ V, segment.to_dense() @ V)
    assert (segment @ V).device.type == device


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_windows(device, kind):
    run, problem, model, test_inputs = on(device, kind)
    windows = [
        Window(run, model, problem.inputs, problem.targets, test_inputs=test_inputs, start=1, dense=dense)
        for dense in (True, False)
    ]
    ops = windows[0].dense_operators()
    assert ops.factor.device.type == device
    assert_close(ops.predicted_test, ops.test_displacement, rtol=1e-9, atol=1e-12)
    assert_close(ops.predicted_train, ops.train_displacement, rtol=1e-9, atol=1e-12)
    for name in ("propagator", "train_transfer", "test_transfer", "dissipation_gramian"):
        operator, matrix = getattr(windows[1], name), getattr(ops, name)
        H = torch.randn(matrix.shape[1], 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
        assert_close(operator @ H, matrix @ H, rtol=1e-9, atol=1e-12)
        assert adjoint_mismatch(operator) < 1e-10
    expected = torch.linalg.svdvals(ops.factor)[:3] ** 2
    assert_close(top_eigenpairs(windows[1].dissipation_gramian, 3).values, expected, rtol=1e-8, atol=1e-14)
    coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
    assert coupling.matrix.device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_drift_and_timescales(device):
    run, problem, model, _ = on(device, "mlp")
    weights = [run.weights(k).to(device) for k in (0, 2, 4)]
    drift = kernel_drift(model, weights, problem.inputs)
    cpu = kernel_drift(problem.to("cpu").model(torch.float64), [w.cpu() for w in weights], problem.inputs.cpu())
    assert_close(drift.drift, cpu.drift)
    K = train_kernel(model, weights[0], problem.inputs)
    assert_close(timescales(K).rates[0].cpu(), drift.norms[0])
