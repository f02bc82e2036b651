"""Messages to ids and loss mask. One byte is one token, so every span below can be counted by hand."""

import json
from pathlib import Path

import pytest
from tiny_models import EOS_ID, make_tokenizer

from dflash_train.chat import ChatTemplate, TokenSample
from dflash_train.conversations import Answer, Conversation, Place, RowRejected
from dflash_train.errors import UserError

CASES = Path(__file__).parent / "data" / "cases"


@pytest.fixture
def chat_template(tmp_path):
    """Makes a `ChatTemplate` from a file of tests/data/templates or from the template's own text."""

    def make(template: str, stop_ids=(EOS_ID,), **variables) -> ChatTemplate:
        source = {"template": template} if template.endswith(".jinja") else {"chat_template": template}
        return ChatTemplate(make_tokenizer(tmp_path, **source), variables, stop_ids)

    return make


def conversation(*messages: tuple[str, str], answer: Answer | None = None) -> Conversation:
    return Conversation(Place("chats.jsonl", 1), "a", [{"role": role, "content": text} for role, text in messages], answer)


def case(name: str) -> Conversation:
    row = json.loads((CASES / name).read_text().splitlines()[0])
    return Conversation(Place(name, 1), "a", row["messages"])


def spans(sample: TokenSample) -> list[tuple[int, int]]:
    edges = [i for i, (a, b) in enumerate(zip([False, *sample.loss_mask], [*sample.loss_mask, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The supervised texts of a sample, stop tokens included."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return lambda sample: [tokenizer.decode(sample.input_ids[start:end]) for start, end in spans(sample)]


def test_two_turns_are_one_sample_with_two_spans(chat_template, texts):
    (sample,) = chat_template("plain.jinja").samples(case("C10.jsonl"))
    assert len(sample.input_ids) == 75
    assert spans(sample) == [(33, 39), (67, 74)]
    assert texts(sample) == ["Blue.<|im_end|>", "Green.<|im_end|>"]
    assert sample.turn is None


@pytest.mark.parametrize(("template", "num_tokens"), [("gen.jinja", 75), ("gen_drift.jinja", 71)])
def test_generation_marks_change_nothing(chat_template, template, num_tokens, texts):
    (sample,) = chat_template(template).samples(case("C10.jsonl"))
    assert len(sample.input_ids) == num_tokens
    assert texts(sample) == ["Blue.<|im_end|>", "Green.<|im_end|>"]


def test_a_template_that_drops_old_reasoning_makes_one_sample_per_turn(chat_template):
    samples = chat_template("think.jinja").samples(case("C11.jsonl"))
    assert [len(sample.input_ids) for sample in samples] == [48, 79]
    assert [spans(sample) for sample in samples] == [[(23, 47)], [(50, 78)]]
    assert [sample.turn for sample in samples] == [1, 3]


def test_the_template_variables_reach_the_template(chat_template, texts):
    """With an empty thought in the generation prompt the answer alone is supervised; the full thought contradicts it."""
    template = chat_template("think.jinja", enable_thinking=False)
    (sample,) = template.samples(conversation(("user", "2+2?"), ("assistant", "4.")))
    assert texts(sample) == ["4.<|im_end|>"]
    with pytest.raises(RowRejected, match="generation prompt is no token prefix of the turn it opens: turn 2"):
        template.samples(case("C11.jsonl"))


def test_without_a_stop_token_trailing_whitespace_is_not_supervised(chat_template, texts):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    (sample,) = chat_template(template).samples(conversation(("user", "Hi"), ("assistant", "Hello.")))
    assert texts(sample) == ["Hello."]


def test_supervision_ends_where_the_target_would_stop(chat_template, texts):
    (sample,) = chat_template("plain.jinja").samples(conversation(("user", "Hi"), ("assistant", "A<|im_end|>B")))
    assert texts(sample) == ["A<|im_end|>"]


def test_an_unasked_assistant_turn_is_context(chat_template, texts):
    (sample,) = chat_template("plain.jinja").samples(conversation(("assistant", "Hello."), ("user", "Hi"), ("assistant", "Oak.")))
    assert texts(sample) == ["Oak.<|im_end|>"]
    with pytest.raises(RowRejected, match="no assistant turn after a user turn"):
        chat_template("plain.jinja").samples(conversation(("assistant", "Hello.")))


def test_a_template_that_opens_no_turn_rejects_the_row(chat_template, texts):
    """gen_first.jinja has no header, so its generation prompt is a prefix and the text follows at once; a wrong one is not."""
    (sample,) = chat_template("gen_first.jinja").samples(conversation(("user", "Hi"), ("assistant", "Oak.")))
    assert texts(sample) == ["Oak.<|im_end|>"]
    wrong = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}model:{% endif %}"
    with pytest.raises(RowRejected, match="generation prompt is no token prefix"):
        chat_template(wrong).samples(conversation(("user", "Hi"), ("assistant", "Oak.")))


def test_a_template_that_fails_rejects_the_row_with_its_words(chat_template):
    template = chat_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowRejected, match="chat template failed: roles must alternate"):
        template.prompt_ids([{"role": "user", "content": "Hi"}])
    with pytest.raises(RowRejected, match="chat template failed: "):
        chat_template("{{ messages[0].content + 1 }}").prompt_ids([{"role": "user", "content": "Hi"}])


def test_a_missing_or_broken_template_stops_the_run(chat_template):
    with pytest.raises(UserError, match="has no chat template"):
        chat_template("")
    with pytest.raises(UserError, match="chat template in .* is broken"):
        chat_template("{% for %}").prompt_ids([{"role": "user", "content": "Hi"}])
    with pytest.raises(UserError, match="data.template_kwargs.tokenize is no template variable"):
        chat_template("plain.jinja", tokenize=True)


def test_an_answer_keeps_its_ids_and_must_match_the_template(chat_template):
    template = chat_template("plain.jinja")
    messages = [{"role": "user", "content": "Hi"}]
    prompt_ids = template.prompt_ids(messages)
    row = conversation(("user", "Hi"), answer=Answer(prompt_ids, [300, 301], None))
    (sample,) = template.samples(row)
    assert sample.input_ids == [*prompt_ids, 300, 301]
    assert spans(sample) == [(len(prompt_ids), len(prompt_ids) + 2)]
    with pytest.raises(RowRejected, match="template or tokenizer differ from the ones that wrote the answer"):
        chat_template("think.jinja", enable_thinking=False).samples(row)


def test_a_pair_is_two_supervised_tokens_in_a_row():
    assert not TokenSample([1, 2, 3], [True, False, True]).has_supervised_pair
    assert TokenSample([1, 2, 3], [False, True, True]).has_supervised_pair
    assert not TokenSample([1, 2, 3], [False, True, True]).cut(2).has_supervised_pair
