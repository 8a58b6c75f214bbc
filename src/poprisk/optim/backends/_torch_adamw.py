"""``gate=None`` is AdamW: torch's own function is called, so it is AdamW bit for bit, whatever the path."""

from torch import Tensor
from torch.optim.adamw import adamw

from poprisk.optim._work import Job


def can_serve(job: Job) -> bool:
    """Whether torch's function takes these tensors: no gate, and state in the parameters' own dtype."""
    if job.hyper.gate is not None:
        return False
    return all(w.state[name].dtype == w.param.dtype for w in job.works for name in ("exp_avg", "exp_avg_sq"))


def step(job: Job) -> None:
    """One step of torch.optim.AdamW."""
    group, hyper, works = job.group, job.hyper, job.works
    if group["fused"]:
        for w in works:
            w.state["step"] = w.state["step"].to(w.param.device)
    averages: list[Tensor] = [w.state["exp_avg"] for w in works]
    squares: list[Tensor] = [w.state["exp_avg_sq"] for w in works]
    adamw(
        [w.param for w in works],
        [w.grad for w in works],
        averages,
        squares,
        [],
        [w.state["step"] for w in works],
        foreach=group["foreach"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
        fused=group["fused"],
        grad_scale=job.grad_scale,
        found_inf=job.found_inf,
        has_complex=any(w.param.is_complex() for w in works),
        amsgrad=False,
        beta1=hyper.betas[0],
        beta2=hyper.betas[1],
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=group["maximize"],
    )
