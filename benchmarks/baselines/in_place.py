# pyright: basic
"""The daemon's arithmetic with the weights updated in place: no deltas leave the kernel."""

from __future__ import annotations

from momentd_server.jit import fence, inline_kernel, kernel, prefetch
from momentd_server.jit.row_protocol import begin_part, begin_row, end_row
from momentd_server.rules.adam_kernels import AVG_AT, ITEM_SHIFT, SQ_AT, advance, sum_grads

LINE = 16  # float32 elements of a cache line


@kernel
def apply_in_place(
    worker,
    first,
    last,
    space,
    words,
    frame_index,
    frame_offset,
    word,
    undo,
    undo_weights,
    progress,
    rows,
    weights,
    order,
    starts,
    grads,
    spare,
    numbers,
    layout,
    ahead_rows,
):
    """As `adam_kernels.apply_dense` without results: distinct row u adds to `weights[rows[u]]`.

    All of float32. `undo` None: without the row protocol. With it, `undo_weights` (workers, width)
    keeps the old weights of the row in work, which a kill would otherwise leave torn.
    """
    width = grads.shape[1]
    summed = spare[worker, 0, :width]
    delta = spare[worker, 1, :width]
    if undo is not None:
        begin_part(progress, worker, first, last)
    for u in range(first, min(first + ahead_rows, last)):
        _fetch(u, space, frame_offset, rows, weights, order, starts, grads, layout)
    for u in range(first, last):
        ahead = u + ahead_rows
        if u < ahead < last:
            _fetch(ahead, space, frame_offset, rows, weights, order, starts, grads, layout)
        at = frame_offset[u] >> layout[ITEM_SHIFT]
        weight = weights[rows[u]]
        if undo is not None:
            old = undo_weights[worker]
            for j in range(width):
                old[j] = weight[j]
            fence()
            begin_row(space, at, words, frame_index[u], word, undo, progress, worker, u)
        grad = grads[order[starts[u]]]
        if starts[u + 1] - starts[u] > 1:
            sum_grads(grads, order, starts[u], starts[u + 1], summed)
            grad = summed
        exp_avg = space[at + layout[AVG_AT] : at + layout[AVG_AT] + width]
        exp_avg_sq = space[at + layout[SQ_AT] : at + layout[SQ_AT] + width]
        advance(exp_avg, exp_avg_sq, grad, delta, numbers)
        for j in range(width):
            weight[j] += delta[j]
        if undo is not None:
            end_row(progress, worker, u)


@inline_kernel
def _fetch(u, space, frame_offset, rows, weights, order, starts, grads, layout):
    """Ask for the cache lines that row `u` will need."""
    at = frame_offset[u] >> layout[ITEM_SHIFT]
    width = grads.shape[1]
    for k in range(0, 2 * width, LINE):
        prefetch(space, at + k)
    at = rows[u] * width
    for k in range(0, width, LINE):
        prefetch(weights, at + k)
    at = order[starts[u]] * width
    for k in range(0, width, LINE):
        prefetch(grads, at + k)
