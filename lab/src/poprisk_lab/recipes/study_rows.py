"""What the study of recipes trains on a task: optimizers at given settings, with and without held-back examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poprisk_lab.engine.arms import ARMS, USUAL, Arm

TAILS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DECAYS = (0.999,)
SHARE = 0.05
"""Share of the training examples that is held back."""
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates of the swap test."""
MAIN, PEERS, COSTLY = "main", "peers", "costly"
"""Stacks in which rows are trained; the gradients of the last take several passes."""
_FEW_AVERAGES = ("weights", "tail 0.1", "tail 0.2")


@dataclass(frozen=True)
class StudyRow:
    """One optimizer at one setting.

    Attributes:
        name: Name in the stored result; ``literal`` is the engine's arm ``defaults``, the gate that controls follow.
        given: Hyper-parameters that differ from those of the arm.
        share: Share of the training examples that is held back.
        averages: Means of the weights whose curves are stored; empty for all.
        stack: Name of the stack it is trained in.
    """

    name: str
    given: Mapping[str, float] = field(default_factory=dict)
    share: float = SHARE
    averages: tuple[str, ...] = ()
    stack: str = MAIN

    @property
    def arm(self) -> Arm:
        """The arm of the engine."""
        return ARMS["defaults" if self.name == "literal" else self.name]

    @property
    def hyper(self) -> dict[str, float]:
        """All hyper-parameters."""
        return self.arm.hyper(self.given)

    @property
    def shown(self) -> dict[str, float]:
        """Learning rate, weight decay, and the hyper-parameters that differ from the usual ones."""
        return {k: v for k, v in self.hyper.items() if k in ("lr", "weight_decay") or v != USUAL[k]}


def _swapped(name: str, share: float = SHARE, rates: Sequence[float] = RATES) -> list[StudyRow]:
    return [StudyRow(name, {"lr": lr}, share, () if 3e-4 <= lr <= 3e-3 else _FEW_AVERAGES) for lr in rates]


_LITERAL = {name: ARMS["defaults"].hyper({})[name] for name in ("lr", "weight_decay")}
_GATES = [
    StudyRow("literal"),
    StudyRow("soft", {"lr": 1e-2}),
    StudyRow("hard", {"lr": 1e-2}),
    StudyRow("snr", {"lr": 1e-2, "strength": 1.0}),
    StudyRow("cautious", {"lr": 1e-3}),
]
_CONTROLS = [StudyRow(name, _LITERAL, averages=_FEW_AVERAGES) for name in ("gate_schedule", "random_mask")]
_PEERS = [
    StudyRow("shuffled_gate", _LITERAL, averages=_FEW_AVERAGES, stack=PEERS),
    *(StudyRow(name, stack=PEERS) for name in ("schedule_free", "casmo", "magma")),
    *(StudyRow(name, {"lr": 1e-3}, stack=COSTLY) for name in ("rm3", "sam")),
]
_WHOLE = [
    *_swapped("adamw", 0.0),
    *_swapped("adamw_cosine", 0.0, (3e-4, 1e-3, 3e-3)),
    *_swapped("relative", 0.0),
    StudyRow("literal", {}, 0.0),
]
ROWS: dict[str, list[StudyRow]] = {
    "all": [
        *_swapped("adamw", rates=(3e-4, 1e-3, 3e-3)),
        StudyRow("relative", {"lr": 1e-3}),
        *_GATES,
        *_CONTROLS,
        *_PEERS,
        *_WHOLE,
    ],
    "few": [
        *_swapped("adamw", rates=(3e-4, 1e-3, 3e-3)),
        StudyRow("relative", {"lr": 1e-3}),
        StudyRow("literal"),
        StudyRow("cautious", {"lr": 1e-3}),
        *_swapped("adamw", 0.0, (3e-4, 1e-3, 3e-3)),
        StudyRow("relative", {"lr": 1e-3}, 0.0),
        StudyRow("adamw_cosine", {"lr": 1e-3}, 0.0),
    ],
    "fewest": [
        StudyRow("adamw", {"lr": 1e-3}),
        StudyRow("relative", {"lr": 1e-3}),
        StudyRow("literal"),
        StudyRow("adamw", {"lr": 1e-3}, 0.0),
        StudyRow("adamw_cosine", {"lr": 1e-3}, 0.0),
    ],
}
"""The rows of a task, by the name of its choice (:class:`poprisk_lab.recipes.study_tasks.StudyTask`)."""
