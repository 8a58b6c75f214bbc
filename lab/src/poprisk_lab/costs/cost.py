"""What an operation costs, in units that no machine changes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OperationCost:
    """Work of one operation on one machine; counts, not times.

    >>> one = OperationCost(flops=4.0, bytes_held=8.0)
    >>> (one + one).flops, (one + one).bytes_held, one.repeated(3).flops
    (8.0, 8.0, 12.0)
    """

    flops: float = 0.0
    """Additions and multiplications of matrix products in float32."""
    half_flops: float = 0.0
    """The same in float16 or bfloat16, on tensor cores."""
    bytes_moved: float = 0.0
    """Read from memory and written to it, every operation's operands and results counted."""
    bytes_held: float = 0.0
    """In memory at the fullest moment, the examples apart."""
    bytes_sent: float = 0.0
    """By one rank to the others, or to the disk."""
    launches: float = 0.0
    """Stretches of work that wait for each other, each with the operation's own fixed cost."""

    def __add__(self, other: "OperationCost") -> "OperationCost":
        """One after the other: what is held is the larger of both."""
        return OperationCost(
            self.flops + other.flops,
            self.half_flops + other.half_flops,
            self.bytes_moved + other.bytes_moved,
            max(self.bytes_held, other.bytes_held),
            self.bytes_sent + other.bytes_sent,
            self.launches + other.launches,
        )

    def repeated(self, times: float) -> "OperationCost":
        """So many times, one after the other."""
        return OperationCost(
            times * self.flops,
            times * self.half_flops,
            times * self.bytes_moved,
            self.bytes_held,
            times * self.bytes_sent,
            times * self.launches,
        )
