"""Members trained as tasks of ``poprisk.cluster``: the same parts for any number of workers, kept in its store."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from poprisk._core.autodiff import slices
from poprisk._core.cluster import COMPUTING, current_cluster, current_store, is_remote, run_tasks
from poprisk._core.progress import Progress
from poprisk._core.store import (
    VALUES,
    TiledArray,
    add_tiled,
    check_schema,
    content_key,
    fingerprint,
    load_tiled,
    pack,
    parsed_json,
    unpack,
)
from poprisk.errors import DataError, HyperparameterError, JobError
from poprisk.operators import pinned
from poprisk.risk._retraining.members import Members, Retrained
from poprisk.runs import Run, ShippedRun, code_digest, run_digest

_CODE = ("poprisk.risk", "poprisk.runs", "poprisk.optim.rules", "poprisk._core.autodiff")
_TASK_WORK = {"cpu": 2e8, "cuda": 2e11}
"""Multiplications of a step above which stacking more members in a task gains little."""
_FORM = "form"


class _Entry(TypedDict):
    tensors: int
    form: dict[str, Any]


@dataclass(frozen=True)
class Trainings:
    """What all tasks of a retraining share."""

    run: ShippedRun
    function: Any
    """Called with the run, members, what to resume, and the options."""
    options: dict[str, Any]
    pool: Any
    """Further examples of the members."""
    device: str
    store: Any
    """Where results are kept; None for returning them."""
    code: str
    """Digest of the sources that train."""

    def do(self, item: tuple[str, dict[str, Any], Members, Retrained | None, bool]) -> Retrained | None:
        """Train some of the members; a JobError where a worker has other sources."""
        if code_digest(*_CODE) != self.code:
            raise JobError("a worker has another version of poprisk than this process: start workers with this one")
        name, content, members, resume, check = item
        run = self.run.open(self.device)
        with COMPUTING, pinned(1):
            members = replace(members, pool=self.pool)
            found = self.function(run, members, resume=resume, check=check, progress=False, **self.options)
        found = _on_cpu(found)
        if self.store is None:
            return found
        _keep(self.store, name, content, found)
        return None


def train_on_cluster(
    run: Run,
    members: Members,
    resume: Retrained | None,
    function: Callable[..., Retrained],
    options: dict[str, Any],
    *,
    each: int,
    check: bool,
    progress: bool | None,
) -> Retrained:
    """What :func:`poprisk.risk.retrain` returns, from tasks of the enclosing cluster.

    Args:
        run: What was recorded.
        members: How each training differs from the recorded one.
        resume: An earlier result of the same members.
        function: Trains, given the run, some members and the options.
        options: Its options.
        each: Number of members of a task.
        check: Whether the first task compares the first steps with the recorded ones.
        progress: Whether to show progress; None shows it on a terminal.
    """
    device, store, remote = run.problem.device, current_store(), is_remote(current_cluster())
    shipped = ShippedRun(run).packed() if remote else ShippedRun(run)
    about = {} if store is None else _content(run, members, resume, options)
    shared = Trainings(shipped, function, options, members.pool, device.type, store, code_digest(*_CODE))
    parts = list(slices(members.count, each))
    name = f"trainings {{}} to {{}} of {content_key(about)[:16]}"
    spans = [(part.start, part.stop) for part in parts]
    items = [(name.format(*span), {**about, "part": list(span)}) for span in spans]
    found: list[Retrained | None] = [None if store is None else _kept(store, *item) for item in items]
    left = [i for i, each in enumerate(found) if each is None]
    pieces = [(_some(members, part), _resumed(resume, part)) for part in parts]
    tasks = [(shared, (*items[i], *pieces[i], check and i == left[0])) for i in left]
    with Progress(f"{members.count} trainings", len(parts), start=len(parts) - len(left), shown=progress) as bar:
        on_gpus = {"GPU": 1.0} if remote and device.type == "cuda" else None
        for count, (place, result) in enumerate(run_tasks(Trainings.do, tasks, resources=on_gpus), 1):
            if isinstance(result, BaseException):
                raise result
            i = left[place]
            found[i] = result if store is None else _kept(store, *items[i])
            if found[i] is None:
                raise JobError(f"{store} does not have {items[i][0]!r}, which a worker stored: all must see one store")
            bar.update(len(parts) - len(left) + count)
    return _joined([each for each in found if each is not None], device)


def members_of_a_task(run: Run, most: int, device: str, batch: int) -> int:
    """Number of stacked members, from sizes of the run alone: enough that a step is more than its launches."""
    return max(1, min(most, ceil(_TASK_WORK.get(device, _TASK_WORK["cpu"]) / (6.0 * run.num_weights * max(batch, 1)))))


def _some(members: Members, part: slice) -> Members:
    named = {name: getattr(members, name) for name in ("weights", "index_map", "targets", "initial")}
    return Members(**{name: None if x is None else x[part].clone().cpu() for name, x in named.items()})  # type: ignore[arg-type]


def _resumed(resume: Retrained | None, part: slice) -> Retrained | None:
    if resume is None:
        return None
    state = tuple(x[part].clone() for x in resume.state)
    of_part = replace(resume, weights=resume.weights[part].clone(), state=state, members=resume.members[part])
    return _on_cpu(replace(of_part, kept={}, buffers={}))


def _on_cpu(found: Retrained) -> Retrained:
    form, tensors = pack(found)
    return unpack(form, {name: x.cpu() for name, x in tensors.items()}, (Retrained,))


def _joined(found: Sequence[Retrained], device: torch.device) -> Retrained:
    def stacked(pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces)).to(device)

    first = found[0]
    return replace(
        first,
        weights=stacked([each.weights for each in found]),
        kept={k: stacked([each.kept[k] for each in found]) for k in first.kept},
        trainings=sum(each.trainings for each in found),
        notes=tuple(dict.fromkeys(note for each in found for note in each.notes)),
        state=tuple(stacked(each) for each in zip(*(each.state for each in found), strict=True)),
        buffers={k: tuple(one for each in found for one in each.buffers[k]) for k in first.buffers},
        members=tuple(one for each in found for one in each.members),
    )


def _content(run: Run, members: Members, resume: Retrained | None, options: dict[str, Any]) -> dict[str, Any]:
    """All that the numbers depend on."""
    form, tensors = pack([members.weights, members.index_map, members.pool, members.targets, members.initial])
    before = None if resume is None else {"step": resume.step, "weights": fingerprint({"weights": resume.weights})}
    about: dict[str, Any] = {key: str(options[key]) for key in ("keep", "last", "dtype", "why")}
    if options["dtype"] not in (torch.float32, torch.float64):
        raise HyperparameterError(f"a store keeps trainings in float32 or float64, got dtype={options['dtype']}")
    members_digest = content_key([form, fingerprint(tensors)])
    return {
        **about,
        "digest": run_digest(run),
        "members": members_digest,
        "resume": before,
        "code": code_digest(*_CODE),
    }


def _keep(store: Any, name: str, content: dict[str, Any], found: Retrained) -> None:
    """Store a result; ``values`` are the last weights, and are there when all else is."""
    form, tensors = pack(replace(found, weights=found.weights[:1, :1]))
    text = torch.frombuffer(bytearray(json.dumps({"tensors": len(tensors), "form": form}).encode()), dtype=torch.uint8)
    shape, dtype = list(found.weights.shape), str(found.weights.dtype).removeprefix("torch.")
    where = {"shape": shape, "tile": shape, "dtype": dtype, "symmetric": False}
    group = TiledArray(store, name, "trainings", content, where)
    add_tiled(group, {_FORM: text, **{f"tensor {key}": x for key, x in tensors.items()}})
    group.write((0, 0), {VALUES: found.weights})


def _kept(store: Any, name: str, content: dict[str, Any]) -> Retrained | None:
    """A stored result; None if there is none, or if it is damaged, and then it is removed."""
    group = TiledArray(store, name, "trainings", content, {})
    try:
        return _read(store, name, content) if group.exists() else None
    except DataError:
        group.remove()
        return None


def _read(store: Any, name: str, content: dict[str, Any]) -> Retrained:
    group = load_tiled(store, name)
    if group.content != content:
        raise DataError(f"{name!r} in {store} is of other trainings")
    where = f"{name!r} in {store}"
    entry = parsed_json(group.whole(_FORM).numpy().tobytes(), where)
    check_schema(_Entry, entry, where)
    tensors = {str(i): group.whole(f"tensor {i}") for i in range(entry["tensors"])}
    found = unpack(entry["form"], tensors, (Retrained,))
    if not isinstance(found, Retrained):
        raise DataError(f"{where} is of no trainings")
    return replace(found, weights=group.tile((0, 0)))
