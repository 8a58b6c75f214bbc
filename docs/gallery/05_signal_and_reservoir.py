"""
Signal channel and reservoir
============================

A training run changes its training outputs in some directions, the *signal channel*, and not in
others, the *reservoir*. No test output depends on the reservoir. This example computes both from
the recorded steps of a small regression.
"""

# %%
# Noisy values of a curve, and a test grid on the curve itself. A few inputs occur twice, with
# different noise: no network can tell the two apart, so their difference must end in the
# reservoir.

import math
from functools import partial

import matplotlib.pyplot as plt
import torch

from poprisk import Problem, Window, dissipation_channels, train
from poprisk.operators import Coupling

generator = torch.Generator().manual_seed(0)
once = torch.rand(24, 1, generator=generator, dtype=torch.float64) * 2 - 1
x = torch.cat([once, once[:6]])  # the last six are repeated
y = torch.sin(math.pi * x) + 0.3 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
grid = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(-1, 1)


def network():
    """Smooth, and wide enough to bend."""
    return torch.nn.Sequential(torch.nn.Linear(1, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))


problem = Problem(network, "squared", x, y, test=(grid, torch.sin(math.pi * grid)))
run = train(
    problem, partial(torch.optim.SGD, lr=0.1, momentum=0.9), 60, dtype=torch.float64, progress=False
)

# %%
# The operators of the whole run. They do not assume a fixed kernel or small steps, so the predicted
# change of the test outputs equals the actual one:

ops = Window.of_run(run).dense_operators()
deviation = (ops.predicted_test - ops.test_displacement).norm() / ops.test_displacement.norm()
print(f"predicted against true test displacement: relative error {deviation:.0e}")

# %%
# W measures how much of each direction the steps used. Directions for which it is zero up to
# rounding form the reservoir: the six differences of repeated inputs, and directions too fine for
# this network in this time.

channels = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer)
print(
    f"signal channel: {channels.rank} of {len(x)} directions, reservoir: {len(x) - channels.rank}"
)

difference = torch.zeros(len(x), dtype=torch.float64)
difference[0], difference[24] = 1, -1  # one example against its double
print(f"used up of a difference of doubles: {channels.dissipation(difference):.0e}")
print(f"used up of the first direction:     {channels.dissipation(channels.vectors[:, 0]):.0e}")

# %%
# The spectrum falls over many decades: even in the signal channel, only the first directions
# changed much. On the right, these directions as functions of the input: smooth ones come first.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
values = channels.spectrum.roots.square()
known = torch.arange(1, len(values) + 1)
axes[0].semilogy(known, values.clamp_min(1e-32), "o", ms=4, label="signal channel")
axes[0].semilogy(
    known[channels.rank :], values[channels.rank :].clamp_min(1e-32), "o", ms=4, label="reservoir"
)
axes[0].set(xlabel="direction", title="eigenvalues of W")
axes[0].legend(frameon=False)
by_input = x[:, 0].argsort()
for direction in range(3):
    axes[1].plot(
        x[by_input, 0], channels.vectors[by_input, direction], ".-", label=f"{direction + 1}"
    )
axes[1].set(xlabel="input", title="leading directions")
axes[1].legend(frameon=False, title="direction")
plt.show()

# %%
# The share of the output gradient in each: the part in the reservoir is noise that training could
# not reach, and no test output depends on it.

g = ops.output_gradient
hidden = channels.reservoir.to_dense() @ g
print(f"share of the output gradient in the reservoir: {(hidden.norm() / g.norm()) ** 2:.3f}")
print(f"test displacement that it caused:              {(ops.test_transfer @ hidden).norm():.0e}")

# %%
# On the signal channel, test outputs follow training outputs: one linear map takes the training
# displacement to the test displacement. Steps of finite size leave a remainder.

coupling = Coupling(channels)
guess = coupling.predict(ops.train_displacement, ops.sources.train, ops.sources.test)
deviation = (guess - ops.test_displacement).norm() / ops.test_displacement.norm()
print(f"relative error of the coupling: {deviation:.0e}")
