"""Many training runs as one stacked computation: any mixture of arms, each member with its own hyper-parameters.

The weights of all members are one matrix. A step is one forward and backward pass of the task for all of them, then
the rule of each arm on its rows. On a GPU the whole step is a CUDA graph and the rules are compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.cli._demonstration.training import epoch_batches, evaluation_steps
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import USUAL, Arm, require_arm
from poprisk_lab.engine.gradients import GradientKind, stacked_gradient
from poprisk_lab.engine.held_block import HeldBlock
from poprisk_lab.engine.parameter_layout import ParameterLayout
from poprisk_lab.engine.peers import PEERS
from poprisk_lab.engine.task import FirstMetric, StackedTask
from poprisk_lab.engine.updates import Block, Lockstep, take_step
from poprisk_lab.engine.weight_means import WeightMeans

_COMPILATIONS = 128
"""Limit for the variants of a compiled function, one per arm; the default of Dynamo is too low."""


@dataclass(frozen=True)
class Member:
    """One training run: an arm, all its hyper-parameters, a seed, and the share of its examples that is held back."""

    arm: Arm
    hyper: Mapping[str, float]
    seed: int
    share: float = 0.0


@dataclass(frozen=True)
class Curves:
    """What was measured for the members: metrics, mean gates and final weights.

    ``every`` has the metrics of the weights and of each of their means, in the order of ``averages``, and what was
    measured on the examples held back, NaN for members that hold none back.
    """

    steps: list[int]
    metrics: dict[str, Float[Tensor, "members evaluations"]]
    gate: Float[Tensor, "members evaluations"]
    weights: Float[Tensor, "members d"]
    layout: ParameterLayout
    averages: tuple[str, ...] = ()
    every: dict[str, Float[Tensor, "members averages evaluations"]] = field(default_factory=dict)


class Stack:
    """Members that are trained together.

    Args:
        task: Task to train on.
        members: The members, grouped by arm, those with the defaults before the controls. A control follows the member
            with the defaults, its own seed and its own share of examples held back.
        device: Device to compute on.
        compiled: Whether the losses are compiled on a GPU, where the rules always are.
        tails: Polynomial-decay means of the weights to keep and to measure, by the share of the steps they cover.
        decays: Exponential means to keep and to measure, by their decay rates.
        first_only: Whether only the first metric is measured, if the task can measure it alone.

    Raises:
        HyperparameterError: there is no member, the members are not grouped by arm, a control has no member to
            follow, or members hold back different shares above 0.
    """

    def __init__(
        self,
        task: StackedTask,
        members: Sequence[Member],
        device: torch.device,
        compiled: bool = False,
        *,
        tails: Sequence[float] = (),
        decays: Sequence[float] = (),
        first_only: bool = False,
    ) -> None:
        if not members:
            raise HyperparameterError("a stack needs at least one member, got none")
        self.task, self.members, self.device = task, list(members), device
        seeds = [member.seed for member in members]
        self._unique = sorted(set(seeds))
        self._seed_index = torch.tensor([self._unique.index(seed) for seed in seeds], device=device)
        starts = [task.initial(seed) for seed in self._unique]
        self.layout = ParameterLayout.of(starts[0])
        rows = torch.stack([self.layout.row(start) for start in starts]).to(device)
        self.weights = rows[self._seed_index].requires_grad_()
        self.cohort = task.cohort(seeds, device)
        self._losses = self.cohort.losses
        if compiled and device.type == "cuda":
            self._losses = torch.compile(self.cohort.losses)
        self.t = torch.zeros((), dtype=torch.float64, device=device)
        self._blocks = list(self._make_blocks())
        self._sources = self._make_sources()
        self.means = WeightMeans(self.weights, tails, decays)
        self._first_only = first_only
        self._set_up_batches()
        self._fresh = True
        purpose = " ".join(sorted({member.arm.name for member in members}))
        self._generator = torch.Generator(device).manual_seed(stream(self._unique[0], f"masks:{purpose}"))
        self._graph: torch.cuda.CUDAGraph | None = None

    def train(self, look: Callable[[int], None] | None = None) -> Curves:
        """Train all members and measure them on the way; ``look`` is called with the step after each measurement."""
        steps = evaluation_steps(self.task.steps, self.task.evaluations)
        seen: list[dict[str, Tensor]] = []
        gates: list[Tensor] = []
        done = 0
        for step in steps:
            for _ in range(step - done):
                self._advance()
            done = step
            with torch.no_grad():
                found = [self._measured(weights) for weights in (self.evaluated(), *self.means.values)]
                gates.append(torch.cat([block.mean_gate(self.t, self.layout) for _, block in self._blocks]).cpu())
            seen.append({name: torch.stack([values[name] for values in found], 1) for name in found[0]})
            if look is not None:
                look(step)
        every = {name: torch.stack([values[name] for values in seen], 2) for name in seen[0]}
        own = {name: values[:, 0] for name, values in every.items() if name in {m.name for m in self.task.metrics}}
        gate = torch.stack(gates, 1)
        return Curves(steps, own, gate, self.weights.detach(), self.layout, self.means.names, every)

    def evaluated(self) -> Float[Tensor, "members d"]:
        """The weights that are measured: those trained, or what a rule makes of them (schedule-free AdamW)."""
        return torch.cat([block.evaluated(self.weights[rows].detach(), self.t) for rows, block in self._blocks])

    def _measured(self, matrix: Float[Tensor, "members d"]) -> dict[str, Tensor]:
        """All metrics on the CPU, all NaN for a member that diverged, because an accuracy alone would not show it."""
        weights = self.layout.views(matrix)
        if self._first_only and isinstance(self.cohort, FirstMetric):
            values = {self.task.metrics[0].name: self.cohort.measure_first(weights)}
        else:
            values = self.cohort.measure(weights)
        values = {name: value.detach().double() for name, value in values.items()}
        whole = matrix.isfinite().all(1)
        for value in values.values():
            whole &= value.isfinite()
        if self.held is not None:
            for name, value in self.held.measure(self.cohort, weights, self._seed_index).items():
                values[name] = value.double().where(self._holds_back, torch.nan)
        return {name: value.where(whole, torch.nan).cpu() for name, value in values.items()}

    def _set_up_batches(self) -> None:
        """One stream of batches for each distinct pair of a seed and a share that is held back."""
        shares = sorted({member.share for member in self.members})
        if len(shares) > 2 or (len(shares) == 2 and shares[0]):
            raise HyperparameterError(f"members of a stack hold back one share of their examples or none, got {shares}")
        self.held = HeldBlock(self.task, self._unique, shares[-1], self.device) if shares[-1] else None
        self._holds_back = torch.tensor([member.share > 0 for member in self.members], device=self.device)
        first = {share: k * len(self._unique) for k, share in enumerate(shares)}
        places = [first[member.share] + self._unique.index(member.seed) for member in self.members]
        self._batch_index = torch.tensor(places, device=self.device)
        self._batches: dict[str, list[Iterator[Tensor]]] = {name: [] for name in self.task.streams}
        for name, (count, size) in self.task.streams.items():
            seeds = [stream(seed, f"batches:{name}") for seed in self._unique]
            for share in shares:
                if not share or self.held is None:
                    self._batches[name].append(epoch_batches(count, size, seeds, self.device))
                else:
                    kept = epoch_batches(self.held.kept[name].shape[1], size, seeds, self.device)
                    self._batches[name].append(self.held.mapped(name, kept))
        self._index = {name: self._next_batch(name).clone() for name in self._batches}

    def _next_batch(self, name: str) -> Int[Tensor, "pairs batch"]:
        return torch.cat([next(batches) for batches in self._batches[name]])

    def _make_blocks(self) -> Iterator[tuple[slice, Block]]:
        names = [member.arm.name for member in self.members]
        begin = 0
        while begin < len(names):
            arm = self.members[begin].arm
            end = begin + names.count(arm.name)
            if names[begin:end] != [arm.name] * (end - begin):
                raise HyperparameterError(f"members must be grouped by arm, but those of {arm.name!r} are not adjacent")
            rows = slice(begin, end)
            hyper = {
                knob: torch.tensor(
                    [[member.hyper[knob]] for member in self.members[rows]], dtype=torch.float64, device=self.device
                )
                for knob in USUAL
            }
            followed = arm.name == "defaults" and any(member.arm.control for member in self.members)
            yield rows, Block.make(arm, hyper, self.weights[rows].detach(), self.task.steps, followed)
            begin = end

    def _make_sources(self) -> dict[str, Tensor]:
        """For each control, the rows of the block with the defaults that its members follow."""
        controls = [(rows, block) for rows, block in self._blocks if block.arm.control]
        if not controls:
            return {}
        rows, source = self._blocks[0]
        usual = require_arm("defaults").hyper({})
        where = {(one.seed, one.share): i for i, one in enumerate(self.members[rows]) if one.hyper == usual}
        missing = {m.seed for m in self.members if m.arm.control and (m.seed, m.share) not in where}
        if source.arm.name != "defaults" or missing:
            raise HyperparameterError(
                "controls follow the members with the library's defaults, which must come first, one for each seed; "
                f"got {source.arm.name!r} first and no such member for seeds {sorted(missing)}"
            )
        return {
            block.arm.name: torch.tensor([where[m.seed, m.share] for m in self.members[rows]], device=self.device)
            for rows, block in controls
        }

    def _advance(self) -> None:
        if not self._fresh:
            for name, index in self._index.items():
                index.copy_(self._next_batch(name))
        self._fresh = False
        if self.device.type != "cuda":
            self._step()
            return
        self._graph = self._graph or self._captured()
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Warm up (which compiles), undo the changes of the warm-up, and capture one step."""
        kept = [tensor.detach().clone() for tensor in self._moving()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for tensor, value in zip(self._moving(), kept, strict=True):
                tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _moving(self) -> list[Tensor]:
        states = [tensor for _, block in self._blocks for tensor in block.state.values()]
        return [self.weights, self.t, self.means.values, *states]

    def _step(self) -> None:
        batch = {name: index[self._batch_index] for name, index in self._index.items()}
        kinds: list[tuple[slice, GradientKind]] = [
            (rows, PEERS[block.arm.rule].gradient) for rows, block in self._blocks if not block.arm.gated
        ]
        gradient = stacked_gradient(self._losses, self.layout, self.weights, batch, kinds)
        with torch.no_grad():
            self.t += 1
            seen: Lockstep | None = None
            for rows, block in self._blocks:
                arm, lockstep, uniform = block.arm, None, None
                if arm.control and seen is not None:
                    chosen = self._sources[arm.name]
                    openings = self._shuffled(chosen) if arm.control == "shuffled_gate" else None
                    lockstep = Lockstep(seen.gate[chosen], seen.norm[chosen], seen.lr[chosen], openings)
                if arm.control == "random_mask" or arm.rule == "magma":
                    uniform = torch.rand(gradient[rows].shape, generator=self._generator, device=self.device)
                by_tensor = arm.per_tensor or arm.relative
                move = _compiled() if self.device.type == "cuda" and not by_tensor else take_step
                segments = self.layout.segments if by_tensor else ()
                move(arm, segments, self.weights[rows], gradient[rows], self.t, block, lockstep, uniform)
                if block.gate is not None and block.step is not None:
                    mean = block.gate.sum(1, keepdim=True) / self.layout.size
                    seen = Lockstep(mean, block.step.norm(dim=1, keepdim=True), block.hyper["lr"])
            self.means.advance(self.weights, self.t)

    def _shuffled(self, chosen: Tensor) -> Tensor:
        """The gates of the members with the defaults, each member's in an order of its own over all its weights."""
        gates = self._blocks[0][1].gate
        assert gates is not None
        keys = torch.rand((len(chosen), gates.shape[1]), generator=self._generator, device=self.device)
        return gates[chosen].gather(1, keys.argsort(dim=1))


@cache
def _compiled() -> Callable[..., None]:
    """The step as one kernel, compiled once for each arm and then used for any number of members and weights."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    # Values of which there is one per member (powers of β in float64) are computed once, not for every weight.
    return torch.compile(take_step, dynamic=True, options={"realize_opcount_threshold": 1})
