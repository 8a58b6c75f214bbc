"""Bad inputs that hypothesis puts together: tasks, options and files, each wrong in a way that is known to be wrong."""

import io
import math
import re
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import poprisk
from poprisk import Problem, cli

N = 24
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CODES = {0, 2, 130}
# What each error must say, however it says it: what is expected, what came, what to do.
EXPECTED = (
    r"\bmust\b|\bexpected\b|\bneeds?\b|\btakes?\b|cannot|is not|has no|no such|missing|have one of|does not|"
    r"unexpected|\bfailed: "
)
CAME = r"\bgot\b|\bbut\b|\bis\b|\bhas\b|\bhave\b|\bholds\b|\bno such|\bmissing|\bfailed: |unexpected"
DO = (
    r"\b(pass|use|give|check|correct|see|add|remove|reshape|number|sum|average|compute|keep|end with|let|pad|cut|name|"
    r"record|choose|export|write|call|train|allow|map|count|restore|ask|freeze|make|open|change|leave|return|take|try|"
    r"start|index|lie|between|from -?[\d.]+|at least|one of|regroup)\b"
)


def linear(outputs=2):
    return nn.Linear(3, outputs)


class Returns(nn.Module):
    """A network whose outputs are changed by a function."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 2), change

    def forward(self, x):
        return self.change(self.linear(x))


class Broken(nn.Linear):
    """A network whose buffer is NaN."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("shift", torch.tensor(math.nan))

    def forward(self, x):
        return super().forward(x) + self.shift


class Data(Dataset):
    """A dataset of which reading or the length goes wrong."""

    def __init__(self, read, length=4):
        self.read, self.length = read, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return self.read(i)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


DRAWN = []
"""The factory that the script of the tests calls."""


def raising(error):
    def theirs(*_):
        raise error

    return theirs


def is_theirs(error):
    """Whether an error comes from a function of :func:`raising` or from reading :class:`Data`."""
    names, at = set(), error.__traceback__
    while at is not None:
        names.add(at.tb_frame.f_code.co_name)
        at = at.tb_next
    return bool(names & {"theirs", "__getitem__"})


def shifted(x, value, rows):
    x = x.clone()
    x[list(rows)] = value
    return x


rows = st.sets(st.integers(0, N - 1), min_size=1, max_size=5)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
odd = st.one_of(st.integers(), st.floats(), words, st.none(), st.binary(max_size=4), st.just(object()), st.just([[1]]))
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
errors = st.sampled_from([ValueError, KeyError, RuntimeError, OSError, AssertionError, StopIteration, TypeError])
raised = st.builds(lambda kind, text: kind(text), errors, words)
fatal = st.sampled_from([SystemExit(), SystemExit(3), SystemExit("bye"), RecursionError("deep"), MemoryError()])
named_inputs = st.one_of(
    st.builds(lambda v, r: {"inputs": shifted(X, v, r)}, not_finite, rows),
    st.builds(lambda k: {"inputs": X[:k]}, st.integers(0, N - 1)),
    st.builds(lambda d: {"inputs": torch.randn(N, d)}, st.integers(4, 9) | st.integers(1, 2)),
    st.builds(lambda w: {"inputs": [*([w] * N)]}, words),
    st.builds(lambda k: {"inputs": [[1.0] * (i % k + 1) for i in range(N)]}, st.integers(2, 5)),
    st.builds(lambda x: {"inputs": x}, st.sampled_from([None, (), {1, 2}, "data.csv", object(), Stream(), 7])),
    st.sampled_from(
        [
            {"inputs": X.to_sparse()},
            {"inputs": X[:0], "targets": Y[:0]},
            {"inputs": X.numpy().astype(object)},
            {"inputs": torch.zeros(N, 3, dtype=torch.uint8)},
            {"inputs": {"x": X}},
            {"inputs": (x for x in X)},
            {"inputs": X.to("meta")},
            {"inputs": X.to(torch.complex64)},
            {"inputs": X > 0},
            {"inputs": torch.tensor(1.0)},
            {"inputs": np.array([object()] * N)},
            {"inputs": np.array(["2020-01-01"] * N, dtype="datetime64[D]")},
            {"inputs": [X[0], X[1, :2]] * (N // 2)},
            {"inputs": (X, X)},
        ]
    ),
    st.builds(lambda e: {"inputs": Data(raising(e)), "targets": None}, raised),
    st.builds(lambda x: {"inputs": Data(lambda _: x), "targets": None}, st.sampled_from([3, "a", {"x": 1}, (X[0],)])),
    st.builds(lambda k: {"inputs": Data(lambda i: (X[i], Y[i]), N + k), "targets": None}, st.integers(1, 9)),
    st.just({"inputs": TensorDataset(X, Y)}),
)
named_targets = st.one_of(
    st.builds(lambda v, r: {"targets": shifted(Y, v, r)}, st.integers(-99, -1) | st.integers(2, 999), rows),
    st.builds(lambda k: {"targets": Y[:k]}, st.integers(0, N - 1)),
    st.builds(lambda k: {"targets": Y + k}, st.integers(2, 99)),
    st.builds(lambda v, r: {"loss": "squared", "targets": shifted(X[:, :2], v, r)}, not_finite, rows),
    st.builds(lambda d: {"loss": "squared", "targets": torch.randn(N, d)}, st.integers(3, 9) | st.just(1)),
    st.builds(
        lambda v, r: {"loss": "logistic", "make_model": lambda: linear(1), "targets": shifted(Y.float(), v, r)},
        st.floats(1.5, 99) | st.floats(-99, -0.5),
        rows,
    ),
    st.builds(lambda a, b: {"targets": [a, b] * (N // 2)}, words, words),
    st.sampled_from(
        [
            {"targets": torch.full((N,), -100)},
            {"targets": Y.float()},
            {"targets": None},
            {"targets": Y.to("meta")},
            {"targets": "labels.csv"},
            {"targets": torch.tensor(1)},
            {"targets": Y[:, None]},
            {"targets": torch.nn.functional.one_hot(Y)},
            {"targets": [2**70] * N},
            {"targets": [None] * N},
            {"loss": "squared", "targets": torch.randn(N)},
            {"loss": "logistic", "targets": Y},
        ]
    ),
)
outputs = st.sampled_from(
    [
        lambda u: (u, u),
        lambda u: {"logits": u},
        lambda u: [u],
        lambda u: None,
        lambda u: u.detach(),
        lambda u: u.sum(),
        lambda u: u[:1],
        lambda u: u * math.nan,
        lambda u: u.tolist(),
        lambda u: u.numpy(),
    ]
)
models = st.one_of(
    st.builds(lambda change: {"make_model": lambda: Returns(change)}, outputs),
    st.builds(lambda e: {"make_model": lambda: Returns(raising(e))}, raised),
    st.builds(lambda e: {"make_model": raising(e)}, raised),
    st.builds(lambda x: {"make_model": lambda: x}, odd),
    st.builds(lambda x: {"make_model": x}, odd),
    st.builds(lambda k: {"arguments": {k: 1}}, words.filter(lambda k: k != "outputs")),
    st.builds(lambda x: {"arguments": x}, st.sampled_from([3, "ab", [1], {1: 2}, object()])),
    st.builds(lambda w: {"make_model": lambda: nn.Linear(w, 2)}, st.integers(4, 9)),
    st.sampled_from(
        [
            {"make_model": lambda width: nn.Linear(3, width)},
            {"make_model": nn.Flatten},
            {"make_model": Broken},
            {"make_model": lambda: linear().requires_grad_(False)},
            {"make_model": lambda: nn.LazyLinear(2)},
        ]
    ),
)
losses = st.one_of(
    st.builds(lambda w: {"loss": w}, words.filter(lambda w: w not in ("squared", "cross_entropy", "logistic"))),
    st.builds(lambda x: {"loss": x}, st.integers() | st.none() | st.binary(max_size=3)),
    st.builds(lambda x: {"loss": lambda u, y: x}, st.none() | st.floats(0, 1) | st.just(torch.tensor(1.0))),
    st.builds(lambda e: {"loss": raising(e)}, raised),
    st.sampled_from(
        [
            {"loss": lambda u, y: (u - 1) ** 2},
            {"loss": lambda u, y: u.sum()[None]},
            {"loss": lambda u, y: u[0] > 0},
            {"loss": lambda u, y: (u.detach() - 1).square().sum()},
            {"loss": lambda u: u.sum()},
            {"loss": lambda: 0},
            {"loss": nn.CrossEntropyLoss(reduction="sum")},
            {"loss": nn.CrossEntropyLoss(weight=torch.ones(2))},
        ]
    ),
)
others = st.one_of(
    st.builds(lambda x: {"name": x}, st.integers() | st.none() | st.binary(max_size=3)),
    st.builds(lambda x: {"seed": x}, st.floats() | st.none() | words | st.just(2**80) | st.booleans()),
    st.builds(lambda x: {"show": x}, st.integers() | words | st.just(lambda: 0)),
    st.builds(lambda x: {"augment": x}, st.integers() | words | st.just(lambda x: x)),
    st.builds(lambda x: {"augment": lambda _x, _g: x}, st.integers() | words | st.none()),
    st.builds(lambda x: {"batch_loss": x}, st.integers() | words | st.just(lambda u: u)),
    st.builds(lambda x: {"test": x}, st.integers() | words | st.just((X,)) | st.just((X[:3], Y[:2]))),
    st.sampled_from(
        [{"test": ()}, {"test": (1, 2)}, {"test": {"x": X}}, {"test": (X[:0], Y[:0])}, {"test": (X, None)}]
    ),
    st.builds(lambda d: {"test": (torch.randn(4, d), Y[:4])}, st.integers(4, 9)),
    st.builds(lambda v: {"test": (X[:4], Y[:4] + v)}, st.integers(2, 9)),
)
tasks = st.one_of(named_inputs, named_targets, models, losses, others)
"""Arguments of a problem, of which one is wrong."""


def problem(wrong):
    """The problem with one wrong part."""
    return Problem(**({"make_model": linear, "loss": "cross_entropy", "inputs": X, "targets": Y} | wrong))


factories = st.one_of(
    st.builds(lambda wrong: lambda: problem(wrong), tasks),
    st.builds(lambda x: lambda: x, odd),
    st.builds(raising, raised | fatal),
    st.just(lambda needed: None),
)
"""Functions that should return a problem."""
bad_number = st.sampled_from(["x", "", "nan", "-inf", "1e400", "-7", "--", "0x1", "1,5", "９a", "\x1b[31m"])
numeric = {
    "train": (
        "--steps",
        "--epochs",
        "--batch-size",
        "--seed",
        "--every",
        "--lr",
        "--clip-norm",
        "--hold-back",
        "--tail",
    ),
    "analyze": ("--budget", "--retrain"),
    "report": ("--budget", "--retrain"),
    "audit": ("--top", "--moments", "--retrain"),
    "demo": ("--seed", "--budget"),
}
unknown = st.builds(lambda w: f"--no-such-{w}", st.text("abcxyz", max_size=5))
commands = ("train", "analyze", "report", "audit", "compare", "runs", "explore", "demo", "bench")


@st.composite
def option_calls(draw, run):
    """Command lines with one wrong option or argument; ``run`` is a good run."""
    kind = draw(st.sampled_from(["number", "unknown", "extra", "missing", "command", "choice"]))
    if kind == "number":
        command = draw(st.sampled_from(sorted(numeric)))
        first = {"train": ["tasks_of_test.py:good"], "demo": []}.get(command, [run])
        option, value = draw(st.sampled_from(numeric[command])), draw(bad_number)
        assume((option, value) != ("--hold-back", "--"))  # no number: the usual share
        return [command, *first, option, value]
    if kind == "unknown":
        return [draw(st.sampled_from(commands)), draw(unknown)]
    if kind == "extra":
        return [draw(st.sampled_from(["analyze", "report", "audit"])), run, draw(words.filter(_is_word))]
    if kind == "missing":
        return [draw(st.sampled_from(["train", "analyze", "report", "audit", "compare"]))]
    if kind == "choice":
        option = draw(st.sampled_from([("audit", "--tier"), ("train", "--optimizer"), ("bench", "--device")]))
        target = {"audit": [run], "train": ["tasks_of_test.py:good"], "bench": []}[option[0]]
        return [option[0], *target, option[1], draw(words.filter(lambda w: w not in ("", "any", "auto", "exact")))]
    return [draw(words.filter(lambda w: _is_word(w) and w not in (*commands, "jobs", "reproduce")))]


def _is_word(text):
    return bool(text) and not text.startswith("-") and text.isprintable()


contents = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(lambda t: t.encode("utf-8", "replace")),
    st.sampled_from(
        [b"PK\x03\x04", b"{", b"[]", b'{"kind": "decisions"}', b"\x93NUMPY", b"a,b\n1", b"[" * 5000, b"task = 3"]
    ),
)
places = st.sampled_from(["file", "folder", "missing", "inside a file", "nested"])


@st.composite
def file_calls(draw, run, folder):
    """Command lines that name a file or a folder which is not what it should be."""
    data, place = draw(contents), draw(places)
    use = draw(st.sampled_from(["run", "clean", "apply", "kernel", "task", "problem", "output"]))
    ends = {"clean": ".npz", "apply": ".json", "kernel": ".npz", "task": ".toml", "problem": ".py", "output": ".html"}
    path = folder / f"given{ends.get(use, '')}"
    if place == "file":
        path.write_bytes(data)
    elif place in ("folder", "nested"):
        path.mkdir()
        if place == "nested":
            (path / "manifest.json").write_bytes(data)
    elif place == "inside a file":
        path.write_bytes(data)
        path = path / "deeper"
    if use == "output":
        path = path / "page.html" if place == "file" else path
        return (
            ["report", run, "-o", str(path)] if place in ("file", "folder", "nested", "inside a file") else ["report"]
        )
    if use == "task" and place == "missing":
        path = folder / "missing.toml"
    return {
        "run": [draw(st.sampled_from(["analyze", "report", "audit", "compare"])), str(path)],
        "clean": ["analyze", run, "--clean", str(path)],
        "apply": ["audit", run, "--apply", str(path)],
        "kernel": ["explore", "--kernel", str(path)],
        "task": ["train", str(path)],
        "problem": ["audit", run, "--problem", f"{path}:make"],
    }[use]


wrong_calls = st.one_of(
    st.builds(lambda v: ("population_risk", {"method": v}), words),
    st.builds(lambda v: ("population_risk", {"retrain_budget": v}), st.integers(max_value=-1) | words | st.floats()),
    st.builds(lambda v: ("population_risk", {"examples": v}), st.integers(max_value=0) | st.integers(N + 1, 999)),
    st.builds(lambda v: ("population_risk", {"examples": torch.tensor(v)}), st.lists(st.integers(N, 99), min_size=1)),
    st.builds(lambda v: ("population_risk", {"controls": v}), st.integers(max_value=-1) | words),
    st.builds(lambda v: ("population_risk", {"weights": v}), words),
    st.builds(
        lambda name, v: (name, {"budget": v}),
        st.sampled_from(["population_risk", "audit", "analyze"]),
        st.floats(max_value=0) | words | st.just(math.nan),
    ),
    st.builds(
        lambda name, v: (name, {"memory": v}),
        st.sampled_from(["population_risk", "audit", "analyze"]),
        st.integers(max_value=0) | words | st.just(math.nan) | st.just("2 XB"),
    ),
    st.builds(lambda v: ("audit", {"tier": v}), words.filter(lambda w: w not in ("any", "auto", "exact"))),
    st.builds(lambda v: ("audit", {"moments": v}), st.integers(max_value=0) | words | st.floats()),
    st.builds(lambda v: ("audit", {"retrain_budget": v}), st.integers(1, 2) | st.integers(max_value=-1)),
    st.builds(
        lambda v: ("audit", {"out_of_fold": v}), st.just(torch.zeros(3)) | words | st.just(torch.full((N, 2), 7.0))
    ),
    st.builds(lambda v: ("analyze", {"retrain": v}), st.integers(1, 2) | st.integers(max_value=-1) | words),
    st.builds(lambda v: ("analyze", {"parts": [v]}), words),
    st.builds(
        lambda name, v: (name, {"run": v}),
        st.sampled_from(["population_risk", "audit", "analyze"]),
        st.integers() | st.none() | st.just("no/such/run") | st.binary(max_size=3),
    ),
)
"""Calls of Python with one wrong argument: the function's name, and what is wrong."""
kinds = odd | st.sampled_from([10**30, True, 1j, np.arange(3), torch.tensor(5), X, X[:0], [["a"]], {1: 2}, "a\0b"])
doors = st.sampled_from(
    [
        ("k_fold", ("folds", "seed", "nested", "renormalize", "dtype", "memory", "progress")),
        ("leave_one_out", ("indices", "renormalize", "dtype", "memory")),
        ("influence_on", ("inputs", "targets", "parameters")),
        ("self_influence", ("parameters", "products", "method", "seed")),
        (
            "population_risk",
            ("method", "retrain_budget", "examples", "controls", "weights", "seed", "budget", "memory"),
        ),
        ("audit", ("tier", "moments", "batch_size", "out_of_fold", "retrain_budget", "budget", "memory")),
        ("out_of_sample_probabilities", ("method", "retrain_budget", "seed")),
        ("replay", ("start", "stop", "tolerate")),
    ]
).flatmap(lambda door: st.tuples(st.just(door[0]), st.sampled_from(door[1]), kinds))
"""Calls of Python with one argument of any kind: the function's name, the argument's, and its value."""


def asked(run, name, wrong):
    """Make such a call."""
    options = {"run": run, "progress": False} | wrong
    return getattr(poprisk, name)(options.pop("run"), **options)


def asked_of(run, name, argument, value):
    """Make such a call of an opened run."""
    given = {"inputs": X[:2], "targets": Y[:2]} if name == "influence_on" else {}
    return getattr(poprisk, name)(run, **given | {argument: value})


def judged(message):
    """What is wrong with an error's message; empty if it is one line with all that it must say."""
    found = []
    if not message or len(message.splitlines()) != 1 or not message.isprintable():
        found.append("not one line")
    for what, pattern in (("expected", EXPECTED), ("came", CAME), ("to do", DO)):
        if not re.search(pattern, message, re.IGNORECASE):
            found.append(f"does not say what {what}")
    return ", ".join(found)


def called(arguments):
    """Exit code, stdout and stderr of a command in this process; what it raises is not caught."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(each) for each in arguments])
        except SystemExit as ended:
            return ended.code, out.getvalue(), err.getvalue()
    raise AssertionError("the command did not end")


def judged_call(arguments):
    """What is wrong with how a command answers a bad input; empty if it answers as it should."""
    code, out, err = called(arguments)
    lines = [line for line in err.splitlines() if not line.startswith("poprisk: warning:")]
    said = lines[-1] if lines else ""
    found = []
    if code != 2:
        found.append(f"exit code {code}")
    if out:
        found.append("words on stdout")
    if [line for line in lines if line.startswith("poprisk: error: ")] != [said]:
        found.append(f"{len(lines)} lines instead of one error")
    if "Traceback" in err:
        found.append("a traceback")
    if complaint := judged(said.removeprefix("poprisk: error: ")):
        found.append(complaint)
    return f"{', '.join(found)}: {err!r}" if found else ""
