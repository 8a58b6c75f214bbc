"""Weights, gradients and states that lie otherwise in memory than before, and a kernel that is damaged on the disk."""

import contextlib
import hashlib
from typing import Any

import pytest
import torch

from poprisk.errors import StateDictError
from poprisk.optim import PopRiskAdamW, TailAverage


def test_a_damaged_kernel_is_built_again(monkeypatch, tmp_path):
    """Its name has the hash of its content; what another program or a broken disk wrote there is not loaded."""
    from poprisk.optim.backends import _compiler as compiler

    monkeypatch.setenv("POPRISK_CACHE_DIR", str(tmp_path))
    defines = ("-DW_TYPE=0", "-DV_BF16=0", "-DS_KIND=1", "-DGATE=1", "-DOBSERVED=0", "-DBATCH_SIGNAL=0")
    defines += ("-DGATED_DECAY=0", "-DSKIP_NONFINITE=0", "-DNORMALIZED=0", "-DAVERAGED=0")
    try:
        compiler._load.__wrapped__(defines)
    except compiler.BuildError as error:
        pytest.skip(str(error))
    (built,) = tmp_path.glob("fused-*.so")
    whole = built.read_bytes()
    assert hashlib.sha256(whole).hexdigest() in built.name
    for damage in (whole[:-100], whole[:1000] + b"\xff" + whole[1001:], b""):
        other = tmp_path / f"{built.name[:-20]}.so"
        built.rename(other)  # not in place: the one that is loaded is mapped into memory
        built.write_bytes(damage)
        compiler._load.__wrapped__(defines)
        assert built.read_bytes() == whole
        other.unlink(missing_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == [built.name]


def other_strides(x):
    return x.t().contiguous().t()


@pytest.mark.parametrize("change", ["weights", "gradient", "state"])
@pytest.mark.parametrize("gate", [None, "default"])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning")
def test_tensors_that_lie_otherwise_in_memory_are_stepped_alike(change, gate, averaged):
    """After ``p.data = …`` for instance; torch's own fused AdamW would mix up the elements."""

    def ended(options):
        torch.manual_seed(0)
        model, generator = torch.nn.Linear(6, 4), torch.Generator().manual_seed(1)
        chosen: dict[str, Any] = {} if gate == "default" else {"gate": None}
        optimizer = PopRiskAdamW(model.parameters(), lr=0.05, **chosen, **options)
        average = TailAverage(model, optimizer, tail=0.5) if averaged else None
        for k in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            if k == 3 and change == "weights":
                model.weight.data = other_strides(model.weight.data)
            elif k == 3 and change == "gradient":
                model.weight.grad = other_strides(model.weight.grad)
            elif k == 3:
                state = optimizer.state[model.weight]
                state |= {name: other_strides(x) for name, x in state.items() if name.startswith("exp_")}
            optimizer.step()
        found = [p.detach().clone() for p in model.parameters()]
        with contextlib.nullcontext() if average is None else average.swapped():
            return [*found, *(p.detach().clone() for p in model.parameters())]

    expected = ended({"fused": False, "foreach": False})
    for options in ({"foreach": True}, {"fused": True}, {}):
        torch.testing.assert_close(ended(options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}])
@pytest.mark.parametrize("shape", [(40, 60), (2, 3)])
def test_weights_of_another_size_are_refused(options, shape):
    """Before anything is written beyond the old state."""
    model = torch.nn.Linear(6, 4)
    optimizer = PopRiskAdamW(model.parameters(), **options)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    model.weight.data = torch.zeros(shape)
    model.weight.grad = torch.ones(shape)
    with pytest.raises(StateDictError, match="after replacing its data"):
        optimizer.step()
