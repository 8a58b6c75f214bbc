"""Every bound holds on every run tried, in discrete time and in flow, is attained where it can be, and can fail."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from coupling_cases import forgetful
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from oracles.linear_model import flow_outputs, linear_operators
from oracles.run_operators import operators_of, quadratic_run, random_steps
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._bound import Bound
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling, anchored_coupling
from poprisk.operators._cumulative import CumulativeError, flow_cumulative_error
from poprisk.operators._dense import RealizedWindow
from poprisk.theory.path_bounds import (
    anchored_bound,
    coarse_bound,
    cumulative_bound,
    path_error_order_bound,
    predictor_bound,
    remainder_bound,
    sharp_bound,
    trajectory_bound,
    visibility_bound,
    window_bounds,
)
from poprisk.theory.visibility_bounds import (
    filtered_bound,
    hard_reservoir_bound,
    mobility_bound,
    soft_reservoir_bound,
    visibility_order_bound,
    visibility_spectra,
    visibility_spectrum_bound,
)

NAMES = {
    "hard reservoir",
    "soft reservoir",
    "mobility",
    "filtered",
    "visibility order",
    "visibility spectrum",
    "visibility",
    "remainder",
    "predictor",
    "trajectory",
    "path error order",
    "sharp",
}


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coupling_of(ops) -> Coupling:
    return Coupling(dissipation_channels(tensor(ops.W_factor), tensor(ops.D), tensor(ops.G)))


def failing(bounds: list[Bound]) -> list[str]:
    return [str(bound) for bound in bounds if not bound.holds]


def plain_sides(F, D, G, A, moved_S, moved_Q) -> tuple[float, float]:
    """‖Δu_Q - A Δu_S‖ and ‖C_Q - A C_S‖, by NumPy from a factor F of W."""
    error = (G - A @ D) @ np.linalg.pinv(F, rcond=1e-9)
    return float(np.linalg.norm(moved_Q - A @ moved_S)), float(np.linalg.norm(error, 2))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), momentum=st.booleans(), squared=st.booleans(), never_drawn=st.integers(0, 2))
def test_all_hold_on_synthetic_runs(seed, momentum, squared, never_drawn):
    steps = random_steps(seed, momentum=momentum, squared=squared, never_drawn=never_drawn)
    ops = operators_of(steps)
    coupling, g = coupling_of(ops), normal(seed, 6)
    window = RealizedWindow(
        g,
        tensor(ops.source_S) - tensor(ops.D) @ g,
        tensor(ops.source_Q) - tensor(ops.G) @ g,
        tensor(ops.source_S),
        tensor(ops.source_Q),
    )
    bounds = window_bounds(coupling, window, predictors=[normal(seed + 1, 4, 6), torch.zeros(4, 6).double()])
    assert {bound.name for bound in bounds} == NAMES
    assert failing(bounds) == []


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("rule", ["gd", "momentum", "nesterov"])
@pytest.mark.parametrize("start", [0, 4])
def test_all_hold_on_runs_that_happened(loss, rule, start):
    run = quadratic_run(8, n=6, batch=3, loss=loss, rule=rule, curvature=1.0, never_drawn=1)
    ops = operators_of(run.steps[start:], run.buffers[start])
    coupling, first = coupling_of(ops), run.steps[start]
    window = RealizedWindow(
        tensor(run.gradients[start]),
        tensor(run.train_outputs[-1] - run.train_outputs[start]),
        tensor(run.test_outputs[-1] - run.test_outputs[start]),
        tensor(ops.source_S),
        tensor(ops.source_Q),
    )
    anchor = anchored_coupling(tensor(first.Jbar_Q @ first.J_S.T), tensor(first.J_S @ first.J_S.T))
    bounds = window_bounds(coupling, window, predictors=[anchor])
    assert failing(bounds) == []
    named = {bound.name: bound for bound in bounds}
    # What a step leaves of the paper's bounds: √(gᵀWg) on the right, displacements without their source on the left.
    g, F = window.gradient.numpy(), ops.W_factor
    moved_S = run.train_outputs[-1] - run.train_outputs[start] - ops.source_S
    moved_Q = run.test_outputs[-1] - run.test_outputs[start] - ops.source_Q
    for name, A in (("visibility", 0 * ops.G), ("predictor", anchor.numpy())):
        left, size = plain_sides(F, ops.D, ops.G, A, moved_S, moved_Q)
        assert (named[name].left, named[name].right) == pytest.approx((left, size * np.linalg.norm(F @ g)), rel=1e-7)
    assert 0 < named["predictor"].tightness <= 1
    assert named["trajectory"].tightness == pytest.approx(named["predictor"].tightness ** 2)
    if rule != "gd":  # with the source left in, the discrete form is another statement
        with_source = RealizedWindow(window.gradient, window.train_displacement, window.test_displacement)
        assert predictor_bound(coupling.channels, anchor, with_source).left != pytest.approx(named["predictor"].left)


def flow_of_a_network(loss: str):
    """Gradient flow of a small nonlinear model with its operators, by an ODE solver: weights, P, D, G and W at once."""
    rng = np.random.default_rng(0)
    n, d, M = 4, 6, 3
    c, A = rng.normal(size=(n + M, d)), rng.normal(size=(n + M, d, d)) * 0.3
    A = A + A.transpose(0, 2, 1)
    y = rng.normal(size=n) if loss == "squared" else np.array([0.0, 1.0, 1.0, 0.0])

    def outputs(w):
        return c @ w + 0.5 * np.einsum("oij,i,j->o", A, w, w)

    def slopes(u):  # ∇Φ and the diagonal of B
        if loss == "squared":
            return (u - y) / n, np.full(n, 1 / n)
        sigmoid = 1 / (1 + np.exp(-u))
        return (sigmoid - y) / n, sigmoid * (1 - sigmoid) / n

    def value(u):
        return ((u - y) ** 2).sum() / (2 * n) if loss == "squared" else (np.logaddexp(0, u) - y * u).sum() / n

    def velocity(_, state):
        w, P = state[:d], state[d : d + n * n].reshape(n, n)
        J = c + A @ w
        g, B = slopes(outputs(w)[:n])
        K, KP = J[:n] @ J[:n].T, J[:n] @ J[:n].T @ P
        return np.concatenate(
            [-J[:n].T @ g, (-B[:, None] * KP).ravel(), KP.ravel(), (J[n:] @ J[:n].T @ P).ravel(), (P.T @ K @ P).ravel()]
        )

    w = rng.normal(size=d) * 0.5
    start = np.concatenate([w, np.eye(n).ravel(), np.zeros(n * n + M * n + n * n)])
    times = np.linspace(0, 3.0, 25)
    path = solve_ivp(velocity, (0, 3.0), start, rtol=1e-11, atol=1e-12, t_eval=times).y
    end = path[:, -1]
    D, G, W = np.split(end[d + n * n :], [n * n, n * n + M * n])
    before, after = outputs(w), outputs(end[:d])
    W = W.reshape(n, n)
    window = RealizedWindow(
        tensor(slopes(before[:n])[0]),
        tensor((after - before)[:n]),
        tensor((after - before)[n:]),
        loss_drop=float(value(before[:n]) - value(after[:n])),
    )
    factor = np.linalg.cholesky(W).T
    coupling = Coupling(
        dissipation_channels(tensor(factor), tensor(D.reshape(n, n)), tensor(G.reshape(M, n)), cutoff=1e-12)
    )
    return coupling, window, path, c, A, times


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_the_papers_form_holds_in_gradient_flow(loss):
    """With the loss drop under the root. Left and right are known to the solver's 1e-9, beside bounds of size 1."""
    coupling, window, path, c, A, times = flow_of_a_network(loss)
    channels, n, d = coupling.channels, 4, 6
    assert channels.dissipation(window.gradient) == pytest.approx(window.loss_drop, rel=1e-8)
    J_0 = c + A @ path[:d, 0]
    drift = np.linalg.norm((c + A @ path[:d, -1])[:n] - J_0[:n]) / np.linalg.norm(J_0[:n])
    assert drift > 0.2
    anchor = anchored_coupling(tensor(J_0[n:] @ J_0[:n].T), tensor(J_0[:n] @ J_0[:n].T))
    zero = torch.zeros_like(anchor)
    named = {bound.name: bound for bound in window_bounds(coupling, window, predictors=[anchor], form="flow")}
    for name in ("visibility", "predictor", "trajectory", "path error order", "sharp", "soft reservoir", "mobility"):
        assert named[name].holds, named[name]
    assert {named[name].form for name in ("visibility", "remainder", "predictor", "trajectory")} == {"flow"}
    D, G, W = np.split(path[d + n * n :, -1], [n * n, n * n + 3 * n])
    D, G, W = D.reshape(n, n), G.reshape(3, n), W.reshape(n, n)
    moved = window.train_displacement.numpy(), window.test_displacement.numpy()
    for name, predictor in (("visibility", 0 * G), ("predictor", anchor.numpy())):
        left, size = plain_sides(np.linalg.cholesky(W).T, D, G, predictor, *moved)
        assert (named[name].left, named[name].right) == pytest.approx((left, size * window.loss_drop**0.5), rel=1e-7)
    # R_perp = 0 in flow: left and right of the remainder's bound are the solver's error.
    assert coupling.relative_remainder < 1e-9
    assert named["remainder"].left < 1e-7
    assert predictor_bound(channels, zero, window, "flow").left == pytest.approx(window.test_displacement.norm().item())
    # The lifted bounds, on the trapezoidal rule over the solver's path.
    J = c + np.einsum("oij,jt->toi", A, path[:d])
    weights = np.gradient(times)
    P = path[d : d + n * n].T.reshape(-1, n, n)
    K_SS, K_QS = J[:, :n] @ J[:, :n].transpose(0, 2, 1), J[:, n:] @ J[:, :n].transpose(0, 2, 1)
    error = flow_cumulative_error(*(tensor(x) for x in (weights, K_SS, K_QS, P)), anchor)
    assert failing([coarse_bound(error), anchored_bound(coupling, error)]) == []
    lifted = cumulative_bound(channels, anchor, error, window, "flow")
    assert lifted.holds
    assert lifted.right > named["trajectory"].right  # the slack: directions the run never took


def test_closed_forms_of_the_linear_model():
    rng = np.random.default_rng(4)
    X, X_test, y, w = rng.normal(size=(5, 7)), rng.normal(size=(3, 7)), rng.normal(size=5), rng.normal(size=7)
    T = 1.3
    ops, after = linear_operators(X, X_test, T), flow_outputs(X, X, y, w, T)
    window = RealizedWindow(
        tensor((X @ w - y) / 5),
        tensor(after - X @ w),
        tensor(flow_outputs(X, X_test, y, w, T) - X_test @ w),
        loss_drop=float((((X @ w - y) ** 2).sum() - ((after - y) ** 2).sum()) / 10),
    )
    coupling = coupling_of(ops)
    assert failing(window_bounds(coupling, window, predictors=[normal(0, 3, 5)], form="flow")) == []
    assert failing(window_bounds(coupling, window, predictors=[normal(0, 3, 5)], form="discrete")) == []


def test_bounds_are_attained_where_the_theory_says():
    ops = operators_of(random_steps(5))
    coupling = coupling_of(ops)
    c = coupling.channels
    z = torch.linalg.svd(c.reduced_test)[2][0]
    loudest = c.vectors @ (z / c.roots)  # h = W^{†/2} z at the top of Γ_Q
    assert mobility_bound(c, loudest).tightness == pytest.approx(1)
    assert filtered_bound(c, torch.ones_like, loudest).tightness == pytest.approx(1)
    window = RealizedWindow(loudest, -tensor(ops.D) @ loudest, -tensor(ops.G) @ loudest)
    assert visibility_bound(c, window).tightness == pytest.approx(1)
    assert sharp_bound(coupling, coupling.matrix).right == pytest.approx(coupling.remainder_norm**2, abs=1e-12)
    lost = forgetful(5)[0]  # with a remainder that is not 0
    assert lost.remainder_norm > 1e-3
    assert sharp_bound(lost, lost.matrix).right == pytest.approx(lost.remainder_norm**2, rel=1e-7, abs=0.0)
    visible, budget = visibility_spectra(c)
    assert (visible <= budget * (1 + 1e-9) + 1e-9).all()
    # Erratum: λ_j(Γ_Q) against λ_j(W) is no bound, it changes with the unit of the test outputs; ours does not.
    louder = dissipation_channels(tensor(ops.W_factor), tensor(ops.D), 10 * tensor(ops.G))
    assert louder.visibility_spectrum[0] > louder.roots[0].square()
    assert visibility_spectrum_bound(louder).holds
    even = visibility_spectrum_bound(dissipation_channels(*(k * torch.eye(3).double() for k in (2, 1, 6))))
    assert (even.left, even.right) == pytest.approx((36, 36))  # G is three times the root of W: 9 · 4 at every index


def test_directions_below_a_cut_off_are_bounded_too():
    """R = diag(1, .05) with a cut-off at 0.01: the second direction is left to the reservoir, and seen most."""
    R, D = torch.diag(torch.tensor([1.0, 0.05])).double(), torch.eye(2).double()
    G, g = torch.tensor([[1.0, 0.5]]).double(), torch.tensor([1.0, 1.0]).double()
    window = RealizedWindow(g, -D @ g, -G @ g)
    A = torch.tensor([[0.3, -2.0]]).double()
    for cutoff in (None, 0.01):
        coupling = Coupling(dissipation_channels(R, D, G, cutoff=cutoff))
        assert coupling.channels.rank == (2 if cutoff is None else 1)
        bounds = window_bounds(coupling, window, predictors=[A], epsilons=[0.001, 0.0025, 0.5, 1.0])
        assert failing(bounds) == []
        sizes = {bound.name: bound.right for bound in bounds}
        # ‖[1, 10]‖ over both directions together, not the larger of 1 and 10.
        assert sizes["visibility"] == pytest.approx((101 * 1.0025) ** 0.5)
        assert mobility_bound(coupling.channels, torch.tensor([1.0, 200.0]).double()).tightness == pytest.approx(1)
    assert sizes["remainder"] == pytest.approx(10 * 1.0025**0.5)  # A_o knows the first direction only
    assert not remainder_bound(coupling, RealizedWindow(g, -D @ g, -G @ g - 20.0)).holds


def test_soft_reservoir_over_the_whole_spectrum():
    ops = operators_of(random_steps(6, count=3))
    c, h = coupling_of(ops).channels, normal(0, 6)
    sides = [(soft_reservoir_bound(c, e), soft_reservoir_bound(c, e, h)) for e in c.roots.square().tolist()]
    assert all(worst.holds and single.holds for worst, single in sides)
    assert sides[0][0].left == pytest.approx(torch.linalg.matrix_norm(tensor(ops.G), 2).item())  # ε = ‖W‖: all of G
    assert all(a.left >= b.left for (a, _), (b, _) in pairwise(sides))


def test_they_fail_on_operators_no_run_has():
    """A G that sees the reservoir, and displacements that the gradient did not cause."""
    ops = operators_of(random_steps(2, never_drawn=2))
    R, D, G = tensor(ops.W_factor), tensor(ops.D), tensor(ops.G)
    seen = G.clone()
    seen[:, -1] += 1.0  # the last output was never drawn
    c = dissipation_channels(R, D, seen)
    unit = torch.eye(6).double()[-1]
    for bound in (
        hard_reservoir_bound(c),
        soft_reservoir_bound(c, c.cutoff, unit),
        mobility_bound(c, unit),
        filtered_bound(c, torch.ones_like, unit),
        visibility_order_bound(c),
    ):
        assert not bound.holds, bound
    # Both sides of each, from the eigenvectors of W.
    values, vectors = torch.linalg.eigh(R.T @ R)
    active = values > c.cutoff
    assert int(active.sum()) == c.rank < 6
    V, visibility = vectors[:, active], torch.linalg.matrix_norm(seen @ vectors[:, active] / values[active].sqrt(), 2)
    h, visibility = normal(3, 6), visibility.square().item()
    moved, spent = (seen @ h).square().sum().item(), visibility * (R @ h).square().sum().item()
    order = torch.linalg.eigvalsh(seen.T @ seen - visibility * R.T @ R)[-1].item() / (visibility * values[-1].item())
    unseen = torch.linalg.matrix_norm(seen - seen @ V @ V.T, 2).item()
    for bound, sides in (
        (hard_reservoir_bound(c), (unseen, 0.0)),
        (mobility_bound(c, h), (moved / visibility, spent / visibility)),
        (filtered_bound(c, torch.ones_like, h), (moved, spent)),
        (visibility_order_bound(c), (order, 0.0)),
    ):
        assert (bound.left, bound.right) == pytest.approx(sides, rel=1e-9), bound
    right = dissipation_channels(R, D, G)
    coupling, g = Coupling(right), normal(1, 6)
    window = RealizedWindow(g, -D @ g, -G @ g + 100.0)
    A = normal(2, 4, 6)
    for bound in (
        visibility_bound(right, window),
        remainder_bound(coupling, window),
        predictor_bound(right, A, window),
        trajectory_bound(right, A, window),
    ):
        assert not bound.holds, bound
        assert bound.tightness > 1
    assert not visibility_spectrum_bound(dissipation_channels(R, D, torch.eye(6).double())).holds
    broken = CumulativeError(torch.eye(2), 2 * torch.eye(2), -torch.eye(2))
    assert not coarse_bound(broken).holds
    assert not Bound("any", "eq", "algebra", 1.0, 0.0).holds
    assert Bound("any", "eq", "algebra", 1.0, 0.0).tightness == float("inf")


@pytest.mark.parametrize("form", ["discrete", "flow"])
def test_both_sides_are_those_of_plain_algebra(form):
    """Each side as a number, by NumPy from R, D and G alone: with wrong sides an inequality can hold as well."""
    ops, rng = operators_of(random_steps(7, never_drawn=1)), np.random.default_rng(0)
    values, vectors = np.linalg.eigh(ops.W_factor.T @ ops.W_factor)
    active = values > 1e-10 * values[-1]
    assert active.sum() == 5
    C_S, C_Q = (X @ vectors[:, active] / np.sqrt(values[active]) for X in (ops.D, ops.G))
    left, roots, right = np.linalg.svd(C_S[:, 1:], full_matrices=False)  # one direction unseen: a remainder is left
    D = left @ np.diag(roots) @ right @ np.diag(np.sqrt(values[active][1:])) @ vectors[:, active][:, 1:].T
    C_S = D @ vectors[:, active] / np.sqrt(values[active])
    A_o = C_Q @ np.linalg.pinv(C_S, rcond=1e-9)
    A, g, moved_S, moved_Q = (rng.normal(size=size) for size in ((4, 6), 6, 6, 4))
    sources = (rng.normal(size=6), rng.normal(size=4)) if form == "discrete" else (np.zeros(6), np.zeros(4))
    spent = g @ ops.W_factor.T @ ops.W_factor @ g if form == "discrete" else 0.37

    def norm(X):
        return np.linalg.norm(X, 2)

    def missed(A):
        return norm(moved_Q - sources[1] - A @ (moved_S - sources[0]))

    remainder, error = C_Q - A_o @ C_S, C_Q - A @ C_S
    assert norm(remainder) > 0.1 * norm(C_Q)
    order = np.linalg.eigvalsh(remainder @ remainder.T - error @ error.T)[-1] / norm(error) ** 2
    total = rng.normal(size=(4, 4)) @ rng.normal(size=(4, 4))
    coupling = Coupling(dissipation_channels(tensor(ops.W_factor), tensor(D), tensor(ops.G)))
    channels, lifted = coupling.channels, CumulativeError(tensor(total), tensor(2 * total), tensor(-total))
    window = RealizedWindow(*map(tensor, (g, moved_S, moved_Q, *sources)), loss_drop=0.37)
    seen, allowed = np.linalg.eigvalsh(ops.G.T @ ops.G)[::-1], norm(C_Q) ** 2 * np.where(active, values, 0.0)[::-1]
    np.testing.assert_allclose(torch.stack(visibility_spectra(channels)), [seen, allowed], rtol=1e-9, atol=1e-12)
    worst = (seen - allowed).argmax()
    for bound, sides in (
        (visibility_spectrum_bound(channels), (seen[worst], allowed[worst])),
        (visibility_bound(channels, window, form), (missed(0 * A), norm(C_Q) * spent**0.5)),
        (remainder_bound(coupling, window, form), (missed(A_o), norm(remainder) * spent**0.5)),
        (predictor_bound(channels, tensor(A), window, form), (missed(A), norm(error) * spent**0.5)),
        (trajectory_bound(channels, tensor(A), window, form), (missed(A) ** 2, norm(error) ** 2 * spent)),
        (cumulative_bound(channels, tensor(A), lifted, window, form), (missed(A) ** 2, norm(total) * spent)),
        (path_error_order_bound(coupling, tensor(A)), (order, 0.0)),
        (sharp_bound(coupling, tensor(A)), (norm(remainder) ** 2, norm(error) ** 2)),
        (coarse_bound(lifted), (2 * norm(total), norm(total))),
        (anchored_bound(coupling, lifted), (norm(remainder) ** 2, norm(total))),
    ):
        assert (bound.left, bound.right) == pytest.approx(sides, rel=1e-9), bound
    # Above, the worst index has 0 on both sides; where every output was drawn it is the one with the least slack.
    ops = operators_of(random_steps(7))
    seen, values = (np.linalg.eigvalsh(X.T @ X)[::-1] for X in (ops.G, ops.W_factor))
    allowed = norm(ops.G @ np.linalg.pinv(ops.W_factor)) ** 2 * values
    worst, bound = (seen - allowed).argmax(), visibility_spectrum_bound(coupling_of(ops).channels)
    assert (bound.left, bound.right) == pytest.approx((seen[worst], allowed[worst]), rel=1e-7)
    assert bound.right > 0


def test_what_does_not_fit_is_refused():
    ops = operators_of(random_steps(0))
    coupling, g = coupling_of(ops), normal(0, 6)
    c = coupling.channels
    window = RealizedWindow(g, -tensor(ops.D) @ g, -tensor(ops.G) @ g)
    with pytest.raises(DataError, match="needs the loss drop"):
        visibility_bound(c, window, "flow")
    with pytest.raises(DataError, match="not negative, got -1"):
        visibility_bound(c, RealizedWindow(g, g, tensor(ops.G) @ g, loss_drop=-1.0), "flow")
    with pytest.raises(DataError, match="knows no source"):
        visibility_bound(c, RealizedWindow(g, g, tensor(ops.G) @ g, train_source=g, loss_drop=1.0), "flow")
    with pytest.raises((HyperparameterError, TypeError), match="form"):
        visibility_bound(c, window, "euler")  # pyright: ignore
    with pytest.raises(DataError, match=r"test_displacement must be a vector \[4\]"):
        visibility_bound(c, RealizedWindow(g, g, g))
    with pytest.raises(DataError, match="at least the cut-off"):
        soft_reservoir_bound(c, 0.0)
    with pytest.raises(DataError, match="phi must map"):
        filtered_bound(c, lambda values: 1 / values, g)
    with pytest.raises(DataError, match=r"h must be a vector \[6\]"):
        mobility_bound(c, g[:3])
