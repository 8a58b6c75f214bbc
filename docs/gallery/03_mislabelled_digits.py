"""
Find mislabelled digits
=======================

An audit of a recorded training finds which labels are probably wrong, about how many, and what they
should be. It needs no further training and no clean data.
"""

# %%
# A tenth of the labels is replaced by wrong ones. Their positions are kept to check the audit.

from functools import partial

import matplotlib.pyplot as plt
import torch
from sklearn.metrics import roc_auc_score

from poprisk import Problem, audit, train
from poprisk.runs import digits_split, replace_labels

split = digits_split(seed=1, train_size=800)
spoiled = replace_labels(
    split.train_labels, 0.1, num_classes=10, generator=torch.Generator().manual_seed(1)
)


def network():
    """As small as it gets, and still able to memorize."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


# %%
# Train with any optimizer, and audit the recorded run. ``every=10`` records every tenth step; the
# audit averages losses and probabilities over these steps, which show much less memorization than
# the final ones.

problem = Problem(network, "cross_entropy", split.train_inputs, spoiled.labels, name="digits")
optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
run = train(problem, optimizer, steps=400, batch_size=50, every=10, progress=False)
table = audit(run, tier="any", progress=False)

print("wrong labels, estimated:", table.wrong_labels)
print("wrong labels, in truth: ", int(spoiled.wrong.sum()))

# %%
# How good the list is: the number of suspects that are wrong, and the probability that a wrong
# label is ranked before a correct one.

suspects = table.is_suspect
print(f"{int((suspects & spoiled.wrong).sum())} of {int(suspects.sum())} suspects are wrong")
print(f"area under the ROC curve: {roc_auc_score(spoiled.wrong, table['suspicion']):.3f}")

# %%
# The most suspicious examples, with the given and the suggested label. A frame marks those whose
# label was replaced.

figure, axes = plt.subplots(2, 6, figsize=(9, 3.8), layout="constrained")
for row, ax in zip(table.worst(12), axes.flat, strict=True):
    example = row["example"]
    ax.imshow(split.train_inputs[example].reshape(8, 8), cmap="gray_r")
    ax.set_title(f"{row['given_label']} → {row['suggested_label']}?", fontsize=11)
    ax.set(xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set(color="tab:red", linewidth=2.5 if spoiled.wrong[example] else 0)
plt.show()

# %%
# ``table.save("audit.csv")`` writes the whole table; ``table.cleaned_targets()`` returns the labels
# with the suggestions applied. For a saved run, ``poprisk audit FOLDER`` prints the same list.
