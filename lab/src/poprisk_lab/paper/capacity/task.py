r"""Configuration of the capacity experiment; its random features are in :mod:`poprisk_lab.theory.double_descent`."""

from dataclasses import dataclass

from poprisk.errors import HyperparameterError


@dataclass(frozen=True)
class CapacityConfig:
    """Configuration of the experiment."""

    problems: int = 20
    """Number of random-feature problems whose risk has an interior maximum along the predictive rank."""
    examples: int = 20
    tests: int = 30
    dimension: int = 6
    width: int = 60
    """Number of features of the predictive-rank problems."""
    sigma: float = 0.5
    draws: int = 400
    """Number of simulated noise draws for each problem."""
    sweep_examples: int = 40
    sweep_tests: int = 100
    widths: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 28, 32, 36, 38, 40, 42, 44, 48, 56, 70, 100, 160, 280, 500)
    sweep_draws: int = 400
    noise_widths: tuple[int, ...] = (80, 160, 500)
    """Widths at which pure noise is interpolated, besides the width that equals the number of examples."""
    noise_levels: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Variances of that noise."""
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (self.problems, self.examples, self.tests, self.dimension, self.width, self.sweep_examples)
        if min(sizes) < 1 or min(self.draws, self.sweep_draws) < 2:
            raise HyperparameterError("sizes must be at least 1, and draws at least 2")
        if list(self.widths) != sorted(set(self.widths)) or len(self.widths) < 3:
            raise HyperparameterError(f"widths must ascend, at least three of them, got {list(self.widths)}")
        if min(self.noise_widths) < self.sweep_examples:
            raise HyperparameterError(f"noise_widths must be at least {self.sweep_examples}, or noise is not fitted")
        if len(self.noise_levels) < 2 or min(self.noise_levels) <= 0:
            raise HyperparameterError(f"noise_levels must be two or more variances, got {list(self.noise_levels)}")


SMOKE = CapacityConfig(
    problems=2,
    examples=6,
    tests=5,
    width=12,
    draws=40,
    sweep_examples=8,
    sweep_tests=6,
    widths=(2, 6, 8, 10, 30),
    sweep_draws=20,
    noise_widths=(30,),
    noise_levels=(0.5, 2.0),
)
