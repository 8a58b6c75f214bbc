"""What a manifest of a run must be, entry by entry; imported only when one is read from disk."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from poprisk.runs._linearize import OPTIMIZERS

_MOST = 2**48
_ITEM_BYTES = {"torch.float64": 8, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2}
_NAME = r"^(start|kept|held-back-\d{8,15}|segment-\d{8,15}(-\d{8,15})?)\.safetensors$"
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Positive = Annotated[int, Field(ge=1, le=_MOST)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Entries(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # a later version may have other entries beside these


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern=_NAME)]
    size: _Positive
    sha256: _Hash


class _Segment(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    start: _Count
    stop: _Positive
    file: _File

    @model_validator(mode="after")
    def _is_named(self) -> "_Segment":
        whole = f"segment-{self.start:08d}"
        if self.file.name not in (f"{whole}.safetensors", f"{whole}-{self.stop:08d}.safetensors"):
            raise ValueError(f"the file of steps {self.start} … {self.stop - 1} cannot be {self.file.name}")
        return self


class _Call(_Entries):
    path: str | None
    arguments: dict[str, JsonValue]
    reason: str | None = None
    folder: str | None = None


class _Named(_Entries):
    name: Literal["squared", "cross_entropy", "logistic"]


class _Told(_Entries):
    name: str
    """In words where there is no problem, as for a trainer's own loss."""


class _Without(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    without: list[_Count]


class _Only(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    only: list[_Count]


class _Changed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    changed: list[_Count]
    targets: list[JsonValue]

    @model_validator(mode="after")
    def _agrees(self) -> "_Changed":
        if len(self.changed) != len(self.targets):
            raise ValueError(f"{len(self.changed)} changed examples have {len(self.targets)} targets")
        return self


class _Problem(_Entries):
    name: str
    source: _Call | None
    make_model: _Call
    loss: _Named | _Call
    examples: _Positive
    data: dict[str, str]
    fingerprint: _Hash
    test_fingerprint: _Hash | None
    splits: list[_Without | _Only | _Changed] = []


class _Layout(_Entries):
    names: Annotated[list[str], Field(min_length=1)]
    shapes: list[Annotated[list[_Count], Field(max_length=32)]]
    dtypes: list[Literal["torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"]]
    groups: list[_Count]

    @model_validator(mode="after")
    def _agrees(self) -> "_Layout":
        if len({len(set(self.names)), len(self.names), len(self.shapes), len(self.dtypes), len(self.groups)}) != 1:
            raise ValueError("names must differ, and be as many as shapes, dtypes and groups")
        return self

    def bytes(self) -> int:
        """Size of the weights."""
        return sum(math.prod(s) * _ITEM_BYTES[d] for s, d in zip(self.shapes, self.dtypes, strict=True))


class _SGD(_Entries):
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool = False


class _Adam(_Entries):
    lr: float
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False


class OptimizerEntry(_Entries):
    """Name and parameter groups of the optimizer."""

    name: str
    groups: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_known(self) -> "OptimizerEntry":
        if self.name not in OPTIMIZERS:
            raise ValueError(f"the optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.name!r:.60}")
        for group in self.groups:
            (_SGD if self.name == "torch.optim.SGD" else _Adam).model_validate(group)
        return self


class _Environment(_Entries):
    poprisk: str
    torch: str


class _Numerics(_Entries):
    device: str
    fused_by_default: bool = False


class _HoldBack(_Entries):
    share: Annotated[float, Field(gt=0, lt=1)]
    tail: float | list[float] | None
    examples: _Count


class _Training(_Entries):  # what ``train`` notes of its loop; a loop of one's own may note anything else
    batch_size: _Positive = 1
    accumulate: _Positive = 1
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    seeded_forward: bool = False
    hold_back: _HoldBack | None = None


class _Unexplained(_Entries):
    step: _Count
    reason: str


class Manifest(_Entries):
    """The manifest of a run in the present format."""

    format_version: int
    kind: Literal["run"]
    created: str
    environment: _Environment
    numerics: _Numerics
    problem: _Problem | None
    loss: _Told | _Call
    frozen_sha256: _Hash
    modes: bool | list[str] | None = None
    examples: _Positive
    layout: _Layout
    optimizer: OptimizerEntry
    every: _Positive
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    augmentation: Literal["seeded", "unseeded"] | None
    training: JsonValue
    obstacles: list[str]
    unexplained: _Unexplained | None = None
    start: _File
    segments: list[_Segment]
    num_steps: _Count
    closed: bool
    held_back: _File | None = None
    kept: _File | None = None

    @model_validator(mode="after")
    def _follows(self) -> "Manifest":
        if any(name in self.model_fields_set and getattr(self, name) is None for name in ("held_back", "kept")):
            raise ValueError("a file beside the record is listed without its name")
        if isinstance(self.training, dict):
            _Training.model_validate(self.training)
        stops = [0, *(segment.stop for segment in self.segments)]
        starts = [*(segment.start for segment in self.segments), self.num_steps]
        if starts != stops or stops != sorted(set(stops)):
            raise ValueError(f"the segments do not follow each other up to step {self.num_steps}")
        files = [self.start, *(s.file for s in self.segments), *(f for f in (self.held_back, self.kept) if f)]
        if len({file.name for file in files}) != len(files):
            raise ValueError("a file is listed twice")
        if self.start.size < self.layout.bytes():
            raise ValueError(f"weights of {self.layout.bytes()} bytes do not fit into a file of {self.start.size}")
        if any(group >= len(self.optimizer.groups) for group in self.layout.groups):
            raise ValueError("a parameter is in a group that the optimizer does not have")
        if self.problem is not None and self.problem.examples != self.examples:
            raise ValueError(f"the run has {self.examples} examples, its problem {self.problem.examples}")
        return self
