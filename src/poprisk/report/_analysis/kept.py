"""An analysis kept in the directory of its run: what its parts are."""

from typing import Any, ClassVar

from poprisk._core.estimate import Estimate
from poprisk.report._analysis.contents import Contents
from poprisk.report._analysis.curves import KernelCurve, LossCurves, Memorization
from poprisk.report._analysis.gates import GateCurve
from poprisk.report._analysis.neighbours import Neighbours
from poprisk.report._analysis.operators import DenseFacts, DriftCurve, WindowFacts
from poprisk.report._analysis.readings import Readings
from poprisk.risk import AuditTable, KeptParts, Reading, RiskEstimate
from poprisk.theory import ExampleGroups


class KeptAnalysis(KeptParts):
    """The parts of one run's analysis on disk, for given options."""

    TYPES: ClassVar[dict[str, Any]] = {
        "examples": AuditTable,
        "contents": Contents,
        "curves": LossCurves,
        "risk": list[Reading],
        "kept_risk": RiskEstimate,
        "memorization": Memorization,
        "gates": GateCurve,
        "operators": WindowFacts,
        "kernel": KernelCurve,
        "neighbours": dict[int, Neighbours],
    }
    CLASSES = (AuditTable, Contents, DenseFacts, DriftCurve, Estimate, ExampleGroups, GateCurve, KernelCurve)
    CLASSES += (LossCurves, Memorization, Neighbours, Reading, Readings, RiskEstimate, WindowFacts)
