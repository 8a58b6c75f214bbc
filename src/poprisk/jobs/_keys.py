"""What names a job's result: a hash of everything that determines it, the code included."""

import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from poprisk._version import __version__


def content_key(content: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys.

    >>> content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 over the sources of packages: the version of a method that nobody can forget to raise.

    Any edit changes it, a comment too: rather compute again than take the result of other code for one's own. Without
    sources (an archive) the package's version stands in.

    >>> code_digest("poprisk.operators._kernels") == code_digest("poprisk.operators._kernels"), len(code_digest("poprisk.operators._kernels"))
    (True, 64)
    """
    digest = hashlib.sha256(__version__.encode())
    for package in packages:
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(place).rglob("*.py")):
                name = f"{package}/{file.relative_to(place).as_posix()}"
                digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
