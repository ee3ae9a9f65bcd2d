"""Tensor subclasses that torch can take apart, stored as named parts and a context.

The class is stored as a label, which is never imported: a label is rebuilt only by a class that
the program itself registered.
"""

from typing import Any, Final

import torch

from fpformat.arguments import check_kind
from fpformat.errors import PlanError
from fpformat_io.torch.forked import without_pool

# The one registry of the process, as the classes are: what a label means is the same everywhere.
_REGISTERED: Final[dict[str, type[torch.Tensor]]] = {}


def label_of(cls: type) -> str:
    """Return the label under which a class is stored."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_subclass(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    """Allow `load` to rebuild tensors of a class; usable as a decorator.

    Args:
        cls: A subclass of `torch.Tensor` with ``__tensor_flatten__`` and
            ``__tensor_unflatten__``.

    Returns:
        The class.

    Raises:
        PlanError: It is no class, or one that cannot be taken apart.
    """
    check_kind("cls", cls, type, "a tensor class with __tensor_flatten__ and its inverse")
    if not (issubclass(cls, torch.Tensor) and is_flattenable(cls)):
        raise PlanError(f"{cls!r} is no tensor class with __tensor_flatten__ and its inverse")
    _REGISTERED[label_of(cls)] = cls
    return cls


def is_flattenable(cls: type) -> bool:
    """Return whether tensors of a class can be taken apart and put together."""
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


@without_pool
def take_apart(tensor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts by name, and what else is needed to rebuild the tensor."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    envelope = {
        "context": context,
        "size": torch.Size(tensor.size()),
        "stride": tuple(tensor.stride()),
        "requires_grad": bool(tensor.requires_grad),
        "parameter": isinstance(tensor, torch.nn.Parameter),
    }
    return parts, envelope


@without_pool
def put_together(label: str, envelope: Any, parts: dict[str, Any]) -> Any:
    """Rebuild a tensor of a registered class.

    Raises:
        PlanError: No class is registered under the label, or what is stored does not fit it.
    """
    cls: Any = _REGISTERED.get(label)
    if cls is None:
        how = f"import the class and call fpformat_io.torch.register_subclass({label})"
        raise PlanError(f"a tensor of class {label!r} is stored, which is not registered: {how}")
    try:
        tensor = cls.__tensor_unflatten__(
            parts, envelope["context"], envelope["size"], envelope["stride"]
        )
        if envelope["parameter"]:
            return torch.nn.Parameter(tensor, requires_grad=envelope["requires_grad"])
        return tensor.requires_grad_(envelope["requires_grad"])
    except Exception as error:
        raise PlanError(f"a stored tensor of class {label!r} does not fit it: {error}") from error
