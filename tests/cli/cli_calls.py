"""Calls of the command line: in this process, or in one of its own."""

import subprocess
import sys

import pytest

from poprisk import cli


def start(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    command = [sys.executable, "-W", "error", "-m", "poprisk", *map(str, arguments)]
    return subprocess.Popen(command, **pipes, **options)


def call(capsys, *arguments):
    """Exit code, stdout, stderr of a call in this process."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err
