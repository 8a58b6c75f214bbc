"""Tangent kernels of ResNet-18: tiles of a large one, their error, every precision, and ten outputs in full."""

import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from scale_models import calibrated_resnet
from scale_recorder import Recorder, parts, timed

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.replayed import Replayed
from poprisk.operators._kernels import memory
from poprisk.operators._kernels.plan import TilePlan
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.rounded import adds_in_place
from poprisk.operators._kernels.rounded_kernel import exact_sample, measured_error
from poprisk.operators._kernels.tangent import cross_kernel
from poprisk.operators._kernels.tiles import Tile, TiledKernel, on_host, tiled_kernel

# The kernel of the bar, and the least part of it that is measured.
ROWS, COLUMNS, SHARE = 60_000, 50_000, 0.05
MOST_MINUTES, LARGEST_ERROR = 12.0, 1e-3
# Share of the GPU's free memory that a plan may fill: convolutions and the context take some that no plan counts.
FILLED = (0.88, 0.6)


def resnet_kernel(r: Recorder) -> None:
    """Tiles of the 60 000 × 50 000 kernel in float16, their error, other precisions, and what it was before."""
    bench = _Scalar(r)
    names = {"captured": 15, "plain": 6, "precisions": 6, "before": 3}
    parts(r, [(name, needs, getattr(bench, name)) for name, needs in names.items()])


class _Scalar:
    """One output."""

    def __init__(self, r: Recorder) -> None:
        width, held, passing = (4, 6, 4) if r.smoke else (64, 3840, 1024)
        self.r, self.wanted = r, 3 if r.smoke else int(SHARE * ROWS * COLUMNS / (held * passing)) + 2
        self.model = FlatModel(calibrated_resnet(1, width, r.device), "squared")
        self.w = self.model.weights
        generator = torch.Generator(r.device).manual_seed(1)
        self.rows, self.columns = (
            torch.randn(n, 3, 32, 32, device=r.device, generator=generator) for n in (held, self.wanted * passing)
        )
        r.note(weights=self.model.size, rows=ROWS, columns=COLUMNS)

    def tiled(self, graphs: bool, filled: float, precision: Precision = Precision.FLOAT16) -> TiledKernel:
        arguments = (self.model, self.w, self.rows, self.columns)
        return tiled_kernel(*arguments, precision=precision, memory=_memory(self.r, filled), graphs=graphs)

    def captured(self) -> None:
        """At least the share of the kernel that is asked for, with chunks replayed as CUDA graphs."""
        self._with_less_memory("captured", graphs=True, share=SHARE)

    def plain(self) -> None:
        """As Python launches it: a few tiles, or the whole share where nothing could be captured."""
        few = SHARE if "measured_share" not in self.r.figures.get("captured", {}) else SHARE / 8
        self._with_less_memory("plain", graphs=False, share=few)

    def _with_less_memory(self, name: str, *, graphs: bool, share: float) -> None:
        for filled in FILLED:
            try:
                self._measure(name, self.tiled(graphs, filled), share)
                return
            except torch.cuda.OutOfMemoryError as error:
                self.r.note(**{f"{name}_out_of_memory": str(error)})
            torch.cuda.empty_cache()  # when the tensors of the failed attempt are gone

    def _measure(self, name: str, tiled: TiledKernel, share: float) -> None:
        r, plan = self.r, tiled.plan
        figures: dict[str, Any] = {"plan": _sizes(plan), "bound": tiled.maker.bound, "in_place": _in_place(r)}
        for _ in range(4):  # loads, and captures
            tiled.maker.side(self.rows[: plan.chunk])
        left_seconds, left = timed(lambda: tiled.maker.side(self.rows[: plan.rows]), r.device)
        right_seconds, right = timed(lambda: tiled.maker.side(self.columns[: plan.columns]), r.device)
        tiled.maker.block(left, right)
        product_seconds, _ = timed(lambda: tiled.maker.block(left, right), r.device)
        flops = 2.0 * plan.rows * plan.columns * self.model.size
        del left, right
        figures |= {
            "held_features_seconds": left_seconds,
            "passing_features_seconds": right_seconds,
            "seconds_per_example": right_seconds / plan.columns,
            "product_seconds": product_seconds,
            "product_tflops": flops / product_seconds / 1e12,
            "capture_refused": tiled.maker.pieces.refused if isinstance(tiled.maker.pieces, Replayed) else None,
        }
        r.note(**{name: figures})
        first, more = self._stream(tiled, left_seconds, share)
        figures |= more
        r.note(**{name: figures})
        figures |= self._error(first)
        r.note(**{name: figures})

    def _stream(self, tiled: TiledKernel, left_seconds: float, share: float) -> tuple[Tile, dict[str, Any]]:
        """Tiles to the host, by the clock; and the whole kernel foretold in two ways."""
        begin, seconds, entries, first = time.perf_counter(), [], 0, None
        for tile in on_host(tiled.tiles()):
            seconds.append(time.perf_counter() - begin)
            entries += tile.block.numel()
            first = tile if first is None else first
            if entries >= share * ROWS * COLUMNS or self.r.left() < 8:
                break
        total, plan = time.perf_counter() - begin, tiled.plan
        assert first is not None
        # The rows' features are made once for a block of rows; a tile of columns costs its features and the product.
        steady = statistics.median(b - a for a, b in pairwise(seconds)) if seconds[1:] else total
        whole = ROWS * COLUMNS / (plan.rows * plan.columns) * steady + ROWS / plan.rows * left_seconds
        by_share = total * ROWS * COLUMNS / entries
        return first, {
            "measured_entries": entries,
            "measured_share": entries / (ROWS * COLUMNS),
            "measured_seconds": total,
            "tile_seconds": steady,
            "extrapolated_minutes": whole / 60,
            "extrapolated_by_share_minutes": by_share / 60,
            "reached_minutes": max(whole, by_share) / 60 <= MOST_MINUTES,
        }

    def _error(self, tile: Tile) -> dict[str, Any]:
        sample, block = 3 if self.r.smoke else 24, tile.block.to(self.r.device)
        inputs = self.rows[: block.shape[0]], self.columns[: block.shape[1]]
        seconds, error = timed(
            lambda: measured_error(self.model, self.w, block, *inputs, examples=sample), self.r.device
        )
        reached = error <= LARGEST_ERROR
        return {"error": error, "error_sample": sample, "error_seconds": seconds, "reached_error": reached}

    def precisions(self) -> None:
        """Speed and error of every precision on one block."""
        r, (n, m) = self.r, (4, 3) if self.r.smoke else (1024, 1024)
        found: dict[str, Any] = {}
        sample = 2 if r.smoke else 16
        exact = exact_sample(self.model, self.w, self.rows[:n], self.columns[:m], examples=sample)
        for precision in Precision:
            tiled = self.tiled(False, FILLED[-1], precision)
            ours, theirs = tiled.maker.side(self.rows[:n]), tiled.maker.side(self.columns[:m])
            tiled.maker.block(ours, theirs)
            seconds, K = timed(partial(tiled.maker.block, ours, theirs), r.device)
            del ours, theirs
            error = exact.error(K)
            rate = 2.0 * n * m * self.model.size / seconds / 1e12
            found[precision.value] = {"seconds": seconds, "tflops": rate, "error": error, "bound": tiled.maker.bound}
            r.note(precisions=found, precisions_block=[n, m], precisions_sample=sample)

    def before(self) -> None:
        """Features an example or two at a time, as CPUs like them, and float32 tiles as they are now."""
        r, few, many = self.r, *((2, 2) if self.r.smoke else (12, 384))
        usual, memory._CHUNK_BYTES["cuda"] = memory._CHUNK_BYTES["cuda"], memory._CHUNK_BYTES["cpu"]
        try:
            cross_kernel(self.model, self.w, self.rows[:2], self.columns[:2])
            old, _ = timed(lambda: cross_kernel(self.model, self.w, self.rows[:few], self.columns[:few]), r.device)
        finally:
            memory._CHUNK_BYTES["cuda"] = usual
        r.note(before={"examples": 2 * few, "seconds_per_example": old / (2 * few)})
        new, _ = timed(lambda: cross_kernel(self.model, self.w, self.rows[:many], self.columns[:many]), r.device)
        r.note(float32_tiles={"examples": 2 * many, "seconds_per_example": new / (2 * many)})


def resnet_ten_outputs(r: Recorder) -> None:
    """The full kernel of 2 000 examples with ten outputs, 20 000 × 20 000."""
    n, width, sample = (5, 4, 2) if r.smoke else (2000, 64, 4)
    model = FlatModel(calibrated_resnet(10, width, r.device), "squared")
    x = torch.randn(n, 3, 32, 32, device=r.device, generator=torch.Generator(r.device).manual_seed(2))
    r.note(n=n, outputs=10, weights=model.size)

    def whole(graphs: bool) -> None:
        room = {"memory": _memory(r, FILLED[0]), "holds_result": True}
        tiled = tiled_kernel(model, model.weights, x, precision=Precision.FLOAT16, graphs=graphs, **room)
        for _ in range(4):
            tiled.maker.side(x[: tiled.plan.chunk])  # loads, and captures
        seconds, K = timed(tiled.assembled, r.device)
        figures = {"plan": _sizes(tiled.plan), "seconds": seconds, "shape": list(K.shape), "bound": tiled.maker.bound}
        r.note(**{"captured" if graphs else "whole": figures})
        error = measured_error(model, model.weights, K, x, examples=sample)
        r.note(**{"captured" if graphs else "whole": figures | {"error": error, "error_sample": sample}})

    parts(r, [("captured", 12, lambda: whole(True))])
    if "captured" not in r.figures:
        parts(r, [("whole", 8, lambda: whole(False))])


def _sizes(plan: TilePlan) -> dict[str, int]:
    """The plan under the names that stored results have."""
    return {"held": plan.rows, "passing": plan.columns, "chunk": plan.chunk, "bytes": plan.bytes}


def _memory(r: Recorder, share: float) -> int:
    """What a plan may fill; memory that PyTorch holds and does not use counts as free."""
    if r.device == "cpu":
        return 2**28
    torch.cuda.empty_cache()
    return int(share * torch.cuda.mem_get_info()[0])


def _in_place(r: Recorder) -> bool | None:
    return adds_in_place(torch.float16, torch.device("cuda", 0)) if r.device == "cuda" else None
