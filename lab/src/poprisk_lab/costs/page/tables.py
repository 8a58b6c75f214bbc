"""The measured part of the page on scaling: machines, cost models, predictions beside measurements, exponents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from poprisk_lab.costs.machine import CheckedOperation, Machine, Point, checked_operations, geometric_mean, machine_of
from poprisk_lab.costs.network import Network
from poprisk_lab.costs.page.words import byte_count, count_words, duration, power_words, two_digits
from poprisk_lab.costs.trajectories import recording
from poprisk_lab.pages.wording import table

GOOD = 1.5
"""A prediction within this factor of the measurement counts as right."""
LEAN = 1.2
"""The page names operations whose mean of prediction over measurement is beyond this factor."""


@dataclass(frozen=True)
class Measured:
    """One stored benchmark."""

    file: str
    saved: Mapping[str, Any]

    @cached_property
    def machine(self) -> Machine:
        """What it ran on."""
        return machine_of(self.saved)

    @cached_property
    def operations(self) -> dict[str, CheckedOperation]:
        """Those with enough points, in the order of the page."""
        found = checked_operations(self.saved)
        return {name: found[name] for name in OPERATIONS if name in found}

    @property
    def is_gpu(self) -> bool:
        """Or one processor."""
        return self.saved["device"] == "cuda"


@dataclass(frozen=True)
class Operation:
    """How an operation is called, and its formulas in words."""

    title: str
    call: str
    flops: str
    moved: str
    held: str


OPERATIONS = {
    "optimizer_step": Operation(
        "optimizer step", "`PopRiskAdamW.step`", "–", "d (2 (p + m + v + s) + g)", "d (p + g + m + v + s)"
    ),
    "adamw_step": Operation(
        "fused AdamW step", "`torch.optim.AdamW.step`", "–", "d (2 (p + m + v) + g)", "d (p + g + m + v)"
    ),
    "training_step": Operation("forward and backward", "a training step", "(6d − 2d₁) tokens", "3d + 11 a", "2d + a"),
    "jacobian_tile": Operation(
        "kernel tile, Jacobian rows",
        '`train_kernel(method="jacobian contraction")`',
        "(n + n′)(f + p(2f − f₁)) + 2NN′d",
        "4(N + N′)d + 10(N + N′)A + NN′",
        "(N + N′)(1 + 3/stretches)d + NN′",
    ),
    "factor_tile": Operation(
        "kernel tile, layer factors",
        '`train_kernel(method="layer factors")`',
        "(n + n′)(f + p(f − f₁)) + Σ T²(2NN′ out + 2nn′ in)",
        "(4L + 1)NN′ + 4L nn′ + (4p + 13)(n + n′)A",
        "(n + n′) Σ T(in + p out) + 2NN′",
    ),
    "product_tile": Operation(
        "kernel tile, vector products",
        '`train_kernel(method="vector products")`',
        "n′[f + p(2f − f₁) + n(p(2f − f₁) + f + f₁)]",
        "n′[(4.5p + 8.5cp + 3)d + 9(p + 1)nA]",
        "3pd + block",
    ),
    "convolution_rows": Operation(
        "rounded rows, ResNet-18", "`rounded_kernel`, its rows", "n(f + p(2f − f₁))", "16 npA + 4.5 npd", "½ npd"
    ),
    "rounded_product": Operation(
        "rounded product",
        "`rounded_kernel`, its products",
        "2NN′r in float16",
        "½ r(N + N′) + 2NN′⌈r/16384⌉",
        "½ r(N + N′)",
    ),
    "kernel_product": Operation(
        "kernel times k columns",
        "`kernel_operator(…) @ X`",
        "n[2k(2f − f₁) + 2f + f₁]",
        "17ckd + 15knA + 5d + 14nA",
        "kd + block",
    ),
    "window_gramian": Operation(
        "W times k columns",
        "`Window.dissipation_gramian @ X`",
        "T[(b + qn)(2k(2f − f₁) + 2f + f₁) + 4nkp² + 2kd + 2npk]",
        "T[(42 + 17qc)kd + 17k(n + b)A + 68d + 3(n + b)A]",
        "(T + 5)kd + block",
    ),
    "window_transfer": Operation(
        "G times k columns",
        "`Window.test_transfer @ X`",
        "T[b(k(2f − f₁) + f) + q(n + m)(k(2f − f₁) + f + f₁) + 2nkp² + 4kd]",
        "T[(12 + 8.5q(c + c′))kd + 10.5k(n + b + m)A + 55d]",
        "5kd + block",
    ),
    "adjoint": Operation(
        "adjoint of Q queries",
        "`Unrolled(run).adjoint`, `influence_on`",
        "Tb[Q(6f − 4f₁ + 2p²) + 3f]",
        "T[31Qd + 28QbA + 30d]",
        "7Qd + QbA",
    ),
    "retraining": Operation(
        "K members retrained", "`retrain`, `k_fold`", "KTb(3f − f₁)", "K[T(14d + 14bA) + 6d]", "13Kd + 4KbA"
    ),
}
"""Every measured operation, in the order of the page."""
_REASONS = {
    ("optimizer_step", "cpu"): "random_rounding",
    ("optimizer_step", "cuda"): "launching_other_states",
    ("rounded_product", "cuda"): "few_rows",
} | dict.fromkeys(
    ((name, "cuda") for name in ("product_tile", "kernel_product", "window_gramian", "window_transfer")),
    "powers_of_two",
)
"""Known reasons for predictions that fail, by operation and device; the template has the words."""
_UNITS = {
    "row_length": "row length",
    "test_examples": "test examples",
    "v": "bytes of v",
    "s": "bytes of s",
}


def models_table() -> str:
    """Formulas of every operation."""
    head = ["operation", "call", "flops", "bytes moved / 4", "bytes held / 4"]
    rows = [[each.title, each.call, each.flops, each.moved, each.held] for each in OPERATIONS.values()]
    for row in rows[:2]:
        row[3:] = [f"{words} bytes" for words in row[3:]]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machines_table(found: Sequence[Measured]) -> str:
    """What each machine does in one large product and one large copy."""
    head = ["machine", "float32 product", "float16 product", "copy", "memory", "torch", "points", "file"]
    rows = []
    for each in found:
        machine, points = each.machine, f"{len(each.saved['rows'])}"
        missing = len(each.saved["missing"])
        half = f"{count_words(machine.half_flops)}flop/s" if each.is_gpu else "as float32"
        rows.append(
            [
                machine.name,
                f"{count_words(machine.float32_flops)}flop/s",
                half,
                f"{byte_count(machine.bytes_per_second)}/s",
                "–" if machine.memory_bytes is None else byte_count(machine.memory_bytes),
                each.saved["environment"]["torch"],
                points + (f" ({missing} missing)" if missing else ""),
                f"`{each.file}`",
            ]
        )
    return table(head, rows)


def checks_table(measured: Measured) -> str:
    """Fitted at the middle size, checked at the others."""
    head = ["operation", "middle size", "share η", "launch τ", "checked at", "span", "off by at most", "within 1.5×"]
    head[-1] = f"within {GOOD:g}×"
    head += ["held, model / measured"] if measured.is_gpu else []
    rows = []
    for name, each in measured.operations.items():
        right, count = each.within(GOOD), len(each.points)
        verdict = f"{right} of {count}" if right == count else f"**{right} of {count}**"
        rows.append(
            [
                OPERATIONS[name].title,
                duration(each.base.seconds),
                f"{each.fit.share:.2f}",
                duration(each.fit.launch_seconds),
                f"{count} sizes",
                f"{two_digits(each.span)}×",
                f"{each.worst:.2f}×",
                verdict,
                *([_held_words(each)] if measured.is_gpu else []),
            ]
        )
    return table(head, rows)


def _held_words(each: CheckedOperation) -> str:
    ratios = each.held_ratios
    return f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else "–"


@dataclass(frozen=True)
class Miss:
    """An operation with sizes whose prediction is off by more than the factor, and the reason where it is known.

    Attributes:
        title: The operation.
        sizes: Each size with the predicted and the measured time, in words.
        reason: Which of the reasons that the template explains; empty if none is known or it was given before.
    """

    title: str
    sizes: str
    reason: str


def misses(measured: Measured) -> list[Miss]:
    """The operations with sizes that are predicted worse than by the factor, each reason once."""
    found, said = [], set()
    for name, each in measured.operations.items():
        wrong = [point for point in each.points if not 1 / GOOD <= point.ratio <= GOOD]
        if wrong:
            reason = _REASONS.get((name, measured.saved["device"]), "")
            sizes = "; ".join(_miss_words(point, each.base) for point in wrong)
            found.append(Miss(OPERATIONS[name].title, sizes, "" if reason in said else reason))
            said.add(reason)
    return found


def _miss_words(point: Point, base: Point) -> str:
    """What is other than at the middle size, and both times."""
    changed = [f"{_size(name)} {power_words(point.sizes[name])}" for name in point.sizes if _changed(name, point, base)]
    return f"{', '.join(changed)}: {duration(point.predicted)} predicted, {duration(point.seconds)} measured"


def _changed(name: str, point: Point, base: Point) -> bool:
    derived = ("forward_flops", "first_flops", "activations", "chunk")
    return name not in derived and point.sizes[name] != base.sizes.get(name)


def biases(measured: Measured) -> dict[str, Any]:
    """Operations whose predictions are too long or too short on average over the checked sizes."""
    means = {name: geometric_mean([p.ratio for p in each.points]) for name, each in measured.operations.items()}
    return {
        "limit": LEAN,
        "long": [f"{OPERATIONS[name].title} {mean:.1f}×" for name, mean in means.items() if mean > LEAN],
        "short": [f"{OPERATIONS[name].title} {1 / mean:.1f}×" for name, mean in means.items() if mean < 1 / LEAN],
    }


def exponents_table(measured: Measured) -> str:
    """How the time grows with each size, measured and by the model."""
    head = ["operation", "size", "from", "to", "measured", "model, same sizes", "model, large sizes"]
    rows = []
    for name, each in measured.operations.items():
        for exponent in each.exponents:
            numbers = [f"{value:.2f}" for value in (exponent.measured, exponent.model, exponent.limit)]
            ends = [power_words(exponent.values[0]), power_words(exponent.values[-1])]
            rows.append([OPERATIONS[name].title, _size(exponent.size), *ends, *numbers])
    return table(head, rows)


def largest_difference(measured: Measured) -> tuple[float, str]:
    """Of an exponent from the model's, and of which."""
    found = [
        (abs(each.measured - each.model), f"{OPERATIONS[name].title}, {_size(each.size)}")
        for name, checked in measured.operations.items()
        for each in checked.exponents
    ]
    return max(found)


def storage_table(measured: Measured) -> str:
    """Recordings on disk beside the formula."""
    head = ["weights", "steps", "kept", "on disk", "model", "model / disk"]
    rows = []
    for row in measured.saved["storage"]:
        sizes = row["sizes"]
        weights, dense = _perceptron_weights(sizes), sizes["every"] == 1
        between = sizes["segment_steps"] if dense else sizes["every"]
        model = recording(weights, steps=sizes["steps"], segment_steps=between, dense=dense)
        kept = "every step" if dense else f"every {sizes['every']}th"
        values = [byte_count(row["bytes"]), byte_count(model), f"{model / row['bytes']:.2f}"]
        rows.append([count_words(weights), str(sizes["steps"]), kept, *values])
    return table(head, rows)


def summary(measured: Measured) -> dict[str, Any]:
    """How good the models are on one machine, with its tables."""
    operations = measured.operations.values()
    apart, which = largest_difference(measured)
    return {
        "name": measured.machine.name,
        "file": measured.file,
        "is_gpu": measured.is_gpu,
        "operations": len(operations),
        "points": sum(len(each.points) for each in operations),
        "right": sum(each.within(GOOD) for each in operations),
        "worst": max(each.worst for each in operations),
        "apart": apart,
        "which": which,
        "drift": max(each.drift for each in operations),
        "checks": checks_table(measured),
        "misses": misses(measured),
        "exponents": exponents_table(measured),
    }


def _size(name: str) -> str:
    return _UNITS.get(name, name)


def _perceptron_weights(sizes: Mapping[str, Any]) -> int:
    width = sizes["width"]
    return Network.perceptron([sizes["inputs"], width, width, sizes["outputs"]]).weights
