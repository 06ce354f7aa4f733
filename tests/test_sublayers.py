"""Sets of sub-layers that a search steps through: their size stays, and the outer layers are left alone."""

import random

import pytest

from labkit.drafters.sublayers import SubLayers, evenly, neighbour


@pytest.mark.parametrize("depth", [3, 4, 7, 30])
@pytest.mark.parametrize("ratio", [0.01, 0.2, 0.45, 0.5, 0.9, 1.0])
def test_steps_keep_the_size_and_the_outer_layers(depth, ratio):
    now, rng = evenly(depth, ratio), random.Random(3)
    size = max(1, round(ratio * 2 * (depth - 2)))
    seen = set()
    for _ in range(60):
        assert len(now.attention) + len(now.mlp) == size
        assert {*now.attention, *now.mlp} <= set(range(1, depth - 1))
        seen.add(now)
        following = neighbour(now, depth, rng)
        places = lambda s: {*(("a", i) for i in s.attention), *(("m", i) for i in s.mlp)}  # noqa: E731
        assert len(places(following) - places(now)) in ((0,) if size == 2 * (depth - 2) else (1, 2, 3))
        now = following
    assert len(seen) > 1 or size == 2 * (depth - 2)


def test_an_outer_layer_that_was_asked_for_stays_skipped():
    assert neighbour(SubLayers((0, 2), (3,)), 4, random.Random(0)).attention[0] == 0
    assert neighbour(SubLayers((0, 2), (3,)), 4, random.Random(0)).mlp[-1] == 3
