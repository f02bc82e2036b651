"""stage=prepare from files to samples: every row is accounted for, splits never share a prompt, a second run changes nothing."""

import json
from pathlib import Path

import pytest
from tiny_models import MASK_TOKEN_ID, make_qwen3, make_tokenizer

from dflash_train.config import Config, DataConfig, DrafterConfig, Dtype, FeaturesConfig, RegenerateConfig, Stage, TargetConfig
from dflash_train.errors import UserError
from dflash_train.samples import load_samples
from dflash_train.stages import prepare, regenerate

CASES = Path(__file__).parent.parent / "data" / "cases"


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("target") / "qwen3")


@pytest.fixture
def make_config(target_path, tmp_path):
    def make(*files, target=target_path, mask_token_id=MASK_TOKEN_ID, layer_ids=(1, 3, 4), **data) -> Config:
        return Config(
            stage=Stage.prepare,
            run_dir=str(tmp_path / "run"),
            target=TargetConfig(path=str(target), dtype=Dtype.float32),
            data=DataConfig(files=[str(file) for file in files], **{"heldout_share": 0.0} | data),
            features=FeaturesConfig(layer_ids=list(layer_ids)),
            drafter=DrafterConfig(mask_token_id=mask_token_id),
        )

    return make


def prepared(config: Config):
    prepare.run(config)
    return load_samples(Path(config.run_dir) / "prepare")


def rejected(config: Config) -> list[dict]:
    return [json.loads(line) for line in (Path(config.run_dir) / "prepare" / "rejected.jsonl").read_text().splitlines()]


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question: str, answer: str, **columns) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **columns}


def test_every_row_is_kept_or_listed(make_config):
    config = make_config(CASES / "C13.jsonl", CASES / "C16_broken.jsonl")
    samples = prepared(config)
    names = samples.dataset["sample_id"][:]
    assert names == ["h2", "h5", "h6", "h7", "h8", "b0", "b1", "b5", "b7"]
    listed = rejected(config)
    assert len(names) + len(listed) == samples.summary["rows"]["read"] == 13 + 8
    assert all(row["reason"] for row in listed)
    counts = samples.summary["rows"]
    assert (counts["kept"], counts["folded"], counts["rejected"]) == (9, 0, 12)
    assert sum(counts["rejected_by_reason"].values()) == 12
    ids = dict(zip(names, samples.dataset["input_ids"][:], strict=True))
    mask = dict(zip(names, samples.dataset["loss_mask"][:], strict=True))
    assert sum(mask["b0"]) == 10 + 1  # "café 🙂" is 10 bytes, then the stop token
    assert len(ids["h6"]) == len(ids["h5"]) + len("<system\nBe brief.>\n")  # one token for each of < and >


def test_the_summary_counts_by_hand(make_config, tmp_path):
    # 21 tokens are not text: 1+5+1+1 around the question, 1+10 of the assistant's header, 1+1 behind the answer
    file = write(tmp_path / "chats.jsonl", chat("Hi", "Oak."), chat("Hi", "Oak.", id="a"), chat("Hi", "Oak.", id="a"), chat("Why", "Elm"))
    summary = prepared(make_config(file)).summary
    assert summary["rows"] == {"read": 4, "kept": 3, "folded": 1, "rejected": 0, "rejected_by_reason": {}}
    assert (summary["samples"], summary["tokens"], summary["supervised_tokens"]) == (3, 27 + 27 + 27, 5 + 5 + 4)
    assert summary["splits"]["train"] == {"conversations": 3, "samples": 3, "tokens": 81, "supervised_tokens": 14}
    assert summary["splits"]["heldout"]["samples"] == 0
    assert summary["length_percentiles"] == {"0": 27, "50": 27, "90": 27, "99": 27, "100": 27}
    assert summary["answers_from_target"] == "unknown"


def test_long_samples_are_cut_while_a_pair_remains(make_config, tmp_path):
    # 19 tokens that are not text and "Hi" stand before "Oak.", so 23 tokens keep one pair and 22 keep none
    file = write(tmp_path / "chats.jsonl", chat("Hi", "Oak.", id="a"))
    samples = prepared(make_config(file, max_tokens=23))
    assert samples.dataset["loss_mask"][0] == [False] * 21 + [True] * 2
    assert samples.summary["cut"] == 1
    config = make_config(file, max_tokens=22)
    with pytest.raises(UserError, match="data.files: no usable row; .*too long: supervision begins after data.max_tokens=22"):
        prepare.run(config)
    assert [row["id"] for row in rejected(config)] == ["a"]
    assert len(load_samples(Path(config.run_dir) / "prepare").dataset) == 1  # the earlier samples are untouched


def test_samples_of_single_turns_share_their_conversation(tmp_path, make_config):
    target = make_qwen3(tmp_path / "think", template="think.jinja")
    dataset = prepared(make_config(CASES / "C11.jsonl", target=target)).dataset
    (conversation,) = set(dataset["conversation_id"][:])
    assert dataset["sample_id"][:] == [f"{conversation}#turn2", f"{conversation}#turn4"]
    assert [len(ids) for ids in dataset["input_ids"][:]] == [48, 79]
    summary = prepared(make_config(CASES / "C11.jsonl", target=target, max_tokens=50)).summary
    assert (summary["samples"], summary["turns_left_out"], summary["rows"]["kept"]) == (1, 1, 1)


def test_no_prompt_is_on_both_sides(make_config, tmp_path):
    rows = [chat(f"Question {i % 20}?", f"Answer {i}.") for i in range(100)]
    dataset = prepared(make_config(write(tmp_path / "chats.jsonl", *rows), heldout_share=0.3)).dataset
    splits = dict(zip([row["messages"][0]["content"] for row in rows], dataset["split"][:], strict=True))
    assert [splits[row["messages"][0]["content"]] for row in rows] == dataset["split"][:]
    assert set(splits.values()) == {"train", "heldout"}


def test_a_second_run_writes_the_same_samples(make_config):
    config = make_config(CASES / "C13.jsonl", heldout_share=0.5)
    first = prepared(config)
    rows, digest = list(first.dataset), first.summary["digest"]
    second = prepared(config)
    assert list(second.dataset) == rows
    assert second.summary["digest"] == digest
    assert {path.name for path in (Path(config.run_dir) / "prepare").iterdir()} == {
        "samples",
        "summary.json",
        "rejected.jsonl",
        "config.yaml",
        "versions.json",
    }


def test_strict_stops_and_writes_no_samples(make_config):
    config = make_config(CASES / "C16_broken.jsonl", strict=True)
    with pytest.raises(UserError, match="C16_broken.jsonl line 4: not JSON"):
        prepare.run(config)
    assert not (Path(config.run_dir) / "prepare" / "samples").exists()


@pytest.mark.parametrize(
    ("mask_token_id", "why"),
    [(320, "outside the target's embedding rows 0..319"), (256, "pad token"), (258, "eos token"), (257, "occurs in the data")],
)
def test_the_mask_token_must_be_unused(mask_token_id, why, make_config):
    with pytest.raises(UserError, match=f"drafter.mask_token_id={mask_token_id} .*{why}; unused ids are for example"):
        prepare.run(make_config(CASES / "C10.jsonl", mask_token_id=mask_token_id))


def test_missing_data_is_named(make_config, tmp_path):
    with pytest.raises(UserError, match="data.files is empty and .*regenerate/answers.jsonl does not exist"):
        prepare.run(make_config())
    with pytest.raises(UserError, match="data.files: .*nowhere.jsonl does not exist"):
        prepare.run(make_config(tmp_path / "nowhere.jsonl"))
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="data.files: no usable row; there are no rows in it"):
        prepare.run(make_config(empty))


def test_the_preview_marks_what_is_learned(make_config, capsys):
    prepare.run(make_config(CASES / "C10.jsonl", preview=1))
    shown = capsys.readouterr().out
    assert "⟦Blue.<|im_end|>⟧" in shown
    assert "⟦Green.<|im_end|>⟧" in shown


@pytest.fixture(scope="module")
def answers_path(target_path, tmp_path_factory) -> Path:
    """Answers that `target_path` wrote."""
    run_dir = tmp_path_factory.mktemp("answers")
    prompts = write(run_dir / "prompts.jsonl", {"id": "a", "prompt": "Hi"}, {"id": "b", "prompt": "Why?"})
    regenerate.run(
        Config(
            run_dir=str(run_dir),
            target=TargetConfig(path=str(target_path), dtype=Dtype.float32),
            regenerate=RegenerateConfig(prompts=[str(prompts)], max_new_tokens=8),
            features=FeaturesConfig(layer_ids=[1, 3, 4]),
            drafter=DrafterConfig(mask_token_id=MASK_TOKEN_ID),
        )
    )
    return run_dir / "regenerate" / "answers.jsonl"


def test_answers_keep_their_ids_and_say_who_wrote_them(answers_path, make_config, tmp_path):
    rows = [json.loads(line) for line in answers_path.read_text().splitlines()]
    samples = prepared(make_config(answers_path))
    assert samples.dataset["input_ids"][:] == [row["prompt_ids"] + row["answer_ids"] for row in rows]
    assert samples.dataset["loss_mask"][:] == [[False] * len(row["prompt_ids"]) + [True] * len(row["answer_ids"]) for row in rows]
    assert samples.summary["answers_from_target"] == "true"
    mixed = prepared(make_config(answers_path, CASES / "C10.jsonl"))
    assert mixed.summary["answers_from_target"] == "unknown"
    other = make_qwen3(tmp_path / "other", seed=1)
    assert prepared(make_config(answers_path, target=other)).summary["answers_from_target"] == "false"


def test_answers_of_another_template_are_rejected(answers_path, make_config, tmp_path):
    other = make_qwen3(tmp_path / "other")
    text = (Path(__file__).parent.parent / "data" / "templates" / "plain.jinja").read_text()
    make_tokenizer(other, chat_template=text.replace("assistant\n", "model\n"))
    with pytest.raises(UserError, match="all 2 rejected, .*template or tokenizer differ from the ones that wrote the answer"):
        prepare.run(make_config(answers_path, target=other))


def test_an_answer_with_ids_the_target_lacks_is_rejected(answers_path, make_config, tmp_path):
    rows = [json.loads(line) for line in answers_path.read_text().splitlines()]
    rows[0]["answer_ids"][0] = 320
    config = make_config(write(tmp_path / "answers.jsonl", *rows))
    assert prepared(config).dataset["conversation_id"][:] == ["b"]
    assert rejected(config)[0]["reason"] == "not a token of the target: id 320, its embedding has 320 rows"


def test_a_layer_the_target_lacks_is_told_before_any_work(make_config, tmp_path):
    config = make_config(write(tmp_path / "chats.jsonl", chat("Hi", "Hello.")), layer_ids=(1, 6))
    with pytest.raises(UserError, match=r"6 is not a layer of this target \(0..5\).* output of layer 5"):
        prepare.run(config)
    assert not (Path(config.run_dir) / "prepare" / "samples").exists()
