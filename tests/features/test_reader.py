"""Reading a dataset: what is there, in which order, from which process, and what is refused."""

import json
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny_datasets import extract_config, make_samples

from dflash_train.config import Config, TargetConfig
from dflash_train.errors import UserError
from dflash_train.features import reader
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.stages.extract import run
from dflash_train.target import contract_for


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("reader")
    target = tiny_models.make_qwen3(folder / "target")
    make_samples(folder, target)
    config = extract_config(folder, target, teacher_state=True)
    run(config)
    return config


@pytest.fixture
def folder(tmp_path, finished) -> Path:
    return Path(shutil.copytree(finished.features.dir, tmp_path / "features"))


def edit_manifest(folder: Path, edit) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_refs_run_shard_by_shard_and_by_split(finished):
    dataset = FeatureDataset(finished.features.dir)
    train, heldout = dataset.refs("train"), dataset.refs("heldout")
    assert (len(train), len(heldout)) == (32, 8)
    assert [ref.shard for ref in train] == sorted(ref.shard for ref in train)
    for shard in {ref.shard for ref in train}:
        refs = sorted((ref for ref in train + heldout if ref.shard == shard), key=lambda ref: ref.row)
        assert [ref.row for ref in refs] == [sum(r.num_tokens for r in refs[:n]) for n in range(len(refs))]
    assert dataset.refs("test") == []


def test_types_and_shapes(finished):
    dataset = FeatureDataset(finished.features.dir)
    ref = dataset.refs("heldout")[0]
    sample = dataset.read(ref)
    assert sample.input_ids_T.dtype == torch.int64 and sample.input_ids_T.shape == (ref.num_tokens,)
    assert sample.loss_mask_T.dtype == torch.bool and int(sample.loss_mask_T.sum()) == ref.num_supervised
    assert sample.features_TLD.dtype == torch.bfloat16 and sample.features_TLD.shape == (ref.num_tokens, 2, 32)
    assert sample.teacher_state_TD.dtype == torch.bfloat16 and sample.teacher_state_TD.shape == (ref.num_tokens, 32)


def _sum(dataset: FeatureDataset, refs: list[SampleRef], results) -> None:
    results.put((os.getpid(), sum(dataset.read(ref).features_TLD.double().sum().item() for ref in refs)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_at_the_same_time(finished, method):
    """Opened here first, then used in two workers: forked ones inherit the object, spawned ones unpickle it."""
    dataset = FeatureDataset(finished.features.dir)
    refs = dataset.refs("train")
    expected = sum(dataset.read(ref).features_TLD.double().sum().item() for ref in refs)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    workers = [context.Process(target=_sum, args=(dataset, refs, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert list(found.values()) == [expected, expected]


def test_a_pickle_carries_no_open_file(finished):
    dataset = FeatureDataset(finished.features.dir)
    ref = dataset.refs("train")[0]
    expected = dataset.read(ref)
    assert torch.equal(pickle.loads(pickle.dumps(dataset)).read(ref).features_TLD, expected.features_TLD)


def test_few_files_stay_open(finished, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_OPEN_FILES", 2)
    dataset = FeatureDataset(finished.features.dir)
    for ref in dataset.refs("train"):
        dataset.read(ref)
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        assert sum(link.startswith(finished.features.dir) for link in links) <= 2


def test_an_incomplete_dataset_needs_leave(folder):
    (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"is incomplete: 1 of \d shards are missing; run stage=extract again"):
        FeatureDataset(folder)
    dataset = FeatureDataset(folder, allow_incomplete=True)
    assert "shard-00001.safetensors" not in {ref.shard for ref in dataset.refs("train")}
    dataset.read(dataset.refs("train")[0])


def test_no_shards_at_all_is_never_enough(folder):
    for path in folder.glob("shard-*"):
        path.unlink()
    with pytest.raises(UserError, match="is incomplete"):
        FeatureDataset(folder, allow_incomplete=True)


def test_no_manifest(tmp_path):
    with pytest.raises(UserError, match="manifest.json is missing: run stage=extract first"):
        FeatureDataset(tmp_path)


@pytest.mark.parametrize("name", ["../shard-00000.safetensors", "/tmp/shard-00000.safetensors", "sub/shard-00000.safetensors", "x", ""])
def test_a_manifest_cannot_point_out_of_its_folder(folder, name):
    edit_manifest(folder, lambda manifest: manifest["shards"][0].update(name=name))
    with pytest.raises(UserError, match="manifest.json: shard name .* is not of the form shard-00000.safetensors"):
        FeatureDataset(folder)


@pytest.mark.parametrize(
    ("edit", "shown"),
    [
        (lambda m: m.update(format="other"), "format 'other' is unknown"),
        (lambda m: m.update(codec="zip"), "codec 'zip' is unknown"),
        (lambda m: m.pop("contract"), "cannot read .*manifest.json"),
        (lambda m: m["contract"].pop("tokenizer"), "manifest.json"),
        (lambda m: m["shards"][0].update(num_tokens=7), "shard-00000.safetensors is damaged: it does not hold"),
        (lambda m: m["contract"].update(layer_ids=[1, 2]), "shard-00000.safetensors is damaged: it was made with another contract"),
    ],
)
def test_a_manifest_that_does_not_fit(folder, edit, shown):
    edit_manifest(folder, edit)
    with pytest.raises(UserError, match=shown) as caught:
        FeatureDataset(folder)
    assert "\n" not in str(caught.value)


def test_a_broken_manifest(folder):
    (folder / "manifest.json").write_text('{"format": ')
    with pytest.raises(UserError, match="cannot read .*manifest.json: JSONDecodeError"):
        FeatureDataset(folder)


def test_a_torn_shard_is_named(folder):
    path = folder / "shard-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UserError, match="shard-00001.safetensors is damaged: it has .* bytes, its header says"):
        FeatureDataset(folder)


def test_a_shard_that_vanishes_while_training(folder):
    dataset = FeatureDataset(folder)
    ref = dataset.refs("train")[0]
    unopened = pickle.loads(pickle.dumps(dataset))
    (folder / ref.shard).unlink()
    with pytest.raises(UserError, match=f"cannot read .*{ref.shard}: No such file"):
        unopened.read(ref)


def test_what_training_refuses(finished, tmp_path):
    """One layer id, the weights, the tokenizer, the template or its variables changed after extraction: both sides are shown."""
    dataset = FeatureDataset(finished.features.dir)
    target = Path(finished.target.path)

    def refused(path: Path, shown: str, layer_ids=(1, 3), template_kwargs=None) -> None:
        current = contract_for(TargetConfig(path=str(path)), list(layer_ids), True, template_kwargs or {})
        with pytest.raises(UserError, match=shown):
            dataset.contract.require_equal(current, "the features", "this run")

    dataset.contract.require_equal(contract_for(TargetConfig(path=str(target)), [1, 3], True, {}), "the features", "this run")
    refused(target, r"layer_ids: \[1, 3\] != \[1, 4\]", layer_ids=(1, 4))
    refused(target, "template_kwargs", template_kwargs={"enable_thinking": True})
    refused(tiny_models.make_qwen3(tmp_path / "weights", seed=1), r"target.weights.model.safetensors: \w+ != \w+")
    shutil.copytree(target, tmp_path / "template")
    tiny_models.make_tokenizer(tmp_path / "template", template="think.jinja")
    refused(tmp_path / "template", r"tokenizer.chat_template: \w+ != \w+")
    shutil.copytree(target, tmp_path / "tokenizer")
    tiny_models.make_tokenizer(tmp_path / "tokenizer", pad_token="<|im_start|>")
    refused(tmp_path / "tokenizer", r"tokenizer.tokenizer: \w+ != \w+")
