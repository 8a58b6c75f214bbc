"""Arrays of tiles in Zarr 3 stores, every byte of which is covered by a checksum.

A tile that is stored is done. Zarr verifies crc32c checksums when it decodes a chunk. Each metadata file has a SHA-256
of all its other content among the attributes, so that a changed shape, data type, codec or setting is noticed as well.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from poprisk._core.store.reading import check_memory, read_json, refuse_links, regular_size
from poprisk._core.store.schema import check_schema
from poprisk._version import __version__
from poprisk.errors import DataError, HyperparameterError, JobError, MissingExtraError

VALUES = "values"
Cell = tuple[int, int]
_OURS, _SEAL, _META, _FORMAT = "poprisk", "sha256", "zarr.json", 2
_ALL: Any = {"write_empty_chunks": True}  # also those that equal the fill value
_CHUNK_BYTES = 2**20
"""Tiles of more bytes are divided into chunks, so that a part of a tile can be read."""
_MOST_TILES, _PLACE = 2**24, re.compile(r"(0|[1-9][0-9]*)/(0|[1-9][0-9]*)")


class _Beside(TypedDict):
    bound: NotRequired[float | None]
    precision: NotRequired[str | None]


@dataclass(frozen=True)
class TiledArray:
    """A matrix that is computed tile by tile: a Zarr group of that name, with further arrays that belong to it."""

    store: Any
    name: str
    kind: str
    """Which computation; the process that starts it chooses the class, not the store."""
    content: dict[str, Any]
    """All that determines the numbers, apart from the tiles."""
    where: dict[str, Any]
    """``shape``, ``tile``, ``dtype``, whether it is stored ``symmetric``, and where things are."""

    @property
    def path(self) -> str:
        """The group's name in the store."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    def digest(self, *, tiles: bool = False) -> str:
        """Hash of what determines the numbers; tiles change their last bits only."""
        known = ("shape", "symmetric", "tile", "chunk") if tiles else ("shape", "symmetric")
        return content_key([self.kind, self.content, [self.where.get(key) for key in known]])

    def cells(self) -> list[Cell]:
        """All tiles by row and column; of a symmetric matrix, those of a leading block before all others."""
        rows, columns = (ceil(n / size) for n, size in zip(self.where["shape"], self.where["tile"], strict=True))
        if self.where["symmetric"]:
            return [(i, j) for j in range(columns) for i in range(j + 1)]
        return list(product(range(rows), range(columns)))

    def region(self, cell: Cell) -> tuple[slice, slice]:
        """Rows and columns of a tile."""
        pairs = zip(cell, self.where["tile"], self.where["shape"], strict=True)
        rows, columns = (slice(i * size, min((i + 1) * size, n)) for i, size, n in pairs)
        return rows, columns

    def done(self, *, verify: bool = False) -> set[Cell]:
        """Tiles that are stored, from one listing; with ``verify`` they are read, and damaged ones removed."""
        names = _stored(self.store, f"{self.path}/{VALUES}/c/")
        stored = {(int(found[1]), int(found[2])) for found in map(_PLACE.fullmatch, names) if found}
        for cell in list(stored) if verify else ():
            try:
                self.tile(cell)
            except DataError:
                _wait(self.store.delete(self._key(cell)))
                stored.remove(cell)
        return {cell for cell in stored if cell[::-1] in stored} if self.where["symmetric"] else stored

    def has(self, cell: Cell) -> bool:
        """Whether a tile is stored."""
        return _wait(self.store.exists(self._key(cell)))

    def array(self, name: str = VALUES) -> Any:
        """One of the group's Zarr arrays, its metadata verified."""
        import zarr

        from poprisk._core.store.tiled_schema import ArrayMetadata

        raw = read_metadata(self.store, f"{self.path}/{name}")
        check_schema(ArrayMetadata, raw, f"{name} of {self.name!r} in {self.store}")
        if name == VALUES and raw["shape"] != self.where["shape"]:
            raise DataError(f"{self.name!r} in {self.store} is damaged: its values have another shape than it says")
        try:
            return zarr.open_array(self.store, path=f"{self.path}/{name}", mode="r+", zarr_format=3).with_config(_ALL)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataError(f"{name} of {self.name!r} in {self.store} is not valid: {_brief(error)}") from None

    def whole(self, name: str) -> Tensor:
        """One of the further arrays."""
        array = self.array(name)
        if array.nchunks_initialized < array.nchunks:
            raise DataError(f"{name} of {self.name!r} in {self.store} is not complete")
        return self._read(array, ...)

    def tile(self, cell: Cell, array: Any = None) -> Tensor:
        """A stored tile, its checksums verified."""
        found = self._read(array or self.array(), self.region(cell))
        if bool(found.isnan().any()) and not self.has(cell):
            raise DataError(f"tile {list(cell)} of {self.name!r} is missing")
        return found

    def write(self, cell: Cell, found: Mapping[str, Tensor]) -> None:
        """Store a result, its tile last: a tile that is there has all that belongs to it."""
        for name in found.keys() - {VALUES}:
            array = self.array(name)
            start = cell[0] * array.chunks[0]
            array[start : start + len(found[name])] = found[name].cpu().numpy()
        values, block = self.array(), found[VALUES].cpu()
        if self.where["symmetric"] and cell[0] != cell[1]:
            values[self.region((cell[1], cell[0]))] = block.T.contiguous().numpy()
        values[self.region(cell)] = block.contiguous().numpy()

    def exists(self) -> bool:
        """Whether there is a group of that name."""
        return _has(self.store, self.path)

    def remove(self) -> None:
        """Delete the group, its own metadata first."""
        _wait(self.store.delete(f"{self.path}/{_META}"))
        _wait(self.store.delete_dir(self.path))

    def annotate(self, **about: Any) -> None:
        """Add to the attributes in the store."""
        raw = read_metadata(self.store, self.path)
        raw["attributes"][_OURS].update(about)
        _set(self.store, f"{self.path}/{_META}", _sealed(raw))

    def remove_leftovers(self) -> None:
        """Delete temporary files that killed processes left."""
        folder = directory_of(self.store)
        for place, _, names in os.walk(folder / self.path) if folder else ():
            for name in names:
                if name.endswith(".partial"):
                    Path(place, name).unlink(missing_ok=True)

    def _key(self, cell: Cell) -> str:
        return f"{self.path}/{VALUES}/c/{cell[0]}/{cell[1]}"

    def _read(self, array: Any, region: Any) -> Tensor:
        try:
            return torch.from_numpy(np.asarray(array[region]))
        except Exception as error:  # whatever damaged bytes lead to
            raise DataError(
                f"{self.name!r} in {self.store} is damaged ({_brief(error)}): run the jobs again with verify"
            ) from None


def open_store(where: Any) -> Any:
    """The Zarr store in a directory, at an address that fsspec knows (``s3://…``, ``memory://…``), or as given."""
    try:
        from zarr.storage import FsspecStore, LocalStore
    except ImportError:
        raise MissingExtraError("zarr", "jobs", "a store of jobs") from None
    if not isinstance(where, str | Path):
        return where
    plain = str(where).removeprefix("file://")
    if "://" in plain:
        try:
            return FsspecStore.from_url(plain)
        except (ImportError, ValueError) as error:  # fsspec says what to install
            raise DataError(f"{where} cannot be opened as a store: {_brief(error)}") from None
    refuse_links(plain)
    return LocalStore(Path(plain).resolve())


def directory_of(store: Any) -> Path | None:
    """The directory of a local store; None for others."""
    return store.root if type(store).__name__ == "LocalStore" else None


def add_tiled(planned: TiledArray, arrays: Mapping[str, Any], *, same_tiles: bool = False) -> TiledArray:
    """Write a group without its tiles, or return the stored one of that name, which then must be the same.

    Further arrays are small tensors, or for those filled later ``shape``, ``chunks`` and ``dtype``. Other tiles change
    the last bits.
    """
    if not re.fullmatch(r"\w[\w .,:()+-]{0,120}", planned.name):
        raise HyperparameterError(f"name must be letters, digits, spaces and '.,:()+-', got {planned.name!r}")
    if not _has(planned.store, planned.path):
        _create(planned, arrays)
        return planned
    there = load_tiled(planned.store, planned.name)
    if there.name != planned.name or there.digest(tiles=same_tiles) != planned.digest(tiles=same_tiles):
        raise DataError(
            f"{planned.name!r} is already planned in {planned.store} with other settings: use another name or store"
        )
    if there.where.get("tile_bytes", 0) > planned.where.get("memory_limit", float("inf")):
        raise JobError(
            f"{planned.name!r} was planned with tiles of {there.where['tile_bytes']} bytes, over the memory limit of "
            f"{planned.where['memory_limit']} now: raise the limit, or use another name or store"
        )
    return there


def load_tiled(store: Any, name: str) -> TiledArray:
    """A group by name."""
    path = TiledArray(store, name, "", {}, {}).path
    if not _has(store, path):
        raise DataError(f"{store} has no group called {name!r}; there are {[each.name for each in load_all(store)]}")
    from poprisk._core.store.tiled_schema import CONTENTS, GroupEntry

    about = read_metadata(store, path)["attributes"][_OURS]
    if about.get("format_version") != _FORMAT:
        raise DataError(
            f"{name!r} has format {about.get('format_version')!r}, but poprisk {__version__} reads {_FORMAT}"
        )
    check_schema(GroupEntry, about, f"{path} in {store}")
    shape, tile = about["where"]["shape"], about["where"]["tile"]
    if prod(map(ceil, (n / size for n, size in zip(shape, tile, strict=True)))) > _MOST_TILES:
        raise DataError(f"{name!r} says that it has more than {_MOST_TILES} tiles: do not use it")
    check_memory(8 * prod(tile), f"a tile of {name!r}")
    if about["kind"] in CONTENTS:
        check_schema(CONTENTS[about["kind"]], about["content"], f"the content of {name!r} in {store}")
    where = {**about["where"], "numerics": about.get("numerics", [])}
    return TiledArray(store, about["name"], about["kind"], about["content"], where)


def load_all(store: Any) -> list[TiledArray]:
    """All groups of a store."""
    if not _has(store, ""):
        raise DataError(f"{store} holds no jobs: plan them first with JobPlan")
    read_metadata(store, "")
    return [load_tiled(store, path) for path in sorted(_wait(_listed(store.list_dir("")))) if _has(store, path)]


def convert_matrix(file: str | Path, store: Any, name: str, *, symmetric: bool = False, side: int = 1024) -> None:
    """Copy a matrix of an ``.npy`` file, such as earlier versions assembled, into a store.

    Args:
        file: The file; its bound, in lower precision, is read from the ``….json`` beside it.
        store: The store.
        name: Name of the matrix in the store.
        symmetric: Whether the matrix is symmetric.
        side: Largest number of rows and columns of a tile.

    Raises:
        DataError: the file is not a matrix of float32 or float64, or the name is taken.
    """
    try:
        beside = Path(file).with_suffix(".json")
        known = read_json(beside) if os.path.lexists(beside) else {}
        mapped = np.load(file, mmap_mode="r") if regular_size(file) else np.empty(0)
    except Exception as error:  # NumPy reads the header as Python's literals, and fails in as many ways
        raise DataError(f"{file} is not a matrix that can be read ({_brief(error)})") from None
    check_schema(_Beside, known, beside)
    if mapped.ndim != 2 or str(mapped.dtype) not in ("float32", "float64"):
        raise DataError(f"{file} must be a matrix of float32 or float64, got {mapped.dtype} {list(mapped.shape)}")
    where = {"shape": list(mapped.shape), "tile": [min(side, n) for n in mapped.shape], "dtype": str(mapped.dtype)}
    where |= {"symmetric": symmetric, "bound": known.get("bound")}
    content = {"converted": Path(file).name, "precision": known.get("precision"), "threads": 1, "device": "cpu"}
    group = add_tiled(TiledArray(open_store(store), name, "converted", content, where), {})
    for cell in group.cells():
        group.write(cell, {VALUES: torch.from_numpy(np.array(mapped[group.region(cell)]))})


def read_metadata(store: Any, path: str) -> dict[str, Any]:
    """The metadata of a group or an array, after its checksum was verified, and without it."""
    key = f"{path}/{_META}" if path else _META
    try:
        raw = json.loads(_get(store, key))
        expected = raw["attributes"][_OURS].pop(_SEAL)
        found = content_key(raw)
    except FileNotFoundError:
        raise DataError(f"there is no {key} in {store}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{key} in {store} is damaged, or not of this library ({type(error).__name__})") from None
    if found != expected:
        raise DataError(f"{key} in {store} is damaged: its SHA-256 does not match")
    return raw


def content_key(content: Any) -> str:
    """SHA-256 of a JSON value; the order of its keys does not matter.

    >>> content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _create(planned: TiledArray, arrays: Mapping[str, Any]) -> None:
    """Write the group's own metadata last: a group that is there is complete, and has no tiles of an earlier one."""
    import zarr
    from zarr.codecs import Crc32cCodec
    from zarr.storage import MemoryStore

    staged, where = MemoryStore(), planned.where
    about = {"format_version": _FORMAT, "version": __version__, "name": planned.name, "kind": planned.kind}
    about |= {"content": planned.content, "where": where}
    for path, ours in (("", {}), (planned.path, about)):
        zarr.create_group(staged, path=path, attributes={_OURS: ours})
    for name, given in {**arrays, VALUES: _tiles(where["shape"], where["tile"], where["dtype"])}.items():
        known = given.cpu().numpy() if isinstance(given, Tensor) else None
        layout: Any = given if known is None else _whole(known)
        array = zarr.create_array(
            *(staged,),
            name=f"{planned.path}/{name}",
            compressors=Crc32cCodec(),
            fill_value=float("nan") if "float" in str(layout["dtype"]) else 0,
            config=_ALL,
            attributes={_OURS: {}},
            **layout,
        )
        if known is not None:
            array[...] = known
    _wait(planned.store.delete_dir(planned.path))
    last = f"{planned.path}/{_META}"
    for key in [*(key for key in _keys(staged, "") if key not in (last, _META)), _META, last]:
        if key != _META or not _has(planned.store, ""):
            content = _get(staged, key)
            _set(planned.store, key, _sealed(json.loads(content)) if key.endswith(_META) else content)


def _whole(known: Any) -> dict[str, Any]:
    return {"shape": known.shape, "dtype": known.dtype, "chunks": tuple(max(1, n) for n in known.shape)}


def _tiles(shape: list[int], tile: list[int], dtype: str) -> dict[str, Any]:
    """Tiles as Zarr's shards, of chunks that divide them."""
    row = torch.empty(0, dtype=getattr(torch, dtype)).element_size() * tile[1]
    height = next((h for h in range(tile[0], 1, -1) if tile[0] % h == 0 and h * row <= _CHUNK_BYTES), 1)
    return {"shape": shape, "dtype": dtype, "chunks": [height, tile[1]], "shards": tile}


def _sealed(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw | {"attributes": {_OURS: {**raw["attributes"][_OURS], _SEAL: content_key(raw)}}}).encode()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _wait(awaitable: Any) -> Any:
    from zarr.core.sync import sync

    return sync(awaitable)


def _stored(store: Any, prefix: str) -> Iterator[str]:
    """Names of chunks, row by row: there may be millions, which pathlib would keep all."""
    if (folder := directory_of(store)) is None:
        yield from (key.removeprefix(prefix) for key in _keys(store, prefix))
        return
    for row in os.listdir(folder / prefix) if (folder / prefix).is_dir() else ():
        with suppress(NotADirectoryError):
            yield from (f"{row}/{column}" for column in os.listdir(folder / prefix / row))


async def _listed(found: Any) -> list[str]:
    return [key async for key in found]


def _keys(store: Any, prefix: str) -> list[str]:
    return _wait(_listed(store.list_prefix(prefix)))


def _has(store: Any, path: str) -> bool:
    return _wait(store.exists(f"{path}/{_META}" if path else _META))


def _get(store: Any, key: str) -> bytes:
    from zarr.core.buffer import default_buffer_prototype

    found = _wait(store.get(key, default_buffer_prototype()))
    if found is None:
        raise FileNotFoundError(key)
    return found.to_bytes()


def _set(store: Any, key: str, content: bytes) -> None:
    from zarr.core.buffer import default_buffer_prototype

    _wait(store.set(key, default_buffer_prototype().buffer.from_bytes(content)))
