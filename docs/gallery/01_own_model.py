"""
Your own model in three lines
=============================

Describe the training problem, train while every step is recorded, and estimate the loss on new
data, without a validation set. This works for any module and any data.
"""

# %%
# The data, from scikit-learn: ten measurements of patients, and the progression of their diabetes
# a year later. More than half are held out, to check the estimate at the end.

from functools import partial

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes

from poprisk import Problem, population_risk, train

measured, progress = load_diabetes(return_X_y=True)
x, y = (torch.as_tensor(each, dtype=torch.float32) for each in (measured, progress[:, None]))
x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
used, aside = order[:200], order[200:]

# %%
# Your model is a module class, or a function that builds a module.


class Regressor(torch.nn.Module):
    """Two layers, nothing special."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(10, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )

    def forward(self, x):
        """One number for each row."""
        return self.layers(x)


# %%
# The three lines. If you have your own training loop, use :class:`poprisk.runs.Recorder` instead of
# ``train``. With ``path="runs/first"`` the run is saved in a directory, for which ``poprisk report
# runs/first`` writes a report.

problem = Problem(Regressor, "squared", x[used], y[used], arguments={"width": 16})
run = train(problem, partial(torch.optim.AdamW, lr=0.02), steps=100, batch_size=50, progress=False)
risk = population_risk(run)

print(f"training loss    {risk.training_loss:.3f}")
print(f"population risk  {risk}")

# %%
# The estimate has a standard error and says whether it is valid. For comparison, the loss on the
# held-out patients:

model = run.module()
torch.nn.utils.vector_to_parameters(run.weights(run.num_steps), model.parameters())
with torch.no_grad():
    losses = 0.5 * (model(x[aside]) - y[aside]).square()
error = losses.std() / len(losses) ** 0.5
print(f"loss of those put aside  {losses.mean():.3f} ± {error:.3f}")

distance = (losses.mean() - risk.value).abs() / (error**2 + risk.standard_error**2).sqrt()
print(f"distance of the two: {distance:.1f} of their common standard error")

# %%
# Both, with their standard errors:

figure, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
names = ["training loss", "estimated risk", "loss of those put aside"]
values = [risk.training_loss, risk.value, losses.mean().item()]
ax.errorbar(values, names, xerr=[0, risk.standard_error, error.item()], fmt="o", capsize=4)
ax.set(xlabel="half the squared error", ylim=(2.5, -0.5))
plt.show()

# %%
# Both numbers have a standard error, and they should agree within these. Their distance from the
# training loss shows how much the network has memorized.
