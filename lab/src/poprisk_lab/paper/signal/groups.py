r"""Do signal directions find wrong labels? A check on handwritten digits whose settings were fixed before it was run.

Fixed beforehand: the graph metric with γ = 10, r = n directions (of 10 n), and the score
:math:`\|[(I - \Pi_r)\, g(0)]_i\|`, what the r leading directions leave of an example's output gradient at the start.
Beside it stand the literal reading, in which the directions alone and no gradient decide (the share of an example that
lies in the lowest quarter of the directions), the loss at the end of the run, and a baseline that needs no run at all:
the share of an example's nearest neighbours with another label.
"""

import time
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk.operators import Window
from poprisk.runs import Problem, digits_split, replace_labels, train
from poprisk.runs._digits import NUM_CLASSES, NUM_PIXELS
from poprisk.theory import SignalDirections, example_groups, signal_directions
from poprisk.theory.graph import graph_metric, neighbour_graph
from poprisk_lab.paper.mnist_influence.metrics import mislabel_auc

REGISTERED, LITERAL, LITERAL_GRADIENT, LOSS, NEIGHBOURS = (
    "gradient outside n directions",
    "energy in the lowest quarter",
    "gradient in the lowest quarter",
    "final loss",
    "neighbours that disagree",
)
SCORES = (REGISTERED, LITERAL, LITERAL_GRADIENT, LOSS, NEIGHBOURS)


@dataclass(frozen=True)
class DigitsConfig:
    """The check on digits; γ, r = examples and the score are what was fixed beforehand."""

    seeds: int = 5
    examples: int = 100
    noise: float = 0.2
    gamma: float = 10.0
    neighbours: int = 10
    width: int = 24
    lr: float = 0.02
    steps: int = 30

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.width < 1 or self.steps < 1:
            raise HyperparameterError("the digits need at least one seed, hidden unit and step")
        if round(self.noise * self.examples) < 2:
            raise HyperparameterError(f"noise must make at least 2 labels wrong, got {self.noise}")


@dataclass(frozen=True)
class DigitsRun:
    """One seed: the area under the ROC curve of each score."""

    seed: int
    train_losses: list[float]
    """At the start and at the end."""
    rank: int
    """Directions that dissipated at all."""
    auc: dict[str, float]
    processor_seconds: float


def measure_digits(config: DigitsConfig, seed: int) -> DigitsRun:
    """Train on digits with wrong labels, form the signal directions of the run, and score every example."""
    began = time.process_time()
    split = digits_split(stream(seed, "signal digits") % 2**31, config.examples)
    generator = torch.Generator().manual_seed(stream(seed, "signal labels"))
    spoiled = replace_labels(split.train_labels, config.noise, NUM_CLASSES, generator)
    inputs = split.train_inputs.double()
    problem = Problem(
        digit_network,
        "cross_entropy",
        inputs,
        spoiled.labels,
        name="digits with wrong labels",
        arguments={"width": config.width},
        seed=stream(seed, "signal digit weights") % 2**31,
    )
    rule = partial(torch.optim.Adam, lr=config.lr)
    recorded = train(problem, rule, config.steps, seed=seed, dtype=torch.float64, progress=False)
    ops = Window.of_run(recorded).dense_operators()
    metric = graph_metric(inputs, config.gamma, neighbours=config.neighbours, outputs=NUM_CLASSES)
    directions = signal_directions(ops.factor, metric)
    final = problem.model(torch.float64).per_example_losses(
        recorded.weights(recorded.num_steps), inputs, spoiled.labels
    )
    scores = {
        **_direction_scores(directions, config.examples, ops.output_gradient),
        LOSS: final,
        NEIGHBOURS: disagreeing_neighbours(inputs, spoiled.labels, config.neighbours),
    }
    return DigitsRun(
        seed=seed,
        train_losses=list(ops.losses),
        rank=directions.rank,
        auc={name: float(mislabel_auc(scores[name], spoiled.wrong).value) for name in SCORES},
        processor_seconds=round(time.process_time() - began, 2),
    )


def digit_network(width: int) -> nn.Sequential:
    """One hidden layer of tanh and ten outputs."""
    return nn.Sequential(nn.Linear(NUM_PIXELS, width), nn.Tanh(), nn.Linear(width, NUM_CLASSES))


def disagreeing_neighbours(points: Float[Tensor, "n features"], labels: Tensor, neighbours: int) -> Float[Tensor, "n"]:
    """The share of each example's neighbours in the graph whose label differs from its own.

    >>> disagreeing_neighbours(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), 1).tolist()
    [0.0, 0.5, 1.0]
    """
    linked = torch.from_numpy(neighbour_graph(points, neighbours).toarray())
    differs = (labels[:, None] != labels).double()
    return (linked * differs).sum(dim=1) / linked.sum(dim=1)


def _direction_scores(directions: SignalDirections, examples: int, gradient: Tensor) -> dict[str, Tensor]:
    known = len(directions.values)
    upper = min(directions.metric.size - directions.metric.size // 4, known)
    leading = example_groups(directions, min(examples, known), NUM_CLASSES, gradient=gradient)
    most = example_groups(directions, upper, NUM_CLASSES, gradient=gradient)
    assert leading.tail_norm is not None
    assert most.tail_norm is not None
    return {REGISTERED: leading.tail_norm, LITERAL: 1 - most.captured, LITERAL_GRADIENT: most.tail_norm}
