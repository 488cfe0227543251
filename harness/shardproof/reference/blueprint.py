"""The static part of a build: layouts, initial values, masks, and the grid that each parameter's gradients are drawn
from.

All of it follows from the build's parameters, the mesh and the model's catalogue, so that sessions with equal ones
share it. This is the one place where the reference remembers anything from one scenario to the next, beside the layouts
of `placement`. The arrays are read-only, and a session copies what it is going to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardproof import probe
from shardproof.grid import Grid
from shardproof.oracle.inputs import Buffer, Build, Parameter
from shardproof.reference.numerics import DTYPE, Array
from shardproof.reference.placement import LAYOUTS, Catalogue, FlatLayout, Fragment, Index, lay_out
from shardproof.scenario import Mesh


@dataclass(frozen=True)
class Source:
    """Parameters of a flat buffer whose gradients are drawn from one grid. experts: ranks share these parameters out,
    and those that do contribute one gradient between them."""

    names: tuple[str, ...]
    grid: Grid
    experts: bool


@dataclass(frozen=True, eq=False)
class Blueprint:
    """Parameters that pass through the same dtypes, on one tensor-parallel coordinate.

    * alike: one of the parameters, which stands for all in what they have in common: stages, initial dtypes, scaled
      roles, rounding.
    * initial: values at the build over the catalogue, in storage dtype.
    * on_host: which elements the host's kernel steps where it is another one, (S, m).
    * domains: over what a scale is taken, (S, m), 0 for what no optimizer holds; None where nothing is scaled.
    * sources: of the gradients; empty where no parameter has one.
    """

    layout: FlatLayout
    tp_index: int
    alike: Parameter
    initial: Array
    on_host: Array | None
    domains: Index | None
    sources: tuple[Source, ...]


@lru_cache(maxsize=512)
def blueprints(catalogue: Catalogue, build: Build, mesh: Mesh, flat: bool) -> tuple[Blueprint, ...]:
    """All of a build, tensor-parallel coordinate 0 first. flat: parameters lie whole in flat buffers."""
    alike: dict[tuple[object, ...], list[Parameter]] = {}
    for param in build.parameters:
        passes = (param.stages, param.initial, param.bound, param.scaled, param.half_away)
        alike.setdefault(passes, []).append(param)
    return tuple(
        _blueprint(catalogue, build, params, mesh, tp_index, flat)
        for tp_index in range(mesh.tp)
        for params in alike.values()
    )


def _blueprint(
    catalogue: Catalogue, build: Build, params: list[Parameter], mesh: Mesh, tp_index: int, flat: bool
) -> Blueprint:
    own = params[0]
    layout = lay_out(catalogue, tuple(p.fqn for p in params), mesh, tp_index, flat)
    values = _initial(catalogue, build.seed, own.bound, own.initial)
    on_host = domains = None
    if any(p.host is not None for p in build.parameters):
        on_host = _over_shards(layout, {p.fqn: np.frombuffer(p.host, np.bool_) for p in params if p.host is not None})
    if any(p.domains is not None for p in build.parameters):
        numbers = {p.fqn: np.array(p.domains) + 1 for p in params if p.domains is not None}
        domains = _over_shards(layout, numbers).astype(np.int64)
    sources = tuple(_sources(layout, build))
    return Blueprint(layout, tp_index, own, values, on_host, domains, sources)


def values_of(own: Blueprint, number: int) -> Array:
    """The values that a build of another number would have, over the catalogue, in storage dtype."""
    return _initial(own.layout.catalogue, number, own.alike.bound, own.alike.initial)


@lru_cache(maxsize=1024)
def _initial(catalogue: Catalogue, build_seed: int, bound: float, dtypes: tuple[str, ...]) -> Array:
    """The values of all parameters over the catalogue, clipped to the bound and passed through the dtypes."""
    keys = np.concatenate([catalogue.keys[p.fqn] for p in catalogue.params])
    values: Array = np.append(probe.initial_values(keys, build_seed), np.float32(0))
    for param in catalogue.params:
        if param.spec.rare:
            values[catalogue.span(param)] = probe.with_rare(values[catalogue.span(param)], build_seed)
    values = np.clip(values, np.float32(-bound), np.float32(bound))
    for dtype in dtypes:
        values = values.astype(DTYPE[dtype])
    values.setflags(write=False)
    return values


def _over_shards(layout: FlatLayout, tensors: dict[str, Array]) -> Array:
    """Numbers of logical tensors as each rank holds its own, (S, m); zero for all others and for padding."""
    dtype = next((values.dtype for values in tensors.values()), np.dtype(np.bool_))
    logical = np.zeros(layout.catalogue.padding + 1, dtype)
    for slot in layout.slots:
        if slot.param.fqn in tensors:
            logical[layout.catalogue.span(slot.param)] = tensors[slot.param.fqn]
    own: Array = logical[layout.shard_element]
    own.setflags(write=False)
    return own


def _sources(layout: FlatLayout, build: Build) -> Iterator[Source]:
    for experts, names in layout.by_expert:
        by_grid: dict[tuple[Grid, bool], list[str]] = {}
        for name in names:
            if grid := build.by_name[name].gradient:
                by_grid.setdefault((grid, grid.parted), []).append(name)
        for (grid, _), own in by_grid.items():
            yield Source(tuple(own), grid, experts)


@lru_cache(maxsize=LAYOUTS)
def offloaded(
    layouts: tuple[FlatLayout, ...], groups: tuple[tuple[str, ...], ...], fraction: float
) -> tuple[Array, ...]:
    """For each layout of one tensor-parallel coordinate, which of a rank's elements live on the host, (S, m): the first
    `fraction` of each group's elements on each rank, whole fragments, in the groups' order."""
    masks = [np.zeros(layout.order.shape, bool) for layout in layouts]
    owned: dict[Fragment, Array] = {
        f: mask for layout, mask in zip(layouts, masks, strict=True) for f in layout.fragments
    }
    for names in groups:
        place = {name: position for position, name in enumerate(names)}
        members = sorted((f for f in owned if f.slot.param.fqn in place), key=lambda f: place[f.slot.param.fqn])
        budget = np.zeros(layouts[0].mesh.dp_shard)
        for fragment in members:
            budget[fragment.shard] += fraction * fragment.numel
        for fragment in members:
            if budget[fragment.shard] > 0:
                owned[fragment][fragment.shard, fragment.at : fragment.at + fragment.numel] = True
                budget[fragment.shard] -= fragment.numel
    for mask in masks:
        mask.setflags(write=False)
    return tuple(masks)


@lru_cache(maxsize=512)
def initial_buffer(buffer: Buffer, seed: int, build_seed: int) -> Array:
    """A module's buffer as its constructor makes it, in its own dtype and shape."""
    keys = probe.element_keys(buffer.fqn, buffer.shape, seed)
    match buffer.dtype:
        case "int64":
            values: Array = np.zeros(keys.shape, np.int64)
        case "bool":
            values = ((keys ^ np.uint64(build_seed)) & np.uint64(1)).astype(bool)
        case dtype:
            values = probe.initial_values(keys, build_seed).astype(DTYPE[dtype])
    values = values.reshape(buffer.shape)
    values.setflags(write=False)
    return values


@lru_cache(maxsize=4096)
def contributions(
    catalogue: Catalogue,
    names: tuple[str, ...],
    idle: tuple[str, ...],
    step: tuple[int, int],
    ranks: int,
    grid: Grid,
    at: tuple[int, int] = (1, 0),
) -> Array:
    """The gradients that so many ranks contribute to the named parameters over the catalogue, fp32, shape (ranks,
    elements + 1): the sum over a parameter's uses; zero for other parameters, for padding and for those that are idle.

    Args:
        step: iteration and microbatch. at: where the grid is parted, the number of tensor-parallel ranks that have a
            part, and which of them it is.
    """
    total = np.zeros((ranks, catalogue.padding + 1), np.float32)
    drawn = [(name, use) for name in names for use in catalogue.uses[name]]
    if drawn:
        keys = np.concatenate([catalogue.keys[use] for _, use in drawn])
        units = (
            probe.part_units(keys, *step, ranks, at[0], grid)[:, at[1]]
            if grid.parted
            else probe.rank_units(keys, *step, ranks, grid)
        )
        start = 0
        for name, use in drawn:
            own = units[:, start : start + catalogue.keys[use].size]
            start += own.shape[1]
            if name not in idle:
                total[:, catalogue.offset[name] : catalogue.offset[name] + own.shape[1]] += own
    total *= np.float32(grid.unit)
    total.setflags(write=False)
    return total


@lru_cache(maxsize=2048)
def gradients(
    blueprint: Blueprint,
    names: tuple[str, ...],
    idle: tuple[str, ...],
    step: tuple[int, int],
    dp: int,
    expert_parallel: int,
) -> Array:
    """What every data-parallel rank's backward pass adds to a flat buffer, fp32, shape (dp, n).

    Args:
        names: of the parameters that have a gradient. idle: of those whose forward has no part. step: iteration and
            microbatch. expert_parallel: how many ranks share the experts out.
    """
    layout = blueprint.layout
    total = np.zeros((0 if blueprint.sources else dp, layout.element.size), np.float32)
    for source in blueprint.sources:
        ranks = dp // expert_parallel if source.experts else dp
        at = (layout.mesh.tp, blueprint.tp_index) if source.grid.parted else (1, 0)
        own = contributions(layout.catalogue, names, idle, step, ranks, source.grid, at)[:, layout.element]
        own = own if ranks == dp else own.repeat(dp // ranks, axis=0)
        total = np.where(layout.catalogue.belongs_to(source.names, layout.element), own, total) if len(total) else own
    total.setflags(write=False)
    return total
