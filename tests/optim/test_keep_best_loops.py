"""KeepBest and TailAverage in the loops that people write: nothing changes in them, and the kept weights are right."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from poprisk import Estimate, KeepBest, PopRiskAdamW, Problem, RiskMeter, TailAverage, hold_back, train
from poprisk.errors import HyperparameterError, StateDictError
from readme_code import blocks


def noisy(count=240, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    flip = torch.rand(count, generator=generator) < noise
    return x, torch.where(flip, 1 - y, y), y


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), *more, nn.ReLU(), nn.Linear(64, 2))


def test_the_loop_of_the_guide():
    x, y, _ = noisy()
    dataset = TensorDataset(x, y)
    model = network()

    train_set, held = hold_back(dataset, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keeper = KeepBest(model, optimizer, held, torch.nn.functional.cross_entropy)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    for _ in range(30):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    last = copy.deepcopy(model.state_dict())
    risk = keeper.finish()

    assert isinstance(risk, Estimate)
    assert risk.valid
    assert 0 < risk.step <= 30 * len(loader)
    assert any(not torch.equal(last[name], value) for name, value in model.state_dict().items())
    outputs = model(x[held.indices])
    assert_close(risk.accuracy, float((outputs.argmax(1) == y[held.indices]).double().mean()))
    kept = keeper.curve.best
    assert_close(kept.losses, functional.cross_entropy(outputs, y[held.indices], reduction="none").detach())
    assert abs(risk.value - float(kept.losses.mean())) < 3 * risk.standard_error


def test_the_blocks_of_the_guide_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y, _ = noisy()
    page = (Path(__file__).parents[2] / "docs/averaging.md").read_text(encoding="utf-8")
    found = {"dataset": TensorDataset(x, y), "model": network(), "make_model": network, "epochs": 4, "path": "state.pt"}
    found["problem"] = Problem(network, "cross_entropy", x, y)
    for code in blocks(page):
        exec(code, found)
        save_file(found["model"].state_dict(), "kept.safetensors")
    assert found["final"].num_steps == round(found["run"].kept.risk.step * len(x) / (len(x) - len(found["held"])))
    assert found["average"].steps == round(found["risk"].step * len(x) / len(found["train_set"]))  # the chosen length
    assert found["risk"].valid


def make(kind, model):
    """Optimizers, and what a step is."""
    parameters = list(model.parameters())
    if kind == "groups":
        groups = [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 1e-3}]
        return torch.optim.AdamW(groups)
    if kind == "gated":
        return PopRiskAdamW(parameters)
    if kind == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters)


KINDS = ["plain", "gated", "sgd", "groups", "schedule", "accumulation", "scaler", "autocast", "lbfgs", "frozen"]


@pytest.mark.parametrize("kind", [*KINDS, "batch norm"])
def test_every_loop_is_left_alone_and_ends_with_what_was_measured(kind):
    x, y, _ = noisy()
    weights, kept = [], []
    for keeps in (False, True):
        model = network(*([nn.BatchNorm1d(64), nn.Dropout(0.2)] if kind == "batch norm" else []))
        if kind == "frozen":
            model[0].requires_grad_(False)
        optimizer = make(kind, model)
        keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, every=4) if keeps else None
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40) if kind == "schedule" else None
        scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler")
        low = torch.autocast("cpu", torch.bfloat16) if kind in ("autocast", "scaler") else contextlib.nullcontext()
        torch.manual_seed(5)
        for step in range(40):
            parts = torch.randint(40, 240, (2, 16)) if kind == "accumulation" else torch.randint(40, 240, (1, 32))

            def closure(parts=parts, low=low, scaler=scaler, optimizer=optimizer, model=model):
                optimizer.zero_grad()
                for index in parts:
                    with low:
                        loss = functional.cross_entropy(model(x[index]), y[index]) / len(parts)
                    scaler.scale(loss).backward()
                return loss

            if kind == "frozen" and step == 15:
                model[0].requires_grad_(True)
            if kind == "lbfgs":
                optimizer.step(closure)
            else:
                closure()
                scaler.step(optimizer)
                scaler.update()
            if schedule is not None:
                schedule.step()
        weights.append(copy.deepcopy(model.state_dict()))
        if keeper is not None:
            kept.append(keeper.finish())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    best = keeper.curve.best
    assert best.step == kept[0].step
    model.eval()
    with low:
        outputs = model(x[:40])
        expected = functional.cross_entropy(outputs, y[:40], reduction="none").detach().float()
    assert_close(best.losses, expected)


def test_gradient_accumulation_counts_all_examples_of_a_step():
    x, y, _ = noisy()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy)
    sizes = []
    model.register_forward_pre_hook(lambda module, args: None if module.training else sizes.append(len(args[0])))
    for _ in range(60):
        optimizer.zero_grad()
        for index in torch.randint(40, 240, (4, 8)):
            functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    keeper.close()
    assert keeper._budget.counted == 32
    assert max(sizes) == 16  # forward passes without gradients, twice those of training


def test_tied_weights_are_one_and_the_file_has_both_names(tmp_path):
    from safetensors.torch import load_file

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("cache", torch.ones(2), persistent=False)

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    model, tokens = Tied(), torch.arange(24) % 6
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    path = tmp_path / "kept.safetensors"
    keeper = KeepBest(model, optimizer, (tokens, tokens), functional.cross_entropy, every=1, path=path)
    for _ in range(5):
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    keeper.finish()
    assert model.head.weight is model.embed.weight
    assert list(keeper.state_dict()["kept"]) == ["embed.weight"]
    found = load_file(path)
    assert set(found) == {"embed.weight", "head.weight"}
    again = Tied()
    again.load_state_dict(found)
    assert torch.equal(again.head.weight, model.head.weight)


def test_a_parameter_that_is_unfrozen_later_is_averaged_from_then_on():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = TailAverage(model, optimizer, tail=1.0)
    first, path = model[0].weight.detach().clone(), []
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
        for each in model.parameters():
            each.grad = torch.ones_like(each) if each.requires_grad else None
        optimizer.step()
        path.append(model[0].weight.detach().clone())
    assert torch.equal(path[2], first)
    with average.swapped():
        assert_close(model[0].weight.detach(), torch.stack(path).mean(0))
    again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    again[0].requires_grad_(False)
    other = TailAverage(again, torch.optim.SGD(again.parameters(), lr=1.0), tail=1.0)
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    assert other.state_dict()["names"] == average.state_dict()["names"]


def test_weights_from_before_an_unfreezing_are_restored():
    x, y, _ = noisy()
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, average=None, every=10**6)
    keeper.measure()
    start = copy.deepcopy(model.state_dict())
    model[0].requires_grad_(True)
    for each in model.parameters():
        each.grad = torch.full_like(each, 1e3)
    optimizer.step()
    keeper.finish()
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="needs torch.compile")
def test_a_compiled_model(monkeypatch):
    x, y, _ = noisy()
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    keeper = KeepBest(compiled, optimizer, (x[:40], y[:40]), functional.cross_entropy, every=5)
    for _ in range(10):
        optimizer.zero_grad()
        functional.cross_entropy(compiled(x[40:72]), y[40:72]).backward()
        optimizer.step()
    assert keeper.finish().measured == 2
    assert keeper._budget.counted == 32
    assert list(keeper.state_dict()["kept"]) == list(model.state_dict())


def test_statistics_of_batch_normalization_are_recomputed_from_a_loader():
    x, y, _ = noisy()
    loader = DataLoader(TensorDataset(x[40:], y[40:]), batch_size=200)
    model = network(nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = TailAverage(model, optimizer, buffers="copy")
    keeper = KeepBest(model, optimizer, (x[:40], y[:40]), functional.cross_entropy, average=average, every=5)
    for _ in range(20):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[40:72]), y[40:72]).backward()
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with average.swapped(batch_norm=loader):
        assert_close(model[1].running_mean, model[0](x[40:]).mean(0).detach())
        assert model[1].num_batches_tracked == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    keeper.finish(batch_norm=loader)
    assert_close(model[1].running_mean, model[0](x[40:]).mean(0).detach())


# Nothing held back -----------------------------------------------------------------------------------------------


def test_nothing_held_back_ends_with_the_average():
    x, y, _ = noisy()
    model = network()
    train_set, held = hold_back((x, y), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keeper = KeepBest(model, optimizer, held, functional.cross_entropy, average=0.5)
    reference = TailAverage(model, optimizer, tail=0.5)
    for index in torch.randint(240, (40, 32)):
        optimizer.zero_grad()
        functional.cross_entropy(model(train_set[0][index]), train_set[1][index]).backward()
        optimizer.step()
    with reference.swapped():
        expected = copy.deepcopy(model.state_dict())
    risk = keeper.finish()
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
    assert not risk.valid
    assert risk.step == 40
    assert "the mean of about the last 50% of the steps at the last step, 40, unmeasured" in risk.reason
    with pytest.raises(HyperparameterError, match="nothing to measure"):
        keeper.measure()
    other = KeepBest(model, optimizer, (x, y), functional.cross_entropy)
    with pytest.raises(StateDictError, match="held-back examples"):
        other.load_state_dict(keeper.state_dict())


class Read:
    """A meter with readings of its own."""

    def __init__(self, values, valid=True):
        self.values, self.valid, self.readings = values, valid, []

    def read(self, run, steps):
        from types import SimpleNamespace

        for step in steps:
            value = self.values(step)
            risk = Estimate(value, 0.1, valid=self.valid, reason="" if self.valid else "it says so")
            self.readings.append(SimpleNamespace(step=step, risk=risk))
        return self


@pytest.mark.parametrize("average", [None, 0.2])
def test_the_moment_that_a_risk_meter_names_is_restored(average):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, None, average=average)
    seen = {}
    for step in range(1, 101):
        for each in model.parameters():
            each.grad = torch.full_like(each, float(step))
        optimizer.step()
        with keeper.average.swapped() if average else contextlib.nullcontext():
            seen[step] = copy.deepcopy(model.state_dict())
        if step == 50:
            state = copy.deepcopy(keeper.state_dict())
            keeper.load_state_dict(state)
    from types import SimpleNamespace

    risk = keeper.finish(SimpleNamespace(num_steps=100), Read(lambda step: abs(step - 40.0)))
    assert abs(risk.step - 40) <= 8
    assert all(torch.equal(seen[risk.step][name], value) for name, value in model.state_dict().items())
    assert risk.valid == (average is None)
    assert f"after step {risk.step} of 100" in risk.reason


def test_without_a_valid_reading_the_last_average_is_kept():
    problem = Problem(
        nn.Linear, "squared", torch.randn(20, 2), torch.randn(20, 1), arguments={"in_features": 2, "out_features": 1}
    )
    model = problem.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, None)
    run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=12, progress=False)
    for _ in range(12):
        optimizer.zero_grad()
        problem.batch_loss(model(problem.inputs), problem.targets).backward()
        optimizer.step()
    state = copy.deepcopy(keeper.state_dict())
    risk = keeper.finish(run, Read(lambda step: 1.0, valid=False))
    assert risk.step == 12
    assert "no valid reading at the 12 moments" in risk.reason
    keeper.load_state_dict(state)
    real = keeper.finish(run, RiskMeter())  # exact for a linear model
    assert "the risk meter reads its lowest value after step" in real.reason
    short = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=3, progress=False)
    assert "the run has 3 steps, but 12 were counted" in keeper.finish(short, RiskMeter()).reason


def test_training_on_all_examples_at_the_chosen_length():
    """The guide's second training: as many steps, all examples, the same average."""
    x, y, clean = noisy(600, 0.3)
    right, risk = {}, None
    for name in ("held back", "all"):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if name == "held back":
            (inputs, targets), held = hold_back((x, y), 0.2)
            keeper, steps = KeepBest(model, optimizer, held, functional.cross_entropy), 1200
        else:
            inputs, targets, steps = x, y, risk.step
            keeper = KeepBest(model, optimizer, None, average=risk.tail)
        torch.manual_seed(1)
        for _ in range(steps):
            index = torch.randint(len(inputs), (32,))
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()
            last = model(x).argmax(1)
        risk = keeper.finish()
        right[name] = float((model(x).argmax(1) == clean).float().mean())
        right.setdefault("last", float((last == clean).float().mean()))
    assert min(right["all"], right["held back"]) > right["last"] + 0.02, right
