"""Formulas against what the operations really do: every flop, and bytes to a few percent, at sizes not used to fit."""

import sys
from pathlib import Path

import pytest
import torch
from counting import counted
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from poprisk._core.autodiff.blocks import plan_blocks
from poprisk._core.autodiff.flat import FlatModel
from poprisk.operators._kernels import rounded
from poprisk.operators._kernels.features import PASS_FLOPS, make_recipe
from poprisk.operators._kernels.layers import find_structure
from poprisk.optim._estimators.ranks import RankVariance
from poprisk.runs._problem import Problem
from poprisk.runs._training import train
from poprisk_lab.costs import kernels
from poprisk_lab.costs.kernels import kept_as_factors, product_blocks
from poprisk_lab.costs.network import LayerSize, Network
from poprisk_lab.costs.operations import cost_of
from poprisk_lab.costs.training import StateBytes, optimizer_step, rank_variance
from poprisk_lab.costs.trajectories import recording

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NETWORK = {"inputs": 20, "width": 40, "outputs": 3}
RUN = {"steps": 3, "batch": 8, "examples": 24, **NETWORK}
CASES = {
    "adjoint": RUN | {"queries": 20},
    "window_gramian": RUN | {"columns": 6, "test_examples": 0},
    "window_transfer": RUN | {"columns": 6, "test_examples": 10},
    "factor_tile": NETWORK | {"examples": 30, "chunk": 64},
    "jacobian_tile": NETWORK | {"examples": 10, "chunk": 64},
    "product_tile": NETWORK | {"rows": 20, "columns": 3, "chunk": 64},
    "kernel_product": NETWORK | {"examples": 30, "columns": 5},
    "training_step": {"layers": 3, "width": 24, "tokens": 40, "itemsize": 4},
}


@pytest.fixture(scope="module")
def operations():
    """The calls that the benchmark times."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from cost_operations import OPERATIONS
    finally:
        sys.path.remove(str(BENCHMARKS))
    return OPERATIONS


def count(operations, name, sizes):
    call, known = operations[name](sizes, "cpu")
    call()
    return counted(call), cost_of(name, known | sizes)


@pytest.mark.parametrize("name", CASES)
def test_every_flop_is_counted(operations, name):
    found, cost = count(operations, name, CASES[name])
    assert cost.flops == found.flops


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_that_move(operations, name):
    found, cost = count(operations, name, CASES[name])
    assert cost.bytes_moved == pytest.approx(found.bytes, rel=0.15)


def test_retraining_multiplies_what_it_says(operations):
    """Beside a few sums over the batch, and forward passes to see how much memory it takes and what can be stacked."""
    sizes = RUN | {"members": 10}
    found, cost = count(operations, "retraining", sizes)
    assert cost.flops == pytest.approx(found.flops, rel=0.02)
    assert cost.bytes_moved == pytest.approx(found.bytes, rel=0.15)


def test_rows_of_convolutions(operations):
    found, cost = count(operations, "convolution_rows", {"examples": 3, "width": 4})
    assert cost.flops == pytest.approx(found.flops, rel=1e-4)
    assert cost.bytes_moved == pytest.approx(found.bytes, rel=0.15)


def test_an_optimizer_step_passes_over_weights_and_states_once():
    """AdamW's fused step is one operation; each operand but the gradient and the counter is written too."""
    w = torch.zeros(1000, requires_grad=True)
    w.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([w], fused=True)
    optimizer.step()
    found = counted(optimizer.step).by_name["aten._fused_adamw_.default"]
    assert optimizer_step(1000, StateBytes(s=0)).bytes_moved == 2 * (found - 4) - 4 * 1000
    assert StateBytes(s=0).held == sum(x.element_size() for x in (w, w.grad, *optimizer.state[w].values()) if x.dim())


def test_rank_variance_sends_squares_once(monkeypatch):
    """Beside DDP's own average of the gradients goes one message of their size; a ring sends each number twice."""
    sent = []
    send = torch.distributed.all_reduce
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, **k: sent.append(x.nbytes) or send(x, **k))
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        module = torch.nn.Linear(5, 3)
        model = DistributedDataParallel(module)
        with RankVariance(model):
            model(torch.ones(2, 5)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    squares = sent[1] - 4 * 2  # and one number for each of two tensors: how many samples it had a part in
    weights = sum(p.numel() for p in module.parameters())
    assert rank_variance(weights, 2, sharded=False).bytes_sent == 2 * squares * (2 - 1) / 2
    assert rank_variance(weights, 2).bytes_sent == squares * (2 - 1) / 2


def test_layers_are_kept_as_factors_as_the_kernels_keep_them():
    assert kernels._PASS_FLOPS == PASS_FLOPS
    assert kernels._PANEL == rounded.PANEL
    modules = [torch.nn.Linear(6, 300), torch.nn.Linear(300, 5), torch.nn.Linear(5, 4)]
    x = torch.zeros(2, 3, 6)
    model = FlatModel(torch.nn.Sequential(*modules, torch.nn.Flatten()), "squared")
    recipe = make_recipe(find_structure(model, model.weights, x), {})
    sizes = [LayerSize(m.in_features, m.out_features, positions=3) for m in modules]
    kept = [str(i) for i, size in enumerate(sizes) if kept_as_factors(size, outputs=12)]
    assert [layer.name for layer in recipe.factored] == kept
    assert 0 < len(kept) < 3


@pytest.mark.parametrize(("width", "examples", "columns"), [(64, 100, 3), (1024, 4096, 64), (2048, 999, 30)])
def test_products_are_cut_as_the_library_cuts_them(width, examples, columns):
    layers = [torch.nn.Linear(512, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    model = FlatModel(torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)), "squared")
    held = model._probe(model.weights, torch.zeros(2, 512)).held
    rows, widths = plan_blocks(examples, columns, held, model.size, 4)
    network = Network.perceptron([512, width, width, 4])
    assert product_blocks(network, examples, columns) == (-(-examples // rows), -(-columns // widths))


@pytest.mark.parametrize("every", [1, 8])
def test_a_recording_takes_as_many_bytes(tmp_path, every):
    x = torch.randn(8, 60, generator=torch.Generator().manual_seed(0))
    arguments = {"in_features": 60, "out_features": 50}
    problem = Problem(torch.nn.Linear, "squared", x, torch.zeros(8, 50), arguments=arguments)
    options = {"segment_steps": 4} if every == 1 else {}
    run = train(problem, torch.optim.Adam, 16, path=tmp_path / "run", every=every, progress=False, **options)
    found = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    segment = 4 if every == 1 else every
    expected = recording(run.num_weights, steps=16, segment_steps=segment, dense=every == 1)
    assert expected == pytest.approx(found, rel=0.1)


def test_networks_count_their_weights():
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    assert Network.perceptron([7, 5, 3]).weights == sum(p.numel() for p in module.parameters())
