"""Holds up `k3-run --state`: a generation in pieces is the one in one go, and no file is lost or misused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.errors import DriveError
from k3.engine.cli import main
from k3.engine.forward.model import Model
from k3.engine.run import generation
from k3.engine.run.deferred_signals import HeldInterrupts, ended_like_ctrl_c
from k3.engine.run.session import Session
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from tests.support.daemons import daemon_inside
from tests.support.engines import VECTORS, golden
from tests.support.mounts import read_only, small_tmpfs

TINY = ["--snapshot", str(VECTORS / "tiny_s1"), "--ignore-eos"]
IDS = golden("tiny_s1")["input_ids"].tolist()
COMMAND = [sys.executable, "-c", "from k3.engine.cli import main; main(prog_name='k3-run')"]


def k3_run(*arguments: Any, **options: Any) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def joined(ids: Any) -> str:
    return ",".join(map(str, ids))


def ids_of(*results: Result) -> list[int]:
    """All ids that these runs printed."""
    assert [result.exit_code for result in results] == [0] * len(results), [r.output for r in results]
    return [int(token) for result in results for token in result.stdout.split(",") if token.strip()]


def summary(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(generation, "built_model")


@pytest.mark.parametrize("pieces", [(12,), (0, 12), (1, 11), (5, 7), (4, 0, 1, 7), (1,) * 12])
@pytest.mark.parametrize("draw", [(), ("--temperature", "1.5", "--top-p", "0.9", "--seed", "3")])
def test_in_pieces_or_at_once(pieces: tuple[int, ...], draw: tuple[str, ...], state: Path, tmp_path: Path) -> None:
    prompt = ["--ids", joined(IDS[:10])]
    whole = k3_run(*TINY, *draw, *prompt, "--ngen", 12, "--logits", tmp_path / "logits")
    logits = []
    results = []
    for number, count in enumerate(pieces):
        given = prompt if number == 0 else []
        path = tmp_path / f"logits{number}"
        results.append(k3_run(*TINY, *draw, *given, "--ngen", count, "--state", state, "--logits", path))
        logits.append(path.read_bytes())
    assert ids_of(*results) == ids_of(whole)
    assert b"".join(logits) == (tmp_path / "logits").read_bytes()


def test_without_logits_each_token_costs_one_pass(state: Path, tmp_path: Path) -> None:
    """The last token is not taken in before somebody wants to know what follows it."""
    whole = ids_of(k3_run(*TINY, "--ids", joined(IDS[:10]), "--ngen", 8))
    first = k3_run(*TINY, "--ids", joined(IDS[:10]), "--ngen", 3, "--state", state)
    second = k3_run(*TINY, "--ngen", 5, "--state", state, "--trace", tmp_path / "trace", "--json")
    told = summary(second)
    assert ids_of(first) + told["ids"] == whole
    assert (told["resumed_tokens"], told["prompt_tokens"], told["decode_passes"]) == (12, 1, 4)
    passes = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines() if '"pass"' in line]
    assert [(item["position"], item["tokens"]) for item in passes if item["type"] == "pass"] == [
        (position, 1) for position in range(12, 17)
    ]


def test_the_same_prompt_costs_no_pass(state: Path, tmp_path: Path) -> None:
    prompt = ["--ids", joined(IDS)]
    assert k3_run(*TINY, *prompt, "--ngen", 0, "--state", state).exit_code == 0
    before = state.read_bytes()
    again = k3_run(*TINY, *prompt, "--ngen", 1, "--state", state, "--trace", tmp_path / "trace")
    assert ids_of(again) == ids_of(k3_run(*TINY, *prompt, "--ngen", 1))
    assert not (tmp_path / "trace").exists()  # nothing was traced
    assert "resumed 24 tokens | prefill 0 tokens" in again.stderr
    assert state.read_bytes() != before  # it knows the token that was chosen
    k3_run(*TINY, *prompt, "--ngen", 0, "--state", state)
    assert state.read_bytes() == before  # which a prompt that ends before it may forget
    inode = state.stat().st_ino
    k3_run(*TINY, *prompt, "--ngen", 0, "--state", state)
    assert state.stat().st_ino == inode  # nothing was new, so nothing was written


def test_a_longer_prompt_goes_on(state: Path) -> None:
    """Also over a token that was chosen but not taken in: here the prompt has another one in its place."""
    k3_run(*TINY, "--ids", joined(IDS[:7]), "--ngen", 1, "--state", state)
    longer = k3_run(*TINY, "--ids", joined(IDS), "--ngen", 4, "--state", state, "--json")
    assert summary(longer)["ids"] == ids_of(k3_run(*TINY, "--ids", joined(IDS), "--ngen", 4))
    assert (summary(longer)["resumed_tokens"], summary(longer)["prompt_tokens"]) == (7, 17)


def test_text_goes_on_as_text(state: Path) -> None:
    """Characters that a piece ends inside are whole in the next one's text."""
    whole = k3_run(*TINY, "Grüße, 世界!", "--ngen", 30, "--json")
    pieces = [k3_run(*TINY, "Grüße, 世界!", "--ngen", 7, "--state", state, "--json")]
    for _ in range(23):
        pieces.append(k3_run(*TINY, "--ngen", 1, "--state", state, "--json"))
    assert [token for piece in pieces for token in summary(piece)["ids"]] == summary(whole)["ids"]
    shown = [json.loads(line) for piece in pieces for line in piece.stdout.splitlines()]
    text = "".join(line["text"] for line in shown if line["type"] == "token")
    wanted = [json.loads(line) for line in whole.stdout.splitlines()]
    assert text == "".join(line["text"] for line in wanted if line["type"] == "token")


def test_another_prompt_is_refused_with_the_place(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    k3_run(*TINY, "--ids", joined(IDS[:9]), "--ngen", 0, "--state", state)
    before = state.read_bytes()
    monkeypatch.delattr(generation, "built_model")
    other = [*IDS[:4], 500, *IDS[5:]]
    for ids, said in ((other, "from token 4 on: 500"), (IDS[:8], "ends after 8 tokens"), ([7], "from token 0")):
        result = k3_run(*TINY, "--ids", joined(ids), "--state", state)
        assert result.exit_code == 8, result.output
        for part in (said, str(state), "cannot go back", "Leave the prompt out"):
            assert part.lower() in result.stderr.lower()
    assert state.read_bytes() == before
    assert list(tmp_path.iterdir()) == [state]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--exact"], "exact false (here true)"),
        (["--mla-eps", "1e-5"], "mla_eps 1e-06 (here 1e-05)"),
        (["--topp", "0.5"], "keep_share 1.0 (here 0.5)"),
        (["--layers", "4"], "layers 0-4 (here 0-3)"),
        (["--bits", "4"], "model snapshot:"),
        (["--snapshot", str(VECTORS / "tiny_s0")], "model snapshot:"),
    ],
)
def test_other_numbers_are_refused(arguments: list[str], said: str, state: Path) -> None:
    k3_run(*TINY, "--ids", "1,2,3", "--ngen", 0, "--state", state)
    if arguments[0] == "--snapshot":
        result = k3_run(*arguments, "--ids", "1,2,3", "--state", state)
    else:
        result = k3_run(*TINY, *arguments, "--ids", "1,2,3", "--state", state)
    assert result.exit_code == 8, result.output
    assert said in result.stderr
    assert "Delete it to begin anew" in result.stderr


def test_a_container_and_its_daemon_take_turns(state: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, direct=False), Watcher())
    container = ["--container", home, "--ignore-eos"]
    whole = ids_of(k3_run(*container, "--ids", joined(IDS), "--ngen", 9))
    with daemon_inside(tmp_path / "socket", [home], max_clients=2) as daemon:
        store = ["--store", daemon.socket, "--ignore-eos"]
        runs = [
            k3_run(*store, "--ids", joined(IDS), "--ngen", 2, "--state", state),
            k3_run(*container, "--ngen", 3, "--state", state, "--threads", 1, "--expert-gb", 0),
            k3_run(*store, "--ngen", 4, "--state", state, "--max-tokens", 999),
        ]
    assert ids_of(*runs) == whole


def test_nothing_to_begin_with(state: Path) -> None:
    result = k3_run(*TINY, "--state", state)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    assert k3_run(*TINY).exit_code == 2
    assert not state.exists()


@pytest.mark.usefixtures("never_loaded")
def test_places_that_cannot_hold_a_state(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, code in (("/dev/null", 2), (pipe, 2), (tmp_path, 2), (tmp_path / "no" / "state", 6)):
        assert k3_run(*TINY, "--ids", "1", "--state", path).exit_code == code
    with read_only(tmp_path, tmp_path.parent / "read-only") as place:
        result = k3_run(*TINY, "--ids", "1", "--state", place / "state")
    assert result.exit_code == 6
    assert "cannot write the state" in result.stderr
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(("content", "code"), [(b"", 1), (b"my notes", 2), (bytes(4096), 2)])
def test_a_file_that_is_no_state_is_left_alone(content: bytes, code: int, state: Path) -> None:
    state.write_bytes(content)
    result = k3_run(*TINY, "--ids", "1", "--state", state)
    assert result.exit_code == code
    assert str(state) in result.stderr
    assert state.read_bytes() == content


def test_a_damaged_part_ends_the_run_before_a_token(state: Path) -> None:
    k3_run(*TINY, "--ids", "1,2,3", "--ngen", 0, "--state", state)
    data = bytearray(state.read_bytes())
    data[-3000] ^= 4
    state.write_bytes(data)
    result = k3_run(*TINY, "--state", state)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "do not match their digest" in result.stderr
    assert "layer " in result.stderr
    assert state.read_bytes() == data


def test_a_full_disk_keeps_the_state_that_was_there(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "200k") as drive:
        state = drive / "state"
        assert k3_run(*TINY, "--ids", "1,2,3", "--ngen", 0, "--state", state).exit_code == 0
        before = state.read_bytes()
        assert len(before) > 50_000  # or the filler must be another
        (drive / "filler").write_bytes(bytes(30_000 + (196_608 - 30_000 - len(before)) // 2))
        result = k3_run(*TINY, "--ids", "1,2,3,4", "--ngen", 3, "--state", state)
        assert result.exit_code == 7, result.output
        for part in ("generation stopped after 0 tokens", "cannot write the state", "No space", "Free space"):
            assert result.stderr.count(part) == 1
        assert state.read_bytes() == before
        assert sorted(path.name for path in drive.iterdir()) == ["filler", "state"]


def test_a_pass_that_fails_leaves_the_state_after_the_prompt(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Model.forward, []

    def forward(self: Model, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise DriveError("cannot read", path="shard")
        return original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Model, "forward", forward)
        result = k3_run(*TINY, "--ids", joined(IDS), "--ngen", 9, "--state", state)
    assert result.exit_code == 6
    assert f"not saved; {state} still has the state of 24 tokens" in result.stderr
    resumed = k3_run(*TINY, "--ngen", 9, "--state", state)
    assert ids_of(resumed) == ids_of(k3_run(*TINY, "--ids", joined(IDS), "--ngen", 9))


def test_an_interrupted_prompt_goes_on_where_it_stopped(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Session.prefill

    def prefill(self: Session, *arguments: Any) -> Any:
        if self.position == 8:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "prefill", prefill)
        result = k3_run(*TINY, "--ids", joined(IDS), "--ngen", 9, "--state", state, "--chunk", 4)
    assert result.exit_code == 130
    assert f"state of 12 tokens saved in {state}\n" in result.stderr
    resumed = k3_run(*TINY, "--ngen", 9, "--state", state, "--json")
    assert summary(resumed)["ids"] == ids_of(k3_run(*TINY, "--ids", joined(IDS), "--ngen", 9))
    assert (summary(resumed)["resumed_tokens"], summary(resumed)["prompt_tokens"]) == (12, 12)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_for_real(state: Path, number: signal.Signals) -> None:
    command = [*COMMAND, *TINY, "--ids", "1,2", "--ngen", "200000", "--state", str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begun = process.stdout.read(20)
        process.send_signal(number)
        begun += process.stdout.read()
        said = process.stderr.read()
    assert process.returncode == 130
    assert "saving the state after this pass" in said
    assert f"saved in {state}" in said
    assert "Traceback" not in said
    shown = [int(token) for token in begun.split(",")]
    more = ids_of(k3_run(*TINY, "--ngen", 5, "--state", state))
    assert shown + more == ids_of(k3_run(*TINY, "--ids", "1,2", "--ngen", len(shown) + 5))


def test_a_second_interrupt_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with HeldInterrupts(True) as held:
        held.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with HeldInterrupts(False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_run_is_an_interrupt_inside_of_it(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """`nohup`, and jobs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with ended_like_ctrl_c(), HeldInterrupts(True) as held:
            signal.raise_signal(number)
            held.check()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
