"""The README of an exported drafter: what it belongs to, how good it is and how that was measured, how to serve it.

Comes in: the exported `config.json`, the feature contract, and the report of `stage=evaluate` if there is one. Goes out: Markdown.
"""

from dataclasses import dataclass
from typing import Any

from dflash_train.config import LayerType, Weights
from dflash_train.layers import Convention, FeatureContract

_CHECKED = """\
| program | version | how this format was checked there |
|---|---|---|
| z-lab dflash | 0.1.0 | run, all layouts |
| vLLM | 0.33.0 | read |
| vLLM (CPU build) | 0.32.0 | run, all-full and all-sliding layouts |
| SGLang | 0.5.23 | read; its drafter module run on CPU |

Earlier versions may load the drafter without an error and draft from the wrong layers or without the window: vLLM 0.20.1 lacked both the
shift of the layer ids by one and the sliding windows. Serve with these versions or later ones."""

_MIXED = """\
This drafter mixes sliding and full layers: vLLM needs a GPU and its V2 model runner for that. 0.33 chooses it by itself where Triton is
present; otherwise set `VLLM_USE_V2_MODEL_RUNNER=1`. The V1 runner refuses the drafter at start-up."""


@dataclass(frozen=True)
class Provenance:
    """Where the drafter comes from."""

    target: str  # path or hub id of the target
    step: int  # optimizer steps of the exported checkpoint
    answers_from_target: str  # true, false or unknown: whether the target itself wrote the training answers
    report: dict[str, Any] | None  # report.json of stage=evaluate about these weights
    weights: Weights = Weights.raw  # raw, or ema: their moving average


def model_card(config: dict[str, Any], contract: FeatureContract, provenance: Provenance) -> str:
    """The card of a drafter with this `config.json` (as `zlab.zlab_config` makes it)."""
    sections = [
        "---\nlibrary_name: dflash\ntags:\n- dflash\n- speculative-decoding\n---",
        f"# DFlash drafter for {provenance.target}",
        _what_it_is(config, provenance),
        "## Acceptance\n\n" + _acceptance(provenance),
        "## Serving\n\n" + _serving(config),
        "## Feature contract\n\n" + _contract(contract),
    ]
    return "\n\n".join(sections) + "\n"


def _what_it_is(config: dict[str, Any], provenance: Provenance) -> str:
    block_size, mask_token_id = config["block_size"], config["dflash_config"]["mask_token_id"]
    return f"""\
A drafter for speculative decoding (DFlash, arXiv 2602.06036). It drafts {block_size - 1} tokens in one forward and works with this target
only: it reads the target's hidden states and borrows its embedding and head.

- Layers: {_layers(config)}, hidden size {config["hidden_size"]}
- Block size: {block_size}, the last committed token and {block_size - 1} mask tokens (id {mask_token_id})
- Training: {provenance.step} optimizer steps; answers written by the target itself: {provenance.answers_from_target}
- Weights: bfloat16, trained in float32{", moving average of the steps" if provenance.weights is Weights.ema else ""}"""


def _layers(config: dict[str, Any]) -> str:
    sliding = config["layer_types"].count(LayerType.sliding_attention)
    full = config["num_hidden_layers"] - sliding
    kinds = {f"{sliding} sliding (causal, window {config['sliding_window']})": sliding, f"{full} full (bidirectional in the block)": full}
    return " + ".join(text for text, count in kinds.items() if count)


def _acceptance(provenance: Provenance) -> str:
    report = provenance.report
    if report is None:
        return "tau: not measured (no report of `stage=evaluate` about these weights)."
    rows = ["| prompts | mode | tau | 95 % interval | verifications | answers from the target |", "|---|---|---|---|---|---|"]
    rows += [_row(measured) for measured in report["sets"]]
    meaning = f"""\
**tau** is answer tokens after the first per verification by the target, pooled over the prompts, greedy, tokens past the end not
counted: 1 is useless, {report["block_size"]} is perfect. `decode` ran speculative decoding with the target, `replay` walked stored
answers of held-out prompts, both with the drafter in {report["dtype"]}. Servers count before the end-of-sequence cut, so their figure is
slightly higher."""
    return "\n".join(rows) + "\n\n" + meaning


def _row(measured: dict[str, Any]) -> str:
    tau, interval = measured["tau"], measured["tau_ci95"]
    cells = [
        measured["prompts"],
        measured["mode"],
        "-" if tau is None else f"{tau:.3f}",
        "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        str(measured["num_verifications"]),
        measured["answers_from_target"],
    ]
    return f"| {' | '.join(cells)} |"


def _serving(config: dict[str, Any]) -> str:
    mixed = len(set(config["layer_types"])) > 1
    return "\n\n".join([_commands(config["block_size"]), *[_MIXED] * mixed, _CHECKED])


def _commands(block_size: int) -> str:
    return f"""\
`TARGET` is the target's path or hub id, `DRAFTER` this folder.

```bash
# vLLM
vllm serve TARGET --speculative-config '{{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": {block_size - 1}}}'
# SGLang
python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER \\
  --speculative-num-draft-tokens {block_size}
```

vLLM does not read the block size, hence `num_speculative_tokens` (block size - 1). With a quantised target, SGLang needs
`--speculative-draft-model-quantization unquant` as well."""


def _contract(contract: FeatureContract) -> str:
    layer_ids = contract.layer_ids
    intro = f"""\
The features are the residual streams after {len(layer_ids.ids)} of the target's {layer_ids.num_target_layers} decoder layers (0-based ids
{list(layer_ids.ids)}, before any final norm), {contract.hidden_size} wide each, concatenated in ascending order. The same layers as
each program writes them:"""
    rows = ["| convention | numbers |", "|---|---|"]
    rows += [f"| {convention.value} | {list(layer_ids.to_convention(convention))} |" for convention in Convention]
    identity = f"Target: {_flat(contract.target)}. Tokenizer: {_flat(contract.tokenizer)}. `contract.json` has the same for programs."
    return "\n\n".join([intro, "\n".join(rows), identity])


def _flat(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name} `{value}`" for name, value in identity.items())
