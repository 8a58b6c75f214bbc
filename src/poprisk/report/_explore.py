"""The page to play with: one HTML file in which sliders move the filter and the risk over a kernel."""

import base64
import html
import json
import math
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from poprisk.report._explorable import ExplorableKernel

_DECADES = 12.0  # that a slider of penalties or times spans at most


def explore_page(kernel: ExplorableKernel) -> str:
    """The whole page, with everything it needs inside: no server, no network, no other file.

    >>> from poprisk.report._explorable import builtin_kernel
    >>> page = explore_page(builtin_kernel())
    >>> page.startswith("<!doctype html>"), "http" in page
    (True, False)
    """
    template = files("poprisk.report").joinpath("explore.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(kernel)).replace("<", "\\u003c")  # a name must not end the script
    return template.replace("__TITLE__", html.escape(kernel.name)).replace("__DATA__", data)


def page_data(kernel: ExplorableKernel) -> dict[str, Any]:
    r"""What the page computes with: the spectrum, the signal, :math:`\Gamma_0`, and the ranges of its sliders.

    Arrays are little-endian float64 in base64, so that the page starts from the same bits as the library.
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
