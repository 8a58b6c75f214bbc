"""Four processes against one: training, checkpoints and variances. One launch does the work; these tests look at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.timeout(580)  # the first test waits for the launch, which a busy machine slows down
HERE = Path(__file__).parent
EXACT = 1e-6
WHERE = ["at 4", "at 2", "at 1", "gathered", "in one process"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the four processes left in their file."""
    folder = tmp_path_factory.mktemp("processes")
    environment = {**({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}), **os.environ}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(HERE / "worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def alone(found):
    """Each network's training in one process."""
    return {name: run for part in found["equality"]["alone"] for name, run in part.items()}


def networks(run):
    return [name for name in run if name != "complaints"]


def difference(actual, expected):
    gap = max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
    return gap / max(e.abs().max().item() for e in expected)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_equals_that_of_one_process(found, alone, kind):
    run = found["equality"][kind]
    gates = {"soft", "hard", "snr"}
    assert {f"{gate}-{pool}" for gate in gates for pool in ("element", "row", "tensor")} <= set(networks(run))
    assert {"none-forloop", "normalized", "shared", "calibrated", "tensor-lr", "nan-tensor"} <= set(networks(run))
    errors = {}
    for name in networks(run):
        looks = zip(run[name]["weights"], alone[name]["weights"], strict=True)
        errors[name] = max(difference(*look) for look in looks)
    assert max(errors.values()) <= EXACT, errors


def test_the_networks_really_are_gated(alone):
    """Else the comparison says nothing: under each gate some coordinates move, and not all of them fully."""
    for name in networks(alone):
        q = torch.cat([x.flatten() for x in alone[name]["gates"]])
        assert name.startswith("none") or 0.02 < q.mean() < 0.98 or name == "normalized", name


def test_backends_serve_shards(found):
    names = networks(found["equality"]["fsdp"])
    assert {f"{gate}-{kind}" for gate in ("soft", "hard", "snr", "none") for kind in ("foreach", "fused")} <= {*names}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_meters_gates_and_linearization_are_those_of_the_whole(found, alone, kind):
    run = found["equality"][kind]
    for name in networks(run):
        for got, expected in zip(run[name]["meters"], alone[name]["meters"], strict=True):
            for meter, value in expected.items():
                # rates are sums of both signs, so their rounding errors are measured by the larger of the two
                scale = abs(expected["training_rate"]) if "rate" in meter else abs(value)
                assert got[meter] == pytest.approx(value, rel=3e-5, abs=3e-5 * scale, nan_ok=True), (name, meter)
        for what in ("gates", "preconditioners"):
            assert difference(run[name][what], alone[name][what]) <= 1e-5, (name, what)


def test_a_nan_is_left_out_and_reported_where_it_lies(found):
    assert found["equality"]["complaints"] == [0, 0, 1, 0]


@pytest.mark.parametrize("kind", ["hsdp", "offload"])
def test_other_layouts_of_fsdp(found, kind):
    errors = found["other meshes"][kind]
    assert max(errors.values()) <= EXACT, errors


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_a_row_that_lies_in_four_processes_is_one_row(found, granularity):
    assert found["other meshes"][f"second axis, {granularity}"] <= EXACT


@pytest.mark.parametrize("backend", ["forloop", "fused"])
def test_shards_round_stochastically_as_the_whole_does(found, backend):
    assert found["rounding"][backend]  # bit for bit


@pytest.mark.parametrize("where", WHERE)
def test_a_checkpoint_of_four_goes_on(found, where):
    resumed = found["in one process"] if where == "in one process" else found["checkpoints"][where]
    went_on = found["checkpoints"]["went on"]
    assert len(went_on["losses"]) == 10
    assert_close(resumed["losses"], went_on["losses"], rtol=EXACT, atol=0)
    assert difference(resumed["weights"], went_on["weights"]) <= (0 if where in ("at 4", "gathered") else EXACT)


@pytest.mark.parametrize("where", WHERE)
def test_a_checkpoint_keeps_counters_and_dtypes(found, where):
    resumed = found["in one process"] if where == "in one process" else found["checkpoints"][where]
    saved = found["checkpoints"]["went on"]["state"]
    assert resumed["state"] == saved
    for name in ("bf16-fused", "bf16-foreach"):
        kept = resumed["state"][name]
        assert [kept[x][0] for x in ("exp_avg", "exp_avg_sq", "exp_var")] == ["torch.float32"] + 2 * ["torch.bfloat16"]
    assert all(state["step"][1] == 10 for state in saved.values())
    assert saved["calibrated"]["var_gain"][0] == "torch.float64"


def test_ranks_give_the_variance_of_their_micro_batches(found):
    numbers = {name: value for name, value in found["variances"].items() if not isinstance(value, bool)}
    assert {"ddp, no_sync, clip 0.05", "fsdp, micro-batches", "hsdp, clip 0.05", "trained, fsdp"} <= set(numbers)
    assert {"hsdp, added up late", "replicas only, added up late", "fsdp, set free", "ddp, source 2"} <= set(numbers)
    assert {f"{kind}, far below" for kind in ("ddp", "fsdp", "hsdp")} <= set(numbers)
    assert max(numbers.values()) <= EXACT, numbers


def test_all_ranks_have_the_same_variances(found):
    assert found["variances"]["agree"] is True  # bit for bit


@pytest.mark.parametrize("how", ["handed out", "sharded"])
def test_ours_goes_on_from_a_sharded_adamw(found, how):
    assert found["from adamw"][how] == (True, 0.01, ["exp_avg", "exp_avg_sq", "step"], True)


def test_a_state_of_two_optimizers_is_refused(found):
    """torch lays AdamW's lr over ours, and keeps the s of the empty step by which it made room."""
    assert "load it into a torch.optim.AdamW of the same model" in found["from adamw"]["at once"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_that_were_not_cleared_are_refused(found, kind):
    assert found["variances"][f"{kind}, not cleared"] is True


def test_the_example_is_the_same_run_under_ddp_and_fsdp(found):
    ddp, fsdp = found["example"]["ddp"], found["example"]["fsdp"]
    assert ddp["accuracy"] > 0.8
    assert ddp["steps"] == 20
    assert_close(ddp, fsdp, rtol=1e-4, atol=1e-6)
