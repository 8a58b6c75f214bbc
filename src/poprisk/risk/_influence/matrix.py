r"""The influence matrix of a run: what each example's weight did to each example's loss.

.. math:: \mathsf J_{ij} = \frac{d}{d\lambda}\Big|_{0} \psi_i(w_T), \qquad \alpha = 1 - \lambda e_j

so that J_ij predicts the *change* of the loss at i when j is removed, in loss units, at fixed order and batches
(Def. ``self_influence_matrix``). The run that happened is differentiated, with its optimizer: momentum,
preconditioner and gate are inside, at every step. This is the paper's :math:`\mathsf J^M_\Psi` (its superscript M:
"the optimizer's preconditioner inserted at every instant"), with the preconditioner's own response added; for plain SGD
it is :math:`\mathsf J_\Psi` of the discrete steps. There is no second matrix without M for a run that had one.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, FlatModel, Inputs, slices, take_examples
from poprisk._core.estimate import Estimate
from poprisk._core.linalg import LinearOperator, from_functions, hutchinson_diagonal, xdiag
from poprisk._core.progress import Progress
from poprisk._core.seeds import generator_for
from poprisk.errors import DataError
from poprisk.risk._influence.linearized_run import LinearizedRun
from poprisk.risk._influence.parameter_choice import Parameters
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.runs import Run


def influence_matrix(
    run: Run | Unrolled, *, loss: str | ExampleLoss | None = None, parameters: Parameters | None = None
) -> Float[Tensor, "n n"]:
    r""":math:`\mathsf J_\Psi`, exactly: one adjoint query for each training example (Thm. ``self_influence_backward``).

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        loss: Ψ, the loss that is evaluated; default: the loss that was trained.
        parameters: Differentiate by these parameters of the model alone, see :class:`Unrolled`; default: all.

    Returns:
        Entry (i, j): the change of example i's loss predicted for the removal of example j.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: fewer than 3 examples, or an example whose loss is not finite.

    >>> from poprisk import Problem, train
    >>> x = torch.tensor([[1.0], [1.0], [1.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", x, torch.tensor([[0.0], [0.0], [3.0]]),
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=40, progress=False)
    >>> influence_matrix(run).round(decimals=3)[2]  # without the 3 its loss grows: the mean falls from 1 to 0
    tensor([-0.6670, -0.6670,  1.3330])
    """
    unrolled = as_unrolled(run, parameters=parameters)
    return influence_on(unrolled, unrolled.inputs, unrolled.targets, loss=loss)


def influence_on(
    run: Run | Unrolled,
    inputs: Inputs,
    targets: Tensor,
    *,
    loss: str | ExampleLoss | None = None,
    parameters: Parameters | None = None,
) -> Float[Tensor, "m n"]:
    """The change of each query's loss predicted for the removal of each training example.

    For smooth activations the prediction holds for whole removals. With kinks such as ReLU (``Unrolled(run).kinks``) it
    is the exact derivative, but units that change side move the run by as much as an example does.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        inputs: Inputs of m queries.
        targets: Targets of the queries.
        loss: Ψ; default: the loss that was trained.
        parameters: Differentiate by these parameters of the model alone, with all others at their recorded values:
            ``"last_layer"``, ``"lora"``, or names of parameters or modules, or patterns. Less memory, and an answer
            to another question: what the removal does through these parameters. Default: all that were trained.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: a query's gradient is not finite, or inputs and targets differ in number.
    """
    unrolled = as_unrolled(run, parameters=parameters)
    inputs, targets = _queries(unrolled, inputs, targets)
    model, w = evaluation_model(unrolled, loss), unrolled.last_weights
    parts, steps = [], unrolled.stop - unrolled.start
    with Progress("influence", len(targets) * steps, shown=None, patient=True) as progress:
        for rows in slices(len(targets), unrolled.columns_at_a_time()):
            queries = model.per_example_gradients(w, take_examples(inputs, rows), targets[rows])
            found = unrolled.adjoint(queries.T, advance=progress.advance).weights
            assert found is not None
            parts.append(-found)
    return torch.cat(parts)


def influence_operator(
    run: Run | Unrolled, *, loss: str | ExampleLoss | None = None, parameters: Parameters | None = None
) -> LinearOperator:
    """The influence matrix by its products: k columns cost k forward directions, its transpose k adjoint queries.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        loss: Ψ; default: the loss that was trained.
        parameters: Differentiate by these parameters of the model alone, see :class:`Unrolled`; default: all.
    """
    unrolled = as_unrolled(run, parameters=parameters)
    model, w, n = evaluation_model(unrolled, loss), unrolled.last_weights, unrolled.num_examples
    slopes = model.output_gradient(w, unrolled.inputs, unrolled.targets)
    _check_finite(slopes)

    def product(X: Tensor) -> Tensor:
        moved = model.jvp(w, unrolled.inputs, unrolled.forward(weights=X)).reshape(*slopes.shape, -1)
        return -(slopes[:, :, None] * moved).sum(1)

    def adjoint_product(Y: Tensor) -> Tensor:
        covectors = model.vjp(w, unrolled.inputs, (slopes[:, :, None] * Y[:, None, :]).flatten(0, 1))
        found = unrolled.adjoint(covectors).weights
        assert found is not None
        return -found.T.contiguous()

    return from_functions(product, adjoint_product, (n, n), dtype=unrolled.dtype, device=w.device)


def self_influence(
    run: Run | Unrolled,
    *,
    loss: str | ExampleLoss | None = None,
    parameters: Parameters | None = None,
    products: int | None = None,
    method: Literal["xdiag", "hutchinson"] = "xdiag",
    seed: int = 0,
) -> Estimate:
    r"""The diagonal :math:`\mathsf J_{ii}`: the change of each example's loss predicted for its own removal.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        loss: Ψ; default: the loss that was trained.
        parameters: Differentiate by these parameters of the model alone, see :class:`Unrolled`; default: all.
        products: Number of products with the matrix to estimate it from; default: the exact diagonal, from n products.
        method: The estimator, ``"xdiag"`` or ``"hutchinson"``.
        seed: Seed for the probes.

    Returns:
        One value per example, with its standard error; the cost is in directions through the run.
    """
    unrolled = as_unrolled(run, parameters=parameters)
    if products is None:
        J = influence_matrix(unrolled, loss=loss)
        return exact_estimate(J.diagonal().clone(), unrolled)
    estimators = {"xdiag": xdiag, "hutchinson": hutchinson_diagonal}
    operator = influence_operator(unrolled, loss=loss)
    return estimators[method](operator, products, generator=generator_for(seed, "probes"))


def exact_estimate(value: Tensor | float, unrolled: Unrolled) -> Estimate:
    """An exact value, from one query per example."""
    error = torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
    return Estimate(value, error, reason="exact derivative of the run", cost=unrolled.num_examples)


def evaluation_model(unrolled: LinearizedRun, loss: str | ExampleLoss | None) -> FlatModel:
    """The network with the loss to evaluate."""
    model = unrolled.last_model
    return model if loss is None else model.with_loss(loss)


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in another dtype; integers stay as they are."""
    if isinstance(inputs, tuple):
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _check_finite(slopes: Tensor) -> None:
    bad = ~slopes.isfinite().all(1)
    if bool(bad.any()):
        raise DataError(
            f"the gradient of example {int(bad.nonzero()[0])}'s loss is not finite at the last weights, so that its "
            "influence is not defined: check the example, or pass another loss"
        )


def _queries(unrolled: Unrolled, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
    """Queries on the device and in the precision of the run."""
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    lengths = [x.shape[0] if x.dim() else 0 for x in (*parts, targets)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise DataError(
            "inputs and targets must have the same number of queries, at least 1, along their first axis, got shapes "
            f"{[list(x.shape) for x in (*parts, targets)]}"
        )
    placed = tuple(x.to(unrolled.device) for x in parts)
    floats = targets.is_floating_point()
    return (
        cast_inputs(placed if isinstance(inputs, tuple) else placed[0], unrolled.dtype),
        targets.to(unrolled.device, unrolled.dtype if floats else targets.dtype),
    )
