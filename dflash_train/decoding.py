"""Greedy decoding with the real target, plain and speculative, one prompt at a time.

Comes in: a loaded target, its capture, a drafter and a prompt's token ids. Goes out: the answer's token ids with seconds, and for
speculation the walk that `acceptance.py` summarizes. Speculative decoding is lossless by construction: every token it emits is the
argmax of the target's own logits, given the tokens before it. The two loops differ only in how many tokens one forward judges, so an
answer can differ only where rounding decides between two nearly equal logits; `compare` tells such near-ties from mistakes.

One round: draft K-1 tokens after the anchor, let the target judge [anchor, drafts] in one forward, keep the right prefix and the target's
next token, take the rest out of the target's cache, and give the drafter the features of what was kept. A whole block is drafted
and judged even where fewer tokens are left, as servers do. Source: DFlash, arXiv 2602.06036; the loop equals that of z-lab's dflash 0.1.0.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_train.acceptance import Walk, right_prefix
from dflash_train.blocks import Context, single_blocks
from dflash_train.capture import Capture
from dflash_train.drafter import DFlashDraftModel, DraftContext
from dflash_train.drafting import draft_tokens
from dflash_train.errors import UserError
from dflash_train.target import Target, TargetEnds

NEAR_TIE = 5e-4  # logits, fp32


@dataclass
class PlainAnswer:
    """`gaps[i]`: distance of the two largest logits that decided token i. `seconds` include the prompt's forward."""

    token_ids: list[int]
    gaps: list[float]
    seconds: float


@dataclass
class SpeculativeAnswer:
    """`seconds` include the prompt's forward."""

    token_ids: list[int]
    walk: Walk
    seconds: float


class Agreement(StrEnum):
    """How a speculative answer stands to the plain one."""

    equal = "equal"
    near_tie = "near_tie"  # first differs where plain decoding's two largest logits lie within NEAR_TIE
    different = "different"


def compare(plain_answer: PlainAnswer, token_ids: Sequence[int]) -> Agreement:
    """Compares token for token with plain decoding under the same limit."""
    if plain_answer.token_ids == list(token_ids):
        return Agreement.equal
    first = right_prefix(plain_answer.token_ids, token_ids)
    near = first < len(plain_answer.gaps) and plain_answer.gaps[first] <= NEAR_TIE
    return Agreement.near_tie if near else Agreement.different


def refuse_without_rollback(target: Target) -> None:
    """Raises UserError when tokens cannot be taken out of the target's cache again, as rejected drafts must be.

    Runs one token: only a used cache knows whether its layers hold a recurrent state.
    """
    cache = _rollback_cache(target)
    with torch.no_grad():
        _logits(target, [0], cache)
    if cache.get_seq_length() != 1:
        raise UserError(f"evaluate.mode=decode cannot hand a cache to {type(target.model).__name__}: use evaluate.mode=replay")
    if not cache.is_croppable:
        kinds = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
        raise UserError(
            f"evaluate.mode=decode cannot take rejected drafts out of the cache of {target.config.model_type} ({', '.join(kinds)} keeps a "
            "recurrent state): use evaluate.mode=replay, which measures the same tau without the target"
        )


@torch.no_grad()
def plain(target: Target, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> PlainAnswer:
    """The target's greedy answer: at most `max_new_tokens` tokens, ending with the first of `eos_ids`."""
    started = time.perf_counter()
    cache = DynamicCache(config=target.model.config)
    token_ids: list[int] = []
    gaps: list[float] = []
    new_ids = prompt_ids
    while not _finished(token_ids, max_new_tokens, eos_ids):
        best_two = _logits(target, new_ids, cache, logits_to_keep=1)[-1].float().topk(2)
        token_ids.append(int(best_two.indices[0]))
        gaps.append(float(best_two.values[0] - best_two.values[1]))
        new_ids = token_ids[-1:]
    return PlainAnswer(token_ids, gaps, time.perf_counter() - started)


@torch.no_grad()
def speculative(
    target: Target,
    capture: Capture,
    drafter: DFlashDraftModel,
    ends: TargetEnds,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int],
    block_size: int,
    mask_token_id: int,
    sample_id: str = "",
) -> SpeculativeAnswer:
    """The same answer as `plain`, in fewer forwards of the target. The target must pass `refuse_without_rollback`."""
    started = time.perf_counter()
    cache = _rollback_cache(target)
    walk = Walk(sample_id)
    with capture.recording() as recorder:
        token_ids = [int(_logits(target, prompt_ids, cache, logits_to_keep=1)[-1].argmax())]
    cache.crop(0)  # a sliding layer forgets what it recorded for a rollback only when told
    context = _extend(drafter, None, recorder.features_BTLD[0], first_position=0)
    while not _finished(token_ids, max_new_tokens, eos_ids):
        anchor = len(prompt_ids) + len(token_ids) - 1
        drafts = _draft(drafter, ends, context, token_ids[-1], anchor, block_size, mask_token_id)
        with capture.recording() as recorder:
            wanted = _logits(target, token_ids[-1:] + drafts, cache).argmax(-1).tolist()
        num_right = right_prefix(drafts, wanted)
        kept = num_right + 1  # the anchor and the right drafts; the target's own token is the next anchor
        cache.crop(kept - block_size)
        context = _extend(drafter, context, recorder.features_BTLD[0, :kept], first_position=anchor)
        emitted = _until_end(wanted[:kept], max_new_tokens - len(token_ids), eos_ids)
        walk.add(num_right, tokens_left=len(emitted))
        token_ids += emitted
    return SpeculativeAnswer(token_ids, walk, time.perf_counter() - started)


def _rollback_cache(target: Target) -> DynamicCache:
    cache = DynamicCache(config=target.model.config)
    cache.activate_past_recording()
    return cache


def _logits(target: Target, new_ids: Sequence[int], cache: DynamicCache, logits_to_keep: int = 0) -> Tensor:
    """One forward over tokens that follow those in `cache`; logits [T, V] of the last `logits_to_keep` of them (0: all)."""
    input_ids_BT = torch.tensor([list(new_ids)], device=target.device)
    output = target.model(input_ids=input_ids_BT, cache=cache, use_cache=True, logits_to_keep=logits_to_keep)
    return output.logits[0]


def _draft(
    drafter: DFlashDraftModel,
    ends: TargetEnds,
    context: DraftContext,
    anchor_id: int,
    position: int,
    block_size: int,
    mask_token_id: int,
) -> list[int]:
    device = ends.head_VD.device
    one = torch.tensor([anchor_id], device=device), torch.tensor([position], device=device), torch.tensor([0], device=device)
    return draft_tokens(drafter, ends, single_blocks(*one, block_size, mask_token_id), context)[0].tolist()


def _extend(drafter: DFlashDraftModel, context: DraftContext | None, features_TLD: Tensor, first_position: int) -> DraftContext:
    position_T = torch.arange(first_position, first_position + len(features_TLD), device=drafter.device)
    meta = Context(document_T=torch.zeros_like(position_T), position_T=position_T)
    return drafter.extend(context, features_TLD.to(drafter.device, drafter.dtype), meta)


def _finished(token_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> bool:
    return len(token_ids) >= max_new_tokens or (bool(token_ids) and token_ids[-1] in eos_ids)


def _until_end(token_ids: Sequence[int], limit: int, eos_ids: Collection[int]) -> list[int]:
    """The tokens up to `limit` and up to the first end-of-sequence token, which is kept."""
    for i, token_id in enumerate(token_ids[:limit]):
        if token_id in eos_ids:
            return list(token_ids[: i + 1])
    return list(token_ids[:limit])
