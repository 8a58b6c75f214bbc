"""A store is read by anyone with Zarr, resumes from what is whole, and never returns a changed number."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import job_problems
import numpy as np
import pytest
import torch
import zarr
from fsspec.registry import known_implementations

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk._core.store.tiled import VALUES, TiledArray, add_tiled, convert_matrix, load_all, load_tiled, open_store
from poprisk.errors import DataError, HyperparameterError, JobError, PopRiskError
from poprisk.jobs import JobPlan, job_status, open_matrix, open_resampled
from poprisk.runs import Problem, train


def stored(where, dense, tile=(7, 5), *, symmetric=False, name="K", cells=None, **content):
    """A matrix in a store, or some of its tiles."""
    dtype = str(dense.dtype).removeprefix("torch.")
    about = {"shape": list(dense.shape), "tile": list(tile), "dtype": dtype, "symmetric": symmetric}
    group = add_tiled(TiledArray(open_store(where), name, "converted", content, about), {"seed": torch.arange(3.0)})
    for cell in group.cells() if cells is None else cells:
        group.write(cell, {VALUES: dense[group.region(cell)]})
    return group


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", ["local", "memory", "file"])
def test_products_are_those_of_the_matrix(tmp_path, dtype, where):
    place = {"local": tmp_path / "s", "memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/s"}[where]
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(23, 11, dtype=dtype, generator=generator)
    stored(place, dense)
    K, X, Y = open_matrix(place, "K"), torch.randn(11, 3, dtype=dtype), torch.randn(23, 2, dtype=dtype)
    assert (K.shape, K.dtype, K.symmetric) == ((23, 11), dtype, False)
    torch.testing.assert_close(K @ X, dense @ X)
    torch.testing.assert_close(K.T @ Y, dense.T @ Y)
    assert torch.equal(K.to_dense(), dense)
    assert adjoint_mismatch(K) < 1e-5
    assert all(tile.numel() <= 35 for _, _, tile in K.tiles())


def test_a_symmetric_matrix_is_whole_for_other_programs(tmp_path):
    R = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dense = R @ R.T
    stored(tmp_path / "s", (dense + dense.T) / 2, (5, 5), symmetric=True, name="train kernel")
    K = open_matrix(tmp_path / "s", "train kernel")
    assert K.T is K
    torch.testing.assert_close(top_eigenpairs(K, 2).values, torch.linalg.eigvalsh(dense).flip(0)[:2])
    whole: Any = zarr.open(tmp_path / "s", mode="r")
    read = whole[f"{K.path}/values"]
    assert np.array_equal(read[:], K.to_dense().numpy())
    assert read.metadata.zarr_format == 3
    assert read.shards == (5, 5)
    codecs = json.loads((tmp_path / "s" / K.path / "values" / "zarr.json").read_text())["codecs"][0]["configuration"]
    assert codecs["codecs"][-1]["name"] == codecs["index_codecs"][-1]["name"] == "crc32c"


def test_large_tiles_have_chunks_that_can_be_read_alone(tmp_path):
    stored(tmp_path / "s", torch.zeros(1024, 600), (1024, 600))
    whole: Any = zarr.open(tmp_path / "s", mode="r")
    array = whole["K/values"]
    assert array.shards == (1024, 600)
    assert array.chunks == (256, 600)


def test_what_is_not_there_is_an_error_and_numbers_that_are_not_are_numbers(tmp_path):
    dense = torch.full((7, 5), torch.nan)
    group = stored(tmp_path / "s", dense)
    K = open_matrix(tmp_path / "s", "K")
    assert bool(K.to_dense().isnan().all())  # a tile like the fill value is stored as well
    (tmp_path / "s" / "K" / "values" / "c" / "0" / "0").unlink()
    with pytest.raises(DataError, match=r"tile \[0, 0\] of 'K' is missing"):
        K.to_dense()
    with pytest.raises(JobError, match="1 of 1 jobs of 'K' are not done"):
        open_matrix(tmp_path / "s", "K")
    assert group.done() == set()
    with pytest.raises(DataError, match=r"has no group called 'L'; there are \['K'\]"):
        open_matrix(tmp_path / "s", "L")
    with pytest.raises(DataError, match="holds no jobs: plan them first"):
        load_all(open_store(tmp_path / "nothing"))


def test_files_that_are_no_tiles_are_not_taken_for_tiles(tmp_path):
    group = stored(tmp_path / "s", torch.ones(20, 20), cells=[(0, 0)])
    for name in ("²/³", "00/1", "1/01", "a/b", "1/1.partial", "-1/0"):
        path = tmp_path / "s" / "K" / "values" / "c" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert group.done() == group.done(verify=True) == {(0, 0)}


def test_an_address_without_a_file_system_is_refused(monkeypatch):
    known = {"class": "absent.FileSystem", "err": "Install absent to use it"}
    monkeypatch.setitem(known_implementations, "absent", known)
    for address, why in (("nosuch://bucket/x", "Protocol not known"), ("absent://bucket/x", "Install absent")):
        with pytest.raises(DataError, match=f"{address} cannot be opened as a store: {why}"):
            open_store(address)


def test_a_part_is_usable_before_the_end(tmp_path):
    """Symmetric: the kernel of the first examples. Otherwise the first rows, or the first columns."""
    dense = torch.randn(20, 20)
    dense = dense + dense.T
    cells = [(0, 0), (0, 1), (1, 1), (0, 2), (2, 2)]
    stored(tmp_path / "s", dense, (6, 6), symmetric=True, cells=cells)
    K = open_matrix(tmp_path / "s", "K", partial=True)
    assert torch.equal(K.to_dense(), dense[:12, :12])
    assert K.symmetric
    stored(tmp_path / "s", dense, (6, 10), name="rows", cells=[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
    assert torch.equal(open_matrix(tmp_path / "s", "rows", partial=True).to_dense(), dense[:12])
    stored(tmp_path / "s", dense, (20, 6), name="columns", cells=[(0, 0), (0, 1), (0, 3)])
    assert torch.equal(open_matrix(tmp_path / "s", "columns", partial=True).to_dense(), dense[:, :12])
    stored(tmp_path / "s", dense, (6, 6), name="nothing", cells=[(3, 3)])
    with pytest.raises(JobError, match="15 of 16 jobs of 'nothing' are not done"):
        open_matrix(tmp_path / "s", "nothing", partial=True)


def test_planning_again_is_the_same_and_other_settings_are_refused(tmp_path):
    dense = torch.ones(9, 9)
    stored(tmp_path / "s", dense, seed=1)
    with pytest.raises(DataError, match=r"'K' is already planned in .* with other settings"):
        stored(tmp_path / "s", dense, seed=2)
    again = stored(tmp_path / "s", dense, (4, 4), seed=1, cells=[])
    assert again.where["tile"] == [7, 5]  # a smaller worker's tiles do not throw away what is there
    with pytest.raises(HyperparameterError, match="name must be letters"):
        stored(tmp_path / "s", dense, name="../elsewhere")


def test_files_of_the_library_are_told_from_others_and_other_formats(tmp_path):
    zarr.create_group(tmp_path / "s")
    with pytest.raises(DataError, match="damaged, or not of this library"):
        load_all(open_store(tmp_path / "s"))
    stored(tmp_path / "t", torch.ones(2, 2))
    group = load_tiled(open_store(tmp_path / "t"), "K")
    group.annotate(format_version=1)
    with pytest.raises(DataError, match="'K' has format 1, but poprisk"):
        load_tiled(group.store, "K")


def test_matrices_of_earlier_versions_are_taken_over(tmp_path):
    dense = torch.randn(30, 30)
    dense = dense + dense.T
    np.save(tmp_path / "0123.npy", dense.numpy())
    (tmp_path / "0123.json").write_text(json.dumps({"precision": "float16", "bound": 0.25}))
    convert_matrix(tmp_path / "0123.npy", tmp_path / "s", "old kernel", symmetric=True, side=8)
    K = open_matrix(tmp_path / "s", "old kernel")
    assert torch.equal(K.to_dense(), dense)
    assert (K.bound, K.symmetric) == (0.25, True)
    for wrong in (np.ones(3), np.ones((2, 2), dtype=int)):
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(DataError, match="must be a matrix of float32 or float64"):
            convert_matrix(tmp_path / "wrong.npy", tmp_path / "s", "wrong")
    with pytest.raises(DataError, match="is not a matrix that can be read"):
        convert_matrix(tmp_path / "missing.npy", tmp_path / "s", "wrong")


def test_a_group_that_lost_its_metadata_is_planned_anew_without_old_tiles(tmp_path):
    stored(tmp_path / "s", torch.ones(9, 9), seed=1)
    for name in ("K/zarr.json", "K/values/zarr.json", "K/seed/zarr.json"):
        there = tmp_path / "s" / name
        kept = there.read_bytes()
        there.unlink()
        with pytest.raises(DataError, match=r"has no group called 'K'|there is no K/(values|seed)/zarr.json"):
            open_matrix(tmp_path / "s", "K").to_dense() + load_tiled(open_store(tmp_path / "s"), "K").whole("seed")
        there.write_bytes(kept)
    assert bool((open_matrix(tmp_path / "s", "K").to_dense() == 1).all())
    (tmp_path / "s" / "K" / "zarr.json").unlink()
    group = stored(tmp_path / "s", 2 * torch.ones(9, 9), seed=2, cells=[(0, 0)])
    assert group.done() == {(0, 0)}


def test_folds_of_another_run_are_refused(tmp_path):
    one, other = (
        train(Problem.build(job_problems.blobs, n=10, test=3, seed=seed), torch.optim.SGD, 2, progress=False)
        for seed in (0, 1)
    )
    plan = JobPlan(tmp_path / "s")
    name = plan.k_fold(one, 3)
    plan.run(client="in-process")
    assert open_resampled(tmp_path / "s", name, run=one).trainings == 3
    with pytest.raises(JobError, match="was planned with another run than"):
        open_resampled(tmp_path / "s", name, run=other)
    with pytest.raises(DataError, match=r"is already planned in .* with other settings"):
        JobPlan(tmp_path / "s").k_fold(other, 3)


NAMES = ["train kernel at step 1", "cross kernel at step 1", "train_transfer of steps 0 to 2", "3-fold, seed 0"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Every kind of array: a kernel, a rounded one, columns, folds with buffers."""
    folder = tmp_path_factory.mktemp("store")
    problem = Problem.build(job_problems.blobs, n=10, test=3, norm=True)
    run = train(problem, torch.optim.SGD, 2, batch_size=5, path=folder / "run", progress=False)
    flat = train(Problem.build(job_problems.blobs, n=10, test=3), torch.optim.SGD, 2, batch_size=5, progress=False)
    plan = JobPlan(folder / "store")
    plan.train_kernel(flat, 1, side=4, preconditioner=torch.linspace(1, 2, flat.num_weights))
    plan.cross_kernel(flat, 1, side=4, precision="float16")
    plan.operator_columns(flat, "train_transfer", columns_per_job=7)
    plan.k_fold(run, 3, members_per_job=2)
    plan.run(client="in-process")
    return folder / "store", run


def everything(store, run, only=None):
    """All that can be read from the store, or from one of its groups, as numbers."""
    found = {}
    if only is None:
        assert all(done == total for done, total in job_status(store).values())
    for name in NAMES if only is None else [only]:
        if "fold" in name:
            resampled = open_resampled(store, name, run=run)
            found[name] = (resampled.weights, resampled.losses, resampled.own_losses)
            continue
        K, group = open_matrix(store, name), load_tiled(open_store(store), name)
        vectors = [
            group.whole(each) for each in ("weights", "preconditioner") if (Path(store) / K.path / each).exists()
        ]
        found[name] = (K.to_dense(), torch.tensor([K.bound or 0.0, K.symmetric]), *vectors)
    return found


def flips(filled, folder, count, seed):
    """Outcomes of reading everything after one bit of one file was flipped, each time another one."""
    (source, run), chance = filled, random.Random(seed)
    store = folder / "store"
    shutil.copytree(source, store)
    files = sorted(path for path in store.rglob("*") if path.is_file())
    expected, outcomes = everything(store, run), {"wrong": 0, "refused": 0, "same": 0}
    for number in range(count):
        path = files[number % len(files)] if number < len(files) else chance.choice(files)
        whole = path.read_bytes()
        changed, place = bytearray(whole), chance.randrange(8 * len(whole))
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        group = path.relative_to(store).parts[0]  # no other group reads the file
        only = next((name for name in NAMES if TiledArray(None, name, "", {}, {}).path == group), None)
        try:
            found = everything(store, run, only)
        except PopRiskError:
            outcomes["refused"] += 1
        else:
            same = all(torch.equal(x, y) for name in found for x, y in zip(found[name], expected[name], strict=True))
            outcomes["same" if same else "wrong"] += 1
        path.write_bytes(whole)
    return outcomes


def test_no_flipped_bit_changes_a_number(filled, tmp_path):
    outcomes = flips(filled, tmp_path, 120, seed=0)
    assert outcomes["wrong"] == 0
    assert outcomes["refused"] > 100  # of the others, most are in white space


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_flipped_bit_of_ten_thousand_changes_a_number(filled, tmp_path):
    assert flips(filled, tmp_path, 10_000, seed=1)["wrong"] == 0
