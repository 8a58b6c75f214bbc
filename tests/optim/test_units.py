"""``lr`` is AdamW's: the gate relative to its mean, checkpoints of literal gates, and a swap at AdamW's rates."""

import copy
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from optimizer_table import BACKENDS
from streams import relative_error, start, stream, train
from torch import nn
from torch.optim import AdamW
from torch.testing import assert_close

from poprisk.errors import LiteralGateWarning, StateDictError
from poprisk.optim import Gate, PopRiskAdamW, suggest_lr
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import current_gate, initial_state, linearize, population_step
from poprisk.optim.rules._relative import first_scale

KINDS = {
    "snr, strength 100": Gate(),
    "snr, strength 1": Gate("snr", strength=1.0),
    "soft": Gate("soft", strength=1.0),
    "soft, calibrated": Gate("soft", strength=1.0, alpha="calibrated"),
    "hard": Gate("hard"),
    "hard, calibrated": Gate("hard", alpha="calibrated"),
    "per row": Gate(granularity="row"),
    "per tensor": Gate(granularity="tensor"),
    "corrected": Gate("soft", centering="corrected", strength=1.0, alpha="calibrated"),
}
EVERY_KIND = pytest.mark.parametrize("gate", KINDS.values(), ids=KINDS)


# --- the rule


@EVERY_KIND
def test_every_coordinate_moves_between_half_of_adamw_s_step_and_adamw_s_step(gate):
    params = start()
    optimizer = PopRiskAdamW(params, gate=gate)
    means = []
    for row in stream(60):
        train(optimizer, params, [row])
        for q in optimizer.gates().values():
            assert q.max() <= 1.0
            assert q.min() >= 0.5
        means.append(optimizer.gates()[params[2]].mean())
    assert 0.5 <= torch.stack(means[5:]).mean() <= 1.0


def test_the_first_step_is_adamw_s_where_the_gate_is_open():
    """There is no mean yet: every open coordinate counts as average."""
    params, theirs = start(), start()
    train(PopRiskAdamW(params, lr=1e-3), params, stream(1))
    train(AdamW(theirs, lr=1e-3), theirs, stream(1))
    assert relative_error(params, theirs) <= 1e-15


def test_strength_does_not_change_the_size_of_the_steps():
    """The literal gate shrinks a hundredfold from strength 1 to 100; in AdamW's units both keep more than half."""
    means = {}
    for normalize in (True, False):
        for strength in (1.0, 100.0):
            params = start()
            optimizer = PopRiskAdamW(params, gate=Gate(strength=strength, normalize=normalize))
            train(optimizer, params, stream(40))
            means[normalize, strength] = float(optimizer.gates()[params[2]].mean())
    assert means[False, 1.0] > 8 * means[False, 100.0]
    assert 0.5 < means[True, 100.0] / means[True, 1.0] < 2.0


@pytest.mark.parametrize("gate", ["snr", "soft", "hard"])
def test_stacked_trainings_have_means_of_their_own(gate):
    hyper = Hyper(gate=gate, normalize_gate=True, alpha=0.3)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) + 0.4 for _ in range(12)]
    weights = torch.zeros(2, 3, 4, dtype=torch.float64)
    stacked = replace(initial_state(weights, hyper), scale=first_scale(weights, (2,)))
    alone, states = list(weights), [initial_state(w, hyper) for w in weights]
    for row in rows:
        weights, stacked = population_step(weights, row, stacked, hyper)
        for i in range(2):
            alone[i], states[i] = population_step(alone[i], row[i], states[i], hyper)
    assert_close(weights, torch.stack(alone), rtol=1e-13, atol=1e-15)
    assert_close(stacked.scale, torch.stack([s.scale for s in states]), rtol=1e-13, atol=1e-15)
    assert_close(current_gate(stacked, hyper)[1], current_gate(states[1], hyper), rtol=1e-12, atol=1e-15)
    assert_close(linearize(stacked, hyper).preconditioner[0], linearize(states[0], hyper).preconditioner)


def literal_gate(state, t):
    """The soft gate of strength 1 and α = 0.3 after t steps."""
    m_hat, s_hat = state["exp_avg"] / (1 - 0.9**t), state["exp_var"] / (1 - 0.99**t)
    signal = (m_hat.square() - 0.3 * s_hat).clamp(min=0)
    return signal / (signal + s_hat)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_scale_left_behind_tells_what_the_step_used(backend):
    params = start()
    optimizer = PopRiskAdamW(params, gate=Gate("soft", alpha=0.3, strength=1.0), **backend)
    gradients = stream(12)
    train(optimizer, params, gradients[:-1])
    before = [optimizer.state[p]["gate_scale"].clone() for p in params]
    train(optimizer, params, gradients[-1:])
    for p, old in zip(params, before, strict=True):
        mean, reference = optimizer.state[p]["gate_scale"]
        assert reference == old[0]
        literal = literal_gate(optimizer.state[p], 12)
        assert_close(mean, literal.mean(), rtol=1e-12, atol=1e-15)
        expected = (1 + (literal / reference).clamp(max=1)) / 2 if reference else 0.5 + 0.5 * (literal > 0).double()
        assert_close(optimizer.gates()[p], expected, rtol=1e-12, atol=1e-15)


# --- checkpoints


def literal_checkpoint(steps=8, **options):
    """As version 0.1 wrote it: a literal gate, and no scale."""
    params = start()
    optimizer = PopRiskAdamW(params, lr=0.06, weight_decay=5e-3, gate=Gate(normalize=False, **options))
    train(optimizer, params, stream(16)[:steps])
    return optimizer, params


def test_an_old_checkpoint_continues_exactly_and_says_how_to_convert_its_learning_rate():
    old, params = literal_checkpoint()
    saved = copy.deepcopy(old.state_dict())
    assert all("gate_scale" not in entry for entry in saved["state"].values())
    others = [nn.Parameter(p.detach().clone()) for p in params]
    ours = PopRiskAdamW(others)
    with pytest.warns(LiteralGateWarning) as caught:
        ours.load_state_dict(saved)
    assert len(caught) == 1
    for words in ("lr=0.06", "not in AdamW's units", "lr/60 for a strength of 100", "lr/10 for a strength of 1"):
        assert words in str(caught[0].message)
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["normalize_gate"]) == (0.06, False)
    train(old, params, stream(16)[8:])
    train(ours, others, stream(16)[8:])
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_a_literal_optimizer_loads_its_own_without_a_word():
    old, params = literal_checkpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PopRiskAdamW(params, gate=Gate(normalize=False)).load_state_dict(old.state_dict())
        PopRiskAdamW.paper(params).load_state_dict(old.state_dict())
        PopRiskAdamW(params, gate=None).load_state_dict(old.state_dict())
        PopRiskAdamW(params).load_state_dict(PopRiskAdamW(params).state_dict())


def test_the_conversion_in_the_message_works():
    old, params = literal_checkpoint()
    ours = PopRiskAdamW(params)
    with pytest.warns(LiteralGateWarning):
        ours.load_state_dict(old.state_dict())
    for group in ours.param_groups:
        group.update(normalize_gate=True, lr=group["lr"] / 60)
    before = [p.detach().clone() for p in params]
    train(ours, params, stream(16)[8:])
    assert 0 < max((p - b).abs().max() for p, b in zip(params, before, strict=True)) <= 1.1 * 8 * 1e-3
    assert "gate_scale" in ours.state[params[0]]


def test_a_group_without_the_entry_is_literal():
    """Before there was such an option."""
    old, params = literal_checkpoint()
    saved = old.state_dict()
    del saved["param_groups"][0]["normalize_gate"]
    ours = PopRiskAdamW(params)
    with pytest.warns(LiteralGateWarning):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["normalize_gate"] is False


def test_a_state_of_the_former_normalization_says_that_the_rule_changed():
    params = start()
    optimizer = PopRiskAdamW(params)
    train(optimizer, params, stream(3))
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        del entry["gate_scale"]
    with pytest.warns(LiteralGateWarning, match="divided the gate by its mean in the same step"):
        PopRiskAdamW(params).load_state_dict(saved)
    with pytest.raises(StateDictError, match="saved with normalize_gate=True and came without its gate_scale"):
        PopRiskAdamW(params, gate=Gate(normalize=False)).load_state_dict(saved)


def test_a_new_checkpoint_goes_on_bit_for_bit():
    params = start(dtype=torch.float32)
    gradients = stream(16, dtype=torch.float32)
    optimizer = PopRiskAdamW(params)
    train(optimizer, params, gradients[:8])
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = PopRiskAdamW(others)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twin.state[others[0]]["gate_scale"].dtype == torch.float64
    train(optimizer, params, gradients[8:])
    train(twin, others, gradients[8:])
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_a_scale_of_another_shape_is_refused():
    params = start()
    optimizer = PopRiskAdamW(params)
    train(optimizer, params, stream(2))
    saved = optimizer.state_dict()
    saved["state"][1]["gate_scale"] = torch.zeros(3)
    with pytest.raises(StateDictError, match=r"gate_scale of parameter 1 must have 2 entries, got shape \(3,\)"):
        optimizer.load_state_dict(saved)


# --- the swap


def test_suggest_lr_returns_its_argument_for_one_more_version():
    with pytest.warns(DeprecationWarning, match="is now AdamW's, so pass lr unchanged"):
        assert suggest_lr(3e-4) == 3e-4


RATES, WRONG, SEEDS = (1e-4, 1e-3, 1e-2), (0.0, 0.4), 3
CELLS = [(lr, wrong, seed) for lr in RATES for wrong in WRONG for seed in range(SEEDS)]
SEED = [seed for *_, seed in CELLS]


@cache
def digits():
    """Images, labels, and the labels that each cell is given, with some wrong ones."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    rows = []
    for _, wrong, seed in CELLS:
        generator = torch.Generator().manual_seed(10 + seed)
        flipped = torch.rand(800, generator=generator) < wrong
        rows.append((y[:800] + flipped * torch.randint(1, 10, (800,), generator=generator)) % 10)
    return x, y, torch.stack(rows)


@cache
def accuracies(gate, steps=300):
    """Test accuracy after a training of each cell, [rates, shares of wrong labels]: all cells are one computation."""
    x, y, given = digits()
    options = {"gate": None} if gate is None else gate.options()
    hyper = Hyper(lr=torch.tensor([lr for lr, *_ in CELLS])[:, None, None], **options)
    generator = torch.Generator().manual_seed(1)
    sizes = ((64, 128, 8), (1, 128, 8), (128, 10, 11.3), (1, 10, 11.3))
    weights = [((2 * torch.rand(SEEDS, a, b, generator=generator) - 1) / width)[SEED] for a, b, width in sizes]
    states = [replace(initial_state(w, hyper), scale=first_scale(w, (len(CELLS),))) for w in weights]

    def network(x, w):
        return (x @ w[0] + w[1]).relu() @ w[2] + w[3]

    for _ in range(steps):
        batch = torch.randint(800, (SEEDS, 50), generator=generator)[SEED]
        for w in weights:
            w.requires_grad_()
        losses = nn.functional.cross_entropy(
            network(x[batch], weights).flatten(0, 1), given.gather(1, batch).flatten(), reduction="none"
        )
        gradients = torch.autograd.grad(losses.sum() / 50, weights)
        moved = [population_step(w.detach(), *rest, hyper) for w, *rest in zip(weights, gradients, states, strict=True)]
        weights, states = [w for w, _ in moved], [state for _, state in moved]
    right = network(x[800:], weights).argmax(-1) == y[800:]
    return right.double().mean(-1).reshape(len(RATES), len(WRONG), SEEDS).mean(-1)


@pytest.mark.parametrize("name", ["snr, strength 100", "snr, strength 1"])
def test_at_adamw_s_learning_rates_a_gate_ends_within_three_points_of_adamw(name):
    theirs, ours = accuracies(None), accuracies(KINDS[name])
    assert theirs[0, 0] > 0.7
    assert theirs[1:, 0].min() > 0.85
    assert (ours >= theirs - 0.03).all(), (theirs, ours - theirs)


def test_the_literal_gate_at_adamw_s_learning_rate_learns_nothing():
    """The reason for AdamW's units."""
    literal = accuracies(Gate(normalize=False))
    assert (literal < accuracies(None) - 0.3)[1].all()
