"""Test error told apart into cells that add up."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from oracles.linear_model import flow_outputs, linear_operators
from oracles.run_operators import operators_of, quadratic_run
from poprisk.errors import DataError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._decomposition import error_cells


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coupling_of(ops) -> Coupling:
    return Coupling(dissipation_channels(tensor(ops.W_factor), tensor(ops.D), tensor(ops.G)))


@pytest.mark.parametrize("rule", ["gd", "momentum", "nesterov"])
@pytest.mark.parametrize(("start", "p"), [(0, 1), (3, 2)])
def test_the_cells_add_up_to_the_error_that_happened(rule, start, p):
    noise = 0.5 * np.random.default_rng(0).normal(size=5 * p)
    run = quadratic_run(7, p=p, test=4, rule=rule, noise=noise, never_drawn=1, curvature=1.0)
    ops = operators_of(run.steps[start:], run.buffers[start])
    targets = tensor(run.train_outputs[start] - run.n * run.gradients[start])  # g = (u - y)/n
    clean_train, clean_test = targets - tensor(noise), normal(3, 4)
    cells = error_cells(
        coupling_of(ops),
        train_outputs=tensor(run.train_outputs[start]),
        test_outputs=tensor(run.test_outputs[start]),
        targets=targets,
        clean_train=clean_train,
        clean_test=clean_test,
        num_examples=run.n,
        test_source=tensor(ops.source_Q),
    )
    error = tensor(run.test_outputs[-1]) - clean_test
    assert_close(cells.total, error, rtol=1e-10, atol=1e-12)
    shares = cells.shares(4)
    assert set(shares) == {"initial", "transferred", "residual_bias", "trapped_noise", "signal_noise", "source"}
    assert sum(shares.values()) == pytest.approx(error.square().sum().item() / 4)
    assert cells.mean_squares(4)["source"] == pytest.approx(cells.source.square().mean().item())
    assert cells.signal_noise.norm() > 1e-3
    assert cells.trapped_noise.norm() < 1e-13  # the last example was never drawn: its noise is trapped, all of it
    assert cells.residual_bias.norm() < 1e-9
    assert_close(cells.bias, cells.initial + cells.transferred, rtol=1e-9, atol=1e-9)
    assert bool(cells.source.any()) == (rule != "gd")


def test_noise_on_an_example_never_drawn_changes_nothing():
    noise = np.zeros(5)
    noise[-1] = 3.0
    quiet, loud = (quadratic_run(7, never_drawn=1, noise=x) for x in (0 * noise, noise))
    np.testing.assert_array_equal(quiet.test_outputs[-1], loud.test_outputs[-1])
    ops = operators_of(loud.steps)
    zero = torch.zeros(3).double()
    cells = error_cells(
        coupling_of(ops),
        train_outputs=torch.zeros(5).double(),
        test_outputs=zero,
        targets=tensor(noise),
        clean_train=torch.zeros(5).double(),
        clean_test=zero,
        num_examples=5,
    )
    assert cells.signal_noise.norm() < 1e-13
    assert cells.trapped_noise.norm() < 1e-13
    for drawn in range(4):  # on the others it moves the test outputs by its column of G
        noise = torch.zeros(5).double()
        noise[drawn] = 3.0
        cells = error_cells(
            coupling_of(ops),
            train_outputs=torch.zeros(5).double(),
            test_outputs=zero,
            targets=noise,
            clean_train=torch.zeros(5).double(),
            clean_test=zero,
            num_examples=5,
        )
        assert_close(cells.signal_noise, tensor(ops.G[:, drawn]) * 3 / 5, rtol=1e-9, atol=1e-13)
        assert cells.signal_noise.norm() > 1e-3


def test_the_linear_model_agrees_with_a_run_on_clean_labels():
    """With a frozen kernel G does not depend on the noise: there the noise cell *is* what clean labels would save."""
    rng = np.random.default_rng(1)
    X, X_test, w_0, truth = rng.normal(size=(6, 4)), rng.normal(size=(3, 4)), rng.normal(size=4), rng.normal(size=4)
    noise, T = rng.normal(size=6), 2.0
    cells = error_cells(
        coupling_of(linear_operators(X, X_test, T)),
        train_outputs=tensor(X @ w_0),
        test_outputs=tensor(X_test @ w_0),
        targets=tensor(X @ truth + noise),
        clean_train=tensor(X @ truth),
        clean_test=tensor(X_test @ truth),
        num_examples=6,
    )
    noisy = flow_outputs(X, X_test, X @ truth + noise, w_0, T)
    clean = flow_outputs(X, X_test, X @ truth, w_0, T)
    assert_close(cells.total, tensor(noisy - X_test @ truth))
    assert_close(cells.signal_noise, tensor(noisy - clean))
    assert_close(cells.bias, tensor(clean - X_test @ truth))
    assert cells.trapped_noise.norm() < 1e-12  # rank 4 of 6: two directions of the noise are trapped


def test_what_does_not_fit_is_refused():
    coupling = coupling_of(operators_of(quadratic_run(1).steps))
    vectors = {name: torch.zeros(5).double() for name in ("train_outputs", "targets", "clean_train")}
    tests = {name: torch.zeros(3).double() for name in ("test_outputs", "clean_test")}
    with pytest.raises(DataError, match=r"test_outputs must be a vector \[3\], got \[5\]"):
        error_cells(coupling, **vectors, **dict.fromkeys(tests, torch.zeros(5).double()), num_examples=5)
    with pytest.raises(DataError, match="num_examples must divide the 5 train outputs, got 2"):
        error_cells(coupling, **vectors, **tests, num_examples=2)
    with pytest.raises(DataError, match="num_test must divide the 3 test outputs, got 2"):
        error_cells(coupling, **vectors, **tests, num_examples=5).shares(2)
