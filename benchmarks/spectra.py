"""Leading eigenpairs of an operator with a large null space, ours beside SciPy's ``eigsh``, in the same run.

The operator is 4000 × 4000 of rank 300; the leading eigenvalue is met once, or forty times. The last line printed is
one JSON object: for each spectrum products, calls (a block of products is one), seconds and the largest error relative
to the largest eigenvalue of both, and their ratio. A solver that misses copies of an eigenvalue shows it in ``error``.

    python benchmarks/spectra.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from poprisk._core.linalg.matrices import from_functions
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk._core.store.envelope import environment

TOLERANCE = 1e-8


def spectra(rank: int) -> dict[str, Tensor]:
    index = torch.arange(1, rank + 1, dtype=torch.float64)
    bulk = torch.linspace(0.5, 0.01, rank - 40, dtype=torch.float64)
    return {"1/j": 1 / index, "40 equal": torch.cat([torch.ones(40, dtype=torch.float64), bulk])}


def counted_operator(n: int, values: Tensor) -> tuple[LinearOperator, list[int]]:
    generator = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64))[0]
    count = [0, 0]

    def matmat(X: Tensor) -> Tensor:
        count[0] += X.shape[1]
        count[1] += 1
        return U @ (values.unsqueeze(1) * (U.T @ X))

    return from_functions(matmat, None, (n, n), torch.float64, symmetric=True), count


def measure(solve: Callable[[], Tensor], count: list[int], true: Tensor, repeats: int) -> dict[str, float]:
    values, seconds = solve(), []
    for _ in range(repeats):
        count[:], start = (0, 0), time.perf_counter()
        values = solve()
        seconds.append(time.perf_counter() - start)
    error = (values.sort(descending=True).values - true).abs().max() / true[0]
    made = {"products": count[0], "calls": count[1]}
    return {**made, "seconds": round(statistics.median(seconds), 4), "error": float(f"{error:.1e}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--rank", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import scipy.sparse.linalg

    eigsh: Any = scipy.sparse.linalg.eigsh  # its annotations want a whole number for tol

    cases = {}
    for name, values in spectra(options.rank).items():
        A, count = counted_operator(options.size, values)
        exported = A.to_scipy()
        true, k = values[: options.pairs], options.pairs
        # eigsh's tolerance is relative to each value, ours to the largest one: for the last of 1/j that is the stricter
        ours = measure(lambda: top_eigenpairs(A, k, tolerance=TOLERANCE).values, count, true, options.repeats)  # noqa: B023
        scipy = measure(
            lambda: torch.from_numpy(eigsh(exported, k=k, tol=TOLERANCE)[0].copy()),  # noqa: B023
            count,
            true,
            options.repeats,
        )
        ratio = {key: round(ours[key] / scipy[key], 3) for key in ("products", "calls", "seconds")}
        cases[name] = {"poprisk": ours, "eigsh": scipy, "ratio": ratio}
    report = {"benchmark": "spectra", "size": options.size, "rank": options.rank, "pairs": options.pairs}
    print(json.dumps({**report, "tolerance": TOLERANCE, "cases": cases, "environment": environment()}))


if __name__ == "__main__":
    main()
