"""Holds up that `k3-run` refuses nonsense and damage with one clear line and the right exit code."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.memory_limit import Limit
from k3.checkpoint.downloads import METADATA_DIRECTORY
from k3.container.reader import Container
from k3.engine.cli import main
from k3.engine.launch import launched
from k3.engine.run import token_output
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from tests.support.containers import flip
from tests.support.engines import VECTORS, copied

TINY = str(VECTORS / "tiny_s1")
ENVIRONMENT = ("BITS", "MLA_BITS", "HEAD_BITS", "EXPERT_GB", "TOPP", "CHUNK", "LAYERS", "DIRECT", "MAXT")


def k3_run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, list(arguments), **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bits", "5"], "5"),
        (["--bits", ""], "--bits"),
        (["--mla-bits", "8.0"], "8.0"),
        (["--head-bits", "-8"], "-8"),
        (["--expert-gb", "abc"], "abc"),
        (["--expert-gb", "-1"], "-1"),
        (["--expert-gb", "nan"], "nan"),
        (["--expert-gb", "inf"], "inf"),
        (["--expert-gb", "1e300"], "1e300"),
        (["--plan", "--drive-gb-per-s", "1e300"], "1e300"),
        (["--chunk", "0"], "--chunk"),
        (["--chunk", "-3"], "--chunk"),
        (["--chunk", "2.5"], "2.5"),
        (["--ngen", "-1"], "--ngen"),
        (["--ngen", "99999999999999999999"], "99999999999999999999"),
        (["--temperature", "-0.1"], "-0.1"),
        (["--temperature", "nan"], "nan"),
        (["--top-p", "0"], "'0'"),
        (["--top-p", "1.01"], "1.01"),
        (["--topp", "0"], "'0'"),
        (["--topp", "x"], "'x'"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "x"], "--seed"),
        (["--threads", "0"], "--threads"),
        (["--threads", "1000000"], "--threads"),
        (["--layers", "0"], "no layer"),
        (["--layers", "6"], "5 layers"),
        (["--layers", "3-2"], "no layer"),
        (["--layers", "x"], "'x'"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-tokens", "34"], "make 35"),
        (["--max-tokens", "2000000"], "1048576"),
        (["--mla-eps", "1e-4"], "1e-4"),
        (["--verify-reads", "maybe"], "maybe"),
        (["--dirs", "a,b"], "--dirs"),
        (["--container", "x"], "two models"),
        (["--prompt", "hi"], "Several prompts"),
        (["hi"], "Several prompts"),
        (["--no-such-option"], "--no-such-option"),
        (["hi", "there"], "there"),
    ],
)
def test_nonsense(arguments: list[str], said: str) -> None:
    result = k3_run("--snapshot", TINY, "--ids", "1,2,3", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ids", "abc"], "abc"),
        (["--ids", ""], "''"),
        (["--ids", "1,,2"], "1,,2"),
        (["--ids", "1,-2"], "1,-2"),
        (["--ids", "1.5"], "1.5"),
        (["--ids", "0x10"], "0x10"),
        (["--ids", "512"], "512"),
        (["--ids", "1,99999999999999999999999"], "too large"),
        (["--ids", "٣"], "٣"),
        (["--prompt", ""], "empty"),
        ([""], "empty"),
        (["--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--prompt-file", "/"], "directory"),
        (["\udcff"], "UTF-8"),
        ([], "No prompt"),
    ],
)
def test_prompts(arguments: list[str], said: str) -> None:
    result = k3_run("--snapshot", TINY, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("data", [b"", b"caf\xe9"])
def test_prompt_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "prompt").write_bytes(data)
    result = k3_run("--snapshot", TINY, "--prompt-file", str(tmp_path / "prompt"))
    assert result.exit_code == 2
    assert ("not UTF-8 at byte 3" if data else "empty") in result.stderr


def test_no_model() -> None:
    result = k3_run("--ids", "1")
    assert result.exit_code == 2
    assert "give --container, --snapshot or --store" in result.stderr


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_nonsense_in_the_environment(name: str) -> None:
    result = k3_run("--snapshot", TINY, "--ids", "1", env={f"K3_{name}": "bogus"})
    assert result.exit_code == 2
    assert "bogus" in result.stderr


def test_places_that_are_no_models(tmp_path: Path) -> None:
    assert k3_run("--container", str(tmp_path), "--ids", "1").exit_code == 5
    assert k3_run("--container", str(tmp_path / "gone"), "--ids", "1").exit_code == 5
    assert k3_run("--snapshot", str(tmp_path), "--ids", "1").exit_code == 3
    assert k3_run("--snapshot", str(tmp_path / "gone"), "--ids", "1").exit_code == 3
    assert k3_run("--container", TINY, "--ids", "1").exit_code == 5


def test_errors_in_json(tmp_path: Path) -> None:
    result = k3_run("--container", str(tmp_path), "--ids", "1", "--json")
    assert json.loads(result.stderr)["exit_code"] == result.exit_code == 5


def test_text_needs_the_vocabulary_and_ids_do_not(tmp_path: Path) -> None:
    snapshot = copied("tiny_s1", tmp_path / "snapshot")
    (snapshot / "tiktoken.model").unlink()
    result = k3_run("--snapshot", str(snapshot), "hello")
    assert result.exit_code == 3
    assert "tiktoken.model" in result.stderr
    assert "--ids" in result.stderr
    assert k3_run("--snapshot", str(snapshot), "--ids", "1,2", "--ngen", "2").exit_code == 0


def test_a_limit_that_cannot_be_met_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "memory_limit", lambda: Limit(launched.IMPORTS_BYTES + 1e6, "a test"))
    result = k3_run("--snapshot", TINY, "--ids", "1,2")
    assert result.exit_code == 9
    assert "a test leaves 0.001 GB" in result.stderr
    assert "expert cache" in result.stderr


def test_a_budget_larger_than_the_machine_is_refused() -> None:
    result = k3_run("--snapshot", TINY, "--ids", "1,2", "--expert-gb", "1e9")
    assert result.exit_code == 9
    assert "1000000000.000 GB" in result.stderr


def test_an_address_space_limit_is_respected() -> None:
    command = f"ulimit -v 600000; exec {sys.executable} -c 'from k3.engine.cli import main; main()'"
    arguments = f"--snapshot {TINY} --ids 1,2 --ngen 1 --expert-gb 1"
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(["bash", "-c", f"{command} {arguments}"], capture_output=True, text=True, env=env)
    assert ended.returncode == 9, ended.stderr
    assert "ulimit -v" in ended.stderr


@pytest.mark.parametrize("target", ["logits", "trace"])
def test_files_that_cannot_be_written(target: str, tmp_path: Path) -> None:
    result = k3_run("--snapshot", TINY, "--ids", "1", f"--{target}", str(tmp_path / "no" / "file"))
    assert result.exit_code == 6
    assert "No such file" in result.stderr


def test_a_full_stdout_is_an_error() -> None:
    command = [sys.executable, "-c", "from k3.engine.cli import main; main()", "--snapshot", TINY, "--ids", "1"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 7
    assert "cannot write" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def cut_after_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a snapshot whose shard of layer 2 is truncated once two tokens were printed."""
    snapshot = copied("tiny_s1", tmp_path / "snapshot")
    shard = snapshot / "model-00003-of-000008.safetensors"
    original = token_output.TextOutput.token
    seen: list[int] = []

    def token(self: token_output.TextOutput, token: int, *, is_stop: bool) -> None:
        original(self, token, is_stop=is_stop)
        seen.append(token)
        if len(seen) == 2:
            os.truncate(shard, 100_000)

    monkeypatch.setattr(token_output.TextOutput, "token", token)
    return snapshot


def test_truncated_while_generating(cut_after_two: Path, tmp_path: Path) -> None:
    result = k3_run(
        "--snapshot", str(cut_after_two), "--ids", "1,2,3", "--ngen", "9", "--expert-gb", "0",
        "--logits", str(tmp_path / "logits"),
    )  # fmt: skip
    assert result.exit_code == 6
    assert result.stdout.endswith("\n")
    assert len(result.stdout.split(",")) == 2
    for part in ("generation stopped after 2 tokens", "model-00003", "layer 2", "expert", "offset"):
        assert part in result.stderr
    assert not (tmp_path / "logits").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot"]


def test_a_damaged_expert_is_never_used(tmp_path: Path) -> None:
    home = tmp_path / "container"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, direct=False), Watcher())
    container = Container.open(home)
    for expert in range(16):
        (extent,) = container.expert_extents(3, expert)
        flip(extent.path, extent.offset + 77)
    container.close()
    result = k3_run("--container", str(home), "--ids", "1,2,3", "--ngen", "2")
    assert result.exit_code == 1
    for part in ("generation stopped after 0 tokens", "layer 3", "expert", "digest"):
        assert part in result.stderr


@pytest.mark.parametrize(
    "name", ["tiktoken.model", "tokenizer_config.json", "generation_config.json", "config.json"]
)
def test_damaged_small_files_of_a_container(name: str, tmp_path: Path) -> None:
    home = tmp_path / "container"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, direct=False), Watcher())
    flip(home / name, 20, 1)
    result = k3_run("--container", str(home), "hello", "--ngen", "1")
    assert result.exit_code == 1
    assert f"{name})" in result.stderr
    assert "digest" in result.stderr


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json", "generation_config.json"])
def test_a_small_file_that_is_not_what_was_downloaded_is_refused(name: str, tmp_path: Path) -> None:
    snapshot = copied("tiny_s1", tmp_path / "snapshot")
    record = snapshot / METADATA_DIRECTORY / f"{name}.metadata"
    record.parent.mkdir(parents=True)
    data = (snapshot / name).read_bytes()
    arguments = ("--snapshot", str(snapshot), "--ngen", "1", "a text")
    for recorded, code in ((data, 0), (data + b" ", 3)):
        record.write_text(f"{'0' * 40}\n{hashlib.sha256(recorded).hexdigest()}\n0\n")
        result = k3_run(*arguments)
        assert result.exit_code == code, result.output
    assert name in result.stderr
    assert "SHA-256" in result.stderr
