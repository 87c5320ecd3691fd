"""A call with its inputs and outputs, and the file that it becomes."""

import hashlib
import json
import math
import os
import struct

from golden.tape import Random, Var, differentiate


def to_f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


class Tensor:
    def __init__(self, shape, fill):
        self.shape = list(shape)
        self.data = [fill() for _ in range(math.prod(shape))]

    def offset(self, index):
        at = 0
        for i, extent in zip(index, self.shape):
            at = at * extent + i
        return at * math.prod(self.shape[len(index):])

    def __getitem__(self, index):
        return self.data[self.offset(index)]

    def __setitem__(self, index, value):
        self.data[self.offset(index)] = value

    def row(self, *index):
        at = self.offset(index)
        return self.data[at:at + math.prod(self.shape[len(index):])]


class Case:
    """One call: inputs drawn at random, outputs that the operator's formula sets, attributes."""

    def __init__(self, op, name, attributes):
        self.op, self.name, self.attributes = op, name, attributes
        self.random = Random(op + " " + name)
        self.inputs, self.outputs, self.upstream = {}, {}, {}

    def input(self, name, shape, draw=None):
        draw = draw or self.random.normal
        self.inputs[name] = Tensor(shape, lambda: Var(to_f32(draw())))
        return self.inputs[name]

    def output(self, name, shape, upstream=None):
        """Zeros until the formula says otherwise; `upstream` names its upstream gradient."""
        self.outputs[name] = Tensor(shape, lambda: Var(0.0))
        if upstream:
            self.upstream[upstream] = (name, Tensor(shape, lambda: to_f32(self.random.normal())))
        return self.outputs[name]

    def sequences(self, batch, tokens):
        """(batch row, begin, length) of every sequence."""
        if "cu_seqlens" not in self.attributes:
            return [(b, 0, tokens) for b in range(batch)]
        ends = self.attributes["cu_seqlens"]
        return [(0, a, b - a) for a, b in zip(ends, ends[1:])]

    def write(self, folder, formula):
        pairs = []
        for name, up in self.upstream.values():
            pairs += zip(self.outputs[name].data, up.data)
        differentiate(pairs)
        names = {"initial_state": "dh0", "initial_z": "dz0"}
        gradients = {names.get(n, "d" + n): t for n, t in self.inputs.items()}
        values = lambda t: [x.value for x in t.data]
        tensors = [(n, "F64", t.shape, values(t)) for n, t in self.outputs.items()]
        tensors += [(n, "F64", t.shape, [x.gradient for x in t.data]) for n, t in gradients.items()]
        tensors += [(n, "F32", t.shape, values(t)) for n, t in self.inputs.items()]
        tensors += [(n, "F32", t.shape, t.data) for n, (_, t) in self.upstream.items()]
        loss = " + ".join("sum(%s*%s)" % (n, up) for up, (n, _) in self.upstream.items())
        metadata = {"op": self.op, "case": self.name, "formula": formula, "loss": loss,
                    "source": "scripts/make_golden.py", "inputs": list(self.inputs),
                    "outputs": list(self.outputs), "upstream": list(self.upstream),
                    "grads": list(gradients), **self.attributes}
        text_of = lambda value: value if isinstance(value, str) else json.dumps(value)
        header, blob = {"__metadata__": {k: text_of(v) for k, v in metadata.items()}}, b""
        for name, dtype, shape, data in tensors:
            raw = struct.pack("<%d%s" % (len(data), "d" if dtype == "F64" else "f"), *data)
            offsets = [len(blob), len(blob) + len(raw)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            blob += raw
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        content = struct.pack("<Q", len(text)) + text + blob
        file = "%s-%s.safetensors" % (self.op, self.name)
        with open(os.path.join(folder, file), "wb") as f:
            f.write(content)
        Var.tape.clear()
        digest = hashlib.sha256(content).hexdigest()
        return {"file": file, "op": self.op, "case": self.name, "bytes": len(content),
                "sha256": digest}
