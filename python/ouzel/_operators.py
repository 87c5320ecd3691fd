"""The functions of the operators, written from the library's table: a new law is a new function.

A function takes the tensors that are always needed, then `scale`, optional tensors,
`output_final_state`, and the other attributes, `cu_seqlens` and `form` last.
"""

from collections import namedtuple
from math import ceil

from . import _core

TensorInfo = namedtuple(
    "TensorInfo", "name shape gradient optional when dtype is_state gradient_when"
)
TensorInfo.__doc__ = "A tensor that an operator takes or gives."
AttributeInfo = namedtuple("AttributeInfo", "name kind meaning default choices")
AttributeInfo.__doc__ = "An attribute of an operator."


class Law(namedtuple("Law", "name aliases formula source inputs outputs attributes")):
    """A row of the table of operators."""

    __slots__ = ()

    def __repr__(self):
        return f"<{self.name}: {self.formula}>"


class Costs(dict):
    """What `explain` counts."""

    def __repr__(self):
        lengths = (f"{name} {ceil(self[name + '_crossing']):,}" for name in ("training", "prefill", "decode"))
        return (f"<{self['law']}: a state of {self['state_bytes']:,.0f} bytes, cheaper than softmax attention "
                f"from T = {', '.join(lengths)}; its keys: {', '.join(self)}>")


_TABLE = [
    Law(
        name,
        tuple(aliases),
        formula,
        source,
        tuple(TensorInfo(*tensor) for tensor in inputs),
        tuple(TensorInfo(*tensor) for tensor in outputs),
        tuple(AttributeInfo(*a[:4], tuple(a[4])) for a in attributes),
    )
    for name, aliases, formula, source, inputs, outputs, attributes in _core.table()
]


class _Laws(dict):
    """Laws by name, once each; aliases find them too."""

    def __repr__(self):
        return f"<{len(self)} laws: {', '.join(self)}>"

    def __missing__(self, alias):
        for law in self.values():
            if alias in law.aliases:
                return law
        raise KeyError(alias)

    def __contains__(self, name):
        return super().__contains__(name) or any(name in law.aliases for law in self.values())

    def get(self, name, default=None):
        return self[name] if name in self else default


def laws():
    """All operators, by name or alias: formula, source, tensors and attributes."""
    return _Laws((law.name, law) for law in _TABLE)


def explain(law, T=4096, K=64, V=64, H=16):
    """What a law costs by count, beside softmax attention of the same sizes: operations and bytes per token
    and all heads, bytes of states and caches, and the lengths T where the two cross: a dict.

    Raises ouzel.InvalidArgumentError for an operator whose costs are not counted.
    """
    return Costs(_core.explain(law, T, K, V, H))


def needed(tensor):
    return not tensor.optional and not tensor.when


def keeps_state(law):
    return any(output.is_state for output in law.outputs)


def upstream(law):
    """The gradients that come from above."""
    return [output for output in law.outputs if output.gradient]


def default_of(attribute):
    """Its value in a signature: None where `meaning` says what holds."""
    if not attribute.default:
        return None
    if attribute.kind == "bool":
        return attribute.default == "true"
    return {"int": int, "float": float}.get(attribute.kind, str)(attribute.default)


def holds(conditions, law, values):
    """Whether `when` of a tensor, "normalize=true form!=parallel", is so with these attributes."""
    for condition in conditions.split():
        name, _, wanted = condition.partition("=")
        negated, name = name.endswith("!"), name.rstrip("!")
        value = values.get(name)
        if value is None:
            value = next(a.default for a in law.attributes if a.name == name)
        if (str(value).lower() in wanted.split("|")) == negated:
            return False
    return True


# Of the functions of an operator: the operator itself, its gradients, and its states updated.
CALL, VJP, STEP = "call", "vjp", "step"


def parameters(law, kind):
    """(name, default) of all parameters, in order; a default of `...` is none. Then the keyword-only."""
    first = [(tensor.name, ...) for tensor in law.inputs if needed(tensor)]
    tensors = [(tensor.name, None) for tensor in law.inputs if not needed(tensor)]
    attributes = [(attribute.name, default_of(attribute)) for attribute in law.attributes]
    last = ["cu_seqlens", "form"]
    scale = [a for a in attributes if a[0] == "scale"]
    rest = [a for a in attributes if a[0] not in ["scale", *last]]
    rest += sorted((a for a in attributes if a[0] in last), key=lambda a: last.index(a[0]))
    state = [("output_final_state", False)] if kind == CALL and keeps_state(law) else []
    keywords = [(output.gradient, None) for output in upstream(law)] if kind == VJP else []
    return first + scale + tensors + state + rest, keywords + [("context", None)]


def signature(positional, keywords):
    """As it stands between the parentheses of a `def`."""

    def spelled(name, default):
        return name if default is ... else f"{name}={default!r}"

    return ", ".join([*(spelled(*p) for p in positional), "*", *(spelled(*p) for p in keywords)])


def _shape(tensor):
    return " or ".join("[" + ", ".join(s.split()) + "]" for s in tensor.shape.split("|"))


def _is_updated(tensor, kind):
    return kind == STEP and tensor.is_state


def _tensor_line(tensor, name, kind=CALL):
    if _is_updated(tensor, kind):
        when = ", with " + tensor.when.replace(" ", ", ") if tensor.when else ""
        return f"    {name}: {_shape(tensor)}, float32, updated in place{when}"
    notes = [_shape(tensor)]
    notes.append("float64 or float32" if tensor.dtype == "float64" else "float32, bfloat16 or float16")
    if tensor.optional:
        notes.append("optional")
    if tensor.when:
        notes.append("with " + tensor.when.replace(" ", ", "))
    return f"    {name}: " + ", ".join(notes)


def _output_line(output, index):
    if index == 0:
        dtype = "of the type of the first argument"
    else:
        dtype = "float32" + (", None without output_final_state" if output.is_state else "")
    when = "; with " + output.when.replace(" ", ", ") if output.when else ""
    return f"    {output.name}: {_shape(output)}, {dtype}{when}"


def _letters(tensors):
    """What the letters of their shapes mean, a line each; digits mean themselves."""
    letters = {letter: None for tensor in tensors for letter in tensor.shape.replace("|", " ").split()}
    return [f"    {letter}: {meaning}" for letter in letters if (meaning := _core.meaning_of_letter(letter))]


def documentation(law, kind):
    """The docstring: formula, source, shapes, types, defaults, errors."""
    if kind == CALL:
        lines = [law.formula, "", f"Source: {law.source}"]
    elif kind == VJP:
        lines = [f"Gradients of `{law.name}`, by name."]
    else:
        lines = [
            f"`{law.name}` of the tokens that follow: the states that are given are updated in place.",
            "",
            "One token of each sequence, [B, 1, ...], is what this is fastest for: decoding.",
        ]
    lines += ["", "Arguments:"]
    lines += [_tensor_line(tensor, tensor.name, kind) for tensor in law.inputs]
    if kind == CALL and keeps_state(law):
        lines.append("    output_final_state: whether states are returned (default: False)")
    for attribute in law.attributes:
        choices = ": " + ", ".join(attribute.choices) if attribute.choices else ""
        default = f" (default: {default_of(attribute)!r})" if attribute.default else ""
        lines.append(f"    {attribute.name}: {attribute.kind}; {attribute.meaning}{choices}{default}")
    if kind == VJP:
        above = upstream(law)
        lines += [f"{_tensor_line(o, o.gradient)}; the gradient of {o.name}" for o in above]
        if len(above) > 1:
            names = ", ".join(output.gradient for output in above)
            lines.append(f"    of {names} one or more must be given; those that are not count as zero")
    lines.append("    context: the ouzel.Context that computes (default: one that all calls share)")
    lines += ["", "Returns:"]
    if kind == VJP:
        gradients = [tensor.gradient for tensor in law.inputs if tensor.gradient]
        lines.append(f"    a dict of {', '.join(gradients)}, those of inputs that were given, each of its")
        lines.append("    input's shape and type")
    else:
        outputs = law.outputs if kind == CALL else law.outputs[:1]
        lines += [_output_line(output, i) for i, output in enumerate(outputs)]
    lines += [
        "",
        "Sizes:",
        *_letters([*law.inputs, *law.outputs]),
        "",
        "Any strides; a last axis that is not contiguous is copied. Raises ouzel.InvalidArgumentError for",
        "what does not fit.",
    ]
    return "\n".join(lines)


def define(law, kind, body, space):
    """A function with the parameters of its kind that returns `body`; `space` holds what the body
    refers to."""
    name = law.name if kind == CALL else kind
    source = (
        f"def {name}({signature(*parameters(law, kind))}, **unknown):\n"
        f"    if unknown:\n        _refuse({name}, unknown)\n"
        f"    return {body}\n"
    )
    space["_refuse"] = _refuse
    exec(compile(source, f"<{space['__name__']}.{law.name}>", "exec"), space)
    function = space[name]
    function.__doc__ = documentation(law, kind)
    known = _signature_of(function)
    function.__signature__ = known.replace(parameters=list(known.parameters.values())[:-1])
    if kind != CALL:
        function.__qualname__ = f"{law.name}.{kind}"
    return function


def _signature_of(function):
    from inspect import signature  # with NumPy it is there already; an import of Ouzel alone does without

    return signature(function)


def _refuse(function, unknown):
    from difflib import get_close_matches

    known, name = list(_signature_of(function).parameters), next(iter(unknown))
    near = get_close_matches(name, known, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(known)}"
    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument '{name}'; {hint}")


def arguments(law, kind):
    """The text of a call's arguments: its tensors, its attributes, whether states are wanted."""

    def together(names):
        return "(" + "".join(name + ", " for name in names) + ")"

    tensors = [tensor.name for tensor in law.inputs]
    if kind == VJP:
        tensors += [output.gradient for output in upstream(law)]
    text = f"{together(tensors)}, {together(a.name for a in law.attributes)}"
    if kind == CALL:
        text += ", output_final_state" if keeps_state(law) else ", False"
    return text + ", context"


# Operators by names and aliases.
NAMES = {name: index for index, law in enumerate(_TABLE) for name in (law.name, *law.aliases)}
_functions = {}


def function_of(name):
    """The function of an operator, the same for its aliases."""
    index = NAMES[name]
    if index not in _functions:
        _functions.setdefault(index, _defined(index))
    return _functions[index]


def _defined(index):
    law = _TABLE[index]
    space = {"_call": _core.forward, "_vjp": _core.vjp, "_step": _core.step, "__name__": "ouzel"}

    def defined(kind):
        return define(law, kind, f"_{kind}({index}, {arguments(law, kind)})", space)

    made = defined(CALL)
    made.vjp = defined(VJP)
    if keeps_state(law):
        made.step = defined(STEP)
    return made
