import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import SMALL, make_gemma3, make_llama, make_mistral3_wrapper, make_model, make_qwen3, make_qwen35_wrapper
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from dflash_train.capture import Capture, Recorder
from dflash_train.config import TargetConfig
from dflash_train.errors import UserError
from dflash_train.layers import LayerIds
from dflash_train.target import Target, load_target

CASES = Path(__file__).parent / "data" / "cases"
CPU = torch.device("cpu")
MAKERS = {
    "qwen3": make_qwen3,
    "llama": make_llama,
    "gemma3": make_gemma3,
    "qwen35_wrapper": make_qwen35_wrapper,
    "mistral3_wrapper": make_mistral3_wrapper,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def targets(folders) -> dict[str, Target]:
    return {name: load_target(TargetConfig(path=str(folder)), CPU) for name, folder in folders.items()}


def ids_of(target: Target, *ids: int) -> LayerIds:
    return LayerIds(ids, target.text_config.num_hidden_layers)


def batch(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows of random bytes."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return rows.masked_fill(~mask, 256), mask.long()


@torch.no_grad()
def hidden_states(target: Target, input_ids, attention_mask):
    return target.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("name", MAKERS)
def test_a_feature_is_the_output_of_its_layer(targets, name):
    case = json.loads((CASES / "C01.json").read_text())
    target, input_ids = targets[name], torch.tensor([case["input_ids"]])
    ids = ids_of(target, *case["target_layer_ids"])
    features = Capture(target, ids).run(input_ids, torch.ones_like(input_ids)).features_BTLD
    states = hidden_states(target, input_ids, torch.ones_like(input_ids))
    assert list(features.flatten(2).shape[1:]) == case["expect"]["feature_shape"]
    assert len(states) == target.text_config.num_hidden_layers + 1
    for plane, layer_id in enumerate(ids.ids):
        torch.testing.assert_close(features[:, :, plane], states[layer_id + 1], atol=case["expect"]["max_abs_diff"], rtol=0)
        assert (features[:, :, plane] - states[layer_id]).abs().max() > 1  # what an unshifted index would read


def test_a_wrapper_of_64_layers_gives_65_hidden_states(tmp_path):
    target = load_target(TargetConfig(path=str(make_qwen35_wrapper(tmp_path, num_hidden_layers=64))), CPU)
    input_ids, mask = batch(5)
    assert len(hidden_states(target, input_ids, mask)) == 65
    ids = ids_of(target, 1, 16, 31, 46, 61)
    Capture(target, ids).compare_with_hidden_states(input_ids, mask)
    assert Capture(target, ids).run(input_ids, mask).features_BTLD.shape == (1, 5, 5, 32)
    with pytest.raises(UserError, match="64 is not a layer.*another convention's name for the output of layer 63"):
        ids_of(target, 1, 16, 31, 46, 61, 64)


@pytest.mark.parametrize("name", MAKERS)
def test_padding_and_batch_mates_change_nothing(targets, name):
    capture = Capture(targets[name], ids_of(targets[name], 0, 4))
    input_ids, mask = batch(3, 9, 6)
    together = capture.run(input_ids, mask).features_BTLD
    for row, length in enumerate((3, 9, 6)):
        alone = capture.run(input_ids[row : row + 1, :length], mask[row : row + 1, :length]).features_BTLD
        torch.testing.assert_close(together[row, :length], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_start_up_comparison_accepts(targets, name):
    for dtype in ("float32", "bfloat16"):
        model = targets[name].model.to(getattr(torch, dtype))
        Capture(targets[name], ids_of(targets[name], 0, 2, 4), teacher_state=True).compare_with_hidden_states(*batch(4, 7))
        model.float()


def test_start_up_comparison_finds_a_shifted_layer(targets):
    target = targets["qwen3"]
    shifted = replace(target, layers=nn.ModuleList([*target.layers[1:], target.layers[0]]))
    with pytest.raises(UserError, match=r"layer 1 as the hooks see it is not hidden_states\[2\].*row 0, token 0 .11 of 11 tokens"):
        Capture(shifted, ids_of(target, 1, 3)).compare_with_hidden_states(*batch(4, 7))


def test_start_up_comparison_counts_the_hidden_states(targets):
    with pytest.raises(UserError, match="gives 7 hidden_states, expected 8"):
        Capture(targets["qwen3"], LayerIds((1, 3), 7)).compare_with_hidden_states(*batch(4))


def test_start_up_comparison_names_layer_row_and_token(targets, monkeypatch):
    put_layer = Recorder.put_layer

    def put_wrongly(self, plane, output):
        put_layer(self, plane, output)
        if plane == 1:
            self.features_BTLD[1, 5, plane, 0] += 1
            self.features_BTLD[0, 5, plane, 0] += 1  # padding, which nobody reads

    monkeypatch.setattr(Recorder, "put_layer", put_wrongly)
    with pytest.raises(UserError, match=r"layer 3 .*row 1, token 5 .1 of 11 tokens"):
        Capture(targets["qwen3"], ids_of(targets["qwen3"], 1, 3)).compare_with_hidden_states(*batch(4, 7))


def test_start_up_comparison_holds_the_teacher_state_to_the_last_hidden_state(targets):
    target = targets["qwen3"]
    wrong = replace(target, final_norm=target.layers[5].input_layernorm)
    with pytest.raises(UserError, match="teacher state .*the last hidden state"):
        Capture(wrong, ids_of(target, 1), teacher_state=True).compare_with_hidden_states(*batch(4))


@pytest.mark.parametrize("name", MAKERS)
def test_teacher_state_is_kept_apart_and_goes_through_the_targets_own_norm(targets, name):
    target, (input_ids, mask) = targets[name], batch(4, 7)
    ids = ids_of(target, 1, 3, 4)
    captured = Capture(target, ids, teacher_state=True).run(input_ids, mask)
    assert captured.features_BTLD.shape[2] == Capture(target, ids).run(input_ids, mask).features_BTLD.shape[2] == 3
    assert Capture(target, ids).run(input_ids, mask).teacher_state_BTD is None
    with torch.no_grad():
        logits = target.model.get_output_embeddings()(target.final_norm(captured.teacher_state_BTD))
        expected = target.model(input_ids=input_ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("teacher_state", "num_layers_run"), [(False, 4), (True, 6)])
def test_the_forward_stops_after_the_last_wanted_tensor(targets, teacher_state, num_layers_run):
    target, entered = targets["qwen3"], []
    head = target.model.get_output_embeddings()
    handles = [module.register_forward_pre_hook(lambda module, inputs: entered.append(module)) for module in (*target.layers, head)]
    Capture(target, ids_of(target, 1, 3), teacher_state).run(*batch(4))
    for handle in handles:
        handle.remove()
    assert entered == list(target.layers[:num_layers_run])


def test_hooks_are_gone_afterwards(targets):
    target = targets["qwen3"]
    before = [len(layer._forward_hooks) for layer in target.layers]
    capture = Capture(target, ids_of(target, 1, 3), teacher_state=True)
    capture.run(*batch(4))
    with pytest.raises(RuntimeError), capture.recording():
        raise RuntimeError
    assert [len(layer._forward_hooks) for layer in target.layers] == before
    assert not target.final_norm._forward_pre_hooks


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3"])
def test_recording_follows_a_cached_decode(targets, name):
    target, (input_ids, mask) = targets[name], batch(9)
    capture, cache = Capture(target, ids_of(target, 1, 4)), DynamicCache(config=target.text_config)
    whole = capture.run(input_ids, mask).features_BTLD
    with capture.recording() as recorder, torch.no_grad():
        for chunk in (slice(0, 6), slice(6, 9)):
            output = target.model(input_ids=input_ids[:, chunk], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(recorder.features_BTLD, whole[:, chunk], atol=1e-5, rtol=1e-5)
    assert output.logits.shape == (1, 3, 320)


def test_features_are_copies(targets):
    target = targets["qwen3"]
    capture = Capture(target, ids_of(target, 1, 3))
    expected = capture.run(*batch(4)).features_BTLD[:, :, 0].clone()

    def overwrite_input(module, inputs):
        inputs[0].zero_()

    handle = target.layers[2].register_forward_pre_hook(overwrite_input)
    features = capture.run(*batch(4)).features_BTLD
    handle.remove()
    assert torch.equal(features[:, :, 0], expected)
    assert not features.requires_grad


def test_recorder_takes_tuples_and_refuses_several_streams():
    recorder = Recorder([1, 3], device=CPU)
    recorder.put_layer(0, (torch.ones(1, 2, 3), None))
    recorder.put_layer(1, torch.full((1, 2, 3), 2.0))
    assert recorder.features_BTLD[0, 0].tolist() == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(UserError, match=r"layer 1 put out \[1, 2, 4, 3\] instead of"):
        recorder.put_layer(0, torch.ones(1, 2, 4, 3))
    for other in (torch.ones(1, 1, 3), torch.ones(1, 2, 3).half()):
        with pytest.raises(UserError, match=r"layer 3 put out .* in torch.float.*, layer 1 \[1, 2, 3\] in torch.float32"):
            recorder.put_layer(1, other)


@pytest.mark.parametrize("name", MAKERS)
def test_recomputing_gives_what_the_hooks_give(targets, name):
    target, (input_ids, mask) = targets[name], batch(7)
    ids = ids_of(target, 0, 3)
    captured = Capture(target, ids, teacher_state=True).run(input_ids, mask)
    recomputed = Capture(target, ids, teacher_state=True).recompute(input_ids[0])
    assert torch.equal(recomputed.features_TLD, captured.features_BTLD[0])
    assert torch.equal(recomputed.teacher.state_TD, captured.teacher_state_BTD[0])
    assert recomputed.teacher.logits_RV.shape == (7, 320) and recomputed.compute_dtype == torch.float32
    plain = Capture(target, ids).recompute(input_ids[0])
    assert plain.teacher is None
    torch.testing.assert_close(plain.features_TLD, recomputed.features_TLD)


SCALED = {  # families that rescale their logits, each in its own way
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("name", SCALED)
def test_log_probabilities_rebuilt_from_the_teacher_state(tmp_path, name):
    model_class, config_class, scaling = SCALED[name]
    target = load_target(TargetConfig(path=str(make_model(tmp_path, model_class, config_class(**SMALL | scaling), "plain.jinja", 0))), CPU)
    input_ids, mask = batch(9)
    state_TD = Capture(target, ids_of(target, 1), teacher_state=True).run(input_ids, mask).teacher_state_BTD[0]
    with torch.no_grad():
        expected = target.model(input_ids=input_ids).logits[0].log_softmax(-1)
    torch.testing.assert_close(target.logits(state_TD).log_softmax(-1), expected, atol=1e-5, rtol=1e-5)
    assert (target.model.get_output_embeddings()(target.final_norm(state_TD)).log_softmax(-1) - expected).abs().max() > 1e-2
    Capture(target, ids_of(target, 1), teacher_state=True).compare_with_hidden_states(input_ids, mask)


def test_start_up_comparison_finds_an_unknown_way_of_scaling_logits(targets, monkeypatch):
    target, genuine = targets["qwen3"], Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, state_TD: 1.1 * genuine(self, state_TD))
    with pytest.raises(UserError, match="logit scale and soft cap are not the model's own"):
        Capture(target, ids_of(target, 1), teacher_state=True).compare_with_hidden_states(*batch(4))
