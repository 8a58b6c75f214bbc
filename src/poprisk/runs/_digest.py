"""Hashes of what results are computed from: a problem, a run up to a step, the sources of a method."""

from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from poprisk._core.store import content_key, fingerprint
from poprisk._version import __version__
from poprisk.runs._run import Run
from poprisk.runs._storage import file_records


def problem_digest(run: Run) -> str:
    """Hash of what outputs depend on besides the trained weights: examples, model factory, frozen values, layout."""
    manifest, problem = run.manifest, run.problem.description
    parts = {key: problem[key] for key in ("make_model", "loss", "fingerprint", "test_fingerprint")}
    source = problem["source"] and {key: problem["source"].get(key) for key in ("path", "arguments")}
    frozen = {key: manifest[key] for key in ("layout", "frozen_sha256", "modes")}
    return content_key({**parts, **frozen, "source": source})


def run_digest(run: Run, stop: int | None = None) -> str:
    """Hash of a run up to a step: the problem, and the files that hold the steps before it."""
    manifest, last = run.manifest, run.num_steps if stop is None else stop
    kept = [segment for segment in manifest["segments"] if segment["start"] < last]
    records = file_records({**manifest, "segments": kept})
    files = [each.get("sha256") or fingerprint(run._storage.read(each)[0]) for each in records]
    return content_key({"problem": problem_digest(run), "files": files, "optimizer": manifest["optimizer"]})


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 of the sources of packages, which stands for the version of a method; any edit changes it.

    >>> len(code_digest("poprisk.runs"))
    64
    """
    digest = sha256(__version__.encode())
    for package in packages:
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(place).rglob("*.py")):
                name = f"{package}/{file.relative_to(place).as_posix()}"
                digest.update(f"{name} {sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
