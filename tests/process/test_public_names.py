"""What `import counterpoint` offers: names that stay what they are, whatever else was imported."""

import pkgutil
from importlib import import_module
from types import ModuleType

import pytest

import counterpoint
import counterpoint.collectives


def test_every_public_name_can_be_loaded() -> None:
    missing = [name for name in counterpoint.__all__ if not hasattr(counterpoint, name)]
    assert missing == []


def test_no_function_has_the_name_of_a_module() -> None:
    """A package of the same name would take the function's place as soon as it is imported."""
    modules = {module.name for module in pkgutil.iter_modules(counterpoint.__path__)}
    names = {
        name for name in modules & {*counterpoint.__all__} if not isinstance(getattr(counterpoint, name), ModuleType)
    }
    assert names == set()


@pytest.mark.parametrize(
    ("name", "module"), [("ddp", "ddp"), ("expert_parallel", "expert"), ("tensor_parallel", "tensor")]
)
def test_a_public_module_can_be_imported(name: str, module: str) -> None:
    """It is the one that has the code, not a copy of it."""
    assert import_module(f"counterpoint.{name}") is import_module(f"counterpoint.parallel.{module}")


def test_a_room_that_loads_lazily_refuses_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Conductor'"):
        counterpoint.collectives.Conductor  # noqa: B018
