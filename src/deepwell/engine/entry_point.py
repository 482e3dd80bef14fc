"""Tells torch that `torch.compile(model, backend="deepwell")` exists, without loading torch.

An installed Deepwell is found through its entry point in the group that torch reads. For a tree that is only on the
path, `announce` offers the same entry point to `importlib.metadata` by its own protocol: a finder that answers when
somebody asks for distributions and takes no part in imports. Where torch has read the entry points already, the backend
is registered with it directly.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

NAME = "deepwell"
TARGET = "deepwell.engine.torch_backend:deepwell"
_GROUP = "torch_dynamo_backends"
_DISTRIBUTION = "deepwell-torch-backend"
_REGISTRY = "torch._dynamo.backends.registry"


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
    """Make the backend's name known, whichever of torch and Deepwell is imported first."""
    if not any(finder is _EntryPointFinder for finder in sys.meta_path):
        sys.meta_path.append(_EntryPointFinder)
    registry = sys.modules.get(_REGISTRY)
    if registry is not None and NAME not in registry._COMPILER_FNS:
        registry.register_backend(_on_first_use, name=NAME)


def _on_first_use(graph_module: Any, example_inputs: Any, **options: Any) -> Callable[..., Any]:
    from deepwell.engine.torch_backend import deepwell

    return deepwell(graph_module, example_inputs, **options)
