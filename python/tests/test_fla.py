"""ouzel.fla: every published function against its formula in float64; signatures, layouts, refusals."""

import ast
import functools
import importlib.util
import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ouzel  # noqa: E402
import ouzel.fla.modules  # noqa: E402
from fla_cases import (  # noqa: E402
    B, CASES, CU, D, H, K, T, V, call, cast, close, drawn, flat, normal, over_cases, samples,
)
from ouzel.fla import _functions, _install, _modules, _table  # noqa: E402

F = torch.nn.functional
OUTPUT_BOUND, GRADIENT_BOUND = 5e-6, 2e-5  # docs/numerics.md


def possible(case, stated, reverse):
    return (not stated or case.states) and (not reverse or case.has("reverse"))


@over_cases(("stated", [False, True]), ("reverse", [False, True]), where=possible)
def test_results_and_gradients_are_those_of_the_formula(case, stated, reverse):
    options = {"reverse": True} if reverse else {}
    if stated and case.has("scale"):
        options["scale"] = 0.7
    given, state = drawn(case)
    state = state if stated else None
    ours, true = (cast((given, state), dtype, grad=True) for dtype in (torch.float32, torch.float64))
    got = flat(call(case, *ours, **options))
    expected = flat(case.formula(**true[0], **({"state": true[1]} if stated else {}), **options))
    assert len(got) == len(expected)
    for x, y in zip(got, expected):
        close(x, y, OUTPUT_BOUND)
    pairs = [(x, y) for x, y in zip(got, expected) if x.requires_grad]
    upstream = [normal(*x.shape) for x, _ in pairs]
    leaves = [flat(list(values[0].values())) + flat(values[1]) for values in (ours, true)]
    gradients = [
        torch.autograd.grad(outputs, inputs, [u.to(x.dtype) for u, x in zip(upstream, outputs)],
                            allow_unused=True)
        for outputs, inputs in zip(zip(*pairs), leaves)
    ]
    floor = 1e-3 * max(float(g.square().mean().sqrt()) for g in gradients[1] if g is not None)
    for ours, true in zip(*gradients):
        assert (ours is None) == (true is None)
        if true is not None:
            close(ours, true, GRADIENT_BOUND, floor)


def test_every_function_has_a_case():
    tested = {case.name for case in CASES}
    aliases = {n for n, f in _functions.items() if n not in tested and any(f is c.function for c in CASES)}
    assert set(_functions) == tested | aliases | set(_table.REPLACED)
    assert set(ouzel.fla.__all__) == {*_functions, "Installation", "install", "uninstall"}
    assert all(f.__doc__ for n, f in _functions.items() if n not in _table.REPLACED)


def pieces(case, given, state):
    """A packed call as calls of each sequence."""
    for n, (begin, end) in enumerate(zip(CU, CU[1:])):
        alone = {}
        for name, x in given.items():
            rows = x.shape[1] // T if x.dim() > 2 and x.shape[0] == 1 else 0
            alone[name] = x[:, rows * begin : rows * end] if rows else x
        yield alone, tuple(h[n : n + 1] for h in state) if isinstance(state, tuple) else state[n : n + 1]


@over_cases(where=lambda case: case.has("cu_seqlens") and case.states)
@pytest.mark.parametrize("as_a", ["list", "tensor"])
def test_packed_sequences_are_as_if_alone(case, as_a):
    cu_seqlens = CU if as_a == "list" else torch.tensor(CU)
    options = {"reverse": True} if case.has("reverse") else {}
    given, state = cast(drawn(case, B=1, N=3), torch.float32)
    packed = flat(call(case, given, state, cu_seqlens=cu_seqlens, **options))
    alone = [flat(call(case, *piece, **options)) for piece in pieces(case, given, state)]
    for results, axis in zip(zip(packed, *alone), [1, *[0] * 3]):
        close(results[0], torch.cat(results[1:], axis), 1e-6)


@over_cases(where=lambda case: case.has("cu_seqlens") and not case.states)
def test_packed_sequences_without_states(case):
    given, _ = cast(drawn(case, B=1), torch.float32)
    options = case.options | {"cu_seqlens": CU}
    if case.has("output_attentions"):
        options["output_attentions"] = False
    packed = flat(case.function(**given, **options))[0]
    del options["cu_seqlens"]
    alone = [case.function(**{n: x[:, b:e] for n, x in given.items()}, **options)
             for b, e in zip(CU, CU[1:]) if e > b]
    close(packed, torch.cat([flat(o)[0] for o in alone], 1), 1e-6)


LAYOUTS = ("state_v_first", "transpose_state_layout")


@over_cases(where=lambda case: any(map(case.has, LAYOUTS)))
def test_states_with_values_first(case):
    def turned(state):
        if isinstance(state, tuple):
            return (turned(state[0]), *state[1:])
        return state.transpose(-1, -2).contiguous()

    layout = next(filter(case.has, LAYOUTS))
    given, state = cast(drawn(case), torch.float32)
    first = call(case, given, state)
    second = call(case, given, turned(state), **{layout: True})
    assert torch.equal(first[0], second[0])
    assert torch.equal(flat(turned(first[1]))[0], flat(second[1])[0])
    assert all(map(torch.equal, flat(first)[2:], flat(second)[2:]))
    if layout == LAYOUTS[0] and case.has("kwargs"):
        with pytest.warns(DeprecationWarning, match="now called `state_v_first`"):
            old = call(case, given, turned(state), transpose_state_layout=True)
        assert all(map(torch.equal, flat(old), flat(second)))
        with pytest.raises(ValueError, match="old name"):
            call(case, given, turned(state), transpose_state_layout=True, state_v_first=True)


def test_what_is_returned():
    a = cast(samples(), torch.float32)
    q, k, v, g, gk, beta, s = (a[n] for n in ("q", "k", "v", "g", "gk", "beta", "s"))
    assert ouzel.fla.chunk_gla(q, k, v, gk)[1] is None
    assert ouzel.fla.chunk_abc(q, k, v, s)[1] is None
    assert ouzel.fla.chunk_gsa(q, k, v, s)[1] == (None, None)
    assert ouzel.fla.parallel_simple_gla(q, k, v)[1] is None
    h, z = ouzel.fla.chunk_linear_attn(q, k, v)[1]
    assert h is None and z.shape == (B, 1, H, K)
    assert ouzel.fla.fused_recurrent_linear_attn(q, k, v)[1] is None
    h, z = ouzel.fla.chunk_lightnet(q, k, v)[1]
    assert h is None and z.shape == (B, 1, H, K)
    assert ouzel.fla.chunk_rwkv7(q, gk, k, v, k, k)[1] is None
    assert ouzel.fla.fused_recurrent_rwkv7(q, gk, k, v, k, k)[1] is not None
    assert len(ouzel.fla.chunk_ttt_linear(q, k, k, a["ln_w"], a["ln_b"], 0.1)) == 3
    o, z = ouzel.fla.parallel_rebased(q, k, v, return_both=True)
    assert o.shape == (B, H, T, V) and z.shape == (B, H, T)
    close(o / (z[..., None] + 1e-5), ouzel.fla.parallel_rebased(q, k, v).transpose(1, 2), 1e-6)
    assert isinstance(ouzel.fla.parallel_based(q, k, v), torch.Tensor)
    o, h = ouzel.fla.chunk_gated_delta_rule(q.bfloat16(), k, v, g, beta, output_final_state=True)
    assert o.dtype == torch.bfloat16 and h.dtype == torch.float32


def test_lightnet_goes_on_from_its_states():
    q, k, v = (cast(samples()[n], torch.float32) for n in ("q", "k", "v"))
    whole, (h, z) = ouzel.fla.chunk_lightnet(q, k, v, output_final_state=True)
    o, state = ouzel.fla.chunk_lightnet(q[:, :4], k[:, :4], v[:, :4], output_final_state=True)
    rest, (h2, z2) = ouzel.fla.chunk_lightnet(q[:, 4:], k[:, 4:], v[:, 4:], initial_state=state,
                                              output_final_state=True)
    for x, y in ((torch.cat([o, rest], 1), whole), (h2, h), (z2, z)):
        close(x, y, 1e-6)
    none = q[:, :0], k[:, :0], v[:, :0]
    assert torch.equal(ouzel.fla.chunk_lightnet(*none, initial_state=state)[1][1], state[1])
    assert ouzel.fla.chunk_lightnet(*none)[1][1].eq(float("-inf")).all()


def test_what_only_concerns_gpus_changes_nothing():
    q, k, v, gk, beta, h = (cast(samples()[n], torch.float32) for n in ("q", "k", "v", "gk", "beta", "state"))
    plain = ouzel.fla.chunk_kda(q, k, v, gk, beta, initial_state=h, output_final_state=True)
    hinted = ouzel.fla.chunk_kda(q, k, v, gk, beta, initial_state=h, output_final_state=True, chunk_size=32,
                                 safe_gate=True, lower_bound=-5.0, disable_recompute=True, use_graph=True,
                                 max_num_seqs=4, cu_seqlens_cpu=torch.tensor(CU), A_log=q, dt_bias=q)
    assert all(map(torch.equal, plain, hinted))


def test_decays_that_are_parameters_learn():
    q, k, v, g_gamma = (cast(samples()[n], torch.float32) for n in ("q", "k", "v", "g_gamma"))
    fixed, _ = ouzel.fla.chunk_simple_gla(q, k, v, g_gamma=g_gamma)
    learned, _ = ouzel.fla.chunk_simple_gla(q, k, v, g_gamma=g_gamma.requires_grad_())
    close(fixed, learned, 1e-6)
    learned.sum().backward()
    assert g_gamma.grad.abs().min() > 0


REFUSALS = [
    ("chunk_kda", {"head_first": False}, DeprecationWarning, "head_first has been removed"),
    ("chunk_kda", {"cp_context": object()}, NotImplementedError, "chunk_kda: cp_context: context parallelism"),
    ("chunk_kda", {"return_intermediate_states": True}, NotImplementedError, "output_final_state"),
    ("chunk_kda", {"chunk_size": 48}, ValueError, "power of 2, 48 was found"),
    ("chunk_kda", {"chunk_sise": 64}, TypeError, r"chunk_kda\(\) got an unexpected .* 'chunk_sise'"),
    ("chunk_kda", {"use_gate_in_kernel": True}, ValueError, "needs `A_log`"),
    ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True}, ValueError, "requires `lower_bound`"),
    ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6}, ValueError, "lie in"),
    ("chunk_kda", {"use_gate_in_kernel": True, "lower_bound": 1.0}, ValueError, "below 0"),
    ("chunk_kda", {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel=True"),
    ("chunk_kda", {"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, ValueError,
     r"`A_log` has 3 numbers; one for each of \(2, 1\)"),
    ("chunk_kda", {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "dt_bias": torch.zeros(H)}, ValueError,
     r"`dt_bias` has 2 numbers; one for each of \(2, 4\)"),
    ("chunk_kda", {"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError, "the logits"),
    ("chunk_kda", {"cu_seqlens": CU}, ValueError, "kda: "),
    ("chunk_kda", {"initial_state": torch.zeros(3, H, K, V)}, ValueError, "kda: initial_state"),
    ("chunk_kda", {"beta": None}, (TypeError, ValueError), "beta"),
    ("fused_recurrent_gated_delta_rule", {"g": None, "use_gate_in_kernel": True, "A_log": torch.zeros(H)},
     ValueError, "the raw gate"),
    ("fused_recurrent_precond_gated_delta_rule", {"gv": torch.zeros(B, T, H, V)}, NotImplementedError,
     "fold it"),
    ("fused_recurrent_gated_delta_rule", {"A": 1}, TypeError, "unexpected keyword argument 'A'"),
    ("parallel_attn", {"g": torch.zeros(B, T, H)}, NotImplementedError, "parallel_attn: .* `g`"),
    ("parallel_attn", {"sink_bias": torch.zeros(H)}, NotImplementedError, "parallel_attn: .* `sink_bias`"),
    ("chunk_log_linear_attn", {"output_final_state": True}, NotImplementedError, "whole sequence"),
    ("fused_chunk_gla", {}, NotImplementedError, "call chunk_gla"),
]


@pytest.mark.parametrize("name,options,error,sentence", REFUSALS)
def test_refusals(name, options, error, sentence):
    case = next((c for c in CASES if c.name == name and "gk" in {*c.inputs.values(), "gk"}), None)
    given = cast(drawn(case)[0], torch.float32) if case else {}
    with pytest.raises(error, match=sentence):
        getattr(ouzel.fla, name)(**given | options)


def test_the_page_names_every_function():
    page = Path(__file__).resolve().parents[2] / "docs" / "fla.md"
    told = page.read_text()
    assert all(f"`{name}`" in told for name in (*_functions, *_table.ABSENT))
    assert f"version {_table.PUBLISHED}" in told


def test_the_first_example_of_the_page_works_as_pasted():
    page = Path(__file__).resolve().parents[2] / "docs" / "fla.md"
    example = page.read_text().split("```python\n")[1].split("```")[0]
    space = {}
    exec(compile(example, str(page), "exec"), space)
    assert space["o"].shape == space["v"].shape


def test_published_names_without_a_law():
    assert not set(_table.ABSENT) & set(ouzel.fla.__all__)
    with pytest.raises(AttributeError, match="no chunk_mesa_net: Ouzel has no such law.*naive.py"):
        ouzel.fla.chunk_mesa_net
    with pytest.raises(AttributeError, match="has no attribute 'chunk_nothing'"):
        ouzel.fla.chunk_nothing
    with pytest.raises(ImportError, match="no chunk_mesa_net: Ouzel has no such law"):
        from ouzel.fla import chunk_mesa_net  # noqa: F401
    with pytest.raises(ImportError, match="'chunk_glaa'; did you mean 'chunk_gla'"):
        from ouzel.fla import chunk_glaa  # noqa: F401
    assert not hasattr(ouzel.fla, "chunk_mesa_net")


# The published package, where it is installed: its sources are read, not imported.


@functools.cache
def published_definitions():
    """Functions and classes of the modules that publish, by name."""
    root = Path(next(iter(importlib.util.find_spec("fla").submodule_search_locations))) / "ops"
    trees = [ast.parse((root / (module.replace(".", "/") + ".py")).read_text()) for module in {*_modules.values()}]
    found = {n.name: n for tree in trees for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    exported = ast.parse((root / "__init__.py").read_text())
    names = {alias.name for n in exported.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    return found, names


def published_returns(name, found):
    """The expressions that a function returns, those of what it hands on to in their place."""
    node = found[name]
    if isinstance(node, ast.ClassDef):  # of autograd
        node = next(n for n in node.body if getattr(n, "name", "") == "forward")
    todo = list(node.body)
    while todo:
        node = todo.pop()
        todo += [] if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
        if not isinstance(node, ast.Return):
            continue
        called = node.value.func if isinstance(node.value, ast.Call) else None
        called = getattr(called, "value", called)  # Function.apply
        if getattr(called, "id", "") in found:
            yield from published_returns(called.id, found)
        else:
            yield node.value


def is_formed_as(result, expression):
    """A tuple where the expression is one, of as many, and a tensor where it is one."""
    if isinstance(expression, ast.Tuple):
        return (isinstance(result, tuple) and len(result) == len(expression.elts)
                and all(map(is_formed_as, result, expression.elts)))
    return not isinstance(result, tuple) or isinstance(expression, ast.Name) and expression.id != "o"


def spelled(arguments):
    """Parameters without their annotations."""
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg]:
        if argument:
            argument.annotation = None
    return ast.unparse(arguments)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_signatures_are_the_published_ones():
    found, names = published_definitions()
    published = [name for name in _modules if name in found]
    assert set(_functions) == {*published, *_table.ALIASES}
    for name in published:
        ours = ast.parse(f"def f{inspect.signature(_functions[name])}: ...").body[0].args
        assert spelled(ours) == spelled(found[name].args), name
    assert names - set(_functions) == set(_table.ABSENT)


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@over_cases(("stated", [False, True]), where=lambda case, stated: case.states or not stated)
def test_what_is_returned_is_formed_as_published(case, stated):
    found, _ = published_definitions()
    given, _ = cast(drawn(case), torch.float32)
    options = {"output_final_state": True} if stated and case.has("output_final_state") else {}
    result = case.function(**given, **case.options, **options)
    name = next((n for n, f in _functions.items() if f is case.function and n in found))
    expressions = [*published_returns(name, found)]
    assert any(is_formed_as(result, e) for e in expressions), [ast.unparse(e) for e in expressions]


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_signatures_of_modules_are_the_published_ones():
    root = Path(next(iter(importlib.util.find_spec("fla").submodule_search_locations))) / "modules"
    for name, (module, _) in _install._MODULES.items():
        tree = ast.parse((root / (module.replace(".", "/") + ".py")).read_text())
        ours = getattr(ouzel.fla.modules, name)
        theirs = next((n for n in tree.body if getattr(n, "name", "") == name), None)
        if theirs is None:  # the `apply` of a class
            assert any(isinstance(n, ast.Assign) and n.targets[0].id == name for n in tree.body)
            continue
        pairs = [(ours, theirs)]
        if isinstance(theirs, ast.ClassDef):
            methods = {n.name: n for n in theirs.body if isinstance(n, ast.FunctionDef)}
            pairs = [(getattr(ours, n), methods[n]) for n in ("__init__", "forward")]
        for function, published in pairs:
            mine = ast.parse(f"def f{inspect.signature(function)}: ...").body[0].args
            assert spelled(mine) == spelled(published.args), name


def test_activations():
    x, y, w, b = normal(3, K), normal(3, K), normal(V, K), normal(V)
    assert torch.equal(ouzel.fla.modules.swish(x), F.silu(x))
    assert torch.equal(ouzel.fla.modules.swiglu(x, y), F.silu(x) * y)
    assert torch.equal(ouzel.fla.modules.swiglu_linear(x, y, w, b), F.linear(F.silu(x) * y, w, b))


def test_short_convolution():
    torch.manual_seed(0)
    conv = ouzel.fla.modules.ShortConvolution(D, 3, bias=True, backend="cuda", use_fast_conv1d=True)
    assert conv.backend == "cuda" and conv.weight.shape == (D, 1, 3)
    x, residual = torch.randn(B, T, D), torch.randn(B, T, D)
    mask = torch.ones(B, T)
    mask[0, :2] = 0
    shifted = F.pad((x * mask[..., None]).transpose(1, 2), (2, 0))
    expected = F.silu(F.conv1d(shifted, conv.weight, conv.bias, groups=D)).transpose(1, 2) + residual
    y, none = conv(x, residual, mask, chunk_indices=torch.zeros(1, 2))
    close(y, expected, OUTPUT_BOUND)
    assert none is None
    first, cache = conv(x[:, :4], residual[:, :4], mask[:, :4], output_final_state=True)
    assert cache.shape == (B, D, 3)
    rest, _ = conv(x[:, 4:], residual[:, 4:], mask[:, 4:], cache=cache)
    close(torch.cat([first, rest], 1), expected, OUTPUT_BOUND)
    y, cache = ouzel.fla.modules.causal_conv1d(x * mask[..., None], conv.weight[:, 0], conv.bias, residual,
                                               activation="swish", output_final_state=True)
    close(y, expected, OUTPUT_BOUND)
    assert cache.shape == (B, D, 3)
    with pytest.raises(NotImplementedError, match="cp_context"):
        ouzel.fla.modules.causal_conv1d(x, conv.weight[:, 0], cp_context=object())
