"""Numbers with derivatives, exactly rounded, and random ones: the same on every machine."""

import decimal
import hashlib
import math

DECIMAL = decimal.Context(prec=40)


def exp(x):
    return float(DECIMAL.exp(decimal.Decimal(x)))


def log(x):
    return float(DECIMAL.ln(decimal.Decimal(x)))


def power_of_two(x):
    return float(DECIMAL.power(2, decimal.Decimal(x)))


class Random:
    """SplitMix64."""

    def __init__(self, text):
        self.state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def uniform(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def normal(self):
        return math.fsum(self.uniform() for _ in range(12)) - 6


class Var:
    """A number on the tape: its value and its derivatives by the numbers that it was made of."""

    tape = []

    def __init__(self, value, parents=()):
        self.value, self.parents, self.gradient = value, parents, 0.0
        Var.tape.append(self)


def dot(a, b, c=()):
    """sum a_i b_i + sum c_i."""
    value = math.fsum([x.value * y.value for x, y in zip(a, b)] + [x.value for x in c])
    parents = [(x, y.value) for x, y in zip(a, b)] + [(y, x.value) for x, y in zip(a, b)]
    return Var(value, parents + [(x, 1.0) for x in c])


def times(x, factor):
    return Var(x.value * factor, [(x, factor)])


def divide(x, y):
    return Var(x.value / y.value, [(x, 1 / y.value), (y, -x.value / (y.value * y.value))])


def plus(x, constant):
    return Var(x.value + constant, [(x, 1.0)])


def exponential(x):
    e = exp(x.value)
    return Var(e, [(x, e)])


def one_minus_exponential(x):
    if x.value == -math.inf:
        return Var(1.0, [(x, 0.0)])
    value = float(DECIMAL.subtract(1, DECIMAL.exp(decimal.Decimal(x.value))))
    return Var(value, [(x, -exp(x.value))])


def product(*factors):
    value = Var(1.0)
    for x in factors:
        value = dot([value], [x])
    return value


def differentiate(outputs):
    """Gradients of the sum of output * upstream over the pairs, for everything on the tape."""
    for y, upstream in outputs:
        y.gradient += upstream
    for y in reversed(Var.tape):
        for x, slope in y.parents:
            x.gradient += y.gradient * slope


def negative(xs):
    return [times(x, -1.0) for x in xs]


def scaled(xs, factor):
    return [product(x, factor) for x in xs]


def each(xs, ys):
    return [product(x, y) for x, y in zip(xs, ys)]
