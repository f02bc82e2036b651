"""Tiny random drafters, ends and samples in memory, for tests of what happens around a drafter."""

import torch
import torch.nn.functional as F
from tiny_models import MASK_TOKEN_ID, NUM_EMBEDDING_ROWS
from transformers import PreTrainedConfig

from dflash_train.blocks import build_blocks, eligible_anchors
from dflash_train.config import DrafterConfig
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.features.reader import Sample
from dflash_train.layers import LayerIds
from dflash_train.target import TargetEnds

WIDTH, LAYER_IDS, NUM_TARGET_LAYERS = 32, (1, 3), 6


def make_drafter(
    layer_types: list[str],
    sliding_window: int | None = None,
    block_size: int = 4,
    text_config: PreTrainedConfig | None = None,
    initializer_range: float = 0.02,
    **overrides,
) -> DFlashDraftModel:
    """A seeded drafter for a target of 6 layers and width 32, or for `text_config`. With the usual `initializer_range`, an untrained
    drafter hardly looks at its context."""
    text_config = text_config or PreTrainedConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        num_hidden_layers=NUM_TARGET_LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    sizes = {"num_layers": len(layer_types), "layer_types": layer_types, "sliding_window": sliding_window, "block_size": block_size}
    settings = DrafterConfig(**sizes, mask_token_id=MASK_TOKEN_ID, **overrides)
    layer_ids = LayerIds(LAYER_IDS, text_config.num_hidden_layers)
    config = drafter_config(settings, layer_ids, text_config, NUM_EMBEDDING_ROWS)
    config.initializer_range = initializer_range
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DFlashDraftModel(config).eval()


def make_ends(num_tokens: int = 3, seed: int = 0) -> TargetEnds:
    """An embedding with all rows and a head over the first `num_tokens`, so few that a random drafter is right now and then."""
    generator = torch.Generator().manual_seed(seed)
    embedding_VD = torch.randn(NUM_EMBEDDING_ROWS, WIDTH, generator=generator)
    return TargetEnds(embedding_VD, torch.randn(num_tokens, WIDTH, generator=generator))


def make_samples(lengths: list[int], num_tokens: int = 3, seed: int = 0) -> list[Sample]:
    """Random samples whose supervision starts at a third of their length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            sample_id=f"sample-{i}",
            input_ids_T=torch.randint(num_tokens, (length,), generator=generator),
            loss_mask_T=torch.arange(length) >= length // 3,
            features_TLD=torch.randn(length, len(LAYER_IDS), WIDTH, generator=generator),
            teacher_state_TD=None,
        )
        for i, length in enumerate(lengths)
    ]


def fit(drafter: DFlashDraftModel, ends: TargetEnds, samples: list[Sample], steps: int) -> DFlashDraftModel:
    """Trains `drafter` on all blocks of `samples` in each step, and stops when every slot is right."""
    documents = [(sample.input_ids_T, sample.loss_mask_T) for sample in samples]
    anchors = [eligible_anchors(loss_mask_T) for _, loss_mask_T in documents]
    context, blocks = build_blocks(documents, anchors, drafter.block_size, drafter.mask_token_id)
    features_TLD = torch.cat([sample.features_TLD for sample in samples])
    embeddings_AKD = F.embedding(blocks.input_ids_AK, ends.embedding_VD)
    counts_AK = blocks.weights_AK > 0
    labels = blocks.labels_AK[counts_AK]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = drafter(features_TLD, context, embeddings_AKD, blocks)[counts_AK] @ ends.head_VD.T
        if (logits.argmax(-1) == labels).all():
            break
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    return drafter
