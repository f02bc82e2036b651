"""The normalisation of a step, unusable samples, and several processes against one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from process_groups import run_group
from tiny_drafters import make_drafter, make_ends, make_samples
from tiny_models import MASK_TOKEN_ID
from torch import Tensor, nn

from dflash_train.blocks import build_blocks, draw_anchors
from dflash_train.config import OptimizerKind
from dflash_train.ema import Ema
from dflash_train.features.reader import Sample, SampleRef
from dflash_train.launch import StopRequest, keep_until_exit
from dflash_train.optimizer import make_optimizer
from dflash_train.packing import Step, packs_of_rank, usable
from dflash_train.trainer import Trainer, accumulate, divide_gradients
from dflash_train.training_data import TrainingPack

CASES = Path(__file__).parent / "data" / "cases"
C23 = json.loads((CASES / "C23.json").read_text())
C24 = json.loads((CASES / "C24.json").read_text())
C25 = json.loads((CASES / "C25.json").read_text())
BLOCK_SIZE = C23["block_size"]


def c24_step(accelerator: Accelerator) -> tuple[float, float]:
    """The step's loss and the gradient of w for loss_i = w * x_i, this process taking every W-th micro-batch."""
    micro_batches = [torch.tensor(batch["token_losses"], dtype=torch.float32)[:, None] for batch in C24["micro_batches"]]
    model = nn.Linear(1, 1, bias=False, device=accelerator.device)
    model.weight.data.fill_(1.0)
    model = accelerator.prepare(model)
    mine = micro_batches[accelerator.process_index :: accelerator.num_processes]

    def loss(batch: Tensor) -> tuple[Tensor, Tensor]:
        losses = model(batch)
        return losses.sum(), torch.stack([torch.tensor(float(len(batch))), losses.detach().sum()])

    totals, stop_asked = accumulate(accelerator, model, iter(mine), len(mine), loss, StopRequest())
    weight_sum, loss_sum = totals.tolist()
    assert not stop_asked
    divide_gradients(accelerator, model, weight_sum)
    return loss_sum / weight_sum, next(model.parameters()).grad.item()


def c23_rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    masks = [torch.tensor([digit == "1" for digit in row["loss_mask"]]) for row in C23["rows"]]
    return [(torch.randint(3, (len(mask),), generator=generator), mask) for mask in masks]


def c23_pack(rows: list[int]) -> TrainingPack:
    documents = [c23_rows()[row] for row in rows]
    anchors = [draw_anchors(mask, 8, 0, 0, str(row)) for row, (_, mask) in zip(rows, documents, strict=True)]
    context, blocks = build_blocks(documents, anchors, BLOCK_SIZE, MASK_TOKEN_ID)
    features = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(1))
    return TrainingPack(torch.cat([torch.empty(0, 2, 32), *(features[: len(mask)] for _, mask in documents)]), context, blocks)


def make_trainer(accelerator: Accelerator, ema: float | None = None, kind: OptimizerKind = OptimizerKind.adamw) -> Trainer:
    drafter = make_drafter(["sliding_attention", "full_attention"], sliding_window=20, block_size=BLOCK_SIZE)
    return Trainer(
        accelerator,
        drafter,
        keep_until_exit(accelerator.prepare(drafter)),
        make_optimizer(drafter, weight_decay=0.0, kind=kind),
        make_ends(),
        max_grad_norm=1.0,
        head_chunk_bytes=1 << 20,
        ema=Ema(drafter, ema) if ema else None,
    )


def step_of(packs: list[TrainingPack]) -> Step:
    ref = SampleRef("sample", "shard-00000", 0, 1, 2, "train")
    return Step(epoch=0, packs=[[ref]] * len(packs))


def take(trainer: Trainer, packs: list[TrainingPack]) -> float | None:
    accelerator = trainer.accelerator
    mine = [pack or c23_pack([]) for pack in packs_of_rank(packs, accelerator.process_index, accelerator.num_processes)]
    return trainer.take_step(1, step_of(packs), iter(mine), lr=1e-3).loss


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_c24_long_and_short_micro_batches_count_by_token(accelerator: Accelerator) -> None:
    loss, gradient = c24_step(accelerator)
    assert loss == C24["expect"]["step_loss"] == 4.0
    assert gradient == C24["expect"]["grad_check"]["dloss_dw"] == 4.0


def test_c23_three_rows_are_unusable() -> None:
    masks = [mask for _, mask in c23_rows()]
    refs = [SampleRef(str(i), "shard-00000", 0, len(mask), int(mask.sum()), "train") for i, mask in enumerate(masks)]
    assert [ref.sample_id for ref in usable(refs)] == ["2"]


def test_c23_bad_rows_beside_a_good_one_change_nothing(accelerator: Accelerator) -> None:
    alone, together, apart = make_trainer(accelerator), make_trainer(accelerator), make_trainer(accelerator)
    losses = [take(alone, [c23_pack([2])]), take(together, [c23_pack([0, 1, 2, 3])]), take(apart, [c23_pack([2]), c23_pack([0, 1, 3])])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == pytest.approx(losses[2], rel=1e-6)
    assert max(distance(weights(alone), weights(other)) for other in (together, apart)) < 1e-5


def test_c23_only_bad_rows_skip_the_step(accelerator: Accelerator) -> None:
    trainer = make_trainer(accelerator)
    before = weights(trainer)
    assert take(trainer, [c23_pack([0, 1, 3]), c23_pack([])]) is None
    assert distance(before, weights(trainer)) == 0.0
    assert not trainer.optimizer.tensors()


def test_figures_of_a_step(accelerator: Accelerator) -> None:
    # 8 anchors in tokens 10..38 of row 2; a block lies wholly inside the supervision up to anchor 24
    pack = c23_pack([2])
    whole = int((pack.blocks.position_A <= 24).sum())
    trainer = make_trainer(accelerator)
    figures = trainer.take_step(1, step_of([pack]), iter([pack]), lr=0.0)
    assert (figures.num_tokens, figures.num_blocks) == (40, 8) and 0 < whole < 8
    hidden_AKD = trainer.drafter(pack.features_TLD, pack.context, trainer.ends.embedding_VD[pack.blocks.input_ids_AK], pack.blocks)
    right_AK = (hidden_AKD @ trainer.ends.head_VD.T).argmax(-1) == pack.blocks.labels_AK
    prefixes = [row.index(False) if False in row else BLOCK_SIZE - 1 for row in right_AK[:, 1:].tolist()]
    expected = [prefix + 1 for prefix, position in zip(prefixes, pack.blocks.position_A.tolist(), strict=True) if position <= 24]
    assert figures.train_anchor_tau == pytest.approx(sum(expected) / whole)
    shares = [sum(prefix > k for prefix in expected) / whole for k in range(1, BLOCK_SIZE)]  # the right prefix is one less
    assert figures.train_acceptance_by_position == pytest.approx(shares)


def test_a_step_that_is_not_finite_is_skipped_and_names_itself_and_its_samples(
    accelerator: Accelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(accelerator, ema=0.9)
    take(trainer, [c23_pack([2])])
    before, average = weights(trainer), {name: tensor.clone() for name, tensor in trainer.ema.tensors.items()}
    state = {name: tensor.clone() for name, tensor in trainer.optimizer.tensors().items()}
    pack = c23_pack([2])
    pack.features_TLD[5] = float("nan")
    figures = trainer.take_step(7, step_of([pack]), iter([pack]), lr=1e-3)
    assert (figures.is_finite, figures.loss, figures.grad_norm) == (False, None, None)
    assert capsys.readouterr().err == "warning: step 7 is skipped: loss=nan, gradient norm=nan; samples of the step: sample\n"
    assert distance(before, weights(trainer)) == distance(average, trainer.ema.tensors) == 0.0
    assert distance(state, trainer.optimizer.tensors()) == 0.0
    assert take(trainer, [c23_pack([2])]) is not None and distance(before, weights(trainer)) > 0


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What `_on_each_process` found on 2 and on 3 processes."""
    folder = tmp_path_factory.mktemp("groups")
    shared = os.environ | {"OMP_NUM_THREADS": "1", "OUT": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, __file__], env=shared, check=True, timeout=300)
    return {size: torch.load(folder / f"found-{size}.pt") for size in (2, 3)}


def test_several_processes_take_the_step_of_one(accelerator: Accelerator, groups: dict[int, dict[str, Any]]) -> None:
    assert groups[2]["c24"] == (4.0, 4.0)
    alone = make_trainer(accelerator)
    losses = [take(alone, packs) for packs in c23_steps()]
    for found in groups.values():
        assert found["losses"] == pytest.approx(losses, rel=1e-5) and losses[-1] is not None
        assert distance(found["weights"], weights(alone)) < 1e-5


def test_c25_every_row_is_evaluated_once_whatever_the_number_of_processes(
    accelerator: Accelerator, groups: dict[int, dict[str, Any]]
) -> None:
    alone = c25_evaluation(accelerator)
    for found in (alone, *(found["c25"] for found in groups.values())):
        assert sorted(found["ids_read"]) == sorted(C25["dataset"] * 2)  # once to replay and once for anchor_tau
        assert sum(found["ids_read"]) / len(found["ids_read"]) == 3.0
        assert found["figures"]["num_prompts"] == 7
        assert found["figures"] == alone["figures"]  # to the last bit, anchor_tau and the interval too
    assert alone["figures"]["anchor_tau"] > 1


def test_a_signal_to_one_process_is_heard_by_all(groups: dict[int, dict[str, Any]]) -> None:
    for size, found in groups.items():
        assert found["stop_asked"] == [(False, True)] * size


class C25Dataset:
    """One sample per row of the case, each of another length; notes what is read."""

    def __init__(self) -> None:
        self.samples = {f"sample-{i}": sample for i, sample in enumerate(make_samples([12 + 7 * i for i in C25["dataset"]]))}
        self.ids_read: list[int] = []

    def read(self, ref: SampleRef, device: torch.device) -> Sample:
        self.ids_read.append(int(ref.sample_id.removeprefix("sample-")))
        return self.samples[ref.sample_id]


def c25_evaluation(accelerator: Accelerator) -> dict[str, Any]:
    dataset = C25Dataset()
    refs = [SampleRef(name, "shard-00000", 0, len(sample.input_ids_T), 2, "heldout") for name, sample in dataset.samples.items()]
    figures = make_trainer(accelerator).evaluate(dataset, refs, tokens_per_pack=40, seed=0)
    return {"figures": figures, "ids_read": gather_object(dataset.ids_read)}


def stop_asked(accelerator: Accelerator) -> list[tuple[bool, bool]]:
    """Per process, whether it was to stop: after a step, and after one in which a signal came to the last process."""
    trainer, heard = make_trainer(accelerator), []
    with trainer.stop:
        for _ in range(2):
            pack = c23_pack([2])
            heard.append(trainer.take_step(1, step_of([pack]), iter([pack]), lr=0.0).stop_asked)
            if accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGUSR1)
    return gather_object([tuple(heard)])


def c23_steps() -> list[list[TrainingPack]]:
    """Good row and bad rows on different processes; no good row at all is left to its own test; a process short of a pack."""
    return [[c23_pack([2]), c23_pack([0, 1, 3])], [c23_pack([2]), c23_pack([0]), c23_pack([2])], [c23_pack([2])]]


def _on_each_process() -> None:
    accelerator = Accelerator(cpu=True)
    trainer = make_trainer(accelerator)
    found = {"c24": c24_step(accelerator) if accelerator.num_processes == 2 else None}
    found |= {"losses": [take(trainer, packs) for packs in c23_steps()], "weights": weights(trainer)}
    found |= {"c25": c25_evaluation(accelerator), "stop_asked": stop_asked(accelerator)}
    if accelerator.is_main_process:
        torch.save(found, Path(os.environ["OUT"]) / f"found-{accelerator.num_processes}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    for number in (2, 3):
        run_group(number, _on_each_process)
