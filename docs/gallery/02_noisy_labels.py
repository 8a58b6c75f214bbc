"""
Train on noisy labels
=====================

Four of ten labels are wrong, and the network is large enough to learn every one of them by heart.
AdamW does; what :class:`poprisk.PopRiskAdamW` does in its place is seen below.
"""

# %%
# The data: handwritten digits of 8 × 8 pixels. Labels to train on are replaced by wrong ones at
# random; those of the test set are right.

import warnings

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from poprisk import PopRiskAdamW
from poprisk.errors import ClosedGateWarning
from poprisk.runs import digits_split, replace_labels

split = digits_split(seed=0, train_size=1000)
spoiled = replace_labels(
    split.train_labels, 0.4, num_classes=10, generator=torch.Generator().manual_seed(0)
)
print(f"{int(spoiled.wrong.sum())} of {len(spoiled.labels)} labels are wrong")

# %%
# An ordinary loop. Two things are measured along the way: accuracy on clean test images, and the
# share of the wrong labels that the network has learned to repeat. (Should its gate all but close,
# the optimizer would say so once. With so many wrong labels that is as it should be.)

warnings.simplefilter("ignore", ClosedGateWarning)


def train(optimizer_class, steps=600, every=20, **options):
    """Accuracy on the test and share of wrong labels repeated, in percent, every so many steps."""
    torch.manual_seed(0)
    relu, linear = torch.nn.ReLU, torch.nn.Linear
    model = torch.nn.Sequential(linear(64, 256), relu(), linear(256, 256), relu(), linear(256, 10))
    optimizer = optimizer_class(model.parameters(), **options)
    measured, batches = [], ()
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                right = model(split.test_inputs).argmax(1) == split.test_labels
                repeated = (model(split.train_inputs).argmax(1) == spoiled.labels)[spoiled.wrong]
            measured.append(
                (step, 100 * right.float().mean().item(), 100 * repeated.float().mean().item())
            )
        if step % 10 == 0:
            batches = torch.randperm(len(spoiled.labels)).split(100)
        batch = batches[step % 10]
        optimizer.zero_grad()
        cross_entropy(model(split.train_inputs[batch]), spoiled.labels[batch]).backward()
        optimizer.step()
    return measured


curves = {
    "AdamW": train(torch.optim.AdamW),
    "PopRiskAdamW": train(PopRiskAdamW),
}  # both as they come

# %%
# The two side by side:

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for name, curve in curves.items():
    steps, accuracy, repeated = zip(*curve, strict=True)
    axes[0].plot(steps, accuracy, label=name)
    axes[1].plot(steps, repeated, label=name)
axes[0].set(xlabel="step", ylabel="%", title="test accuracy, clean labels", ylim=(50, 100))
axes[1].set(xlabel="step", ylabel="%", title="wrong labels repeated", ylim=(0, 100))
axes[0].legend(frameon=False)
plt.show()

# %%
# In numbers, the last step beside the best one that somebody with a clean test set could have
# stopped at:

for name, curve in curves.items():
    accuracies = [accuracy for _, accuracy, _ in curve]
    last, best, repeats = accuracies[-1], max(accuracies), curve[-1][2]
    print(
        f"{name:13} last {last:.1f}%, best {best:.1f}%, repeats {repeats:.0f}% of the wrong labels"
    )

# %%
# What the curves show: AdamW reaches its best early and then trades it for wrong labels. The gate
# of PopRiskAdamW lets a weight move as far as its gradient's signal stands out of its noise; what
# wrong labels say differs from batch to batch, and is noise. This is one seed; ``poprisk demo``
# repeats it over several, beside a grid of learning rates for AdamW.
