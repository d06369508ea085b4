"""Dense tensors by name: which ones a model must have, and each of them claimed exactly once.

`expected_tensors` is the table of names and shapes that follows from a configuration. Before a byte of
weights is read, the source's names are held against it: a missing tensor is an error, and so is one that this
engine does not know, since a model with more tensors computes something else. `Weights` then hands each
tensor out once, checks its shape, and at the end insists that all were asked for.

`Matrix` is a weight that stays in its stored encoding and is multiplied by the kernels. It may be made before its
bytes are there: the first use waits for them. Claiming and first uses belong to one thread; a `Matrix` that was
used is immutable and may be used from any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.container.errors import DamageError, SourceError, UnsupportedError
from k3.container.keys import Encoding, layer_of
from k3.container.source import EncodedTensor, ModelSource
from k3.engine.config import ModelConfig
from k3.engine.reading import TensorReader

Array = npt.NDArray[np.float32]
Shape = tuple[int, ...]

ALL_TEXT_PREFIXES = ("language_model.", "")
"""Where the text model's names may begin: inside the multimodal checkpoint, or alone."""

_LISTED = 5  # names shown in an error before "and N more"


class Matrix:
    """A weight [rows, columns] in its stored encoding; calling it multiplies."""

    __slots__ = ("_arrival", "_exact", "_tensor")

    def __init__(self, tensor: EncodedTensor | Callable[[], EncodedTensor], *, exact: bool) -> None:
        """`tensor` is the weight, or what waits for it and returns it: called once, at the first use."""
        self._tensor = tensor if isinstance(tensor, EncodedTensor) else None
        self._arrival = None if isinstance(tensor, EncodedTensor) else tensor
        self._exact = exact

    @property
    def tensor(self) -> EncodedTensor:
        """The weight as stored. Waits for it, and raises what reading it raised."""
        if self._tensor is None:
            assert self._arrival is not None
            self._tensor, self._arrival = self._arrival(), None
        return self._tensor

    def __call__(self, x: Array) -> Array:
        """x [S, columns] -> [S, rows]. A row of the result depends only on the same row of x.

        DamageError for an input that is not finite, where the kernel has to notice.
        """
        try:
            return kernels.matmul(x, self.tensor, exact=self._exact)
        except kernels.NonFiniteError as error:
            raise DamageError(
                f"an input of the product is {error.value} (token {error.row} of the chunk)",
                tensor=self.tensor.name,
                advice="Weights before this one are damaged; check the model with k3-verify",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return _nbytes(self.tensor)


class Weights:
    """The dense tensors of one model, given out by name without the checkpoint's prefix.

    With `lazy`, a matrix is given out at once and waits for its bytes when it is first used; otherwise it is there
    when it is given out. `floats` always waits.
    """

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        reading: TensorReader,
        *,
        exact: bool,
        lazy: bool = False,
        on_read: Callable[[str], None] | None = None,
    ) -> None:
        """`reading` hands out the tensors of `needed_names`; `on_read` is told of each that was taken from it."""
        self._exact = exact
        self._lazy = lazy
        self._on_read = on_read
        self._reading = reading
        self.prefix = text_prefix(source.tensor_names())
        self._shapes = expected_tensors(config, config.layers)
        self._unclaimed = set(self._shapes)
        self.resident_bytes = 0

    def matrix(self, name: str, *, exact: bool | None = None) -> Matrix:
        """A weight to multiply by. `exact=True` where the model needs float32 whatever the run's setting."""
        self._claim(name)
        tensor = partial(self._take, name) if self._lazy else self._take(name)
        return Matrix(tensor, exact=self._exact if exact is None else exact)

    def floats(self, name: str) -> Array:
        """A tensor as float32 values in its own shape: norms, biases, convolutions."""
        self._claim(name)
        return to_float32(self._take(name))

    def finish(self) -> None:
        """To be called when the model is built: every tensor of the table must be in use."""
        if self._unclaimed:
            raise AssertionError(f"tensors of the table that no layer claimed: {sorted(self._unclaimed)}")

    def _claim(self, name: str) -> None:
        if name not in self._unclaimed:
            raise AssertionError(f"{name} is claimed twice, or is not in the table of tensors")
        self._unclaimed.remove(name)

    def _take(self, name: str) -> EncodedTensor:
        """A claimed tensor as soon as it is there."""
        full_name = self.prefix + name
        tensor = self._reading.take(full_name)
        check_shape(full_name, tensor.shape, self._shapes[name])
        self.resident_bytes += _nbytes(tensor)
        if self._on_read is not None:
            self._on_read(full_name)
        return tensor


def _nbytes(tensor: EncodedTensor) -> int:
    return tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)


def to_float32(tensor: EncodedTensor) -> Array:
    """The values of a tensor in any encoding. UnsupportedError for a dtype that holds no real numbers."""
    if tensor.encoding is Encoding.INT8:
        assert tensor.scales is not None
        return kernels.dequantize_int8(tensor.data, tensor.scales)
    if tensor.encoding is Encoding.INT4:
        assert tensor.scales is not None
        return kernels.dequantize_int4(tensor.data, tensor.scales, tensor.shape[1])
    if tensor.encoding is Encoding.F32 or tensor.dtype == "F32":
        return np.ascontiguousarray(tensor.data, dtype=np.float32)
    if tensor.dtype == "BF16":
        return kernels.widen_bf16(tensor.data)
    raise UnsupportedError(f"dtype {tensor.dtype} where BF16 or F32 is expected", tensor=tensor.name)


def text_prefix(names: Iterable[str]) -> str:
    """What the text model's tensor names begin with. SourceError when there are no embeddings at all."""
    present = set(names)
    for prefix in ALL_TEXT_PREFIXES:
        if f"{prefix}model.embed_tokens.weight" in present:
            return prefix
    raise SourceError("tensor is missing from the model", tensor="language_model.model.embed_tokens.weight")


def check_shape(name: str, shape: Sequence[int], expected: Shape) -> None:
    """SourceError unless the shapes agree; A_log may be padded beyond its heads."""
    fits = tuple(shape) == expected
    if name.endswith(".A_log"):
        fits = len(shape) == 1 and shape[0] >= expected[0]
    if not fits:
        raise SourceError(
            f"shape {list(shape)} does not fit the configuration, which gives {list(expected)}", tensor=name
        )


def check_shapes(shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> None:
    """Check tensors by full name, before anything is read. SourceError names the first that does not fit."""
    prefix = text_prefix(shapes)
    expected = expected_tensors(config, config.layers)
    for name, shape in shapes.items():
        check_shape(name, shape, expected[name.removeprefix(prefix)])


def expected_tensors(config: ModelConfig, layers: Iterable[int]) -> dict[str, Shape]:
    """Every dense tensor that these layers and the model around them have: name without prefix -> shape."""
    hidden, vocab = config.hidden, config.vocab
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in layers:
        kda, moe = layer in config.kda_layers, layer in config.moe_layers
        own = _mix_and_norm_shapes(config)
        own |= _kda_shapes(config) if kda else _mla_shapes(config)
        own |= _moe_shapes(config) if moe else _dense_mlp_shapes(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _mix_and_norm_shapes(config: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        f"{norm}.weight": (config.hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for mix in ("self_attention_res", "mlp_res"):
        shapes[f"{mix}_norm.weight"] = (config.hidden,)
        shapes[f"{mix}_proj.weight"] = (1, config.hidden)
    return shapes


def _kda_shapes(config: ModelConfig) -> dict[str, Shape]:
    kda, hidden = config.kda, config.hidden
    shapes: dict[str, Shape] = {
        "f_a_proj.weight": (kda.head_dim, hidden),
        "f_b_proj.weight": (kda.width, kda.head_dim),
        "b_proj.weight": (kda.heads, hidden),
        "g_proj.weight": (kda.width, hidden),
        "o_proj.weight": (hidden, kda.width),
        "o_norm.weight": (kda.head_dim,),
        "A_log": (kda.heads,),
        "dt_bias": (kda.width,),
    }
    for stream in "qkv":
        shapes[f"{stream}_proj.weight"] = (kda.width, hidden)
        shapes[f"{stream}_conv1d.weight"] = (kda.width, 1, kda.conv_taps)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mla_shapes(config: ModelConfig) -> dict[str, Shape]:
    mla, hidden = config.mla, config.hidden
    shapes: dict[str, Shape] = {
        "q_a_proj.weight": (mla.q_rank, hidden),
        "q_a_layernorm.weight": (mla.q_rank,),
        "q_b_proj.weight": (mla.heads * (mla.nope + mla.rope), mla.q_rank),
        "kv_a_proj_with_mqa.weight": (mla.latent + mla.rope, hidden),
        "kv_a_layernorm.weight": (mla.latent,),
        "kv_b_proj.weight": (mla.heads * (mla.nope + mla.value), mla.latent),
        "g_proj.weight": (mla.heads * mla.value, hidden),
        "o_proj.weight": (hidden, mla.heads * mla.value),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _glu_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _dense_mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    return _glu_shapes("mlp", config.hidden, config.dense_inner)


def _moe_shapes(config: ModelConfig) -> dict[str, Shape]:
    moe, hidden = config.moe, config.hidden
    shapes: dict[str, Shape] = {
        "block_sparse_moe.gate.weight": (moe.experts, hidden),
        "block_sparse_moe.gate.e_score_correction_bias": (moe.experts,),
        "block_sparse_moe.routed_expert_down_proj.weight": (moe.latent, hidden),
        "block_sparse_moe.routed_expert_norm.weight": (moe.latent,),
        "block_sparse_moe.routed_expert_up_proj.weight": (hidden, moe.latent),
    }
    if moe.shared_experts:
        inner = moe.shared_experts * moe.inner
        shapes |= _glu_shapes("block_sparse_moe.shared_experts", hidden, inner)
    return shapes


def needed_names(names: Iterable[str], config: ModelConfig) -> list[str]:
    """Full names of the tensors that a run of `config.layers` reads, out of all that a source has, in its order.

    Compares names only. SourceError for what is missing; UnsupportedError for tensors that the whole model
    would not have.
    """
    names = list(names)
    prefix = text_prefix(names)
    needed = {prefix + name for name in expected_tensors(config, config.layers)}
    present = set(names)
    known = expected_tensors(config, range(config.layer_count))
    unknown = [name for name in present if name.removeprefix(prefix) not in known or not name.startswith(prefix)]
    if unknown:
        raise UnsupportedError(
            f"this engine does not know {_listing(unknown)}",
            tensor=min(unknown),
            advice="The model is a later revision or not a Kimi K3; leaving tensors out would change its text",
        )
    missing = [name for name in needed if name not in present]
    if missing:
        layers = sorted({layer for name in missing if (layer := layer_of(name)) is not None})
        raise SourceError(
            f"the model lacks {_listing(missing)}",
            tensor=min(missing),
            layer=layers[0] if layers else None,
            advice="If only some layers were repacked or downloaded, run just those with --layers",
        )
    return [name for name in names if name in needed]


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    more = len(names) - _LISTED
    plural = "tensor" if len(names) == 1 else "tensors"
    return f"{plural} {shown}" + (f" and {more} more" if more > 0 else "")
