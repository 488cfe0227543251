"""`shardproof explain ID`: the page of a failure as text for a terminal.

It says the same in the same order: title, effect and place, what explains it, the differences by operation, role and
tensor with the bits of the first that deviates, the library's calls, and the commands that go on from here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardproof.issues.known_issues import KnownIssues
from shardproof.report.failure_page import BitRow, FailurePage, element_of, failure_page
from shardproof.report.groups import COPIES, Operation, Tensor
from shardproof.report.text import circumstances, explanation_lines, inert, verdict_line
from shardproof.result import Result
from shardproof.wording.rank_ends import told_ends

BOLD, SOFT = "1", "2"

NAME = 44
"""Characters of a tensor's name that have a column of their own."""

PARTS = {"sign": "35", "exponent": "32", "mantissa": "34"}
"""ANSI colours of the parts of a float, as the page has them."""

CHANGES = {"+": "32", "-": "31"}
"""ANSI colours of a patch's lines."""


def render_explained(
    result: Result, issues: KnownIssues, colour: bool = False, *, place: str = "", again: str = ""
) -> str:
    """Everything about one result, ending in a newline.

    Args:
        issues: what is known, to say what a failure does, where it lies and whether it is public.
        place, again: options that its printed commands need, as `failure_page` takes them.
        colour: use ANSI colours.
    """
    page = failure_page(result, issues, place, again)
    blocks = [
        "\n".join([verdict_line(result, colour), _paint(page.title, BOLD, colour), *_answers(page)]),
        "\n".join(circumstances(result, emulated_only=issues.emulated_only(result))),
        told_ends(result),
        "\n".join(f"  {line}" for line in explanation_lines(result) if not result.arms),
        "\n".join(_arms(result, colour)),
        "\n".join(_state(page, colour)),
        *_operations(page.operations, colour),
        "\n".join(_first_element(page, colour)),
        "\n".join(_error(result)),
        "\n".join(_calls(page, colour)),
        "\n".join(_cure(page, colour)),
        "\n".join(_commands(page, colour)),
    ]
    return inert("\n\n".join(block for block in blocks if block), colour) + "\n"


def _answers(page: FailurePage) -> Iterator[str]:
    told = page.filing.description
    if told and told.what:
        yield f"  {told.what}"
    if page.effect:
        yield f"  effect: {page.effect}"
    if told and told.line:
        yield f"  where: {told.line}" + (f", repaired in {told.repaired}" if told.repaired else "")
    if page.place:
        yield f"  raised at: {page.place.full}" + (f": {page.place.code}" if page.place.code else "")
    if told and told.upstream:
        yield f"  public: {told.upstream}"


def _arms(result: Result, colour: bool) -> Iterator[str]:
    """Of a trainer's cell, the verdict of each arm, what went wrong in it, and what it did not compare."""
    if result.arms:
        yield _paint("arms", BOLD, colour)
    width = max((len(arm.verdict) for arm in result.arms), default=0)
    for arm in result.arms:
        first, *more = arm.paragraphs or ("",)
        yield f"  {arm.verdict:<{width}}  {arm.name}" + (f": {first}" if first else "")
        yield from (f"  {'':<{width}}    {paragraph}" for paragraph in more)
        yield from (f"  {'':<{width}}    {_paint(note, SOFT, colour)}" for note in arm.notes)


def _state(page: FailurePage, colour: bool) -> Iterator[str]:
    """Of a trainer's cell, the state that was found; what could not be read comes first, as a warning."""
    found = page.state
    if found.hidden:
        yield _paint("WARNING: state that cannot be read, and is not compared (name it in `state()`)", BOLD, colour)
        yield from (f"  {line}" for line in found.hidden)
    if found.read or found.others:
        yield _paint("state that was found", BOLD, colour)
        yield from (f"  {line}" for line in (*found.read, *found.others))
    if found.measured:
        yield _paint("what a step does, as measured", BOLD, colour)
        yield from (f"  {line}" for line in found.measured)


def _operations(operations: Sequence[Operation], colour: bool) -> Iterator[str]:
    """A paragraph for each operation. A value of which an earlier one says the same is counted, and not told again."""
    before: set[tuple[tuple[str, str], str]] = set()
    for op in operations:
        told = {(role.name, tensor.name): _tensor(tensor) for role in op.roles for tensor in role.tensors}
        again = {key for key, text in told.items() if (key, text) in before}
        yield "\n".join(_operation(op, again, colour))
        before.update(told.items())


def _operation(op: Operation, again: Collection[tuple[str, str]], colour: bool) -> Iterator[str]:
    yield f"{_paint(op.name, BOLD, colour)}, {'first to diverge' if op.first else 'follows'}: {_values(op.size)}"
    for role in op.roles:
        new = [tensor for tensor in role.tensors if (role.name, tensor.name) not in again]
        if not new:
            continue
        meaning = f" ({role.meaning})" if role.meaning else ""
        tensors = f"{len(role.tensors)} tensor{'s' * (len(role.tensors) != 1)}"
        yield f"  {_paint(role.name, BOLD, colour)}{meaning}, {tensors}: {role.kinds}"
        width = min(NAME, max(len(tensor.name) for tensor in new))
        for tensor in new:
            yield f"    {tensor.name:<{width}}  {_tensor(tensor)}"
    if again:
        roles = ", ".join(role.name for role in op.roles if any(name == role.name for name, _ in again))
        yield f"  as told above: {_values(len(again))} of {roles}"
    if op.has_copies and len(again) < op.size:
        yield f"  {_paint(COPIES, SOFT, colour)}"


def _values(number: int) -> str:
    return f"{number} value{'s' * (number != 1)}"


def _tensor(tensor: Tensor) -> str:
    first = tensor.first
    kinds = "+".join(dict.fromkeys(d.kind for d in tensor.differences))
    sides = ""
    if first.expected_first and first.observed_first and first.total > 1:
        sides = f"expected {first.expected_first} but got {first.observed_first}"
    return "; ".join(filter(None, [f"{kinds}  {tensor.summary}".rstrip(), tensor.ranks, sides]))


def _first_element(page: FailurePage, colour: bool) -> Iterator[str]:
    """The bits of the first deviating element of all."""
    tensor = page.first
    element = element_of(tensor) if tensor else None
    if tensor is None or element is None:
        return
    where = f"element {list(element.index)} of " if element.index else ""
    yield _paint(f"first difference: {where}{tensor.first.key.role} of {tensor.name}", BOLD, colour)
    for row in element.rows:
        yield f"  {row.side}  {_bits(row, colour)}".rstrip()
    if element.distance:
        yield f"  {element.distance}"


def _bits(row: BitRow, colour: bool) -> str:
    digits = " ".join(_paint(part.digits, PARTS.get(part.name, ""), colour) for part in row.parts)
    return "  ".join(filter(None, [digits, row.number, row.hexadecimal, row.meaning]))


def _error(result: Result) -> Iterator[str]:
    if result.error and result.error.traceback:
        yield from (f"  {line}" for line in result.error.traceback.rstrip().split("\n"))


def _calls(page: FailurePage, colour: bool) -> Iterator[str]:
    if not page.filing.calls:
        if page.filing.reason and page.result.verdict.is_failure:
            yield f"without the library's calls: {page.filing.reason}"
        return
    yield _paint("the library's calls", BOLD, colour)
    for step in page.filing.steps:
        if step.calls:
            yield _paint(f"  # operation {step.op.index}: {step.op.kind}, mesh {step.op.mesh}", SOFT, colour)
            yield from (f"  {line}" for line in step.calls.splitlines())


def _cure(page: FailurePage, colour: bool) -> Iterator[str]:
    """The patch that takes a known defect away."""
    told = page.filing.description
    if told and told.patch:
        yield _paint(f"the cure {told.cure}", BOLD, colour)
        if told.instead:
            yield f"  This is no repair: it {told.instead}"
        yield from (f"  {_paint(line, CHANGES.get(line[:1], ''), colour)}" for line in told.patch.splitlines())


def _commands(page: FailurePage, colour: bool) -> Iterator[str]:
    own = [command for command in page.commands if command.name != "Explain"]
    width = max((len(command.text) for command in own), default=0)
    for command in own:
        yield f"{_paint(command.text.ljust(width), BOLD, colour)}  {command.what}"


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text
