"""Our drafter, exported, against z-lab's own package (dflash 0.1.0): hidden states, drafted tokens, generated text."""

import time
from itertools import accumulate

import pytest
import tiny_models
import torch
from dflash.model import DFlashDraftModel as ZlabDrafter
from dflash.model import dflash_generate, extract_context_feature
from transformers import AutoModelForCausalLM

from dflash_train.blocks import build_blocks
from dflash_train.capture import Capture
from dflash_train.config import DrafterConfig, TargetConfig
from dflash_train.decoding import speculative
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.layers import FeatureContract, LayerIds
from dflash_train.serving.zlab import write_drafter
from dflash_train.target import load_ends, load_target, text_config

FULL, SLIDING = "full_attention", "sliding_attention"
LAYOUTS = {"full": [FULL] * 3, "sliding": [SLIDING] * 3, "mixed": [SLIDING, SLIDING, FULL]}
LAYER_IDS = LayerIds((1, 3, 4), 6)
BLOCK_SIZE, WINDOW, MASK = 8, 11, tiny_models.MASK_TOKEN_ID
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    """A target that says four different tokens only, so that a random drafter is right now and then."""
    path = tiny_models.make_qwen3(tmp_path_factory.mktemp("target"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3:] = 0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(target_path):
    return AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=LAYOUTS)
def drafters(request, target, tmp_path_factory):
    """The same exported folder, loaded by us and by z-lab's package, in fp32."""
    layer_types = LAYOUTS[request.param]
    window = WINDOW if SLIDING in layer_types else None
    settings = DrafterConfig(3, layer_types, sliding_window=window, block_size=BLOCK_SIZE, mask_token_id=MASK)
    drafter = DFlashDraftModel(drafter_config(settings, LAYER_IDS, text_config(target.config), 320))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = 0.3 * torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + noise if weight.ndim == 1 else noise)
    folder = tmp_path_factory.mktemp(request.param) / "export"
    contract = FeatureContract(LAYER_IDS, 32, False, {}, {})
    write_drafter(folder, drafter.config, drafter.state_dict(), contract, "")
    ours = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    return ours, ZlabDrafter.from_pretrained(folder, dtype=torch.float32).eval()


def prompt_ids(length, seed=1):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_hidden_states_and_drafted_tokens(drafters, target):
    ours, theirs = drafters
    ids_T = prompt_ids(48)
    streams = target(ids_T[None], output_hidden_states=True).hidden_states
    features_TLD = torch.stack([streams[i][0] for i in LAYER_IDS.hf_hidden_states], dim=1)
    anchors = torch.tensor([1, 5, 10, 11, 30, 40])  # contexts shorter than, equal to and beyond the window
    context, blocks = build_blocks([(ids_T, torch.ones(48))], [anchors], BLOCK_SIZE, MASK)
    table = target.get_input_embeddings().weight
    our_hidden_AKD = ours(features_TLD, context, table[blocks.input_ids_AK], blocks)
    for our_hidden_KD, anchor, block_ids_K in zip(our_hidden_AKD, anchors.tolist(), blocks.input_ids_AK, strict=True):
        their_hidden_KD = theirs(
            position_ids=torch.arange(anchor + BLOCK_SIZE)[None],
            noise_embedding=table[block_ids_K][None],
            target_hidden=extract_context_feature([s[:, :anchor] for s in streams], theirs.target_layer_ids),
        )[0]
        error = (our_hidden_KD - their_hidden_KD).abs().max() / their_hidden_KD.abs().max()
        assert error < 1e-5
        drafted = [target.lm_head(hidden_KD[1:]).argmax(-1) for hidden_KD in (our_hidden_KD, their_hidden_KD)]
        assert torch.equal(*drafted)


@torch.no_grad()
def test_generated_text_and_accepted_lengths(drafters, target, target_path, monkeypatch):
    ours, theirs = drafters
    prompt, num_new = prompt_ids(9, seed=2), 60
    plain = target.generate(prompt[None], max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 9:].tolist()
    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)
    zlab = dflash_generate(theirs, target, prompt[None], num_new, None, return_stats=True)
    assert zlab.output_ids[0, 9:].tolist() == plain

    loaded = load_target(TargetConfig(path=str(target_path)), CPU)
    ends = load_ends(TargetConfig(path=str(target_path)), CPU, torch.float32)
    answer = speculative(loaded, Capture(loaded, LAYER_IDS), ours, ends, prompt.tolist(), num_new, set(), BLOCK_SIZE, MASK)
    assert answer.token_ids == plain
    # near the limit dflash shortens the block, and a full layer's drafts depend on the whole block
    whole = sum(1 for done in accumulate(zlab.acceptance_lengths) if done + BLOCK_SIZE < num_new)
    assert answer.walk.gains[:whole] == zlab.acceptance_lengths[:whole]
    assert max(zlab.acceptance_lengths[:whole]) > 1
