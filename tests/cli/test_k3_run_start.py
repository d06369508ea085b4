"""Holds up that a start has the drive busy early, refuses before it reads, and ends well whatever happens then."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.direct_io import ReadFile
from k3.base.memory_limit import Limit
from k3.container import dense_load, reader
from k3.container.dense_load import DenseLoad
from k3.container.reader import Container
from k3.engine.cli import main
from k3.engine.definition.settings import ModelSettings, RunSettings
from k3.engine.launch import launched, loading
from k3.engine.launch.launched import Launched
from k3.engine.launch.memory_plan import plan_memory
from k3.engine.launch.model_files import open_model_files
from k3.engine.run import generation, run_request
from k3.model.model_source import TensorLoad
from k3.repack.repack_request import RepackRequest
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
    """Let a run fail that begins to read dense weights, or gives them memory."""
    monkeypatch.delattr(Container, "begin_load")


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
    """Importing NumPy, kernels and model leaves the drive idle for longer than everything else together.

    Where address space is limited they come first, since the plan has to count what they take of it.
    """
    done = in_a_process(
        "import resource, sys, k3.container.dense_load as dense_load\n"
        f"if {limited}: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "begin = dense_load.DenseLoad.__init__\n"
        "heavy = ('numpy', 'k3.kernels', 'k3.engine.run.generation', 'k3.engine.forward.model', 'tiktoken',\n"
        "         'zstandard', 'tqdm')\n"
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
        ("--max-tokens", "2"),
        ("--max-tokens", "99999999"),
    ],
)
def test_what_is_refused_behind_a_text_reads_nothing(home: Path, arguments: Sequence[str]) -> None:
    result = k3_run(home, *arguments, prompt=["a text of some tokens"])
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--max-tokens", "3"), 2, "--max-tokens"),
        (("--logits", "/proc/none/logits"), 6, "/proc/none"),
        (("--trace", "/proc/none/trace"), 6, "/proc/none"),
    ],
)
def test_what_is_refused_while_weights_load_leaves_nothing_behind(
    home: Path, arguments: Sequence[str], code: int, said: str
) -> None:
    """The vocabulary and the files to write are looked at beside the reads; a refusal ends them."""
    before_s = sys.getswitchinterval()
    result = k3_run(home, *arguments, prompt=["a text of some tokens"])
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr
    assert not loading_threads()
    assert sys.getswitchinterval() == before_s


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
    monkeypatch.setattr(launched, "memory_limit", lambda: Limit(1e6, "a test"))
    result = k3_run(home, "--expert-gb", "0", prompt=prompt)
    assert result.exit_code == 9, result.output
    assert "a test leaves 0.00" in result.stderr


def test_damage_that_is_found_before_there_is_a_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = Container.open(home)
    extent = container.tensor(FIRST).weights
    flip(container.file_path(extent.file), extent.offset)
    container.close()
    generate = generation.generate

    def late(launched: Launched, settings: RunSettings) -> None:
        for thread in loading_threads():
            thread.join()
        generate(launched, settings)

    monkeypatch.setattr(generation, "generate", late)
    result = k3_run(home)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "generation stopped after 0 tokens: tensor does not match its digest" in result.stderr
    assert FIRST in result.stderr


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_behind_the_first_reads_ends_them(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    seen: list[TensorLoad] = []

    def fails(launched: Launched, settings: RunSettings) -> None:
        seen.append(launched.weights)
        raise error

    monkeypatch.setattr(generation, "generate", fails)
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
        "        if name == 'k3.engine.forward.model':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())",
        home,
        "--ids",
        "1,2",
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("prompt", [("--ids", "1,2"), ("some words " * 40,)], ids=["ids", "text"])
def test_reading_begins_before_a_prompt_is_encoded(
    home: Path, monkeypatch: pytest.MonkeyPatch, prompt: Sequence[str]
) -> None:
    happened: list[str] = []

    def noted(module: Any, name: str) -> None:
        before = getattr(module, name)

        def function(*given: Any, **more: Any) -> Any:
            happened.append(name)
            return before(*given, **more)

        monkeypatch.setattr(module, name, function)

    noted(Container, "begin_load")
    noted(run_request, "read_prompt")
    assert k3_run(home, prompt=prompt).exit_code == 0
    assert happened == ["begin_load", "read_prompt"]


def test_a_run_that_fits_without_its_context_is_refused_beside_the_reads(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least run decides whether reading begins, the whole plan whether the run goes on."""
    opened = open_model_files(ModelSettings(container=home))
    least, whole = (
        plan_memory(
            opened, ModelSettings(container=home, expert_bytes=0),
            Limit(1e12, "a test"), capacity=capacity, chunk=1, every_logit=False,
        ).need.total_bytes
        for capacity in (1, 2002)
    )  # fmt: skip
    opened.close()
    begun: list[float] = []
    free_bytes = 0.0

    def noted(*given: Any, **more: Any) -> DenseLoad:
        begun.append(free_bytes)
        return begin_load(*given, **more)

    monkeypatch.setattr(launched, "_limit", lambda *_, **__: Limit(free_bytes, "a test"))
    begin_load = Container.begin_load
    monkeypatch.setattr(Container, "begin_load", noted)
    for free_bytes in (least - 1, whole - 1):  # noqa: B007
        result = k3_run(home, "--expert-gb", "0", "--chunk", "1", "--ngen", "2000")
        assert result.exit_code == 9, result.output
        assert not loading_threads()
    assert begun == [whole - 1]


def test_a_vocabulary_that_cannot_be_read_ends_the_load(home: Path) -> None:
    flip(home / "tiktoken.model", 5)
    result = k3_run(home, prompt=["a text"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tiktoken.model" in result.stderr
    assert not loading_threads()


def test_the_switch_interval_is_short_while_weights_load(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_s = sys.getswitchinterval()
    seen: list[float] = []
    generate = generation.generate

    def noted(launched: Launched, settings: RunSettings) -> None:
        seen.append(sys.getswitchinterval())
        release.set()
        generate(launched, settings)
        seen.append(sys.getswitchinterval())

    release = threading.Event()
    open_file = dense_load.open_file

    def slow(path: Path, direct: bool) -> ReadFile:
        release.wait()
        return open_file(path, direct)

    monkeypatch.setattr(generation, "generate", noted)
    monkeypatch.setattr(reader, "DenseLoad", partial(DenseLoad, opener=slow))
    assert k3_run(home).exit_code == 0
    assert seen == pytest.approx([loading.GIL_SWITCH_INTERVAL_S, before_s])
    assert sys.getswitchinterval() == before_s
