"""What a manifest of a run must be, entry by entry; imported only when one is read from disk."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from poprisk.runs._linearize import OPTIMIZERS

_MOST = 2**48
_ITEM_BYTES = {"torch.float64": 8, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2}
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^(start|kept|held-back-\d{8,15}|segment-\d{8,15}(-\d{8,15})?)\.safetensors$")]


class Entries(BaseModel):
    """Entries with known types; a later version may have others beside them."""

    model_config = ConfigDict(extra="allow", strict=True)


class File(BaseModel):
    """A file of the run's directory."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: FileName
    size: Positive
    sha256: Hash


class Segment(BaseModel):
    """A file with the steps ``start`` … ``stop - 1``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    start: Count
    stop: Positive
    file: File

    @model_validator(mode="after")
    def _is_named(self) -> "Segment":
        whole = f"segment-{self.start:08d}"
        if self.file.name not in (f"{whole}.safetensors", f"{whole}-{self.stop:08d}.safetensors"):
            raise ValueError(f"the file of steps {self.start} … {self.stop - 1} cannot be {self.file.name}")
        return self


class Call(Entries):
    """The import path of a function with its arguments, or why it has none."""

    path: str | None
    arguments: dict[str, JsonValue]
    reason: str | None = None
    folder: str | None = None


class Named(Entries):
    """A loss with a name."""

    name: Literal["squared", "cross_entropy", "logistic"]


class Split(BaseModel):
    """Which examples a part of a problem is without, or consists of."""

    model_config = ConfigDict(extra="forbid", strict=True)
    without: list[Count] | None = None
    only: list[Count] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "Split":
        if (self.without is None) == (self.only is None):
            raise ValueError("a split is either without some examples or only these")
        return self


class ProblemEntry(Entries):
    """The description of the problem."""

    name: str
    source: Call | None
    make_model: Call
    loss: Named | Call
    examples: Positive
    data: dict[str, str]
    fingerprint: Hash
    test_fingerprint: Hash | None
    splits: list[Split] = []


class LayoutEntry(Entries):
    """The parameters in the flat vector of weights."""

    names: list[str]
    shapes: list[Annotated[list[Count], Field(max_length=32)]]
    dtypes: list[Literal["torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"]]
    groups: list[Count]

    def bytes(self) -> int:
        """Size of the weights."""
        total = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = _ITEM_BYTES[dtype]
            for side in shape:
                size *= side
            total += size
        return total

    @model_validator(mode="after")
    def _agrees(self) -> "LayoutEntry":
        if len({len(self.names), len(self.shapes), len(self.dtypes), len(self.groups)}) != 1 or not self.names:
            raise ValueError("names, shapes, dtypes and groups must be of the same length, at least 1")
        if len(set(self.names)) != len(self.names):
            raise ValueError("two parameters have the same name")
        return self


class SGDOptions(Entries):
    """Options of a parameter group of torch's SGD."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool = False


class AdamOptions(Entries):
    """Options of a parameter group of the other optimizers."""

    lr: float
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False


class OptimizerEntry(Entries):
    """Name and parameter groups of the optimizer."""

    name: str
    groups: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_known(self) -> "OptimizerEntry":
        if self.name not in OPTIMIZERS:
            raise ValueError(f"the optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.name!r:.60}")
        for group in self.groups:
            (SGDOptions if self.name == "torch.optim.SGD" else AdamOptions).model_validate(group)
        return self


class EnvironmentEntry(Entries):
    """Versions."""

    poprisk: str
    torch: str


class NumericsEntry(Entries):
    """Settings on which the last bits depend."""

    device: str
    fused_by_default: bool = False


class HoldBackEntry(Entries):
    """How examples were held back."""

    share: Annotated[float, Field(gt=0, lt=1)]
    tail: float | list[float] | None
    examples: Count


class TrainingEntry(Entries):
    """What ``train`` notes of its loop; a loop of one's own may note anything else."""

    batch_size: Positive = 1
    accumulate: Positive = 1
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    seeded_forward: bool = False
    hold_back: HoldBackEntry | None = None


class UnexplainedEntry(Entries):
    """From which step on the problem does not explain the gradients."""

    step: Count
    reason: str


class Manifest(Entries):
    """The manifest of a run in the present format."""

    format_version: int
    kind: Literal["run"]
    created: str
    environment: EnvironmentEntry
    numerics: NumericsEntry
    problem: ProblemEntry | None
    loss: Named | Call
    frozen_sha256: Hash
    modes: bool | list[str] | None = None
    examples: Positive
    layout: LayoutEntry
    optimizer: OptimizerEntry
    every: Positive
    seed: Seed
    augmentation: Literal["seeded", "unseeded"] | None
    training: JsonValue
    obstacles: list[str]
    unexplained: UnexplainedEntry | None = None
    start: File
    segments: list[Segment]
    num_steps: Count
    closed: bool
    held_back: File | None = None
    kept: File | None = None

    @model_validator(mode="after")
    def _follows(self) -> "Manifest":
        if isinstance(self.training, dict):
            TrainingEntry.model_validate(self.training)
        at = 0
        for segment in self.segments:
            if segment.start != at or segment.stop <= at:
                raise ValueError(f"a segment of steps {segment.start} … {segment.stop - 1} follows step {at - 1}")
            at = segment.stop
        if at != self.num_steps:
            raise ValueError(f"the segments have {at} steps, the run has {self.num_steps}")
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
