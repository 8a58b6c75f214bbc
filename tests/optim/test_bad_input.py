"""Bad input is refused at the door: by class, by message, and with nothing touched."""

import copy

import pytest
import torch
from optimizer_table import BACKENDS, DEVICE_ERRORS, ERROR_INPUTS
from streams import start, stream, train
from torch import nn

from poprisk import errors
from poprisk.errors import DeviceError, GradientError, HyperparameterError, PopRiskError
from poprisk.optim._adamw import PopRiskAdamW

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
OF_GROUPS = [row for row in ERROR_INPUTS if "variance" not in row.options]  # a source serves all groups


def name_of(row):
    return ", ".join(f"{k}={v}" for k, v in row.options.items()) or "none"


@pytest.mark.filterwarnings("ignore:the option:DeprecationWarning")
@pytest.mark.parametrize("row", ERROR_INPUTS, ids=name_of)
def test_the_constructor_refuses(row):
    with pytest.raises(row.error, match=row.words) as caught:
        PopRiskAdamW([nn.Parameter(torch.ones(2))], **row.options)
    assert isinstance(caught.value, PopRiskError)


@pytest.mark.filterwarnings("ignore:the option:DeprecationWarning")
@pytest.mark.parametrize("row", OF_GROUPS, ids=name_of)
def test_a_group_s_options_are_refused_too(row):
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(row.error, match=row.words):
        PopRiskAdamW([{"params": [good]}, {"params": [bad], **row.options}])


@pytest.mark.filterwarnings("ignore:the option:DeprecationWarning")
@pytest.mark.parametrize("row", OF_GROUPS, ids=name_of)
def test_a_group_added_later_is_refused_and_left_out(row):
    optimizer = PopRiskAdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(row.error, match=row.words):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **row.options})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("row", DEVICE_ERRORS, ids=name_of)
def test_a_fused_group_on_two_devices_is_refused(row):
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(row.error, match=row.words):
        PopRiskAdamW(params, **row.options)
    with pytest.raises(DeviceError, match=r"supports the devices .* got meta"):
        PopRiskAdamW(params[1:], **row.options)
    assert len(PopRiskAdamW(params).param_groups[0]["params"]) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_fused_group_needs_floating_point(dtype):
    p = torch.ones(2, dtype=dtype)
    with pytest.raises(DeviceError, match="floating-point"):
        PopRiskAdamW([p], fused=True)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("HyperparameterError", ValueError),
        ("GradientError", RuntimeError),
        ("DeviceError", RuntimeError),
        ("StateDictError", ValueError),
        ("ClosedGateWarning", UserWarning),
        ("NonFiniteGradientWarning", UserWarning),
        ("BackendWarning", UserWarning),
    ],
)
def test_errors_can_be_caught_as_builtins(name, base):
    assert issubclass(getattr(errors, name), base)
    assert issubclass(getattr(errors, name), errors.PopRiskWarning if base is UserWarning else PopRiskError)


# --- at a step


def frozen(optimizer, params):
    return copy.deepcopy(([p.detach().clone() for p in params], optimizer.state_dict()["state"]))


def assert_untouched(before, optimizer, params):
    weights, state = before
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    now = optimizer.state_dict()["state"]
    assert now.keys() == state.keys()
    for index, entry in state.items():
        assert all(torch.equal(now[index][name], value) for name, value in entry.items())


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later"])
@EVERY_BACKEND
def test_a_sparse_gradient_is_refused_before_any_group_moves(backend, steps):
    shapes = ((3, 2), (4, 3))
    params = start(shapes=shapes)
    optimizer = PopRiskAdamW([{"params": params[:1]}, {"params": params[1:], "gate": "hard"}], **backend)
    train(optimizer, params, stream(steps, shapes=shapes))
    before = frozen(optimizer, params)
    params[0].grad = torch.ones(3, 2, dtype=torch.float64)
    params[1].grad = torch.eye(4, 3, dtype=torch.float64).to_sparse()
    with pytest.raises(GradientError, match=r"dense gradients.*\(4, 3\).*sparse=False"):
        optimizer.step()
    assert_untouched(before, optimizer, params)


def test_an_embedding_with_sparse_gradients_is_refused():
    table = nn.Embedding(10, 2, sparse=True)
    optimizer = PopRiskAdamW(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(GradientError, match="SparseAdam"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later"])
def test_fused_groups_moved_to_two_devices_are_refused(steps):
    """The parameters were on one device when the optimizer was made."""
    params = start()
    optimizer = PopRiskAdamW([{"params": params[:2]}, {"params": params[2:]}], fused=True)
    train(optimizer, params, stream(steps))
    before = frozen(optimizer, params[:2])
    for p, g in zip(params, stream(1)[0], strict=True):
        p.grad = g
    moved = nn.Parameter(torch.ones(130, device="meta"))
    moved.grad = torch.ones(130, device="meta")
    optimizer.param_groups[1]["params"] = [moved]
    with pytest.raises(DeviceError, match="one device, got cpu, meta"):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(params[:2], before[0], strict=True))
    assert [s["step"].item() for s in list(optimizer.state.values())[:2]] == [steps] * 2 * bool(steps)


class Source:
    def __init__(self, answer):
        self.answer = answer

    def variances(self, parameters):
        return self.answer(parameters)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda ps: [None] * (len(ps) - 1), "gave 2 entries for 3 parameters"),
        (lambda ps: [torch.ones(5, 7), None, None], r"gave shape \(5, 7\) for a parameter of shape \(7, 5\)"),
        (lambda ps: [None, None, torch.ones(1)], r"gave shape \(1,\) for a parameter of shape \(130,\)"),
    ],
    ids=["length", "transposed", "broadcast"],
)
@EVERY_BACKEND
def test_a_variance_source_must_answer_in_the_parameters_shapes(backend, answer, words):
    params = start()
    optimizer = PopRiskAdamW(params, variance=Source(answer), **backend)
    before = frozen(optimizer, params)
    with pytest.raises(HyperparameterError, match=words):
        train(optimizer, params, stream(1))
    assert_untouched(before, optimizer, params)
