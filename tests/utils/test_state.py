"""State of user code in checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gdpo_nemo.utils.state import from_json, to_json


def test_a_state_is_restored_with_types_and_bits():
    arrays = [np.arange(6).reshape(2, 3).astype(kind) for kind in ("f4", "f8", ">f8", "i8", "u1", "?")]
    state = {
        "arrays": [*arrays, np.array(0.1), np.empty((0, 2)), np.array([np.nan, -0.0, np.inf]), arrays[0].T],
        "scalars": [np.float32(0.1), np.int64(2**60), True, None, "ä", 0.1, 10**40],
        "nested": {"": [{}, []]},
    }
    restored = from_json(json.loads(json.dumps(to_json(state))))
    assert restored["nested"] == state["nested"] and restored["scalars"] == state["scalars"]
    assert to_json((1, (True,))) == [1, [True]]
    assert [type(value) for value in restored["scalars"]] == [type(value) for value in state["scalars"]]
    for found, expected in zip(restored["arrays"], state["arrays"], strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert found.flags.writeable


endless: list = []
endless.append(endless)


@pytest.mark.parametrize(
    "state, place",
    [
        ({"a": [1, {2: 3}]}, r"state\['a'\]\[1\]: cannot save dict"),
        ({1, 2}, "state: cannot save set"),
        ({"mean": np.array(["x"])}, r"state\['mean'\]: cannot save ndarray"),
        (np.array([object()]), "cannot save ndarray"),
        ({"__array__": 1}, "cannot save dict"),
        ("x" * (33 << 20), "has 33 MiB as JSON; the maximum is 32"),
        (endless, "nested too deeply"),
        ("\ud800", "could not be read again"),
        (object, "cannot save type"),
    ],
)
def test_a_state_that_would_not_be_restored_is_refused_with_its_place(state, place):
    with pytest.raises(ValueError, match=place):
        to_json(state)
