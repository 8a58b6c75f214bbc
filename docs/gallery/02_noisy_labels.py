"""
End a noisy training at its best
================================

Four of ten labels are wrong, and the network is large enough to memorize all of them. AdamW does
so. With :class:`poprisk.KeepBest` the same training ends with the best averaged weights, chosen on
a few held-back examples whose labels are just as noisy.
"""

# %%
# The data: handwritten digits of 8 × 8 pixels. A random share of the training labels is replaced by
# wrong ones; the test labels are correct. 5% of the training examples are held back.

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from poprisk import KeepBest, hold_back
from poprisk.runs import digits_split, replace_labels

split = digits_split(seed=0, train_size=1000)
spoiled = replace_labels(
    split.train_labels, 0.4, num_classes=10, generator=torch.Generator().manual_seed(0)
)
print(f"{int(spoiled.wrong.sum())} of {len(spoiled.labels)} labels are wrong")
train_set, held = hold_back(TensorDataset(split.train_inputs, spoiled.labels), 0.05)

# %%
# An ordinary training loop, with two more lines: the one that makes the keeper, and the one that
# asks it to finish. Accuracy on the test images is measured only to look at; nothing uses it.

torch.manual_seed(0)
relu, linear = torch.nn.ReLU, torch.nn.Linear
model = torch.nn.Sequential(linear(64, 256), relu(), linear(256, 256), relu(), linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
keeper = KeepBest(model, optimizer, held, cross_entropy)


def test_accuracy():
    """Share of the test images that the model gets right, in percent."""
    with torch.no_grad():
        right = model(split.test_inputs).argmax(1) == split.test_labels
    return 100 * right.float().mean().item()


curve = []
for _epoch in range(60):
    for x, y in DataLoader(train_set, batch_size=100, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    curve.append(test_accuracy())

last = test_accuracy()
risk = keeper.finish()  # the model now has the kept weights
kept = test_accuracy()

# %%
# What happened, and what was kept:

figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
ax.plot(range(1, 61), curve, color="#222222", label="AdamW, after each pass")
ax.axhline(kept, color="#009E73", label="the weights that KeepBest kept")
ax.set(xlabel="passes over the data", ylabel="%", title="accuracy on test images, clean labels")
ax.legend(frameon=False)
plt.show()

print(f"AdamW at its last step   {last:.1f}%")
print(f"AdamW at its best step   {max(curve):.1f}%, found with clean test labels")
print(f"with KeepBest            {kept:.1f}%, found with {len(held)} noisy labels")
print(f"gained over the last step: {kept - last:+.1f} points")

# %%
# ``risk`` is the loss to expect on new data *as noisy as these*, with an error bar. It is higher
# than the loss on clean test labels: a wrong label costs a good model the most.

print(risk)
with torch.no_grad():
    clean = cross_entropy(model(split.test_inputs), split.test_labels).item()
print(f"loss on test images with clean labels: {clean:.2f}")
