"""
Which examples made this prediction?
====================================

A network gets a test image wrong. Which training examples pushed it there, and which would it have
to lose to get it right? :func:`poprisk.influence_on` follows the recorded training and predicts how
the loss of any query would change if an example were left out.
"""

# %%
# A small network on 300 handwritten digits, 15% of them with a wrong label.

from functools import partial

import matplotlib.pyplot as plt
import torch

from poprisk import Problem, influence_on, train
from poprisk.runs import digits_split, replace_labels

split = digits_split(seed=0, train_size=300)
spoiled = replace_labels(
    split.train_labels, 0.15, num_classes=10, generator=torch.Generator().manual_seed(0)
)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
problem = Problem(network, "cross_entropy", split.train_inputs, spoiled.labels)
run = train(problem, partial(torch.optim.AdamW, lr=5e-3), steps=60, batch_size=60, progress=False)

# %%
# The test image with the largest loss among those that it gets wrong:

model = run.module()
torch.nn.utils.vector_to_parameters(run.weights(run.num_steps), model.parameters())
with torch.no_grad():
    outputs = model(split.test_inputs)
losses = torch.nn.functional.cross_entropy(outputs, split.test_labels, reduction="none")
query = int(losses.argmax())
said, true = int(outputs[query].argmax()), int(split.test_labels[query])
print(f"test image {query} is a {true}; the network says {said} (loss {losses[query]:.2f})")

# %%
# One line: how this loss would change without each of the training examples. A negative number
# means that the loss would fall, so the example was harmful here.

change = influence_on(
    run, split.test_inputs[query : query + 1], split.test_labels[query : query + 1]
)[0]
harmful, helpful = change.argsort()[:6], change.argsort(descending=True)[:6]

figure, axes = plt.subplots(2, 7, figsize=(9, 3.1), layout="constrained")
for row, (name, examples) in zip(
    axes, {"harmful": harmful, "helpful": helpful}.items(), strict=True
):
    row[0].imshow(split.test_inputs[query].reshape(8, 8), cmap="Greys")
    row[0].set_title(f"query: a {true}", fontsize=9)
    row[0].set_ylabel(name)
    for ax, i in zip(row[1:], examples.tolist(), strict=True):
        ax.imshow(split.train_inputs[i].reshape(8, 8), cmap="Greys")
        wrong = ", wrong" if spoiled.wrong[i] else ""
        ax.set_title(f"{int(spoiled.labels[i])}{wrong}\n{change[i]:+.2f}", fontsize=9)
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
plt.show()

# %%
# Check the predictions: train again without each of these twelve, from the same first weights and
# with the same batches (:func:`poprisk.risk.leave_one_out` trains them in one computation).

from poprisk.risk import leave_one_out

examples = torch.cat([harmful, helpful])
without = leave_one_out(run, examples, renormalize=False, progress=False)
actual = []
for weights in without.weights:
    torch.nn.utils.vector_to_parameters(weights.to(torch.float32), model.parameters())
    with torch.no_grad():
        output = model(split.test_inputs[query])
    actual.append(torch.nn.functional.cross_entropy(output, split.test_labels[query]))
actual = torch.stack(actual) - losses[query]

figure, ax = plt.subplots(figsize=(4.4, 3.6), layout="constrained")
ax.axline((0, 0), slope=1, color="#8A8A8A", linewidth=1)
ax.plot(change[examples], actual, "o", color="#0072B2")
ax.set(xlabel="predicted change of the loss", ylabel="change after training again")
plt.show()

together = torch.corrcoef(torch.stack([change[examples].float(), actual]))[0, 1]
print(f"correlation of predicted and actual changes: {together:.2f}")
