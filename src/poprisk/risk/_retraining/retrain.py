"""Train a recorded run again many times at once, each time with other example weights, examples or labels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from poprisk._core.autodiff import Inputs, Replayed, exact_kernels, parts_of, probe, resolve_loss, slices
from poprisk._core.cluster import current_cluster, is_remote
from poprisk._core.costs import current_limits, working_memory
from poprisk._core.progress import training_progress
from poprisk._core.text import first_line
from poprisk.errors import DataError, PopRiskError, RunError
from poprisk.risk._retraining.members import (
    Buffers,
    MemberExamples,
    Members,
    Retrained,
    cannot_repeat,
    cast,
    check_members,
    mean_weights,
    moved,
    recorded_factor,
)
from poprisk.risk._retraining.on_cluster import members_of_a_task, train_on_cluster
from poprisk.risk._retraining.one_by_one import module_outputs, train_one_by_one
from poprisk.runs import MODULE_BUFFER, FlatRule, Problem, Run, SegmentReader, flat_rule, step_generator

_CACHED_BYTES = 2**23
"""Size of a stacked vector beyond which a CPU is slower per member, because it no longer fits in the cache."""
_IN_MEMORY = "trained in this process, since a cluster cannot open a run that is only in memory: call run.save first"
_SMALL_WORK = 1e12
"""Number of multiplications up to which no progress is shown."""


def retrain(
    run: Run,
    members: Members,
    *,
    keep: Sequence[int] = (),
    stop: int | None = None,
    resume: Retrained | None = None,
    dtype: torch.dtype | None = None,
    memory: int = 2**30,
    progress: bool | None = None,
    check: bool = True,
    folder: str | Path | None = None,
) -> Retrained:
    r"""Train a run's model again from its first weights, K times: in one stacked computation where that is possible.

    Batches in their order, options, learning rates, micro-batches and seeded augmentation are the recorded ones. Where
    :func:`poprisk.runs.train` clipped (``clip_norm``), each member's gradient is clipped by its own norm; a factor from
    a custom loop whose origin is not recorded is applied as it was, and ``notes`` says so. A member with all weights 1
    ends at the weights of the run, to rounding.

    The gradients of all members are batched matrix products of the whole batch (no per-example gradient is formed), so
    that K members cost the arithmetic of K runs. On the CPU a few members are trained at a time, about 8 MiB per
    stacked vector, which is faster than all at once; ``memory`` limits it on every device.

    Modules that mix the examples of a batch or draw at random (BatchNorm, Dropout), and those without the derivatives
    that stacking takes (GRU, custom autograd functions), are trained one member after the other, by
    :mod:`poprisk.risk._retraining.one_by_one`; ``notes`` says why.

    Within ``with poprisk.cluster(…)`` the members are trained as tasks of that cluster, a few at a time, which equal
    each other bit by bit for any number of workers.

    Args:
        run: A recorded run with its problem.
        members: How each training differs from the recorded one.
        keep: Steps before which the weights are kept, from 0 to ``stop``.
        stop: The step before which to stop; default: the end of the run.
        resume: An earlier result of the same members, to continue from where it stopped.
        dtype: Precision of the arithmetic; default: that of the run.
        memory: Approximate limit in bytes for the members trained together.
        progress: Whether to show progress on stderr; None shows it for long trainings.
        check: Whether to compare the first two steps with the recorded ones, where every step was recorded.
        folder: Directory in which each finished training is kept, and found by a later call; with it, members are
            trained one after another.

    Returns:
        The members' weights, on the device of the problem's examples.

    Raises:
        RunError: the run has no problem, or its steps cannot be repeated from its optimizer and problem.
        DataError: weights are negative, not finite or of the wrong shape, or an index is out of range.

    >>> from poprisk import train
    >>> x = torch.tensor([[1.0], [1.0], [1.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", x, torch.tensor([[0.0], [0.0], [3.0]]),
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=40, progress=False)
    >>> retrain(run, Members(torch.tensor([[1.0, 1.0, 1.0], [1.5, 1.5, 0.0]]))).weights.round(decimals=4).abs()
    tensor([[1.],
            [0.]])
    """
    check_members(run, members, keep)
    memory = working_memory(memory)
    last = run.num_steps if stop is None else stop
    _resumed(run, members, keep, last, resume)
    held, why = (0, "to keep each of them") if folder is not None else _stackable(run, dtype)
    dtype = dtype or run.layout.dtype
    if resume is not None and resume.members:
        why = why or "as before"
    if not why and check and resume is None and run.is_dense and run.num_steps:
        why = _not_repeated(run, dtype)
    how = {"keep": list(keep), "last": last, "dtype": dtype, "memory": memory, "folder": folder}
    how |= {"held": held, "why": why}
    where = current_cluster()
    if where is None or (is_remote(where) and run.path is None):
        found = _train(run, members, resume=resume, check=check, progress=progress, **how)
        return found if where is None else replace(found, notes=(*found.notes, _IN_MEMORY))
    batch = len(run.batch(0)) if run.num_steps else 1
    each = 1 if why else members_of_a_task(run, members.count, run.problem.device.type, batch)
    return train_on_cluster(run, members, resume, _train, how, each=each, check=check, progress=progress)


def _train(
    run: Run,
    members: Members,
    *,
    keep: Sequence[int],
    last: int,
    resume: Retrained | None,
    dtype: torch.dtype,
    memory: int,
    progress: bool | None,
    check: bool,
    folder: str | Path | None,
    held: int,
    why: str | None,
) -> Retrained:
    """Train here: one after another, where there is a reason for it."""
    if why:
        how = {"resume": resume, "dtype": dtype, "progress": progress, "check": check, "folder": folder}
        return train_one_by_one(run, members, keep, last, **how, why=why)
    return _stacked(run, members, keep, last, resume, dtype, memory, progress, held)


def _stackable(run: Run, dtype: torch.dtype | None) -> tuple[int, str | None]:
    """Number of values that a forward pass computes for one example, and why members cannot be stacked, if so."""
    if run.obstacles:
        return 0, _brief(run.obstacles[0])
    changed = [name for name in run.checkpoint(run.num_steps) if name.startswith(MODULE_BUFFER)]
    if changed:
        return 0, f"training changes the buffer {changed[0].removeprefix(MODULE_BUFFER)!r}"
    few = torch.arange(1)
    try:
        trainer = _Trainer(run, flat_rule(run), dtype or run.layout.dtype, Members(torch.ones(1, run.num_examples)))
        held = _held(trainer)
        inputs, targets = run.problem.batch(few, dtype=trainer.dtype)
        w = trainer.first_weights(slice(0, 1))
        with _no_fallback(), exact_kernels(trainer.module):
            vmap(trainer._gradient, in_dims=(0, None, None, None))(w, w.new_ones(len(few)), inputs, targets)
            with torch.no_grad():
                vmap(trainer.outputs, in_dims=(0, None))(w, inputs)
    except (PopRiskError, RuntimeError) as error:  # from PyTorch: no batching rule, an operation in place
        return 0, _brief(first_line(error))
    return held, None


def _brief(text: str) -> str:
    """The first clause of an error's line, without what to do.

    >>> _brief("aten::embedding_bag hit the vmap fallback which is currently disabled")
    "torch.func.vmap has no rule for 'embedding_bag'"
    """
    if "hit the vmap fallback" in text:
        return f"torch.func.vmap has no rule for {text.partition(' ')[0].removeprefix('aten::')!r}"
    return text.rpartition(" but ")[2].partition(": ")[0].partition(", so ")[0]


@contextmanager
def _no_fallback() -> Iterator[None]:
    """Refuse operations that ``vmap`` would take member by member, with a warning."""
    before = torch._C._functorch._is_vmap_fallback_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._functorch._set_vmap_fallback_enabled(False)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(before)  # pyright: ignore[reportAttributeAccessIssue]


def _stacked(
    run: Run,
    members: Members,
    keep: Sequence[int],
    last: int,
    resume: Retrained | None,
    dtype: torch.dtype,
    memory: int,
    progress: bool | None,
    held: int,
) -> Retrained:
    trainer = _Trainer(run, flat_rule(run), dtype, members)
    first = 0 if resume is None else resume.step
    largest = max((len(index) for k in range(run.num_steps) for index, _ in trainer.recorded(k).parts(k)), default=1)
    width = _members_at_once(trainer, memory, held, largest)
    steps = last - first
    work = 6.0 * members.count * run.num_weights * steps * (len(run.batch(0)) if run.num_steps else 0)
    shown = progress if progress is not None or current_limits() is not None else work > _SMALL_WORK
    found: list[dict[int, Tensor]] = []
    states: list[tuple[Tensor, ...]] = []
    chunks = list(slices(members.count, width))
    with training_progress(
        f"{members.count} trainings", 0, max(steps * len(chunks), 1), shown, patient=progress is not True
    ) as report:
        for c, chunk in enumerate(chunks):
            found.append({})
            for k, w, state, loss in trainer.steps(chunk, last, resume):
                if k in keep or k == last:
                    found[-1][k] = w.clone()
                if k == last:
                    states.append(state)
                if k > first:
                    report(c * steps + k - first, loss)
    stacked = {k: torch.cat([part[k] for part in found]) for k in {*keep, last}}
    return Retrained(
        weights=stacked[last],
        kept={k: stacked[k] for k in keep},
        trainings=members.count * steps / max(run.num_steps, 1),
        notes=tuple(dict.fromkeys(trainer.notes)),
        step=last,
        state=tuple(torch.cat(each) for each in zip(*states, strict=True)),
    )


def _resumed(run: Run, members: Members, keep: Sequence[int], last: int, resume: Retrained | None) -> None:
    """Refuse members that cannot be resumed."""
    first = 0 if resume is None else resume.step
    if not first <= last <= run.num_steps or any(not first <= k <= last for k in keep):
        raise DataError(
            f"stop and keep must lie in {first} … {run.num_steps}, from the members' next step to the end of the run, "
            f"got stop={last} and keep={list(keep)}"
        )
    if resume is not None and resume.weights.shape != (members.count, run.num_weights):
        raise DataError(
            f"resume has members of shape {list(resume.weights.shape)}, expected {[members.count, run.num_weights]}"
        )


@dataclass
class _Trainer:
    """The run's steps for a slice of the members."""

    run: Run
    rule: FlatRule
    dtype: torch.dtype
    members: Members
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        run, problem = self.run, self.run.problem
        self.module, self.problem = run.module(self.dtype), problem
        training = run.manifest["training"]
        self.clip_norm = training.get("clip_norm") if isinstance(training, dict) else None
        self.seed = run.manifest["seed"] if run.augmented else None
        if run.augmented and problem.augment is None:
            raise RunError(
                f"the run was augmented, but problem {problem.name!r} has no augment: pass the one that was used"
            )
        self._gradient = grad_and_value(self._loss)
        self._stacked: dict[tuple[int, ...], Replayed[tuple[Tensor, Tensor]]] = {}
        self._reader: SegmentReader | None = None

    @property
    def device(self) -> torch.device:
        return self.problem.device

    def recorded(self, k: int) -> SegmentReader:
        """The recorded segment that has step k; opened once for all its steps."""
        if self._reader is None or not self._reader.start <= k < self._reader.stop:
            self._reader = self.run.recorded(k)
        return self._reader

    def first_weights(self, chunk: slice) -> Tensor:
        given = self.members.initial
        if given is not None:
            return given[chunk].to(self.device, self.dtype, copy=True)
        count = len(range(*chunk.indices(self.members.count)))
        return self.run.weights(0).to(self.device, self.dtype).repeat(count, 1)

    @torch.no_grad()
    def steps(
        self, chunk: slice, stop: int, resume: Retrained | None = None
    ) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...], Tensor]]:
        """The members' weights and states before each step and after the last, with the loss of the step before."""
        if resume is None:
            start, w = 0, self.first_weights(chunk)
            state = self.rule.initial(w)
        else:
            start, w = resume.step, resume.weights[chunk].to(self.device, self.dtype)
            state = tuple(each[chunk].to(self.device, self.dtype) for each in resume.state)
        loss = w.new_zeros(())
        data = MemberExamples(self.problem, self.members, chunk, self.device, self.dtype)
        for k in range(start, stop):
            yield k, w, state, loss
            with exact_kernels(self.module):
                g, loss = self._step_gradient(k, w, data)
                w, state = self.rule.step(k, w, g, state)
        yield stop, w, state, loss

    def _step_gradient(self, k: int, w: Tensor, data: "MemberExamples") -> tuple[Tensor, Tensor]:
        batches, factor = self.recorded(k).parts(k), self._factor(k)
        generator = None if self.seed is None else step_generator(self.seed, k)
        g, loss = None, w.new_zeros(())
        for index, given in batches:
            recorded = mean_weights(index, len(batches)) if given is None else given
            omega = (recorded * factor).to(self.device, self.dtype)
            inputs, targets, axes = data.batch(index, generator)
            weights = omega * data.weights[:, index.to(self.device)]
            added, losses = self._member_gradients(w, weights, inputs, targets, axes)
            if len(batches) > 1 and g is None:
                added = added.clone()  # the next part's gradient is written over this one
            g, loss = added if g is None else g + added, loss + losses.mean()
        assert g is not None
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g = g * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
        return g, loss

    def _member_gradients(
        self, w: Tensor, weights: Tensor, inputs: Inputs, targets: Tensor, axes: tuple[int | None, int | None]
    ) -> tuple[Tensor, Tensor]:
        """Each member's gradient and loss; on a GPU replayed, and overwritten by the next step's."""
        several = isinstance(inputs, tuple)

        def gradients(w: Tensor, weights: Tensor, targets: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
            return vmap(self._gradient, in_dims=(0, 0, *axes))(w, weights, batch if several else batch[0], targets)

        form = tuple(-1 if axis is None else axis for axis in axes)
        if form not in self._stacked:
            on_gpu = self.device.type == "cuda"
            self._stacked[form] = Replayed(gradients, capture=on_gpu, only=lambda _: on_gpu)
        return self._stacked[form](w, weights, targets, *parts_of(inputs))

    def _factor(self, k: int) -> float:
        """The factor of the recorded gradient, apart from clipping, which is computed again."""
        if self.clip_norm is not None:
            return 1.0
        return recorded_factor(self.recorded(k), k, self.notes)

    def _loss(self, w: Tensor, weights: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
        return torch.dot(weights, example_losses(self.problem, self.outputs(w, inputs), targets))

    def outputs(self, w: Float[Tensor, "d"], inputs: Inputs) -> Float[Tensor, "b *out"]:
        """One member's outputs for a batch."""
        layout = self.run.layout
        pieces = zip(layout.names, layout.split(w), strict=True)
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        batch = inputs if isinstance(inputs, tuple) else (inputs,)
        return functional_call(self.module, (dict(pieces), buffers), batch)


def example_losses(problem: Problem, outputs: Float[Tensor, "b *out"], targets: Tensor) -> Float[Tensor, "b"]:
    """Each example's loss of a batch, as one operation where torch has it.

    >>> problem = Problem(torch.nn.Identity, "squared", torch.zeros(1, 2), torch.zeros(1, 2))
    >>> example_losses(problem, torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([12.5000])
    """
    if problem.loss == "cross_entropy" and outputs.dim() == 2:
        return F.cross_entropy(outputs, targets, reduction="none")
    if problem.loss == "squared" and outputs.shape == targets.shape:
        return 0.5 * (outputs - targets).square().flatten(1).sum(1)
    return vmap(resolve_loss(problem.loss))(outputs, targets)


def member_outputs(
    run: Run,
    weights: Float[Tensor, "members d"],
    inputs: Inputs,
    *,
    own: bool = False,
    memory: int = 2**30,
    buffers: Buffers | None = None,
) -> Float[Tensor, "members b *out"]:
    """Every member's outputs for a batch, or with ``own`` for a batch of its own (inputs [members, b, …]).

    Members that were trained one after another have ``buffers``, and are evaluated one after another.

    >>> from poprisk import train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1, "bias": False})
    >>> run = train(problem, torch.optim.SGD, steps=1, progress=False)
    >>> member_outputs(run, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)).squeeze(2)
    tensor([[1., 2.],
            [3., 4.]])
    """
    if buffers is not None:
        given, several = parts_of(moved(inputs, run.problem.device)), range(len(weights))
        each: list[Inputs] = [tuple(x[j] for x in given) if own else given for j in several]
        return torch.stack(module_outputs(run, list(weights), buffers, each, weights.dtype))
    trainer = _Trainer(run, flat_rule(run), weights.dtype, Members(torch.ones(len(weights), run.num_examples)))
    converted = tuple(cast(part, weights.dtype) for part in parts_of(moved(inputs, weights.device)))
    held = _held(trainer)
    block = max(1, memory // (3 * held * weights.element_size() + 1))  # examples at once, where one member fills memory
    found = []
    with torch.no_grad(), exact_kernels(trainer.module):
        for columns in slices(converted[0].shape[1 if own else 0], block):
            rows = (slice(None), columns) if own else (columns,)
            part = tuple(x[rows] for x in converted)
            width = _members_at_once(trainer, memory, held, part[0].shape[1 if own else 0])
            done = [
                _outputs(trainer, weights[a], part, a, own, many=isinstance(inputs, tuple))
                for a in slices(len(weights), width)
            ]
            found.append(torch.cat(done))
    return torch.cat(found, 1)


def _outputs(
    trainer: _Trainer, weights: Tensor, batch: tuple[Tensor, ...], rows: slice, own: bool, many: bool
) -> Tensor:
    part = tuple(x[rows] for x in batch) if own else batch
    return vmap(trainer.outputs, in_dims=(0, 0 if own else None))(weights, part if many else part[0])


def _held(trainer: _Trainer) -> int:
    """Number of values that a forward pass computes for one example; refuses a model that mixes examples."""
    problem, dtype = trainer.problem, trainer.dtype
    w = trainer.run.weights(0).to(trainer.device, dtype)

    def outputs(rows: list[int]) -> Tensor:
        return trainer.outputs(w, problem.batch(torch.tensor(rows), dtype=dtype)[0])

    return probe(outputs, len(problem)).held


def _members_at_once(trainer: _Trainer, memory: int, held: int, batch: int) -> int:
    """Number of members that fit in memory, and on a CPU in its cache."""
    vector = trainer.run.num_weights * trainer.dtype.itemsize
    vectors = 4 + 2 * len(trainer.rule.state_names)
    fits = max(1, memory // (vectors * vector + 3 * held * batch * trainer.dtype.itemsize))
    return int(fits if trainer.device.type != "cpu" else min(fits, max(2, _CACHED_BYTES // vector)))


def _not_repeated(run: Run, dtype: torch.dtype) -> str:
    """Why stacked members would not take the recorded steps: Adam makes steps of rounding errors."""
    alone = _Trainer(run, flat_rule(run), dtype, Members(torch.ones(1, run.num_examples)))
    try:
        for k, w, _, _ in alone.steps(slice(0, 1), min(2, run.num_steps)):
            cannot_repeat(run, k, w[0])
    except RunError:
        return "stacked steps round differently from the recorded ones"
    return ""
