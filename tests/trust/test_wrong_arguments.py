"""Arguments of the wrong kind at every public function: an error of the library in one line, and nothing that hangs."""

import inspect
from functools import partial

import bad_inputs as bad
import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn

import poprisk
from poprisk import Problem, Run, risk, train
from poprisk._core.arguments import checked
from poprisk.errors import DataError, HyperparameterError, PopRiskError
from poprisk.risk import RiskMeter, Unrolled

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(scope="module")
def run():
    return train(Problem(partial(nn.Linear, 3, 2), "cross_entropy", X, Y), SGD, 4, progress=False)


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


DOORS = {
    "population_risk": {"progress": False},
    "audit": {"progress": False},
    "analyze": {"progress": False, "budget": 0.1},
    "k_fold": {"folds": 3},
    "leave_one_out": {},
    "influence_matrix": {},
    "influence_on": {"inputs": X[:2], "targets": Y[:2]},
    "self_influence": {},
    "out_of_sample_probabilities": {},
    "replay": {},
    "risk.cross_validation_risk": {"k": 4},
    "risk.holdouts": {"k": 2, "count": 2},
    "risk.subsets": {"masks": torch.arange(24).reshape(2, 12) % 3 > 0},
    "risk.exclusion": {},
    "risk.exclusion_risk": {},
    "risk.first_order_risk": {},
    "risk.generalization_gap": {},
    "risk.influence_operator": {},
    "risk.Unrolled": {},
}
LEFT = {"loss", "remainder", "data", "kept", "options"}
"""Arguments that may be anything, or a person's own function."""
WRONG = [
    *("x", "../nowhere", "a\0b", b"a", object(), 1.5, float("nan"), float("inf"), 10**30, -(10**30), -1, 1j, True),
    *([], ["a"], [[1]], {}, {1: 2}, np.array(["a"], dtype=object), np.arange(3), torch.tensor(5), X, X[:0]),
]


def answer(function, arguments):
    """What an error of the library says; any other error is raised."""
    try:
        function(**arguments)
    except PopRiskError as error:
        return str(error)
    return "it works"


@pytest.mark.parametrize("door", sorted(DOORS))
def test_every_wrong_argument_is_an_error_of_the_library(run, door):
    """What the annotations allow may also work; nothing else is raised, by any of them."""
    function = getattr(risk, door.removeprefix("risk.")) if door.startswith("risk.") else getattr(poprisk, door)
    names = [name for name in inspect.signature(function).parameters if name not in LEFT]
    for name in names:
        for wrong in [*WRONG, run]:
            said = answer(function, {"run": run, **DOORS[door], name: wrong})
            assert len(said.splitlines()) == 1, f"{name}={wrong!r}"
            assert said.isprintable(), f"{name}={wrong!r}"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda run: poprisk.k_fold(run, "3"), HyperparameterError, "folds must be int, got '3': see help.k_fold."),
        (lambda run: poprisk.k_fold(run, 2.5), HyperparameterError, "folds must be int, got 2.5"),
        (lambda run: poprisk.k_fold(run, True), HyperparameterError, "folds must be int, got True"),
        (
            lambda run: poprisk.k_fold(run, 3, seed=10**30),
            HyperparameterError,
            r"seed must be int below 2\*\*63, got",
        ),
        (lambda run: poprisk.k_fold(run, 3, dtype="f"), HyperparameterError, "dtype must be dtype or None, got 'f'"),
        (lambda run: poprisk.k_fold(run, 3, nested=10**9), DataError, "a number of repetitions up to 1000000, got"),
        (lambda run: risk.holdouts(run, 2, 10**9), DataError, "a count from 1 to 1000000, got"),
        (lambda run: poprisk.k_fold("runs/first"), DataError, r"run must be Run, got 'runs/first': open .*Run\.load"),
        (Run.load, HyperparameterError, "path must be str or Path, got Run: see help.Run.load."),
        (lambda run: poprisk.leave_one_out(run, ["a"]), DataError, r"indices must be Sequence\[int\], Tensor or None"),
        (lambda run: poprisk.influence_on(run, X, None), DataError, "targets must be Tensor, got None"),
        (
            lambda run: poprisk.influence_on(run, X.numpy(), Y),
            DataError,
            r"ndarray of float32 with shape \[12, 3\]",
        ),
        (lambda run: poprisk.audit(run, tier="all"), HyperparameterError, 'tier must be "auto", "any" or "exact", got'),
        (lambda run: poprisk.audit(run, batch_size=0), HyperparameterError, "batch_size must be at least 1, got 0"),
        (lambda run: RiskMeter(examples="3"), HyperparameterError, r"examples must be int or None.*help.RiskMeter."),
        (lambda run: RiskMeter(retrain_budget=-1), HyperparameterError, "0 or more, got -1"),
        (lambda run: RiskMeter().read(3), DataError, "run must be Run, str or Path, got 3"),
        (lambda run: RiskMeter().read(run, 2.5), HyperparameterError, r"steps must be int, Sequence\[int\] or None"),
        (lambda run: Unrolled(run, stop="3"), HyperparameterError, "stop must be int or None, got '3'"),
        (lambda run: poprisk.write_report(run, 3), HyperparameterError, "path must be str or Path, got 3"),
        (
            lambda run: poprisk.audit(run, out_of_fold=[[1.0]], progress=False),
            DataError,
            "out_of_fold must be .*Ten",
        ),
    ],
)
def test_what_is_said(run, call, error, said):
    with pytest.raises(error, match=said) as caught:
        call(run)
    assert not bad.judged(str(caught.value)), caught.value


def test_what_python_numpy_and_torch_take_for_numbers_are_numbers(run):
    folds = [np.int64(3), torch.tensor(3), np.uint8(3)]
    assert len({float(poprisk.k_fold(run, n, progress=False).risk.value) for n in (3, *folds)}) == 1
    some = [[0, 2], (0, 2), torch.tensor([0, 2]), np.array([0, 2])]
    assert all(len(poprisk.leave_one_out(run, each, renormalize=np.True_).losses) == 2 for each in some)


def test_more_moments_than_steps_are_all_steps(run):
    assert poprisk.audit(run, moments=10**12, progress=False).moments == (1, 2, 3, 4)
    assert [each.step for each in RiskMeter().read(run, steps=10**12).readings] == [1, 2, 3, 4]


def test_every_public_function_of_the_room_is_guarded():
    functions = [getattr(risk, name) for name in risk.__all__ if inspect.isfunction(getattr(risk, name))]
    assert len(functions) > 14
    assert [each.__name__ for each in functions if not hasattr(each, "__wrapped__")] == []
    with pytest.raises(TypeError, match="unexpected keyword argument 'fold'"):
        poprisk.audit(None, fold=3)


def test_a_function_of_ones_own():
    @checked
    def count(n: int, *, share: float = 0.5, name: str = ""):
        return n * share

    assert count(4, share=np.float32(0.5)) == 2
    for wrong in ({"n": None}, {"n": 1, "share": "1"}, {"n": 1, "name": "a\0"}):
        with pytest.raises(HyperparameterError, match="must be"):
            count(**wrong)
