"""Empirical tangent kernels of a model at given weights: in full, in tiles, as products; their drift and timescales."""

from poprisk.kernels.drift import KernelDrift as KernelDrift
from poprisk.kernels.drift import OperatorNorm as OperatorNorm
from poprisk.kernels.drift import kernel_drift as kernel_drift
from poprisk.kernels.drift import operator_norm as operator_norm
from poprisk.kernels.method import Cost as Cost
from poprisk.kernels.method import Method as Method
from poprisk.kernels.method import method_costs as method_costs
from poprisk.kernels.precision import Precision as Precision
from poprisk.kernels.products import kernel_operator as kernel_operator
from poprisk.kernels.rounded_kernel import RoundedKernel as RoundedKernel
from poprisk.kernels.rounded_kernel import measured_error as measured_error
from poprisk.kernels.rounded_kernel import rounded_kernel as rounded_kernel
from poprisk.kernels.tangent import cross_kernel as cross_kernel
from poprisk.kernels.tangent import kernel_tiles as kernel_tiles
from poprisk.kernels.tangent import output_trace as output_trace
from poprisk.kernels.tangent import train_kernel as train_kernel
from poprisk.kernels.tiles import Tile as Tile
from poprisk.kernels.timescales import Timescales as Timescales
from poprisk.kernels.timescales import curvature_root as curvature_root
from poprisk.kernels.timescales import scaled_kernel as scaled_kernel
from poprisk.kernels.timescales import scaled_kernel_operator as scaled_kernel_operator
from poprisk.kernels.timescales import timescales as timescales
from poprisk.kernels.transfer import on_host as on_host
