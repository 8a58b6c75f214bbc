"""One setting of the honesty study: a training that can be run and recorded, and the true risk of the model it made."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from poprisk import Gate, PopRiskAdamW
from poprisk._core.autodiff import Inputs, resolve_loss
from poprisk.runs import MODULE_BUFFER, Problem, Run, train
from poprisk_lab.paper.risk_honesty import sources
from poprisk_lab.paper.risk_honesty.networks import LOSSES, build

TEST = 20_000
"""Number of fresh test examples where the data have no end."""
GATES: dict[str, Gate] = {
    "snr": Gate("snr"),
    "soft": Gate("soft"),
    "hard": Gate("hard"),
    "paper": Gate.paper(),
    "snr, literal": Gate("snr", strength=1.0, normalize=False),
    "hard, literal": Gate("hard", normalize=False),
}
"""Gates of PopRiskAdamW in the study; "paper" is Algorithm 1 as published."""
LITERAL = ("paper", "snr, literal", "hard, literal")


@dataclass(frozen=True)
class Truth:
    """The mean loss of a model on test examples that no training has seen."""

    value: float
    error: float
    """Standard error of the value, from the number of test examples."""
    examples: int


@dataclass(frozen=True)
class Setting:
    """A training: data, model, loss, optimizer and length.

    Attributes:
        name: Name, unique in the study.
        split: "tune", "seen" or "report".
        model: A key of :data:`~poprisk_lab.paper.risk_honesty.networks.MAKERS`.
        width: Units or channels of the model.
        loss: "squared", "cross_entropy", "logistic", "absolute" or "huber".
        source: Where the data come from.
        shape: Shape of one input.
        classes: Number of classes; 0 for a regression.
        n: Number of training examples.
        noise: Share of wrong labels, or standard deviation of the targets' noise.
        tails: Distribution of the targets' noise.
        imbalance: Frequency of the most frequent class relative to the rarest.
        duplicates: Share of the training examples that are exact copies of others.
        optimizer: "sgd", "momentum", "adamw" or a key of :data:`GATES`.
        lr: Learning rate.
        weight_decay: Weight decay of the optimizer.
        cosine: Whether the rate falls to 0 along half a cosine.
        batch: Examples per step.
        steps: Number of steps.
        regime: "under-trained", "early", "trained" or "long".
        augmented: Whether images are shifted at random in training.
        hold_back: Share of the examples held back to choose the weights; 0 for none.
        double: Whether weights are float64 (else float32).
        seed: Seed for data, weights and batches.
    """

    name: str
    split: str
    model: str
    width: int
    loss: str
    source: str
    shape: tuple[int, ...]
    classes: int
    n: int
    noise: float
    tails: str
    imbalance: float
    duplicates: float
    optimizer: str
    lr: float
    weight_decay: float
    cosine: bool
    batch: int
    steps: int
    regime: str
    augmented: bool
    hold_back: float
    double: bool
    seed: int

    @property
    def factors(self) -> dict[str, Any]:
        """Everything but the name and the split, as JSON values."""
        factors = {key: value for key, value in asdict(self).items() if key not in ("name", "split")}
        return {**factors, "shape": list(self.shape)}

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return torch.float64 if self.double else torch.float32

    @property
    def schedule(self) -> Callable[[int], float] | None:
        """Factor of the rate in each step; None for a constant rate."""
        return self._rate if self.cosine else None

    @property
    def is_real(self) -> bool:
        """Whether the examples are from a real data set, of which the test set is what remains."""
        return self.source in sources.REAL

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        half = 0 if self.split == "tune" else 1  # "report" has no data set that is halved
        request = sources.Request(
            self.source, self.classes, self.shape, self.noise, self.tails, self.imbalance, self.seed, half
        )
        return sources.draw(request, self.n, self.duplicates, TEST)

    def problem(self) -> Problem:
        """The training examples with the model and its loss; the test set is not part of it."""
        x, y, _, _ = self._data
        y = self._targets(y)
        return Problem(
            build,
            LOSSES[self.loss],
            x.to(self.dtype),
            y.to(self.dtype) if y.is_floating_point() else y,
            name=self.name,
            arguments={
                "kind": self.model,
                "shape": list(self.shape),
                "width": self.width,
                "outputs": self.classes if self.loss == "cross_entropy" else 1,
            },
            augment=shifted if self.augmented else None,
            seed=self.seed,
        )

    def run(self) -> Run:
        """Train and record."""
        return train(
            self.problem(),
            self.make_optimizer,
            self.steps,
            batch_size=self.batch,
            seed=self.seed,
            schedule=self.schedule,
            dtype=self.dtype,
            hold_back=self.hold_back or None,
            progress=False,
        )

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The setting's optimizer."""
        if self.optimizer in ("sgd", "momentum"):
            momentum = 0.9 if self.optimizer == "momentum" else 0.0
            return torch.optim.SGD(parameters, self.lr, momentum=momentum, weight_decay=self.weight_decay)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, self.lr, weight_decay=self.weight_decay)
        return PopRiskAdamW(parameters, self.lr, weight_decay=self.weight_decay, gate=GATES[self.optimizer])

    def truth(self, run: Run) -> Truth:
        """The risk of the run's final model: its mean loss on fresh examples with the same noise."""
        return self.risk_of(final_module(run))

    def kept_truth(self, run: Run) -> Truth | None:
        """The risk of the weights that the held-back examples chose; None without such examples."""
        if run.kept is None:
            return None
        module = run.module()
        module.load_state_dict(run.kept.weights)
        return self.risk_of(module)

    def training_loss(self, run: Run) -> float:
        """The mean loss of the final model on its training examples, in evaluation mode."""
        x, y, _, _ = self._data
        return mean_loss(final_module(run), self.loss, x, self._targets(y)).value

    def risk_of(self, module: nn.Module) -> Truth:
        """The risk of any module: its mean loss on the test examples."""
        _, _, x, y = self._data
        return mean_loss(module, self.loss, x, self._targets(y))

    def risk_on(self, module: nn.Module, rows: Tensor) -> Truth:
        """The mean loss of a module on some of the training examples."""
        x, y, _, _ = self._data
        return mean_loss(module, self.loss, x[rows], self._targets(y[rows]))

    def _targets(self, y: Tensor) -> Tensor:
        return y.double().reshape(-1, 1) if self.loss == "logistic" else y

    def _rate(self, k: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * k / self.steps))


def mean_loss(module: nn.Module, loss: str, x: Tensor, y: Tensor) -> Truth:
    """Mean loss of a module in evaluation mode, and its standard error; losses in float64."""
    module = module.eval()
    dtype = next(module.parameters()).dtype
    with torch.no_grad():
        outputs = torch.cat([module(rows.to(dtype)) for rows in x.split(2000)]).double()
    targets = y.double() if y.is_floating_point() else y
    losses = torch.func.vmap(resolve_loss(LOSSES[loss]))(outputs, targets)
    return Truth(losses.mean().item(), losses.std().item() / math.sqrt(len(losses)), len(losses))


def final_module(run: Run) -> nn.Module:
    """The module of a run after its last step, with the buffers that training changed, in evaluation mode."""
    module, last = run.module(), run.checkpoint(run.num_steps)
    trained = [p for p in module.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, piece in zip(trained, run.layout.split(run.weights(run.num_steps)), strict=True):
            p.copy_(piece)
        for name, buffer in module.named_buffers():
            if MODULE_BUFFER + name in last:
                buffer.copy_(last[MODULE_BUFFER + name])
    return module.eval()


def shifted(images: Inputs, generator: Generator) -> Inputs:
    """Every image moved by up to one pixel in each direction, around the edges.

    >>> shifted(torch.zeros(2, 1, 8, 8), Generator().manual_seed(0)).shape
    torch.Size([2, 1, 8, 8])
    """
    assert isinstance(images, Tensor)
    moves = torch.randint(-1, 2, (len(images), 2), generator=generator).tolist()
    return torch.stack([image.roll((a, b), (-2, -1)) for image, (a, b) in zip(images, moves, strict=True)])
