"""Compiling CUDA C at run time, with the compiler inside torch, and launching it. No CUDA toolkit is needed."""

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


_UNSUPPORTED_CODE = (200, 209, 218, 222, 223)
"""Driver errors for code that does not fit driver or GPU: invalid image, no binary, unknown PTX."""


_CAPTURE_MODE_RELAXED = 2


class CompilationError(RuntimeError):
    """Error of a missing compiler, a source that does not compile, or code that the driver rejects."""


class DriverError(RuntimeError):
    """Error of CUDA while loading or running a kernel; an earlier operation may be its cause."""


class Module:
    """The kernels of one source, compiled for one device."""

    def __init__(self, source: str, options: Sequence[str], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self.device = device
        binary = _compile(source, (*options, f"--gpu-architecture=sm_{major}{minor}"))
        self._module = c_void_p()
        self._functions: dict[str, c_void_p] = {}
        with torch.cuda.device(device):
            _set_context(device)
            with _allow_while_capturing():
                status = _library().cuModuleLoadData(byref(self._module), binary)
        if status in _UNSUPPORTED_CODE:
            raise CompilationError(f"the driver does not take what the compiler made: {_describe(status)}")
        _check(status)

    def launch(self, name: str, grid: tuple[int, int], block: tuple[int, int], *arguments: Argument) -> None:
        """Queue a kernel on the current stream; None becomes a null pointer, an `int` an int, other numbers a float."""
        converted = [self._to_c(argument) for argument in arguments]
        pointers = (c_void_p * len(converted))(*(ctypes.addressof(value) for value in converted))
        with torch.cuda.device(self.device):
            _set_context(self.device)
            function = self._functions.get(name) or self._load_function(name)
            stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            _check(_library().cuLaunchKernel(function, *grid, 1, *block, 1, 0, stream, pointers, None))

    def _load_function(self, name: str) -> c_void_p:
        function = c_void_p()
        with _allow_while_capturing():
            _check(_library().cuModuleGetFunction(byref(function), self._module, name.encode()))
        self._functions[name] = function
        return function

    def _to_c(self, argument: Argument) -> c_void_p | c_int | c_float:
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
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load compiler and driver; torch's own library is linked against both."""
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


def _compile(source: str, options: Sequence[str]) -> bytes:
    library, program = _library(), c_void_p()
    _check_compiler(library.nvrtcCreateProgram(byref(program), source.encode(), b"shiftmend.cu", 0, None, None))
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _read(program, "ProgramLog").rstrip(b"\0").decode().strip()
            raise CompilationError(f"the kernels do not compile:\n{log}")
        return _read(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _read(program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    _check_compiler(getattr(_library(), f"nvrtcGet{what}Size")(program, byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_compiler(getattr(_library(), f"nvrtcGet{what}")(program, text))
    return text.raw


@contextmanager
def _allow_while_capturing() -> Iterator[None]:
    """Allow this thread to load code while a CUDA graph is captured, which is otherwise forbidden."""
    # The call swaps the mode of this thread with the previous one.
    mode = c_int(_CAPTURE_MODE_RELAXED)
    _check(_library().cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        _check(_library().cuThreadExchangeStreamCaptureMode(byref(mode)))


def _set_context(device: torch.device) -> None:
    """Make the device's primary context, which torch uses, current; a thread that launched nothing has none."""
    library, context = _library(), c_void_p()
    _check(library.cuCtxGetCurrent(byref(context)))
    if not context.value:
        number = torch.cuda.current_device() if device.index is None else device.index
        _check(library.cuDevicePrimaryCtxRetain(byref(context), c_int(number)))
        _check(library.cuCtxSetCurrent(context))


def _check(status: int) -> None:
    if status:
        raise DriverError(f"CUDA: {_describe(status)}")


def _describe(status: int) -> str:
    text = c_char_p()
    _library().cuGetErrorString(c_int(status), byref(text))
    return (text.value or b"unknown error").decode()


def _check_compiler(status: int) -> None:
    if status:
        _library().nvrtcGetErrorString.restype = c_char_p
        raise CompilationError(f"the CUDA compiler: {_library().nvrtcGetErrorString(c_int(status)).decode()}")
