"""The matrices that Muon orthogonalises, and which of them together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from harness.model.weights import split_fused
from harness.runs.optimizer_state import newton_schulz_flops
from harness.training.shares import Piece

# Small matrices of one block and shape are orthogonalised together, up to so many numbers: one at a time they would
# hardly occupy a device. Which ones go together does not depend on the number of ranks, lest the last bit do.
BATCH_NUMBERS = 2**20


@dataclass(frozen=True)
class Matrix:
    """A matrix that is orthogonalised: a parameter, or as many of its rows as are one tensor in checkpoints."""

    name: str  # of the parameter
    start: int  # its first number in the flattened parameter
    rows: int
    columns: int

    @property
    def sides(self) -> tuple[int, int]:
        """The shape, the smaller side first."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    def wide(self, flat: Tensor) -> Tensor:
        """Its numbers as a matrix that is at least as wide as high: a view."""
        matrix = flat.view(self.rows, self.columns)
        return matrix if self.rows <= self.columns else matrix.mT

    def of(self, parameter: Tensor) -> Tensor:
        """The matrix in a tensor of the parameter's shape: a view, at least as wide as high."""
        return self.wide(self.piece().of(parameter))

    def piece(self, owner: int = 0) -> Piece:
        return Piece(self.name, self.start, self.start + self.rows * self.columns, owner)


def matrices_of(name: str, parameter: nn.Parameter, model: nn.Module) -> list[Matrix]:
    """A parameter as the matrices that it is in checkpoints: query, key and value each by itself."""
    found, start = [], 0
    for part in split_fused(name, parameter.detach(), model.config).values():  # type: ignore[arg-type]
        found.append(Matrix(name, start, *part.shape))
        start += part.numel()
    return found


def batches_of(matrices: list[Matrix]) -> list[list[Matrix]]:
    """Matrices that are orthogonalised together: of one block and shape, and together not too large."""
    alike: dict[tuple[str, int, int], list[Matrix]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.name.split(".")[1], *matrix.sides), []).append(matrix)
    batches = []
    for (_, low, high), found in alike.items():
        count = max(1, BATCH_NUMBERS // (low * high))
        batches += [found[at : at + count] for at in range(0, len(found), count)]
    return batches


def batch_cost(batch: list[Matrix]) -> float:
    """Floating-point operations of orthogonalising it."""
    return sum(newton_schulz_flops(*matrix.sides) for matrix in batch)
