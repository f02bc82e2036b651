"""Reading a dataset: what is there, in which order, from which thread and process, whose memory it is, and what is refused."""

import json
import multiprocessing
import os
import pickle
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from tiny_datasets import extract_config, make_samples

from dflash_train.config import Config, TargetConfig
from dflash_train.errors import UserError
from dflash_train.features import reader
from dflash_train.features.codec import Codec, codec_named
from dflash_train.features.reader import EncodedFeatures, FeatureDataset, SampleRef
from dflash_train.features.shard import DamagedShardError, read_header
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


def stored(dataset: FeatureDataset, ref: SampleRef, name: str) -> torch.Tensor:
    """A sample's rows as the safetensors package reads them."""
    return load_file(dataset.folder / ref.shard)[name][ref.row : ref.row + ref.num_tokens]


def all_refs(dataset: FeatureDataset) -> list[SampleRef]:
    """Every sample, in an order that jumps between the shards."""
    refs = dataset.refs("train") + dataset.refs("heldout")
    return [refs[i * 7 % len(refs)] for i in range(len(refs))]


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


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "cpu"), (torch.float32, "meta")])
def test_dtype_and_device_are_those_asked_for(finished, dtype, device):
    dataset = FeatureDataset(finished.features.dir)
    ref = dataset.refs("train")[3]
    sample = dataset.read(ref, dtype, device)
    for tensor, name in ((sample.features_TLD, "features"), (sample.teacher_state_TD, "teacher_state")):
        assert (tensor.dtype, tensor.device.type, tensor.shape[0]) == (dtype, device, ref.num_tokens)
        assert device == "meta" or torch.equal(tensor, stored(dataset, ref, name).to(dtype))
    assert sample.input_ids_T.device.type == sample.loss_mask_T.device.type == "cpu"


def test_a_loss_mask_alone_is_that_of_the_sample(finished):
    dataset = FeatureDataset(finished.features.dir)
    for ref in all_refs(dataset)[:5]:
        assert torch.equal(dataset.read_loss_mask(ref), dataset.read(ref).loss_mask_T)


def test_samples_of_several_shards_stand_behind_one_another(finished):
    dataset = FeatureDataset(finished.features.dir)
    refs = all_refs(dataset)
    assert len({ref.shard for ref in refs}) > 2
    encoded = dataset.read_encoded(refs)
    assert torch.equal(encoded.input_ids_T, torch.cat([stored(dataset, ref, "input_ids").long() for ref in refs]))
    assert torch.equal(encoded.loss_mask_T, torch.cat([stored(dataset, ref, "loss_mask").bool() for ref in refs]))
    assert torch.equal(encoded.features.decode(), torch.cat([stored(dataset, ref, "features") for ref in refs]))
    assert encoded.teacher_state_TD is None
    states_TD = dataset.read_encoded(refs, teacher_state=True).teacher_state_TD
    assert torch.equal(states_TD, torch.cat([stored(dataset, ref, "teacher_state") for ref in refs]))


def test_no_samples_at_all(finished):
    encoded = FeatureDataset(finished.features.dir).read_encoded([])
    assert (encoded.input_ids_T.dtype, encoded.loss_mask_T.dtype) == (torch.int64, torch.bool)
    assert encoded.input_ids_T.shape == encoded.loss_mask_T.shape == (0,) and encoded.features.decode().shape == (0, 2, 32)


@pytest.mark.parametrize("codec", map(codec_named, ("bf16", "fp8")), ids=lambda codec: codec.name)
def test_features_cross_to_a_device_as_they_are_stored(codec: Codec):
    features_TLD = torch.arange(24.0).view(3, 2, 4)
    encoded = EncodedFeatures(codec, codec.encode(features_TLD))
    there = encoded.to("meta")
    layout = {name: (dtype, (3, *shape)) for name, (dtype, shape) in codec.token_layout(2, 4).items()}
    assert {name: (array.dtype, array.shape) for name, array in there.arrays.items()} == layout
    assert all(array.device.type == "meta" for array in there.arrays.values())
    torch.testing.assert_close(encoded.decode(torch.float32), features_TLD, rtol=codec.spacing, atol=0)
    assert encoded.decode().dtype == torch.bfloat16


def test_every_sample_that_is_held_keeps_its_values(finished):
    """Each kept in another way: the sample, one view of its features, what autograd keeps of them."""
    dataset = FeatureDataset(finished.features.dir)
    refs = all_refs(dataset)
    wholes = [dataset.read(ref) for ref in refs]
    rows = [dataset.read(ref).features_TLD[2:4] for ref in refs]
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    sums = [(dataset.read(ref).features_TLD.flatten() * weight).sum() for ref in refs]
    for ref, whole, row, sum_ in zip(refs, wholes, rows, sums, strict=True):
        features_TLD = stored(dataset, ref, "features")
        assert torch.equal(whole.features_TLD, features_TLD) and torch.equal(row, features_TLD[2:4])
        assert torch.equal(whole.teacher_state_TD, stored(dataset, ref, "teacher_state"))
        (gradient,) = torch.autograd.grad(sum_, weight)
        torch.testing.assert_close(gradient, features_TLD.float().sum().bfloat16()[None], rtol=2**-7, atol=0.1)


def faults_of_filling(buffers) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers.take((10, 4_000_000), torch.uint8, pin_memory=False).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_is_touched_for_the_first_time_once():
    buffers = reader._Buffers()
    faults_of_filling(buffers)
    assert faults_of_filling(buffers) < 1000  # of 9766 pages


def test_memory_that_a_tensor_holds_is_not_lent_again():
    buffers = reader._Buffers()
    first = buffers.take((2, 64), torch.bfloat16, pin_memory=False)
    address, row = first.data_ptr(), first[1]
    second = buffers.take((2, 64), torch.bfloat16, pin_memory=False)
    assert second.data_ptr() != address
    del first
    assert buffers.take((2, 64), torch.bfloat16, pin_memory=False).data_ptr() != address
    del row
    assert buffers.take((128,), torch.bfloat16, pin_memory=False).data_ptr() == address


def test_little_memory_is_kept_for_later():
    buffers = reader._Buffers()
    held = [buffers.take((1000,), torch.uint8, pin_memory=False) for _ in range(20)]
    del held
    assert sum(map(len, buffers._free.values())) == reader._FREE_BUFFERS


def test_threads_read_at_the_same_time(finished, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_OPEN_FILES", 1)
    dataset = FeatureDataset(finished.features.dir)
    refs = all_refs(dataset) * 5
    with ThreadPoolExecutor(4) as executor:
        samples = list(executor.map(dataset.read, refs))
    expected = {ref: stored(dataset, ref, "features") for ref in all_refs(dataset)}
    assert all(torch.equal(sample.features_TLD, expected[ref]) for ref, sample in zip(refs, samples, strict=True))


def test_a_file_is_not_closed_while_it_is_read(finished, monkeypatch):
    """Between opening a file and reading it, samples of other shards are read, which puts it out of the cache."""
    monkeypatch.setattr(reader, "_MAX_OPEN_FILES", 1)
    dataset = FeatureDataset(finished.features.dir)
    others = [ref for ref in dataset.refs("train") if ref.shard != dataset.refs("train")[0].shard]
    read_rows = reader.read_rows

    def interrupted(*args):
        monkeypatch.setattr(reader, "read_rows", read_rows)
        for ref in others:
            dataset.read(ref)
        return read_rows(*args)

    monkeypatch.setattr(reader, "read_rows", interrupted)
    ref = dataset.refs("train")[0]
    assert torch.equal(dataset.read(ref).input_ids_T, stored(dataset, ref, "input_ids").long())


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
        (
            lambda m: m["shards"][0].update(num_tokens=7),
            r"does not hold what manifest.json says: input_ids is \[\d+\] in torch.int32, not \[7\]",
        ),
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


@pytest.mark.parametrize(("index", "change"), [(0, 1), (1, -1_000), (1, 1_000), (2, 0), (-1, -1)])
def test_offsets_that_do_not_cut_the_tokens(folder, index, change):
    """Not from 0, falling, beyond the end, a sample without tokens (offset 2 becomes offset 1), and tokens left over."""
    path = folder / "shard-00001.safetensors"
    offsets = load_file(path)["offsets"]
    offsets[index] = offsets[index] + change if change else offsets[index - 1]
    with path.open("r+b") as file:
        file.seek(read_header(path).arrays["offsets"].start)
        file.write(offsets.numpy().tobytes())
    with pytest.raises(DamagedShardError, match=r"shard-00001.safetensors is damaged: its offsets do not cut \d+ tokens into samples"):
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
