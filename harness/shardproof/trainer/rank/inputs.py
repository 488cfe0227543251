"""What the model of a trainer was given in a step, so that a step can be told from one that was given other data; and
the gradient that came back to its output, sample by sample, so that a loss can be told from one that weighs them
otherwise, and one whose gradients are set to zero before an optimizer steps.

Whatever a trainer calls its data, they come to a module sooner or later. The first module inside each call of a model
that is given a tensor by position, such as an embedding or a first layer, gets them as they are. Samples are the rows
of that tensor, and of the output the first tensor with as many rows counts.

*Does not see* data that a model computes with before a module gets them, models that `torch.compile` has made, calls
without gradients, as a validation makes, and gradients that are set to zero by hand.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.rank.calls import MOST, UNREAD, digest_of_given, tensors_of
from shardproof.trainer.rank.lines import where_of
from shardproof.trainer.rank.measured import MOST_ELEMENTS, weights_for
from shardproof.trainer.rank.pieces import raw

MOST_SAMPLES = 256
"""Of one call; with more, nothing is kept of each."""

MOST_NUMBERS = 1024
"""Tokens of one call; of more, none is kept."""

LEAST_CLASSES = 3
"""With fewer, any gradient whose elements add up to zero looks like that of a cross-entropy."""

NEAR_TARGET = 1e-3


@dataclass
class Given:
    """One call of a model. digest: of all that its first module was given. rows: of the first tensor of that. samples:
    a digest of each. gradients: of each at the model's output, its size, with a sign; empty until a backward came.
    came: whether one did. zeroed: the line that set what it made to zero before an optimizer stepped. weights: of the
    targets of a cross-entropy, by which the loss weighs each. evaluates: whether the model's `training` is False.
    draws: whether random numbers were drawn in it. elements: of the first tensor that its first module was given.
    numbers: these, if they are whole numbers and not many. padded: what `padding_among` says of the targets."""

    digest: str
    rows: int
    samples: list[str] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    came: bool = False
    zeroed: str = ""
    weights: list[float] = field(default_factory=list)
    padded: list[int] = field(default_factory=list)
    evaluates: bool = False
    draws: bool = False
    elements: int = 0
    numbers: list[int] = field(default_factory=list)


class Inputs:
    """What the first module was given, once for each call of a model since the latest record."""

    def __init__(self) -> None:
        self.given: list[Given] = []
        self._open = 0  # modules that are being called
        self._outermost = 0  # identity of the first of them
        self._random = torch.empty(0)  # the state of torch's generator when the outermost of them was
        self._seen = False  # whether the call of the model has its digest
        self._call: Given | None = None  # that of the model's call, if what it was given is data
        self._used: dict[int, tuple[int, int]] = {}  # marks of the gradients that an optimizer has stepped with latest
        self._waiting: list[Given] = []  # calls whose gradients no optimizer has taken yet
        self._steps = False  # whether an optimizer of torch ever does, so that it is known when

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, inputs are kept."""
        # without `with_kwargs` and `always_call`, of which torch leaves traces behind when a hook is removed
        hooks = [module.register_module_forward_pre_hook(self._begins), module.register_module_forward_hook(self._ends),
                 register_optimizer_step_pre_hook(self._stepped)]  # fmt: skip
        try:
            with _before(Optimizer, "zero_grad", self._zeroed), _before(nn.Module, "zero_grad", self._zeroed):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def record(self, op: int, rank: int) -> Record:
        """The calls so far as a record that is not compared; what follows begins anew."""
        calls = [[one.digest, one.rows, one.samples, one.gradients, one.zeroed if self._steps else "", one.weights,
                  one.evaluates, one.draws, one.elements, one.numbers, one.padded] for one in self.given]  # fmt: skip
        data = json.dumps(calls).encode()
        self.given, self._open, self._seen, self._call = [], 0, False, None  # a module that raised has not ended
        return whole(op, rank, GIVEN, "", "utf8", (len(data),), data)

    def _begins(self, called: nn.Module, args: Any) -> None:
        if not _is_forward():
            return
        if id(called) == self._outermost and self._open and not _is_inside(called):  # it raised, and somebody caught it
            self._open = 0
            self.given = [one for one in self.given if one is not self._call]
            self._waiting = [one for one in self._waiting if one is not self._call]
            self._call = None
        self._seen = self._seen and bool(self._open)
        if not self._open:
            self._random, self._outermost = torch.get_rng_state(), id(called)
        self._open += 1

    def _ends(self, called: nn.Module, args: Any, output: Any) -> None:
        if not _is_forward():
            return
        self._open -= 1
        if not self._seen and len(self.given) < MOST:
            self._look(args, output)
        if self._call and not self._open:
            self._call.evaluates = not called.training
            self._call.draws = not torch.equal(self._random, torch.get_rng_state())
            _follow(self._call, output)
            self._call = None

    def _look(self, args: Any, output: Any) -> None:
        """Keep what a module was given, if it can be read."""
        digest = digest_of_given(args, output)
        if digest == UNREAD:
            return
        self._seen = True
        tensors = [*tensors_of(args)]
        if not any(tensor.requires_grad for tensor in tensors):  # computed from parameters: no data
            rows = tensors[0].shape[0] if tensors[0].ndim else 1
            samples = _samples(tensors[0]) if 0 < rows <= MOST_SAMPLES else []
            self._call = Given(digest, rows, samples, elements=tensors[0].numel(), numbers=_numbers(tensors[0]))
            self.given.append(self._call)
            self._waiting.append(self._call)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps = True
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._used |= {id(each): mark for each in own if (mark := _mark_of_gradient(each))}
        self._waiting = [one for one in self._waiting if not one.came]

    def _zeroed(self, holder: Any) -> None:
        """Keep which calls' gradients are lost, if there are any where they are set to zero."""
        lost = [one for one in self._waiting if one.came]
        new = (mark and mark != self._used.get(id(each)) for each in _parameters(holder)
               for mark in [_mark_of_gradient(each)])  # fmt: skip
        if lost and any(new):  # and not those that an optimizer has stepped with before
            line = where_of(inspect.currentframe())
            for one in lost:
                one.zeroed = line
            self._waiting = [one for one in self._waiting if not one.came]


def _mark_of_gradient(parameter: torch.Tensor) -> tuple[int, int] | None:
    """What changes whenever a backward adds to the gradient of a parameter; None where there is none."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def _samples(tensor: torch.Tensor) -> list[str]:
    """A digest of each row; none of a tensor that cannot be read row by row."""
    try:
        with torch.no_grad():
            return [blake2b(raw(row)[2], digest_size=6).hexdigest() for row in (tensor if tensor.ndim else [tensor])]
    except Exception:  # a tensor of a subclass or of a transform: nothing is said of its samples
        return []


def _numbers(tensor: torch.Tensor) -> list[int]:
    """The elements of a tensor of whole numbers, such as tokens; none of a large one."""
    whole_numbers = tensor.dtype in (torch.int64, torch.int32) and 0 < tensor.numel() <= MOST_NUMBERS
    try:
        with torch.no_grad():
            return tensor.reshape(-1).tolist() if whole_numbers else []
    except Exception:  # as of `_samples`
        return []


def _follow(given: Given, output: Any) -> None:
    """Keep the gradient that comes back to the first output with a row for each sample."""
    try:
        outputs = [one for one in tensors_of(output) if one.requires_grad and one.ndim and one.shape[0] == given.rows]
    except Exception:  # as of `_samples`
        return
    if outputs:
        outputs[0].register_hook(functools.partial(_keep, given, outputs[0].detach()))  # type: ignore[no-untyped-call]


def _keep(given: Given, output: torch.Tensor, gradient: torch.Tensor) -> None:
    given.came = True
    if not given.samples:
        return
    try:
        with torch.no_grad():
            rows = gradient.detach().reshape(given.rows, -1).to(torch.float64)
            signs = (rows * weights_for(rows)).sum(1)
            sizes = (rows.norm(dim=1) * torch.where(signs < 0, -1.0, 1.0)).tolist()
    except Exception:  # as of `_samples`
        return
    given.weights = weights_of_targets(output, gradient)
    given.padded = padding_among(gradient) if given.weights else []
    given.gradients = [one + other for one, other in zip(given.gradients or [0.0] * given.rows, sizes, strict=True)]


LEAST_FILLING = 0.1
"""The least share of targets that is told of as padding."""


def weights_of_targets(output: torch.Tensor, gradient: torch.Tensor) -> list[float]:
    """By what a cross-entropy weighs each of its targets; empty where the loss is none, or one with smoothed labels.

    Its gradient at the logits of a target is the weight times the probabilities, less the weight at the right class.

    Args:
        output: (..., classes). gradient: of the same shape.
    """
    classes = output.shape[-1] if output.ndim > 1 else 0
    if classes < LEAST_CLASSES or output.numel() > MOST_ELEMENTS:
        return []
    try:
        with torch.no_grad():
            own = gradient.reshape(-1, classes).to(torch.float64)
            counted = own.ne(0).any(1)
            own, chances = own[counted], output.reshape(-1, classes)[counted].to(torch.float64).softmax(1)
            right = own.abs().argmax(1, keepdim=True)
            weights = -own.gather(1, right) / (1 - chances.gather(1, right))
            expected = weights * chances
            expected.scatter_add_(1, right, -weights)
            fits = (own - expected).abs().amax(1) <= NEAR_TARGET * own.abs().amax(1)
            return weights[:, 0].tolist() if len(own) and bool(fits.all()) else []
    except Exception:  # as of `_samples`
        return []


def padding_among(gradient: torch.Tensor) -> list[int]:
    """The class that fills up the ends of rows among the targets of a cross-entropy, how many targets it is, and of how
    many; empty where some targets have no weight already, or where no class looks like a filling: one that ends at
    least half of the rows, each as far as its own length asks, and stands nowhere else.

    Args:
        gradient: (rows, places, classes), at the logits.
    """
    if gradient.ndim != len(("rows", "places", "classes")) or not gradient.ne(0).any(-1).all():
        return []
    with torch.no_grad():
        right = gradient.abs().argmax(-1)
        filling = right[:, -1].mode().values
        runs = right.eq(filling).flip(1).cumprod(1).sum(1)
        number, lengths = int(runs.sum()), set(runs.tolist())
        elsewhere = int(right.eq(filling).sum()) != number
    few = int((runs > 1).sum()) * 2 < len(runs) or number < right.numel() * LEAST_FILLING
    return [] if elsewhere or few or len(lengths) < 2 else [int(filling), number, right.numel()]


def _is_forward() -> bool:
    """Whether a module is called by the trainer to train, and neither traced nor computed anew in a backward."""
    traced = torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1
    return torch.is_grad_enabled() and not traced


def _is_inside(called: nn.Module) -> bool:
    """Whether a call of a module is still running, as of one that calls itself: what Python runs below the one that
    begins has it as its own first name, in a file that is not torch's machinery of modules."""
    frame = inspect.currentframe()
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        machinery = frame.f_code.co_filename in (__file__, module.__file__)
        if first and not machinery and frame.f_locals.get(first[0]) is called:
            return True
        frame = frame.f_back
    return False


def _parameters(holder: Any) -> Iterator[torch.Tensor]:
    if isinstance(holder, nn.Module):
        yield from holder.parameters()
    else:
        yield from (parameter for group in holder.param_groups for parameter in group["params"])


@contextmanager
def _before(kind: type, name: str, told: Callable[[Any], None]) -> Iterator[None]:
    """Inside, a method of a class and of those that do not write their own tells what it is called on, first."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        told(self)
        return method(self, *args, **kwargs)

    setattr(kind, name, called)
    try:
        yield
    finally:
        setattr(kind, name, method)
