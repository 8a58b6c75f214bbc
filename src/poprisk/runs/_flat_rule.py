r"""The optimizer of a run as a pure function of flat vectors, for derivatives, ensembles and replays."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from poprisk.errors import DataError, RunError
from poprisk.optim import (
    Hyper,
    PopulationState,
    adam_options,
    adam_step,
    advance,
    current_gate,
    first_scale,
    hyper_of,
    is_usable,
    linearize,
    population_step,
    sgd_options,
    sgd_step,
)
from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._layout import Layout
from poprisk.runs._rule_parts import Options, Past, Piece, distinct, options_by_step, past_of, pieces_of
from poprisk.runs._run import Run
from poprisk.runs._segment import SegmentReader

State = tuple[Tensor, ...]


class FlatRule(ABC):
    r"""One optimizer step :math:`(w, g, \mathrm{state}) \mapsto (w', \mathrm{state}')` on flat vectors [d].

    Made by :func:`flat_rule`. Learning rates and all other options of step k are those recorded for it, for each
    parameter group; step counts and bias corrections follow from k. All functions are pure and work with
    ``torch.func.vmap``, ``jvp`` and ``vjp``; weights, gradient and states may also have a leading axis, with one row
    for each member of an ensemble.

    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), steps=3, progress=False)
    >>> rule = flat_rule(run)
    >>> rule.state_names, rule.elementwise
    (('momentum',), True)
    >>> w, state = torch.zeros(3), rule.initial(torch.zeros(3))
    >>> for k in range(2):
    ...     w, state = rule.step(k, w, torch.ones(3), state)
    >>> w  # -0.5 (1 + 1.9)
    tensor([-1.4500, -1.4500, -1.4500])
    """

    state_names: tuple[str, ...]
    """The state vectors by name: ``()``, ``("momentum",)``, ``("m", "v")`` or ``("m", "v", "s")``; a gate in AdamW's
    units adds ``"q"``, the mean of the gate over each tensor."""
    elementwise: bool
    """Whether each weight's step depends on that weight alone, apart from the means in :attr:`averaged` (false if a
    gate is pooled over rows or tensors)."""
    averaged: tuple[str, ...] = ()
    """The state vectors that :meth:`average` averages over each tensor at the end of a step."""
    _saved: ClassVar[dict[str, str]]
    """The optimizer's name for each state vector."""

    def __init__(self, run: Run, layout: Layout) -> None:
        self._run, self._layout = run, layout
        self._options = options_by_step(run)
        every_option = distinct(self._options)
        self.state_names = self._names_of(every_option)
        self.averaged = tuple(name for name in ("q",) if name in self.state_names)
        self.elementwise = all(self._is_elementwise(options) for options in every_option)
        start = run.checkpoint(0)
        self._start = {name: checkpoint._state_of(start, name) for name in self._layout.names}
        pasts = [past_of(self._start[name]) for name in self._layout.names]
        self._pieces, first = pieces_of(self._layout, pasts, merged=self.elementwise)
        self._pasts = [first]
        self._looked_at: set[int] = set()
        self._reader: SegmentReader | None = None

    def initial(self, w: Float[Tensor, "*members d"]) -> State:
        """The state before step 0, zeros unless the optimizer had one, with the shape, dtype and device of ``w``."""
        return tuple(self._first_state(name).to(w).expand(w.shape) for name in self.state_names)

    def step(
        self,
        k: int,
        w: Float[Tensor, "*members d"],
        g: Float[Tensor, "*members d"],
        state: State,
        *,
        gate: Float[Tensor, "*members d"] | None = None,
        averages: bool = True,
    ) -> tuple[Float[Tensor, "*members d"], State]:
        """Step k of the run, with these weights, this gradient and this state in place of the recorded ones.

        Args:
            k: Step whose options and counts are used.
            w: Weights before the step.
            g: Gradient of the batch, times the clipping factor.
            state: State vectors before the step, in the order of :attr:`state_names`.
            gate: Gate to use instead of the one computed from the state, e.g. :meth:`gate` of the recorded step. Rules
                without a gate ignore it.
            averages: Whether to apply :meth:`average` to the state; False leaves what is averaged, weight by weight.

        Returns:
            Weights and state after the step.

        Raises:
            DataError: k is not a step of the run, or the number or shapes of the vectors are wrong.
            RunError: something other than the optimizer moved the weights in this step.
        """
        self._check(k, w, g, state)
        if not self.elementwise and w.dim() > 1:
            axes = (0, 0, None if gate is None else 0, *[0] * len(state))
            one = partial(self.step, k, averages=averages)
            return vmap(lambda w, g, q, *state: one(w, g, state, gate=q), axes)(w, g, gate, *state)
        moved = []
        for piece, past in zip(self._pieces, self._past(k), strict=True):
            given = None if gate is None else self._shaped(piece, gate)
            parts = [self._shaped(piece, x) for x in (w, g, *state)]
            new_w, new_state = self._move(self._options[k][piece.group], past, parts[0], parts[1], parts[2:], given)
            moved.append([x.reshape(piece.of(w).shape) for x in (new_w, *new_state)])
        new_w, *after = (x[0] if len(x) == 1 else torch.cat(x, -1) for x in zip(*moved, strict=True))
        return new_w, self.average(after) if averages else tuple(after)

    def average(self, state: Sequence[Tensor]) -> State:
        """State vectors in which those in :attr:`averaged` are replaced by their means over each tensor.

        The map is linear and symmetric, and mapping twice is mapping once.
        """
        named = zip(self.state_names, state, strict=True)
        return tuple(self._means(x) if name in self.averaged else x for name, x in named)

    def _means(self, x: Float[Tensor, "*members d"]) -> Float[Tensor, "*members d"]:
        parts = x.split(self._layout.sizes, -1)
        return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], -1)

    def gate(
        self, k: int, w: Float[Tensor, "*members d"], g: Float[Tensor, "*members d"], state: State
    ) -> Float[Tensor, "*members d"]:
        """The gate q that step k computes from this gradient and this state; ones for a rule without a gate."""
        self._check(k, w, g, state)
        if not self.elementwise and w.dim() > 1:
            return vmap(lambda w, g, *state: self.gate(k, w, g, state))(w, g, *state)
        gates = []
        for piece, past in zip(self._pieces, self._past(k), strict=True):
            parts = [self._shaped(piece, x) for x in (w, g, *state)]
            q = self._gate_of(self._options[k][piece.group], past, parts[0], parts[1], parts[2:])
            gates.append(q.reshape(piece.of(w).shape))
        return gates[0] if len(gates) == 1 else torch.cat(gates, -1)

    # Different for each rule.

    @staticmethod
    @abstractmethod
    def _names_of(every_option: Sequence[Options]) -> tuple[str, ...]: ...

    @staticmethod
    def _is_elementwise(options: Options) -> bool:
        return True

    @staticmethod
    @abstractmethod
    def _advance(past: Past, options: Options) -> Past: ...

    @abstractmethod
    def _move(
        self, options: Options, past: Past, w: Tensor, g: Tensor, state: Sequence[Tensor], gate: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]: ...

    def _gate_of(self, options: Options, past: Past, w: Tensor, g: Tensor, state: Sequence[Tensor]) -> Tensor:
        return torch.ones_like(w)

    # Common to all rules.

    def _shaped(self, piece: Piece, x: Tensor) -> Tensor:
        part = x if len(self._pieces) == 1 else piece.of(x)
        return part if self.elementwise else part.reshape(piece.shape)

    def _past(self, k: int) -> list[Past]:
        while len(self._pasts) <= k:
            options = self._options[len(self._pasts) - 1]
            pairs = zip(self._pasts[-1], self._pieces, strict=True)
            self._pasts.append([self._advance(past, options[piece.group]) for past, piece in pairs])
        return self._pasts[k]

    def _first_state(self, name: str) -> Tensor:
        layout, key = self._layout, self._saved[name]
        pairs = list(zip(layout.names, layout.sizes, strict=True))
        if name in self.averaged:
            scales = [self._start[owner].get(key, first_scale(torch.zeros(()))) for owner, _ in pairs]
            return layout.flatten([x[0].expand(size) for x, (_, size) in zip(scales, pairs, strict=True)])
        zero = torch.zeros((), dtype=layout.dtype)
        return layout.flatten([self._start[owner].get(key, zero.expand(size)) for owner, size in pairs])

    def _check(self, k: int, w: Tensor, g: Tensor, state: State) -> None:
        if not 0 <= k < len(self._options):
            last = len(self._options) - 1
            raise DataError(f"the run has {last + 1} steps: k must lie in 0 … {last}, got {k}")
        d = self._layout.size
        shapes = [list(x.shape) for x in (w, g, *state)]
        if len(state) != len(self.state_names) or w.shape[-1:] != (d,) or any(s != shapes[0] for s in shapes):
            raise DataError(
                f"weights, gradient and the states {self.state_names} must be vectors of {d} entries, got {shapes}"
            )
        if self._run.is_dense and k not in self._looked_at:  # each step is read once
            if self._reader is None or not self._reader.start <= k < self._reader.stop:
                self._reader = self._run.recorded(k)
            if isinstance(self._reader.step(k).source, Tensor):
                raise RunError(
                    f"the weights were changed in step {k} by something other than the optimizer (a projection, a "
                    "clamp), so the step is not a function of its gradient alone: do it in the model's forward"
                )
            self._looked_at.add(k)


class _SGDRule(FlatRule):
    """SGD, by :func:`poprisk.optim.rules.sgd_step`."""

    _saved: ClassVar = {"momentum": "momentum_buffer"}

    @staticmethod
    def _names_of(every_option: Sequence[Options]) -> tuple[str, ...]:
        return ("momentum",) if any(options["momentum"] for options in every_option) else ()

    @staticmethod
    def _advance(past: Past, options: Options) -> Past:
        return replace(past, has_buffer=past.has_buffer or options["momentum"] != 0)

    def _move(
        self, options: Options, past: Past, w: Tensor, g: Tensor, state: Sequence[Tensor], gate: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        buffer = state[0] if state else None
        moved, buffer = sgd_step(w, g, buffer, **sgd_options(options), first=not past.has_buffer)
        return moved, [] if buffer is None else [buffer]


class _AdamRule(FlatRule):
    """Adam and AdamW, by :func:`poprisk.optim.rules.adam_step`."""

    _saved: ClassVar = {"m": "exp_avg", "v": "exp_avg_sq"}

    @staticmethod
    def _names_of(every_option: Sequence[Options]) -> tuple[str, ...]:
        if any(options["amsgrad"] for options in every_option):
            raise RunError("amsgrad=True is not supported here: train with amsgrad=False")
        return ("m", "v")

    @staticmethod
    def _advance(past: Past, options: Options) -> Past:
        return replace(past, step=past.step + 1)

    def _move(
        self, options: Options, past: Past, w: Tensor, g: Tensor, state: Sequence[Tensor], gate: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        moved, m, v = adam_step(w, g, state[0], state[1], past.step + 1, **adam_options(options))
        return moved, [m, v]


class _PopulationRule(FlatRule):
    """PopRiskAdamW, by :func:`poprisk.optim.rules.population_step`."""

    _saved: ClassVar = {"m": "exp_avg", "v": "exp_avg_sq", "s": "exp_var", "q": "gate_scale"}

    @staticmethod
    def _names_of(every_option: Sequence[Options]) -> tuple[str, ...]:
        hypers = [hyper_of(dict(options)) for options in every_option]
        if any(options["state_dtype"] for options in every_option):
            raise RunError("a state_dtype, which rounds at random, is not supported here: train with state_dtype=None")
        s = ("s",) if any(hyper.tracks_variance for hyper in hypers) else ()
        return ("m", "v", *s, *(("q",) if any(hyper.in_adamw_units for hyper in hypers) else ()))

    @staticmethod
    def _is_elementwise(options: Options) -> bool:
        return options["gate"] is None or options["granularity"] == "element"

    @staticmethod
    def _advance(past: Past, options: Options) -> Past:
        hyper = hyper_of(dict(options))
        past = _begin_variance(past, hyper)
        step, var_step, gain = _counts(past, hyper)
        c = advance(hyper, step, var_step, gain)
        counted = replace(past, step=float(c.step))
        if past.has_variance:
            counted = replace(counted, var_step=float(c.var_step))
        return replace(counted, gain=float(c.gain)) if past.has_gain else counted

    def _move(
        self, options: Options, past: Past, w: Tensor, g: Tensor, state: Sequence[Tensor], gate: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        hyper, before = self._before(options, past, state)
        moved, after = population_step(w, g, before, hyper)
        if gate is not None and hyper.gate is not None:
            moved = _with_gate(gate, w, g, after, hyper)
        vectors = [after.m, after.v]
        if "s" in self.state_names:
            vectors.append(state[2] if after.s is None else after.s)
        if self.averaged:  # each weight's own gate: the mean follows
            vectors.append(state[-1] if after.scale is None else after.scale[..., 0])
        return moved, vectors

    def _gate_of(self, options: Options, past: Past, w: Tensor, g: Tensor, state: Sequence[Tensor]) -> Tensor:
        hyper, before = self._before(options, past, state)
        return current_gate(population_step(w, g, before, hyper)[1], hyper)

    def _before(self, options: Options, past: Past, state: Sequence[Tensor]) -> tuple[Hyper, PopulationState]:
        hyper = hyper_of(dict(options))
        begun = _begin_variance(past, hyper)
        s = state[2] if hyper.tracks_variance else None
        if s is not None and begun != past:  # the optimizer creates s at its first gated step
            s = torch.zeros_like(s)
        scale = None
        if hyper.in_adamw_units:  # one scale for each weight
            scale = torch.stack([state[-1], torch.zeros_like(state[-1])], -1)
        return hyper, PopulationState(state[0], state[1], s, *_counts(begun, hyper), scale=scale)


def flat_rule(run: Run, layout: Layout | None = None) -> FlatRule:
    """The optimizer of a run as a pure function of flat vectors.

    Args:
        run: A run of SGD, Adam, AdamW or PopRiskAdamW, whose weights have one dtype, float32 or float64.
        layout: Part of the run's layout, for the rule of some of its parameters alone.

    Returns:
        The rule. With the recorded gradients it gives the recorded weights, up to rounding.

    Raises:
        RunError: the run used amsgrad or states of low precision, or weights of low precision or several dtypes.

    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> run = train(problem, torch.optim.AdamW, steps=3, progress=False)
    >>> flat_rule(run).state_names
    ('m', 'v')
    """
    dtypes = sorted(set(run.layout.dtypes))
    if len(dtypes) != 1 or dtypes[0] not in ("torch.float32", "torch.float64"):
        raise RunError(f"the weights must all be float32 or all float64, got {', '.join(dtypes)}")
    rules: dict[str, type[FlatRule]] = {
        "torch.optim.SGD": _SGDRule,
        "torch.optim.Adam": _AdamRule,
        "torch.optim.AdamW": _AdamRule,
        "poprisk.PopRiskAdamW": _PopulationRule,
    }
    return rules[run.manifest["optimizer"]["name"]](run, run.layout if layout is None else layout)


def _with_gate(gate: Tensor, w: Tensor, g: Tensor, after: PopulationState, hyper: Hyper) -> Tensor:
    """Line 10 of Algorithm 1 with a given gate."""
    open_gate = linearize(after, replace(hyper, gate=None, gated_decay=False))
    decay = open_gate.decay * gate if hyper.gated_decay else open_gate.decay
    moved = w - gate * open_gate.preconditioner * after.m - decay * w
    return torch.where(is_usable(g), moved, w) if hyper.skip_nonfinite else moved


def _begin_variance(past: Past, hyper: Hyper) -> Past:
    """The state that the optimizer creates before its step, if a gate or its calibration starts after step 0."""
    if hyper.gate is None:
        return past
    if hyper.tracks_variance and not past.has_variance:
        past = replace(past, has_variance=True, var_step=0.0)
    if hyper.alpha == "calibrated" and not past.has_gain:
        past = replace(past, has_gain=True, gain=0.0)
        past = past if hyper.shared_state else replace(past, var_step=0.0)
    return past


def _counts(past: Past, hyper: Hyper) -> tuple[float, float, float]:
    own = past.has_variance and not hyper.shared_state
    return past.step, past.var_step if own else past.step, past.gain if past.has_gain else 0.0
