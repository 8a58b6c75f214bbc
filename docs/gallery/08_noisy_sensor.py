"""
Know when to stop, without validation data
==========================================

A sensor measures a smooth signal with noise. A network fits the signal first and the noise later.
:class:`poprisk.RiskMeter` reads the population risk along one recorded training, without a single
example kept aside, and so shows where the training should have ended.
"""

# %%
# 60 noisy measurements, and a network with 193 weights.

from functools import partial

import matplotlib.pyplot as plt
import torch

from poprisk import Problem, RiskMeter, train

generator = torch.Generator().manual_seed(2)
time = torch.rand(60, 1, generator=generator) * 2 - 1


def signal(t):
    """What the sensor would measure without noise."""
    return torch.sin(4 * t) * torch.exp(-(t**2))


measured = signal(time) + 0.35 * torch.randn(60, 1, generator=generator)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
problem = Problem(network, "squared", time, measured)
run = train(problem, partial(torch.optim.AdamW, lr=0.02), steps=400, progress=False)

# %%
# The risk at 12 moments of that training. Each reading has a standard error, and says whether it is
# valid.

meter = RiskMeter().read(run, steps=12)
for reading in meter.readings:
    mark = "" if reading.risk.valid else "  (not valid)"
    print(
        f"step {reading.step:4d}: training loss {reading.risk.training_loss:.3f}, risk "
        f"{reading.risk.value:.3f} ± {reading.risk.standard_error:.3f}{mark}"
    )
print(f"lowest estimated risk: step {meter.best_step}")

# %%
# What the meter could not see: the error on 2,000 new measurements with the same noise.

new = torch.rand(2000, 1, generator=generator) * 2 - 1
noisy = signal(new) + 0.35 * torch.randn(2000, 1, generator=generator)
model, steps, truth = run.module(), [reading.step for reading in meter.readings], []
for step in steps:
    torch.nn.utils.vector_to_parameters(run.weights(step), model.parameters())
    with torch.no_grad():
        truth.append(0.5 * (model(new) - noisy).square().mean().item())

figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
ax.plot(
    steps, [r.risk.training_loss for r in meter.readings], color="#8A8A8A", label="training loss"
)
ax.plot(steps, truth, color="#222222", label="loss on new measurements")
valid = [reading for reading in meter.readings if reading.risk.valid]
ax.errorbar(
    [reading.step for reading in valid],
    [reading.risk.value for reading in valid],
    [reading.risk.standard_error for reading in valid],
    fmt="o",
    capsize=3,
    color="#0072B2",
    label="estimated from the run alone",
)
ax.axvline(meter.best_step, color="#0072B2", linestyle=":", linewidth=1)
ax.set(xscale="log", yscale="log", xlabel="step", ylabel="half the squared error")
ax.legend(frameon=False)
plt.show()

# %%
# The estimates follow the loss on new data, with errors that say how far to trust them. The dotted
# line is the moment that they would choose.
