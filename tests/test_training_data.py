"""Packs as training gets them: order, values and draws with any number of threads, and how reading ahead ends."""

import gc
import pickle
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny_datasets import extract_config, make_samples

from dflash_train.blocks import build_blocks, draw_anchors
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset
from dflash_train.packing import RunPlan, Step
from dflash_train.stages.extract import run
from dflash_train.training_data import PackReader, TrainingPack, load_packs

SEED, NUM_ANCHORS, BLOCK_SIZE, MASK_TOKEN_ID = 5, 3, 4, 300


@pytest.fixture(scope="module")
def features_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training_data")
    target = tiny_models.make_qwen3(folder / "target")
    make_samples(folder, target)
    config = extract_config(folder, target, teacher_state=True)
    run(config)
    return Path(config.features.dir)


@pytest.fixture
def reader(features_dir: Path) -> PackReader:
    return make_reader(features_dir)


def make_reader(features_dir: Path, device: str = "cpu", mask_token_id: int = MASK_TOKEN_ID) -> PackReader:
    shape = NUM_ANCHORS, BLOCK_SIZE, mask_token_id, None
    return PackReader(FeatureDataset(features_dir), torch.device(device), SEED, *shape, teacher_state=True)


def steps_of(reader: PackReader, num_steps: int = 6) -> list[Step]:
    """About 4 packs of 2 or 3 samples each per step; 6 steps go into a second epoch."""
    plan = RunPlan(reader.dataset.refs("train"), SEED, tokens_per_step=200, tokens_per_pack=50, shuffle_shards=2)
    return list(plan.steps(0, num_steps))


def tensors(pack: TrainingPack) -> list[torch.Tensor]:
    return [pack.features_TLD, pack.teacher_state_TD, *vars(pack.context).values(), *vars(pack.blocks).values()]


def plain_packs(reader: PackReader, steps: list[Step]) -> Iterator[TrainingPack]:
    """The twin: every sample read alone, its anchors drawn by themselves, and the features joined."""
    for step in steps:
        for refs in step.packs:
            samples = [reader.dataset.read(ref) for ref in refs]
            anchors = [draw_anchors(sample.loss_mask_T, NUM_ANCHORS, SEED, step.epoch, sample.sample_id) for sample in samples]
            context, blocks = build_blocks([(s.input_ids_T, s.loss_mask_T) for s in samples], anchors, BLOCK_SIZE, MASK_TOKEN_ID)
            states_TD = torch.cat([sample.teacher_state_TD for sample in samples])
            yield TrainingPack(torch.cat([sample.features_TLD for sample in samples]), context, blocks, states_TD)


def assert_equal(ours: list[TrainingPack], theirs: list[TrainingPack]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(left), tensors(right), strict=True))


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pack-reader")]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_packs_that_are_held_together_are_those_read_one_by_one(reader: PackReader, num_workers: int) -> None:
    steps = steps_of(reader)
    assert {step.epoch for step in steps} == {0, 1} and max(len(pack) for step in steps for pack in step.packs) > 1
    assert_equal(list(load_packs(reader, steps, 0, 1, num_workers)), list(plain_packs(reader, steps)))
    assert not reading_threads()


def test_teacher_states_are_read_when_asked_for_and_lie_behind_the_anchors_row(reader: PackReader) -> None:
    steps = steps_of(reader, 1)
    packs = list(load_packs(reader, steps, 0, 1, num_workers=0))
    assert packs[0].teacher_state_TD.dtype == torch.bfloat16
    for refs, pack in zip(steps[0].packs, packs, strict=True):
        blocks = pack.blocks
        for row, document, position in zip(blocks.row_A.tolist(), blocks.document_A.tolist(), blocks.position_A.tolist(), strict=True):
            assert torch.equal(pack.teacher_state_TD[row], reader.dataset.read(refs[document]).teacher_state_TD[position])
    without = load_packs(replace(reader, teacher_state=False), steps, 0, 1, num_workers=0)
    assert all(pack.teacher_state_TD is None for pack in without)


def test_the_processes_share_the_packs_of_each_step(reader: PackReader) -> None:
    """Packs 0 1 2 of the step: process 0 takes 0 and 2, process 1 takes 1 and an empty one."""
    step = Step(0, steps_of(reader)[0].packs[:3])
    expected = list(plain_packs(reader, [step]))
    first, second = (list(load_packs(reader, [step], rank, 2, 1)) for rank in range(2))
    assert_equal(first, expected[::2])
    assert_equal(second[:1], expected[1:2])
    assert len(second) == 2 and second[1].features_TLD.shape == (0, 2, 32)
    assert len(second[1].context.position_T) == len(second[1].blocks.position_A) == 0


def test_only_so_many_packs_are_read_ahead(reader: PackReader) -> None:
    refs = reader.dataset.refs("train")
    num_planned = 0

    def steps() -> Iterator[Step]:
        nonlocal num_planned
        for ref in refs:
            num_planned += 1
            yield Step(0, [[ref]])

    packs = load_packs(reader, steps(), 0, 1, num_workers=2)
    assert num_planned == 0
    for num_taken in range(1, 6):
        next(packs)
        assert num_planned == num_taken + 2
    packs.close()


def test_a_consumer_that_stops_leaves_no_thread(reader: PackReader) -> None:
    packs = load_packs(reader, steps_of(reader), 0, 1, num_workers=2)
    kept = next(packs)
    assert len(reading_threads()) == 2
    packs.close()
    assert not reading_threads()
    dropped = load_packs(reader, steps_of(reader), 0, 1, num_workers=2)
    next(dropped)
    assert reading_threads()
    del dropped
    gc.collect()
    assert not reading_threads()
    assert_equal([kept], list(plain_packs(reader, steps_of(reader, 1)))[:1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_sample_is_told_when_its_pack_is_due(features_dir: Path, num_workers: int, tmp_path: Path) -> None:
    opened = make_reader(shutil.copytree(features_dir, tmp_path / "features"))
    reader = replace(opened, dataset=pickle.loads(pickle.dumps(opened.dataset)))  # without open files
    refs = reader.dataset.refs("train")
    lost = refs[0].shard
    (reader.dataset.folder / lost).unlink()
    good = [ref for ref in refs if ref.shard != lost][:5]
    packs = load_packs(reader, [Step(0, [[ref] for ref in [*good, refs[0], *good]])], 0, 1, num_workers)
    assert [len(next(packs).features_TLD) for _ in good] == [ref.num_tokens for ref in good]
    with pytest.raises(UserError, match=rf"^cannot read .*{lost}: No such file or directory$"):
        next(packs)
    assert not reading_threads()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mask_token_that_the_data_uses(features_dir: Path, num_workers: int) -> None:
    dataset = FeatureDataset(features_dir)
    used = int(dataset.read(dataset.refs("train")[0]).input_ids_T[0])
    reader = make_reader(features_dir, mask_token_id=used)
    with pytest.raises(UserError, match=rf"^drafter\.mask_token_id={used} occurs in the data"):
        list(load_packs(reader, steps_of(reader), 0, 1, num_workers))
    assert not reading_threads()


@pytest.mark.gpu
def test_packs_on_a_gpu_are_those_on_the_cpu(features_dir: Path) -> None:
    reader = make_reader(features_dir, device="cuda")
    steps = steps_of(reader)
    packs = list(load_packs(reader, steps, 0, 1, num_workers=2))
    assert all(tensor.device.type == "cuda" for pack in packs for tensor in tensors(pack))
    on_cpu = [
        TrainingPack(pack.features_TLD.cpu(), pack.context.to("cpu"), pack.blocks.to("cpu"), pack.teacher_state_TD.cpu()) for pack in packs
    ]
    torch.cuda.synchronize()
    assert_equal(on_cpu, list(plain_packs(reader, steps)))
