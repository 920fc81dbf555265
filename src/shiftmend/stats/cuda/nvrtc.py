"""CUDA C compiled at run time, by the compiler that torch carries for its own use: no toolkit needs to be installed."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch
from torch import Tensor

Argument = Tensor | int | float | None


_UNFIT = (200, 209, 218, 222, 223)
"""What the driver says of code that is not for it or for its GPU: invalid image, no binary, PTX it does not know."""


class CompilationError(RuntimeError):
    """There is no compiler, it refused the source, or what it made is not for this driver."""


class DriverError(RuntimeError):
    """CUDA refused to load or to run a kernel, perhaps for something that went wrong before."""


class Kernels:
    """The functions of one source, compiled for one device."""

    def __init__(self, source: str, options: Sequence[str], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self.device = device
        binary = _compiled(source, (*options, f"--gpu-architecture=sm_{major}{minor}"))
        self._module = c_void_p()
        self._functions: dict[str, c_void_p] = {}
        with torch.cuda.device(device):
            _hold_context(device)
            with _also_while_capturing():
                status = _library().cuModuleLoadData(byref(self._module), binary)
        if status in _UNFIT:
            raise CompilationError(f"the driver does not take what the compiler made: {_message(status)}")
        _check(status)

    def launch(self, name: str, grid: tuple[int, int], block: tuple[int, int], *arguments: Argument) -> None:
        """Queue a function on the current stream; whole numbers are passed as int, others as float."""
        held = [self._as_c(argument) for argument in arguments]
        pointers = (c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        with torch.cuda.device(self.device):
            _hold_context(self.device)
            function = self._functions.get(name) or self._found(name)
            stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            _check(_library().cuLaunchKernel(function, *grid, 1, *block, 1, 0, stream, pointers, None))

    def _found(self, name: str) -> c_void_p:
        function = c_void_p()
        with _also_while_capturing():
            _check(_library().cuModuleGetFunction(byref(function), self._module, name.encode()))
        self._functions[name] = function
        return function

    def _as_c(self, argument: Argument) -> c_void_p | c_int | c_float:
        match argument:
            case Tensor():
                if argument.device != self.device or not argument.is_contiguous():
                    raise ValueError(f"a kernel for {self.device} takes contiguous tensors there: {argument.shape}")
                return c_void_p(argument.data_ptr())
            case None:
                return c_void_p()
            case int():
                if not -(1 << 31) <= argument < 1 << 31:
                    raise ValueError(f"{argument} does not fit into 32 bits")
                return c_int(argument)
        return c_float(argument)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU: how many blocks it can work on at once is a multiple of it."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiler and driver: what torch's own library is linked against is found through it."""
    if torch.version.cuda is None or sys.platform == "win32":
        raise CompilationError("this torch has no CUDA compiler")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        for name in ("nvrtcCompileProgram", "nvrtcGetCUBIN", "cuLaunchKernel", "cuModuleLoadData"):
            getattr(library, name)
    except (OSError, AttributeError) as error:
        raise CompilationError(f"the CUDA compiler of torch cannot be loaded: {error}") from error
    library.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return library


def _compiled(source: str, options: Sequence[str]) -> bytes:
    library, program = _library(), c_void_p()
    _check_compiler(library.nvrtcCreateProgram(byref(program), source.encode(), b"shiftmend.cu", 0, None, None))
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _text(program, "ProgramLog").rstrip(b"\0").decode().strip()
            raise CompilationError(f"the kernels do not compile:\n{log}")
        return _text(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _text(program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    _check_compiler(getattr(_library(), f"nvrtcGet{what}Size")(program, byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_compiler(getattr(_library(), f"nvrtcGet{what}")(program, text))
    return text.raw


@contextmanager
def _also_while_capturing() -> Iterator[None]:
    """A graph that is being captured forbids what might wait for the device, such as loading code, but to who asks."""
    mode = c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED, of this thread; exchanged for the one before
    _check(_library().cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        _check(_library().cuThreadExchangeStreamCaptureMode(byref(mode)))


def _hold_context(device: torch.device) -> None:
    """A thread that has launched nothing yet has no context; torch's is the device's primary one."""
    library, context = _library(), c_void_p()
    _check(library.cuCtxGetCurrent(byref(context)))
    if not context.value:
        number = torch.cuda.current_device() if device.index is None else device.index
        _check(library.cuDevicePrimaryCtxRetain(byref(context), c_int(number)))
        _check(library.cuCtxSetCurrent(context))


def _check(status: int) -> None:
    if status:
        raise DriverError(f"CUDA: {_message(status)}")


def _message(status: int) -> str:
    text = c_char_p()
    _library().cuGetErrorString(c_int(status), byref(text))
    return (text.value or b"unknown error").decode()


def _check_compiler(status: int) -> None:
    if status:
        _library().nvrtcGetErrorString.restype = c_char_p
        raise CompilationError(f"the CUDA compiler: {_library().nvrtcGetErrorString(c_int(status)).decode()}")
