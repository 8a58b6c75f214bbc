r"""The equation u_t + 5 u_x = 0 solved by many physics-informed networks at once, from a noisy initial condition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric

NOISY, CLEAN = "pinn_noisy", "pinn_clean"
ERROR, SENSOR_FIT = "relative l2 error", "misfit to the sensors"
PERIOD = 2 * math.pi
_MEMBERS_AT_ONCE = 32  # per measurement: 10 201 points x 512 units x 32 members are 0.7 GB


@dataclass(frozen=True)
class PinnTask:
    r"""Advection of sin x around a circle, known from sensors at t = 0 with Gaussian noise.

    The solution of :math:`u_t + c\,u_x = 0`, periodic on :math:`[0, 2\pi)` with :math:`u(x, 0) = \sin x`, is
    :math:`\sin(x - c t)`. The inputs of the network are x and t. It minimizes

    .. math::
        \frac{w_r}{b_r}\sum (u_t + c\,u_x)^2 + \frac{w_b}{b_b}\sum (u(0, t) - u(2\pi, t))^2
        + \frac{w_0}{b_0}\sum (u(x, 0) - y)^2,

    each sum over a batch of points of its kind. The paper gives the equation, c = 5, noise of standard deviation 1, the
    size of the network, 8 000 iterations and the grid; the initial condition, the points, the batches and the weights
    of the terms are our choice.

    Attributes:
        noise: Standard deviation of the sensor noise, drawn once for each seed.
        speed: Speed c.
        width: Number of units of a hidden layer.
        layers: Number of hidden tanh layers.
        interior: Number of points for the residual, uniform over space and time, drawn once for each seed.
        interior_batch: Number of these points per step.
        sensors: Number of evenly spaced points of the initial condition.
        sensor_batch: Number of these points per step.
        boundary: Number of times at which the two ends must agree, uniform, drawn once for each seed.
        boundary_batch: Number of these times per step.
        residual_weight: Weight w_r of the residual.
        boundary_weight: Weight w_b of the boundary term.
        initial_weight: Weight w_0 of the initial condition.
        grid: Number of points of the test grid in x and in t, both ends included.
        steps: Number of optimizer steps.
        evaluations: Number of measurements.
    """

    noise: float = 1.0
    speed: float = 5.0
    width: int = 512
    layers: int = 8
    interior: int = 10_000
    interior_batch: int = 512
    sensors: int = 256
    sensor_batch: int = 64
    boundary: int = 1_000
    boundary_batch: int = 64
    residual_weight: float = 1.0
    boundary_weight: float = 1.0
    initial_weight: float = 1.0
    grid: int = 101
    steps: int = 8_000
    evaluations: int = 80

    def __post_init__(self) -> None:
        _require(self.noise >= 0, "noise must be 0 or more", self.noise)
        _require(self.width >= 1 and self.layers >= 1, "width and layers must be 1 or more", (self.width, self.layers))
        _require(self.grid >= 2, "grid must be 2 or more", self.grid)
        for name, (points, batch) in self.streams.items():
            _require(1 <= batch <= points, f"the batch of {name} points must lie between 1 and their number", batch)

    @property
    def name(self) -> str:
        """``pinn_clean`` or ``pinn_noisy``."""
        return NOISY if self.noise else CLEAN

    @property
    def description(self) -> str:
        """Equation, noise, network and loss in one sentence."""
        seen = f"seen through Gaussian noise of standard deviation {self.noise:g}" if self.noise else "without noise"
        return (
            f"u_t + {self.speed:g} u_x = 0, periodic, u(x, 0) = sin x at {self.sensors} sensors {seen}; "
            f"{self.layers} tanh layers of {self.width} units ({self.parameters:,} parameters); squared residual, "
            "boundary and initial terms"
        )

    @property
    def parameters(self) -> int:
        """Number of parameters of the network.

        >>> PinnTask().parameters
        1840641
        """
        return sum(fan_out * (fan_in + 1) for fan_out, fan_in in self.shapes)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every layer: x and t in, u out."""
        hidden = ((self.width, self.width),) * (self.layers - 1)
        return ((self.width, 2), *hidden, (1, self.width))

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Error against the solution without noise, target 0.40 as in the paper; mean square misfit to the sensors."""
        return TaskMetric(ERROR, False, target=0.4), TaskMetric(SENSOR_FIT, False)

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """Points of the equation, of the initial condition and of the boundary, and their batches."""
        return {
            "interior": (self.interior, self.interior_batch),
            "initial": (self.sensors, self.sensor_batch),
            "boundary": (self.boundary, self.boundary_batch),
        }

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Glorot's uniform weights, biases 0."""
        generator = torch.Generator().manual_seed(stream(seed, "pinn weights"))
        weights: dict[str, Tensor] = {}
        for i, (fan_out, fan_in) in enumerate(self.shapes):
            reach = math.sqrt(6 / (fan_in + fan_out))
            weights[f"layer{i}.weight"] = torch.empty(fan_out, fan_in).uniform_(-reach, reach, generator=generator)
            weights[f"layer{i}.bias"] = torch.zeros(fan_out)
        return weights

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "PinnCohort":
        """The members with these seeds, each with the points and the noise of its seed."""
        return PinnCohort(self, seeds, device)

    def portrait(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Any]:
        """The absolute error on the grid, as [t][x], rounded to 4 digits."""
        stacked = {name: value.unsqueeze(0) for name, value in weights.items()}
        device = next(iter(stacked.values())).device
        points = grid_points(self.grid).to(device)
        error = network(self, stacked, points.unsqueeze(0))[0] - exact_solution(points, self.speed)
        rows = error.abs().reshape(self.grid, self.grid).cpu().tolist()
        return {"error_field": [[round(value, 4) for value in row] for row in rows]}


class PinnCohort:
    """Points and sensors of many members on one device, and their losses.

    Attributes:
        interior: Points (x, t) of the residual, for each distinct seed.
        sensor_points: Points (x, 0) of the sensors, the same for all.
        readings: Sensor readings, for each distinct seed.
        times: Times of the boundary points, for each distinct seed.
    """

    def __init__(self, task: PinnTask, seeds: Sequence[int], device: torch.device) -> None:
        self.task = task
        unique = sorted(set(seeds))
        self._seed_index: Int[Tensor, "members 1"] = torch.tensor(
            [[unique.index(seed)] for seed in seeds], device=device
        )
        self.interior = torch.stack([_interior_points(task, seed) for seed in unique]).to(device)
        self.sensor_points = sensor_points(task.sensors).to(device)
        self.readings = torch.stack([sensor_readings(task, seed) for seed in unique]).to(device)
        self.times = torch.stack([_uniform(task.boundary, seed, "pinn boundary") for seed in unique]).to(device)
        self._ends = torch.tensor([0.0, PERIOD], device=device)
        direction = torch.tensor([task.speed, 1.0], device=device)
        self._along = direction.expand(len(seeds), task.interior_batch, 2).contiguous()
        self._grid = grid_points(task.grid).to(device)
        self._solution = exact_solution(self._grid, task.speed)

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Residual, boundary and initial terms of each member, with the task's weights."""
        task, seed = self.task, self._seed_index
        inner = self.interior[seed, batch["interior"]]
        initial = self.sensor_points[batch["initial"]]
        times = self.times[seed, batch["boundary"]]
        left, right = (torch.stack([end.expand_as(times), times], dim=-1) for end in self._ends)
        points = torch.cat([inner, initial, left, right], dim=1)
        values, residual = network_and_residual(task, weights, points, self._along)
        at_sensors, at_left, at_right = values[:, inner.shape[1] :].split(
            [initial.shape[1], times.shape[1], times.shape[1]], dim=1
        )
        misfit = at_sensors - self.readings[seed, batch["initial"]]
        return (
            task.residual_weight * residual.square().mean(1)
            + task.boundary_weight * (at_left - at_right).square().mean(1)
            + task.initial_weight * misfit.square().mean(1)
        )

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """Relative l2 error on the grid, and the mean square misfit to all sensors."""
        parts = [
            self._measure({name: value[first : first + _MEMBERS_AT_ONCE] for name, value in weights.items()}, first)
            for first in range(0, len(self._seed_index), _MEMBERS_AT_ONCE)
        ]
        errors, misfits = zip(*parts, strict=True)
        return {ERROR: torch.cat(errors), SENSOR_FIT: torch.cat(misfits)}

    def _measure(self, weights: StackedWeights, first: int) -> tuple[Tensor, Tensor]:
        members = len(weights["layer0.bias"])
        points = torch.cat([self._grid, self.sensor_points]).expand(members, -1, -1)
        values, at_sensors = network(self.task, weights, points).split([len(self._grid), self.task.sensors], dim=1)
        error = (values - self._solution).norm(dim=1) / self._solution.norm()
        readings = self.readings[self._seed_index[first : first + members, 0]]
        return error, (at_sensors - readings).square().mean(1)


def network(
    task: PinnTask, weights: StackedWeights, points: Float[Tensor, "members points 2"]
) -> Float[Tensor, "members points"]:
    """The value of u for each member at its points."""
    value = points
    for i in range(task.layers):
        value = _affine(weights, i, value).tanh()
    return _affine(weights, task.layers, value).squeeze(-1)


def network_and_residual(
    task: PinnTask,
    weights: StackedWeights,
    points: Float[Tensor, "members points 2"],
    along: Float[Tensor, "members inner 2"],
) -> tuple[Float[Tensor, "members points"], Float[Tensor, "members inner"]]:
    r"""Values of u at all points, and its derivative in the given directions at the first of them.

    Along (x, t) = (c, 1) that one derivative is the equation's residual u_t + c u_x. It is carried forward beside the
    value: through a layer :math:`h = \tanh(W h_{-} + b)` it becomes :math:`\dot h = (1 - h^2)\, W \dot h_{-}`.
    Training needs only a backward pass through both, no second derivative.

    Args:
        task: Task, for the number of layers.
        weights: Weights of all members.
        points: Points at which to evaluate u, for each member.
        along: A direction for each of a member's first points.
    """
    value, tangent, inner = points, along, along.shape[1]
    for i in range(task.layers):
        value = _affine(weights, i, value).tanh()
        slope = torch.bmm(tangent, weights[f"layer{i}.weight"].mT)
        # The derivative of tanh from its output, in one kernel that can itself be differentiated.
        tangent = torch.ops.aten.tanh_backward(slope, value[:, :inner])
    u = _affine(weights, task.layers, value).squeeze(-1)
    return u, torch.bmm(tangent, weights[f"layer{task.layers}.weight"].mT).squeeze(-1)


def exact_solution(points: Float[Tensor, "*points 2"], speed: float) -> Float[Tensor, "*points"]:
    """sin(x - c t), the solution without noise.

    >>> exact_solution(torch.tensor([[math.pi / 2 + 5, 1.0]]), speed=5.0)
    tensor([1.])
    """
    return torch.sin(points[..., 0] - speed * points[..., 1])


def grid_points(count: int) -> Float[Tensor, "points 2"]:
    """(x, t) on an even grid of count x count points, both ends included; x runs fastest.

    >>> grid_points(3)[:4, 1].tolist(), grid_points(3)[:4, 0].div(math.pi).tolist()
    ([0.0, 0.0, 0.0, 0.5], [0.0, 1.0, 2.0, 0.0])
    """
    t, x = torch.meshgrid(torch.linspace(0, 1, count), torch.linspace(0, PERIOD, count), indexing="ij")
    return torch.stack([x, t], dim=-1).reshape(-1, 2)


def sensor_points(count: int) -> Float[Tensor, "sensors 2"]:
    """(x, 0) of evenly spaced sensors on the circle.

    >>> sensor_points(4)[:, 0].div(math.pi).tolist()
    [0.0, 0.5, 1.0, 1.5]
    """
    x = torch.arange(count) * (PERIOD / count)
    return torch.stack([x, torch.zeros(count)], dim=-1)


def sensor_readings(task: PinnTask, seed: int) -> Float[Tensor, "sensors"]:
    """The initial condition sin x plus the noise of the seed."""
    generator = torch.Generator().manual_seed(stream(seed, "pinn noise"))
    clean = exact_solution(sensor_points(task.sensors), task.speed)
    return clean + task.noise * torch.randn(task.sensors, generator=generator)


def _interior_points(task: PinnTask, seed: int) -> Float[Tensor, "interior 2"]:
    x = PERIOD * _uniform(task.interior, seed, "pinn places")
    return torch.stack([x, _uniform(task.interior, seed, "pinn times")], dim=-1)


def _uniform(count: int, seed: int, purpose: str) -> Float[Tensor, "count"]:
    return torch.rand(count, generator=torch.Generator().manual_seed(stream(seed, purpose)))


def _affine(weights: StackedWeights, layer: int, inputs: Float[Tensor, "members points inputs"]) -> Tensor:
    return torch.baddbmm(weights[f"layer{layer}.bias"].unsqueeze(1), inputs, weights[f"layer{layer}.weight"].mT)


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise HyperparameterError(f"{expected}, got {got}")
