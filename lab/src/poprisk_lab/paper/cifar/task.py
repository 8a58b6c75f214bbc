r"""CIFAR-10 with human labels, and a small convolutional network, many members at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from poprisk._core.seeds import stream
from poprisk.errors import DataError, HyperparameterError
from poprisk.runs import replace_labels
from poprisk_lab.data.cifar import HUMAN_LABELS, WRONG_SHARES, CifarImages, cifar10, human_labels
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric
from poprisk_lab.paper.cifar.stacked_convolution import CONVOLUTIONS, stacked_conv3x3
from poprisk_lab.paper.labels.task import cross_entropies

CLASSES = 10
_HALVED_AFTER = (1, 3, 5)
"""Convolutions that are followed by 2 x 2 max pooling."""
_TRAIN_MEASURED = 10_000
_SIDE, _SYNTHETIC_SIDE, _SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 32, 8, 160, 80
_MEASURE_NUMBERS = 2**30
"""Maximum number of entries of the widest layer's nine-fold copy in one chunk of a measurement: 2 GiB in bfloat16."""


@dataclass(frozen=True)
class CifarTask:
    r"""CIFAR-10's images, one of CIFAR-10N's label sets, and five convolutions.

    The network, for ``width`` :math:`w`: 3 x 3 convolutions 3 - w - 2w - 2w - 4w - 4w, each followed by normalization
    over the whole image (one group, no gain: before a ReLU and a convolution it would be redundant), a bias for each
    channel and ReLU; 2 x 2 max pooling after the first, third and fifth; then a linear layer on all outputs.
    At w = 32 an image takes 29 million multiplications.

    All seeds have the same images and labels; initial weights and order differ. With ``flips``, each image occurs
    twice, once mirrored, and an epoch still counts as many examples as there are images. Pixels are standardized by the
    mean and the standard deviation of their channel over the training images. On a GPU the network computes in
    bfloat16 (weights are cast inside the loss; normalization, the last layer and the loss use float32);
    on a CPU in float32.

    Memory at w = 32 in bfloat16, by count: a step keeps 0.5 MB per example for its backward pass; the nine-fold copy of
    ``im2col`` exists for one layer at a time, at most 256 · 9 · 2w · 2 bytes = 0.3 MB, and gradients add as much again.
    At 1 MB per example and a batch of 128, 24 members need 3 GB and 200 members 27 GB; the images take 0.3 GB.

    Attributes:
        folder: Folder with CIFAR-10 and CIFAR-10N; ``None`` for small synthetic images.
        labels: ``clean``, ``aggre``, ``random1``, ``random2``, ``random3`` or ``worse``.
        width: Number of channels after the first convolution.
        batch_size: Number of examples per step.
        epochs: Number of epochs, each with as many examples as there are training images, in whole batches.
        evaluations: Number of measurements.
        flips: Whether mirrored images are added to the examples.
        convolution: Method for the convolutions of all members, see :mod:`poprisk_lab.paper.cifar.stacked_convolution`.
        train_size: Number of training images, taken from the start.

    Raises:
        DataError: an unknown label set.
        HyperparameterError: a value out of range.

    >>> task = CifarTask(folder=None, train_size=160, batch_size=16, epochs=1)
    >>> task.name, task.steps, task.streams
    ('cifar10-random1', 10, {'train': (320, 16)})
    >>> sum(weight.numel() for weight in CifarTask("data/cifar10").initial(0).values())
    298250
    """

    folder: str | None
    labels: str = "random1"
    width: int = 32
    batch_size: int = 128
    epochs: int = 15
    evaluations: int = 15
    flips: bool = True
    convolution: str = "im2col"
    train_size: int = 50_000

    def __post_init__(self) -> None:
        if self.labels not in HUMAN_LABELS:
            raise DataError(f"labels must be one of {', '.join(HUMAN_LABELS)}, got {self.labels!r}")
        if self.convolution not in CONVOLUTIONS:
            raise HyperparameterError(f"convolution must be one of {', '.join(CONVOLUTIONS)}, got {self.convolution!r}")
        if not 1 <= self.batch_size <= self.train_size:
            raise HyperparameterError(f"batch_size must lie between 1 and {self.train_size}, got {self.batch_size}")
        if min(self.width, self.epochs, self.evaluations) < 1:
            raise HyperparameterError(
                f"width, epochs and evaluations must be at least 1, got {self.width}, {self.epochs}, {self.evaluations}"
            )

    @property
    def name(self) -> str:
        """The label set."""
        return f"cifar10-{self.labels}"

    @property
    def description(self) -> str:
        """Data, labels, network and loss in one sentence."""
        images = "synthetic images, not CIFAR-10" if self.folder is None else "CIFAR-10"
        given = "true labels" if self.labels == "clean" else f"CIFAR-10N labels {self.labels!r}"
        channels = "-".join(str(n) for n in self.channels)
        flips = ", mirrored images too" if self.flips else ""
        return f"{images}, {self.train_size} examples{flips}, {given}; convolutions {channels}, cross-entropy"

    @property
    def channels(self) -> tuple[int, ...]:
        """Numbers of channels before the first convolution and after each."""
        return (3, *(self.width * factor for factor in (1, 2, 2, 4, 4)))

    @property
    def features(self) -> int:
        """Number of inputs of the linear layer: the last channels on an eight times coarser grid."""
        side = (_SYNTHETIC_SIDE if self.folder is None else _SIDE) // 2 ** len(_HALVED_AFTER)
        return self.channels[-1] * side * side

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Test accuracy first; ``memorized``, the share of wrong labels reproduced, only if labels are wrong."""
        always = (TaskMetric("test accuracy", True), TaskMetric("test loss", False), TaskMetric("train accuracy", True))
        return always if self.labels == "clean" else (*always, TaskMetric("memorized", False))

    @property
    def steps(self) -> int:
        """Number of whole batches in all epochs."""
        return self.epochs * (self.train_size // self.batch_size)

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """One stream: the training images, followed by their mirror images."""
        return {"train": (self.train_size * (2 if self.flips else 1), self.batch_size)}

    @property
    def copies(self) -> int:
        """Number of copies of each image in the stream: with flips, the mirror image of i is i + ``train_size``."""
        return 2 if self.flips else 1

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Normal weights of variance 2 / fan in, biases 0; the last layer uniform within ±1/√(fan in)."""
        generator = torch.Generator().manual_seed(stream(seed, "weights"))
        weights: dict[str, Tensor] = {}
        for i, (fan_in, out) in enumerate(zip(self.channels[:-1], self.channels[1:], strict=True), 1):
            normal = torch.randn(out, fan_in, 3, 3, generator=generator)
            weights |= {f"conv{i}.weight": normal * sqrt(2 / (9 * fan_in)), f"conv{i}.bias": torch.zeros(out)}
        uniform = 2 * torch.rand(CLASSES, self.features + 1, generator=generator) - 1
        last, bias = (uniform / sqrt(self.features)).split([self.features, 1], 1)
        return {**weights, "linear.weight": last.contiguous(), "linear.bias": bias.squeeze(1).contiguous()}

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "CifarCohort":
        """One member per seed; members differ in initial weights and order, so the data are stored once."""
        return CifarCohort(self, len(seeds), device)

    def require_data(self) -> None:
        """Check before any training that images and labels exist and belong together.

        Raises:
            DataError: with the name of the file and what to fetch.
        """
        cifar_data(self)


@dataclass(frozen=True)
class CifarData:
    """Images as bytes, the given labels, and which of them are wrong."""

    train_images: UInt8[Tensor, "train 3 side side"]
    given: Int[Tensor, "train"]
    wrong: Bool[Tensor, "train"]
    test_images: UInt8[Tensor, "test 3 side side"]
    test_labels: Int[Tensor, "test"]


def cifar_data(task: CifarTask) -> CifarData:
    """The examples of a task.

    Raises:
        DataError: a file is missing or damaged, the labels belong to other images, or there are fewer than requested.
    """
    images, labels = _load(task.folder)
    if task.folder is not None and images.train_images.shape[-1] != _SIDE:
        raise DataError(f"{task.folder} should hold images of 32 x 32, got a side of {images.train_images.shape[-1]}")
    if task.train_size > len(images.train_labels):
        most = len(images.train_labels)
        raise DataError(f"train_size must be at most {most}, the number of training images, got {task.train_size}")
    given, true = (y[: task.train_size] for y in (labels[task.labels], images.train_labels))
    return CifarData(
        images.train_images[: task.train_size], given, given != true, images.test_images, images.test_labels
    )


@lru_cache(maxsize=1)
def _load(folder: str | None) -> tuple[CifarImages, dict[str, Tensor]]:
    if folder is None:
        return _synthetic()
    images = cifar10(folder)
    return images, human_labels(folder, images.train_labels)


def _synthetic() -> tuple[CifarImages, dict[str, Tensor]]:
    """Synthetic images in place of CIFAR-10, a noisy pattern per class, to show that the code runs."""
    generator = torch.Generator().manual_seed(stream(0, "synthetic images"))
    count = _SYNTHETIC_TRAIN + _SYNTHETIC_TEST
    patterns = torch.rand(CLASSES, 3, _SYNTHETIC_SIDE, _SYNTHETIC_SIDE, generator=generator)
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, *patterns.shape[1:], generator=generator)
    images = (255 * (patterns[labels] + 0.3 * noise).clamp(0, 1)).to(torch.uint8)
    n = _SYNTHETIC_TRAIN
    made = {name: replace_labels(labels[:n], share, CLASSES, generator).labels for name, share in WRONG_SHARES.items()}
    return CifarImages(images[:n], labels[:n], images[n:], labels[n:]), made


class CifarCohort:
    """Members of a :class:`CifarTask`. Images are stored once, as bytes; a batch is gathered, then normalized."""

    def __init__(self, task: CifarTask, members: int, device: torch.device) -> None:
        data = cifar_data(task)
        self._task, self._members = task, members
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        train = data.train_images.permute(0, 2, 3, 1).contiguous()
        mirrored = train.flip(2)
        self._train = (torch.cat([train, mirrored]) if task.flips else train).to(device)
        self._test = data.test_images.permute(0, 2, 3, 1).contiguous().to(device)
        self._given, self._wrong, self._test_labels = (y.to(device) for y in (data.given, data.wrong, data.test_labels))
        mean, deviation = channel_moments(data.train_images)
        self._mean, self._deviation = mean.to(device), deviation.to(device)

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The mean cross-entropy of each member, with the human labels."""
        index = batch["train"]
        logits = self._logits(weights, self._train[index])
        return cross_entropies(logits, self._given[index % len(self._given)]).mean(1)

    def errors(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The share of the human labels that each member does not predict."""
        index = batch["train"]
        said = self._logits(weights, self._train[index]).argmax(-1)
        return (said != self._given[index % len(self._given)]).float().mean(1)

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """The test accuracy."""
        accuracy, loss = self._tested(weights)
        return accuracy.where(loss.isfinite(), torch.nan)

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """The metrics of the task, on the first 10 000 training images; NaN where the test loss is not finite."""
        accuracy, loss = self._tested(weights)
        fitted, memorized = self._given.new_zeros(2, self._members, dtype=torch.float32).unbind()
        shown = min(_TRAIN_MEASURED, len(self._given))
        for piece in self._pieces(shown):
            same = self._shared_logits(weights, self._train[piece]).argmax(-1) == self._given[piece]
            fitted += same.sum(1)
            memorized += (same & self._wrong[piece]).sum(1)
        values = {
            "test accuracy": accuracy,
            "test loss": loss,
            "train accuracy": fitted / shown,
            "memorized": memorized / self._wrong[:shown].sum().clamp_min(1),
        }
        return {m.name: values[m.name].where(loss.isfinite(), torch.nan) for m in self._task.metrics}

    def _tested(self, weights: StackedWeights) -> tuple[Float[Tensor, "members"], Float[Tensor, "members"]]:
        """Accuracy and loss on the test images."""
        right, loss = self._given.new_zeros(2, self._members, dtype=torch.float32).unbind()
        for piece in self._pieces(len(self._test_labels)):
            logits, labels = self._shared_logits(weights, self._test[piece]), self._test_labels[piece]
            right += (logits.argmax(-1) == labels).sum(1)
            loss += cross_entropies(logits, labels.expand(self._members, -1)).sum(1)
        return right / len(self._test_labels), loss / len(self._test_labels)

    def _shared_logits(self, weights: StackedWeights, images: Tensor) -> Float[Tensor, "members batch classes"]:
        return self._logits(weights, images.expand(self._members, *images.shape))

    def _logits(
        self, weights: StackedWeights, images: UInt8[Tensor, "members batch side side 3"]
    ) -> Float[Tensor, "members batch classes"]:
        """Pool before bias and ReLU, which gives the same as pooling after them, on a quarter of the entries."""
        x = ((images.float() / 255 - self._mean) / self._deviation).to(self._dtype)
        for i in range(1, len(self._task.channels)):
            x = stacked_conv3x3(x, weights[f"conv{i}.weight"].to(self._dtype), self._task.convolution)
            x = functional.layer_norm(x, x.shape[2:])
            x = _halved(x) if i in _HALVED_AFTER else x
            x = (x + weights[f"conv{i}.bias"].to(self._dtype)[:, None, None, None]).relu()
        return torch.baddbmm(weights["linear.bias"].unsqueeze(1), x.float().flatten(2), weights["linear.weight"].mT)

    def _pieces(self, count: int) -> Iterator[slice]:
        """Chunks of the examples that are small enough for all members at once."""
        side = self._test.shape[1] // 2
        size = max(1, _MEASURE_NUMBERS // (self._members * side * side * 9 * 2 * self._task.width))
        return (slice(i, min(i + size, count)) for i in range(0, count, size))


def channel_moments(images: UInt8[Tensor, "images 3 side side"]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each colour on the scale 0 to 1, exactly, from the counts of its 256 values.

    >>> channel_moments(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 2, 2))
    (tensor([0.5000, 0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000]))
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    flat = images.transpose(0, 1).flatten(1)
    share = torch.stack([torch.bincount(channel, minlength=256) for channel in flat]).double() / flat.shape[1]
    mean = share @ values
    variance = share @ values**2 - mean**2
    return mean.float(), variance.clamp_min(1e-8).sqrt().float()


def _halved(x: Float[Tensor, "members batch side side channels"]) -> Tensor:
    """2 x 2 max pooling."""
    pooled = functional.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 2)
    return pooled.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
