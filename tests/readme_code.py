"""The Python blocks of a page, run the way a reader would.

As a script it runs those of the page that the installed package carries, its long description, and nothing of this
folder: ``python -I readme_code.py``; with the names of modules, all blocks but those that import one of them.
"""

import re
import sys
from importlib.metadata import metadata

import torch

import poprisk


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(self.body(x))


def run_block(code: str) -> dict[str, object]:
    """The names after the block. A model, its optimizer and a dataset are there before it."""
    model = Model()
    optimizer = poprisk.PopRiskAdamW(model.parameters())
    inputs = torch.randn(80, 4)
    dataset = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    given = {"model": model, "optimizer": optimizer, "dataset": dataset, "PopRiskAdamW": poprisk.PopRiskAdamW}
    names: dict[str, object] = dict(given)
    exec(code, names)
    return names


def main() -> None:
    found = blocks(metadata("poprisk")["Description"])
    found = [code for code in found if not any(f"from {name}" in code for name in sys.argv[1:])]
    for code in found:
        run_block(code)
    print(f"{len(found)} blocks, {poprisk.__file__}")


if __name__ == "__main__":
    main()
