"""Kill commands with SIGKILL at every system call that changes their files, and check what is left.

    python benchmarks/kill.py [--commands profile adapt rehearse bench report] [--every 1]

A library in C, loaded before all others, counts the calls that open for writing, write, rename, link, delete, flush or
make folders below the folder of the trial. In a first run nothing is killed and the calls are counted. Then, for each
call, a fresh process is killed right before that call; of a write, half is done. Afterwards:

- each result is absent or whole: it loads, and its seal holds;
- the same command then runs to its end, and nothing half written is left. An empty temporary folder may stay beside a
  file that is whole and therefore not written again; such folders are counted.

It needs Linux, gcc, and no GPU. Imports are shared by forking, so a trial takes as long as its work.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long at = -1, seen = 0;
static const char *watched = 0;

void shim_arm(const char *folder, long kill_at) { watched = strdup(folder); seen = 0; at = kill_at; }
long shim_seen(void) { return seen; }

static int below(const char *path) { return watched && path && !strncmp(path, watched, strlen(watched)); }

static int is_ours(int folder, const char *path) {
    if (!watched) return 0;
    if (path && path[0] == '/') return below(path);
    char link[64], place[PATH_MAX];
    if (folder == AT_FDCWD) return getcwd(place, sizeof place) && below(place);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, place, sizeof place - 1);
    if (length < 0) return 0;
    place[length] = 0;
    return below(place);
}

/* Returns 1 if this call is the one to die at. */
static int count(int ours) { return ours && ++seen == at; }
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

#define OPEN(name)                                                                         \
    int name(const char *path, int flags, ...) {                                           \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, int); va_end(list); \
        if ((flags & WRITES) && count(is_ours(AT_FDCWD, path))) die();                     \
        return REAL(name)(path, flags, mode);                                              \
    }
OPEN(open) OPEN(open64)
#define OPENAT(name)                                                                       \
    int name(int folder, const char *path, int flags, ...) {                               \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, int); va_end(list); \
        if ((flags & WRITES) && count(is_ours(folder, path))) die();                       \
        return REAL(name)(folder, path, flags, mode);                                      \
    }
OPENAT(openat) OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    if (count(is_ours(file, 0))) { REAL(write)(file, data, size / 2); die(); }
    return REAL(write)(file, data, size);
}
#define PWRITE(name, type)                                                                 \
    ssize_t name(int file, const void *data, size_t size, type place) {                    \
        if (count(is_ours(file, 0))) { REAL(name)(file, data, size / 2, place); die(); }   \
        return REAL(name)(file, data, size, place);                                        \
    }
PWRITE(pwrite, off_t) PWRITE(pwrite64, off64_t)
int rename(const char *old, const char *new) {
    if (count(is_ours(AT_FDCWD, new))) die();
    return REAL(rename)(old, new);
}
int renameat(int from, const char *old, int to, const char *new) {
    if (count(is_ours(to, new))) die();
    return REAL(renameat)(from, old, to, new);
}
int unlink(const char *path) { if (count(is_ours(AT_FDCWD, path))) die(); return REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) {
    if (count(is_ours(folder, path))) die();
    return REAL(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) { if (count(is_ours(AT_FDCWD, path))) die(); return REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { if (count(is_ours(AT_FDCWD, path))) die(); return REAL(mkdir)(path, mode); }
int fsync(int file) { if (count(is_ours(file, 0))) die(); return REAL(fsync)(file); }
int fdatasync(int file) { if (count(is_ours(file, 0))) die(); return REAL(fdatasync)(file); }
int ftruncate(int file, off_t size) { if (count(is_ours(file, 0))) die(); return REAL(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { if (count(is_ours(file, 0))) die(); return REAL(ftruncate64)(file, size); }
int chmod(const char *path, mode_t mode) { if (count(is_ours(AT_FDCWD, path))) die(); return REAL(chmod)(path, mode); }
"""

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ).eval()

BATTERY = {"brighter": lambda inputs: inputs + 1}
"""


@dataclass(frozen=True)
class Command:
    """A command that is killed.

    Attributes:
        name: Name of the command.
        arguments: Its arguments, with files in the current folder.
        check: Raises if what is in a folder is half written; called after each kill, and after the run that follows.
        results: Files or folders that are there after a whole run.
    """

    name: str
    arguments: tuple[str, ...]
    check: Callable[[Path], None]
    results: tuple[str, ...]


def _check_profile(path: Path) -> None:
    import shiftmend

    if path.exists():
        shiftmend.Profile.load(path)


def _check_adaptation(folder: Path) -> None:
    from shiftmend.report.saved import load_adaptation
    from shiftmend.utils.python_files import import_file

    if (folder / "mended").exists():
        load_adaptation(folder / "mended", import_file(folder / "model.py").make())
    if (folder / "run.ckpt").exists():
        from shiftmend.utils import sealing

        with (folder / "run.ckpt").open("rb") as file:
            sealing.check(file)


def _check_rehearsal(folder: Path) -> None:
    from shiftmend.utils import sealing

    _check_profile(folder / "rehearsed")
    if (folder / "rehearsal.json").exists():
        sealing.check_json((folder / "rehearsal.json").read_text())


def _check_bench(folder: Path) -> None:
    from shiftmend.research.bench.store import STORE, Store

    path = folder / "bench" / STORE
    if path.exists() and path.stat().st_size:
        with Store(path) as store:
            assert not any("unsealed" in result.manifest for result in store.results())
    for file in (folder / "bench").glob("profiles/*.safetensors"):
        _check_profile(file)


def _check_report(folder: Path) -> None:
    page = folder / "page.html"
    assert not page.exists() or page.read_text().rstrip().endswith("</html>")


def make_commands() -> dict[str, Command]:
    """List the commands with their checks."""
    common = ("model.py:make", "--device", "cpu")
    tiny = f"{Path(__file__).parents[1] / 'tests' / 'helpers' / 'tiny.py'}:TINY"
    profile = Command(
        "profile",
        ("profile", *common, "-d", "home.npz", "-o", "new"),
        lambda folder: _check_profile(folder / "new"),
        ("new",),
    )
    adapt = Command(
        "adapt --checkpoint",
        ("adapt", *common, "-d", "site.npz", "-p", "profile", "-o", "mended", "-m", "fr", "--option", "epochs=2")
        + ("--checkpoint", "run.ckpt"),
        _check_adaptation,
        ("mended",),
    )
    rehearse = Command(
        "rehearse",
        ("rehearse", *common, "-d", "home.npz", "-p", "profile", "-o", "rehearsed", "--quick")
        + ("--battery", "model.py:BATTERY", "--candidates", "adabn", "--checkpoint", "rehearsal.json"),
        _check_rehearsal,
        ("rehearsed",),
    )
    bench = Command(
        "bench run",
        ("bench", "run", tiny, "-f", "bench", "--methods", "source-only,adabn", "--seeds", "1", "--shifts", "dark")
        + ("--workers", "1", "--device", "cpu", "--data-root", "data"),
        _check_bench,
        ("bench/results.sqlite",),
    )
    report = Command(
        "report",
        ("report", *common, "-d", "site.npz", "-p", "profile", "-o", "page.html", "--samples", "0"),
        _check_report,
        ("page.html",),
    )
    return {"profile": profile, "adapt": adapt, "rehearse": rehearse, "bench": bench, "report": report}


# ---- trials


def prepare(folder: Path) -> None:
    """Write the model, the data and the profile that the commands read."""
    import numpy as np
    import torch

    import shiftmend
    from shiftmend.utils.python_files import import_file

    (folder / "data").mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(120, 4)).astype(np.float32)
    np.savez(folder / "home.npz", inputs=inputs, labels=(inputs[:, 0] > 0).astype(np.int64))
    np.savez(folder / "site.npz", inputs=inputs + 1)
    model = import_file(folder / "model.py").make()
    shiftmend.profile(model, torch.from_numpy(inputs), progress=False).save(folder / "profile")


def run_forked(shim: ctypes.CDLL, command: Command, folder: Path, kill_at: int) -> tuple[int, int]:
    """Run a command in a forked process; return its exit status and the calls that it has counted."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        from shiftmend.cli import main

        os.close(read)
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        shim.shim_arm(str(folder).encode(), kill_at)
        try:
            main(list(command.arguments))
        except SystemExit as ended:
            os.write(write, f"{ended.code or 0} {shim.shim_seen()}".encode())
        except Exception as error:
            os.write(write, f"99 {type(error).__name__}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode().split()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status), 0
    return (int(said[0]), int(said[1])) if len(said) == 2 and said[1].isdigit() else (99, 0)


def _import_all(command: Command, folder: Path) -> None:
    """Run a command in this process, so that the forked ones find everything imported."""
    from shiftmend.cli import main

    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(list(command.arguments))
    except SystemExit:
        pass
    finally:
        os.chdir(before)


def torment(shim: ctypes.CDLL, command: Command, good: Path, every: int) -> tuple[int, int, int, list[str]]:
    """Kill a command at its calls; return the calls, the kills, empty folders that were left, and what was wrong."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "imports"
        shutil.copytree(good, folder)
        _import_all(command, folder)
        folder = Path(root) / "whole"
        shutil.copytree(good, folder)
        status, calls = run_forked(shim, command, folder, 0)
        if status or not all((folder / result).exists() for result in command.results):
            return calls, 0, 0, [f"{command.name} does not run at all: status {status}"]
        wrong, tried, empty = [], 0, 0
        for kill_at in range(1, calls + 1, every):
            folder = Path(root) / f"{kill_at}"
            shutil.copytree(good, folder)
            status, _ = run_forked(shim, command, folder, kill_at)
            tried += status == -signal.SIGKILL
            try:
                command.check(folder)
                time.sleep(1.1)  # Younger leftovers may be a living process's.
                status, _ = run_forked(shim, command, folder, 0)
                command.check(folder)
                found = list(folder.rglob("*.partial"))
                left = [one.name for one in found if not one.is_dir() or any(one.iterdir())]
                empty += len(found) - len(left)
                if status or left or not all((folder / result).exists() for result in command.results):
                    wrong.append(f"{command.name}, call {kill_at}: then status {status}, left behind: {left}")
            except Exception as error:
                wrong.append(f"{command.name}, call {kill_at}: {type(error).__name__}: {error}")
            shutil.rmtree(folder)
    return calls, tried, empty, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=list(make_commands()), default=list(make_commands()))
    parser.add_argument("--every", type=int, default=1, help="Kill at every n-th call only.")
    given = parser.parse_args()
    if "SHIFTMEND_SHIM" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "shim.so"
            build = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", str(library), "-ldl"]
            subprocess.run(build, input=SHIM, text=True, check=True)
            environment = os.environ | {"LD_PRELOAD": str(library), "SHIFTMEND_SHIM": str(library)}
            environment |= {"OMP_NUM_THREADS": "1"}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    shim = ctypes.CDLL(os.environ["SHIFTMEND_SHIM"])
    shim.shim_arm.argtypes, shim.shim_seen.restype = (ctypes.c_char_p, ctypes.c_long), ctypes.c_long
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        prepare(Path(root) / "good")
        print("| command | calls | kills | violations | empty folders left |\n|---|---|---|---|---|", flush=True)
        for name in given.commands:
            command = make_commands()[name]
            calls, tried, empty, wrong = torment(shim, command, Path(root) / "good", given.every)
            print(f"| `{command.name}` | {calls} | {tried} | {len(wrong)} | {empty} |", flush=True)
            problems += wrong
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
