"""The list of all jobs in a directory: what each consists of, and the key under which its result is stored.

A key is a hash of everything that determines the result, including the code.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from poprisk._core.store import write_json
from poprisk._version import __version__
from poprisk.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class JobGroup:
    """Jobs that belong together: the tiles of one kernel, the columns of one operator, the members of one ensemble."""

    name: str
    """Name for people, unique in a directory."""
    kind: str
    """Import path of the class that computes the jobs."""
    content: dict[str, Any]
    """Everything that determines the results besides the indices, as JSON values."""
    jobs: list[list[int]]
    """The indices of each job."""
    where: dict[str, Any] = field(default_factory=dict)
    """Where things are and how results are assembled; no result depends on it."""

    @cached_property
    def keys(self) -> list[str]:
        """The key of each job."""
        base = content_key({"kind": self.kind, "content": self.content})
        return [content_key([base, indices]) for indices in self.jobs]

    @property
    def digest(self) -> str:
        """Hash of all keys: equal for groups with equal results."""
        return content_key(self.keys)


@dataclass(frozen=True)
class JobSpec:
    """One job of a group."""

    key: str
    group: JobGroup = field(repr=False)
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """All jobs of a directory.

    >>> group = JobGroup("squares", "package.module:Squares", {"code": "1"}, [[0], [1]])
    >>> manifest = Manifest((group,))
    >>> [job.indices for job in manifest.jobs()], manifest.jobs()[0].key == group.keys[0]
    ([(0,), (1,)], True)
    """

    groups: tuple[JobGroup, ...]

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read the manifest of a directory.

        Raises:
            DataError: there is no manifest, or it is damaged or has another format.
        """
        path = Path(folder) / MANIFEST
        try:
            read = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(f"{folder} holds no jobs: there is no {MANIFEST}; plan them first with JobPlan") from None
        except ValueError as error:
            raise DataError(f"{path} is damaged: not valid JSON ({error}); plan the jobs again") from None
        if not isinstance(read, dict) or read.get("kind") != "jobs":
            raise DataError(f"{path} is not a manifest of jobs: pass the directory that JobPlan wrote")
        if read.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"{path} has format_version {read.get('format_version')!r}, but poprisk {__version__} reads "
                f"{FORMAT_VERSION}: plan the jobs again, or use the version that planned them"
            )
        groups = tuple(JobGroup(**each) for each in read["groups"])
        if content_key([group.digest for group in groups]) != read.get("sha256"):
            raise DataError(f"{path} is damaged: its SHA-256 does not match its jobs; plan the jobs again")
        return cls(groups)

    def save(self, folder: str | Path) -> Path:
        """Write the manifest into a directory."""
        groups = [
            {"name": g.name, "kind": g.kind, "content": g.content, "jobs": g.jobs, "where": g.where}
            for g in self.groups
        ]
        sha256 = content_key([group.digest for group in self.groups])
        manifest = {"format_version": FORMAT_VERSION, "kind": "jobs", "sha256": sha256, "groups": groups}
        return write_json(Path(folder) / MANIFEST, manifest)

    def with_group(self, group: JobGroup) -> "Manifest":
        """A manifest with one more group; a group that exists already is not added twice.

        Raises:
            DataError: another group has the same name.
        """
        for there in self.groups:
            if there.name == group.name and there.digest != group.digest:
                raise DataError(
                    f"{group.name!r} is already planned in this directory with other settings: use another name, or "
                    "another directory"
                )
        if any(there.name == group.name for there in self.groups):
            return self
        return Manifest((*self.groups, group))

    def group(self, name: str) -> JobGroup:
        """A group by name.

        Raises:
            DataError: there is no group of that name; the message lists the existing ones.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise DataError(f"there is no group of jobs called {name!r}; there are {[group.name for group in self.groups]}")

    def jobs(self) -> list[JobSpec]:
        """Every job once, in order; a job shared by two groups belongs to the first."""
        return list({job.key: job for job in reversed(list(self._all()))}.values())[::-1]

    def _all(self) -> Iterator[JobSpec]:
        for group in self.groups:
            for key, indices in zip(group.keys, group.jobs, strict=True):
                yield JobSpec(key, group, tuple(indices))


def content_key(content: Any) -> str:
    """SHA-256 of a JSON value; the order of its keys does not matter.

    >>> content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_digest(*packages: str) -> str:
    """SHA-256 of the sources of packages, which stands for the version of a method.

    Any edit changes it, even of a comment: computing a result again is better than using one of other code. Without
    sources (in an archive) the version of the package is used instead.

    >>> len(code_digest("poprisk.operators._kernels"))
    64
    """
    digest = hashlib.sha256(__version__.encode())
    for package in packages:
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(place).rglob("*.py")):
                name = f"{package}/{file.relative_to(place).as_posix()}"
                digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
