r"""The leave-one-out coefficient α: in the paper's units, and calibrated for an exponential average."""

from typing import Any, Literal

from poprisk._core.types import Scalar
from poprisk.errors import HyperparameterError

Centering = Literal["paper", "corrected"]


def loo_coefficient(batch_size: int, dataset_size: int | None = None) -> float:
    r"""The streaming leave-one-out coefficient of Theorem ``thm:minibatch_covariance``.

    .. math:: \alpha = 1 \text{ (fresh batches)}, \qquad \alpha = b/(n-b) \text{ (batches from } n \text{ examples)}

    On a finite data set the paper gives the same value for :math:`\lambda_{pop}` (``strength``). Measured on noisy
    labels replayed for many epochs the strict α = 1 ends higher: see the README.

    Args:
        batch_size: b, the number of examples in one optimizer step, over all devices and accumulated micro-batches.
        dataset_size: n, or None when every batch is fresh.

    Raises:
        HyperparameterError: the batch is empty, or is the whole data set (there is no noise left to measure).

    >>> loo_coefficient(64), loo_coefficient(64, 1024)
    (1.0, 0.06666666666666667)
    """
    for name, size in (("batch_size", batch_size), ("dataset_size", dataset_size)):
        if size is not None and not (size >= 1 and float(size).is_integer()):
            raise HyperparameterError(f"{name} must be a positive whole number, got {size}")
    if dataset_size is None:
        return 1.0
    if batch_size >= dataset_size:
        raise HyperparameterError(
            f"batch_size must be smaller than dataset_size, got {batch_size} and {dataset_size}: with the whole data "
            "set in every batch the stream carries no sampling noise; use per-example variances or a smaller batch"
        )
    return batch_size / (dataset_size - batch_size)


def mean_noise(beta1: float, step: Scalar, signal: Literal["ema", "batch"] = "ema") -> Any:
    r"""Variance of the gate's signal under white gradient noise of unit variance.

    For the debiased average :math:`\hat m_t` it is
    :math:`\kappa_t = \frac{(1-\beta_1)(1+\beta_1^t)}{(1+\beta_1)(1-\beta_1^t)}`, for the batch gradient itself 1.

    >>> mean_noise(0.9, 1), round(mean_noise(0.9, 10_000), 6)
    (1.0, 0.052632)
    """
    if signal == "batch" or (isinstance(step, int | float) and step == 1):
        return 1.0
    return (1 - beta1) * (1 + beta1**step) / ((1 + beta1) * (1 - beta1**step))


def deviation_noise(beta1: float, step: Scalar, centering: Centering = "paper") -> Any:
    r"""Variance of the deviation :math:`g_t - m_{t-1}` under white gradient noise of unit variance.

    Centred on the raw average it is :math:`1 + \frac{1-\beta_1}{1+\beta_1}(1-\beta_1^{2(t-1)})`, on the debiased one
    :math:`1 + \kappa_{t-1}` (from t = 2).
    """
    if centering == "paper":
        return 1.0 + (1 - beta1) / (1 + beta1) * (1 - beta1 ** (2 * (step - 1)))
    return 1.0 + mean_noise(beta1, step - 1)


def calibrated_alpha(beta1: float, rho: float, step: int, centering: Centering = "paper") -> float:
    r"""The threshold at which pure noise breaks even, :math:`E[\hat m_t^2] = \alpha_t E[\hat s_t]`.

    The theory compares one batch's mean with one batch's variance; Algorithm 1 plugs in averages of both, so that its
    α = 1 is a test at 4.5 standard deviations for β1 = 0.9. This α restores the theory's break-even test:
    :math:`\alpha_t = \kappa_t / c_t`, where :math:`c_t = E[\hat s_t]` for unit noise, and
    :math:`\alpha_t \to (1-\beta_1)/2` for the paper's centring.

    The optimizer computes the same number recursively (``alpha="calibrated"``), so that it stays right when training
    goes on from a checkpoint without s; this function gives it in closed form.

    >>> calibrated_alpha(0.9, 0.99, 1), round(calibrated_alpha(0.9, 0.99, 5000), 6)
    (1.0, 0.05)
    """
    if not (0 <= beta1 < 1 and 0 <= rho < 1):
        raise HyperparameterError(f"beta1 and rho must lie in [0, 1), got {beta1} and {rho}")
    first = 1 if centering == "paper" else 2
    if step < first:
        raise HyperparameterError(f"step must be at least {first} for centering={centering!r}, got {step}")
    weights = [rho ** (step - i) for i in range(first, step + 1)]
    noise = [deviation_noise(beta1, i, centering) for i in range(first, step + 1)]
    return mean_noise(beta1, step) * sum(weights) / sum(w * c for w, c in zip(weights, noise, strict=True))
