"""Every exception and warning of the library. Messages say what was expected, what came, and what to do."""


class PopRiskError(Exception):
    """Base class of all errors of this library."""


class HyperparameterError(PopRiskError, ValueError):
    """A hyperparameter is out of range, has the wrong type, or contradicts another one."""


class GradientError(PopRiskError, RuntimeError):
    """A gradient has a layout or dtype that the optimizer does not support."""


class DeviceError(PopRiskError, RuntimeError):
    """Tensors are on devices that the chosen backend does not support."""


class StateDictError(PopRiskError, ValueError):
    """A state dict belongs to another optimizer, or to parameters of other shapes."""


class DataError(PopRiskError, ValueError):
    """Inputs of an estimator have the wrong shape or too few examples."""


class MissingExtraError(PopRiskError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'poprisk[{extra}]'")


class PopRiskWarning(UserWarning):
    """Base class of the library's warnings. Each is given once per optimizer (a missing backend: once per process)."""


class ClosedGateWarning(PopRiskWarning):
    """The gate is almost closed, so the weights hardly move."""


class NonFiniteGradientWarning(PopRiskWarning):
    """Some gradient entries were NaN or infinite; their coordinates skipped a step."""


class BackendWarning(PopRiskWarning):
    """The requested fast path is not available; a slower one with the same result is used."""


class LiteralGateWarning(PopRiskWarning):
    """A loaded optimizer state has a gate that is not normalized, so its learning rate is not in AdamW's units."""


class UnexplainedGradientWarning(PopRiskWarning):
    """The gradients of a recorded loop are no longer those of its problem; exact analyses end before that step."""


class RunError(PopRiskError, RuntimeError):
    """A training run cannot be recorded, resumed, opened or replayed as requested."""


class LimitError(RunError):
    """A call would take longer, or more memory, than it was allowed."""


class UntrustedError(RunError):
    """A file names code that this user has not run on this machine; ``call`` is the call that was not made."""

    def __init__(self, message: str, call: object = None) -> None:
        super().__init__(message)
        self.call = call


class JobError(PopRiskError, RuntimeError):
    """Jobs cannot be planned, run or assembled as requested."""


class MixedNumericsWarning(PopRiskWarning):
    """Parts of one result were computed on machines that round differently."""


class MissingLabError(PopRiskError, ImportError):
    """The lab, a separate project, is needed and not installed."""

    def __init__(self, purpose: str) -> None:
        super().__init__(f"{purpose} needs the lab, which is not installed: pip install ./lab in a checkout of poprisk")
