"""Label Wave: where it stops on known counts, and counts that a plain loop gives."""

import torch

from poprisk_lab.paper.labels.task import LabelTask, label_data
from poprisk_lab.paper.teacher.task import TeacherTask
from poprisk_lab.recipes.label_wave import chosen_epoch, outcome, predicted, training_inputs, watch

CPU = torch.device("cpu")


def test_it_stops_before_the_first_rise_of_the_moving_average():
    assert chosen_epoch([0, 9, 7, 3, 5, 8, 1], window=1) == 3
    assert chosen_epoch([0, 9, 3, 5, 3, 3, 9, 9], window=3) == 5  # means 9, 6, 17/3, 11/3, 11/3, 5
    assert chosen_epoch([0, 9, 8, 7]) == 3  # never rises: the last epoch


def test_counts_are_those_of_a_network_trained_epoch_by_epoch():
    task = LabelTask(noise=0.4, train_size=100, width=16, batch_size=20, steps=15)
    found = watch(task, [0, 1], CPU)
    assert found["evaluation_steps"] == [5, 10, 15]
    longer, shorter = (watch(LabelTask(**{**vars(task), "steps": steps}), [1], CPU) for steps in (15, 10))
    assert longer["changed"][0][:2] == shorter["changed"][0] == found["changed"][1][:2]
    assert found["changed"][0][0] == 0
    assert 0 < found["changed"][0][1] <= 100
    assert set(outcome(found)) == {0, 1}


def test_predictions_are_the_networks():
    task = TeacherTask(train_size=30, test_size=5, width=8)
    weights = {name: value.unsqueeze(0) for name, value in task.initial(3).items()}
    inputs = training_inputs(task, [3])
    layers = [torch.nn.Linear(40, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 10)]
    for i, layer in enumerate(layers, 1):
        layer.load_state_dict({kind: weights[f"layer{i}.{kind}"][0] for kind in ("weight", "bias")})
    network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    assert torch.equal(predicted(weights, inputs, 2)[0], network(task.data(3).inputs).argmax(1))
    digits = LabelTask(train_size=100)
    assert training_inputs(digits, [0, 1]).shape == (2, 100, 64)
    assert torch.equal(training_inputs(digits, [1])[0], label_data(digits, [1]).train_pool)
