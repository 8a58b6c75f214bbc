"""The PINN experiment: its equation, its stacked networks against plain ones, its smoke run and its figure."""

import copy
import io
import math
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from poprisk.errors import HyperparameterError
from poprisk_lab.pages.gate_choice import searched_gates
from poprisk_lab.paper.pinn import study as pinn
from poprisk_lab.paper.pinn.figure import draw as draw_pinn
from poprisk_lab.paper.pinn.numbers import claims as claims_pinn
from poprisk_lab.paper.pinn.numbers import lines as pinn_lines
from poprisk_lab.paper.pinn.task import (
    ERROR,
    PERIOD,
    SENSOR_FIT,
    PinnTask,
    exact_solution,
    grid_points,
    network_and_residual,
    sensor_points,
    sensor_readings,
)

SMALL = PinnTask(
    width=7,
    layers=3,
    interior=30,
    interior_batch=9,
    sensors=16,
    sensor_batch=5,
    boundary=12,
    boundary_batch=4,
    residual_weight=0.7,
    boundary_weight=1.3,
    initial_weight=2.0,
    grid=11,
    steps=4,
    evaluations=2,
)
SEEDS = (3, 5, 5)  # a seed twice, and not the first one: a chunk that forgot its place would show


def stacked_start(task, seeds, dtype=torch.float64):
    """Weights of all members; members of one seed differ here, so that mixing would show."""
    starts = [task.initial(seed) for seed in seeds]
    weights = {name: torch.stack([start[name] for start in starts]).to(dtype) for name in starts[0]}
    for i, value in enumerate(weights.values()):
        value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(i), dtype=dtype)
    return {name: value.requires_grad_() for name, value in weights.items()}


def a_batch(task, members):
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.stack([torch.randperm(points, generator=generator)[:batch] for _ in range(members)])
        for name, (points, batch) in task.streams.items()
    }


def float64_cohort(task, seeds):
    cohort = task.cohort(seeds, torch.device("cpu"))
    for name, value in vars(cohort).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(cohort, name, value.double())
    return cohort


def plain_network(task, weights, member):
    layers = []
    for i, (fan_out, fan_in) in enumerate(task.shapes):
        layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
        layer.load_state_dict({kind: weights[f"layer{i}.{kind}"][member].detach() for kind in ("weight", "bias")})
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def plain_residual(net, points, speed):
    """The equation's left side, by two entries of autograd's gradient."""
    points = points.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
    return slopes[:, 1] + speed * slopes[:, 0]


def test_the_solution_satisfies_the_equation_its_start_and_its_boundary():
    points = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (slopes,) = torch.autograd.grad(exact_solution(points, 5.0).sum(), points)
    assert (slopes[:, 1] + 5.0 * slopes[:, 0]).abs().max() < 1e-14
    x = sensor_points(40)
    torch.testing.assert_close(exact_solution(x, 5.0), x[:, 0].sin())
    ends = [exact_solution(torch.tensor([[end, 0.3]], dtype=torch.float64), 5.0) for end in (0.0, PERIOD)]
    torch.testing.assert_close(ends[0], ends[1])


def test_the_network_has_the_papers_size():
    task = PinnTask()
    assert 1.8e6 <= task.parameters <= 1.9e6
    assert sum(value.numel() for value in task.initial(0).values()) == task.parameters
    assert task.steps // task.evaluations == 100
    assert len(grid_points(task.grid)) == 101**2


def test_the_forward_tangent_is_autograds_derivative():
    weights = stacked_start(SMALL, SEEDS)
    points = torch.rand(3, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    along = torch.tensor([SMALL.speed, 1.0], dtype=torch.float64).expand(3, 4, 2)
    values, residual = network_and_residual(SMALL, weights, points, along)
    for member in range(3):
        net = plain_network(SMALL, weights, member)
        torch.testing.assert_close(values[member], net(points[member]).squeeze(-1))
        expected = plain_residual(net, points[member, :4], SMALL.speed)
        torch.testing.assert_close(residual[member], expected, rtol=1e-10, atol=1e-12)


def test_stacked_losses_and_gradients_equal_those_of_single_networks():
    cohort, weights, batch = float64_cohort(SMALL, SEEDS), stacked_start(SMALL, SEEDS), a_batch(SMALL, len(SEEDS))
    losses = cohort.losses(weights, batch)
    losses.sum().backward()
    for member, seed in enumerate(SEEDS):
        at = sorted(set(SEEDS)).index(seed)
        net = plain_network(SMALL, weights, member)
        inner = cohort.interior[at][batch["interior"][member]]
        times = cohort.times[at][batch["boundary"][member]]
        ends = [net(torch.stack([torch.full_like(times, end), times], -1)).squeeze(-1) for end in (0.0, PERIOD)]
        x = batch["initial"][member].double() * PERIOD / SMALL.sensors
        misfit = net(torch.stack([x, 0 * x], -1)).squeeze(-1) - cohort.readings[at][batch["initial"][member]]
        loss = (
            0.7 * plain_residual(net, inner, 5.0).square().mean()
            + 1.3 * (ends[0] - ends[1]).square().mean()
            + 2.0 * misfit.square().mean()
        )
        torch.testing.assert_close(losses[member], loss, rtol=1e-6, atol=1e-7)  # the float32 value of 2π sits between
        loss.backward()
        for i in range(len(SMALL.shapes)):
            got, expected = weights[f"layer{i}.weight"].grad, net[2 * i].weight.grad
            assert got is not None
            torch.testing.assert_close(got[member], expected, rtol=1e-5, atol=1e-6)


def test_members_do_not_mix_and_one_seed_means_one_start_and_one_data_set():
    cohort, batch = SMALL.cohort(SEEDS, torch.device("cpu")), a_batch(SMALL, len(SEEDS))
    weights = stacked_start(SMALL, SEEDS, torch.float32)
    cohort.losses(weights, batch)[1].backward()
    gradient = weights["layer1.weight"].grad
    assert gradient is not None
    assert gradient[1].abs().max() > 0
    assert gradient[[0, 2]].abs().max() == 0
    same = {name: value[[0, 1, 1]].detach() for name, value in weights.items()}
    for value in cohort.measure(same).values():
        assert value[1] == value[2] != value[0]
    assert all(torch.equal(a, b) for a, b in zip(SMALL.initial(3).values(), SMALL.initial(3).values(), strict=True))


def test_the_error_of_the_zero_function_is_one_and_of_a_network_is_that_of_plain_code(monkeypatch):
    monkeypatch.setattr("poprisk_lab.paper.pinn.task._MEMBERS_AT_ONCE", 2)  # so that chunks meet
    cohort, weights = float64_cohort(SMALL, SEEDS), stacked_start(SMALL, SEEDS)
    measured = cohort.measure(weights)
    points = grid_points(SMALL.grid).double()
    solution = torch.sin(points[:, 0] - 5 * points[:, 1])
    for member, seed in enumerate(SEEDS):
        net = plain_network(SMALL, weights, member)
        error = (net(points).squeeze(-1) - solution).norm() / solution.norm()
        torch.testing.assert_close(measured[ERROR][member], error, rtol=1e-6, atol=1e-7)
        at_sensors = net(sensor_points(SMALL.sensors).double()).squeeze(-1)
        misfit = (at_sensors - cohort.readings[sorted(set(SEEDS)).index(seed)]).square().mean()
        torch.testing.assert_close(measured[SENSOR_FIT][member], misfit, rtol=1e-6, atol=1e-7)
    silent = {name: torch.zeros_like(value) for name, value in weights.items()}
    torch.testing.assert_close(cohort.measure(silent)[ERROR], torch.ones(3, dtype=torch.float64))


def test_the_noise_has_its_level_and_belongs_to_the_seed():
    task = replace(PinnTask(), sensors=4000, sensor_batch=10)
    noise = sensor_readings(task, 0) - sensor_points(4000)[:, 0].sin()
    assert abs(noise.std() - 1) < 5 / math.sqrt(2 * 4000)
    assert not torch.equal(sensor_readings(task, 0), sensor_readings(task, 1))
    clean = sensor_readings(replace(task, noise=0.0), 0)
    torch.testing.assert_close(clean, sensor_points(4000)[:, 0].sin())


def test_the_portrait_is_the_error_field():
    weights = {name: torch.zeros_like(value) for name, value in SMALL.initial(0).items()}
    field = torch.tensor(SMALL.portrait(weights, 0)["error_field"])
    expected = exact_solution(grid_points(SMALL.grid), 5.0).abs().reshape(11, 11)
    torch.testing.assert_close(field, expected, rtol=0, atol=6e-5)


@pytest.mark.parametrize("change", [{"noise": -1.0}, {"layers": 0}, {"sensor_batch": 257}, {"grid": 1}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(HyperparameterError, match="got"):
        replace(PinnTask(), **change)


@pytest.fixture(scope="module")
def saved(smoke_of, smoke_result):
    assert re.match(r"pinn: (\d+) of \1 ", smoke_of("pinn").err.splitlines()[-1])
    return smoke_result("pinn")


def test_the_smoke_run_has_every_row_of_the_papers_table_and_the_control(saved):
    studies = saved["result"]["studies"]
    assert list(studies) == ["pinn_noisy", "pinn_clean"]
    noisy, clean = studies.values()
    labels = [row["label"] for row in noisy["rows"]]
    assert labels[:6] == [pinn.FULL, pinn.NO_WARMUP, *(pinn.adamw_label(lr) for lr in pinn.ADAMW_RATES)]
    assert set(noisy["arms"]) == set(pinn.PinnConfig().arms)
    assert all(len(values) == 8 for row in noisy["rows"] for values in row["curves"][ERROR])
    assert clean["task"]["config"]["noise"] == 0
    assert "PopRiskAdamW, defaults" in [row["label"] for row in clean["rows"]]


def test_the_full_size_is_the_papers():
    config = pinn.PinnConfig()
    task = config.task
    assert (task.noise, task.speed, task.steps, task.grid, config.report_seeds) == (1.0, 5.0, 8000, 101, (0, 1, 2))
    noisy, clean = pinn.studies(config)
    assert (noisy.task, clean.task) == (task, replace(task, noise=0.0))
    warm = {setting.label: setting.hyper for setting in noisy.settings}[pinn.FULL]
    assert warm == {"lr": 1e-4, "gate_warmup": 500}


def test_warm_up_without_the_gate_changes_the_run(saved):
    rows = {row["label"]: row for row in saved["result"]["studies"]["pinn_noisy"]["rows"]}
    first = [rows[label]["curves"][ERROR][0][0] for label in (pinn.FULL, pinn.NO_WARMUP, pinn.adamw_label(1e-4))]
    assert first[0] == first[2] != first[1]  # the first measurement comes at the end of the warm-up


def test_the_figure_and_the_lines_are_drawn_from_the_saved_result(saved):
    figure = draw_pinn(saved)
    titles = [axes.get_title(loc="left")[:1] for part in figure.subfigs for axes in part.axes]
    assert titles[:5] == list("ABCDE")
    console = Console(width=200, record=True, file=io.StringIO())
    for line in pinn_lines(saved):
        console.print(line)
    text = console.export_text()
    assert "│ Pop. risk training (full)  " in text  # the first column, a space from the border
    assert "0.249" in text
    assert "Without noise, the last ℓ2 is" in text


def with_errors(saved, errors, seeds=3):
    """The saved result with the error curves of some rows replaced, all seeds alike; two would decide nothing."""
    changed = copy.deepcopy(saved)
    study = changed["result"]["studies"]["pinn_noisy"]
    for row in study["rows"]:
        default = [0.9] * len(study["evaluation_steps"])
        row["seeds"] = list(range(seeds))
        row["curves"][ERROR] = [errors.get(row["label"], default)] * seeds
    return changed


@pytest.fixture(scope="module")
def falls(saved):
    """Curves that fall below the target at the first, the second, … evaluation."""
    looks = len(saved["result"]["studies"]["pinn_noisy"]["evaluation_steps"])
    return [[0.9] * place + [0.3] * (looks - place) for place in range(looks)]


def test_the_verdict_follows_the_numbers(saved, falls):
    quick = with_errors(saved, {pinn.FULL: falls[1], pinn.NO_WARMUP: falls[5], pinn.adamw_label(1e-3): falls[7]})
    speed, best, warmup = claims_pinn(quick)
    assert "takes 4.0× [3.5, 8.0] fewer iterations than AdamW (lr 1e-3)" in speed.verdict
    assert speed.verdict.startswith(
        "Held with AdamW's settings (the claim holds if the whole interval is at 2× fewer iterations"
    )
    assert "3 of 3" in speed.paper_conditions
    assert "not distinguishable" in best.verdict
    assert warmup.verdict.startswith("Held")
    assert "3.0× [2.5, 6.0] fewer" in warmup.verdict
    slow = with_errors(saved, {pinn.FULL: falls[3], pinn.adamw_label(5e-5): falls[1]})
    assert claims_pinn(slow)[0].verdict.startswith("Not held")
    assert "2.0× [1.5, 4.0] the iterations of AdamW (lr 5e-5)" in claims_pinn(slow)[0].verdict
    missed = with_errors(saved, {pinn.adamw_label(5e-5): falls[1]})
    assert claims_pinn(missed)[0].verdict.startswith("Not held")
    never = claims_pinn(with_errors(saved, {}))
    assert "neither" in never[0].verdict
    assert never[2].verdict.startswith("Undecided")


def test_what_an_evaluation_or_two_seeds_leave_open_is_undecided(saved, falls):
    """Twice as quick by the evaluations seen, which may be three times or one and a half."""
    rows = {pinn.FULL: falls[1], pinn.NO_WARMUP: falls[2], pinn.adamw_label(1e-3): falls[3]}
    speed, _, warmup = claims_pinn(with_errors(saved, rows))
    assert speed.verdict.startswith("Undecided")
    assert "2.0× [1.5, 4.0] fewer" in speed.verdict
    assert warmup.verdict.startswith("Undecided"), "an evaluation later may be a moment later"
    level = claims_pinn(with_errors(saved, {pinn.FULL: falls[2], pinn.NO_WARMUP: falls[2]}))[2]
    assert level.verdict.startswith("Undecided")
    far = {pinn.FULL: falls[0], pinn.NO_WARMUP: falls[6], pinn.adamw_label(1e-3): falls[7]}
    assert all(claim.verdict.startswith("Undecided") for claim in claims_pinn(with_errors(saved, far, 2))[::2])
    assert claims_pinn(with_errors(saved, far))[2].verdict.startswith("Held")


def test_a_gate_picked_on_the_report_seeds_is_exploratory(saved, falls):
    rows = {"SNR gate, strength 1, lr 1e-3": falls[0], pinn.adamw_label(1e-4): falls[7]}
    speed = claims_pinn(with_errors(saved, rows))[0]
    assert speed.verdict.startswith("Not held")
    assert "picked on these seeds and therefore exploratory: SNR gate, strength 1, lr 1e-3 takes 8.0×" in speed.verdict
    assert "Held by another gate" not in speed.verdict


def test_the_best_of_several_gates_is_said_to_be_that(saved, falls):
    changed = with_errors(saved, {})
    study = changed["result"]["studies"]["pinn_noisy"]
    for name, place in (("adamw", 7), ("soft", 3), ("snr", 1)):
        rows = [row for row in study["rows"] if row["arm"] == name and row["chosen_for"]]
        study["rows"] = [row for row in study["rows"] if not any(row is other for other in rows[1:])]
        rows[0]["chosen_for"] = ["last", "best", "target"]
        rows[0]["curves"][ERROR] = [falls[place]] * 3
        study["arms"][name]["chosen"] = {"last": 0, "best": 0, "target": 0}
        study["arms"][name]["trials"][0]["curve"] = [falls[place]]
    speed, best, _ = claims_pinn(changed)
    count = len(searched_gates(study))
    for words in (speed.verdict, speed.equal_tuning, best.verdict, best.equal_tuning):
        assert f"(best of {count} gates, {count} times the trials" in words
    assert "held for SNR gate" in speed.verdict
    assert "fixed in advance" in speed.verdict


@pytest.mark.parametrize("kept", [("adamw",), ()])
def test_the_page_works_without_a_searched_gate(saved, kept):
    changed = copy.deepcopy(saved)
    study = changed["result"]["studies"]["pinn_noisy"]
    study["arms"] = {name: arm for name, arm in study["arms"].items() if name in kept}
    study["rows"] = [row for row in study["rows"] if not row["chosen_for"] or row["arm"] in kept]
    draw_pinn(changed)
    assert len(list(pinn_lines(changed))) == 7
    assert "no gate" in claims_pinn(changed)[0].equal_tuning


def test_a_diverged_run_is_said_and_drawn(saved):
    changed = copy.deepcopy(saved)
    study = changed["result"]["studies"]["pinn_noisy"]
    row = study["rows"][0]
    row["curves"][ERROR][1] = [0.9] + [None] * 7
    row["failures"] = 1
    study["portraits"][pinn.FULL] = {"error_field": [[None] * 21] * 21}
    draw_pinn(changed).canvas.draw()
    assert "because a run diverged" in claims_pinn(with_errors(changed, {pinn.FULL: [None] * 8}))[1].verdict
