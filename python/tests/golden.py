"""The committed golden files: calls of operators with their float64 results."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden"
TYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64}


class Golden:
    def __init__(self, path):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        self.metadata = {key: decoded(value) for key, value in header.pop("__metadata__").items()}
        self.tensors = {}
        for name, info in header.items():
            begin, end = (8 + size + offset for offset in info["data_offsets"])
            array = np.frombuffer(data[begin:end], TYPES[info["dtype"]])
            self.tensors[name] = array.reshape(info["shape"])

    def arguments(self, law, names):
        """The tensors of these names, in the types of the table."""
        wide = {tensor.name for tensor in law.inputs if tensor.dtype == "float64"}
        return {
            name: self.tensors[name] if name in wide else self.tensors[name].astype(np.float32)
            for name in names
        }

    def attributes(self, law):
        names = [attribute.name for attribute in law.attributes]
        return {name: self.metadata[name] for name in names if name in self.metadata}


def decoded(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def files():
    return sorted(FOLDER.glob("*.safetensors"))


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def check(expected, got, bound):
    """Relative RMS of each difference, over no less than a thousandth of the largest tensor's RMS."""
    floor = 1e-3 * max(map(rms, expected.values()), default=0)
    for name, truth in expected.items():
        assert got[name].shape == truth.shape, name
        error = rms(got[name].astype(np.float64) - truth) / (max(rms(truth), floor) or 1)
        assert error <= bound, f"{name}: {error:.2e}"
