"""Kernels of rounded rows from jobs: the bits of one process, within their bound of float64, mixed with no others."""

from dataclasses import replace

import job_problems
import pytest
import torch

from poprisk import cluster
from poprisk._core.store import load_tiled, open_store
from poprisk.errors import DataError, DeviceError, HyperparameterError
from poprisk.jobs import JobPlan, open_matrix, run_jobs
from poprisk.operators import pinned
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.plan import plan_tiles
from poprisk.operators._kernels.precision import Precision, check_supported, error_bound
from poprisk.operators._kernels.tiles import TileMaker, tiled_kernel
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

STEP, SIDE = 2, 6
ON_A_CPU = [each for each in Precision if each is not Precision.TF32]


def recorded(path, problem):
    return train(problem, torch.optim.Adam, 3, batch_size=5, path=path, progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """23 training and 7 test examples with two outputs: the side divides neither."""
    return recorded(tmp_path_factory.mktemp("run") / "two", Problem.build(job_problems.blobs, n=23))


@pytest.fixture(scope="module")
def run_of_one_output(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run") / "one", Problem.build(job_problems.line))


def planned(folder, run, device="cpu", **options):
    plan, options = JobPlan(folder, device=device), {"side": SIDE, **options}
    return plan.train_kernel(run, STEP, **options) + plan.cross_kernel(run, STEP, **options)


def inputs_of(run):
    return run.problem.test[0], run.problem.batch()[0]


def naive_kernel(run):
    """Of all test and training examples, each Jacobian by one backward pass per output, in float64."""
    model = run.model(torch.float64)
    x = torch.cat(inputs_of(run)).double()
    J = torch.autograd.functional.jacobian(lambda w: model.outputs(w, x).flatten(), run.weights(STEP).double())
    return J @ J.T


def assembled(K, tiles):
    for tile in tiles:
        K[tile.rows, tile.columns] = tile.block
        if K.shape[0] == K.shape[1]:
            K[tile.columns, tile.rows] = tile.block.T
    return K


def streamed(run, inputs, others, precision, chunk):
    """The kernel of this process alone, its tiles cut as the jobs are."""
    with pinned(1):
        model, w, precision = run.model(), run.weights(STEP), Precision(precision)
        tiled = tiled_kernel(model, w, inputs, others, precision=precision)
        maker = TileMaker(model, w, inputs, Method.LAYER_FACTORS, chunk, precision=precision)
        tiled = replace(tiled, maker=maker, plan=replace(tiled.plan, rows=SIDE, columns=SIDE))
        return assembled(torch.empty(tiled.shape), tiled.tiles()), maker.bound


def test_jobs_give_the_bits_of_one_stream(tmp_path, run):
    """In one thread or three, and the tiles of a stream in this process."""
    for folder in ("one", "three"):
        names = planned(tmp_path / folder, run, precision="float16")
    run_jobs(tmp_path / "one", client="in-process")
    with cluster("threads", workers=3):
        run_jobs(tmp_path / "three")
    test, examples = inputs_of(run)
    for name, sides in zip(names, ((examples, None), (test, examples)), strict=True):
        one, three = (open_matrix(tmp_path / folder, name) for folder in ("one", "three"))
        chunk = load_tiled(open_store(tmp_path / "one"), name).where["chunk"]
        expected, bound = streamed(run, *sides, "float16", chunk)
        assert torch.equal(one.to_dense(), expected)
        assert torch.equal(three.to_dense(), expected)
        assert one.bound == three.bound == bound


@pytest.mark.parametrize("precision", ON_A_CPU)
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_bound_holds_against_the_naive_float64_kernel(tmp_path, request, outputs, precision):
    run = request.getfixturevalue("run" if outputs == 2 else "run_of_one_output")
    names = planned(tmp_path, run, side=4, precision=precision)
    run_jobs(tmp_path, client="in-process")
    K, places = naive_kernel(run), outputs * len(inputs_of(run)[0])
    scales = K.diagonal().sqrt()[:, None] * K.diagonal().sqrt()
    blocks = (slice(places, None), slice(places, None)), (slice(0, places), slice(places, None))
    for name, at in zip(names, blocks, strict=True):
        found = open_matrix(tmp_path, name)
        assert found.dtype == torch.float32
        assert found.bound is not None
        error = ((found.to_dense().double() - K[at]).abs() / scales[at]).max().item()
        assert error <= found.bound
        if precision in (Precision.FLOAT16, Precision.BFLOAT16):
            assert error > 1e-6  # rows were rounded indeed
        assert found.bound == error_bound(precision, run.num_weights, -(-run.num_weights // 16) * 16)
    K_SS = open_matrix(tmp_path, names[0]).to_dense()
    assert torch.equal(K_SS, K_SS.T)


def test_tiles_of_different_precision_are_not_mixed(tmp_path, run):
    plan = JobPlan(tmp_path)
    for precision in (None, *ON_A_CPU):
        plan.train_kernel(run, STEP, side=SIDE, method="layer factors", precision=precision, name=str(precision))
    with pytest.raises(DataError, match=r"already planned in .* with other settings"):
        plan.train_kernel(run, STEP, side=SIDE, method="layer factors", precision="float16", name="None")
    plan.run(client="in-process")
    found = [open_matrix(tmp_path, f"{precision} at step {STEP}") for precision in (None, *ON_A_CPU)]
    assert [K.bound is None for K in found] == [True] + [False] * len(ON_A_CPU)
    assert len({K.path for K in found}) == len(found)


def test_what_cannot_be_is_refused_before_anything_is_planned(tmp_path, run):
    plan = JobPlan(tmp_path)
    for method in ("jacobian contraction", "vector products"):
        with pytest.raises(HyperparameterError, match=r"'auto' or 'layer factors', got .*: take one of them, or leave"):
            plan.train_kernel(run, STEP, method=method, precision="float16")
    with pytest.raises(HyperparameterError, match=r"float64: pass dtype=torch\.float32, or leave precision out"):
        plan.cross_kernel(run, STEP, dtype=torch.float64, precision="bfloat16x3")
    with pytest.raises(HyperparameterError, match=r"float64: pass dtype=torch\.float32"):
        JobPlan(tmp_path, device="cuda").train_kernel(run, STEP, dtype=torch.float64, precision="tf32")
    with pytest.raises(DeviceError, match="needs the tensor cores of a GPU, and the device is 'cpu': use 'float32'"):
        plan.train_kernel(run, STEP, precision="tf32")
    with pytest.raises(HyperparameterError, match=r"precision must be a Precision or one of \['float32', 'tf32'"):
        plan.train_kernel(run, STEP, precision="float8")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DeviceError, match=r"'tf32' needs a GPU of CUDA capability 8\.0 or later, got 7\.0: use"):
        check_supported(Precision.TF32, "cuda", (7, 0))
    check_supported(Precision.TF32, "cuda", (9, 0))


def test_plans_for_a_gpu_have_chunks_of_one_size(run):
    model, x = run.model(), torch.zeros(5000, 3)
    for memory in (2**24, 2**26, 2**28):
        options = {"precision": Precision.FLOAT16, "memory": memory, "copies": 4, "separate": True}
        plan = plan_tiles(model, model.weights, x, **options, device=torch.device("cuda"))
        assert plan.bytes <= memory
        assert plan.rows == plan.columns
        assert plan.rows % plan.chunk == 0
        assert plan.method is Method.LAYER_FACTORS
        assert plan_tiles(model, model.weights, x, **options).bytes <= memory
    assert plan.rows == 1024  # 2048 outputs


def test_chunks_that_are_replayed_are_so_from_the_first_on(run):
    """On a CPU what is replayed is the function itself on still copies; warm, the first side is like any other."""
    model, (_, x) = run.model(), inputs_of(run)
    maker = TileMaker(model, model.weights, x[:1], Method.LAYER_FACTORS, 4, precision=Precision.FLOAT16)
    arguments = (model, model.weights, x[:1], Method.LAYER_FACTORS, 4)
    replayed = TileMaker(*arguments, precision=Precision.FLOAT16, graphs=True)
    replayed.warm(x[:1])
    assert len(replayed.pieces._captured) == 1  # type: ignore[attr-defined]
    first = replayed.block(replayed.side(x[:10]), replayed.side(x[10:]))
    again = replayed.block(replayed.side(x[:10]), replayed.side(x[10:]))
    assert torch.equal(first, again)
    assert torch.equal(first, maker.block(maker.side(x[:10]), maker.side(x[10:])))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", list(Precision))
def test_on_a_gpu_the_bits_do_not_depend_on_the_worker(tmp_path, run, precision):
    for folder in ("one", "two"):
        names = planned(tmp_path / folder, run, device="cuda", precision=precision)
    run_jobs(tmp_path / "one", client="in-process")
    with cluster("threads", workers=2):
        run_jobs(tmp_path / "two")
    K, places = naive_kernel(run), 2 * len(inputs_of(run)[0])
    scales = K.diagonal().sqrt()[:, None] * K.diagonal().sqrt()
    blocks = (slice(places, None), slice(places, None)), (slice(0, places), slice(places, None))
    for name, at in zip(names, blocks, strict=True):
        one, two = (open_matrix(tmp_path / folder, name) for folder in ("one", "two"))
        assert torch.equal(one.to_dense(), two.to_dense())
        assert one.bound is not None
        assert ((one.to_dense().double() - K[at]).abs() / scales[at]).max().item() <= one.bound + 1e-6
