"""``gate=None`` is AdamW: torch's own function is called, so it is AdamW bit for bit, whatever the path."""

from torch import Tensor
from torch.optim.adamw import adamw

from poprisk.optim._updates import GroupUpdate


def can_serve(update: GroupUpdate) -> bool:
    """Whether torch's function takes these tensors: no gate, and state in the parameters' own dtype."""
    if update.hyper.gate is not None:
        return False
    return all(w.state[name].dtype == w.local.dtype for w in update.params for name in ("exp_avg", "exp_avg_sq"))


def step(update: GroupUpdate) -> None:
    """One step of torch.optim.AdamW; its fused kernel only for tensors that lie in memory alike, as it assumes."""
    group, hyper, params = update.group, update.hyper, update.params
    first, second = ([w.state[name] for w in params] for name in ("exp_avg", "exp_avg_sq"))
    weights, gradients = [w.local for w in params], [w.grad for w in params]
    layout, *others = (list(map(Tensor.stride, part)) for part in (weights, gradients, first, second))
    fused = group["fused"] and all(other == layout for other in others)
    if group["fused"]:
        for w in params:
            w.state["step"] = w.state["step"].to(w.local.device)
    adamw(
        weights,
        gradients,
        first,
        second,
        [],
        [w.state["step"] for w in params],
        **{name: group[name] for name in ("foreach", "capturable", "differentiable", "maximize")},
        fused=fused,
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
        has_complex=any(w.local.is_complex() for w in params),
        amsgrad=False,
        beta1=hyper.betas[0],
        beta2=hyper.betas[1],
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
    )
