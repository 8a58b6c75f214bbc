"""What ``poprisk train --hold-back`` says at its end: the risk of the kept weights, and how they do on the test set."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poprisk.runs import Run


def kept_found(run: "Run") -> dict[str, Any] | None:
    """Facts about the kept weights as JSON values; None if nothing was held back."""
    kept = run.kept
    if kept is None:
        return None
    risk = kept.risk
    return {
        "examples": kept.count,
        **{name: _plain(getattr(risk, name)) for name in ("value", "standard_error", "valid", "reason")},
        "step": risk.step,
        "tail": risk.tail,
        "accuracy": _plain(risk.accuracy),
        "measurements": risk.measured,
        "test": _tested(run),
    }


def kept_lines(found: dict[str, Any], steps: int) -> list[str]:
    """The same as sentences."""
    from poprisk.report import size_of
    from poprisk.risk import Estimate

    tail = found["tail"]
    mean = "" if tail is None else f", averaged over about the last {100 * tail:.3g}% of the steps up to it"
    right = "" if found["accuracy"] is None else f" and accuracy {found['accuracy']:.1%}"
    risk = size_of(Estimate(found["value"], found["standard_error"])) if found["valid"] else "not valid"
    why = "" if found["valid"] else f" ({found['reason']})"
    lines = [
        f"Kept the weights of step {found['step']} of {steps}{mean}: held-back risk {risk}{why}{right} on "
        f"{found['examples']} examples that no step trained on."
    ]
    if found["test"] is not None:
        kept, last = found["test"]["kept"], found["test"]["last"]
        by = "loss" if kept["accuracy"] is None or last["accuracy"] is None else "accuracy"
        shown = [f"{each[by]:.1%}" if by == "accuracy" else f"{each[by]:.3g}" for each in (kept, last)]
        lines.append(f"Test {by}: {shown[0]} with the kept weights, {shown[1]} with those of the last step.")
    return lines


def _tested(run: "Run") -> dict[str, dict[str, float | None]] | None:
    """Loss and accuracy on the test set, of the kept weights and of those of the last step."""
    from poprisk.report import put_weights, scores_on_test

    if run.problem.test is None or run.kept is None:
        return None
    module, found = run.module().eval(), {}
    for name in ("kept", "last"):
        if name == "kept":
            module.load_state_dict(run.kept.weights)
        else:
            put_weights(run, module, run.num_steps)
        losses, accuracy = scores_on_test(run.problem, module)
        found[name] = {"loss": losses.mean().item(), "accuracy": accuracy}
    return found


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
