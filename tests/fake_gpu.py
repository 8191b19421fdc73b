"""A GPU that is not there. Its tensors say that they are on cuda:0, are computed on the CPU, and refuse what
CUDA refuses: operations over two devices, numpy, pointers for native code. It notes where the host waits.

So the code for GPUs runs on machines without one, and its results can be compared with the CPU's. CUDA's own
kernels, their speed and the order of streams are not tested by this.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DEVICE, IS_CUDA, IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
DATA, GRAD = Tensor.data.__set__, Tensor.grad.__set__
WAITS = {  # functions that need values on the host, or a size that depends on values
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique,
    Tensor.equal, torch.equal, torch.allclose, Tensor.bincount, torch.bincount, Tensor.__contains__,
    Tensor.unique_consecutive, torch.unique_consecutive,
}  # fmt: skip
FROM_HOST = {torch.tensor, torch.as_tensor, Tensor.new_tensor}  # copies that the host waits for
CROSSING = {
    DATA,
    GRAD,
    torch._has_compatible_shallow_copy_type,
    Tensor.copy_,
    Tensor.view_as,
    Tensor.expand_as,
    Tensor.type_as,
    Tensor.is_set_to,
}


class GpuTensor(Tensor):
    """A tensor on the GPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _call(function, args, kwargs or {})


class GpuParameter(torch.nn.Parameter):
    """A parameter on the GPU."""

    __torch_function__ = GpuTensor.__torch_function__


def on_gpu(value: Any) -> bool:
    """Return whether a value is a tensor on the GPU."""
    return isinstance(value, (GpuTensor, GpuParameter))


class FakeGpu(TorchFunctionMode):
    """Context in which torch has the GPU.

    Attributes:
        waits: places of the package at which the host has waited for it, in order.
    """

    waits: list[str] = []  # of all contexts
    copies: list[tuple[Tensor, Tensor]] = []  # on their way to the host: where to, and of what
    lock = threading.RLock()  # of the copies

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _call(function, args, kwargs or {})


def _waited() -> None:
    """Note a wait, with the place of the package that caused it. Copies have arrived then."""
    frame = sys._getframe()
    while frame is not None and "/drafttrain/" not in frame.f_code.co_filename:
        frame = frame.f_back
    # under a lock: a thread that finds no copy left, or that finds a wait, may read what copies have brought
    with FakeGpu.lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        while FakeGpu.copies:
            goal, source = FakeGpu.copies.pop()
            goal.copy_(source)
        if frame is not None:
            FakeGpu.waits.append(f"{frame.f_code.co_filename.split('/drafttrain/')[-1]}:{frame.f_lineno}")


def _call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one function of torch's."""
    first = args[0] if args else None
    if function in (DEVICE, IS_CUDA, IS_CPU):
        with torch._C.DisableTorchFunctionSubclass():
            real = function(*args)
        return {DEVICE: GPU, IS_CUDA: True, IS_CPU: False}[function] if on_gpu(first) else real
    if function is Tensor.get_device:
        return 0 if on_gpu(first) else -1
    if function is Tensor.__iter__ and on_gpu(first):
        return iter(first.unbind(0))
    if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
        return _move(function, *args, **kwargs)
    if function is Tensor.numpy and kwargs.get("force") and on_gpu(first):
        return first.cpu().numpy(force=True)
    if function in (Tensor.numpy, Tensor.__array__, Tensor.data_ptr) and on_gpu(first):
        raise TypeError(f"Tensor.{function.__name__}: must be of a tensor on the CPU, got one on {GPU}")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_gpu = any(on_gpu(leaf) for leaf in leaves)
    if is_gpu:
        _refuse_two_devices(function, args, leaves)
        if function in WAITS or _indexes_by_mask(function, args):
            _waited()
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type == "cuda" and function in FROM_HOST and not is_gpu:
            _waited()
        is_gpu = device.type == "cuda"
        kwargs = {**kwargs, "device": CPU if is_gpu else device}
    elif is_gpu and function is Tensor.new_tensor:
        _waited()
    with torch._C.DisableTorchFunctionSubclass():
        out = function(*args, **kwargs)
    if function == DATA and on_gpu(args[1]) and not on_gpu(first):  # as `Module.to` moves a parameter
        first.__class__ = GpuParameter if isinstance(first, torch.nn.Parameter) else GpuTensor
    return tree_map(lambda one: _placed(one, is_gpu, args), out)


def _placed(value: Any, is_gpu: bool, args: tuple) -> Any:
    """Return a result as a tensor of its device; one of the arguments stays the same object."""
    if not isinstance(value, Tensor) or any(value is one for one in args) or on_gpu(value) == is_gpu:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(GpuTensor if is_gpu else Tensor)


def _move(function: Callable, tensor: Tensor, *args, **kwargs) -> Tensor:
    device, dtype, flags = kwargs.pop("device", None), kwargs.pop("dtype", None), []
    if function is not Tensor.to:
        device = "cpu" if function is Tensor.cpu else "cuda"
        args = ()
    for one in args:
        if isinstance(one, (str, torch.device)):
            device = one
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, Tensor):
            device, dtype = one.device, one.dtype
        elif isinstance(one, bool):
            flags.append(one)
    kwargs |= dict(zip(("non_blocking", "copy"), flags))
    device = tensor.device if device is None else torch.device(device)
    moves = (device.type == "cuda") != on_gpu(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        out = tensor.to(dtype=tensor.dtype if dtype is None else dtype, **kwargs)
        if device.type not in ("cpu", "cuda"):
            return out.to(device)
        if not moves and out is tensor:
            return tensor
        if moves and out is tensor:
            out = tensor.clone()  # memory of its own
        out = out.as_subclass(GpuTensor if device.type == "cuda" else Tensor)
    if moves and not kwargs.get("non_blocking"):
        _waited()
    elif moves and device.type == "cpu":
        with FakeGpu.lock, torch._C.DisableTorchFunctionSubclass():
            FakeGpu.copies.append((out, out.clone()))
            out.fill_(-(2**30))  # until the host has waited
    return out


def _refuse_two_devices(function: Callable, args: tuple, leaves: list[Tensor]) -> None:
    """Raise as CUDA does if tensors are on two devices. Numbers (tensors without a dimension) may be."""
    if function in CROSSING:
        return
    if function is Tensor.__getitem__ and on_gpu(args[0]):
        return  # indices may be on the CPU
    if function is Tensor.__setitem__:
        target, index, value = args
        picked = [one for one in tree_leaves(index) if isinstance(one, Tensor)]
        if not picked or (
            on_gpu(target) and (not isinstance(value, Tensor) or on_gpu(value) or not value.dim())
        ):
            return
    others = [one for one in leaves if not on_gpu(one) and one.dim() and one.device.type == "cpu"]
    if others:
        shapes = [f"{'cuda' if on_gpu(one) else 'cpu'} {[*one.shape]}" for one in leaves]
        name = getattr(function, "__name__", str(function))
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {', '.join(shapes)}")


def _indexes_by_mask(function: Callable, args: tuple) -> bool:
    if function not in (Tensor.__getitem__, Tensor.__setitem__):
        return False
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in tree_leaves(args[1]))


class _Stream:
    """A stream of the GPU, on which everything happens at once."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def synchronize(self) -> None:
        _waited()

    def wait_stream(self, other: "_Stream") -> None:
        pass


class _Event:
    """An event of the GPU. To wait for it is a wait, unless the host has waited for the GPU since."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.waits = 0

    def record(self, stream: "_Stream | None" = None) -> None:
        self.waits = len(FakeGpu.waits)

    def query(self) -> bool:
        return len(FakeGpu.waits) > self.waits

    def synchronize(self) -> None:
        if not self.query():
            _waited()

    def elapsed_time(self, end: "_Event") -> float:
        return 1.0


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Give torch the GPU, and the functions of `torch.cuda` that the package calls."""
    import pytest

    stands = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: _waited(),
        "Event": _Event,
        "Stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: _Stream(),
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "GPU of the tests",
        "max_memory_allocated": lambda device=None: 1 << 20,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    with pytest.MonkeyPatch.context() as patch, FakeGpu() as gpu:
        for name, stand in stands.items():
            patch.setattr(torch.cuda, name, stand)
        gpu.waits.clear()
        gpu.copies.clear()
        make, run = torch.Generator, threading.Thread.run
        patch.setattr(torch, "Generator", lambda device="cpu": make("cpu"))  # operators run on the CPU

        def run_on_gpu(thread: threading.Thread) -> None:
            with FakeGpu():  # a context holds for one thread
                run(thread)

        patch.setattr(threading.Thread, "run", run_on_gpu)
        yield gpu
