"""Holds up that completions mean what their messages said, and that one that is not sound loses nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from k3.engine.chat.chat_request import ChatRequest
from k3.engine.chat.completion import ArgumentsText, CallBegun, Completion, ContentText, ReasoningText, joined
from k3.engine.chat.completion_stream import TextCompletion, TokenCompletion, parse_completion
from k3.engine.chat.encoder import chat_prompt, prompt_ids
from k3.engine.chat.markup import CLOSE, END, OPEN, SEP
from k3.engine.chat.parser import HEAD_CHARS_MAX
from tests.support.chat import COMPLETIONS, meaning, synthetic_tokenizer, understood

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "u": {"type": ["string", "null"]},
                    "a": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "e": {"enum": [1, 2]},
                    "r": {"$ref": "#/$defs/point"},
                },
                "$defs": {"point": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}},
]


def opened(tag: str, attributes: str = "") -> str:
    return f"{OPEN}{tag}{attributes}{SEP}"


def closed(tag: str) -> str:
    return f"{CLOSE}{tag}{SEP}"


def argument(key: str, text: str, kind: str = "") -> str:
    given = f' type="{kind}"' if kind else ""
    return opened("argument", f' key="{key}"{given}') + text + closed("argument")


def call(body: str, name: str = "f", index: int = 1) -> str:
    return opened("call", f' tool="{name}" index="{index}"') + body + closed("call")


def tools(*calls: str) -> str:
    return opened("tools") + "".join(calls) + closed("tools")


ENDING = closed("message") + END
ANSWER = closed("think") + opened("response") + "Hi" + closed("response")


def parse(text: str, thinking: bool = True) -> Completion:
    return parse_completion(text, tools=TOOLS, thinking=thinking)


@pytest.mark.parametrize("golden", COMPLETIONS, ids=lambda golden: f"{golden['from']}-{golden['thinking']}")
def test_golden_completions_round_trip(golden: dict[str, Any]) -> None:
    thinking, wanted = golden["thinking"], meaning(golden["message"], golden["thinking"])
    assert understood(parse_completion(golden["completion"], thinking=thinking)) == wanted
    # and as token ids, where nothing that a text spells is a marker
    request = ChatRequest([golden["message"]], thinking=thinking, add_generation_prompt=False)
    ids = prompt_ids(chat_prompt(request), synthetic_tokenizer())
    opening = prompt_ids(chat_prompt(ChatRequest([], thinking=thinking)), synthetic_tokenizer())
    assert ids[: len(opening)] == opening
    stream = TokenCompletion(synthetic_tokenizer(), thinking=thinking)
    events = [event for token in ids[len(opening) :] for event in stream.push(token)]
    parsed = joined(events + stream.finish())
    assert understood(parsed) == wanted
    assert all("json block" in warning for warning in parsed.warnings)


def test_there_are_as_many_golden_completions_as_were_made() -> None:
    assert len(COMPLETIONS) == 62


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "warnings"),
    [
        ("why" + ANSWER + ENDING, "why", "Hi", 0),
        ("why", "why", "", 1),
        ("why" + closed("think"), "why", "", 0),
        ("why" + opened("response") + "Hi" + closed("response") + ENDING, "why", "Hi", 1),
        (opened("response") + "Hi" + closed("response") + ENDING, "", "Hi", 0),
        (opened("think") + "why" + ANSWER + ENDING, "why", "Hi", 0),
        (opened("message", ' role="assistant"') + opened("think") + "why" + ANSWER + ENDING, "why", "Hi", 1),
        ("a\n" + ANSWER.replace(SEP, SEP + " \n", 1) + "\n" + ENDING, "a\n", "Hi", 0),
        (ANSWER + opened("response") + " more" + closed("response") + ENDING, "", "Hi more", 1),
        (ANSWER + opened("think") + "late" + closed("think") + ENDING, "late", "Hi", 1),
        (ANSWER + "after" + ENDING, "", "Hiafter", 1),
        (ANSWER + ENDING + "\nbehind", "", "Hi\nbehind", 1),
        (closed("think") + "no opener" + ENDING, "", "no opener", 1),
        (ANSWER + END, "", "Hi", 0),
        (ANSWER, "", "Hi", 0),
        ("response think message" + ANSWER, "response think message", "Hi", 0),
        (OPEN + "bold" + SEP + "x" + ANSWER, OPEN + "bold" + SEP + "x", "Hi", 0),
        ("a" + SEP + "b" + ANSWER, "a" + SEP + "b", "Hi", 0),
        ("a" + CLOSE + "think" + OPEN + "response" + SEP + "Hi", "a", "Hi", 2),
        ("a" + closed("response") + ANSWER, "a" + closed("response"), "Hi", 1),
        ("a<|clo", "a<|clo", "", 1),
        ("a" + CLOSE + "thi", "a", "", 2),
        ("a" + CLOSE + "think", "a", "", 0),
        (ANSWER + opened("message", ' role="user"') + "x", "", "Hi" + opened("message", ' role="user"') + "x", 2),
    ],
)  # fmt: skip
def test_sections(text: str, reasoning: str, content: str, warnings: int) -> None:
    parsed = parse(text)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (reasoning, content, ())
    assert len(parsed.warnings) == warnings, parsed.warnings


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hi" + closed("response") + ENDING, "", "Hi"),
        (opened("response") + "Hi" + closed("response") + ENDING, "", "Hi"),
        (opened("think") + "why" + ANSWER + ENDING, "why", "Hi"),
        (ANSWER + ENDING, "", "Hi"),
    ],
)
def test_without_thinking(text: str, reasoning: str, content: str) -> None:
    parsed = parse(text, thinking=False)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    "text",
    [
        "why" + ANSWER + tools(call(argument("s", "v", "string"))) + ENDING,
        "why" + closed("think") + tools(call(argument("s", "v"))) + opened("response") + "Hi" + closed("response"),
        "why" + tools(call(argument("s", "v"))) + opened("response") + "Hi" + closed("response"),
        "why" + ANSWER[: -len(closed("response"))] + tools(call(argument("s", "v"))) + ENDING,
        "why"
        + ANSWER
        + " \n"
        + opened("tools")
        + "\n"
        + call("\n" + argument("s", "v") + "\n")
        + "\n"
        + closed("tools"),
        "why" + ANSWER + tools(opened("call", ' index="1"  tool="f" ') + argument("s", "v") + closed("call")),
        "why" + ANSWER + opened("tools") + call(argument("s", "v")) + ENDING,
        "why"
        + ANSWER
        + opened("tools")
        + opened("call", ' tool="f"')
        + argument("s", "v")
        + closed("tools")
        + ENDING,
        "why" + ANSWER + opened("tools") + opened("call", ' tool="f"') + argument("s", "v") + ENDING,
        "why"
        + ANSWER
        + opened("tools")
        + opened("call", ' tool="f"')
        + opened("argument", ' key="s"')
        + "v"
        + ENDING,
        "why" + ANSWER + opened("tools") + opened("call", ' tool="f"') + opened("argument", ' key="s"') + "v",
        "why" + ANSWER + ENDING + tools(call(argument("s", "v"))),
        "why" + ANSWER + call(argument("s", "v")) + ENDING,
        "why" + ANSWER + tools(call(opened("json", ' type="object"') + '{"s": "v"}' + closed("json"))) + ENDING,
    ],
)
def test_one_call_however_it_is_written(text: str) -> None:
    parsed = parse(text)
    assert understood(parsed) == ("why", "Hi", [("f", {"s": "v"})])


def test_calls_in_several_sections() -> None:
    parsed = parse(
        ANSWER + tools(call(argument("s", "v"))) + tools(call("", "noop", 2), call("", "noop", 3)) + ENDING
    )
    assert understood(parsed)[2] == [("f", {"s": "v"}), ("noop", {}), ("noop", {})]
    assert parsed.warnings == ()


def test_a_call_follows_one_that_is_not_closed() -> None:
    begun = opened("call", ' tool="f"') + opened("argument", ' key="s"') + "v"
    parsed = parse(ANSWER + opened("tools") + begun + begun + argument("n", "1") + ENDING)
    assert understood(parsed)[2] == [("f", {"s": "v"}), ("f", {"s": "v", "n": 1})]
    assert len(parsed.warnings) == 3


@pytest.mark.parametrize(
    ("body", "arguments", "warnings"),
    [
        (argument("s", "3", "number"), '{"s": "3"}', 0),  # the schema decides
        (argument("n", "3", "string"), '{"n": 3}', 0),
        (argument("n", " 3\n"), '{"n": 3}', 0),
        (argument("n", "abc"), '{"n": "abc"}', 1),
        (argument("n", ""), '{"n": ""}', 1),
        (argument("n", "2.5"), '{"n": "2.5"}', 1),
        (argument("n", "2.0"), '{"n": 2.0}', 0),
        (argument("x", "1e-07"), '{"x": 1e-07}', 0),
        (argument("x", "NaN"), '{"x": "NaN"}', 1),
        (argument("b", "True"), '{"b": "True"}', 1),
        (argument("b", "1"), '{"b": "1"}', 1),
        (argument("e", "2"), '{"e": 2}', 0),
        (argument("r", '{"q": [1]}'), '{"r": {"q": [1]}}', 0),
        (argument("r", '{"q": [1]'), '{"r": "{\\"q\\": [1]"}', 1),
        (argument("u", "null", "string"), '{"u": "null"}', 0),  # the tag decides between the schema's types
        (argument("u", "null", "null"), '{"u": null}', 0),
        (argument("u", "null"), '{"u": null}', 0),  # the text decides
        (argument("u", "3"), '{"u": "3"}', 0),
        (argument("u", "3", "number"), '{"u": "3"}', 0),  # the schema allows no number
        (argument("a", "3"), '{"a": 3}', 0),
        (argument("a", "3", "number"), '{"a": 3}', 0),
        (argument("a", "2.5", "number"), '{"a": "2.5"}', 1),
        (argument("a", "three"), '{"a": "three"}', 0),
        (argument("s", "say \"no\"\n\\"), '{"s": "say \\"no\\"\\n\\\\"}', 0),
        (argument("s", opened("response") + SEP), json.dumps({"s": opened("response") + SEP}), 1),
        (argument("s", "1") + argument("s", "2"), '{"s": "1", "s#2": "2"}', 1),
        (argument("new", "3"), '{"new": 3}', 1),
        (argument("new", "3", "string"), '{"new": "3"}', 1),
        (argument("new", "3", "boolean"), '{"new": "3"}', 2),
        (argument("new&quot;&amp;lt;" + OPEN, "v"), json.dumps({'new"&lt;' + OPEN: "v"}), 1),
        (argument("new" + SEP, "v"), json.dumps({"new" + SEP: "v"}), 1),
        (opened("argument", ' type="string"') + "v" + closed("argument"), '{"": "v"}', 1),
        (opened("argument", ' key="s" style="x"') + "v" + closed("argument"), '{"s": "v"}', 1),
        (opened("json") + '{"a": 1.0}' + closed("json"), '{"a": 1.0}', 0),
        (opened("json") + "{}" + closed("json"), "{}", 0),
        (opened("json") + '{"a": 1,' + closed("json"), '"{\\"a\\": 1,"', 1),
        (opened("json") + "[1]" + closed("json") + argument("n", "1"), '{"json": "[1]", "n": 1}', 1),
        (argument("n", "1") + opened("json") + '{"s": "v"}' + closed("json"), '{"n": 1, "s": "v"}', 0),
        (argument("n", "1") + opened("json") + '{"n": 2}' + closed("json"), '{"n": 1, "json": {"n": 2}}', 1),
    ],
)  # fmt: skip
def test_arguments(body: str, arguments: str, warnings: int) -> None:
    parsed = parse(ANSWER + tools(call(body)) + ENDING)
    assert parsed.tool_calls[0].arguments == arguments
    json.loads(arguments)
    assert (parsed.content, len(parsed.warnings)) == ("Hi", warnings), parsed.warnings


def test_what_was_not_offered_is_kept_and_said() -> None:
    text = ANSWER + tools(call(argument("k", "v"), "g")) + ENDING
    parsed = parse(text)
    assert understood(parsed)[2] == [("g", {"k": "v"})]
    assert "tool 'g', which was not offered" in parsed.warnings[0]
    assert parse_completion(text, tools=[]).warnings == parsed.warnings
    assert parse_completion(text).warnings == ()
    assert "the tool 'noop' has no argument 'k'" in parse(text.replace('"g"', '"noop"')).warnings


def test_a_name_with_quotes_and_ampersands() -> None:
    parsed = parse_completion(ANSWER + tools(call("", "f&amp;&quot;<&x")))
    assert parsed.tool_calls[0].name == 'f&"<&x'


def test_text_inside_a_call_is_content() -> None:
    parsed = parse(ANSWER + opened("tools") + " a" + call("b " + argument("s", "v")) + closed("tools") + ENDING)
    assert understood(parsed) == ("", "Hi ab ", [("f", {"s": "v"})])
    assert len(parsed.warnings) == 2


def test_a_begun_tag_is_said_and_arguments_are_complete() -> None:
    whole = ANSWER + tools(call(argument("s", "value", "string") + argument("n", "12"))) + ENDING
    for length in range(len(whole)):
        parsed = parse(whole[:length])
        for one in parsed.tool_calls:
            assert isinstance(json.loads(one.arguments), dict)
        # What could have become a marker is text in the end; a tag that was begun is not.
        assert re.fullmatch(r"(H|Hi)?(<[|a-z_]*)?", parsed.content)


def test_a_head_without_end_is_text() -> None:
    head = f'{OPEN}call tool="' + "x" * HEAD_CHARS_MAX
    parsed = parse(ANSWER + head + tools(call(argument("s", "v"))))
    assert parsed.content == "Hi" + head
    assert understood(parsed)[2] == [("f", {"s": "v"})]


def test_a_million_markers_take_no_stack() -> None:
    for unit in (OPEN, f'{OPEN}call tool="', f"{CLOSE}think", opened("tools"), f'{OPEN}call tool="{SEP}'):
        parsed = parse(unit * 3000)
        assert parsed.warnings


def test_strings_stream_and_everything_else_comes_when_it_is_complete() -> None:
    stream = TextCompletion(tools=TOOLS)
    stream.push(ANSWER + opened("tools"))
    assert stream.push(opened("call", ' tool="f" index="1"')) == [CallBegun(0, "f")]
    assert stream.push(opened("argument", ' key="s" type="string"')) == [ArgumentsText(0, '{"s": "')]
    assert stream.push('a"b<|clo') == [ArgumentsText(0, 'a\\"b')]
    assert stream.push("x") == [ArgumentsText(0, "<|clox")]
    assert stream.push(closed("argument")) == [ArgumentsText(0, '"')]
    assert stream.push(opened("argument", ' key="n"')) == [ArgumentsText(0, ', "n": ')]
    assert stream.push("12") == []
    assert stream.push(closed("argument")) == [ArgumentsText(0, "12")]
    assert stream.push(closed("call")) == [ArgumentsText(0, "}")]


def test_text_comes_at_once_and_a_begun_marker_waits() -> None:
    stream = TextCompletion()
    assert stream.push("a <|cl") == [ReasoningText("a ")]
    assert stream.push("ose|>think") == []
    assert stream.push(f"{SEP}\n{OPEN}response{SEP}Hel") == [ContentText("Hel")]
    assert stream.push("lo<") == [ContentText("lo")]
    assert [event for event in stream.finish() if isinstance(event, ContentText)] == [ContentText("<")]


def test_control_tokens_inside_a_quote_are_no_text() -> None:
    """A model that forgets a quote closes its tag all the same: a marker among token ids is never text."""
    tokenizer = synthetic_tokenizer()
    broken = f'{OPEN}call tool="f{SEP}'
    stream = TokenCompletion(tokenizer, tools=TOOLS)
    ids = tokenizer.encode(ANSWER + opened("tools") + broken + call(argument("s", "v")), allow_special=True)
    parsed = joined([event for token in ids for event in stream.push(token)] + stream.finish())
    assert parsed.content == "Hi" + broken
    assert understood(parsed)[2] == [("f", {"s": "v"})]
