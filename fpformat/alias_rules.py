"""The rules of aliases, views and hidden bases in one segment's tensor table."""

from bisect import bisect_left

import numpy as np

from fpformat.bulk import ELEMENT_NBYTES, by_ndim, dims_rows, first_true, is_view, tensor_title
from fpformat.errors import fault
from fpformat.index import FLAG_HIDDEN, Array, SegmentIndex
from fpformat.limits import MAX_INT, NONE
from fpformat.names import HIDDEN_PREFIX


def check_aliases(index: SegmentIndex, where: str) -> None:
    """Check flags, names of hidden bases, targets, and that views stay inside them.

    Raises:
        FormatError: ALI-1 to ALI-4 or ALI-7.
    """
    tensors = index.tables.tensors
    target = tensors["target"]
    is_alias = target != NONE
    viewing, is_hidden = is_view(tensors), (tensors["flags"] & FLAG_HIDDEN) != 0
    wrong = (viewing & ~is_alias) | (is_hidden & (is_alias | (tensors["ndim"] != 1)))
    if (bad := first_true(wrong)) is not None:
        detail = "a view needs a target; a hidden base has none and one dimension"
        raise fault("ALI-4", tensor_title(index, where, bad), detail)
    _check_hidden_names(index, is_hidden, where)
    rows = np.flatnonzero(is_alias)
    inside = target[rows] < len(tensors)
    if (bad := first_true(~inside | is_alias[np.where(inside, target[rows], 0)])) is not None:
        row = int(rows[bad])
        detail = f"target {target[row]} is not another entry with bytes of its own"
        raise fault("ALI-1", tensor_title(index, where, row), detail)
    if (bad := first_true(is_hidden[target[rows]] & ~viewing[rows])) is not None:
        detail = "is the same tensor as a hidden base, which only views may look at"
        raise fault("ALI-7", tensor_title(index, where, int(rows[bad])), detail)
    _check_same(index, rows[~viewing[rows]], where)
    _check_views(index, rows[viewing[rows]], where)


def _check_hidden_names(index: SegmentIndex, is_hidden: Array, where: str) -> None:
    """Check that the names of hidden bases, and only they, have the prefix.

    Names are sorted, so those with the prefix stand together.
    """
    first = bisect_left(index.names, HIDDEN_PREFIX)
    last = bisect_left(index.names, HIDDEN_PREFIX[:-1] + chr(ord(HIDDEN_PREFIX[-1]) + 1))
    wrong = is_hidden.copy()
    wrong[first:last] ^= True
    if (bad := first_true(wrong)) is not None:
        detail = f"hidden bases, and only they, have names that begin with {HIDDEN_PREFIX}"
        raise fault("ALI-7", tensor_title(index, where, bad), detail)


def _check_same(index: SegmentIndex, rows: Array, where: str) -> None:
    """Check plain aliases: data type and shape equal the target's."""
    tensors = index.tables.tensors
    others = tensors["target"][rows]
    same = (tensors["dtype"][rows] == tensors["dtype"][others]) & (
        tensors["ndim"][rows] == tensors["ndim"][others]
    )
    for ndim, group in by_ndim(tensors["ndim"], rows[same]):
        starts = tensors["dims_index"]
        mine = dims_rows(index, starts[group], ndim)
        theirs = dims_rows(index, starts[tensors["target"][group]], ndim)
        same[np.isin(rows, group[(mine != theirs).any(axis=1)])] = False
    if (bad := first_true(~same)) is not None:
        target = index.names[int(others[bad])]
        detail = f"has another data type or shape than its target {target!r}"
        raise fault("ALI-2", tensor_title(index, where, int(rows[bad])), detail)


def _check_views(index: SegmentIndex, rows: Array, where: str) -> None:
    """Check that a view's last byte lies inside its target."""
    tensors = index.tables.tensors
    for ndim, group in by_ndim(tensors["ndim"], rows):
        values = dims_rows(index, tensors["dims_index"][group], 2 * ndim + 1)
        shapes, strides, offsets = values[:, :ndim], values[:, ndim:-1], values[:, -1]
        empty = (shapes == 0).any(axis=1)
        steps = np.where(shapes == 0, 0, shapes - np.uint64(1))
        sizes = ELEMENT_NBYTES[tensors["dtype"][group]]
        rough = offsets.astype(float) + (steps.astype(float) * strides.astype(float)).sum(axis=1)
        too_far = (rough > MAX_INT) | (strides > MAX_INT).any(axis=1) | (offsets > MAX_INT)
        last = np.where(too_far, 0, offsets + (steps * strides).sum(axis=1))
        end = np.where(empty, offsets, last + np.uint64(1))
        limit = tensors["nbytes"][tensors["target"][group]]
        if (bad := first_true(too_far | (end > limit // sizes))) is not None:
            detail = f"the view does not lie inside the {limit[bad]} bytes of its target"
            raise fault("ALI-3", tensor_title(index, where, int(group[bad])), detail)
