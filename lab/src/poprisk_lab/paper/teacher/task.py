"""Labels of a random teacher network, some of them replaced: a classification task that needs no file."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk.runs import replace_labels
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric

TEST_ACCURACY, TRAIN_ACCURACY, MEMORIZED = "test accuracy", "train accuracy", "wrong labels reproduced"
_EXAMPLES_AT_ONCE = 1_000_000  # for all members together: 1 GB for a layer of 256 units


@dataclass(frozen=True)
class TeacherData:
    """Data of one seed: inputs, labels of the teacher, and which training labels were replaced."""

    inputs: Float[Tensor, "train dimension"]
    labels: Int[Tensor, "train"]
    wrong: Bool[Tensor, "train"]
    test_inputs: Float[Tensor, "test dimension"]
    test_labels: Int[Tensor, "test"]


@dataclass(frozen=True)
class TeacherTask:
    r"""A student learns :math:`\arg\max_k (W_2 \operatorname{relu}(W_1 x))_k` for Gaussian x from few examples.

    The matrices of the teacher are Gaussian and differ between seeds; a share ``noise`` of the training labels is
    replaced by another class. Test labels are those of the teacher. With clean labels, AdamW with torch's defaults
    gets about two thirds of them right.
    """

    noise: float = 0.2
    dimension: int = 40
    teacher_width: int = 10
    classes: int = 10
    train_size: int = 2000
    test_size: int = 5000
    width: int = 256
    depth: int = 2
    batch_size: int = 100
    steps: int = 2000
    evaluations: int = 40

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise HyperparameterError(f"noise must lie in [0, 1), got {self.noise}")
        if self.classes < 2:
            raise HyperparameterError(f"classes must be at least 2, got {self.classes}")
        sizes = (self.dimension, self.teacher_width, self.train_size, self.test_size, self.width, self.depth)
        if min(*sizes, self.batch_size, self.steps, self.evaluations) < 1:
            raise HyperparameterError(f"sizes, steps and counts must be at least 1, got {self}")

    @property
    def name(self) -> str:
        """``teacher_clean``, or the name with the percentage of wrong labels: ``teacher_20``."""
        return f"teacher_{self.noise * 100:g}" if self.noise else "teacher_clean"

    @property
    def description(self) -> str:
        """Data, noise, network and loss in one sentence."""
        spoiled = f"{self.noise:.0%} of the labels replaced" if self.noise else "clean labels"
        return (
            f"{self.train_size} Gaussian inputs of {self.dimension} entries, {self.classes} classes by a random "
            f"network ({spoiled}); {self.depth} hidden layers of {self.width}; cross-entropy, batches of "
            f"{self.batch_size}."
        )

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Accuracy on new points, accuracy on the given labels, and the share of wrong labels reproduced."""
        always = (TaskMetric(TEST_ACCURACY, True), TaskMetric(TRAIN_ACCURACY, True))
        return (*always, TaskMetric(MEMORIZED, False)) if self.wrong_count else always

    @property
    def wrong_count(self) -> int:
        """Number of replaced training labels."""
        return round(self.noise * self.train_size)

    @property
    def streams(self) -> dict[str, tuple[int, int]]:
        """Training examples."""
        return {"examples": (self.train_size, self.batch_size)}

    def data(self, seed: int) -> TeacherData:
        """The data of a seed, which depend only on the seed and the sizes of the task."""
        generator = torch.Generator().manual_seed(stream(seed, "teacher"))
        first = torch.randn(self.teacher_width, self.dimension, generator=generator)
        second = torch.randn(self.classes, self.teacher_width, generator=generator)
        inputs = torch.randn(self.train_size + self.test_size, self.dimension, generator=generator)
        hidden = F.relu(inputs @ first.T)
        said = ((hidden - hidden.mean(0)) @ second.T).argmax(1)  # centred: otherwise one class would get most inputs
        labels = torch.Generator().manual_seed(stream(seed, "labels"))
        given = replace_labels(said[: self.train_size], self.noise, self.classes, labels)
        n = self.train_size
        return TeacherData(inputs[:n], given.labels, given.wrong, inputs[n:], said[n:])

    def initial(self, seed: int) -> dict[str, Tensor]:
        """PyTorch's default initialization of linear layers."""
        sizes = [self.dimension, *[self.width] * self.depth, self.classes]
        weights: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "weights"))
            for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
                layer = nn.Linear(fan_in, fan_out)
                weights[f"layer{i}.weight"], weights[f"layer{i}.bias"] = layer.weight.detach(), layer.bias.detach()
        return weights

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "TeacherCohort":
        """The members with these seeds."""
        return TeacherCohort(self, seeds, device)


class TeacherCohort:
    """Members of one stacked training, with the data of each distinct seed."""

    def __init__(self, task: TeacherTask, seeds: Sequence[int], device: torch.device) -> None:
        self._task = task
        unique = sorted(set(seeds))
        self._seed_index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        data = [task.data(seed) for seed in unique]
        self._inputs = torch.stack([d.inputs for d in data]).to(device)
        self._labels = torch.stack([d.labels for d in data]).to(device)
        self._wrong = torch.stack([d.wrong for d in data]).to(device)
        self._test_inputs = torch.stack([d.test_inputs for d in data]).to(device)
        self._test_labels = torch.stack([d.test_labels for d in data]).to(device)

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Mean cross-entropy with the given labels."""
        seeds, index = self._seed_index.unsqueeze(1), batch["examples"]
        logits = self._logits(weights, self._inputs[seeds, index])
        losses = F.cross_entropy(logits.flatten(0, 1), self._labels[seeds, index].flatten(), reduction="none")
        return losses.view(index.shape).mean(1)

    def errors(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The share of the given labels that each member does not predict."""
        seeds, index = self._seed_index.unsqueeze(1), batch["examples"]
        said = self._logits(weights, self._inputs[seeds, index]).argmax(2)
        return (said != self._labels[seeds, index]).float().mean(1)

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """The accuracy on test points."""
        return self._right(weights, self._test_inputs, self._test_labels).float().mean(1)

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """The metrics of each member on test points and training labels."""
        fitted = self._right(weights, self._inputs, self._labels)
        measured = {TEST_ACCURACY: self.measure_first(weights), TRAIN_ACCURACY: fitted.float().mean(1)}
        if self._task.wrong_count:
            measured[MEMORIZED] = (fitted & self._wrong[self._seed_index]).float().sum(1) / self._task.wrong_count
        return measured

    def _right(
        self, weights: StackedWeights, inputs: Float[Tensor, "seeds n d"], labels: Int[Tensor, "seeds n"]
    ) -> Bool[Tensor, "members n"]:
        """Mask of the examples that each member labels as given, computed in chunks that fit in memory."""
        per_piece = max(1, _EXAMPLES_AT_ONCE // len(self._seed_index))
        pieces = zip(inputs.split(per_piece, 1), labels.split(per_piece, 1), strict=True)
        parts = [self._logits(weights, x[self._seed_index]).argmax(2) == y[self._seed_index] for x, y in pieces]
        return torch.cat(parts, 1)

    def _logits(self, weights: StackedWeights, x: Float[Tensor, "members b i"]) -> Float[Tensor, "members b k"]:
        for i in range(1, self._task.depth + 2):
            if i > 1:
                x = F.relu(x)
            bias, matrix = weights[f"layer{i}.bias"].unsqueeze(1), weights[f"layer{i}.weight"]
            x = torch.baddbmm(bias, x, matrix.transpose(1, 2))
        return x
