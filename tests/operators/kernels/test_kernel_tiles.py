"""Tiles cover the kernel once, keep their limit by their own count, and by the system's."""

import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from kernel_models import make
from torch.testing import assert_close

from poprisk.errors import HyperparameterError
from poprisk.operators._kernels import memory as system
from poprisk.operators._kernels.memory import free_memory
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.plan import plan_tiles
from poprisk.operators._kernels.tangent import cross_kernel, kernel_tiles, train_kernel

METHODS = [Method.JACOBIAN_CONTRACTION, Method.LAYER_FACTORS, Method.VECTOR_PRODUCTS]


def smallest(function) -> int:
    """The limit named in the refusal of one that is too small."""
    with pytest.raises(HyperparameterError, match="smallest limit that works") as caught:
        function(memory=1)
    return int(re.search(r"too little: (\d+) bytes", str(caught.value)).group(1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "transformer"])
def test_the_smallest_limit_named_works_and_gives_the_same_kernel(name, method):
    model, w, x = make(name, n=6)
    x, q = x[:4], x[4:]
    for function, full in (
        (lambda memory: train_kernel(model, w, x, method=method, memory=memory), train_kernel(model, w, x)),
        (lambda memory: cross_kernel(model, w, q, x, method=method, memory=memory), cross_kernel(model, w, q, x)),
    ):
        least = smallest(function)
        for memory in (least, 3 * least):
            assert_close(function(memory=memory), full, rtol=1e-10, atol=1e-10)
        with pytest.raises(HyperparameterError):
            function(memory=least - 1)


@pytest.mark.parametrize("method", METHODS)
def test_tiles_cover_the_kernel_once(method):
    model, w, x = make("multilayer", n=7)
    p, K = 3, train_kernel(model, w, x)
    least = smallest(lambda memory: list(kernel_tiles(model, w, x, method=method, memory=memory)))
    covered = torch.zeros_like(K)
    for tile in kernel_tiles(model, w, x, method=method, memory=3 * least):
        assert_close(tile.block, K[tile.rows, tile.columns], rtol=1e-10, atol=1e-10)
        covered[tile.rows, tile.columns] += 1
    blocks = covered.view(7, p, 7, p).amax(dim=(1, 3))
    assert torch.equal(blocks, covered.view(7, p, 7, p).amin(dim=(1, 3)))
    mirrored = blocks + blocks.T
    assert (mirrored.diagonal() == 2).all()  # the diagonal once
    off = ~torch.eye(7, dtype=torch.bool)
    square_tiles = blocks + blocks.T == 2  # inside a tile on the diagonal both halves come
    assert ((mirrored[off] == 1) | square_tiles[off]).all()
    assert blocks.triu().sum() == 7 * 8 / 2


def test_plans_keep_their_limit_and_use_it():
    model, w, x = make("convolutions", n=500)
    planned = partial(plan_tiles, model, w, x, method=Method.LAYER_FACTORS)
    least = smallest(planned)
    plans = [planned(memory=memory) for memory in (least, 4 * least, 64 * least, 10**10)]
    limits = (least, 4 * least, 64 * least, 10**10)
    assert all(plan.bytes <= limit for plan, limit in zip(plans, limits, strict=True))
    assert plans[0].rows == plans[0].columns == 1
    assert not plans[0].keep
    sides = [plan.rows for plan in plans[:3]]
    assert sides == sorted(sides)
    assert sides[2] > 1
    assert plans[-1].keep
    with_result = planned(memory=10**10, holds_result=True)
    assert with_result.bytes == plans[-1].bytes + 8 * (500 * with_result.outputs) ** 2


LIMITED = """
import resource, torch
from torch import nn
from poprisk._core.autodiff import FlatModel
from poprisk.operators import train_kernel
def model_of(build):
    torch.manual_seed(0)
    return FlatModel(build(), "squared")
mlp = model_of(lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
cnn = model_of(lambda: nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
                                     nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * 16, 10)))
cases = [(mlp, torch.randn(200, 64)), (cnn, torch.randn(48, 1, 16, 16))]
torch.set_num_threads(1)
for model, x in cases:
    train_kernel(model, model.weights, x[:2])  # everything is loaded
MiB = 2**20
def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for (model, x), limit in zip(cases, (64 * MiB, 24 * MiB)):
    needed = 4 * 10 * x.shape[0] * model.size
    resource.setrlimit(resource.RLIMIT_AS, (used() + limit, resource.RLIM_INFINITY))
    K = train_kernel(model, model.weights, x, memory=limit)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(needed // limit, bool(torch.isfinite(K).all()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_the_system_sees_the_limit_kept():
    # The Jacobian of the first case would take far more than the limit; the process may not take more than the limit.
    done = subprocess.run([sys.executable, "-c", LIMITED], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    (share, finite), (_, second) = (line.split() for line in done.stdout.splitlines())
    assert int(share) > 20
    assert finite == second == "True"


def test_free_memory_counts_caches_and_the_limit_of_a_container(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  4000 kB\n")
    assert system._available(meminfo) == 4000 * 1024
    meminfo.write_text("MemFree:  100 kB\n")  # an old kernel
    assert system._available(meminfo) > 0
    assert system._available(tmp_path / "none") is None
    second, first = tmp_path / "v2", tmp_path / "v1"
    for group in (second, first / "memory"):
        group.mkdir(parents=True)
    for name, value in {"memory.max": 1000, "memory.current": 700}.items():
        (second / name).write_text(f"{value}\n")
    assert system._left_to_the_group(second) == 300
    (second / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert system._left_to_the_group(second) == 500
    (second / "memory.max").write_text("max\n")
    assert system._left_to_the_group(second) is None
    for name, value in {"limit_in_bytes": 800, "usage_in_bytes": 900}.items():
        (first / "memory" / f"memory.{name}").write_text(f"{value}\n")
    assert system._left_to_the_group(first) == 0
    for available, left, expected in ((100, 60, 30), (40, None, 20), (None, None, system._FALLBACK_MEMORY)):
        monkeypatch.setattr(system, "_available", lambda value=available: value)
        monkeypatch.setattr(system, "_left_to_the_group", lambda value=left: value)
        assert free_memory(torch.device("cpu")) == expected
