"""Holds up that each dense tensor is used exactly once, and that missing, unknown and misshapen ones are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from k3.base.errors import SourceError, UnsupportedError
from k3.checkpoint.read_ahead import ReadAhead
from k3.engine.forward.deferred import Deferred
from k3.engine.forward.weights import Matrix, Weights
from k3.model.architecture import ModelConfig
from k3.model.model_source import EncodedTensor
from k3.model.tensor_names import expected_tensors, needed_names
from tests.support.engines import VECTORS, all_logits, loaded, snapshot

PREFIX = "language_model."


class Altered:
    """A golden snapshot some of whose tensors are renamed, added or changed."""

    def __init__(
        self,
        *,
        without: Sequence[str] = (),
        extra: Sequence[str] = (),
        change: Callable[[EncodedTensor], EncodedTensor] = lambda tensor: tensor,
        prefix: str = PREFIX,
        bits: int = 16,
    ) -> None:
        self._inner = snapshot("tiny_s1", bits)
        self._without, self._extra, self._change, self._prefix = without, extra, change, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def tensor_names(self) -> list[str]:
        names = [name for name in self._inner.tensor_names() if name.removeprefix(PREFIX) not in self._without]
        return [self._prefix + name.removeprefix(PREFIX) for name in (*names, *self._extra)]

    def read_tensor(self, name: str) -> EncodedTensor:
        return self._change(self._inner.read_tensor(PREFIX + name.removeprefix(self._prefix)))

    def begin_load(self, names: Sequence[str], **calls: Any) -> ReadAhead:
        return ReadAhead(self.read_tensor, names, **calls)


def config() -> ModelConfig:
    return ModelConfig.from_raw(snapshot().config, VECTORS / "config.json")


def test_the_table_is_what_the_published_form_has() -> None:
    wanted = {PREFIX + name: shape for name, shape in expected_tensors(config(), range(5)).items()}
    source = snapshot()
    found = {name: source.tensors[name].shape for name in source.tensor_names()}
    padded = {name for name in found if name.endswith("A_log")}
    assert found.keys() == wanted.keys()
    assert {name: shape for name, shape in found.items() if name not in padded} == {
        name: shape for name, shape in wanted.items() if name not in padded
    }


def test_names_without_the_prefix_load_as_well() -> None:
    with loaded(Altered(prefix="")) as model:
        assert model.resident_bytes > 0


def test_a_later_revision_is_refused() -> None:
    name = "model.layers.1.self_attn.index_proj.weight"
    with pytest.raises(UnsupportedError, match="index_proj") as caught, loaded(Altered(extra=[name])):
        pass
    assert caught.value.tensor == PREFIX + name


def test_a_layer_too_many_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.5"):
        needed_names([*snapshot().tensor_names(), f"{PREFIX}model.layers.5.input_layernorm.weight"], config())


def test_unknown_tensors_are_refused_even_where_they_are_not_run() -> None:
    with pytest.raises(UnsupportedError, match="odd"), loaded(Altered(extra=["model.layers.4.odd"]), layers="2"):
        pass


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.3.self_attn.kv_b_proj.weight"]
)
def test_missing_tensors_are_named(name: str) -> None:
    with pytest.raises(SourceError, match=r"lack|missing") as caught, loaded(Altered(without=[name])):
        pass
    assert caught.value.tensor == PREFIX + name


def test_only_layers_that_are_run_are_needed() -> None:
    missing = [name for name in expected_tensors(config(), range(5)) if ".4." in name]
    with loaded(Altered(without=missing), layers="4") as model:
        assert len(model.layers) == 4
    with pytest.raises(SourceError, match="--layers"), loaded(Altered(without=missing)):
        pass


def test_a_shape_that_does_not_fit_is_named() -> None:
    def cut(tensor: EncodedTensor) -> EncodedTensor:
        if not tensor.name.endswith("layers.2.self_attn.f_a_proj.weight"):
            return tensor
        return dataclasses.replace(tensor, shape=(31, 128), data=tensor.data[:31])

    with pytest.raises(SourceError, match=r"\[31, 128\].*\[32, 128\]") as caught, loaded(Altered(change=cut)):
        pass
    assert caught.value.tensor == f"{PREFIX}model.layers.2.self_attn.f_a_proj.weight"


@pytest.mark.parametrize(("length", "good"), [(4, True), (128, True), (3, False)])
def test_a_log_may_be_padded(length: int, good: bool) -> None:
    def cut(tensor: EncodedTensor) -> EncodedTensor:
        if not tensor.name.endswith("A_log"):
            return tensor
        return dataclasses.replace(tensor, shape=(length,), data=tensor.data[:length].copy())

    if good:
        with loaded(Altered(change=cut)) as model:
            assert model.resident_bytes > 0
    else:
        with pytest.raises(SourceError, match="A_log"), loaded(Altered(change=cut)):
            pass


def test_a_log_padding_must_be_zero() -> None:
    def dirty(tensor: EncodedTensor) -> EncodedTensor:
        if tensor.name.endswith("A_log"):
            data = tensor.data.copy()
            data[100] = 1
            return dataclasses.replace(tensor, data=data)
        return tensor

    with loaded(Altered(change=dirty)) as model, pytest.raises(SourceError, match="not zero"):
        all_logits(model, np.array([1]), 1)


def test_claims_are_exact() -> None:
    source = snapshot()
    with source.begin_load(source.tensor_names()) as reading:
        weights = Weights(source, config(), reading, exact=True)
        weights.floats("model.norm.weight")  # the last first: order is only a matter of speed
        with pytest.raises(AssertionError, match="claimed twice"):
            weights.floats("model.norm.weight")
        with pytest.raises(AssertionError, match="no layer claimed"):
            weights.check_all_claimed()


def test_an_input_that_is_not_finite_names_the_tensor() -> None:
    tensor = snapshot(bits=8).read_tensor(f"{PREFIX}lm_head.weight")
    matrix = Matrix(Deferred(lambda: tensor), exact=False)
    x = np.ones((2, 128), np.float32)
    x[1, 5] = np.inf
    with pytest.raises(SourceError, match="token 1") as caught:
        matrix(x)
    assert caught.value.tensor == f"{PREFIX}lm_head.weight"
