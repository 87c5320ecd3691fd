"""Ctrl-C ends a call of any operator within 0.2 s, in the middle of its work; by PyTorch too."""

import signal
import threading
import time

import numpy as np
import pytest

import ouzel
from test_bad_input import GATES

SIZES = {"W": 4, "TP": 3, "R": 8, "L": 24, "GD": 1, "BD": 1, "B": 1, "N": 1, "M": 16}
ATTRIBUTES = {
    "LinearAttention": {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "gated_delta"},
    "lightning_attention": {"layer_idx": 0, "num_layers": 2},
}
CONTEXT = ouzel.Context(threads=2, isa="portable")


def extent(letter, tokens):
    if letter in ("T", "TQ", "TK", "TN"):
        return tokens
    return int(letter) if letter.isdigit() else SIZES.get(letter, 1 if letter[0] in "HU" else 32)


def array_of(tensor, tokens):
    """Of any length, the memory of one token."""
    letters = tensor.shape.split("|")[0].split()
    # Gates, in logarithms or not, may be 0.
    value = 0.0 if tensor.name in GATES else 0.05
    one = np.full([extent(letter, 1) for letter in letters], value, tensor.dtype)
    return np.broadcast_to(one, [extent(letter, tokens) for letter in letters])


def arguments(law, tokens):
    wanted = [t for t in law.inputs if not t.optional and (not t.when or law.name in ATTRIBUTES)]
    return {t.name: array_of(t, tokens) for t in wanted} | ATTRIBUTES.get(law.name, {})


@pytest.fixture(autouse=True)
def handled():
    """A shell's background processes ignore Ctrl-C, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def seconds_to_end(call):
    """The time from Ctrl-C to the end of the call, of this process: the machine may be at other work. None
    if the call ended by itself."""
    sent, ended = [], False

    def interrupt():
        sent.append(time.process_time())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # and to no thread later

    timer = threading.Timer(0.1, interrupt)
    timer.start()
    try:
        try:
            call()
            ended = True
        finally:
            timer.cancel()
            timer.join()
    except KeyboardInterrupt:
        return None if ended else time.process_time() - sent[0]


def check(call_of):
    """`call_of(tokens)` is a call of that many: as many as it takes for it to be interrupted."""
    call_of(16)()  # what is imported at a first call is not to be interrupted
    for tokens in (1 << n for n in range(12, 25, 2)):
        call, took = call_of(tokens), []
        while len(took) < 3 and (seconds := seconds_to_end(call)) is not None:
            took.append(seconds)
            if seconds < 0.2:
                return
        assert not took, f"the least of {took} seconds"
    pytest.fail("no call was interrupted")


@pytest.mark.measures
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("law", ouzel.laws().values(), ids=ouzel.laws())
def test_every_operator_is_interrupted(law, way):
    function = getattr(ouzel, law.name)

    def call_of(tokens):
        given = arguments(law, tokens)
        if way == "forward":
            return lambda: function(**given, context=CONTEXT)
        above = {law.outputs[0].gradient: array_of(law.outputs[0], tokens)}
        return lambda: function.vjp(**given, **above, context=CONTEXT)

    check(call_of)


def tensors(name, tokens):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ouzel.torch")
    given = arguments(ouzel.laws()[name], tokens)
    return torch, {
        n: torch.from_numpy(x[:, :1].copy() if x.strides[1] == 0 and x.ndim > 1 else x.copy()).expand(x.shape)
        for n, x in given.items()
    }


TORCH = ["gated_delta_rule", "selective_scan", "softmax_attention", "short_conv", "rms_norm"]


@pytest.mark.measures
@pytest.mark.parametrize("way", ["forward", "backward", "registered"])
@pytest.mark.parametrize("name", TORCH)
def test_calls_of_torch_are_interrupted(name, way):
    def call_of(tokens):
        torch, given = tensors(name, tokens)
        if way == "registered":  # as a compiled graph has it, in the context that all calls share
            if not hasattr(torch.library, "register_autograd"):
                pytest.skip("this PyTorch registers no gradients")
            from torch.utils._python_dispatch import TorchDispatchMode

            class Seen(TorchDispatchMode):
                def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                    return function(*args, **(kwargs or {}))

            def call():
                with Seen():
                    return getattr(ouzel.torch, name)(**given)

            return call
        if way == "forward":
            return lambda: getattr(ouzel.torch, name)(**given, context=CONTEXT)
        given = {n: x.detach().requires_grad_() for n, x in given.items()}
        o = getattr(ouzel.torch, name)(**given, context=CONTEXT)
        o = o[0] if isinstance(o, tuple) else o
        above = torch.ones(1).expand(o.shape)
        return lambda: torch.autograd.grad(o, [*given.values()], above, retain_graph=True)

    check(call_of)


@pytest.mark.measures
@pytest.mark.parametrize("way", ["forward", "generate"])
def test_models_are_interrupted(way):
    model = ouzel.Model.random({"model_type": "retnet", "vocab_size": 256, "hidden_size": 64,
                                "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 64})  # fmt: skip

    def call_of(tokens):
        text = b"a" * tokens
        if way == "forward":
            return lambda: model.forward(text, context=CONTEXT)
        return lambda: model.generate(text, 1, context=CONTEXT)

    check(call_of)
