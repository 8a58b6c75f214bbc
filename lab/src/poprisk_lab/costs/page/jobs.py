"""What jobs in a store cost over plain loops (``benchmarks/scale_jobs.py``), beside the goals."""

from collections.abc import Iterator, Mapping
from typing import Any

from poprisk_lab.costs.page.words import duration
from poprisk_lab.pages.wording import table

Figures = Mapping[str, Any]
_SHARE, _OVERHEAD, _SCALING, _SECONDS = 0.95, 0.05, 1.8, 10.0


def jobs_table(saved: Figures) -> str:
    """Every measurement that is stored, with its goal."""
    rows = [*_on_a_gpu(saved.get("gpu", {})), *_on_a_cpu(saved.get("cpu", {}))]
    return table(["jobs in a store on the disk", "measured", "goal", ""], rows)


def _on_a_gpu(found: Figures) -> Iterator[list[str]]:
    if "share_of_plain" not in found:
        return
    share, height, width = found["share_of_plain"], *found["tile"]
    what = f"ResNet-18, float16 kernel {found['rows']:,} × {found['columns']:,}, {found['measured_share']:.1%} of it in"
    tiles = f"{what} tiles of {height:,} × {width:,}: speed over that of the same tiles in a plain loop"
    yield [tiles, f"{share:.2f}", f"≥ {_SHARE:g}", _verdict(share >= _SHARE)]
    yield ["the whole kernel at that speed", f"{found['whole_kernel_minutes']:.1f} min", "", ""]
    same, compared = found["tiles_identical"], found["tiles_compared"]
    yield ["tiles that are those of the loop, bit by bit", f"{same} of {compared}", "all", _verdict(same == compared)]


def _on_a_cpu(found: Figures) -> Iterator[list[str]]:
    if "overhead" in found:
        each, more = duration(found["seconds_per_tile"]), found["overhead"]
        what = f"tiles of {each}, one worker on {_cores(found)}: time over that of a plain loop"
        yield [what, f"{100 * more:+.1f}%", f"≤ {100 * _OVERHEAD:g}%", _verdict(more <= _OVERHEAD)]
        two, machine = found["scaling_one_to_two"], found.get("machine_scaling")
        faster = "two workers: times faster than one"
        faster += f" (two plain loops at once are {machine:.2f} times faster than one)" if machine else ""
        yield [faster, f"{two:.2f}", f"≥ {_SCALING:g}", _verdict(two >= _SCALING)]
        if "scaling_one_to_four" in found:
            yield ["four workers: times faster than one", f"{found['scaling_one_to_four']:.2f}", "", ""]
    if many := found.get("ten_thousand"):
        seconds = many["planned_seconds"] + many["resumed_seconds"]
        what = f"{many['tiles']:,} tiles planned, and resumed with one left"
        yield [what, f"{seconds:.1f} s", f"≤ {_SECONDS:g} s", _verdict(seconds <= _SECONDS)]


def _cores(found: Figures) -> str:
    """Where the part on the CPU was measured."""
    return f"{found['cores']} cores of {found['environment']['cpu']}" if "cores" in found else "a CPU"


def _verdict(met: bool) -> str:
    return "reached" if met else "**missed**"
