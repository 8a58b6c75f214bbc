r"""A noisy photograph fitted by many coordinate networks at once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.errors import DataError, HyperparameterError, MissingExtraError
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric
from poprisk_lab.paper.inr.pixels import packed_pixels

IMAGES = ("astronaut", "coffee", "chelsea")
CLEAN_PSNR, NOISY_PSNR, HIGH_POWER = "clean PSNR", "noisy PSNR", "high-frequency residual power"
RING = 0.25
"""Radius in cycles per pixel beyond which a frequency is high: half of Nyquist's 0.5."""
CHANNELS = 3
_MEMBERS_AT_ONCE = 32  # per measurement: 16 384 pixels x 256 units x 32 members are 0.5 GB
_SPECTRUM_SIDE = 64


@dataclass(frozen=True)
class InrTask:
    r"""A photograph with Gaussian noise, fitted by a coordinate network that can also fit the noise.

    Coordinates v in [0, 1)² pass through random Fourier features :math:`(\sin 2\pi F v, \cos 2\pi F v)` with
    :math:`F_{jk} \sim N(0, s^2)`, drawn once for each seed and not trained, then through ReLU layers to red, green and
    blue; the loss is the mean square over a batch of pixels. Because of the Fourier
    features, this network fits fine detail, and thus also pixel noise, within a few hundred epochs: a plain coordinate
    MLP is too smooth to overfit. The paper does not publish its network, noise or image.

    Attributes:
        image: One of scikit-image's bundled photographs: ``astronaut``, ``coffee`` or ``chelsea``.
        size: Side in pixels; the central square of the photograph is resized with anti-aliasing.
        noise: Standard deviation of the noise, for values in [0, 1]; drawn once for each seed, not clipped.
        frequencies: Number of rows of F.
        scale: Scale s, in cycles per picture.
        width: Number of units of a hidden layer.
        layers: Number of hidden layers.
        batch: Number of pixels per step.
        steps: Number of optimizer steps.
        evaluations: Number of measurements; large, because AdamW is best early.
    """

    image: str = "astronaut"
    size: int = 128
    noise: float = 0.2
    frequencies: int = 128
    scale: float = 10.0
    width: int = 256
    layers: int = 3
    batch: int = 2_048
    steps: int = 3_000
    evaluations: int = 100

    def __post_init__(self) -> None:
        if self.image not in IMAGES:
            raise DataError(f"image must be one of {', '.join(IMAGES)}, got {self.image!r}")
        _require(self.size >= 4, "size must be 4 or more", self.size)
        _require(self.noise >= 0, "noise must be 0 or more", self.noise)
        _require(self.scale > 0, "scale must be positive", self.scale)
        sizes = (self.frequencies, self.width, self.layers)
        _require(min(sizes) >= 1, "frequencies, width and layers must be 1 or more", sizes)
        _require(1 <= self.batch <= self.size**2, "batch must lie between 1 and the number of pixels", self.batch)

    @property
    def name(self) -> str:
        """``inr_astronaut``, or ``inr_astronaut_clean`` without noise."""
        return f"inr_{self.image}" + ("" if self.noise else "_clean")

    @property
    def description(self) -> str:
        """Image, noise, network and loss in one sentence."""
        seen = f"with Gaussian noise of standard deviation {self.noise:g}" if self.noise else "without noise"
        return (
            f"scikit-image's photograph '{self.image}' at {self.size} x {self.size} pixels, {seen}, fitted from its "
            f"coordinates: {self.frequencies} random Fourier frequencies of scale {self.scale:g}, {self.layers} ReLU "
            f"layers of {self.width} units; mean square error"
        )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every layer."""
        hidden = ((self.width, self.width),) * (self.layers - 1)
        return ((self.width, 2 * self.frequencies), *hidden, (CHANNELS, self.width))

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """PSNR against the clean and the noisy picture, and the high-frequency part of the residual."""
        return (
            TaskMetric(CLEAN_PSNR, True, spec=".2f"),
            TaskMetric(NOISY_PSNR, True, spec=".2f"),
            TaskMetric(HIGH_POWER, False, spec=".2e"),
        )

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """One stream: all pixels."""
        return {"pixels": (self.size**2, self.batch)}

    def initial(self, seed: int) -> dict[str, Tensor]:
        """The default of ``torch.nn.Linear``: weights and biases uniform within ±1/sqrt(inputs)."""
        generator = torch.Generator().manual_seed(stream(seed, "inr weights"))
        weights: dict[str, Tensor] = {}
        for i, (fan_out, fan_in) in enumerate(self.shapes):
            reach = 1 / math.sqrt(fan_in)
            weights[f"layer{i}.weight"] = torch.empty(fan_out, fan_in).uniform_(-reach, reach, generator=generator)
            weights[f"layer{i}.bias"] = torch.empty(fan_out).uniform_(-reach, reach, generator=generator)
        return weights

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "InrCohort":
        """The members with these seeds, each with the noise and the frequencies of its seed."""
        return InrCohort(self, seeds, device)

    def portrait(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Any]:
        """The fitted, noisy and clean pictures, packed, and the log10 spectrum of the residual, centred."""
        stacked = {name: value.detach().cpu().unsqueeze(0) for name, value in weights.items()}
        fitted = network(self, stacked, fourier_features(self, seed).unsqueeze(0))[0]
        clean = photograph(self.image, self.size)
        pictures = {"fitted": fitted, "noisy": noisy_pixels(self, seed), "clean": clean}
        packed = {
            name: packed_pixels(value.reshape(self.size, self.size, CHANNELS)) for name, value in pictures.items()
        }
        return {**packed, "spectrum": _log_spectrum(fitted - clean, self.size), "ring": RING}


class InrCohort:
    """Pixels and features of many members on one device.

    Attributes:
        clean: The picture without noise, one row per pixel.
        noisy: The noisy picture, for each distinct seed.
        features: Inputs of the network, for each distinct seed.
    """

    def __init__(self, task: InrTask, seeds: Sequence[int], device: torch.device) -> None:
        self.task = task
        unique = sorted(set(seeds))
        self._seed_index: Int[Tensor, "members 1"] = torch.tensor(
            [[unique.index(seed)] for seed in seeds], device=device
        )
        self.clean = photograph(task.image, task.size).to(device)
        self.noisy = torch.stack([noisy_pixels(task, seed) for seed in unique]).to(device)
        self.features = torch.stack([fourier_features(task, seed) for seed in unique]).to(device)
        self._high = high_frequencies(task.size).to(device)

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Mean squared error of each member on its noisy pixels."""
        pixels, seed = batch["pixels"], self._seed_index
        fitted = network(self.task, weights, self.features[seed, pixels])
        return (fitted - self.noisy[seed, pixels]).square().mean((1, 2))

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """PSNR against the clean picture."""
        return torch.cat([psnr(self._fitted(part, first) - self.clean) for part, first in _parts(weights)])

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """Both PSNRs and the high-frequency power of the residual, over the whole picture."""
        parts = [self._measure(part, first) for part, first in _parts(weights)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _measure(self, weights: StackedWeights, first: int) -> dict[str, Tensor]:
        seed = self._seed_index[first : first + _MEMBERS_AT_ONCE, 0]
        fitted = self._fitted(weights, first)
        residual = fitted - self.clean
        return {
            CLEAN_PSNR: psnr(residual),
            NOISY_PSNR: psnr(fitted - self.noisy[seed]),
            HIGH_POWER: (residual_power(residual, self.task.size) * self._high).sum((-2, -1)),
        }

    def _fitted(self, weights: StackedWeights, first: int) -> Float[Tensor, "members pixels channels"]:
        """The pictures of the members from the given one on."""
        return network(self.task, weights, self.features[self._seed_index[first : first + _MEMBERS_AT_ONCE, 0]])


def _parts(weights: StackedWeights) -> Iterator[tuple[StackedWeights, int]]:
    """The weights of as many members as are measured at once, with the number of the first of them."""
    for first in range(0, len(next(iter(weights.values()))), _MEMBERS_AT_ONCE):
        yield {name: value[first : first + _MEMBERS_AT_ONCE] for name, value in weights.items()}, first


def network(
    task: InrTask, weights: StackedWeights, features: Float[Tensor, "members pixels features"]
) -> Float[Tensor, "members pixels channels"]:
    """The colours of each member at its pixels; not clipped to [0, 1]."""
    value = _affine(weights, 0, features)
    for i in range(1, task.layers + 1):
        value = _affine(weights, i, value.relu())
    return value


def psnr(error: Float[Tensor, "*members pixels channels"]) -> Float[Tensor, "*members"]:
    r"""Peak signal-to-noise ratio in dB of values whose peak is 1: :math:`-10 \log_{10}` of the mean square error.

    >>> psnr(torch.full((4, 3), 0.1))
    tensor(20.)
    """
    return -10 * error.square().mean((-2, -1)).log10()


def residual_power(
    residual: Float[Tensor, "*members pixels channels"], size: int
) -> Float[Tensor, "*members size size"]:
    r"""Mean square of the residual by frequency, averaged over channels: :math:`|\hat r_f|^2 / N^2` for N pixels.

    Summed over all frequencies it is the mean square of the residual (Parseval).

    >>> residual_power(torch.full((16, 3), 0.5), size=4).sum()
    tensor(0.2500)
    """
    picture = residual.unflatten(-2, (size, size)).movedim(-1, -3)
    return (torch.fft.fft2(picture).abs() / size**2).square().mean(-3)


def high_frequencies(size: int, ring: float = RING) -> Bool[Tensor, "size size"]:
    """Which frequencies, in the order of ``torch.fft.fft2``, lie outside the ring (in cycles per pixel).

    >>> high_frequencies(4).int().tolist()
    [[0, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    """
    frequency = torch.fft.fftfreq(size)
    return frequency[:, None].square() + frequency.square() > ring**2


@lru_cache
def photograph(image: str, size: int) -> Float[Tensor, "pixels channels"]:
    """The central square of a bundled photograph, resized with anti-aliasing, one row per pixel, values in [0, 1].

    Raises:
        MissingExtraError: If scikit-image is not installed.
    """
    try:
        from skimage import data, transform
    except ImportError:
        raise MissingExtraError("scikit-image", "data", "the experiment on image denoising") from None
    picture = getattr(data, image)()
    side = min(picture.shape[:2])
    top, left = ((length - side) // 2 for length in picture.shape[:2])
    square = picture[top : top + side, left : left + side] / 255
    resized = transform.resize(square, (size, size), anti_aliasing=True)
    return torch.as_tensor(resized, dtype=torch.float32).clamp(0, 1).reshape(-1, CHANNELS)


def noisy_pixels(task: InrTask, seed: int) -> Float[Tensor, "pixels channels"]:
    """The photograph plus the noise of the seed, not clipped."""
    clean = photograph(task.image, task.size)
    generator = torch.Generator().manual_seed(stream(seed, "inr noise"))
    return clean + task.noise * torch.randn(clean.shape, generator=generator)


def fourier_features(task: InrTask, seed: int) -> Float[Tensor, "pixels features"]:
    """Sines, then cosines, of the coordinates of every pixel at the random frequencies of the seed."""
    generator = torch.Generator().manual_seed(stream(seed, "inr frequencies"))
    frequencies = task.scale * torch.randn(task.frequencies, 2, generator=generator)
    axis = torch.arange(task.size) / task.size
    coordinates = torch.cartesian_prod(axis, axis)
    phase = 2 * math.pi * coordinates @ frequencies.T
    return torch.cat([phase.sin(), phase.cos()], dim=1)


def _log_spectrum(residual: Float[Tensor, "pixels channels"], size: int) -> list[list[float]]:
    """The logarithm of the spectrum, averaged over neighbouring frequencies to about 64 x 64 values."""
    power = torch.fft.fftshift(residual_power(residual, size))
    block = size // _SPECTRUM_SIDE
    if block > 1 and size % block == 0:
        power = power.reshape(size // block, block, size // block, block).mean((1, 3))
    return [[round(value, 3) for value in row] for row in power.clamp_min(1e-12).log10().tolist()]


def _affine(weights: StackedWeights, layer: int, inputs: Float[Tensor, "members points inputs"]) -> Tensor:
    return torch.baddbmm(weights[f"layer{layer}.bias"].unsqueeze(1), inputs, weights[f"layer{layer}.weight"].mT)


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise HyperparameterError(f"{expected}, got {got}")
