"""Members trained as one stack end where real optimizers, one by one, would have brought them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.flop_counter import FlopCounterMode

from oracles.resampling import train_one_by_one
from poprisk.errors import DataError, RunError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import member_outputs, retrain
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._replay import replay
from poprisk.runs._training import train

N = 14
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.3, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(SGD, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    "adam": partial(Adam, lr=0.05, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.05, weight_decay=0.2),
    "poprisk": partial(
        PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha=0.1, normalize=False), weight_decay=0.01, lr=0.05
    ),
    "poprisk default": partial(PopRiskAdamW, lr=0.05),
    "poprisk rows": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha=0.1, granularity="row", gated_decay=True),
        weight_decay=0.01,
        lr=0.05,
    ),
}


def make_mlp(inputs=4, width=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def make_cnn():
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, token, x):
        return self.head(torch.tanh(self.embed(token) + x))


class Tied(nn.Module):
    """A shared weight, a frozen one and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale + self.shift)


def examples(n=N, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(11)
    return torch.randn(n, width, generator=generator, dtype=dtype), torch.randint(3, (n,), generator=generator)


def classification(dtype=torch.float64, **options):
    return Problem(make_mlp, "cross_entropy", *examples(dtype=dtype), name="tiny", **options)


def quiet(problem, optimizer, steps=10, batch_size=5, dtype=torch.float64, **options):
    return train(problem, optimizer, steps, batch_size=batch_size, dtype=dtype, progress=False, **options)


def batches_of(run):
    return [run.batch(k) for k in range(run.num_steps)]


def some_weights(n=N):
    """As recorded, one left out with and without renormalization, and any numbers."""
    alpha = torch.ones(4, n, dtype=torch.float64)
    alpha[1, 3] = 0
    alpha[2] = n / (n - 1)
    alpha[2, 3] = 0
    alpha[3] = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2
    return alpha


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_members_are_real_trainings(name):
    problem, alpha = classification(), some_weights()
    options = {"clip_norm": 0.4, "schedule": lambda k: 1 / (1 + 0.2 * k)}
    run = quiet(problem, OPTIMIZERS[name], accumulate=5, **options)
    found = retrain(run, Members(alpha))
    expected = train_one_by_one(problem, OPTIMIZERS[name], batches_of(run), alpha, accumulate=5, **options)
    torch.testing.assert_close(found.weights, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.weights[0], run.weights(run.num_steps), rtol=1e-10, atol=1e-12)
    assert (found.weights[1:] - found.weights[0]).norm(dim=1).min() > 1e-3
    assert found.trainings == 4
    assert not found.notes  # the clipping was each member's own
    factors = [run.recorded(k).factor(k)[0] for k in range(run.num_steps)]
    assert min(factors) < 0.8 or name.startswith("poprisk")


@pytest.mark.parametrize("name", ["momentum", "adam", "poprisk"])
def test_single_precision_and_chunks(name):
    problem = classification(dtype=torch.float32)
    run = quiet(problem, OPTIMIZERS[name], dtype=torch.float32)
    alpha = some_weights().float()
    whole = retrain(run, Members(alpha))
    assert whole.weights.dtype == torch.float32
    torch.testing.assert_close(whole.weights[0], run.weights(run.num_steps), rtol=1e-4, atol=1e-5)
    one_at_a_time = retrain(run, Members(alpha), memory=1)
    torch.testing.assert_close(one_at_a_time.weights, whole.weights, rtol=1e-4, atol=1e-5)
    wide = retrain(run, Members(alpha), dtype=torch.float64)
    assert wide.weights.dtype == torch.float64
    torch.testing.assert_close(wide.weights.float(), whole.weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [make_cnn, TwoInputs, Tied])
def test_other_models(make):
    if make is TwoInputs:
        x, y = examples()
        tokens = torch.arange(N) % 5
        problem = Problem(make, "cross_entropy", (tokens, x), y)
    else:
        problem = Problem(make, "cross_entropy", *examples(width=16 if make is make_cnn else 4))
    run = quiet(problem, OPTIMIZERS["adam"])
    found = retrain(run, Members(some_weights()))
    torch.testing.assert_close(found.weights[0], run.weights(run.num_steps), rtol=1e-10, atol=1e-12)
    alone = retrain(run, Members(some_weights()[2:3]))
    torch.testing.assert_close(alone.weights[0], found.weights[2], rtol=1e-10, atol=1e-12)
    assert (found.weights[2] - found.weights[0]).norm() > 1e-3


def test_examples_and_labels_from_elsewhere():
    problem = classification()
    run = quiet(problem, OPTIMIZERS["momentum"], steps=8)
    x, y = examples(n=3)
    pool = (x + 1, (y + 1) % 3)
    index = torch.arange(N).repeat(3, 1)
    index[1, 4] = N + 2  # a stranger in place of example 4
    index[2, 6] = 0  # a training example twice
    found = retrain(run, Members(torch.ones(3, N), index_map=index, pool=pool))
    inputs, labels = [problem.inputs.clone() for _ in range(3)], [problem.targets.clone() for _ in range(3)]
    inputs[1][4], labels[1][4] = pool[0][2], pool[1][2]
    inputs[2][6], labels[2][6] = problem.inputs[0], problem.targets[0]
    expected = train_one_by_one(
        problem, OPTIMIZERS["momentum"], batches_of(run), torch.ones(3, N), inputs=inputs, targets=labels
    )
    torch.testing.assert_close(found.weights, expected, rtol=1e-10, atol=1e-12)
    flipped = torch.stack([problem.targets, (problem.targets + 1) % 3, labels[1]])
    found = retrain(run, Members(torch.ones(3, N), targets=flipped))
    expected = train_one_by_one(
        problem, OPTIMIZERS["momentum"], batches_of(run), torch.ones(3, N), targets=list(flipped)
    )
    torch.testing.assert_close(found.weights, expected, rtol=1e-10, atol=1e-12)
    assert (expected[1] - expected[0]).norm() > 1e-2


def test_kept_steps_and_first_weights():
    problem = classification()
    run = quiet(problem, OPTIMIZERS["adamw"])
    moved = torch.stack([run.weights(0), run.weights(0) + 0.1])
    found = retrain(run, Members(torch.ones(2, N), initial=moved), keep=(0, 4, 10))
    assert torch.equal(found.kept[0], moved)
    torch.testing.assert_close(found.kept[4][0], run.weights(4), rtol=1e-11, atol=1e-13)
    assert torch.equal(found.kept[10], found.weights)
    assert (found.weights[1] - found.weights[0]).norm() > 0.05


def jitter(inputs, generator):
    return inputs + 0.3 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def test_seeded_augmentation_is_repeated():
    run = quiet(classification(augment=jitter), OPTIMIZERS["momentum"], accumulate=5, seed=3)
    found = retrain(run, Members(some_weights()))
    torch.testing.assert_close(found.weights[0], run.weights(run.num_steps), rtol=1e-10, atol=1e-12)
    with pytest.raises(RunError, match="augmented run cannot be retrained with other examples"):
        retrain(run, Members(torch.ones(1, N), index_map=torch.arange(N).unsqueeze(0)))


def test_sparse_runs_too():
    problem = classification()
    dense, sparse = (quiet(problem, OPTIMIZERS["adam"], every=every) for every in (1, 4))
    alpha = some_weights()
    assert torch.equal(retrain(sparse, Members(alpha)).weights, retrain(dense, Members(alpha)).weights)


def record(problem, change, optimizer=None, **options):
    """A loop of one's own that does something to the gradients."""
    model = problem.module(torch.float64)
    optimizer = (optimizer or partial(SGD, lr=0.2))(model.parameters())
    recorder = Recorder(None, model, optimizer, problem=problem, **options)
    for k in range(4):
        batch = (torch.arange(6) + 3 * k) % N
        with recorder.step(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(problem.inputs[batch]), problem.targets[batch]).backward()
            change(model)
            optimizer.step()
    return recorder.close()


def test_clipping_in_a_loop_of_ones_own_is_taken_over_and_said():
    problem, alpha = classification(), some_weights()
    run = record(problem, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2))
    found = retrain(run, Members(alpha))
    assert "each member uses the recorded factors" in found.notes[0]
    assert len(found.notes) == 1
    factors = [run.recorded(k).factor(k)[0] for k in range(4)]
    assert max(factors) < 0.9
    expected = train_one_by_one(problem, partial(SGD, lr=0.2), batches_of(run), alpha, factors=factors)
    torch.testing.assert_close(found.weights, expected, rtol=1e-9, atol=1e-12)


def test_runs_that_cannot_be_taken_again_are_refused():
    class Fixed:
        def variances(self, parameters):
            return [torch.full_like(p, 1e-9) for p in parameters]

    problem = classification()
    ones = Members(torch.ones(1, N))
    run = record(
        problem,
        lambda model: None,
        partial(PopRiskAdamW, gate=Gate("soft", strength=1.0), weight_decay=0.01, lr=0.05, variance=Fixed()),
    )
    with pytest.raises(RunError, match="variance source"):
        retrain(run, ones)
    model = problem.module(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, loss="cross_entropy", examples=N)
    with recorder.step(range(N)):
        nn.functional.cross_entropy(model(problem.inputs), problem.targets).backward()
        optimizer.step()
    with pytest.raises(RunError, match="recorded without a problem"):
        retrain(recorder.close(), ones)


def test_bad_members_are_refused():
    run = quiet(classification(), OPTIMIZERS["sgd"], steps=2)
    ones = torch.ones(2, N)
    nan, negative, nothing = ones.clone(), ones.clone(), ones.clone()
    nan[0, 0], negative[1, 2], nothing[1] = torch.nan, -0.1, 0.0
    for weights in (nan, negative, ones * torch.inf):
        with pytest.raises(DataError, match="finite and not negative"):
            retrain(run, Members(weights))
    with pytest.raises(DataError, match="weight 0 for all"):
        retrain(run, Members(nothing))
    for weights in (ones[:, 1:], ones[0], ones[:0], ones.long()):
        with pytest.raises(DataError, match=f"a row of {N} numbers"):
            retrain(run, Members(weights))
    index = torch.arange(N).repeat(2, 1)
    for members, message in (
        (Members(ones, index_map=index + 1), f"from 0 to {N - 1}"),
        (Members(ones, index_map=index[:1]), f"from 0 to {N - 1}"),
        (Members(ones, pool=examples()), "needs an index_map"),
        (Members(ones, index_map=index, targets=index), "index_map and targets"),
        (Members(ones, targets=index[:1]), "shape of targets must start with"),
        (Members(ones, initial=torch.zeros(2, 3)), "initial must have shape"),
    ):
        with pytest.raises(DataError, match=message):
            retrain(run, members)
    with pytest.raises(DataError, match=r"before the steps 0 … 2, got \[3\]"):
        retrain(run, Members(ones), keep=[3])


def test_ten_members_cost_ten_trainings_and_no_loop(monkeypatch):
    """Counted multiplications, and calls of the model's forward: one for each step, whatever the number of members."""
    problem = Problem(make_mlp, "cross_entropy", *examples(n=40, width=32), arguments={"inputs": 32, "width": 24})
    run = quiet(problem, OPTIMIZERS["momentum"], steps=6, batch_size=20, every=6)
    with FlopCounterMode(display=False) as one:
        replay(run)
    calls = []
    forward = nn.Sequential.forward
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: calls.append(1) or forward(self, x))
    with FlopCounterMode(display=False) as ten:
        retrain(run, Members(torch.ones(10, 40)), check=False)
    ratio = ten.get_total_flops() / one.get_total_flops()
    assert 9 <= ratio <= 11  # 10 would be exact; the probe of the model is part of it
    assert len(calls) <= 6 + 5


def test_progress_is_shown_when_asked_for(capsys):
    run = quiet(classification(), OPTIMIZERS["sgd"], steps=3)
    retrain(run, Members(torch.ones(2, N)))
    assert capsys.readouterr().err == ""
    retrain(run, Members(torch.ones(2, N)), progress=True)
    assert "2 trainings: step 3 of 3" in capsys.readouterr().err


def test_outputs_of_members():
    problem = classification()
    run = quiet(problem, OPTIMIZERS["sgd"])
    weights = retrain(run, Members(some_weights())).weights
    shared = member_outputs(run, weights, problem.inputs[:5])
    own = member_outputs(run, weights, problem.inputs[:8].reshape(4, 2, 4), own=True, memory=1)
    model = problem.model(torch.float64)
    for k in range(4):
        torch.testing.assert_close(shared[k], model.outputs(weights[k], problem.inputs[:5]))
        torch.testing.assert_close(own[k], model.outputs(weights[k], problem.inputs[2 * k : 2 * k + 2]))


@pytest.mark.gpu
def test_on_a_device():
    problem = classification(dtype=torch.float32).to("cuda")
    run = quiet(problem, OPTIMIZERS["adamw"], dtype=torch.float32)
    index = torch.arange(N).repeat(4, 1)
    index[2, 1] = 0
    found = retrain(run, Members(some_weights().float(), index_map=index))
    assert found.weights.is_cuda
    torch.testing.assert_close(found.weights[0].cpu(), run.weights(run.num_steps), rtol=1e-4, atol=1e-5)


def test_members_go_on_with_a_longer_recording():
    """What a meter does while a run is being recorded: no step is taken twice, and nothing comes out differently."""
    problem = classification()
    short, whole = (quiet(problem, OPTIMIZERS["poprisk"], steps) for steps in (5, 12))
    members = Members(some_weights())
    first = retrain(short, members, keep=[3])
    at_once = retrain(whole, members, keep=[3, 8])
    then = retrain(whole, members, keep=[8], resume=first)
    for found, expected in (
        (first.kept[3], at_once.kept[3]),
        (then.weights, at_once.weights),
        (then.kept[8], at_once.kept[8]),
        (retrain(whole, members, stop=8).weights, at_once.kept[8]),
    ):
        torch.testing.assert_close(found, expected)
    assert then.trainings == pytest.approx(4 * 7 / 12)
    with pytest.raises(DataError, match="stop and keep must lie in 5"):
        retrain(whole, members, keep=[3], resume=first)
    with pytest.raises(DataError, match=r"stop=4 and keep=\[8\]"):
        retrain(whole, members, keep=[8], stop=4)
