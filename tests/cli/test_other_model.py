"""Holds up that two models of the same weights are not taken for one: by a state, a daemon, a fallback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.errors import DaemonError
from k3.container.reader import Container
from k3.engine.cli import main
from k3.store.client.daemon_source import DaemonSource
from k3.store.lending.file_source import FileSource
from tests.support.daemons import daemon_inside
from tests.support.engines import VECTORS
from tests.support.repacked import repacked

Edit = Callable[[Path], None]


def k3_run(*arguments: Any) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def in_config(**keys: Any) -> Edit:
    def edit(snapshot: Path) -> None:
        config = json.loads((snapshot / "config.json").read_text())
        config["text_config"].update(keys)
        (snapshot / "config.json").write_text(json.dumps(config))

    return edit


def in_generation(snapshot: Path) -> None:
    (snapshot / "generation_config.json").write_text('{"eos_token_id": [258, 3]}')


def in_vocabulary(snapshot: Path) -> None:
    lines = (snapshot / "tiktoken.model").read_text().splitlines()
    (one, rank), (other, last) = lines[-2].split(), lines[-1].split()
    (snapshot / "tiktoken.model").write_text("\n".join([*lines[:-2], f"{other} {rank}", f"{one} {last}"]) + "\n")


def in_form(snapshot: Path) -> None:
    config = json.loads((snapshot / "config.json").read_text())
    config["transformers_version"] = "9.9"
    (snapshot / "config.json").write_text(json.dumps(config, indent=7, sort_keys=True))


MEANT: dict[str, Edit] = {
    "fewer experts": in_config(num_experts_per_token=1),
    "epsilon": in_config(rms_norm_eps=1e-3),
    "activation": in_config(activation_situ_beta=3.5),
    "end of text": in_generation,
}


def remade(edit: Edit, place: Path) -> Path:
    """Return a container of the vectors' weights with other small files."""
    shutil.copytree(VECTORS / "tiny_s1", place / "snapshot")
    edit(place / "snapshot")
    repacked(place / "snapshot", place / "home")
    return place / "home"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remade(lambda snapshot: None, tmp_path_factory.mktemp("first"))


def uuid(home: Path) -> str:
    return str(json.loads((home / "manifest.json").read_text())["container"])


@pytest.mark.parametrize("what", MEANT)
def test_a_state_goes_on_only_under_the_configuration_that_made_it(what: str, home: Path, tmp_path: Path) -> None:
    other, state = remade(MEANT[what], tmp_path), tmp_path / "state"
    assert uuid(other) == uuid(home), "the weights are the same"
    assert k3_run("--container", home, "--ids", "1,2,3", "--ngen", 2, "--state", state).exit_code == 0
    before = state.read_bytes()
    refused = k3_run("--container", other, "--ngen", 2, "--state", state)
    assert refused.exit_code == 8
    assert "config " in refused.stderr
    assert str(state) in refused.stderr
    assert state.read_bytes() == before
    assert k3_run("--container", home, "--ngen", 2, "--state", state).exit_code == 0


def test_form_binds_nobody(home: Path, tmp_path: Path) -> None:
    other, state = remade(in_form, tmp_path), tmp_path / "state"
    assert k3_run("--container", home, "--ids", "1,2,3", "--ngen", 2, "--state", state).exit_code == 0
    assert k3_run("--container", other, "--ngen", 2, "--state", state).exit_code == 0


def test_the_vocabulary_binds_a_conversation_in_text(home: Path, tmp_path: Path) -> None:
    other = remade(in_vocabulary, tmp_path)
    ids, text = tmp_path / "ids", tmp_path / "text"
    assert k3_run("--container", home, "--ids", "1,2,3", "--ngen", 1, "--state", ids).exit_code == 0
    assert k3_run("--container", home, "--ngen", 1, "--state", text, "Hello").exit_code == 0
    assert k3_run("--container", other, "--ngen", 1, "--state", ids).exit_code == 0
    refused = k3_run("--container", other, "--ngen", 1, "--state", text)
    assert refused.exit_code == 8
    assert "text " in refused.stderr


def test_a_snapshot_that_is_edited_is_another_model(tmp_path: Path) -> None:
    shutil.copytree(VECTORS / "tiny_s1", tmp_path / "snapshot")
    options = ("--snapshot", tmp_path / "snapshot", "--ngen", 1, "--state", tmp_path / "state")
    assert k3_run(*options, "--ids", "1,2,3").exit_code == 0
    in_form(tmp_path / "snapshot")
    assert k3_run(*options).exit_code == 0
    MEANT["epsilon"](tmp_path / "snapshot")
    refused = k3_run(*options)
    assert (refused.exit_code, "config " in refused.stderr) == (8, True)


@pytest.mark.parametrize("what", ["fewer experts", "vocabulary"])
def test_a_fallback_of_another_model_is_refused_before_the_run(what: str, home: Path, tmp_path: Path) -> None:
    other = remade({**MEANT, "vocabulary": in_vocabulary}[what], tmp_path)
    with daemon_inside(tmp_path / "s", [home]):
        options = ("--store", tmp_path / "s", "--ids", "1,2,3", "--ngen", 1, "--fallback", "file", "--container")
        assert k3_run(*options, home).exit_code == 0
        refused = k3_run(*options, other)
        assert refused.exit_code == 10
        assert "is not the model that k3-store serves" in refused.stderr


def test_a_daemon_that_comes_later_must_serve_the_model_that_is_run(home: Path, tmp_path: Path) -> None:
    """A run that began on files does not take experts of whatever a daemon serves by then."""
    other = Container.open(remade(MEANT["fewer experts"], tmp_path))
    source = DaemonSource(tmp_path / "s", fallback=lambda: FileSource(other), identity=other.identity)
    with daemon_inside(tmp_path / "s", [home]):
        with pytest.raises(DaemonError, match="another model than is run here: config"):
            DaemonSource(tmp_path / "s", fallback=lambda: FileSource(other), identity=other.identity)
        source._daemon._tried_at_s = float("-inf")
        with pytest.raises(DaemonError, match="another model than is run here: config"):
            source.lease(1, [0])
    source.close()
    other.close()


def test_a_daemon_that_comes_back_with_another_configuration_is_refused(home: Path, tmp_path: Path) -> None:
    other = remade(MEANT["activation"], tmp_path)
    with daemon_inside(tmp_path / "s", [home]):
        source = DaemonSource(tmp_path / "s")
        for lease in source.lease(1, [0]):
            lease.release()
    with daemon_inside(tmp_path / "s", [other]), pytest.raises(DaemonError, match="instead of"):
        list(source.lease(1, [0]))
    source.close()
