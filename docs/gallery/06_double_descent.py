"""
Double descent from one kernel
==============================

The error of a fit to noisy data can fall, rise and fall again as its capacity grows. For a fixed
kernel no training is needed to know where: the risk at every capacity follows from the kernel, the
clean targets and the noise.
"""

# %%
# A regression on random features: few examples, more features than examples, and a smooth target.

import matplotlib.pyplot as plt
import torch

from poprisk.theory.random_features import random_feature_task
from poprisk_lab.theory.double_descent import simulate_predictive_ranks
from poprisk_lab.theory.predictive_rank import predictive_rank_path

width, sigma = 60, 0.5
task = random_feature_task(seed=0, dimension=6)
problem = task.problem(width)
print(f"{len(task.signal)} examples, {width} features, kernel of rank {problem.rank}")

# %%
# Capacity is the number of fitted predictive directions, ordered by their effect on the test
# outputs. Each direction adds its noise and removes its share of the bias; the risk rises if its
# noise is larger than its signal.

path = predictive_rank_path(problem, task.signal, noise=sigma**2)
print("local peaks at rank:", path.local_peaks)
print("the highest at rank:", path.peak)

# %%
# For comparison, actual fits: a least-norm regression at every rank, for many draws of the noise.
# The simulation uses none of the formulas.

features, test_features = task.features(task.inputs, width), task.features(task.test_inputs, width)
generator = torch.Generator().manual_seed(1)
simulated = simulate_predictive_ranks(
    features, test_features, task.signal, sigma, draws=400, generator=generator
)
deviations = ((path.risks - simulated.mean).abs() / simulated.standard_error)[1:]  # rank 0 has none
print(f"largest distance of theory and simulation: {deviations.max():.1f} standard errors")

# %%
# Bias, variance and their sum, with the simulated fits:

ranks = range(problem.rank + 1)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
axes[0].plot(ranks, path.risks, label="risk", lw=2)
axes[0].plot(ranks, path.bias, "--", label="bias")
axes[0].plot(ranks, path.variance, ":", label="variance")
axes[0].errorbar(
    ranks, simulated.mean, 2 * simulated.standard_error, fmt="k.", ms=4, label="simulated ± 2 s.e."
)
for peak in path.local_peaks:
    axes[0].axvline(peak, color="0.6", lw=0.8)
axes[0].set(xlabel="predictive rank", title="risk along one kernel")
axes[0].legend(frameon=False)
axes[1].bar(
    range(1, problem.rank + 1),
    path.increments,
    color=["C3" if x > 0 else "C0" for x in path.increments],
)
axes[1].set(xlabel="predictive rank", title="what each direction adds to the risk")
plt.show()

# %%
# There is a peak where a red bar is followed by a blue one. ``poprisk explore`` writes a page with
# the same curves and sliders for noise, rank, ridge and training time, for this kernel or your own.
