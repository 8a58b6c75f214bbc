"""Stacked networks on wrong labels: each member is the plain network it stands for, on its own seed's data."""

import pytest
import torch
from torch import nn

from poprisk.errors import DataError, HyperparameterError
from poprisk.runs._digits import digits_split
from poprisk_lab.paper.labels import task as label_tasks
from poprisk_lab.paper.labels.task import LabelTask, label_data

CPU = torch.device("cpu")
SMALL = LabelTask(noise=0.3, train_size=50, width=7, depth=2, batch_size=10, steps=5, evaluations=2)
SEEDS = (3, 4, 3)


def encode(x):
    header = bytes([0, 0, 8, x.dim()]) + b"".join(n.to_bytes(4, "big") for n in x.shape)
    return header + bytes(x.flatten().tolist())


@pytest.fixture
def mnist(tmp_path):
    """A folder in MNIST's layout with 40 training and 20 test images."""
    generator = torch.Generator().manual_seed(0)
    for which, count in (("train", 40), ("t10k", 20)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        (tmp_path / f"{which}-images-idx3-ubyte").write_bytes(encode(images))
        (tmp_path / f"{which}-labels-idx1-ubyte").write_bytes(encode(labels))
    label_tasks._load.cache_clear()
    return tmp_path


def stacked(task, seeds, spread=0.1):
    """Weights of all members; members with one seed are moved apart, so that a mix-up shows."""
    generator = torch.Generator().manual_seed(5)
    starts = [task.initial(seed) for seed in seeds]
    return {
        name: torch.stack([s[name] + spread * torch.randn(s[name].shape, generator=generator) for s in starts])
        for name in starts[0]
    }


def plain(task, weights, member):
    """One member as an ordinary network in float64."""
    layers = []
    for i in range(1, task.depth + 2):
        weight, bias = weights[f"layer{i}.weight"][member], weights[f"layer{i}.bias"][member]
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        linear.load_state_dict({"weight": weight.detach().double(), "bias": bias.detach().double()})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def examples(task, seed):
    """What one seed trains and tests on, straight from the data: inputs, given labels, which are wrong, test set."""
    data = label_data(task, [seed])
    train, test = data.train_pool[data.train_rows[0]].double(), data.test_pool[data.test_rows[0]].double()
    return train, data.given[0], data.wrong[0], test, data.test_labels[0]


def check_members(task, seeds=SEEDS):
    generator = torch.Generator().manual_seed(7)
    batch = torch.stack([torch.randperm(task.train_size, generator=generator)[: task.batch_size] for _ in seeds])
    weights = {k: w.requires_grad_() for k, w in stacked(task, seeds).items()}
    cohort = task.cohort(seeds, CPU)
    losses = cohort.losses(weights, {"train": batch})
    losses.sum().backward()
    with torch.no_grad():
        measured = cohort.measure(weights)
    for member, seed in enumerate(seeds):
        network = plain(task, weights, member)
        train, given, wrong, test, labels = examples(task, seed)
        loss = nn.functional.cross_entropy(network(train[batch[member]]), given[batch[member]])
        loss.backward()
        torch.testing.assert_close(losses[member].double(), loss, rtol=1e-5, atol=1e-6)
        got, wanted = weights["layer1.weight"].grad[member].double(), network[0].weight.grad
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
        fitted, predicted = network(train).argmax(1) == given, network(test)
        facts = {
            "test accuracy": (predicted.argmax(1) == labels).double().mean(),
            "test loss": nn.functional.cross_entropy(predicted, labels),
            "train accuracy": fitted.double().mean(),
            "memorized": fitted[wrong].double().mean(),
        }
        assert set(measured) == {metric.name for metric in task.metrics}
        for name, values in measured.items():
            torch.testing.assert_close(values[member].double(), facts[name].detach(), rtol=1e-5, atol=1e-6)


def test_each_member_is_the_plain_network_on_digits():
    check_members(SMALL)


def test_each_member_is_the_plain_network_on_clean_labels():
    check_members(LabelTask(noise=0.0, train_size=50, width=7, depth=1, batch_size=10))


def test_each_member_is_the_plain_network_on_idx_files(mnist):
    check_members(LabelTask("mnist", str(mnist), 0.5, train_size=30, width=5, batch_size=6))


def test_pieces_of_a_measurement_add_up(monkeypatch):
    weights, cohort = stacked(SMALL, SEEDS), SMALL.cohort(SEEDS, CPU)
    whole = cohort.measure(weights)
    monkeypatch.setattr(label_tasks, "_MEASURE_NUMBERS", 3 * (64 + 21) * 11)
    for name, values in cohort.measure(weights).items():
        torch.testing.assert_close(values, whole[name])


def test_members_do_not_mix():
    weights = {k: w.requires_grad_() for k, w in stacked(SMALL, SEEDS).items()}
    batch = torch.arange(10).expand(3, 10)
    SMALL.cohort(SEEDS, CPU).losses(weights, {"train": batch})[1].backward()
    for weight in weights.values():
        assert weight.grad[1].abs().sum() > 0
        assert weight.grad[[0, 2]].abs().sum() == 0


def test_one_seed_is_one_start_and_one_data_set():
    weights = stacked(SMALL, SEEDS, spread=0.0)
    batch = torch.arange(10).expand(3, 10)
    losses = SMALL.cohort(SEEDS, CPU).losses(weights, {"train": batch})
    assert losses[0] == losses[2] != losses[1]


def test_wrong_labels_are_as_many_as_asked_for_and_the_others_are_true():
    data = label_data(SMALL, [8, 9])
    assert data.wrong.sum(1).tolist() == [15, 15]
    true = digits_split(label_tasks.stream(9, "split"), 50).train_labels
    assert torch.equal(data.given[1] != true, data.wrong[1])


def test_inputs_are_standardised_by_two_numbers_of_the_training_pixels():
    data = label_data(SMALL, [8])
    assert data.train_pool.mean().abs() < 1e-5
    assert (data.train_pool.std() - 1).abs() < 1e-5
    raw = digits_split(label_tasks.stream(8, "split"), 50)
    deviation, mean = torch.std_mean(raw.train_inputs)
    torch.testing.assert_close(data.test_pool * deviation + mean, raw.test_inputs, rtol=1e-4, atol=1e-5)


def test_every_seed_draws_its_own_of_the_shared_images(mnist):
    task = LabelTask("fashion", str(mnist), 0.2, train_size=30, width=5, batch_size=6)
    data = label_data(task, [0, 1])
    assert data.train_pool.shape == (40, 784)
    assert data.test_pool.shape == (20, 784)
    assert all(len(set(rows)) == 30 for rows in data.train_rows.tolist())
    assert data.train_rows[0].tolist() != data.train_rows[1].tolist()
    assert torch.equal(data.test_labels[0], data.test_labels[1])


def test_a_member_without_a_finite_loss_has_no_accuracy():
    weights = stacked(SMALL, SEEDS)
    weights["layer2.bias"][1] = torch.nan
    for values in SMALL.cohort(SEEDS, CPU).measure(weights).values():
        assert values.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"data": "cats"}, DataError, "one of digits, mnist, fashion, got 'cats'"),
        ({"data": "mnist"}, DataError, "MNIST needs a folder, got none: put the four official idx files"),
        ({"train_size": 5}, DataError, "between 10 and 1697, got 5"),
        ({"noise": 0.7}, HyperparameterError, "between 0 and 0.6"),
        ({"noise": 1e-4}, HyperparameterError, "replace a label of 50"),
        ({"batch_size": 51}, HyperparameterError, "between 1 and 50, got 51"),
        ({"depth": 0}, HyperparameterError, "at least 1"),
    ],
)
def test_values_out_of_range_are_refused(wrong, error, words):
    values = {**vars(SMALL), **wrong}
    with pytest.raises(error, match=words):
        LabelTask(**values)


def test_files_that_are_missing_are_named_with_their_source(tmp_path, mnist):
    LabelTask("mnist", str(mnist), train_size=30, batch_size=6).require_data()
    (mnist / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte or .*gz: put the four official idx files"):
        LabelTask("mnist", str(mnist), train_size=30, batch_size=6).require_data()


def test_too_few_images_are_refused(mnist):
    with pytest.raises(DataError, match=r"at most the 40 images in .*, got 1000"):
        label_data(LabelTask("mnist", str(mnist)), [0])
