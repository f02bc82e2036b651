import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import dflash_train
from dflash_train.errors import UserError
from dflash_train.layers import Convention, FeatureContract, LayerIds, check_mask_token_id, refuse_residual_streams, zlab_spacing

CASES = Path(__file__).parent / "data" / "cases"
PACKAGE = Path(dflash_train.__file__).parent
HEADLINE = LayerIds((1, 16, 31, 46, 61), 64)


def case(name: str) -> dict:
    return json.loads((CASES / f"{name}.json").read_text())


# The worked example: a 64-layer target and ids [1, 16, 31, 46, 61], as each consumer writes them.
WRITTEN = {
    Convention.zlab: [1, 16, 31, 46, 61],
    Convention.transformers: [1, 16, 31, 46, 61],
    Convention.tensorrt_llm: [1, 16, 31, 46, 61],
    Convention.mlx: [1, 16, 31, 46, 61],
    Convention.hf_hidden_states: [2, 17, 32, 47, 62],
    Convention.vllm_aux: [2, 17, 32, 47, 62],
    Convention.sglang_capture: [2, 17, 32, 47, 62],
    Convention.speculators_aux: [2, 17, 32, 47, 62],
    Convention.gguf: [2, 17, 32, 47, 62],
    Convention.onnx_genai: [2, 17, 32, 47, 62],
}


@pytest.mark.parametrize("convention", Convention)
def test_conventions_in_both_directions(convention):
    assert list(HEADLINE.to_convention(convention)) == WRITTEN[convention]
    assert LayerIds.from_convention(convention, WRITTEN[convention], 64) == HEADLINE


def test_named_properties():
    ids = LayerIds((1, 3, 4), 6)
    assert ids.zlab == (1, 3, 4)
    expected = case("C01")["expect"]
    assert list(ids.hf_hidden_states) == expected["hf_indices"]
    assert list(ids.vllm_aux) == expected["vllm_aux_ids"]
    assert ids.num_hf_hidden_states == expected["hf_hidden_states_len"]
    assert ids.sglang_capture == ids.speculators_aux == ids.gguf == (2, 4, 5)


@pytest.mark.parametrize(
    ("ids", "num_layers", "name", "output_of", "allowed"),
    [([1, 3, 4, 6], 6, 6, 5, "0..4"), ([1, 16, 31, 46, 61, 78], 78, 78, 77, "0..76"), ([1, 16, 31, 46, 61, 64], 64, 64, 63, "0..62")],
)
def test_number_of_layers_is_not_a_layer(ids, num_layers, name, output_of, allowed):
    with pytest.raises(UserError) as error:
        LayerIds(tuple(ids), num_layers)
    message = str(error.value)
    assert f"{name} is not a layer of this target (0..{output_of})" in message
    assert f"another convention's name for the output of layer {output_of}" in message
    assert f"context features take {allowed}" in message


def test_last_layer_points_to_the_teacher_state():
    with pytest.raises(UserError, match=r"63 is the last layer.*before the final norm.*features\.teacher_state=true.*0\.\.62"):
        LayerIds((1, 63), 64)


def test_first_and_second_to_last_layers_are_valid():
    assert LayerIds((0, 62), 64).hf_hidden_states == (1, 63)


@pytest.mark.parametrize("row", case("C04")["rows"], ids=lambda row: row["name"])
def test_published_mistakes_in_drafter_configs(row):
    num_layers = row.get("num_target_layers", case("C04")["num_target_layers"])
    if row["expect"].startswith("accept"):
        config = row["draft_config"]
        ids = LayerIds.from_drafter_config(config, num_layers)
        assert list(ids.ids) == config.get("dflash_config", config)["target_layer_ids"]
    else:
        with pytest.raises(UserError) as error:
            LayerIds.from_drafter_config(row["draft_config"], num_layers)
        for word in {
            "negative": ["-1", "0..62"],
            "duplicate": ["[1, 5, 5, 29, 41]", "unique"],
            "unsorted": ["[31, 1, 16]", "increasing"],
            "empty": ["empty"],
            "missing_key": ["dflash_config.target_layer_ids"],
            "wrong_pair": ["33", "32 layers"],
            "conflict": ["target_layer_ids=[1, 2]", "dflash_config.target_layer_ids=[1, 3]"],
        }[row["name"]]:
            assert word in str(error.value)
        assert "\n" not in str(error.value)


def test_vllm_key_beside_target_layer_ids_has_to_name_the_same_layers():
    agreeing = {"dflash_config": {"target_layer_ids": [1, 3]}, "eagle_aux_hidden_state_layer_ids": [2, 4]}
    assert LayerIds.from_drafter_config(agreeing, 8).ids == (1, 3)
    unshifted = agreeing | {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    with pytest.raises(UserError, match=r"eagle_aux_hidden_state_layer_ids=\[1, 3\] \(layer ids \[0, 2\]\)"):
        LayerIds.from_drafter_config(unshifted, 8)


def test_speculators_config_is_read_through_the_inverse():
    assert LayerIds.from_drafter_config({"aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]}, 36).ids == (1, 9, 17, 25, 33)
    with pytest.raises(UserError, match=r"speculators.*\[2, 36\], which are layer ids \[1, 35\]: 35 is the last layer"):
        LayerIds.from_drafter_config({"aux_hidden_state_layer_ids": [2, 36]}, 36)
    with pytest.raises(UserError, match="-1 is not a layer"):  # 0 is their name for the embeddings
        LayerIds.from_convention(Convention.speculators_aux, [0, 2], 36)


@pytest.mark.parametrize("numbers", [["1", 3], [1.0, 3], [True, 3], "13", 3])
def test_numbers_have_to_be_whole(numbers):
    with pytest.raises(UserError, match="not a whole number|not a list"):
        LayerIds.from_drafter_config({"target_layer_ids": numbers}, 8)


def test_zlab_spacing():
    assert zlab_spacing(64, 5) == [1, 16, 31, 46, 61]
    assert zlab_spacing(36, 5) == [1, 9, 17, 25, 33]
    assert zlab_spacing(64, 1) == [32]
    with pytest.raises(UserError, match="increasing"):
        zlab_spacing(6, 5)


@pytest.mark.parametrize(("model_type", "count"), [("deepseek_v4", "hc_mult"), ("glm5_next", "hc_mult"), ("qwen4_exp", "hc_count")])
def test_targets_with_several_residual_streams_are_refused_by_name(model_type, count):
    with pytest.raises(UserError, match=f"{model_type}.*4 residual streams.*{count}=4"):
        refuse_residual_streams(SimpleNamespace(model_type=model_type, **{count: 4}))
    refuse_residual_streams(SimpleNamespace(model_type="plain"))


SPECIAL = {"pad": {256}, "eos": {257, 258}, "bos": set()}


def test_mask_token_may_be_any_unused_row():
    check_mask_token_id(300, 320, SPECIAL, used={1, 2, 3})


@pytest.mark.parametrize(
    ("mask_token_id", "why"),
    [(320, r"outside.*0\.\.319"), (-1, "outside"), (256, "pad token"), (258, "eos token"), (7, "occurs in the data")],
)
def test_mask_token_refusals_list_unused_ids(mask_token_id, why):
    with pytest.raises(UserError, match=f"drafter.mask_token_id={mask_token_id} .*{why}") as error:
        check_mask_token_id(mask_token_id, 320, SPECIAL, used={7, 318})
    assert "[314, 315, 316, 317, 319]" in str(error.value)


def contract(**changes) -> FeatureContract:
    fields = {
        "layer_ids": LayerIds((1, 3), 6),
        "hidden_size": 32,
        "teacher_state": False,
        "target": {"config": "aa", "weights": {"model.safetensors": "bb"}},
        "tokenizer": {"chat_template": "cc", "template_kwargs": {}},
    }
    return FeatureContract(**fields | changes)


def test_contract_survives_json():
    assert FeatureContract.from_dict(json.loads(json.dumps(contract().to_dict()))) == contract()
    with pytest.raises(UserError, match="hidden_size"):
        FeatureContract.from_dict({key: value for key, value in contract().to_dict().items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"layer_ids": LayerIds((1, 4), 6)}, "layer_ids: [1, 3] != [1, 4]"),
        ({"layer_ids": LayerIds((1, 3), 7)}, "num_target_layers: 6 != 7"),
        ({"hidden_size": 64}, "hidden_size: 32 != 64"),
        ({"teacher_state": True}, "teacher_state: False != True"),
        (
            {"target": {"config": "aa", "weights": {"model.safetensors": "b" * 99}}},
            f"target.weights.model.safetensors: bb != {'b' * 57}...",
        ),
        ({"tokenizer": {"chat_template": "dd", "template_kwargs": {}}}, "tokenizer.chat_template: cc != dd"),
    ],
)
def test_every_field_of_the_contract_is_compared(changes, difference):
    assert contract().differences(contract(**changes)) == [difference]
    with pytest.raises(UserError, match="config.*features/manifest.json") as error:
        contract().require_equal(contract(**changes), "the config", "features/manifest.json")
    assert difference in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_variable_that_is_null_is_not_one_that_is_absent():
    kwargs = [contract(tokenizer={"template_kwargs": value}) for value in ({}, {"thinking": None})]
    assert "tokenizer.template_kwargs.thinking: nothing != None" in kwargs[0].differences(kwargs[1])
    contract().require_equal(contract(), "a", "b")


# --- the shift stands in layers.py alone ---

LAYERS = ("layer", "aux", "hidden_states", "capture_point")


def shifted_layer_indices(source: str) -> list[str]:
    """Expressions that add 1 to, or take it from, something that is named after layers or runs over layers."""
    tree = ast.parse(source)
    running = {
        name.id
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For | ast.comprehension) and is_about_layers(loop.iter)
        for name in ast.walk(loop.target)
        if isinstance(name, ast.Name)
    }
    shifts = [node for node in ast.walk(tree) if is_shift(node) and (is_about_layers(node) or names_in(node) & running)]
    subscripts = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and is_about_layers(node.value) and any(map(is_shift, ast.walk(node.slice)))
    ]
    numbered = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "enumerate"
        and len(node.args) + len(node.keywords) > 1
        and is_about_layers(node.args[0])
    ]
    return [ast.unparse(node) for node in (*shifts, *subscripts, *numbered)]


def is_shift(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub)
        and any(isinstance(side, ast.Constant) and side.value == 1 for side in (node.left, node.right))
    )


def is_about_layers(node: ast.AST) -> bool:
    """Counts (`num_layers`) are no indices."""
    source = re.sub(r"\bnum_\w+", "", ast.unparse(node))
    return any(word in source for word in LAYERS)


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


@pytest.mark.parametrize(
    "source",
    [
        "aux = [i + 1 for i in layer_ids]",
        "state = hidden_states[index + 1]",
        "aux_id = layer_id + 1",
        "ids = [1 + i for i in ids.layer_ids]",
        "state = hidden_states[num_layers - 1]",
        "for i in contract.layer_ids.ids:\n    use(i - 1)",
        "for i, state in enumerate(layers, 1):\n    pass",
    ],
)
def test_the_scan_finds_a_shift(source):
    assert shifted_layer_indices(source)


@pytest.mark.parametrize(
    "source", ["block_size - 1", "num_layers - 1", "[a + 1 for a in anchors]", "for i in layer_ids:\n    use(i)", "ids[k + 1]"]
)
def test_the_scan_leaves_other_arithmetic_alone(source):
    assert not shifted_layer_indices(source)


def test_a_layer_index_is_shifted_in_layers_py_only():
    found = {str(path.relative_to(PACKAGE)): shifted_layer_indices(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert found.pop("layers.py")
    assert {path: shifts for path, shifts in found.items() if shifts} == {}


def test_layers_import_no_torch():
    source = ast.parse((PACKAGE / "layers.py").read_text())
    modules = {node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(source) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"collections.abc", "dataclasses", "enum", "typing", "dflash_train.errors"}
