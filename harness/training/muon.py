"""Muon for the matrices of the transformer blocks, with AdamW for all other parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.distributed.world import World
from harness.model.weights import split_fused
from harness.runs.optimizer_state import MOMENTS, NEWTON_SCHULZ_STEPS, is_muons, newton_schulz_flops
from harness.runs.train_config import MUON_FIRST_MOMENTUM, TrainConfig
from harness.training.adamw import AdamW
from harness.training.zero1 import NamedState, Shard, StatePartition, StateShapes, check_state

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/),
# and torch.optim.Muon: the quintic a·x + b·x³ + c·x⁵ whose slope at zero is largest among those that keep singular
# values near 1. Five steps bring all singular values above 0.01 to between 0.68 and 1.14.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalize(matrices_GxMxN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an approximation of U·Vᵀ for each of G matrices X = U·S·Vᵀ (singular value decomposition), in `dtype`. A
    matrix of zeros stays zero. For speed, matrices should have no more rows (M) than columns (N)."""
    a, b, c = COEFFICIENTS
    x_GxMxN = matrices_GxMxN.to(dtype)
    norms_Gx1x1 = torch.linalg.vector_norm(x_GxMxN, dim=(-2, -1), keepdim=True)
    x_GxMxN = x_GxMxN / norms_Gx1x1.clamp(min=EPSILON)  # no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_GxMxM = x_GxMxN @ x_GxMxN.mT
        update_GxMxM = torch.baddbmm(gram_GxMxM, gram_GxMxM, gram_GxMxM, beta=b, alpha=c)
        x_GxMxN = torch.baddbmm(x_GxMxN, update_GxMxM, x_GxMxN, beta=a)
    return x_GxMxN


# Largest number of elements in a batch of several matrices. A batch is orthogonalized at once, because one small matrix
# at a time would hardly occupy a device. With larger batches, eight ranks would have unequal shares. The batches do not
# depend on the number of ranks, so the last bits of the results do not depend on it either.
BATCH_ELEMENTS = {"cpu": 2**20, "cuda": 2**22}


@dataclass(frozen=True)
class Matrix:
    """Place of a matrix whose updates Muon orthogonalizes: a whole parameter or, if the parameter fuses query, key and
    value, the rows of one of them."""

    name: str  # name of the parameter
    start: int  # index of the matrix's first element in the flattened parameter
    rows: int
    columns: int

    @property
    def sides(self) -> tuple[int, int]:
        """The two dimensions of the matrix, smaller first."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    def wide(self, flat: Tensor) -> Tensor:
        """Return a 2-D view of `flat`, this matrix's flattened elements, with no more rows than columns."""
        matrix = flat.view(self.rows, self.columns)
        return matrix if self.rows <= self.columns else matrix.mT

    def shard(self, owner: int = 0) -> Shard:
        """Return the shard that consists of this matrix's elements and is owned by the rank `owner`."""
        return Shard(self.name, self.start, self.start + self.rows * self.columns, owner)


def matrices_of(name: str, parameter: nn.Parameter, model: nn.Module) -> list[Matrix]:
    """Return the matrices that a parameter of `model` consists of: the projections of queries, keys and values if it is
    their fused matrix, else one."""
    found, start = [], 0
    for part in split_fused(name, parameter.detach(), model.config).values():  # type: ignore[arg-type]
        found.append(Matrix(name, start, *part.shape))
        start += part.numel()
    return found


def batches_of(matrices: list[Matrix], device_type: str) -> list[list[Matrix]]:
    """Return the matrices in batches that are orthogonalized together. The matrices of a batch have the same shape, up
    to transposition."""
    alike: dict[tuple[str, int, int], list[Matrix]] = {}
    for matrix in matrices:
        block = "" if device_type == "cuda" else matrix.name.split(".")[1]
        alike.setdefault((block, *matrix.sides), []).append(matrix)
    batches = []
    for (_, low, high), found in alike.items():
        count = max(1, BATCH_ELEMENTS.get(device_type, BATCH_ELEMENTS["cpu"]) // (low * high))
        batches += [found[at : at + count] for at in range(0, len(found), count)]
    return batches


(BUFFER,) = MOMENTS["muon"]
# Factors of an update, as functions of the matrix's rows and columns, by their names in torch.optim.Muon
# (`adjust_lr_fn`) and in train.json (`muon_update_scale`).
SCALES = {
    # Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982), section 2.2: the root mean square of the
    # update is about that of an AdamW update, so that AdamW's learning rates and weight decay fit.
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # From Keller Jordan's article, like COEFFICIENTS.
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


class Muon:
    """Muon (Jordan et al. 2024) for the matrices of the blocks, and AdamW for all other parameters.

    Names and formulas are those of torch.optim.Muon. The momentum is an average, not a sum. A rank updates only the
    matrices that `partition` assigns to it, and keeps only their momentum. Methods without a docstring do what those of
    AdamW do (adamw.py).
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        dtype: torch.dtype | None = None,
        partition: StatePartition | None = None,
    ) -> None:
        """Create the optimizer of all parameters of the model. Updates of matrices are orthogonalized in `dtype` (None:
        in the parameters' dtype). Without a `partition`, every rank keeps the whole state."""
        self.partition, self._dtype, self._config = partition or StatePartition(), dtype, config
        self.parameters = dict(model.named_parameters())
        self._muons = {name: each for name, each in self.parameters.items() if is_muons(name, each.shape)}
        others = {name: each for name, each in self.parameters.items() if name not in self._muons}
        self._adamw = AdamW(model, config, self.partition, others)
        matrices = [each for name, parameter in self._muons.items() for each in matrices_of(name, parameter, model)]
        batches = batches_of(matrices, next(iter(self.parameters.values())).device.type)
        owners = self.partition.owners([sum(newton_schulz_flops(*each.sides) for each in batch) for batch in batches])
        shared = list(zip(batches, owners, strict=True))
        self._shards = [each.shard(owner) for batch, owner in shared for each in batch]
        self.shards = [*self._adamw.shards, *self._shards]
        self._batches = [batch for batch, owner in shared if owner == self.partition.rank]
        self._momenta: dict[Matrix, Tensor] = {}  # flattened momentum of each of this rank's matrices
        self._steps: Tensor | None = None  # number of steps not skipped, fp32, on the device; None before the first
        self._scale = SCALES[config.muon_update_scale]
        self.set_factors(1.0)

    def set_factors(self, rate_factor: float, decay_factor: float = 1.0) -> None:
        own_rate, own_decay = self._config.muon_learning_rate, self._config.muon_weight_decay
        self._rate = rate_factor * (self._config.learning_rate if own_rate is None else own_rate)
        self._decay = decay_factor * (self._config.weight_decay if own_decay is None else own_decay)
        self._adamw.set_factors(rate_factor, decay_factor)

    @torch.no_grad()
    def update(self, skipped: Tensor, clip_divisor: Tensor | None) -> None:
        self._adamw.update(skipped, clip_divisor)
        steps = self._make_state() if self._steps is None else self._steps
        kept = (1 - skipped).to(next(iter(self._muons.values())).dtype)  # 0 leaves matrices and momentum unchanged
        # The momentum rises linearly from MUON_FIRST_MOMENTUM, if there is a warm-up.
        full, rising = self._config.muon_momentum, self._config.muon_momentum_warmup_steps
        part = torch.ones_like(steps) if rising is None else (steps / rising).clamp(max=1)
        momentum = full - (full - MUON_FIRST_MOMENTUM) * (1 - part.to(kept.dtype))
        # Computed once, because each operation on a scalar is a kernel of its own on a GPU.
        is_kept, new_share, shrinkage = kept.bool(), (1 - momentum) * kept, 1 - self._rate * self._decay * kept
        shapes = {(each.rows, each.columns) for batch in self._batches for each in batch}
        rates = {shape: self._rate * self._scale(*shape) * kept for shape in shapes}
        for batch in self._batches:
            gradients = {each: grad for each in batch if (grad := self._muons[each.name].grad) is not None}
            if not gradients:  # the loss does not depend on these parameters
                continue
            nesterov = []
            for each, gradient in gradients.items():
                flat = each.shard().of(gradient)
                # torch.where instead of a product, because inf · 0 is NaN.
                flat = torch.where(is_kept, flat if clip_divisor is None else flat / clip_divisor, 0)
                average = self._momenta[each].lerp_(flat, new_share)
                nesterov.append(each.wide(flat.lerp_(average, momentum)))
            updates_GxMxN = orthogonalize(torch.stack(nesterov), self._dtype or nesterov[0].dtype)
            for each, update_MxN in zip(gradients, updates_GxMxN, strict=True):
                weight_MxN = each.wide(each.shard().of(self._muons[each.name]))
                weight_MxN *= shrinkage
                weight_MxN -= update_MxN.to(weight_MxN.dtype) * rates[each.rows, each.columns]
        steps += kept

    def _make_state(self) -> Tensor:
        """Set the momentum of each of this rank's matrices to zero. Returns the tensor that counts the steps, also
        zero."""
        for batch in self._batches:
            for matrix in batch:
                self._momenta[matrix] = torch.zeros_like(matrix.shard().of(self._muons[matrix.name]))
        self._steps = torch.zeros((), device=next(iter(self.parameters.values())).device)
        return self._steps

    def state_shapes(self) -> StateShapes:
        shapes = self._adamw.state_shapes()
        for name, parameter in self._muons.items():
            shapes[name] = {"step": torch.Size(), BUFFER: parameter.shape}
        return {name: shapes[name] for name in self.parameters}

    def named_state(self, world: World, into: NamedState) -> NamedState:
        if self._steps is None or (self.partition.size == 1 and not world.is_main):
            return {}
        shapes = self.state_shapes()
        self._adamw.named_state(world, into)
        own = {
            each.shard(self.partition.rank): {"step": self._steps, BUFFER: momentum}
            for each, momentum in self._momenta.items()
        }
        self.partition.gather(self._shards, own, shapes, self._steps.device, into)
        return into

    def load_named_state(self, saved: NamedState) -> None:
        check_state(saved, self.state_shapes())
        self._adamw.load_named_state({name: state for name, state in saved.items() if name not in self._muons})
        steps = self._make_state()
        for matrix, momentum in self._momenta.items():
            momentum.copy_(matrix.shard().of(saved[matrix.name][BUFFER]))
        steps.copy_(saved[next(iter(self._muons))]["step"])
