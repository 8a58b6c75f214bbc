"""Every backend × gate × option × dtype against the float64 rule, enumerated from one table."""

import contextlib
import copy
from functools import cache

import pytest
import torch
from optimizer_table import BACKENDS, GATES, INPUTS
from streams import SHAPES, relative_error, start, stream, train

from poprisk.errors import BackendWarning, GradientError, StateDictError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._updates import hyper_of
from poprisk.optim.rules._population import PopulationState, initial_state, population_step

STEPS = 200
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = list(TOLERANCE)
UNITS = pytest.mark.parametrize("normalize", [True, False], ids=["AdamW's units", "literal"])


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


@cache
def reference(gate, row):
    """The pure rule in float64, tensor by tensor; the stream is the same in every dtype."""
    options = {"gate": gate, **INPUTS[row].options}
    hyper = hyper_of(PopRiskAdamW(start(), **join_gate(options)).param_groups[0])
    sign, out = -1 if options.get("maximize") else 1, []
    for k, w in enumerate(start()):
        w = w.detach()
        state = initial_state(w, hyper)
        for gradients in stream(STEPS):
            w, state = population_step(w, sign * gradients[k], state, hyper)
        out.append(w)
    return out


def expected_warning(backend, row):
    return pytest.warns(BackendWarning) if backend == "fused" and row.two_pass else contextlib.nullcontext()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("row", INPUTS, ids=lambda r: r.name)
@pytest.mark.parametrize("gate", [g for g in GATES if g != "hard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_smooth_gates_equal_the_rule_after_200_steps(backend, gate, row, dtype, device):
    options = {"gate": gate, **row.options}
    gradients = stream(STEPS, dtype=dtype, device=device)
    params = start(dtype=dtype, device=device)
    optimizer = PopRiskAdamW(params, **join_gate(options), **BACKENDS[backend])
    with expected_warning(backend, row):
        train(optimizer, params, gradients)
    # A soft gate near its cutoff is a small difference of large numbers; relative to a mean of such, it moves weights.
    near_the_cutoff = gate == "soft" and row.name == "defaults" and dtype == torch.float32
    assert (
        relative_error(params, reference(gate, INPUTS.index(row))) <= (5 if near_the_cutoff else 1) * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("row", INPUTS, ids=lambda r: r.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_gate_equals_the_rule_step_by_step(backend, row, dtype, device):
    """From equal state each step: one flipped bit of a hard gate would otherwise separate the runs for good."""
    options = {"gate": "hard", **row.options}
    params = start(dtype=dtype, device=device)
    optimizer = PopRiskAdamW(params, **join_gate(options), **BACKENDS[backend])
    hyper = hyper_of(optimizer.param_groups[0])
    sign = -1 if row.options.get("maximize") else 1
    compared = 0
    for gradients in stream(40, dtype=dtype, device=device):
        before = [_snapshot(optimizer, p) for p in params]
        with expected_warning(backend, row) if compared == 0 else contextlib.nullcontext():
            train(optimizer, params, [gradients])
        for p, g, (w, state) in zip(params, gradients, before, strict=True):
            state = state or initial_state(w, hyper)
            new, after = population_step(w, sign * g.double().cpu(), state, hyper)
            clear = _away_from_ties(after, g.double().cpu(), hyper)
            compared += int(clear.sum())
            error = (p.detach().double().cpu() - new)[clear].abs().max() if clear.any() else torch.zeros(())
            size = torch.maximum(new.abs().max(), w.abs().max())  # a scalar may pass zero
            assert error <= TOLERANCE[dtype] * size
    assert compared > 0.99 * 40 * sum(p.numel() for p in params)


def _snapshot(optimizer, p):
    state = optimizer.state.get(p)
    w = p.detach().double().cpu().clone()
    if not state:
        return w, None
    moments = {
        name: state[name].double().cpu().clone() if name in state else None
        for name in ("exp_avg", "exp_avg_sq", "exp_var")
    }
    step = state["step"].item()
    return w, PopulationState(
        moments["exp_avg"], moments["exp_avg_sq"], moments["exp_var"], step,
        state["var_step"].item() if "var_step" in state else step,
        state["var_gain"].item() if "var_gain" in state else 0.0,
        scale=state["gate_scale"].double().cpu().clone() if "gate_scale" in state else None,
    )  # fmt: skip


def _away_from_ties(state, g, hyper):
    """Where |m̂²/(αŝ) - 1| ≥ 1e-5."""
    from poprisk.optim.rules._coefficients import current
    from poprisk.optim.rules._population import debiased_variance

    c = current(hyper, state.step, state.var_step, state.gain)
    signal = (g if hyper.signal == "batch" else state.m * c.m_debias).square()
    noise = debiased_variance(state, hyper) * c.alpha
    if hyper.granularity != "element":
        dims = tuple(range(0 if hyper.granularity == "tensor" else 1, signal.dim()))
        if dims:
            signal, noise = signal.mean(dims, keepdim=True).expand_as(g), noise.mean(dims, keepdim=True).expand_as(g)
    clear = (signal / noise - 1).abs() >= 1e-5
    return clear | torch.tensor(c.open_gate == c.open_gate)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@UNITS
def test_low_precision_weights_use_float32_mathematics(normalize, backend, dtype, device):
    """The weights are those of the float32 rule rounded at each step; m, v and s are float32."""
    params = start(dtype=dtype, device=device)
    optimizer = PopRiskAdamW(params, gate=Gate(normalize=normalize), **BACKENDS[backend])
    falls_back = backend == "fused" and device == "cpu" and dtype == torch.float16
    gradients = [[g.to(dtype) for g in row] for row in stream(50, dtype=torch.float32, device=device)]
    with pytest.warns(BackendWarning) if falls_back else contextlib.nullcontext():
        train(optimizer, params, gradients)
    hyper = hyper_of(optimizer.param_groups[0])
    for k, w in enumerate(start(dtype=dtype, device=device)):
        w = w.detach()
        state = initial_state(w, hyper)
        for row in gradients:
            w, state = population_step(w, row[k], state, hyper)
        assert params[k].dtype == dtype
        assert {optimizer.state[params[k]][n].dtype for n in ("exp_avg", "exp_avg_sq", "exp_var")} == {torch.float32}
        ulp = torch.finfo(dtype).eps * w.abs().max().item()
        assert (params[k].detach().float() - w.float()).abs().max().item() <= ulp  # one rounding may fall the other way


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "state_dtype", [torch.bfloat16, {"s": torch.bfloat16}, {"v": torch.bfloat16}], ids=["v,s", "s", "v"]
)
def test_low_precision_states_draw_the_same_bits_in_every_backend(backend, state_dtype, device):
    params, plain = start(dtype=torch.float32, device=device), start(dtype=torch.float32, device=device)
    optimizer = PopRiskAdamW(params, state_dtype=state_dtype, **BACKENDS[backend])
    rule = PopRiskAdamW(plain, state_dtype=state_dtype, foreach=False)
    gradients = stream(100, dtype=torch.float32, device=device)
    train(optimizer, params, gradients)
    train(rule, plain, gradients)
    wanted = state_dtype if isinstance(state_dtype, dict) else {"v": state_dtype, "s": state_dtype}
    different, total = 0, 0
    for p, r in zip(params, plain, strict=True):
        for name, letter in (("exp_avg_sq", "v"), ("exp_var", "s")):
            assert optimizer.state[p][name].dtype == wanted.get(letter, torch.float32)
            if letter in wanted:  # arithmetic in another order may carry one sum over a rounding boundary
                different += (optimizer.state[p][name] != rule.state[r][name]).sum().item()
                total += p.numel()
    assert different <= 0.01 * total
    assert relative_error(params, plain) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@UNITS
def test_layouts_empty_and_scalar_tensors(normalize, backend, device):
    base = torch.randn(6, 4, device=device)
    params = [
        torch.nn.Parameter(torch.randn(3, 4, 2, 2, device=device).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(5, 3, device=device).t()),
        torch.nn.Parameter(torch.randn(0, 3, device=device)),
        torch.nn.Parameter(torch.randn((), device=device)),
        torch.nn.Parameter(base[:, ::2]),
        torch.nn.Parameter(torch.randn(9, device=device)[1:]),  # not aligned to 16 bytes
    ]
    copies = [torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    gate = Gate(normalize=normalize)
    fast = PopRiskAdamW(params, gate=gate, **BACKENDS[backend])
    plain = PopRiskAdamW(copies, gate=gate, foreach=False)
    with pytest.warns(BackendWarning) if backend == "fused" else contextlib.nullcontext():
        for _ in range(5):
            for p, c in zip(params, copies, strict=True):
                c.grad = torch.randn(c.shape, device=device)
                p.grad = torch.empty_like(p).copy_(c.grad)
            fast.step()
            plain.step()
    for p, c in zip(params, copies, strict=True):
        torch.testing.assert_close(p.detach().contiguous(), c.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=dtype_name)
def test_complex_parameters_have_a_gate_for_each_part(backend, dtype, device):
    real_dtype = torch.float32 if dtype == torch.complex64 else torch.float64
    z = [torch.nn.Parameter(torch.randn(4, 3, dtype=dtype, device=device))]
    x = [torch.nn.Parameter(torch.view_as_real(z[0].detach()).clone())]
    on_complex, on_real = PopRiskAdamW(z, **BACKENDS[backend]), PopRiskAdamW(x, foreach=False)
    for row in stream(20, shapes=((4, 3, 2),), dtype=real_dtype, device=device):
        z[0].grad, x[0].grad = torch.view_as_complex(row[0]), row[0]
        on_complex.step()
        on_real.step()
    torch.testing.assert_close(torch.view_as_real(z[0].detach()), x[0].detach(), rtol=1e-6, atol=1e-7)
    assert on_complex.state[z[0]]["exp_var"].dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_variance_from_outside_in_every_backend(backend, device):
    class Given:
        def variances(self, parameters):
            return [torch.full_like(p, 0.25) if i % 2 else None for i, p in enumerate(parameters)]

    params, plain = (start(dtype=torch.float32, device=device) for _ in range(2))
    gradients = stream(30, dtype=torch.float32, device=device)
    train(PopRiskAdamW(params, variance=Given(), **BACKENDS[backend]), params, gradients)
    train(PopRiskAdamW(plain, variance=Given(), foreach=False), plain, gradients)
    assert relative_error(params, plain) <= 2e-6


def test_a_missing_compiler_falls_back_with_the_same_result_and_says_so_once(monkeypatch, tmp_path):
    from poprisk.optim.backends import _compiler as compiler

    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("POPRISK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_FAILURES", [])
    compiler._load.cache_clear()
    params, plain = start(), start()
    with pytest.warns(BackendWarning, match="cannot be built") as caught:
        train(PopRiskAdamW(params, fused=True), params, stream(5))
    train(PopRiskAdamW(plain, foreach=False), plain, stream(5))
    assert len(caught) == 1
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p, q)


def test_without_a_compiler_the_default_is_silent_and_tries_it_once(monkeypatch, tmp_path):
    from poprisk.optim.backends import _compiler as compiler

    calls = []
    monkeypatch.setenv("POPRISK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_FAILURES", [])
    monkeypatch.setattr(compiler, "_call", lambda command: calls.append(command) or _fail(compiler))
    compiler._load.cache_clear()
    params, plain = start(), start()
    for gate in ("snr", "soft"):  # two kernels, and the second is not tried
        train(PopRiskAdamW(params, gate=gate), params, stream(5))
        train(PopRiskAdamW(plain, gate=gate, foreach=False), plain, stream(5))
    assert len(calls) == 1
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p, q)


def _fail(compiler):
    raise compiler.BuildError("no compiler")


def test_the_default_is_the_fused_kernel_and_only_where_it_fits(monkeypatch):
    from poprisk.optim.backends import _cpu as cpu

    served, original = [], cpu._call

    def call(update, library, items, params, done):
        served.append(len(params))
        original(update, library, items, params, done)

    monkeypatch.setattr(cpu, "_call", call)
    params = [*start(dtype=torch.float32), torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]
    gradients = [[*row, torch.ones(3, dtype=torch.float16)] for row in stream(3, dtype=torch.float32)]
    train(PopRiskAdamW(params), params, gradients)
    assert served == [len(params) - 1] * 3  # no kernel for float16 on the CPU
    for options in ({"foreach": True}, {"foreach": False}, {"fused": False}):
        train(PopRiskAdamW(params, **options), params, gradients)
    assert len(served) == 3


def test_a_step_sees_what_changed_since_the_last_one():
    """Weights moved to other memory, new states, another count, a parameter that has no gradient for a while."""
    params, plain = start(dtype=torch.float32), start(dtype=torch.float32)
    fast, slow = PopRiskAdamW(params), PopRiskAdamW(plain, foreach=False)
    gradients = stream(12, dtype=torch.float32)
    for step, row in enumerate(gradients):
        for optimizer, tensors in ((fast, params), (slow, plain)):
            if step == 2:
                tensors[0].data = tensors[0].data.clone()
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 6:
                optimizer.state[tensors[1]]["exp_avg"] = torch.zeros_like(tensors[1])
            if step == 7:
                optimizer.state[tensors[2]]["step"].add_(5)
            if step == 8:
                optimizer.param_groups[0]["lr"] = 0.1
            if step == 10:
                optimizer.state[tensors[1]]["exp_avg"].data = torch.ones_like(tensors[1])
            for p, g in zip(tensors, row, strict=True):
                p.grad = torch._neg_view(-g) if step == 11 else g.clone()
            if step in (3, 9):
                tensors[step % 2].grad = None
            optimizer.step()
    assert relative_error(params, plain) <= 2e-6


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rows", [2, 64], ids=["smaller", "larger"])
@pytest.mark.parametrize("grad", [False, True], ids=["old gradient", "new gradient"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_data_of_another_shape_is_refused_before_anything_is_written(backend, grad, rows, cached):
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = PopRiskAdamW([p], **BACKENDS[backend])
    for _ in range(3 if cached else 1):
        p.grad = torch.ones_like(p)
        optimizer.step()
    old, whole = p.data, torch.ones(100, 3)
    p.data = whole[:rows] if rows == 64 else old[:rows]  # the smaller one lies at the same address
    if grad:
        p.grad = torch.ones(rows, 3)
    state = {name: value.clone() for name, value in optimizer.state[p].items()}
    before = old.clone()
    with pytest.raises((StateDictError, GradientError), match=rf"a parameter of shape \({rows}, 3\) has a"):
        optimizer.step()
    assert torch.equal(old, before)
    assert torch.equal(whole, torch.ones(100, 3))
    assert all(torch.equal(value, optimizer.state[p][name]) for name, value in state.items())


def test_a_transposed_parameter_at_the_same_address_is_noticed():
    results = []
    for options in ({}, {"foreach": False}):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        optimizer = PopRiskAdamW([p], lr=0.1, **options)
        for step in range(8):
            p.grad = torch.randn(4, 4, dtype=torch.float64)
            if step == 5:
                p.data = p.data.t()
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_a_step_keeps_no_gradient_alive():
    import weakref

    params = start()
    optimizer = PopRiskAdamW(params)
    for row in stream(3):
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        optimizer.step()
    seen = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    assert [ref() for ref in seen] == [None] * len(params)


def test_gradients_are_never_written(tmp_path):
    for options in BACKENDS.values():
        params = start()
        grads = stream(1)[0]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        PopRiskAdamW(params, maximize=True, **options).step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


def test_the_table_covers_every_option():
    """A new option of the rule must appear in the table."""
    from poprisk.optim._defaults import RULE_OPTIONS

    used = {name for row in INPUTS for name in row.options} | {"gate", "lr", "betas"}
    assert set(RULE_OPTIONS) <= used
    assert len(SHAPES) == len(start())
