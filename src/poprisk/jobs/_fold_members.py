"""Members of a K-fold resampling: each job trains the recorded run again without some of the folds."""

import json
from pathlib import Path

import torch
from torch import Tensor

from poprisk._core.autodiff import slices
from poprisk.errors import HyperparameterError
from poprisk.jobs._manifest import JobGroup
from poprisk.jobs._sources import find_run, run_digest, settings, where_is
from poprisk.risk import Members, k_fold_members, retrain
from poprisk.runs import Run

KIND = "poprisk.jobs._fold_members:FoldMembers"
CODE = ("poprisk.risk._retraining", "poprisk.risk", "poprisk.runs", "poprisk.optim.rules", "poprisk._core.autodiff")

_BUFFER, _ALONE = "buffer.", "one by one"


class FoldMembers:
    """A run opened by a worker, with the example weights of all its members."""

    def __init__(self, group: JobGroup, folder: Path, device: torch.device) -> None:
        content = group.content
        self._run = find_run(group, folder, device)
        self._members = k_fold_members(self._run, content["folds"], content["seed"], renormalize=content["renormalize"])

    def compute(self, indices: tuple[int, ...]) -> dict[str, Tensor]:
        """The final weights of members a … b, and notes on what was taken from the recorded run."""
        found = retrain(self._run, Members(self._members.weights[slice(*indices)]), progress=False)
        notes = torch.frombuffer(bytearray(json.dumps(found.notes).encode()), dtype=torch.uint8)
        buffers = {
            f"{_BUFFER}{j}.{name}": x
            for j, each in enumerate(found.buffers.get(found.step, ()))
            for name, x in each.items()
        }
        alone = {_ALONE: torch.ones(1)} if found.buffers else {}
        return {"weights": found.weights, "notes": notes, **buffers, **alone}


def buffers_of(results: list[dict[str, Tensor]]) -> list[dict[str, Tensor]] | None:
    """Buffers of all members, from the results of their jobs; None if the members were trained together."""
    if not any(_ALONE in each for each in results):
        return None
    found: list[dict[str, Tensor]] = []
    for each in results:
        own: list[dict[str, Tensor]] = [{} for _ in range(len(each["weights"]))]
        for key, x in each.items():
            if key.startswith(_BUFFER):
                j, _, name = key.removeprefix(_BUFFER).partition(".")
                own[int(j)][name] = x
        found += own
    return found


def fold_group(
    run: Run,
    folder: Path,
    name: str,
    *,
    folds: int,
    seed: int,
    renormalize: bool,
    members_per_job: int,
    threads: int,
    device: str,
) -> JobGroup:
    """The jobs of a K-fold."""
    if members_per_job < 1:
        raise HyperparameterError(f"members_per_job must be at least 1, got {members_per_job}")
    run.problem  # noqa: B018  # refuses a run that other processes cannot train
    count = k_fold_members(run, folds, seed, renormalize=renormalize).count
    content = {
        **settings(run_digest(run), "steps", CODE, threads, device),
        "folds": folds,
        "seed": seed,
        "renormalize": renormalize,
    }
    where = {"run": where_is(run, folder), "code": list(CODE), "layout": "members"}
    return JobGroup(name, KIND, content, [[part.start, part.stop] for part in slices(count, members_per_job)], where)
