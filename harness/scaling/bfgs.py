"""Minima of one smooth function from many starts at once, by BFGS in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ITERATIONS = 400
TRIALS = 40  # of step lengths in one iteration
DECREASE, CURVATURE = 1e-4, 0.9  # the two conditions of Wolfe
# A search has ended when its value has fallen by less than this part of itself in PATIENCE iterations.
TOLERANCE = 1e-9
PATIENCE = 5

# Values [R] and gradients [R, P] at points [R, P]. The second argument, [R], says which of the searches each row
# belongs to, for functions that differ from search to search (by the resample that they fit, say).
Function = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass
class _Searches:
    """State of all searches."""

    x_SxP: np.ndarray
    value_S: np.ndarray
    gradient_SxP: np.ndarray
    inverse_SxPxP: np.ndarray  # of the Hessian, approximately


@dataclass(frozen=True)
class Minima:
    """End points [S, P] of the searches and their values [S]."""

    x_SxP: np.ndarray
    value_S: np.ndarray


def minimize(function: Function, starts_SxP: np.ndarray) -> Minima:
    """Search from each start by itself.

    BFGS with the bisecting line search of Lewis & Overton (2013, Mathematical Programming 141), which needs no second
    derivatives and also ends well at kinks, such as a Huber loss of small delta nearly has.
    """
    with np.errstate(all="ignore"):  # a step that is too long may overflow; it is then halved
        state = _begin(function, starts_SxP)
        searching = np.flatnonzero(np.isfinite(state.value_S))
        earlier = np.full((PATIENCE, len(starts_SxP)), np.inf)
        for iteration in range(ITERATIONS):
            if not searching.size:
                break
            moved = _step(function, state, searching)
            before = earlier[iteration % PATIENCE, searching].copy()
            now = state.value_S[searching]
            earlier[iteration % PATIENCE, searching] = now
            falling = before - now > TOLERANCE * np.abs(now)
            searching = searching[moved & falling]
    return Minima(state.x_SxP, np.where(np.isfinite(state.value_S), state.value_S, np.inf))


def _begin(function: Function, starts_SxP: np.ndarray) -> _Searches:
    value_S, gradient_SxP = function(starts_SxP, np.arange(len(starts_SxP)))
    # The first steps are about one tenth long: there is no curvature yet to choose a length by.
    length_S = np.linalg.norm(gradient_SxP, axis=1)
    scale_S = 0.1 / np.maximum(length_S, 1e-300)
    inverse = np.eye(starts_SxP.shape[1])[None] * scale_S[:, None, None]
    return _Searches(starts_SxP.astype(float), value_S.copy(), gradient_SxP.copy(), inverse)


def _step(function: Function, state: _Searches, rows_R: np.ndarray) -> np.ndarray:
    """Run one iteration of the searches `rows_R`; return which of them moved, [R]."""
    gradient_RxP = state.gradient_SxP[rows_R]
    direction_RxP = -np.einsum("rpq,rq->rp", state.inverse_SxPxP[rows_R], gradient_RxP)
    slope_R = np.einsum("rp,rp->r", direction_RxP, gradient_RxP)
    before_RxP = state.x_SxP[rows_R].copy()
    accepted_R = _search_line(function, state, rows_R, direction_RxP, slope_R)
    moved = rows_R[accepted_R]
    step_MxP = state.x_SxP[moved] - before_RxP[accepted_R]
    change_MxP = state.gradient_SxP[moved] - gradient_RxP[accepted_R]
    state.inverse_SxPxP[moved] = _updated(state.inverse_SxPxP[moved], step_MxP, change_MxP)
    return accepted_R


def _search_line(
    function: Function, state: _Searches, rows_R: np.ndarray, direction_RxP: np.ndarray, slope_R: np.ndarray
) -> np.ndarray:
    """Move each search along its direction to where both conditions of Wolfe hold: for which one was found, [R]."""
    x_RxP, value_R = state.x_SxP[rows_R].copy(), state.value_S[rows_R].copy()
    low_R, high_R, length_R = np.zeros(len(rows_R)), np.full(len(rows_R), np.inf), np.ones(len(rows_R))
    accepted_R = np.zeros(len(rows_R), bool)
    open_T = np.flatnonzero(slope_R < 0)
    for _ in range(TRIALS):
        if not open_T.size:
            break
        x_TxP = x_RxP[open_T] + length_R[open_T, None] * direction_RxP[open_T]
        value_T, gradient_TxP = function(x_TxP, rows_R[open_T])
        is_low = value_T <= value_R[open_T] + DECREASE * length_R[open_T] * slope_R[open_T]  # False for NaN
        is_flat = np.einsum("tp,tp->t", gradient_TxP, direction_RxP[open_T]) >= CURVATURE * slope_R[open_T]
        high_R[open_T[~is_low]] = length_R[open_T[~is_low]]
        low_R[open_T[is_low & ~is_flat]] = length_R[open_T[is_low & ~is_flat]]
        found = open_T[is_low & is_flat]
        accepted_R[found] = True
        done = is_low & is_flat
        rows = rows_R[found]
        state.x_SxP[rows], state.value_S[rows], state.gradient_SxP[rows] = (
            x_TxP[done],
            value_T[done],
            gradient_TxP[done],
        )
        open_T = open_T[~done]
        length_R[open_T] = np.where(np.isinf(high_R), 2 * low_R, (low_R + high_R) / 2)[open_T]
    return accepted_R


def _updated(inverse_MxPxP: np.ndarray, step_MxP: np.ndarray, change_MxP: np.ndarray) -> np.ndarray:
    """The inverse Hessians after a step with a change of gradient (Nocedal & Wright 2006, equation 6.17)."""
    product_M = np.einsum("mp,mp->m", step_MxP, change_MxP)
    is_usable = product_M > 1e-300
    rho_M = np.where(is_usable, 1 / np.where(is_usable, product_M, 1), 0)
    left = np.eye(step_MxP.shape[1]) - rho_M[:, None, None] * step_MxP[:, :, None] * change_MxP[:, None, :]
    new = left @ inverse_MxPxP @ left.transpose(0, 2, 1)
    new += rho_M[:, None, None] * step_MxP[:, :, None] * step_MxP[:, None, :]
    return np.where(is_usable[:, None, None], new, inverse_MxPxP)
