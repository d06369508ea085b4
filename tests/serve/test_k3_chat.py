"""Holds up that `k3-chat render` and `parse` print what the chat format makes of files, and refuse by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.serve.cli import main
from tests.support.chat import CASES, COMPLETIONS, VECTORS, meaning

SYNTHETIC = VECTORS / "synthetic.tiktoken.model"


def call(words: list[str], text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, words, input=text, prog_name="k3-chat")


def request_text(case: dict[str, Any]) -> str:
    return json.dumps({"model": "k3", "messages": case["messages"], "chat_template_kwargs": case["kwargs"]})


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_render_prints_golden_cases_and_refuses_the_others(case: dict[str, Any]) -> None:
    result = call(["render", "-", "--vocabulary", str(SYNTHETIC)], request_text(case))
    if "error" in case:
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Traceback" not in result.stderr
        assert result.stderr
    else:
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout) == {"ids": case["ids_synthetic"], "text": case["text"]}


def test_render_reads_a_request_in_openais_form_with_a_models_own_vocabulary(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "developer"}], "reasoning_effort": "none"}
    (tmp_path / "request.json").write_text(
        json.dumps({**body, "tools": [{"name": "f"}], "tool_choice": "required"})
    )
    snapshot = VECTORS / "tiny_s0"
    result = call(["render", str(tmp_path / "request.json"), "--snapshot", str(snapshot)])
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["text"].endswith("response<|sep|>")
    assert "tool_choice=required" in printed["text"]
    assert "'developer'" in result.stderr
    again = call(["render", str(tmp_path / "request.json"), "--vocabulary", str(snapshot / "tiktoken.model")])
    assert json.loads(again.stdout) == printed  # names of specials come from the file beside it
    assert 256 + 3 in printed["ids"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "no list of messages"),
        ('{"messages": [], "messages": []}', "twice"),
        ('{"messages": [], "chat_template_kwargs": 3}', "chat_template_kwargs is no object"),
        ('{"messages": [], "chat_template_kwargs": {"enable_thinking": false}}', "'enable_thinking'"),
        ('{"messages": [], "chat_template_kwargs": {"thinking": "no"}}', "thinking is 'no'"),
        ('{"messages": [], "chat_template_kwargs": {"image_prompts": [1]}}', "image_prompts"),
        ('{"messages": [], "reasoning_effort": "medium"}', "'medium'"),
        ('{"messages": [], "tools": {}}', "tools is {}"),
    ],
)
def test_requests_that_are_not_sound_are_refused(text: str, said: str) -> None:
    result = call(["render", "-", "--vocabulary", str(SYNTHETIC)], text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_one_vocabulary_is_needed_and_must_be_one(tmp_path: Path) -> None:
    assert call(["render", "-"], "{}").exit_code == 2
    assert call(["render", "-", "--vocabulary", str(SYNTHETIC), "--snapshot", "x"], "{}").exit_code == 2
    (tmp_path / "none").write_text("x")
    for place in (tmp_path / "none", tmp_path / "absent"):
        result = call(["render", "-", "--vocabulary", str(place)], '{"messages": []}')
        assert result.exit_code == 3
        assert place.name in result.stderr


@pytest.mark.parametrize("golden", COMPLETIONS, ids=lambda golden: f"{golden['from']}-{golden['thinking']}")
def test_parse_prints_golden_completions(golden: dict[str, Any]) -> None:
    words = ["parse", "-"] if golden["thinking"] else ["parse", "--no-thinking", "-"]
    result = call(words, golden["completion"])
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert set(printed) == {"reasoning", "content", "tool_calls", "warnings"}
    functions = [one["function"] for one in printed["tool_calls"]]
    calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
    assert (printed["reasoning"], printed["content"], calls) == meaning(golden["message"], golden["thinking"])


def test_parse_types_arguments_by_the_tools(tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}},
    }
    text = '<|close|>think<|sep|><|open|>call tool="f"<|sep|><|open|>argument type="string" key="n"<|sep|>3'
    (tmp_path / "completion").write_text(text)
    for tools in ([tool], {"tools": [tool]}):
        (tmp_path / "tools.json").write_text(json.dumps(tools))
        result = call(["parse", "--tools", str(tmp_path / "tools.json"), str(tmp_path / "completion")])
        assert json.loads(result.stdout)["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 3}'}


def test_parse_refuses_what_is_no_text(tmp_path: Path) -> None:
    result = call(["parse", "-"], b"abc\xff")
    assert result.exit_code == 2
    assert "offset 3" in result.stderr
    (tmp_path / "tools.json").write_text('{"tools": 3}')
    assert "no list" in call(["parse", "-", "--tools", str(tmp_path / "tools.json")], "x").stderr
    assert call(["parse", str(tmp_path / "absent")]).exit_code == 6
