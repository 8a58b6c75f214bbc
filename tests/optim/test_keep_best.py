"""KeepBest: the best measured weights are kept, training is left alone, costs are bounded, resuming is exact."""

import copy
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from poprisk.errors import DataError, HyperparameterError, StateDictError
from poprisk.optim._held_block import HeldBlock
from poprisk.optim._held_curve import HeldCurve, Moment, held_error
from poprisk.optim._keep_best import KeepBest
from poprisk.optim._tail_average import TailAverage


def task(count=120, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    flip = torch.rand(count, generator=generator) < noise
    return x, torch.where(flip, 1 - y, y)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))


def train(model, optimizer, x, y, start, stop, after=lambda: None):
    """Batches and dropout masks depend on the step alone."""
    for step in range(start, stop):
        torch.manual_seed(1000 + step)
        index = torch.randint(len(x), (20,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        after()


def test_the_model_ends_with_the_best_weights_that_were_measured():
    x, y = task()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"every": 10, "average": None, "metric": "accuracy"}
    keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, **options)
    seen = []

    def look():
        if keeper.steps % 10 == 0:
            model.eval()
            with torch.no_grad():
                out = model(x[:40])
            model.train()
            errors = float((out.argmax(1) != y[:40]).double().mean())
            seen.append((errors, float(functional.cross_entropy(out, y[:40])), copy.deepcopy(model.state_dict())))

    train(model, optimizer, x[40:], y[40:], 0, 200, look)
    risk = keeper.finish()
    best = min(seen, key=lambda each: each[:2])
    assert all(torch.equal(best[2][name], value) for name, value in model.state_dict().items())
    assert risk.measured == 20
    assert_close(risk.accuracy, 1 - best[0])
    assert keeper.kept_step == risk.step == 10 * (seen.index(best) + 1)


def test_training_is_left_alone():
    x, y = task()
    models = [network(), network()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    keeper = KeepBest(models[0], optimizers[0], (x[:40], y[:40]), functional.cross_entropy, every=3)
    states = []
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(5)
        for _ in range(30):  # one stream of random numbers for batches and dropout
            index = torch.randint(80, (20,)) + 40
            optimizer.zero_grad()
            functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert models[0].training
    keeper.close()


def test_measurements_stay_within_their_cost():
    x, y = task(400)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, cost=0.03)
    evaluated = []
    model.register_forward_pre_hook(lambda module, args: None if module.training else evaluated.append(len(args[0])))
    train(model, optimizer, x[40:], y[40:], 0, 600)
    keeper.close()
    assert len(keeper.curve.moments) >= 10
    assert sum(evaluated) / 3 <= 0.03 * 600 * 20


@pytest.mark.parametrize("average", [0.2, (0.1, 0.5), None])
def test_resuming_gives_the_same_bits(average):
    x, y = task()

    def begin():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, average=average)

    model, optimizer, keeper = begin()
    train(model, optimizer, x[40:], y[40:], 0, 90)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), keeper.state_dict()))
    train(model, optimizer, x[40:], y[40:], 90, 200)
    risk = keeper.finish()
    again, other, resumed = begin()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(again, other, x[40:], y[40:], 90, 200)
    second = resumed.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert (risk.value, risk.standard_error, risk.step) == (second.value, second.standard_error, second.step)


_SCRIPT = """
import os, sys, torch
sys.path[:0] = [{folder!r}]
from test_keep_best import KeepBest, functional, network, task, train
x, y = task()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, path="kept.safetensors", every=5)
begin = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
    keeper.load_state_dict(state["keeper"]); begin = keeper.steps
def save():
    if keeper.steps % 4 == 0:
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "keeper": keeper.state_dict()}}
        torch.save(state, "checkpoint.tmp"); os.replace("checkpoint.tmp", "checkpoint.pt")
    print(keeper.steps, flush=True)
calls, last = 0, int(sys.argv[1])
def count(frame, event, argument):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), 9)
if last >= 0:
    sys.setprofile(count)
train(model, optimizer, x[40:], y[40:], begin, 60, save)
keeper.finish()
sys.setprofile(None)
torch.save(model.state_dict(), "final.pt")
open("calls.txt", "w").write(str(calls))
"""


def _child(folder, calls=0):
    """A training in a folder, from its checkpoint on. It kills itself at a number of calls, or counts them (0)."""
    folder.mkdir(exist_ok=True)
    code = _SCRIPT.format(folder=os.path.dirname(__file__))
    return subprocess.Popen([sys.executable, "-c", code, str(calls)], cwd=folder, stdout=subprocess.PIPE, text=True)


def _check_same(whole, cut):
    first, second = (torch.load(folder / "final.pt", weights_only=True) for folder in (whole, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (whole / "kept.safetensors").read_bytes() == (cut / "kept.safetensors").read_bytes()


@pytest.mark.timeout(900)  # five processes that import torch, on a machine that may be busy
def test_killed_at_any_step_it_ends_with_the_same_weights(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with _child(whole, -1) as process:
        process.communicate()
    assert process.returncode == 0
    for stop in (7, 23, 42):
        with _child(cut, -1) as process:
            for line in process.stdout:
                if int(line) >= stop:
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.returncode == -signal.SIGKILL
        kept = load_file(cut / "kept.safetensors")  # whole, whatever the moment
        network().load_state_dict(kept)
    with _child(cut, -1) as process:
        process.communicate()
    assert process.returncode == 0
    _check_same(whole, cut)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments_it_ends_with_the_same_weights(tmp_path):
    """Anywhere in a step, a measurement or a write: the process kills itself at a random call of a function."""
    process = _child(tmp_path / "whole")
    process.communicate()
    assert process.returncode == 0
    most, draw = int((tmp_path / "whole/calls.txt").read_text()) // 6, random.Random(0)
    kills, trainings = 0, 0
    while kills < 20:
        process = _child(tmp_path / str(trainings), draw.randint(1, most))
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        kills += process.returncode != 0
        if process.returncode == 0 or kills == 20:
            if process.returncode:
                _child(tmp_path / str(trainings)).communicate()
            _check_same(tmp_path / "whole", tmp_path / str(trainings))
            trainings += 1


def test_the_loss_decides_where_the_accuracy_does_not():
    def moment(wrong, loss, step):
        scores = torch.zeros(100)
        scores[:wrong] = 1
        return Moment(step, None, torch.full((100,), loss), scores)

    rows = [moment(30, 1.0, 1), moment(29, 1.1, 2), moment(31, 0.9, 3), moment(20, 1.5, 4), moment(25, 0.5, 5)]
    curve, plain = HeldCurve(), HeldCurve(plain=True)
    # One error fewer is no more than a standard error; ten are; five more are too many, whatever the loss.
    assert [curve.add(each) for each in rows] == [True, False, True, True, False]
    assert [plain.add(each) for each in rows] == [True, True, False, True, False]
    again = HeldCurve()
    again.restore(curve.packed())
    assert again.best.step == curve.best.step == 4


def test_being_too_sure_does_not_count_against_a_moment():
    """A network that goes on learning becomes surer of itself, and its few mistakes cost more: it is still better."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (60,), generator=generator)
    early = 2.0 * functional.one_hot(y, 3) + 1.5 * torch.randn(60, 3, generator=generator)
    late = 20 * (early + 0.1 * functional.one_hot(y, 3))
    curve, by_loss = HeldCurve(), []
    for step, logits in enumerate((early, late)):
        block = HeldBlock((logits, y), functional.cross_entropy, None)
        losses, scores, calibrated = block.measure(nn.Identity(), batch_size=25)
        by_loss.append(float(losses.mean()))
        curve.add(Moment(step, None, losses, scores, calibrated))
    assert by_loss[0] < by_loss[1]
    assert curve.best.step == 1
    again = HeldCurve()
    again.restore(curve.packed())
    assert again.best.step == 1


def test_of_moments_with_about_the_same_loss_the_latest_is_kept():
    """One example decides nothing: on clean data a network goes on learning after the block is got right."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(50, generator=generator)
    noise = torch.randn(50, generator=generator)
    noise = noise - noise.mean()

    def moment(step, more):
        return Moment(step, None, losses + more + noise * step, torch.zeros(50))

    curve = HeldCurve()
    added = [curve.add(moment(step, more)) for step, more in ((0, 0.0), (1, 0.02), (2, 2.0), (3, -0.1), (4, -0.08))]
    assert added == [True, True, False, True, True]


def test_the_risk_is_not_too_small_after_choosing_by_errors():
    """Errors of equal moments, with losses that go along with them."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(40):
        curve = HeldCurve()
        for step in range(25):
            wrong = (torch.rand(60, generator=generator) < 0.4).float()
            curve.add(Moment(step, None, 0.5 + wrong + 0.2 * torch.randn(60, generator=generator), wrong))
        value, error, _ = curve.chosen_risk()
        values.append(value)
        assert abs(value - 0.9) < 4 * error
    assert_close(sum(values) / 40, 0.9, atol=0.03, rtol=0)


def test_the_risk_is_not_too_small_after_choosing():
    """Many moments of equal quality: the least mean is optimistic, the estimate is not."""
    generator = torch.Generator().manual_seed(0)
    values, plain = [], []
    for _ in range(60):
        curve = HeldCurve()
        for step in range(25):
            losses = 1 + torch.randn(40, generator=generator)
            curve.add(Moment(step, None, losses, losses))
        value, error, least = curve.chosen_risk()
        values.append(value)
        plain.append(least)
        assert abs(value - 1) < 4 * error
    assert_close(sum(values) / 60, 1.0, atol=0.06, rtol=0)
    assert sum(plain) / 60 < 0.8


def test_the_risk_is_the_mean_loss_where_the_choice_never_changes():
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0))
    curve = HeldCurve()
    for step, more in enumerate((2.0, 0.0, 3.0)):
        curve.add(Moment(step, None, losses + more, losses + more))
    value, error, plain = curve.chosen_risk()
    assert value == plain
    assert_close(value, float(losses.double().mean()))
    assert error > 0


@pytest.mark.parametrize("held", ["arrays", "dataset"])
@pytest.mark.parametrize(
    "loss", [functional.mse_loss, nn.MSELoss(), lambda outputs, targets: (outputs - targets).square().mean()]
)
def test_regression_is_chosen_by_the_loss(held, loss):
    x = torch.randn(30, 2)
    y = x.sum(1, keepdim=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = (x[:12], y[:12]) if held == "arrays" else TensorDataset(x[:12], y[:12])
    keeper = KeepBest(model, optimizer, block, loss, every=5, average=None)
    for _ in range(40):
        optimizer.zero_grad()
        functional.mse_loss(model(x[12:]), y[12:]).backward()
        optimizer.step()
    risk = keeper.finish()
    assert risk.step == 40
    assert risk.valid
    assert torch.isnan(torch.tensor(risk.accuracy))
    assert_close(float(keeper.curve.moments[-1].losses.mean()), functional.mse_loss(model(x[:12]), y[:12]).item())


def test_an_average_of_ones_own_is_used():
    x, y = task()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = TailAverage(model, optimizer, tail=0.3)
    keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, average=average, every=10)
    train(model, optimizer, x[40:], y[40:], 0, 30)
    assert keeper.finish().tail == 0.3
    assert average.steps == 30


def test_few_held_examples_have_no_error():
    x, y = task()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keeper = KeepBest(model, optimizer, (x[:4], y[:4]), functional.cross_entropy)
    train(model, optimizer, x[40:], y[40:], 0, 20)
    risk = keeper.finish()
    assert not risk.valid
    assert "hold at least 10 back" in risk.reason


def test_what_does_not_fit_is_refused():
    x, y = task()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for options, message in (
        ({"metric": "f1"}, "metric must be"),
        ({"cost": 0}, "cost must be"),
        ({"every": 0}, "every must be"),
    ):
        with pytest.raises(HyperparameterError, match=message):
            KeepBest(model, optimizer, (x, y), functional.cross_entropy, **options)
    with pytest.raises(DataError, match="empty"):
        KeepBest(model, optimizer, (x[:0], y[:0]), functional.cross_entropy)
    keeper = KeepBest(model, optimizer, (x[:20], y[:20]), functional.cross_entropy)
    keeper.measure()
    state = keeper.state_dict()
    other = nn.Linear(8, 2)
    with pytest.raises(StateDictError, match="another model"):
        KeepBest(other, torch.optim.SGD(other.parameters()), (x, y), functional.cross_entropy).load_state_dict(state)


def test_a_block_may_measure_by_itself_and_a_loop_may_count_by_itself():
    class Block:
        count = 30

        def measure(self, model, batch_size):
            sizes.append(batch_size)
            losses = torch.full((30,), float(model.weight.detach().square().mean()))
            return losses, losses

    sizes, model = [], nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, Block(), average=None, every=1)
    for _ in range(3):
        keeper.count_examples(7)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    least = min(float(each.losses[0]) for each in keeper.curve.moments)
    assert keeper.finish().measured == 3
    assert_close(float(model.weight.detach().square().mean()), least)
    with pytest.raises(HyperparameterError, match="needs the loss"):
        KeepBest(model, optimizer, (torch.zeros(2, 3), torch.zeros(2)))


def few_losses(kind, generator, count, repeats=2000):
    """Mean, spread, worst and truth of a few losses from a known distribution."""
    if kind == "squared":
        losses, truth = torch.randn(repeats, count, generator=generator).square(), 1.0
    else:  # errors of one in ten, each of a loss of 3
        losses, truth = 3.0 * (torch.rand(repeats, count, generator=generator) < 0.1), 0.3
    return losses.double(), truth


@pytest.mark.parametrize("count", [10, 20, 50])
@pytest.mark.parametrize("kind", ["squared", "errors"])
def test_the_error_of_few_losses_is_not_confidently_wrong(kind, count):
    """Off by more than a fifth and by more than 2.5 errors: plain errors are in several percent of the blocks."""
    losses, truth = few_losses(kind, torch.Generator().manual_seed(count), count)
    plain, wrong, covered = 0, 0, 0
    for row in losses:
        value, error = float(row.mean()), float(row.std()) / count**0.5
        unseen = float(row.max()) / count if kind == "squared" else 3.0 / count
        wide, off = held_error(value, error, unseen, count), abs(value - truth)
        plain += off > max(2.5 * error, 0.2 * truth)
        wrong += off > max(2.5 * wide, 0.2 * truth)
        covered += off <= 2 * wide
    assert plain > 0.02 * len(losses)
    assert wrong < 0.02 * len(losses)
    assert covered > 0.93 * len(losses)


def test_an_unseen_mistake_is_part_of_the_error():
    """Twenty examples that all are right do not say that no example is wrong."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keeper = KeepBest(model, optimizer, (x, torch.tensor([0, 1]).repeat(10)), nn.functional.cross_entropy)
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1]).repeat(10)).backward()
    optimizer.step()
    risk = keeper.finish()
    assert risk.accuracy == 1.0
    assert risk.standard_error >= nn.functional.cross_entropy(model(x), torch.tensor([1, 0]).repeat(10)) / 20


def test_the_other_of_two_classes_is_a_mistake_for_the_logistic_loss():
    model, loss = nn.Linear(1, 1, bias=False), nn.functional.binary_cross_entropy_with_logits
    with torch.no_grad():
        model.weight.fill_(4.0)
    x, y = torch.tensor([[1.0], [-1.0]]).repeat(6, 1), torch.tensor([[1.0], [0.0]]).repeat(6, 1)
    assert HeldBlock((x, y), loss, None).unseen(model, 5) == pytest.approx(loss(model(x), 1 - y).item() / 12)
    numbers = (x, 3 * y + 0.5)
    assert HeldBlock(numbers, nn.functional.mse_loss, None).unseen(model, 5) is None
