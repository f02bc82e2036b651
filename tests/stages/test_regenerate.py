"""stage=regenerate: the target's own greedy answers, whatever the batch, the launch or the moment it was killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import EOS_ID, MASK_TOKEN_ID, make_qwen3, make_qwen35_wrapper
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from dflash_train.config import Config, DataConfig, DrafterConfig, Dtype, FeaturesConfig, RegenerateConfig, Stage, TargetConfig
from dflash_train.errors import UserError
from dflash_train.stages import regenerate

ROOT = Path(__file__).parents[2]
QUESTIONS = ["Name a tree.", "Two plus two?", "Hi", "Name a colour that the sky has in the evening.", "Why?"]
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> Path:
    path = make_qwen3(tmp_path_factory.mktemp("target") / "qwen3")
    sampling = GenerationConfig(
        eos_token_id=EOS_ID, pad_token_id=256, do_sample=True, temperature=2.0, repetition_penalty=5.0, min_length=40
    )
    sampling.save_pretrained(path)
    return path


@pytest.fixture
def prompts_path(tmp_path) -> Path:
    rows = [{"id": f"q{i}", "prompt": question} for i, question in enumerate(QUESTIONS)]
    return _write(tmp_path / "prompts.jsonl", rows)


def make_config(target: Path, prompts: Path, run_dir: Path, max_tokens: int = 4096, **settings) -> Config:
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "sequences_per_forward": 2} | settings
    return Config(
        stage=Stage.regenerate,
        run_dir=str(run_dir),
        target=TargetConfig(path=str(target), dtype=Dtype.float32),
        data=DataConfig(max_tokens=max_tokens),
        regenerate=RegenerateConfig(prompts=[str(prompts)], **settings),
        features=FeaturesConfig(layer_ids=[1, 3, 4]),
        drafter=DrafterConfig(mask_token_id=MASK_TOKEN_ID),
    )


def answers(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "regenerate" / "answers.jsonl").read_text().splitlines()]


def _write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@torch.no_grad()
def greedy(model, prompt_ids: list[int], stops: set[int]) -> list[int]:
    """Plain greedy decoding, one sequence, no cache: the oracle."""
    ids = list(prompt_ids)
    for _ in range(MAX_NEW_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt_ids) :]


def test_the_answers_are_plain_greedy_decoding_in_the_order_of_the_prompts(target_path, prompts_path, tmp_path):
    regenerate.run(make_config(target_path, prompts_path, tmp_path / "run"))
    model = AutoModelForCausalLM.from_pretrained(target_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    rows = answers(tmp_path / "run")
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(len(QUESTIONS))]
    for row, question in zip(rows, QUESTIONS, strict=True):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert row["messages"] == [{"role": "user", "content": question}]
        assert row["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row["answer_ids"] == greedy(model, row["prompt_ids"], {EOS_ID})
        assert row["answer"] == tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
        assert row["finish"] == ("stop" if row["answer_ids"][-1] == EOS_ID else "length")


def test_a_stop_token_ends_the_answer_and_stays_in_it(target_path, prompts_path, tmp_path):
    regenerate.run(make_config(target_path, prompts_path, tmp_path / "free"))
    free = answers(tmp_path / "free")[0]["answer_ids"]
    stop = free[3]
    stopping = make_qwen3(tmp_path / "stopping")
    GenerationConfig(eos_token_id=[EOS_ID, stop], pad_token_id=256).save_pretrained(stopping)
    regenerate.run(make_config(stopping, prompts_path, tmp_path / "run"))
    row = answers(tmp_path / "run")[0]
    assert row["answer_ids"] == free[: free.index(stop) + 1]
    assert row["finish"] == "stop"


def test_a_hybrid_wrapper_answers_the_same_in_a_padded_batch(prompts_path, tmp_path):
    path = make_qwen35_wrapper(tmp_path / "hybrid")
    regenerate.run(make_config(path, prompts_path, tmp_path / "run", sequences_per_forward=5))
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    for row in answers(tmp_path / "run"):
        assert row["answer_ids"] == greedy(model, row["prompt_ids"], {EOS_ID})


def test_a_killed_run_computes_only_what_is_missing(target_path, prompts_path, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    config = make_config(target_path, prompts_path, run_dir)
    regenerate.run(config)
    whole = (run_dir / "regenerate" / "answers.jsonl").read_bytes()
    (run_dir / "regenerate" / "answers.jsonl").unlink()
    regenerate.part_path(run_dir / "regenerate", 1).unlink()
    batches = []
    answer = regenerate.Answerer.answer
    monkeypatch.setattr(regenerate.Answerer, "answer", lambda self, prompts: batches.append(len(prompts)) or answer(self, prompts))
    regenerate.run(config)
    assert batches == [2]
    assert (run_dir / "regenerate" / "answers.jsonl").read_bytes() == whole
    monkeypatch.setattr(regenerate, "load_target", None)  # the third run loads no target
    regenerate.run(config)
    assert batches == [2]


def test_two_processes_write_the_answers_of_one(target_path, prompts_path, tmp_path):
    regenerate.run(make_config(target_path, prompts_path, tmp_path / "one"))
    settings = [f"run_dir={tmp_path}/two", f"target.path={target_path}", "target.dtype=float32", f"regenerate.prompts=[{prompts_path}]"]
    settings += [f"regenerate.max_new_tokens={MAX_NEW_TOKENS}", "regenerate.sequences_per_forward=2"]
    settings += ["features.layer_ids=[1,3,4]", f"drafter.mask_token_id={MASK_TOKEN_ID}"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launched = subprocess.run([*launch, "-m", "dflash_train", "stage=regenerate", *settings], cwd=ROOT, capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr
    one, two = (tmp_path / run / "regenerate" / "answers.jsonl" for run in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_parts_of_other_settings_are_refused(target_path, prompts_path, tmp_path):
    regenerate.run(make_config(target_path, prompts_path, tmp_path / "run"))
    recorded = (tmp_path / "run" / "regenerate" / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="another `max_new_tokens` .12 there, 6 now.: choose another run_dir"):
        regenerate.run(make_config(target_path, prompts_path, tmp_path / "run", max_new_tokens=6))
    with pytest.raises(UserError, match="another `target`"):
        regenerate.run(make_config(make_qwen3(tmp_path / "other", seed=1), prompts_path, tmp_path / "run"))
    _write(prompts_path, [{"id": "q0", "prompt": "Something else?"}])
    with pytest.raises(UserError, match="another `prompts`"):
        regenerate.run(make_config(target_path, prompts_path, tmp_path / "run"))
    assert (tmp_path / "run" / "regenerate" / "config.yaml").read_bytes() == recorded


def test_bad_prompts_are_listed_and_the_rest_is_answered(target_path, tmp_path):
    rows = [
        {"id": "long", "prompt": "x" * 200},
        {"id": "none", "question": "Why?"},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    ]
    config = make_config(target_path, _write(tmp_path / "prompts.jsonl", rows), tmp_path / "run", max_tokens=100)
    regenerate.run(config)
    rejected = [json.loads(line) for line in (tmp_path / "run" / "regenerate" / "rejected.jsonl").read_text().splitlines()]
    # 219 tokens: 200 of the text, 1+5+1+1 around it (start, "user\n", end, newline) and 1+10 of the assistant header
    assert [(row["id"], row["line"]) for row in rejected] == [("long", 1), ("none", 2)]
    assert rejected[0]["reason"] == "prompt too long: 219 tokens, data.max_tokens=100 leaves room for 99"
    assert [row["messages"] for row in answers(tmp_path / "run")] == [[{"role": "user", "content": "Hi"}]]


def test_no_prompts_is_one_line(target_path, tmp_path):
    with pytest.raises(UserError, match="regenerate.prompts is empty"):
        regenerate.run(Config(run_dir=str(tmp_path), target=TargetConfig(path=str(target_path))))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match="regenerate.prompts: no usable row; there are no rows"):
        regenerate.run(make_config(target_path, empty, tmp_path / "run"))


def test_out_of_memory_names_the_setting_which_may_then_change(target_path, prompts_path, tmp_path, monkeypatch):
    def generate(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr("transformers.GenerationMixin.generate", generate)
        with pytest.raises(UserError, match="smaller regenerate.sequences_per_forward"):
            regenerate.run(make_config(target_path, prompts_path, tmp_path / "run", sequences_per_forward=4))
    regenerate.run(make_config(target_path, prompts_path, tmp_path / "run", sequences_per_forward=1))
    assert len(answers(tmp_path / "run")) == len(QUESTIONS)


def test_layers_and_mask_of_later_stages_are_checked_before_answering(target_path, prompts_path, tmp_path):
    config = make_config(target_path, prompts_path, tmp_path / "run")
    config.features.layer_ids = [1, 5]
    with pytest.raises(UserError, match="5 is the last layer"):
        regenerate.run(config)
