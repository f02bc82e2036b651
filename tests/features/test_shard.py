"""The file format: what other safetensors readers see, equal bytes, checksum, and files that are not whole."""

import json
import os
from io import FileIO

import pytest
import torch
import xxhash
from safetensors import safe_open

from dflash_train.errors import UserError
from dflash_train.features.shard import METADATA_KEY, DamagedShardError, read_header, read_rows, write_shard

ARRAYS = {
    "loss_mask": torch.tensor([0, 1, 1], dtype=torch.uint8),
    "features": torch.arange(12, dtype=torch.bfloat16).reshape(3, 2, 2),
    "offsets": torch.tensor([0, 1, 3]),
    "input_ids": torch.tensor([5, 6, 7], dtype=torch.int32),
}
METADATA = {"sample_ids": ["ä", "b"], "contract": {"b": 1, "a": [1, 2]}}


@pytest.fixture
def path(tmp_path):
    write_shard(tmp_path / "shard.safetensors", ARRAYS, METADATA)
    return tmp_path / "shard.safetensors"


def test_any_safetensors_reader_reads_it(path):
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert torch.equal(file.get_tensor(name), array) and file.get_tensor(name).dtype == array.dtype
        metadata = file.metadata()
    assert list(metadata) == [METADATA_KEY]
    assert metadata[METADATA_KEY].startswith('{"checksum":"xxh3_128:')
    assert json.loads(metadata[METADATA_KEY]).items() >= METADATA.items()
    assert '"contract":{"a":[1,2],"b":1}' in metadata[METADATA_KEY]  # canonical: sorted, no spaces


def test_checksum_is_of_the_payload(path):
    raw = path.read_bytes()
    payload = raw[8 + int.from_bytes(raw[:8], "little") :]
    assert len(payload) == 3 * 8 + 3 * 4 + 12 * 2 + 3
    assert read_header(path).metadata["checksum"] == f"xxh3_128:{xxhash.xxh3_128_hexdigest(payload)}"


def test_bytes_depend_on_content_alone(path, tmp_path):
    reordered = dict(reversed(ARRAYS.items()))
    write_shard(tmp_path / "again.safetensors", reordered, dict(reversed(METADATA.items())))
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_arrays_are_aligned_and_mode_follows_the_umask(path):
    for array in read_header(path).arrays.values():
        assert array.start % array.dtype.itemsize == 0
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_rows_go_straight_into_the_given_memory(path):
    array = read_header(path).arrays["features"]
    buffer_TLD = torch.full((5, 2, 2), -1, dtype=torch.bfloat16)
    with FileIO(path) as file:
        read_rows(file, array, 1, buffer_TLD[2:4])
    assert torch.equal(buffer_TLD[2:4], ARRAYS["features"][1:])
    assert (buffer_TLD[[0, 1, 4]] == -1).all()


@pytest.mark.parametrize("size", [0, 5, 8, 40, -1, 1])
def test_a_file_of_the_wrong_size_is_damaged(path, size):
    raw = path.read_bytes()
    path.write_bytes(raw + b"x" if size == 1 else raw[:size])
    with pytest.raises(DamagedShardError, match="shard.safetensors is damaged") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'{"__metadata__":{"dflash_train":"[1]"}}',
        b'{"__metadata__":{"dflash_train":"{}"},"x":{"dtype":"Q9","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"dflash_train":"{}"},"x":{"dtype":"U8","shape":["a"],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"dflash_train":"{}"},"x":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}',
        b"\xff\xff",
    ],
)
def test_a_wrong_header_is_damaged(tmp_path, header):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedShardError, match="shard.safetensors is damaged"):
        read_header(path)


def test_a_file_that_shrinks_while_open(path):
    array = read_header(path).arrays["features"]
    with FileIO(path) as file:
        os.truncate(path, array.start + 10)
        with pytest.raises(DamagedShardError, match="ends at byte"):
            read_rows(file, array, 0, torch.empty(3, 2, 2, dtype=torch.bfloat16))


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot read .*none.safetensors"):
        read_header(tmp_path / "none.safetensors")
