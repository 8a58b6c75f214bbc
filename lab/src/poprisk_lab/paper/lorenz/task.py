r"""Chaotic dynamics from noisy states: a network predicts the next state of Lorenz '63 from the present one.

The truth is :math:`\dot x = 10 (y - x),\ \dot y = x (28 - z) - y,\ \dot z = x y - \tfrac{8}{3} z`, on its attractor. A
sensor reports every state with Gaussian noise, and the network is trained to map one *reported* state to the next, by
squared error. It is measured on the true system: one step from true held-out states, and the length of valid roll-outs.

States are standardized by the means and standard deviations of the attractor (constants, the same for every seed), so
that ``noise`` is in units of each coordinate's standard deviation and an error of 1 is that of predicting the mean.

Noise in the *inputs* (errors in variables) has two consequences. The best predictor of the reported data is not the
true flow: it shrinks a reported state towards the attractor, and averages the flow over the states compatible with the
report. No amount of data removes this; an optimizer can only avoid fitting single noisy points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric
from poprisk_lab.paper.lorenz.system import LYAPUNOV_EXPONENT, in_own_units, orbit, simulate, standardized

HELD_OUT = TaskMetric("held-out MSE", higher_is_better=False, spec=".5f")
VALID_TIME = TaskMetric("valid prediction time", higher_is_better=True, spec=".2f")
TRAIN_LOSS = TaskMetric("train loss", higher_is_better=False, spec=".5f")

_LOST = 0.4  # a roll-out ends when its error exceeds this share of the attractor's root mean square
_EVERY = 2  # number of states per state kept in a picture
_WALLS = 10.0  # standard deviations at which a diverging roll-out is cut off in a picture


@dataclass(frozen=True)
class LorenzTask:
    """One-step prediction of Lorenz '63 under one level of sensor noise.

    Attributes:
        noise: Standard deviation of the sensor's noise, in standard deviations of each coordinate.
        train_pairs: Number of consecutive pairs of reported states, from one trajectory per seed.
        test_states: Number of true held-out states, from another trajectory.
        interval: Time from one state to the next.
        width: Number of units of a hidden layer.
        hidden_layers: Number of hidden layers.
        batch_size: Number of pairs per step.
        steps: Number of optimizer steps.
        evaluations: Number of measurements, evenly spaced.
        rollouts: Number of held-out states from which the valid prediction time is measured.
        horizon: Maximum valid prediction time, in Lyapunov times.
        portrait_steps: Number of steps of the roll-out in a picture, of which every second state is kept.

    >>> task = LorenzTask(noise=0.1, train_pairs=50, test_states=40, width=8, batch_size=16, rollouts=2)
    >>> sorted(task.initial(seed=0))[:2], task.streams
    (['0.bias', '0.weight'], {'train': (50, 16)})
    """

    noise: float = 0.1
    train_pairs: int = 2000
    test_states: int = 2000
    interval: float = 0.02
    width: int = 128
    hidden_layers: int = 3
    batch_size: int = 128
    steps: int = 10_000
    evaluations: int = 50
    rollouts: int = 32
    horizon: float = 5.0
    portrait_steps: int = 2000

    def __post_init__(self) -> None:
        _require(self.noise >= 0, "noise must be at least 0", self.noise)
        _require(self.interval > 0 and self.horizon > 0, "interval and horizon must be > 0", self)
        counts = ("train_pairs", "width", "hidden_layers", "batch_size", "steps", "evaluations", "rollouts")
        for name in (*counts, "portrait_steps"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        most = self.train_pairs
        _require(self.batch_size <= most, f"batch_size must be at most the {most} training pairs", self.batch_size)
        fewest = self.rollouts + 1
        _require(self.test_states >= fewest, f"test_states must be at least rollouts + 1 = {fewest}", self.test_states)

    @property
    def name(self) -> str:
        """Name with the noise, which can be part of a file name."""
        return f"lorenz_noise{self.noise:g}"

    @property
    def description(self) -> str:
        """Task, noise, network and loss in one sentence."""
        sensor = f"sensor noise of {self.noise:g} standard deviations" if self.noise else "no sensor noise"
        return (
            f"next state of Lorenz '63 after {self.interval:g} units of time, {sensor} in inputs and targets, "
            f"{self.train_pairs} pairs; x + f(x) with {self.hidden_layers} hidden layers of {self.width} SiLU units; "
            f"squared error, batches of {self.batch_size}; measured on true states"
        )

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        r"""The one-step error from true states, the time that a roll-out stays near the truth, and the training loss.

        The valid prediction time is how long a roll-out from a true state stays within
        :math:`\|\hat x - x\| \le 0.4 \sqrt{3}` of the truth (standardized states have mean square 3), in Lyapunov
        times, averaged over the starts and limited to the horizon.
        """
        return HELD_OUT, VALID_TIME, TRAIN_LOSS

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """One stream: the training pairs."""
        return {"train": (self.train_pairs, self.batch_size)}

    @property
    def rollout_steps(self) -> int:
        """Number of steps up to the horizon."""
        return max(1, round(self.horizon / LYAPUNOV_EXPONENT / self.interval))

    def initial(self, seed: int) -> dict[str, Tensor]:
        """PyTorch's default initialization of linear layers, from the seed alone."""
        sizes = [3] + [self.width] * self.hidden_layers + [3]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "lorenz weights"))
            layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
        return {f"{i}.{name}": w.detach() for i, layer in enumerate(layers) for name, w in layer.named_parameters()}

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "LorenzCohort":
        """Members with these seeds, with their trajectories on the device."""
        return LorenzCohort(self, seeds, device)

    def portrait(self, weights: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
        """A long roll-out of one member and the truth from the same true state, in the original units.

        A diverging roll-out is clipped at ten standard deviations.

        Args:
            weights: Weights of one member.
            seed: Seed of the member; the roll-out starts on its held-out trajectory.

        Returns:
            ``rollout`` and ``truth``, each a list of [x, y, z], and ``time`` between two of them.
        """
        stacked = {name: weight.detach().cpu().float()[None] for name, weight in weights.items()}
        _, test = simulate([seed], 0, self.interval)
        truth = standardized(orbit(test[0].T, self.portrait_steps, self.interval)[:, :, 0])
        state = torch.from_numpy(truth[:1]).float()[None]
        states = [state[0, 0].tolist()]
        for _ in range(self.portrait_steps):
            state = torch.nan_to_num(predicted(stacked, state), nan=_WALLS).clamp(-_WALLS, _WALLS)
            states.append(state[0, 0].tolist())
        shown = {"rollout": np.array(states), "truth": truth}
        lists = {name: in_own_units(values[::_EVERY]).round(3).tolist() for name, values in shown.items()}
        return {**lists, "time": _EVERY * self.interval}


class LorenzCohort:
    """Many predictors at once, each with the trajectory of its seed."""

    def __init__(self, task: LorenzTask, seeds: Sequence[int], device: torch.device) -> None:
        unique = sorted(set(seeds))
        self._task = task
        self._seed_index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        self._reported = reported_states(task, unique).to(device)
        self._true = true_states(task, unique).to(device)
        starts = torch.linspace(0, task.test_states - 1, task.rollouts).long()
        self._futures = _futures(task, unique, starts).to(device)  # [seeds, times, rollouts, 3]

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The mean squared error of each member on its batch of reported pairs."""
        of, at = self._seed_index[:, None], batch["train"]
        return _squared_error(weights, self._reported[of, at], self._reported[of, at + 1])

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """One-step error on true states."""
        true = self._true[self._seed_index]
        return _squared_error(weights, true[:, :-1], true[:, 1:])

    @torch.no_grad()
    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """One-step error on true states, valid prediction time, loss on all reported pairs."""
        reported = self._reported[self._seed_index]
        return {
            HELD_OUT.name: self.measure_first(weights),
            VALID_TIME.name: self._valid_time(weights),
            TRAIN_LOSS.name: _squared_error(weights, reported[:, :-1], reported[:, 1:]),
        }

    def _valid_time(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        futures = self._futures[self._seed_index]  # [members, times, rollouts, 3]
        state = futures[:, 0]
        on_track = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
        valid = torch.zeros(state.shape[:2], device=state.device)
        for time in range(1, futures.shape[1]):
            state = predicted(weights, state)
            on_track = on_track & ((state - futures[:, time]).norm(dim=-1) <= _LOST * 3**0.5)  # false for NaN
            valid += on_track
        return valid.mean(dim=1) * self._task.interval * LYAPUNOV_EXPONENT


def predicted(weights: StackedWeights, states: Float[Tensor, "members batch 3"]) -> Float[Tensor, "members batch 3"]:
    """The next states, x + f(x), for every member at once."""
    layers = len(weights) // 2
    x = states
    for layer in range(layers):
        x = torch.baddbmm(weights[f"{layer}.bias"][:, None], x, weights[f"{layer}.weight"].transpose(1, 2))
        x = x if layer == layers - 1 else F.silu(x)
    return states + x


def true_states(task: LorenzTask, seeds: Sequence[int]) -> Float[Tensor, "seeds states 3"]:
    """The held-out trajectory of each seed, standardized."""
    _, test = _trajectories(task, seeds)
    return _standardized_tensor(test)


def reported_states(task: LorenzTask, seeds: Sequence[int]) -> Float[Tensor, "seeds states 3"]:
    """The training trajectory of each seed, standardized and noisy; noise levels scale the same draw."""
    train, _ = _trajectories(task, seeds)
    generators = [torch.Generator().manual_seed(stream(seed, "lorenz noise")) for seed in seeds]
    noise = [torch.randn(train.shape[1:], generator=generator, dtype=torch.float64) for generator in generators]
    return (torch.from_numpy(standardized(train)) + task.noise * torch.stack(noise)).float()


def _trajectories(task: LorenzTask, seeds: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    train, test = simulate(seeds, max(task.train_pairs, task.test_states), task.interval)
    return train[:, : task.train_pairs + 1], test[:, : task.test_states + 1]


def _futures(task: LorenzTask, seeds: Sequence[int], starts: Tensor) -> Float[Tensor, "seeds times rollouts 3"]:
    """The true states from each start up to the horizon."""
    test = _trajectories(task, seeds)[1][:, starts.numpy()]  # [seeds, rollouts, 3]
    states = orbit(test.reshape(-1, 3).T, task.rollout_steps, task.interval)  # [times, 3, seeds · rollouts]
    futures = states.transpose(2, 0, 1).reshape(len(seeds), task.rollouts, len(states), 3)
    return _standardized_tensor(futures).transpose(1, 2).contiguous()


def _standardized_tensor(states: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(standardized(states)).float()


def _squared_error(weights: StackedWeights, states: Tensor, following: Tensor) -> Float[Tensor, "members"]:
    return (predicted(weights, states) - following).square().mean(dim=(1, 2))


def _require(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise HyperparameterError(f"{expected}, got {got}")
