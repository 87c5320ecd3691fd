#!/usr/bin/env python3
"""Writes a small seed corpus for each fuzz target: FOLDER/TARGET/*.

usage: make_seeds.py FOLDER
"""

import json
import struct
import sys
from pathlib import Path

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


def safetensors(tensors, metadata=None):
    """A valid file; tensors: name -> (dtype, shape)."""
    header = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, count = end, 1
        for extent in shape:
            count *= extent
        end += count * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = (bytes(range(256)) * (end // 256 + 1))[:end]
    return struct.pack("<Q", len(text)) + text + data


SEEDS = {
    "safetensors_fuzz": {
        "empty": safetensors({}),
        "types": safetensors({t: (t, [2]) for t in SIZES}),
        "shapes": safetensors({"scalar": ("F32", []), "none": ("F32", [0, 3]),
                               "matrix": ("F16", [2, 3])}, {"op": "gla", "scale": "0.5"}),
        "cut": safetensors({"w": ("F32", [4])})[:-1],
    },
    "config_fuzz": {
        model: json.dumps({"model_type": model, "vocab_size": 256, "hidden_size": 64,
                           "num_hidden_layers": 2, "num_heads": 4, "expand_k": 0.5, "window_size": 8,
                           "attn": {"layers": [1], "num_heads": 2}}).encode()
        for model in ("transformer", "linear_attn", "retnet")
    },
    "json_fuzz": {
        "values": b'{"a":[1,-2,0.5e3,true,false,null],"b":{"c":"\\u00e9\\n"}}',
        "deep": b"[" * 63 + b"]" * 63,
        "twice": b'{"a":1,"a":2}',
    },
}


def main():
    for target, seeds in SEEDS.items():
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in seeds.items():
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
