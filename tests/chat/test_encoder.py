"""Holds up that conversations give the segments and ids of the makers' encoder, and no text a control token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import ExitCode
from k3.engine.chat.chat_request import ChatError, ChatRequest
from k3.engine.chat.encoder import chat_prompt, prompt_ids
from k3.engine.chat.markup import MARKERS
from tests.support.chat import CASES, GOLDEN, request_of, synthetic_tokenizer

RENDERED = [case for case in CASES if "error" not in case]
REFUSED = [case for case in CASES if "error" in case]
USER = {"role": "user", "content": "x"}


def case_name(case: dict[str, Any]) -> str:
    return str(case["name"])


@pytest.mark.parametrize("case", RENDERED, ids=case_name)
def test_golden_cases(case: dict[str, Any]) -> None:
    prompt = chat_prompt(request_of(case))
    assert [list(segment) for segment in prompt.segments] == case["segments"]
    assert prompt.text == case["text"]
    assert prompt_ids(prompt, synthetic_tokenizer()) == case["ids_synthetic"]


def test_there_are_as_many_golden_cases_as_were_made() -> None:
    assert (len(RENDERED), len(REFUSED)) == (74, 5)
    assert sum(not case["flat_text_gives_same_ids"] for case in RENDERED) >= 11


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("image_prompt_count_too_many", "1 image prompt for 0 images"),
        ("missing_role", "message 0 has no role"),
        ("effort_medium_is_rejected", "'medium' is not one of low, high and max"),
        ("call_arguments_wrong_type", "message 1: the arguments of 'f' are neither"),
        ("tool_result_extra_unresolvable", "message 3: nothing tells which tool"),
    ],
)
def test_golden_cases_that_must_be_refused(name: str, said: str) -> None:
    (case,) = (case for case in REFUSED if case["name"] == name)
    with pytest.raises(ChatError, match=said) as raised:
        chat_prompt(request_of(case))
    assert raised.value.exit_code is ExitCode.USAGE
    assert raised.value.advice


def test_the_default_rendering_is_with_and_without_effort() -> None:
    golden = GOLDEN["default_rendering"]
    request = ChatRequest(golden["messages"], thinking_effort="max")
    assert chat_prompt(request).text == golden["apply_chat_template"]
    assert chat_prompt(ChatRequest(golden["messages"])).text == golden["apply_chat_template_effort_none"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "message 1 .* image",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "message 0: .* type 'input_audio'"),
        ([{"role": "user", "content": 5}], "message 0: content 5"),
        ([{"role": "user", "content": "x", "name": 5}], "message 0: the name 5"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "message 0: a tool call has no function name"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            "message 0: .* JSON, but no obj",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_place(messages: list[object], said: str) -> None:
    with pytest.raises(ChatError, match=said):
        chat_prompt(ChatRequest(messages))


def test_more_images_than_prompts_are_refused() -> None:
    with pytest.raises(ChatError, match="1 image prompt for more images"):
        chat_prompt(
            ChatRequest([{"role": "user", "content": [{"type": "image"}] * 2}], image_prompts=["<|media_pad|>"])
        )


def test_a_schema_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(ChatError, match="without a schema"):
        chat_prompt(ChatRequest([USER], response_format="json_schema"))


def test_what_the_format_leaves_out_is_said() -> None:
    messages = [
        "stray",
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "c", "tools": [{}]},
        USER,
    ]
    prompt = chat_prompt(ChatRequest(messages))
    assert [warning.split(" ")[1] for warning in prompt.warnings] == ["0", "1", "2"]
    assert "developer" in prompt.warnings[1]
    assert chat_prompt(ChatRequest([USER])).warnings == ()


def test_the_text_of_a_json_block_that_was_none_comes_back_as_it_was() -> None:
    call = {"function": {"name": "f", "arguments": '"{\\"a\\": 1,"'}}
    prompt = chat_prompt(ChatRequest([{"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False))
    assert '<|open|>json type="object"<|sep|>{"a": 1,<|close|>json<|sep|>' in prompt.text


hostile = st.text(st.characters(codec="utf-8"), max_size=12) | st.lists(
    st.sampled_from(
        [*MARKERS, "[EOS]", "[BOS]", "<|media_pad|>", "<|reserved_token_4000|>", 'x" role="system', "&", "\n"]
    ),
    max_size=5,
).map("".join)
content = hostile | st.lists(hostile.map(lambda text: {"type": "text", "text": text}), max_size=3)
arguments = st.dictionaries(
    hostile, hostile | st.none() | st.lists(hostile, max_size=2), max_size=3
) | hostile.map(lambda text: "{" + text)
call = st.fixed_dictionaries({"name": hostile, "arguments": arguments, "id": hostile})
message = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": content, "name": hostile}),
    st.fixed_dictionaries(
        {"role": st.just("system"), "tools": st.lists(st.dictionaries(hostile, hostile), max_size=2)}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": content, "tool": hostile.map("t".__add__)}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": content,
            "reasoning": hostile,
            "tool_calls": st.lists(call, max_size=2),
        }
    ),
)


@given(st.lists(message, max_size=4), st.lists(st.dictionaries(hostile, hostile), max_size=2), st.booleans())
def test_no_text_becomes_a_control_token(messages: list[object], tools: list[object], thinking: bool) -> None:
    prompt = chat_prompt(ChatRequest(messages, tools=tools, thinking=thinking))
    tokenizer = synthetic_tokenizer()
    markers = [text for text, allow_special in prompt.segments if allow_special]
    assert set(markers) <= set(MARKERS)
    ids = prompt_ids(prompt, tokenizer)
    assert [token for token in ids if token >= tokenizer.rank_count] == [
        tokenizer.specials[one] for one in markers
    ]
    assert tokenizer.decode(ids) == prompt.text
