"""The one reader of FX nodes: which op a call is, its arguments by name, and who writes into whose memory.

Graphs arrive in three dialects (torch functions and methods from Dynamo, aten overloads from export, a mixture from
recording), and `x * y` is operator.mul, torch.mul or the method "mul". `op_of` gives each call one name, which is
torch's; `arguments` gives what it was called with by torch's names. Capture and the engine's passes read nodes here.

Two calls have one name only where they compute the same from the same arguments:
- a call that writes is another op: "add_" for `x += y` and `x.add_(y)`, "relu_" for `relu(x, inplace=True)`, "mul.out";
- "to" is a cast between floating-point dtypes, or to the dtype that is there; to integers or bool it is "convert";
- a function of another library has its namespace: "transformers::grouped_mm_fallback".

Modules are not called in these graphs: Dynamo, export and the recorder all write out what their forward does.
"""

from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Names of functions, methods, operators and aten ops that stand for an op of another name with the same arguments.
_SPELLINGS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg",
    "_softmax": "softmax", "mm": "matmul", "bmm": "matmul", "concat": "cat", "concatenate": "cat", "absolute": "abs",
    "swapaxes": "transpose", "swapdims": "transpose", "clip": "clamp", "_grouped_mm": "grouped_mm",
    "split_with_sizes": "split", "_unsafe_view": "view", "floor_divide": "floordiv", "moveaxis": "movedim",
    "convolution": "conv", "conv1d": "conv", "conv2d": "conv", "conv3d": "conv", "greater_equal": "ge",
}  # fmt: skip
# The same where the arguments differ: (op, its arguments in the order that this one takes them, what the name says).
_SPECIAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "square": ("pow", "input", {"exponent": 2}),
    "rsub": ("sub", "other input", {}),
    "clamp_min": ("clamp", "input min", {}),
    "clamp_max": ("clamp", "input max", {}),
    "hardtanh": ("clamp", "input min max inplace", {}),
}
_CASTS = {
    "to": None, "_to_copy": None, "type": None, "type_as": None,
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
# A call writes if its name ends in an underscore, unless it is a plain one, or if it is one of these operators.
_IN_PLACE_OPERATORS = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior", "ixor", "imatmul"}
_PLAIN_UNDERSCORE = {"and_", "or_", "not_", "xor_"}

CHANGED = "deepwell_changed"  # on a node: see `mark_changed`
GRAD_MODE = "deepwell_grad_mode"  # on a node of a graph that sets it: whether autograd records here

AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)  # its borders in a graph

GROUPED_FALLBACK = "transformers::grouped_mm_fallback"  # Hugging Face's, for dtypes that torch's does not take

# The arguments of an op by position, behind a bar those that torch takes by name alone.
_ARGUMENTS = {
    op: arguments
    for ops, arguments in (
        ("neg abs sqrt rsqrt tanh erf sigmoid contiguous t", "input"),
        ("mul floordiv ge matmul", "input other"),
        ("add sub", "input other | alpha"),
        ("div", "input other | rounding_mode"),
        ("pow", "input exponent"),
        ("relu relu6 silu mish selu hardswish hardsigmoid", "input inplace"),
        ("elu celu", "input alpha inplace"),
        ("leaky_relu", "input negative_slope inplace"),
        ("threshold", "input threshold value inplace"),
        ("gelu", "input | approximate"),
        ("mean sum", "input dim keepdim | dtype"),
        ("topk", "input k dim largest sorted"),
        ("addmm", "input mat1 mat2 | beta alpha"),
        ("linear conv", "input weight bias"),
        ("grouped_mm", "input weight offs bias out_dtype"),
        (GROUPED_FALLBACK, "input weight offs"),
        ("embedding", "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"),
        ("rms_norm", "input normalized_shape weight eps"),
        ("layer_norm", "input normalized_shape weight bias eps"),
        ("dropout", "input p training inplace"),
        ("masked_fill", "input mask value"),
        ("scaled_dot_product_attention", "query key value attn_mask dropout_p is_causal | scale enable_gqa"),
        ("cross_entropy", "input target weight size_average ignore_index reduce reduction label_smoothing"),
        ("cross_entropy_loss", "input target weight reduction ignore_index label_smoothing"),
        ("nll_loss", "input target weight"),
        (
            "multi_head_attention_forward",
            "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
            "dropout_p out_proj_weight out_proj_bias",
        ),
        ("getitem", "input index"),
        ("view reshape expand", "input size"),
        ("permute", "input dims"),
        ("flatten", "input start_dim end_dim"),
        ("unsqueeze", "input dim"),
        ("repeat_interleave", "input repeats dim"),
        ("transpose", "input dim0 dim1"),
        ("chunk", "input chunks dim"),
        ("split", "input sizes dim"),
        ("cat stack", "tensors dim"),
        ("scatter", "input dim index src"),
        ("full_like", "input fill_value"),
        ("repeat", "input repeats"),
    )
    for op in ops.split()
}
_WEIGHT_FIRST = "weight input padding_idx scale_grad_by_freq sparse"  # torch.embedding and aten's
# torch's other names of an argument: aten's, NumPy's, which torch takes too, and those of single functions.
_OTHER_NAMES = {
    "self": "input", "x": "input", "a": "input", "x1": "input", "x2": "other", "axis": "dim", "keepdims": "keepdim",
    "axis0": "dim0", "axis1": "dim1", "min_val": "min", "max_val": "max", "shape": "size", "split_size": "sizes",
    "split_sizes": "sizes", "split_size_or_sections": "sizes",
}  # fmt: skip
_OTHER_NAMES_OF = {
    "rsub": {"input": "other", "self": "other", "other": "input"},
    "matmul": {"mat2": "other"},
    "embedding": {"indices": "input"},
    "grouped_mm": {"mat2": "weight", "mat_a": "input", "mat_b": "weight"},
}
# Methods that take a sequence as so many arguments: `x.view(2, 3)`.
_SPREAD = {"view", "reshape", "expand", "permute", "repeat"}
# Ops without effects, so that one that nobody reads can go and others can move.
PURE = {
    "add", "sub", "mul", "div", "pow", "neg", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "relu", "silu", "gelu", "mean",
    "matmul", "addmm", "linear", "embedding", "rms_norm", "layer_norm", "dropout", "scaled_dot_product_attention",
    "cross_entropy", "getitem", "to", "convert", "view", "reshape", "expand", "permute", "flatten", "contiguous",
    "unsqueeze", "repeat_interleave", "transpose", "t", "chunk", "split", "cat", "stack",
}  # fmt: skip

# Ops that describe the same numbers in the same order by another shape or layout.
SHAPE_OPS = {"view", "reshape", "flatten", "contiguous"}
# Ops whose result lies in their first argument's memory, or may.
VIEWS = SHAPE_OPS | {
    "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze", "unflatten", "slice", "select", "narrow",
    "chunk", "split", "tensor_split", "unbind", "t", "T", "movedim", "view_as", "reshape_as", "getattr", "diagonal",
    "detach", "alias", "view_as_real", "view_as_complex", "view_dtype",
}  # fmt: skip


def op_of(node: Any) -> str:
    """The op that a node calls, "" for what is no call. The top of this file says what a name means."""
    return f"{_op_of(node)} (changed)" if is_changed(node) else _op_of(node)


def _op_of(node: Any) -> str:
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    name, is_write = _name(node.target)
    if name in _CASTS and not isinstance(node.target, type):
        return _cast(node, name)
    if name == "getattr" and node.args[1] in ("T", "mT"):
        return "T" if node.args[1] == "T" else "transpose"
    if name == "view" and isinstance(node.args[-1], torch.dtype):
        return "view_dtype"
    op = _SPECIAL[name][0] if name in _SPECIAL else _SPELLINGS.get(name, name)
    if node.kwargs.get("out") is not None:
        return f"{op}.out"
    return f"{op}_" if is_write or _given(node, name, op).get("inplace") else op


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a node's op is called with, by torch's names; those that are not given are not in it."""
    name, _ = _name(node.target)
    op = _SPECIAL[name][0] if name in _SPECIAL else _SPELLINGS.get(name, name)
    given = _given(node, name, op)
    if name in _SPECIAL:
        given |= _SPECIAL[name][2]
    if name == "getattr" and node.args[1] == "mT":
        given = {"input": node.args[0], "dim0": -2, "dim1": -1}
    padding = given.get("padding_idx")  # a node where the number is open, as a compiled function's may be
    if op == "embedding" and _is_weight_first(node) and isinstance(padding, int) and padding < 0:
        given["padding_idx"] = None  # there any negative index means none, elsewhere it counts from the end
    return given


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """One argument by torch's name of it, however it was given."""
    return arguments(node).get(name, default)


def without_marks(op: str) -> str:
    """The name of an op without its namespace and the mark of a write: what it computes, wherever that goes."""
    name = op.rpartition("::")[2].removesuffix(".out")
    return name.removesuffix("_") if name not in _PLAIN_UNDERSCORE else name


def _name(target: Any) -> tuple[str, bool]:
    """The name that a call has in its dialect, without the mark of a write, and whether it had one."""
    if isinstance(target, str):
        space, name = "torch", target
    elif isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        qualified = target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
        space, _, name = str(qualified).partition("::")
    else:
        space = str(getattr(target, "__module__", None) or "torch").partition(".")[0]
        name = str(getattr(target, "__name__", target))
    if space not in ("torch", "aten", "prims", "_operator", "builtins", "math"):
        return f"{space}::{name}", False
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    if name in _IN_PLACE_OPERATORS:
        return name[1:], True
    if name.endswith("_") and name not in _PLAIN_UNDERSCORE:
        return name[:-1], True
    return name, False


def _given(node: fx.Node, name: str, op: str) -> dict[str, Any]:
    """The arguments of a call under torch's names."""
    args = node.args
    if op in _SPREAD and node.op == "call_method" and len(args) > 1 and not isinstance(args[1], list | tuple):
        args = (args[0], args[1:])
    others = _OTHER_NAMES_OF.get(name) or _OTHER_NAMES_OF.get(op, {})
    given = dict(zip(_positions(node, name, op), args, strict=False))
    return given | {others.get(key, _OTHER_NAMES.get(key, key)): value for key, value in node.kwargs.items()}


def _positions(node: fx.Node, name: str, op: str) -> list[str]:
    """Which arguments a call takes by position."""
    if name in _SPECIAL:
        return _SPECIAL[name][1].split()
    if op == "embedding" and _is_weight_first(node):
        return _WEIGHT_FIRST.split()
    if op in ("add", "sub") and len(node.args) == 3:
        return ["input", "alpha", "other"]  # an old form that torch still takes
    return _ARGUMENTS.get(op, "").partition("|")[0].split()


def _is_weight_first(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") != "torch.nn.functional"


def _cast(node: fx.Node, name: str) -> str:
    """ "to" where a cast keeps the numbers up to rounding, "convert" where it makes others of them."""
    before, after = value_of(node.args[0]), value_of(node)
    spelled = [value for value in (*node.args[1:], node.kwargs.get("dtype")) if isinstance(value, torch.dtype)]
    dtype = after.dtype if after is not None else next(iter(spelled), _CASTS[name])
    if before is not None and before.dtype == dtype:
        return "to"
    is_float = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    loses_a_part = before is not None and before.dtype.is_complex and is_float and not dtype.is_complex
    return "to" if is_float and not loses_a_part else "convert"


def give_operands_by_position(graph: fx.Graph) -> None:
    """Turn `f(input=x, weight=w)` into `f(x, w)`, so that passes find operands in one place."""
    for node in graph.nodes:
        op = op_of(node)
        if not node.kwargs or op in _SPREAD or isinstance(node.target, torch._ops.OpOverload):
            continue
        name, _ = _name(node.target)
        given = _given(node, name, without_marks(op) if "::" not in op else op)
        others = _OTHER_NAMES_OF.get(name) or _OTHER_NAMES_OF.get(op, {})
        for position in _positions(node, name, op)[len(node.args) :]:
            if position not in given:
                break
            node.args = (*node.args, given[position])
            kept = {key: v for key, v in node.kwargs.items() if others.get(key, _OTHER_NAMES.get(key, key)) != position}
            node.kwargs = kept


# ---- values ----


def value_of(node: Any) -> Any:
    """The fake tensor that stands for a node's value, None where there is none; export keeps some under another key.

    There is none of what no kernel takes: a tensor inside `torch.vmap` or `torch.func.grad`, which hides dimensions, a
    subclass that holds others (DTensor, a nested tensor) and a sparse one.
    """
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) and _is_plain(value) else None


def _is_plain(value: torch.Tensor) -> bool:
    is_wrapper = is_functorch_wrapped_tensor(value) or is_traceable_wrapper_subclass(value)
    return not is_wrapper and value.layout is torch.strided


def transposed(node: Any) -> fx.Node | None:
    """The matrix M where the node is M.T in one of its spellings, else None."""
    if op_of(node) not in ("t", "T", "transpose") or value_of(node) is None or value_of(node).dim() != 2:
        return None
    is_swap = op_of(node) != "transpose" or _swapped(node) in ({0, 1}, {-2, -1})
    return node.args[0] if is_swap else None


def _swapped(node: fx.Node) -> set[Any]:
    return {argument(node, "dim0"), argument(node, "dim1")}


def other_operand(node: fx.Node, one: fx.Node) -> Any:
    """The other factor or summand of a two-operand node."""
    return node.args[1] if node.args[0] is one else node.args[0]


def multiplies(node: fx.Node, factor: fx.Node) -> bool:
    """Whether a node multiplies by this factor, and writes nowhere but into the factor's own memory."""
    return op_of(node) == "mul" or (op_of(node) == "mul_" and node.args[0] is factor)


def skip_casts(node: Any) -> Any:
    """What was cast, the node itself where it is no cast."""
    while op_of(node) == "to" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_widened(node: Any) -> bool:
    """Whether a node is a cast to float32 that keeps every number: what reads it may read what was cast."""
    before, after = (value_of(node.args[0]), value_of(node)) if op_of(node) == "to" else (None, None)
    wide = (torch.bfloat16, torch.float16, torch.float32)
    return before is not None and after is not None and after.dtype is torch.float32 and before.dtype in wide


def skip_widening(node: Any) -> Any:
    """What was cast to float32, the node itself where it is another: a cast to bf16 rounds, and is computed."""
    while is_widened(node):
        node = node.args[0]
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The single user of a node, None where there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


# ---- products with a weight ----


def linear_parts(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """(x, weight, bias, whether the weight is [K, N]) where the node is a linear, else None."""
    op = _op_of(node)
    if op not in ("linear", "addmm", "matmul"):
        return None
    given = arguments(node)
    if op == "linear":
        return given["input"], given.get("weight"), given.get("bias"), False
    if op == "addmm":
        is_sum = len(node.args) <= 3 and given.get("alpha", 1) == given.get("beta", 1) == 1
        is_row = value_of(given["input"]) is not None and value_of(given["input"]).dim() == 1
        return (given["mat1"], given["mat2"], given["input"], True) if is_sum and is_row else None
    x, right = given["input"], given["other"]
    weight = transposed(right)
    return (x, weight, None, False) if weight is not None else (x, right, None, True)


def is_grouped_product(target: Any) -> bool:
    """Whether a function is torch's product of rows sorted by group, or Hugging Face's stand-in for it."""
    return _name(target)[0] in ("grouped_mm", "_grouped_mm", GROUPED_FALLBACK)


def grouped_parts(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """(x, weight, offs, whether the weight is [E, K, N]) where the node is a grouped product of 2D rows, else None.

    A batch of products has no `offs`: x is [E, T, K].
    """
    is_batch = _op_of(node) == "matmul"
    if not is_batch and not is_grouped_product(node.target):
        return None
    given = arguments(node)
    x, right, offs = given["input"], given["other" if is_batch else "weight"], given.get("offs")
    x_value, value = value_of(x), value_of(right)
    if x_value is None or value is None or (x_value.dim(), value.dim()) != (3 if is_batch else 2, 3):
        return None
    if (offs is None) != is_batch or (is_batch and not _are_as_many(x_value.shape[0], value.shape[0])):
        return None
    if given.get("bias") is not None or given.get("out_dtype") not in (None, x_value.dtype):
        return None
    is_transposed = op_of(right) == "transpose" and _swapped(right) in ({-2, -1}, {1, 2})
    return x, right.args[0] if is_transposed else right, offs, not is_transposed


def _are_as_many(batch: Any, experts: Any) -> bool:
    """Whether both sizes are fixed and equal: an open one may be one of many that a product is repeated for."""
    return isinstance(batch, int) and isinstance(experts, int) and batch == experts


# ---- memory ----


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes into: `x.add_(y)`, `x += y`, `x[i] = y`, `f(x, inplace=True)`, `f(x, out=y)`."""
    op = _op_of(node)
    targets: list[Any] = [node.kwargs.get("out")]
    if op == "setitem" or (op.endswith("_") and op not in _PLAIN_UNDERSCORE):
        targets += node.args[:1] or [argument(node, "input")]
    if op == "embedding" and argument(node, "max_norm") is not None:
        targets.append(argument(node, "weight"))
    if isinstance(node.target, torch._ops.OpOverload):
        for i, operand in enumerate(node.target._schema.arguments):
            if operand.alias_info is not None and operand.alias_info.is_write:
                targets.append(node.args[i] if i < len(node.args) else node.kwargs.get(operand.name))
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(targets, found.setdefault)
    return list(found)


def memory_of(node: Any) -> Any:
    """The key of a tensor's memory: that of the fake tensor, or where there is none what is viewed."""
    while isinstance(node, fx.Node):
        value = value_of(node)
        if value is not None:
            return value.untyped_storage()._cdata
        source = next(iter(written_by(node)), None) or _viewed(node)
        if source is None:
            break
        node = source
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node in whose memory a node's result lies by what its op is."""
    op = _op_of(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not (op in VIEWS or op == "getitem"):
        return None
    if op == "getitem" and (has_index_tensor(node) or (value_of(source) is None and _op_of(source) not in VIEWS)):
        return None  # rows are copied, or it is one of several results of a call: the indices of a top-k
    return source


def has_index_tensor(node: fx.Node) -> bool:
    """Whether an indexing copies rows by a tensor of indices, and so is no view."""
    index = node.args[1] if len(node.args) > 1 else None
    return any(isinstance(entry, fx.Node) for entry in (index if isinstance(index, tuple) else (index,)))


def mark_changed(graph: fx.Graph) -> None:
    """Mark tensors that are written into and read after that: they are not what their op computed, or learn otherwise.

    `op_of` gives them a name that no pattern has; a product with a weight stays one, whatever becomes of its result.
    """
    writes = Writes(graph)
    for node in graph.nodes if writes.memory else ():
        if node.users and node.op in ("call_function", "call_method") and writes.between_readers(node):
            node.meta[CHANGED] = True
    _mark_cut(graph)


def _mark_cut(graph: fx.Graph) -> None:
    """Mark what `torch.no_grad` cuts off from a gradient: fused with what follows, it would get one.

    A graph that is all under no_grad stays as it is.
    """
    outside: list[bool] = [torch.is_grad_enabled()]
    cut: list[fx.Node] = []
    learns = False
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            outside[-1] = bool(node.args[0])
        elif node.target is torch.autograd.grad_mode._enter_inference_mode:
            outside.append(outside[-1] and not node.args[0])
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            outside.pop()
        elif node.op in ("call_function", "call_method"):
            node.meta[GRAD_MODE] = outside[-1]
            if outside[-1]:
                learns = learns or _needs_gradient(node)
            elif any(map(_needs_gradient, node.all_input_nodes)) and not _needs_gradient(node):
                cut.append(node)
    for node in cut if learns else ():
        node.meta[CHANGED] = True


def _needs_gradient(node: fx.Node) -> bool:
    found = node.meta.get("example_value")
    values = found if isinstance(found, tuple | list) else (found,)
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def is_changed(node: Any) -> bool:
    return isinstance(node, fx.Node) and CHANGED in node.meta


class Writes:
    """Where a graph writes into memory that is there already: `x.mul_(2)`, `x[0] = y`, also through views.

    A pass that lets an op read a tensor earlier or later than the model did asks whether it is another one by then.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order: dict[fx.Node, int] = {}
        self._places: dict[Any, list[int]] = {}
        for place, node in enumerate(graph.nodes):
            self._order[node] = place
            for target in written_by(node):
                self._places.setdefault(memory_of(target), []).append(place)

    def between(self, tensor: Any, first: fx.Node, last: fx.Node | None = None) -> bool:
        """Whether a tensor's memory is written after one node and before another, or before the end.

        A node that a pass put in has no place of its own here: it counts as the graph's begin or end.
        """
        places = self._places.get(memory_of(tensor), ())
        begin, end = self._order.get(first, -1), len(self._order)
        return any(begin < place < (end if last is None else self._order.get(last, end)) for place in places)

    def while_read(self, tensor: fx.Node, last: fx.Node) -> bool:
        """Whether a tensor's memory is written between its first reader and a node."""
        return self.between(tensor, min(tensor.users, key=lambda node: self._order.get(node, -1)), last)

    def between_readers(self, tensor: fx.Node) -> bool:
        """Whether a tensor's memory is written after it was made and before its last reader."""
        return self.between(tensor, tensor, max(tensor.users, key=lambda node: self._order.get(node, -1)))

    def spoils(self, made: fx.Node, *kept: Any) -> bool:
        """Whether an op in the place of a node would keep a tensor for its gradient that is written later on.

        Autograd refuses such a gradient; what the model wrote may keep other tensors, and have one.
        """
        value = value_of(made)
        return value is not None and value.requires_grad and any(self.between(tensor, made) for tensor in kept)

    @property
    def memory(self) -> set[Any]:
        """All that is written at some place."""
        return set(self._places)
