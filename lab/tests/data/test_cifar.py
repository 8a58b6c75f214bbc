"""CIFAR-10 and its human labels from tiny files: both layouts, damage, and pickles that want more than arrays."""

import os
import pickle
import re

import numpy as np
import pytest
import torch

from poprisk.errors import DataError
from poprisk_lab.data.cifar import HUMAN_LABELS, cifar10, human_labels

RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.integers(256, size=(n, 32, 32, 3), dtype=np.uint8) for n in (10, 4))
TRAIN_LABELS, TEST_LABELS = np.arange(10), np.array([3, 1, 4, 1])
KEYS = ("clean_label", "aggre_label", "random_label1", "random_label2", "random_label3", "worse_label")


def save_arrays(folder, **changed):
    arrays = {"train_images": TRAIN, "train_labels": TRAIN_LABELS, "test_images": TEST, "test_labels": TEST_LABELS}
    arrays = {name: value for name, value in {**arrays, **changed}.items() if value is not None}
    np.savez(folder / "cifar10.npz", **arrays)
    return folder


def save_pickles(folder, protocol=2, **changed):
    """As the official files: rows of 3072 bytes, channel by channel, keys of bytes."""
    parts = {f"data_batch_{i + 1}": (TRAIN[2 * i : 2 * i + 2], TRAIN_LABELS[2 * i : 2 * i + 2]) for i in range(5)}
    parts["test_batch"] = (TEST, TEST_LABELS)
    for name, (images, labels) in parts.items():
        rows = np.ascontiguousarray(np.moveaxis(images, -1, 1)).reshape(len(images), -1)
        content = {b"data": rows, b"labels": labels.tolist(), b"batch_label": b"training batch", **changed}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


def human_arrays():
    shifted = {key: (TRAIN_LABELS + (i if i > 1 else 0)) % 10 for i, key in enumerate(KEYS)}
    return {key: values.astype(np.int64) for key, values in shifted.items()}


def check_images(found):
    assert torch.equal(found.train_images, torch.from_numpy(TRAIN).permute(0, 3, 1, 2))
    assert torch.equal(found.test_images, torch.from_numpy(TEST).permute(0, 3, 1, 2))
    assert found.train_labels.tolist() == TRAIN_LABELS.tolist()
    assert found.test_labels.tolist() == TEST_LABELS.tolist()


def test_arrays_are_read_channels_first(tmp_path):
    check_images(cifar10(save_arrays(tmp_path)))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_official_batches_are_the_same(tmp_path, protocol):
    check_images(cifar10(save_pickles(tmp_path, protocol)))


def test_the_official_folder_is_found_inside(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    save_pickles(tmp_path / "cifar-10-batches-py")
    check_images(cifar10(tmp_path))


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("never-made",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_wants_more_than_arrays_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    save_pickles(tmp_path, protocol, filenames=Malicious())
    with pytest.raises(DataError, match=r"data_batch_1 asks for .*mkdir, .*do not trust it"):
        cifar10(tmp_path)
    assert not (tmp_path / "never-made").exists()


def test_a_strange_encoding_in_a_pickle_is_refused(tmp_path):
    save_pickles(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x04\x00\x00\x00zlibtR.")
    with pytest.raises(DataError, match="as latin1, got"):
        cifar10(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q", b"not a pickle", pickle.dumps([1, 2])])
def test_a_damaged_batch_is_refused_by_name(tmp_path, content):
    save_pickles(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3 (is damaged|should hold a dictionary)"):
        cifar10(tmp_path)


def test_a_missing_batch_is_named_with_its_source(tmp_path):
    save_pickles(tmp_path)
    (tmp_path / "test_batch").unlink()
    with pytest.raises(DataError, match=r"test_batch cannot be read.*cs\.toronto\.edu"):
        cifar10(tmp_path)


def test_an_empty_folder_is_told_what_to_fetch(tmp_path):
    with pytest.raises(
        DataError, match=r"has no CIFAR-10: put the unpacked cifar-10-python.tar.gz of www\.cs\.toronto"
    ):
        cifar10(tmp_path)
    with pytest.raises(DataError, match=r"CIFAR-10_human\.pt of github\.com/UCSC-REAL/cifar-10-100n"):
        human_labels(tmp_path, torch.arange(10))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train_labels": None}, "should have an entry 'train_labels'"),
        ({"train_images": TRAIN[:9]}, "as many as the 10 labels"),
        ({"train_images": TRAIN.astype(np.float32)}, "of bytes"),
        ({"train_images": TRAIN[..., :1]}, "should be [n, 32, 32, 3]"),
        ({"test_labels": np.array([0, 1, 2, 10])}, "whole numbers in 0 … 9"),
        ({"test_labels": np.array([0.0, 1, 2, 3])}, "whole numbers in 0 … 9"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, changed, words):
    with pytest.raises(DataError, match=re.escape(words)):
        cifar10(save_arrays(tmp_path, **changed))


def test_a_damaged_file_of_arrays_is_refused(tmp_path):
    (tmp_path / "cifar10.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="cannot be read as arrays"):
        cifar10(tmp_path)


def write_npz(folder, arrays):
    np.savez(folder / "cifar10n_labels.npz", **arrays)


def write_zip(folder, arrays):
    torch.save(arrays, folder / "CIFAR-10_human.pt")


def write_legacy(folder, arrays):
    torch.save(arrays, folder / "CIFAR-10_human.pt", _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [write_npz, write_zip, write_legacy])
def test_human_labels_are_read_from_each_layout(tmp_path, write):
    write(tmp_path, human_arrays())
    found = human_labels(tmp_path, torch.arange(10))
    assert tuple(found) == HUMAN_LABELS
    assert found["clean"].tolist() == found["aggre"].tolist() == list(range(10))
    assert found["worse"].tolist() == human_arrays()["worse_label"].tolist()


def test_a_human_pickle_that_wants_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_zip(tmp_path, {**human_arrays(), "more": Malicious()})
    with pytest.raises(DataError, match="cannot be read as arrays"):
        human_labels(tmp_path, torch.arange(10))
    assert not (tmp_path / "never-made").exists()


@pytest.mark.parametrize("write", [write_npz, write_zip])
def test_labels_of_other_images_are_refused(tmp_path, write):
    write(tmp_path, human_arrays())
    with pytest.raises(DataError, match="10 of 10 of its clean labels differ"):
        human_labels(tmp_path, torch.arange(10).flip(0))
    with pytest.raises(DataError, match="10 labels 'clean' for 9 images"):
        human_labels(tmp_path, torch.arange(9))
    write(tmp_path, {key: values for key, values in human_arrays().items() if key != "worse_label"})
    with pytest.raises(DataError, match="should have an entry 'worse_label'"):
        human_labels(tmp_path, torch.arange(10))
