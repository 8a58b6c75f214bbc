r"""What a gate can go by, watched while AdamW trains: is there anything in it that tells noise from signal in time?

Watched are the loss, the length of the gradient, the *agreement* of the next batch with the step decided before it,
:math:`\langle g_t^\top u_{t-1} \rangle / \langle g_t^\top u_t \rangle`, and how far the strict gate would open. Two
questions are put to them.

*Turning points.* On each task of the study: where is the agreement when AdamW's test error is at its best? A gate that
closes at a given agreement can be right on all tasks only if this is the same number on all of them.

*Twins.* A division table with its right answers, and with wrong ones (:mod:`poprisk_lab.paper.grokking.task`);
inputs, start and batches are the same. AdamW first memorizes the answers it is shown and finds the rule much later. As
long as the twins look alike, a gate that keeps the wrong answers out keeps the right ones out, too; and these must be
memorized on AdamW's way to the rule. This is the *worlds* argument of ``docs/gates.md`` on a real network.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk._core.store import save_result
from poprisk.cli._demonstration.training import epoch_batches
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.parameter_layout import ParameterLayout
from poprisk_lab.engine.task import StackedTask
from poprisk_lab.gates.plan import SMOKE as STUDY_SMOKE
from poprisk_lab.gates.plan import Bench, GateVariantsConfig, images_in
from poprisk_lab.gates.variants.shared import moments
from poprisk_lab.paper.grokking.task import GrokkingTask

KIND = "gate_evidence"
ALL_WRONG = 0.9999  # of a few thousand labels: rounded to all of them
SEEN = ("loss", "gradient norm", "agreement", "strict gate")
_KNOBS = {"beta1": 0.9, "eps": 1e-8, "rho": 0.99, "alpha": 1.0, "strength": 1.0}
Look = Callable[[str], None]


@dataclass(frozen=True)
class EvidenceConfig:
    """Sizes and seeds; tasks, rates and all else are those of the study of variants.

    Attributes:
        study: Where the tasks come from.
        turning: Names of tasks whose turning points are looked for, with the steps for which each is watched.
        window: Steps over which is averaged there.
        twins_steps: For how long the twins are watched.
        twins_windows: Over how many windows that is averaged.
        seeds: Each is a start, an order of batches and, where data are drawn, a data set.

    Raises:
        HyperparameterError: an unknown task, or fewer than two seeds.
    """

    study: GateVariantsConfig = field(default_factory=GateVariantsConfig)
    turning: tuple[tuple[str, int], ...] = (
        ("digits-40", 300),
        ("fashion-40", 620),
        ("teacher_40", 300),
        ("lorenz_noise0.4", 1500),
        ("inr_astronaut", 300),
        ("digits-0", 300),
        ("teacher_clean", 800),
        ("pinn_clean", 300),
    )
    window: int = 20
    twins_steps: int = 600
    twins_windows: int = 6
    seeds: tuple[int, ...] = (20, 21, 22, 23, 24)

    def __post_init__(self) -> None:
        known = {bench.task.name for bench in self.study.benches()}
        if unknown := [name for name, _ in self.turning if name not in known]:
            raise HyperparameterError(f"no task is called {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if len(self.seeds) < 2:
            raise HyperparameterError(f"seeds must be at least two, for a spread between them, got {self.seeds}")


SMOKE = EvidenceConfig(STUDY_SMOKE, (("digits-40", 6), ("teacher_clean", 6)), 2, 6, 3, (0, 1))


def run(config: EvidenceConfig, report: Look | None = None) -> dict[str, Any]:
    """Both questions.

    Returns:
        ``turning``, by task: what :func:`watch` gives, and ``noisy``, ``pass_steps``, ``metric``,
        ``higher_is_better``. ``twins``: what it gives for ``right`` and ``wrong`` answers.

    >>> found = run(SMOKE)
    >>> found["twins"]["wrong"]["steps"], len(found["turning"]["digits-40"]["agreement"])
    ([2, 4, 6], 2)
    """
    benches = {bench.task.name: bench for bench in config.study.benches()}
    turning = {}
    for name, steps in config.turning:
        bench, metric = benches[name], benches[name].task.metrics[0]
        seen = watch(bench, bench.task, config.seeds, steps, config.window, report)
        facts = {"noisy": bench.noisy, "pass_steps": bench.pass_steps}
        turning[name] = facts | {"metric": metric.name, "higher_is_better": metric.higher_is_better} | seen
    right = next(bench for bench in benches.values() if isinstance(bench.task, GrokkingTask))
    window = config.twins_steps // config.twins_windows
    assert isinstance(right.task, GrokkingTask)
    worlds = {"right": right.task, "wrong": replace(right.task, wrong_share=ALL_WRONG)}
    twins = {
        world: watch(right, task, config.seeds, config.twins_steps, window, report) for world, task in worlds.items()
    }
    return {"turning": turning, "twins": twins}


def watch(
    bench: Bench, task: StackedTask, seeds: Sequence[int], steps: int, window: int, report: Look | None = None
) -> dict[str, Any]:
    """AdamW at its usual rate; what can be seen of it, window by window, and the task's metrics at their ends.

    Returns:
        ``steps`` (the windows' ends), and each of ``loss``, ``gradient norm``, ``agreement``, ``strict gate`` and the
        task's metrics as [seeds][windows].
    """
    starts = [task.initial(seed) for seed in seeds]
    layout = ParameterLayout.of(starts[0])
    w = torch.stack([layout.row(start) for start in starts]).requires_grad_()
    cohort = task.cohort(seeds, torch.device("cpu"))
    batches = {
        name: epoch_batches(count, size, [stream(seed, f"batches:{name}") for seed in seeds])
        for name, (count, size) in task.streams.items()
    }
    shared = ARMS["adamw"].hyper(bench.shared)
    knobs, decay = {**_KNOBS, "beta2": shared["beta2"]}, shared["weight_decay"]
    state = {name: torch.zeros_like(w) for name in ("m", "v", "s", "u")}
    seen: dict[str, list[Tensor]] = {}
    sums = torch.zeros(5, len(seeds), dtype=torch.float64)
    for t in range(1, steps + 1):
        losses = cohort.losses(layout.views(w), {name: next(stream_) for name, stream_ in batches.items()})
        (g,) = torch.autograd.grad(losses.sum(), w)
        with torch.no_grad():
            now = moments(g, state, knobs, t)
            next_batch, own = (g * state["u"]).sum(1), (g * now.adam).sum(1)
            gate = now.strict(knobs, t).sum(1) / layout.size
            sums += torch.stack([losses.detach(), g.norm(dim=1), next_batch, own, gate]).double()
            w.sub_(bench.rates[0] * min(1.0, t / max(1.0, shared["lr_warmup"])) * (now.adam + decay * w))
            state = {**now.kept, "u": now.adam}
        if t % window == 0:
            _look(seen, sums / window, cohort.measure(layout.views(w.detach())))
            sums = torch.zeros_like(sums)
            if report is not None:
                report(f"{task.name}: {t} of {steps}")
    ends = [window * (i + 1) for i in range(steps // window)]
    return {"steps": ends, **{name: torch.stack(values, 1).tolist() for name, values in seen.items()}}


def _look(seen: dict[str, list[Tensor]], means: Tensor, measured: Mapping[str, Tensor]) -> None:
    loss, norm, next_batch, own, gate = means
    for name, value in zip(SEEN, (loss, norm, next_batch / own, gate), strict=True):
        seen.setdefault(name, []).append(value)
    for name, value in measured.items():
        seen.setdefault(name, []).append(value.double())


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.gates.evidence``: a quarter of an hour on one core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/gate_evidence.json"))
    parser.add_argument("--data", default="data", help="folder that holds the folder fashion with its idx files")
    parser.add_argument("--smoke", action="store_true", help="a second, at a tiny size")
    options = parser.parse_args(arguments)
    config = SMOKE
    if not options.smoke:
        config = EvidenceConfig(images_in(GateVariantsConfig(), options.data))
    found = run(config, lambda words: print(words, flush=True))
    stored = {name: value for name, value in asdict(config).items() if name != "study"}
    print(f"Wrote {save_result(options.output, KIND, stored, found)}")


if __name__ == "__main__":
    main()
