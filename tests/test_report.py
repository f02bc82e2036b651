"""The report says what was measured, in figures a reader can find again."""

import json

from dflash_train.acceptance import Walk, summarize
from dflash_train.report import console_lines, markdown, write_report


def example() -> dict:
    summary = summarize([Walk("a", [3, 0, 1], [4, 1, 1]), Walk("b", [0], [1])], block_size=4, seed=0)
    decoded = {
        "tokens_per_second_plain": 20.0,
        "tokens_per_second_speculative": 15.5,
        "answers_compared": 30,
        "answers_equal": 28,
        "answers_near_tie": 2,
        "answers_different": 0,
        "replay_tau": 1.7462,
        "replay_decoded_tau": 1.75,
        "replay_compared": 30,
        "replay_difference_percent": -0.2,
        "stored_answers_equal": 27,
    }
    return {
        "target": "models/tiny",
        "checkpoint": "step-00000020",
        "step": 20,
        "weights_kind": "ema",
        "block_size": 4,
        "layer_ids": [1, 3],
        "sets": [
            {"prompts": "heldout", "mode": "replay", **summary, "answers_from_target": "unknown"},
            {"prompts": "heldout", "mode": "decode", **summary, **decoded, "answers_from_target": "true"},
        ],
    }


def test_files_are_written(tmp_path):
    write_report(tmp_path, example())
    write_report(tmp_path, example())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["acceptance.png", "report.json", "report.md"]
    assert json.loads((tmp_path / "report.json").read_text()) == example()
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_page_has_a_row_per_set_and_per_number_of_accepted_tokens():
    page = markdown(example())
    assert "drafter `step-00000020` (step 20, ema weights), block size 4" in page
    assert "| heldout | replay | 1.750 | [1.000, 2.000] | 1.500 | 2 | 4 | unknown |" in page
    assert "| heldout | 20.000 | 15.500 | 30 | 28 | 2 | 0 | 1.746 | 27 |" in page
    assert "| 0 | 2 | - | - |\n| 1 | 1 | 50.0% | 50.0% |\n| 2 | 0 | 25.0% | 50.0% |\n| 3 | 1 | 25.0% | 100.0% |" in page


def test_figures_without_data_show_as_a_dash(tmp_path):
    report = example()
    report["sets"] = [{"prompts": "heldout", "mode": "replay", **summarize([], block_size=4, seed=0), "answers_from_target": "true"}]
    write_report(tmp_path, report)
    assert "| heldout | replay | - | - | - | 0 | 0 | true |" in markdown(report)


def test_console_ends_with_the_comparison_to_plain_decoding():
    lines = console_lines(example())
    assert lines[0].startswith("heldout, replay: tau 1.750 [1.000, 2.000]")
    assert lines[2].startswith("same 30 prompts: replay tau 1.746, decoded tau 1.750")
    assert "difference -0.20 %" in lines[2] and "27 of 30" in lines[2]
    assert lines[-2] == "plain 20.000 tokens/s, speculative 15.500 tokens/s"
    assert lines[-1] == "30 answers: 28 equal plain greedy decoding token for token, 2 near-ties, 0 different"
