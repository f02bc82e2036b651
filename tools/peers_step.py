"""One optimizer step of another DFlash trainer, measured in a process of its own on the shapes and tensors of `step_shapes.py`.

    python tools/peers_step.py specforge --shape S --dtype bf16
    python tools/peers_step.py speculators --shape X --dtype fp32 --loss-only

Goes out: one line of JSON with CPU and wall seconds per step, peak MB, the first loss and gradient norm, and the speed of a matrix product
in the same process. It runs in an environment with the peers' packages and nothing of ours. Their own requirements exclude each other
(torch 2.11, CUDA, SGLang), so they are installed without them:

    python3 -m venv peers
    peers/bin/pip install torch==2.13.0                                   the CPU build is enough
    peers/bin/pip install transformers==5.14.1 datasets
    peers/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 nvidia-modelopt==0.47.0
    peers/bin/pip install --no-deps hs-connectors==0.9.0 openai==3.57.0 httpx2 sniffio
    peers/bin/pip install requests omegaconf "pulp<4" scipy regex nvidia-ml-py

SpecForge has to give loss 6.25269 and gradient norm 1.48803 on shape X in fp32. The others differ by design: speculators learns from the
target's last state instead of the labels, Model-Optimizer lets sliding layers see another set of keys. AdamW is fused where the peer's
own is; bf16 weights have fp32 masters in all three. Attention is PyTorch's sdpa, the fastest of theirs on a CPU.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from step_shapes import (
    DTYPES,
    GAMMA,
    LR,
    MAX_GRAD_NORM,
    RMS_NORM_EPS,
    ROPE_THETA,
    StepInputs,
    StepShape,
    StepValues,
    add_step_arguments,
    drafter_weights,
    frozen_tables,
    print_figures,
    step_inputs,
)
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

BLOCKS_PER_CHUNK = 128  # SpecForge's default: blocks whose logits are held at once


@dataclass(frozen=True)
class Peer:
    """A trainer ready to run: `loss` is one forward, `drafter` what trains."""

    loss: Callable[[], Tensor]
    drafter: nn.Module
    fused_adamw: bool = False


class AdamWStep:
    """Backward, clipping and AdamW; bf16 weights are copies of fp32 masters."""

    def __init__(self, peer: Peer) -> None:
        self.loss = peer.loss
        self.weights = [weight for weight in peer.drafter.parameters() if weight.requires_grad]
        self.has_masters = self.weights[0].dtype != torch.float32
        self.masters = [weight.detach().float().requires_grad_() for weight in self.weights] if self.has_masters else self.weights
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=peer.fused_adamw)

    def __call__(self) -> StepValues:
        """The update of one step."""
        loss = self.loss()
        loss.backward()
        if self.has_masters:
            self._move_gradients()
        norm = nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.has_masters:
            self._copy_weights()
        return StepValues(loss.item(), norm.item())

    def _move_gradients(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            if weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)


def specforge(shape: StepShape, dtype: torch.dtype, inputs: StepInputs) -> Peer:
    """SpecForge 0.2.0, sdpa, its chunked objective."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config = qwen3_config(shape)
    config.block_size, config.num_target_layers = shape.block_size, shape.num_target_layers
    config.dflash_config = {"target_layer_ids": shape.layer_ids, "mask_token_id": shape.mask_token_id}
    drafter = DFlashDraftModel(config).to(dtype).train()
    load_drafter(drafter, shape, dtype)
    embedding, head = frozen_tables(shape, dtype)
    model = OnlineDFlashModel(
        drafter,
        _frozen(nn.Linear(*head.T.shape, bias=False, device="meta"), head),
        _frozen(nn.Embedding(*embedding.shape, device="meta"), embedding),
        shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend="sdpa",
        num_anchors=shape.num_anchors,
        loss_decay_gamma=GAMMA,
        objective_chunk_blocks=BLOCKS_PER_CHUNK,
    )
    model._sample_anchor_positions = lambda *_: (inputs.anchors, torch.ones_like(inputs.anchors, dtype=torch.bool))
    mask = torch.ones(inputs.ids.shape)
    return Peer(lambda: model(input_ids=inputs.ids, hidden_states=inputs.features, loss_mask=mask)[0], drafter)


def speculators(shape: StepShape, dtype: torch.dtype, inputs: StepInputs) -> Peer:
    """speculators 0.9.0, sdpa, its eager cross-entropy; all sequences are one pack."""
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        transformer_layer_config=qwen3_config(shape),
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=shape.layer_ids,
        mask_token_id=shape.mask_token_id,
    )
    config.transformer_layer_config._attn_implementation = "sdpa"  # the constructor drops it
    model = core.DFlashDraftModel(config).to(dtype).train()
    load_drafter(model, shape, dtype)
    embedding, head = frozen_tables(shape, dtype)
    for module, table in ((model.embed_tokens, embedding), (model.lm_head, head), (model.verifier_lm_head, head)):
        _frozen(module, table)
    nn.init.ones_(model.verifier_norm.weight)
    firsts = torch.arange(shape.num_sequences)[:, None] * shape.num_tokens
    anchors = (inputs.anchors + firsts).flatten()
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    pack: dict[str, Any] = {
        "hidden_states": inputs.features.flatten(0, 1)[None],
        "input_ids": inputs.ids.view(1, -1),
        "loss_mask": torch.ones(1, shape.context_tokens),
        "verifier_last_hidden_states": inputs.last_hidden.flatten(0, 1)[None],
        "document_ids": torch.arange(shape.num_sequences).repeat_interleave(shape.num_tokens)[None],
        "position_ids": torch.arange(shape.num_tokens).repeat(shape.num_sequences)[None],
    }
    settings = {"loss_config": resolve_loss_config("ce", "eager"), "gamma": GAMMA, "max_anchors": len(anchors)}
    return Peer(lambda: model(**pack, **settings)[1], model)


def modelopt(shape: StepShape, dtype: torch.dtype, inputs: StepInputs) -> Peer:
    """Model-Optimizer 0.47.0, sdpa, from stored features; the base model is one layer that never runs."""
    import modelopt.torch.speculative as mtsp
    import modelopt.torch.speculative.plugins.hf_dflash as hf_dflash

    config = qwen3_config(shape)
    config.num_hidden_layers, config.layer_types, config.num_orig_hidden_layers = 1, ["full_attention"], shape.num_target_layers
    model = Qwen3ForCausalLM(config).to(dtype)
    embedding, head = frozen_tables(shape, dtype)
    _frozen(model.model.embed_tokens, embedding)
    _frozen(model.lm_head, head)
    hf_dflash.build_target_layer_ids = lambda *_: shape.layer_ids  # its own rule ties their number to that of the drafter layers
    mtsp.convert(model, [("dflash", _modelopt_settings(shape))])
    model.train()
    load_drafter(model.dflash_module, shape, dtype)
    model._sample_anchor_positions = lambda *_: (inputs.anchors, torch.ones_like(inputs.anchors, dtype=torch.bool))
    batch = {
        "input_ids": inputs.ids,
        "base_model_outputs": {"aux_hidden_states": inputs.features},
        "loss_mask": torch.ones(inputs.ids.shape),
    }
    return Peer(lambda: model(**batch).loss, model.dflash_module, fused_adamw=True)


def _modelopt_settings(shape: StepShape) -> dict[str, Any]:
    architecture = {
        "num_hidden_layers": len(shape.layers),
        "layer_types": shape.layer_types,
        "use_sliding_window": True,
        "sliding_window": shape.sliding_window,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "_attn_implementation": "sdpa",
    }
    return {
        "dflash_architecture_config": architecture,
        "dflash_block_size": shape.block_size,
        "dflash_mask_token_id": shape.mask_token_id,
        "dflash_num_anchors": shape.num_anchors,
        "dflash_offline": True,
        "dflash_use_torch_compile": False,
        "dflash_self_logit_distillation": False,
        "dflash_loss_objective": "decay",
        "dflash_loss_decay_factor": GAMMA,
    }


def qwen3_config(shape: StepShape) -> Qwen3Config:
    """The sizes of `shape` as transformers names them."""
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=len(shape.layers),
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=32_768,
        layer_types=shape.layer_types,
        use_sliding_window=True,
        sliding_window=shape.sliding_window,
        rms_norm_eps=RMS_NORM_EPS,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    return config


def load_drafter(drafter: nn.Module, shape: StepShape, dtype: torch.dtype) -> None:
    """The weights of `drafter_weights`; whatever trains has to be among them."""
    loaded = drafter.load_state_dict(drafter_weights(shape, dtype), strict=False)
    trained = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    borrowed = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"}
    missing = trained & set(loaded.missing_keys) - borrowed
    assert not loaded.unexpected_keys and not missing, f"{missing} have no weights, {loaded.unexpected_keys} no place"


def _frozen(module: nn.Module, table: Tensor) -> nn.Module:
    module.weight = nn.Parameter(table, requires_grad=False)
    return module


PEERS = {peer.__name__: peer for peer in (specforge, speculators, modelopt)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    add_step_arguments(parser)
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    def make_step() -> AdamWStep:
        dtype = DTYPES[arguments.dtype]
        return AdamWStep(PEERS[arguments.peer](arguments.shape, dtype, step_inputs(arguments.shape, dtype)))

    print_figures(arguments, make_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
