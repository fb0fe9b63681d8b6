"""Runs of flattened tensors as rectangles: each element once, where numpy says that it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optstream.core.placement import Placement, regions_of
from optstream.core.rectangles import rectangles

pytestmark = pytest.mark.unit

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(runs())
def test_rectangles_are_the_run_in_order(run):
    shape, start, stop = run
    tensor = np.arange(math.prod(shape)).reshape(shape)
    found = []
    parts = list(rectangles(shape, start, stop))
    for part in parts:
        box = tensor[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))]
        assert box.size == part.numel
        assert box.reshape(-1)[0] == part.start
        found.extend(box.reshape(-1))
    assert found == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_a_run_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match="not in a tensor"):
        rectangles((2, 3), 4, 7)


@given(runs(), st.integers(1, 40), st.data())
def test_items_put_every_element_of_a_region_into_its_global_place(run, numel_max, data):
    shape, start, stop = run
    if not shape:
        shape = (1,)
    offsets = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    global_shape = tuple(o + s + data.draw(st.integers(0, 2)) for o, s in zip(offsets, shape, strict=True))
    before = data.draw(st.integers(0, 7))
    placement = Placement("w", global_shape, offsets, shape, start=before)
    whole = np.arange(math.prod(global_shape)).reshape(global_shape)
    flat = whole[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))].reshape(-1)
    position = data.draw(st.integers(0, 9))
    block = np.full(position + stop - start, -1)
    for region in regions_of(
        [placement], block=0, entry=0, start=before + start, stop=before + stop, position=position
    ):
        for item in region.items(numel_max):
            assert item.numel <= numel_max
            box = whole[tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))]
            assert (block[item.position : item.position + item.numel] == -1).all(), "each element once"
            block[item.position : item.position + item.numel] = box.reshape(-1)
    assert list(block[position:]) == list(flat[start:stop])
    assert (block[:position] == -1).all()
