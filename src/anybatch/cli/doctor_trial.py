"""The process of a trial: runs the edited script for some steps and redirects its writes.

A trial runs the user's script again, so it must not repeat the script's effects. What it writes goes to the folder of
the trial, and is read from there. What can't be redirected (starting a program, connecting to another machine, deleting
or renaming a file that the trial did not write) is refused, which ends most scripts and thereby the trial.
"""

import builtins
import io
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from anybatch.cli import edited

REFUSED = "refused"
"""The file of a trial's folder that says what was refused."""

_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"})
_CHANGES: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), ((0,), 1)),
    **dict.fromkeys(("os.chmod", "os.mkdir"), ((0,), 2)),
    **dict.fromkeys(("os.chown", "os.utime"), ((0,), 3)),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 1), 2)),
    "os.symlink": ((1,), 2),
    "os.truncate": ((0,), None),
    "sqlite3.connect": ((0,), None),
}
"""For events of the interpreter which arguments are paths, and which one is the folder that these are relative to."""
_ALSO_OF_TORCH = frozenset({"ldconfig", "uname", "lscpu", "nvidia-smi", "gcc", "cc", "g++", "ld", "objdump", "which"})
_LOCAL = ("127.", "localhost", "::1", "/")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Shadow:
    """Redirects the writes of a trial."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._open, self._os_open, self._mkdir, self._stat = io.open, os.open, os.mkdir, os.stat

    def own(self, path: Any) -> str | None:
        """The path in the trial's folder for a path outside it; ``None`` where none is needed."""
        if isinstance(path, int):
            return None
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - what a script does has to be fast
        if whole.startswith((f"{self.folder}{os.sep}", "/dev/", "/proc/")):
            return None
        return os.path.join(self.folder, "files", os.path.splitdrive(whole)[1].lstrip(os.sep))  # noqa: PTH118

    def to_write(self, path: Any, *, keeps: bool = False) -> Any:
        """The path to write to; with ``keeps`` the file begins as a copy of the original."""
        own = self.own(path)
        if own is None:
            return path
        os.makedirs(os.path.dirname(own), exist_ok=True)  # noqa: PTH103, PTH120
        if keeps and not self._exists(own) and self._exists(path):
            shutil.copyfile(path, own)
        return own

    def to_read(self, path: Any) -> Any:
        """The path to read from: the trial's own version of a file, if it wrote one."""
        try:
            own = self.own(path)
        except (TypeError, ValueError):  # the script's own error, which comes from the function itself
            return path
        return own if own is not None and self._exists(own) else path

    def _exists(self, path: Any) -> bool:
        try:
            self._stat(path)
        except (OSError, ValueError):
            return False
        return True

    def open(self, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        """``open``."""
        if isinstance(file, int) or not isinstance(mode, str):
            return self._open(file, mode, *arguments, **keywords)
        writes = set("wax+") & set(mode)
        path = self.to_write(file, keeps=bool(set("a+") & set(mode))) if writes else self.to_read(file)
        return self._open(path, mode, *arguments, **keywords)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open``."""
        if dir_fd is None:
            path = self.to_write(path, keeps=not flags & os.O_TRUNC) if flags & _WRITING else self.to_read(path)
        return self._os_open(path, flags, mode, dir_fd=dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """``os.mkdir``."""
        own = self.own(path)
        if own is None or dir_fd is not None:
            return self._mkdir(path, mode, dir_fd=dir_fd)
        if self._exists(own) or self._exists(path):
            raise FileExistsError(17, os.strerror(17), path)
        parts = []
        while not self._exists(own):
            parts.append(own)
            own = os.path.dirname(own)  # noqa: PTH120
        for part in reversed(parts):
            self._mkdir(part)
        return None

    def redirected(self, function: Any, *paths: tuple[int, str, Callable[[Any], Any]]) -> Any:
        """A function whose paths are redirected: for each its position, its name, and what redirects it.

        The audit hook refuses what would delete or rename a file that the trial did not write.
        """

        def call(*given: Any, **words: Any) -> Any:
            arguments = list(given)
            for place, name, redirect in paths if "dir_fd" not in words else ():
                if name in words:
                    words[name] = redirect(words[name])
                elif place < len(arguments):
                    arguments[place] = redirect(arguments[place])
            return function(*arguments, **words)

        return call

    def put_on(self) -> None:
        """Redirects the writes of this process."""
        read, write = self.to_read, self.to_write
        builtins.open = io.open = self.open
        os.open, os.mkdir = self.os_open, self.mkdir
        os.stat = self.redirected(os.stat, (0, "path", read))
        os.remove = os.unlink = self.redirected(os.remove, (0, "path", read))
        os.replace = os.rename = self.redirected(os.replace, (0, "src", read), (1, "dst", write))
        try:
            import safetensors
        except ImportError:
            return
        safetensors.serialize_file = self.redirected(safetensors.serialize_file, (1, "filename", write))

    def put_on_torch(self, torch: Any) -> None:
        """Redirects ``torch.save`` and ``torch.load``, which open files in C++."""

        def by_path(redirect: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda file: redirect(file) if isinstance(file, str | os.PathLike) else file

        torch.save = self.redirected(torch.save, (1, "f", by_path(self.to_write)))
        torch.load = self.redirected(torch.load, (0, "f", by_path(self.to_read)))


def refusal(event: str, arguments: tuple[Any, ...], folder: str) -> str:
    """What an audit event would do that a trial may not; empty if it is allowed."""
    if event in _STARTS:
        program = os.path.basename(os.fsdecode(_first(arguments)))  # noqa: PTH119
        is_torchs = program in _ALSO_OF_TORCH or f"torch{os.sep}_inductor" in str(arguments[1:2])
        return "" if is_torchs else f"start {program}"
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else address
        return "" if str(host).startswith(_LOCAL) else f"connect to {host}"
    if event == "open":
        path, _mode, flags = arguments
        if isinstance(path, int) or not (flags or 0) & (os.O_WRONLY | os.O_RDWR):
            return ""
        return "" if _is_inside(path, folder) else f"write {os.fsdecode(path)}"
    paths, relative_to = _CHANGES[event]
    if relative_to is not None and len(arguments) > relative_to and arguments[relative_to] not in (-1, None):
        return ""  # of an open folder, which rmtree goes through; it has an event of its own
    outside = [arguments[one] for one in paths if not isinstance(arguments[one], int)]
    outside = [one for one in outside if one != ":memory:" and not _is_inside(one, folder)]
    return f"{event.rpartition('.')[2]} {os.fsdecode(outside[0])}" if outside else ""


def _first(arguments: tuple[Any, ...]) -> Any:
    one = arguments[0]
    if one is None and len(arguments) > 1:
        one = arguments[1]
    if isinstance(one, list | tuple):
        one = one[0]
    return os.fspath(one).split()[0] if isinstance(one, str | os.PathLike) and os.fspath(one) else one


def _is_inside(path: Any, folder: str) -> bool:
    whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
    return whole.startswith((f"{folder}{os.sep}", "/dev/", "/proc/"))


def _guard(folder: str, note: Callable[[str], None]) -> None:
    """Refuses for the rest of this process what can't be kept apart."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _STARTS and event not in _CHANGES and event not in ("open", "socket.connect"):
            return
        refused = refusal(event, arguments, folder)
        if refused:
            note(refused)
            raise PermissionError(f"the trial of a fix may not {refused}")

    sys.addaudithook(hook)


class Trial:
    """One trial run of a script.

    Args:
        settings: ``folder`` for its writes, ``sources`` (the edited text of files, by path), and ``steps`` of one
            optimizer after which it ends.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._shadow = Shadow(settings["folder"])
        self._sources: Mapping[str, str] = settings["sources"]
        self._steps: int = settings["steps"]
        self._count: dict[int, int] = {}
        self._leave: Callable[[], None] = lambda: None
        self._left = False

    def begin(self) -> None:
        """Prepares the process before the script runs and torch is imported."""
        folder = self._shadow.folder
        temporary = os.path.join(folder, "tmp")  # noqa: PTH118
        os.makedirs(temporary, exist_ok=True)  # noqa: PTH103
        os.environ["TMPDIR"] = os.environ["TEMP"] = os.environ["TMP"] = temporary
        os.environ["WANDB_MODE"] = "disabled"
        sys.dont_write_bytecode = True
        random.seed(0)
        for path, text in self._sources.items():  # for those that read a source as a file
            with self._shadow.open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        edited.use(self._sources)
        self._shadow.put_on()
        _guard(folder, self._note)

    def _note(self, text: str) -> None:
        with open(os.path.join(self._shadow.folder, REFUSED), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(f"{text}\n")

    def with_torch(self, torch: Any, leave: Callable[[], None]) -> None:
        """Counts optimizer steps, once torch has been imported; calls ``leave`` if the script has caught the exit."""
        self._leave = leave
        self._shadow.put_on_torch(torch)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, *arguments: Any) -> None:
        number = self._count[id(optimizer)] = self._count.get(id(optimizer), 0) + 1
        if number < self._steps:
            return
        if self._left:  # the script has caught the exit
            self._leave()
            os._exit(0)
        self._left = True
        raise SystemExit(0)
