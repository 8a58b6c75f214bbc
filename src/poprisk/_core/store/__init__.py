"""Atomic, versioned files; everything that is written to disk goes through this package."""

from poprisk._core.store.envelope import environment, load_result, save_result
from poprisk._core.store.files import (
    Figure,
    append_line,
    atomic_file,
    writable_directory,
    writable_file,
    write_bytes,
    write_figure,
    write_json,
    write_text,
)
from poprisk._core.store.import_paths import Importable, described, importable, located, resolve
from poprisk._core.store.lock import LOCK, WriterLock, locked
from poprisk._core.store.packed import check_fields, fits, pack, unpack
from poprisk._core.store.reading import is_private, json_digest, member, own_folder, parsed_json, read_json
from poprisk._core.store.schema import check_schema
from poprisk._core.store.script import where
from poprisk._core.store.tensors import TensorFile, check_size, fingerprint, read_tensors, write_tensors
from poprisk._core.store.tiled import (
    VALUES,
    Cell,
    TiledArray,
    add_tiled,
    content_key,
    convert_matrix,
    directory_of,
    load_all,
    load_tiled,
    open_store,
)
from poprisk._core.store.trust import remember, require_known, shown_call
