"""Holds up that a start has the drive busy early, refuses before it reads, and ends well whatever happens then."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.container import dense_load
from k3.container.dense_load import DenseLoad
from k3.container.direct import ReadFile
from k3.container.memory_limit import Limit
from k3.container.reader import Container
from k3.engine import finding, run, starting
from k3.engine.cli import main
from k3.engine.plan import MemoryPlan
from k3.repack.request import RepackRequest
from k3.repack.run import Watcher, repack
from tests.support.containers import flip
from tests.support.engines import VECTORS

FIRST = "language_model.model.embed_tokens.weight"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, direct=False), Watcher())
    return home


@pytest.fixture
def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that begins to read dense weights, or gives them memory, fails with an exception."""
    monkeypatch.delattr(finding, "DenseLoad")


def k3_run(home: Path, *arguments: str, prompt: Sequence[str] = ("--ids", "1,2")) -> Result:
    return CliRunner().invoke(main, ["--container", str(home), *prompt, "--ngen", "2", *arguments])


def loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "k3-dense"]


def in_a_process(code: str, home: Path, *prompt: str) -> subprocess.CompletedProcess[str]:
    """k3-run in a new process after `code`."""
    program = f"{code}\nfrom k3.engine.cli import main\nmain(prog_name='k3-run')"
    command = [sys.executable, "-c", program, "--container", str(home), *prompt, "--ngen", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("prompt", [("--ids", "1,2"), ("a text",)], ids=["ids", "text"])
def test_reading_begins_before_anything_heavy_is_imported(
    home: Path, limited: bool, prompt: Sequence[str]
) -> None:
    """NumPy, kernels and model would leave the drive idle for longer than everything else together. Where address
    space is limited they come first, since the plan has to count what they take of it."""
    done = in_a_process(
        "import resource, sys, k3.container.dense_load as dense_load\n"
        f"if {limited}: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "begin = dense_load.DenseLoad.__init__\n"
        "heavy = ('numpy', 'k3.kernels', 'k3.engine.run', 'k3.engine.model', 'tiktoken', 'zstandard', 'tqdm')\n"
        "def noted(*given, **more):\n"
        "    print('begun with', [name for name in heavy if name in sys.modules])\n"
        "    begin(*given, **more)\n"
        "dense_load.DenseLoad.__init__ = noted",
        home,
        *prompt,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("begun with ['numpy', " if limited else "begun with []\n")


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--ngen", "9999999"], 2, "max_position_embeddings"),
        (["--ids", "5000000"], 2, "5000000"),
        (["--layers", "77"], 2, "--layers"),
        (["--bits", "4"], 2, "--bits"),
        (["--logits", "/proc/none/logits"], 6, "/proc/none"),
        (["--trace", "/proc/none/trace"], 6, "/proc/none"),
        (["--plan", "--drive-gb-per-s", "2", "--memory-gb-per-s", "9"], 0, ""),
        (["--version"], 0, ""),
    ],
)
def test_what_is_refused_or_only_planned_reads_nothing(
    home: Path, arguments: list[str], code: int, said: str
) -> None:
    result = k3_run(home, *arguments)
    assert result.exit_code == code, result.output
    assert said in result.stderr


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--ngen", "9999999"),
        ("--max-tokens", "3"),
        ("--max-tokens", "99999999"),
        ("--logits", "/proc/none/logits"),
        ("--trace", "/proc/none/trace"),
    ],
)
def test_what_is_refused_behind_a_text_reads_nothing(home: Path, arguments: Sequence[str]) -> None:
    result = k3_run(home, *arguments, prompt=["a text of some tokens"])
    assert result.exit_code in (2, 6), result.output


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize("name", ["generation_config.json", "tiktoken.model", "tokenizer_config.json"])
def test_small_files_that_are_not_there_or_damaged_are_refused_first(home: Path, name: str) -> None:
    if name == "generation_config.json":
        (home / name).write_text("{}")
    else:
        (home / name).unlink()
    result = k3_run(home, prompt=["a text of some tokens"])
    assert result.exit_code in (1, 4, 6, 7), result.output
    assert name in result.stderr


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize("prompt", [("--ids", "1,2"), ("a text",)], ids=["ids", "text"])
def test_what_does_not_fit_in_memory_reads_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, prompt: Sequence[str]
) -> None:
    monkeypatch.setattr(starting, "memory_limit", lambda: Limit(1e6, "a test"))
    result = k3_run(home, "--expert-gb", "0", prompt=prompt)
    assert result.exit_code == 9, result.output
    assert "a test leaves 0.001 GB" in result.stderr


def test_damage_that_is_found_before_there_is_a_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = Container.open(home)
    extent = container.tensor(FIRST).weights
    flip(container.file_path(extent.file), extent.offset)
    container.close()
    go_on = run.go_on

    def late(started: starting.Started) -> None:
        assert started.found.loading is not None
        for thread in loading_threads():
            thread.join()
        go_on(started)

    monkeypatch.setattr(run, "go_on", late)
    result = k3_run(home)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "generation stopped after 0 tokens: tensor does not match its digest" in result.stderr
    assert FIRST in result.stderr


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_behind_the_first_reads_ends_them(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    seen: list[DenseLoad] = []

    def fails(started: starting.Started) -> None:
        assert started.found.loading is not None
        seen.append(started.found.loading)
        raise error

    monkeypatch.setattr(run, "go_on", fails)
    result = k3_run(home)
    assert result.exit_code == (9 if error is MemoryError else 130)
    assert not loading_threads()
    with pytest.raises(ValueError, match="closed"):
        seen[0].take(FIRST)


def test_ctrl_c_while_the_rest_is_imported(home: Path) -> None:
    done = in_a_process(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'k3.engine.model':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())",
        home,
        "--ids",
        "1,2",
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("spare_bytes", "order"), [(0, ["begun", "prompt"]), (-1, ["prompt", "begun"])])
def test_reading_begins_before_a_text_is_encoded_if_any_number_of_tokens_fits(
    home: Path, monkeypatch: pytest.MonkeyPatch, spare_bytes: int, order: list[str]
) -> None:
    text = "some words " * 40
    free = k3_run(home, "--expert-gb", "0", prompt=[text])
    happened: list[str] = []
    plans: list[MemoryPlan] = []

    def noted(name: str, before: Callable[..., Any]) -> None:
        def function(*given: Any, **more: Any) -> Any:
            happened.append(name)
            return before(*given, **more)

        monkeypatch.setattr(starting, before.__name__, function)

    def planned(*given: Any) -> MemoryPlan:
        plans.append(plan(*given))
        return plans[-1]

    plan = starting._plan
    monkeypatch.setattr(starting, "_plan", planned)
    assert k3_run(home, "--expert-gb", "0", prompt=[text]).exit_code == 0
    assert plans[0].capacity == len(text) + 2
    enough_bytes = plans[0].need.total_bytes + starting.VOCABULARY_BYTES
    monkeypatch.setattr(starting, "memory_limit", lambda: Limit(enough_bytes + spare_bytes, "a test"))
    noted("prompt", starting.read_prompt)
    noted("begun", starting.begin_loading)
    tight = k3_run(home, "--expert-gb", "0", prompt=[text])
    assert happened == order
    assert (tight.exit_code, tight.stdout) == (0, free.stdout)


def test_a_vocabulary_that_cannot_be_read_ends_the_load(home: Path) -> None:
    flip(home / "tiktoken.model", 5)
    result = k3_run(home, prompt=["a text"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tiktoken.model" in result.stderr
    assert not loading_threads()


def test_turns_at_the_interpreter_are_short_while_weights_are_read(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_s = sys.getswitchinterval()
    seen: list[float] = []
    go_on = run.go_on

    def noted(started: starting.Started) -> None:
        seen.append(sys.getswitchinterval())
        release.set()
        go_on(started)
        seen.append(sys.getswitchinterval())

    release = threading.Event()
    open_file = dense_load.open_file

    def slow(path: Path, direct: bool) -> ReadFile:
        release.wait()
        return open_file(path, direct)

    monkeypatch.setattr(run, "go_on", noted)
    monkeypatch.setattr(finding, "DenseLoad", partial(DenseLoad, opener=slow))
    assert k3_run(home).exit_code == 0
    assert seen == pytest.approx([starting.TURN_S, before_s])
    assert sys.getswitchinterval() == before_s
