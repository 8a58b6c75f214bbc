"""Train members one after another, with the module and the optimizer themselves: for models that cannot be stacked.

Each training repeats the recorded one: first weights, optimizer and options, order of batches, augmentation, clipping.
Examples of weight 0 are taken out of their batches, so that they are in no batch statistics, and what is left keeps its
recorded weights: a batch that loses some of its examples is smaller, and one that loses all of them is a step with a
gradient of zero. For modules that map each example by itself this is the stacked training, to rounding. Where batch
normalization would be left with a single example, another kept example completes the statistics, with weight 0 in the
loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from poprisk._core.autodiff import Inputs, parts_of
from poprisk._core.progress import training_progress
from poprisk._core.store import TensorFile, fingerprint, read_json, read_tensors, write_json, write_tensors
from poprisk.errors import DataError, RunError
from poprisk.risk._retraining.members import (
    Buffers,
    MemberExamples,
    Members,
    Retrained,
    cannot_repeat,
    cast,
    mean_weights,
    recorded_factor,
)
from poprisk.runs import (
    MODULE_BUFFER,
    Run,
    SegmentReader,
    capture,
    capture_buffers,
    options_of,
    rebuilt,
    seeded,
    set_options,
    step_generator,
    step_seed,
    weights_of,
)

_KEPT = "kept."
_ROWS = 1024
"""Examples that a module is evaluated on at a time."""


def train_one_by_one(
    run: Run,
    members: Members,
    keep: Sequence[int],
    last: int,
    *,
    resume: Retrained | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
    check: bool = True,
    folder: str | Path | None = None,
    why: str = "",
) -> Retrained:
    """What :func:`poprisk.risk.retrain` returns, without stacking.

    Args:
        run: What was recorded.
        members: How each training differs from the recorded one.
        keep: Steps before which the weights are kept.
        last: The step before which to stop.
        resume: An earlier result of the same members.
        dtype: Precision of the arithmetic; default: that of the run.
        progress: Whether to show progress on stderr; None shows it on a terminal only.
        check: Whether to compare the first steps with the recorded ones.
        folder: Directory in which each finished training is kept, and found by a later call.
        why: Why the trainings cannot be stacked, for the notes.

    Raises:
        RunError: the recorded training cannot be repeated.
    """
    first, trainer = 0 if resume is None else resume.step, _Trainer(run, dtype or run.layout.dtype, members)
    if check and first == 0:
        trainer.check()
    steps, done = last - first, []
    with training_progress(
        f"{members.count} trainings, one after another", 0, max(steps * members.count, 1), shown=progress
    ) as report:
        for c in range(members.count):
            start = run.checkpoint(0) if resume is None else resume.members[c]
            file = None if folder is None else _File(folder, _key(run, members, c, [*keep, last], trainer.dtype))
            found = None if file is None else file.read()
            if found is None:
                said = lambda k, loss, c=c: report(c * steps + k - first, loss)  # noqa: E731
                found = trainer.train(c, start, range(first, last), {*keep, last}, said)
                if file is not None:
                    file.write(found)
            done.append(found)
    by_step = {k: [_kept(each, k) for each in done] for k in {*keep, last}}
    weights = {k: torch.stack([w for w, _ in each]).to(run.problem.device) for k, each in by_step.items()}
    return Retrained(
        weights=weights[last],
        kept={k: weights[k] for k in keep},
        trainings=members.count * steps / max(run.num_steps, 1),
        notes=(*((f"trained one after another: {why}",) if why else ()), *dict.fromkeys(trainer.notes)),
        step=last,
        buffers={k: tuple(buffers for _, buffers in each) for k, each in by_step.items()},
        members=tuple({name: x for name, x in each.items() if not name.startswith(_KEPT)} for each in done),
    )


def module_outputs(
    run: Run, weights: Sequence[Tensor], buffers: Buffers, inputs: Sequence[Inputs], dtype: torch.dtype
) -> list[Tensor]:
    """Each member's outputs for its own batch, in evaluation mode and with its own buffers."""
    module = run.module(dtype).eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    first = {name: b.clone() for name, b in module.named_buffers()}
    found = []
    with torch.no_grad():
        for w, own, batch in zip(weights, buffers, inputs, strict=True):
            for p, piece in zip(parameters, run.layout.split(w), strict=True):
                p.copy_(piece)
            for name, buffer in module.named_buffers():
                buffer.copy_(own.get(name, first[name]))
            rows = torch.arange(len(parts_of(batch)[0])).split(_ROWS)
            done = [module(*(cast(x[r], dtype) for x in parts_of(batch))) for r in rows]
            found.append(torch.cat(done))
    return found


@dataclass
class _Trainer:
    """The recorded recipe, taken by one member at a time."""

    run: Run
    dtype: torch.dtype
    members: Members
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        about, problem = self.run.manifest, self.run.problem
        training = about["training"]
        self.clip_norm = training.get("clip_norm") if isinstance(training, dict) else None
        self.seed, self.problem = about["seed"] or 0, problem
        if self.run.augmented and problem.augment is None:
            raise RunError(
                "the inputs were augmented by code that was not recorded, so the training cannot be repeated: give it "
                "to the problem, Problem(…, augment=…)"
            )
        self._reader: SegmentReader | None = None

    def recorded(self, k: int) -> SegmentReader:
        if self._reader is None or not self._reader.start <= k < self._reader.stop:
            self._reader = self.run.recorded(k)
        return self._reader

    def train(
        self,
        c: int,
        start: dict[str, Tensor],
        steps: range,
        keep: set[int],
        report: Callable[[int, Tensor], None] = lambda k, loss: None,
    ) -> dict[str, Tensor]:
        """Member c after these steps as a checkpoint, with its weights and buffers before the steps to keep."""
        run = self.run
        module, optimizer = rebuilt(run, start, steps.start, self.dtype)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if self.members.initial is not None and steps.start == 0:
            with torch.no_grad():
                for p, piece in zip(parameters, run.layout.split(self.members.initial[c]), strict=True):
                    p.copy_(piece)
        first = dict(run.module(self.dtype).named_buffers())
        data = MemberExamples(self.problem, self.members, slice(c, c + 1), self.problem.device, self.dtype)
        found, options = {}, None
        for k in [*steps, steps.stop]:
            if k in keep:
                found[f"{_KEPT}{k}"] = torch.cat([p.detach().reshape(-1).clone() for p in parameters])
                found |= {f"{_KEPT}{k}.{name}": b for name, b in capture_buffers(module, first).items()}
            if k == steps.stop:
                break
            if (now := self.recorded(k).options(k)) != options:
                options = now
                for group, values in zip(optimizer.param_groups, options_of(run, k), strict=True):
                    set_options(group, values)
            report(k + 1, self._step(k, module, optimizer, parameters, data))
        return found | capture(run.layout, parameters, optimizer) | capture_buffers(module, first)

    def _step(
        self, k: int, module: nn.Module, optimizer: Optimizer, parameters: list[nn.Parameter], data: MemberExamples
    ) -> Tensor:
        reader = self.recorded(k)
        if self.run.is_dense and isinstance(reader.step(k).source, Tensor):
            raise RunError(
                f"the weights were changed in step {k} by something other than the optimizer (a projection, a clamp), "
                "so the training cannot be repeated: do it in the model's forward"
            )
        optimizer.zero_grad()
        with seeded(self._forward_seed(k, data)):
            loss = self._backward(k, module, data)
        for p in parameters if loss is None else ():
            p.grad = torch.zeros_like(p)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        elif (factor := recorded_factor(reader, k, self.notes)) != 1.0:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)
        optimizer.step()
        return torch.zeros(()) if loss is None else loss

    def _forward_seed(self, k: int, data: MemberExamples) -> int:
        """The recorded seed; for a batch that is not the recorded one, a seed that no other member shares."""
        own, batch = step_seed(self.seed, k), self.recorded(k).batch(k).to(data.weights.device)
        if bool((data.weights[0, batch] > 0).all()):
            return own
        return step_seed(own, int(data.weights[0].nonzero().sum()))

    def _backward(self, k: int, module: nn.Module, data: MemberExamples) -> Tensor | None:
        """Add the gradients of the examples that are left; None if there are none."""
        batches, total = self.recorded(k).parts(k), None
        generator = step_generator(self.seed, k) if self.run.augmented else None
        mixes = any(isinstance(m, _BatchNorm) and m.training for m in module.modules())
        for whole, given in batches:
            omega = (mean_weights(whole, len(batches)) if given is None else given).to(data.weights)
            omega = omega * data.weights[0, whole.to(data.weights.device)]
            index, rows = whole, (omega > 0).nonzero().squeeze(1)
            if not len(rows):
                continue
            if mixes and len(rows) < min(2, len(index)):
                index, rows = self._filled(index, omega, data, k)
            inputs, targets, axes = data.batch(index, generator)
            inputs = tuple(x[0] if axes[0] == 0 else x for x in parts_of(inputs))
            targets = targets[0] if axes[1] == 0 else targets
            outputs = module(*(x[rows] for x in inputs))
            loss = self.problem.batch_loss(outputs, targets[rows], omega[rows])
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        return total

    def _filled(self, index: Tensor, omega: Tensor, data: MemberExamples, k: int) -> tuple[Tensor, Tensor]:
        """The batch with another kept example in a place that was left out: batch statistics need two examples."""
        others = (data.weights[0] > 0).cpu()
        others[index] = False
        places = others.nonzero().squeeze(1)
        left = (omega > 0).nonzero().squeeze(1)
        if not len(places):
            return index, left
        drawn = torch.randint(len(places), (), generator=torch.Generator().manual_seed(step_seed(self.seed, -1 - k)))
        index, free = index.clone(), (omega == 0).nonzero().squeeze(1)[:1]
        index[free.to(index.device)] = places[drawn].to(index)
        return index, torch.cat([left, free])

    def check(self) -> None:
        """Refuse a run whose first steps do not follow from its problem; note one whose random numbers are unknown."""
        run, stop = self.run, min(2, self.run.num_steps)
        if not run.is_dense or not stop:
            return
        first = self._alone(stop)
        try:
            cannot_repeat(run, stop, first)
        except RunError:
            other = _Trainer(run, self.dtype, self.members)
            other.seed = self.seed + 1
            if torch.equal(other._alone(stop), first):
                raise
            self.notes.append("random numbers of the run were not recorded: each training draws its own")

    def _alone(self, stop: int) -> Tensor:
        """The weights after the first steps, of a training like the recorded one."""
        alone = _Trainer(self.run, self.dtype, Members(torch.ones(1, self.run.num_examples)))
        alone.seed = self.seed
        return weights_of(alone.train(0, self.run.checkpoint(0), range(stop), set()))


def _kept(found: dict[str, Tensor], k: int) -> tuple[Tensor, dict[str, Tensor]]:
    prefix = f"{_KEPT}{k}.{MODULE_BUFFER}"
    return found[f"{_KEPT}{k}"], {name[len(prefix) :]: x for name, x in found.items() if name.startswith(prefix)}


def _key(run: Run, members: Members, c: int, steps: list[int], dtype: torch.dtype) -> str:
    """Name of a finished training: the run as far as it was repeated, the member, and what is kept of it."""
    own = {"weights": members.weights[c], "start": run.weights(0), "end": run.weights(max(steps))}
    for name in ("index_map", "targets", "initial"):
        if (given := getattr(members, name)) is not None:
            own[name] = given[c]
    for j, x in enumerate(() if members.pool is None else (*parts_of(members.pool[0]), members.pool[1])):
        own[f"pool {j}"] = x
    own["steps"] = torch.tensor(sorted(steps))
    return fingerprint({f"{run.problem.fingerprint} {dtype} {name}": x for name, x in own.items()})[:24]


class _File:
    """A finished training in a directory: tensors, and their size and hash, written last."""

    def __init__(self, folder: str | Path, key: str) -> None:
        self._folder, self._key = Path(folder), key

    def read(self) -> dict[str, Tensor] | None:
        """The training; None if it is not there or damaged."""
        try:
            about = read_json(self._folder / f"{self._key}.json")
            return read_tensors(self._folder, TensorFile(**about))[0]
        except (OSError, TypeError, DataError):
            return None

    def write(self, found: dict[str, Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = write_tensors(self._folder / f"{self._key}.safetensors", found)
        write_json(self._folder / f"{self._key}.json", asdict(file))
