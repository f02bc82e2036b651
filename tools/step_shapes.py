"""The work of one training step in numbers: shapes, seeded tensors, the floating-point operations needed, and how a step is measured.

Comes in: a shape by name (S, M, X) or as `key=value,...`. Goes out: the same features, ids, anchors, tables and drafter weights for
every trainer that is compared, and its cost in the process that asks. The same file serves our environment and that of the peers, so it
imports torch and the standard library only.

S is a small drafter of SmolLM2-135M on 4 documents, M one of a 0.6B target with a large vocabulary on one long document; X is tiny, for
values and not for speed. Anchors always leave room for a whole block, and everything is supervised.
"""

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GAMMA = 7.0  # slot k weighs exp(-(k-1)/GAMMA)
LR = 1e-4
MAX_GRAD_NORM = 1.0
ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-6
_LAYER_TYPES = {"s": "sliding_attention", "f": "full_attention"}
_PRODUCT = {"cpu": (2048, 1024, 3072), "cuda": (8192, 8192, 8192)}  # rows, inner size, columns


@dataclass(frozen=True)
class StepShape:
    """What one optimizer step computes. Raises ValueError for sizes that do not fit together."""

    name: str
    num_sequences: int
    num_tokens: int  # context tokens per sequence
    num_anchors: int  # per sequence
    block_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layers: str  # a letter per drafter layer: s = sliding window, f = full
    sliding_window: int
    target_layer_ids: str  # captured target layers as z-lab counts them, like 1:7:13
    num_target_layers: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if not self.layers or not set(self.layers) <= set(_LAYER_TYPES):
            raise ValueError(f"layers={self.layers} must be one letter per layer: s (sliding window) or f (full)")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        if self.num_anchors > self.num_tokens - self.block_size - 1:
            raise ValueError(f"num_anchors={self.num_anchors} must be at most num_tokens - block_size - 1")
        if not all(part.isdecimal() for part in self.target_layer_ids.split(":")):
            raise ValueError(f"target_layer_ids={self.target_layer_ids} must be whole numbers between colons, like 1:7:13")
        if not all(0 <= layer_id < self.num_target_layers - 1 for layer_id in self.layer_ids):
            raise ValueError(f"target_layer_ids={self.target_layer_ids} must lie between 0 and num_target_layers - 2")

    def __str__(self) -> str:
        """What `parse_shape` reads."""
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())

    @property
    def layer_types(self) -> list[str]:
        """A drafter layer's type as configs spell it."""
        return [_LAYER_TYPES[letter] for letter in self.layers]

    @property
    def layer_ids(self) -> list[int]:
        """The captured target layers, z-lab's count."""
        return [int(layer_id) for layer_id in self.target_layer_ids.split(":")]

    @property
    def mask_token_id(self) -> int:
        """The last row of the embedding; no id of the inputs."""
        return self.vocab_size - 1

    @property
    def context_tokens(self) -> int:
        """Of one step."""
        return self.num_sequences * self.num_tokens

    @property
    def num_slots(self) -> int:
        """Of one step, anchors included."""
        return self.num_sequences * self.num_anchors * self.block_size


_S = StepShape(
    name="S",
    num_sequences=4,
    num_tokens=512,
    num_anchors=32,
    block_size=16,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49_152,
    layers="ssf",
    sliding_window=128,
    target_layer_ids="1:7:13:20:27",
    num_target_layers=30,
)
_M = StepShape(
    name="M",
    num_sequences=1,
    num_tokens=2048,
    num_anchors=128,
    block_size=16,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    layers="ssssf",
    sliding_window=512,
    target_layer_ids="1:7:13:19:25",
    num_target_layers=28,
)
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 512}
_X = replace(_S, name="X", num_sequences=2, num_tokens=96, num_anchors=6, block_size=8, sliding_window=24, **_TINY)
SHAPES = {shape.name: shape for shape in (_S, _M, _X)}


def parse_shape(text: str) -> StepShape:
    """S, M, X, or `key=value,...` with the fields of `StepShape`; those that are missing are taken from the shape `like` (S if not given).

    Raises ValueError.
    """
    if text in SHAPES:
        return SHAPES[text]
    settings = dict(part.partition("=")[::2] for part in text.split(","))
    like = settings.pop("like", "S")
    kinds = {field.name: field.type for field in fields(StepShape)}
    if like not in SHAPES or not settings or not settings.keys() <= kinds.keys():
        raise ValueError(f"{text}: is neither of {', '.join(SHAPES)} nor key=value,... with the keys like, {', '.join(kinds)}")
    settings.setdefault("name", f"{like}*")
    for key, value in settings.items():
        if kinds[key] is int and not value.isdecimal():
            raise ValueError(f"{key}={value} must be a whole number")
    return replace(SHAPES[like], **{key: kinds[key](value) for key, value in settings.items()})


def shape_argument(text: str) -> StepShape:
    """`parse_shape` for argparse, which would not show the reason of a ValueError."""
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StepInputs:
    """B sequences of T tokens with A anchors each, ascending; features are those of the L captured layers behind one another."""

    features: Tensor  # [B, T, L * D]
    last_hidden: Tensor  # [B, T, D]: the target's last state, which some objectives take as teacher
    ids: Tensor  # int64 [B, T]
    anchors: Tensor  # int64 [B, A]


def step_inputs(shape: StepShape, dtype: torch.dtype) -> StepInputs:
    """The same values in every process; no id is the mask token."""
    generator = torch.Generator().manual_seed(1234)
    batch = (shape.num_sequences, shape.num_tokens)
    features = torch.randn(*batch, len(shape.layer_ids) * shape.hidden_size, generator=generator).to(dtype)
    last_hidden = torch.randn(*batch, shape.hidden_size, generator=generator).to(dtype)
    ids = torch.randint(0, shape.mask_token_id, batch, generator=generator)
    places = shape.num_tokens - shape.block_size - 1
    drawn = [torch.randperm(places, generator=generator)[: shape.num_anchors].sort().values + 1 for _ in range(shape.num_sequences)]
    return StepInputs(features, last_hidden, ids, torch.stack(drawn))


def frozen_tables(shape: StepShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding and output head [V, D] of the target."""
    generator = torch.Generator().manual_seed(99)
    size = (shape.vocab_size, shape.hidden_size)
    embedding = _small(*size, generator=generator, dtype=dtype)
    return embedding, _small(*size, generator=generator, dtype=dtype)


def drafter_weights(shape: StepShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """The drafter's first weights by z-lab's names: norms are 1, matrices small and random."""
    generator = torch.Generator().manual_seed(7)
    hidden, mlp, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    sizes: dict[str, tuple[int, ...]] = {"fc": (hidden, len(shape.layer_ids) * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    sizes |= {f"layers.{i}.{name}": size for i in range(len(shape.layers)) for name, size in layer.items()}
    return {
        f"{name}.weight": torch.ones(size, dtype=dtype) if len(size) == 1 else _small(*size, generator=generator, dtype=dtype)
        for name, size in sizes.items()
    }


def _small(*size: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(*size, generator=generator).mul_(0.02).to(dtype)


def needed_flop(shape: StepShape, anchors: Tensor) -> float:
    """Floating-point operations that no correct step can do without: products at 2 per multiply-add, attention over visible pairs only.

    A trained matrix costs three products, `fc` two because its input needs no gradient, the frozen head two over the K-1 slots that count,
    and attention seven halves of its forward (backward with the scores computed again).
    """
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    context, slots = shape.context_tokens, shape.num_slots
    fc = 2 * 2 * context * len(shape.layer_ids) * hidden * hidden
    on_slots = slots * hidden * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    layers = 3 * 2 * len(shape.layers) * (on_slots + context * 2 * hidden * keys)
    head = 2 * 2 * (slots * (shape.block_size - 1) // shape.block_size) * hidden * shape.vocab_size
    seen = {"f": anchors, "s": anchors.clamp(max=shape.sliding_window)}
    pairs = sum(int(((seen[letter] + shape.block_size) * shape.block_size).sum()) for letter in shape.layers)
    return float(fc + layers + head + 3.5 * 2 * 2 * pairs * queries)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StepValues:
    """What a step says of itself; the norm is that before clipping."""

    loss: float
    grad_norm: float


def measure(take_step: Callable[[], StepValues], dtype: torch.dtype, num_steps: int, device: str = "cpu") -> dict[str, Any]:
    """One step to warm up, then `num_steps` measured ones, none if 0; `device` is where the steps run.

    On a CPU `cpu_s` are the CPU seconds of all threads of this process and `peak_mb` is its memory from its start on. On a GPU, where a
    CPU second says little, `gpu_s` are seconds of the clock from an idle GPU to an idle GPU, and `gpu_peak_mb` is what tensors had at
    most there during the measured steps.
    """
    before = product_gflops(dtype, device=device) if num_steps else None
    first = take_step()
    figures: dict[str, Any] = {"device": device_name(device)} | asdict(first)
    if num_steps:
        figures |= _cuda_cost(take_step, num_steps) if device == "cuda" else _cpu_cost(take_step, num_steps)
        figures |= {"product_gflops": [before, product_gflops(dtype, device=device)]}
    return figures


def device_name(device: str) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def _cpu_cost(take_step: Callable[[], StepValues], num_steps: int) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        take_step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu_s": cpu / num_steps, "wall_s": wall / num_steps, "peak_mb": peak_mb()}


def _cuda_cost(take_step: Callable[[], StepValues], num_steps: int) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()  # neither the products nor what compiling tried out
    wall = time.perf_counter()
    for _ in range(num_steps):
        take_step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - wall) / num_steps
    return {"gpu_s": seconds, "wall_s": seconds, "gpu_peak_mb": torch.cuda.max_memory_allocated() / (1 << 20)}


def product_gflops(dtype: torch.dtype, tries: int = 12, device: str = "cpu") -> float:
    """Speed of one well-shaped matrix product, GFLOP per CPU second or per second of the GPU: the best of `tries`, after one to warm up."""
    rows, inner, columns = _PRODUCT[device]
    left, right = (torch.randn(*size, dtype=dtype, device=device) for size in ((rows, inner), (inner, columns)))
    time_product = _cuda_seconds if device == "cuda" else _cpu_seconds
    seconds = [time_product(lambda: torch.mm(left, right)) for _ in range(tries + 1)]
    return 2 * rows * inner * columns / min(seconds[1:]) / 1e9


def _cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _cuda_seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_mb() -> float:
    """Peak resident memory of this process in MiB, without what its parent had when it started it, which ru_maxrss counts on Linux."""
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1024
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of a process that measures one trainer."""
    parser.add_argument("--shape", type=shape_argument, default=SHAPES["S"], help="S, M, X or key=value,... (default: S)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="bf16 keeps fp32 master weights (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="measured ones, after one to warm up (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--loss-only", action="store_true", help="only the loss and the gradient norm of the first step")


def print_figures(arguments: argparse.Namespace, make_step: Callable[[], Callable[[], StepValues]], device: str = "cpu") -> None:
    """Measures the step that `make_step` builds, and prints one line of JSON; whatever else is printed meanwhile goes to stderr."""
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.dtype]
    with contextlib.redirect_stdout(sys.stderr):
        torch.manual_seed(0)
        figures = measure(make_step(), dtype, 0 if arguments.loss_only else arguments.steps, device)
        figures |= {"needed_gflop": needed_flop(arguments.shape, step_inputs(arguments.shape, dtype).anchors) / 1e9}
    print(json.dumps(figures | {"torch": torch.__version__}), flush=True)
