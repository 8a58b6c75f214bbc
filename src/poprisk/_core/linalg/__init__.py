"""Linear algebra that knows no network: operators, certified spectra, projectors, trace and diagonal estimators."""

from poprisk._core.linalg.factor import (
    Spectrum,
    spectrum_of_eigenpairs,
    spectrum_of_factor,
    spectrum_of_matrix,
    tsqr_append,
)
from poprisk._core.linalg.low_rank import LowRank, Preconditioner, precondition
from poprisk._core.linalg.matrices import diagonal, from_dense, from_functions, identity
from poprisk._core.linalg.norms import column_norms
from poprisk._core.linalg.offdiagonal import OffDiagonalProjector, offdiagonal_projector
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.projectors import Channels, OrthogonalProjector, epsilon_projectors, inverse_square_root
from poprisk._core.linalg.random_vectors import default_generator, gaussian, probe_columns
from poprisk._core.linalg.ritz import Progress
from poprisk._core.linalg.singular import top_singular_triplets
from poprisk._core.linalg.spectra import Eigenpairs, top_eigenpairs
from poprisk._core.linalg.stored import StoredMatrix
from poprisk._core.linalg.trace import hutchinson_diagonal, hutchinson_trace, hutchpp_trace, xdiag, xtrace
