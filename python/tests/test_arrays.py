"""What arrays are taken, how, and what comes back."""

import ctypes
import re
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ouzel

try:  # bfloat16 for NumPy
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

SIXTEEN = [np.float16, *filter(None, [bfloat16])]


def sample(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def triple(shape=(2, 37, 3, 8)):
    return [sample(shape, seed) for seed in range(3)]


class OnlyDlpack:
    """An array of some framework: nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: np.stack([x, x, x], axis=2)[:, :, 1],  # rows of q, k, v beside each other
        lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],  # tokens backwards in memory
        lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        np.asfortranarray,  # a last axis that is not contiguous: copied
        lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        lambda x: np.frombuffer(b"?" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
        OnlyDlpack,
        memoryview,
    ],
)
def test_any_layout_gives_the_same_bits(lay_out):
    arrays = triple()
    expected = ouzel.retention(*arrays, output_final_state=True)
    got = ouzel.retention(*map(lay_out, arrays), output_final_state=True)
    assert all(map(np.array_equal, got, expected))
    upstream = sample(arrays[2].shape, 3)
    want = ouzel.retention.vjp(*arrays, do=upstream)
    have = ouzel.retention.vjp(*map(lay_out, arrays), do=lay_out(upstream))
    assert all(np.array_equal(have[name], want[name]) for name in want)


def test_broadcast_arrays_are_read_as_they_are():
    q, k, v = triple()
    one = np.broadcast_to(k[:, :, :1], k.shape)
    assert one.strides[2] == 0
    assert np.array_equal(ouzel.retention(q, one, v)[0], ouzel.retention(q, one.copy(), v)[0])


def test_read_only_arrays_are_taken():
    arrays = triple()
    expected = ouzel.retention(*arrays)[0]
    for array in arrays:
        array.flags.writeable = False
    assert np.array_equal(ouzel.retention(*arrays)[0], expected)


def test_results_are_aligned_writable_and_their_own():
    o, state = ouzel.retention(*triple(), output_final_state=True)
    for result in (o, state):
        assert result.flags.writeable and result.flags.c_contiguous and result.dtype == np.float32
        assert result.ctypes.data % 64 == 0
    kept = o.copy()
    del state
    ouzel.retention(*triple())
    assert np.array_equal(o, kept)


def test_empty_arrays():
    q = np.zeros((2, 0, 3, 8), np.float32)
    o, state = ouzel.retention(q, q, q, output_final_state=True)
    assert o.shape == q.shape and not state.any()
    assert ouzel.retention.vjp(q, q, q, do=q)["dk"].shape == q.shape
    sentence = r"q is empty: its shape {} has {} = 0, and only numbers of tokens may be 0; leave the call out"
    for shape, letter in (((2, 5, 0, 8), "HQ"), ((0, 5, 3, 8), "B"), ((2, 5, 3, 0), "K")):
        empty = np.zeros(shape, np.float32)
        match = sentence.format(re.escape(str(list(shape))), letter)
        with pytest.raises(ouzel.InvalidArgumentError, match=match):
            ouzel.retention(empty, empty, empty)
        with pytest.raises(ouzel.InvalidArgumentError, match=match):
            ouzel.retention.vjp(empty, empty, empty, do=empty)
    with pytest.raises(ouzel.InvalidArgumentError, match=r"k has shape \[0, 5, 3, 8\]; expected"):
        ouzel.retention(sample((2, 5, 3, 8)), np.zeros((0, 5, 3, 8), np.float32), sample((2, 5, 3, 8)))


def test_masks_are_not_lost_in_silence():
    q, k, v = triple()
    masked = np.ma.masked_array(k, mask=k > 1)
    state = np.zeros((2, 3, 8, 8), np.float32)
    step = [x[:, :1] for x in (q, k, v)]
    for call in (
        lambda: ouzel.retention(q, masked, v),
        lambda: ouzel.retention.vjp(q, k, v, do=masked),
        lambda: ouzel.retention.step(*step, initial_state=np.ma.masked_array(state)),
    ):
        with pytest.raises(ouzel.InvalidArgumentError, match=r"is a masked array.*pass its filled\("):
            call()
    assert np.array_equal(ouzel.retention(q, masked.filled(0), v)[0],
                          ouzel.retention(q, np.where(k > 1, np.float32(0), k), v)[0])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bit_floats(dtype):
    arrays = [array.astype(dtype) for array in triple()]
    wide = [array.astype(np.float32) for array in arrays]
    o, state = ouzel.retention(*arrays, output_final_state=True)
    expected, expected_state = ouzel.retention(*wide, output_final_state=True)
    assert o.dtype == dtype and state.dtype == np.float32
    assert np.array_equal(o, expected.astype(dtype))
    assert np.array_equal(state, expected_state)
    gradients = ouzel.retention.vjp(*arrays, do=arrays[2])
    for name, gradient in ouzel.retention.vjp(*wide, do=wide[2]).items():
        assert gradients[name].dtype == dtype
        assert np.array_equal(gradients[name], gradient.astype(dtype))


def test_types_that_are_not_taken():
    q, k, v = triple()
    for dtype, sentence in (
        (np.float64, r"retention: k is F64 \[2, 37, 3, 8\]; F32, BF16 or F16 was expected: "
                     r"convert it first, as by k.astype\(np.float32\)$"),
        (np.int32, r"retention: k is I32 .*: convert it first, as by k.astype\(np.float32\)$"),
        (np.complex64, "retention: k has a type of 64 bits"),
    ):
        with pytest.raises(ouzel.InvalidArgumentError, match=sentence):
            ouzel.retention(q, k.astype(dtype), v)
    for wrong in ([1.0, 2.0], 3, "text", object()):
        with pytest.raises(TypeError, match=r"retention: k is of type \w+; a NumPy array or one"):
            ouzel.retention(q, wrong, v)
    with pytest.raises(ouzel.InvalidArgumentError, match="tensor 'k' .* is missing"):
        ouzel.retention(q, None, v)
    with pytest.raises(ouzel.InvalidArgumentError, match="k has 6 axes"):
        ouzel.retention(q, k[None, None], v)
    with pytest.raises(ouzel.InvalidArgumentError, match=r"k has shape \[2, 37, 3, 4\]"):
        ouzel.retention(q, k[..., :4], v)


def test_what_an_array_says_of_itself_is_passed_on():
    class Refuses:
        def __dlpack__(self, **keywords):
            raise RuntimeError("detach me first")

    q, k, v = triple()
    with pytest.raises(RuntimeError, match="detach me first"):
        ouzel.retention(q, Refuses(), v)


class Exporter:
    """An array of nobody's: all that is known of it is what its __dlpack__ returns."""

    def __init__(self, export):
        self.export = export

    def __dlpack__(self, **keywords):
        return self.export(**keywords)


def test_capsules_that_are_handed_out_twice():
    """The second would free what the first has freed."""
    q, k, v = triple()
    once = k.copy().__dlpack__()
    twice = Exporter(lambda **_: once)
    assert np.array_equal(ouzel.retention(q, twice, v)[0], ouzel.retention(q, k, v)[0])
    for again in (twice, once):
        with pytest.raises(ouzel.InvalidArgumentError, match="k is a capsule that .* was taken before"):
            ouzel.retention(q, again, v)
    state = np.zeros((2, 3, 8, 8), np.float32)
    of_state = state.__dlpack__()
    with pytest.raises(ouzel.InvalidArgumentError, match="initial_state is a capsule that .* was taken before"):
        ouzel.retention.step(*(x[:, :1] for x in (q, k, v)), initial_state=Exporter(lambda **_: of_state))


class Named(np.lib.mixins.NDArrayOperatorsMixin, Exporter):
    """Of a module whose name begins like that of a framework, or with a base of NumPy's."""


@pytest.mark.parametrize("module", ["torch_like", "jaxtyping", "numpy_like", "\ud800", 3, None])
def test_types_that_are_named_like_a_framework(module):
    q, k, v = triple()
    kind = type("Like", (Named,), {"__module__": module})
    once = k.copy().__dlpack__()
    twice = kind(lambda **_: once)
    o, _ = ouzel.retention(twice, k, v)
    assert isinstance(o, np.ndarray) and np.array_equal(o, ouzel.retention(k, k, v)[0])
    with pytest.raises(ouzel.InvalidArgumentError, match="q is a capsule that .* was taken before"):
        ouzel.retention(twice, k, v)


def test_buffers_without_strides():
    x = np.arange(1 * 5 * 2 * 4, dtype=np.float32).reshape(1, 5, 2, 4) / 40
    buffer = (ctypes.c_float * 4 * 2 * 5 * 1).from_buffer(x.copy())
    np.testing.assert_array_equal(ouzel.retention(x, x, buffer)[0], ouzel.retention(x, x, x)[0])
    for value in ((ctypes.c_float * 0)(), np.datetime64("NaT"), np.timedelta64(1, "D"), ctypes.c_float(1)):
        with pytest.raises((ouzel.InvalidArgumentError, TypeError), match="retention: v "):
            ouzel.retention(x, x, value)
        with pytest.raises((ouzel.InvalidArgumentError, TypeError), match="do"):
            ouzel.retention.vjp(x, x, x, do=value)


def test_flags_that_are_no_text():
    x = np.zeros((1, 2, 1, 4), np.float32)
    for value in ("\ud800", "a\0b"):
        with pytest.raises((ouzel.InvalidArgumentError, TypeError), match="reverse"):
            ouzel.retention(x, x, x, reverse=value)


def test_arrays_that_export_a_kept_capsule():
    class Kept(np.ndarray):
        def __dlpack__(self, **keywords):
            self.capsule = getattr(self, "capsule", None) or np.asarray(self).__dlpack__()
            return self.capsule

    q, k, v = triple()
    kept = k.view(Kept)
    assert np.array_equal(ouzel.retention(q, kept, v)[0], ouzel.retention(q, k, v)[0])
    with pytest.raises(ouzel.InvalidArgumentError, match="k is a capsule that .* was taken before"):
        ouzel.retention(q, kept, v)


def test_exporters_of_any_age():
    q, k, v = triple()
    expected = ouzel.retention(q, k, v)[0]
    for export in (lambda: k.__dlpack__(), lambda stream=None: k.__dlpack__(), lambda **all: k.__dlpack__(**all)):
        assert np.array_equal(ouzel.retention(q, Exporter(export), v)[0], expected)
    for wrong in (3, k, None):
        with pytest.raises(TypeError, match="retention: k: its __dlpack__ returned a value of type"):
            ouzel.retention(q, Exporter(lambda wrong=wrong, **_: wrong), v)


@pytest.mark.parametrize("readonly", [False, True])
def test_arrays_of_derived_types(readonly):
    class Derived(np.ndarray):
        pass

    q, k, v = triple()
    derived = k.view(Derived)
    derived.flags.writeable = not readonly
    assert np.array_equal(ouzel.retention(q, derived, v)[0], ouzel.retention(q, k, v)[0])


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]


def test_arrays_of_devices_are_refused():
    class OnDevice:
        def __dlpack__(self, **keywords):
            self.shape = (ctypes.c_int64 * 4)(1, 2, 1, 4)
            self.tensor = DLTensor(None, 2, 0, 4, 2, 32, 1, self.shape)
            capsule = ctypes.pythonapi.PyCapsule_New
            capsule.restype = ctypes.py_object
            capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            return capsule(ctypes.addressof(self.tensor), b"dltensor", None)

    with pytest.raises(ouzel.InvalidArgumentError, match="q lives on a device .* move it to the CPU"):
        ouzel.retention(OnDevice(), *[sample((1, 2, 1, 4))] * 2)


@pytest.mark.parametrize("shape, sentence", [(None, "has axes, but no shape"), ((1, -2, 1, 4), "length below 0")])
def test_shapes_that_are_none(shape, sentence):
    shape = None if shape is None else (ctypes.c_int64 * 4)(*shape)
    strides, memory = (ctypes.c_int64 * 4)(8, 4, 4, 1), (ctypes.c_float * 8)()
    tensor = DLTensor(ctypes.addressof(memory), 1, 0, 4, 2, 32, 1, shape, strides)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.addressof(tensor), b"dltensor", None)
    with pytest.raises(ouzel.InvalidArgumentError, match="k .*" + sentence):
        ouzel.retention(sample((1, 2, 1, 4)), capsule, sample((1, 2, 1, 4)))


# By how many bytes more than its results a call of every operator makes memory grow; inputs are 1,024 tokens of 2,048
# numbers.
MEMORY = """
import json, sys
import numpy as np
import ouzel
import test_arrays  # which makes bfloat16 known
from test_bad_input import ATTRIBUTES, GATES

SIZES = {"B": 1, "N": 1, "QD": 2048, "KD": 2048, "VD": 2048, "D": 2048, "C": 2048, "GD": 64, "BD": 64, "TP": 3, "W": 4,
         "R": 8, "L": 24, "M": 16}
GIVEN = ATTRIBUTES | {"LinearAttention": {"q_num_heads": 64, "kv_num_heads": 64, "update_rule": "gated_delta"}}

def extent(letter):
    if letter.isdigit():
        return int(letter)
    return SIZES.get(letter, {"T": 1024, "H": 64}.get(letter[0], 32))

def array_of(tensor):
    dtype = sys.argv[1] if tensor.dtype == "float32" and not tensor.is_state else tensor.dtype
    shape = [extent(letter) for letter in tensor.shape.split("|")[0].split()]
    if len(shape) > 1:  # rows with gaps, as of projections beside each other
        wide = np.full([*shape[:-1], 2 * shape[-1]], 0.0 if tensor.name in GATES else 0.05, np.dtype(dtype))
        return wide[..., : shape[-1]]
    return np.full(shape, 0.05, np.dtype(dtype))

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

more = {}
for law in ouzel.laws().values():
    wanted = [t for t in law.inputs if not t.optional and (not t.when or law.name in ATTRIBUTES)]
    given = {t.name: array_of(t) for t in wanted}
    context = ouzel.Context(threads=1)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = status("VmRSS")
    results = getattr(ouzel, law.name)(**given, **GIVEN.get(law.name, {}), context=context)
    peak = status("VmHWM")
    results = [x for x in (results if isinstance(results, tuple) else [results]) if x is not None]
    more[law.name] = peak - before - sum(x.nbytes for x in results)
print(json.dumps(more))
"""
# Float64 throughout; another layout.
WITH_COPIES = {"nadaraya_watson", "CausalConvWithState"}


@pytest.mark.measures
@pytest.mark.parametrize("dtype", [np.float32, SIXTEEN[-1]], ids=lambda dtype: np.dtype(dtype).name)
def test_arrays_are_not_copied(dtype):
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Memory that is freed is the system's again at once, and not taken for memory that was there.
    environment = os.environ | {"PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    run = subprocess.run([sys.executable, "-c", MEMORY, np.dtype(dtype).name], capture_output=True, text=True, check=True,
                         env=environment)  # fmt: skip
    more = json.loads(run.stdout)
    copied = {law for law, size in more.items() if size > 4 << 20}  # an input in float32 has 8 MiB
    assert copied == WITH_COPIES, more


def test_gradients_have_the_types_of_their_inputs():
    """Whatever the type of the call's first array."""
    types = (np.float32, *SIXTEEN)
    rng = np.random.default_rng(3)
    base = [rng.standard_normal((1, 3, 1, 4)).astype(np.float32) for _ in range(4)]
    exact = ouzel.retention.vjp(*base[:3], do=base[3])
    for given in itertools.product(types, repeat=3):
        inputs = [x.astype(t) for x, t in zip(base, given)]
        got = ouzel.retention.vjp(*inputs, do=base[3])
        for name, x in zip("qkv", inputs):
            assert got["d" + name].dtype == x.dtype and got["d" + name].shape == x.shape
            np.testing.assert_allclose(got["d" + name].astype(np.float32), exact["d" + name], atol=0.05)
