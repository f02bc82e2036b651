"""One draft: blocks in, drafted tokens out, with the head's logits held in chunks of bounded size.

Comes in: a drafter, the target's embedding table and head, blocks and the drafter's context. Goes out: token ids [A, K-1]. Replay and
real decoding both draft through this one function, so they cannot disagree about it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_train.blocks import Blocks
from dflash_train.drafter import DFlashDraftModel, DraftContext
from dflash_train.target import TargetEnds

LOGITS_CHUNK_BYTES = 1 << 28


def draft_tokens(drafter: DFlashDraftModel, ends: TargetEnds, blocks: Blocks, context: DraftContext) -> Tensor:
    """The drafter's argmax for slots 1 to K-1 of every block: int64 [A, K-1], on the drafter's device."""
    embeddings_AKD = F.embedding(blocks.input_ids_AK, ends.embedding_VD).to(drafter.dtype)
    hidden_AKD = drafter.draft(embeddings_AKD, blocks, context)
    return head_argmax(hidden_AKD[:, 1:], ends.head_VD)


def head_argmax(hidden_XD: Tensor, head_VD: Tensor, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> Tensor:
    """Index of the largest logit of each hidden state [..., D], int64 [...]; never more than `chunk_bytes` of logits at once."""
    rows_ND = hidden_XD.reshape(-1, hidden_XD.shape[-1]).to(head_VD.dtype)
    rows_per_chunk = max(1, chunk_bytes // (head_VD.shape[0] * head_VD.element_size()))
    best = [F.linear(chunk_ND, head_VD).argmax(-1) for chunk_ND in rows_ND.split(rows_per_chunk)]
    return torch.cat(best).view(hidden_XD.shape[:-1])
