"""Members trained one after another: any module, the same trainings as the stacked ones, resumed from a directory."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poprisk import Problem, Recorder, RiskMeter, Run, population_risk, train
from poprisk.errors import RunError
from poprisk.risk import Members, k_fold, leave_one_out, retrain
from poprisk.risk._retraining import one_by_one
from poprisk.risk._retraining.one_by_one import module_outputs, train_one_by_one
from poprisk.risk._retraining.retrain import _stackable

N, CLOSE = 24, {"rtol": 1e-9, "atol": 1e-11}


def examples(shape=(6,), n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, (x.flatten(1)[:, :3] + 0.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)).argmax(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(9, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.words(x))


class Twice(torch.autograd.Function):
    """Custom code without a rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return Twice.apply(self.layer(x))


class InPlace(nn.Module):
    """Writes into a fresh tensor, which vmap refuses where the source is batched and the target is not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        out[:] = self.layer(x)
        return out


def mlp(*between, width=8):
    return nn.Sequential(nn.Linear(6, width), *between, nn.Tanh(), nn.Linear(width, 3))


MODELS = {
    "batch norm": (lambda: mlp(nn.BatchNorm1d(8)), (6,)),
    "dropout": (lambda: mlp(nn.Dropout(0.3)), (6,)),
    "gru": (Recurrent, (4, 3)),
    "bag": (Bag, None),
    "custom": (Custom, (6,)),
    "in place": (InPlace, (6,)),
}
ADAMW = partial(torch.optim.AdamW, lr=0.02)


def recorded(name, steps=12, **options):
    make, shape = MODELS[name]
    x, y = examples(shape or (6,))
    if shape is None:
        x = torch.randint(0, 9, (N, 4), generator=torch.Generator().manual_seed(1))
    problem = Problem(make, "cross_entropy", x, y)
    return train(problem, ADAMW, steps, batch_size=8, dtype=torch.float64, progress=False, **options)


def plain(run, members, keep=()):
    return train_one_by_one(run, members, keep, run.num_steps, progress=False)


@pytest.mark.parametrize("name", MODELS)
def test_every_module_gets_folds(name):
    run = recorded(name)
    assert _stackable(run, None)[1]
    risk = population_risk(run, "k_fold", 3)
    assert risk.cost == 3
    assert "one after another" in risk.reason
    assert 0.1 < float(risk.value) < 3


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.05}, {"accumulate": 2}, {"every": 5}, {"schedule": lambda k: 0.9**k}]
)
@pytest.mark.parametrize("kind", [ADAMW, partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)])
def test_they_are_the_stacked_trainings(kind, options):
    """A batch without some of its examples, and one without any: the weights are those of stacked members."""
    run = train(
        Problem(mlp, "cross_entropy", *examples()),
        kind,
        9,
        batch_size=4,
        dtype=torch.float64,
        progress=False,
        **options,
    )
    weights = torch.ones(3, N, dtype=torch.float64)
    weights[0, ::3] = 0
    weights[1, run.batch(2)] = 0
    weights[2] = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    there = retrain(run, Members(weights), keep=[4])
    here = plain(run, Members(weights), keep=[4])
    torch.testing.assert_close(here.weights, there.weights, **CLOSE)
    torch.testing.assert_close(here.kept[4], there.kept[4], **CLOSE)


def test_augmented_batches_keep_their_augmentation():
    def jitter(x, generator):
        return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)

    problem = Problem(mlp, "cross_entropy", *examples(), augment=jitter)
    run = train(problem, ADAMW, 9, batch_size=8, dtype=torch.float64, progress=False)
    weights = torch.ones(2, N, dtype=torch.float64)
    weights[0, :7] = 0
    torch.testing.assert_close(plain(run, Members(weights)).weights, retrain(run, Members(weights)).weights, **CLOSE)


@pytest.mark.parametrize("name", ["batch norm", "dropout"])
def test_with_all_examples_it_is_the_run(name):
    run = recorded(name)
    found = plain(run, Members(torch.ones(1, N)))
    torch.testing.assert_close(found.weights[0], run.weights(run.num_steps), **CLOSE)
    if name == "batch norm":
        there = run.checkpoint(run.num_steps)
        assert set(found.buffers[12][0]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        for key, value in found.buffers[12][0].items():
            torch.testing.assert_close(value, there[f"checkpoint.module.{key}"], **CLOSE)


def test_examples_left_out_are_in_no_batch_statistics():
    """Their inputs may be anything: neither weights nor running statistics see them, nor does evaluation."""
    run = recorded("batch norm")
    weights = torch.ones(1, N)
    weights[0, :5] = 0
    here = plain(run, Members(weights))
    run.problem.inputs[:5] = 1e6
    there = train_one_by_one(run, Members(weights), (), 12, progress=False, check=False)
    assert torch.equal(here.weights, there.weights)
    assert torch.equal(here.buffers[12][0]["1.running_var"], there.buffers[12][0]["1.running_var"])
    one, both = (
        module_outputs(run, [here.weights[0]], here.buffers[12], [run.problem.inputs[rows]], torch.float64)[0]
        for rows in (slice(7, 8), slice(6, 8))
    )
    torch.testing.assert_close(one[0], both[1], **CLOSE)  # running statistics: no example sees another


def test_batch_statistics_of_a_single_example_are_completed():
    x, y = examples()
    run = train(Problem(MODELS["batch norm"][0], "cross_entropy", x, y), ADAMW, 12, batch_size=2, progress=False)
    weights = torch.ones(1, N)
    weights[0, run.batch(3)[0]] = 0
    assert plain(run, Members(weights)).weights.isfinite().all()


def test_low_precision_and_amsgrad_are_trained_too():
    x, y = examples()
    problem = Problem(mlp, "cross_entropy", x.float(), y)
    for kind, dtype in ((ADAMW, torch.bfloat16), (partial(torch.optim.Adam, lr=0.02, amsgrad=True), torch.float32)):
        run = train(problem, kind, 12, batch_size=8, dtype=dtype, progress=False)
        assert 0.1 < float(population_risk(run, "k_fold", 3).value) < 3


def test_finished_trainings_are_not_trained_again(tmp_path, monkeypatch):
    run = recorded("batch norm")
    first = k_fold(run, 4, folder=tmp_path / "folds")
    taken = []
    step = one_by_one._Trainer._step
    monkeypatch.setattr(one_by_one._Trainer, "_step", lambda self, k, *rest: taken.append(k) or step(self, k, *rest))
    again = k_fold(run, 4, folder=tmp_path / "folds")
    assert len(taken) <= 2  # the check of the first steps
    assert torch.equal(again.losses, first.losses)
    assert again.risk.value == first.risk.value
    next((tmp_path / "folds").glob("*.safetensors")).write_bytes(b"torn")
    taken.clear()
    assert torch.equal(k_fold(run, 4, folder=tmp_path / "folds").losses, first.losses)
    assert run.num_steps <= len(taken) <= run.num_steps + 2
    k_fold(run, 4, seed=1, folder=tmp_path / "folds")  # another partition is another training
    assert len(taken) > 4 * run.num_steps


def test_the_meter_reads_along_and_goes_on(tmp_path):
    run = recorded("batch norm", segment_steps=4)
    whole = RiskMeter("k_fold", retrain_budget=3).read(run, [5, 8, 12]).readings
    assert [r.step for r in whole] == [5, 8, 12]
    parts = RiskMeter("k_fold", retrain_budget=3).read(run, [5]).read(run, [8, 12]).readings
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(float(one.risk.value), float(other.risk.value), **CLOSE)
        assert one.risk.method == "k_fold"
    with pytest.raises(RunError, match="BatchNorm1d '1'"):
        RiskMeter("exclusion").read(run)


def test_random_numbers_that_were_not_recorded():
    """A loop of one's own with dropout: the folds draw their own, and say so."""
    problem = Problem(lambda: mlp(nn.Dropout(0.3)), "cross_entropy", *examples())
    model = problem.module(torch.float64)
    optimizer = ADAMW(model.parameters())
    recorder = Recorder(None, model, optimizer, problem=problem)
    for index in torch.arange(N).split(8) * 2:
        with recorder.step(index):
            optimizer.zero_grad()
            F.cross_entropy(model(problem.inputs[index]), problem.targets[index]).backward()
            optimizer.step()
    risk = population_risk(recorder.close(), "k_fold", retrain_budget=3)
    assert "each training draws its own" in risk.reason


def test_what_cannot_be_repeated_is_refused_in_one_line(tmp_path):
    problem = Problem(lambda: mlp(nn.BatchNorm1d(8)), "cross_entropy", *examples())
    model = problem.module(torch.float64)
    optimizer = ADAMW(model.parameters())
    recorder = Recorder(None, model, optimizer, problem=problem, augmentation="unseeded")
    for index in torch.arange(N).split(8):
        with recorder.step(index):
            optimizer.zero_grad()
            noisy = problem.inputs[index] + torch.randn(8, 6, dtype=torch.float64)
            F.cross_entropy(model(noisy), problem.targets[index]).backward()
            optimizer.step()
    with pytest.raises(RunError, match=r"augmented by code that was not recorded.*augment=…") as found:
        population_risk(recorder.close(), "k_fold", retrain_budget=3)
    assert "\n" not in str(found.value)


def test_other_problems_are_refused():
    run = recorded("batch norm")

    def other():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    changed = Run(run._storage, problem=Problem(other, "cross_entropy", *examples()))
    with pytest.raises(RunError, match="cannot be repeated"):
        leave_one_out(changed, [0])
