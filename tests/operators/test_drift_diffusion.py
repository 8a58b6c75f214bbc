"""Drift, diffusion, source and remainder of real runs: they add up, the oracle agrees, the bounds hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from drift_runs import RULES, TEST, split_of, trained
from networks import build, draw
from torch.testing import assert_close

from oracles import drift_diffusion as oracle
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.operators._batch_law import batch_laws
from poprisk.operators._drift_diffusion import drift_diffusion
from poprisk.operators._gradient_descent import RecordedSteps, gradient_descent
from poprisk.runs._problem import Problem
from poprisk.runs._step import AffineStep
from poprisk.runs._training import train


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("rule", RULES)
def test_the_parts_add_up_to_the_displacement(rule, loss):
    """The remainder uses the recorded weights, the other three the recursion: a wrong recursion would not close."""
    run, _, model = trained(rule, loss)
    for start, sampling in ((0, "independent"), (2, "epochs")):
        split = split_of(rule, loss, start=start, sampling=sampling)
        assert split.closure < 1e-11
        parts = (split.drift, split.diffusion, split.source, split.curvature_remainder)
        missed = split.displacement.norm().item() / sum(part.norm().item() for part in parts)
        off = replace(split, displacement=2 * split.displacement)
        assert off.closure == pytest.approx(missed, rel=1e-9)
        true = model.outputs(run.weights(6), TEST) - model.outputs(run.weights(start), TEST)
        total = sum(parts)
        assert_close(total, true.reshape(-1), rtol=1e-11, atol=1e-13)
        assert min(split.drift.norm(), split.diffusion.norm(), split.curvature_remainder.norm()) > 1e-4
        assert (split.source.norm() > 1e-4) == (rule != "sgd")


def test_accumulation_changes_nothing():
    split = split_of("momentum", accumulate=2)
    assert split.closure < 1e-11
    assert_close(split.drift, split_of("momentum").drift, rtol=1e-9, atol=1e-12)


CASES = [
    *((rule, sampling, {}) for rule in RULES for sampling in ("independent", "epochs")),
    ("momentum", "independent", {"clip_norm": 0.3}),
]


@pytest.mark.parametrize(("rule", "sampling", "options"), CASES)
def test_the_oracle_agrees(rule, sampling, options):
    """Double sums over steps in place of the recursion; a clip factor is part of mean and fluctuation alike."""
    run, problem, model = trained(rule, **options)
    steps, seen = [], set()
    for k in range(6):
        step, w = run.step(k), run.weights(k)
        if len(seen) == 8:
            seen = set()
        numbers = {
            "beta": step.momentum,
            "kappa": step.new_gradient,
            "a": step.buffer_share,
            "b": step.direct_share,
            "decay": step.decay,
            "coupled_decay": step.coupled_decay,
            "extra": step.source,
        }
        steps.append(
            oracle.GradientStep(
                J_Q=model.output_jacobian(w, TEST).flatten(0, 1).numpy(),
                G=model.per_example_gradients(w, problem.inputs, problem.targets).numpy(),
                batch=step.batch.tolist(),
                selection=step.selection.numpy(),
                pool=sorted(set(range(8)) - seen) if sampling == "epochs" else list(range(8)),
                w=w.numpy(),
                M=step.preconditioner.numpy(),
                **{name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in numbers.items()},
            )
        )
        seen |= set(step.batch.tolist())
    for start in (0, 2):
        found = split_of(rule, start=start, sampling=sampling, **options)
        assert found.closure < 1e-11
        expected = oracle.split(steps[start:], run.buffer(start).numpy())
        for name, rows in expected.items():
            actual = getattr(found, f"{name}_steps").numpy()
            np.testing.assert_allclose(actual, rows, rtol=1e-10, atol=1e-13, err_msg=name)


def test_the_remainder_is_the_integral_of_the_jacobian_s_change():
    run, _, model = trained("adam")

    def jacobian(w):
        return model.output_jacobian(torch.from_numpy(w), TEST).flatten(0, 1).numpy()

    expected = oracle.remainder(jacobian, [run.weights(k).numpy() for k in range(7)], nodes=16)
    found = split_of("adam").curvature_remainder.numpy()
    assert np.linalg.norm(found - expected) < 1e-11 * np.linalg.norm(expected)


def test_the_remainder_is_of_second_order_in_the_step():
    model, x, y = FlatModel(build("mlp"), "squared"), draw("mlp", 8), torch.ones(8, 3, dtype=torch.float64)
    sizes = []
    for lr in (0.02, 0.01, 0.005):
        run = gradient_descent(model, x, y, lr=lr, steps=1)
        sizes.append(drift_diffusion(run, model, x, y, TEST).curvature_remainder.norm().item())
    orders = np.log2(np.array(sizes[:-1]) / np.array(sizes[1:]))
    assert (np.abs(orders - 2) < 0.1).all(), orders


def test_full_batches_do_not_fluctuate():
    model, x, y = FlatModel(build("mlp"), "squared"), draw("mlp", 8), torch.ones(8, 3, dtype=torch.float64)
    split = drift_diffusion(gradient_descent(model, x, y, lr=0.1, steps=3), model, x, y, TEST)
    assert split.diffusion.norm() < 1e-14 * split.drift.norm()


@pytest.mark.parametrize(("n", "b"), [(5, 2), (6, 1), (4, 4), (6, 3)])
def test_the_covariance_of_a_batch_is_that_of_all_batches(n, b):
    G = np.random.default_rng(0).standard_normal((n, 3))
    centred = G - G.mean(0)
    step = AffineStep(torch.arange(b), torch.full((b,), n / b), torch.ones(3))
    run = RecordedSteps([], [step], [])
    factor = batch_laws(run, n, stop=1)[0].covariance_factor
    np.testing.assert_allclose(
        factor * centred.T @ centred / n, oracle.covariance_over_all_batches(G, b), rtol=1e-12, atol=1e-15
    )


def test_what_an_epoch_has_left():
    def recorded(*batches):
        steps = [AffineStep(torch.tensor(b), torch.full((len(b),), 5 / len(b)), torch.ones(1)) for b in batches]
        return RecordedSteps([], steps, [])

    kept = batch_laws(recorded([0, 3], [4, 1], [2], [2, 0]), 5, stop=4, sampling="epochs")
    assert [law.pool.tolist() for law in kept] == [[0, 1, 2, 3, 4], [1, 2, 4], [2], [0, 1, 2, 3, 4]]
    assert [law.covariance_factor for law in kept] == [3 / 8, 1 / 4, 0.0, 3 / 8]
    dropped = batch_laws(recorded([0, 3], [4, 1], [2, 0]), 5, start=1, stop=3, sampling="epochs")
    assert [law.pool.tolist() for law in dropped] == [[1, 2, 4], [0, 1, 2, 3, 4]]
    with pytest.raises(DataError, match="example 0 a second time"):
        batch_laws(recorded([0, 3], [0, 1]), 5, stop=2, sampling="epochs")


def test_bad_input_is_refused():
    run, problem, model = trained("sgd")
    data = (model, problem.inputs, problem.targets, TEST)
    with pytest.raises(DataError, match="0 ≤ start < stop ≤ 6"):
        drift_diffusion(run, *data, start=6)
    # Under the run-time type checks it is they that refuse an unknown name.
    with pytest.raises((HyperparameterError, TypeError), match="random"):
        drift_diffusion(run, *data, sampling="random")
    with pytest.raises(DataError, match="the run is over 8 examples"):
        drift_diffusion(run, model, problem.inputs[:3], problem.targets[:3], TEST)
    with pytest.raises(DataError, match="pass all training inputs"):
        batch_laws(run, 3, stop=2)
    weighted = AffineStep(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), torch.ones(1))
    with pytest.raises(DataError, match="weighs its examples from 1 to 2"):
        batch_laws(RecordedSteps([], [weighted], []), 3, stop=1)
    twice = AffineStep(torch.tensor([1, 1]), torch.ones(2), torch.ones(1))
    with pytest.raises(DataError, match='sampling="replacement"'):
        batch_laws(RecordedSteps([], [twice], []), 3, stop=1)
    assert batch_laws(RecordedSteps([], [twice], []), 2, stop=1, sampling="replacement")[0].covariance_factor == 0.5


def test_augmented_runs_are_refused():
    def jitter(inputs, generator):
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)

    problem = Problem(
        build, "squared", draw("mlp", 8), torch.ones(8, 3).double(), arguments={"kind": "mlp"}, augment=jitter
    )
    run = train(problem, RULES["sgd"], 2, batch_size=4, progress=False)
    with pytest.raises(RunError, match="augmented"):
        drift_diffusion(run, problem.model(torch.float64), problem.inputs, problem.targets, TEST)
