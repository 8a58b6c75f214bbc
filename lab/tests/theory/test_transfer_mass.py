"""Transfer mass against the operators, and which directions saturate first."""

import math

import pytest
import torch
from spectral_cases import frozen_case
from torch.testing import assert_close

import oracles.frozen_kernel as oracle
from poprisk.errors import DataError
from poprisk.theory.frozen import frozen_problem
from poprisk_lab.theory.transfer_mass import (
    frozen_visibility,
    grouped_mass,
    mobility_groups,
    transfer_mass,
    transfer_operator,
    transfer_spectra,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def kernels_of(case):
    J_S, J_Q = case[0].numpy(), case[1].numpy()
    return J_S @ J_S.T, J_Q @ J_S.T


def test_transfer_mass_is_that_of_the_operators():
    case = frozen_case()
    problem, n = case[2], 5
    K, H = kernels_of(case)
    for t in (0.3, 4.0):
        G = n * H @ oracle.pseudo_inverse(K) @ oracle.gradient_flow(K, n, t)
        T = problem.left.T @ torch.from_numpy(G.T @ G) @ problem.left
        assert_close(transfer_operator(problem, t), T, **EXACT)
        assert_close(transfer_mass(problem, [t])[0], T.diagonal(), **EXACT)
        values = torch.linalg.eigvalsh(T).flip(0)
        assert_close(transfer_spectra(problem, [t])[0], values[: min(problem.test_map.shape)], **EXACT)
        W = torch.from_numpy(n / 2 * oracle.gradient_flow(K, n, 2 * t))
        whiten = torch.linalg.inv(torch.linalg.cholesky(problem.left.T @ W @ problem.left))
        assert_close(
            torch.linalg.eigvalsh(frozen_visibility(problem, t)), torch.linalg.eigvalsh(whiten @ T @ whiten.T), **EXACT
        )
    assert_close(frozen_visibility(problem, math.inf), 2 * n * problem.visibility, **EXACT)
    assert_close(transfer_mass(problem, [math.inf])[0], n**2 * problem.visibility.diagonal(), **EXACT)


def test_fast_directions_saturate_first():
    problem = frozen_problem(torch.diag(torch.tensor([100.0, 1.0])).double(), torch.tensor([[100.0, 10.0]]).double())
    groups = mobility_groups(problem, [10.0])
    mass = grouped_mass(problem, [0.1, 1e4], groups)
    assert mass[0, 0] > 0.9 * mass[1, 0]
    assert mass[0, 1] < 0.01 * mass[1, 1]
    assert mass[0, 0] > mass[0, 1]
    assert mass[1, 1] > mass[1, 0]  # the slow direction is seen more, and overtakes
    assert_close(mass.sum(dim=1), transfer_mass(problem, [0.1, 1e4]).sum(dim=1))


def test_limits_that_do_not_descend_are_refused():
    with pytest.raises(DataError, match="descend"):
        mobility_groups(frozen_case()[2], [1.0, 2.0])
