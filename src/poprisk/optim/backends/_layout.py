"""Which tensors a single-pass kernel can walk through: dense, laid out alike, of dtypes it knows."""

from collections.abc import Container

import torch
from torch import Tensor

from poprisk.optim._work import Job, Work, real
from poprisk.optim.rules._population import math_dtype


def one_pass(job: Job, work: Work, weights: Container[torch.dtype]) -> bool:
    """Whether one pass will do for this parameter, given the dtypes of weights the kernel takes."""
    if job.hyper.granularity != "element" or job.hyper.normalize_gate:
        return False
    w = real(work.param)
    if w.dtype not in weights or real(work.grad).dtype != w.dtype or not is_dense(work.param):
        return False
    math = math_dtype(w.dtype)
    allowed = (math, torch.bfloat16) if math == torch.float32 else (math,)
    moments = [x for name, x in work.state.items() if name.startswith("exp_")]
    if real(work.state["exp_avg"]).dtype != math or any(real(x).dtype not in allowed for x in moments):
        return False
    given = [] if work.variance is None else [work.variance]
    if any(real(x).dtype != math for x in given):
        return False
    return all(x.stride() == work.param.stride() for x in (work.grad, *moments, *given))


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of axes."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(x.stride(), x.shape, strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True
