"""KeepBest and TailAverage in two processes against one: DDP, FSDP2 and torch.distributed.checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

pytestmark = pytest.mark.timeout(300)  # the first test waits for the launch
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the two processes left what they found."""
    folder = tmp_path_factory.mktemp("keep")
    environment = {**({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}), **os.environ}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(HERE / "keep_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "resumed"])
def test_two_processes_keep_what_one_keeps(found, kind):
    one, alone = found["ranks"][0][kind], found["alone"]
    for part in ("last", "mean", "kept"):
        assert_close(one[part], alone[part], rtol=1e-4, atol=1e-5)
    assert one["risk"][2:4] == alone["risk"][2:4]
    assert_close(one["risk"], alone["risk"], rtol=1e-4, atol=1e-5)
    assert len(one["moments"]) == 20
    for own, expected in zip(one["moments"], alone["moments"], strict=True):
        assert own[:2] == expected[:2]
        assert_close(own[2], expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "resumed"])
def test_all_processes_keep_the_same_moment(found, kind):
    first, second = (rank[kind] for rank in found["ranks"])
    assert first["risk"] == second["risk"]
    assert_close(first["kept"], second["kept"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_swapping_gives_the_weights_back(found, kind):
    for rank in found["ranks"]:
        assert_close(rank[kind]["back"], rank[kind]["last"], rtol=0, atol=0)
        assert not torch.equal(rank[kind]["mean"]["0.weight"], rank[kind]["last"]["0.weight"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_file_has_the_whole_weights(folder, found, kind):
    assert_close(load_file(folder / f"{kind}.safetensors"), found["ranks"][0][kind]["kept"], rtol=0, atol=0)


def test_a_distributed_checkpoint_goes_on_bit_for_bit(found):
    """FSDP of the whole model against the two layers of it: the same arithmetic."""
    for rank in found["ranks"]:
        resumed, through = rank["resumed"], rank["fsdp"]
        assert resumed["same curve"]
        assert resumed["sharded means"]
        for part in ("last", "mean", "kept"):
            assert_close(resumed[part], through[part], rtol=0, atol=0)
        assert resumed["risk"] == through["risk"]


def test_processes_with_batches_of_different_sizes_measure_at_the_same_steps(found):
    first, second = (rank["uneven"] for rank in found["ranks"])
    assert first == second
    assert len(first) >= 4
