"""Algorithm 1 (``alg:pop_risk``) and its options with explicit loops over coordinates, in plain Python floats.

Written from the paper, not from the library: nothing is imported from poprisk.
"""

import math


def gate(kind, m_hat, s_hat, alpha, strength, gate_eps):
    """Eq. ``soft_filter``, the three lines."""
    if kind == "hard":
        return 1.0 if m_hat**2 > alpha * s_hat else 0.0
    top = m_hat**2 if kind == "snr" else max(m_hat**2 - alpha * s_hat, 0.0)
    bottom = top + strength * s_hat + gate_eps
    return top / bottom if bottom > 0 else 0.0


def break_even_alpha(beta1, rho, t, samples, centering):
    """E[m̂²]/E[ŝ] for unit white noise, by the weights of each average written out.

    ``samples`` are the steps whose deviation went into s.
    """
    weights = [(1 - beta1) * beta1 ** (t - i) / (1 - beta1**t) for i in range(1, t + 1)]
    numerator = sum(w * w for w in weights)
    total, denominator = 0.0, 0.0
    for i in samples:
        scale = 1.0 if centering == "paper" else 1 / (1 - beta1 ** (i - 1))
        mean_weights = [scale * (1 - beta1) * beta1 ** (i - 1 - j) for j in range(1, i)]
        share = (1 - rho) * rho ** (t - i)
        total += share
        denominator += share * (1 + sum(w * w for w in mean_weights))
    return numerator * total / denominator


def algorithm1(
    weights,
    gradients,
    *,
    lr=1e-2,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
    gate_kind="soft",
    alpha=1.0,
    strength=1.0,
    rho=0.99,
    gate_eps=0.0,
    centering="paper",
    warmup_steps=0,
    normalize_gate=False,
    gated_decay=False,
    row_length=None,
    signal="ema",
    variances=None,
):
    """The path of flat ``weights`` under a list of flat ``gradients``; ``row_length`` pools the gate over rows."""
    d = len(weights)
    w, m, v, s = list(weights), [0.0] * d, [0.0] * d, [0.0] * d  # line 1
    samples, trajectory = [], []
    q_mean = 0.0
    for t, g in enumerate(gradients, start=1):  # line 2
        m_prev = list(m)  # line 4
        takes = variances is not None or centering == "paper" or t > 1
        if takes:
            samples.append(t)
        for k in range(d):
            if takes:  # line 5
                centre = m_prev[k] if centering == "paper" or t == 1 else m_prev[k] / (1 - betas[0] ** (t - 1))
                squared = (g[k] - centre) ** 2 if variances is None else variances[t - 1][k]
                s[k] = rho * s[k] + (1 - rho) * squared
            m[k] = betas[0] * m[k] + (1 - betas[0]) * g[k]  # line 6
            v[k] = betas[1] * v[k] + (1 - betas[1]) * g[k] ** 2  # line 7
        m_hat = [x / (1 - betas[0] ** t) for x in m]  # line 8
        v_hat = [x / (1 - betas[1] ** t) for x in v]
        s_hat = [x / (1 - rho ** len(samples)) if samples else 0.0 for x in s]
        a = alpha
        if alpha == "calibrated" and samples:
            a = break_even_alpha(betas[0], rho, t, samples, centering)
        q = _mask(t, g, m_hat, s_hat, a, samples, locals_=dict(
            kind=gate_kind, strength=strength, gate_eps=gate_eps, warmup=warmup_steps, row=row_length, signal=signal,
            given=variances is not None,
        ))  # fmt: skip
        if normalize_gate:  # AdamW's units: relative to the mean of the previous step
            r = [min(1.0, x / q_mean) if q_mean > 0 else float(x > 0) for x in q]
            q_mean = sum(q) / d
            q = [(1 + x) / 2 for x in r]
        for k in range(d):  # line 10
            decay = weight_decay * (q[k] if gated_decay else 1.0)
            w[k] = w[k] - lr * q[k] * m_hat[k] / (math.sqrt(v_hat[k]) + eps) - lr * decay * w[k]
        trajectory.append(list(w))
    return trajectory


def _mask(t, g, m_hat, s_hat, alpha, samples, locals_):
    """Line 9, pooled if asked, with what is decided in advance."""
    o, d = locals_, len(g)
    if o["kind"] is None or t <= o["warmup"]:
        return [1.0] * d
    tie = (
        t == 1
        and o["kind"] != "snr"
        and o["signal"] == "ema"
        and not o["given"]
        and (alpha == "calibrated" or alpha >= 1)
    )
    if not samples or tie:
        return [0.0] * d
    power = [x * x for x in (g if o["signal"] == "batch" else m_hat)]
    noise = list(s_hat)
    if o["row"]:
        for start in range(0, d, o["row"]):
            span = range(start, start + o["row"])
            p, n = sum(power[i] for i in span) / o["row"], sum(noise[i] for i in span) / o["row"]
            for i in span:
                power[i], noise[i] = p, n
    return [
        gate(o["kind"], math.sqrt(p), n, alpha, o["strength"], o["gate_eps"]) for p, n in zip(power, noise, strict=True)
    ]
