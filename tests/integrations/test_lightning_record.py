"""Recording in the real Lightning: the run is the training that happened, and what cannot be recorded is refused."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from poprisk import PopRiskAdamW, Run, hold_back, population_risk, replay
from poprisk.errors import RunError, UnexplainedGradientWarning
from poprisk.integrations import lightning_record
from poprisk.integrations.lightning_keep import KeepBestCallback
from poprisk.integrations.lightning_record import RecordRun
from poprisk.risk._audit.run_audit import audit
from poprisk.runs._problem import Problem

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
QUIET |= {"enable_checkpointing": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),  # tiny data in memory
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*last training batch.*"),
]


def network(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def points(n=42):
    """Three classes; the labels of the first two are wrong."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % 3
    inputs = 0.3 * torch.randn(n, 4, generator=generator)
    inputs[torch.arange(n), labels] += 2
    labels[:2] = (labels[:2] + 1) % 3
    return inputs, labels


def problem():
    return Problem(network, "cross_entropy", *points(), name="points")


class Module(pl.LightningModule):
    def __init__(self, optimizer=PopRiskAdamW, factor=1.0, parts=network, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make, self.options, self.factor = parts(), optimizer, options, factor
        self.losses = []

    def training_step(self, batch, index):
        loss = self.factor * nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.net.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(**options):
    return DataLoader(TensorDataset(*points()), **{"batch_size": 8, "shuffle": True, **options})


def fit(record, module, data=None, **options):
    torch.manual_seed(5)
    trainer = pl.Trainer(**{"max_epochs": 3, "gradient_clip_val": 0.5, **QUIET, **options})
    if record is not None:
        trainer.callbacks.append(record)
        data = record.watch(loader()) if data is None else data
    trainer.fit(module, loader() if data is None else data)
    return trainer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("lightning") / "run"
    module, record = Module(torch.optim.AdamW, lr=0.1), RecordRun(path, Problem.build(problem))
    fit(record, module)
    return module, record, path


def test_the_training_is_what_it_is_without(recorded):
    module, _, _ = recorded
    alone = Module(torch.optim.AdamW, lr=0.1)
    fit(None, alone)
    assert_close(module.net.state_dict(), alone.net.state_dict(), rtol=0, atol=0)
    assert module.losses == alone.losses


def test_the_run_is_the_training(recorded):
    module, record, path = recorded
    run = Run.load(path)
    assert repr(run) == repr(record.run)
    assert run.manifest["closed"]
    assert run.num_steps == 18  # three epochs of five whole batches and one of two
    assert run.losses.tolist() == module.losses
    for epoch in range(3):
        drawn = torch.cat([run.batch(k) for k in range(6 * epoch, 6 * epoch + 6)])
        assert drawn.sort().values.tolist() == list(range(42))
    assert_close(run.weights(18), torch.cat([p.detach().flatten() for p in module.net.parameters()]), rtol=0, atol=0)
    rates = [run.options(k)[0]["lr"] for k in (0, 10)]
    assert rates == pytest.approx([0.1, 0.05])
    assert run.recorded(0).factor(0)[0] < 1  # clipped


def test_replay_verifies_and_the_audit_is_exact(recorded):
    run = recorded[1].run
    assert replay(run).exact
    table = audit(run, progress=False)
    assert {row["example"] for row in table.worst(2)} == {0, 1}
    assert "loo_loss" in table.columns


def test_accumulated_batches_are_one_step():
    module, record = Module(torch.optim.SGD, lr=0.1), RecordRun(None, problem())
    fit(record, module, record.watch(loader(batch_size=7)), accumulate_grad_batches=4, max_epochs=2)
    run = record.run
    assert run.num_steps == 4  # an epoch of six batches is a step of four and one of two
    assert [len(run.recorded(k).parts(k)) for k in range(4)] == [4, 2, 4, 2]
    assert_close(run.losses[:2].tolist(), [sum(module.losses[:4]) / 4, sum(module.losses[4:6]) / 4])
    assert max(replay(run, tolerate=True).deviations.values()) < 1e-6


def test_a_loss_that_changes_later_is_found_and_the_run_is_kept():
    class Changing(Module):
        def training_step(self, batch, index):
            self.factor = 1.0 if self.trainer.global_step < 5 else 3.0
            return super().training_step(batch, index)

    record = RecordRun(None, problem())
    with pytest.warns(UnexplainedGradientWarning, match=r"at step 8 .*scale of the loss changed by 3"):
        fit(record, Changing(torch.optim.AdamW, lr=0.1))
    assert record.run.num_steps == 18
    assert record.run.unexplained.step == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_any_sampler_and_workers(workers):
    weights = torch.ones(42)
    sampler = torch.utils.data.WeightedRandomSampler(weights, 20)
    module, record = Module(torch.optim.AdamW, lr=0.01), RecordRun(None, problem(), every=4)
    data = loader(shuffle=None, sampler=sampler, num_workers=workers, drop_last=True)
    fit(record, module, record.watch(data), limit_train_batches=2, max_epochs=3)
    assert record.run.num_steps == 6
    assert replay(record.run).exact
    assert data.batch_sampler.sampler is sampler  # the loader is left as it was
    assert type(data.batch_sampler).__name__ == "BatchSampler"


def test_a_network_that_draws_at_random_is_recorded_for_any_audit():
    dropping = lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))  # noqa: E731
    module = Module(torch.optim.AdamW, parts=dropping, lr=0.05)
    record = RecordRun(None, Problem(dropping, "cross_entropy", *points()))
    fit(record, module, max_epochs=8)
    run = record.run
    assert "draws at random" in run.obstacles[0]
    assert run.losses.tolist() == module.losses
    assert {row["example"] for row in audit(run, progress=False).worst(2)} == {0, 1}


def test_without_a_problem_there_are_batches_and_losses(tmp_path):
    module, record = Module(torch.optim.AdamW, lr=0.1), RecordRun(tmp_path / "run", network="net")
    fit(record, module, max_epochs=1)
    run = Run.load(tmp_path / "run")
    assert run.losses.tolist() == module.losses
    assert torch.cat([run.batch(k) for k in range(6)]).sort().values.tolist() == list(range(42))
    with pytest.raises(RunError, match="recorded without a problem"):
        audit(run, progress=False)
    assert replay(Run.load(tmp_path / "run", problem=problem())).exact  # brought later


def test_an_interrupted_training_keeps_whole_steps(tmp_path):
    class Interrupted(Module):
        def training_step(self, batch, index):
            if len(self.losses) == 9:
                raise KeyError("enough")
            return super().training_step(batch, index)

    module, record = Interrupted(lr=0.1), RecordRun(tmp_path / "run", problem())
    with pytest.raises(KeyError, match="enough"):
        fit(record, module)
    run = Run.load(tmp_path / "run", problem=problem())
    assert run.num_steps == 9
    assert not run.manifest["closed"]
    assert replay(run).exact
    module.losses.clear()
    again = RecordRun(None, problem())
    fit(again, Module(lr=0.1), max_epochs=1)  # and nothing is left behind that would stand in the way


class Manual(Module):
    automatic_optimization = False


class Two(Module):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(*points()))


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Module, {"precision": "bf16-mixed"}, 'precision="32-true"'),
        (Module, {"precision": "bf16-true"}, "bf16-true"),
        (Module, {"gradient_clip_algorithm": "value"}, "clipping by value"),
        (Manual, {"gradient_clip_val": None}, "manual optimization"),
        (Two, {"gradient_clip_val": None}, "manual optimization"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_first_step(module, options, message):
    made = module()
    with pytest.raises(RunError, match=message):
        fit(RecordRun(None, problem()), made, **options)
    assert made.losses == []


def test_more_that_is_refused(tmp_path):
    inputs, labels = points()

    def other(inputs, labels, **size):
        return RecordRun(None, Problem(network, "cross_entropy", inputs, labels, arguments=size))

    cases = [
        (RecordRun(None, problem()), loader(), r"not watched.*record.watch\(loader\)"),
        (other(inputs[:40], labels[:40]), None, "40 examples, .* dataset 42"),
        (other(inputs, labels.flip(0)), None, "targets of the batch are not those of the problem"),
        (other(inputs.flip(1), labels), None, "gradient of step 0 is not that"),
        (RecordRun(None, problem(), network="head"), None, r"no part 'head': network must be one of net, net.0"),
        (other(inputs, labels, width=5), None, "no part of Module"),
    ]
    for record, data, message in cases:
        module = Module()
        with pytest.raises(RunError, match=message):
            fit(record, module, data)
        assert len(module.losses) <= 1
    with pytest.raises(RunError, match="Stream does not tell which examples"):
        RecordRun(None).watch(DataLoader(Stream(), batch_size=4))
    with pytest.raises(RunError, match="gradient of step 0 is not that"):
        fit(RecordRun(None, problem()), Module(factor=2.0))
    with pytest.raises(RunError, match="nothing has been recorded yet"):
        RecordRun(None).run
    with pytest.raises(RunError, match="2 processes share each step"):
        lightning_record._check_trainer(SimpleNamespace(world_size=2), Module())


def test_a_training_that_goes_on_is_refused():
    trainer = fit(None, Module(), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    record = RecordRun(None, problem())
    trainer.callbacks.append(record)
    with pytest.raises(RunError, match="continues from step 6"):
        trainer.fit(Module(), record.watch(loader()))


def test_a_collate_function_that_drops_examples_is_refused():
    short = loader(collate_fn=lambda rows: torch.utils.data.default_collate(rows[1:]))
    record = RecordRun(None, problem())
    with pytest.raises(RunError, match="a batch of 7 should consist of the 8 examples"):
        fit(record, Module(), record.watch(short))


@pytest.mark.filterwarnings("ignore::poprisk.errors.ClosedGateWarning")
def test_the_example_runs(capsys):
    script = Path(__file__).parents[2] / "examples/lightning/record_run.py"
    runpy.run_path(str(script))["main"](["--steps", "25"])
    said = capsys.readouterr().out
    assert "Run(25 steps" in said
    assert "wrong labels" in said


@pytest.mark.parametrize("record_first", [True, False])
def test_with_held_back_examples_the_run_has_the_kept_weights(record_first, tmp_path):
    (inputs, labels), held = hold_back(points(90), 0.2)
    record = RecordRun(tmp_path / "run", Problem(network, "cross_entropy", inputs, labels))
    keep = KeepBestCallback(held, nn.functional.cross_entropy, network="net", every=4)
    module = Module()
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=12)
    callbacks = [record, keep] if record_first else [keep, record]
    pl.Trainer(max_steps=12, callbacks=callbacks, **QUIET).fit(module, record.watch(loader))
    run = Run.load(tmp_path / "run", problem=record.problem)
    found = population_risk(run)
    assert (found.method, found.value, found.standard_error) == ("held_back", keep.risk.value, keep.risk.standard_error)
    assert_close(run.kept.weights, dict(module.net.state_dict()), rtol=0, atol=0)
    assert not torch.equal(run.weights(12), torch.cat([p.detach().flatten() for p in module.net.parameters()]))
