"""The end of ``poprisk train --hold-back``: the risk of the kept weights, the test set, and the training on all."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from poprisk.cli._outcome import interrupt_says, interrupt_waits, user_code

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from poprisk.runs import Run

REFIT = "refit"
"""Folder of the second training, in the directory of the first."""


def kept_found(run: "Run") -> dict[str, Any] | None:
    """Facts about the kept weights as JSON values; None if nothing was held back."""
    from poprisk.risk import population_risk

    kept = run.kept
    if kept is None:
        return None
    risk, judged = kept.risk, population_risk(run, "held_back")  # the verdict of every other command
    return {
        "examples": kept.count,
        **{name: _plain(getattr(judged, name)) for name in ("value", "standard_error", "valid", "reason")},
        "step": risk.step,
        "tail": risk.tail,
        "accuracy": _plain(risk.accuracy),
        "measurements": risk.measured,
        "test": None if run.problem.test is None else {which: tested(run, which) for which in ("kept", "last")},
    }


def kept_lines(found: dict[str, Any], steps: int) -> list[str]:
    """The same as sentences."""
    from poprisk.report import as_command, size_of
    from poprisk.risk import Estimate

    tail = found["tail"]
    mean = "" if tail is None else f", averaged over about the last {100 * tail:.3g}% of the steps up to it"
    right = "" if found["accuracy"] is None else f" and accuracy {found['accuracy']:.1%}"
    risk = size_of(Estimate(found["value"], found["standard_error"])) if found["valid"] else "not known"
    why = "" if found["valid"] else f" ({as_command(found['reason'])})"
    if not found["valid"] and (found["standard_error"] or 0.0) > (found["value"] or math.inf):
        risk, why = f"{found['value']:.2g}", ", too uncertain to say how these weights do on new data,"
    lines = [
        f"Kept the weights of step {found['step']} of {steps}{mean}: held-back risk {risk}{why}{right} on "
        f"{found['examples']} examples that no step trained on."
    ]
    if found["test"] is not None:
        kept, last = tested_words(found["test"]["kept"]), tested_words(found["test"]["last"]).rpartition(" ")[2]
        lines.append(f"{kept} with the kept weights, {last} with those of the last step.")
    return lines


def refitted(run: "Run", make_optimizer: "Callable[..., Optimizer]", folder: Path) -> dict[str, Any]:
    """Train again on all examples; facts about the final weights as JSON values."""
    from poprisk._core.progress import training_progress
    from poprisk.runs import DirectoryStorage, refit, refit_steps

    steps = refit_steps(run)

    def done() -> int:
        manifest = DirectoryStorage(folder).read_manifest()
        return 0 if manifest is None else manifest["num_steps"]

    def kept() -> str:
        return f"{done()} of {steps} steps on all examples are kept in {folder}; the same command continues from there"

    shown = training_progress(f"{run.problem.name}, all examples", min(done(), steps), steps)
    with interrupt_says(kept), interrupt_waits("this step") as asked, user_code("the training"), shown as report:

        def after_step(k: int, loss: Any) -> None:
            report(k, loss)
            if asked() and k < steps:
                raise KeyboardInterrupt

        second = refit(run, make_optimizer, path=folder, resume=True, progress=after_step)
    test = None if second.problem.test is None else tested(second, "kept")
    return {"run": folder.as_posix(), "steps": steps, "test": test}


def refit_lines(found: dict[str, Any], examples: int) -> list[str]:
    """The same as sentences."""
    right = f" {tested_words(found['test'])}." if found["test"] else ""
    return [
        f"Trained again on all {examples} examples for {found['steps']} steps, as many passes: the final weights are "
        f"kept in {found['run']}. They are not measured; the held-back risk is that of the first training.{right}"
    ]


def tested(run: "Run", which: Literal["kept", "last"]) -> dict[str, float | None]:
    """Loss and accuracy on the test set, of the kept weights or of those of the last step."""
    from poprisk.report import put_weights, scores_on_test

    module = run.module().eval()
    if which == "kept" and run.kept is not None:
        module.load_state_dict(run.kept.weights)
    else:
        put_weights(run, module, run.num_steps)
    losses, accuracy = scores_on_test(run.problem, module)
    return {"loss": losses.mean().item(), "accuracy": accuracy}


def tested_words(found: dict[str, float | None]) -> str:
    """What was measured on the test set.

    >>> tested_words({"loss": 0.3, "accuracy": 0.985}), tested_words({"loss": 0.31234, "accuracy": None})
    ('Test accuracy: 98.5%', 'Test loss: 0.312')
    """
    if found["accuracy"] is None:
        return f"Test loss: {found['loss']:.3g}"
    return f"Test accuracy: {found['accuracy']:.1%}"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
