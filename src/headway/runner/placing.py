"""Where each tensor of a checkpoint goes: the one check that a checkpoint makes up the parameters of a spec.

Knows neither files nor what becomes of a tensor: packed for the CPU (`weights`), copied to a device (`cuda.weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from headway.errors import ModelFormatError
from headway.models.params import Parameter, is_ignored
from headway.models.registry import parameters
from headway.models.spec import ModelSpec


class Shaped(Protocol):
    """A tensor of any kind."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Kind = TypeVar("Kind", bound=Shaped)


class Placed(NamedTuple, Generic[Kind]):
    """A tensor that is a part of a parameter, from row `start` on."""

    param: Parameter
    part: int  # its number
    start: int
    tensor: Kind
    is_global_order: bool  # with it every part of the parameter has come


def place_tensors(tensors: Iterable[tuple[str, Kind]], spec: ModelSpec) -> Iterator[Placed[Kind]]:
    """Each tensor with its place, in the order in which they come; refuses what does not make up the spec."""
    places = {part.source: (param, index) for param in parameters(spec) for index, part in enumerate(param.parts)}
    missing = dict.fromkeys(places)
    for source, tensor in tensors:
        if source not in places:
            if is_ignored(source, spec):
                continue
            raise ModelFormatError(f"the model has a tensor {source!r} that a {spec.family} model has no place for")
        if source not in missing:
            raise ModelFormatError(f"the model has the tensor {source!r} twice")
        del missing[source]
        param, index = places[source]
        got, shape = tuple(tensor.shape), param.part_shape(param.parts[index])
        if got != shape:
            asked = f"the model's config asks for {list(shape)}"
            raise ModelFormatError(f"the tensor {source!r} has shape {list(got)}; {asked}")
        start = sum(part.rows for part in param.parts[:index])
        is_global_order = not any(part.source in missing for part in param.parts)
        yield Placed(param, index, start, tensor, is_global_order)
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise ModelFormatError(f"the model lacks {len(missing)} of its tensors, among them {names}; is it complete?")
