"""Controls of a gate open as much as the gate, and differ in what they leave out."""

import pytest
import torch

from poprisk_lab.recipes.openings import OPENINGS, OpenedAdamW

Q = torch.rand(4000, generator=torch.Generator().manual_seed(0)).pow(4)


def opened(opening):
    return OpenedAdamW([torch.zeros(1, requires_grad=True)])._opened(Q, opening)


@pytest.mark.parametrize("opening", ["gate", "mean", "shuffled", "random"])
def test_every_control_opens_as_much_as_the_gate(opening):
    assert float(opened(opening).mean()) == pytest.approx(float(Q.mean()), rel=0.1)


def test_what_the_controls_leave_out():
    shuffled = opened("shuffled")
    assert torch.equal(shuffled.sort().values, Q.sort().values)
    assert not torch.equal(shuffled, Q)
    assert set(opened("random").unique().tolist()) == {0.0, 1.0}
    assert opened("mean").dim() == 0


def test_the_relative_gate_is_between_half_of_adamw_and_adamw():
    relative = opened("relative")
    assert float(relative.max()) == 1
    assert 0.5 <= float(relative.min()) < 0.51
    assert 0.5 <= float(relative.mean()) <= 1


@pytest.mark.parametrize("opening", OPENINGS)
def test_it_descends(opening):
    w = torch.full((8,), 3.0, requires_grad=True)
    optimizer = OpenedAdamW([w], lr=0.05, opening=opening, strength=1.0)
    for _ in range(300):
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()
    assert float(w.detach().square().sum()) < 1
