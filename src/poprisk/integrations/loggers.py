"""Log the gate to TensorBoard, Weights & Biases or a file, from your own training loop."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poprisk.errors import HyperparameterError
from poprisk.integrations._readings import PREFIX, Readings, find_poprisk, interval
from poprisk.integrations.sinks import JsonLinesSink, Sink, TensorBoardSink, WandbSink, as_sink
from poprisk.optim import (
    Hyper,
    ParamUpdate,
    PopRiskAdamW,
    PopulationState,
    current,
    current_gate,
    debiased_variance,
    hyper_of,
    meters,
    number,
    over_all,
    rule_state,
    was_stepped,
)

__all__ = ["JsonLinesSink", "Sink", "TensorBoardSink", "WandbSink", "Watch", "watch"]

SAMPLE = 10_000


class Watch:
    """Handle of :func:`watch`; ``remove()`` or the end of a ``with`` block stops it and writes the last line.

    The sink stays open; close it where you opened it.
    """

    def __init__(
        self,
        optimizer: PopRiskAdamW,
        sink: Sink,
        every: int,
        draw_every: int | None,
        model: nn.Module | None,
        prefix: str,
    ) -> None:
        self._optimizer, self._sink, self._model, self._prefix = optimizer, sink, model, prefix
        self._every, self._draw_every, self._read_every = every, draw_every, interval(None, every)
        self._overall, self._groups = Readings(), dict[str, Readings]()
        self._step = steps_taken(optimizer)
        self._last_line = self._last_drawn = self._read_at = 0
        self._handles: list[RemovableHandle] = [
            before_each_step(optimizer, self._before_step),
            optimizer.register_load_state_dict_post_hook(self._restart),
        ]

    def remove(self) -> None:
        """Stop watching, and write the readings since the last line. Calling it again has no effect."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._overall and self._read_at > self._last_line:
            self._write(self._read_at)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before_step(self) -> None:
        """Count the step, and take a reading or write a line if one is due."""
        self._step += 1
        line = self._step % self._every == 0
        if _capturing() or not (line or self._step % self._read_every == 0):
            return
        self._take()
        self._read_at = self._step
        if line:
            self._step = self._read_at = steps_taken(self._optimizer) + 1  # a step may have been skipped on the device
            if self._step % self._every == 0 and self._step > self._last_line and self._overall:
                self._write(self._step)

    def _take(self) -> None:
        """Read the diagnostics of every group, and of all together, in one pass over the state."""
        groups = self._optimizer.param_groups
        if not self._optimizer.state:
            return
        with torch.no_grad():
            sums = self._optimizer._gate_sums()
            self._overall.add(meters(over_all(sums)))
            for index, group in enumerate(groups if len(groups) > 1 else ()):
                name = f"group_{group.get('name', index)}/"
                self._groups.setdefault(name, Readings()).add(meters(sums[index]))

    def _write(self, step: int) -> None:
        every = self._draw_every
        if every is not None and (self._last_drawn == 0 or step // every > self._last_drawn // every):
            self._draw(step)
        values = {self._prefix + name.removeprefix(PREFIX): value for name, value in self._overall.flush().items()}
        for group, readings in self._groups.items():
            values |= {self._prefix + group + n.removeprefix(PREFIX): value for n, value in readings.flush().items()}
        self._last_line = step
        self._sink.scalars(values, step)

    def _draw(self, step: int) -> None:
        names = _parameter_names(self._optimizer, self._model)
        for parameter, gate, log_snr in sampled_gates(self._optimizer):
            for kind, values in (("gate", gate), ("log10_snr", log_snr)):
                if values.numel():
                    self._sink.histogram(f"{self._prefix}{kind}/{names[parameter]}", values, step)
            self._last_drawn = step

    def _restart(self, _: Any) -> None:
        """After loading a checkpoint, continue its count of steps and discard earlier readings."""
        self._overall, self._groups = Readings(), {}
        self._step = steps_taken(self._optimizer)
        self._last_line = self._last_drawn = self._read_at = 0


def watch(
    optimizer: Any,
    writer: Any,
    *,
    model: nn.Module | None = None,
    every: int = 100,
    histograms: bool | int = True,
    prefix: str = PREFIX,
) -> Watch:
    """Log the optimizer's gate diagnostics during training, without changes to the training loop.

    A hook reads them in each step just before the weights are updated: after a closure, if there is one, after
    clipping, and without the gradient scale. Steps are counted by the optimizer, so the curves of a resumed run
    continue. Steps replayed from a CUDA graph run no hooks and are not seen. If several processes train one model,
    call this in one of them.

    Args:
        optimizer: A :class:`poprisk.PopRiskAdamW`, or a trainer's wrapper around one.
        writer: A ``torch.utils.tensorboard.SummaryWriter``, a ``wandb`` run (or ``wandb`` itself, once it has one), or
            any :class:`Sink`, such as :class:`JsonLinesSink`, which needs no further package.
        model: Model whose parameter names the histograms use. Without it they use the names that the optimizer was
            built with (``model.named_parameters()``), or numbers.
        every: Steps between two log lines; a line is the mean of ten readings, each of which takes about as long as
            two steps that are not fused. With several parameter groups each one is logged too, under ``group_0/``, or
            ``group_x/`` for a group with ``"name": "x"``.
        histograms: Whether to log histograms of the gate q and of log10 of its signal-to-noise ratio m̂²/ŝ for each
            parameter, at the first line and every tenth one; an integer is the number of steps between histograms.
        prefix: Prefix of all names.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        HyperparameterError: The optimizer has no gate, the writer is not supported, or an interval is not an
            integer ≥ 1.

    Example:
        >>> class Printer:
        ...     def scalars(self, values, step):
        ...         print(step, sorted(values)[0])
        ...
        ...     def histogram(self, name, values, step):
        ...         print(step, name, len(values))
        >>> network = nn.Linear(2, 1, bias=False)
        >>> optimizer = PopRiskAdamW(network.parameters())
        >>> with watch(optimizer, Printer(), model=network, every=3):
        ...     for x in (1.0, 2.0, 3.0):
        ...         optimizer.zero_grad()
        ...         (network(torch.tensor([x, 0.0])) - 1).square().sum().backward()
        ...         optimizer.step()
        3 poprisk/gate/weight 2
        3 poprisk/log10_snr/weight 1
        3 poprisk/active_fraction
    """
    gated = find_poprisk(optimizer)
    if gated is None:
        raise HyperparameterError(f"watch needs a PopRiskAdamW, got {type(optimizer).__name__}, which has no gate")
    _check_interval("every", every)
    draw_every = _draw_interval(histograms, every)
    return Watch(gated, as_sink(writer), every, draw_every, model, prefix)


def before_each_step(optimizer: PopRiskAdamW, read: Callable[[], None]) -> RemovableHandle:
    """Call ``read`` in every step once its gradients are complete: at the start, or after its closure."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            read()
            return None

        def closure_then_read() -> Any:
            loss = closure()
            read()
            return loss

        return args[:1], {**kwargs, "closure": closure_then_read}

    return optimizer.register_step_pre_hook(hook)


def steps_taken(optimizer: PopRiskAdamW) -> int:
    """Number of steps of the optimizer, those before a checkpoint included: the largest count of its parameters."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def sampled_gates(
    optimizer: PopRiskAdamW, sample: int = SAMPLE
) -> Iterator[tuple[Tensor, Float[Tensor, " n"], Float[Tensor, " k"]]]:
    r"""For each gated parameter, the gate q of its last step and :math:`\log_{10}(\hat m^2/\hat s)`, for histograms.

    At most ``sample`` coordinates, evenly spread, on the CPU; those without signal or noise have no ratio and are left
    out of the second. With ``granularity`` or ``normalize_gate`` q is the one really used, the ratio is each
    coordinate's own. A parameter's first step is left out, since its gate is decided beforehand.
    """
    with torch.no_grad():
        for group in optimizer.param_groups:
            hyper = hyper_of(group)
            for p in group["params"] if hyper.gate is not None else ():
                update = ParamUpdate(p, p, p, key=0, state=optimizer.state.get(p, {}))
                if p.numel() == 0 or not was_stepped(update, hyper) or number(update.state["step"]) < 2:
                    continue
                state = rule_state(update, hyper)
                stride = _stride(state.m.numel(), sample)
                thin = _thinned(state, stride)
                pools = hyper.granularity != "element" or hyper.normalize_gate
                q = _every_nth(current_gate(state, hyper), stride) if pools else current_gate(thin, hyper)
                yield p, _finite(q), _finite(_log_snr(thin, hyper))


def _log_snr(state: PopulationState, hyper: Hyper) -> Tensor:
    """Computed with logarithms, since m̂² may underflow."""
    c = current(hyper, state.step, state.var_step, state.gain)
    signal = (state.m.double() * c.m_debias).abs().log10()
    return 2 * signal - debiased_variance(state, hyper).double().log10()


def _thinned(state: PopulationState, stride: int) -> PopulationState:
    s = None if state.s is None else _every_nth(state.s, stride)
    return replace(state, m=_every_nth(state.m, stride), v=_every_nth(state.v, stride), s=s)


def _every_nth(x: Tensor, stride: int) -> Tensor:
    return x.reshape(-1)[::stride]


def _stride(count: int, sample: int) -> int:
    """The first stride that leaves at most ``sample`` values and, being coprime, does not stay in one column."""
    stride = -(-count // sample)
    while math.gcd(stride, count) > 1:
        stride += 1
    return stride


def _finite(x: Tensor) -> Tensor:
    return x[x.isfinite()].float().cpu()


def _parameter_names(optimizer: PopRiskAdamW, model: nn.Module | None) -> dict[Tensor, str]:
    """Names of the parameters from the model, otherwise from the optimizer, otherwise group and position."""
    names: dict[Tensor, str] = {
        p: group["param_names"][place] if "param_names" in group else f"{index}.{place}"
        for index, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    }
    if model is not None:
        names.update({p: name for name, p in model.named_parameters()})
    return names


def _check_interval(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HyperparameterError(f"{name} must be a number of steps ≥ 1, got {value!r}")


def _draw_interval(histograms: bool | int, every: int) -> int | None:
    if isinstance(histograms, bool):
        return 10 * every if histograms else None
    _check_interval("histograms, if not True or False,", histograms)
    return histograms


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
