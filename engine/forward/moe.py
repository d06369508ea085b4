"""Stable LatentMoE: route, lease, multiply, sum, release.

The router reads the full width in float32: s = sigmoid(gate x). The bias takes part only in the choice of the top
experts; the weights are s alone. The chosen experts work in a narrow latent space, their weighted sum is
normalised, and an up projection leads back. Shared experts read the full width.

A chunk's tokens are routed together, and each expert that one of them chose is leased once. Experts arrive in any
order, but a token's outputs are summed in ascending expert id, so the result does not depend on the place of an
expert, on the cache, or on the chunks that tokens were taken in by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.base.errors import ExpertError, SourceError
from k3.engine.forward.mlp import GatedMlp
from k3.engine.forward.weights import DAMAGED_OR_PUBLISHED, Weights
from k3.kernels import ExpertMatrix
from k3.model.architecture import ROUTER_SUM_EPS, ModelConfig, MoeConfig
from k3.model.k3_tensors import EXPERT_MATRICES
from k3.model.keys import ExpertLayout
from k3.model.tensor_names import check_experts
from k3.store.source import ExpertSource

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token.

    `experts` [S, top_k] ascending; `weights` [S, top_k]; `kept` [S, top_k], False where an expert was pruned.
    """

    experts: Ids
    weights: Array
    kept: npt.NDArray[np.bool_]

    def wanted(self) -> list[int]:
        """Return every expert that at least one token uses, ascending."""
        return [int(expert) for expert in np.unique(self.experts[self.kept])]

    def per_token(self) -> list[list[int]]:
        """Return the experts that each token uses, ascending."""
        return [row[keep].tolist() for row, keep in zip(self.experts, self.kept, strict=True)]


class Router:
    """The choice of experts.

    `keep_share` p < 1 prunes: of a token's experts only the smallest set of the heaviest is used whose weights
    make up p of their total (ties: lowest id). The others keep their weights, which is as good as rescaling them,
    since the norm after the sum cancels any common factor.
    """

    def __init__(self, weights: Weights, name: str, layer: int, moe: MoeConfig, keep_share: float) -> None:
        self._gate = weights.matrix(f"{name}.gate.weight", exact=True)
        self._bias = weights.floats(f"{name}.gate.e_score_correction_bias")
        self._layer = layer
        self._moe = moe
        self._keep_share = keep_share

    @property
    def ready(self) -> bool:
        """True once the router has been used."""
        return self._gate.ready and self._bias.ready

    def choice(self, x: Array) -> Array:
        """Return the scores by which experts are chosen: x [S, hidden] -> [S, experts]."""
        biased: Array = kernels.sigmoid(self._gate(x)) + self._bias()
        return biased

    def __call__(self, x: Array) -> Routing:
        """Return the routing of `x` [S, hidden].

        SourceError when a score is not finite: no choice made from it would mean anything.
        """
        scores = kernels.sigmoid(self._gate(x))
        try:
            experts = kernels.top_k(scores + self._bias(), self._moe.top_k)
        except kernels.NonFiniteError as error:
            raise SourceError(
                f"the router's score of expert {error.column} for token {error.row} of the chunk is {error.value}",
                layer=self._layer,
                advice=DAMAGED_OR_PUBLISHED,
            ) from error
        weights = np.take_along_axis(scores, experts, axis=-1)
        if self._moe.renormalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(ROUTER_SUM_EPS))
        weights = weights * np.float32(self._moe.scaling_factor)
        return Routing(experts, weights, kept_experts(weights, self._keep_share))


class LatentMoe:
    """The MoE of one layer; `name` is the tensors' prefix, e.g. "model.layers.1.block_sparse_moe"."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        config: ModelConfig,
        source: ExpertSource,
        layout: ExpertLayout,
        *,
        exact: bool,
        keep_share: float = 1.0,
    ) -> None:
        self.router = Router(weights, name, layer, config.moe, keep_share)
        self._down = weights.matrix(f"{name}.routed_expert_down_proj.weight")
        self._norm = weights.floats(f"{name}.routed_expert_norm.weight")
        self._up = weights.matrix(f"{name}.routed_expert_up_proj.weight")
        self._shared = GatedMlp(weights, f"{name}.shared_experts", config) if config.moe.shared_experts else None
        self._layer = layer
        self._config = config
        self._source = source
        self._matrices = expert_matrices(layout, config, layer)
        self._exact = exact

    def __call__(self, x: Array, on_request: Callable[[Routing], None]) -> Array:
        """Return the mixture of experts [S, hidden] of normed `x` [S, hidden].

        `on_request` receives the routing once its experts are requested and the drives have begun to read them.
        Raises what the expert source raises.
        """
        routing = self.router(x)
        stream = self._source.lease(self._layer, routing.wanted())
        try:  # the drives read from here on; meanwhile compute what needs no expert
            on_request(routing)
            z = self._down(x)
            shared = None if self._shared is None else self._shared(x)
            total = ExpertSum(routing, self._config.moe.latent)
            for lease in stream:
                with lease:
                    out = self._multiply(total.gather(z, lease.expert), lease.payload, lease.expert)
                    total.add(lease.expert, out)
        finally:
            stream.close()
        out = self._up(kernels.rms_norm(total.finish(), self._norm(), self._config.eps))
        return out if shared is None else out + shared

    def _multiply(self, z: Array, payload: npt.NDArray[np.uint8], expert: int) -> Array:
        """Return one expert's output for these rows of z. ExpertError when it is not finite."""
        beta, linear_beta = self._config.situ_beta, self._config.situ_linear_beta
        try:
            out = kernels.expert_forward(
                z, payload, *self._matrices, beta=beta, linear_beta=linear_beta, exact=self._exact
            )
        except (kernels.ReservedScaleError, kernels.NonFiniteError) as error:
            raise self._useless(f"the expert cannot be computed: {error}", expert) from error
        if not np.isfinite(out).all():
            raise self._useless("the expert's output is not finite", expert)
        return out

    def _useless(self, problem: str, expert: int) -> ExpertError:
        return ExpertError(problem, layer=self._layer, expert=expert, advice=DAMAGED_OR_PUBLISHED)


class ExpertSum:
    """Weighted outputs of a chunk's experts, added per token in ascending expert id, however they arrive."""

    def __init__(self, routing: Routing, width: int) -> None:
        self._sum = np.zeros((len(routing.experts), width), np.float32)
        tokens, slots = np.nonzero(routing.kept)
        experts = routing.experts[tokens, slots]
        by_expert = np.argsort(experts, kind="stable")  # ascending too within each expert
        ids, begins = np.unique(experts[by_expert], return_index=True)
        tokens, weights = tokens[by_expert], routing.weights[tokens, slots][by_expert, None]
        bounds = [*begins.tolist(), len(tokens)]
        spans = list(map(slice, bounds, bounds[1:]))
        self._order: list[int] = ids.tolist()
        self._rows: dict[int, Ids] = dict(zip(self._order, map(tokens.__getitem__, spans), strict=True))
        self._weights: dict[int, Array] = dict(zip(self._order, map(weights.__getitem__, spans), strict=True))
        self._early: dict[int, Array] = {}
        self._next = 0

    def gather(self, z: Array, expert: int) -> Array:
        """Return the rows of z [S, width] whose tokens use `expert`."""
        return z if len(self._rows[expert]) == len(z) else z[self._rows[expert]]

    def add(self, expert: int, out: Array) -> None:
        """Add an expert's output for its rows, once every lower id was added. `out` may be written over."""
        assert expert not in self._early
        self._early[expert] = out
        while self._next < len(self._order) and (turn := self._order[self._next]) in self._early:
            rows, weighted = self._rows[turn], self._early.pop(turn)
            weighted *= self._weights[turn]
            if len(rows) == len(self._sum):  # every token uses it: nothing to scatter
                self._sum += weighted
            else:
                self._sum[rows] += weighted
            self._next += 1

    def finish(self) -> Array:
        """Return the sums [S, width], after every expert was added."""
        assert self._next == len(self._order), "an expert never arrived"
        return self._sum


def kept_experts(weights: Array, keep_share: float) -> npt.NDArray[np.bool_]:
    """Return which of each token's experts remain under `--topp`: weights [S, k] -> bool [S, k].

    These are the heaviest, until they make up `keep_share` of the total: at least one, and all at 1.
    """
    if keep_share >= 1:
        return np.ones(weights.shape, np.bool_)
    order = np.argsort(-weights, axis=-1, kind="stable")
    heaviest = np.take_along_axis(weights, order, axis=-1).astype(np.float64)
    reached = np.cumsum(heaviest, axis=-1)
    kept = np.ones(weights.shape, np.bool_)  # the heaviest, and those before which the sum is too small
    np.put_along_axis(kept, order[:, 1:], reached[:, :-1] < keep_share * reached[:, -1:], axis=-1)
    return kept


def expert_matrices(layout: ExpertLayout, config: ModelConfig, layer: int) -> tuple[ExpertMatrix, ...]:
    """Return the places of w1, w2 and w3 in a payload. Raises what `tensor_names.check_experts` raises."""
    check_experts(layout, config, layer)
    latent, inner = config.moe.latent, config.moe.inner
    return tuple(
        ExpertMatrix(
            layout.part(f"{matrix}.weight_packed").offset, layout.part(f"{matrix}.weight_scale").offset, *shape
        )
        for matrix, shape in zip(EXPERT_MATRICES, ((inner, latent), (latent, inner), (inner, latent)), strict=True)
    )
