"""The idx reader: what is written is read, packed or not, and damage is named."""

import gzip

import pytest
import torch

from poprisk.errors import DataError
from poprisk_lab.data.idx import idx_split, read_idx

NAMES = ("images-idx3-ubyte", "labels-idx1-ubyte")


def encode(x):
    header = bytes([0, 0, 8, x.dim()]) + b"".join(n.to_bytes(4, "big") for n in x.shape)
    return header + bytes(x.flatten().tolist())


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for which, n in (("train", 5), ("t10k", 3)):
        images = torch.randint(256, (n, 4, 3), generator=generator, dtype=torch.uint8)
        images[0, 0, 0] = 255
        labels = torch.arange(n, dtype=torch.uint8)
        for name, x in zip(NAMES, (images, labels), strict=True):
            (tmp_path / f"{which}-{name}").write_bytes(encode(x))
    return tmp_path


def test_images_are_flat_rows_in_the_unit_interval(folder):
    split = idx_split(folder)
    assert split.train_inputs.shape == (5, 12)
    assert split.test_inputs.shape == (3, 12)
    assert split.train_inputs.max() == 1
    assert split.train_labels.tolist() == [0, 1, 2, 3, 4]
    raw = read_idx(folder / "train-images-idx3-ubyte")
    torch.testing.assert_close(split.train_inputs * 255, raw.flatten(1).float())


def test_packed_files_are_the_same(folder):
    plain = idx_split(folder)
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert torch.equal(idx_split(folder).train_inputs, plain.train_inputs)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda b: b[:-1], "is damaged: its header says"),
        (lambda b: b + b"\0", "is damaged: its header says"),
        (lambda b: b"\x1f\x8b" + b[2:], "begins with 00 00 08"),
        (lambda b: b[:2] + b"\x0d" + b[3:], "begins with 00 00 08"),
        (lambda b: b[:6], "begins with 00 00 08"),
        (lambda _: b"", "begins with 00 00 08"),
    ],
)
def test_a_damaged_file_is_refused_by_name(folder, spoil, why):
    path = folder / "t10k-images-idx3-ubyte"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=f"t10k-images-idx3-ubyte .*{why}"):
        idx_split(folder)


def test_a_damaged_archive_is_refused_by_name(folder):
    path = folder / "train-labels-idx1-ubyte"
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_name(path.name + ".gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is damaged"):
        idx_split(folder)


def test_missing_and_mismatched_files(folder):
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(encode(torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(DataError, match=r"as many labels, got shapes \[5, 4, 3\] and \[4\]"):
        idx_split(folder)
    labels.unlink()
    with pytest.raises(DataError, match="has no file train-labels-idx1-ubyte"):
        idx_split(folder)
    (folder / "t10k-images-idx3-ubyte").write_bytes(encode(torch.zeros(3, 2, 2, dtype=torch.uint8)))
    labels.write_bytes(encode(torch.zeros(5, dtype=torch.uint8)))
    with pytest.raises(DataError, match="12 and 4 pixels"):
        idx_split(folder)
