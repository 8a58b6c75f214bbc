"""``poprisk train``: train the user's own model and record the run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poprisk.cli._options import AsJson, built, examples, number
from poprisk.cli._outcome import interrupt_says, interrupt_waits, note, user_code
from poprisk.cli._output import show
from poprisk.cli._train_kept import REFIT, kept_found, kept_lines, refit_lines, refitted, tested, tested_words
from poprisk.cli._train_plan import HOLD_BACK, LIMITS, OPTIMIZER, OPTIMIZERS, SHARE, TAIL, TrainPlan, read_plan
from poprisk.errors import RunError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from poprisk.runs import Problem, Run

EXAMPLES = examples(
    "poprisk train task.py:make_task",
    "poprisk train task.py:make_task --epochs 50 --batch-size 64 --output runs/first",
    "poprisk train package.tasks:digits --optimizer adamw --lr 3e-4",
    "poprisk train task.py:make_task --labels decisions.json --output runs/second",
    "poprisk train first.toml",
)


def train(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="Function without required arguments that returns a poprisk.Problem, as script.py:function or "
            "package.module:function; or a .toml file.",
        ),
    ],
    optimizer: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(OPTIMIZERS)} (poprisk: PopRiskAdamW), with its own defaults. Default: "
            f"{OPTIMIZER}.",
            show_default=False,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        number(1e-12, 1e6, "Learning rate. Default: the optimizer's.", show_default=False),
    ] = None,
    steps: Annotated[int | None, number(*LIMITS["steps"], "Number of steps.", show_default=False)] = None,
    epochs: Annotated[
        int | None, number(*LIMITS["epochs"], "Number of passes over the data. Default: 20.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None,
        number(
            *LIMITS["batch_size"],
            "Examples per step. Default: 32, but at most a sixth of the data.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        number(*LIMITS["seed"], "Seed for batches, augmentation and dropout. Default: 0.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory for the run. Default: poprisk-run.", show_default=False),
    ] = None,
    every: Annotated[
        int | None,
        number(
            *LIMITS["every"],
            "Interval, in steps, between recorded weights; those in between are recomputed when needed. Default: 1, or "
            "more if that would take more than 1 GiB.",
            show_default=False,
        ),
    ] = None,
    clip_norm: Annotated[
        float | None, number(*LIMITS["clip_norm"], "Clip the gradient to this norm.", show_default=False)
    ] = None,
    hold_back: Annotated[
        float | None,
        number(
            *LIMITS["hold_back"],
            "Share of the examples to hold back from training and to choose the final weights by: averaged weights are "
            f"measured on them along the run, and the best are kept beside it. Without a number: {SHARE}; 0 holds none "
            f"back. Default: {HOLD_BACK:g}.",
            show_default=False,
        ),
    ] = None,
    tail: Annotated[
        float | None,
        number(
            *LIMITS["tail"],
            f"With --hold-back, the share of the steps so far that the weights are averaged over. Default: {TAIL}.",
            show_default=False,
        ),
    ] = None,
    refit: Annotated[
        bool | None,
        typer.Option(
            "--refit",
            help="After the held-back examples chose the moment, train again on all examples for as many passes, into "
            "the folder refit of the run's directory, and end with those weights.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Train on corrected labels: the decisions exported from a report (.json or .csv), or targets written "
            "by poprisk audit (.npy or .csv). The task stays as it is. Several are applied one after another.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train your own model and record the run, for poprisk report, analyze and audit.

    TASK names a function that returns a poprisk.Problem: a model factory, a loss, inputs and targets. If the training
    is interrupted or killed, the same command continues it. A .toml file contains task = "script.py:function", any of
    the options, and the tables arguments (for the function) and optimizer (its name and options).
    """
    given = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "seed": seed, "every": every}
    given |= {"optimizer": optimizer, "lr": lr, "output": output, "clip_norm": clip_norm}
    given |= {"hold_back": hold_back, "tail": tail, "refit": refit or None, "labels": tuple(labels or ()) or None}
    plan = read_plan(task, given)
    make_optimizer = plan.make_optimizer()
    problem, changed = _corrected(built(plan.task, **plan.arguments), plan.labels)
    began = time.perf_counter()
    start, run = _train(plan, problem, make_optimizer)
    again = refitted(run, make_optimizer, plan.output / REFIT) if plan.refit else None
    found = _found(plan, run, start, time.perf_counter() - began) | {"refit": again}
    found["labels_changed"] = changed
    show(_lines(_name(plan, problem), run, found), found, as_json)


def _corrected(problem: "Problem", files: tuple[Path, ...]) -> "tuple[Problem, int]":
    """The problem with the corrections in the files, and how many targets these change."""
    from poprisk.risk import corrected_targets

    given = problem.targets
    for file in files:
        problem = problem.with_targets(corrected_targets(file, problem))
    return problem, int((problem.targets != given).reshape(len(given), -1).any(1).sum())


def _train(plan: TrainPlan, problem: "Problem", make_optimizer: "Callable[..., Optimizer]") -> "tuple[int, Run]":
    """The number of steps already recorded, and the finished run."""
    from poprisk._core.progress import training_progress
    from poprisk.runs import DirectoryStorage, usual_interval
    from poprisk.runs import train as train_run

    n, output = plan.trained(len(problem)), plan.output
    steps = plan.steps_of(n)
    manifest = DirectoryStorage(output).read_manifest()
    if manifest is not None and not manifest["num_steps"]:
        manifest = None  # left by a training that failed before its first step
    start = 0 if manifest is None else manifest["num_steps"]
    with user_code("making the model"):
        module = problem.module()
        problem.check_fits(module)
        made = make_optimizer([p for p in module.parameters() if p.requires_grad])
    if manifest is not None:
        _check_same(manifest, made, output)
        note(_there(plan, manifest, steps, max(1, n // plan.batch_of(n))))
    every = plan.every or (manifest["every"] if manifest is not None else usual_interval(module, made, steps))
    if manifest is None and plan.every is None and every > 1:
        note(f"recording weights every {every} steps, as every step would take over 1 GiB; change it with --every")

    def kept() -> str:
        there = DirectoryStorage(output).read_manifest()
        done = 0 if there is None else there["num_steps"]
        return f"{done} of {steps} steps are kept in {output}; the same command continues from there" if done else ""

    shown = training_progress(_name(plan, problem), min(start, steps), steps)
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
            hold_back=plan.hold_back or None,
            tail=plan.tail,
            progress=after_step,
        )
    return start, run


def _name(plan: TrainPlan, problem: "Problem") -> str:
    """The problem's name, or its task's if it was given none."""
    return plan.task if problem.name == "problem" else problem.name


def _there(plan: TrainPlan, manifest: dict[str, Any], steps: int, per_epoch: int) -> str:
    """What the directory holds, and what this command adds to it."""
    start = manifest["num_steps"]
    holds = f"{plan.output} already holds {start} steps ({start / per_epoch:.4g} epochs)"
    if start < steps:
        return f"{holds}; continuing to {steps}"
    asked = f"this command asks for {steps} ({steps / per_epoch:.4g} epochs), so there is nothing to do"
    more = f"more than {start} steps" if plan.steps else f"more than {start // per_epoch} epochs"
    return f"{holds}, and {asked}: choose another directory with --output, or {more} to continue this run"


def _check_same(manifest: dict[str, Any], made: "Optimizer", output: Path) -> None:
    """Check the optimizer's options against the recorded ones; the recorder checks everything else."""
    from poprisk.runs import plain, plain_options

    for there, group in zip(manifest["optimizer"]["groups"], made.param_groups, strict=False):
        here = plain(plain_options(group))
        name = next((name for name in here if name in there and there[name] != here[name]), None)
        if name is not None:
            raise RunError(
                f"{output} holds a run with {name}={there[name]}, got {name}={here[name]}: choose another "
                "directory with --output"
            )


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
        "kept": kept_found(run),
        "test": None if run.kept is not None or run.problem.test is None else tested(run, "last"),
        "seconds": round(seconds, 3),
        "next": f"poprisk report {plan.output.as_posix()}",
    }


def _lines(name: str, run: "Run", found: dict[str, Any]) -> list[str]:
    from poprisk.runs import readable_size

    size = readable_size(sum(file.stat().st_size for file in Path(found["run"]).glob("*") if file.is_file()))
    optimizer, kept = found["optimizer"].rpartition(".")[2], found["kept"]
    drawn = f"{run.num_examples - kept['examples']} of {run.num_examples}" if kept else run.num_examples
    return [
        *([f"Labels: {found['labels_changed']} of {run.num_examples} corrected."] if found["labels_changed"] else ()),
        f"{name}: {run.num_steps} steps of {optimizer} at lr {found['lr']:g} with batches of {found['batch_size']} "
        f"from {drawn} examples; batch loss {found['first_loss']:.3g} at the first step, "
        f"{found['last_loss']:.3g} at the last.",
        *(kept_lines(kept, run.num_steps) if kept else ()),
        *([f"{tested_words(found['test'])} with the weights of the last step."] if found["test"] else ()),
        *(refit_lines(found["refit"], run.num_examples) if found["refit"] else ()),
        f"Recorded in {found['run']} ({size}).",
        f"Next: {found['next']}",
    ]
