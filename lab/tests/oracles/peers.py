"""The peer optimizers with explicit loops over coordinates, in plain Python floats; nothing is imported from poprisk.

Averages are written out as weighted sums over all past gradients, not as recursions.
"""

import math


def average(values, beta):
    """The debiased exponential average: weights proportional to β^age, summing to one."""
    weights = [beta ** (len(values) - 1 - i) for i in range(len(values))]
    return math.fsum(w * x for w, x in zip(weights, values, strict=True)) / math.fsum(weights)


def raw_average(values, beta):
    """The exponential average that starts from zero."""
    return math.fsum((1 - beta) * beta ** (len(values) - 1 - i) * x for i, x in enumerate(values))


def adam_ratio(history, beta1, beta2, eps):
    return average(history, beta1) / (math.sqrt(average([g * g for g in history], beta2)) + eps)


def adamw(histories, beta1, beta2, eps):
    return [adam_ratio(history, beta1, beta2, eps) for history in histories]


def adabelief(histories, beta1, beta2, eps):
    """Algorithm 2 of arXiv 2010.07468: ε is added to the stored variance in every step, and to its root."""
    directions = []
    for history in histories:
        s = 0.0
        for t, g in enumerate(history, start=1):
            s = beta2 * s + (1 - beta2) * (g - raw_average(history[:t], beta1)) ** 2 + eps
        s_hat = s / (1 - beta2 ** len(history))
        directions.append(average(history, beta1) / (math.sqrt(s_hat) + eps))
    return directions


def msvag(histories, beta1):
    """arXiv 1705.07774: ρ is the sum of the average's squared weights, and s is unbiased under white noise."""
    directions = []
    for history in histories:
        t = len(history)
        weights = [(1 - beta1) * beta1 ** (t - 1 - i) / (1 - beta1**t) for i in range(t)]
        rho = math.fsum(w * w for w in weights)
        m = math.fsum(w * g for w, g in zip(weights, history, strict=True))
        spread = math.fsum(w * (g - m) ** 2 for w, g in zip(weights, history, strict=True))
        noise = rho * spread / (1 - rho) if t > 1 else 0.0
        directions.append(m**3 / (m**2 + noise) if m**2 + noise > 0 else 0.0)
    return directions


def cautious(histories, beta1, beta2, eps):
    """Algorithm 2 of arXiv 2411.16085, over the coordinates of one member."""
    directions = adamw(histories, beta1, beta2, eps)
    kept = [u * history[-1] > 0 for u, history in zip(directions, histories, strict=True)]
    scale = len(kept) / (sum(kept) + 1)
    return [scale * u if keep else 0.0 for u, keep in zip(directions, kept, strict=True)]


def grokfast(histories, alpha_ema, lamb, beta1, beta2, eps):
    """The EMA filter of arXiv 2405.20233, whose average starts at the first gradient."""
    amplified = []
    for history in histories:
        slow, seen = history[0], []
        for g in history:
            slow = alpha_ema * slow + (1 - alpha_ema) * g
            seen.append(g + lamb * slow)
        amplified.append(seen)
    return adamw(amplified, beta1, beta2, eps)


def cubed(histories, beta1, beta2, eps):
    return [math.copysign(abs(u) ** 3, u) for u in adamw(histories, beta1, beta2, eps)]


def casmo(histories, beta1, beta2, eps):
    """casmo-optimizer 0.4.0 with its default options; the coordinates are one tensor."""
    means, noises = [], []
    for history in histories:
        t = len(history)
        deviations = [(g - raw_average(history[:i], beta1)) ** 2 for i, g in enumerate(history)]
        means.append(average(history, beta1))
        noises.append(raw_average(deviations, beta2) / (1 - beta2**t))
    totals = [m * m + s for m, s in zip(means, noises, strict=True)]
    agreement = [m * m / total if total > 0 else 0.0 for m, total in zip(means, totals, strict=True)]
    mean = math.fsum(agreement) / len(agreement)
    trust = (0.1 + 0.9 * mean) ** 0.5
    return [
        trust * min(max(a / (mean + eps), 0.1), 1.0) * m / (math.sqrt(total) + eps)
        for a, m, total in zip(agreement, means, totals, strict=True)
    ]
