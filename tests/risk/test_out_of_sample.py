"""Out-of-sample probabilities: equal to retraining where that is exact, and never better informed than they may be."""

from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from poprisk import Problem, k_fold, leave_one_out, out_of_sample_probabilities, train
from poprisk.errors import DataError, HyperparameterError
from poprisk.integrations.cleanlab import cleanlab_inputs


def flipped(n: int, seed: int = 0, share: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator)
    true = (x[:, :3] + 0.3 * torch.randn(n, 3, generator=generator)).argmax(1)
    wrong = torch.rand(n, generator=generator) < share
    return x, torch.where(wrong, (true + 1) % 3, true), wrong


@cache
def network_run():
    x, y, _ = flipped(90)
    problem = Problem(
        lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)), "cross_entropy", x, y, seed=1
    )
    return train(problem, partial(SGD, lr=0.3, momentum=0.5), 120, batch_size=30, progress=False)


def test_squared_loss_on_one_hot_targets_gives_the_probabilities_of_real_deletions():
    x, y, _ = flipped(30)
    targets = nn.functional.one_hot(y, 3).double()
    problem = Problem(
        nn.Linear,
        "squared",
        x.double(),
        targets,
        arguments={"in_features": 12, "out_features": 3, "dtype": torch.double},
    )
    run = train(problem, partial(SGD, lr=0.1), 60, progress=False)
    found = out_of_sample_probabilities(run, "exclusion")
    real = leave_one_out(run).outputs.clamp_min(0)
    torch.testing.assert_close(found.probabilities, real / real.sum(1, keepdim=True), rtol=1e-8, atol=1e-8)
    assert torch.equal(found.labels, y)


def test_folds_give_the_softmax_of_held_out_outputs():
    found = out_of_sample_probabilities(network_run(), "k_fold", 5, seed=3)
    torch.testing.assert_close(found.probabilities, k_fold(network_run(), 5, 3).outputs.softmax(1))
    assert (found.method, found.cost, found.valid) == ("k_fold", 5.0, True)


def test_a_fitted_network_is_less_sure_of_what_it_has_not_seen():
    found, run = out_of_sample_probabilities(network_run()), network_run()
    seen = run.model().batch_outputs(run.weights(run.num_steps), run.problem.inputs).softmax(1)
    own = found.labels[:, None]
    trained = -float(seen.gather(1, own).log().mean())
    assert found.log_loss > 1.5 * trained
    folds = out_of_sample_probabilities(run, "k_fold", 10).log_loss
    assert abs(found.log_loss - folds) < 0.15 * folds


def test_cleanlab_takes_them():
    found = out_of_sample_probabilities(network_run())
    inputs = cleanlab_inputs(found)
    torch.testing.assert_close(torch.from_numpy(inputs["pred_probs"]), found.probabilities.double())
    assert inputs["labels"].tolist() == found.labels.tolist()


def test_what_has_no_classes_is_refused():
    problem = Problem(
        nn.Linear, "squared", torch.ones(12, 2), torch.ones(12, 1), arguments={"in_features": 2, "out_features": 1}
    )
    run = train(problem, partial(SGD, lr=0.1), 3, progress=False)
    with pytest.raises(DataError, match="one class label per example"):
        out_of_sample_probabilities(run)


@pytest.mark.parametrize(("method", "budget"), [("nothing", 0), ("k_fold", 2), ("auto", -1)])
def test_unknown_methods_and_budgets_are_refused(method, budget):
    with pytest.raises(HyperparameterError):
        out_of_sample_probabilities(network_run(), method, budget)
