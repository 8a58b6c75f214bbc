"""Retraining as one would do it by hand: a new model and a real torch optimizer for every training, one by one."""

import torch
from torch import nn
from torch.nn import functional as F


def train_one_by_one(
    problem,
    make_optimizer,
    batches,
    weights,
    *,
    inputs=None,
    targets=None,
    accumulate=1,
    clip_norm=None,
    factors=None,
    schedule=None,
    dtype=torch.float64,
):
    """The last weights of each training: row k of ``weights`` has its example weights.

    ``inputs`` and ``targets`` are lists with each training's own examples; default: the problem's.
    """
    found = []
    for k, alpha in enumerate(weights):
        x = problem.inputs if inputs is None else inputs[k]
        y = problem.targets if targets is None else targets[k]
        found.append(
            train_one(problem, make_optimizer, batches, alpha, x, y, accumulate, clip_norm, factors, schedule, dtype)
        )
    return torch.stack(found)


def train_one(problem, make_optimizer, batches, alpha, x, y, accumulate, clip_norm, factors, schedule, dtype):
    model = problem.module(dtype)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(batches):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr if schedule is None else lr * schedule(step)
        optimizer.zero_grad()
        for part in batch.chunk(accumulate):
            total = 0.0
            for i in part.tolist():
                total = total + alpha[i].to(dtype) * example_loss(problem, model, x[i : i + 1].to(dtype), y[i : i + 1])
            (total / len(batch)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if factors is not None:
            for p in model.parameters():
                p.grad.mul_(factors[step])
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def example_loss(problem, model, x, y):
    u = model(x)
    if problem.loss == "cross_entropy":
        return F.cross_entropy(u, y)
    return 0.5 * (u - y.to(u)).square().sum()


def outputs_of(problem, weights, i, dtype=torch.float64):
    """What the model with these flat weights says of training example i."""
    model = problem.module(dtype)
    nn.utils.vector_to_parameters(weights, [p for p in model.parameters() if p.requires_grad])
    with torch.no_grad():
        return model(problem.inputs[i : i + 1].to(dtype))[0]


def holdout_weights(n, held_out):
    """The paper's weights of a holdout: n/(n-k) on each point kept, 0 on each of the k left out."""
    alpha = torch.full((n,), n / (n - len(held_out)), dtype=torch.float64)
    alpha[list(held_out)] = 0
    return alpha


def averaged_holdout_direction(n, k, i):
    """Equation common_first_variation, by going through every holdout of size k that contains i."""
    from itertools import combinations

    total, count = torch.zeros(n, dtype=torch.float64), 0
    for rest in combinations([j for j in range(n) if j != i], k - 1):
        total += 1 - holdout_weights(n, (i, *rest))
        count += 1
    return total / count


def nested_cross_validation(losses, folds, K, pair_losses):
    """Bates, Hastie and Tibshirani (2021), algorithm 1, written with lists.

    ``pair_losses[f, g][i]`` is the loss of example i under the model trained without the folds f and g.
    """
    n = len(losses)
    differences, variances, inner = [], [], []
    for f in range(K):
        outside = [i for i in range(n) if folds[i] != f]
        inside = [i for i in range(n) if folds[i] == f]
        errors_in = [float(pair_losses[frozenset((f, int(folds[i])))][i]) for i in outside]
        errors_out = [float(losses[i]) for i in inside]
        mean_in, mean_out = sum(errors_in) / len(errors_in), sum(errors_out) / len(errors_out)
        differences.append((mean_in - mean_out) ** 2)
        spread = sum((e - mean_out) ** 2 for e in errors_out) / (len(errors_out) - 1)
        variances.append(spread / len(errors_out))
        inner += errors_in
    mse = max(0.0, sum(differences) / K - sum(variances) / K)
    sd = torch.tensor(inner, dtype=torch.float64).std().item()
    inflation = mse**0.5 / (sd / (n * (K - 1) / K) ** 0.5)
    inflation = min(max(inflation, 1.0), K**0.5)
    cv, deep = float(losses.mean()), sum(inner) / len(inner)
    error = float(losses.std()) / n**0.5 * inflation
    return error, deep + (1 + (K - 2) / K) * (cv - deep)
