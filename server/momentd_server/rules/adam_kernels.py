# pyright: basic
"""Kernels of `sparse_adam`: one pass over the records of a batch's distinct rows.

The order of operations is torch's, in the state's dtype, each product and sum rounded by itself;
nothing is summed across the elements of a row, so the bits depend neither on the width of the
CPU's vectors nor on who does which rows.
"""

import numpy as np

from momentd_server.jit import inline_kernel, kernel, prefetch
from momentd_server.jit.row_protocol import begin_part, begin_row, end_row

# What is called once a row is inlined: faster, and a row then has no way out in its midst.

# Elements of `numbers` (state's dtype) and of `layout` (int64); offsets and sizes in elements.
GAIN_AVG, GAIN_SQ, EPS, STEP, SIGN, ZERO = 0, 1, 2, 3, 4, 5
ITEM_SHIFT, AVG_AT, SQ_AT, AHEAD, RECORD_REACH, GRAD_REACH, RESULT = 0, 1, 2, 3, 4, 5, 6
DELTA, VALUE, NONE = 0, 1, 2


@inline_kernel
def advance(exp_avg, exp_avg_sq, grad, delta, numbers):
    """Advance both moments of a row in place; `delta` is what to add to the weight. All (width,).

    old <- beta * old + (1 - beta) * new is written as old += (1 - beta) * (new - old).
    """
    gain_avg, gain_sq, eps = numbers[GAIN_AVG], numbers[GAIN_SQ], numbers[EPS]
    step, sign = numbers[STEP], numbers[SIGN]
    for j in range(delta.shape[0]):
        g = sign * grad[j]
        old_avg = exp_avg[j]
        old_sq = exp_avg_sq[j]
        avg = old_avg + (g - old_avg) * gain_avg
        sq = old_sq + (g * g - old_sq) * gain_sq
        exp_avg[j] = avg
        exp_avg_sq[j] = sq
        # eps is added before the bias correction scales the step, as in torch's sparse_adam.
        delta[j] = step * (avg / (np.sqrt(sq) + eps))


@kernel
def apply_dense(
    worker,
    first,
    last,
    base,
    space,
    words,
    frame_index,
    frame_offset,
    word,
    undo,
    progress,
    order,
    starts,
    grads,
    weights,
    values,
    factors,
    spare,
    numbers,
    layout,
):
    """Update distinct rows [base + first, base + last) whose gradients have all elements.

    `space`, `undo`, `grads`, `weights`, `values`, `spare`, `numbers` are of the state's dtype.
    `spare` (workers, 3, padded width): a summed gradient and an unwanted delta by worker.
    `undo` None: without the row protocol. Empty `factors`: none wanted.
    """
    width = grads.shape[1]
    summed = spare[worker, 0, :width]
    unwanted = spare[worker, 1, :width]
    first += base
    last += base
    if undo is not None:
        begin_part(progress, worker, first, last)
    for u in range(first, min(first + layout[AHEAD], last)):
        _fetch(u, space, words, frame_index, frame_offset, order, starts, grads, layout)
    for u in range(first, last):
        ahead = u + layout[AHEAD]
        if u < ahead < last:
            _fetch(ahead, space, words, frame_index, frame_offset, order, starts, grads, layout)
        at = frame_offset[u] >> layout[ITEM_SHIFT]
        if undo is not None:
            begin_row(space, at, words, frame_index[u], word, undo, progress, worker, u)
        grad = grads[order[starts[u]]]
        if starts[u + 1] - starts[u] > 1:
            sum_grads(grads, order, starts[u], starts[u + 1], summed)
            grad = summed
        delta = unwanted
        if layout[RESULT] != NONE:
            delta = values[u]
        exp_avg = space[at + layout[AVG_AT] : at + layout[AVG_AT] + width]
        exp_avg_sq = space[at + layout[SQ_AT] : at + layout[SQ_AT] + width]
        advance(exp_avg, exp_avg_sq, grad, delta, numbers)
        if layout[RESULT] == VALUE:
            _add(delta, weights[order[starts[u]]])
        if factors.shape[0] > 0:
            factors[u] = 1
        if undo is not None:
            end_row(progress, worker, u)


@kernel
def apply_masked(
    worker,
    first,
    last,
    base,
    space,
    words,
    frame_index,
    frame_offset,
    word,
    undo,
    progress,
    order,
    starts,
    grads,
    weights,
    values,
    factors,
    spare,
    numbers,
    layout,
    mask,
):
    """As `apply_dense`, for gradients with elements only where `mask` (n, width) is not zero.

    Elements that no gradient of the row has stay as they are; their delta is 0.
    """
    width = grads.shape[1]
    summed = spare[worker, 0, :width]
    unwanted = spare[worker, 1, :width]
    present = spare[worker, 2, :width]
    first += base
    last += base
    if undo is not None:
        begin_part(progress, worker, first, last)
    for u in range(first, min(first + layout[AHEAD], last)):
        _fetch(u, space, words, frame_index, frame_offset, order, starts, grads, layout)
    for u in range(first, last):
        ahead = u + layout[AHEAD]
        if u < ahead < last:
            _fetch(ahead, space, words, frame_index, frame_offset, order, starts, grads, layout)
        at = frame_offset[u] >> layout[ITEM_SHIFT]
        if undo is not None:
            begin_row(space, at, words, frame_index[u], word, undo, progress, worker, u)
        sum_masked(grads, mask, order, starts[u], starts[u + 1], summed, present)
        delta = unwanted
        if layout[RESULT] != NONE:
            delta = values[u]
        exp_avg = space[at + layout[AVG_AT] : at + layout[AVG_AT] + width]
        exp_avg_sq = space[at + layout[SQ_AT] : at + layout[SQ_AT] + width]
        advance_present(exp_avg, exp_avg_sq, summed, present, delta, numbers)
        if layout[RESULT] == VALUE:
            _add(delta, weights[order[starts[u]]])
        if factors.shape[0] > 0:
            factors[u] = 1
        if undo is not None:
            end_row(progress, worker, u)


@inline_kernel
def advance_present(exp_avg, exp_avg_sq, grad, present, delta, numbers):
    """As `advance` where `present` is not zero; elsewhere nothing moves and `delta` is 0."""
    gain_avg, gain_sq, eps = numbers[GAIN_AVG], numbers[GAIN_SQ], numbers[EPS]
    step, sign = numbers[STEP], numbers[SIGN]
    for j in range(delta.shape[0]):
        here = present[j] != 0
        g = sign * grad[j]
        old_avg = exp_avg[j]
        old_sq = exp_avg_sq[j]
        avg = old_avg + (g - old_avg) * gain_avg
        sq = old_sq + (g * g - old_sq) * gain_sq
        exp_avg[j] = avg if here else old_avg
        exp_avg_sq[j] = sq if here else old_sq
        moved = step * (avg / (np.sqrt(sq) + eps))
        delta[j] = moved if here else numbers[ZERO]


@inline_kernel
def sum_grads(grads, order, start, stop, out):
    """out = sum of grads[order[start:stop]], in that order, at least one."""
    head = grads[order[start]]
    for j in range(out.shape[0]):
        out[j] = head[j]
    for k in range(start + 1, stop):
        _add(out, grads[order[k]])


@inline_kernel
def sum_masked(grads, mask, order, start, stop, out, present):
    """As `sum_grads` over the elements that the mask has; `present` is 1 where there are any."""
    for j in range(out.shape[0]):
        out[j] = 0
        present[j] = 0
    for k in range(start, stop):
        grad = grads[order[k]]
        here = mask[order[k]]
        for j in range(out.shape[0]):
            # The first one is taken as it is: 0 + -0 would be another zero.
            total = out[j] + grad[j] if present[j] != 0 else grad[j]
            out[j] = total if here[j] != 0 else out[j]
            present[j] = 1 if here[j] != 0 else present[j]


@inline_kernel
def _add(out, other):
    for j in range(out.shape[0]):
        out[j] += other[j]


@inline_kernel
def _fetch(u, space, words, frame_index, frame_offset, order, starts, grads, layout):
    """Ask for the cache lines that row `u` will need; the reach is cut off for long rows."""
    line = 64 >> layout[ITEM_SHIFT]
    at = frame_offset[u] >> layout[ITEM_SHIFT]
    for k in range(0, layout[RECORD_REACH], line):
        prefetch(space, at + k)
    prefetch(words, frame_index[u])
    at = order[starts[u]] * grads.shape[1]
    for k in range(0, layout[GRAD_REACH], line):
        prefetch(grads, at + k)
