"""The list of all jobs in a directory: what each is made of, and the key under which its result will lie."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from poprisk._core.store import write_json
from poprisk._version import __version__
from poprisk.errors import DataError
from poprisk.jobs._keys import content_key

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Group:
    """Jobs that belong together: the tiles of one kernel, the columns of one operator, the members of one ensemble."""

    name: str
    """What a person calls it, once in a directory."""
    kind: str
    """Import path of the class that computes its jobs."""
    content: dict[str, Any]
    """Everything beside the indices that determines the results, as JSON values."""
    jobs: list[list[int]]
    """The indices of each job."""
    where: dict[str, Any] = field(default_factory=dict)
    """Where things are and how to put the results together; no result depends on it."""

    @cached_property
    def keys(self) -> list[str]:
        """The key of each job."""
        base = content_key({"kind": self.kind, "content": self.content})
        return [content_key([base, indices]) for indices in self.jobs]

    @property
    def digest(self) -> str:
        """Of all its jobs: equal for groups with equal results."""
        return content_key(self.keys)


@dataclass(frozen=True)
class Job:
    """One piece of work."""

    key: str
    group: Group = field(repr=False)
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """All jobs of a directory.

    >>> group = Group("squares", "package.module:Squares", {"code": "1"}, [[0], [1]])
    >>> manifest = Manifest((group,))
    >>> [job.indices for job in manifest.jobs()], manifest.jobs()[0].key == group.keys[0]
    ([(0,), (1,)], True)
    """

    groups: tuple[Group, ...]

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read the manifest of a directory.

        Raises:
            DataError: there is none, or it is damaged or of another format.
        """
        path = Path(folder) / MANIFEST
        try:
            read = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(f"{folder} holds no jobs: there is no {MANIFEST}; plan them first, with Plan") from None
        except ValueError as error:
            raise DataError(f"{path} is damaged: it is not JSON ({error}); plan the jobs again") from None
        if not isinstance(read, dict) or read.get("kind") != "jobs":
            raise DataError(f"{path} is not a manifest of jobs: give the directory that Plan wrote")
        if read.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"{path} has format_version {read.get('format_version')!r}, and poprisk {__version__} reads "
                f"{FORMAT_VERSION}: plan the jobs again, or use the version that planned them"
            )
        groups = tuple(Group(**each) for each in read["groups"])
        if content_key([group.digest for group in groups]) != read.get("sha256"):
            raise DataError(f"{path} is damaged: its jobs do not have the SHA-256 it names; plan the jobs again")
        return cls(groups)

    def save(self, folder: str | Path) -> Path:
        """Write it into a directory."""
        groups = [
            {"name": g.name, "kind": g.kind, "content": g.content, "jobs": g.jobs, "where": g.where}
            for g in self.groups
        ]
        sha256 = content_key([group.digest for group in self.groups])
        manifest = {"format_version": FORMAT_VERSION, "kind": "jobs", "sha256": sha256, "groups": groups}
        return write_json(Path(folder) / MANIFEST, manifest)

    def with_group(self, group: Group) -> "Manifest":
        """One group more; a group that is there already is not listed twice.

        Raises:
            DataError: another group has its name.
        """
        for there in self.groups:
            if there.name == group.name and there.digest != group.digest:
                raise DataError(
                    f"{group.name!r} is planned in this directory with other settings: give it another name, or plan "
                    "into another directory"
                )
        if any(there.name == group.name for there in self.groups):
            return self
        return Manifest((*self.groups, group))

    def group(self, name: str) -> Group:
        """A group by name.

        Raises:
            DataError: there is none of that name; the message lists those there are.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise DataError(f"no jobs are called {name!r} here: there are {[group.name for group in self.groups]}")

    def jobs(self) -> list[Job]:
        """Every job once, in order; where two groups share a job, it is the first one's."""
        return list({job.key: job for job in reversed(list(self._all()))}.values())[::-1]

    def _all(self) -> Iterator[Job]:
        for group in self.groups:
            for key, indices in zip(group.keys, group.jobs, strict=True):
                yield Job(key, group, tuple(indices))
