r"""PopRiskAdamW: AdamW with a gate that scales each coordinate's step by the signal-to-noise ratio of its gradient."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from poprisk._core.types import Linearization, VarianceSource
from poprisk.errors import HyperparameterError
from poprisk.optim import _checkpoint as checkpoint
from poprisk.optim import backends
from poprisk.optim._defaults import DEFAULTS, PAPER
from poprisk.optim._diagnostics import GateDiagnostics, Sums, gate_sums, meters, over_all
from poprisk.optim._gate import GATE_FIELD, Gate, unpack_gate
from poprisk.optim._monitor import Monitor
from poprisk.optim._step_average import StepAverage
from poprisk.optim._updates import GroupMemory, GroupUpdate, attach_variances, rule_state, was_stepped
from poprisk.optim._validation import check_group, check_one_device
from poprisk.optim.rules._gates import GateName
from poprisk.optim.rules._population import current_gate, linearize


class PopRiskAdamW(Optimizer):
    r"""AdamW with a gate per coordinate, which descends population risk instead of training loss.

    .. math::
       s_t &= \rho s_{t-1} + (1-\rho)(g_t - m_{t-1})^2, \quad
       m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \\
       \tilde q_t &= \tfrac12 \big(1 + \min(1, q_t / \bar q_{t-1})\big), \quad
       q_t = \frac{\hat m_t^2}{\hat m_t^2 + \lambda \hat s_t} \\
       w_t &= w_{t-1} - \eta\, \tilde q_t \odot \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} - \eta \lambda_{wd} w_{t-1}

    *Population risk* is the expected loss on fresh examples. The *gate* q scales the step of each coordinate by how
    clearly the signal of its gradient stands out of the noise. This is the SNR gate of the paper's Algorithm 1
    (``alg:pop_risk``), relative to its mean :math:`\bar q` over the tensor; :class:`poprisk.Gate` has the other gates
    and everything else that shapes a gate. A drop-in replacement for :class:`torch.optim.AdamW` with one more state
    vector, s, and two numbers per tensor.

    **Learning rate.** ``lr`` is AdamW's for every gate: pass the one you would give :class:`torch.optim.AdamW`, with
    the same schedule. A coordinate whose gate is at least average for its tensor gets AdamW's step, the others less,
    down to half of it.
    :meth:`PopRiskAdamW.paper` and ``Gate(normalize=False)`` multiply by q itself, as Algorithm 1 does: then AdamW's lr
    is far too small, and about ten times it suits a strength of 1, 60 times a strength of 100.

    **What it pays.** Less than one may hope: against controls that slow AdamW down as much, the literal gate's choice
    of coordinates helps on some tasks and hurts on others, mostly noisy ones. What pays on noisy labels, measured with
    AdamW, is averaging the weights along the run and choosing the moment on examples held back: see
    :class:`poprisk.KeepBest`. ``docs/optimizer.md`` has the results.

    If nearly all gates of a literal gate stay closed for 200 steps, a :class:`poprisk.errors.ClosedGateWarning` says so
    once, with the remedy.

    Symbol map: ``lr`` η, ``betas`` (β1, β2), ``eps`` ϵ, ``weight_decay`` λ_wd; of the gate ``alpha`` α, ``strength``
    λ_pop (λ of the SNR gate), ``rho`` ρ, ``eps`` ε.

    Differs from the paper: ε defaults to 0, which makes the gate independent of the gradients' scale (0/0 is closed);
    at t = 1 with α ≥ 1, where m̂² = ŝ, the gate is closed by definition; s has a step count of its own, so that it can
    join a run that began with AdamW; a coordinate whose gradient is not finite is not updated in that step.

    Args:
        params: Parameters, named parameters, or parameter groups. Every option except ``variance`` may be set per
            group: ``gate=None`` lets routers, norms or embeddings opt out, a name changes the kind of the gate, a
            ``Gate`` replaces it.
        lr: AdamW's learning rate, a number or a one-element tensor.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Constant added to Adam's denominator.
        weight_decay: Decoupled weight decay, as in AdamW. It is not gated, so a closed gate still decays (see
            ``Gate.gated_decay``).
        gate: A :class:`poprisk.Gate`, or the name of its kind with all else at the defaults: ``"snr"``, ``"soft"`` or
            ``"hard"``. None is torch's AdamW, bit for bit at the same lr and weight decay.
        state: ``"shared"`` derives s from m and v, which needs ρ = β1 = β2 and no memory beyond AdamW's.
        state_dtype: ``torch.bfloat16`` for v and s, or a mapping such as ``{"s": torch.bfloat16}``; rounded
            stochastically, because round-to-nearest would freeze the averages. Default: float32 (float64 for float64).
        skip_nonfinite: Leave a coordinate (w, m, v, s) unchanged in a step where its gradient is NaN or infinite, or
            so large that its square overflows, and warn once. False lets it through, as AdamW does.
        variance: Source of the variance of the batch gradient, in place of the stream of gradients:
            :class:`poprisk.PerExampleVariance` or :class:`poprisk.MicrobatchVariance`.
        maximize: Maximize the objective instead of minimizing it.
        foreach: As in torch: True, False, or None for torch's choice.
        capturable: Keep counters on the device, so that a step can be captured in a CUDA graph.
        differentiable: Let autograd run through the step.
        fused: Update in one pass over memory: a C kernel on the CPU, a Triton kernel on CUDA. Where that is not
            possible, a slower path with the same result is used, with one warning. None, the default, uses the C
            kernel wherever it is possible (it is compiled once and kept in the user's cache) and torch's choice
            elsewhere, without a warning.
        **gate_options: Deprecated: the fields of :class:`poprisk.Gate` one by one, ``strength=…`` for instance.

    Raises:
        HyperparameterError: an option is out of range, or contradicts another.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = PopRiskAdamW(model.parameters(), gate=Gate("snr", strength=30.0))
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'exp_var', 'gate_scale', 'step', 'var_step']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = DEFAULTS.lr,
        betas: tuple[float, float] = DEFAULTS.betas,
        eps: float = DEFAULTS.eps,
        weight_decay: float = DEFAULTS.weight_decay,
        *,
        gate: Gate | GateName | None = DEFAULTS.gate,
        state: Literal["full", "shared"] = DEFAULTS.state,
        state_dtype: torch.dtype | dict[str, torch.dtype] | None = DEFAULTS.state_dtype,
        skip_nonfinite: bool = DEFAULTS.skip_nonfinite,
        variance: VarianceSource | None = None,
        maximize: bool = DEFAULTS.maximize,
        foreach: bool | None = DEFAULTS.foreach,
        capturable: bool = DEFAULTS.capturable,
        differentiable: bool = DEFAULTS.differentiable,
        fused: bool | None = DEFAULTS.fused,
        **gate_options: Any,
    ) -> None:
        given = locals()
        unknown = next((name for name in gate_options if name not in GATE_FIELD), None)
        if unknown is not None:
            raise TypeError(f"PopRiskAdamW.__init__() got an unexpected keyword argument {unknown!r}")
        options = {name: given[name] for name in DEFAULTS.as_dict() if name in given}
        defaults = {**DEFAULTS.as_dict(), **options, **unpack_gate({"gate": gate, **gate_options})}
        check_group(defaults | {"params": []})
        if variance is not None and not isinstance(variance, VarianceSource):
            raise HyperparameterError(
                f"variance must have a method variances(parameters), got {type(variance).__name__}: see "
                "poprisk.PerExampleVariance and poprisk.MicrobatchVariance"
            )
        super().__init__(params, defaults)
        self._prepare(variance)

    @classmethod
    def paper(cls, params: ParamsT, **options: Any) -> "PopRiskAdamW":
        """Algorithm 1 as published, independent of this library's defaults; ``options`` override single values.

        Its gate multiplies AdamW's step literally, so it needs about ten times AdamW's learning rate. To change a field
        of the gate, pass ``gate=Gate.paper(alpha=0.5)``.

        >>> PopRiskAdamW.paper([torch.zeros(1, requires_grad=True)]).defaults["alpha"]
        1.0
        """
        return cls(params, **{**PAPER, **options, **unpack_gate(options)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, also during training; its options are checked like the constructor's."""
        params = param_group["params"]
        if not isinstance(params, Tensor | set):  # torch refuses a set, whose order changes from run to run
            param_group = {**param_group, "params": list(params)}
        param_group = {**param_group, **unpack_gate(param_group)}
        given = [params] if isinstance(params, Tensor) else param_group["params"]
        tensors = [p for p in (p[1] if isinstance(p, tuple) else p for p in given) if isinstance(p, Tensor)]
        full = {**self.defaults, **param_group, "params": tensors}
        check_group(full)
        super().add_param_group({**param_group, **{name: full[name] for name in DEFAULTS.as_dict()}})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one optimization step.

        Inside ``torch.compile`` the step runs uncompiled between the compiled parts: a fused step is already one pass
        over memory, and traced code would be recompiled whenever the step count changes.

        Args:
            closure: Evaluates the model again and returns the loss; optional, as in torch.
        """
        return self._untraced_step(closure) if torch.compiler.is_compiling() else self._step(closure)

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._updates(stepping=True)
        for update in updates:
            backends.run(update)
            update.finish(self.state)
        with torch.no_grad():
            self._monitor.after_step(updates)
        return loss

    _untraced_step = torch._disable_dynamo(_step)

    def diagnostics(self) -> list[GateDiagnostics]:
        """Meters of each parameter group, computed on the device without waiting for it.

        Active fraction, mean gate and noise scale describe the last step. The two rates need gradients that no step has
        used yet: call this between ``backward()`` (and ``GradScaler.unscale_``, if there is one) and ``step()``;
        otherwise they are NaN, as they are with a ``variance`` source. Can be captured in a CUDA graph. With sharded
        parameters (FSDP2) the meters describe the whole parameters: call this in every process.
        """
        with torch.no_grad():
            return [meters(sums) for sums in self._gate_sums()]

    def overall_diagnostics(self) -> GateDiagnostics:
        """The same meters over all parameter groups together, for a training log.

        Rates add up over the groups; gate and noise scale cover the groups that have a gate.
        """
        with torch.no_grad():
            return meters(over_all(self._gate_sums()))

    def gates(self) -> dict[Tensor, Tensor]:
        """What multiplied AdamW's step in each parameter's last step, in the parameter's shape.

        This is the gate in AdamW's units, between 0.5 and 1; with ``Gate(normalize=False)`` it is q itself, at most 1.
        Parameters that have not been stepped are left out. Complex parameters have pairs of real numbers, sharded ones
        DTensors (call this in every process).
        """
        with torch.no_grad():
            return {
                p.parameter: p.global_view(current_gate(rule_state(p, update.hyper), update.hyper))
                for update in self._updates(stepping=False)
                for p in update.params
                if was_stepped(p, update.hyper)
            }

    def linearize(self, *, gated: bool = True) -> dict[Tensor, Linearization]:
        """The last step of each parameter as an affine map of its gradient's momentum; see ``Linearization``.

        With ``gated=False`` it is the step with an open gate, beside which the gate itself is known to rounding.

        It uses the hyper-parameters of that step, whatever a scheduler has set since. Complex parameters are pairs of
        real numbers, sharded ones DTensors. Coordinates left out for a non-finite gradient are not marked.
        """
        steps: dict[Tensor, Linearization] = {}
        with torch.no_grad():
            for update in self._updates(stepping=False):
                hyper = update.memory.last or update.hyper
                hyper = hyper if gated else replace(hyper, gate=None)
                for p in update.params:
                    if was_stepped(p, update.hyper):
                        lin = linearize(rule_state(p, hyper), hyper)
                        M = lin.preconditioner if update.sign == 1 else -lin.preconditioner
                        per_weight = isinstance(lin.decay, Tensor) and lin.decay.dim()
                        decay = p.global_view(torch.as_tensor(lin.decay)) if per_weight else lin.decay
                        steps[p.parameter] = replace(lin, preconditioner=p.global_view(M), decay=decay)
        return steps

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with dtypes as text, because ``torch.distributed.checkpoint`` gathers numbers and text only."""
        for group in self.param_groups:
            group.update(unpack_gate(group, in_group=True))  # a Gate that was set since the last step
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["state_dtype"] = checkpoint.dtype_names(group["state_dtype"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or one of :class:`torch.optim.AdamW` to continue its run.

        From AdamW, moments and step counts are taken; lr, gate and all other options stay those of this optimizer, and
        ``went_on_from_adamw`` becomes True. States keep the dtype they were saved with. A state dict of version 0.1 has
        a gate that is not normalized: its run continues exactly, and a :class:`poprisk.errors.LiteralGateWarning` says
        how to convert its learning rate to AdamW's units. A state dict that does not fit changes nothing.
        """
        checkpoint.check_form(state_dict)
        seen: dict[str, Any] = {}
        before = [{name: group[name] for name in ("gate", "normalize_gate")} for group in self.param_groups]

        def adopt(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            seen["dict"] = checkpoint.adopt(given, self.param_groups)
            seen["ours"], seen["given"] = checkpoint.is_ours(given), given
            return seen["dict"]

        def restore(_: Optimizer) -> None:
            checkpoint.restore_dtypes(self.state, seen["dict"], self.param_groups, seen["ours"])

        handles = [  # between the user's own hooks: they give what is checked, and see what was restored
            self.register_load_state_dict_pre_hook(adopt),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        self.went_on_from_adamw = not seen["ours"]
        if seen["ours"]:
            checkpoint.warn_of_units(seen["given"], before)

    def to_adamw_state_dict(self) -> dict[str, Any]:
        """A state dict for ``torch.optim.AdamW(...).load_state_dict``: moments and step counts, without s.

        It contains this optimizer's lr and weight decay, as every state dict does: set AdamW's after loading.
        """
        return checkpoint.to_adamw(self.state_dict())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "variance_source": self._variance_source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state.pop("variance_source", getattr(self, "_variance_source", None))
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("normalize_gate", False)  # what a group without this entry means
            for name, value in DEFAULTS.as_dict().items():
                group.setdefault(name, value)
        self._prepare(source)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and overflow checks to the step, as it does for torch's fused ones.

        Not with a variance source: it follows the scale of ``.grad``, which must then be the unscaled one.
        """
        return self._variance_source is None and all(group["fused"] for group in self.param_groups)

    def _prepare(self, variance: VarianceSource | None) -> None:
        self._variance_source = variance
        self._monitor = Monitor()
        self._memories: dict[int, GroupMemory] = {}
        self._average: StepAverage | None = getattr(self, "_average", None)
        self.went_on_from_adamw = False

    def _updates(self, *, stepping: bool) -> list[GroupUpdate]:
        """The updates of all groups: in a step of what has a gradient, otherwise, to look at, of every parameter.

        Everything is checked before anything is touched.
        """
        check_one_device({p.device for g in self.param_groups if g["fused"] for p in g["params"] if p.grad is not None})
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        average = None if self._average is None or self._average.closed else self._average
        again = stepping and scale is None and overflow is None and self._variance_source is None
        updates, new, key = [], [], 0
        for group in self.param_groups:
            memory = self._memories.get(id(group)) or self._memories.setdefault(id(group), GroupMemory())
            hyper, update = memory.hyper_of(group), None
            if again and memory.launch is not None:
                update = memory.launch.reuse(group, hyper, self.state, key + 1, average)
            if update is None:
                params = [
                    memory.param_update(p, key + place)
                    for place, p in enumerate(group["params"], 1)
                    if p.grad is not None or not stepping
                ]
                update = GroupUpdate(params, hyper, group, memory, scale, overflow, average=average)
                if params and hyper.gate is not None:
                    update.left_out = self._monitor.counter(params[0].local.device)
                new.append(update)
            key += len(group["params"])
            updates.append(update)
        if stepping and self._variance_source is not None:
            attach_variances(self._variance_source, updates)
        for update in new:
            update.attach_states(self.state, create=stepping)
        return updates

    def average_in_step(self, average: StepAverage) -> bool:
        """Move means of the weights along with each step, in the same pass over memory where a kernel supports it.

        :class:`poprisk.TailAverage` calls this, and moves what no kernel has moved. With ``gate=None`` and
        ``fused=True`` the kernel then replaces torch's function: the step is AdamW's up to rounding, not bit for bit.

        Returns:
            Whether the means were taken; not if this optimizer moves others already.
        """
        if self._average is None or self._average.closed:
            self._average = average
        return self._average is average

    def _gate_sums(self) -> list[Sums]:
        observed = self._variance_source is not None
        return [
            gate_sums(u, fresh=not observed and u.hyper.signal == "ema" and u.has_fresh_gradients())
            for u in self._updates(stepping=False)
        ]
