import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    EOS_ID,
    NUM_EMBEDDING_ROWS,
    SMALL,
    make_gemma3,
    make_llama,
    make_mistral3_wrapper,
    make_model,
    make_qwen3,
    make_qwen35_wrapper,
    make_tokenizer,
)
from torch import nn
from transformers import (
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from dflash_train.config import Dtype, TargetConfig
from dflash_train.errors import UserError
from dflash_train.target import (
    contract_for,
    eos_token_ids,
    load_config,
    load_ends,
    load_target,
    load_teacher_head,
    load_tokenizer,
    special_token_ids,
    target_dir,
    target_identity,
    text_config,
    tokenizer_identity,
)

CASES = Path(__file__).parent / "data" / "cases"
CPU = torch.device("cpu")
MAKERS = {"qwen3": make_qwen3, "llama": make_llama, "gemma3": make_gemma3, "qwen35_wrapper": make_qwen35_wrapper}


SCALED = {  # families that rescale their logits, each in its own way, or have a head with a bias
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "phi": (PhiForCausalLM, PhiConfig, {}),
}


def make_scaled(folder: Path, name: str) -> Path:
    model_class, config_class, scaling = SCALED[name]
    make_model(folder, model_class, config_class(**SMALL | scaling), "plain.jinja", 0)
    if name == "phi":
        edit_weights(folder, lambda tensors: tensors | {"lm_head.bias": torch.linspace(-2, 2, NUM_EMBEDDING_ROWS)})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture
def copy(folders, tmp_path):
    """A target of one's own, to damage."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


def settings(path: Path | str, **fields) -> TargetConfig:
    return TargetConfig(path=str(path), **fields)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, edit) -> None:
    """`edit` changes the tensors in place or returns other ones."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edited = edit(tensors)
    save_file(tensors if edited is None else edited, path, metadata={"format": "pt"})


# --- configs ---


@pytest.mark.parametrize(("name", "expect"), json.loads((CASES / "C05.json").read_text())["expect"].items())
def test_sizes_come_from_the_language_model(name, expect):
    target = settings(CASES / "C05_configs" / name)
    config = load_config(target)
    text = text_config(config)
    assert (text.num_hidden_layers, text.hidden_size, text.vocab_size) == tuple(
        expect[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    assert config.tie_word_embeddings == text.tie_word_embeddings == expect["tie"]
    rope = text.rope_parameters
    if isinstance(expect.get("rope_theta"), dict):
        assert {kind: rope[kind]["rope_theta"] for kind in rope} == expect["rope_theta"]
    elif "rope_theta" in expect:
        assert rope["rope_theta"] == expect["rope_theta"]
    for kind in ("full", "linear", "sliding"):
        if f"{kind}_attention_layers" in expect:
            assert text.layer_types.count(f"{kind}_attention") == expect[f"{kind}_attention_layers"]
    if "eos" in expect:
        assert eos_token_ids(target, config) == set(expect["eos"])


def test_eos_of_generation_config_comes_first(copy):
    folder = copy("qwen3")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    assert eos_token_ids(settings(folder), load_config(settings(folder))) == {256, 258}
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(settings(folder), load_config(settings(folder))) == {EOS_ID}


@pytest.mark.parametrize("model_type", ["deepseek_v4", "glm5_next", "gemma3n"])
def test_hyper_connection_targets_are_refused_by_name(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UserError, match=f"{model_type}.*4 residual streams"):
        load_config(settings(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json"),
        ("{}", "model_type"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "qwen3", "num_hidden_layers": "six"}', "num_hidden_layers"),
        ('{"model_type": "t5"}', "encoder-decoder"),
    ],
)
def test_broken_configs_end_in_one_line(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_config(settings(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_targets_end_in_one_line(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_config(settings(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no config.json"):
        target_dir(settings(tmp_path))
    for read in (load_config, load_tokenizer, target_dir):
        with pytest.raises(UserError, match="target.path=no-such/model, which is no local folder"):
            read(settings("no-such/model"))


def test_a_hub_id_fetches_weights_json_and_tokenizer_only(folders, monkeypatch):
    asked = {}

    def snapshot(path, revision, allow_patterns):
        asked.update(path=path, revision=revision, patterns=allow_patterns)
        return str(folders["qwen3"])

    monkeypatch.setattr("dflash_train.target.snapshot_download", snapshot)
    assert target_dir(settings("some/model", revision="abc")) == folders["qwen3"]
    assert (asked["path"], asked["revision"]) == ("some/model", "abc")
    assert not any(fnmatch(name, pattern) for name in ("pytorch_model.bin", "modeling.py", "model.pt") for pattern in asked["patterns"])


# --- the whole model ---


@pytest.mark.parametrize("name", MAKERS)
def test_loads_and_finds_the_parts(folders, name):
    target = load_target(settings(folders[name]), CPU)
    assert len(target.layers) == target.text_config.num_hidden_layers
    assert type(target.final_norm).__name__.endswith("RMSNorm")
    assert target.device == CPU
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}
    assert hasattr(target.model.model, "visual") == (name == "qwen35_wrapper")


def test_dtype_of_the_settings(folders):
    target = load_target(settings(folders["qwen3"], dtype=Dtype.bfloat16), CPU)
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}


def test_a_missing_layer_weight_is_refused(copy):
    folder = copy("qwen35_wrapper")
    lost = "model.language_model.layers.2.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(UserError, match=f"lacks {lost}"):
        load_target(settings(folder), CPU)


def test_a_missing_vision_weight_is_not_the_language_models_business(copy):
    folder = copy("qwen35_wrapper")
    edit_weights(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if "visual.blocks.1" not in name})
    load_target(settings(folder), CPU)


def test_pickled_weights_are_never_read(copy):
    folder = copy("qwen3")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for load in (load_target, lambda target, device: load_ends(target, device, torch.float32)):
        with pytest.raises(UserError, match="holds neither model.safetensors"):
            load(settings(folder), CPU)


# --- embedding and head ---


@pytest.mark.parametrize("name", ["qwen3", "qwen35_wrapper", "llama"])
def test_ends_are_the_models_own(folders, name):
    model = load_target(settings(folders[name]), CPU).model
    ends = load_ends(settings(folders[name]), CPU, torch.float32)
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VD, model.get_output_embeddings().weight)
    assert ends.embedding_VD.shape == (NUM_EMBEDDING_ROWS, 32)  # the padded rows, not the 263 tokens
    assert (ends.head_VD is ends.embedding_VD) == (name == "llama")
    assert load_ends(settings(folders[name]), CPU, torch.bfloat16).head_VD.dtype == torch.bfloat16


def test_only_the_two_tensors_are_read(folders, monkeypatch):
    read = []
    import dflash_train.target as module

    original = module.read_tensor
    monkeypatch.setattr(module, "read_tensor", lambda stored, device: read.append(stored.name) or original(stored, device))
    load_ends(settings(folders["qwen35_wrapper"]), CPU, torch.float32)
    assert read == ["model.language_model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize("load", [load_target, lambda target, device: load_ends(target, device, torch.float32)], ids=["target", "ends"])
def test_a_missing_head_is_refused(copy, load):
    folder = copy("llama")  # tied: the file holds no head
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(UserError, match="lacks lm_head.weight"):
        load(settings(folder), CPU)


@pytest.mark.parametrize("load", [load_target, lambda target, device: load_ends(target, device, torch.float32)], ids=["target", "ends"])
def test_a_wrapper_tied_in_its_text_section_alone(tmp_path, load):
    folder = make_qwen35_wrapper(tmp_path, tie_word_embeddings=True)
    edit_config(folder, tie_word_embeddings=False)
    loaded = load(settings(folder), CPU)
    if hasattr(loaded, "model"):
        assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    else:
        assert loaded.head_VD is loaded.embedding_VD


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_missing_embedding_is_refused(copy, name):
    folder = copy(name)
    edit_weights(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name})
    with pytest.raises(UserError, match="lacks model.embed_tokens.weight"):
        load_ends(settings(folder), CPU, torch.float32)


def test_a_checkpoint_with_the_names_of_older_releases(tmp_path):
    folder = make_mistral3_wrapper(tmp_path)
    assert "language_model.model.embed_tokens.weight" in load_file(folder / "model.safetensors")
    ends, model = load_ends(settings(folder), CPU, torch.float32), load_target(settings(folder), CPU).model
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VD, model.get_output_embeddings().weight)


def test_a_checkpoint_without_the_prefix_of_its_model_class(copy, folders):
    folder = copy("qwen3")
    edit_weights(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    expected = load_ends(settings(folders["qwen3"]), CPU, torch.float32)
    assert torch.equal(load_ends(settings(folder), CPU, torch.float32).embedding_VD, expected.embedding_VD)


def test_a_head_tied_by_the_config_but_stored_is_the_stored_one(copy):
    folder = copy("qwen3")
    edit_config(folder, tie_word_embeddings=True)
    ends, model = load_ends(settings(folder), CPU, torch.float32), load_target(settings(folder), CPU).model
    assert not torch.equal(ends.head_VD, ends.embedding_VD)
    assert torch.equal(ends.head_VD, model.get_output_embeddings().weight)


def pack_head(tensors):
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight").to(torch.int32)


def quantise_head(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


def cut_head(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:263].clone()


@pytest.mark.parametrize(
    ("edit", "message"),
    [(pack_head, "packed form .lm_head.weight_packed"), (quantise_head, "F8_E4M3"), (cut_head, r"\[263, 32\].*\[320, 32\]")],
)
def test_heads_that_are_no_plain_matrix_are_refused(copy, edit, message):
    folder = copy("qwen3")
    edit_weights(folder, edit)
    with pytest.raises(UserError, match=message):
        load_ends(settings(folder), CPU, torch.float32)


def test_targets_that_rescale_are_refused_by_name(folders, copy, monkeypatch):
    with pytest.raises(UserError, match="gemma3_text.*Gemma3TextScaledWordEmbedding"):
        load_ends(settings(folders["gemma3"]), CPU, torch.float32)
    folder = copy("qwen3")
    edit_config(folder, logits_scaling=8.0)
    with pytest.raises(UserError, match="logits_scaling=8.0"):
        load_ends(settings(folder), CPU, torch.float32)


def test_a_head_with_a_bias_is_refused(folders, monkeypatch):
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "get_output_embeddings", lambda model: nn.Linear(32, 320, bias=True))
    with pytest.raises(UserError, match="head is Linear.*bias=True"):
        load_ends(settings(folders["qwen3"]), CPU, torch.float32)


# --- from a teacher state to logits ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*MAKERS, *SCALED])
def test_logits_of_a_teacher_state_without_the_whole_target(folders, tmp_path, name, dtype):
    folder = folders.get(name) or make_scaled(tmp_path, name)
    target = load_target(settings(folder, dtype=Dtype(str(dtype).removeprefix("torch."))), CPU)
    state_TD = 3 * torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = load_teacher_head(settings(folder), CPU, dtype)
    assert not any(parameter.requires_grad for parameter in head.norm.parameters())
    assert head.norm is not target.final_norm and head.normed(state_TD).dtype == dtype
    product_TV = head.normed(state_TD) @ target.model.get_output_embeddings().weight.T
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(head.rescale_(product_TV), target.logits(state_TD), **tolerance)


def test_a_teacher_head_reads_the_final_norm_alone(folders, monkeypatch):
    read = []
    monkeypatch.setattr("dflash_train.target.read_tensor", lambda stored, device: read.append(stored.name) or torch.ones(stored.shape))
    load_teacher_head(settings(folders["qwen3"]), CPU, torch.float32)
    assert read == ["model.norm.weight"]


def test_a_missing_final_norm_is_refused(copy):
    edit_weights(folder := copy("qwen3"), lambda tensors: {name: tensors[name] for name in tensors if name != "model.norm.weight"})
    with pytest.raises(UserError, match=r"lacks model\.norm\.weight$"):
        load_teacher_head(settings(folder), CPU, torch.float32)


# --- tokenizer ---


def test_a_missing_tokenizer_is_refused(copy):
    for name in ("qwen3", "gemma3"):  # transformers makes one up for both families
        folder = copy(name)
        for path in folder.glob("tokenizer*"):
            path.unlink()
        with pytest.raises(UserError, match="tokenizer"):
            load_tokenizer(settings(folder))


def test_special_token_ids(folders):
    target = settings(folders["qwen3"])
    assert special_token_ids(target, load_config(target), load_tokenizer(target)) == {"eos": {258}, "pad": {256}, "bos": frozenset()}


# --- identities ---


def nudge_one_weight(tensors):
    tensors["model.layers.5.mlp.up_proj.weight"][0, 0] += 1e-3


def test_identity_of_the_weights(copy):
    folder = copy("qwen3")
    before = target_identity(folder)
    assert before == target_identity(folder)
    edit_weights(folder, nudge_one_weight)
    after = target_identity(folder)
    assert [key for key in before if before[key] != after[key]] == ["weights"]


def test_identity_of_shapes_and_config(copy):
    folder = copy("qwen3")
    before = target_identity(folder)
    edit_config(folder, transformers_version="0.0.1")
    assert target_identity(folder) == before
    edit_config(folder, rms_norm_eps=1e-5, quantization_config={"quant_method": "fp8"})
    edit_weights(folder, lambda tensors: {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    after = target_identity(folder)
    assert [key for key in before if before[key] != after[key]] == ["config", "quantization", "tensors", "weights"]
    assert after["quantization"] == "fp8"


def test_identity_of_the_tokenizer(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    before = tokenizer_identity(tokenizer, {"enable_thinking": False})
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)  # changes the backend's state, not its identity
    assert tokenizer_identity(tokenizer, {"enable_thinking": False}) == before
    assert tokenizer_identity(tokenizer, {})["template_kwargs"] == {}
    tokenizer.chat_template += " "
    assert tokenizer_identity(tokenizer, {"enable_thinking": False})["chat_template"] != before["chat_template"]
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_identity(tokenizer, {"enable_thinking": False})["tokenizer"] != before["tokenizer"]


def test_contract_for_checks_the_ids_against_the_language_model(folders):
    contract = contract_for(settings(folders["qwen35_wrapper"]), [1, 3, 6], True, {})
    assert (contract.layer_ids.num_target_layers, contract.hidden_size, contract.teacher_state) == (8, 32, True)
    assert contract.target == target_identity(folders["qwen35_wrapper"])
    with pytest.raises(UserError, match="8 is not a layer of this target .0..7.*output of layer 7"):
        contract_for(settings(folders["qwen35_wrapper"]), [1, 3, 8], True, {})
