"""Peer rules against a public package of optimizers, in the versions whose rules are right."""

from importlib.metadata import version

import pytest
import torch
from torch.testing import assert_close

from poprisk_lab.engine.peers import PEERS

package = pytest.importorskip("pytorch_optimizer")
# 3.9 divides M-SVAG's mean by β^t, and 3.11's foreach AdaBelief forgets the mean's bias correction
if int(version("pytorch_optimizer").split(".")[0]) < 4:
    pytest.skip("pytorch_optimizer before 4.0 is wrong", allow_module_level=True)

LR, DECAY = 1e-2, 0.1
CASES = {
    "msvag": (
        lambda weights, foreach: package.MSVAG(weights, lr=LR, beta=0.9, foreach=foreach),
        {"beta1": 0.9},
        0.0,  # the package's M-SVAG has no weight decay
        1e-12,
    ),
    "adabelief": (
        lambda weights, foreach: package.AdaBelief(
            weights, lr=LR, betas=(0.9, 0.999), eps=1e-16, weight_decay=DECAY, rectify=False, foreach=foreach
        ),
        {"beta1": 0.9, "beta2": 0.999, "eps": 1e-16},
        DECAY,
        1e-12,
    ),
    "grokfast": (
        lambda weights, foreach: package.GrokFastAdamW(
            weights, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY, normalize_lr=False, eps=1e-8, foreach=foreach
        ),
        {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "alpha_ema": 0.98, "lamb": 2.0},
        DECAY,
        1e-8,  # the package takes the larger of √v̂ and ϵ, we add them as Adam does
    ),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_same_path_as_the_package(name, foreach):
    make, h, decay, tolerance = CASES[name]
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1, 50, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(w.clone())
    optimizer = make([theirs], foreach)
    state = {key: torch.zeros_like(w) for key in PEERS[name].states}
    for t in range(1, 61):
        noise = torch.randn(1, 50, generator=generator, dtype=torch.float64)
        g = torch.linspace(-2, 2, 50, dtype=torch.float64) + noise
        u, state = PEERS[name].direction(g, state, h, t)
        w = w - LR * u - LR * decay * w
        theirs.grad = g.clone()
        optimizer.step()
        assert_close(w, theirs.detach(), rtol=0, atol=tolerance)


def test_same_mask_as_the_package():
    from pytorch_optimizer.base.optimizer import BaseOptimizer

    generator = torch.Generator().manual_seed(0)
    h = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    state = {key: torch.zeros(1, 50, dtype=torch.float64) for key in ("m", "v")}
    for t in range(1, 61):
        g = torch.randn(1, 50, generator=generator, dtype=torch.float64)
        masked, _ = PEERS["adamw"].direction(g, state, h, t)
        BaseOptimizer.apply_cautious(masked, g)
        u, state = PEERS["cautious"].direction(g, state, h, t)
        assert_close(u, masked, rtol=1e-12, atol=0)
