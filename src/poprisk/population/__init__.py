"""Population risk from one batch: the rate of a step, the best step, its leave-one-out risk, and gradient variances."""

from typing import TYPE_CHECKING, Any

from poprisk.population.loo import one_step_loo_risk as one_step_loo_risk
from poprisk.population.projector import OffDiagonalProjector as OffDiagonalProjector
from poprisk.population.projector import population_projector as population_projector
from poprisk.population.rate import kernel_blocks as kernel_blocks
from poprisk.population.rate import population_rate as population_rate
from poprisk.population.rate import population_rate_from_kernel as population_rate_from_kernel
from poprisk.population.rate import rate_matrix as rate_matrix
from poprisk.population.variance import MicrobatchVariance as MicrobatchVariance
from poprisk.population.variance import PerExampleVariance as PerExampleVariance

if TYPE_CHECKING:
    from poprisk.population.ranks import RankVariance as RankVariance


def __getattr__(name: str) -> Any:
    if name == "RankVariance":  # brings torch.distributed along
        from poprisk.population.ranks import RankVariance

        return RankVariance
    raise AttributeError(f"module 'poprisk.population' has no attribute {name!r}")
