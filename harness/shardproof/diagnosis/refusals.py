"""Explains an exception by its text, when a library refused its input and no state could be compared.

An error that names a parameter and the sizes of two tensors often says which one was taken for it. For example, *state
of 'a.bias' has 15 elements where its parameter's shard has 6*: of all parameters, one has 15 elements on a rank. An
error that names two sizes and no parameter says less: *could not broadcast input array from shape (6,) into shape
(15,)* is explained only if no parameter has both sizes.

*Verifies*: that the sizes in the text are those that the ranks' pieces have.
*Does not verify*: that the tensor of that size is the one that was given; another may have it by chance. So nothing
here is certain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from shardproof.diagnosis.explanation import Confidence, Context, Explanation

MECHANISM = "size_of_another"

_SIZES = re.compile(r"[\[(]([\d, ]*)[\])]|(?<![\w.])(\d+)(?![\w.])")
"""A shape in brackets, or a number that is no part of a word or a name."""


def explain_refusal(message: str, index: int, context: Context) -> list[Explanation]:
    """Whose sizes an error's text names, if it names a parameter beside its own size and another one.

    Args:
        message: what the library raised. index: the operation that it ended.
    """
    sizes = _sizes(context)
    names = [fqn for fqn in sizes if re.search(rf"(?<![\w.]){re.escape(fqn)}(?![\w.])", message)]
    if not names:
        return _of_two_sizes(message, index, sizes, context)
    if len(names) != 1:
        return []
    name, told = names[0], _sizes_named(message.replace(names[0], ""))
    foreign = sorted(told - sizes[name])
    if not told & sizes[name] or len(foreign) != 1:
        return []
    owners = [fqn for fqn, own in sizes.items() if foreign[0] in own]
    if not owners:
        return []
    whose = " or ".join(owners)
    text = f"What was refused for one parameter has the size of another: {context.op_name(index)} was given "
    text += f"{foreign[0]} elements for {name}, as many as {whose} has."
    evidence = {"name": name, "elements": foreign[0], "as_many_as": owners}
    confidence: Confidence = "likely" if len(owners) == 1 else "possible"
    return [Explanation(MECHANISM, confidence, text, (evidence,), ("PT-54736",))]


def _of_two_sizes(message: str, index: int, sizes: Mapping[str, set[int]], context: Context) -> list[Explanation]:
    """An error that names no parameter, and two sizes, each of which some parameters have, and none both: what some
    parameter has was put where another one's belongs."""
    told = sorted(_sizes_named(message) - {0})
    owners = [[fqn for fqn, own in sizes.items() if elements in own] for elements in told]
    a_place = "exceeds dimension size" in message  # in a buffer, whose size is a setting
    if len(told) != 2 or not all(owners) or set(owners[0]) & set(owners[1]) or a_place:
        return []
    each = [f"{elements} elements, as many as {' or '.join(of)}" for elements, of in zip(told, owners, strict=True)]
    text = f"What was refused for one parameter has the size of another: {context.op_name(index)} met {each[0]}, and "
    text += f"{each[1]}."
    evidence = {"elements": told, "as_many_as": owners}
    return [Explanation(MECHANISM, "possible", text, (evidence,), ("PT-54736",))]


def _sizes(context: Context) -> dict[str, set[int]]:
    """Parameter → how many elements it has, whole and on a rank."""
    sizes = {param.fqn: {param.spec.numel} for param in context.model.params}
    for record in context.records:
        if record.fqn in sizes and record.where == "live" and record.size:
            sizes[record.fqn].add(prod(record.size))
    return sizes


def _sizes_named(text: str) -> set[int]:
    """The sizes that a text names, in elements."""
    found = set()
    for shape, number in _SIZES.findall(text):
        found.add(int(number) if number else prod(int(n) for n in shape.replace(" ", "").split(",") if n))
    return found
