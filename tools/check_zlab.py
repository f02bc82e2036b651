"""Holds an exported drafter to z-lab's own package: hidden states, drafted tokens, generated text and accepted lengths, in fp32.

Comes in: a drafter folder as stage=export writes it, its target (local folder), and a JSONL file of prompts. For each prompt the
target answers plainly, with our speculative loop and with `dflash_generate`; then both drafters draft every block of our walk from the
same features. Goes out: one table, and exit status 1 when anything differs (hidden states beyond 1e-5 of the largest value).

    pip install --no-deps dflash==0.1.0
    python tools/check_zlab.py runs/quickstart/export targets/SmolLM2-135M-Instruct recipes/quickstart_data/questions.jsonl

Not for targets with a recurrent state, which dflash 0.1.0 does not restore.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import dflash.model as zlab
import torch
from torch import Tensor
from torch.nn.functional import embedding

from dflash_train.blocks import Context, single_blocks
from dflash_train.capture import Capture
from dflash_train.chat import ChatTemplate
from dflash_train.config import Dtype, TargetConfig
from dflash_train.conversations import RowLedger, read_prompts
from dflash_train.decoding import plain, speculative
from dflash_train.drafter import DFlashDraftModel
from dflash_train.drafting import head_argmax
from dflash_train.errors import UserError
from dflash_train.progress import Progress
from dflash_train.target import TargetEnds, eos_token_ids, load_config, load_ends, load_target, load_tokenizer

HIDDEN_TOLERANCE = 1e-5  # of the largest value, fp32
CPU = torch.device("cpu")


@dataclass
class Comparison:
    """What one prompt showed."""

    hidden_error: float  # largest difference by largest value, over all blocks of the walk
    num_slots: int
    num_slots_different: int
    is_text_equal: bool  # ours, z-lab's and plain decoding
    our_gains: list[int]
    zlab_gains: list[int]


class Checker:
    """One drafter folder, loaded by us and by z-lab's package, beside its target."""

    def __init__(self, drafter_dir: Path, target_path: str) -> None:
        settings = TargetConfig(path=target_path, dtype=Dtype.float32)
        self.target = load_target(settings, CPU)
        self.ends: TargetEnds = load_ends(settings, CPU, torch.float32)
        self.ours = DFlashDraftModel.from_pretrained(drafter_dir, dtype=torch.float32).eval()
        self.theirs = zlab.DFlashDraftModel.from_pretrained(drafter_dir, dtype=torch.float32).eval()
        self.capture = Capture(self.target, self.ours.layer_ids)
        self.stop_ids = eos_token_ids(settings, load_config(settings))
        self.template = ChatTemplate(load_tokenizer(settings), {}, self.stop_ids)

    @torch.no_grad()
    def compare(self, prompt_ids: list[int], max_new_tokens: int) -> Comparison:
        """Decodes `prompt_ids` three ways and drafts the walk's blocks twice."""
        baseline = plain(self.target, prompt_ids, max_new_tokens, self.stop_ids)
        drafting = self.ours.block_size, self.ours.mask_token_id
        ours = speculative(self.target, self.capture, self.ours, self.ends, prompt_ids, max_new_tokens, self.stop_ids, *drafting)
        theirs = zlab.dflash_generate(
            self.theirs, self.target.model, torch.tensor([prompt_ids]), max_new_tokens, sorted(self.stop_ids) or None, return_stats=True
        )
        texts = [baseline.token_ids, ours.token_ids, theirs.output_ids[0, len(prompt_ids) :].tolist()]
        errors, num_slots, num_different = self._draft_walk(torch.tensor(prompt_ids + ours.token_ids), len(prompt_ids), ours.walk.gains)
        return Comparison(errors, num_slots, num_different, texts.count(texts[0]) == 3, ours.walk.gains, theirs.acceptance_lengths)

    def _draft_walk(self, ids_T: Tensor, num_prompt: int, gains: Sequence[int]) -> tuple[float, int, int]:
        features_TLD = self.capture.run(ids_T[None], torch.ones_like(ids_T)[None]).features_BTLD[0]
        worst, num_slots, num_different = 0.0, 0, 0
        for anchor in accumulate(gains[:-1], initial=num_prompt):
            ours_KD, theirs_KD = self._draft_twice(ids_T, features_TLD[:anchor], anchor)
            worst = max(worst, float((ours_KD - theirs_KD).abs().max() / theirs_KD.abs().max()))
            ours_K, theirs_K = head_argmax(ours_KD[1:], self.ends.head_VD), head_argmax(theirs_KD[1:], self.ends.head_VD)
            num_slots += len(ours_K)
            num_different += int((ours_K != theirs_K).sum())
        return worst, num_slots, num_different

    def _draft_twice(self, ids_T: Tensor, features_TLD: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """Hidden states [K, D] of the block at `anchor`, ours and z-lab's."""
        zero = torch.zeros(1, dtype=torch.long)
        blocks = single_blocks(ids_T[anchor : anchor + 1], zero + anchor, zero, self.ours.block_size, self.ours.mask_token_id)
        embeddings_AKD = embedding(blocks.input_ids_AK, self.ends.embedding_VD)
        meta = Context(document_T=torch.zeros(anchor, dtype=torch.long), position_T=torch.arange(anchor))
        ours_AKD = self.ours(features_TLD, meta, embeddings_AKD, blocks)
        positions = torch.arange(anchor + self.ours.block_size)[None]
        theirs_BKD = self.theirs(position_ids=positions, noise_embedding=embeddings_AKD, target_hidden=features_TLD.flatten(1)[None])
        return ours_AKD[0], theirs_BKD[0]


def read_prompt_ids(checker: Checker, file: str, num: int) -> list[list[int]]:
    """The last `num` usable prompts of a JSONL file."""
    rows = read_prompts([file], RowLedger(sys.stderr, strict=True), setting="prompts")
    return [checker.template.prompt_ids(row.messages) for row in rows][-num:]


def tau_of(gains: Sequence[Sequence[int]]) -> float:
    """Tokens per verification, pooled."""
    return sum(map(sum, gains)) / sum(map(len, gains))


def report(found: Sequence[Comparison]) -> tuple[str, bool]:
    """The table, and whether everything agrees."""
    worst = max(c.hidden_error for c in found)
    slots, different = sum(c.num_slots for c in found), sum(c.num_slots_different for c in found)
    texts = sum(c.is_text_equal for c in found)
    ours, theirs = (tau_of(gains) for gains in ([c.our_gains for c in found], [c.zlab_gains for c in found]))
    lines = [
        f"prompts                  {len(found)}",
        f"hidden states            largest relative difference {worst:.1e} (allowed {HIDDEN_TOLERANCE:.0e})",
        f"drafted tokens           {different} of {slots} differ",
        f"generated texts          {texts} of {len(found)} equal: ours, dflash 0.1.0, plain greedy decoding",
        f"tau                      {ours:.4f} ours, {theirs:.4f} dflash 0.1.0",
    ]
    return "\n".join(lines), worst <= HIDDEN_TOLERANCE and not different and texts == len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path, help="folder written by stage=export")
    parser.add_argument("target", help="local Hugging Face folder")
    parser.add_argument("prompts", help="JSONL prompts")
    parser.add_argument("--num", type=int, default=20, help="prompts, from the end of the file (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=120, help="per answer (default: %(default)s)")
    arguments = parser.parse_args()
    zlab._cuda_time = time.perf_counter  # its statistics would ask for a GPU
    try:
        checker = Checker(arguments.drafter, arguments.target)
        prompts = read_prompt_ids(checker, arguments.prompts, arguments.num)
        with Progress("compare", len(prompts), "prompts") as progress:
            found = []
            for prompt_ids in prompts:
                found.append(checker.compare(prompt_ids, arguments.max_new_tokens))
                progress.advance(1)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text, agrees = report(found)
    print(text)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
