"""Writing beside the forward: what the thread does with rows, failures on both sides, and how many forwards wait."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_train.capture import Recomputed
from dflash_train.features import writer
from dflash_train.features.checks import ContentError
from dflash_train.features.codec import Bf16Codec
from dflash_train.features.shard import read_header, sample_checksum
from dflash_train.features.writer import CapturedRows, CheckSample, ShardJob, WriterThread, write_shard
from dflash_train.layers import FeatureContract, LayerIds

CONTRACT = FeatureContract(LayerIds((1, 3), 6), 4, True, {}, {})
CPU = torch.device("cpu")
LENGTHS = (3, 2, 2)  # two forwards: 3 rows, and 2 + 2


def job(path: Path) -> ShardJob:
    ids = [[10 * sample + position for position in range(length)] for sample, length in enumerate(LENGTHS)]
    rows = {"sample_id": ["a", "b", "c"], "split": ["train", "heldout", "train"], "input_ids": ids}
    return ShardJob(path, rows | {"loss_mask": [[False, True, True], [True, True], [False, True]]}, CONTRACT, Bf16Codec(), 4)


def forwards(shard: ShardJob) -> list[CapturedRows]:
    generator = torch.Generator().manual_seed(0)
    features_TLD, states_TD = torch.randn(7, 2, 4, generator=generator), torch.randn(7, 4, generator=generator)
    return [CapturedRows(shard.input_ids_T[rows].long(), features_TLD[rows], states_TD[rows]) for rows in (slice(0, 3), slice(3, 7))]


def check(shard: ShardJob) -> CheckSample:
    return CheckSample(1, Recomputed(torch.float32, forwards(shard)[1].features_TLD[:2], None))


def test_a_shard(tmp_path):
    shard = job(tmp_path / "shard")
    metadata = write_shard(shard, forwards(shard), check(shard))
    assert read_header(tmp_path / "shard").metadata == metadata
    arrays = load_file(tmp_path / "shard")
    assert torch.equal(arrays["features"], torch.cat([rows.features_TLD for rows in forwards(shard)]).bfloat16())
    assert torch.equal(arrays["teacher_state"], torch.cat([rows.teacher_state_TD for rows in forwards(shard)]).bfloat16())
    assert arrays["offsets"].tolist() == [0, 3, 5, 7] and arrays["input_ids"].tolist() == [0, 1, 2, 10, 11, 20, 21]
    assert arrays["loss_mask"].tolist() == [0, 1, 1, 1, 1, 0, 1]
    assert metadata["num_supervised"] == [2, 2, 1] and metadata["splits"] == ["train", "heldout", "train"]
    assert metadata["statistics"]["num_supervised"] == 5 and metadata["statistics"]["tokens_per_forward"] == 4
    rows = {name: array[3:5] for name, array in arrays.items() if name != "offsets"}
    assert metadata["sample_checksums"][1] == sample_checksum(3, rows)
    assert all(0 < error < 2**-8 for error in metadata["codec"]["relative_error"])


def test_how_the_rows_are_cut_into_forwards_changes_no_payload(tmp_path):
    one, other = job(tmp_path / "one"), job(tmp_path / "other")
    write_shard(one, forwards(one), check(one))
    first, second = forwards(other)
    cut = [
        CapturedRows(second.input_ids_T[rows], second.features_TLD[rows], second.teacher_state_TD[rows]) for rows in (slice(2), slice(2, 4))
    ]
    write_shard(other, [first, *cut], check(other))
    assert read_header(tmp_path / "one").metadata["sample_checksums"] == read_header(tmp_path / "other").metadata["sample_checksums"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.input_ids_T.__setitem__(1, 99), r"sample b, row 1 of 2: the target was given another token there than planned"),
        (
            lambda r: CapturedRows(r.input_ids_T[:-1], r.features_TLD[:-1], r.teacher_state_TD[:-1]),
            "sample c, row 1 of 2: .* a row is missing",
        ),
        (lambda r: CapturedRows(r.input_ids_T, r.features_TLD[:-1], r.teacher_state_TD), r"features are \[3, 2, 4\] .*, not \[4, 2, 4\]"),
        (lambda r: CapturedRows(r.input_ids_T, r.features_TLD, r.teacher_state_TD[1:]), r"teacher state are \[3, 4\] .*, not \[4, 4\]"),
        (lambda r: CapturedRows(r.input_ids_T, r.features_TLD, None), r"teacher state are missing, not \[4, 4\]"),
        (lambda r: CapturedRows(r.input_ids_T, r.features_TLD[:, :1], r.teacher_state_TD), r"features are \[4, 1, 4\] .*, not \[4, 2, 4\]"),
        (lambda r: CapturedRows(r.input_ids_T, r.features_TLD.double(), r.teacher_state_TD), "in torch.float64, not .* in torch.float32"),
        (
            lambda r: CapturedRows(torch.cat([r.input_ids_T, r.input_ids_T]), r.features_TLD, None),
            "sample c, row 1 of 2: the target was given",
        ),
    ],
)
def test_rows_that_are_not_the_planned_ones(tmp_path, change, said):
    shard = job(tmp_path / "shard")
    first, second = forwards(shard)
    changed = change(second) or second
    with pytest.raises(ContentError, match=said):
        write_shard(shard, [first, changed], check(shard))
    assert not list(tmp_path.iterdir())


def test_the_check_sample_is_compared_as_a_reader_gets_it(tmp_path, monkeypatch):
    """Here the file itself garbles: what was captured is right."""
    shard = job(tmp_path / "shard")
    genuine = writer.ShardFile.write_rows
    monkeypatch.setattr(
        writer.ShardFile, "write_rows", lambda self, name, first, rows: genuine(self, name, first, rows * 0 if name == "features" else rows)
    )
    with pytest.raises(ContentError, match=r"sample b, row \d of 2: the feature of layer 1 is not what the target gives"):
        write_shard(shard, forwards(shard), check(shard))
    assert not list(tmp_path.iterdir())


def test_the_thread_writes_one_shard_after_the_other(tmp_path):
    with WriterThread(CPU) as thread:
        for name in ("one", "two"):
            shard = job(tmp_path / name)
            thread.open(shard, check(shard))
            for rows in forwards(shard):
                thread.add(rows)
        assert [metadata["sample_ids"] for metadata in thread.finished(wait=True)] == [["a", "b", "c"]] * 2
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert not [t for t in threading.enumerate() if t.name.startswith("feature-writer")]


def test_a_failure_in_the_thread_reaches_who_hands_over(tmp_path, monkeypatch):
    """Even when the queue is full because nobody takes from it any more."""
    monkeypatch.setattr(writer, "_POLL_SECONDS", 0.01)
    shard = job(tmp_path / "shard")
    first, _ = forwards(shard)
    first.features_TLD[1, 0, 2] = float("nan")
    with pytest.raises(ContentError, match="sample a, row 1 of 3: the feature of layer 1 is nan"), WriterThread(CPU) as thread:
        thread.open(shard, check(shard))
        for _ in range(1000):
            thread.add(first)
    assert not list(tmp_path.iterdir())


def test_the_last_shard_fails_at_the_end(tmp_path):
    shard = job(tmp_path / "shard")
    wrong = CheckSample(1, Recomputed(torch.float32, forwards(shard)[0].features_TLD[:2], None))
    with pytest.raises(ContentError, match="sample b"), WriterThread(CPU) as thread:
        thread.open(shard, wrong)
        for rows in forwards(shard):
            thread.add(rows)
    assert not list(tmp_path.iterdir())


def test_a_failure_outside_leaves_no_half_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_POLL_SECONDS", 0.01)
    shard = job(tmp_path / "shard")
    with pytest.raises(KeyboardInterrupt), WriterThread(CPU) as thread:
        thread.open(shard, check(shard))
        thread.add(forwards(shard)[0])
        deadline = time.monotonic() + 10
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_few_forwards_wait(tmp_path, monkeypatch):
    """Memory on the device is bounded: one forward is held up in the thread, two wait, the next one is not taken."""
    released, handed = threading.Event(), []
    genuine = Bf16Codec.encode
    monkeypatch.setattr(Bf16Codec, "encode", lambda self, features_TLD: released.wait() and genuine(self, features_TLD))
    shards = [job(tmp_path / name) for name in ("one", "two")]

    def hand_over() -> None:
        with WriterThread(CPU) as thread:
            for shard in shards:
                thread.open(shard, check(shard))
                for rows in forwards(shard):
                    thread.add(rows)
                    handed.append(shard.path.name)

    caller = threading.Thread(target=hand_over)
    caller.start()
    time.sleep(1)
    waiting = len(handed)
    released.set()
    caller.join(timeout=30)
    assert waiting == 3 and len(handed) == 4 and not caller.is_alive()
