"""No predictor beats the remainder, linear or not; when an exact one exists; the split of the path error."""

import pytest
import torch
from coupling_cases import coupling_of, forgetful, norm, normal, overshoot, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from oracles.run_operators import operators_of, quadratic_run, random_steps
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import (
    Coupling,
    path_error,
    whitened_error,
)
from poprisk_lab.theory.path_error_split import path_error_split
from poprisk_lab.theory.predictors import nonlinear_bound, predictor_error, transfer_equivalences, transfer_norm


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_no_predictor_beats_the_remainder(seed):
    """cor:linear_predictor_optimal: the floor holds for linear and nonlinear predictors and A_o attains it."""
    coupling, _, D, G = forgetful(seed)
    c, A_o = coupling.channels, coupling.matrix
    B, offset = normal(seed, 4, 6), normal(seed + 1, 4)
    for predictor in (
        lambda x: A_o @ x,
        lambda x: B @ x,
        lambda x: torch.tanh(A_o @ x),
        lambda x: A_o @ x + offset,
        lambda x: A_o @ (x * x.norm()),
    ):
        error = predictor_error(coupling, predictor)
        assert error.at_least >= coupling.remainder_norm * (1 - 1e-9)
        attained = (G @ error.direction - predictor(D @ error.direction)).norm() / c.dissipation(error.direction) ** 0.5
        assert attained.item() == pytest.approx(error.at_least, rel=1e-6)
    assert norm(whitened_error(c, A_o)) == pytest.approx(coupling.remainder_norm, rel=1e-8)
    assert predictor_error(coupling, lambda x: A_o @ x).at_least == pytest.approx(coupling.remainder_norm, rel=1e-8)
    assert predictor_error(coupling, lambda x: B @ x).at_least <= norm(whitened_error(c, B)) * (1 + 1e-9)
    # The supremum over directions that the train outputs do not see is the same number.
    kernel = torch.linalg.svd(c.reduced_train)[2][c.train_rank :]
    assert norm(c.reduced_test @ kernel.T) == pytest.approx(coupling.remainder_norm, rel=1e-8)


@pytest.mark.parametrize("guess", [1.0, -1.0])
def test_a_lucky_guess_at_an_unseen_direction_is_wrong_at_its_opposite(guess):
    """The step of the proof that needs both signs: D h = D(-h) = 0, so a predictor must say the same for both."""
    coupling = overshoot()
    error = predictor_error(coupling, lambda x: torch.full_like(x, guess), scales=(1.0,), random_probes=0)
    assert error.floor == pytest.approx(1.0)
    assert error.at_least == pytest.approx(2.0)


def test_the_four_equivalences_agree():
    """cor:transfer_equivalences: all 0 for a squared-loss run, none of them for a transfer that forgets."""
    run = quadratic_run(3, batch=5, rule="gd", curvature=1.0)
    exact = coupling_of(operators_of(run.steps))
    numbers = transfer_equivalences(exact)
    D, G = exact.channels.train_transfer, exact.channels.test_transfer
    assert exact.channels.unresolved == 0
    for value in (numbers.remainder, numbers.kernel_inclusion, numbers.range_inclusion, numbers.semidefinite_order):
        assert abs(value) < 1e-10
    assert transfer_norm(D, G) ** 2 == pytest.approx(numbers.order_constant)
    assert norm(exact.matrix - G @ torch.linalg.pinv(D, rtol=1e-12)) < 1e-9 * norm(exact.matrix)  # Ψ♯ = G D†
    order = numbers.order_constant * D.T @ D - G.T @ G
    assert torch.linalg.eigvalsh(order)[0] > -1e-10 * norm(order)
    coupling, _, D, G = forgetful(4)
    numbers = transfer_equivalences(coupling)
    for value in (numbers.remainder, numbers.kernel_inclusion, numbers.range_inclusion, numbers.semidefinite_order):
        assert value > 1e-3
    blind = torch.linalg.svd(D)[2][coupling.channels.rank - 2 :].T  # two forgotten directions and the reservoir
    assert numbers.kernel_inclusion == pytest.approx(norm(G @ blind) / norm(G), rel=1e-8)


def test_the_four_equivalences_where_training_outputs_never_moved():
    """D = 0: all that moved on the test set is unseen, and a test set that did not move either is transferred."""
    R, D = torch.eye(2).double(), torch.zeros(2, 2).double()
    numbers = transfer_equivalences(Coupling(dissipation_channels(R, D, torch.tensor([[2.0, 3.0]]).double())))
    for value in (numbers.remainder, numbers.kernel_inclusion, numbers.range_inclusion, numbers.semidefinite_order):
        assert value == pytest.approx(1.0)
    assert numbers.order_constant == 0.0
    still = transfer_equivalences(Coupling(dissipation_channels(R, D, torch.zeros(1, 2).double())))
    assert still == type(still)(0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_generator_of_the_cpu_serves_channels_anywhere(device):
    ops = operators_of(random_steps(4, never_drawn=1))
    channels = dissipation_channels(*(tensor(X).to(device) for X in (ops.W_factor, ops.D, ops.G)))
    generator, twin = (torch.Generator().manual_seed(7) for _ in range(2))
    error = predictor_error(Coupling(channels), lambda x: torch.tanh(x[:4]), generator=generator)
    assert error.direction.device == channels.roots.device
    assert error.at_least >= error.floor - error.rounding
    torch.randn(channels.rank, 32, generator=twin, dtype=torch.float64)  # the numbers came from the generator given
    assert torch.equal(generator.get_state(), twin.get_state())


def test_a_steep_predictor_at_a_direction_that_is_only_nearly_lost():
    """D moves the second direction by 1e-16: it counts as lost, yet a slope of 1e16 predicts it. The report says so."""
    R, D, G = torch.eye(2).double(), torch.diag(torch.tensor([1.0, 1e-16])).double(), torch.eye(2).double()
    coupling = Coupling(dissipation_channels(R, D, G))
    assert coupling.channels.unresolved == 1
    exact = torch.linalg.inv(D)
    steep = predictor_error(coupling, lambda x: exact @ x)
    assert steep.at_least < 1e-6 < steep.floor == pytest.approx(1.0)
    assert steep.at_least >= steep.floor - steep.rounding
    flat = predictor_error(coupling, lambda x: x)
    assert flat.rounding < 1e-12
    assert flat.at_least >= flat.floor - flat.rounding
    assert_close(coupling.coupling_remainder, coupling.remainder)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_split_of_the_path_error(seed):
    """thm:path_error_split, with a remainder that is not 0."""
    coupling, W, D, G = forgetful(seed)
    c, A_o = coupling.channels, coupling.matrix
    assert coupling.remainder_norm > 1e-3
    W_pinv = torch.linalg.pinv(W, rtol=1e-11, hermitian=True)
    for A in (normal(seed, 4, 6), A_o, torch.zeros(4, 6).double()):
        split = path_error_split(coupling, A)
        assert_close(split.total, (G - A @ D) @ W_pinv @ (G - A @ D).T, rtol=1e-6, atol=1e-6)
        assert split.mismatch < 1e-9
        assert_close(path_error(c, A), split.total)
        assert torch.linalg.eigvalsh(split.total - split.irreducible)[0] > -1e-9 * norm(split.total)
    assert norm(path_error_split(coupling, A_o).penalty) < 1e-15 * norm(A_o @ c.train_channel) ** 2


def test_nonlinear_predictors_are_above_the_floor():
    coupling = coupling_of(operators_of(random_steps(9)))
    error = predictor_error(coupling, lambda x: torch.tanh(coupling.matrix @ x))
    bound = nonlinear_bound(error)
    assert bound.holds
    assert bound.right > 1e-3
    h, c = error.direction, coupling.channels
    missed = c.test_transfer @ h - torch.tanh(coupling.matrix @ c.train_transfer @ h)
    assert bound.right == pytest.approx(missed.norm().item() / c.dissipation(h) ** 0.5)
    C_S, C_Q = c.train_channel, c.test_channel
    assert bound.left == pytest.approx(norm(C_Q - C_Q @ torch.linalg.pinv(C_S, rtol=1e-9) @ C_S), abs=1e-9)
    lost = forgetful(9)[0]
    bound = nonlinear_bound(predictor_error(lost, lambda x: torch.tanh(lost.matrix @ x)))
    C_S, C_Q = lost.channels.train_channel, lost.channels.test_channel
    assert bound.left == pytest.approx(norm(C_Q - C_Q @ torch.linalg.pinv(C_S, rtol=1e-9) @ C_S))


def test_what_does_not_fit_is_refused():
    coupling, *_ = forgetful(0)
    with pytest.raises(HyperparameterError, match="scales must be positive"):
        predictor_error(coupling, lambda x: x, scales=(0.0,))
    with pytest.raises(DataError, match="what the predictor returns"):
        predictor_error(coupling, lambda x: x)
    empty = Coupling(dissipation_channels(torch.zeros(1, 2), torch.zeros(2, 2), torch.zeros(1, 2)))
    with pytest.raises(DataError, match="signal channel is empty"):
        predictor_error(empty, lambda x: x[:1])
