"""Small problems that a run can rebuild: pictures of two kinds, and a noisy curve with texts; and calls of commands."""

import pytest
import torch
from torch import Tensor, nn

from poprisk import cli
from poprisk.runs._problem import Problem

WRONG = 3


def call(capsys, *arguments):
    """Exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def network(inputs: int, outputs: int, width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def _pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """8 x 8 pixels, bright in the upper half (0) or the lower one (1)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    x = 0.4 * torch.rand(n, 8, 8, generator=generator)
    x[labels == 0, :4] += 0.6
    x[labels == 1, 4:] += 0.6
    return x.flatten(1), labels


def pictures(n: int = 28) -> Problem:
    x, labels = _pictures(n, seed=1)
    labels[:WRONG] = 1 - labels[:WRONG]
    arguments = {"inputs": 64, "outputs": 2}
    return Problem(network, "cross_entropy", x, labels, name="halves", arguments=arguments, test=_pictures(20, seed=2))


def truth(x: Tensor) -> Tensor:
    return torch.sin(2 * x[:, :1]) + x[:, 1:2]


def chance() -> Problem:
    """Labels that nothing but memory can know, in training and test alike."""
    generator = torch.Generator().manual_seed(3)
    x, q = torch.randn(20, 12, generator=generator), torch.randn(40, 12, generator=generator)
    y, z = (torch.randint(2, (len(inputs),), generator=generator) for inputs in (x, q))
    return Problem(nn.Linear, "cross_entropy", x, y, arguments={"in_features": 12, "out_features": 2}, test=(q, z))


HOSTILE = "</script><img src=x onerror=alert(1)>"


def curve(more: str = "") -> Problem:
    generator = torch.Generator().manual_seed(0)
    x, q = torch.randn(24, 2, generator=generator), torch.randn(16, 2, generator=generator)
    y = truth(x) + 0.3 * torch.randn(24, 1, generator=generator)
    return Problem(
        network,
        "squared",
        x,
        y,
        name=f"curve {HOSTILE}",
        arguments={"inputs": 2, "outputs": 1},
        test=(q, truth(q)),
        show=lambda i: f"secret point {i} {HOSTILE}{more}",
    )
