"""The INR experiment: photographs, stacked networks against plain ones, spectra, its smoke run and its figures."""

import builtins
import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from poprisk.errors import DataError, HyperparameterError, MissingExtraError
from poprisk_lab.pages.gate_choice import searched_gates
from poprisk_lab.paper.inr import study as inr
from poprisk_lab.paper.inr.figure import draw as draw_inr
from poprisk_lab.paper.inr.numbers import claims as claims_inr
from poprisk_lab.paper.inr.numbers import lines as inr_lines
from poprisk_lab.paper.inr.pixels import unpacked_pixels
from poprisk_lab.paper.inr.task import (
    CLEAN_PSNR,
    HIGH_POWER,
    IMAGES,
    NOISY_PSNR,
    InrTask,
    fourier_features,
    high_frequencies,
    noisy_pixels,
    photograph,
    psnr,
    residual_power,
)

SMALL = InrTask(size=8, frequencies=5, width=6, layers=2, batch=10, steps=4, evaluations=2)
SEEDS = (3, 5, 5)  # a seed twice, and not the first one: a chunk that forgot its place would show


def stacked_start(task, seeds, dtype=torch.float64):
    """Weights of all members; members of one seed differ here, so that mixing would show."""
    starts = [task.initial(seed) for seed in seeds]
    weights = {name: torch.stack([start[name] for start in starts]).to(dtype) for name in starts[0]}
    for i, value in enumerate(weights.values()):
        value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(i), dtype=dtype)
    return {name: value.requires_grad_() for name, value in weights.items()}


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
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_stacked_losses_and_gradients_equal_those_of_single_networks():
    cohort, weights = float64_cohort(SMALL, SEEDS), stacked_start(SMALL, SEEDS)
    pixels = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i))[:10] for i in range(3)])
    losses = cohort.losses(weights, {"pixels": pixels})
    losses.sum().backward()
    for member, seed in enumerate(SEEDS):
        net = plain_network(SMALL, weights, member)
        inputs = fourier_features(SMALL, seed).double()[pixels[member]]
        loss = nn.functional.mse_loss(net(inputs), noisy_pixels(SMALL, seed).double()[pixels[member]])
        torch.testing.assert_close(losses[member], loss)
        loss.backward()
        for i in range(len(SMALL.shapes)):
            got, expected = weights[f"layer{i}.weight"].grad, net[2 * i].weight.grad
            assert got is not None
            torch.testing.assert_close(got[member], expected)


def test_members_do_not_mix_and_one_seed_means_one_data_set():
    cohort, weights = SMALL.cohort(SEEDS, torch.device("cpu")), stacked_start(SMALL, SEEDS, torch.float32)
    cohort.losses(weights, {"pixels": torch.arange(10).expand(3, -1)})[1].backward()
    gradient = weights["layer1.weight"].grad
    assert gradient is not None
    assert gradient[1].abs().max() > 0
    assert gradient[[0, 2]].abs().max() == 0
    same = {name: value[[0, 1, 1]].detach() for name, value in weights.items()}
    for value in cohort.measure(same).values():
        assert value[1] == value[2] != value[0]


def test_measures_equal_those_of_plain_code(monkeypatch):
    monkeypatch.setattr("poprisk_lab.paper.inr.task._MEMBERS_AT_ONCE", 2)  # so that chunks meet
    cohort, weights = float64_cohort(SMALL, SEEDS), stacked_start(SMALL, SEEDS)
    measured = cohort.measure(weights)
    clean = photograph("astronaut", 8).double()
    for member, seed in enumerate(SEEDS):
        fitted = plain_network(SMALL, weights, member)(fourier_features(SMALL, seed).double())
        mse = nn.functional.mse_loss(fitted, clean)
        noisy = nn.functional.mse_loss(fitted, noisy_pixels(SMALL, seed).double())
        torch.testing.assert_close(measured[CLEAN_PSNR][member], 20 * torch.log10(1 / mse.sqrt()))
        torch.testing.assert_close(measured[NOISY_PSNR][member], 20 * torch.log10(1 / noisy.sqrt()))
        torch.testing.assert_close(measured[HIGH_POWER][member], plain_high_power(fitted - clean, 8))


def plain_high_power(residual, size):
    """The sum over frequencies, each by the definition of the Fourier transform."""
    total = torch.zeros((), dtype=torch.float64)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for a in range(-size // 2, size // 2):
        for b in range(-size // 2, size // 2):
            if math.hypot(a / size, b / size) > 0.25:
                angle = 2 * math.pi * (a * rows + b * columns).double() / size
                for channel in residual.reshape(size, size, 3).unbind(-1):
                    real, imaginary = (channel * angle.cos()).mean(), (channel * angle.sin()).mean()
                    total = total + (real**2 + imaginary**2) / 3
    return total


def test_psnr_of_gaussian_noise_is_its_closed_form():
    task = InrTask(size=64, batch=100)
    error = noisy_pixels(task, 0) - photograph("astronaut", 64)
    assert abs(psnr(error) - 20 * math.log10(1 / 0.2)) < 10 / math.log(10) * 5 * math.sqrt(2 / error.numel())


def test_the_spectrum_sums_to_the_mean_square_and_parts_by_the_ring():
    residual = torch.randn(64 * 64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    power = residual_power(residual, 64)
    torch.testing.assert_close(power.sum(), residual.square().mean())
    high = high_frequencies(64)
    assert abs(high.double().mean() - (1 - math.pi / 16)) < 0.01  # a disc of half of Nyquist's radius cut from a square
    waves = {cycles: torch.cos(2 * math.pi * cycles * torch.arange(64) / 64) for cycles in (3, 20)}
    for cycles, wave in waves.items():
        picture = wave.expand(64, 64).reshape(-1, 1).expand(-1, 3)
        share = (residual_power(picture, 64) * high).sum() / picture.square().mean()
        assert share == pytest.approx(float(cycles > 16), abs=1e-5)


@pytest.mark.parametrize("image", IMAGES)
def test_photographs_are_squares_of_the_right_size_and_range(image):
    picture = photograph(image, 32)
    assert picture.shape == (32 * 32, 3)
    assert 0 <= picture.min() < 0.2
    assert 0.6 < picture.max() <= 1
    assert picture.std() > 0.1


def test_noise_and_frequencies_belong_to_the_seed():
    assert torch.equal(noisy_pixels(SMALL, 3), noisy_pixels(SMALL, 3))
    assert not torch.equal(noisy_pixels(SMALL, 3), noisy_pixels(SMALL, 5))
    assert not torch.equal(fourier_features(SMALL, 3), fourier_features(SMALL, 5))
    assert torch.equal(noisy_pixels(replace(SMALL, noise=0.0), 3), photograph("astronaut", 8))
    features = fourier_features(SMALL, 3)
    torch.testing.assert_close(features.square().sum(1), torch.full((64,), 5.0))


def test_the_portrait_holds_the_pictures_and_the_spectrum():
    task = InrTask(size=128, width=4, frequencies=4, layers=1)
    weights = {name: torch.zeros_like(value) for name, value in task.initial(0).items()}
    portrait = task.portrait(weights, 0)
    assert unpacked_pixels(portrait["fitted"]).max() == 0
    clean = torch.tensor(unpacked_pixels(portrait["clean"]))
    torch.testing.assert_close(clean.reshape(-1, 3) / 255, photograph("astronaut", 128), rtol=0, atol=0.51 / 255)
    assert len(portrait["spectrum"]) == len(portrait["spectrum"][0]) == 64
    assert max(range(64), key=lambda i: max(portrait["spectrum"][i])) == 32  # the mean colour, in the centre
    assert all(len(portrait[name]["zlib_base64"]) < 70_000 for name in ("fitted", "noisy", "clean"))


def test_what_cannot_be_is_refused():
    with pytest.raises(DataError, match="astronaut, coffee, chelsea, got 'lena'"):
        InrTask(image="lena")
    with pytest.raises(HyperparameterError, match="number of pixels, got 4096"):
        InrTask(size=32, batch=4096)


def test_without_scikit_image_the_message_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.startswith("skimage"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"poprisk\[data\]"):
        photograph("astronaut", 9)


@pytest.fixture(scope="module")
def saved(smoke_result):
    return smoke_result("inr")


def test_the_smoke_run_has_every_arm_every_image_and_the_control(saved):
    studies = saved["result"]["studies"]
    assert list(studies) == ["inr_astronaut", "inr_coffee", "inr_astronaut_clean"]
    assert set(studies["inr_astronaut"]["arms"]) == set(inr.InrConfig().arms)
    assert [study["task"]["config"]["noise"] for study in studies.values()] == [0.2, 0.2, 0.0]
    for study in studies.values():
        assert study["evaluation_steps"] == [4, 8, 12, 16, 20, 24]
        given = [row["label"] for row in study["rows"] if not row["chosen_for"]]
        assert given == [setting.label for setting in inr.SETTINGS]
    clean = studies["inr_astronaut_clean"]["rows"][1]["curves"]
    assert clean[CLEAN_PSNR] == clean[NOISY_PSNR]


def test_the_figure_and_the_lines_are_drawn_from_the_saved_result(saved):
    figure = draw_inr(saved)
    titles = [axes.get_title(loc="left")[:1] for part in figure.subfigs[:2] for axes in part.axes]
    assert titles[:5] == list("ABCDE")
    gallery = figure.subfigs[2].axes
    assert len(gallery) == 2 * (2 + 4)
    assert [axes.get_title() for axes in gallery[:4]] == ["clean", "noisy", "AdamW,\nlr 1e-3", "AdamW,\ntuned"]
    console = Console(width=200, record=True, file=io.StringIO())
    for line in inr_lines(saved):
        console.print(line)
    assert "Without noise, the last PSNR is" in console.export_text()


def with_values(saved, label, metric, values, spread=1e-4):
    """The saved result with one row's curve replaced in every noisy study, three seeds that differ by a small step."""
    changed = copy.deepcopy(saved)
    for study in changed["result"]["studies"].values():
        if study["task"]["config"]["noise"] > 0:
            for row in study["rows"]:
                row["seeds"] = [0, 1, 2]
                row["curves"] = {name: (curves * 2)[:3] for name, curves in row["curves"].items()}
                if row["label"] == label:
                    row["curves"][metric] = [[v + spread * i for v in values] for i in range(3)]
    return changed


def test_the_verdicts_follow_the_numbers(saved):
    peak = with_values(saved, inr.ADAMW, CLEAN_PSNR, [10.0, 20.0, 18.0, 16.0, 15.0, 14.0])
    beyond = claims_inr(with_values(peak, inr.SHARED, CLEAN_PSNR, [10.0, 12.0, 14.0, 16.0, 18.0, 20.5]))[0]
    assert beyond.verdict.startswith("Held")
    assert "2 of 2 photographs with the paper's rule" in beyond.verdict
    assert "astronaut +0.50" in beyond.paper_conditions
    short = claims_inr(with_values(peak, inr.SHARED, CLEAN_PSNR, [10.0, 12.0, 14.0, 16.0, 18.0, 19.0]))[0]
    assert short.verdict.startswith("Not held")
    assert "astronaut −1.00" in short.paper_conditions


def test_a_mean_beyond_the_best_step_decides_nothing_where_its_interval_does_not(saved):
    """Seeds 0.1, 0.6 and 1.1 dB beyond: on average half a dB, and an interval that holds zero."""
    peak = with_values(saved, inr.ADAMW, CLEAN_PSNR, [10.0, 20.0, 18.0, 16.0, 15.0, 14.0])
    wide = claims_inr(with_values(peak, inr.SHARED, CLEAN_PSNR, [10.0, 12.0, 14.0, 16.0, 18.0, 20.1], spread=0.5))[0]
    assert wide.verdict.startswith("Undecided")
    assert "0 of 2 photographs (2 undecided) with the paper's rule" in wide.verdict


@pytest.mark.parametrize(
    ("kept", "spread", "words"),
    [
        (1.0, 1e-4, "Held at AdamW's lr for a limit of 5×, held for the paper's 8.5×"),
        (1.5, 1e-4, "Held at AdamW's lr for a limit of 5×, not held for the paper's 8.5×"),
        (4.0, 1e-4, "Not held at AdamW's lr for a limit of 5×, not held for the paper's 8.5×"),
        (1.0, 0.4, "Undecided at AdamW's lr for a limit of 5×, undecided for the paper's 8.5×"),
    ],
)
def test_power_is_judged_by_the_interval_of_the_paired_ratio(saved, kept, spread, words):
    noisy = with_values(saved, inr.ADAMW, HIGH_POWER, [10.0] * 6)
    power = claims_inr(with_values(noisy, inr.SHARED, HIGH_POWER, [kept] * 6, spread))[1]
    assert words in power.verdict
    if kept == 4.0:
        assert "2.5× [2.5, 2.5] (astronaut), 2.5× [2.5, 2.5] (coffee)" in power.paper_conditions


def test_a_power_that_is_not_finite_is_no_ratio(saved):
    noisy = with_values(saved, inr.SHARED, HIGH_POWER, [1.0] * 6)
    failed = with_values(noisy, inr.ADAMW, HIGH_POWER, [10.0] * 6)
    for study in failed["result"]["studies"].values():
        row = next(row for row in study["rows"] if row["label"] == inr.ADAMW)
        row["curves"][HIGH_POWER][0] = [None] * 6
    power = claims_inr(failed)[1]
    assert power.verdict.startswith("Undecided")
    assert "(AdamW diverged) (astronaut)" in power.paper_conditions


def test_the_best_of_several_gates_is_said_to_be_that(saved):
    study = saved["result"]["studies"]["inr_astronaut"]
    count = len(searched_gates(study))
    assert count > 1
    for claim in claims_inr(saved):
        for words in (claim.equal_tuning, claim.verdict):
            assert f"best of {count} gates, {count} times the trials" in words
            assert "the gate fixed in advance" in words


@pytest.mark.parametrize("kept", [("adamw",), ()])
def test_the_page_works_without_a_searched_gate(saved, kept):
    changed = copy.deepcopy(saved)
    for study in changed["result"]["studies"].values():
        study["arms"] = {name: arm for name, arm in study["arms"].items() if name in kept}
        study["rows"] = [row for row in study["rows"] if not row["chosen_for"] or row["arm"] in kept]
        study["portraits"] = {
            label: portrait for label, portrait in study["portraits"].items() if kept or label != "AdamW"
        }
    draw_inr(changed)
    assert len(list(inr_lines(changed))) == 7
    for claim in claims_inr(changed):
        assert "no gate searched" in claim.verdict
        assert ("chosen in its favour" in claim.equal_tuning) == (not kept)


def test_a_diverged_run_is_said_and_drawn(saved):
    changed = copy.deepcopy(saved)
    for study in changed["result"]["studies"].values():
        row = next(row for row in study["rows"] if row["label"] == inr.SHARED)
        for curves in row["curves"].values():
            curves[0] = [None] * 6
        row["failures"] = 1
        if study["portraits"]:
            study["portraits"][inr.SHARED]["spectrum"] = [[None] * 16] * 16
    draw_inr(changed).canvas.draw()
    first, second = claims_inr(changed)
    assert first.verdict.startswith("Not held")
    assert "astronaut diverged (1 of 2)," in first.paper_conditions
    assert second.verdict.startswith("Not held")


def test_a_diverged_network_has_a_portrait():
    broken = {name: torch.full_like(value, torch.nan) for name, value in SMALL.initial(0).items()}
    portrait = SMALL.portrait(broken, 0)
    assert unpacked_pixels(portrait["fitted"]).max() == 0
    assert all(math.isnan(value) for line in portrait["spectrum"] for value in line)
