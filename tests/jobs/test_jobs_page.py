"""The page on jobs runs from top to bottom; its first block is the file task.py."""

from pathlib import Path

from readme_code import blocks

ROOT = Path(__file__).parents[2]


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    task, *rest = blocks((ROOT / "docs/jobs.md").read_text(encoding="utf-8"))
    (tmp_path / "task.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    assert len(rest) == 6
    for block in rest:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "jobs" in printed
    assert "a model trained on 32 of the 40 examples" in printed
    assert "bound 9." in printed
