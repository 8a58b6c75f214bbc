"""Shapes in the gates' type hints are executed in this folder, wherever a rule calls a gate."""

import pytest

from poprisk.optim.rules import _gates as gates

try:
    from beartype import beartype
    from jaxtyping import jaxtyped

    CHECKED = {
        name: jaxtyped(typechecker=beartype)(getattr(gates, name)) for name in ("hard_gate", "soft_gate", "snr_gate")
    }
except ImportError:
    CHECKED = {}


@pytest.fixture(autouse=True, scope="module")
def _checked_gates():
    with pytest.MonkeyPatch.context() as patch:
        for name, gate in CHECKED.items():
            patch.setattr(gates, name, gate)
        yield
