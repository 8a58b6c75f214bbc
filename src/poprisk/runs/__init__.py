r"""What happened in a training run, and no theory: recorded, saved, opened, executed again.

To record your own training loop, put a :class:`Recorder` around each step:

>>> import torch
>>> from poprisk import Problem, Recorder, Run, replay, train
>>> inputs = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(8, 1)
>>> problem = Problem(torch.nn.Linear, "squared", inputs, 2 * inputs, arguments={"in_features": 1, "out_features": 1})
>>> model = problem.module(torch.float64)
>>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
>>> recorder = Recorder(None, model, optimizer, problem=problem)  # a directory in place of None keeps it
>>> for index in torch.arange(8).split(4):
...     with recorder.step(index) as step:
...         optimizer.zero_grad()
...         step.loss = 0.5 * (model(inputs[index]) - 2 * inputs[index]).square().mean()
...         step.loss.backward()
...         optimizer.step()
>>> run = recorder.close()
>>> run.num_steps, run.batch(1)
(2, tensor([4, 5, 6, 7]))

Every step of the run is available as an affine map of its gradient:

>>> step, w = run.step(1), run.weights(1)
>>> v = run.buffer(2)  # the momentum after step 1
>>> predicted = -step.preconditioner * v - step.decay * w
>>> bool(((run.weights(2) - w - predicted).abs() < 1e-15).all())
True

``train(problem, torch.optim.Adam, steps=100, batch_size=4, path="runs/first")`` trains and records without a loop of
your own, ``Run.load(path)`` opens the run, and ``replay(run)`` executes it again and reports how far it deviates.
"""

from typing import Any

from poprisk import _moved
from poprisk._core.arguments import guard
from poprisk.runs._digits import digits_split, replace_labels
from poprisk.runs._listing import RunSummary, list_runs
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._refit import refit
from poprisk.runs._replay import Replay, replay
from poprisk.runs._run import Run
from poprisk.runs._step import AffineStep, PerWeight, StepContext
from poprisk.runs._training import train

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk._core.seeds import seeded, step_generator, step_seed
from poprisk.runs._checkpoint import (
    MODULE_BUFFER,
    capture,
    capture_buffers,
    plain_options,
    rebuild_optimizer,
    restore,
    set_options,
    weights_of,
)
from poprisk.runs._digest import code_digest, problem_digest, run_digest
from poprisk.runs._digits import NUM_CLASSES, NUM_PIXELS, TRAIN_SIZES
from poprisk.runs._disk_use import readable_size, usual_interval
from poprisk.runs._first_steps import check_first_steps
from poprisk.runs._flat_rule import FlatRule, flat_rule
from poprisk.runs._gradients import add_gradients, randomness_of
from poprisk.runs._layout import layout_of
from poprisk.runs._linearize import OPTIMIZERS
from poprisk.runs._manifest import plain
from poprisk.runs._refit import refit_steps
from poprisk.runs._replay import options_of, rebuilt
from poprisk.runs._run import as_run
from poprisk.runs._segment import SegmentReader
from poprisk.runs._shipped import ShippedRun
from poprisk.runs._storage import MANIFEST, DirectoryStorage, repair

__all__ = [
    "AffineStep", "PerWeight", "Problem", "Recorder", "Replay", "Run", "RunSummary", "StepContext", "digits_split",
    "list_runs", "refit", "replace_labels", "replay", "train",
]  # fmt: skip
guard(globals(), ["refit", "replay"])


def __getattr__(name: str) -> Any:
    return _moved.facade_attribute(__name__, name)
