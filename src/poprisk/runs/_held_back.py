"""Held-back examples in a recorded training: measured along the way, and the best weights kept beside the record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.autodiff import resolve_loss
from poprisk._core.store import check_fields, content_key, pack, unpack
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import KeepBest, KeptRisk, Moment, hold_back
from poprisk.runs._manifest import Content
from poprisk.runs._problem import Problem
from poprisk.runs._writer import RunWriter


@dataclass(frozen=True, eq=False)
class Kept:
    """What a training with held-back examples ended with: the best averaged weights, and the curve they were chosen by.

    The record of the run itself has the weights of every step; these are stored beside it.
    ``module.load_state_dict(kept.weights)`` puts them into a module.
    """

    risk: KeptRisk
    """Their risk on new data as noisy as the training data, with the step at which they were kept."""
    weights: dict[str, Tensor]
    """The state of the module, buffers included."""
    held: Int[Tensor, "held"]
    """Indices of the examples that were held back; no step trained on them. Empty if they are not among the examples of
    the run, as in a loop of your own with a :class:`~poprisk.Recorder` for the other examples."""
    moments: tuple[Moment, ...]
    """All measurements: the loss and the score of every held-back example; none if these weights were not measured."""
    target: str = ""
    """The model that ``risk`` is about, if it is not the one with these weights."""

    @property
    def count(self) -> int:
        """Number of held-back examples."""
        return len(self.moments[0].losses) if self.moments else 0

    def content(self) -> Content:
        """Tensors and notes for a file."""
        form, tensors = pack({name: getattr(self, name) for name in ("risk", "weights", "held", "moments", "target")})
        return tensors, form

    @classmethod
    def from_content(cls, content: Content, examples: int) -> "Kept":
        """The opposite of :meth:`content`, for a run with that many examples.

        Raises:
            DataError: the content is not that of kept weights.
        """
        try:
            kept = check_fields(cls(**unpack(content[1], content[0], (KeptRisk, Moment))))
        except (DataError, TypeError) as error:
            raise DataError(f"the kept weights of the run are damaged ({error}): restore them from a copy") from None
        inside = not len(kept.held) or 0 <= int(kept.held.min()) <= int(kept.held.max()) < examples
        shapes = {tuple(x.shape) for each in kept.moments for x in (each.losses, each.scores)}
        if not inside or kept.held.dtype != torch.long or len(shapes) > 1:
            raise DataError("the measurements of the kept weights are damaged: restore them from a copy")
        return kept


class KeptWriter:
    """Stores what a :class:`~poprisk.KeepBest` of the same optimizer keeps beside the record, when it finishes.

    Args:
        writer: Writes the run.
        module: The module that is recorded.
    """

    held: Int[Tensor, "held"] = torch.empty(0, dtype=torch.long)
    """Indices of the held-back examples, if they are among those of the run."""

    def __init__(self, writer: RunWriter, module: nn.Module) -> None:
        self._writer, self._module = writer, module

    def before_kept(self) -> None:
        """Write the last steps while the module still has their weights."""
        if not self._writer.is_finished:
            self._writer.flush()

    def after_kept(self, risk: KeptRisk, steps: int, moments: Sequence[Moment]) -> None:
        """Write the kept weights, if they are of all steps of this run."""
        if self._writer.has_begun and steps == self._writer.num_steps:
            self.store(risk, moments)

    def store(self, risk: KeptRisk, moments: Sequence[Moment], target: str = "") -> None:
        """Write the weights that the module has as the kept ones."""
        weights = {name: x.detach().cpu().clone() for name, x in self._module.state_dict().items()}
        self._writer.keep(Kept(risk, weights, self.held, tuple(moments), target).content())


class HeldBack:
    """Splits the examples of a problem, and follows a training on most of them with :class:`~poprisk.KeepBest`.

    Args:
        problem: The problem; examples are held back from its training examples.
        share: Share of the examples to hold back, in (0, 1).
        seed: Seed for the choice of examples.
        tail: See :class:`~poprisk.KeepBest`.

    Raises:
        HyperparameterError: ``share`` is not in (0, 1).
    """

    def __init__(self, problem: Problem, share: float, seed: int, tail: float | Sequence[float] | None) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise HyperparameterError(f"hold_back must be a share of the examples in (0, 1), got {share!r}: use 0.05")
        self._problem, self._tail = problem, tail
        rows = (torch.arange(len(problem)), problem.targets.cpu())
        (self.train, _), (self.held, _) = hold_back(rows, share, seed=seed)
        tails = list(tail) if isinstance(tail, Sequence) else tail
        # A training is continued only with the block that it began with, however a later version may draw.
        block = content_key(self.held.tolist())[:16]
        about = {"share": float(share), "tail": tails, "examples": len(self.held), "block": block}
        self.settings = {"hold_back": about}
        self._keeper: KeepBest | None = None

    def follow(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Measure the module after some of the optimizer's steps."""
        dtype = next(module.parameters()).dtype
        example_loss = torch.func.vmap(resolve_loss(self._problem.loss))

        def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
            losses = example_loss(outputs, targets)
            return losses if reduction == "none" else losses.mean()

        held = self._problem.batch(self.held, dtype=dtype)
        self._keeper = KeepBest(module, optimizer, held, loss, average=self._tail)

    def count(self, examples: int) -> None:
        """Say how many examples the coming step trains on."""
        assert self._keeper is not None
        self._keeper.count_examples(examples)

    def state(self) -> Content:
        """Everything needed to go on from the present step."""
        assert self._keeper is not None
        form, tensors = pack(self._keeper.state_dict())
        return tensors, form

    def restore(self, content: Content) -> None:
        """Go on from :meth:`state`."""
        assert self._keeper is not None
        self._keeper.load_state_dict(unpack(content[1], content[0], ()))

    def finish(self, recorder: Any) -> None:
        """Choose the best weights; the module has them afterwards, and the recorder of the training stores them."""
        assert self._keeper is not None
        self._keeper.finish()

    def close(self) -> None:
        """Stop following the optimizer."""
        if self._keeper is not None:
            self._keeper.close()
