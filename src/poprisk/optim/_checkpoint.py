"""State dicts: checks before loading, conversion from AdamW's, and conversion to AdamW's."""

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from poprisk.errors import LiteralGateWarning, StateDictError
from poprisk.optim._learning_rate import conversion
from poprisk.optim._shards import is_sharded
from poprisk.optim._updates import COUNTERS, MOMENTS, SCALE, counts_on_device, state_dtype_of
from poprisk.optim._validation import check_group
from poprisk.optim.rules._relative import first_scale

REQUIRED = {"step", "exp_avg", "exp_avg_sq"}
KNOWN = {*COUNTERS, *MOMENTS, SCALE}
ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused")
Groups = list[dict[str, Any]]


def adopt(state_dict: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """A state dict for these groups: ours unchanged, AdamW's with our hyper-parameters; any other is rejected.

    From AdamW the moments and the step count are taken; lr, gate and all other options stay those of this optimizer,
    because AdamW's lr has another meaning here. s starts empty, with a step count of its own.
    """
    check(state_dict, groups)
    saved_groups, ours = state_dict["param_groups"], is_ours(state_dict)
    (_check_complete if ours else _check_meaning)(saved_groups, groups, state_dict["state"])
    new_groups = []
    for saved, group in zip(saved_groups, groups, strict=True):
        own = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        own |= {"normalize_gate": False} if ours else {}  # what a state dict without this entry means
        names = {k: saved[k] for k in ("params", "param_names") if k in saved}
        checked = {**own, **(saved if ours else names), "params": group["params"]}
        check_group(checked)  # and brings dtypes back from their names
        new_groups.append({**checked, "params": saved["params"]})
    return {**state_dict, "param_groups": new_groups}


def warn_of_units(state_dict: Mapping[str, Any], groups: Groups) -> None:
    """Warns if this optimizer's gate was normalized and the saved one, which replaces it, was not.

    Version 0.1 had literal gates only; what it called ``normalize_gate`` divided by the mean of the same step.
    """
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        if saved["gate"] is None or group["gate"] is None:
            continue
        if group["normalize_gate"] and not saved.get("normalize_gate", False):
            warnings.warn(
                f"this state was saved with a gate that is not normalized, as in version 0.1, and lr={saved['lr']}: "
                "the run continues exactly as it was, so its learning rate is not in AdamW's units. To continue in "
                "them, set normalize_gate=True and the new lr in each of optimizer.param_groups after loading; "
                f"{conversion()}. To keep the gate as it was without this warning, create the optimizer with "
                "gate=Gate(…, normalize=False)",
                LiteralGateWarning,
                stacklevel=3,
            )
            return
        states = [state_dict["state"].get(index) or {} for index in saved["params"]]
        if saved.get("normalize_gate") and any("step" in s and SCALE not in s for s in states):
            warnings.warn(
                "this state was saved with normalize_gate=True in version 0.1, where it divided the gate by its "
                "mean in the same step: the run continues with the present rule (see poprisk.Gate)",
                LiteralGateWarning,
                stacklevel=3,
            )
            return


def _check_meaning(saved_groups: Groups, groups: Groups, _: Any) -> None:
    """The moments of AdamW can be taken over only if they mean the same here."""
    _check_options(saved_groups, {"amsgrad"})
    for saved, group in zip(saved_groups, groups, strict=True):
        for name, default in (("betas", None), ("maximize", False)):
            came, here = saved.get(name, default), group[name]
            if (tuple(map(float, came)) if name == "betas" else bool(came)) != here:
                raise StateDictError(
                    f"the moments were made with {name}={came}, this optimizer has {name}={here}: create it with "
                    f"{name}={came} to continue from them"
                )


def _check_complete(saved_groups: Groups, groups: Groups, states: Mapping[Any, Any]) -> None:
    """A distributed checkpoint is read into what the new optimizer has: without a gate, s would be lost silently."""
    if any("amsgrad" in g for g in saved_groups):  # with AdamW's lr, and an s that is no gradient's
        raise StateDictError(
            "the state has options of PopRiskAdamW and of torch.optim.AdamW, because set_optimizer_state_dict laid one "
            "over the other: load it into a torch.optim.AdamW of the same model, and give load_state_dict of this "
            "optimizer the state_dict() of that"
        )
    for saved, group in zip(saved_groups, groups, strict=True):
        for name, entry in (("gate", "var_step"), ("alpha", "var_gain"), ("normalize_gate", SCALE)):
            known = [states.get(index) or {} for index in saved["params"]]
            lost = any("step" in s and entry not in s for s in known)
            if lost and _keeps(entry, saved) and not _keeps(entry, group):
                raise StateDictError(
                    f"the state was saved with {name}={saved[name]!r} and came without its {entry}, because this "
                    f"optimizer has {name}={group[name]!r}: create it with {name}={saved[name]!r} before loading"
                )


def _keeps(entry: str, group: Mapping[str, Any]) -> bool:
    """Whether the states of a group have this entry."""
    own = {
        "var_step": group.get("state") != "shared",
        "var_gain": group.get("alpha") == "calibrated",
        SCALE: group.get("normalize_gate", False),
    }
    return group["gate"] is not None and own[entry]


def is_ours(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict was written by this class, and not by torch.optim.AdamW."""
    return all("gate" in g for g in state_dict["param_groups"])


def check_form(state_dict: Any) -> None:
    """Rejects a value that is not an optimizer's state dict."""
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"expected a dict as Optimizer.state_dict() gives it, got {type(state_dict).__name__}")
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    is_list = isinstance(groups, list | tuple) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    if not isinstance(state, Mapping) or not is_list:
        raise StateDictError(
            "expected a dict with the keys 'state' and 'param_groups', as Optimizer.state_dict() gives it, got the "
            f"keys {sorted(map(str, state_dict))}"
        )


def check(state_dict: Mapping[str, Any], groups: Groups) -> None:
    """Rejects a state dict of another optimizer or of other shapes, before anything is changed."""
    check_form(state_dict)
    saved_groups = state_dict["param_groups"]
    saved, own = [len(g["params"]) for g in saved_groups], [len(g["params"]) for g in groups]
    if saved != own:
        raise StateDictError(
            f"the state dict has parameter groups of sizes {saved}, this optimizer of sizes {own}: build the optimizer "
            "with the same groups in the same order as the one that was saved"
        )
    _check_options(saved_groups, {"betas", "eps"})
    if any(g.get("amsgrad") for g in saved_groups):
        raise StateDictError(
            "the state dict comes from AdamW(amsgrad=True), whose running maximum has no counterpart here: remove "
            "'max_exp_avg_sq' from each state and set amsgrad to False to continue from the plain moments"
        )
    ids = chain.from_iterable(g["params"] for g in saved_groups)
    params = chain.from_iterable(g["params"] for g in groups)
    for index, param in zip(ids, params, strict=True):
        _check_entry(index, state_dict["state"].get(index), param)


def _check_options(groups: Groups, names: set[str]) -> None:
    strange = next((g for g in groups if not names <= set(g)), None)
    if strange is not None:
        raise StateDictError(
            f"the state dict has a parameter group with the options {sorted(set(strange) - {'params'})}: this is the "
            "state of another optimizer, neither PopRiskAdamW nor torch.optim.AdamW"
        )


def _check_entry(index: Any, entry: Mapping[str, Any] | None, param: Tensor) -> None:
    if not entry:
        return
    if not isinstance(entry, Mapping):
        raise StateDictError(f"the state of parameter {index} must be a dict of tensors, got {type(entry).__name__}")
    if not set(entry) >= REQUIRED or not set(entry) <= KNOWN:
        raise StateDictError(
            f"the state of parameter {index} has the entries {sorted(entry)}, expected those of PopRiskAdamW "
            f"{sorted(KNOWN)} or of torch.optim.AdamW {sorted(REQUIRED)}: this is the state of another optimizer"
        )
    if ("exp_var" in entry) != ("var_step" in entry):
        raise StateDictError(f"the state of parameter {index} has one of exp_var and var_step without the other")
    if SCALE in entry and entry[SCALE].shape != (2,):
        raise StateDictError(f"{SCALE} of parameter {index} must have 2 entries, got shape {tuple(entry[SCALE].shape)}")
    for name in MOMENTS:
        value = entry.get(name, param)
        if not isinstance(value, Tensor) or value.shape != param.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise StateDictError(
                f"{name} of parameter {index} has {got}, the parameter has shape {tuple(param.shape)}: the state dict "
                "belongs to another model"
            )
        if is_sharded(value) != is_sharded(param):
            got, here = ("a sharded", "whole") if is_sharded(value) else ("a whole", "sharded")
            raise StateDictError(
                f"{name} of parameter {index} is {got} tensor, the parameter is {here}: load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, in every process"
            )


def restore_dtypes(state: dict[Tensor, dict[str, Any]], saved: Mapping[str, Any], groups: Groups, ours: bool) -> None:
    """Undoes torch's cast of every state to the parameter's dtype; counters are plain scalars."""
    ids = chain.from_iterable(g["params"] for g in saved["param_groups"])
    owners = ((p, g) for g in groups for p in g["params"])
    for index, (param, group) in zip(ids, owners, strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if name in COUNTERS:
                counter = torch.as_tensor(value, dtype=torch.float64 if name == "var_gain" else torch.float32)
                state[param][name] = counter.to(param.device if counts_on_device(group) else "cpu", copy=True)
            elif name == SCALE:
                state[param][name] = value.to(param.device, dtype=first_scale(param).dtype, copy=True)
            else:
                dtype = value.dtype if ours else state_dtype_of(param, group, name)
                copy = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
                state[param][name] = copy.copy_(value)


def dtype_names(state_dtype: Mapping[str, torch.dtype] | None) -> dict[str, str] | None:
    """The dtypes of v and s as text, which :func:`poprisk.optim._validation.check_state_dtype` reads back.

    >>> dtype_names({"s": torch.bfloat16})
    {'s': 'bfloat16'}
    """
    if state_dtype is None:
        return None
    return {letter: str(dtype).removeprefix("torch.") for letter, dtype in state_dtype.items()}


def to_adamw(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Our state dict in the form of torch.optim.AdamW: without s and its counters, with the same moments."""
    state = {k: {name: v for name, v in entry.items() if name in REQUIRED} for k, entry in state_dict["state"].items()}
    kept = {"params", "param_names", "initial_lr", *ADAMW_OPTIONS}
    groups = [{k: v for k, v in g.items() if k in kept} for g in state_dict["param_groups"]]
    for group in groups:
        group.update(amsgrad=False, decoupled_weight_decay=True)
    return {"state": state, "param_groups": groups}
