"""tail_average in optax follows poprisk.TailAverage, under jit, in chains, and in low precision."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

from poprisk import TailAverage  # noqa: E402
from poprisk.errors import HyperparameterError, StateDictError  # noqa: E402
from poprisk.integrations.optax import averaged_params, poprisk_adamw, tail_average  # noqa: E402

TAILS = (0.1, 0.5, 1.0)


def test_the_averages_are_those_of_the_torch_class():
    generator = np.random.default_rng(0)
    start = generator.normal(size=(3, 2)).astype(np.float32)
    gradients = generator.normal(size=(40, 3, 2)).astype(np.float32)
    model = torch.nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(start))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    average = TailAverage(model, sgd, TAILS)
    optimizer = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1), tail_average(TAILS))
    params = {"w": jnp.asarray(start)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    assert_array_equal(averaged_params(state, params)["w"], start)
    for g in gradients:
        model.weight.grad = torch.from_numpy(g.copy())
        sgd.step()
        updates, state = update({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
    for which in range(len(TAILS)):
        with average.swapped(which):
            expected = model.weight.detach().numpy().copy()
        assert_allclose(averaged_params(state, params, which)["w"], expected, rtol=1e-5, atol=1e-6)


def test_updates_pass_through_and_any_optimizer_can_come_first():
    params = {"w": jnp.arange(3.0), "b": (jnp.ones(()),)}
    plain, averaged = poprisk_adamw(0.1), optax.chain(poprisk_adamw(0.1), tail_average())
    gradient = jax.tree.map(lambda p: p + 1, params)
    expected, _ = plain.update(gradient, plain.init(params), params)
    got, state = averaged.update(gradient, averaged.init(params), params)
    jax.tree.map(assert_array_equal, got, expected)
    jax.tree.map(assert_array_equal, averaged_params(state, params), optax.apply_updates(params, got))


def test_half_precision_is_averaged_in_float32_and_other_leaves_are_copied():
    params = {"w": jnp.zeros(2, jnp.bfloat16), "n": jnp.zeros((), jnp.int32)}
    optimizer = tail_average(1.0)
    state = optimizer.init(params)
    for k in range(1, 4):
        step = {"w": jnp.full(2, 2.0**-7 * k, jnp.bfloat16), "n": jnp.ones((), jnp.int32)}
        _, state = optimizer.update(step, state, params)
        params = optax.apply_updates(params, step)
    assert state.means[0]["w"].dtype == jnp.float32
    assert_allclose(state.means[0]["w"], 2.0**-7 * (1 + 3 + 6) / 3, rtol=1e-6)
    found = averaged_params(state, params)
    assert found["w"].dtype == jnp.bfloat16
    assert found["n"] == 3


def test_what_is_missing_is_said():
    with pytest.raises(HyperparameterError, match="tail must be"):
        tail_average(0.0)
    optimizer = tail_average()
    state = optimizer.init(jnp.ones(2))
    with pytest.raises(HyperparameterError, match="needs the parameters"):
        optimizer.update(jnp.ones(2), state)
    with pytest.raises(StateDictError, match="put tail_average"):
        averaged_params(optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
