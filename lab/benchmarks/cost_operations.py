"""What the benchmark of cost models times: every operation made ready at given sizes, by the calls that users make.

Each function takes sizes and a device, and returns the call to be timed with whatever the cost model needs to know
besides the sizes. Inputs are random: no time here depends on what they show.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from scale_models import calibrated_resnet
from torch import Tensor, nn

from poprisk._core.autodiff.flat import FlatModel
from poprisk.cli._step_time import step_parameters
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.precision import Precision, float32_products
from poprisk.operators._kernels.products import kernel_operator
from poprisk.operators._kernels.rounded import RoundedRows, contract_rounded, panel_layout
from poprisk.operators._kernels.tiles import TileMaker, tiled_kernel
from poprisk.operators._window import Window
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run
from poprisk.runs._training import train

Sizes = dict[str, int]
Prepared = tuple[Callable[[], Any], dict[str, float]]

_DTYPES = {4: torch.float32, 2: torch.bfloat16}
# What windows, retrainings and adjoint solves may hold on to: enough that nothing is made twice at these sizes.
_MEMORY = {"cuda": 2**35, "cpu": 2**31}


def perceptron(inputs: int, width: int, outputs: int) -> nn.Module:
    """Three linear layers, smooth between."""
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers)


def optimizer_step(sizes: Sizes, device: str) -> Prepared:
    """PopRiskAdamW, or without s torch's AdamW; both fused."""
    params = step_parameters([(sizes["weights"],)], device)
    if not sizes["s"]:
        return torch.optim.AdamW(params, fused=True).step, {}
    low = {name: _DTYPES[sizes[name]] for name in ("v", "s") if sizes[name] != 4}
    options: dict[str, Any] = {"state_dtype": low} if low else {}
    return PopRiskAdamW(params, fused=True, **options).step, {}


def training_step(sizes: Sizes, device: str) -> Prepared:
    """Forward and backward pass of a stack of square layers over tokens."""
    dtype, width = _DTYPES[sizes["itemsize"]], sizes["width"]
    layers = [part for _ in range(sizes["layers"]) for part in (nn.Linear(width, width, bias=False), nn.ReLU())]
    network = nn.Sequential(*layers).to(device, dtype)
    x = torch.randn(sizes["tokens"], width, device=device, dtype=dtype)

    def step() -> None:
        for p in network.parameters():
            p.grad = None
        network(x).sum().backward()

    return step, {}


def tile(method: Method, sizes: Sizes, device: str) -> Prepared:
    """A tile between two sets of examples, each differentiated for it."""
    rows, columns = (sizes.get(name, sizes.get("examples", 0)) for name in ("rows", "columns"))
    model, x, z = _flat_perceptron(sizes, device, rows, columns)
    maker = TileMaker(model, model.weights, x, method, chunk=min(sizes["chunk"], rows))
    return lambda: maker.block(maker.side(x), maker.side(z)), {}


def kernel_product(sizes: Sizes, device: str) -> Prepared:
    """The kernel times a block of columns, never formed."""
    model, x, _ = _flat_perceptron(sizes, device, sizes["examples"], 1)
    K = kernel_operator(model, model.weights, x)
    X = torch.randn(K.shape[1], sizes["columns"], device=device)
    return lambda: K @ X, {}


def convolution_rows(sizes: Sizes, device: str) -> Prepared:
    """The rounded Jacobian rows of a ResNet-18 with one output, as tiles in float16 are made of."""
    model = FlatModel(calibrated_resnet(1, sizes["width"], device), "squared")
    x = torch.randn(sizes["examples"], 3, 32, 32, device=device)
    tiled = tiled_kernel(model, model.weights, x, precision=Precision.FLOAT16, memory=_free(device))
    maker, recipe = tiled.maker, tiled.plan.recipe
    assert recipe is not None
    structure = recipe.structure
    for _ in range(3):  # graphs are captured
        maker.side(x[: min(maker.chunk, sizes["examples"])])
    # The first convolution's inputs need no gradient.
    first = structure.layers[0]
    known = {
        "weights": model.size,
        "forward_flops": structure.forward_flops,
        "first_flops": 2.0 * first.positions * first.inputs * first.outputs,
        "activations": structure.held,
        "row_length": recipe.row_length,
        "chunk": maker.chunk,
    }
    return lambda: maker.side(x[: sizes["examples"]]), known


def rounded_product(sizes: Sizes, device: str) -> Prepared:
    """The product of two sets of rows in float16."""
    layout = panel_layout([sizes["row_length"]])

    def rows() -> RoundedRows:
        made = RoundedRows.empty(Precision.FLOAT16, layout, sizes["examples"], torch.device(device))
        step = max(1, sizes["examples"] // 8)
        for start in range(0, sizes["examples"], step):
            count = min(step, sizes["examples"] - start)
            made.fill(start, [torch.randn(count, 1, sizes["row_length"], device=device)], ())
        return made

    left, right = rows(), rows()
    return lambda: contract_rounded(left, right), {}


def window(which: str, sizes: Sizes, device: str) -> Prepared:
    """A block of columns times W or G of a recorded window, by products."""
    run = _recorded(sizes, device, torch.float32)
    test = torch.randn(sizes["test_examples"], sizes["inputs"], device=device) if sizes["test_examples"] else None
    options = {"dense": False, "nodes": 1, "memory": _MEMORY[device]}
    made = Window.of_run(run, test_inputs=test, dtype=torch.float32, **options)
    X = torch.randn(made.num_outputs, sizes["columns"], device=device)
    operator = getattr(made, which)
    return lambda: operator.matmat(X), {}


def adjoint(sizes: Sizes, device: str) -> Prepared:
    """Queries through a recorded run, from its last weights to the weights of its examples."""
    unrolled = Unrolled(_recorded(sizes, device, torch.float32), memory=_MEMORY[device])
    queries = torch.randn(unrolled.num_weights, sizes["queries"], device=device)
    return lambda: unrolled.adjoint(queries), {}


def retraining(sizes: Sizes, device: str) -> Prepared:
    """A recorded run trained again, several members at once."""
    run = _recorded(sizes, device, torch.float32)
    n, count = run.num_examples, sizes["members"]
    folds = torch.ones(count, n)
    folds[torch.arange(n) % count, torch.arange(n)] = 0
    options = {"progress": False, "memory": _MEMORY[device], "check": False}
    return lambda: retrain(run, Members(folds), **options), {}


def recorded_bytes(sizes: Sizes, device: str) -> float:
    """What a recording takes on disk."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        options: dict[str, Any] = {"every": sizes["every"], "path": path}
        if sizes["every"] == 1:
            options["segment_steps"] = sizes["segment_steps"]
        _recorded(sizes, device, torch.float32, torch.optim.Adam, **options)
        return float(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def _recorded(sizes: Sizes, device: str, dtype: torch.dtype, optimizer: Any = None, **options: Any) -> Run:
    """A run of SGD with momentum on random data, in memory unless a path is given."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes["examples"], sizes["inputs"], generator=generator, dtype=dtype)
    y = torch.randint(sizes["outputs"], (sizes["examples"],), generator=generator)
    arguments = {name: sizes[name] for name in ("inputs", "width", "outputs")}
    problem = Problem(perceptron, "cross_entropy", x, y, arguments=arguments).to(device)
    made = optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    return train(problem, made, sizes["steps"], batch_size=sizes["batch"], dtype=dtype, progress=False, **options)


def _flat_perceptron(sizes: Sizes, device: str, rows: int, columns: int) -> tuple[FlatModel, Tensor, Tensor]:
    torch.manual_seed(0)
    network = perceptron(sizes["inputs"], sizes["width"], sizes["outputs"]).to(device)
    x, z = (torch.randn(count, sizes["inputs"], device=device) for count in (rows, columns))
    return FlatModel(network, "squared"), x, z


def _free(device: str) -> int:
    if device == "cpu":
        return 2**30
    torch.cuda.empty_cache()
    return int(0.5 * torch.cuda.mem_get_info()[0])


OPERATIONS: dict[str, Callable[[Sizes, str], Prepared]] = {
    "optimizer_step": optimizer_step,
    "adamw_step": optimizer_step,
    "training_step": training_step,
    "jacobian_tile": partial(tile, Method.JACOBIAN_CONTRACTION),
    "factor_tile": partial(tile, Method.LAYER_FACTORS),
    "product_tile": partial(tile, Method.VECTOR_PRODUCTS),
    "convolution_rows": convolution_rows,
    "rounded_product": rounded_product,
    "kernel_product": kernel_product,
    "window_gramian": partial(window, "dissipation_gramian"),
    "window_transfer": partial(window, "test_transfer"),
    "adjoint": adjoint,
    "retraining": retraining,
}
"""By the names of the cost models in :mod:`poprisk_lab.costs`."""


def machine_figures(device: str, side: int, copied: int) -> dict[str, float]:
    """What the machine itself can do: large products, a large copy, an operation on nothing, copies to the host."""
    from cost_timing import median_seconds

    figures: dict[str, float] = {}
    kinds = {"float32_flops": torch.float32, "half_flops": torch.float16 if device == "cuda" else torch.float32}
    for name, dtype in kinds.items():
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        with float32_products("ieee"):
            seconds = median_seconds(lambda a=a, b=b: a @ b, device)[0]
        figures[name] = 2.0 * side**3 / seconds
        del a, b
    source = torch.randn(copied, device=device)
    target = torch.empty_like(source)
    figures["bytes_per_second"] = 8.0 * copied / median_seconds(lambda: target.copy_(source), device)[0]
    nothing = torch.zeros(1, device=device)
    figures["call_seconds"] = median_seconds(lambda: nothing.add_(1), device)[0]
    if device == "cuda":
        host = torch.empty(copied, pin_memory=True)
        figures["host_bytes_per_second"] = 4.0 * copied / median_seconds(lambda: host.copy_(source), device)[0]
        figures["memory_bytes"] = float(torch.cuda.mem_get_info()[1])
    return figures
