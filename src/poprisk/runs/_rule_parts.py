"""The parts of a flat rule: pieces of the flat vector, the counters of their states, each step's options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._layout import Layout
from poprisk.runs._run import Run

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A contiguous piece of the flat vector with the same options: one parameter, or neighbours in one group."""

    start: int
    stop: int
    shape: tuple[int, ...]
    group: int

    def of(self, x: Tensor) -> Tensor:
        """This piece of a vector."""
        return x[..., self.start : self.stop]


@dataclass(frozen=True)
class Past:
    """The counters and flags of a parameter's state, which follow from the step number and the options alone."""

    step: float = 0.0
    var_step: float = 0.0
    gain: float = 0.0
    has_buffer: bool = False
    has_variance: bool = False
    has_gain: bool = False


def past_of(state: Mapping[str, Tensor]) -> Past:
    """The counters and flags of a recorded state."""
    counts = {key: float(state[key]) for key in ("step", "var_step") if key in state}
    return Past(
        **counts,
        gain=float(state.get("var_gain", 0.0)),
        has_buffer="momentum_buffer" in state,
        has_variance="exp_var" in state,
        has_gain="var_gain" in state,
    )


def pieces_of(layout: Layout, pasts: Sequence[Past], *, merged: bool) -> tuple[list[Piece], list[Past]]:
    """The pieces of the flat vector; if ``merged``, neighbours with the same options and past become one piece."""
    pieces: list[Piece] = []
    found: list[Past] = []
    start = 0
    for shape, size, group, past in zip(layout.shapes, layout.sizes, layout.groups, pasts, strict=True):
        if merged and pieces and pieces[-1].group == group and found[-1] == past:
            first = pieces.pop()
            pieces.append(Piece(first.start, start + size, (start + size - first.start,), group))
        else:
            pieces.append(Piece(start, start + size, shape, group))
            found.append(past)
        start += size
    return pieces, found


def options_by_step(run: Run) -> list[list[dict[str, Any]]]:
    """Options of each group at each step; steps with equal options share the objects."""
    steps: list[list[dict[str, Any]]] = []
    while len(steps) < run.num_steps:
        reader = run.recorded(len(steps))
        changes: dict[int, list[Any]] = {}
        for step, g, changed in reader._notes["options"]:
            changes.setdefault(step, []).append((g, changed))
        groups = [_parsed(group) for group in reader._notes["start_options"]]
        for k in range(reader.start, reader.stop):
            if k in changes:
                groups = list(groups)
                for g, changed in changes[k]:
                    groups[g] = {**groups[g], **_parsed(changed)}
            steps.append(groups)
    return steps


def _parsed(options: Options) -> dict[str, Any]:
    group: dict[str, Any] = {}
    checkpoint.set_options(group, options)
    return group


def distinct(steps: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All distinct options of all groups."""
    return list({id(group): group for groups in steps for group in groups}.values())
