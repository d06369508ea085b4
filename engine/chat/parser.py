"""A completion, piece by piece, to reasoning, content and tool calls (`docs/chat.md`, Parsing).

The parser takes any sequence of markers and text. It never fails and drops no text: a tag that makes sense where
it stands is structure, any other is text of the place it stands in, and every departure from the format gives a
warning. The events do not depend on how the text was cut into pieces. One instance per completion, one thread.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from k3.base.safe_text import shown
from k3.engine.chat.argument_values import ObjectText, certainly_string, escaped_text, json_value
from k3.engine.chat.completion import (
    ArgumentsText,
    CallBegun,
    ContentText,
    Event,
    ParseWarning,
    ReasoningText,
)
from k3.engine.chat.markup import CLOSE, END, OPEN, SEP, Tag, may_become_tag, parse_tag, quote_is_open
from k3.engine.chat.scanner import Piece
from k3.engine.chat.tool_schema import ToolSchemas

HEAD_CHARS_MAX = 4096
"""A tag with a longer head is text: no completion can make the parser hold back more."""

_TAG_ATTRIBUTES = {
    "message": {"role", "name"},
    "call": {"tool", "index"},
    "argument": {"key", "type"},
    "json": {"type"},
}


class Place(enum.Enum):
    """The section that text now belongs to."""

    THINK = "think"
    RESPONSE = "response"
    OUTSIDE = "between sections"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    JSON = "json"


class Span(enum.Enum):
    """The use that was made of a stretch of a completion."""

    REASONING = "reasoning"
    CONTENT = "content"
    VALUE = "value"  # of an argument
    TAG = "tag"
    LAYOUT = "layout"  # white space between sections
    CUT = "cut"  # the beginning of a tag, at the end of the completion


Observer = Callable[[Span, str], None]

_VALUES = (Place.ARGUMENT, Place.JSON)
_IN_TOOLS = (Place.TOOLS, Place.CALL, *_VALUES)


class _Head:
    """The text behind an `<|open|>` or `<|close|>`, until its `<|sep|>`."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.text = ""
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.text += piece.text


class ChatParser:
    """One completion. `text` and `marker` take its pieces, `finish` its end; each returns the events it gave."""

    def __init__(
        self,
        *,
        tools: Iterable[object] | None = None,
        thinking: bool = True,
        exact_markers: bool = False,
        observe: Observer | None = None,
    ) -> None:
        """`thinking` tells which section the prompt left open.

        `tools` are those that the request offered; None when that is not known, so that none is called
        unknown. With `exact_markers`, markers were control tokens; without, they were found in text, and inside
        a quoted attribute they are text. `observe` is told the use of every stretch of the completion, in order.
        """
        self._tools = ToolSchemas(tools or ())
        self._knows_tools = tools is not None
        self._exact_markers = exact_markers
        self._observe = observe
        self._events: list[Event] = []
        self._head: _Head | None = None
        self._queue: deque[Piece] = deque()  # pieces to take, and those of a head that was none, again
        self._place = Place.THINK if thinking else Place.RESPONSE
        self._latest = self._place  # THINK or RESPONSE, open or closed
        self._opened = {self._place}
        self._is_fresh = True  # nothing but white space and repeated openers so far
        self._is_empty = True  # the section has no text yet
        self._has_ended = False
        self._blank = ""  # white space outside sections that may turn out to be layout
        self._in_stray_text = False
        self._call_count = 0
        self._call_name = ""
        self._object = ObjectText()
        self._key = ""
        self._given_type = ""
        self._value = ""
        self._is_streamed = False

    def text(self, text: str) -> list[Event]:
        """Take text that holds no marker, or whose markers are text."""
        return self._take(Piece(text, False))

    def marker(self, marker: str) -> list[Event]:
        """Take one of the four markers."""
        return self._take(Piece(marker, True))

    def finish(self, begun: str = "") -> list[Event]:
        """End the completion: what is still open is closed, so that arguments are complete JSON.

        `begun` is a text at the end that could have become a marker.
        """
        if self._head is None:
            if begun:
                self._say(begun)
        else:
            head, self._head = self._head, None
            tag = parse_tag(head.text)
            source = head.marker + head.text + begun
            if tag is not None and head.marker == CLOSE and not (tag.attributes or begun):
                self._close(tag, source)
            else:
                self._drop_blank()
                self._note(Span.CUT, source)
                self._warn(f"the completion ends inside the tag {source!r}")
        self._end_all()
        self._drop_blank()
        return self._given()

    # Pieces

    def _take(self, piece: Piece) -> list[Event]:
        self._queue.append(piece)
        while self._queue:
            text, is_marker = self._queue.popleft()
            if is_marker:
                self._take_marker(text)
            elif text:
                self._take_text(text)
        return self._given()

    def _take_text(self, text: str) -> None:
        if self._head is None:
            self._say(text)
            return
        room = max(HEAD_CHARS_MAX - len(self._head.text), 0)
        self._head.add(Piece(text[:room], False))
        if len(text) > room or not may_become_tag(self._head.text):
            self._give_up_head(Piece(text[room:], False))

    def _take_marker(self, marker: str) -> None:
        head = self._head
        if head is None:
            self._take_marker_in_text(marker)
            return
        tag = parse_tag(head.text)
        is_quoted = not self._exact_markers and marker != END and quote_is_open(head.text)
        if is_quoted and (tag is None or marker != SEP):
            if len(head.text) < HEAD_CHARS_MAX:
                head.add(Piece(marker, True))
            else:
                self._give_up_head(Piece(marker, True))
            return
        if tag is None:
            self._give_up_head(Piece(marker, True))
            return
        self._head = None
        source = head.marker + head.text
        if marker == SEP:
            source += SEP
        else:
            self._warn(f"the tag {source!r} lacks its {SEP}")
            self._queue.appendleft(Piece(marker, True))
        if head.marker == OPEN:
            self._open(tag, source)
        else:
            self._close(tag, source)

    def _take_marker_in_text(self, marker: str) -> None:
        if marker in (OPEN, CLOSE):
            self._head = _Head(marker)
        elif marker == END:
            self._end_all()
            self._structure(END)
            self._has_ended = True
        else:
            self._say(marker)

    def _give_up_head(self, behind: Piece) -> None:
        """Take the marker of a head that is no tag as text, and what followed it once more."""
        head, self._head = self._head, None
        assert head is not None
        self._say(head.marker)
        self._queue.appendleft(behind)
        self._queue.extendleft(reversed(head.pieces))

    # Tags

    def _open(self, tag: Tag, source: str) -> None:
        name = tag.name
        if not self._may_open(tag):
            self._keep(source)
            return
        for key in tag.attributes:
            if key not in _TAG_ATTRIBUTES.get(name, ()):
                self._warn(f"the tag {source!r} has an attribute that the format does not know")
                break
        if name == "message":
            self._structure(source)
            self._place = Place.OUTSIDE
            return
        self._leave_for(name)
        self._structure(source)
        if name in ("think", "response"):
            self._enter(Place(name))
        elif name == "tools":
            self._place = Place.TOOLS
        elif name == "call":
            self._begin_call(tag.attributes)
        else:
            self._begin_value(name, tag.attributes)
        self._is_fresh = False

    def _may_open(self, tag: Tag) -> bool:
        """Tell whether a tag can be structure where it stands."""
        name, place = tag.name, self._place
        if name == "message":
            return self._is_fresh and tag.attributes.get("role", "assistant") == "assistant"
        if name in ("argument", "json") and place not in (Place.CALL, *_VALUES):
            return False
        if name == "call" and place not in _IN_TOOLS and "tool" not in tag.attributes:
            return False
        if place in _VALUES and not self._exact_markers:
            return name in ("argument", "call")
        return not (name == "think" and place is Place.THINK and not self._is_empty)

    def _leave_for(self, name: str) -> None:
        """Close what the format would have closed before this tag opens."""
        place = self._place
        if name in ("argument", "json"):
            if place in _VALUES:
                self._warn(f"the {place.value} section before {name} is not closed")
                self._end_value()
            return
        if place in (*_VALUES, Place.CALL):
            self._warn(f"the {place.value} section before {name} is not closed")
            self._end_call()
            place = Place.TOOLS
        if name == "call":
            if place is not Place.TOOLS:
                self._warn("a tool is called outside a tools section")
            return
        if name == "tools" and place is Place.TOOLS:
            self._warn("a tools section is opened inside another")
        elif place is Place.TOOLS or (place in (Place.THINK, Place.RESPONSE) and not self._is_empty):
            self._warn(f"the {place.value} section before {name} is not closed")

    def _enter(self, place: Place) -> None:
        if place in self._opened and not (place is self._place and self._is_empty):
            self._warn(f"the {place.value} section comes again")
        self._opened.add(place)
        self._place = self._latest = place
        self._is_empty = True

    def _close(self, tag: Tag, source: str) -> None:
        name, place = tag.name, self._place
        if tag.attributes or not self._may_close(name):
            self._keep(source, name)
            return
        if name == "message":
            self._end_all()
            self._has_ended = True
        elif name in ("call", "tools"):
            if place in _VALUES or (place is Place.CALL and name == "tools"):
                self._warn(f"the {place.value} section is not closed before {name} is")
            if place is not Place.TOOLS:
                self._end_call()
            if name == "tools":
                self._place = Place.OUTSIDE
        elif place in _VALUES:
            if name != place.value:
                self._warn(f"a {place.value} section is closed as {name}")
            self._end_value()
        else:
            if name != place.value:
                self._warn(f"a {place.value} section is closed as {name}")
            self._place = Place.OUTSIDE
        self._structure(source)
        self._is_fresh = False

    def _may_close(self, name: str) -> bool:
        place = self._place
        if name == "message":
            return True
        if name == "tools":
            return place in _IN_TOOLS
        if name == "call":
            return place in (Place.CALL, *_VALUES)
        if name == "argument":
            return place in _VALUES
        if name == "think" and place is Place.RESPONSE:
            return self._is_fresh  # the model thinks that it was to think
        return name == place.value

    def _keep(self, source: str, closed: str | None = None) -> None:
        """Keep a tag that makes no sense here as text."""
        if self._place is Place.OUTSIDE and closed == self._latest.value:
            # The section's text held its own closing tag, which was taken for the end of it.
            span = Span.REASONING if self._latest is Place.THINK else Span.CONTENT
            blank, self._blank = self._blank, ""
            self._emit(span, blank + source)
        else:
            self._say(source)
        self._warn(f"the tag {source!r} has no place here and is kept as text")

    # Text

    def _say(self, text: str) -> None:
        """Take text, or a marker that is no structure, into the section that is open."""
        if self._place in _VALUES:
            self._note(Span.VALUE, text)
            if self._is_streamed:
                self._append(escaped_text(text))
            else:
                self._value += text
            return
        if self._place in (Place.THINK, Place.RESPONSE):
            self._emit(Span.REASONING if self._place is Place.THINK else Span.CONTENT, text)
            self._is_fresh = self._is_empty = False
            return
        if not self._in_stray_text:
            stripped = text.lstrip()
            self._blank += text[: len(text) - len(stripped)]
            if not stripped:
                return
            where = "behind the end of the message" if self._has_ended else "outside any section"
            self._warn(f"text {where} is kept as content")
            self._in_stray_text = True
            text, self._blank = self._blank + stripped, ""
        self._emit(Span.CONTENT, text)
        self._is_fresh = False

    def _emit(self, span: Span, text: str) -> None:
        self._note(span, text)
        self._events.append(ReasoningText(text) if span is Span.REASONING else ContentText(text))

    def _structure(self, source: str) -> None:
        self._drop_blank()
        self._in_stray_text = False
        self._note(Span.TAG, source)

    def _drop_blank(self) -> None:
        if self._blank:
            self._note(Span.LAYOUT, self._blank)
            self._blank = ""

    # Calls

    def _begin_call(self, attributes: Mapping[str, str]) -> None:
        name = attributes.get("tool")
        self._place = Place.CALL
        self._call_name = name or ""
        self._call_count += 1
        self._object = ObjectText()
        self._events.append(CallBegun(self._call_count - 1, self._call_name))
        if name is None:
            self._warn(f"call {self._call_count} names no tool")
        elif self._knows_tools and name not in self._tools:
            self._warn(f"call {self._call_count} is of the tool {shown(name)}, which was not offered")
        index = attributes.get("index")
        if index is not None and index != str(self._call_count):
            self._warn(f"call {self._call_count} says that its index is {shown(index)}")

    def _begin_value(self, name: str, attributes: Mapping[str, str]) -> None:
        self._place = Place(name)
        self._value = ""
        self._is_streamed = False
        if name == "json":
            return
        key = attributes.get("key")
        self._key = key or ""
        self._given_type = attributes.get("type", "")
        if key is None:
            self._warn(f"an argument of {shown(self._call_name)} has no key")
        elif self._knows_tools and not self._tools.knows(self._call_name, key):
            self._warn(f"the tool {shown(self._call_name)} has no argument {shown(key)}")
        before, named = self._object.member(self._key)
        if named != self._key:
            self._warn(f"the argument {shown(self._key)} comes again and is passed as {shown(named)}")
        types = self._tools.types(self._call_name, self._key)
        self._is_streamed = certainly_string(types, self._given_type)
        self._append(before + '"' if self._is_streamed else before)

    def _end_value(self) -> None:
        if self._place is Place.JSON:
            text, warning = self._object.block(self._value)
            self._append(text)
        elif self._is_streamed:
            self._append('"')
            warning = None
        else:
            types = self._tools.types(self._call_name, self._key)
            value = json_value(self._value, types, self._given_type)
            self._append(value.text)
            warning = None if value.warning is None else f"argument {shown(self._key)}: {value.warning}"
        if warning is not None:
            self._warn(warning)
        self._value = ""
        self._place = Place.CALL

    def _end_call(self) -> None:
        if self._place in _VALUES:
            self._end_value()
        self._append(self._object.finish())
        self._place = Place.TOOLS

    def _append(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsText(self._call_count - 1, text))

    # Ends

    def _end_all(self) -> None:
        """Close every section that is open."""
        if self._place is not Place.OUTSIDE:
            self._warn(f"the message ends inside its {self._place.value} section")
        if self._place in (Place.CALL, *_VALUES):
            self._end_call()
        self._place = Place.OUTSIDE

    def _note(self, span: Span, text: str) -> None:
        if self._observe is not None and text:
            self._observe(span, text)

    def _warn(self, text: str) -> None:
        self._events.append(ParseWarning(text))

    def _given(self) -> list[Event]:
        events, self._events = self._events, []
        return events
