"""Tensor files are whole, or refused by name."""

import pytest
import torch

from poprisk._core.store.tensors import TensorFile, check_size, fingerprint, read_tensors, write_tensors
from poprisk.errors import DataError

TENSORS = {
    "double": torch.linspace(0, 1, 5, dtype=torch.float64),
    "coarse": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "number": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
}


def test_round_trip_and_equal_bytes(tmp_path):
    notes = {"options": [[1, 0, {"lr": 0.1}]], "α": None}
    file = write_tensors(tmp_path / "a.safetensors", TENSORS, notes)
    again = write_tensors(tmp_path / "b.safetensors", TENSORS, notes)
    assert (file.size, file.sha256) == (again.size, again.sha256)
    tensors, found = read_tensors(tmp_path, file)
    assert found == notes
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_damage_is_refused_by_name(tmp_path):
    file = write_tensors(tmp_path / "x.safetensors", TENSORS)
    path = check_size(tmp_path, file)
    content = path.read_bytes()
    for position in (0, 40, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.safetensors is damaged: its content"):
            read_tensors(tmp_path, file)
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"x\.safetensors is damaged: expected"):
        read_tensors(tmp_path, file)
    with pytest.raises(DataError, match=r"y\.safetensors is missing"):
        read_tensors(tmp_path, TensorFile("y.safetensors", 1, ""))


def test_fingerprint_sees_names_shapes_and_bits():
    x = torch.zeros(2, 3)
    seen = [{"x": x}, {"y": x}, {"x": x.T}, {"x": -x}, {"x": x.double()}, {"x": x, "y": x}]
    assert len({fingerprint(tensors) for tensors in seen}) == len(seen)
    assert fingerprint({"x": x.T.contiguous().T}) == fingerprint({"x": x})
