"""Learning-rate schedules restored from a checkpoint of AdamW, whose learning rate has another scale."""

from typing import Any

from poprisk.optim import PopRiskAdamW


def keep_own_lr(optimizer: PopRiskAdamW, scheduler: Any) -> None:
    """Put this run's learning rate into a schedule restored from an AdamW run, at the schedule's current position.

    No effect if the optimizer did not continue from AdamW, or if the schedule has no base learning rates
    (``ReduceLROnPlateau``). Absolute bounds of a schedule, such as ``eta_min``, remain those of AdamW.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    parts = [part for part in getattr(scheduler, "_schedulers", [scheduler]) if hasattr(part, "base_lrs")]
    if not optimizer.went_on_from_adamw or not parts:
        return
    own = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    reached = zip(optimizer.param_groups, parts[0].base_lrs, scheduler.get_last_lr(), own, strict=True)
    for group, base, last, lr in reached:
        group["lr"] = lr * float(last) / float(base) if base else lr
    for part in parts:
        part.base_lrs = list(own)
