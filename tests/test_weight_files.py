import json

import pytest
import torch
from safetensors.torch import save_file

from dflash_train.errors import UserError
from dflash_train.weight_files import SAMPLE_BYTES, read_tensor, sample_digest, stored_tensors, weight_paths


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_headers_and_tensors_of_sharded_weights(sharded):
    stored = stored_tensors(sharded)
    assert {name: (tensor.dtype, tensor.shape, tensor.path.name) for name, tensor in stored.items()} == {
        "a": ("F32", (2, 3), "model-1.safetensors"),
        "b": ("BF16", (4,), "model-2.safetensors"),
    }
    assert read_tensor(stored["a"], torch.device("cpu")).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd"])
def test_an_index_cannot_leave_its_folder(sharded, name):
    write_index(sharded, {"a": name})
    with pytest.raises(UserError, match="outside its own folder"):
        weight_paths(sharded)


def test_missing_and_broken_files(sharded, tmp_path_factory):
    write_index(sharded, {"a": "model-3.safetensors"})
    with pytest.raises(UserError, match="model-3.safetensors, which is missing"):
        weight_paths(sharded)
    (sharded / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not a safetensors index"):
        weight_paths(sharded)
    with pytest.raises(UserError, match="holds neither"):
        weight_paths(tmp_path_factory.mktemp("empty"))


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_file_that_is_cut_short(tmp_path, kept):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(8)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="model.safetensors has"):
        stored_tensors(tmp_path)


def test_the_sample_reaches_the_ends_of_a_large_file(tmp_path):
    path = tmp_path / "large"
    content = bytearray(3 * SAMPLE_BYTES)
    digests = set()
    for position in (None, 0, len(content) - 1):
        if position is not None:
            content[position] ^= 1
        path.write_bytes(content)
        digests.add(sample_digest(path))
    path.write_bytes(content + b"\0")
    assert len(digests | {sample_digest(path)}) == 4
