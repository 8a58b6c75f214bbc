"""Linear algebra that knows no network: low-rank matrices and the projector of the off-diagonal rate matrix."""

from poprisk.linalg.low_rank import LowRank as LowRank
from poprisk.linalg.low_rank import Preconditioner as Preconditioner
from poprisk.linalg.low_rank import precondition as precondition
from poprisk.linalg.offdiagonal import OffDiagonalProjector as OffDiagonalProjector
from poprisk.linalg.offdiagonal import offdiagonal_projector as offdiagonal_projector
