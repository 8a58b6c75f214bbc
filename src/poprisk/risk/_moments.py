"""Evaluate the network of a run on every training example, at chosen steps of the training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from poprisk.errors import HyperparameterError, RunError
from poprisk.optim import LastFeatures
from poprisk.runs import MODULE_BUFFER, Run

_EARLY, _RATIO = 8, 1.6
"""Number of steps before the first of the evenly spaced ones, each earlier than the next by this factor."""


@dataclass(frozen=True)
class Moment:
    """Outputs of the network with the weights before step ``step``."""

    step: int
    share: float
    """Share of the training since the previous evaluation: the weight of this one in averages over time."""
    outputs: Tensor
    """Outputs for all training examples, on the CPU, in evaluation mode."""


def choose_moments(run: Run, number: int = 20) -> list[int]:
    """Steps at which to evaluate a run: ``number`` evenly spaced ones up to the end, and a few early ones.

    If not every step was recorded, the checkpoints nearest to these steps are used, and nothing is executed again.

    Raises:
        HyperparameterError: ``number`` is less than 1.
        RunError: the run has no steps.
    """
    if number < 1:
        raise HyperparameterError(f"moments must be a positive integer, got {number!r}: use 20")
    steps = run.num_steps
    if not steps:
        raise RunError("the run has no steps: record at least one")
    number = min(number, steps)
    even = [steps * (j + 1) / number for j in range(number)]
    early = [even[0] / _RATIO ** (j + 1) for j in range(_EARLY)] if number > 1 else []
    wanted = [max(1, round(t)) for t in (*early, *even)]
    if run.is_dense:
        return sorted(set(wanted))
    kept = [k for k in run.checkpoints if k > 0]
    return sorted({min(kept, key=lambda k: abs(k - t)) for t in wanted})


def evaluate(run: Run, moments: Sequence[int], *, batch_size: int = 1024) -> Iterator[Moment]:
    """The network's outputs for all training examples at each step, in evaluation mode and without augmentation.

    At a checkpoint, buffers such as the statistics of batch normalization are the recorded ones. Between checkpoints
    the statistics are estimated by one pass over the training examples with the weights of that step, and other buffers
    are those of the checkpoint before.

    Raises:
        RunError: the run's problem cannot be rebuilt, or builds another model than the recorded one.
    """
    network = Network(run, batch_size)
    before = 0
    for k in moments:
        network.go_to(k)
        yield Moment(k, (k - before) / moments[-1], network.outputs())
        before = k


def buffers_at(run: Run, k: int) -> dict[str, Tensor]:
    """The module's buffers before step k, as :func:`evaluate` has them; empty if training did not change any."""
    if not has_changing_buffers(run):
        return {}
    network = Network(run, 1024)
    network.go_to(k)
    return {name: b.detach().clone() for name, b in network.module.named_buffers()}


def first_features(run: Run, batch_size: int = 1024) -> Float[Tensor, "n features"] | None:
    """What the last linear layer receives for each example before the first step; None where there is no such layer."""
    network = Network(run, batch_size)
    network.go_to(0)
    pieces: list[Tensor] = []
    with torch.no_grad(), LastFeatures(network.module) as features:
        for rows in network.batches:
            network.forward(rows)
            if not features.are_rows(len(rows)):
                return None
            pieces.append(features.take().cpu())
    return torch.cat(pieces)


def kept_features(run: Run, batch_size: int = 1024) -> tuple[Float[Tensor, "n features"], Tensor]:
    """What the last linear layer receives for each example, and the outputs, by the weights that were kept.

    Raises:
        RunError: no weights were kept, the held-back examples are not those of the run, or its problem is not known.
    """
    kept = run.kept
    if kept is None or not len(kept.held):
        raise RunError("the run has no held-back examples: train with hold_back=0.05, or use another method")
    network = Network(run, batch_size)
    network.module.load_state_dict(kept.weights)
    points, outputs = [], []
    with torch.no_grad(), LastFeatures(network.module) as features:
        for rows in network.batches:
            outputs.append(network.forward(rows).cpu())
            points.append(features.take(outputs[-1]).cpu())
    return torch.cat(points), torch.cat(outputs)


def has_changing_buffers(run: Run) -> bool:
    """Whether training changed buffers of the module, as batch normalization does."""
    return any(name.startswith(MODULE_BUFFER) for name in run.checkpoint(run.num_steps))


class Network:
    """The run's module in evaluation mode, which can be set to any recorded step.

    Raises:
        RunError: the run's problem cannot be rebuilt, or builds another model than the recorded one.
    """

    def __init__(self, run: Run, batch_size: int) -> None:
        self.run, self.problem = run, run.problem
        self.module = _module(run)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.first = {name: b.detach().clone() for name, b in self.module.named_buffers()}
        self.moving = has_changing_buffers(run)
        self.batches = torch.arange(len(self.problem)).split(batch_size)

    def go_to(self, k: int) -> None:
        """Take over weights and buffers before step k, as :func:`evaluate` does."""
        with torch.no_grad():
            for p, piece in zip(self.parameters, self.run.layout.split(self.run.weights(k)), strict=True):
                p.copy_(piece)
            if self.moving:
                self._restore_buffers(k)

    def outputs(self) -> Tensor:
        """Outputs for all training examples, on the CPU."""
        with torch.no_grad():
            return torch.cat([self.forward(rows).cpu() for rows in self.batches])

    def forward(self, rows: Tensor) -> Tensor:
        """Outputs for some of the training examples."""
        inputs, _ = self.problem.batch(rows, dtype=self.parameters[0].dtype)
        return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)

    def _restore_buffers(self, k: int) -> None:
        at = max(c for c in self.run.checkpoints if c <= k)
        kept = self.run.checkpoint(at)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(kept.get(MODULE_BUFFER + name, self.first[name]))
        if at != k:
            self._estimate_statistics()

    def _estimate_statistics(self) -> None:
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain average over all batches
            norm.train()
        # A batch of one example has no variance.
        for rows in [rows for rows in self.batches if len(rows) > 1] if norms else []:
            self.forward(rows)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


def _module(run: Run) -> nn.Module:
    """The module in evaluation mode, in the recorded dtype or at least float32."""
    module = run.module()
    if run.layout.dtype in (torch.bfloat16, torch.float16):
        module = module.float()
    return module.eval()
