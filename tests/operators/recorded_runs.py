"""Recorded runs in which the kernel moves by more than its own size, and their windows, made once per test session."""

from functools import cache, partial

import torch
from networks import build, draw
from torch.nn import functional as F

import oracles.run_operators as oracle
from poprisk.operators._window import Window
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

STEPS = 10
NETWORKS = ("mlp", "smooth cnn", "transformer")
LOSSES = ("squared", "cross_entropy")
OUTPUTS = {"mlp": 3, "smooth cnn": 3, "transformer": 5}
RULES = ("momentum", "nesterov", "adam", "adamw", "poprisk")
# Plain gradients differ in size from network to network: rates at which the kernel drifts by 1 and more, and no run
# leaves the region in which it descends.
SGD_RATES = {
    ("mlp", "squared"): 0.2,
    ("mlp", "cross_entropy"): 0.2,
    ("smooth cnn", "squared"): 0.05,
    ("smooth cnn", "cross_entropy"): 0.4,
    ("transformer", "squared"): 0.02,
    ("transformer", "cross_entropy"): 0.1,
}


def optimizer(rule, kind="mlp", loss="squared"):
    """What makes the optimizer."""
    lr = SGD_RATES[kind, loss]
    return {
        "momentum": partial(torch.optim.SGD, lr=lr, momentum=0.8, weight_decay=0.02),
        "nesterov": partial(torch.optim.SGD, lr=lr, momentum=0.8, nesterov=True),
        "adam": partial(torch.optim.Adam, lr=0.05),
        "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
        "poprisk": partial(
            PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated"), lr=0.2, weight_decay=0.05
        ),
    }[rule]


def make_network(kind):
    """The network; a transformer starts near zero, where its kernel has far to go."""
    module = build(kind)
    if kind == "transformer":
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.mul_(1.0 if "norm" in name else 0.2)
    return module


def labels_of(kind, inputs):
    """Something to learn: the token after the last one, or the largest of some random projections."""
    if kind == "transformer":
        return (inputs[:, -1] + 1) % OUTPUTS[kind]
    generator = torch.Generator().manual_seed(5)
    directions = torch.randn(inputs[0].numel(), OUTPUTS[kind], generator=generator, dtype=inputs.dtype)
    return (inputs.flatten(1) @ directions).argmax(1)


def problem_of(kind, loss, inputs, test_inputs):
    """Targets and labels for any inputs, as a problem."""

    def answers(x):
        labels = labels_of(kind, x)
        size = 4.0 if kind == "transformer" else 2.0
        return size * F.one_hot(labels, OUTPUTS[kind]).double() if loss == "squared" else labels

    test = (test_inputs, answers(test_inputs))
    return Problem(make_network, loss, inputs, answers(inputs), arguments={"kind": kind}, test=test)


@cache
def trained(kind, rule, loss, *, steps=STEPS, n=8, batch=3):
    """A recorded run in minibatches."""
    everything = draw(kind, n + 4)
    problem = problem_of(kind, loss, everything[:n], everything[n:])
    return train(problem, optimizer(rule, kind, loss), steps, batch_size=batch, progress=False)


@cache
def window_of(kind, rule, loss, *, steps=STEPS, **options):
    """A window of that run, dense unless said otherwise."""
    return Window.of_run(trained(kind, rule, loss, steps=steps), **{"dense": True, **options})


@cache
def operators_of(kind, rule, loss, **options):
    """Its operators as matrices."""
    return window_of(kind, rule, loss, **options).dense_operators()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def oracle_steps(window):
    """A dense window as the oracle's matrices."""
    run, n, steps = window._trajectory, window.num_examples, []
    p = window.num_outputs // n
    for k, maps in enumerate(window.steps, window.start):
        step, eye = maps.step, torch.eye(window.num_outputs, dtype=torch.float64)
        S = torch.zeros(n, dtype=torch.float64).index_add_(0, step.batch, step.selection)
        numbers = {
            "beta": step.momentum,
            "kappa": step.new_gradient,
            "a": step.buffer_share,
            "b": step.direct_share,
            "decay": step.decay,
            "coupled_decay": step.coupled_decay,
            "extra": step.source,
        }
        steps.append(
            oracle.DenseStep(
                J_S=window.model.output_jacobian(run.weights(k), window.inputs).flatten(0, 1).numpy(),
                Jbar_S=maps.train_jacobian.numpy(),
                Jbar_Q=maps.test_jacobian.numpy(),
                Bbar=maps.bend(eye).numpy(),
                S=S.repeat_interleave(p).numpy(),
                M=step.preconditioner.numpy(),
                w=run.weights(k).numpy(),
                **{name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in numbers.items()},
            )
        )
    return steps
