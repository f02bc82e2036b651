"""Messages -> token ids and a loss mask that is proven by token prefixes, never guessed from text.

In: the target's tokenizer with its own chat template, and the template's variables (`data.template_kwargs`). Out: `TokenSample`s.

What the target writes in turn i is what follows the *generation prompt*: the rendering of the turns before it with
`add_generation_prompt=True`. So if the ids of that prompt are a prefix of the ids of the turns up to and including i, the rest is
the assistant's text and its end-of-turn token. When these turns are prefixes of the whole conversation as well, it becomes one
sample with several supervised spans; when the template rewrites old turns (drops their reasoning, say), every assistant turn becomes
a sample of its own, ending there; when not even the generation prompt is a prefix, the row is rejected.

A span ends with the first token the target stops at; templates without one lose trailing whitespace tokens instead. Assistant turns
before the first user turn are context: nobody asked for them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from dflash_train.conversations import Conversation, Messages, RowRejected
from dflash_train.errors import UserError

_RENDER_ARGUMENTS = {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)  # what Python code inside a template raises


@dataclass(frozen=True)
class TokenSample:
    """Token ids [T] and which of them the target wrote [T]; `turn` is the 0-based turn a sample of a single turn ends with."""

    input_ids: list[int]
    loss_mask: list[bool]
    turn: int | None = None

    @property
    def has_supervised_pair(self) -> bool:
        """Two supervised tokens in a row: an anchor and a token to predict."""
        return any(a and b for a, b in zip(self.loss_mask, self.loss_mask[1:], strict=False))

    def cut(self, max_tokens: int) -> "TokenSample":
        return TokenSample(self.input_ids[:max_tokens], self.loss_mask[:max_tokens], self.turn)


@dataclass(frozen=True)
class _Turn:
    """Assistant turn `index`: ids of the turns up to and including it; its text is [start, end)."""

    index: int
    ids: list[int]
    start: int
    end: int


class ChatTemplate:
    """The target's chat template. Raises UserError when there is none, RowRejected when it fails on a row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], stop_ids: Collection[int]) -> None:
        if not tokenizer.chat_template:
            raise UserError(f"target.path: the tokenizer in {tokenizer.name_or_path} has no chat template, so chats cannot become tokens")
        taken = sorted(_RENDER_ARGUMENTS & template_kwargs.keys())
        if taken:
            raise UserError(f"data.template_kwargs.{taken[0]} is no template variable: dflash_train sets it itself")
        self._tokenizer, self._variables, self._stop_ids = tokenizer, dict(template_kwargs), frozenset(stop_ids)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Ids of the turns and the header after which the target writes."""
        return self._ids(messages, add_generation_prompt=True)

    def samples(self, conversation: Conversation) -> list[TokenSample]:
        """The row's samples: one, or one per assistant turn (module docstring). Raises RowRejected."""
        if conversation.answer is not None:
            return [self._answer_sample(conversation)]
        turns = self._assistant_turns(conversation.messages)
        whole_ids = self._ids(conversation.messages)
        if all(_is_prefix(turn.ids[: turn.end], whole_ids) for turn in turns):
            return [TokenSample(whole_ids, _mask(len(whole_ids), turns))]
        return [TokenSample(turn.ids, _mask(len(turn.ids), [turn]), turn.index) for turn in turns]

    def _answer_sample(self, conversation: Conversation) -> TokenSample:
        answer = conversation.answer
        assert answer is not None
        if self.prompt_ids(conversation.messages) != answer.prompt_ids:
            raise RowRejected("template or tokenizer differ from the ones that wrote the answer")
        mask = [False] * len(answer.prompt_ids) + [True] * len(answer.answer_ids)
        return TokenSample(answer.prompt_ids + answer.answer_ids, mask)

    def _assistant_turns(self, messages: Messages) -> list[_Turn]:
        first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > first_user]
        if not indices:
            raise RowRejected("no assistant turn after a user turn")
        return [self._turn(messages, index) for index in indices]

    def _turn(self, messages: Messages, index: int) -> _Turn:
        prompt_ids = self.prompt_ids(messages[:index])
        ids = self._ids(messages[: index + 1])
        if not _is_prefix(prompt_ids, ids):
            raise RowRejected(f"generation prompt is no token prefix of the turn it opens: turn {index + 1}")
        return _Turn(index, ids, len(prompt_ids), self._end_of_turn(ids, len(prompt_ids)))

    def _end_of_turn(self, ids: list[int], start: int) -> int:
        for position in range(start, len(ids)):
            if ids[position] in self._stop_ids:
                return position + 1
        end = len(ids)
        while end > start and not self._tokenizer.decode([ids[end - 1]]).strip():
            end -= 1
        return end

    def _ids(self, messages: Messages, add_generation_prompt: bool = False) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except TemplateSyntaxError as error:
            raise UserError(f"target.path: the chat template in {self._tokenizer.name_or_path} is broken: {error}") from error
        except _TEMPLATE_FAULTS as error:
            raise RowRejected(f"chat template failed: {error}") from error
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _is_prefix(prefix: list[int], ids: list[int]) -> bool:
    return ids[: len(prefix)] == prefix


def _mask(num_tokens: int, turns: list[_Turn]) -> list[bool]:
    mask = [False] * num_tokens
    for turn in turns:
        mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
    return mask
