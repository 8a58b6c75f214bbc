"""What the metadata of a store of tiles must be, whoever wrote it: kinds of numbers and codecs that execute nothing."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

_Count = Annotated[int, Field(ge=0, le=2**48)]
_Positive = Annotated[int, Field(ge=1, le=2**48)]
_Pair = Annotated[list[_Positive], Field(min_length=2, max_length=2)]


class _Configuration(TypedDict):
    chunk_shape: NotRequired[list[_Positive]]
    codecs: NotRequired[list["_Codec"]]
    index_codecs: NotRequired[list["_Codec"]]


class _Codec(TypedDict):
    name: Literal["bytes", "crc32c", "sharding_indexed"]
    configuration: NotRequired[_Configuration]


class _Chunks(TypedDict):
    chunk_shape: list[_Positive]


class _Grid(TypedDict):
    name: Literal["regular"]
    configuration: _Chunks


class ArrayMetadata(TypedDict):
    """The metadata of one of the arrays; anything else that Zarr can do is refused."""

    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: list[_Count]
    chunk_grid: _Grid
    data_type: Literal["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    codecs: list[_Codec]
    storage_transformers: NotRequired[Annotated[list[Any], Field(max_length=0)]]


class _Where(TypedDict):
    shape: _Pair
    tile: _Pair
    dtype: Literal["float32", "float64"]
    symmetric: bool
    run: NotRequired[str | None]
    bound: NotRequired[float | None]
    known_symmetric: NotRequired[bool]
    outputs: NotRequired[_Positive]
    chunk: NotRequired[_Positive | None]
    step: NotRequired[_Count]
    memory_limit: NotRequired[_Positive | None]
    tile_bytes: NotRequired[_Count]


class GroupEntry(TypedDict):
    """What a group says about itself."""

    format_version: int
    version: str
    name: Annotated[str, Field(pattern=r"^\w[\w .,:()+-]{0,120}$")]
    kind: str
    content: dict[str, Any]
    where: _Where
    numerics: NotRequired[list[dict[str, Any]]]


class _Common(TypedDict):
    digest: str
    code: str
    threads: Annotated[int, Field(ge=1, le=2**16)]
    device: Literal["cpu", "cuda"]


class _Kernel(_Common):
    rows: Literal["train", "test"]
    dtype: Literal["float32", "float64"]
    method: str
    precision: str | None
    preconditioner: str | float | None
    weights: str


class _Columns(_Common):
    start: _Count
    stop: _Count
    operator: Literal["propagator", "train_completion", "train_transfer", "test_transfer", "dissipation_gramian"]
    adjoint: bool
    columns: str
    seed: int
    dtype: Literal["float32", "float64"]


class _Folds(_Common):
    folds: _Count
    seed: int
    renormalize: bool


CONTENTS = {"kernel": _Kernel, "columns": _Columns, "folds": _Folds}
"""By kind; settings of other kinds are not used to compute anything."""
