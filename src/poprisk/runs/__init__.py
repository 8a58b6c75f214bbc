r"""What happened in a training run, and no theory: recorded, saved, opened, executed again.

A loop of your own gets a recorder around it:

>>> import torch
>>> from poprisk.problems import Problem
>>> from poprisk.runs import Recorder, Run, replay, train
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

and every step can be had as the affine map of its gradient that it was:

>>> step, w = run.step(1), run.weights(1)
>>> v = run.buffer(2)  # the momentum after step 1
>>> predicted = -step.preconditioner * v - step.decay * w
>>> bool(((run.weights(2) - w - predicted).abs() < 1e-15).all())
True

Without a loop, ``train(problem, torch.optim.Adam, steps=100, batch_size=4, path="runs/first")`` is one;
``Run.load(path)`` opens what it left, ``replay(run)`` executes it again and says how far it deviates.
"""

from poprisk.runs.flat_rule import FlatRule as FlatRule
from poprisk.runs.flat_rule import flat_rule as flat_rule
from poprisk.runs.recorder import Recorder as Recorder
from poprisk.runs.replay import Replay as Replay
from poprisk.runs.replay import replay as replay
from poprisk.runs.run import Run as Run
from poprisk.runs.step import PerWeight as PerWeight
from poprisk.runs.step import Step as Step
from poprisk.runs.training import train as train
