"""Acceptance: what a served drafter gains, measured on stored answers without the target, and the figures made of it.

Comes in: walks (right prefix and gain of each verification), from `replay` here or from `decoding.py`. Goes out: tau and its
companions as a JSON-able dictionary.

**tau** is answer tokens after the first, divided by verifications, pooled over a prompt set: 1.0 is useless, the block size K is
perfect. A verification gains min(right prefix + 1, tokens left): the +1 is the target's own token, and tokens past the end of the
answer or past the limit do not count, nor does the token that the prefill produces. Servers count differently (SGLang and vLLM count
before the end-of-sequence cut), so their figures are to be converted, not compared. Left out on purpose: products or means of
per-slot accuracies, which say little about a prefix.

**Replay** walks a stored answer as a server would: draft a whole block, count its right prefix, jump behind it, draft again. On answers
that the target wrote greedily it is the tau of greedy speculative decoding, up to rounding of the stored features and near-ties of the
target's logits, for targets with recurrent state too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_train.blocks import Context, sample_generator, single_blocks
from dflash_train.drafter import DFlashDraftModel
from dflash_train.drafting import draft_tokens
from dflash_train.features.reader import Sample
from dflash_train.target import TargetEnds

RESAMPLES = 2000  # of the prompts, for the interval
SCORES_BYTES = 1 << 28  # attention scores held at once while drafting from a pack


@dataclass
class Walk:
    """One answer as a server walks it. `prefixes`: right drafted tokens per verification, 0 to K-1, those past the end counted as
    wrong; `gains`: tokens per verification, the target's own included and cut at the end."""

    sample_id: str
    prefixes: list[int] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)

    def add(self, num_right: int, tokens_left: int) -> int:
        """Counts a verification with `num_right` right drafts when the answer has `tokens_left` tokens after the anchor; its gain."""
        self.prefixes.append(min(num_right, tokens_left))
        self.gains.append(min(num_right + 1, tokens_left))
        return self.gains[-1]


def right_prefix(drafted: Sequence[int], wanted: Sequence[int]) -> int:
    """How many leading tokens of `drafted` equal those of `wanted`; what lies past the end of `wanted` is wrong."""
    length = 0
    for ours, theirs in zip(drafted, wanted, strict=False):
        if ours != theirs:
            break
        length += 1
    return length


def tau(walks: Iterable[Walk]) -> float | None:
    """Answer tokens after the first per verification, pooled; None without any verification."""
    walks = list(walks)
    return _ratio(sum(sum(w.gains) for w in walks), sum(len(w.gains) for w in walks))


def summarize(walks: Sequence[Walk], block_size: int, seed: int) -> dict[str, Any]:
    """Every acceptance figure of a prompt set, under the names of `report.json`; None where a figure is undefined.

    Walks of one sample count as one prompt. `acceptance_by_position[k-1]` is the share of verifications whose right prefix reaches
    slot k (1 to K-1), `conditional_acceptance_by_position[k-1]` the same among those that reached slot k-1.
    """
    prefixes = np.array([p for walk in walks for p in walk.prefixes], dtype=np.int64)
    reached = [int((prefixes >= k).sum()) for k in range(block_size)]
    gains_P, verifications_P = _per_prompt(walks)
    return {
        "tau": tau(walks),
        "tau_ci95": _resampled_interval(gains_P, verifications_P, seed),
        "tau_mean_over_prompts": float((gains_P / verifications_P).mean()) if len(gains_P) else None,
        "num_prompts": len({walk.sample_id for walk in walks}),
        "num_answers": len(walks),
        "num_verifications": len(prefixes),
        "accepted_histogram": np.bincount(prefixes, minlength=block_size).tolist(),
        "acceptance_by_position": [_ratio(n, reached[0]) for n in reached[1:]],
        "conditional_acceptance_by_position": [_ratio(n, m) for m, n in zip(reached, reached[1:], strict=False)],
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _per_prompt(walks: Sequence[Walk]) -> tuple[np.ndarray, np.ndarray]:
    """Gained tokens and verifications of each prompt that has a verification, in an order that is the same on any number of processes."""
    totals: dict[str, list[int]] = {}
    for walk in walks:
        total = totals.setdefault(walk.sample_id, [0, 0])
        total[0] += sum(walk.gains)
        total[1] += len(walk.gains)
    table = np.array([total for _, total in sorted(totals.items()) if total[1]], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _resampled_interval(gains_P: np.ndarray, verifications_P: np.ndarray, seed: int) -> list[float] | None:
    """95 % interval of tau by drawing prompts with replacement: verifications of one prompt resemble each other, prompts do not."""
    num_prompts = len(gains_P)
    if num_prompts < 2:
        return None
    generator = np.random.default_rng(seed)
    times_drawn_RP = generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=RESAMPLES)
    taus_R = (times_drawn_RP @ gains_P) / (times_drawn_RP @ verifications_P)
    return np.percentile(taus_R, [2.5, 97.5]).tolist()


@dataclass
class StoredAnswer:
    """One supervised span of a document and how far its walk has come."""

    document: int  # index in its pack
    start: int  # position of the first answer token in the document
    token_ids: list[int]
    walk: Walk
    anchor: int = 0  # index in token_ids of the last committed token

    @property
    def tokens_left(self) -> int:
        return len(self.token_ids) - 1 - self.anchor

    def verify(self, drafted: Sequence[int]) -> None:
        """Counts the drafted tokens [K-1] after the anchor and jumps behind the right prefix and the target's own token."""
        num_right = right_prefix(drafted, self.token_ids[self.anchor + 1 :])
        self.anchor += self.walk.add(num_right, self.tokens_left)


def stored_answers(sample: Sample, document: int = 0) -> list[StoredAnswer]:
    """The unbroken supervised spans of a sample, in order."""
    edges = torch.diff(sample.loss_mask_T.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist()
    return [
        StoredAnswer(document, start, sample.input_ids_T[start:end].tolist(), Walk(sample.sample_id))
        for start, end in zip(starts, ends, strict=True)
    ]


def walk_answers(answers: Sequence[StoredAnswer], draft: Callable[[list[StoredAnswer]], list[list[int]]]) -> None:
    """Walks all answers to their ends, one batched `draft` (K-1 token ids for each answer it is given) per round."""
    while walking := [answer for answer in answers if answer.tokens_left > 0]:
        for answer, drafted in zip(walking, draft(walking), strict=True):
            answer.verify(drafted)


@torch.no_grad()
def replay(
    drafter: DFlashDraftModel,
    ends: TargetEnds,
    samples: Iterable[Sample],
    block_size: int,
    mask_token_id: int,
    tokens_per_pack: int,
) -> list[Walk]:
    """Walks every supervised span of `samples` (read once, in order) and returns one walk per span, in order.

    The drafter's context is computed once for each pack of at most `tokens_per_pack` context tokens (a longer document is a pack of
    its own) on the device of `ends`.
    """
    walks = []
    for documents in _packs(samples, tokens_per_pack):
        pack = _Pack(drafter, ends, documents, block_size, mask_token_id)
        answers = [answer for i, sample in enumerate(documents) for answer in stored_answers(sample, document=i)]

        def draft(walking: list[StoredAnswer], pack: _Pack = pack) -> list[list[int]]:
            return pack.draft([a.document for a in walking], [a.start + a.anchor for a in walking])

        walk_answers(answers, draft)
        walks += [answer.walk for answer in answers]
    return walks


@torch.no_grad()
def anchor_counts(
    drafter: DFlashDraftModel,
    ends: TargetEnds,
    samples: Iterable[Sample],
    block_size: int,
    mask_token_id: int,
    tokens_per_pack: int,
    seed: int,
    share_of_blocks: float = 0.25,
) -> tuple[int, int]:
    """Blocks drafted, and the sum of their right prefixes: `share_of_blocks` of those of `samples` wholly inside the supervision.

    What is drawn from a sample depends on the sample and the seed alone, so counts add up to the same whoever drafts which sample.
    """
    prefixes: list[int] = []
    for documents in _packs(samples, tokens_per_pack):
        generators = [sample_generator(seed, sample.sample_id) for sample in documents]
        drawn = [
            _draw_whole_blocks(sample.loss_mask_T, block_size, share_of_blocks, generator)
            for sample, generator in zip(documents, generators, strict=True)
        ]
        document_of = [i for i, positions in enumerate(drawn) for _ in positions]
        positions = [p for positions in drawn for p in positions]
        if not positions:
            continue
        drafts = _Pack(drafter, ends, documents, block_size, mask_token_id).draft(document_of, positions)
        for i, a, drafted in zip(document_of, positions, drafts, strict=True):
            prefixes.append(right_prefix(drafted, documents[i].input_ids_T[a + 1 : a + block_size].tolist()))
    return len(prefixes), sum(prefixes)


def anchor_tau(counts: Iterable[tuple[int, int]]) -> float | None:
    """Mean right prefix + 1 over all blocks that `anchor_counts` counted; None without any.

    Cheap, for the training log; it runs 5 to 10 % above tau, because a served walk visits hard text more often than uniform anchors
    do. Never called tau and never picks a checkpoint.
    """
    counts = list(counts)
    num_blocks, num_right = sum(n for n, _ in counts), sum(right for _, right in counts)
    return _ratio(num_right + num_blocks, num_blocks)


def _draw_whole_blocks(loss_mask_T: Tensor, block_size: int, share: float, generator: torch.Generator) -> list[int]:
    """Sorted anchors of `share` (rounded up) of the blocks whose K positions are all supervised."""
    if len(loss_mask_T) < block_size:
        return []
    anchors = loss_mask_T.unfold(0, block_size, 1).all(-1).nonzero().flatten()
    drawn = torch.randperm(len(anchors), generator=generator)[: math.ceil(len(anchors) * share)]
    return anchors[drawn].sort().values.tolist()


def _packs(samples: Iterable[Sample], tokens_per_pack: int) -> Iterator[list[Sample]]:
    """Whole samples in order, as many as fit into `tokens_per_pack`; at least one, so that a long one is a pack of its own."""
    pack: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        length = len(sample.input_ids_T)
        if pack and num_tokens + length > tokens_per_pack:
            yield pack
            pack, num_tokens = [], 0
        pack.append(sample)
        num_tokens += length
    if pack:
        yield pack


class _Pack:
    """Documents whose context keys and values are computed once, and drafted from at any of their positions."""

    def __init__(self, drafter: DFlashDraftModel, ends: TargetEnds, documents: list[Sample], block_size: int, mask_token_id: int) -> None:
        self.drafter, self.ends = drafter, ends
        self.block_size, self.mask_token_id = block_size, mask_token_id
        self.device = ends.head_VD.device
        lengths = torch.tensor([len(sample.input_ids_T) for sample in documents])
        self.first_token = lengths.cumsum(0) - lengths
        self.input_ids_T = torch.cat([sample.input_ids_T for sample in documents])
        meta = Context(
            document_T=torch.repeat_interleave(torch.arange(len(documents)), lengths),
            position_T=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        )
        features_TLD = torch.cat([sample.features_TLD for sample in documents])
        self.context = drafter.extend(None, features_TLD.to(self.device, drafter.dtype), meta.to(self.device))

    def draft(self, documents: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
        """Drafted token ids (K-1 each) of the blocks anchored at `positions` of `documents`, one block per entry."""
        document_A, position_A = torch.tensor(documents), torch.tensor(positions)
        anchor_ids_A = self.input_ids_T[self.first_token[document_A] + position_A]
        drafts = []
        for chunk in torch.arange(len(position_A)).split(self._blocks_at_once()):
            blocks = single_blocks(anchor_ids_A[chunk], position_A[chunk], document_A[chunk], self.block_size, self.mask_token_id)
            drafts += draft_tokens(self.drafter, self.ends, blocks.to(self.device), self.context).tolist()
        return drafts

    def _blocks_at_once(self) -> int:
        """Blocks whose attention scores over the pack stay within `SCORES_BYTES`."""
        scores_per_block = self.block_size * (len(self.input_ids_T) + self.block_size) * self.drafter.config.num_attention_heads
        return max(1, SCORES_BYTES // (scores_per_block * self.drafter.dtype.itemsize))
