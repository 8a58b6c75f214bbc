"""The commands and calls that a report names: to write the page again, to repeat the run, or to change one thing."""

import inspect
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from poprisk.optim import Gate, join_gate
from poprisk.report._drawing.advice import CORRECTED, Action
from poprisk.runs import OPTIMIZERS, Run

_NAMES = {"torch.optim.AdamW": "adamw", "torch.optim.SGD": "sgd", "poprisk.PopRiskAdamW": "poprisk"}
"""Optimizers of ``poprisk train``."""


def with_command(run: Run, action: Action) -> Action:
    """The action with the command or call of ``train`` that it asks for; in words for a loop of the user's own."""
    if action.call is None:
        return action
    name, changes = action.call
    place = name if run.path is None else f"{run.path.as_posix()}-{name}"
    if name == CORRECTED:
        return replace(action, command=review_commands(run))
    command = train_command(run, path=place, **changes)  # type: ignore[arg-type]
    if command:
        return replace(action, command=command)
    text = training_call(run, path=place, **changes)  # type: ignore[arg-type]
    if text:
        return replace(action, command=text.rpartition("\n")[2])
    words = {
        "steps": "train for {} steps instead of " + str(run.num_steps),
        "lr": "multiply the learning rate by {}",
        "hold_back": "hold back a share of {} with poprisk.hold_back and poprisk.KeepBest",
    }
    return replace(
        action, command="# in your training loop: " + ", ".join(words[k].format(v) for k, v in changes.items())
    )


def report_command(
    run: Path, output: Path, budget: float, retrain: int, examples: bool, clean: Path | None, problem: str | None
) -> str:
    """The command that writes this page.

    >>> report_command(Path("run 1"), Path("page.html"), 20.0, 0, False, None, None)
    "poprisk report 'run 1' --output page.html --budget 20 --no-examples"
    """
    words = ["poprisk", "report", run.as_posix(), "--output", output.as_posix(), "--budget", f"{budget:g}"]
    words += ["--retrain", str(retrain)] if retrain else []
    words += [] if examples else ["--no-examples"]
    words += [] if clean is None else ["--clean", clean.as_posix()]
    words += [] if problem is None else ["--problem", problem]
    return shlex.join(words)


def review_commands(run: Run) -> str:
    """What to do with the decisions of a review: train on the corrected labels and compare, or write them to a file."""
    where = "RUN" if run.path is None else run.path.as_posix()
    apply = shlex.join(["poprisk", "audit", where, "--apply", "decisions.json", "--output", "corrected.npy"])
    again = _is_corrected(run)  # the decisions are about labels that only the run has
    place = f"{where}-{CORRECTED}"
    train = train_command(run, path=place, labels="corrected.npy" if again else "decisions.json")
    lines = [train, shlex.join(["poprisk", "compare", where, place])] if train else []
    return "\n".join([apply, *lines] if again or not train else lines)


def train_command(
    run: Run,
    *,
    path: str,
    steps: int | None = None,
    lr: float = 1.0,
    hold_back: float | None = None,
    labels: str | None = None,
) -> str:
    """The ``poprisk train`` command that repeats a run with a change; empty if the record does not determine one.

    Args:
        run: The run.
        path: Directory of the new run.
        steps: Another number of steps.
        lr: Factor for the learning rate.
        hold_back: Another share of examples to hold back.
        labels: File with corrected labels.
    """
    recipe = _recipe(run)
    name = _NAMES.get(run.manifest["optimizer"]["name"])
    if recipe is None or name is None or run.layout.dtype.itemsize != 4:
        return ""
    source, training, given = recipe
    options = given | ({"lr": float(f"{given.get('lr', _usual_lr(run)) * lr:.6g}")} if lr != 1 else {})
    if source["arguments"] or not options.keys() <= {"lr"} or training.get("accumulate", 1) != 1:
        return ""
    if _is_corrected(run) and labels is None:
        return ""
    words = ["poprisk", "train", _path(run, source)]
    words += ["--optimizer", name] if name != "adamw" else []
    words += ["--lr", f"{options['lr']:g}"] if "lr" in options else []
    words += ["--steps", str(steps or run.num_steps), "--batch-size", str(training["batch_size"])]
    seed, clip, held = run.manifest["seed"], training.get("clip_norm"), training.get("hold_back") or {}
    words += ["--seed", str(seed)] if seed else []
    words += ["--clip-norm", f"{clip:g}"] if clip is not None else []
    words += ["--hold-back", f"{hold_back or held.get('share', 0):g}"]
    words += ["--tail", f"{held['tail']:g}"] if isinstance(held.get("tail"), float) and held["tail"] != 0.2 else []
    words += ["--labels", labels] if labels else []
    return shlex.join([*words, "--output", path])


def training_call(
    run: Run, *, steps: int | None = None, lr: float = 1.0, hold_back: float | None = None, path: str = "again"
) -> str:
    """The call of ``poprisk.train`` that reproduces the run; empty if the record does not determine it.

    Args:
        run: The run.
        steps: Another number of steps.
        lr: Factor for the learning rate.
        hold_back: Another share of examples to hold back.
        path: Directory of the new run.

    >>> import torch
    >>> from poprisk.runs import Problem, train
    >>> x = torch.eye(2)
    >>> problem = Problem(torch.nn.Linear, "squared", x, x, arguments={"in_features": 2, "out_features": 2})
    >>> training_call(train(problem, torch.optim.SGD, 2, progress=False))
    ''
    """
    recipe = _recipe(run)
    if recipe is None or _is_corrected(run):
        return ""
    manifest, (source, training, kept) = run.manifest, recipe
    name = manifest["optimizer"]["name"]
    kept |= {"lr": float(f"{kept.get('lr', _usual_lr(run)) * lr:.6g}")} if lr != 1 else {}
    options = "".join(f", {k}={v!r}" for k, v in kept.items())
    arguments = "".join(f", {k}={v!r}" for k, v in source["arguments"].items())
    extra = "".join(
        f", {k}={training[k]!r}"
        for k, usual in (("accumulate", 1), ("clip_norm", None))
        if training.get(k, usual) != usual
    )
    if held := training.get("hold_back"):
        extra += f", hold_back={hold_back or held['share']!r}, tail={held['tail']!r}"
    elif hold_back is not None:
        extra += f", hold_back={hold_back!r}"
    extra += f", every={manifest['every']}" if manifest["every"] != 1 else ""
    extra += ", dtype=torch.float64" if run.layout.dtype.itemsize == 8 else ""
    module, short = name.rpartition(".")[::2]
    gate = "Gate, " * isinstance(kept.get("gate"), Gate)
    return (
        "from functools import partial\n"
        + ("import torch\n" if "torch.float64" in extra else "")
        + f"from {module} import {short}\nfrom poprisk import {gate}Problem, train\n"
        f"problem = Problem.build({_path(run, source)!r}{arguments})\n"
        f"train(problem, partial({short}{options}), {steps or run.num_steps}, batch_size={training['batch_size']}, "
        f"seed={manifest['seed']}, path={json.dumps(path)}{extra})"
    )


def _path(run: Run, source: dict[str, Any]) -> str:
    """Path of the function that makes the problem; for a script, relative to the run's directory."""
    if source.get("folder") is None:
        return source["path"]
    where = Path(os.path.normpath((run.path or Path()) / source["folder"]))
    return (where / source["path"]).as_posix()


def _recipe(run: Run) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """The function that makes the problem, the settings of the loop, and the optimizer's unusual options.

    None if the record does not determine the run: a problem that cannot be rebuilt, a loop of the user's own, or a
    schedule, of which only the values are known.
    """
    manifest = run.manifest
    problem, training = manifest["problem"], manifest["training"]
    source = None if problem is None else problem["source"]
    if source is None or source["path"] is None or not isinstance(training, dict) or "batch_size" not in training:
        return None
    if not all(name.isidentifier() for name in source["arguments"]):
        return None  # made by hand: no code to be copied comes of it
    groups = run.options(0)
    if len(groups) != 1 or groups != run.options(run.num_steps) or "refit" in training:
        return None
    defaults = _defaults(run)
    given = join_gate(groups[0]) if "gate" in groups[0] else groups[0]
    kept = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in defaults}
    return source, training, {k: v for k, v in kept.items() if v not in (defaults[k], Gate())}


def _defaults(run: Run) -> dict[str, Any]:
    made = OPTIMIZERS[run.manifest["optimizer"]["name"]].__init__
    return {k: p.default for k, p in inspect.signature(made).parameters.items()}


def _usual_lr(run: Run) -> float:
    return _defaults(run)["lr"]


def _is_corrected(run: Run) -> bool:
    """Whether targets were changed after the problem's function made them: the call needs their file."""
    return any("changed" in split for split in run.manifest["problem"].get("splits", ()))
