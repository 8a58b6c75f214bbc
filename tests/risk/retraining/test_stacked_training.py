"""A stacked ensemble is exactly its members trained one by one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from poprisk.cli._demonstration.networks import MLPShape, StackedMLP, initial_weights, member_losses
from poprisk.cli._demonstration.training import StackedTraining, epoch_batches, learning_rate_groups
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW

SHAPE = MLPShape(inputs=5, width=7, depth=2, outputs=3)
SEEDS, ORDERS, RATES = (11, 12, 13), (21, 22, 23), (1e-3, 1e-2)
EXAMPLES, BATCH, STEPS = 20, 6, 25


def make_data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(len(SEEDS), EXAMPLES, SHAPE.inputs, generator=generator, dtype=torch.float64)
    labels = torch.randint(SHAPE.outputs, (len(SEEDS), EXAMPLES), generator=generator)
    return inputs, labels


def alone(optimizer_class, options, seed_index, lr):
    """One member as an ordinary torch module, with the same weights and batches."""
    inputs, labels = make_data()
    weights = initial_weights(SHAPE, SEEDS[seed_index], torch.float64)
    layers = []
    for i, (fan_in, fan_out) in enumerate(SHAPE.layers):
        linear = nn.Linear(fan_in, fan_out, dtype=torch.float64)
        linear.weight.data, linear.bias.data = weights[2 * i], weights[2 * i + 1].flatten()
        layers += [linear, nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = optimizer_class(model.parameters(), lr=lr, **options)
    batches = epoch_batches(EXAMPLES, BATCH, [ORDERS[seed_index]])
    for _ in range(STEPS):
        index = next(batches)[0]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[seed_index, index]), labels[seed_index, index]).backward()
        optimizer.step()
    return model(inputs[seed_index])


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (AdamW, {}),
        (AdamW, {"fused": True}),
        (PopRiskAdamW, {"gate": Gate(normalize=False)}),
        (PopRiskAdamW, {"gate": Gate(normalize=False), "fused": True}),
    ],
    ids=["AdamW", "AdamW fused", "PopRiskAdamW", "PopRiskAdamW fused"],
)
def test_stack_equals_members_alone(optimizer_class, options):
    inputs, labels = make_data()
    network = StackedMLP(SHAPE, SEEDS, len(RATES), torch.float64)
    optimizer = optimizer_class(learning_rate_groups(network, RATES), **options)
    training = StackedTraining(network, optimizer, inputs, labels, epoch_batches(EXAMPLES, BATCH, ORDERS))
    training.advance(10)
    training.advance(STEPS - 10)
    assert training.step == STEPS
    logits = network(inputs)
    for group, lr in enumerate(RATES):
        for seed in range(len(SEEDS)):
            expected = alone(optimizer_class, options, seed, lr)
            torch.testing.assert_close(logits[group, seed], expected, rtol=1e-9, atol=1e-10)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    torch.testing.assert_close(training.predictions(inputs), logits.argmax(-1))


def test_groups_and_ensembles_start_from_the_same_weights():
    first, second = (StackedMLP(SHAPE, SEEDS, groups) for groups in (2, 3))
    for a, b in zip(first.group_parameters()[1], second.group_parameters()[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    weight = first.group_parameters()[0][0]
    assert weight.shape == (len(SEEDS), SHAPE.width, SHAPE.inputs)
    assert not torch.equal(weight[0], weight[1])
    assert weight.abs().max() <= SHAPE.inputs**-0.5


def test_member_losses_are_cross_entropies():
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    labels = torch.randint(5, (3, 4))
    expected = torch.stack(
        [torch.stack([F.cross_entropy(x, y) for x, y in zip(g, labels, strict=True)]) for g in logits]
    )
    torch.testing.assert_close(member_losses(logits, labels), expected, rtol=1e-12, atol=1e-12)


def test_batches_cover_an_epoch_and_differ_by_seed():
    batches = epoch_batches(10, 3, (1, 2))
    epoch = torch.cat([next(batches) for _ in range(3)], dim=1)
    assert all(len(set(row)) == 9 for row in epoch.tolist())
    assert epoch[0].tolist() != epoch[1].tolist()
    again = epoch_batches(10, 3, (1,))
    torch.testing.assert_close(torch.cat([next(again) for _ in range(3)], dim=1)[0], epoch[0])


def test_wrong_sizes_are_refused_at_the_door():
    with pytest.raises(DataError, match="between 1 and the 10 training examples, got 11"):
        epoch_batches(10, 11, (1,))
    network = StackedMLP(SHAPE, SEEDS, 2)
    with pytest.raises(HyperparameterError, match="each of the 2 groups, got 1"):
        learning_rate_groups(network, [1e-3])
    with pytest.raises(HyperparameterError, match="got 0 and 1"):
        StackedMLP(SHAPE, (), 1)
