"""Layers of transformers on the CPU: the torch path against ouzel.transformers, in one process.

usage: transformers_layers.py [--layers NAME...] [--tokens N...] [--what WHAT...] [--threads N]
                              [--dtype TYPE] [--repeat N] [--parts]

For each layer and length: milliseconds of a prefill (forward, no gradients) and of a training step (forward
and backward), least of the repetitions, which take turns. Both paths share the linear projections, whose time
alone is `linear`; `bound` is what a path with nothing but them would gain, `between` the ratio of what lies
between them. With --parts also each function that is replaced, by itself, on the inputs that the layer gives
it: convolution, scan, norm; in a step with its backward pass, where the layer's inputs need gradients.
"""

import argparse
import functools
import inspect
import sys
import time

# transformers takes kernels of these packages where they can be imported; they need a GPU.
for package in ("fla", "mamba_ssm", "causal_conv1d"):
    sys.modules[package] = None

import torch  # noqa: E402
import transformers  # noqa: E402

import ouzel.transformers  # noqa: E402

LAYERS = {
    "gated_delta_net": (  # of Qwen3.5-0.8B
        "qwen3_5_text",
        dict(hidden_size=1024, linear_num_key_heads=16, linear_num_value_heads=16),
    ),
    "mamba2": ("mamba2", dict(hidden_size=768, num_heads=24, n_groups=1)),  # of mamba2-130m
    "mamba": ("mamba", dict(hidden_size=768, time_step_rank=48)),  # of mamba-130m
}


def layer(name, dtype):
    """The first layer of a model of one."""
    kind, sizes = LAYERS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **sizes, vocab_size=8, num_hidden_layers=1, intermediate_size=2 * sizes["hidden_size"]
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with ouzel.transformers.accelerate(model) as handle:
        kinds = handle.layers
    found = next(m for m in model.modules() if type(m).__name__ in kinds and list(m.children()))
    return found.to(dtype), config.hidden_size


def linear_inputs(module, x):
    """Its projections, each with an input as it comes in a forward pass."""
    seen = []
    linear = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [
        m.register_forward_pre_hook(lambda m, args: seen.append((m, torch.randn_like(args[0]))))
        for m in linear
    ]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return seen


def recorded(function, name, calls):
    """The function, which notes its calls."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        calls.append((name, function, args, kwargs))
        return function(*args, **kwargs)

    return call


def torch_calls(module, x):
    """The calls of a forward pass of what ouzel.transformers replaces."""
    places, calls = [], []
    for owner in module.modules():
        kind = type(owner)
        for name in ouzel.transformers.LAYERS.get(kind.__name__, {}):
            # A method of the class, or a function that its module has.
            place = kind if hasattr(kind, name) else inspect.getmodule(inspect.unwrap(kind.forward))
            places.append((place, name, getattr(place, name)))
    for place, name, function in places:
        label = f"{place.__name__}.{name}" if inspect.isclass(place) else name
        setattr(place, name, recorded(function, label, calls))
    try:
        module(x)
    finally:
        for place, name, function in places:
            setattr(place, name, function)
    return calls


def ouzel_calls(module, x, context):
    """Those of an accelerated one in their places, with tensors laid out as it has them."""
    rows, calls = ouzel.transformers.LAYERS.values(), []
    before = [dict(row) for row in rows]
    for row in rows:
        row.update({name: recorded(f, name, calls) for name, f in row.items() if not hasattr(f, "__wrapped__")})
    try:
        with ouzel.transformers.accelerate(module, context=context):
            module(x)
    finally:
        for row, functions in zip(rows, before):
            row.update(functions)
    return calls


def leaf(x):
    """With a gradient of its own, of the same strides."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def part(call, what):
    """A call by itself, for a prefill or a step."""
    _, function, args, kwargs = call
    args, kwargs = [leaf(a) for a in args], {n: leaf(a) for n, a in kwargs.items()}
    leaves = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]

    def forward():
        with torch.no_grad():
            function(*args, **kwargs)

    def step():
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first.backward(torch.ones_like(first))
        for x in leaves:
            x.grad = None

    return forward if what == "prefill" else step


def measure_parts(module, x, what, repeat, context):
    """Each replaced function alone."""
    x = x.detach().requires_grad_(what == "step")
    pairs = list(zip(torch_calls(module, x), ouzel_calls(module, x, context), strict=True))
    for theirs, mine in pairs:
        assert theirs[0].endswith(mine[0])
        functions = part(theirs, what), part(mine, what)
        times = [[milliseconds(function) for function in functions] for _ in range(repeat + 1)]
        torch_ms, ouzel_ms = map(min, zip(*times[1:]))
        print(f"    {theirs[0]:35} {torch_ms:9.1f} {ouzel_ms:9.1f} {torch_ms / ouzel_ms:7.2f}", flush=True)


def milliseconds(function):
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def measure(name, tokens, what, dtype, repeat, context, with_parts):
    module, width = layer(name, dtype)
    x = torch.randn(1, tokens, width, dtype=dtype)
    linear = linear_inputs(module, x)
    dy = torch.randn_like(x)

    def prefill():
        with torch.no_grad():
            module.eval()(x)

    def step():
        module.train().zero_grad()
        y = module(x.requires_grad_())
        y.backward(dy)
        x.grad = None

    def linear_prefill():
        with torch.no_grad():
            for m, given in linear:
                m(given)

    def linear_step():
        module.zero_grad()
        for m, given in linear:
            y = m(given.requires_grad_())
            y.backward(torch.ones_like(y))
            given.grad = None

    def ours(function):
        with ouzel.transformers.accelerate(module, context=context):
            return milliseconds(function)

    runs = {"prefill": (prefill, linear_prefill), "step": (step, linear_step)}
    for kind in what:
        function, alone = runs[kind]
        best = [float("inf")] * 3
        for i in range(repeat + 1):  # the first warms up
            times = milliseconds(function), ours(function), milliseconds(alone)
            if i > 0:
                best = [min(pair) for pair in zip(best, times)]
        torch_ms, ouzel_ms, linear_ms = best
        print(
            f"{name:16} {tokens:6} {kind:8} {torch_ms:9.1f} {ouzel_ms:9.1f} {torch_ms / ouzel_ms:7.2f}"
            f" {linear_ms:9.1f} {torch_ms / linear_ms:7.2f}"
            f" {(torch_ms - linear_ms) / max(ouzel_ms - linear_ms, 1e-3):8.1f}",
            flush=True,
        )
        if with_parts:
            measure_parts(module, x, kind, repeat, context)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--what", nargs="+", choices=["prefill", "step"], default=["prefill", "step"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    context = ouzel.Context(threads=options.threads)
    print(f"{options.threads} threads, {options.dtype}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}; times in ms")  # fmt: skip
    print("layer            tokens what         torch     ouzel   ratio    linear   bound  between")
    for name in options.layers:
        for tokens in options.tokens:
            dtype = getattr(torch, options.dtype)
            measure(name, tokens, options.what, dtype, options.repeat, context, options.parts)


if __name__ == "__main__":
    main()
