r"""How much of its own label each example takes over through a run, and what removing it would do by that measure.

Removing example i is taken to be the label change that leaves it no residual at the end. With
:math:`H_i = \partial u_i / \partial y_i` through the run and :math:`\Lambda_i` the loss curvature,

.. math:: u_{-i} = u_i + H_i r(u_{-i}), \quad r(u_{-i}) \approx r_i + \Lambda_i (u_{-i} - u_i)
   \quad\Rightarrow\quad u_{-i} = u_i + (I - H_i \Lambda_i)^{-1} H_i r_i

which is :math:`e_i/(1-h_i)` for squared loss. It is exact for ridge regression at its minimum. Along a run the residual
of the example changes from step to step, and one label cannot cancel them all: the formula is right early in training,
and blows up as h approaches 1.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import loss_hessians, slices, take_examples
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._influence.step_jacobian import StepJacobian
from poprisk.runs import Run


def label_sensitivities(run: Run | Unrolled, examples: Int[Tensor, "m"] | None = None) -> Float[Tensor, "m p p"]:
    r""":math:`H_i = \partial u_i(w_T) / \partial y_i`: how much of its own label each example takes over.

    The labels of all steps change together; for losses other than squared, cross-entropy and logistic a label change is
    a shift of the residual. It takes p adjoint queries per example.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples; default: all.

    >>> from poprisk import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(3), torch.ones(3, 1),
    ...                   arguments={"in_features": 3, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=1.5), steps=2, progress=False)
    >>> label_sensitivities(run).flatten()  # 1 - (1 - lr/3)²
    tensor([0.7500, 0.7500, 0.7500])
    """
    unrolled = as_unrolled(run)
    every = torch.arange(unrolled.num_examples)
    return _sensitivities(unrolled, every if examples is None else examples, every)


def _sensitivities(
    unrolled: Unrolled, chosen: Int[Tensor, "m"], groups: Int[Tensor, "n"], responses: Tensor | None = None
) -> Float[Tensor, "m p c"]:
    """The sum of H_ij over the examples j of i's group, each times its response [p, c]."""
    p, w, model = unrolled.num_outputs, unrolled.last_weights, unrolled.last_model
    # Every query passes each step with the outputs of its whole batch.
    by_batch = 4 * len(unrolled.run.batch(unrolled.start)) * p * unrolled.dtype.itemsize
    width = max(1, min(unrolled.columns_at_a_time(), unrolled.memory // 2 // by_batch))
    blocks = []
    for rows in slices(len(chosen), max(1, width // p)):
        own = chosen[rows]
        queries = model.output_jacobian(w, take_examples(unrolled.inputs, own)).flatten(0, 1)  # [m p, d]
        owners = own.repeat_interleave(p)
        parts = [
            _own_labels(unrolled, queries[part], owners[part], groups, responses) for part in slices(len(owners), width)
        ]
        blocks.append(torch.cat(parts).view(len(own), p, -1))
    return torch.cat(blocks)


def corrected_displacement(
    unrolled: Unrolled, examples: Int[Tensor, "m"], groups: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "m *out"], Float[Tensor, "m p"], Float[Tensor, "m"]]:
    """Outputs of each example, their change when its group is removed, and the spectral radius of HΛ (fails near 1).

    Examples of a group have equal inputs and outputs, so that Δ is the sum of H_ij (r_j + Λ_j Δ) over it.
    """
    model, w = unrolled.last_model, unrolled.last_weights
    out = torch.isin(groups, groups[examples]).nonzero().squeeze(1)
    x, y = take_examples(unrolled.inputs, out.to(unrolled.device)), unrolled.targets[out]
    outputs = model.batch_outputs(w, x)
    curved = torch.cat([loss_hessians(model.loss, outputs, y), model.output_gradient(w, x, y).unsqueeze(2)], 2)
    responses = curved.new_zeros(len(groups), *curved.shape[1:])
    responses[out] = curved
    found = _sensitivities(unrolled, examples, groups, responses)
    HL, Hr = found[:, :, :-1], found[:, :, -1:]
    eye = torch.eye(HL.shape[1], dtype=HL.dtype, device=HL.device)
    radius = torch.linalg.eigvals(HL).abs().amax(1).to(HL.dtype)
    solved = torch.linalg.solve_ex(eye - HL, Hr).result.squeeze(2)
    return outputs[torch.searchsorted(out, examples)], solved, radius


def _own_labels(
    unrolled: Unrolled,
    queries: Float[Tensor, "q d"],
    owners: Int[Tensor, "q"],
    groups: Int[Tensor, "n"],
    responses: Float[Tensor, "n p c"] | None,
) -> Float[Tensor, "q c"]:
    """The derivative of each query by the labels of its example's group; those by all n labels would not fit."""
    found = queries.new_zeros(len(queries), unrolled.num_outputs if responses is None else responses.shape[2])
    groups = groups.to(queries.device)
    own = groups[owners.to(queries.device)]

    def gather(step: StepJacobian, by_labels: Float[Tensor, "q b p"]) -> None:
        rows, places = (own[:, None] == groups[step.examples][None, :]).nonzero(as_tuple=True)
        each = by_labels[rows, places]
        if responses is not None:
            each = torch.einsum("kp,kpc->kc", each, responses[step.examples[places]])
        found.index_add_(0, rows, each)

    unrolled.adjoint(queries.T, wrt=("initial",), on_step=gather)
    return found
