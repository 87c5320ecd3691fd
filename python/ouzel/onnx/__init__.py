"""ONNX's nodes LinearAttention and CausalConvWithState (opset 27) for its ReferenceEvaluator.

    import onnx.reference, ouzel.onnx

    session = onnx.reference.ReferenceEvaluator(model, new_ops=ouzel.onnx.operators)
    output, present_state = session.run(None, inputs)

Inputs are float32, float16 or bfloat16 (ml_dtypes), each its own type; sums are float32, as the
specification's own evaluation has them. `output` has the type of the first input, `present_state` that
of `past_state`, or of the first input without one. What the specification forbids raises
ouzel.InvalidArgumentError, a ValueError.

The nodes also are functions of arrays: `ouzel.LinearAttention` and `ouzel.CausalConvWithState`, with
`.vjp`.
"""

import ouzel

from .._extras import require

require(__name__, "onnx>=1.23")

from onnx.reference.op_run import OpRun  # noqa: E402


def _state(state, past_state, first):
    like = first if past_state is None else past_state
    return state.astype(like.dtype, copy=False)


class LinearAttention(OpRun):
    op_domain = ""

    def _run(self, query, key, value, past_state=None, decay=None, beta=None, **attributes):
        output, state = ouzel.LinearAttention(
            query, key, value, past_state=past_state, decay=decay, beta=beta, **attributes
        )
        return output, _state(state, past_state, query)


class CausalConvWithState(OpRun):
    op_domain = ""

    def _run(self, input, weight, bias=None, past_state=None, activation="none"):
        output, state = ouzel.CausalConvWithState(
            input, weight, bias=bias, past_state=past_state, activation=activation
        )
        return output, _state(state, past_state, input)


operators = [LinearAttention, CausalConvWithState]
