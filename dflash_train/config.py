"""Every setting: its name, type, default and one line with its unit. Imports no torch, so a typo is answered at once.

Comes in: the dictionary Hydra composed from `conf/config.yaml`, a recipe and the command line. Goes out: a `Config` of plain
dataclasses whose `__post_init__` checks what the settings alone can tell; what needs the target is checked in `target.py` and
`layers.py`. Only `cli.py`, the stages and `run_folder.py` see the whole `Config`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from dflash_train.errors import UserError


class Stage(StrEnum):
    """The stages in their order. `all` runs them; plan, which computes nothing, and verify, which reads all data, run only by name."""

    regenerate = "regenerate"
    prepare = "prepare"
    extract = "extract"
    verify = "verify"
    train = "train"
    evaluate = "evaluate"
    export = "export"
    plan = "plan"
    all = "all"


class DataFormat(StrEnum):
    """How a data file's rows are laid out; `auto` looks at each row's keys."""

    auto = "auto"
    messages = "messages"  # {"messages": [{"role", "content"}, ...]}
    sharegpt = "sharegpt"  # {"conversations": [{"from", "value"}, ...]}
    answers = "answers"  # the rows stage=regenerate writes


class Dtype(StrEnum):
    """Dtype of the target's weights and activations; `auto` is the checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LayerType(StrEnum):
    """Attention of one drafter layer: full is bidirectional in the block, sliding is causal and windowed."""

    full_attention = "full_attention"
    sliding_attention = "sliding_attention"


class InitFrom(StrEnum):
    """Where the drafter's first weights come from."""

    random = "random"
    target = "target"  # the target's last layers, where they fit (drafter_init.py)


class MixedPrecision(StrEnum):
    """Accelerate's name for the compute dtype; the master weights stay fp32."""

    no = "no"
    bf16 = "bf16"


class Schedule(StrEnum):
    """Learning rate after the warm-up."""

    cosine = "cosine"
    constant = "constant"
    wsd = "wsd"  # stays, then falls linearly over the last steps (train.decay_share)


class OptimizerKind(StrEnum):
    """What moves the matrices; norms and other vectors always take AdamW."""

    adamw = "adamw"
    muon = "muon"  # torch.optim.Muon, scaled so that the learning rate of adamw fits


class Loss(StrEnum):
    """What a slot is held to: the data token, or the target's own distribution (which needs features.teacher_state)."""

    ce = "ce"  # cross-entropy of the data token
    kl = "kl"  # KL(target || drafter)
    tv = "tv"  # total variation, half the sum of |p - q|: the share of drafted tokens that sampling would reject
    kl_tv = "kl_tv"  # (1-x) kl + x tv, x rising in the course of the run (train.tv_start)


class PositionWeights(StrEnum):
    """What the slots of a block weigh against each other."""

    decay = "decay"  # exp(-(k-1)/gamma) (train.decay_gamma)
    dpace = "dpace"  # follows the drafter's own probabilities (train.dpace_alpha)


class FeatureCodec(StrEnum):
    """How features are stored: bf16 two bytes a value, fp8 (e4m3, one scale per token and layer) one."""

    bf16 = "bf16"
    fp8 = "fp8"


class AttentionBackend(StrEnum):
    """How the training step computes attention (attention.py); `auto` is flex on CUDA and tiled elsewhere."""

    auto = "auto"
    dense = "dense"
    tiled = "tiled"
    flex = "flex"


class EvaluateMode(StrEnum):
    """`replay` walks stored answers without the target, `decode` runs the target, `both` does one after the other."""

    replay = "replay"
    decode = "decode"
    both = "both"


class Weights(StrEnum):
    """Which weights of a checkpoint: the trained ones (raw), their moving average (ema), or auto: ema where there is one."""

    auto = "auto"
    raw = "raw"
    ema = "ema"


@dataclass
class TargetConfig:
    path: str = MISSING  # local Hugging Face folder, or a hub id
    revision: str | None = None  # branch, tag or commit of a hub id
    dtype: Dtype = Dtype.auto  # weights and activations of the target
    attn_implementation: str | None = None  # as transformers names it; null lets transformers choose
    device_map: str | None = None  # as transformers names it; null puts the whole target on the process's device
    trust_remote_code: bool = False  # run Python code that comes with the target


@dataclass
class DataConfig:
    files: list[str] = field(default_factory=list)  # JSONL chats; empty: the answers of stage=regenerate in this run_dir
    format: DataFormat = DataFormat.auto  # layout of the rows; auto looks at each row's keys
    max_tokens: int = 4096  # tokens per sample; a longer sample is cut and counted
    heldout_share: float = 0.02  # share of conversations held out, 0 to below 1
    strict: bool = False  # stop at the first bad row instead of listing it in rejected.jsonl
    preview: int = 0  # samples printed with their supervised text marked
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template, e.g. enable_thinking

    def __post_init__(self) -> None:
        _positive("data.max_tokens", self.max_tokens)
        _share("data.heldout_share", self.heldout_share)
        _not_negative("data.preview", self.preview)


@dataclass
class PlanConfig:
    samples: int | None = None  # samples of the data that is to come; without effect once samples are prepared
    tokens_per_sample: int | None = None  # tokens of each of them, all supervised; without effect once samples are prepared
    num_processes: int = 1  # processes of extract and train, over all nodes, one device each
    device_memory_bytes: float | None = None  # memory of one device, e.g. 180e9; null: it is not judged
    device_flops: float | None = None  # peak FLOP per second of one device in the compute dtype, e.g. 2.25e15; null: no times
    utilisation: float = 0.4  # achieved share of device_flops, above 0 and at most 1
    disk_bytes: float | None = None  # room for features and checkpoints yet to be written; null: what is free where they go

    def __post_init__(self) -> None:
        _positive("plan.num_processes", self.num_processes)
        for name in ("samples", "tokens_per_sample", "device_memory_bytes", "device_flops", "disk_bytes"):
            if getattr(self, name) is not None:
                _positive(f"plan.{name}", getattr(self, name))
        if self.tokens_per_sample is not None and self.tokens_per_sample < 2:
            raise UserError(f"plan.tokens_per_sample={self.tokens_per_sample} must be at least 2: an anchor and a token after it")
        if not 0 < self.utilisation <= 1:
            raise UserError(f"plan.utilisation={self.utilisation} must be above 0 and at most 1: the achieved share of plan.device_flops")


@dataclass
class RegenerateConfig:
    prompts: list[str] = field(default_factory=list)  # JSONL rows with `messages`, `conversations` or `prompt`
    max_new_tokens: int = 2048  # tokens per answer
    sequences_per_forward: int = 16  # prompts decoded together, per process

    def __post_init__(self) -> None:
        _positive("regenerate.max_new_tokens", self.max_new_tokens)
        _positive("regenerate.sequences_per_forward", self.sequences_per_forward)


@dataclass
class FeaturesConfig:
    layer_ids: list[int] = MISSING  # 0-based decoder layers of the target, strictly increasing, 0 to N-2
    teacher_state: bool = False  # also keep the input of the target's final norm
    codec: FeatureCodec = FeatureCodec.bf16  # how a value is stored; the teacher state is always bf16
    dir: str = "${run_dir}/extract"  # folder of the feature dataset
    shard_tokens: int = 262144  # context tokens per shard, at least 16 times tokens_per_forward
    tokens_per_forward: int = 16384  # context tokens with padding in one forward, per process
    check_samples: bool = True  # recompute one sample per shard alone and stop when it differs; false only warns
    dry_run: bool = False  # show the plan, with size and free space, and stop

    def __post_init__(self) -> None:
        ids = self.layer_ids
        if ids != MISSING:
            if not ids:
                raise UserError("features.layer_ids=[] is empty: name at least one 0-based decoder layer of the target")
            if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
                raise UserError(f"features.layer_ids={list(ids)} must be strictly increasing, without duplicates")
            if ids[0] < 0:
                raise UserError(f"features.layer_ids={list(ids)}: {ids[0]} is negative; ids are 0-based decoder layers, 0 to N-2")
        _positive("features.tokens_per_forward", self.tokens_per_forward)
        if self.shard_tokens < 16 * self.tokens_per_forward:
            raise UserError(
                f"features.shard_tokens={self.shard_tokens} must be at least 16 times features.tokens_per_forward="
                f"{self.tokens_per_forward} (that is {16 * self.tokens_per_forward}), or grouping by length pads too much"
            )


@dataclass
class VerifyConfig:
    samples_per_shard: int | None = 4  # recomputed with the target and compared; 0: the target is not loaded; null: all

    def __post_init__(self) -> None:
        if self.samples_per_shard is not None:
            _not_negative("verify.samples_per_shard", self.samples_per_shard)


@dataclass
class DrafterConfig:
    num_layers: int = 5  # decoder layers of the drafter
    layer_types: list[LayerType] = field(default_factory=list)  # one per layer; empty: all full_attention
    sliding_window: int | None = None  # keys a query of a sliding layer sees, itself included
    block_size: int = 16  # slots per block: the anchor and block_size-1 drafted tokens
    mask_token_id: int = MISSING  # a row of the target's embedding that no text uses
    init_from: InitFrom = InitFrom.random  # first weights
    num_attention_heads: int | None = None  # null: the target's
    num_key_value_heads: int | None = None  # null: the target's
    head_dim: int | None = None  # null: the target's
    intermediate_size: int | None = None  # null: the target's
    rope_theta: float | None = None  # null: the target's
    rms_norm_eps: float | None = None  # null: the target's

    def __post_init__(self) -> None:
        _positive("drafter.num_layers", self.num_layers)
        if self.block_size < 2:
            raise UserError(f"drafter.block_size={self.block_size} must be at least 2: the anchor and one drafted token")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise UserError(
                f"drafter.layer_types has {len(self.layer_types)} entries, drafter.num_layers={self.num_layers}: name one per layer"
            )
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta", "rms_norm_eps"):
            if getattr(self, name) is not None:
                _positive(f"drafter.{name}", getattr(self, name))
        slides = LayerType.sliding_attention in self.layer_types
        if self.sliding_window is None:
            if slides:
                raise UserError("drafter.sliding_window is missing: a sliding_attention layer needs a window in tokens")
        elif not slides:
            raise UserError(
                f"drafter.sliding_window={self.sliding_window} has no effect: no entry of drafter.layer_types is sliding_attention"
            )
        elif self.sliding_window < self.block_size:
            raise UserError(
                f"drafter.sliding_window={self.sliding_window} is smaller than drafter.block_size={self.block_size}: "
                "a block must fit into the window"
            )

    @property
    def resolved_layer_types(self) -> list[str]:
        """One name per layer, as the exported config spells it."""
        return [str(t) for t in self.layer_types] or [str(LayerType.full_attention)] * self.num_layers


_POSITIVE_TRAIN_SETTINGS = (
    *("epochs", "lr", "tokens_per_step", "tokens_per_pack", "anchors_per_document", "shuffle_shards", "max_grad_norm"),
    *("log_every_steps", "evaluate_every_steps", "checkpoint_every_steps", "keep_checkpoints"),
)


@dataclass
class TrainConfig:
    max_steps: int | None = None  # optimizer steps; null: as many as epochs gives; raised, a run goes on
    epochs: float = 6.0  # passes over the training samples; max_steps, when set, decides instead
    optimizer: OptimizerKind = OptimizerKind.adamw  # of the matrices; vectors take AdamW
    lr: float = 6e-4  # peak learning rate
    schedule: Schedule = Schedule.cosine  # of the learning rate, after the warm-up
    warmup_share: float = 0.04  # share of the optimizer steps
    decay_share: float | None = None  # share of the optimizer steps, the last ones, in which wsd falls to 0; null: 0.2
    weight_decay: float = 0.0  # decoupled, on matrices only
    ema: float | None = None  # decay per optimizer step of a moving average of the weights, e.g. 0.999; null: no average
    max_grad_norm: float = 1.0  # global norm the gradient is clipped to
    max_nonfinite_steps: int = 10  # optimizer steps of a run that may be skipped because loss or gradient are not finite
    tokens_per_step: int = 262144  # context tokens per optimizer step, over all processes
    tokens_per_pack: int = 4096  # context tokens in one forward and backward; a longer document makes a pack of its own
    anchors_per_document: int = 512  # blocks at most per document and epoch; every position comes once before any comes twice
    loss: Loss = Loss.ce  # of a slot
    tv_start: float | None = None  # share of the optimizer steps after which kl_tv begins to turn from kl to tv; null: 0.5
    position_weights: PositionWeights = PositionWeights.decay  # of the slots of a block
    decay_gamma: float | None = None  # with decay, slot k weighs exp(-(k-1)/gamma); null: 7, 5 or 4 by block size
    dpace_alpha: float | None = None  # with dpace, what a hopeless slot leaves to those behind it, 0 to 1; null: 0.5
    shuffle_shards: int = 4  # shards whose samples are shuffled together
    mixed_precision: MixedPrecision = MixedPrecision.no  # compute dtype; master weights stay fp32
    attention: AttentionBackend = AttentionBackend.auto  # of the training step: dense, tiled or flex; auto picks by device
    compile: bool = False  # torch.compile of the layers: a minute or two at the start, then faster steps; left out without a compiler
    head_chunk_bytes: int | None = None  # bytes of logits held at once; null: 64 MiB on a CPU, 1 GiB on a GPU
    loader_workers: int = 1  # threads per rank that read ahead, a pack each; 0 reads when a pack is needed
    log_every_steps: int = 10  # optimizer steps between rows of metrics.jsonl
    evaluate_every_steps: int = 500  # held-out replay tau; the last step is always evaluated
    checkpoint_every_steps: int = 500  # the last step always writes one
    keep_checkpoints: int = 2  # newest checkpoints kept, besides the best
    heldout_documents: int | None = 256  # held-out samples replayed at each evaluation; null: all
    resume: bool = True  # continue from the newest checkpoint in run_dir; false refuses a folder that has one
    allow_incomplete_features: bool = False  # train although shards are missing
    wandb_project: str | None = None  # null: no wandb
    wandb_name: str | None = None  # null: wandb invents one

    def __post_init__(self) -> None:
        for name in ("max_steps", "decay_gamma", "heldout_documents", "head_chunk_bytes"):
            if getattr(self, name) is not None:
                _positive(f"train.{name}", getattr(self, name))
        for name in _POSITIVE_TRAIN_SETTINGS:
            _positive(f"train.{name}", getattr(self, name))
        _share("train.warmup_share", self.warmup_share)
        _not_negative("train.weight_decay", self.weight_decay)
        _not_negative("train.loader_workers", self.loader_workers)
        _not_negative("train.max_nonfinite_steps", self.max_nonfinite_steps)
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(f"train.ema={self.ema} must lie between 0 and 1, both excluded; null: no moving average")
        self._check_decay_share()
        self._check_objective()
        if self.tokens_per_pack > self.tokens_per_step:
            raise UserError(f"train.tokens_per_pack={self.tokens_per_pack} is larger than train.tokens_per_step={self.tokens_per_step}")

    def _check_decay_share(self) -> None:
        if self.schedule is not Schedule.wsd:
            if self.decay_share is not None:
                raise UserError(f"train.decay_share={self.decay_share} has no effect with train.schedule={self.schedule}, only with wsd")
        elif self.resolved_decay_share <= 0 or self.resolved_decay_share + self.warmup_share > 1 + 1e-9:
            raise UserError(
                f"train.decay_share={self.resolved_decay_share} must be greater than 0 and leave room for "
                f"train.warmup_share={self.warmup_share}: at most {1 - self.warmup_share:g}"
            )

    def _check_objective(self) -> None:
        uses: list[tuple[str, str, StrEnum, StrEnum]] = [
            ("tv_start", "loss", self.loss, Loss.kl_tv),
            ("decay_gamma", "position_weights", self.position_weights, PositionWeights.decay),
            ("dpace_alpha", "position_weights", self.position_weights, PositionWeights.dpace),
        ]
        for name, chooser, chosen, needed in uses:
            if getattr(self, name) is not None and chosen is not needed:
                raise UserError(f"train.{name}={getattr(self, name)} has no effect with train.{chooser}={chosen}, only with {needed}")
        _share("train.tv_start", self.resolved_tv_start)
        if self.dpace_alpha is not None and not 0 <= self.dpace_alpha <= 1:
            raise UserError(f"train.dpace_alpha={self.dpace_alpha} must be at least 0 and at most 1")

    @property
    def resolved_tv_start(self) -> float:
        """Share of the optimizer steps after which kl_tv begins to turn."""
        return 0.5 if self.tv_start is None else self.tv_start

    @property
    def resolved_dpace_alpha(self) -> float | None:
        """D-PACE's alpha, None with weights that decay."""
        return (0.5 if self.dpace_alpha is None else self.dpace_alpha) if self.position_weights is PositionWeights.dpace else None

    @property
    def resolved_decay_share(self) -> float:
        """Share of the optimizer steps in which wsd falls."""
        return 0.2 if self.decay_share is None else self.decay_share


@dataclass
class EvaluateConfig:
    mode: EvaluateMode = EvaluateMode.replay  # stored answers, real decoding with the target, or both
    checkpoint: str = "best"  # best, latest, or a checkpoint folder
    weights: Weights = Weights.auto  # of the checkpoint; auto: the moving average (train.ema) where there is one
    prompts: list[str] = field(default_factory=list)  # JSONL prompts for decode; empty: the held-out samples
    max_prompts: int | None = None  # prompts per set; null: all
    max_new_tokens: int = 512  # tokens per decoded answer

    def __post_init__(self) -> None:
        _positive("evaluate.max_new_tokens", self.max_new_tokens)
        if self.max_prompts is not None:
            _positive("evaluate.max_prompts", self.max_prompts)
        if self.prompts and self.mode == EvaluateMode.replay:
            raise UserError("evaluate.prompts has no effect with evaluate.mode=replay: replay walks stored held-out answers")


@dataclass
class ExportConfig:
    checkpoint: str = "best"  # best, latest, or a checkpoint folder
    weights: Weights = Weights.auto  # of the checkpoint; auto: the moving average (train.ema) where there is one
    dir: str = "${run_dir}/export"  # folder of the drafter that vLLM and SGLang read


@dataclass
class Config:
    stage: Stage = MISSING  # what to run
    run_dir: str = MISSING  # folder of everything this run writes
    seed: int = 0  # decides splits, shard plan, anchors, order and first weights
    debug: bool = False  # show the traceback of a user's mistake
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        if self.train.loss is not Loss.ce and not self.features.teacher_state:
            raise UserError(f"train.loss={self.train.loss} needs the target's distribution: set features.teacher_state=true and extract")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise UserError(f"{name}={value} must be greater than 0")


def _not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise UserError(f"{name}={value} must not be negative")


def _share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name}={value} must be at least 0 and below 1")
