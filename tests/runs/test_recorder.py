"""Recording a loop: what is observed, what is refused, and with which words."""

import logging
from contextlib import nullcontext

import jaxtyping
import pytest
import torch
from tiny_problems import classification, jitter, make_mlp, regression, tiny_data, with_dropout
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.variance import PerExampleVariance
from poprisk.runs._gradients import common_factor
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run


@pytest.fixture
def problem():
    return classification()


@pytest.fixture
def model(problem):
    return problem.module(torch.float64)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gradients(problem, model, index):
    model.zero_grad()
    loss = F.cross_entropy(model(problem.inputs[index]), problem.targets[index])
    loss.backward()
    return loss


def in_a_step(recorder, indices, *actions):
    with recorder.step(indices):
        for action in actions:
            action()


def test_a_dataset_says_its_indices(problem, model, optimizer):
    data = TensorDataset(problem.inputs, problem.targets)
    seen = []
    with Recorder(None, model, optimizer, problem=problem) as recorder:
        torch.manual_seed(1)
        for index, x, y in DataLoader(recorder.dataset(data), batch_size=5, shuffle=True):
            with recorder.step(index) as step:
                optimizer.zero_grad()
                step.loss = F.cross_entropy(model(x), y)
                step.loss.backward()
                optimizer.step()
            seen.append((index, step.loss.item()))
    run = recorder.run
    assert sorted(torch.cat([run.batch(k) for k in range(3)]).tolist()) == list(range(12))
    assert all(torch.equal(run.batch(k), index) for k, (index, _) in enumerate(seen))
    assert run.losses.tolist() == [loss for _, loss in seen]
    torch.testing.assert_close(run.step(2).selection, torch.full((2,), 6.0, dtype=torch.float64))  # the last two


def test_datasets_of_mappings_and_without_indices(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    mappings = [{"x": i} for i in range(12)]
    assert recorder.dataset(mappings)[3] == {"index": 3, "x": 3}
    assert list(recorder.dataset(range(12)))[2] == (2, 2)
    with pytest.raises(RunError, match="12 training examples, the dataset has 3"):
        recorder.dataset(range(3))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(RunError, match=r"must have __len__ and __getitem__.*got Stream"):
        recorder.dataset(Stream())


def test_micro_batches_inside_the_block_and_a_closure(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    with recorder.step() as step:
        optimizer.zero_grad()
        for index in torch.arange(12).chunk(3):
            step.micro_batch(index)
            (F.cross_entropy(model(problem.inputs[index]), problem.targets[index]) / 3).backward()
        optimizer.step()
    with recorder.step(range(12)):
        optimizer.step(lambda: gradients(problem, model, torch.arange(12)))
    run = recorder.close()
    torch.testing.assert_close(run.step(0).selection, torch.ones(12, dtype=torch.float64))
    assert run.losses[0].isnan()
    assert run.losses[1] > 0
    with pytest.raises(RunError, match="inside the step's block"):
        step.micro_batch([0])


def test_weights_of_examples(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    index, omega = torch.tensor([1, 4, 4]), torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64)
    with recorder.step(index, weights=omega):
        losses = F.cross_entropy(model(problem.inputs[index]), problem.targets[index], reduction="none")
        (omega * losses).sum().backward()
        optimizer.step()
    torch.testing.assert_close(recorder.close().step(0).selection, 12 * omega)


def test_the_gradient_must_be_that_of_the_recorded_examples(problem, model, optimizer):
    with pytest.raises(RunError, match="gradient of step 0 is not that of the recorded examples"):
        wrong_step(problem, model, optimizer, range(4, 8))  # other examples
    with pytest.raises(RunError, match="pass weights="):
        wrong_step(problem, model, optimizer, range(4), scale=4.0)  # a sum, not a mean
    wrong_step(problem, model, optimizer, range(4))
    recorder = Recorder(None, model, optimizer, problem=problem)
    for k in range(2):  # gradients not zeroed: seen at the second step
        context = pytest.raises(RunError, match=r"step 1 .*gradients are zeroed") if k else nullcontext()
        with context, recorder.step(range(4)):
            if k == 0:
                optimizer.zero_grad()
            F.cross_entropy(model(problem.inputs[:4]), problem.targets[:4]).backward()
            optimizer.step()


def wrong_step(problem, model, optimizer, indices, scale=1.0):
    optimizer.zero_grad()
    with Recorder(None, model, optimizer, problem=problem) as recorder, recorder.step(indices):
        (scale * F.cross_entropy(model(problem.inputs[:4]), problem.targets[:4])).backward()
        optimizer.step()


@pytest.mark.parametrize("every", [1, 10])
def test_gradients_changed_otherwise_are_refused(problem, model, optimizer, every):
    before = model[0].weight.detach().clone()
    recorder = Recorder(None, model, optimizer, problem=problem, every=every)
    changes = (
        lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda: model[0].weight.grad.mul_(0.5),
        lambda: model[2].bias.grad.add_(0.1),
    )
    for change in changes:
        actions = (lambda: gradients(problem, model, torch.arange(12)), change, optimizer.step)
        with pytest.raises(RunError, match="more than one common factor"):
            in_a_step(recorder, range(12), *actions)
    assert torch.equal(before, model[0].weight)  # refused before anything moved
    assert recorder.num_steps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_common_factor_has_the_same_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        g = torch.randn(40, generator=generator, dtype=dtype)
        c = torch.rand((), generator=generator, dtype=dtype)
        assert torch.equal(g * common_factor(g, g * c), g * c)
    twice = g * c * c
    assert common_factor(g, twice) == pytest.approx(float(c * c), rel=1e-6)
    assert common_factor(g, g.clone()) == 1.0
    assert common_factor(torch.zeros(3), torch.zeros(3)) == 1.0
    for after in (g + 1, g.clamp(-0.1, 0.1), g * torch.nan):
        with pytest.raises(RunError, match="common factor"):
            common_factor(g, after)


def test_order_of_calls(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    with pytest.raises(RunError, match="nothing has been recorded yet"):
        recorder.run
    gradients(problem, model, torch.arange(12))
    with pytest.raises(RunError, match="outside of `with recorder"):
        optimizer.step()
    with pytest.raises(RunError, match=r"no step was recorded: call optimizer.step\(\)"), recorder.step(range(12)):
        pass
    with pytest.raises(RunError, match="has no batch"), recorder.step():
        optimizer.step()
    with pytest.raises(RunError, match="cannot be nested"), recorder.step(range(12)), recorder.step(range(12)):
        pass
    with pytest.raises(RunError, match="was called twice in one block"):
        in_a_step(recorder, range(12), optimizer.step, optimizer.step)
    assert recorder.num_steps == 1  # the first of the two happened, and is recorded
    used = recorder.step(range(12))
    with used:
        gradients(problem, model, torch.arange(12))
        optimizer.step()
    with pytest.raises(RunError, match="can be recorded only once"), used:
        pass
    assert recorder.close().num_steps == 2
    with pytest.raises(RunError, match="recorder is closed"), recorder.step(range(12)):
        pass
    optimizer.step()  # the hooks are gone
    assert recorder.close().num_steps == 2


def test_an_error_in_the_loop_leaves_the_recorder_usable(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    with pytest.raises(ValueError, match="mine"), recorder.step(range(12)):
        raise ValueError("mine")
    with recorder.step(range(12)):
        gradients(problem, model, torch.arange(12))
        optimizer.step()
    assert recorder.close().num_steps == 1


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([12], "indices must lie in 0 … 11, got 12"),
        ([-1], "got -1"),
    ],
)
def test_indices_out_of_range(problem, model, optimizer, indices, message):
    recorder = Recorder(None, model, optimizer, problem=problem)
    with pytest.raises(DataError, match=message):
        recorder.step(indices)


def test_late_indices_of_a_sparse_recording_are_checked_when_written(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem, every=12)
    for k in range(11):
        with recorder.step([k]):
            gradients(problem, model, torch.tensor([k]))
            optimizer.step()
    with pytest.raises(DataError, match="got 99"):
        in_a_step(recorder, [99], lambda: gradients(problem, model, torch.arange(1)), optimizer.step)


@pytest.mark.parametrize("indices", [torch.tensor([0.5]), torch.tensor(3), torch.tensor([], dtype=torch.long), [True]])
def test_indices_that_are_none(problem, model, optimizer, indices):
    with pytest.raises(RunError, match="vector of whole numbers"):
        Recorder(None, model, optimizer, problem=problem).step(indices)


def test_parameters_must_be_the_models(problem, model):
    with pytest.raises(RunError, match="4 of the optimizer's 4 parameters"):
        Recorder(None, model, torch.optim.SGD(make_mlp().parameters()), problem=problem)
    with pytest.raises(RunError, match=r"'2.weight' is trainable but not in the optimizer"):
        Recorder(None, model, torch.optim.SGD(model[0].parameters()), problem=problem)
    complex_model = nn.Linear(1, 1, dtype=torch.complex64)
    with pytest.raises(RunError, match="only real floating-point"):
        Recorder(None, complex_model, torch.optim.SGD(complex_model.parameters()), problem=problem)
    with pytest.raises(RunError, match=r"RMSprop cannot be recorded"):
        Recorder(None, model, torch.optim.RMSprop(model.parameters()), problem=problem)


def test_missing_and_sparse_gradients(problem):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(1, 1)

        def forward(self, x):
            return self.used(x)

    model = Partly().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem)
    with pytest.raises(RunError, match=r"'unused.weight' has no gradient"):
        in_a_step(recorder, range(12), lambda: gradients(problem, model, torch.arange(12)), optimizer.step)
    table = nn.Embedding(12, 3, sparse=True).double()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    recorder = Recorder(None, table, optimizer, loss="squared", examples=12)
    with pytest.raises(RunError, match="sparse gradient"):
        in_a_step(recorder, range(2), lambda: table(torch.arange(2)).sum().backward(), optimizer.step)


@pytest.mark.parametrize("every", [1, 5])
def test_weights_moved_between_steps(problem, model, optimizer, every):
    recorder = Recorder(None, model, optimizer, problem=problem, every=every)
    with recorder.step(range(12)):
        gradients(problem, model, torch.arange(12))
        optimizer.step()
    with torch.no_grad():
        model[0].bias.add_(1.0)
    with pytest.raises(RunError, match="changed between steps 0 and 1"), recorder.step(range(12)):
        pass


def test_arguments(problem, model, optimizer, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for wrong in ({}, {"loss": "squared"}, {"examples": 3}, {"problem": problem, "loss": "squared"}):
        with pytest.raises(HyperparameterError, match="either problem=…, or loss=… and examples=…"):
            Recorder(None, model, optimizer, **wrong)
    for wrong, message in (
        ({"every": 0}, "every must be a whole number, at least 1, got 0"),
        ({"verify_steps": -1}, "verify_steps must be a whole number, at least 0, got -1"),
        ({"augmentation": "seed"}, 'augmentation must be "seeded", "unseeded" or None, got \'seed\''),
        ({"path": 3}, "path must be of type .*, got int: pass the one of your loop"),
        ({"problem": print}, "problem must be of type .*, got builtin_function_or_method"),
    ):
        with pytest.raises(HyperparameterError, match=message):
            Recorder(**{"path": None, "model": model, "optimizer": optimizer, "problem": problem} | wrong)
    source = PerExampleVariance(model, "cross_entropy")
    gated = PopRiskAdamW(model.parameters(), variance=source)
    with pytest.raises(RunError, match="variance source cannot be replayed"):
        Recorder(None, model, gated, problem=problem, every=2)


def test_what_stands_in_the_way_of_exact_analyses():
    problem = classification()
    coarse = problem.module(torch.bfloat16)
    optimizer = torch.optim.AdamW(coarse.parameters())
    recorder = Recorder(None, coarse, optimizer, problem=problem)
    with recorder.step(range(12)):
        F.cross_entropy(coarse(problem.inputs.bfloat16()), problem.targets).backward()
        optimizer.step()
    run = recorder.close()
    assert run.weights(1).dtype == torch.bfloat16
    with pytest.raises(RunError, match=r"no exact analysis of this run is possible: the weights are torch.bfloat16"):
        run.require_exact()
    dropout = with_dropout()
    model = dropout.module(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=dropout, augmentation="unseeded")
    with recorder.step(range(12)):
        F.cross_entropy(model(dropout.inputs), dropout.targets).backward()
        optimizer.step()
    run = recorder.close()
    assert len(run.obstacles) == 2
    with pytest.raises(RunError, match="draws at random"):
        run.require_exact()


def test_seeded_augmentation_is_checked_and_unseeded_is_noticed():
    problem = classification(augmented=True)
    model = problem.module(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem, seed=11)
    for k in range(2):
        with recorder.step(range(6)) as step:
            optimizer.zero_grad()
            x = jitter(problem.inputs[:6], step.generator)
            F.cross_entropy(model(x), problem.targets[:6]).backward()
            optimizer.step()
        assert step.number == k
    run = recorder.close()
    assert run.augmented
    assert run.manifest["augmentation"] == "seeded"
    assert not run.obstacles
    recorder = Recorder(None, model, optimizer, problem=problem)

    def unseeded():
        x = jitter(problem.inputs[:6], torch.Generator())
        F.cross_entropy(model(x), problem.targets[:6]).backward()

    with pytest.raises(RunError, match="changed at random"):
        in_a_step(recorder, range(6), optimizer.zero_grad, unseeded, optimizer.step)


def test_a_skipped_step_of_a_scaler_is_no_step(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    with recorder.step(range(12), loss_scale=2.0**200):
        gradients(problem, model, torch.arange(12))  # and the scaler finds an overflow
    with recorder.step(range(12), loss_scale=8.0):
        (8 * gradients_graph(problem, model)).backward()
        for p in model.parameters():
            p.grad.div_(8)
        optimizer.step()
    run = recorder.close()
    assert run.num_steps == 1
    torch.testing.assert_close(run.step(0).selection, torch.ones(12, dtype=torch.float64))


def gradients_graph(problem, model):
    model.zero_grad()
    return F.cross_entropy(model(problem.inputs), problem.targets)


def test_disk_use_is_said_before_the_first_write(problem, model, tmp_path, caplog, monkeypatch):
    optimizer = torch.optim.Adam(model.parameters())
    recorder = Recorder(tmp_path / "run", model, optimizer, problem=problem, steps=40, segment_steps=8)
    assert not (tmp_path / "run").exists()
    with caplog.at_level(logging.INFO, "poprisk.runs"):
        for _ in range(40):
            with recorder.step(range(12)):
                gradients(problem, model, torch.arange(12))
                optimizer.step()
    assert "KiB for 40 steps" in caplog.text
    recorder.close()
    vectors = sum(f.stat().st_size for f in (tmp_path / "run").glob("*.safetensors"))
    assert recorder.estimated_bytes * 0.9 < vectors < recorder.estimated_bytes * 1.5  # headers and indices beside it
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    recorder = Recorder(tmp_path / "other", model, optimizer, problem=problem, steps=40)
    with pytest.raises(RunError, match=r"has 100 B free: use a larger every="), recorder.step(range(12)):
        pass
    assert not (tmp_path / "other").exists()


def test_a_loss_by_name_needs_no_problem():
    inputs, _ = tiny_data()
    model = make_mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, loss="squared", examples=12)
    with recorder.step([0, 1]):
        (0.5 * model(inputs[:2]).square().sum(1).mean()).backward()
        optimizer.step()
    run = recorder.close()
    assert run.manifest["loss"] == {"name": "squared"}
    with pytest.raises(RunError, match="recorded without a problem"):
        run.problem
    assert Run(run._storage, problem=regression()).problem.name == "tiny regression"
    with pytest.raises(DataError, match="12 training examples, but problem 'tiny regression' has 5"):
        Run(run._storage, problem=regression(5))


def test_weights_and_manifest_are_copies(problem, model, optimizer):
    recorder = Recorder(None, model, optimizer, problem=problem)
    for _ in range(2):
        with recorder.step(range(12)):
            gradients(problem, model, torch.arange(12))
            optimizer.step()
    run = recorder.close()
    for get in (run.weights, run.buffer, lambda k: run.step(k).preconditioner):
        for k in (0, 1):
            kept = get(k).clone()
            get(k).zero_()
            assert torch.equal(get(k), kept)
    run.manifest["num_steps"] = 7
    assert run.num_steps == 2
    for call, wrong in ((run.weights, 3), (run.step, 2), (run.batch, -1)):
        with pytest.raises(DataError, match="the run has 2 steps"):
            call(wrong)
