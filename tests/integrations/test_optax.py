"""The optax integration follows the torch class step by step, and does what optax asks of its own optimizers.

All tests of the gate that need JAX are in this file. Compiling is what costs here, so one compiled scan serves many
options.
"""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

import poprisk.integrations.optax as integration  # noqa: E402
from poprisk.errors import (  # noqa: E402
    GradientError,
    HyperparameterError,
    LiteralGateWarning,
    MissingExtraError,
    StateDictError,
)
from poprisk.integrations._optax_rule import PopulationRiskState  # noqa: E402
from poprisk.integrations.optax import gate_diagnostics, poprisk_adamw, population_risk_gate  # noqa: E402
from poprisk.optim import Gate, join_gate  # noqa: E402
from poprisk.optim._adamw import PopRiskAdamW  # noqa: E402
from poprisk.optim._defaults import DEFAULTS  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::poprisk.errors.NonFiniteGradientWarning"),
    pytest.mark.filterwarnings("ignore::poprisk.errors.ClosedGateWarning"),
]
STEPS = 200
GATES = ("soft", "hard", "snr")
MATRIX = {"w": (6, 5)}
TREE = {"a": [(4, 3, 2), ()]}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}  # relative to the largest entry
NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "s": "exp_var"}


def is_shape(x):
    return isinstance(x, tuple)


def numbers(shapes, seed=0, rows=(), mean=0.0):
    """Standard normal numbers for every shape, representable in float32; ``rows`` is put before the shape."""
    generator = np.random.default_rng(seed)
    draw = lambda shape: np.float32(generator.normal(size=(*rows, *shape))).astype(np.float64)  # noqa: E731
    return jax.tree.map(lambda shape: draw(shape) + mean, shapes, is_leaf=is_shape)


def stream(shapes, steps=STEPS, dtype="float32", spoiled=True):
    """Gradients of unit noise around means of either sign; in some steps entries are NaN, infinite or too large."""
    signal, noise = numbers(shapes, seed=1), numbers(shapes, seed=2, rows=(steps,))
    rows = jax.tree.map(lambda m, x: np.asarray(m + x, np.float32).astype(dtype), signal, noise)
    huge = 1e30 if dtype == "float32" else 1e200
    for row in jax.tree.leaves(rows) if spoiled else ():
        flat = row.reshape(steps, -1)
        flat[3, 0], flat[steps // 2, :2], flat[steps // 2 + 1, :1], flat[-1, -1:] = np.nan, np.inf, -np.inf, huge
    return rows


def schedule(i):
    """A learning rate that is never the same twice, from a number or a traced count."""
    return 1e-2 * (1 + i) / STEPS


class TorchPath(NamedTuple):
    """What one parameter group has come to: weights and states as trees, counters, and its diagnostics."""

    weights: Any
    states: dict[str, Any]
    counters: dict[str, float]
    meters: dict[str, float]


def torch_paths(rows, shapes, gradients, rate=schedule, start=None):
    """The torch class under many sets of options: one optimizer, with a parameter group for each of them."""
    leaves, structure = jax.tree.flatten(gradients)
    begin = jax.tree.leaves(numbers(shapes) if start is None else start)
    dtypes = [torch.tensor(leaf[0]).dtype for leaf in leaves]
    groups = [[torch.nn.Parameter(torch.tensor(w).to(d)) for w, d in zip(begin, dtypes, strict=True)] for _ in rows]
    optimizer = PopRiskAdamW([{"params": group, **join_gate(o)} for group, o in zip(groups, rows, strict=True)])
    for i in range(len(leaves[0])):
        for group, weights in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = rate(i)
            for w, leaf in zip(weights, leaves, strict=True):
                w.grad = torch.tensor(leaf[i])
        optimizer.step()

    def path(weights, diagnostics):
        states = [optimizer.state[w] for w in weights]
        return TorchPath(
            structure.unflatten([w.detach().numpy() for w in weights]),
            {n: structure.unflatten([x[key].numpy() for x in states]) for n, key in NAMES.items() if key in states[0]},
            {key: x.item() for key, x in states[0].items() if key in ("step", "var_step", "var_gain")},
            diagnostics.to_floats(),
        )

    return [path(*pair) for pair in zip(groups, optimizer.diagnostics(), strict=True)]


def scan(optimizer, params, gradients, state=None):
    """The same path in JAX: parameters and state after one update per row, to be jitted."""

    def step(carry, row):
        updates, after = optimizer.update(row, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), after), None

    return jax.lax.scan(step, (params, optimizer.init(params) if state is None else state), gradients)[0]


def jitted(optimizer):
    """The same optimizer, compiled: operation by operation JAX would compile every one of them."""
    return optax.GradientTransformationExtraArgs(jax.jit(optimizer.init), jax.jit(optimizer.update))


def meters(state, **options):
    return jax.jit(lambda x: gate_diagnostics(x, **options))(state)


def jax_paths(rows, shapes, gradients, dtype="float32", start=None):
    """Weights and state of ``poprisk_adamw`` under many sets of options: one scan over the stream for all of them."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), numbers(shapes)) if start is None else start
    optimizers = [poprisk_adamw(schedule, **options) for options in rows]

    def step(carry, row):
        pairs = [(w, x.update(row, state, w)) for (w, state), x in zip(carry, optimizers, strict=True)]
        return [(optax.apply_updates(w, updates), state) for w, (updates, state) in pairs], None

    @jax.jit
    def run(params, gradients):
        return jax.lax.scan(step, [(params, x.init(params)) for x in optimizers], gradients)[0]

    return run(params, gradients)


def assert_near(actual, expected, tolerance, message=""):
    """Largest difference over all leaves, over the largest expected entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_allclose(np.asarray(a), np.asarray(e), rtol=0, atol=tolerance * scale, err_msg=message)


def assert_follows(ours, theirs, dtype, message=""):
    """Weights, every state vector and the counters of the two frameworks."""
    (weights, (gate, *_)), tolerance = ours, TOLERANCE[dtype]
    assert_near(weights, theirs.weights, tolerance, message)
    for name, value in theirs.states.items():
        assert_near(getattr(gate, name), value, tolerance, f"{name}: {message}")
    for name, key in {"count": "step", "var_count": "var_step"}.items():
        assert getattr(gate, name) == theirs.counters.get(key, 0), message
    if "var_gain" in theirs.counters:
        assert_allclose(gate.gain, theirs.counters["var_gain"], rtol=tolerance, err_msg=message)


def assert_same_meters(readings, theirs, rtol, message=""):
    for name in readings._fields:
        assert_allclose(getattr(readings, name), theirs.meters[name], rtol=rtol, err_msg=f"{name}: {message}")


# --- equal to the torch class ---------------------------------------------------------------------------------------

SOFT = {"gate": "soft", "strength": 1.0, "normalize_gate": False}
ALGORITHM1 = {**SOFT, "weight_decay": 1e-2}
COMBINATIONS = [
    {"strength": 1.0, "alpha": alpha, "centering": centering, "granularity": granularity}
    for alpha, centering, granularity in product(
        (0.7, "calibrated"), ("paper", "corrected"), ("element", "row", "tensor")
    )
]


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_follows_the_torch_class(gate):
    """α × centring × granularity, with and without warm-up, under a schedule, with entries that are not finite."""
    rows = [{"gate": gate, "warmup_steps": 7 * (i % 2), **options} for i, options in enumerate(COMBINATIONS)]
    gradients = stream(MATRIX)
    paths = jax_paths(rows, MATRIX, gradients), torch_paths(rows, MATRIX, gradients)
    for options, ours, theirs in zip(rows, *paths, strict=True):
        assert_follows(ours, theirs, "float32", str(options))


DOUBLE = [
    {},
    *({**SOFT, "gate": gate} for gate in (*GATES, None)),
    {**SOFT, "alpha": "calibrated", "granularity": "row", "warmup_steps": 3},
    {**SOFT, "alpha": 0.3, "granularity": "tensor", "centering": "corrected"},
    {"gate": "soft", "alpha": 0.3, "strength": 3.0, "rho": 0.9, "gate_eps": 1e-3, "eps": 1e-6, "weight_decay": 0.3},
    {"gate": "hard", "alpha": "calibrated", "centering": "corrected", "normalize_gate": True},
    {"gate": "snr", "normalize_gate": True, "granularity": "row"},
    {**SOFT, "signal": "batch", "alpha": 0.5},
    {"signal": "batch", "alpha": "calibrated", "gate": "hard"},
    {**SOFT, "b1": 0.0, "rho": 0.0, "eps": 0.0, "alpha": 0.5},
]


def all_meters(rows, paths):
    """The diagnostics of every path, compiled together."""
    of_gate = [{name: value for name, value in options.items() if name != "weight_decay"} for options in rows]
    states = [state for _, state in paths]
    return jax.jit(lambda xs: [gate_diagnostics(x, **o) for x, o in zip(xs, of_gate, strict=True)])(states)


def as_torch(options):
    """optax's b1 and b2 as torch's betas."""
    rest = {name: value for name, value in options.items() if name not in ("b1", "b2")}
    return {**rest, "betas": (options.get("b1", 0.9), options.get("b2", 0.999))}


def test_in_double_precision_it_is_the_torch_class():
    """Every option at least once, over a tree of a tensor, a scalar and a vector."""
    with jax.enable_x64(True):
        for spoiled in (True, False):  # without a gate a NaN goes through, as in AdamW
            rows = [options for options in DOUBLE if (options.get("gate", "soft") is not None) == spoiled]
            gradients = stream(TREE, steps=60, dtype="float64", spoiled=spoiled)
            ours = jax_paths(rows, TREE, gradients, "float64")
            theirs = torch_paths([as_torch(options) for options in rows], TREE, gradients)
            for options, path, readings, other in zip(rows, ours, all_meters(rows, ours), theirs, strict=True):
                assert_follows(path, other, "float64", str(options))
                assert_same_meters(readings, other, 1e-11, str(options))


def test_without_a_gate_it_is_optax_adamw():
    gradients = jax.tree.map(jnp.asarray, stream(TREE, steps=20, spoiled=False))
    params = jax.tree.map(jnp.float32, numbers(TREE))
    mask = {"a": [True, False]}
    options = {"weight_decay": 1e-2, "mask": mask}  # whose default is neither optax's nor torch's
    ours, theirs = poprisk_adamw(1e-3, gate=None, **options), optax.adamw(1e-3, **options)
    (w, state), (expected, _) = jax.jit(lambda: (scan(ours, params, gradients), scan(theirs, params, gradients)))()
    assert_near(w, expected, 1e-6)
    assert state[0].s is None


def test_non_finite_gradients_can_be_let_through():
    w = jnp.ones(2)
    for skip in (True, False):
        optimizer = jitted(poprisk_adamw(1e-2, skip_nonfinite=skip, **ALGORITHM1))
        updates, state = optimizer.update(jnp.array([jnp.nan, 1.0]), optimizer.init(w), w)
        assert jnp.isnan(updates).tolist() == [not skip, False]
        assert jnp.isnan(state[0].mu).tolist() == [not skip, False]
        assert (updates[0] == 0) == skip  # and no decay either: the coordinate sits the step out
        assert updates[1] == np.float32(-1e-4)  # closed at t = 1: decay alone


@pytest.mark.parametrize("gate", ["soft", None])
def test_a_coordinate_without_a_gradient_stays_where_it_is_at_eps_0(gate):
    """0/0 twice, in the gate and in Adam's denominator."""
    optimizer = jitted(population_risk_gate(eps=0.0, gate=gate, centering="corrected", normalize_gate=False))
    state, g = optimizer.init(jnp.zeros(2)), jnp.array([0.0, 1.0])
    for _ in range(2):
        updates, state = optimizer.update(g, state)
    assert_allclose(updates, [0.0, 1.0], rtol=1e-6)


def test_complex_parameters_are_pairs_of_real_ones():
    """As in torch each part has its own gate, and may sit a step out alone."""
    shapes = {"z": (4, 3)}
    real, imaginary = numbers(shapes, seed=4, rows=(40,), mean=0.5), numbers(shapes, seed=5, rows=(40,))
    gradients = {"z": np.asarray(real["z"] + 1j * imaginary["z"], np.complex64)}
    gradients["z"][7, 0, 0] = complex(np.nan, 1.0)
    start = {"z": np.ones((4, 3), np.complex64) * (1 - 2j)}
    rows = [{}, SOFT, {**SOFT, "alpha": "calibrated", "granularity": "row"}]
    ours, theirs = (paths(rows, None, gradients, start=start) for paths in (jax_paths, torch_paths))
    for options, path, readings, other in zip(rows, ours, all_meters(rows, ours), theirs, strict=True):
        assert_follows(path, other, "float32", str(options))
        assert_same_meters(readings, other, 1e-5, str(options))


def test_the_gate_joins_a_run_that_began_with_adam():
    """Adam's moments and count, s and its count from zero: as torch's load_state_dict adopts AdamW."""
    gradients = stream(MATRIX, steps=60, spoiled=False)
    first, rest = (jax.tree.map(lambda x, i=i: x[30 * i : 30 * (i + 1)], gradients) for i in (0, 1))
    parameter = torch.nn.Parameter(torch.tensor(numbers(MATRIX)["w"], dtype=torch.float32))
    gated = PopRiskAdamW([parameter], **join_gate({"alpha": "calibrated", "lr": 1e-2, **ALGORITHM1}))
    adamw = torch.optim.AdamW([parameter], lr=1e-3)
    for i, row in enumerate([*first["w"], *rest["w"]]):
        if i == 30:
            gated.load_state_dict(adamw.state_dict())
        parameter.grad = torch.tensor(row)
        (adamw if i < 30 else gated).step()

    adam = optax.adamw(1e-3, weight_decay=1e-2)
    optimizer = poprisk_adamw(1e-2, alpha="calibrated", **ALGORITHM1)

    @jax.jit
    def run(params):
        params, state = scan(adam, params, first)
        fresh = optimizer.init(params)
        adopted = fresh[0]._replace(count=state[0].count, mu=state[0].mu, nu=state[0].nu)
        return scan(optimizer, params, rest, (adopted, *fresh[1:]))

    params, state = run(jax.tree.map(jnp.float32, numbers(MATRIX)))
    assert_near(params["w"], parameter.detach().numpy(), 1e-6)
    assert_near(state[0].s["w"], gated.state[parameter]["exp_var"].numpy(), 1e-6)
    assert (state[0].count, state[0].var_count) == (60, 30)


# --- the gate around other transformations --------------------------------------------------------------------------


def test_around_adam_it_is_algorithm_1():
    rows = stream(MATRIX, steps=30, spoiled=False)
    gradients, params = jax.tree.map(jnp.asarray, rows), jax.tree.map(jnp.float32, numbers(MATRIX))
    alone, around = (population_risk_gate(alpha=0.5, **SOFT, inner=inner) for inner in (None, optax.scale_by_adam()))
    chains = [optax.chain(x, optax.scale_by_learning_rate(1e-2)) for x in (alone, around)]
    (w, state), (expected, _) = jax.jit(lambda: [scan(x, params, gradients) for x in chains])()
    assert_near(w, expected, 1e-6)
    assert isinstance(state[0], PopulationRiskState)
    [paper] = torch_paths([{**SOFT, "alpha": 0.5, "weight_decay": 0.0}], MATRIX, rows, rate=lambda _: 1e-2)
    assert_near(expected, paper.weights, 1e-6)


def test_around_a_chain_with_decay_it_gates_the_decay():
    gradients = stream(MATRIX, steps=30, spoiled=False)
    inner = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.3))
    optimizer = optax.chain(population_risk_gate(alpha=0.5, **SOFT, inner=inner), optax.scale_by_learning_rate(1e-2))
    w, state = jax.jit(lambda w: scan(optimizer, w, gradients))(jax.tree.map(jnp.float32, numbers(MATRIX)))
    options = {**SOFT, "alpha": 0.5, "weight_decay": 0.3, "gated_decay": True}
    [expected] = torch_paths([options], MATRIX, gradients, rate=lambda _: 1e-2)
    assert_near(w, expected.weights, 1e-6)
    assert_near(state[0].s, expected.states["s"], 1e-6)


def test_around_nothing_it_is_the_gated_gradient():
    """With the hard gate the update is the gradient or 0, and a gradient that is not finite never gets to inner."""
    gradients = stream({"g": (50,)}, steps=20, spoiled=False)["g"]
    gradients[-1, 0] = np.nan
    remember = optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, updates))
    gate, reference = (
        jitted(population_risk_gate(gate="hard", inner=inner, normalize_gate=False)) for inner in (remember, None)
    )
    state, other = gate.init(jnp.zeros(50)), reference.init(jnp.zeros(50))
    for row in gradients:
        updates, state = gate.update(row, state)
        adam, other = reference.update(row, other)
    assert_array_equal(updates, np.where(adam != 0, row, 0))
    assert 0 < (updates != 0).sum() < 50
    assert_array_equal(state.inner_state, np.nan_to_num(row))
    assert (state.nu, other.nu is None) == (None, False)


def test_without_a_gate_inner_is_left_as_it_is():
    w, g = jnp.ones(3), jnp.array([1.0, jnp.nan, 2.0])
    gate = population_risk_gate(gate=None, inner=optax.identity())
    updates, _ = gate.update(g, gate.init(w), w, unexpected=1)
    assert_array_equal(updates, g)


# --- what optax asks of contributed optimizers ----------------------------------------------------------------------


def targets():
    """The four problems of optax's battery, solved together: a gate per coordinate does not see the others."""
    best = {
        "parabola": jnp.array([1.0, -1.0, 1.0]),
        "rosenbrock": jnp.array([1.0, 1.0]),
        "matrix": jnp.array([[3.0, -2.0], [1.0, 4.0]]),
        "mixed": (jnp.array([1.0, -1.0, 2.0]), jnp.array([[1.0, 0.0], [-1.0, 1.0]])),
    }

    def objective(params):
        quadratics = ("parabola", "matrix", "mixed")
        distances = jax.tree.map(
            lambda x, y: jnp.sum((x - y) ** 2), *({k: p[k] for k in quadratics} for p in (params, best))
        )
        x, y = params["rosenbrock"]
        return sum(jax.tree.leaves(distances)) + (1 - x) ** 2 + 100 * (y - x**2) ** 2

    start = {**jax.tree.map(jnp.zeros_like, best), "parabola": jnp.array([-1.0, 10.0, 1.0])}
    return start, best, objective


@pytest.mark.parametrize("gate", GATES)
def test_it_converges(gate):
    start, best, objective = targets()
    options = {"gate": gate, "strength": 1.0, "normalize_gate": False}
    optimizer = poprisk_adamw(1e-2, weight_decay=1e-4, **options)  # optax.adamw's decay: moves the optimum less

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(objective)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=30_000)[0]

    params, _ = train(start)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(best), strict=True):
        assert_allclose(a, b, rtol=3e-2, atol=3e-2)


def test_unknown_extra_arguments_and_no_second_compilation():
    optimizer, traces = poprisk_adamw(schedule, alpha="calibrated", centering="corrected", **SOFT), []

    @jax.jit
    def step(params, state):
        traces.append(1)  # runs when JAX traces, not when it runs what it compiled
        updates, state = optimizer.update(jax.grad(jnp.sum)(params), state, params, unexpected=1, value=2.0)
        return optax.apply_updates(params, updates), state

    params = jnp.array([1.0, 2.0])
    state = optimizer.init(params)
    for _ in range(3):
        params, state = step(params, state)
    assert len(traces) == 1
    assert state[0].count == 3


def test_hyperparameters_can_be_injected():
    """Every number becomes a traced array; the result is the same, and can be changed or scheduled on the way."""
    factory = optax.inject_hyperparams(poprisk_adamw, static_args="mask")
    options = {"learning_rate": 1e-2, "alpha": 0.7, "strength": 2.0, "warmup_steps": 2, "centering": "corrected"}
    options |= {"gate": "soft"}
    gradients = jax.tree.map(jnp.asarray, stream(MATRIX, steps=6))
    params = jax.tree.map(jnp.float32, numbers(MATRIX))
    scheduled = factory(**{**options, "alpha": lambda i: jnp.where(i < 3, 5.0, 0.7)})

    @jax.jit
    def run():
        return [scan(x, params, gradients) for x in (poprisk_adamw(**options), factory(**options), scheduled)]

    (w, state), (w_injected, injected), (w_scheduled, _) = run()
    assert_near(w_injected, w, 1e-6)
    for a, b in zip(jax.tree.leaves(injected.inner_state), jax.tree.leaves(state), strict=True):
        assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert {"b1", "b2", "eps", "rho", "strength", "gate_eps", "warmup_steps", "alpha"} <= set(injected.hyperparams)
    assert not np.allclose(w["w"], w_scheduled["w"], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_and_shapes_are_stable(dtype):
    """Updates have the parameters' dtype; moments are float32 or better; both are what a branch not taken returns."""
    with jax.enable_x64(dtype == "float64"):
        optimizer = poprisk_adamw(1e-2, alpha="calibrated", granularity="row", **SOFT)
        params = jnp.array([[-1.0, 10.0, 1.0]], dtype)
        state = optimizer.init(params)

        @jax.jit
        def step(flag, params, state):
            gradient = jax.grad(lambda p: jnp.sum(p**2))(params)
            updates, state = jax.lax.cond(
                flag, lambda: optimizer.update(gradient, state, params), lambda: (params, state)
            )
            return optax.apply_updates(params, updates), updates, state

        for _ in range(2):
            params, updates, after = step(True, params, state)
            assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
            state = after
        assert params.dtype == updates.dtype == jnp.dtype(dtype)
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        assert {x.dtype for x in (state[0].mu, state[0].nu, state[0].s)} == {jnp.dtype(wide)}


def test_low_precision_gradients_give_the_torch_states():
    """The states of bfloat16 weights do not depend on the weights, so they must agree as those of float32 do."""
    rounded = torch.tensor(stream(MATRIX, steps=20, spoiled=False)["w"]).bfloat16()
    weight = torch.nn.Parameter(torch.zeros(MATRIX["w"], dtype=torch.bfloat16))
    theirs = PopRiskAdamW([weight], lr=1e-2, gate=Gate(normalize=False))
    for row in rounded:
        weight.grad = row.clone()
        theirs.step()
    gradients = jnp.asarray(rounded.float().numpy(), jnp.bfloat16)
    optimizer = poprisk_adamw(1e-2, normalize_gate=False)
    w, state = jax.jit(lambda w: scan(optimizer, w, gradients))(jnp.zeros(MATRIX["w"], jnp.bfloat16))
    for name, key in NAMES.items():
        assert_near(getattr(state[0], name), theirs.state[weight][key].numpy(), 1e-6)
    assert_near(w.astype(jnp.float32), weight.detach().float().numpy(), 2**-7)  # one more rounding per update


def test_mu_dtype_is_that_of_m_alone():
    optimizer = jitted(population_risk_gate(mu_dtype=jnp.bfloat16))
    params = {"x": jnp.ones(3), "z": jnp.ones(2, jnp.complex64)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state)
    assert [x.dtype for x in jax.tree.leaves(state.mu)] == [jnp.bfloat16, jnp.complex64]
    assert [x.dtype for x in jax.tree.leaves((state.nu, state.s))] == [jnp.float32, jnp.complex64] * 2
    assert [x.dtype for x in jax.tree.leaves(updates)] == [jnp.float32, jnp.complex64]


def test_accumulated_gradients_are_one_step_on_their_mean():
    inner = poprisk_adamw(1e-2, alpha=0.5, warmup_steps=1, **SOFT)
    optimizer = optax.MultiSteps(inner, every_k_schedule=4)
    gradients = jax.tree.map(jnp.asarray, stream(MATRIX, steps=12, spoiled=False))
    params = jax.tree.map(jnp.float32, numbers(MATRIX))
    means = jax.tree.map(lambda x: x.reshape(3, 4, *x.shape[1:]).mean(1), gradients)

    @jax.jit
    def run():
        first, _ = optimizer.update(jax.tree.map(lambda x: x[0], gradients), optimizer.init(params), params)
        return scan(optimizer, params, gradients), scan(inner, params, means), first["w"]

    (w, state), (expected, inner_state), first = run()
    assert_near(w, expected, 1e-6)
    assert_near(state.inner_opt_state[0].s, inner_state[0].s, 1e-6)
    assert_array_equal(first, 0)


def test_a_constant_schedule_is_a_number():
    w, g = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0])
    results = []
    for rate in (1e-3, optax.constant_schedule(1e-3), jnp.float32(1e-3)):
        optimizer = poprisk_adamw(rate, centering="corrected")
        results.append(jax.jit(lambda w, x=optimizer: scan(x, w, jnp.stack([g] * 3)))(w)[0])
    assert not np.allclose(results[0], w)
    assert_allclose(results[1], results[0], rtol=1e-6)
    assert_allclose(results[2], results[0], rtol=1e-6)


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding
from poprisk.integrations.optax import gate_diagnostics, poprisk_adamw

assert "torch" not in sys.modules and jax.device_count() == 2
options = {"gate": "soft", "strength": 1.0, "centering": "corrected", "granularity": "tensor", "alpha": "calibrated"}
optimizer = poprisk_adamw(1e-2, **options)
gradient = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32) + 1
update = jax.jit(optimizer.update)
meters = jax.jit(lambda x: gate_diagnostics(x, **options))

def two_steps(params, sharding):
    place = lambda x: x if sharding is None else jax.device_put(x, sharding)
    state = first = optimizer.init(params)
    for scale in (1.0, 3.0):
        updates, state = update(place(gradient * scale), state, params)
    return updates, first, state

expected, _, alone = two_steps(jnp.ones((4, 6)), None)
for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    sharding = NamedSharding(mesh, jax.P(None, "x"))
    with jax.set_mesh(mesh):
        updates, first, state = two_steps(jax.device_put(jnp.ones((4, 6)), sharding), sharding)
        assert updates.sharding.is_equivalent_to(sharding, 2), updates.sharding
        for x in (first, state):
            for moment in (x[0].mu, x[0].nu, x[0].s):
                assert moment.sharding.is_equivalent_to(sharding, 2), (kind, moment.sharding)
        assert jax.tree.map(jax.typeof, first) == jax.tree.map(jax.typeof, state)
        readings = meters(state)
    np.testing.assert_allclose(updates, expected, rtol=1e-6, atol=1e-9)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(readings.mean_gate, meters(alone).mean_gate, rtol=1e-6)
print("sharded alike")
"""


def test_state_is_sharded_like_the_parameters_and_no_torch_is_loaded():
    """On two devices, with shardings as types and without; in a process of its own, which has them."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **flags},
    )
    assert done.stdout.strip() == "sharded alike", done.stderr


# --- trees, masks, groups -------------------------------------------------------------------------------------------


def test_none_and_empty_leaves():
    params = {"a": None, "b": jnp.zeros((0, 3)), "c": jnp.zeros((3, 0)), "d": (jnp.ones((2, 2)), None), "e": 2.0}
    literal = {"normalize_gate": False}
    rows = [literal, {"granularity": "tensor", **literal}, {"granularity": "row"}, {}]

    def two_steps(params, options):
        optimizer = poprisk_adamw(centering="corrected", **options)
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params, state, params)
        return updates, gate_diagnostics(state, centering="corrected", **options)

    with jax.debug_nans(True):
        results = jax.jit(lambda params: [two_steps(params, options) for options in rows])(params)
    for (updates, readings), options in zip(results, rows, strict=True):
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
        assert (updates["d"][0] < -1e-3).all()
        assert 0 < readings.mean_gate <= (1 if "normalize_gate" in options else 3)


def test_masks_and_groups_leave_the_others_alone():
    params = {"gated": jnp.array([1.0, 2.0]), "plain": jnp.array([3.0])}
    gradient = {"gated": jnp.array([0.3, -0.3]), "plain": jnp.array([1.0])}
    alone = poprisk_adamw(centering="corrected")
    masked = optax.masked(alone, {"gated": True, "plain": False})
    labels = {"gated": "gate", "plain": "sgd"}
    grouped = optax.multi_transform({"gate": alone, "sgd": optax.sgd(0.5)}, labels)

    def two_steps(optimizer, params, gradient):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(gradient, state, params)
        return updates, gate_diagnostics(state, centering="corrected")

    @jax.jit
    def run():
        only = two_steps(alone, params["gated"], gradient["gated"])
        return only, *(two_steps(x, params, gradient) for x in (masked, grouped))

    (expected, readings), *others = run()
    assert (expected < -1e-4).tolist() == [True, False]
    for (updates, others_readings), rest in zip(others, (1.0, -0.5), strict=True):
        assert_allclose(updates["gated"], expected, rtol=1e-6)
        assert updates["plain"] == rest
        assert_allclose(others_readings, readings, rtol=1e-6)


def test_state_can_be_made_from_shapes_and_mapped_over():
    optimizer = population_risk_gate(inner=optax.trace(0.9))
    state = optimizer.init(jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert state.mu.shape == (2, 4)
    mapped = optax.tree.map_params(optimizer, lambda x: x + 1, state)
    assert_array_equal(mapped.s, 1)
    assert_array_equal(mapped.inner_state.trace, 1)
    assert mapped.count == 0


def test_the_gate_works_under_strict_promotion():
    """No dtype is left to JAX's promotion rules, also with float64 scalars beside a state made without x64."""
    gate = jitted(population_risk_gate(gate="soft", alpha="calibrated", granularity="row", strength=jnp.float32(2.0)))
    g = {"x": jnp.ones((2, 2), jnp.float32), "y": jnp.ones(2, jnp.bfloat16)}
    state = gate.init(g)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        updates, after = gate.update(g, state)
    assert jax.tree.map(lambda x: x.dtype, updates) == {"x": jnp.float32, "y": jnp.bfloat16}
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


# --- looking --------------------------------------------------------------------------------------------------------


def test_diagnostics_in_single_precision_through_wrappers():
    options = {**SOFT, "alpha": 0.5}
    gradients = stream(MATRIX, steps=30, spoiled=False)
    [theirs] = torch_paths([options], MATRIX, gradients)
    wrapped = optax.MultiSteps(optax.inject_hyperparams(poprisk_adamw, static_args="mask")(**options), 1)
    params = jax.tree.map(jnp.float32, numbers(MATRIX))
    _, state = jax.jit(lambda: scan(wrapped, params, jax.tree.map(jnp.asarray, gradients)))()
    readings = meters(state, **options)
    assert_same_meters(readings, theirs, rtol=1e-5)
    assert 0 < readings.mean_gate < 1


def test_diagnostics_after_one_step():
    """Where the deviation from a debiased mean does not exist yet."""
    rows = [{"gate": "snr", "centering": centering} for centering in ("paper", "corrected")]
    gradients = stream(MATRIX, steps=1, spoiled=False)
    ours, theirs = (paths(rows, MATRIX, gradients) for paths in (jax_paths, torch_paths))
    for readings, other in zip(all_meters(rows, ours), theirs, strict=True):
        assert_same_meters(readings, other, rtol=1e-5)


def test_diagnostics_before_the_first_step_and_without_a_gate():
    w = jnp.ones(3)
    fresh = meters(poprisk_adamw().init(w))
    assert (fresh.active_fraction, fresh.mean_gate) == (0, 0)
    assert jnp.isnan(fresh.noise_scale)
    optimizer = jitted(poprisk_adamw(gate=None))
    _, state = optimizer.update(w, optimizer.init(w), w)
    assert meters(state, gate=None)[:2] == (1, 1)


# --- refused at the door --------------------------------------------------------------------------------------------

BAD = [
    *product(
        ("learning_rate", "eps", "weight_decay", "strength", "gate_eps", "alpha"),
        (-1.0, float("nan"), float("inf"), "0.1", True),
    ),
    *product(("b1", "b2", "rho"), (1.0, -0.1, float("nan"), None)),
    *((name, "x") for name in ("gate", "centering", "signal", "granularity", "normalize_gate", "skip_nonfinite")),
    *product(("warmup_steps",), (-1, 1.5, None)),
    *product(("mu_dtype",), (jnp.int32, jnp.complex64, "float33")),
    ("rho", jnp.float32(1.0)),
    ("rho", np.float64(1.0)),
    ("strength", jnp.ones(2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_options_are_refused_in_one_line(name, value):
    with pytest.raises(HyperparameterError, match=f"^{name} must be .* got ") as caught:
        poprisk_adamw(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:the option:DeprecationWarning")
def test_what_torch_refuses_is_refused_with_the_same_words():
    for name, value in (("alpha", -1.0), ("rho", 1.0), ("gate", "x"), ("granularity", 3), ("strength", "1")):
        messages = []
        for make in (poprisk_adamw, lambda **options: PopRiskAdamW([torch.nn.Parameter(torch.ones(1))], **options)):
            with pytest.raises(HyperparameterError) as caught:
                make(**{name: value})
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "gate", [Gate(), Gate("soft", strength=1.0, alpha=0.3, eps=1e-3, centering="corrected")], ids=str
)
def test_a_gate_is_its_options(gate):
    flat = {name: value for name, value in gate.options().items() if name != "gated_decay"}
    w, g = jnp.array([1.0, -2.0]), jnp.array([0.3, 0.1])
    results = []
    for options in ({"gate": gate}, flat):
        optimizer = poprisk_adamw(**options)
        state = optimizer.init(w)
        for k in range(4):
            updates, state = optimizer.update(g * (k + 1), state, w)
        results.append((updates, gate_diagnostics(state, **options)))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *results))
    with pytest.raises(HyperparameterError, match=r"rho=0\.5 was given beside gate=Gate"):
        poprisk_adamw(gate=gate, rho=0.5)
    with pytest.raises(HyperparameterError, match="gated_decay is not an option here"):
        poprisk_adamw(gate=Gate(gated_decay=True))


def test_defaults_are_the_librarys():
    ours = {
        **{name: x.default for name, x in inspect.signature(poprisk_adamw).parameters.items()},
        **{name: x.default for name, x in inspect.signature(population_risk_gate).parameters.items()},
    }
    b1, b2 = DEFAULTS.betas
    theirs = {**DEFAULTS.as_dict(), "learning_rate": DEFAULTS.lr, "b1": b1, "b2": b2}
    of_optax = {"mask", "mu_dtype", "inner"}
    assert {ours[name] for name in of_optax} == {None}
    assert {name: value for name, value in ours.items() if name not in of_optax} == {
        name: theirs[name] for name in ours if name not in of_optax
    }
    shared = set(inspect.signature(poprisk_adamw).parameters) & set(inspect.signature(population_risk_gate).parameters)
    for name in shared:
        assert inspect.signature(poprisk_adamw).parameters[name].default == ours[name]


def test_trees_that_do_not_fit_are_refused():
    optimizer = poprisk_adamw()
    with pytest.raises(GradientError, match="got dtype int32 for one of shape"):
        optimizer.init({"ids": jnp.arange(3)})
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(GradientError, match="tree structure of the parameters"):
        optimizer.update({"a": jnp.ones(2), "b": None}, optimizer.init(params), params)
    with pytest.raises(HyperparameterError, match=r"inner must be an optax\.GradientTransformation or None, got 3"):
        population_risk_gate(inner=3)
    with pytest.raises(StateDictError, match="contains a PopulationRiskState, got tuple"):
        gate_diagnostics(optax.adamw(1e-3).init(jnp.ones(2)))


@pytest.mark.parametrize("package", ["optax", "jax"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    """The module is run once more, under another name, where the package cannot be imported."""
    for name in list(sys.modules):
        if name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.spec_from_file_location("without_jax", integration.__file__)
    with pytest.raises(
        MissingExtraError, match=r"^the optax integration needs optax, .* pip install 'poprisk\[jax\]'$"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# --- the example ----------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "optax"


def test_the_example_shows_what_its_page_says(capsys):
    """Shorter than by default: AdamW at its customary rate ends far above its best step, the gate next to its own."""
    spec = importlib.util.spec_from_file_location("noisy_labels", EXAMPLE / "noisy_labels.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    curves = example.main(["--steps", "1000", "--seeds", "2"])
    lost = {}
    for name, (_, rates) in example.OPTIMIZERS.items():
        curve = curves[name][:, rates.index(example.CUSTOMARY[name])].mean(0)
        lost[name] = 100 * (curve[-1] - curve.min())
    assert lost["optax.adamw"] > 5
    assert lost["poprisk_adamw"] < 1
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("optax.adamw", "poprisk_adamw ")) for line in printed) == 5 + 5 + 1
    assert "at its default lr minus optax.adamw" in printed[-1]
    with pytest.raises(SystemExit):
        example.main(["--steps", "10"])
    assert "multiple of 25" in capsys.readouterr().err


def test_the_code_on_the_page_runs(capsys):
    page = (EXAMPLE / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block, names)
    gate, active, _ = map(float, capsys.readouterr().out.split())
    assert (gate, active) == (1.0, 1.0)  # the first step is AdamW's: there is no mean to compare with
    params = {"w": jnp.ones(2)}
    for name, rate in {"clipped": 1e-3, "gated_lion": 1e-4, "gated_descent": 1.0}.items():
        updates, _ = jitted(names[name]).update(params, names[name].init(params))
        assert_allclose(updates["w"], -rate, rtol=1e-5)


def test_a_whole_gate_with_a_scheduled_learning_rate():
    """``inject_hyperparams`` turns defaults that nobody gave into arrays."""
    from poprisk import Gate

    w = {"w": jnp.ones(3)}
    schedule = optax.cosine_decay_schedule(0.01, 10)
    injected = optax.inject_hyperparams(poprisk_adamw)(learning_rate=schedule, gate=Gate("soft", strength=2.0))
    plain = poprisk_adamw(0.01, gate=Gate("soft", strength=2.0))
    states = [injected.init(w), plain.init(w)]
    updates = [jax.jit(rule.update)(w, state, w)[0]["w"] for rule, state in zip((injected, plain), states, strict=True)]
    assert_allclose(*updates, rtol=1e-6)
    with pytest.raises(HyperparameterError, match="was given beside"):
        poprisk_adamw(0.01, gate=Gate("soft"), strength=3.0)


def test_a_state_of_a_literal_gate_goes_on_and_warns():
    params, gradient = jnp.ones(4), jnp.array([1.0, -2.0, 0.5, 3.0])
    literal, default = population_risk_gate(normalize_gate=False), population_risk_gate()
    state = literal.init(params)
    for _ in range(3):
        _, state = literal.update(gradient, state, params)
    expected, _ = literal.update(0.5 * gradient, state, params)
    with pytest.warns(LiteralGateWarning, match="normalize_gate=False"):
        found, after = default.update(0.5 * gradient, state, params)
    assert_array_equal(found, expected)
    assert after.gate_scale is None
