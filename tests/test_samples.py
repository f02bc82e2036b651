"""The prepared samples on disk: splits, the digest that stands for them, and that a reader never sees half of them."""

import datasets
import pytest

from dflash_train import samples
from dflash_train.errors import UserError
from dflash_train.samples import COLUMNS, assign_splits, load_samples, prompt_hash, samples_digest, save_samples, write_rows

HALF = 2**63


def row(name: str, input_ids=(1, 2, 3), loss_mask=(False, True, True)) -> dict:
    return {"sample_id": name, "conversation_id": name, "input_ids": list(input_ids), "loss_mask": list(loss_mask)}


def make(tmp_path, *rows) -> datasets.Dataset:
    return write_rows(tmp_path / "rows.arrow", COLUMNS, rows)


def test_what_is_saved_is_loaded(tmp_path):
    save_samples(tmp_path, make(tmp_path, row("a"), row("b", (7,), (True,))), {"tokens": 4})
    prepared = load_samples(tmp_path)
    assert list(prepared.dataset) == [row("a"), row("b", (7,), (True,))]
    assert prepared.summary == {"tokens": 4, "digest": samples_digest(prepared.dataset)}


def test_saving_again_replaces_the_samples(tmp_path):
    for name in ("a", "b"):
        save_samples(tmp_path, make(tmp_path, row(name)), {})
    assert [sample["sample_id"] for sample in load_samples(tmp_path).dataset] == ["b"]


def test_a_save_that_is_interrupted_leaves_nothing_to_read(tmp_path, monkeypatch):
    save_samples(tmp_path, make(tmp_path, row("a")), {})
    monkeypatch.setattr(samples, "write_json", lambda path, value: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_samples(tmp_path, make(tmp_path, row("b")), {})
    with pytest.raises(UserError, match="summary.json is missing: run stage=prepare first"):
        load_samples(tmp_path)


def test_a_save_that_fails_early_leaves_the_earlier_samples(tmp_path, monkeypatch):
    save_samples(tmp_path, make(tmp_path, row("a")), {})
    monkeypatch.setattr(samples, "save_quietly", lambda dataset, folder: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="cannot write .*samples: No space left on device"):
        save_samples(tmp_path, make(tmp_path, row("b")), {})
    assert [sample["sample_id"] for sample in load_samples(tmp_path).dataset] == ["a"]


def test_the_digest_sees_every_change_but_not_the_chunks(tmp_path):
    rows = [row(f"s{i}", range(i + 1), [True] * (i + 1)) for i in range(5)]
    whole = make(tmp_path, *rows)
    digest = samples_digest(whole)
    halves = datasets.concatenate_datasets([whole.select(range(2)), whole.select(range(2, 5))])
    assert len(halves.data.column("input_ids").chunks) == 2
    assert samples_digest(halves) == digest
    changed = [
        [row("s0x"), *rows[1:]],
        [*rows[:4], row("s4", (0, 1, 2, 3, 5), [True] * 5)],
        [*rows[:4], row("s4", range(5), [True] * 4 + [False])],
        [*rows[:3], rows[4], rows[3]],
        [row("s0", (0, 0), (True, True)), row("s1", (1,), (True,)), *rows[2:]],  # the same ids, cut elsewhere
    ]
    assert len({digest, *(samples_digest(make(tmp_path, *other)) for other in changed)}) == 6


def test_the_share_is_held_out_by_hash():
    assert assign_splits([0, HALF - 1, HALF, HALF + 1], 0.5) == ["heldout", "heldout", "train", "train"]
    assert assign_splits([5, 9, 5], 0.0) == ["train"] * 3


def test_neither_side_stays_empty_when_there_are_two_prompts():
    assert assign_splits([HALF + 2, HALF + 1, HALF + 2], 0.1) == ["train", "heldout", "train"]
    assert assign_splits([1, 2, 1], 0.9) == ["heldout", "train", "heldout"]


def test_a_single_prompt_trains():
    assert assign_splits([1, 1], 0.9) == ["train"] * 2
    assert assign_splits([HALF, HALF], 0.1) == ["train"] * 2


def test_the_prompt_is_system_text_and_first_user_turn():
    def turns(*pairs):
        return [{"role": role, "content": text} for role, text in pairs]

    first = prompt_hash(turns(("user", "Hi"), ("assistant", "Hello."), ("user", "And?")), seed=0)
    assert first == prompt_hash(turns(("user", "Hi"), ("assistant", "Good day.")), seed=0)
    others = [turns(("user", "Hi!")), turns(("system", "Be brief."), ("user", "Hi"))]
    assert len({first, prompt_hash(others[0], 0), prompt_hash(others[1], 0), prompt_hash(turns(("user", "Hi")), seed=1)}) == 4


def test_missing_samples_name_the_path(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/summary.json is missing: run stage=prepare first"):
        load_samples(tmp_path)
