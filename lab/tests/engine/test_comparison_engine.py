"""The engine of fair comparison: members are the optimizers they claim to be, and a study chooses fairly."""

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import nn

from poprisk import cluster
from poprisk._core.seeds import stream
from poprisk.cli._demonstration.training import epoch_batches
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, current_gate
from poprisk_lab.engine.arms import ALL_ARMS, ARMS
from poprisk_lab.engine.parameter_layout import ParameterLayout
from poprisk_lab.engine.run import run_comparison
from poprisk_lab.engine.stack import Member, Stack
from poprisk_lab.engine.study import Setting, Study, choose
from poprisk_lab.engine.task import TaskMetric

CPU = torch.device("cpu")
EVERY = ("defaults", *ALL_ARMS)  # of this engine: other experiments may add arms of their own to the table
KNOBS = {"lr": 0.02, "weight_decay": 0.1, "beta2": 0.98, "strength": 0.7, "rho": 0.95}


@dataclass(frozen=True)
class Regression:
    """y = tanh-network teacher plus noise, for a two-layer student: small, and with gradients that are not trivial."""

    noise: float = 0.5
    examples: int = 48
    batch_size: int = 8
    steps: int = 25
    evaluations: int = 5
    broken_seed: int | None = None

    @property
    def name(self):
        return f"regression_{self.noise:g}"

    @property
    def description(self):
        return "a small regression"

    @property
    def metrics(self):
        return (TaskMetric("clean error", higher_is_better=False, target=0.9), TaskMetric("train error", False))

    @property
    def streams(self):
        return {"train": (self.examples, self.batch_size)}

    def initial(self, seed):
        generator = torch.Generator().manual_seed(stream(seed, "weights"))
        shapes = {"hidden.weight": (5, 3), "hidden.bias": (5,), "out.weight": (1, 5)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def data(self, seed):
        generator = torch.Generator().manual_seed(stream(seed, "data"))
        x = torch.randn(self.examples, 3, generator=generator)
        clean = x.prod(1) if seed != self.broken_seed else torch.full((self.examples,), float("nan"))
        return x, clean, clean + self.noise * torch.randn(self.examples, generator=generator)

    def cohort(self, seeds, device):
        return RegressionCohort(self, seeds, device)


class RegressionCohort:
    def __init__(self, task, seeds, device):
        unique = sorted(set(seeds))
        self.index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        parts = zip(*map(task.data, unique), strict=True)
        self.x, self.clean, self.y = (torch.stack(part).to(device) for part in parts)

    def outputs(self, weights, x):
        hidden = torch.tanh(torch.baddbmm(weights["hidden.bias"].unsqueeze(1), x, weights["hidden.weight"].mT))
        return torch.bmm(hidden, weights["out.weight"].mT).squeeze(-1)

    def losses(self, weights, batch):
        where = (self.index.unsqueeze(1), batch["train"])
        return (self.outputs(weights, self.x[where]) - self.y[where]).square().mean(1)

    def measure(self, weights):
        found = self.outputs(weights, self.x[self.index])
        return {
            "clean error": (found - self.clean[self.index]).square().mean(1),
            "train error": (found - self.y[self.index]).square().mean(1),
        }


@dataclass(frozen=True)
class Config:
    note: str = "for the stored result"


def member(arm, seed=0, **hyper):
    return Member(ARMS[arm], ARMS[arm].hyper(hyper), seed)


def trained(task, *members):
    curves = Stack(task, members, CPU).train()
    return curves, [curves.layout.member(row) for row in curves.weights]


def trained_alone(task, seed, make_optimizer, schedule=None):
    """The same training with modules and a torch optimizer, one network at a time."""
    hidden, out = nn.Linear(3, 5), nn.Linear(5, 1, bias=False)
    network = nn.Sequential(hidden, nn.Tanh(), out)
    start = task.initial(seed)
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), start.values(), strict=True):
            parameter.copy_(value)
    optimizer = make_optimizer(network.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    x, _, y = task.data(seed)
    batches = epoch_batches(task.examples, task.batch_size, [stream(seed, "batches:train")])
    for _ in range(task.steps):
        chosen = next(batches)[0]
        optimizer.zero_grad()
        (network(x[chosen]).squeeze(-1) - y[chosen]).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return dict(zip(start, network.parameters(), strict=True))


def assert_equal_weights(found, expected, tolerance=2e-5):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), atol=tolerance, rtol=tolerance)


def test_adamw_members_are_torchs_adamw():
    task = Regression()
    _, (first, second) = trained(task, member("adamw", 0, **KNOBS), member("adamw", 3, **(KNOBS | {"lr": 0.003})))
    for seed, lr, found in ((0, 0.02, first), (3, 0.003, second)):
        expected = trained_alone(
            task, seed, lambda p, lr=lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
        )
        assert_equal_weights(found, expected)


def test_a_cosine_is_torchs_cosine():
    task = Regression()
    _, (found,) = trained(task, member("adamw_cosine", 0, **KNOBS))
    expected = trained_alone(
        task,
        0,
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.9, 0.98), weight_decay=0.1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps),
    )
    assert_equal_weights(found, expected)


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        ("soft", {"kind": "soft", "alpha": 1.0}),
        ("hard", {"kind": "hard", "alpha": 1.0}),
        ("snr", {"kind": "snr"}),
        ("soft_calibrated", {"kind": "soft", "alpha": "calibrated"}),
        ("hard_calibrated", {"kind": "hard", "alpha": "calibrated"}),
        ("tensor_gate", {"kind": "snr", "granularity": "tensor"}),
    ],
)
def test_gated_members_are_the_optimizer(arm, options):
    task = Regression()
    _, (found, other) = trained(task, member(arm, 0, **KNOBS), member(arm, 2, **(KNOBS | {"strength": 3.0})))
    for seed, strength, weights in ((0, 0.7, found), (2, 3.0, other)):
        expected = trained_alone(
            task,
            seed,
            lambda p, strength=strength: PopRiskAdamW.paper(
                p, lr=0.02, betas=(0.9, 0.98), weight_decay=0.1, gate=Gate.paper(rho=0.95, strength=strength, **options)
            ),
        )
        assert_equal_weights(weights, expected)


def test_members_of_one_stack_may_differ_in_threshold_and_warm_up():
    task = Regression()
    rows = [member("soft", 0, **KNOBS, alpha=alpha, gate_warmup=wait) for alpha, wait in ((1.0, 0), (0.1, 0), (1.0, 9))]
    _, together = trained(task, *rows)
    for row, found in zip(rows, together, strict=True):
        expected = trained_alone(
            task,
            0,
            lambda p, row=row: PopRiskAdamW.paper(
                p,
                lr=0.02,
                betas=(0.9, 0.98),
                weight_decay=0.1,
                gate=Gate.paper(
                    rho=0.95, strength=0.7, alpha=row.hyper["alpha"], warmup_steps=int(row.hyper["gate_warmup"])
                ),
            ),
        )
        assert_equal_weights(found, expected)


def test_the_defaults_are_the_literal_gate_of_the_stored_results():
    task = Regression()
    _, (found,) = trained(task, member("defaults", 0))
    literal = Gate("snr", strength=100.0, rho=0.99, normalize=False)
    alone = trained_alone(task, 0, lambda p: PopRiskAdamW(p, lr=0.06, weight_decay=5e-3, gate=literal))
    assert_equal_weights(found, alone)


def test_a_relative_gate_is_taken_relative_to_its_mean_over_each_tensor():
    task = Regression(steps=1, evaluations=1)
    literal = Stack(task, [member("snr", 0, strength=1.0, lr=10.0, weight_decay=0.0)], CPU)
    relative = Stack(task, [member("relative", 0, strength=1.0, lr=10.0, weight_decay=0.0)], CPU)
    for _ in range(4):  # on one trajectory: the weights, and with them the gradients, are made equal after each step
        before = literal.weights.detach().clone()
        literal._advance()
        relative._advance()
        moved = (literal.weights.detach() - before)[0].split(literal.layout.segments)
        scaled = (relative.weights.detach() - before)[0].split(literal.layout.segments)
        state = literal._blocks[0][1]
        with torch.no_grad():
            relative.weights.copy_(literal.weights)
    gates = current_gate(
        PopulationState(*(state.state[name] for name in ("m", "v", "s")), literal.t, literal.t, state.state["gain"]),
        Hyper(gate="snr", strength=1.0, rho=0.99),
    )[0].split(literal.layout.segments)
    for gate, plain, found in zip(gates, moved, scaled, strict=True):
        if len(gate):
            expected = plain / gate * (1 + (gate / gate.mean()).clamp(max=1)) / 2
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    shown = relative._blocks[0][1].mean_gate(relative.t, relative.layout).item()
    opened = [(1 + (gate / gate.mean()).clamp(max=1)) / 2 for gate in gates if len(gate)]
    mean = sum(x.sum().item() for x in opened) / literal.layout.size
    assert shown == pytest.approx(mean, rel=1e-5)


def test_every_member_is_what_it_is_alone():
    task = Regression()
    crowd = [member(arm, seed) for arm in EVERY for seed in (0, 1)]
    _, together = trained(task, *crowd)
    for i, one in enumerate(crowd):
        if one.arm.control is None:
            _, (alone,) = trained(task, one)
            assert_equal_weights(together[i], alone, 1e-6)


def test_controls_copy_what_they_say():
    task = Regression(steps=12)
    lr = ARMS["defaults"].hyper({})["lr"]
    rows = [member("defaults", seed) for seed in (0, 1)]
    rows += [member(arm, 1, lr=lr, weight_decay=0.0) for arm in ("gate_schedule", "random_mask", "matched_norm")]
    stack = Stack(task, rows, CPU)
    before = stack.weights.detach().clone()
    for _ in range(12):
        before.copy_(stack.weights.detach())
        stack._advance()
    source = stack._blocks[0][1]
    gate, norm = source.gate[1].mean(), source.step[1].norm()
    moved = (stack.weights.detach() - before)[2:]
    assert 0 < gate < 1
    torch.testing.assert_close(moved[2].norm(), norm)  # the same length
    schedule, plain = moved[0].abs(), stack._blocks[1][1].state
    c1, c2 = 1 - 0.9**12, 1 - 0.999**12
    adam = (plain["m"][0] / c1).abs() / ((plain["v"][0] / c2).sqrt() + 1e-8)
    torch.testing.assert_close(schedule, lr * gate * adam, rtol=1e-3, atol=1e-7)  # AdamW at lr · mean gate
    assert set((moved[1] != 0).tolist()) <= {True, False}
    assert (moved[1] == 0).any()  # masked somewhere at such a low density


def test_a_random_mask_has_the_gates_density():
    @dataclass(frozen=True)
    class Wide(Regression):
        def initial(self, seed):
            start = super().initial(seed)
            return start | {"unused": torch.zeros(20_000)}

        def cohort(self, seeds, device):
            return WideCohort(self, seeds, device)

    class WideCohort(RegressionCohort):
        def losses(self, weights, batch):
            pull = torch.linspace(-1, 1, 20_000)
            return super().losses(weights, batch) + (weights["unused"] * pull).sum(1)

    stack = Stack(Wide(), [member("defaults", 0), member("random_mask", 0, weight_decay=0.0)], CPU)
    for _ in range(5):
        before = stack.weights.detach().clone()
        stack._advance()
    gate = stack._blocks[0][1].gate.sum().item() / stack.layout.size
    moved = (stack.weights.detach() - before)[1] != 0
    assert abs(moved.double().mean().item() - gate) < 0.02


def test_the_mean_gate_is_that_of_the_last_step():
    task = Regression(evaluations=1)
    followers = [member("defaults", 0), member("tensor_gate", 0), member("gate_schedule", 0)]
    stack = Stack(task, followers, CPU)
    curves = stack.train()
    torch.testing.assert_close(curves.gate[0, 0].float(), stack._blocks[0][1].gate.mean())
    assert 0 < curves.gate[1, 0] < 1
    assert curves.gate[2].isnan().all()


def test_a_broken_member_leaves_the_others_alone():
    task = Regression(broken_seed=7)
    rows = [member("adamw", 0, **KNOBS), member("adamw", 7, **KNOBS)]
    curves, (found, _) = trained(task, *rows)
    _, (alone,) = trained(task, rows[0])
    assert_equal_weights(found, alone, 1e-7)
    assert curves.metrics["clean error"][1].isnan().all()


def test_stacks_that_cannot_be_are_refused():
    with pytest.raises(HyperparameterError, match="at least one member"):
        Stack(Regression(), [], CPU)
    with pytest.raises(HyperparameterError, match="grouped by arm"):
        Stack(Regression(), [member("adamw"), member("soft"), member("adamw", 1)], CPU)
    with pytest.raises(HyperparameterError, match="no such member for seeds"):
        Stack(Regression(), [member("defaults", 0), member("random_mask", 1)], CPU)
    with pytest.raises(HyperparameterError, match="come first"):
        Stack(Regression(), [member("random_mask", 1)], CPU)
    with pytest.raises(HyperparameterError, match="unknown hyper-parameters"):
        member("adamw", learning_rate=1.0)


def test_layouts_keep_every_number():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "c": torch.arange(2.0)}
    layout = ParameterLayout.of(tensors)
    row = layout.row(tensors)
    assert layout.size == len(row) == 9  # nothing is large, so there is no gap
    large = ParameterLayout.of({"a": torch.zeros(3), "b": torch.ones(40, 27), "c": torch.zeros(5)})
    assert large.size == 1088
    assert len(large.row({"a": torch.ones(3), "b": torch.ones(40, 27), "c": torch.ones(5)})) % 4 == 0
    assert large.views(torch.zeros(2, 1092))["b"].storage_offset() % 4 == 0
    for name, value in layout.member(row).items():
        assert torch.equal(value, tensors[name])
    with pytest.raises(DataError, match="the same tensors"):
        layout.row({"a": torch.zeros(2)})


def test_choices_follow_the_question():
    curves = [[[0.5, 0.9], [0.6, 0.9]], [[0.95, 0.2], [0.9, 0.2]], [[None, None], [0.99, 0.99]]]
    assert choose(TaskMetric("accuracy", True, 0.9), curves, [10, 20]) == {"last": 0, "best": 1, "target": 1}
    assert choose(TaskMetric("accuracy", True), curves, [10, 20])["target"] is None
    assert choose(TaskMetric("loss", False, 0.01), [[[0.5]], [[None]]], [10]) == {"last": 0, "best": 0, "target": None}


def study(**changes):
    options = {"trials": 2, "tuning_seeds": (100,), "report_seeds": (0, 1)} | changes
    return Study(Regression(steps=10, evaluations=2), **options)


def test_a_study_reports_every_arm_on_fresh_paired_seeds(tmp_path):
    told = []
    given = Setting("AdamW at 1e-2", "adamw", {"lr": 1e-2})
    result = run_comparison(
        "regression", Config(), [study(arms=ALL_ARMS, settings=(given,))], lambda *x: told.append(x), device=CPU
    )
    found = result.studies["regression_0.5"]
    assert set(found["arms"]) == set(ALL_ARMS)
    assert all(len(arm["trials"]) == 2 for arm in found["arms"].values())
    reported = {row["arm"] for row in found["rows"]}
    assert reported == {*ALL_ARMS, "defaults"}
    for row in found["rows"]:
        assert row["seeds"] == [0, 1]
        assert {len(c) for curves in row["curves"].values() for c in curves} == {2}
    by_label = {row["label"]: row for row in found["rows"]}
    assert by_label["AdamW at 1e-2"]["hyper"]["lr"] == 1e-2
    assert by_label["AdamW at 1e-2"]["chosen_for"] == []
    assert told[-1][2] == ""
    assert all(a[0] <= b[0] <= b[1] for a, b in pairwise(told))
    saved = json.loads(result.save(tmp_path / "r.json").read_text())
    assert saved["result"]["studies"]["regression_0.5"]["rows"][0]["label"]
    assert saved["environment"]["torch"]


def test_a_chosen_trial_is_run_again_as_it_was():
    """Were the stored hyper-parameters not those trained with, a report on the tuning seed would differ."""
    first = run_comparison("r", Config(), [study(arms=("soft", "adamw"))], device=CPU).studies["regression_0.5"]
    chosen = first["arms"]["soft"]["trials"][first["arms"]["soft"]["chosen"]["last"]]
    again = study(settings=(Setting("again", "soft", chosen["hyper"]),), report_seeds=(100,), tuning_seeds=())
    second = run_comparison("r", Config(), [again], device=CPU).studies["regression_0.5"]
    row = next(row for row in second["rows"] if row["label"] == "again")
    assert row["curves"]["clean error"] == chosen["curve"]


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path):
    class Interrupted(Exception):
        pass

    def stop(done, total, words):
        if "report" in words:
            raise Interrupted

    wanted = [study(arms=("adamw", "soft"))]
    with pytest.raises(Interrupted):
        run_comparison("r", Config(), wanted, stop, tmp_path / "parts", CPU)
    kept = sorted((tmp_path / "parts").iterdir())
    assert len(kept) == 1  # the tuning
    stamp = kept[0].read_bytes()
    whole = run_comparison("r", Config(), wanted, None, tmp_path / "parts", CPU)
    assert kept[0].read_bytes() == stamp
    fresh = run_comparison("r", Config(), wanted, device=CPU)
    assert _timeless(whole) == _timeless(fresh)
    kept[0].write_text("{ not JSON")  # a damaged part is made again
    assert _timeless(run_comparison("r", Config(), wanted, None, tmp_path / "parts", CPU)) == _timeless(fresh)


def test_twins_are_trained_once_and_pictured_if_one_of_them_is():
    @dataclass(frozen=True)
    class Pictured(Regression):
        def portrait(self, weights, seed):
            return {"seed": seed, "norm": round(float(weights["out.weight"].norm()), 4)}

    usual = ARMS["defaults"].hyper({})
    twin = Setting("twin", ARMS["defaults"].rule, {k: usual[k] for k in ("lr", "weight_decay", "strength")})
    for settings in ((twin,), (Setting("PopRiskAdamW, defaults", "defaults"), twin)):
        wanted = Study(
            Pictured(steps=4, evaluations=1),
            settings=settings,
            report_seeds=(3,),
            tuning_seeds=(),
            portraits=("PopRiskAdamW, defaults",),
        )
        told = []
        found = run_comparison("r", Config(), [wanted], lambda *x, told=told: told.append(x[2]), device=CPU)
        stored = found.studies["regression_0.5"]
        assert told[0].endswith("report, 1 members")
        assert stored["portraits"]["PopRiskAdamW, defaults"]["seed"] == 3
        curves = [row["curves"] for row in stored["rows"]]
        assert len(curves) == 2
        assert curves[0] == curves[1]


def test_small_stacks_give_what_one_large_stack_gives():
    one = run_comparison("r", Config(), [study(arms=("adamw", "gate_schedule", "soft"))], device=CPU)
    many = run_comparison(
        "r", Config(), [study(arms=("adamw", "gate_schedule", "soft"), members_at_once=3)], device=CPU
    )
    for a, b in zip(*(x.studies["regression_0.5"]["rows"] for x in (one, many)), strict=True):
        assert a["label"] == b["label"]
        assert a["curves"]["clean error"] == [pytest.approx(curve, rel=1e-4) for curve in b["curves"]["clean error"]]


def test_stacks_are_tasks_of_a_cluster(tmp_path):
    """The bits of any number of workers, and progress for each measurement; what is stored is not trained again."""
    wanted, found = [study(arms=("adamw", "gate_schedule", "soft"), members_at_once=3)], []
    for place in ("in-process", "threads", "processes", "in-process"):
        told = []
        with cluster(place, workers=2):
            parts = tmp_path / ("processes" if len(found) == 3 else place)
            found.append(run_comparison("r", Config(), wanted, lambda *x, told=told: told.append(x), parts, CPU))
        assert len(told) == 1 if len(found) == 4 else len(told) > len(list(parts.iterdir()))
        assert all(a[0] <= b[0] <= b[1] for a, b in pairwise(told))
        assert _timeless(found[-1]) == _timeless(found[0])


def test_unfair_studies_are_refused():
    with pytest.raises(HyperparameterError, match="choose fresh ones"):
        study(arms=("adamw",), tuning_seeds=(0,), report_seeds=(0, 1))
    with pytest.raises(HyperparameterError, match="there is no arm 'adam'"):
        study(arms=("adam",))
    with pytest.raises(HyperparameterError, match="labels of their own"):
        study(settings=(Setting("a", "adamw"), Setting("a", "soft")))
    with pytest.raises(HyperparameterError, match="a different task name"):
        run_comparison("r", Config(), [study(), study()])


def test_every_searched_range_is_equally_wide():
    widths = {arm.searched["lr"].high / arm.searched["lr"].low for arm in (ARMS[name] for name in ALL_ARMS)}
    assert max(widths) == pytest.approx(min(widths))
    assert ARMS["adamw"].searched["lr"].low == 3e-6
    narrowed = Study(Regression(), ("adamw", "soft"), lr_range=(1e-5, 1e-3))
    assert narrowed.ranges(ARMS["soft"])["lr"].high == pytest.approx(1e-2)


def test_gaps_in_a_row_change_nothing(monkeypatch):
    crowd = [member(arm, seed) for arm in EVERY for seed in (0, 1) if ARMS[arm].control != "random_mask"]
    plain, weights = trained(Regression(), *crowd)
    monkeypatch.setattr("poprisk_lab.engine.parameter_layout._LARGE", 1)
    gapped, shifted = trained(Regression(), *crowd)
    assert gapped.weights.shape[1] == plain.weights.shape[1] + 7
    for i, one in enumerate(crowd):
        if one.arm.name != "cautious":  # its count is over the row: three zeros more never agree in sign
            assert_equal_weights(shifted[i], weights[i], 1e-6)
    torch.testing.assert_close(gapped.gate, plain.gate, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.timeout(400)  # every arm is compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_a_captured_step_is_the_step():
    """On a GPU the step is compiled and recorded: every arm ends where it ends on the CPU."""
    task = Regression(steps=20)
    rising = {arm: {} if arm == "defaults" else {"lr_warmup": 3.0} for arm in EVERY}
    crowd = [member(arm, seed, **rising[arm]) for arm in EVERY for seed in (0, 1)]
    on_cpu = Stack(task, crowd, CPU).train()
    on_gpu = Stack(task, crowd, torch.device("cuda")).train()
    steady = [i for i, one in enumerate(crowd) if one.arm.control != "random_mask"]
    torch.testing.assert_close(on_gpu.weights[steady].cpu(), on_cpu.weights[steady], atol=2e-4, rtol=2e-4)
    expected, found = on_cpu.metrics["clean error"][steady], on_gpu.metrics["clean error"][steady]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    other = Stack(Regression(steps=5), crowd[:4], torch.device("cuda")).train()  # another shape, the same kernels
    torch.testing.assert_close(
        other.weights.cpu(), Stack(Regression(steps=5), crowd[:4], CPU).train().weights, atol=1e-4, rtol=1e-4
    )


def _timeless(result):
    return {name: {k: v for k, v in one.items() if k != "seconds"} for name, one in result.studies.items()}
