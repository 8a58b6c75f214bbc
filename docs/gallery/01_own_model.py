"""
Your own model in three lines
=============================

Any module, any data: say what is trained, train it while everything is recorded, and ask what the
run will be worth on data it has not seen, without a validation set.
"""

# %%
# The data: ten measurements of patients and the progress of their diabetes a year later, as
# scikit-learn ships them. More than half are put aside, so that we can see at the end whether the
# estimate was right; it never sees them.

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
# A model of your own is a module, or a function that makes one.


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
# The three lines. ``train`` is for those who have no loop; :class:`poprisk.runs.Recorder` goes
# around a loop that is there already. With ``path="runs/first"`` the run is kept in a folder, and
# ``poprisk report runs/first`` reads it.

problem = Problem(Regressor, "squared", x[used], y[used], arguments={"width": 16})
run = train(problem, partial(torch.optim.AdamW, lr=0.02), steps=100, batch_size=50, progress=False)
risk = population_risk(run)

print(f"training loss    {risk.training_loss:.3f}")
print(f"population risk  {risk}")

# %%
# The estimate comes with a standard error and says whether it may be believed. What those put
# aside say, who took no part in any of it:

model = run.module()
torch.nn.utils.vector_to_parameters(run.weights(run.num_steps), model.parameters())
with torch.no_grad():
    losses = 0.5 * (model(x[aside]) - y[aside]).square()
error = losses.std() / len(losses) ** 0.5
print(f"loss of those put aside  {losses.mean():.3f} ± {error:.3f}")

distance = (losses.mean() - risk.value).abs() / (error**2 + risk.standard_error**2).sqrt()
print(f"distance of the two: {distance:.1f} of their common standard error")

# %%
# Side by side, with the error of each:

figure, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
names = ["training loss", "estimated risk", "loss of those put aside"]
values = [risk.training_loss, risk.value, losses.mean().item()]
ax.errorbar(values, names, xerr=[0, risk.standard_error, error.item()], fmt="o", capsize=4)
ax.set(xlabel="half the squared error", ylim=(2.5, -0.5))
plt.show()

# %%
# Both numbers have an error, and the two should agree within what these allow. The distance from
# the training loss to either is what the network has memorized.
