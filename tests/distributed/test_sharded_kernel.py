"""The tangent kernel of a model under FSDP2 in two processes is that of the whole model in one."""

import os
import subprocess
import sys
from pathlib import Path

import kernel_worker
import pytest
import torch
from torch.testing import assert_close

from poprisk._core.autodiff import FlatModel
from poprisk.operators import train_kernel

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    environment = {**({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}), **os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / "kernel_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(kernel_worker.WORLD)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["plain", "half", "diagonal"])
def test_products_are_those_of_the_whole_model(found, which):
    model, (x, v) = kernel_worker.Network().double(), kernel_worker.data()
    flat = FlatModel(model, "squared")
    trained = [p for p in model.parameters() if p.requires_grad]
    diagonal = torch.cat([torch.full((p.numel(),), 2.0 + i, dtype=torch.float64) for i, p in enumerate(trained)])
    M = {"plain": None, "half": 0.5, "diagonal": diagonal}[which]
    expected = (train_kernel(flat, flat.weights, x, preconditioner=M) @ v.reshape(-1)).reshape(v.shape)
    assert_close(torch.cat([each[which] for each in found]), expected)


def test_directions_are_sharded_and_gradients_are_left_alone(found):
    for each in found:
        local, whole = each["local"].tolist()
        assert 0.3 * whole < local < 0.7 * whole
        assert not bool(each["left"].any())
        assert bool(each["trains"].all())


def test_what_cannot_be_multiplied_is_refused(found):
    for each in found:
        assert "expected a model under fully_shard (FSDP2), got Network" in each["refused"][0]
        assert "J and its adjoint disagree" in each["refused"][1]
