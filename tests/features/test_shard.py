"""The file format: what other safetensors readers see, equal bytes, checksum, and files that are not whole."""

import json
import os
from io import FileIO

import pytest
import torch
import xxhash
from safetensors import safe_open

from dflash_train.errors import UserError
from dflash_train.features.shard import (
    METADATA_KEY,
    DamagedShardError,
    open_shard,
    read_header,
    read_offsets,
    read_rows,
    sample_checksum,
    set_aside,
)

ARRAYS = {
    "loss_mask": torch.tensor([0, 1, 1], dtype=torch.uint8),
    "features": torch.arange(12, dtype=torch.bfloat16).reshape(3, 2, 2),
    "offsets": torch.tensor([0, 1, 3]),
    "input_ids": torch.tensor([5, 6, 7], dtype=torch.int32),
}
METADATA = {"sample_ids": ["ä", "b"], "contract": {"b": 1, "a": [1, 2]}}


def write_shard(path, arrays, metadata, longest=None):
    with open_shard(path, {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}, longest or metadata) as file:
        for name, array in arrays.items():
            for row in reversed(range(len(array))):  # rows may come in any order
                file.write_rows(name, row, array[row : row + 1])
        file.finish(metadata)


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
    assert read_header(path).metadata == METADATA
    assert json.loads(metadata[METADATA_KEY]).items() >= METADATA.items()
    assert '"contract":{"a":[1,2],"b":1}' in metadata[METADATA_KEY]  # canonical: sorted, no spaces


def test_the_header_has_a_checksum(path):
    """Of everything in it: one changed letter of a sample's name is damage."""
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'\\"b\\"]', b'\\"c\\"]'))
    assert path.read_bytes() != raw
    with pytest.raises(DamagedShardError, match="its header does not have the checksum that it holds"):
        read_header(path)


def test_a_samples_checksum_is_of_its_place_and_its_rows():
    rows = {"input_ids": torch.tensor([6, 7], dtype=torch.int32), "features": torch.ones(2, 1, 1, dtype=torch.bfloat16)}
    content = (1).to_bytes(8, "little") + b"\x80\x3f\x80\x3f" + b"\6\0\0\0\7\0\0\0"  # by name: features before input_ids
    assert sample_checksum(1, rows) == xxhash.xxh3_128_hexdigest(content)
    assert sample_checksum(2, rows) != sample_checksum(1, rows)


def test_the_header_may_turn_out_shorter_than_told(path, tmp_path):
    longer = METADATA | {"sample_ids": ["ä", "b" * 100]}
    write_shard(tmp_path / "longer.safetensors", ARRAYS, METADATA, longest=longer)
    assert read_header(tmp_path / "longer.safetensors").metadata == METADATA
    assert (tmp_path / "longer.safetensors").stat().st_size > path.stat().st_size
    with safe_open(tmp_path / "longer.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("features"), ARRAYS["features"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_writer_leaves_nothing(tmp_path, error):
    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), open_shard(tmp_path / "shard.safetensors", {"offsets": (torch.int64, (2,))}, {}):
        assert list(tmp_path.iterdir())
        raise error
    assert not list(tmp_path.iterdir())


def test_a_shard_without_its_header_gets_no_name(tmp_path):
    with pytest.raises(DamagedShardError), open_shard(tmp_path / "shard.safetensors", {"offsets": (torch.int64, (2,))}, {}) as file:
        file.write_rows("offsets", 0, torch.tensor([0, 1]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("offsets", [[1, 2, 3], [0, 2, 2], [0, 3, 2], [0, 1, 4], [0, 0, 3]])
def test_offsets_that_do_not_cut_the_tokens_are_damage(tmp_path, offsets):
    write_shard(tmp_path / "shard.safetensors", ARRAYS | {"offsets": torch.tensor(offsets)}, METADATA)
    with FileIO(tmp_path / "shard.safetensors") as file, pytest.raises(DamagedShardError, match="do not cut 3 tokens into samples"):
        read_offsets(file, read_header(tmp_path / "shard.safetensors"))


def test_setting_aside_keeps_what_was_set_aside_before(tmp_path):
    for content in ("first", "second", "third"):
        (tmp_path / "shard").write_text(content)
        set_aside(tmp_path / "shard")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "shard.damaged": "first",
        "shard.damaged1": "second",
        "shard.damaged2": "third",
    }


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
        b'{"__metadata__":{"dflash_train":"{}"}}',
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
