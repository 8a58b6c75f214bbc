"""
Read a report
=============

One page says what a run learned, what it memorized, and what it cannot tell. Here a small run is
made, its report is written, and the page itself is shown below.
"""

# sphinx_gallery_thumbnail_path = '_static/report.png'

# %%
# A run worth reporting: digits of two kinds that look alike, with some labels wrong.

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
    """A few hidden units are enough for this."""
    return torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


test = only(split.test_inputs, split.test_labels)
problem = Problem(network, "cross_entropy", x, labels, name="threes and eights", test=test)
run = train(problem, partial(PopRiskAdamW, lr=0.03), steps=40, batch_size=16, progress=False)

# %%
# The report: on the command line ``poprisk report FOLDER -o report.html``, from Python one
# function. Each part may take ``budget`` seconds, about; what would be dearer is left out, and the
# page says how to get it.

path = Path(tempfile.mkdtemp()) / "report.html"
write_report(run, path, budget=2.0)
print(f"{path.stat().st_size / 1e6:.1f} MB in one file")


# %%
# The page needs no server and no network. Here it is, in a frame.


class Framed:
    """Shows an HTML file inside of a page or a notebook."""

    def __init__(self, path):
        self.page = path.read_text(encoding="utf-8")

    def _repr_html_(self):
        style = "width:100%;height:42rem;border:1px solid #8886;border-radius:6px"
        page = html.escape(self.page)
        return f'<iframe title="the report" srcdoc="{page}" style="{style}"></iframe>'


Framed(path)

# %%
# How to read it, from top to bottom. The sentences first: how much of the drop in training loss
# new data would not have seen, the risk on new data with its error and whether it may be believed,
# and how many labels look wrong. Then the losses with the estimated risk between them, the gate
# over time, the operators of the run with signal channel and reservoir, and at the end every
# example: sort by suspicion to see the labels to check first. Beside a suspect stand the examples
# that did most to its loss.
