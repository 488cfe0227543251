"""Tells a wrong value from one that another order of sums makes.

    after a resume     three ranks and more, whose gradients a fresh process may add up in another order: apart by no
                       more than a thousandth of the largest value of the tensor
    two ways alike, or two meshes where the optimizer does not treat every element alone
                       each element apart by no more than a thousandth of what the steps changed, or by 4 units in the
                       last place: a sum, a norm or a matrix product over the pieces of a tensor

    the same of a parameter whose gradient is zero but for rounding in both ways
                       anything: its direction is noise, of which Adam makes whole steps

    the same where a part computes in bf16 or fp16
                       the root mean square of what the two are apart by is at most `HALF` of that of the tensor; of
                       a parameter, `HALF_OF_PARAMS` of that of its change, since Adam turns a
                       gradient that rounding alone has made into a whole step

For example, a norm that is taken over a piece in the place of the tensor is off by a tenth and more on tensors of a few
thousand elements, and one that adds up the pieces in another order by a millionth.

*Verifies*: that a difference is as small as that. *Does not verify*: that a sum is its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from shardproof.diff import Difference, as_numbers, ulp_distance
from shardproof.observe.assemble import as_bits
from shardproof.observe.logical import Value
from shardproof.oracle.extra_state import EXTRA_STATE

PARAMS = "param"

At = Mapping[tuple[str, str], Value]
"""(role, name) → value, after one operation."""

LEAST_RANKS_THAT_ROUND = 3
"""With so many ranks the sum of their gradients depends on its order, and a fresh process may have another: for
example, DistributedDataParallel cuts its buckets anew after the first step of a process."""

ROUNDING = 2.0**-10
"""How far two values may be apart, as a share of the largest one or of the largest change, to count as another order of
sums."""

HALF, HALF_OF_PARAMS = 2.0**-5, 2.0**-2
"""The same for values that a part of the model computes in bf16 or fp16, in the root mean square over a tensor."""

ULPS = 4
"""So many units in the last place count as another order of sums, whatever their share."""

HALVES = ("bf16", "fp16")

FLOATS = ("fp32", "fp64", *HALVES)


def rounded(difference: Difference, expected: At, observed: At, ranks: int) -> bool:
    """Whether a difference after a step is what another order of adding up gradients may come to."""
    if ranks < LEAST_RANKS_THAT_ROUND or not _comparable(difference, expected):
        return False
    one, other = _numbers(difference, expected), _numbers(difference, observed)
    largest = max(float(np.abs(one).max()), float(np.abs(other).max()))
    return bool(np.isfinite(one).all() and np.isfinite(other).all() and np.abs(one - other).max() <= ROUNDING * largest)


class Beyond(NamedTuple):
    """Of the differences of two ways: wrong: those that no other order of sums makes. farthest: how far apart the two
    are at the most. noise: the parameters whose gradient is zero but for rounding, and of which nothing is compared."""

    wrong: list[Difference]
    farthest: float
    noise: frozenset[str]


def beyond_rounding(
    found: Iterable[Difference], start: At, expected: At, observed: At, *, half: bool = False
) -> Beyond:
    """What no other order of sums makes of the differences of two ways to compute the same, or of two meshes. half:
    whether a part computes in bf16 or fp16."""
    judged = [(each, *apart(each, start, expected, observed, half=half)) for each in found]
    beyond = {each.key.fqn for each, _, rounding in judged if not rounding}
    noise = _noise(beyond, start, expected, observed) if beyond else frozenset[str]()
    left_out = {each for each, _, rounding in judged
                if not rounding and each.key.fqn in noise and _follows(each, expected, observed)}  # fmt: skip
    kept = [(each, share, rounding) for each, share, rounding in judged if each not in left_out]
    return Beyond(
        [each for each, _, rounding in kept if not rounding],
        max((share for _, share, _ in kept), default=0.0),
        frozenset(each.key.fqn for each in left_out),
    )


NOISE, NOISE_OF_FP64 = 2.0**-22, 2.0**-48
"""Which share of the largest moment, or of the largest change, of all parameters a sum of zero comes to at the most."""

_OF_GRADIENTS = ("exp_avg", "exp_avg_sq", "momentum", PARAMS)
"""Roles of what follows a parameter's gradient."""


def _noise(names: Iterable[str], start: At, expected: At, observed: At) -> frozenset[str]:
    """The parameters whose gradient is zero but for rounding in both ways, as that of a bias in front of a norm, or of
    the keys' in an attention: tiny against all others', and where there are moments in neither way zero to the bit.
    Adam makes whole steps of it; under other optimizers what the parameter has changed has to be as tiny."""
    ways = expected, observed
    adam, momentum = (_tiny(role, {}, expected) & _tiny(role, {}, observed) for role in ("exp_avg", "momentum"))
    zeros = {name for role, name in expected if role == "momentum"} - momentum
    still = set.intersection(*(_tiny(PARAMS, start, way) for way in ways)) - zeros
    without = {name for role, name in expected if role == "exp_avg"}
    return frozenset(names) & (adam | (still - without))


def _tiny(role: str, start: At, way: At) -> set[str]:
    """The parameters of which a moment, or the change since `start`, is tiny against that of another; a moment of zero
    is none."""
    own = {name: value for (kind, name), value in way.items() if kind == role and value.dtype in FLOATS and value.data}
    sizes = {name: _size(value, start.get((role, name))) for name, value in own.items()}
    largest = max(sizes.values(), default=0.0)
    share = {name: NOISE_OF_FP64 if value.dtype == "fp64" else NOISE for name, value in own.items()}
    return {name for name, size in sizes.items()
            if size <= share[name] * largest < np.inf and (size > 0 or role == PARAMS)}  # fmt: skip


def _size(value: Value, before: Value | None) -> float:
    """The largest element of a moment, or of what a parameter has changed; infinite where one is no number."""
    numbers = as_numbers(value).astype(np.float64)
    if before is not None and before.shape == value.shape:
        numbers = numbers - as_numbers(before).astype(np.float64)
    size = float(np.abs(numbers).max())
    return size if np.isfinite(size) else np.inf


def _follows(difference: Difference, expected: At, observed: At) -> bool:
    """Whether a difference may come of a gradient that is noise: numbers, in both ways, of what an optimizer makes."""
    if difference.key.role not in _OF_GRADIENTS or not _comparable(difference, expected):
        return False
    return all(np.isfinite(_numbers(difference, way)).all() for way in (expected, observed))


def may_follow_noise(difference: Difference, values: At) -> bool:
    """Whether a difference may follow from a parameter that noise has moved in a step before: a buffer, or a number of
    the trainer's own, such as the mean that a norm keeps of what a bias adds to, and a loss that is made with it."""
    name = difference.key.role, difference.key.fqn
    return name[0] in ("buffer", EXTRA_STATE) and difference.kind == "bits" and values[name].dtype in FLOATS


def apart(difference: Difference, start: At, expected: At, observed: At, *, half: bool = False) -> tuple[float, bool]:
    """How far two ways to compute the same are apart, and whether that is as little as another order of sums makes.

    The distance is the largest one of two elements: of a parameter as a share of its largest change since `start`, of
    anything else as a share of its largest value. With `half` it is that of root mean squares. It is infinite where
    that has no meaning.
    """
    key = (difference.key.role, difference.key.fqn)
    if not _comparable(difference, expected):
        return np.inf, False
    one, other = _numbers(difference, expected), _numbers(difference, observed)
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return np.inf, False
    few_ulps = ulp_distance(as_bits(expected[key]), as_bits(observed[key])) <= ULPS
    change = one - as_numbers(start[key]).astype(np.float64) if key[0] == PARAMS and key in start else one
    if half:
        share = _share(np.sqrt(np.square(one - other).mean()), np.sqrt(np.square(change).mean()))
        return share, bool(share <= (HALF_OF_PARAMS if key[0] == PARAMS else HALF) or few_ulps.all())
    scale = np.abs(change).max()
    shares = np.abs(one - other) / scale if scale else np.full(one.shape, np.inf)
    shares[one == other] = 0.0
    return float(shares.max()), bool(((shares <= ROUNDING) | few_ulps).all())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else np.inf


def computes_in_half(values: At) -> bool:
    """Whether a parameter is of a dtype in which a model computes with 8 or 11 significant bits."""
    return any(role == PARAMS and value.dtype in HALVES for (role, _), value in values.items())


def _comparable(difference: Difference, expected: At) -> bool:
    key = (difference.key.role, difference.key.fqn)
    return difference.kind == "bits" and expected[key].dtype in FLOATS


def _numbers(difference: Difference, values: At) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return as_numbers(values[difference.key.role, difference.key.fqn]).astype(np.float64)
