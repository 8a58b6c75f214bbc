"""Tokens per second of a compiled, captured training step: PopRiskAdamW over torch's fused AdamW."""

import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from scale_models import Decoder, DecoderShape, decoder_block, decoder_head, decoder_start
from scale_recorder import Recorder, parts, timed
from torch import Tensor

from poprisk.optim._adamw import PopRiskAdamW

LEAST_RATIO = 0.99


def training_step(r: Recorder) -> None:
    """Compiles, captures a step with each optimizer, and lets them run by turns.

    Two first, then all three: should the third break the process, the figures of the two are on the disk.
    """
    bench = _Training(r)
    parts(r, [("compile", 30, bench.compile)])
    *first, last = bench.makers
    parts(r, [(f"capture {name}", 4, partial(bench.capture, name)) for name in first])
    parts(r, [("race", 2, partial(bench.race, "race", 15))])
    parts(r, [(f"capture {last}", 4, partial(bench.capture, last))])
    if last in bench.steps:
        parts(r, [("race of three", 2, partial(bench.race, "race_of_three", 9))])


class _Training:
    """One model, whose weights every optimizer moves in its turn."""

    def __init__(self, r: Recorder) -> None:
        self.r = r
        shape = DecoderShape(64, 32, 2, 4, 2, 48) if r.smoke else DecoderShape()
        batch, length = (2, 8) if r.smoke else (16, 1024)
        torch.manual_seed(0)
        self.model = Decoder(shape, r.device)
        self.params = list(self.model.parameters())
        self.tokens = torch.randint(shape.vocabulary, (batch, length), device=r.device)
        self.targets = self.tokens.roll(-1, 1)
        self.functions: tuple[Callable, ...] = (decoder_start, decoder_block, decoder_head)
        self.steps: dict[str, Callable[[], object]] = {}
        # A graph writes to the states of its optimizer without holding them: whoever replays it must.
        self.held: list[object] = []
        self.pool: Any = None
        fused: dict[str, Any] = {"fused": True, "capturable": True} if r.device == "cuda" else {}
        low: dict[str, Any] = {"state_dtype": torch.bfloat16}
        self.makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "AdamW": lambda: torch.optim.AdamW(self.params, lr=1e-6, **fused),
            "PopRiskAdamW": lambda: PopRiskAdamW(self.params, lr=1e-6, **fused),
            "PopRiskAdamW, v and s bf16": lambda: PopRiskAdamW(self.params, lr=1e-6, **low, **fused),
        }
        r.note(weights=sum(p.numel() for p in self.params), tokens_per_step=batch * length)

    def backward(self) -> Tensor:
        """Loss and gradients."""
        loss = self.model.loss(self.tokens, self.targets, *self.functions)
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """No gradients: the next backward pass writes them anew, in place of adding to them."""
        for p in self.params:
            p.grad = None

    def compile(self) -> None:
        """One layer, which serves all, and the loss; as they are where that fails or takes too long."""
        plain = self.functions
        self.functions = tuple(torch.compile(function) for function in plain)
        try:
            with time_limit(min(60.0, self.r.left() - 25)):
                seconds, loss = timed(self.backward, self.r.device)
        except BaseException:
            self.functions = plain
            self.clear()
            raise
        self.r.note(compile_seconds=seconds, loss=float(loss), compiled=True)
        self.clear()

    def capture(self, name: str) -> None:
        """A whole step with one optimizer."""
        optimizer = self.makers[name]()
        self.held.append(optimizer)

        def step() -> None:
            self.backward()
            optimizer.step()
            self.clear()

        if self.r.device != "cuda":
            step()
            self.steps[name] = step
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        # One graph runs at a time, and nothing that one allocates is read after its replay: gradients are made and let
        # go inside, states and counters were made in the steps before. So they may share their scratch memory.
        self.pool = graph.pool()
        self.held += [graph, step]
        self.steps[name] = graph.replay
        torch.cuda.synchronize()
        self.r.note(captured=sorted(self.steps))
        self.r.reached(f"captured {name}")

    def race(self, label: str, rounds: int) -> None:
        """Rounds by turns, in one order and then in the other."""
        names, rows = [name for name in self.makers if name in self.steps], []
        repeats = 1 if self.r.smoke else 2
        for name in names:
            seconds, _ = timed(self.steps[name], self.r.device)
            self.r.reached(f"{label}: first replay of {name} in {seconds:.3f} s")
        while len(rows) < rounds and (len(rows) < 5 or self.r.left() > 4):
            row = {}
            for name in names if len(rows) % 2 == 0 else names[::-1]:
                seconds, _ = timed(lambda f=self.steps[name]: [f() for _ in range(repeats)], self.r.device)
                row[name] = seconds / repeats
            rows.append(row)
            self._report(label, names, rows)

    def _report(self, label: str, names: list[str], rows: list[dict[str, float]]) -> None:
        if len(rows) < 2 or "AdamW" not in names:
            return
        base = statistics.median(row["AdamW"] for row in rows)
        race: dict[str, Any] = {"adamw_step_seconds": base, "adamw_tokens_per_second": self.tokens.numel() / base}
        race["rounds"] = len(rows)
        for name in names[1:]:
            ratios = [row["AdamW"] / row[name] for row in rows]  # throughput of ours over that of AdamW
            median, spread = statistics.median(ratios), statistics.stdev(ratios)
            figures = {"throughput_ratio": median, "stdev": spread, "standard_error": spread / len(ratios) ** 0.5}
            figures |= {"ratios": ratios, "step_seconds": statistics.median(row[name] for row in rows)}
            race[name] = figures | {"reached": median >= LEAST_RATIO}
        self.r.note(**{label: race})


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises in the main thread when the time is over."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
