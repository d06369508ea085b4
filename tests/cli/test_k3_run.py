"""Holds up what `k3-run` prints and writes: golden ids and logits, text as it comes, JSON, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from k3.checkpoint.snapshot import Snapshot
from k3.container.layout import VERSION
from k3.engine.cli import main
from k3.engine.run import token_output
from k3.engine.run.generation import read_warnings
from k3.model.tensor_recipe import Recipe
from k3.repack.cli import main as repack_main
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.store.cli import main as store_main
from k3.store.lending.memory_source import MemorySource
from k3.store.source import SourceStats
from k3.verify.cli import main as verify_main
from tests.support.engines import GOLDEN_REL_L2, VECTORS, copied, golden, rel_l2

TINY = str(VECTORS / "tiny_s1")
EXACT = ["--bits", "16", "--mla-bits", "16", "--head-bits", "16", "--exact"]
COMMAND = [sys.executable, "-c", "from k3.engine.cli import main; main(prog_name='k3-run')"]


def k3_run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, list(arguments), **options)


def joined(ids: Any) -> str:
    return ",".join(map(str, ids))


def read_logits(path: Path, vocab: int = 512) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.fromfile(path, "<f4").reshape(-1, vocab)


@pytest.mark.parametrize("command", [main, repack_main, store_main, verify_main])
def test_every_command_has_a_version(command: click.Command) -> None:
    result = CliRunner().invoke(command, ["--version"], prog_name="k3-some")
    assert (result.exit_code, result.stdout) == (
        0,
        f"k3-some {version('k3-store')} (container format {VERSION})\n",
    )


def test_a_notice_never_lands_inside_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; elsewhere stderr is not where the line is."""
    original = token_output.TextOutput.token

    def token(self: token_output.TextOutput, token: int, *, is_stop: bool) -> None:
        original(self, token, is_stop=is_stop)
        logging.getLogger("k3.store").warning("the daemon went %s", "away")

    monkeypatch.setattr(token_output.TextOutput, "token", token)
    arguments = ["--snapshot", TINY, "--ids", "1,2", "--ngen", "3"]
    plain = k3_run(*arguments)
    assert plain.stderr.startswith("the daemon went away\n" * 3)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    shown = k3_run(*arguments)
    assert shown.stdout == plain.stdout
    assert "\nthe daemon went away\n\nthe daemon went away\n" in shown.stderr


@pytest.mark.parametrize("name", ["tiny_s0", "tiny_s1"])
def test_golden_ids_and_logits(name: str, tmp_path: Path) -> None:
    truth = golden(name)
    arguments = ["--snapshot", str(VECTORS / name), *EXACT, "--ids", joined(truth["input_ids"])]
    result = k3_run(*arguments, "--ngen", "12", "--ignore-eos", "--logits", str(tmp_path / "logits"))
    assert result.exit_code == 0
    assert result.stdout == joined(truth["greedy_ids"]) + "\n"
    logits = read_logits(tmp_path / "logits")
    assert len(logits) == 24 + 12
    assert rel_l2(logits[:24], truth["logits"]) <= GOLDEN_REL_L2
    assert logits[23:35].argmax(axis=-1).tolist() == truth["greedy_ids"].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]


def test_golden_logits_of_a_long_prompt(tmp_path: Path) -> None:
    truth = golden("tiny_s1_long")
    path = tmp_path / "logits"
    result = k3_run(
        "--snapshot", TINY, *EXACT, "--ids", joined(truth["input_ids"]), "--ngen", "0", "--logits", str(path)
    )
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert rel_l2(read_logits(path), truth["logits"]) <= GOLDEN_REL_L2


def test_a_continuation_read_as_a_prompt_gives_the_same_logits(tmp_path: Path) -> None:
    """Also with int8 activations: decoding and prefilling are one computation."""
    ids = golden("tiny_s1")["input_ids"].tolist()
    first = k3_run("--snapshot", TINY, "--ids", joined(ids), "--ngen", "6", "--logits", str(tmp_path / "a"))
    more = [int(token) for token in first.stdout.split(",")]
    k3_run(
        "--snapshot", TINY, "--ids", joined([*ids, *more]), "--ngen", "0", "--logits", str(tmp_path / "b"),
        "--chunk", "7", "--threads", "3", "--expert-gb", "0",
    )  # fmt: skip
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_way_to_give_a_prompt(tmp_path: Path) -> None:
    text = "Grüße, 世界!"
    file = tmp_path / "prompt"
    file.write_text(text)
    base = ["--snapshot", TINY, "--ngen", "9"]
    results = [
        k3_run(*base, text),
        k3_run(*base, "--prompt", text),
        k3_run(*base, "--prompt-file", str(file)),
        k3_run(*base, "--prompt-file", "-", input=text.encode()),
    ]
    assert {result.exit_code for result in results} == {0}
    assert len({result.stdout for result in results}) == 1
    assert "prefill 16 tokens" in results[0].stderr
    assert "decode 9 tokens" in results[0].stderr
    assert "peak RSS" in results[0].stderr


def test_text_and_json_tell_the_same() -> None:
    arguments = ["--snapshot", TINY, "--ngen", "20", "--ignore-eos", "Hello"]
    plain = k3_run(*arguments)
    lines = [json.loads(line) for line in k3_run(*arguments, "--json").stdout.splitlines()]
    tokens = [line for line in lines if line["type"] == "token"]
    summary = lines[-1]
    assert summary["type"] == "summary"
    assert summary["text"] + "\n" == plain.stdout
    assert summary["ids"] == [token["id"] for token in tokens]
    assert [token["index"] for token in tokens] == list(range(20))
    assert summary["text"].startswith("".join(token["text"] for token in tokens))
    assert (summary["prompt_tokens"], summary["generated_tokens"], summary["stop"]) == (5, 20, "length")
    assert summary["read_bytes"] > 0


@pytest.fixture
def stopping(tmp_path: Path) -> Path:
    """Return a snapshot whose third greedy token after the golden prompt is the stop token."""
    snapshot = copied("tiny_s1", tmp_path / "snapshot")
    third = int(golden("tiny_s1")["greedy_ids"][2])
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, third]}))
    return snapshot


def test_it_stops_at_the_stop_token(stopping: Path) -> None:
    truth = golden("tiny_s1")
    arguments = ["--snapshot", str(stopping), *EXACT, "--ids", joined(truth["input_ids"]), "--ngen", "12"]
    assert k3_run(*arguments).stdout == joined(truth["greedy_ids"][:3]) + "\n"
    summary = json.loads(k3_run(*arguments, "--json").stdout.splitlines()[-1])
    assert (summary["stop"], summary["generated_tokens"]) == ("eos", 3)
    assert k3_run(*arguments, "--ignore-eos").stdout == joined(truth["greedy_ids"]) + "\n"


def test_a_draw_repeats_with_its_seed() -> None:
    arguments = ["--snapshot", TINY, "--ids", "1,2,3", "--ngen", "12", "--temperature", "1.5", "--ignore-eos"]
    free = k3_run(*arguments)
    seed = free.stderr.split()[free.stderr.split().index("seed") + 1]
    assert k3_run(*arguments, "--seed", seed).stdout == free.stdout
    assert k3_run(*arguments, "--seed", str(int(seed) + 1)).stdout != free.stdout
    assert k3_run(*arguments, "--seed", "5", "--top-p", "0.000001").stdout == k3_run(
        *arguments[:-3], "--ignore-eos"
    ).stdout  # a set of one token is greedy  # fmt: skip


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the same model in three forms: one root, three roots, in place. Values are arguments of k3-run."""
    base = tmp_path_factory.mktemp("containers")
    drives = (base / "d1", base / "d2")
    source = VECTORS / "tiny_s1"
    recipe = Recipe(8, 8, 8)
    one = RepackRequest((source,), base / "one", recipe=recipe, direct=False)
    cut = RepackRequest((source,), base / "cut", drives=drives, shares=(2, 1), recipe=recipe, direct=False)
    placed = RepackRequest((source,), base / "placed", recipe=recipe, in_place=True, direct=False)
    for request in (one, cut, placed):
        repack(request, Watcher())
    return {
        "one": ["--container", str(one.home)],
        "cut": ["--container", str(cut.home), "--dirs", ",".join(map(str, drives))],
        "placed": ["--container", str(placed.home)],
    }


@pytest.mark.parametrize("form", ["one", "cut", "placed"])
def test_containers_give_the_bits_of_the_snapshot(
    form: str, containers: dict[str, list[str]], tmp_path: Path
) -> None:
    rest = ["--ids", joined(golden("tiny_s1")["input_ids"]), "--ngen", "5", "--logits"]
    from_snapshot = k3_run("--snapshot", TINY, "--bits", "8", *rest, str(tmp_path / "a"))
    from_container = k3_run(*containers[form], *rest, str(tmp_path / "b"), "--verify-reads", "first")
    assert from_container.exit_code == 0, from_container.output
    assert from_container.stdout == from_snapshot.stdout
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_other_bits_than_the_containers_are_refused(containers: dict[str, list[str]]) -> None:
    arguments = [*containers["one"], "--ids", "1", "--ngen", "1"]
    assert k3_run(*arguments, "--bits", "8").exit_code == 0
    assert k3_run(*arguments, "--bits", "4").exit_code == 2
    result = k3_run(*arguments, env={"K3_HEAD_BITS": "16"})
    assert result.exit_code == 2
    assert "--head-bits 16" in result.stderr


def test_a_misspelt_root_is_told_of(containers: dict[str, list[str]]) -> None:
    arguments = [*containers["one"], "--ids", "1", "--ngen", "1"]
    result = k3_run(*arguments, "--dirs", "/nowhere/misspelt")
    assert result.exit_code == 0
    assert "warning: --dirs: /nowhere/misspelt holds no root of this container" in result.stderr
    assert "warning" not in k3_run(*containers["cut"], "--ids", "1", "--ngen", "1").stderr


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    trace, logits = tmp_path / "trace", tmp_path / "logits"
    env = {
        "K3_BITS": "4", "K3_MLA_BITS": "16", "K3_HEAD_BITS": "32", "K3_EXPERT_GB": "0.001", "K3_TOPP": "0.5",
        "K3_CHUNK": "2", "K3_LAYERS": "3", "K3_TRACE": str(trace), "K3_LOGITS": str(logits), "K3_DIRECT": "0",
        "K3_MAXT": "7",
    }  # fmt: skip
    result = k3_run("--snapshot", TINY, "--ids", "1,2,3,4,5", "--ngen", "2", env=env)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [record["tokens"] for record in records if record["type"] == "pass"] == [2, 2, 1, 1, 1]
    assert max(record.get("layer", 0) for record in records) == 2
    assert any(len(experts) < 4 for record in records for experts in record.get("experts") or [])
    assert read_logits(logits).shape == (7, 512)


def test_float32_activations_by_option_and_by_environment(tmp_path: Path) -> None:
    def logits(name: str, *more: str, env: dict[str, str] | None = None) -> bytes:
        path = tmp_path / name
        result = k3_run("--snapshot", TINY, "--ids", "1,2,3", "--ngen", "0", "--logits", str(path), *more, env=env)
        assert result.exit_code == 0, result.output
        return path.read_bytes()

    exact = logits("exact", "--exact")
    assert logits("environment", env={"K3_IDOT": "0"}) == exact
    assert logits("option first", "--exact", env={"K3_IDOT": "1"}) == exact
    assert logits("default") == logits("idot", "--idot") != exact


def test_how_experts_were_read_is_told() -> None:
    class Told(MemorySource):
        def stats(self) -> SourceStats:
            return stats

    experts = Told({})
    stats = SourceStats(retries=3, direct={Path("/a"): True, Path("/b"): False})
    weights = Snapshot.open((VECTORS / "tiny_s1",)).begin_load([])
    cached, retried = read_warnings(experts, weights, direct=True)
    assert "/b" in cached
    assert "O_DIRECT" in cached
    assert "3 reads" in retried
    assert len(read_warnings(experts, weights, direct=False)) == 1
    stats = SourceStats(direct={Path("/a"): True})
    assert read_warnings(experts, weights, direct=True) == []


def test_unknown_keys_are_warned_of(tmp_path: Path) -> None:
    snapshot = copied("tiny_s1", tmp_path / "snapshot")
    config = json.loads((snapshot / "config.json").read_text())
    config["text_config"]["attn_logit_softcapping"] = 30.0
    (snapshot / "config.json").write_text(json.dumps(config))
    result = k3_run("--snapshot", str(snapshot), "--ids", "1", "--ngen", "1")
    assert result.exit_code == 0
    assert "warning: " in result.stderr
    assert "attn_logit_softcapping" in result.stderr


def test_help_is_quick_and_complete() -> None:
    shown = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    for word in ("--container", "--snapshot", "--ids", "--expert-gb", "Exit codes", "130"):
        assert word in shown
    heavy = "import sys, k3.engine.cli; print({'numpy', 'tiktoken', 'lmdb', 'tqdm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"


def test_a_run_on_ids_imports_no_tokenizer_and_no_daemon() -> None:
    rare = (
        "import sys, k3.engine.run.generation\n"
        "print({'tiktoken', 'tqdm', 'k3.store.client.daemon_source'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", rare], capture_output=True, text=True).stdout == "set()\n"


def test_an_interrupt_ends_the_line_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    original = token_output.TextOutput.token

    def token(self: token_output.TextOutput, token: int, *, is_stop: bool) -> None:
        original(self, token, is_stop=is_stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(token_output.TextOutput, "token", token)
    result = k3_run("--snapshot", TINY, "--ids", "1,2", "--ngen", "5")
    assert result.exit_code == 130
    assert result.stdout.endswith("\n")
    assert "generation stopped; the tokens printed so far are complete" in result.stderr


def test_ctrl_c_for_real() -> None:
    command = [*COMMAND, "--snapshot", TINY, "--ids", "1,2", "--ngen", "200000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, said = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert rest.endswith("\n")
    assert "interrupted" in said
    assert "Traceback" not in said


def test_a_closed_pipe_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [*COMMAND, "--snapshot", TINY, "--ids", "1,2"]
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_look_ahead_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    arguments = ["--snapshot", TINY, "--ids", "1,2,3", "--ngen", "6", "--ignore-eos", "--expert-gb", "0", "--json"]
    plain = json.loads(k3_run(*arguments, "--prefetch", "0").stdout.splitlines()[-1])
    ahead = json.loads(k3_run(*arguments, "--prefetch", "3", "--trace", str(trace)).stdout.splitlines()[-1])
    usual = json.loads(k3_run(*arguments).stdout.splitlines()[-1])
    assert ahead["ids"] == usual["ids"] == plain["ids"]
    assert plain["prefetched"] == plain["prefetch_hits"] == 0
    for report in (ahead, usual):
        assert report["prefetched"] >= report["prefetch_hits"] >= 0
        assert report["prefetched"] > 0
    layers = [line for line in map(json.loads, trace.read_text().splitlines()) if line["type"] == "layer"]
    assert max(len(line["foreseen"]) for line in layers if line["layer"] > 0 and line["pass"] > 0) == 3
    assert {line["foreseen"] for line in layers if line["layer"] == 0} == {None}
