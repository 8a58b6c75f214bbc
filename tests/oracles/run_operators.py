"""The operators of a run in naive float64 numpy: dense matrices, plain loops, every step as it happened.

One step, with g_k the output gradient of the mean training loss and all of M, β, κ, a, b, λ, λᶜ, σ numbers or one per
weight (the letters of `poprisk.runs._step.Step`):

    f_k = J_kᵀ S_k g_k
    v_k = β v_{k-1} + κ (f_k + λᶜ w_k)
    dw_k = -M (a v_k + b (f_k + λᶜ w_k)) - λ w_k + σ
    u_{k+1} - u_k = J̄_S dw_k,    U_Q changes by J̄_Q dw_k,    g_{k+1} - g_k = B̄ (u_{k+1} - u_k)

Everything is affine in g(s). The linear part gives P, W, D, G; the rest, decay and a buffer carried in, the sources.
"""

from dataclasses import dataclass

import numpy as np

Number = float | np.ndarray


@dataclass
class DenseStep:
    """One step: dense Jacobians and curvature, diagonals as vectors."""

    J_S: np.ndarray  # [N, d] Jacobian of the train outputs at w_k
    Jbar_S: np.ndarray  # [N, d] averaged over the segment from w_k to w_{k+1}
    Jbar_Q: np.ndarray  # [M, d] the same for the test outputs
    Bbar: np.ndarray  # [N, N] loss curvature averaged over the segment of outputs
    S: np.ndarray  # [N] diagonal of the batch selection, n/b on the batch
    M: np.ndarray  # [d] diagonal of the preconditioner
    beta: Number = 0.0
    kappa: Number = 1.0
    a: Number = 1.0
    b: Number = 0.0
    decay: Number = 0.0  # λ, decoupled
    coupled_decay: Number = 0.0  # λᶜ, enters the gradient
    extra: Number = 0.0  # σ
    w: np.ndarray | None = None  # [d] weights before the step; needed when there is decay


@dataclass
class DenseOperators:
    """What a window of steps amounts to."""

    P: np.ndarray  # [N, N]
    W: np.ndarray  # [N, N]
    W_factor: np.ndarray  # [K·d, N] the M̃_j^{1/2} F_j stacked; its Gram matrix is W
    D: np.ndarray  # [N, N]
    G: np.ndarray  # [M, N]
    source_S: np.ndarray  # [N]
    source_Q: np.ndarray  # [M]
    source_g: np.ndarray  # [N] g(T) = P g(s) + source_g
    M_tilde: list[np.ndarray]  # [d] each
    F: list[np.ndarray]  # [d, N] each: J_kᵀ S_k P_k
    propagators: list[np.ndarray]  # [N, N] each: P_k, from the identity to P


def operators_of(steps: list[DenseStep], buffer: np.ndarray | None = None) -> DenseOperators:
    """The operators of a window; `buffer` is the momentum v_{s-1} carried into its first step."""
    N, d = steps[0].J_S.shape
    M_rows = steps[0].Jbar_Q.shape[0]
    P, V = np.eye(N), np.zeros((d, N))
    D, G = np.zeros((N, N)), np.zeros((M_rows, N))
    gradient_0, v_0 = np.zeros(N), np.zeros(d) if buffer is None else buffer.copy()
    source_S, source_Q = np.zeros(N), np.zeros(M_rows)
    F_all, P_all = [], [P]
    for step in steps:
        # The linear part, one column for each entry of g(s).
        F = step.J_S.T @ (step.S[:, None] * P)
        V = _rows(step.beta, V) + _rows(step.kappa, F)
        X = _rows(step.M, _rows(step.a, V) + _rows(step.b, F))
        D = D + step.Jbar_S @ X
        G = G + step.Jbar_Q @ X
        P = P - step.Bbar @ step.Jbar_S @ X
        # The affine part: the same step from g(s) = 0.
        decayed = step.coupled_decay * step.w if _is_there(step.coupled_decay) else 0.0
        f_0 = step.J_S.T @ (step.S * gradient_0) + decayed
        v_0 = step.beta * v_0 + step.kappa * f_0
        dw_0 = -step.M * (step.a * v_0 + step.b * f_0) + step.extra
        if _is_there(step.decay):
            dw_0 = dw_0 - step.decay * step.w
        source_S = source_S + step.Jbar_S @ dw_0
        source_Q = source_Q + step.Jbar_Q @ dw_0
        gradient_0 = gradient_0 + step.Bbar @ step.Jbar_S @ dw_0
        F_all.append(F)
        P_all.append(P)
    M_tilde = [effective_preconditioner(steps, j) for j in range(len(steps))]
    W_factor = np.vstack([np.sqrt(m)[:, None] * F for m, F in zip(M_tilde, F_all, strict=True)])
    W = sum(F.T @ (m[:, None] * F) for m, F in zip(M_tilde, F_all, strict=True))
    return DenseOperators(P, W, W_factor, D, G, source_S, source_Q, gradient_0, M_tilde, F_all, P_all)


def effective_preconditioner(steps: list[DenseStep], j: int) -> np.ndarray:
    """M̃_j: all that the gradient of step j will have been multiplied with, at its own step and through the momentum.

    M̃_j = κ_j Σ_{k≥j} (β_{j+1} … β_k) a_k M_k + b_j M_j
    """
    through_momentum = np.zeros_like(steps[j].M)
    for k in range(j, len(steps)):
        kept = np.ones_like(steps[j].M)
        for between in range(j + 1, k + 1):
            kept = kept * steps[between].beta
        through_momentum = through_momentum + kept * steps[k].a * steps[k].M
    return steps[j].kappa * through_momentum + steps[j].b * steps[j].M


def lifted_maps(steps: list[DenseStep], A: np.ndarray) -> list[np.ndarray]:
    """L_j = Σ_{k≥j} (J̄_Q - A J̄_S)_k (weight of f_j in dw_k) M̃_j^{†/2}, so that G - A D = Σ_j L_j M̃_j^{1/2} F_j."""
    maps = []
    for j in range(len(steps)):
        total = np.zeros((A.shape[0], steps[0].J_S.shape[1]))
        for k in range(j, len(steps)):
            kept = np.ones(steps[0].J_S.shape[1])
            for between in range(j + 1, k + 1):
                kept = kept * steps[between].beta
            weight = steps[k].M * steps[k].a * kept * steps[j].kappa
            if k == j:
                weight = weight + steps[j].M * steps[j].b
            total = total + (steps[k].Jbar_Q - A @ steps[k].Jbar_S) * weight
        m = effective_preconditioner(steps, j)
        inverse_root = np.zeros_like(m)
        inverse_root[m > 0] = m[m > 0] ** -0.5
        maps.append(total * inverse_root)
    return maps


def cumulative_error_of(steps: list[DenseStep], A: np.ndarray) -> np.ndarray:
    """D_A = Σ_j L_j Π_j L_jᵀ with Π_j onto range(M̃_j^{1/2} J_jᵀ S_j), by a pseudo-inverse."""
    total = np.zeros((A.shape[0], A.shape[0]))
    for j, L in enumerate(lifted_maps(steps, A)):
        m = effective_preconditioner(steps, j)
        reach = np.sqrt(m)[:, None] * steps[j].J_S.T * steps[j].S
        total = total + L @ reach @ np.linalg.pinv(reach, rcond=1e-11) @ L.T
    return total


def random_steps(
    seed: int,
    *,
    N: int = 6,
    d: int = 9,
    M: int = 4,
    count: int = 5,
    squared: bool = True,
    momentum: bool = True,
    never_drawn: int = 0,
) -> list[DenseStep]:
    """Steps made of random numbers, without any network; the last `never_drawn` outputs are in no batch."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        root = rng.normal(size=(N, N)) / np.sqrt(N)
        drawn = rng.random(N) < 0.6
        drawn[0] = True
        drawn[N - never_drawn :] = False
        preconditioner = 0.3 * rng.random(d) * (rng.random(d) < 0.8)  # some gates are closed
        steps.append(
            DenseStep(
                J_S=rng.normal(size=(N, d)),
                Jbar_S=rng.normal(size=(N, d)),
                Jbar_Q=rng.normal(size=(M, d)),
                Bbar=np.eye(N) / N if squared else root @ root.T / N,
                S=np.where(drawn, N / drawn.sum(), 0.0),
                M=preconditioner,
                beta=0.9 * rng.random(d) if momentum else 0.0,
                kappa=0.2 + rng.random() if momentum else 1.0,
                a=0.5 + rng.random() if momentum else 1.0,
                b=rng.random() if momentum else 0.0,
                decay=0.01 * rng.random(d),
                coupled_decay=0.01 * rng.random(),
                extra=0.01 * rng.normal(size=d),
                w=rng.normal(size=d),
            )
        )
    return steps


@dataclass
class QuadraticRun:
    """A real training run of a model whose averaged Jacobian is known: u_i(w) = c_i·w + ½ wᵀ A_i w."""

    steps: list[DenseStep]
    buffers: list[np.ndarray]  # v_{k-1}, carried into step k
    train_outputs: list[np.ndarray]  # before step k, and after the last one
    test_outputs: list[np.ndarray]
    gradients: list[np.ndarray]  # g_k = ∇Φ
    losses: list[float]  # Φ
    n: int


def quadratic_run(
    seed: int,
    *,
    n: int = 5,
    p: int = 1,
    d: int = 12,
    test: int = 3,
    count: int = 12,
    batch: int = 3,
    loss: str = "squared",
    rule: str = "momentum",
    decay: float = 0.02,
    lr: float = 0.3,
    curvature: float = 0.3,
    duplicate: bool = False,
    never_drawn: int = 0,
    noise: np.ndarray | None = None,
) -> QuadraticRun:
    """Train the quadratic model with minibatches and record everything dense.

    Jacobians are linear in w, so their average over a segment is their value at its middle, exactly. Squared loss has
    B = I/n; for the logistic loss of one output the average of ℓ'' over a segment is the difference quotient of ℓ'.

    rule: "gd" (no momentum), "momentum" (v averaged, with a preconditioner that changes and has closed gates),
    "nesterov" (torch's, with coupled decay).
    """
    rng = np.random.default_rng(seed)
    N = n * p
    c, A = rng.normal(size=(N + test, d)) / np.sqrt(d), rng.normal(size=(N + test, d, d)) * curvature / d
    A = A + A.transpose(0, 2, 1)
    if duplicate:
        c[N - p : N], A[N - p : N] = c[:p], A[:p]
    y = rng.normal(size=N) if loss == "squared" else (rng.random(N) < 0.5).astype(float)
    if noise is not None:
        y = y + noise
    w, v = rng.normal(size=d) * 0.5, np.zeros(d)
    run = QuadraticRun([], [], [], [], [], [], n)

    def outputs(w: np.ndarray) -> np.ndarray:
        return c @ w + 0.5 * np.einsum("oij,i,j->o", A, w, w)

    def jacobian(w: np.ndarray) -> np.ndarray:
        return c + A @ w

    for _ in range(count):
        u, g, value = outputs(w), *_loss(outputs(w)[:N], y, n, loss)
        drawn = rng.permutation(n - never_drawn)[:batch]
        S = np.zeros((n, p))
        S[drawn] = n / len(drawn)
        S = S.reshape(-1)
        M, beta, kappa, a, b, coupled, uncoupled = _rule(rule, rng, d, lr, decay)
        f = jacobian(w)[:N].T @ (S * g) + coupled * w
        run.buffers.append(v)
        v = beta * v + kappa * f
        dw = -M * (a * v + b * f) - uncoupled * w
        middle, after = jacobian(w + dw / 2), outputs(w + dw)
        run.steps.append(
            DenseStep(
                J_S=jacobian(w)[:N],
                Jbar_S=middle[:N],
                Jbar_Q=middle[N:],
                Bbar=_averaged_curvature(u[:N], after[:N], y, n, loss),
                S=S,
                M=M,
                beta=beta,
                kappa=kappa,
                a=a,
                b=b,
                decay=uncoupled,
                coupled_decay=coupled,
                w=w,
            )
        )
        run.train_outputs.append(u[:N])
        run.test_outputs.append(u[N:])
        run.gradients.append(g)
        run.losses.append(value)
        w = w + dw
    u, g, value = outputs(w), *_loss(outputs(w)[:N], y, n, loss)
    run.buffers.append(v)
    run.train_outputs.append(u[:N])
    run.test_outputs.append(u[N:])
    run.gradients.append(g)
    run.losses.append(value)
    return run


def _rule(rule: str, rng: np.random.Generator, d: int, lr: float, decay: float):
    """M, β, κ, a, b, λᶜ, λ of one step."""
    if rule == "gd":
        return np.full(d, lr), 0.0, 1.0, 1.0, 0.0, 0.0, 0.0
    if rule == "nesterov":
        return np.full(d, lr), 0.6, 1.0, 0.6, 1.0, decay, 0.0
    return lr * rng.random(d) * (rng.random(d) < 0.8), 0.7, 0.3, 1.0, 0.0, 0.0, decay


def _loss(u: np.ndarray, y: np.ndarray, n: int, loss: str) -> tuple[np.ndarray, float]:
    """∇Φ and Φ."""
    if loss == "squared":
        return (u - y) / n, float(((u - y) ** 2).sum() / (2 * n))
    sigmoid = 1 / (1 + np.exp(-u))
    return (sigmoid - y) / n, float((np.logaddexp(0, u) - y * u).sum() / n)


def _averaged_curvature(u: np.ndarray, after: np.ndarray, y: np.ndarray, n: int, loss: str) -> np.ndarray:
    if loss == "squared":
        return np.eye(len(u)) / n
    change = _loss(after, y, n, loss)[0] - _loss(u, y, n, loss)[0]
    return np.diag(change / (after - u))


def _rows(diagonal: Number, X: np.ndarray) -> np.ndarray:
    """diag(diagonal) X, or a number times X."""
    return diagonal[:, None] * X if isinstance(diagonal, np.ndarray) else diagonal * X


def _is_there(term: Number) -> bool:
    return bool(np.any(np.asarray(term) != 0))
