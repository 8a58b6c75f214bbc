"""Schedules after a checkpoint of AdamW: they carry its learning rate, which means something else here."""

from typing import Any

from poprisk.optim import PopRiskAdamW


def keep_own_lr(optimizer: PopRiskAdamW, scheduler: Any) -> None:
    """Puts this run's learning rate into a schedule restored from an AdamW run, at the place the schedule has reached.

    Nothing happens if the optimizer did not go on from AdamW, or if the schedule has no base learning rates (one that
    waits for a plateau). Absolute bounds of a schedule, such as ``eta_min`` or a cycle's upper end, stay AdamW's.

    Args:
        optimizer: Ours, after ``load_state_dict``.
        scheduler: A scheduler of torch, or one wrapped by accelerate.
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
