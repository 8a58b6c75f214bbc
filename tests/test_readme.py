"""The page says what was measured, and its code runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_measured_sections_come_from_the_results():
    done = subprocess.run(
        [sys.executable, "tools/render_readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet, capsys):
    model = torch.nn.Module()
    model.body, model.router = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    from poprisk import PopRiskAdamW

    optimizer = PopRiskAdamW(model.parameters())
    names = {"model": model, "optimizer": optimizer, "PopRiskAdamW": PopRiskAdamW}
    exec(snippet, names)
    names["optimizer"].step()
