"""The examples run as their pages say, at a tiny size; the commands are read from the pages themselves."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = {
    "distributed": "--steps 3",
    "dpo_paper": "",
    "fix_labels": "--steps 30 --seeds 1 --size 200",
    "huggingface": "--steps 6",
    "kernel_jobs": "--examples 60 --workers 0",
    "lightning": "--steps 6",
    "loggers": "--steps 60",
    "optax": "--steps 25 --seeds 2",
    "record_your_loop": "--epochs 2",
    "trl": "--steps 6",
}
STARTERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
PAGES = sorted(page for page in EXAMPLES.glob("*/README.md") if any(page.parent.glob("*.py")))  # a notebook has none


def commands(page):
    """What the page's console blocks start with Python: how, which script, with what arguments."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    found = []
    for program, *words in (shlex.split(line, comments=True) for line in lines if line):
        if program in STARTERS:
            at = next(k for k, word in enumerate(words) if word.endswith(".py"))
            found.append(([*STARTERS[program], *words[:at]], words[at], words[at + 1 :]))
    return found


def test_every_example_has_a_page_that_runs_it():
    scripts = {str(path.relative_to(ROOT)) for path in EXAMPLES.glob("*/*.py")}
    assert {script for page in PAGES for _, script, _ in commands(page)} == scripts
    for page in PAGES:
        assert "pip install -c constraints.txt" in page.read_text(encoding="utf-8"), page


@pytest.mark.parametrize("page", PAGES, ids=[page.parent.name for page in PAGES])
def test_the_first_command_of_a_page_runs(page, tmp_path):
    """From an empty directory, offline, with nothing but the package's extras."""
    start, script, arguments = commands(page)[0]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, str(ROOT / script), *arguments, *TINY[page.parent.name].split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PopRiskAdamW" in done.stdout or "poprisk" in done.stdout, done.stdout
