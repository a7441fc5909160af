"""The verdict on an artifact: whether its projections hold on new text, which heads stand out, and what to do."""

import numpy as np
import test_artifact

from bpc_artifacts import LayerProjection, ProjectionArtifact, verdict
from bpc_artifacts.verdict import asks_for_action

HEADS, BITS, DIM = test_artifact.KV_HEADS, 64, 128


def made(own, other=None, *, keys=4096):
    """An artifact of layers 0 and 2 with these residuals `[layer][head]`."""
    layers = {
        index: LayerProjection(np.zeros((HEADS, BITS, DIM), np.float32), np.array(heads, np.float32)[:, None])
        for index, heads in zip((0, 2), own, strict=True)
    }
    held_out = None
    if other is not None:
        held_out = test_artifact.held_out(
            float(np.mean(other)),
            residual_by_layer={"0": float(np.mean(other[0])), "2": float(np.mean(other[1]))},
            residual_by_head={"0": other[0], "2": other[1]},
        )
    changes = {"algorithm__bits": BITS, "model__head_dim": DIM, "calibration__keys_per_head": keys}
    return ProjectionArtifact(layers, test_artifact.metadata(metrics__held_out=held_out, **changes))


def judged(own, other=None, *, keys=4096):
    return verdict(made(own, other, keys=keys))


def same(value):
    return [[value] * HEADS] * 2


def test_projections_that_hold_are_called_so():
    assert judged(same(0.5), same(0.53)) == [
        "The projections hold on new text: residual 0.530 on 32 keys per head of 1 sample kept aside, 0.500 on the "
        "fitted keys."
    ]


def test_keys_learnt_by_heart_want_more_keys():
    (said,) = judged(same(0.2), same(0.5), keys=200)
    assert said.startswith("On new text the residual is 150 % above that of the fitted keys (0.500 on 32 keys per head")
    assert said.endswith("200 keys per head are few for 64 bits: raise --samples or --keys-per-head, to 2,048 keys.")
    (said,) = judged(same(0.4), same(0.5))
    assert said.endswith("calibrate on more text, or on text more like yours: raise --samples.")
    assert judged(same(0.0), same(0.5))[0].startswith("On new text the residual is above that of the fitted keys")


def test_what_was_not_measured_is_said():
    assert judged(same(0.5)) == ["Not measured on new text, which takes at least 2 samples."]
    (said,) = judged(same(0.0), keys=8)
    assert "8 keys per head are few for 64 bits" in said


def test_layers_and_heads_that_stand_out_are_named():
    assert judged([[0.7, 0.7], [0.2, 0.2]], [[0.7, 0.7], [0.28, 0.28]])[-1] == (
        "Some layers hold less well on new text than the others: 2 (0.280, 0.200 on the fitted keys): raise --samples."
    )
    assert judged([[0.5, 0.84], [0.9, 0.9]], [[0.5, 0.84], [0.9, 0.9]])[-1] == (
        "Codes say little where the residual is 0.8 or more (layer 0 head 1; layer 2 head 0, 1): keep these layers "
        "dense with --dense-layers or use more --bits."
    )
    assert judged(same(0.9))[-1] == (
        "Every head has a residual of 0.8 or more, so the codes say little: attend to more tokens or use more --bits."
    )


def test_heads_are_judged_by_their_fitted_keys_where_those_are_too_few():
    assert len(judged(same(0.3), same(0.9), keys=100)) == 1  # more keys come first


def test_a_verdict_asks_for_action_unless_all_is_well():
    assert not asks_for_action(made(same(0.5), same(0.55)))
    assert asks_for_action(made(same(0.5)))  # not measured
    assert asks_for_action(made(same(0.5), same(0.56)))  # does not hold
    assert asks_for_action(made(same(0.85), same(0.85)))  # holds, and codes say little
