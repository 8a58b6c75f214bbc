"""Keys say all that matters, manifests are whole, and a result that is not whole is never believed."""

import json

import pytest
import torch

from poprisk.errors import DataError
from poprisk.jobs._manifest import JobGroup, Manifest, code_digest
from poprisk.jobs._results import read_result, result_notes, result_path, write_result

KIND = "job_problems:Squares"


def group(**content):
    return JobGroup("squares", KIND, {"a": 1, **content}, [[0], [1]])


def test_a_key_depends_on_kind_content_and_indices_and_on_nothing_else():
    first = group()
    same = JobGroup("other name", KIND, {"a": 1}, [[1], [0]], where={"run": "elsewhere"})
    assert set(first.keys) == set(same.keys)
    others = [group(a=2), group(b=0), JobGroup("squares", "job_problems:Cubes", {"a": 1}, [[0], [1]])]
    keys = {key for each in (first, *others) for key in each.keys}
    assert len(keys) == 2 * 4


def test_a_digest_of_code_depends_on_every_source(tmp_path, monkeypatch):
    package = tmp_path / "some_method"
    package.mkdir()
    for name in ("__init__.py", "formula.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    digest = code_digest.__wrapped__
    before = digest("some_method")
    assert digest("some_method") == before
    (package / "formula.py").write_text("x = 2\n")
    assert digest("some_method") != before
    assert digest("poprisk.operators._kernels") != digest("poprisk.operators._kernels", "poprisk._core.autodiff")


def test_a_manifest_comes_back_and_lists_a_shared_job_once(tmp_path):
    shared = JobGroup("again", KIND, {"a": 1}, [[1], [2]])
    manifest = Manifest((group(),)).with_group(shared)
    manifest.save(tmp_path)
    loaded = Manifest.load(tmp_path)
    assert loaded == manifest
    assert [job.indices for job in loaded.jobs()] == [(0,), (1,), (2,)]
    assert loaded.with_group(shared) is loaded
    with pytest.raises(DataError, match="planned in this directory with other settings"):
        loaded.with_group(group(a=2))
    with pytest.raises(DataError, match=r"no group of jobs called 'cubes'; there are \['squares', 'again'\]"):
        loaded.group("cubes")


def test_a_missing_or_changed_manifest_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no jobs: there is no manifest\.json; plan them first"):
        Manifest.load(tmp_path)
    path = Manifest((group(),)).save(tmp_path)
    whole = path.read_text()
    for text, said in (
        (whole[:-9], "not valid JSON"),
        (whole.replace('"a": 1', '"a": 2'), "SHA-256 does not match"),
        (whole.replace('"format_version": 1', '"format_version": 9'), "format_version 9"),
        (json.dumps([]), "not a manifest of jobs"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            Manifest.load(tmp_path)


def test_a_result_comes_back_with_its_notes(tmp_path):
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([True])}
    write_result(tmp_path, "ab12", tensors, {"worker": "one"})
    read = read_result(tmp_path, "ab12")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert result_notes(tmp_path, "ab12")["worker"] == "one"
    with pytest.raises(DataError, match="is missing: the job is not done"):
        read_result(tmp_path, "cd34")


def test_a_torn_result_is_not_done_wherever_it_was_torn(tmp_path):
    path = write_result(tmp_path, "ab12", {"x": torch.arange(100.0)}, {})
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert result_notes(tmp_path, "ab12") is None
        with pytest.raises(DataError, match="damaged"):
            read_result(tmp_path, "ab12")
    path.write_bytes(whole + b"x")
    assert result_notes(tmp_path, "ab12") is None


def test_a_result_with_any_wrong_byte_is_refused(tmp_path):
    path = write_result(tmp_path, "ab12", {"x": torch.arange(5.0)}, {})
    whole = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(8, header, 7), *range(header, len(whole))]:
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            read = read_result(tmp_path, "ab12")
        except DataError:
            continue
        assert torch.equal(read["x"], torch.arange(5.0)), place  # padding of the header, nothing that is read


def test_a_result_under_anothers_name_is_refused(tmp_path):
    write_result(tmp_path, "ab12", {"x": torch.zeros(2)}, {})
    result_path(tmp_path, "ab12").rename(result_path(tmp_path, "ab34"))
    assert result_notes(tmp_path, "ab34") is None
    with pytest.raises(DataError, match="damaged"):
        read_result(tmp_path, "ab34")
