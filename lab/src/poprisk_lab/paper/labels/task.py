r"""Image classification with a share of wrong labels: digits, MNIST, Fashion-MNIST, and stacked ReLU networks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.cli._demonstration.networks import MLPShape, initial_weights
from poprisk.errors import DataError, HyperparameterError
from poprisk.runs import digits_split, replace_labels
from poprisk.runs._digits import NUM_PIXELS, TRAIN_SIZES
from poprisk_lab.data.idx import ImageSplit, idx_split
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric

CLASSES = 10
MAX_NOISE = 0.6
DIGITS, MNIST, FASHION = "digits", "mnist", "fashion"
TITLES = {DIGITS: "digits", MNIST: "MNIST", FASHION: "Fashion-MNIST"}
ARCHIVES = {
    MNIST: "the four official idx files of MNIST (yann.lecun.com/exdb/mnist)",
    FASHION: "the four official idx files of Fashion-MNIST (github.com/zalandoresearch/fashion-mnist, data/fashion)",
}
"""What to fetch for the data sets that are not shipped, and where from."""
_IMAGE_PIXELS, _IMAGE_TRAIN = 784, 60_000
_MEASURE_NUMBERS = 2**29
"""Maximum number of float32 entries in one chunk of a measurement: 2 GiB, for any number of members."""


@dataclass(frozen=True)
class LabelTask:
    r"""Images with a share of the training labels replaced by another class, and a fully connected ReLU network.

    Each seed has its own training examples, its own wrong labels (:func:`poprisk.runs.replace_labels`: always
    another class) and its own initial weights. Digits: ``train_size`` of the 1797 for training, the others for testing.
    MNIST and Fashion-MNIST: ``train_size`` of the 60 000 training images, and the official 10 000 test images.
    Inputs are standardized by the mean and the standard deviation of all training pixels (digits: of the training
    examples of the seed; else of the 60 000).

    Attributes:
        data: ``digits``, ``mnist`` or ``fashion``.
        folder: Folder with the four idx files; not needed for digits.
        noise: Share of the training labels that is replaced, from 0 to 0.6.
        train_size: Number of training examples of each seed.
        width: Number of units of a hidden layer.
        depth: Number of hidden layers.
        batch_size: Number of examples per step.
        steps: Number of optimizer steps.
        evaluations: Number of measurements.

    Raises:
        DataError: the data set is unknown, the folder is missing, or train_size is out of range.
        HyperparameterError: any other value out of range.

    >>> task = LabelTask(noise=0.2)
    >>> task.name, task.streams, [metric.name for metric in task.metrics]
    ('digits-20', {'train': (1000, 100)}, ['test accuracy', 'test loss', 'train accuracy', 'memorized'])
    """

    data: str = DIGITS
    folder: str | None = None
    noise: float = 0.4
    train_size: int = 1000
    width: int = 512
    depth: int = 2
    batch_size: int = 100
    steps: int = 1500
    evaluations: int = 30

    def __post_init__(self) -> None:
        if self.data not in TITLES:
            raise DataError(f"data must be one of {', '.join(TITLES)}, got {self.data!r}")
        if self.data in ARCHIVES and self.folder is None:
            raise DataError(f"{TITLES[self.data]} needs a folder, got none: put {ARCHIVES[self.data]} into one")
        low, high = TRAIN_SIZES if self.data == DIGITS else (CLASSES, _IMAGE_TRAIN)
        if not low <= self.train_size <= high:
            raise DataError(f"train_size of {self.data} must lie between {low} and {high}, got {self.train_size}")
        if not 0 <= self.noise <= MAX_NOISE or (self.noise and not round(self.noise * self.train_size)):
            raise HyperparameterError(
                f"noise must lie between 0 and {MAX_NOISE} and, unless 0, replace a label of {self.train_size}, "
                f"got {self.noise}"
            )
        if not 1 <= self.batch_size <= self.train_size:
            raise HyperparameterError(f"batch_size must lie between 1 and {self.train_size}, got {self.batch_size}")
        if min(self.width, self.depth, self.steps, self.evaluations) < 1:
            raise HyperparameterError(
                "width, depth, steps and evaluations must be at least 1, got "
                f"{self.width}, {self.depth}, {self.steps}, {self.evaluations}"
            )

    @property
    def name(self) -> str:
        """Data set and noise in percent."""
        return f"{self.data}-{100 * self.noise:g}"

    @property
    def description(self) -> str:
        """Data, noise, network and loss in one sentence."""
        sizes = "-".join(str(n) for n in (self.shape.inputs, *[self.width] * self.depth, CLASSES))
        spoiled = f"{self.noise:.0%} of the labels replaced by another class" if self.noise else "clean labels"
        return f"{TITLES[self.data]}, {self.train_size} examples, {spoiled}; ReLU network {sizes}, cross-entropy"

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Test accuracy first; ``memorized``, the share of wrong labels reproduced, only if labels are wrong."""
        always = (TaskMetric("test accuracy", True), TaskMetric("test loss", False), TaskMetric("train accuracy", True))
        return (*always, TaskMetric("memorized", False)) if self.noise else always

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """One stream: the training examples."""
        return {"train": (self.train_size, self.batch_size)}

    @property
    def shape(self) -> MLPShape:
        """Sizes of the network."""
        return MLPShape(NUM_PIXELS if self.data == DIGITS else _IMAGE_PIXELS, self.width, self.depth, CLASSES)

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Weights [out, in] and biases [out], uniform within ±1/√(fan in)."""
        tensors = initial_weights(self.shape, stream(seed, "weights"))
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return {
            f"layer{i}.{kind}": tensor
            for i, (weight, bias) in enumerate(pairs, 1)
            for kind, tensor in (("weight", weight), ("bias", bias.squeeze(0)))
        }

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "LabelCohort":
        """Members with these seeds; members with the same seed share their data."""
        return LabelCohort(self, seeds, device)

    def require_data(self) -> None:
        """Check before any training that the files exist.

        Raises:
            DataError: with the name of the folder and what to fetch.
        """
        if self.folder is None or self.data == DIGITS:
            return
        names = [f"{which}-{kind}-ubyte" for which in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
        missing = [n for n in names if not any((Path(self.folder) / f"{n}{packed}").exists() for packed in ("", ".gz"))]
        if missing:
            raise DataError(f"{self.folder} has no {missing[0]} or {missing[0]}.gz: put {ARCHIVES[self.data]} there")


@dataclass(frozen=True)
class LabelData:
    """The examples of several seeds: two pools of images that all seeds share, and the indices of each seed."""

    train_pool: Float[Tensor, "train_images pixels"]
    train_rows: Int[Tensor, "seeds train"]
    given: Int[Tensor, "seeds train"]
    wrong: Bool[Tensor, "seeds train"]
    test_pool: Float[Tensor, "test_images pixels"]
    test_rows: Int[Tensor, "seeds test"]
    test_labels: Int[Tensor, "seeds test"]

    def to(self, device: torch.device) -> "LabelData":
        """The same on a device."""
        return LabelData(**{name: value.to(device) for name, value in vars(self).items()})


def label_data(task: LabelTask, seeds: Sequence[int]) -> LabelData:
    """The training and test examples of each seed, with the given labels.

    >>> data = label_data(LabelTask(noise=0.4, train_size=100), [0, 1])
    >>> data.wrong.sum(1).tolist(), list(data.test_rows.shape)
    ([40, 40], [2, 1697])
    """
    drawn = _digits(task, seeds) if task.data == DIGITS else _images(task, seeds)
    train_pool, train_rows, train_labels, test_pool, test_rows, test_labels = drawn
    replaced = [
        replace_labels(labels, task.noise, CLASSES, torch.Generator().manual_seed(stream(seed, "labels")))
        for seed, labels in zip(seeds, train_labels, strict=True)
    ]
    given, wrong = torch.stack([r.labels for r in replaced]), torch.stack([r.wrong for r in replaced])
    return LabelData(train_pool, train_rows, given, wrong, test_pool, test_rows, test_labels)


def _digits(task: LabelTask, seeds: Sequence[int]) -> tuple[Tensor, ...]:
    """The splits of all seeds, concatenated in the pools, because they are small."""
    splits = [digits_split(stream(seed, "split"), task.train_size) for seed in seeds]
    train_labels, test_labels = (torch.stack([getattr(s, k) for s in splits]) for k in ("train_labels", "test_labels"))
    pools = [_standardised(s.train_inputs, s.test_inputs) for s in splits]
    train_pool, test_pool = (torch.cat(pool) for pool in zip(*pools, strict=True))
    train_rows, test_rows = (torch.arange(y.numel()).view_as(y) for y in (train_labels, test_labels))
    return train_pool, train_rows, train_labels, test_pool, test_rows, test_labels


def _images(task: LabelTask, seeds: Sequence[int]) -> tuple[Tensor, ...]:
    split = _load(str(task.folder))
    if task.train_size > len(split.train_labels):
        most = len(split.train_labels)
        raise DataError(f"train_size must be at most the {most} images in {task.folder}, got {task.train_size}")
    if split.train_inputs.shape[1] != _IMAGE_PIXELS:
        raise DataError(
            f"{task.folder} should hold images of 28 x 28, got {split.train_inputs.shape[1]} pixels: "
            f"put {ARCHIVES[task.data]} there"
        )
    count = len(split.train_labels)
    orders = [torch.randperm(count, generator=torch.Generator().manual_seed(stream(seed, "split"))) for seed in seeds]
    train_rows = torch.stack([order[: task.train_size] for order in orders])
    test_rows = torch.arange(len(split.test_labels)).expand(len(seeds), -1)
    test_labels = split.test_labels.expand(len(seeds), -1)
    train_labels = split.train_labels[train_rows]
    return split.train_inputs, train_rows, train_labels, split.test_inputs, test_rows, test_labels


@lru_cache(maxsize=1)
def _load(folder: str) -> ImageSplit:
    """A standardized data set. The last one is cached for further noise levels."""
    split = idx_split(folder)
    train, test = _standardised(split.train_inputs, split.test_inputs)
    return ImageSplit(train, split.train_labels, test, split.test_labels)


def _standardised(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both sets, standardized by the mean and the standard deviation of all training pixels."""
    deviation, mean = torch.std_mean(train)
    return (train - mean) / deviation, (test - mean) / deviation


class LabelCohort:
    """Members of a :class:`LabelTask`. Images are stored once for all; a batch gathers its rows."""

    def __init__(self, task: LabelTask, seeds: Sequence[int], device: torch.device) -> None:
        unique = sorted(set(seeds))
        self._task, self._data = task, label_data(task, unique).to(device)
        self._seed = torch.tensor([unique.index(seed) for seed in seeds], device=device).unsqueeze(1)
        self._wrong_count = self._data.wrong.sum(1)[self._seed.squeeze(1)].clamp_min(1)

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The mean cross-entropy of each member, with its given labels."""
        return cross_entropies(*self._given(weights, batch)).mean(1)

    def errors(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The share of the given labels that each member does not predict."""
        logits, labels = self._given(weights, batch)
        return (logits.argmax(-1) != labels).float().mean(1)

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """The test accuracy."""
        accuracy, loss = self._tested(weights)
        return accuracy.where(loss.isfinite(), torch.nan)

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """The metrics of the task; all NaN for a member whose test loss is not finite."""
        data = self._data
        accuracy, loss = self._tested(weights)
        fitted, memorized = (0.0 * self._wrong_count for _ in range(2))
        for piece in self._pieces(data.given.shape[1]):
            rows, given, wrong = (x[:, piece][self._seed.squeeze(1)] for x in (data.train_rows, data.given, data.wrong))
            same = self._logits(weights, data.train_pool[rows]).argmax(-1) == given
            fitted += same.sum(1)
            memorized += (same & wrong).sum(1)
        values = {
            "test accuracy": accuracy,
            "test loss": loss,
            "train accuracy": fitted / data.given.shape[1],
            "memorized": memorized / self._wrong_count,
        }
        return {m.name: values[m.name].where(loss.isfinite(), torch.nan) for m in self._task.metrics}

    def _given(self, weights: StackedWeights, batch: StackedBatch) -> tuple[Tensor, Tensor]:
        """Logits and given labels of each member's batch."""
        examples, data = batch["train"], self._data
        logits = self._logits(weights, data.train_pool[data.train_rows[self._seed, examples]])
        return logits, data.given[self._seed, examples]

    def _tested(self, weights: StackedWeights) -> tuple[Float[Tensor, "members"], Float[Tensor, "members"]]:
        """Accuracy and loss on the test examples."""
        data = self._data
        right, loss = (0.0 * self._wrong_count for _ in range(2))
        for piece in self._pieces(data.test_labels.shape[1]):
            labels = data.test_labels[:, piece][self._seed.squeeze(1)]
            logits = self._logits(weights, data.test_pool[data.test_rows[:, piece][self._seed.squeeze(1)]])
            right += (logits.argmax(-1) == labels).sum(1)
            loss += cross_entropies(logits, labels).sum(1)
        return right / data.test_labels.shape[1], loss / data.test_labels.shape[1]

    def _logits(
        self, weights: StackedWeights, inputs: Float[Tensor, "members batch pixels"]
    ) -> Float[Tensor, "members batch classes"]:
        hidden = inputs
        for i in range(1, self._task.depth + 2):
            weight, bias = weights[f"layer{i}.weight"], weights[f"layer{i}.bias"]
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden if i == 1 else hidden.relu(), weight.mT)
        return hidden

    def _pieces(self, count: int) -> Iterator[slice]:
        """Chunks of the examples that are small enough for all members at once."""
        numbers = len(self._seed) * (self._task.shape.inputs + 3 * self._task.width)
        size = max(1, _MEASURE_NUMBERS // numbers)
        return (slice(i, i + size) for i in range(0, count, size))


def cross_entropies(
    logits: Float[Tensor, "members batch classes"], labels: Int[Tensor, "members batch"]
) -> Float[Tensor, "members batch"]:
    """Cross-entropy of every example of every member.

    >>> cross_entropies(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.long)).exp()
    tensor([[4.]])
    """
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
