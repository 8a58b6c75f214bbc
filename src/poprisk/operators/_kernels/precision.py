r"""The arithmetic in which rows of a Jacobian are multiplied, and how many digits it may cost.

Every row is divided by its norm before it is rounded, so that the error of an entry is bounded relative to
:math:`\sqrt{K_{ii} K_{jj}}`. With :math:`\|\delta x\| \le u \|x\|` and the inequality of Cauchy and Schwarz

.. math:: |\langle x + \delta x, y + \delta y \rangle - \langle x, y \rangle| \le (2 u + u^2)\, \|x\| \|y\|
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import torch

from poprisk.errors import DeviceError, HyperparameterError

# Number of products that a tensor core adds before it rounds; it truncates the sum at 24 bits.
_GROUP = 16
_CUT = 2.0**-23
_FLOAT32 = 2.0**-24
# The first CUDA capability with TF32 and bfloat16 products.
_AMPERE = (8, 0)


Kind = TypeVar("Kind", bound="Named")


class Named(Enum):
    """Choices that may be given by their names."""

    @classmethod
    def checked(cls: type[Kind], given: "Kind | str") -> Kind:
        """The member of that name.

        Raises:
            HyperparameterError: there is none.

        >>> Precision.checked("float16")
        <Precision.FLOAT16: 'float16'>
        """
        try:
            return cls(given)
        except ValueError:
            kind, names = cls.__name__, [each.value for each in cls]
            raise HyperparameterError(f"{kind.lower()} must be a {kind} or one of {names}, got {given!r}") from None


class Precision(Named):
    r"""How the rows are stored and multiplied; sums are always kept in float32.

    Speeds are those of one H200 in large products, relative to IEEE float32, as a rule of thumb.
    """

    FLOAT32 = "float32"
    """IEEE products: the reference, speed 1."""
    TF32 = "tf32"
    """float32 rows that the tensor cores read with 11 bits: u = 2⁻¹⁰ (cut off, not rounded), speed 8."""
    BFLOAT16X3 = "bfloat16x3"
    """x = hi + lo in bfloat16, and hi hi' + hi lo' + lo hi': 3 · 2⁻¹⁶, speed 5, the memory of float32."""
    FLOAT16 = "float16"
    """Rows scaled to a norm of 2¹⁵, which no entry overflows: u = 2⁻¹¹, speed 15, half the memory."""
    BFLOAT16 = "bfloat16"
    """u = 2⁻⁸, speed 15, half the memory; float16 is better in every respect that matters here."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which rows are stored."""
        stored = {"float16": torch.float16, "bfloat16": torch.bfloat16, "bfloat16x3": torch.bfloat16}
        return stored.get(self.value, torch.float32)

    @property
    def parts(self) -> int:
        """Number of stored numbers per entry of a row."""
        return 2 if self is Precision.BFLOAT16X3 else 1

    @property
    def itemsize(self) -> int:
        """Number of bytes per entry of a row."""
        return self.parts * self.dtype.itemsize

    @property
    def norm(self) -> float:
        """Norm to which every row is scaled."""
        return 2.0**15 if self is Precision.FLOAT16 else 1.0

    @property
    def speed(self) -> float:
        """Speed of products relative to IEEE float32."""
        return {"float32": 1.0, "tf32": 8.0, "bfloat16x3": 5.0}.get(self.value, 15.0)


def check_supported(precision: Precision, device: str, capability: tuple[int, int] | None = None) -> None:
    """Refuses a precision that a kind of device does not support."""
    if precision is Precision.TF32 and device == "cpu":
        raise DeviceError(
            "precision='tf32' needs the tensor cores of a GPU, and the device is 'cpu': use 'float32', 'bfloat16x3' or "
            "'float16', or device='cuda'"
        )
    needs_ampere = precision in (Precision.TF32, Precision.BFLOAT16, Precision.BFLOAT16X3)
    if needs_ampere and capability is not None and capability < _AMPERE:
        raise DeviceError(
            f"precision={precision.value!r} needs a GPU of CUDA capability {'.'.join(map(str, _AMPERE))} or later, "
            f"got {'.'.join(map(str, capability))}: use 'float16', or a newer GPU"
        )


def error_bound(precision: Precision, length: int, width: int) -> float:
    r"""The largest :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}` that rounding can make, whatever the rows are.

    Rounding of the entries as above, entries of float16 below its range (:math:`\sqrt r\, 2^{-25}/2^{15}` for each
    row), and sums: a panel of ``width`` columns is summed by groups of 16 products, each sum cut off at 24 bits
    (IEEE float32: rounded after every product), and the panels are added in float32. The error with which the rows
    themselves were computed is not included; ``measured_error`` includes it.

    >>> f"{error_bound(Precision.FLOAT16, 10**6, 4096):.1e}"
    '1.0e-03'
    """
    panels = -(-length // max(1, width))
    if precision is Precision.FLOAT32:
        return (width + panels) * _FLOAT32
    u = {Precision.TF32: 2.0**-10, Precision.FLOAT16: 2.0**-11, Precision.BFLOAT16: 2.0**-8}.get(precision, 2.0**-16)
    products = 3 * u if precision is Precision.BFLOAT16X3 else 2 * u + u**2
    under = 2 * length**0.5 * 2.0**-25 / precision.norm if precision is Precision.FLOAT16 else 0.0
    return products + under + -(-width // _GROUP) * _CUT + panels * _FLOAT32


@contextmanager
def _changed(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Objects with other values of their attributes, which come back at the end."""
    before = [getattr(owner, name) for owner, name, _ in settings]
    for owner, name, value in settings:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)


@contextmanager
def whole_sums() -> Iterator[None]:
    """Keeps partial sums of float16 and bfloat16 products on a GPU in float32.

    >>> with whole_sums():
    ...     torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    False
    """
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    with _changed(*((torch.backends.cuda.matmul, name, False) for name in names)):
        yield


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Runs float32 matrix products and convolutions on a GPU in ``"ieee"`` or ``"tf32"`` arithmetic.

    >>> with float32_products("ieee"):
    ...     torch.ones(2) @ torch.ones(2)
    tensor(2.)
    """
    convolutions: Any = torch.backends.cudnn
    with _changed(*((each, "fp32_precision", precision) for each in (torch.backends.cuda.matmul, convolutions.conv))):
        yield


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Fixes the number of threads, IEEE products and deterministic convolutions within a block.

    Sums are then split in the same way on all machines.

    >>> with pinned(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with float32_products("ieee"), _changed((torch.backends.cudnn, "deterministic", True)):
            yield
    finally:
        torch.set_num_threads(before)


def numerics_here(device: str = "cpu") -> dict[str, Any]:
    """The version of torch and the kind of processor, which determine how results are rounded.

    >>> sorted(numerics_here())
    ['cpu', 'gpu', 'torch']
    """
    gpu = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "gpu": gpu}
