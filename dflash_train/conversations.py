"""Reads chat data: JSONL files, row by row, into normalised messages that know the file and line they came from.

In: files with `messages` (role/content), ShareGPT `conversations` (from/value), or the rows of stage=regenerate; for prompts also
`prompt`. Out: `Conversation`s whose turns have a role of system, user, assistant or tool and a text. A row that cannot be used is
written to rejected.jsonl with its file, line, id and reason; the `RowLedger` accounts for every row.

Decisions, the same for every row: an empty system turn is dropped; turns after the last assistant turn are cut; an empty user or
assistant turn, an unknown role, tool definitions, tool calls and parts that are not text reject the row; blank lines are not rows.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from dflash_train.config import DataFormat
from dflash_train.errors import UserError

Messages = list[dict[str, str]]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
_UNREAD_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # text that dropping would lose in silence
_TURN_SUFFIX = re.compile(r"#turn\d+$")


class RowRejected(Exception):
    """One row cannot be used. The message reads `kind` or `kind: detail`; rows are counted by kind."""


@dataclass(frozen=True)
class Place:
    """Where a row stands: file and 1-based line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass(frozen=True)
class Answer:
    """A target's answer as token ids, and the digest of that target's identity (None when the row does not say)."""

    prompt_ids: list[int]
    answer_ids: list[int]
    target: str | None


@dataclass(frozen=True)
class Conversation:
    """One usable row. With an `answer`, `messages` are the prompt's turns alone."""

    place: Place
    id: str
    messages: Messages
    answer: Answer | None = None


class RowLedger:
    """Accounts for every row: `num_read` is what was kept, plus `num_folded` exact doubles, plus `num_rejected`.

    Rejected rows go to `file` as JSON lines. With `strict`, the first one raises UserError instead.
    """

    def __init__(self, file: TextIO, strict: bool) -> None:
        self.num_read = self.num_folded = self.num_rejected = 0
        self.kinds: Counter[str] = Counter()
        self.first: str | None = None
        self._file, self._strict = file, strict

    @contextmanager
    def rejecting(self, place: Place, row_id: str | None = None) -> Iterator[None]:
        """Lists the row when the body raises RowRejected."""
        try:
            yield
        except RowRejected as rejected:
            self.reject(place, row_id, str(rejected))

    def reject(self, place: Place, row_id: str | None, reason: str) -> None:
        if self._strict:
            raise UserError(f"{place}: {reason} (data.strict=true stops at the first bad row)")
        self.num_rejected += 1
        self.kinds[reason.partition(":")[0]] += 1
        self.first = self.first or f"{place}: {reason}"
        row = {"file": place.file, "line": place.line, "id": row_id, "reason": reason}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    @property
    def num_kept(self) -> int:
        return self.num_read - self.num_folded - self.num_rejected

    def require_some(self, setting: str) -> None:
        """Raises UserError when no row is left."""
        if self.num_kept == 0:
            why = f"all {self.num_rejected} rejected, the first: {self.first}" if self.first else "there are no rows in it"
            raise UserError(f"{setting}: no usable row; {why}")

    def summary(self) -> dict[str, Any]:
        return {
            "read": self.num_read,
            "kept": self.num_kept,
            "folded": self.num_folded,
            "rejected": self.num_rejected,
            "rejected_by_reason": dict(self.kinds.most_common()),
        }


def content_digest(value: Any) -> str:
    """32 hexadecimal digits that stand for a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_conversations(files: Sequence[str], data_format: DataFormat, ledger: RowLedger) -> Iterator[Conversation]:
    """The usable chats of `data.files` in order. Raises UserError for a missing file and for one id with two contents."""
    return _read("data.files", files, ledger, lambda place, row: _conversation(place, row, _layout(row, data_format)))


def read_prompts(files: Sequence[str], ledger: RowLedger, setting: str = "regenerate.prompts") -> Iterator[Conversation]:
    """The usable prompts of `files` in order: rows with `messages` or `conversations`, whose closing assistant turns are dropped,
    or with `prompt`, which becomes a user turn. Raises UserError like `read_conversations`."""
    return _read(setting, files, ledger, _prompt)


def _read(setting: str, files: Sequence[str], ledger: RowLedger, parse: Callable[[Place, dict], Conversation]) -> Iterator[Conversation]:
    """Checks the files at once and parses their rows as the caller asks for them."""
    for file in files:
        _require_file(setting, file)
    return _unique(files, ledger, parse)


def _unique(files: Sequence[str], ledger: RowLedger, parse: Callable[[Place, dict], Conversation]) -> Iterator[Conversation]:
    seen: dict[str, tuple[str, Place]] = {}
    for place, row in _rows(files, ledger):
        with ledger.rejecting(place, _stated_id(row)):
            conversation = parse(place, row)
            digest = _conversation_digest(conversation)
            first_digest, first_place = seen.setdefault(conversation.id, (digest, place))
            if first_digest != digest:
                raise UserError(f"{place}: id {conversation.id!r} stands for another conversation at {first_place}; ids must be unique")
            if first_place == place:
                yield conversation
            else:
                ledger.num_folded += 1


def _rows(files: Sequence[str], ledger: RowLedger) -> Iterator[tuple[Place, dict]]:
    for file in files:
        for place, line in _lines(file):
            ledger.num_read += 1
            with ledger.rejecting(place):
                yield place, _parse_line(line)


def _require_file(setting: str, file: str) -> None:
    if not os.path.exists(file):
        raise UserError(f"{setting}: {file} does not exist (seen from {os.getcwd()})")
    if not os.path.isfile(file):
        raise UserError(f"{setting}: {file} is not a file; name JSONL files")
    try:
        open(file, "rb").close()
    except OSError as error:
        raise UserError(f"{setting}: cannot read {file}: {error.strerror}") from error


def _lines(file: str) -> Iterator[tuple[Place, bytes]]:
    """Lines end at the newline byte alone: U+2028 and its like are text. A byte order mark is not part of the first line."""
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.strip()
            if line:
                yield Place(file, number), line


def _parse_line(line: bytes) -> dict:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowRejected(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise RowRejected(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise RowRejected(f"not JSON that can be read: {error}") from error
    if not isinstance(row, dict):
        raise RowRejected(f"not a JSON object: {type(row).__name__}")
    if b"\\u" in line:
        _refuse_lone_surrogates(row)
    return row


def _refuse_lone_surrogates(row: dict) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowRejected(f"not a text: lone surrogate U+{ord(error.object[error.start]):04X}") from error


def _layout(row: dict, data_format: DataFormat) -> DataFormat:
    if data_format != DataFormat.auto:
        return data_format
    if "answer_ids" in row:
        return DataFormat.answers
    if "messages" in row:
        return DataFormat.messages
    if "conversations" in row:
        return DataFormat.sharegpt
    raise _unknown_columns(row, "messages, conversations, or the columns of stage=regenerate")


def _unknown_columns(row: dict, wanted: str) -> RowRejected:
    return RowRejected(f"unknown columns: found {', '.join(sorted(row)) or 'none'}; wanted {wanted}")


def _conversation(place: Place, row: dict, layout: DataFormat) -> Conversation:
    if layout == DataFormat.answers:
        return _answer(place, row)
    messages = _messages(row, "messages" if layout == DataFormat.messages else "conversations")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise RowRejected("no assistant turn")
    return Conversation(place, _row_id(row, messages), messages)


def _prompt(place: Place, row: dict) -> Conversation:
    column = next((name for name in ("messages", "conversations") if name in row), None)
    if column is not None:
        messages = _messages(row, column)
    elif isinstance(row.get("prompt"), str):
        messages = _messages({"prompt": [{"role": "user", "content": row["prompt"]}]}, "prompt")
    else:
        raise _unknown_columns(row, "messages, conversations, or prompt with a text")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise RowRejected("no user turn")
    return Conversation(place, _row_id(row, messages), messages)


def _answer(place: Place, row: dict) -> Conversation:
    for name in ("messages", "prompt_ids", "answer_ids"):
        if name not in row:
            raise _unknown_columns(row, "messages, prompt_ids and answer_ids")
    messages = _messages(row, "messages")
    answer = Answer(_token_ids(row, "prompt_ids"), _token_ids(row, "answer_ids"), row.get("target"))
    return Conversation(place, _row_id(row, [messages, answer.answer_ids]), messages, answer)


def _token_ids(row: dict, column: str) -> list[int]:
    ids = row[column]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise RowRejected(f"bad {column}: must be a list of token ids, not empty")
    return ids


def _messages(row: dict, column: str) -> Messages:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise RowRejected(f"no turns: `{column}` is {_shown(turns)}, wanted a list of turns")
    if row.get("tools"):
        raise RowRejected("tool definitions: rows with `tools` are not supported")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "`system`")})
        if any(message["role"] == "system" and message["content"] for message in messages[1:]):
            raise RowRejected("two system texts: a `system` column and a system turn")
    return [message for message in messages if message["role"] != "system" or message["content"].strip()]


def _message(turn: Any, number: int) -> dict[str, str]:
    """One normalised turn of a row; `number` is 1-based."""
    if not isinstance(turn, dict):
        raise RowRejected(f"bad turn: turn {number} is {_shown(turn)}, wanted an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise RowRejected(f"unknown role: {_shown(role)} in turn {number}, wanted {', '.join(_ROLES)}")
    for key in _UNREAD_KEYS:
        if turn.get(key):
            raise RowRejected(f"unsupported key: `{key}` in turn {number}")
    text = _text(turn.get("content", turn.get("value")), f"turn {number}")
    if _ROLES[role] in ("user", "assistant") and not text.strip():
        raise RowRejected(f"empty turn: turn {number} ({_ROLES[role]}) has no text")
    return {"role": _ROLES[role], "content": text}


def _text(content: Any, where: str) -> str:
    """A text, or a list of text parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected(f"not a text: {where} holds {_shown(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RowRejected(f"not a text: {where} has a part of type {_shown(kind)}")
    return "".join(part["text"] for part in content)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _stated_id(row: dict) -> str | None:
    row_id = row.get("id")
    return str(row_id) if isinstance(row_id, str | int) and not isinstance(row_id, bool) and row_id != "" else None


def _row_id(row: dict, content: Any) -> str:
    """The row's own id, else the digest of its content."""
    row_id = _stated_id(row)
    if row_id is None and row.get("id") not in (None, ""):
        raise RowRejected(f"bad id: {_shown(row['id'])}, wanted a text or a whole number")
    if row_id is not None and _TURN_SUFFIX.search(row_id):
        raise RowRejected(f"bad id: {row_id!r} ends like the ids of samples made from single turns")
    return content_digest(content) if row_id is None else row_id


def _conversation_digest(conversation: Conversation) -> str:
    answer = conversation.answer
    return content_digest([conversation.messages, answer and [answer.prompt_ids, answer.answer_ids]])
