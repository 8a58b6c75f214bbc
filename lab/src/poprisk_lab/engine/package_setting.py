"""The setting of the authors' own package: an SNR gate with λ = 1 and ρ = .99, after 32 steps without gating."""

from collections.abc import Mapping
from typing import Any

from poprisk_lab.engine.study import Setting

PACKAGE, PACKAGE_PER_TENSOR = "authors' package setting", "authors' package setting per tensor"
PACKAGE_RULE: dict[str, float] = {"strength": 1.0, "rho": 0.99, "gate_warmup": 32.0}
PACKAGE_ARMS: dict[str, str] = {PACKAGE: "snr", PACKAGE_PER_TENSOR: "tensor_gate"}
"""One gate for each weight, or one for each tensor."""


def package_settings(shared: Mapping[str, float], ending: str = " at AdamW's lr") -> tuple[Setting, ...]:
    """The package's setting as two rows of a report, with everything else shared.

    Args:
        shared: Learning rate and other hyper-parameters that are shared with AdamW.
        ending: End of the labels, which says what is shared.

    >>> [setting.label for setting in package_settings({"lr": 1e-3})]
    ["authors' package setting at AdamW's lr", "authors' package setting per tensor at AdamW's lr"]
    """
    return tuple(Setting(f"{words}{ending}", arm, {**shared, **PACKAGE_RULE}) for words, arm in PACKAGE_ARMS.items())


def package_rows(study: Mapping[str, Any], words: str) -> list[Mapping[str, Any]]:
    """The rows of a stored study with the package's setting; none if it was not measured.

    Args:
        study: A stored study.
        words: :data:`PACKAGE` or :data:`PACKAGE_PER_TENSOR`.
    """
    return [
        row
        for row in study["rows"]
        if not row["chosen_for"]
        and row["arm"] == PACKAGE_ARMS[words]
        and all(row["hyper"].get(name) == value for name, value in PACKAGE_RULE.items())
    ]
