"""Atomic, versioned files: the one way anything reaches disk."""

from poprisk.store.envelope import FORMAT_VERSION as FORMAT_VERSION
from poprisk.store.envelope import environment as environment
from poprisk.store.envelope import load_result as load_result
from poprisk.store.envelope import save_result as save_result
from poprisk.store.files import writable_directory as writable_directory
from poprisk.store.files import write_bytes as write_bytes
from poprisk.store.files import write_figure as write_figure
from poprisk.store.files import write_json as write_json
from poprisk.store.files import write_text as write_text
from poprisk.store.importable import Importable as Importable
from poprisk.store.importable import importable as importable
from poprisk.store.importable import resolve as resolve
from poprisk.store.script import where as where
