"""Muon for the matrices of the transformer blocks, with AdamW for all other parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from harness.distributed.world import World
from harness.model.weights import split_fused
from harness.runs.optimizer_state import MOMENTS, NEWTON_SCHULZ_STEPS, is_muons, newton_schulz_flops
from harness.runs.train_config import MUON_FIRST_MOMENTUM, TrainConfig
from harness.training.adamw import AdamW, measure_gradients, trained_parameters
from harness.training.zero1 import NamedState, Shard, StatePartition, StateShapes, check_state

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/),
# and torch.optim.Muon: the quintic a·x + b·x³ + c·x⁵ whose slope at zero is largest among those that keep singular
# values near 1. Five steps bring all singular values that are not tiny to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalise(matrices_GxMxN: Tensor, dtype: torch.dtype) -> Tensor:
    """Map each matrix U·S·Vᵀ of a batch to about U·Vᵀ, computed and returned in `dtype`. M must be at most N, so that
    the products X·Xᵀ are MxM, of the smaller side. A matrix of zeros stays zero."""
    a, b, c = COEFFICIENTS
    x_GxMxN = matrices_GxMxN.to(dtype)
    norms_Gx1x1 = torch.linalg.vector_norm(x_GxMxN, dim=(-2, -1), keepdim=True)
    x_GxMxN = x_GxMxN / norms_Gx1x1.clamp(min=EPSILON)  # no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_GxMxM = x_GxMxN @ x_GxMxN.mT
        update_GxMxM = torch.baddbmm(gram_GxMxM, gram_GxMxM, gram_GxMxM, beta=b, alpha=c)
        x_GxMxN = torch.baddbmm(x_GxMxN, update_GxMxM, x_GxMxN, beta=a)
    return x_GxMxN


# Matrices of the same block and shape are orthogonalized together, up to this many elements, because one small matrix
# at a time would hardly occupy a device. The batches do not depend on the number of ranks, so that the last bits of the
# results do not either.
BATCH_NUMBERS = 2**20


@dataclass(frozen=True)
class Matrix:
    """Matrix that is orthogonalized: a whole parameter, or the rows of a fused parameter that are one tensor in
    checkpoints."""

    name: str  # of the parameter
    start: int  # index of its first element in the flattened parameter
    rows: int
    columns: int

    @property
    def sides(self) -> tuple[int, int]:
        """The shape, with the smaller side first."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    def wide(self, flat: Tensor) -> Tensor:
        """Return `flat`, this matrix's flattened elements, as a view that is at least as wide as high."""
        matrix = flat.view(self.rows, self.columns)
        return matrix if self.rows <= self.columns else matrix.mT

    def of(self, parameter: Tensor) -> Tensor:
        """Return this matrix in `parameter`, or in a tensor of its shape, as a view that is at least as wide as
        high."""
        return self.wide(self.shard().of(parameter))

    def shard(self, owner: int = 0) -> Shard:
        return Shard(self.name, self.start, self.start + self.rows * self.columns, owner)


def matrices_of(name: str, parameter: nn.Parameter, model: nn.Module) -> list[Matrix]:
    """Return the matrices that a parameter has in checkpoints: query, key and value are one each."""
    found, start = [], 0
    for part in split_fused(name, parameter.detach(), model.config).values():  # type: ignore[arg-type]
        found.append(Matrix(name, start, *part.shape))
        start += part.numel()
    return found


def batches_of(matrices: list[Matrix]) -> list[list[Matrix]]:
    """Return the matrices in batches that are orthogonalized together. A batch has matrices of one block and shape,
    with at most BATCH_NUMBERS elements in all, or a single larger matrix."""
    alike: dict[tuple[str, int, int], list[Matrix]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.name.split(".")[1], *matrix.sides), []).append(matrix)
    batches = []
    for (_, low, high), found in alike.items():
        count = max(1, BATCH_NUMBERS // (low * high))
        batches += [found[at : at + count] for at in range(0, len(found), count)]
    return batches


T = TypeVar("T")

(BUFFER,) = MOMENTS["muon"]
# Factors of an update, as functions of the matrix's rows and columns, by their names in torch.optim.Muon.
SCALES = {
    # Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982), section 2.2: the root mean square of the
    # update is about that of AdamW's, so that AdamW's learning rates and weight decay fit.
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # From Keller Jordan's article, like COEFFICIENTS.
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


class Muon:
    """Muon (Jordan et al. 2024): momentum whose Nesterov form is orthogonalized, with decoupled weight decay. Formulas,
    names and order of operations are those of torch.optim.Muon, which keeps the momentum as an average, not as a sum.

    This rank orthogonalizes the batches of matrices that `partition` assigns to it, and keeps their momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        dtype: torch.dtype | None = None,
        partition: StatePartition | None = None,
    ) -> None:
        """Matrices are orthogonalized in `dtype`, or if None in the parameters' dtype."""
        self._partition, self._dtype, self._config = partition or StatePartition(), dtype, config
        self._parameters = trained_parameters(model)
        self._muons = {name: each for name, each in self._parameters.items() if is_muons(name, each.shape)}
        others = {name: each for name, each in self._parameters.items() if name not in self._muons}
        self._adamw = AdamW(model, config, self._partition, others)
        matrices = [each for name, parameter in self._muons.items() for each in matrices_of(name, parameter, model)]
        batches = batches_of(matrices)
        flops = [sum(newton_schulz_flops(*matrix.sides) for matrix in batch) for batch in batches]
        owners = self._partition.owners(flops)
        shared = list(zip(batches, owners, strict=True))
        self._shards = [each.shard(owner) for batch, owner in shared for each in batch]
        self._batches = [batch for batch, owner in shared if owner == self._partition.rank]
        self._momenta: dict[Matrix, Tensor] = {}  # of this rank's matrices, flattened
        self._whole: dict[str, Tensor] = {}  # without sharding: the tensors that `_momenta` are views of
        self._steps: Tensor | None = None  # number of steps not skipped, fp32, on the device; None before the first
        self._scale = SCALES[config.muon_update_scale]
        self.set_multiplier(1.0)

    @property
    def learning_rate(self) -> float:
        return self._adamw.learning_rate

    def set_multiplier(self, multiplier: float, decay: float = 1.0) -> None:
        own_rate, own_decay = self._config.muon_learning_rate, self._config.muon_weight_decay
        self._rate = multiplier * (self._config.learning_rate if own_rate is None else own_rate)
        self._decay = decay * (self._config.weight_decay if own_decay is None else own_decay)
        self._adamw.set_multiplier(multiplier, decay)

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        assert not scaler.is_enabled(), "fp16 is refused before"
        norm, skipped, divisor = measure_gradients(self._parameters.values(), max_norm)
        self._adamw.step(skipped, divisor)
        self._step_matrices(skipped, divisor)
        self._partition.exchange([*self._adamw.shards, *self._shards], self._parameters)
        return norm.float(), skipped

    @torch.no_grad()
    def _step_matrices(self, skipped: Tensor, divisor: Tensor | None) -> None:
        if self._steps is None:
            self._make_state()
        assert self._steps is not None
        dtype = next(iter(self._muons.values())).dtype
        kept = (1 - skipped).to(dtype)
        # The momentum rises linearly from MUON_FIRST_MOMENTUM, if there is a warm-up.
        full, steps = self._config.muon_momentum, self._config.muon_momentum_warmup_steps
        part = torch.ones_like(self._steps) if steps is None else (self._steps / steps).clamp(max=1)
        momentum = full - (full - MUON_FIRST_MOMENTUM) * (1 - part.to(dtype))
        for batch in self._batches:
            self._step_batch(batch, kept, momentum, divisor)
        self._steps += kept

    def _step_batch(self, batch: list[Matrix], kept: Tensor, momentum: Tensor, divisor: Tensor | None) -> None:
        """Update a batch of matrices, or if `kept` is 0 leave the matrices and their momentum unchanged."""
        numbers: list[Tensor] = []
        for each in batch:
            gradient = self._muons[each.name].grad
            if gradient is None:  # the loss does not depend on this parameter
                return
            flat = each.shard().of(gradient)
            # torch.where instead of a product, because inf · 0 is NaN.
            flat = torch.where(kept.bool(), flat if divisor is None else flat / divisor, 0)
            average = self._momenta[each].lerp_(flat, (1 - momentum) * kept)
            numbers.append(each.wide(flat.lerp_(average, momentum)))
        updates_GxMxN = orthogonalise(torch.stack(numbers), self._dtype or numbers[0].dtype)
        for each, update_MxN in zip(batch, updates_GxMxN, strict=True):
            weight_MxN = each.of(self._muons[each.name])
            weight_MxN *= 1 - self._rate * self._decay * kept
            weight_MxN -= update_MxN.to(weight_MxN.dtype) * (self._rate * self._scale(each.rows, each.columns) * kept)

    def _make_state(self) -> None:
        """Allocate momentum of zero for each parameter or, with sharding, for each matrix of this rank."""
        if self._partition.size == 1:
            self._whole = {name: torch.zeros_like(parameter.detach()) for name, parameter in self._muons.items()}
        for matrix in [each for batch in self._batches for each in batch]:
            shard, parameter = matrix.shard(), self._muons[matrix.name].detach()
            own = self._whole.get(matrix.name)
            count = shard.stop - shard.start
            self._momenta[matrix] = parameter.new_zeros(count) if own is None else shard.of(own)
        self._steps = torch.zeros((), device=next(iter(self._parameters.values())).device)

    def state_shapes(self) -> StateShapes:
        muons = {name: {"step": torch.Size(), BUFFER: parameter.shape} for name, parameter in self._muons.items()}
        return self._in_order(self._adamw.state_shapes() | muons)

    def named_state(self, world: World) -> NamedState:
        others = self._adamw.named_state(world)
        if self._steps is None:
            return {}
        if self._partition.size > 1:
            own = {
                each.shard(self._partition.rank): {"step": self._steps, BUFFER: momentum}
                for each, momentum in self._momenta.items()
            }
            shapes = {name: shape for name, shape in self.state_shapes().items() if name in self._muons}
            return self._in_order(others | self._partition.gather(self._shards, own, shapes))
        if not world.is_main:  # every rank has the whole state
            return {}
        return self._in_order(others | {name: {"step": self._steps, BUFFER: own} for name, own in self._whole.items()})

    def _in_order(self, values: dict[str, T]) -> dict[str, T]:
        """Return the entries of `values`, which are by parameter name, in the order of the model's parameters."""
        return {name: values[name] for name in self._parameters if name in values}

    def load_named_state(self, saved: NamedState) -> None:
        check_state(saved, self.state_shapes())
        self._adamw.load_named_state({name: state for name, state in saved.items() if name not in self._muons})
        self._make_state()
        assert self._steps is not None
        for matrix, momentum in self._momenta.items():
            momentum.copy_(matrix.shard().of(saved[matrix.name][BUFFER]))
        self._steps.copy_(saved[next(iter(self._muons))]["step"])
