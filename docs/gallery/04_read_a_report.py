"""
Read a report
=============

A report shows on one page what a run learned, what it memorized, and what remains unknown. This
example trains a small model, writes the report of the run, and shows the page below.
"""

# sphinx_gallery_thumbnail_path = '_static/report.png'

# %%
# First, a run: two digits that look alike, with some labels wrong.

import html
import tempfile
from functools import partial
from pathlib import Path

import torch

from poprisk import PopRiskAdamW, Problem, train, write_report
from poprisk.runs import digits_split, replace_labels

split = digits_split(seed=2, train_size=900)


def only(inputs, labels, first=3, second=8):
    """Images of two digits, as the classes 0 and 1."""
    kept = (labels == first) | (labels == second)
    return inputs[kept], (labels[kept] == second).long()


x, truth = only(split.train_inputs, split.train_labels)
x, truth = x[:64], truth[:64]
labels = replace_labels(
    truth, 0.15, num_classes=2, generator=torch.Generator().manual_seed(0)
).labels


def network():
    """A network with a few hidden units."""
    return torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


test = only(split.test_inputs, split.test_labels)
problem = Problem(network, "cross_entropy", x, labels, name="threes and eights", test=test)
run = train(problem, partial(PopRiskAdamW, lr=0.03), steps=40, batch_size=16, progress=False)

# %%
# Write the report with one function; on the command line, use ``poprisk report FOLDER -o
# report.html``. Each section may take about ``budget`` seconds. More expensive sections are
# skipped; the page says how long each would take.

path = Path(tempfile.mkdtemp()) / "report.html"
write_report(run, path, budget=2.0)
print(f"{path.stat().st_size / 1e6:.1f} MB in one file")


# %%
# The page needs no server and no network. Here it is, in a frame.


class Framed:
    """An HTML file, shown inside a page or a notebook."""

    def __init__(self, path):
        self.page = path.read_text(encoding="utf-8")

    def _repr_html_(self):
        style = "width:100%;height:42rem;border:1px solid #8886;border-radius:6px"
        page = html.escape(self.page)
        return f'<iframe title="the report" srcdoc="{page}" style="{style}"></iframe>'


Framed(path)

# %%
# How to read it, from top to bottom:
#
# - **The verdict**: one sentence on what happened, three numbers (the loss on new data, what was
#   memorized, wrong labels), each with its error, and what to do next, with the command.
# - **Examples and label review**: the labels that look wrong come first. Accept a suggestion or
#   keep the given label by key, and export your decisions for ``poprisk audit RUN --apply``.
# - **Learning curves**: training and test loss, and the estimated population risk with its error.
#   Where new data have wrong labels, too, the risk lies above the loss on clean test labels.
# - **The gate**, if the optimizer has one: for which weights it is open.
# - **The operators**: how much of the labels, and of their noise, training has used up (signal
#   channel and reservoir), what the test error is made of, drift against diffusion, and how each
#   training output moved the test outputs. A sentence above each picture says what it means.
# - What could not be computed is listed at the end, with what it would take.
