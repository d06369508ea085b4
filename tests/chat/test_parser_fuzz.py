"""Holds up that no completion makes the parser fail, lose a character or depend on how it was cut.

Golden completions are cut, spliced and mixed with tags by seed. Every stretch of the result must be accounted for,
and the same events must come of any way to cut it into pieces.
"""

from __future__ import annotations

import json
import random
from itertools import groupby

import pytest

from k3.engine.chat.argument_values import quoted
from k3.engine.chat.completion import (
    ArgumentsText,
    CallBegun,
    Completion,
    ContentText,
    Event,
    ParseWarning,
    ReasoningText,
    joined,
)
from k3.engine.chat.completion_stream import TextCompletion, TokenCompletion
from k3.engine.chat.markup import CLOSE, END, MARKERS, OPEN, OPENED_TAGS, SEP, parse_tag
from k3.engine.chat.parser import Span
from tests.support.chat import COMPLETIONS, synthetic_tokenizer

PROPERTIES = {"s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["null", "string"]}}
TOOLS = [{"function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]
TAGS = [
    'call tool="f" index="1"', 'call index="2" tool="g"', 'argument key="s"', 'argument type="number" key="i"',
    'argument key="n" type="null"', 'json type="object"', 'message role="assistant"', 'message role="user"',
    *sorted(OPENED_TAGS),
]  # fmt: skip
FRAGMENTS = [
    *MARKERS,
    *(f"{OPEN}{tag}{SEP}" for tag in TAGS),
    *(f"{CLOSE}{tag}{SEP}" for tag in sorted(OPENED_TAGS)),
    *("<|", "<|open", "|>", '"', ' key="', "=", "&amp;", " ", "\n", "\t", "\0", "\ud800", "é", "天", "🎉"),
    *("{", "}", "7", "true", "null", '{"a": 1, "s": [2]}'),
]


def mutated(rng: random.Random) -> str:
    """Return a golden completion with up to eight mutations."""
    text = str(rng.choice(COMPLETIONS)["completion"])
    for _ in range(rng.randrange(9)):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] if rng.random() < 0.5 else text[at:]
        elif kind == 1:
            to = min(to, at + rng.randrange(1, 40))
            text = text[:at] + text[to:]
        elif kind == 2:
            text = text[:at] + text[at : at + rng.randrange(60)] + text[at:]
        elif kind == 3:
            other = str(rng.choice(COMPLETIONS)["completion"])
            text = text[:at] + other[rng.randrange(len(other)) :]
        else:
            for _ in range(rng.randrange(1, 4)):
                text = text[:at] + rng.choice(FRAGMENTS) + text[at:]
    return text


def in_pieces(rng: random.Random, text: str) -> list[str]:
    longest = rng.choice([1, 3, 20, 200])
    pieces = []
    while text:
        length = rng.randint(1, longest)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def merged(events: list[Event]) -> list[tuple[object, str]]:
    """Events with neighbours of one kind joined: all that may not depend on how a text was cut."""

    def kind(event: Event) -> object:
        return (type(event), event.call) if isinstance(event, ArgumentsText) else type(event)

    result: list[tuple[object, str]] = []
    for one, group in groupby(events, kind):
        if one in (CallBegun, ParseWarning):
            result += [(one, repr(event)) for event in group]
        else:
            result.append((one, "".join(event.text for event in group if not isinstance(event, CallBegun))))
    return result


def check(rng: random.Random) -> None:
    text, thinking = mutated(rng), rng.random() < 0.7
    tools = rng.choice([None, TOOLS, []])
    spans: list[tuple[Span, str]] = []
    stream = TextCompletion(tools=tools, thinking=thinking, observe=lambda span, part: spans.append((span, part)))
    events = stream.push(text) + stream.finish()
    parsed = joined(events)
    account(text, spans, parsed)
    again = TextCompletion(tools=tools, thinking=thinking)
    cut = [event for piece in in_pieces(rng, text) for event in again.push(piece)] + again.finish()
    assert merged(cut) == merged(events)
    assert joined(cut) == parsed


def account(text: str, spans: list[tuple[Span, str]], parsed: Completion) -> None:
    """Find every character of a completion again in what was made of it."""
    assert "".join(part for _, part in spans) == text
    assert "".join(part for span, part in spans if span is Span.REASONING) == parsed.reasoning
    assert "".join(part for span, part in spans if span is Span.CONTENT) == parsed.content
    arguments = "\n".join(call.arguments for call in parsed.tool_calls)
    names = []
    for span, group in groupby(spans, lambda pair: pair[0]):
        parts = [part for _, part in group]
        if span is Span.LAYOUT:
            assert all(part.isspace() for part in parts)
        elif span is Span.CUT:
            assert parts == [spans[-1][1]]
            assert any(repr(parts[0]) in warning for warning in parsed.warnings)
        elif span is Span.VALUE:
            value = "".join(parts)
            inner = value.strip().removeprefix("{").removesuffix("}").strip()
            assert quoted(value) in arguments or value.strip() in arguments or inner in arguments, value
        elif span is Span.TAG:
            for part in parts:
                if part == END:
                    continue
                marker = OPEN if part.startswith(OPEN) else CLOSE
                tag = parse_tag(part.removeprefix(marker).removesuffix(SEP))
                assert tag is not None, part
                if marker == OPEN and tag.name == "call":
                    names.append(tag.attributes.get("tool", ""))
                if marker == OPEN and tag.name == "argument":
                    assert quoted(tag.attributes.get("key", "")) + ": " in arguments or "#" in arguments
    assert names == [call.name for call in parsed.tool_calls]
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict | str)


def check_tokens(rng: random.Random) -> None:
    """Ids of a mutated completion, and ids at random: nothing fails, and all text comes out."""
    tokenizer = synthetic_tokenizer()
    text = mutated(rng).replace("\ud800", "?")
    ids = tokenizer.encode(text, allow_special=True)
    if rng.random() < 0.3:
        ids = [rng.choice([*ids, *range(3840, 3850), rng.randrange(4096)]) for _ in ids]
    stream = TokenCompletion(tokenizer, tools=TOOLS)
    parsed = joined([event for token in ids for event in stream.push(token)] + stream.finish())
    for call in parsed.tool_calls:
        json.loads(call.arguments, parse_constant=pytest.fail)
    if not set(ids) & {tokenizer.specials[marker] for marker in (OPEN, CLOSE, END)}:
        assert parsed.reasoning == tokenizer.decode(ids)


def test_mutated_completions_are_accounted_for() -> None:
    for seed in range(600):
        try:
            check(random.Random(seed))
            check_tokens(random.Random(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error


def test_the_accounting_sees_a_lost_character() -> None:
    spans = [(Span.REASONING, "ab")]
    with pytest.raises(AssertionError):
        account("abc", spans, Completion("ab", "", (), ()))
    with pytest.raises(AssertionError):
        account("ab", spans, Completion("a", "", (), ()))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_campaign_of_mutated_completions() -> None:
    count, id_count = 200_000, 0
    for seed in range(1_000_000, 1_000_000 + count):
        rng = random.Random(seed)
        try:
            check(rng)
            if seed % 4 == 0:
                check_tokens(rng)
                id_count += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    print(
        f"{count} mutated completions as text, {id_count} as token ids: none lost a character or depended on cuts"
    )


def test_events_have_the_kinds_that_are_compared() -> None:
    assert merged([ReasoningText("a"), ReasoningText("b"), ContentText("c")]) == [
        (ReasoningText, "ab"),
        (ContentText, "c"),
    ]
