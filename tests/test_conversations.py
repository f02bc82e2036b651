"""Chat data as people really have it: layouts, broken lines, doubled ids. The files are rebuilt from public fault reports."""

import io
import json
from pathlib import Path

import pytest

from dflash_train.config import DataFormat
from dflash_train.conversations import RowLedger, content_digest, read_conversations, read_prompts
from dflash_train.errors import UserError

CASES = Path(__file__).parent / "data" / "cases"
LAYOUTS = json.loads((CASES / "C14.json").read_text())["expect_messages"]


def read(*files, data_format=DataFormat.auto, strict=False, read=read_conversations):
    """Conversations, rejected rows and the ledger of `files`."""
    rejected = io.StringIO()
    ledger = RowLedger(rejected, strict)
    extra = {} if read is read_prompts else {"data_format": data_format}
    conversations = list(read([str(file) for file in files], ledger=ledger, **extra))
    assert ledger.num_kept == len(conversations)
    return conversations, [json.loads(line) for line in rejected.getvalue().splitlines()], ledger


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*texts, **columns):
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns, **columns}


@pytest.mark.parametrize("name", ["sharegpt", "perfectblend", "ultrachat", "specforge", "sharegpt_tools"])
def test_layouts_become_the_same_messages(name):
    conversations, rejected, _ = read(CASES / "C14" / f"{name}.jsonl")
    assert [conversation.messages for conversation in conversations] == LAYOUTS[f"{name}.jsonl"]
    assert rejected == []


def test_an_empty_system_turn_is_dropped():
    (conversation,), _, _ = read(CASES / "C14" / "nemotron_v2.jsonl")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_text_parts_are_joined_and_an_image_is_refused():
    conversations, rejected, _ = read(CASES / "C14" / "openai_parts.jsonl")
    assert [conversation.messages for conversation in conversations] == [LAYOUTS["openai_parts.jsonl"][0]]
    assert rejected[0]["reason"] == 'not a text: turn 1 has a part of type "image_url"'


@pytest.mark.parametrize(
    ("name", "columns"),
    [("unknown", "question_text, reply_text"), ("alpaca", "input, instruction, output"), ("preformatted", "id, text")],
)
def test_unknown_columns_are_named(name, columns):
    conversations, rejected, ledger = read(CASES / "C14" / f"{name}.jsonl")
    assert conversations == []
    assert all(f"unknown columns: found {columns}; wanted messages, conversations" in row["reason"] for row in rejected)
    with pytest.raises(UserError, match=f"data.files: no usable row; .*{name}.jsonl line 1: unknown columns: found {columns}"):
        ledger.require_some("data.files")


def test_a_stated_format_is_not_guessed_around(tmp_path):
    file = write(tmp_path / "chats.jsonl", chat("Hi", "Hello."))
    conversations, rejected, _ = read(file, data_format=DataFormat.sharegpt)
    assert conversations == []
    assert rejected[0]["reason"] == "no turns: `conversations` is null, wanted a list of turns"


def test_broken_lines_are_listed_with_file_and_line():
    file = CASES / "C16_broken.jsonl"
    conversations, rejected, ledger = read(file)
    assert [conversation.id for conversation in conversations] == ["b0", "b1", "b5", "b7"]
    assert [conversation.place.line for conversation in conversations] == [1, 3, 7, 9]
    assert conversations[0].messages[1]["content"] == "café 🙂"
    assert [(row["file"], row["line"]) for row in rejected] == [(str(file), line) for line in (4, 5, 6, 8)]
    kinds = ["not JSON", "not a text", "not UTF-8", "not a JSON object"]
    assert [row["reason"].partition(":")[0] for row in rejected] == kinds
    assert rejected[1]["reason"] == "not a text: lone surrogate U+D83D"
    assert (ledger.num_read, ledger.num_kept, ledger.num_rejected) == (8, 4, 4)


def test_strict_stops_at_the_first_bad_line():
    with pytest.raises(UserError, match=r"C16_broken.jsonl line 4: not JSON: .*data.strict=true"):
        read(CASES / "C16_broken.jsonl", strict=True)


@pytest.mark.parametrize("line", ['{"id": "x", "n": ' + "9" * 5000 + "}", "[" * 100_000, '{"messages": 1}', '"text"', "\ufeff\ufeff{}"])
def test_no_line_stops_the_reader(line, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(line + "\n" + json.dumps(chat("Hi", "Hello.")))
    conversations, rejected, _ = read(file)
    assert [conversation.place.line for conversation in conversations] == [2]
    assert [row["line"] for row in rejected] == [1]


def test_only_a_newline_ends_a_row(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(chat("one\u2028two", "three\x85four"), ensure_ascii=False), encoding="utf-8")
    (conversation,), _, _ = read(file)
    assert conversation.messages[0]["content"] == "one\u2028two"


def test_odd_conversations():
    conversations, rejected, ledger = read(CASES / "C13.jsonl")
    assert [conversation.id for conversation in conversations] == ["h2", "h5", "h6", "h7", "h8"]
    reasons = {row["id"]: row["reason"].partition(":")[0] for row in rejected}
    assert reasons == {
        "h0": "no turns",
        "h1": "no assistant turn",
        "h3": "no assistant turn",
        "h4": "empty turn",
        "h9": "unknown role",
        "h10": "no turns",
        "h11": "unknown columns",
        "h12": "empty turn",
    }
    assert ledger.num_read == 13
    by_id = {conversation.id: conversation.messages for conversation in conversations}
    assert by_id["h5"][-1] == {"role": "assistant", "content": "Oak."}  # the closing user turn is cut
    assert by_id["h6"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"tools": [{"name": "get_time"}]}, "tool definitions"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "unsupported key"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]}, "not a text"),
        ({"messages": [{"role": "user", "content": "Hi"}, "Hello."]}, "bad turn"),
        ({"system": "Be brief.", "messages": [{"role": "system", "content": "Be long."}]}, "two system texts"),
        ({"id": ["a"]}, "bad id"),
        ({"id": "a#turn2"}, "bad id"),
    ],
)
def test_what_would_be_lost_in_silence_rejects_the_row(columns, kind, tmp_path):
    conversations, rejected, _ = read(write(tmp_path / "chats.jsonl", chat("Hi", "Hello.") | columns))
    assert conversations == []
    assert rejected[0]["reason"].partition(":")[0] == kind


def test_one_id_with_two_contents_stops_the_run_and_names_it():
    with pytest.raises(UserError, match="C17.jsonl line 3: id 'c0' stands for another conversation at .*C17.jsonl line 1"):
        read(CASES / "C17.jsonl")


def test_exact_doubles_are_folded_and_counted(tmp_path):
    other = write(
        tmp_path / "more.jsonl", chat("Hi", "Hello.", id="a"), chat("Hi", "Hello."), chat("Hi", "Hello."), chat("Hi", "Hello.", id=7)
    )
    file = write(tmp_path / "chats.jsonl", chat("Hi", "Hello.", id="a"))
    conversations, _, ledger = read(file, other)
    ids = [conversation.id for conversation in conversations]
    assert ids == ["a", content_digest(chat("Hi", "Hello.")["messages"]), "7"]
    assert ledger.summary() == {"read": 5, "kept": 3, "folded": 2, "rejected": 0, "rejected_by_reason": {}}


def test_answers_keep_their_token_ids(tmp_path):
    row = {
        "id": "q",
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt_ids": [1, 2],
        "answer_ids": [3],
        "answer": "x",
        "target": "t",
    }
    file = write(tmp_path / "answers.jsonl", row, row | {"id": "r", "answer_ids": []}, row | {"id": "s", "answer_ids": [1.5]})
    (conversation,), rejected, _ = read(file)
    assert (conversation.answer.prompt_ids, conversation.answer.answer_ids, conversation.answer.target) == ([1, 2], [3], "t")
    assert [row["reason"].partition(":")[0] for row in rejected] == ["bad answer_ids"] * 2


def test_prompts_lose_their_closing_answer(tmp_path):
    rows = [
        chat("Hi", "Hello.", "And?", "Bye."),
        {"prompt": "Why?"},
        {"prompt": 3},
        {"conversations": [{"from": "gpt", "value": "Hello."}]},
    ]
    conversations, rejected, _ = read(write(tmp_path / "prompts.jsonl", *rows), read=read_prompts)
    assert [[message["content"] for message in conversation.messages] for conversation in conversations] == [
        ["Hi", "Hello.", "And?"],
        ["Why?"],
    ]
    assert [row["reason"].partition(":")[0] for row in rejected] == ["unknown columns", "no user turn"]


def test_a_missing_file_is_named_with_its_setting(tmp_path):
    with pytest.raises(UserError, match="data.files: .*nowhere.jsonl does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="regenerate.prompts: .* is not a file"):
        read(tmp_path, read=read_prompts)
