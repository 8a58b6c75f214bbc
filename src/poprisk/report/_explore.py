"""An interactive page: sliders change the filter of a kernel method, and charts show its risk."""

import base64
import html
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.store import write_text
from poprisk.report._drawing.templates import policy_of
from poprisk.report._explorable import ExplorableKernel, builtin_kernel, kernel_from_file

_DECADES = 12.0
"""Maximum range of the sliders for ridge and time."""


def explore(path: str | Path, kernel: str | Path | None = None) -> Path:
    """Write an interactive page on how noise, capacity, ridge and training time change the risk of a kernel method.

    Args:
        path: The HTML file to write; it needs no server and no network.
        kernel: A NumPy archive with your own kernel: ``K_SS`` [N, N] between the training outputs, ``K_QS`` [M, N]
            between test and training outputs, the clean targets ``signal`` [N] and, if known, the true values
            ``truth`` [M] at the test inputs. None uses a built-in kernel.

    Returns:
        The path of the file.

    Raises:
        DataError: The archive does not hold such arrays, or the kernel has too many directions.
        OSError: A file cannot be read or written.
    """
    return write_text(path, explore_page(builtin_kernel() if kernel is None else kernel_from_file(kernel)))


def explore_page(kernel: ExplorableKernel) -> str:
    """The page as HTML text, self-contained.

    >>> page = explore_page(builtin_kernel())
    >>> page.startswith("<!doctype html>"), "://" in page
    (True, False)
    """
    template = files("poprisk.report").joinpath("explore.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(kernel)).replace("<", "\\u003c")  # no name may close the script element
    style, script = (template.split(f"<{name}>")[1].split(f"</{name}>")[0] for name in ("style", "script"))
    page = template.replace("__POLICY__", policy_of(style, script))
    return page.replace("__TITLE__", html.escape(kernel.name)).replace("__DATA__", data)


def page_data(kernel: ExplorableKernel) -> dict[str, Any]:
    r"""The data of the page: the spectrum, the signal, :math:`\Gamma_0`, and the ranges of the sliders.

    Arrays are little-endian float64 in base64, so that the page computes with the same bits as the library.
    """
    problem, signal = kernel.problem, kernel.signal
    gap = None if kernel.truth is None else problem.interpolant(signal) - kernel.truth
    low, high = _log_range(problem.mobility / problem.num_examples)
    size = signal.square().mean().sqrt().item()
    return {
        "name": kernel.name,
        "examples": problem.num_examples,
        "tests": len(problem.start_test),
        "rank": problem.rank,
        "hasTruth": gap is not None,
        "mobility": _packed(problem.mobility),
        "signal": _packed(problem.coordinates(signal)),
        "visibility": _packed(problem.visibility),
        "misfit": 0.0 if gap is None else gap.square().sum().item(),
        "cross": _packed(torch.zeros_like(problem.roots) if gap is None else problem.test_map.T @ gap),
        "largestNoise": 2 * size if size > 0 else 1.0,
        "startNoise": 25,
        "ridgeDecades": [low - 1, high + 1],
        "timeDecades": [-high - 1, -low + 1],
    }


def _log_range(rates: Tensor) -> tuple[float, float]:
    high = math.log10(rates.max().item())
    return max(math.log10(rates.min().item()), high - _DECADES), high


def _packed(values: Tensor) -> str:
    return base64.b64encode(values.detach().cpu().double().numpy().astype("<f8").tobytes()).decode()
