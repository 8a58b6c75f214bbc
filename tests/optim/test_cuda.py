"""What only a CUDA device can show: graphs, gradient scaling without a wait, memory, and the async monitor."""

import copy
import warnings

import pytest
import torch
from streams import relative_error, start, stream, train

from poprisk.errors import ClosedGateWarning, NonFiniteGradientWarning
from poprisk.optim import Gate, TailAverage
from poprisk.optim._adamw import PopRiskAdamW

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=["fused", "foreach", "forloop"]
)
@pytest.mark.parametrize(
    "extra",
    [{}, {"gate": Gate(alpha="calibrated")}, {"gate": Gate(centering="corrected")}, {"state_dtype": torch.bfloat16}],
    ids=str,
)
def test_a_captured_step_equals_an_eager_one(options, extra):
    eager, captured = (start(dtype=torch.float32, device="cuda") for _ in range(2))
    gradients = stream(30, dtype=torch.float32, device="cuda")
    plain = PopRiskAdamW(eager, **extra, **options)
    graphed = PopRiskAdamW(captured, capturable=True, **extra, **options)
    for p, g in zip(captured, gradients[0], strict=True):
        p.grad = g.clone()
    train(plain, eager, gradients)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for row in gradients[:3]:
            for p, g in zip(captured, row, strict=True):
                p.grad.copy_(g)
            graphed.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
        meters = graphed.diagnostics()[0]
    for row in gradients[3:]:
        for p, g in zip(captured, row, strict=True):
            p.grad.copy_(g)
        graph.replay()
    assert graphed.state[captured[0]]["step"].item() == 30
    assert relative_error(captured, eager) <= (2e-3 if "state_dtype" in extra else 2e-6)
    torch.testing.assert_close(meters.mean_gate, plain.diagnostics()[0].mean_gate, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication available")
def test_a_compiled_and_captured_training_step_equals_an_eager_one():
    """Forward and backward by torch.compile and the fused step, all in one CUDA graph."""
    batches = torch.randn(20, 32, 16, generator=torch.Generator().manual_seed(2)).cuda()

    def network():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4)).cuda()

    def training_step(model, optimizer, x):
        optimizer.zero_grad(set_to_none=False)
        (model(x) - 1).square().mean().backward()
        optimizer.step()

    eager, captured = network(), network()
    plain = PopRiskAdamW(eager.parameters(), gate=Gate(alpha=0.3), fused=True)
    graphed = PopRiskAdamW(captured.parameters(), gate=Gate(alpha=0.3), fused=True, capturable=True)
    for x in batches:
        training_step(eager, plain, x)
    compiled, held = torch.compile(captured), batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in batches[:3]:
            held.copy_(x)
            training_step(compiled, graphed, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training_step(compiled, graphed, held)
    for x in batches[3:]:
        held.copy_(x)
        graph.replay()
    assert graphed.state[captured[0].weight]["step"].item() == len(batches)
    assert relative_error(list(captured.parameters()), list(eager.parameters())) <= 2e-5


def test_an_empty_parameter_keeps_the_others_time():
    params = [torch.nn.Parameter(torch.zeros(0, 3, device="cuda")), torch.nn.Parameter(torch.ones(40, device="cuda"))]
    optimizer = PopRiskAdamW(params, fused=True)
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [4, 4]


def test_the_fused_step_makes_no_parameter_sized_temporary():
    p = torch.nn.Parameter(torch.randn(1 << 24, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = PopRiskAdamW([p], fused=True)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < p.numel() // 16


def test_gradient_scaling_happens_in_the_kernel_and_an_overflow_is_skipped():
    params, plain = (start(dtype=torch.float32, device="cuda") for _ in range(2))
    fused, reference = PopRiskAdamW(params, fused=True), PopRiskAdamW(plain, foreach=False)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step, row in enumerate(stream(10, dtype=torch.float32, device="cuda")):
        overflow = step == 4
        scaler.scale(torch.zeros((), device="cuda"))
        for p, q, g in zip(params, plain, row, strict=True):
            p.grad = g * scaler.get_scale()
            q.grad = g.clone()
            if overflow:
                p.grad.view(-1)[0] = float("inf")
        before = [p.detach().clone() for p in params]
        scaler.step(fused)
        scaler.update()
        if overflow:
            assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        else:
            reference.step()
    assert fused.state[params[0]]["step"].item() == 9
    assert relative_error(params, plain) <= 2e-6


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device():
    params = start(dtype=torch.float32, device="cuda")
    for options in ({"fused": True}, {"foreach": True}):
        optimizer = PopRiskAdamW(params, **options)
        gradients = stream(60, dtype=torch.float32, device="cuda")
        train(optimizer, params, gradients[:2])
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            train(optimizer, params, gradients)
            optimizer.diagnostics()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert optimizer.state[params[0]]["step"].item() == 62


def test_the_monitor_reads_later_what_it_copied_earlier():
    """Of Algorithm 1's own gate, which pure noise closes; the default one passes some of it, and is not reported."""
    p = torch.nn.Parameter(torch.randn(4096, device="cuda"))
    optimizer = PopRiskAdamW.paper([p], fused=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(400):
            p.grad = torch.randn_like(p)
            if step == 10:
                p.grad[3] = float("nan")
            optimizer.step()
            if step % 50 == 0:
                torch.cuda.synchronize()
    kinds = [w.category for w in caught]
    assert kinds.count(ClosedGateWarning) == 1
    assert kinds.count(NonFiniteGradientWarning) == 1
    assert torch.isfinite(p).all()
    assert torch.isfinite(optimizer.state[p]["exp_var"]).all()


@pytest.mark.parametrize("fused", [True, False])
def test_state_moves_between_devices(fused):
    gradients = stream(12, dtype=torch.float32)
    on_cpu = start(dtype=torch.float32)
    first = PopRiskAdamW(on_cpu, state_dtype=torch.bfloat16, fused=fused, foreach=False)
    train(first, on_cpu, gradients[:6])
    on_gpu = [torch.nn.Parameter(p.detach().cuda()) for p in on_cpu]
    second = PopRiskAdamW(on_gpu, state_dtype=torch.bfloat16, fused=fused, foreach=False)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {second.state[p]["exp_var"].dtype for p in on_gpu} == {torch.bfloat16}
    assert {second.state[p]["exp_var"].device.type for p in on_gpu} == {"cuda"}
    train(second, on_gpu, [[g.cuda() for g in row] for row in gradients[6:]])
    train(first, on_cpu, gradients[6:])
    assert relative_error(on_gpu, on_cpu) <= 2e-3


@pytest.mark.filterwarnings("ignore::poprisk.errors.NonFiniteGradientWarning")
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}], ids=["foreach", "forloop"])
def test_without_fused_the_parameters_may_lie_on_two_devices(options):
    params = [p for d in ("cpu", "cuda") for p in start(dtype=torch.float32, device=d)]
    optimizer = PopRiskAdamW(params, gate="snr", **options)
    for row in stream(60, dtype=torch.float32):
        row[2][5] = float("nan")
        for p, g in zip(params, row + row, strict=True):
            p.grad = g.to(p.device)
        optimizer.step()
    assert relative_error(params[3:], params[:3]) <= 2e-6


@pytest.mark.filterwarnings("ignore::poprisk.errors.NonFiniteGradientWarning")
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_an_overflowing_gradient_and_a_nan_variance_leave_their_coordinate_alone(options):
    class Given:
        def variances(self, parameters):
            return [torch.where(torch.isfinite(p.grad), 0.25, float("nan")) for p in parameters]

    for variance in (None, Given()):
        params = start(dtype=torch.float32, device="cuda")
        optimizer = PopRiskAdamW(params, variance=variance, **options)
        gradients = stream(6, dtype=torch.float32, device="cuda")
        train(optimizer, params, gradients[:3])
        before = params[2].detach().clone(), optimizer.state[params[2]]["exp_var"].clone()
        gradients[3][2][::2], gradients[3][2][1::2] = float("nan"), 1e30
        train(optimizer, params, gradients[3:4])
        assert torch.equal(params[2], before[0])
        assert torch.equal(optimizer.state[params[2]]["exp_var"], before[1])
        train(optimizer, params, gradients[4:])
        assert torch.isfinite(params[2]).all()
        assert not torch.equal(params[2], before[0])


def test_a_gradient_with_a_lazy_sign_is_read_with_it():
    lazy, plain = (start(dtype=torch.float32, device="cuda") for _ in range(2))
    one, two = (PopRiskAdamW(p, gate="snr", fused=True) for p in (lazy, plain))
    for row in stream(5, dtype=torch.float32, device="cuda"):
        for p, q, g in zip(lazy, plain, row, strict=True):
            p.grad, q.grad = torch._neg_view(g), -g
        one.step()
        two.step()
    assert all(torch.equal(p, q) for p, q in zip(lazy, plain, strict=True))


LARGE = ((700, 300), (5,), (1024, 16), (33, 7, 3))


@pytest.mark.parametrize("shapes", [LARGE, LARGE[:1]], ids=["several", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_means_of_gates_do_not_depend_on_the_order_of_blocks(shapes, dtype):
    """Two runs give the same bits, and the means are those of the rule."""
    gate = Gate("snr", strength=1.0, normalize=True)
    runs = [start(shapes=shapes, dtype=dtype, device="cuda") for _ in range(3)]
    optimizers = [PopRiskAdamW(params, gate=gate, fused=True) for params in runs[:2]] + [
        PopRiskAdamW(runs[2], gate=gate, foreach=False)
    ]
    gradients = [[g.to(dtype) for g in row] for row in stream(8, shapes=shapes, dtype=torch.float32, device="cuda")]
    for optimizer, params in zip(optimizers, runs, strict=True):
        train(optimizer, params, gradients)
    for one, two, rule in zip(*runs, strict=True):
        assert torch.equal(one, two)
        scales = [o.state[p]["gate_scale"] for o, p in zip(optimizers, (one, two, rule), strict=True)]
        assert torch.equal(scales[0], scales[1])
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # weights that round the other way have other gradients
        torch.testing.assert_close(scales[0], scales[2], rtol=tolerance, atol=1e-6)
    assert relative_error(runs[0], runs[2]) <= (2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("gate", [None, "snr", Gate("snr", normalize=False)], ids=["none", "default", "literal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_kernel_moves_the_tail_average_as_the_hook_does(gate, dtype):
    model = torch.nn.ParameterList(start(shapes=LARGE, dtype=dtype, device="cuda"))
    options = {"state_dtype": torch.float32} if dtype == torch.bfloat16 and gate is None else {}
    optimizer = PopRiskAdamW(model.parameters(), lr=1e-2, gate=gate, fused=True, **options)
    in_step, by_hook = (TailAverage(model, optimizer) for _ in range(2))
    params = list(model.parameters())
    for row in stream(10, shapes=LARGE, dtype=torch.float32, device="cuda"):
        train(optimizer, params, [[g.to(dtype) for g in row]])
    assert in_step._in_step.mean_of(params[0]) is not None
    for one, two in zip(in_step.state_dict()["means"][0], by_hook.state_dict()["means"][0], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
