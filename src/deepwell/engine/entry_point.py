"""Registers Deepwell's names with torch and transformers, without loading either.

`torch.compile(model, backend="deepwell")`: an installed Deepwell is found through its entry point in the group that
torch reads. For a tree that is only on the path, `announce` offers the same entry point to `importlib.metadata` by its
own protocol: a finder that answers when somebody asks for distributions and takes no part in imports. Where torch has
read the entry points already, the backend is registered with it directly.

`model.set_experts_implementation("deepwell")`: transformers has no such protocol. Its registry is a module, and the
name is put into it when that module is loaded, or at once where it is loaded already.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

NAME = "deepwell"
TARGET = "deepwell.engine.torch_backend:deepwell"
_GROUP = "torch_dynamo_backends"
_DISTRIBUTION = "deepwell-torch-backend"
_REGISTRY = "torch._dynamo.backends.registry"
_EXPERTS = "transformers.integrations.moe"


class _ExpertsFinder:
    """A member of sys.meta_path that adds a name to the registry of experts right after that module was loaded."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _EXPERTS:
            return None
        sys.meta_path.remove(_ExpertsFinder)  # once is enough, and what follows asks all other finders
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _register_experts(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register_experts(module: Any) -> None:
    if NAME not in module.ALL_EXPERTS_FUNCTIONS:
        module.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_on_first_use)


def _experts_on_first_use(module: Any, *args: Any, **kwargs: Any) -> Any:
    from deepwell.moe.hugging_face import experts_forward

    return experts_forward(module, *args, **kwargs)


class _EntryPointFinder:
    """A member of sys.meta_path that finds no module and one distribution."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        return None

    @staticmethod
    def find_distributions(context: Any = None) -> Iterator[Any]:
        if getattr(context, "name", None) not in (None, _DISTRIBUTION):
            return
        from importlib.metadata import Distribution

        class Announced(Distribution):
            def read_text(self, filename: str) -> str | None:
                texts = {
                    "METADATA": f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: 0\n",
                    "entry_points.txt": f"[{_GROUP}]\n{NAME} = {TARGET}\n",
                }
                return texts.get(filename)

            def locate_file(self, path: Any) -> Any:
                raise FileNotFoundError(f"{_DISTRIBUTION} has no files: {path}")

        yield Announced()


def announce() -> None:
    """Make the names known, whichever of torch, transformers and Deepwell is imported first."""
    experts = sys.modules.get(_EXPERTS)
    if experts is not None and hasattr(experts, "ALL_EXPERTS_FUNCTIONS"):
        _register_experts(experts)
    elif not any(finder is _ExpertsFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, _ExpertsFinder)
    if not any(finder is _EntryPointFinder for finder in sys.meta_path):
        sys.meta_path.append(_EntryPointFinder)
    registry = sys.modules.get(_REGISTRY)
    if registry is not None and NAME not in registry._COMPILER_FNS:
        registry.register_backend(_on_first_use, name=NAME)


def _on_first_use(graph_module: Any, example_inputs: Any, **options: Any) -> Callable[..., Any]:
    from deepwell.engine.torch_backend import deepwell

    return deepwell(graph_module, example_inputs, **options)
