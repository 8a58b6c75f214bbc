r"""What replacing one training example does: by real trainings, and by the transfer operators of the two runs.

With :math:`U_Q^S(T) = U_Q(w_0) - \mathsf G_{Q,S}\, g_S(0)` for both datasets, replacing example i by another moves the
predictions on Q by

.. math:: \Delta = U_Q^{S'} - U_Q^{S} = \mathsf G_{Q,S}^{(i)} \delta_i
    + (\mathsf G_{Q,S} - \mathsf G_{Q,S'})\, g_{S'}(0)

the effect of the example's own initial gradient, plus the change of what training transfers (Lemma
``replace_one_stability``). The operators are those of the recorded steps (:class:`poprisk.operators.Window`). Decay and
other sources, which the paper's flow does not have, are a third part here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, Inputs, gauss_legendre, loss_gradients
from poprisk._core.linalg import spectrum_of_factor
from poprisk.errors import DataError
from poprisk.operators import Operators, Window
from poprisk.risk import Members, Resampled
from poprisk.risk._resampled import RetrainOptions, held_out_result, train_members
from poprisk.runs import Run


def replace_one(
    run: Run,
    pairs: Sequence[tuple[int, int]],
    *,
    pool: tuple[Inputs, Tensor] | None = None,
    **options: Unpack[RetrainOptions],
) -> Resampled:
    r"""Train with one example replaced by a new one, and evaluate the model on the example that was replaced.

    Theorem ``thm:self_influence``: over independent new examples the mean of
    :math:`\ell(F(w_T(S^{(i)}), z_i), y_i) - \ell(F(w_T(S), z_i), y_i)` is the generalization gap, and the held-out loss
    alone is the risk of a model trained on all n examples. It takes one training for each pair.

    Args:
        run: What was recorded.
        pairs: (i, j): training example i is replaced by row j of the pool.
        pool: Inputs and targets drawn like the training examples; default: the problem's test examples.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk.retrain`.

    Raises:
        DataError: there is no pool, no pair, or an index is out of range.
        RunError: the run cannot be trained again.
    """
    n, others = run.num_examples, pool if pool is not None else run.problem.test
    if others is None:
        raise DataError(
            "replacing examples needs other examples: pass pool=(inputs, targets), or give the problem test examples"
        )
    index = torch.as_tensor(pairs, dtype=torch.long).reshape(-1, 2)
    limits = torch.tensor([n, len(others[1])])
    if not len(index) or bool(((index < 0) | (index >= limits)).any()):
        raise DataError(f"pairs must be (example, row) below {tuple(limits.tolist())}, at least one, got {pairs!r}")
    positions = torch.arange(n).repeat(len(index), 1)
    positions[torch.arange(len(index)), index[:, 0]] = n + index[:, 1]
    members = Members(torch.ones(len(index), n, dtype=torch.float64), index_map=positions, pool=others)
    held = [index[j : j + 1, 0] for j in range(len(index))]
    trained = train_members(run, members, options)
    return held_out_result(run, "replace-one", held, trained, target=f"a model trained on {n} examples")


@dataclass(frozen=True)
class ReplaceOneDisplacement:
    r"""The displacement of the predictions on Q and its parts, :math:`\Delta = content + channel + source`."""

    displacement: Float[Tensor, "M"]
    r""":math:`\Delta = U_Q^{S'}(T) - U_Q^S(T)`, measured on the two networks."""
    content: Float[Tensor, "M"]
    r""":math:`\mathsf G^{(i)} \delta_i`: the effect of the replaced example's initial gradient."""
    channel: Float[Tensor, "M"]
    r""":math:`(\mathsf G_S - \mathsf G_{S'})\, g_{S'}`: the effect of the change of the transfer."""
    source: Float[Tensor, "M"]
    """Contribution of weight decay and of momentum from before the window; 0 without them."""
    example_score: float
    r""":math:`\|\mathsf G^{(i)}\|_{op}`."""
    bound: float
    r""":math:`\|\mathsf G^{(i)}\| \|\delta_i\| + \|\mathsf G_S - \mathsf G_{S'}\| \|g_{S'}\| + \|source\|`, at least
    :math:`\|\Delta\|` (``eq:replace_one_bound``)."""
    learned_content: Float[Tensor, "M"]
    r""":math:`C_S (z_S - z_{S'})` with :math:`z = W^{1/2} g` (Remark ``self_influence_content_channel``)."""
    observed_channel: Float[Tensor, "M"]
    r""":math:`(C_S - C_{S'})\, z_{S'}` with :math:`C = \mathsf G W^{\dagger/2}`; sums with the above to content +
    channel."""


def replace_one_displacement(window: Window, replaced: Window, example: int) -> ReplaceOneDisplacement:
    r"""The displacement of predictions between two runs whose data differ in one example, and its parts.

    Args:
        window: Window of the run on S, small enough for dense matrices, with a test set.
        replaced: Window of the run on S': the same steps from the same weights, with the same test set.
        example: i, the example that was replaced.

    Raises:
        DataError: the windows have different sizes or starts, no test set, or differ in more than that example.
    """
    _check_pair(window, replaced, example)
    first, second = window.dense_operators(), replaced.dense_operators()
    n = window.num_examples
    change = (first.output_gradient - second.output_gradient).view(n, -1)
    others = torch.cat([change[:example], change[example + 1 :]])
    if float(others.abs().max()) > 1e-6 * float(first.output_gradient.abs().max()):
        raise DataError(
            f"the runs differ in more than example {example}, or start from different weights: replace one example and "
            "keep seed, batches and first weights"
        )
    G, G_other = first.test_transfer, second.test_transfer
    block = G.view(len(G), n, -1)[:, example]
    delta, g_other = change[example], second.output_gradient
    score = float(torch.linalg.matrix_norm(block, 2))
    source = second.sources.test - first.sources.test
    drift = float(torch.linalg.matrix_norm(G - G_other, 2)) * float(g_other.norm())
    content, channel = _normalized_split(first, second)
    return ReplaceOneDisplacement(
        displacement=second.test_displacement - first.test_displacement,
        content=block @ delta,
        channel=(G - G_other) @ g_other,
        source=source,
        example_score=score,
        bound=score * float(delta.norm()) + drift + float(source.norm()),
        learned_content=content,
        observed_channel=channel,
    )


def gap_integrals(
    loss: str | ExampleLoss,
    outputs: Float[Tensor, "n *out"],
    targets: Tensor,
    displacement: Float[Tensor, "n p"],
    *,
    nodes: int = 32,
) -> Float[Tensor, "n"]:
    r"""Each example's term of the integral representation of the gap (Cor. ``self_influence_integral``).

    .. math:: \int_0^1 \langle \nabla\Psi_{Z_i}(e_i + \theta \Delta_i), \Delta_i \rangle\, d\theta
       = \Psi_{Z_i}(e_i + \Delta_i) - \Psi_{Z_i}(e_i)

    by Gauss–Legendre quadrature. Averaged over examples and replacements it is the expected generalization gap.

    Args:
        loss: Ψ, the loss.
        outputs: Predictions of the run for its examples.
        targets: Targets of the examples.
        displacement: Δ_i, the change of each prediction when its own example is replaced.
        nodes: Number of quadrature nodes; a single one is exact for the squared loss.

    >>> moved = gap_integrals("squared", torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]))
    >>> round(moved.item(), 4)  # (3² - 1²)/2
    4.0
    """
    flat = outputs.reshape(len(outputs), -1)
    if displacement.shape != flat.shape:
        raise DataError(f"displacement must be {list(flat.shape)}, one row per example, got {list(displacement.shape)}")
    total = flat.new_zeros(len(flat))
    for theta, weight in gauss_legendre(nodes):
        at = (flat + theta * displacement).view(outputs.shape)
        total += weight * (loss_gradients(loss, at, targets) * displacement).sum(1)
    return total


def _normalized_split(first: Operators, second: Operators) -> tuple[Tensor, Tensor]:
    """C_S (z_S - z_S') and (C_S - C_S') z_S', with W's root and its pseudo-inverse from its factor."""
    (C, root), (C_other, root_other) = (_channel(ops) for ops in (first, second))
    z, z_other = root @ first.output_gradient, root_other @ second.output_gradient
    return C @ (z - z_other), (C - C_other) @ z_other


def _channel(ops: Operators) -> tuple[Tensor, Tensor]:
    """C = G W^{†/2} and W^{1/2}."""
    spectrum = spectrum_of_factor(ops.factor)
    roots, V = spectrum.roots, spectrum.vectors
    kept = roots > roots.max() * torch.finfo(roots.dtype).eps * 1e4
    roots, V = roots[kept], V[:, kept]
    return (ops.test_transfer @ V / roots) @ V.T, (V * roots) @ V.T


def _check_pair(window: Window, replaced: Window, example: int) -> None:
    for each in (window, replaced):
        if each.test_inputs is None:
            raise DataError("a displacement needs a test set: pass test_inputs=… to both windows")
    sizes = [(w.num_outputs, w.num_test_outputs, w.num_examples, w.start, w.stop) for w in (window, replaced)]
    if sizes[0] != sizes[1] or window.start != 0:
        raise DataError(
            "both windows must have the same examples, test set and steps, from step 0 on, got (outputs, test outputs, "
            f"examples, start, stop) = {sizes[0]} and {sizes[1]}"
        )
    if not 0 <= example < window.num_examples:
        raise DataError(f"the examples are 0 … {window.num_examples - 1}, got {example}")
