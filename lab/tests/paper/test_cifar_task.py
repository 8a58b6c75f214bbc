"""Stacked convolutional networks: convolutions, losses and measures equal torch's own network, member by member."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from poprisk._core.store.envelope import load_result
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.paper.cifar import study as cifar
from poprisk_lab.paper.cifar import task as cifar_task
from poprisk_lab.paper.cifar.stacked_convolution import CONVOLUTIONS, stacked_conv3x3
from poprisk_lab.paper.cifar.task import CifarTask, channel_moments, cifar_data
from poprisk_lab.paper.labels.figure import draw as draw_labels
from poprisk_lab.paper.labels.numbers import claims as claims_labels

CPU = torch.device("cpu")
SMALL = CifarTask(None, "worse", width=2, batch_size=6, epochs=1, evaluations=2, train_size=160)
SEEDS = (3, 4, 3)


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
def test_every_members_convolution_and_its_gradients_are_torchs(convolution):
    x = torch.randn(3, 2, 5, 4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 6, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 5, 4, 6, dtype=torch.float64)
    made = stacked_conv3x3(x, w, convolution)
    wanted = torch.stack(
        [functional.conv2d(x[m].permute(0, 3, 1, 2), w[m], padding=1).permute(0, 2, 3, 1) for m in range(3)]
    )
    torch.testing.assert_close(made, wanted)
    got, right = (torch.autograd.grad((y * weight).sum(), (x, w)) for y in (made, wanted))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_the_ninefold_product_agree_with_differences():
    x = torch.randn(2, 1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(stacked_conv3x3, (x, w))


def test_the_ninefold_copy_is_not_kept():
    kept = []
    x, w = torch.randn(2, 3, 8, 8, 4), torch.randn(2, 5, 4, 3, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        stacked_conv3x3(x, w)
    assert sorted(kept) == sorted([x.numel(), w.numel()])


class Plain(nn.Module):
    """The network as its description says, pooling last, from torch's own modules."""

    def __init__(self, task, weights, member):
        super().__init__()
        self.convolutions = nn.ModuleList()
        for i, (n, m) in enumerate(zip(task.channels[:-1], task.channels[1:], strict=True), 1):
            convolution = nn.Conv2d(n, m, 3, padding=1, bias=False)
            norm = nn.GroupNorm(1, m)
            convolution.weight.data = weights[f"conv{i}.weight"][member].detach().clone()
            norm.bias.data = weights[f"conv{i}.bias"][member].detach().clone()
            self.convolutions.append(nn.Sequential(convolution, norm, nn.ReLU(), *[nn.MaxPool2d(2)] * (i % 2)))
        self.linear = nn.Linear(task.features, 10)
        self.linear.weight.data = weights["linear.weight"][member].detach().clone()
        self.linear.bias.data = weights["linear.bias"][member].detach().clone()
        self.double()

    def forward(self, x):
        for convolution in self.convolutions:
            x = convolution(x)
        return self.linear(x.permute(0, 2, 3, 1).flatten(1))


def stacked(task, spread=0.1):
    generator = torch.Generator().manual_seed(5)
    starts = [task.initial(seed) for seed in SEEDS]
    return {
        name: torch.stack([s[name] + spread * torch.randn(s[name].shape, generator=generator) for s in starts])
        for name in starts[0]
    }


def normalized(task, images):
    mean, deviation = channel_moments(cifar_data(task).train_images)
    return (images.double() / 255 - mean.double().view(3, 1, 1)) / deviation.double().view(3, 1, 1)


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.parametrize("labels", ["worse", "clean"])
def test_each_member_is_the_plain_network(convolution, labels):
    task = CifarTask(None, labels, 2, batch_size=6, epochs=1, convolution=convolution, train_size=150)
    data, weights = cifar_data(task), {k: w.requires_grad_() for k, w in stacked(task).items()}
    batch = torch.randint(300, (3, 6), generator=torch.Generator().manual_seed(1))  # half of them mirrored
    cohort = task.cohort(SEEDS, CPU)
    losses = cohort.losses(weights, {"train": batch})
    losses.sum().backward()
    with torch.no_grad():
        measured = cohort.measure(weights)
    both = torch.cat([data.train_images, data.train_images.flip(-1)])
    for member in range(3):
        network = Plain(task, weights, member)
        loss = functional.cross_entropy(network(normalized(task, both[batch[member]])), data.given[batch[member] % 150])
        loss.backward()
        torch.testing.assert_close(losses[member].double(), loss, rtol=1e-5, atol=1e-6)
        got, right = weights["conv2.weight"].grad[member].double(), network.convolutions[1][0].weight.grad
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
        predicted = network(normalized(task, data.test_images))
        fitted = network(normalized(task, data.train_images)).argmax(1) == data.given
        facts = {
            "test accuracy": (predicted.argmax(1) == data.test_labels).double().mean(),
            "test loss": functional.cross_entropy(predicted, data.test_labels),
            "train accuracy": fitted.double().mean(),
            "memorized": fitted[data.wrong].double().mean(),
        }
        assert set(measured) == {metric.name for metric in task.metrics}
        for name, values in measured.items():
            torch.testing.assert_close(values[member].double(), facts[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("convolution", CONVOLUTIONS)
def test_bfloat16_as_on_a_gpu_gives_nearly_the_same(convolution):
    task = CifarTask(None, "worse", width=4, batch_size=6, epochs=1, convolution=convolution, train_size=160)
    batch, gradients, losses = {"train": torch.arange(30).view(3, 10)}, [], []
    for dtype in (torch.float32, torch.bfloat16):
        weights = {k: w.requires_grad_() for k, w in stacked(task).items()}
        cohort = task.cohort(SEEDS, CPU)
        cohort._dtype = dtype
        losses.append(cohort.losses(weights, batch))
        losses[-1].sum().backward()
        gradients.append(torch.cat([w.grad.flatten() for w in weights.values()]))
    assert losses[1].dtype == gradients[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.0)
    assert functional.cosine_similarity(gradients[0], gradients[1], 0) > 0.98


def test_members_do_not_mix():
    weights = {k: w.requires_grad_() for k, w in stacked(SMALL).items()}
    SMALL.cohort(SEEDS, CPU).losses(weights, {"train": torch.arange(6).expand(3, 6)})[1].backward()
    for weight in weights.values():
        assert weight.grad[1].abs().sum() > 0
        assert weight.grad[[0, 2]].abs().sum() == 0


def test_one_seed_is_one_start():
    one, other, again = (SMALL.initial(seed) for seed in SEEDS)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    assert {name: tuple(w.shape) for name, w in one.items()}["conv5.weight"] == (8, 8, 3, 3)


def test_pieces_of_a_measurement_add_up(monkeypatch):
    weights, cohort = stacked(SMALL), SMALL.cohort(SEEDS, CPU)
    whole = cohort.measure(weights)
    monkeypatch.setattr(cifar_task, "_MEASURE_NUMBERS", 3 * 16 * 9 * 4 * 7)
    for name, values in cohort.measure(weights).items():
        torch.testing.assert_close(values, whole[name])


def test_a_member_without_a_finite_loss_has_no_accuracy():
    weights = stacked(SMALL)
    weights["conv3.bias"][1] = torch.nan
    for values in SMALL.cohort(SEEDS, CPU).measure(weights).values():
        assert values.isnan().tolist() == [False, True, False]


def test_files_are_used_with_the_labels_people_gave(tmp_path):
    images = np.random.default_rng(0).integers(256, size=(24, 32, 32, 3), dtype=np.uint8)
    true = np.arange(20) % 10
    keys = ("clean_label", "aggre_label", "random_label1", "random_label2", "random_label3", "worse_label")
    human = {key: true.copy() for key in keys}
    human["worse_label"][:5] = 9 - true[:5]
    np.savez(
        tmp_path / "cifar10.npz", train_images=images[:20], train_labels=true, test_images=images[20:],
        test_labels=true[:4],
    )  # fmt: skip
    task = CifarTask(str(tmp_path), "worse", 2, batch_size=4, train_size=16)
    with pytest.raises(DataError, match="has no CIFAR-10N labels"):
        task.require_data()
    np.savez(tmp_path / "cifar10n_labels.npz", **human)
    data = cifar_data(task)
    assert data.wrong.tolist() == [True] * 5 + [False] * 11
    assert torch.equal(data.test_images, torch.from_numpy(images[20:]).permute(0, 3, 1, 2))
    with pytest.raises(DataError, match="train_size must be at most 20, the number of training images, got 50000"):
        CifarTask(str(tmp_path)).require_data()
    with pytest.raises(DataError, match="has no CIFAR-10: put the unpacked"):
        CifarTask(str(tmp_path / "nowhere")).require_data()
    small = {"train_images": images[:20, :8, :8], "test_images": images[20:, :8, :8]}
    np.savez(tmp_path / "cifar10.npz", **small, train_labels=true, test_labels=true[:4])
    cifar_task._load.cache_clear()
    with pytest.raises(DataError, match="images of 32 x 32, got a side of 8"):
        task.require_data()


def test_moments_are_those_of_the_pixels():
    images = cifar_data(SMALL).train_images
    deviation, mean = torch.std_mean(images.double() / 255, (0, 2, 3), correction=0)
    for made, wanted in zip(channel_moments(images), (mean, deviation), strict=True):
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"labels": "best"}, DataError, "labels must be one of clean, aggre"),
        ({"convolution": "fft"}, HyperparameterError, "one of im2col, grouped, got 'fft'"),
        ({"batch_size": 161}, HyperparameterError, "between 1 and 160, got 161"),
        ({"width": 0}, HyperparameterError, "at least 1, got 0"),
    ],
)
def test_values_out_of_range_are_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        CifarTask(**{**vars(SMALL), **wrong})


def test_an_unknown_way_to_convolve_is_refused():
    with pytest.raises(HyperparameterError, match="one of im2col, grouped"):
        stacked_conv3x3(torch.zeros(1, 1, 3, 3, 1), torch.zeros(1, 1, 1, 3, 3), "fft")


def test_the_smoke_study_is_told_from_the_real_one(tmp_path):
    result = cifar.run(replace(cifar.SMOKE, arms=("adamw", "gate_schedule")))
    saved = load_result(result.save(tmp_path / "cifar.json"), cifar.KIND)
    assert set(saved["result"]["studies"]) == {"cifar10-clean", "cifar10-worse"}
    for study in saved["result"]["studies"].values():
        assert study["task"]["description"].startswith("synthetic images, not CIFAR-10")
        assert study["evaluation_steps"] == [5, 10, 15, 20]
        assert all(row["failures"] == 0 for row in study["rows"])
    claims = claims_labels(saved)
    assert [claim.claim.split(":")[0] for claim in claims] == ["synthetic images, clean", "synthetic images, 40% wrong"]
    titles = [axes.get_title("left") for axes in draw_labels(saved).axes]
    assert titles == ["Synthetic images: last step", "Synthetic images: learning curves, 40% wrong"]


def test_the_full_size_asks_for_files_first(tmp_path):
    task = cifar.CifarConfig().task("worse")
    assert (task.folder, task.steps, task.streams) == ("data/cifar10", 30 * 156, {"train": (40_000, 128)})
    with pytest.raises(DataError, match="cifar10 has no CIFAR-10: put the unpacked"):
        cifar.studies(cifar.CifarConfig(folder=str(tmp_path)))
    with pytest.raises(DataError, match="labels must be of clean"):
        cifar.CifarConfig(labels=("best",))
    with pytest.raises(HyperparameterError, match="got an empty one"):
        cifar.CifarConfig(arms=())


def test_an_image_of_full_size_fits_the_linear_layer():
    task = CifarTask("data/cifar10", width=2)
    weights = {name: weight.unsqueeze(0) for name, weight in task.initial(0).items()}
    cohort = SMALL.cohort([0], CPU)
    cohort._task = task
    images = torch.randint(256, (1, 2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = ((images[0] / 255 - cohort._mean) / cohort._deviation).double().permute(0, 3, 1, 2)
    torch.testing.assert_close(
        cohort._logits(weights, images)[0].double(), Plain(task, weights, 0)(pixels), rtol=1e-4, atol=1e-5
    )
