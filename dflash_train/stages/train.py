"""stage=train: a drafter from the feature dataset, on any number of processes, resumable after a kill at any moment.

Reads the features, and of the target only its config, tokenizer, embedding, head and, for a loss against its distribution, final norm.
Writes into `run_dir/train`: `checkpoints/`, `best.json` (by held-out replay tau), `metrics.jsonl` and its picture `curves.png`. What
decides the weights is in each checkpoint's state and compared when a run continues: contract, data, seed and the settings of `_identity`.
Every step and draw is a function of these and of the number of steps, so a run that was killed or asked to stop (SIGTERM, SIGUSR1) ends
with the weights of one that was not. The number of steps may be raised.
"""

import random
import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from dflash_train.attention import resolve_backend
from dflash_train.blocks import eligible_anchors
from dflash_train.checkpoint import (
    latest_checkpoint,
    load_ema,
    load_optimizer,
    load_weights,
    read_state,
    record_best,
    remove_old_checkpoints,
    save_checkpoint,
)
from dflash_train.config import Config, InitFrom, Loss, MixedPrecision, Stage
from dflash_train.curves import write_curves
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.drafter_init import init_from_target
from dflash_train.ema import Ema
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.launch import from_main_process, keep_until_exit, make_accelerator
from dflash_train.layers import FeatureContract
from dflash_train.loss import Objective, head_chunk_bytes, tv_share_at
from dflash_train.optimizer import lr_at, make_optimizer
from dflash_train.packing import Coverage, RunPlan, pack_fill, usable
from dflash_train.progress import Progress
from dflash_train.run_folder import open_stage_dir, stage_dir
from dflash_train.target import check_layers_and_mask, contract_for, load_config, load_ends, load_teacher_head, load_tokenizer, text_config
from dflash_train.tracking import Tracker
from dflash_train.trainer import StepFigures, Trainer
from dflash_train.training_data import PackReader, TrainingPack, load_packs

# settings of `train` that may change when a run continues: they decide the weights no further than rounding, but for the number of steps,
# which the learning rate and the share of total variation follow
_FREE = {
    "attention",
    "compile",
    "max_steps",
    "epochs",
    "max_nonfinite_steps",
    "head_chunk_bytes",
    "loader_workers",
    "log_every_steps",
    "evaluate_every_steps",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "heldout_documents",
    "resume",
    "allow_incomplete_features",
    "wandb_project",
    "wandb_name",
}

_FIRST_STATE = {"step": 0, "epoch": 0, "skipped_steps": 0, "nonfinite_steps": 0, "best": None, "replay": None}


def run(config: Config) -> None:
    """Trains to the end of the plan, from the newest checkpoint of the run folder if there is one."""
    accelerator = make_accelerator(config.train.mixed_precision)
    dataset = FeatureDataset(stage_dir(config, Stage.extract), config.train.allow_incomplete_features)
    contract = _checked_contract(config, dataset)
    refs = _usable_samples(dataset, "train", accelerator.is_main_process)
    if not refs:
        raise UserError(f"{dataset.folder} has no training sample with two supervised tokens: there is nothing to train on")
    identity = _identity(config, dataset, contract, len(refs))
    checkpoint = _checkpoint_to_continue(config, identity)
    plan = _plan(config, refs)
    total_steps = config.train.max_steps or plan.num_steps(config.train.epochs)
    progress = read_state(checkpoint) if checkpoint else _FIRST_STATE | {"total_steps": total_steps}
    _compare_lengths(progress, total_steps, accelerator.is_main_process)
    train_dir = open_stage_dir(config, Stage.train, accelerator.is_main_process)

    trainer = _make_trainer(config, accelerator, dataset, refs, checkpoint)
    _Run(config, train_dir, dataset, plan, trainer, progress | identity | {"total_steps": total_steps}).train()
    accelerator.end_training()


def _plan(config: Config, refs: list[SampleRef]) -> RunPlan:
    settings = config.train
    return RunPlan(refs, config.seed, settings.tokens_per_step, settings.tokens_per_pack, settings.shuffle_shards)


def _compare_lengths(progress: dict[str, Any], total_steps: int, is_main_process: bool) -> None:
    """Says that a run goes on with another number of steps. Raises UserError when it has taken more already."""
    if total_steps < progress["step"]:
        raise UserError(
            f"train.max_steps or train.epochs give {total_steps} optimizer steps, but the run has taken {progress['step']}: "
            "a run can be made longer, not shorter than it is"
        )
    if total_steps != progress["total_steps"] and is_main_process:
        print(f"the learning rate schedule now spans {total_steps} instead of {progress['total_steps']} optimizer steps", flush=True)


def _checked_contract(config: Config, dataset: FeatureDataset) -> FeatureContract:
    """The contract of the settings, which has to be that of the features; before any weight is loaded."""
    features = config.features
    contract = contract_for(config.target, features.layer_ids, features.teacher_state, config.data.template_kwargs)
    contract.require_equal(dataset.contract, "the settings with their target", f"features {dataset.folder}")
    target = load_config(config.target)
    check_layers_and_mask(config.target, target, load_tokenizer(config.target), features.layer_ids, config.drafter.mask_token_id)
    return contract


def _usable_samples(dataset: FeatureDataset, split: str, is_main_process: bool) -> list[SampleRef]:
    refs = dataset.refs(split)
    found = usable(refs)
    if is_main_process and len(found) < len(refs):
        print(f"{len(refs) - len(found)} of {len(refs)} {split} samples are unusable: fewer than two supervised tokens", flush=True)
    return found


def _identity(config: Config, dataset: FeatureDataset, contract: FeatureContract, num_samples: int) -> dict[str, Any]:
    """What decides the weights, JSON-able."""
    settings = {f"train.{name}": value for name, value in asdict(config.train).items() if name not in _FREE}
    settings |= {f"drafter.{name}": value for name, value in asdict(config.drafter).items()}
    manifest = dataset.manifest
    features = {name: getattr(manifest, name) for name in ("codec", "target_dtype", "seed", "shard_tokens", "samples_digest")}
    return {
        "seed": config.seed,
        "contract": contract.to_dict(),
        "features": features | {"num_training_samples": num_samples},
        "answers_from_target": manifest.answers_from_target,
        "settings": settings,
    }


def _checkpoint_to_continue(config: Config, identity: dict[str, Any]) -> Path | None:
    """The newest checkpoint, if there is one. Raises UserError with both sides when it belongs to another run."""
    checkpoint = latest_checkpoint(stage_dir(config, Stage.train))
    if checkpoint is None:
        return None
    if not config.train.resume:
        raise UserError(f"train.resume=false, but there is {checkpoint}: choose another run_dir or delete that folder's checkpoints")
    state = read_state(checkpoint)
    there, here = (FeatureContract.from_dict(side["contract"]) for side in (state, identity))
    there.require_equal(here, f"checkpoint {checkpoint}", "this run")
    there, here = _flat(state), _flat(identity)
    differing = [f"{name}: {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
    if differing:
        raise UserError(f"{checkpoint} is of another run ({'; '.join(differing)}): choose another run_dir, or delete its train folder")
    return checkpoint


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    features = {f"features.{name}": value for name, value in identity["features"].items()}
    return {name: identity[name] for name in ("seed", "answers_from_target")} | features | identity["settings"]


def _make_trainer(
    config: Config, accelerator: Accelerator, dataset: FeatureDataset, refs: list[SampleRef], checkpoint: Path | None
) -> Trainer:
    """The drafter with the same first weights on every process, its optimizer, and the target's two tables."""
    text = text_config(load_config(config.target))
    torch.manual_seed(config.seed)
    drafter = DFlashDraftModel(drafter_config(config.drafter, dataset.contract.layer_ids, text, text.vocab_size)).float()
    drafter.attention = resolve_backend(config.train.attention, accelerator.device)
    if accelerator.is_main_process:
        print(f"train: attention {drafter.attention} on {accelerator.device}", flush=True)
    if config.train.compile:
        _compile(drafter, accelerator)
    if checkpoint is not None:
        load_weights(checkpoint, drafter)
    elif config.drafter.init_from is InitFrom.target:
        init_from_target(drafter, config.target, dataset.read(refs[0]).features_TLD)
    optimizer = make_optimizer(drafter.to(accelerator.device), config.train.weight_decay, config.train.optimizer)
    ema = Ema(drafter, config.train.ema) if config.train.ema else None
    if checkpoint is not None:
        load_optimizer(checkpoint, optimizer)
        if ema is not None:
            load_ema(checkpoint, ema)
    head_dtype = torch.bfloat16 if config.train.mixed_precision is MixedPrecision.bf16 else torch.float32
    return Trainer(
        accelerator=accelerator,
        drafter=drafter,
        model=keep_until_exit(accelerator.prepare(drafter)),
        optimizer=optimizer,
        ends=load_ends(config.target, accelerator.device, head_dtype),
        max_grad_norm=config.train.max_grad_norm,
        head_chunk_bytes=head_chunk_bytes(config.train.head_chunk_bytes, accelerator.device.type != "cpu"),
        ema=ema,
        teacher_head=None if config.train.loss is Loss.ce else load_teacher_head(config.target, accelerator.device, head_dtype),
    )


def _compile(drafter: DFlashDraftModel, accelerator: Accelerator) -> None:
    """Compiles the layers, or says why they run as they are."""
    try:
        torch.compile(torch.sin)(torch.ones(2, device=accelerator.device))
    except Exception as error:  # whatever the compiler lacks
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if accelerator.is_main_process:
            _warn(f"train.compile=true, but torch.compile does not work here, training goes on without it: {reason}")
        return
    drafter.compile_layers()


@dataclass
class _Rates:
    """Work and time of the steps since the last logged one."""

    num_packs: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    seconds: float = 0.0

    def add(self, figures: StepFigures, num_packs: int, seconds: float) -> None:
        self.num_packs += num_packs
        self.num_tokens += figures.num_tokens
        self.num_blocks += figures.num_blocks
        self.seconds += seconds

    def per_second(self) -> dict[str, float]:
        return {"tokens_per_second": self.num_tokens / self.seconds, "blocks_per_second": self.num_blocks / self.seconds}


class _Run:
    """The loop over the plan's steps: when it logs, evaluates and saves. `state` is what `state.json` holds."""

    def __init__(
        self, config: Config, train_dir: Path, dataset: FeatureDataset, plan: RunPlan, trainer: Trainer, state: dict[str, Any]
    ) -> None:
        self.config, self.settings, self.train_dir, self.dataset = config, config.train, train_dir, dataset
        self.plan, self.trainer, self.state = plan, trainer, state
        self.is_main_process = trainer.accelerator.is_main_process
        self.total_steps = state["total_steps"]
        self.heldout = self._heldout_samples()
        self.rates = _Rates()
        self.coverage: Coverage | None = None  # the main process has it, for the log

    def train(self) -> None:
        """Takes the steps that are left, or those until it is asked to stop, and says which checkpoint is the best one."""
        first = self.state["step"]
        if self.is_main_process:
            record_best(self.train_dir, self.state["best"])  # a kill may have come between a checkpoint and this record
        from_main_process(self.trainer.accelerator, self._begin_coverage)
        wandb = {"wandb_project": self.settings.wandb_project, "wandb_name": self.settings.wandb_name}
        with (
            self.trainer.stop,
            Tracker(self.train_dir, first, self.is_main_process, settings=asdict(self.config), **wandb) as tracker,
            Progress("train", self.total_steps, "steps", self.is_main_process) as progress,
            closing(self._packs(first)) as packs,
        ):
            progress.skip(first)
            for number, step in enumerate(self.plan.steps(first, self.total_steps), start=first + 1):
                started = time.monotonic()
                lr = self._lr(number - 1)
                figures = self.trainer.take_step(number, step, packs, lr, self._objective(number - 1))
                seconds = time.monotonic() - started
                self.rates.add(figures, len(step.packs), seconds)
                self.state |= {"step": number, "epoch": step.epoch, "replay": None}
                self.state["skipped_steps"] += figures.loss is None and figures.is_finite
                self.state["nonfinite_steps"] += not figures.is_finite
                progress.advance(1)
                if self.coverage is not None:
                    self.coverage.add([step])
                self._log(tracker, figures, lr, progress.seconds_left)
                if not figures.is_finite:
                    from_main_process(self.trainer.accelerator, self._refuse_many_nonfinite_steps)
                self._evaluate_and_save(tracker, progress, figures.stop_asked)
                progress.advance(0, self._note(figures, lr, seconds))
                if figures.stop_asked:
                    break
        if self.is_main_process:
            print(self._last_line(), flush=True)

    def _lr(self, step: int) -> float:
        settings = self.settings
        return lr_at(step, self.total_steps, settings.lr, settings.warmup_share, settings.schedule, settings.resolved_decay_share)

    def _objective(self, step: int) -> Objective:
        settings = self.settings
        match settings.loss:
            case Loss.ce:
                tv_share = None
            case Loss.kl:
                tv_share = 0.0
            case Loss.tv:
                tv_share = 1.0
            case Loss.kl_tv:
                tv_share = tv_share_at(step, self.total_steps, settings.resolved_tv_start)
        return Objective(tv_share, settings.resolved_dpace_alpha)

    def _last_line(self) -> str:
        step, folder = self.state["step"], self.train_dir / "checkpoints"
        if step == self.total_steps:
            return f"train: {step} steps, {self._best()}; checkpoints in {folder}"
        how = f"asked to stop, ended after step {step} of {self.total_steps} with a checkpoint in {folder}"
        return f"train: {how}; the same command continues"

    def _refuse_many_nonfinite_steps(self) -> None:
        num, limit = self.state["nonfinite_steps"], self.settings.max_nonfinite_steps
        if num > limit:
            raise UserError(
                f"{num} steps of the run were skipped because loss or gradient were not finite, more than "
                f"train.max_nonfinite_steps={limit}: look at the samples in the warnings, or start anew with a lower train.lr"
            )

    def _heldout_samples(self) -> list[SampleRef]:
        """The held-out samples to replay: the same random ones at every evaluation, because a shard's samples run by length."""
        refs = _usable_samples(self.dataset, "heldout", self.is_main_process)
        if not refs and self.is_main_process:
            print("warning: no held-out samples, so there will be no tau and no best checkpoint (data.heldout_share)", flush=True)
        num = self.settings.heldout_documents or len(refs)
        return random.Random(self.config.seed).sample(refs, min(num, len(refs)))

    def _begin_coverage(self) -> None:
        """Counts the eligible positions, and those that earlier launches used; says what an epoch is made of."""
        self.coverage = Coverage(
            {ref: len(eligible_anchors(self.dataset.read_loss_mask(ref))) for ref in self.plan.refs}, self.settings.anchors_per_document
        )
        self.coverage.add(self.plan.steps(0, self.state["step"]))
        steps = self.plan.epoch(0)
        packs = [pack for packs in steps for pack in packs]
        room = self.settings.tokens_per_pack
        print(
            f"train: {len(self.plan.refs):,} samples, {self.coverage.num_positions:,} eligible anchors; an epoch is {len(packs):,} packs "
            f"of {room:,} tokens, {pack_fill(packs, room):.1%} full, in {len(steps):,} steps; {self.total_steps:,} steps in all",
            flush=True,
        )
        if without := sum(not num for num in self.coverage.num_eligible.values()):
            _warn(f"{without} training samples have no two supervised tokens in a row: no block can be drawn from them")

    def _packs(self, first: int) -> Generator[TrainingPack, None, None]:
        settings, drafter, accelerator = self.settings, self.trainer.drafter, self.trainer.accelerator
        reader = PackReader(
            dataset=self.dataset,
            device=accelerator.device,
            seed=self.config.seed,
            anchors_per_document=settings.anchors_per_document,
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            gamma=settings.decay_gamma,
            teacher_state=settings.loss is not Loss.ce,
        )
        steps = self.plan.steps(first, self.total_steps)
        return load_packs(reader, steps, accelerator.process_index, accelerator.num_processes, settings.loader_workers)

    def _log(self, tracker: Tracker, figures: StepFigures, lr: float, seconds_left: float | None) -> None:
        if not self._is_due(self.settings.log_every_steps):
            return
        rates, self.rates = self.rates, _Rates()
        if self.coverage is None:
            return
        position = {name: self.state[name] for name in ("step", "epoch", "skipped_steps", "nonfinite_steps")}
        shown = {name: getattr(figures, name) for name in ("loss", "grad_norm", "train_anchor_tau", "train_acceptance_by_position")}
        data = {"coverage": self.coverage.share, "fill": rates.num_tokens / (rates.num_packs * self.settings.tokens_per_pack)}
        if self.settings.loss is Loss.kl_tv:
            shown["tv_share"] = self._objective(self.state["step"] - 1).tv_share
        tracker.log(position | shown | {"lr": lr} | data | rates.per_second() | {"seconds_left": seconds_left})

    def _evaluate_and_save(self, tracker: Tracker, progress: Progress, stop_asked: bool) -> None:
        """A new best is always saved, so that `best.json` never names a checkpoint that is not there."""
        is_new_best = False
        is_evaluation_due = self._is_due(self.settings.evaluate_every_steps)
        if self.heldout and is_evaluation_due:
            replay = self.trainer.evaluate(self.dataset, self.heldout, self.settings.tokens_per_pack, self.config.seed)
            tracker.log({"step": self.state["step"]} | replay)
            progress.say(f"step {self.state['step']}: {_evaluation_line(replay)}")
            best = self.state["best"]
            is_new_best = replay["tau"] is not None and (best is None or replay["tau"] > best["tau"])
            self.state["replay"] = replay
            if is_new_best:
                self.state["best"] = {"step": self.state["step"], "tau": replay["tau"]}
        if is_new_best or stop_asked or self._is_due(self.settings.checkpoint_every_steps):
            from_main_process(self.trainer.accelerator, self._save)
        if is_evaluation_due and self.is_main_process:
            self._draw()

    def _draw(self) -> None:
        """A picture that cannot be drawn is no reason to end a run."""
        try:
            write_curves(self.train_dir)
        except Exception as error:
            _warn(f"the curves of step {self.state['step']} are not drawn, training goes on: {' '.join(str(error).split())}")

    def _save(self) -> None:
        save_checkpoint(self.train_dir, self.trainer.drafter, self.trainer.optimizer, self.state, self.trainer.ema)
        record_best(self.train_dir, self.state["best"])
        remove_old_checkpoints(self.train_dir, self.settings.keep_checkpoints)

    def _is_due(self, every_steps: int) -> bool:
        return self.state["step"] % every_steps == 0 or self.state["step"] == self.total_steps

    def _note(self, figures: StepFigures, lr: float, seconds: float) -> str:
        """The step just taken, for the console."""
        if self.coverage is None:
            return ""
        step = f"loss {figures.loss:.4f}, gradient {figures.grad_norm:.3g}, " if figures.loss is not None else ""
        speed = f"{figures.num_tokens / seconds:,.0f} tokens/s"
        return f"{step}lr {lr:.2e}, {speed}, {self.coverage.share:.1%} covered, {self._best()}"

    def _best(self) -> str:
        best = self.state["best"]
        return f"best tau {best['tau']:.3f} at step {best['step']}" if best else "no tau yet"


def _evaluation_line(replay: dict[str, Any]) -> str:
    """An evaluation for the console; figures without data are left out."""
    parts = [f"held-out {name} {replay[name]:.3f}" for name in ("tau", "anchor_tau") if replay[name] is not None]
    if replay["tau_ci95"]:
        parts.insert(1, "95 % [{:.3f}, {:.3f}]".format(*replay["tau_ci95"]))
    shares = [f"{100 * share:.0f}" for share in replay["acceptance_by_position"] if share is not None]
    return ", ".join([*parts, f"right up to slot k: {' '.join(shares)} %"] if shares else [*parts, "nothing to verify"])


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
