"""Every exception the library raises: a named class on a builtin base, whose message says what, got, and what to do."""


class PopRiskError(Exception):
    """Base of all errors of this library; catch it to catch them all."""


class HyperparameterError(PopRiskError, ValueError):
    """A hyper-parameter is out of its range, of the wrong type, or contradicts another one."""


class GradientError(PopRiskError, RuntimeError):
    """A gradient has a layout or dtype the optimizer cannot use."""


class DeviceError(PopRiskError, RuntimeError):
    """Tensors lie on devices that the chosen backend cannot serve."""


class StateDictError(PopRiskError, ValueError):
    """A state dict belongs to another optimizer, or to parameters of another shape."""


class DataError(PopRiskError, ValueError):
    """Inputs of an estimator have the wrong shape or too few examples."""


class MissingExtraError(PopRiskError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'poprisk[{extra}]'")


class PopRiskWarning(UserWarning):
    """Base of the library's warnings; each is given once per optimizer (a missing backend: once per process)."""


class ClosedGateWarning(PopRiskWarning):
    """The gate lets almost nothing through, so training hardly moves."""


class NonFiniteGradientWarning(PopRiskWarning):
    """Gradient entries were NaN or infinite and their coordinates were left out of a step."""


class BackendWarning(PopRiskWarning):
    """The asked-for fast path is not available here; a slower one with the same result is used."""


class RunError(PopRiskError, RuntimeError):
    """A training run cannot be recorded, resumed, reopened or replayed as asked."""


class JobError(PopRiskError, RuntimeError):
    """Jobs cannot be planned, done or assembled as asked."""


class MixedNumericsWarning(PopRiskWarning):
    """Parts of one result were computed on machines that round differently."""


class MissingLabError(PopRiskError, ImportError):
    """Something of the lab, which is a project of its own, was asked for and the lab is not installed."""

    def __init__(self, purpose: str) -> None:
        super().__init__(f"{purpose} needs the lab, which is not installed: pip install ./lab in a checkout of poprisk")
