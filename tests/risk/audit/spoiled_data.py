"""Real data whose labels were changed in known ways, and trainings on them."""

from functools import partial

import torch
from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from torch import nn

from poprisk.runs._problem import Problem
from poprisk.runs._training import train

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def loaded(name, n, seed=0):
    """Some examples in random order, and the rest."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return (x[order[:n]], y[order[:n]]), (x[order[n:]], y[order[n:]])


def flipped(true, share, kind="uniform", seed=0):
    """Labels of which a share is wrong: any other class, or the next one; for one class, only some of the zeros."""
    generator = torch.Generator().manual_seed(seed)
    classes, n = 1 + int(true.max()), len(true)
    hit = torch.rand(n, generator=generator) < share
    if kind == "one class":
        hit &= true == 0
    shift = torch.randint(1, classes, (n,), generator=generator) if kind == "uniform" else torch.ones(n).long()
    return torch.where(hit, (true + shift) % classes, true)


def ambiguous(x, true, number):
    """The labels nearest to another class, changed to that class."""
    p = torch.as_tensor(cross_val_predict(LogisticRegression(max_iter=500), x, true, cv=5, method="predict_proba"))
    own = p.gather(1, true[:, None])[:, 0]
    other = p.scatter(1, true[:, None], -1).max(1)
    nearest = (own - other.values).argsort()[:number]
    given = true.clone()
    given[nearest] = other.indices[nearest]
    return given


def network(inputs, outputs, state=None):
    module = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    if state is not None:
        module.load_state_dict(state)
    return module


def run_on(x, given, optimizer, epochs, state=None):
    """A recorded training in batches of 32."""
    make = partial(network, state=state)
    sizes = {"inputs": x.shape[1], "outputs": 1 + int(given.max())}
    problem = Problem(make, "cross_entropy", x, given, arguments=sizes)
    steps = epochs * len(given) // 32
    return train(problem, optimizer, steps, batch_size=32, every=max(1, steps // 30), progress=False)


def pretrained(x, y, classes):
    """Weights trained on other examples with right labels, for a network with this many classes."""
    run = run_on(x, y, ADAMW, 5)
    module = run.problem.module()
    nn.utils.vector_to_parameters(run.weights(run.num_steps), module.parameters())
    state = network(x.shape[1], classes).state_dict()
    return state | {name: value for name, value in module.state_dict().items() if not name.startswith("4.")}
