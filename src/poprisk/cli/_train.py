"""``poprisk train``: record the training of a user's own model."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poprisk.cli._opening import built
from poprisk.cli._options import AsJson, examples, number
from poprisk.cli._outcome import interrupt_says, interrupt_waits, note, user_code
from poprisk.cli._output import show
from poprisk.cli._train_plan import LIMITS, OPTIMIZERS, TrainPlan, read_plan
from poprisk.errors import RunError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from poprisk.runs import Problem, Run

EXAMPLES = examples(
    "poprisk train task.py:make_task",
    "poprisk train task.py:make_task --epochs 50 --batch-size 64 --output runs/first",
    "poprisk train package.tasks:digits --optimizer adamw --lr 3e-4",
    "poprisk train first.toml",
)
_DENSE = 2**30
"""Bytes up to which every step's weights are recorded unless said otherwise."""
_MOST_CHECKPOINTS = 50


def train(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="script.py:function or package.module:function, which takes no arguments and returns a "
            "poprisk.Problem; or a .toml file.",
        ),
    ],
    optimizer: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(OPTIMIZERS)}, at its own defaults. Default: poprisk.", show_default=False
        ),
    ] = None,
    lr: Annotated[
        float | None,
        number(1e-12, 1e6, "Learning rate. Default: the optimizer's own.", show_default=False),
    ] = None,
    steps: Annotated[int | None, number(*LIMITS["steps"], "How many steps.", show_default=False)] = None,
    epochs: Annotated[
        int | None, number(*LIMITS["epochs"], "How often to go over the data. Default: 20.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None,
        number(
            *LIMITS["batch_size"],
            "Examples in a step. Default: 32, at most a sixth of the data.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        number(*LIMITS["seed"], "Of batches, augmentation and dropout. Default: 0.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory for the run. Default: poprisk-run.", show_default=False),
    ] = None,
    every: Annotated[
        int | None,
        number(
            *LIMITS["every"],
            "Steps between recorded weights; what lies between is computed again when it is needed. Default: 1, or "
            "more where that would take over a gibibyte.",
            show_default=False,
        ),
    ] = None,
    clip_norm: Annotated[
        float | None, number(*LIMITS["clip_norm"], "Scale gradients down to this norm.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train your own model and record the run, for poprisk report, analyze and audit.

    TASK names a function that returns a poprisk.Problem: a model factory, a loss, inputs and targets. Interrupted, or
    killed, the same command goes on where the run stopped. A .toml file has task = "script.py:function", any of the
    options, and the tables arguments (of the function) and optimizer (name and any option of it).
    """
    given = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "seed": seed, "every": every}
    given |= {"optimizer": optimizer, "lr": lr, "output": output, "clip_norm": clip_norm}
    plan = read_plan(task, given)
    make_optimizer = plan.make_optimizer()
    problem = built(plan.task, **plan.arguments)
    began = time.perf_counter()
    start, run = _train(plan, problem, make_optimizer)
    found = _found(plan, run, start, time.perf_counter() - began)
    show(_lines(problem, run, found), found, as_json)


def _train(plan: TrainPlan, problem: "Problem", make_optimizer: "Callable[..., Optimizer]") -> "tuple[int, Run]":
    """The number of steps that were there already, and the whole run."""
    from poprisk._core.progress import training_progress
    from poprisk.runs import MANIFEST, DirectoryStorage
    from poprisk.runs import train as train_run

    steps, n, output = plan.steps_of(len(problem)), len(problem), plan.output
    manifest = DirectoryStorage(output).read_manifest()
    if manifest is not None and not manifest["num_steps"]:
        (output / MANIFEST).unlink()  # of a training that failed before its first step: nothing is lost
        manifest = None
    start = 0 if manifest is None else manifest["num_steps"]
    with user_code("making the model"):
        module = problem.module()
        made = make_optimizer([p for p in module.parameters() if p.requires_grad])
    if manifest is not None:
        _check_same(manifest, made, output)
        note(f"{output} has {start} steps already; " + (f"going on to {steps}" if start < steps else "nothing to do"))
    every = plan.every or (manifest["every"] if manifest is not None else _every(module, made, steps))
    if manifest is None and plan.every is None and every > 1:
        note(f"weights are recorded every {every} steps, because all of them would take more than 1 GiB (--every)")

    def kept() -> str:
        there = DirectoryStorage(output).read_manifest()
        done = 0 if there is None else there["num_steps"]
        return f"{done} of {steps} steps are kept in {output}, and the same command goes on from there" if done else ""

    shown = training_progress(problem.name, min(start, steps), steps)
    with interrupt_says(kept), interrupt_waits("this step") as asked, user_code("the training"), shown as report:

        def after_step(k: int, loss: Any) -> None:
            report(k, loss)
            if asked() and k < steps:
                raise KeyboardInterrupt

        run = train_run(
            problem,
            make_optimizer,
            steps,
            batch_size=plan.batch_of(n),
            seed=plan.seed,
            path=output,
            every=every,
            clip_norm=plan.clip_norm,
            resume=True,
            progress=after_step,
        )
    return start, run


def _check_same(manifest: dict[str, Any], made: "Optimizer", output: Path) -> None:
    """The recorder compares the rest; options of the optimizer it would take from the run without a word."""
    from poprisk.runs import plain, plain_options

    for there, group in zip(manifest["optimizer"]["groups"], made.param_groups, strict=False):
        here = plain(plain_options(group))
        name = next((name for name in here if name in there and there[name] != here[name]), None)
        if name is not None:
            raise RunError(
                f"{output} holds a run with {name}={there[name]}, got {name}={here[name]}: name another directory with "
                "--output"
            )


def _every(module: Any, optimizer: "Optimizer", steps: int) -> int:
    """1 where all weights take little, else so that about as much is taken."""
    from poprisk.runs import bytes_per_step, layout_of, usual_segment

    layout, _ = layout_of(module, optimizer)
    if bytes_per_step(optimizer, layout, 1, usual_segment(layout)) * steps <= _DENSE:
        return 1
    checkpoint = bytes_per_step(optimizer, layout, 2, 1)
    return math.ceil(steps / max(1, min(_MOST_CHECKPOINTS, int(_DENSE // checkpoint))))


def _found(plan: TrainPlan, run: "Run", start: int, seconds: float) -> dict[str, Any]:
    losses = run.losses.tolist()
    return {
        "run": plan.output.as_posix(),
        "examples": run.num_examples,
        "weights": run.num_weights,
        "steps": run.num_steps,
        "steps_before": start,
        "optimizer": run.manifest["optimizer"]["name"],
        "lr": run.options(0)[0]["lr"],
        "batch_size": len(run.batch(0)),
        "seed": run.manifest["seed"],
        "every": run.manifest["every"],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "seconds": round(seconds, 3),
        "next": f"poprisk report {plan.output.as_posix()}",
    }


def _lines(problem: "Problem", run: "Run", found: dict[str, Any]) -> list[str]:
    from poprisk.runs import readable_size

    size = readable_size(sum(file.stat().st_size for file in Path(found["run"]).glob("*") if file.is_file()))
    name = found["optimizer"].rpartition(".")[2]
    return [
        f"{problem.name}: {run.num_steps} steps of {name} at lr {found['lr']:g} in batches of {found['batch_size']} of "
        f"{run.num_examples} examples; loss of a batch {found['first_loss']:.3g} at first, {found['last_loss']:.3g} at "
        "last.",
        f"Recorded in {found['run']} ({size}).",
        f"Next: {found['next']}",
    ]
