"""CUDA C compiled at run time, by the compiler that torch carries for its own use: no toolkit needs to be installed."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch
from torch import Tensor

Argument = Tensor | int | float | None


class CompilationError(RuntimeError):
    """There is no compiler, it refused the source, or the driver refused what it made."""


class Kernels:
    """The functions of one source, compiled for one device."""

    def __init__(self, source: str, options: Sequence[str], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self.device = device
        binary = _compiled(source, (*options, f"--gpu-architecture=sm_{major}{minor}"))
        self._module = c_void_p()
        with torch.cuda.device(device):
            _hold_context(device)
            _check(_library().cuModuleLoadData(byref(self._module), binary))
        self._functions: dict[str, c_void_p] = {}

    def launch(self, name: str, grid: tuple[int, int], block: tuple[int, int], *arguments: Argument) -> None:
        """Queue a function on the current stream; whole numbers are passed as int, others as float."""
        function = self._functions.get(name)
        if function is None:
            function = c_void_p()
            _check(_library().cuModuleGetFunction(byref(function), self._module, name.encode()))
            self._functions[name] = function
        held = [_as_c(argument) for argument in arguments]
        pointers = (c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        with torch.cuda.device(self.device):
            _hold_context(self.device)
            stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            _check(_library().cuLaunchKernel(function, *grid, 1, *block, 1, 0, stream, pointers, None))


def available() -> bool:
    """Whether this torch has the compiler."""
    try:
        _library()
    except CompilationError:
        return False
    return True


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
            raise CompilationError(f"the kernels do not compile:\n{_text(program, 'ProgramLog').decode().strip()}")
        return _text(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _text(program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    _check_compiler(getattr(_library(), f"nvrtcGet{what}Size")(program, byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_compiler(getattr(_library(), f"nvrtcGet{what}")(program, text))
    return text.raw


def _hold_context(device: torch.device) -> None:
    """A thread that has launched nothing yet has no context; torch's is the device's primary one."""
    library, context = _library(), c_void_p()
    _check(library.cuCtxGetCurrent(byref(context)))
    if not context.value:
        number = torch.cuda.current_device() if device.index is None else device.index
        _check(library.cuDevicePrimaryCtxRetain(byref(context), c_int(number)))
        _check(library.cuCtxSetCurrent(context))


def _as_c(argument: Argument) -> c_void_p | c_int | c_float:
    match argument:
        case Tensor():
            return c_void_p(argument.data_ptr())
        case None:
            return c_void_p()
        case int():
            return c_int(argument)
    return c_float(argument)


def _check(status: int) -> None:
    if status:
        text = c_char_p()
        _library().cuGetErrorString(c_int(status), byref(text))
        raise CompilationError(f"CUDA: {(text.value or b'unknown error').decode()}")


def _check_compiler(status: int) -> None:
    if status:
        _library().nvrtcGetErrorString.restype = c_char_p
        raise CompilationError(f"the CUDA compiler: {_library().nvrtcGetErrorString(c_int(status)).decode()}")
