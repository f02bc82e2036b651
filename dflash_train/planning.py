"""What a training takes before it runs: memory of a process by kind, floating-point operations by kind, disk and time.

Comes in: the sizes of drafter and pack, and the settings that cost memory. Goes out: bytes and FLOP per kind as plain dictionaries. Pure
arithmetic: nothing here reads a file or imports torch. `tests/test_planning.py` holds the memory to the measured peak of real steps within
15 %.

FLOP are those no correct step can do without: products at 2 per multiply-add, and attention over visible pairs only. Memory is what
autograd keeps of `drafter.py`, counted per context token and per slot, at the moments of a step when most is held (`step_memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

FP32_BYTES = 4
RUNTIME_BYTES = 1 << 30  # CUDA context, libraries and their workspaces: what a process holds before it has a tensor
_RESERVE_SHARE = 0.15  # of what comes and goes in a step: room that the allocator has cut too small to give out again

_BLOCKS_PER_TILE = 8  # what tiled attention takes where anchors are as dense as in training
_DENSE_GROUP_BYTES = 1 << 30  # `SCORES_BYTES` of attention.py: more scores are computed group by group, and again in the backward

Bytes = dict[str, int]
Flop = dict[str, float]


@dataclass(frozen=True)
class DrafterShape:
    """The sizes of a drafter and of the tables it borrows. `windows` has an entry per layer: its window in keys, None on a full layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    num_features: int  # captured target layers
    block_size: int
    vocab_size: int  # rows of the target's embedding and head
    tied_tables: bool = False  # embedding and head are one table

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's seven matrices."""
        return self.hidden_size * (2 * self.query_size + 2 * self.kv_size + 3 * self.intermediate_size)

    @property
    def num_matrix_parameters(self) -> int:
        return self.num_features * self.hidden_size**2 + len(self.windows) * self.layer_matrices

    @property
    def num_vector_parameters(self) -> int:
        """The norms: two per layer and of its queries and keys, `hidden_norm` and `norm`."""
        return len(self.windows) * (2 * self.hidden_size + 2 * self.head_dim) + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_matrix_parameters + self.num_vector_parameters


@dataclass(frozen=True)
class PackShape:
    """What one forward and backward sees: context tokens and blocks."""

    num_tokens: int
    num_blocks: int


@dataclass(frozen=True)
class StepSettings:
    """What else decides the memory of a process."""

    compute_bytes: int  # of a value in products: 2 with bf16, else 4
    muon: bool  # one state per matrix instead of AdamW's two
    ema: bool
    several_processes: bool  # DDP keeps its own copy of the gradients
    accumulates: bool  # more than one pack per process and step: gradients are held during the forward
    head_chunk_bytes: int
    dense_attention: bool = False  # else tiled or flex, which keep nothing of the size of the scores


# ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_flop(shape: DrafterShape, num_tokens: float, num_blocks: float, keys: Mapping[int | None, float]) -> Flop:
    """FLOP by kind of a step over `num_tokens` context tokens and `num_blocks` blocks, all slots but the anchors' counting.

    `keys` holds the context tokens that a block sees on average, by window (None: full layers). A trained matrix costs three products,
    `fc` two because features need no gradient, the frozen head two, and attention seven halves of its forward, whose scores are computed
    again in the backward.
    """
    hidden, num_slots = shape.hidden_size, num_blocks * shape.block_size
    on_context = hidden * 2 * shape.kv_size
    seen = sum(keys[window] + shape.block_size for window in shape.windows)
    return {
        "fc": 2 * 2 * num_tokens * shape.num_features * hidden**2,
        "layers": 3 * 2 * len(shape.windows) * (num_slots * shape.layer_matrices + num_tokens * on_context),
        "attention": 3.5 * 2 * 2 * num_slots * seen * shape.query_size,
        "head": 2 * 2 * num_blocks * (shape.block_size - 1) * hidden * shape.vocab_size,
    }


def mean_keys(num_tokens: int, num_supervised: int, window: int | None) -> float:
    """Context tokens that a block of a document sees on average; anchors lie evenly in its last `num_supervised` tokens, but the last."""
    first, end = num_tokens - num_supervised, num_tokens - 1
    if end <= first:
        return 0.0
    return (_sum_of_keys(end, window) - _sum_of_keys(first, window)) / (end - first)


def _sum_of_keys(end: int, window: int | None) -> int:
    """Sum over the anchors 0 to `end` - 1 of min(anchor, window)."""
    rising = end if window is None else min(end, window)
    return rising * (rising - 1) // 2 + (end - rising) * (window or 0)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_memory(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> dict[str, Bytes]:
    """Bytes by kind at the three moments of a step at which a process can hold most; the peak is the largest of their sums."""
    held = held_memory(shape, settings)
    gradients = FP32_BYTES * shape.num_parameters
    begun = gradients if settings.accumulates else 0
    kept, scratch = attention_memory(shape, pack, settings)
    saved = {
        "compute-dtype copies of weights": 2 * shape.num_matrix_parameters if settings.compute_bytes == 2 else 0,
        "features of a pack": _feature_bytes(shape, pack, settings),
        "activations of a pack": _activation_bytes(shape, pack, settings),
    }
    moments = {
        "head": {"gradients": begun} | saved | {"attention": kept, "head chunk": _head_bytes(shape, pack, settings)},
        "last layer's backward": {"gradients": max(begun, gradients // len(shape.windows))} | saved | {"attention": kept + scratch},
        "optimizer": {"gradients": gradients},
    }
    return {name: held | passing | {"reserve": round(_RESERVE_SHARE * sum(passing.values()))} for name, passing in moments.items()}


def peak_bytes(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> int:
    """The most that a process holds in a step, without `RUNTIME_BYTES`."""
    return max(sum(moment.values()) for moment in step_memory(shape, pack, settings).values())


def held_memory(shape: DrafterShape, settings: StepSettings) -> Bytes:
    """Bytes by kind that a process holds through all of a training."""
    num, tables = shape.num_parameters, 1 if shape.tied_tables else 2
    states = shape.num_matrix_parameters * (1 if settings.muon else 2) + shape.num_vector_parameters * 2
    return {
        "weights in fp32": FP32_BYTES * num,
        "optimizer": FP32_BYTES * states,
        "moving average": FP32_BYTES * num * settings.ema,
        "DDP buckets": FP32_BYTES * num * settings.several_processes,
        "frozen embedding and head": tables * settings.compute_bytes * shape.vocab_size * shape.hidden_size,
    }


def checkpoint_bytes(shape: DrafterShape, muon: bool, ema: bool) -> int:
    """Weights, optimizer and moving average of one checkpoint."""
    held = held_memory(shape, StepSettings(FP32_BYTES, muon, ema, several_processes=False, accumulates=False, head_chunk_bytes=0))
    return sum(held[kind] for kind in ("weights in fp32", "optimizer", "moving average"))


def _feature_bytes(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> int:
    """A pack's features in bf16, and what `fc` keeps of them in the compute dtype."""
    return pack.num_tokens * shape.num_features * shape.hidden_size * (2 + settings.compute_bytes)


def _activation_bytes(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> int:
    """What autograd keeps but for attention. A norm of n values keeps them and their normalised form in fp32, `8 * n` bytes."""
    c, hidden, num_slots = settings.compute_bytes, shape.hidden_size, pack.num_blocks * shape.block_size
    casts = 1 if c == FP32_BYTES else 5  # under autocast, each of q, k, v, gate and up makes its own copy of the norm's result
    inputs = 2 * hidden * c if casts == 1 else casts * hidden * c
    per_token = 8 * hidden + c * hidden + len(shape.windows) * 8 * shape.kv_size  # hidden_norm and its result; k_norm of each layer
    per_slot = 2 * 8 * hidden + inputs + 8 * (shape.query_size + shape.kv_size) + 4 * c * shape.intermediate_size
    ends = 8 * hidden + 3 * FP32_BYTES * hidden  # `norm`; embeddings, hidden states and their gradient
    return pack.num_tokens * per_token + num_slots * (len(shape.windows) * per_slot + ends)


def attention_memory(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> tuple[int, int]:
    """Bytes that attention keeps from all layers until the backward, and those it needs on top while one layer is computed.

    Every layer keeps queries and output of the slots, and keys and values of slots and context, in the compute dtype.
    """
    num_slots, c = pack.num_blocks * shape.block_size, settings.compute_bytes
    per_layer = c * (2 * num_slots * shape.query_size + 2 * (num_slots + pack.num_tokens) * shape.kv_size)
    kept, scratch = (_dense_scores if settings.dense_attention else _tiles)(shape, pack, settings)
    return len(shape.windows) * per_layer + kept, scratch


def _tiles(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> tuple[int, int]:
    """Masks of every kind of layer; on top the gradients of a layer, and scores, probabilities and gradients of a tile of a few blocks."""
    c, num_slots, blocks = settings.compute_bytes, pack.num_blocks * shape.block_size, min(_BLOCKS_PER_TILE, pack.num_blocks)
    keys = {
        window: min(pack.num_tokens, (window or pack.num_tokens) + pack.num_tokens * blocks // max(1, pack.num_blocks))
        for window in shape.windows
    }
    masks = sum(pack.num_blocks * num_keys * (shape.block_size if window else 1) for window, num_keys in keys.items())
    tile = 4 * c * blocks * shape.block_size * shape.num_heads * (max(keys.values()) + blocks * shape.block_size)
    layer = 2 * c * num_slots * (shape.query_size + shape.kv_size) + 2 * FP32_BYTES * pack.num_tokens * shape.kv_size
    return masks, layer + tile


def _head_bytes(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> int:
    """A chunk of logits in the compute dtype; what is computed from it goes in slabs, or on a GPU within the same bytes."""
    block_bytes = shape.block_size * shape.vocab_size * settings.compute_bytes
    num_blocks = min(max(1, settings.head_chunk_bytes // block_bytes), pack.num_blocks)
    return num_blocks * block_bytes


def _dense_scores(shape: DrafterShape, pack: PackShape, settings: StepSettings) -> tuple[int, int]:
    """Scores of all blocks with the whole pack: kept from all layers, and needed on top.

    Measured peaks ask for three more of a layer's scores, or, where groups are computed again, one and a half of a group's.
    """
    num_keys = pack.num_tokens + shape.block_size
    block_scores = shape.block_size * shape.num_heads * num_keys
    group = max(1, _DENSE_GROUP_BYTES // (FP32_BYTES * block_scores))
    masks = sum(pack.num_blocks * pack.num_tokens * (shape.block_size if window else 1) for window in shape.windows)
    scores = settings.compute_bytes * min(group, pack.num_blocks) * block_scores
    if pack.num_blocks > group:
        return masks, 3 * scores // 2
    return masks + len(shape.windows) * scores, 3 * scores
