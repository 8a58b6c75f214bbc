"""
Train on noisy labels
=====================

Four of ten labels are wrong, and the network is large enough to memorize all of them. AdamW does
so. This example compares it with :class:`poprisk.PopRiskAdamW`.
"""

# %%
# The data: handwritten digits of 8 × 8 pixels. A random share of the training labels is replaced by
# wrong ones; the test labels are correct.

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
# An ordinary training loop. It measures the accuracy on test images with correct labels, and the
# share of the wrong training labels that the network predicts. (The optimizer warns once if its
# gate is almost closed. With so many wrong labels that is expected.)

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
# The curves of both optimizers:

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
# In numbers: the last step, and the best step, which can be chosen only with clean test labels:

for name, curve in curves.items():
    accuracies = [accuracy for _, accuracy, _ in curve]
    last, best, repeats = accuracies[-1], max(accuracies), curve[-1][2]
    print(
        f"{name:13} last {last:.1f}%, best {best:.1f}%, repeats {repeats:.0f}% of the wrong labels"
    )

# %%
# AdamW reaches its best accuracy early and then learns the wrong labels. The gate of PopRiskAdamW
# scales the step of each weight by the signal-to-noise ratio of its gradient; the contribution of
# wrong labels differs from batch to batch, so it counts as noise. This is one seed; with several
# seeds, and a grid of learning rates for AdamW, ``poprisk demo`` repeats the comparison.
