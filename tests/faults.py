"""Faults of the world: what the program is put through in processes of its own, and what has to hold afterwards.

`tests/test_faults.py` runs each as a test, `docs/benchmarks/reliability.py` prints a page of all.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from autopar.plan import Plan
from autopar.search.settings import DEFAULT_SETTINGS

ROOT = Path(__file__).parents[1]
FOREIGN = frozenset({".ses"})
"""Files that libraries leave: the telemetry of ONNX Runtime. Ray keeps the logs of its sessions in a folder `ray`."""
MARK = "AUTOPAR_FAULT"
"""Environment variable by which the processes of a fault are told from all others."""
PATIENCE = 900.0
"""Seconds after which something that should have ended counts as hanging; a busy machine is ten times slower."""
GRACE = 10.0
"""Seconds that processes may take to notice that the one they work for has gone."""
OVERTIME = 2.0
"""Seconds by which a limit of time may be exceeded."""

JOB = ("solve", "zoo:gpt2", "--set", "num_layers=2", "--gpus", "4", "--global-batch", "8", "--grid", "0")
"""Some seconds of search: the plan does not depend on the clock."""
QUICK = ("solve", "zoo:mlp-xs", "--gpus", "2", "--global-batch", "8", "--grid", "0")
"""One that is over almost at once, for what happens outside the search."""
LONG = ("solve", "zoo:gpt2", "--gpus", "64", "--grid", "0")
"""A search that goes on for longer than any fault takes to come."""
DEEP = ("solve", "zoo:gpt3-xl", "--set", "num_layers=1000", "--gpus", "64", "--grid", "0")
"""A model that takes seconds to import."""
FILES = ("plan.json", "report.txt", "report.html", "trace.json")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended: exit code, what it wrote, and seconds."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """The message of its error; "" if there is none."""
        return next((line for line in self.err.splitlines() if line.startswith("error: ")), "").removeprefix("error: ")


@dataclass(slots=True)
class World:
    """A folder in which the program runs, and what is found wrong there.

    Attributes:
        folder: With the folders `cache`, `out` and `tmp`.
        wrong: What does not hold.
        seconds: From the fault to the end.
    """

    folder: Path
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def out(self) -> Path:
        """Where the program writes its files."""
        return self.folder / "out"

    @property
    def cache(self) -> Path:
        """Its cache."""
        return self.folder / "cache"

    def start(self, *args: str, environment: dict[str, str] | None = None, **streams: Any) -> "subprocess.Popen[str]":
        """Start the program, with pipes but for the streams given."""
        own = {"AUTOPAR_CACHE_DIR": str(self.cache), "TMPDIR": str(self.folder / "tmp"), MARK: str(self.folder)}
        return subprocess.Popen(
            [sys.executable, "-m", "autopar", *args],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **own, **(environment or {})},
            text=True,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **streams},
        )

    def end(self, process: "subprocess.Popen[str]", before: str = "") -> Ended:
        """Wait for the end of a process; `before` is what was read of its standard error."""
        began = time.monotonic()
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"still running after {PATIENCE:g} s")
            process.kill()
            out, err = process.communicate()
        self.seconds = time.monotonic() - began
        ended = Ended(process.returncode, out or "", before + (err or ""), self.seconds)
        self.check("Traceback" not in ended.err, f"a traceback: {ended.err[-500:]}")
        self.check(ended.err.count("\nerror: ") + ended.err.startswith("error: ") <= 1, "more than one error")
        return ended

    def run(self, *args: str, environment: dict[str, str] | None = None, **streams: Any) -> Ended:
        """Run the program to its end."""
        began = time.monotonic()
        ended = self.end(self.start(*args, environment=environment, **streams))
        self.seconds = time.monotonic() - began
        return Ended(ended.code, ended.out, ended.err, self.seconds)

    def check(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)

    def ends_with(self, ended: Ended, code: int, message: str = "") -> None:
        """Check an exit code and a part of the error."""
        self.check(ended.code == code, f"exit code {ended.code}, not {code}: {ended.err[-500:]}")
        self.check(message in ended.err, f"{message!r} is not said: {ended.err[-500:]}")

    def is_whole(self) -> None:
        """Check that all files of a plan are there, and complete."""
        for name in FILES:
            self.check((self.out / name).exists(), f"{name} is missing")
        self.no_halves()

    def no_halves(self) -> None:
        """Check that every plan file that exists is complete."""
        if (self.out / "plan.json").exists():
            Plan.load(self.out / "plan.json")
        if (self.out / "trace.json").exists():
            json.loads((self.out / "trace.json").read_bytes())
        if (self.out / "report.html").exists():
            self.check((self.out / "report.html").read_text().rstrip().endswith("</html>"), "half of report.html")

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes that were started here."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.folder}\0".encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        return found

    def leftovers(self) -> tuple[str, ...]:
        """Return the processes and the temporary files that are left, once they have had time to go."""
        end = time.monotonic() + GRACE
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        for number in alive:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        files = [path for folder in (self.out, self.cache) for path in folder.rglob(".*") if path.is_file()]
        files += [path for path in (self.folder / "tmp").rglob("*") if path.is_file()]
        files = [path for path in files if path.name not in FOREIGN and "ray" not in path.parts]
        return (*(f"process: {command[:60]}" for command in alive.values()), *(f"file: {file.name}" for file in files))


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that may happen.

    Attributes:
        done: What is done.
        run: Does it, checks what has to hold, and returns what happened.
        needs: Package without which it cannot be done.
        mounts: Whether file systems are mounted, which only root may do.
    """

    done: str
    run: Callable[[World], str]
    needs: str = ""
    mounts: bool = False

    @property
    def missing(self) -> str:
        """Why it cannot be done here; "" if it can."""
        if self.needs and find_spec(self.needs) is None:
            return f"needs {self.needs}"
        return "needs root, to mount file systems" if self.mounts and not can_mount() else ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened, what of it is wrong, what was left behind, and the seconds from the fault to the end."""

    happened: str
    wrong: tuple[str, ...]
    leftovers: tuple[str, ...]
    seconds: float


def do(fault: Fault) -> Seen:
    """Do a fault in a folder of its own."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # as in the background of a script; what is started would too
            signal.signal(number, signal.SIG_DFL)
    # Sockets have names of a hundred characters at most, so that the folder's is short.
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as name:
        world = World(Path(name))
        for folder in (world.out, world.cache, world.folder / "tmp"):
            folder.mkdir()
        happened = fault.run(world)
        return Seen(happened, tuple(world.wrong), world.leftovers(), world.seconds)


def can_mount() -> bool:
    """Whether this process may mount file systems."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return done.returncode == 0


@contextmanager
def small_disk(folder: Path, size: str, options: str = "") -> Iterator[None]:
    """Put a file system of a size over a folder, with more options once its content is copied there."""
    kept = shutil.copytree(folder, folder.with_name(folder.name + "-kept"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        if options:
            subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# Signals.


def await_line(process: "subprocess.Popen[str]", part: str) -> str:
    """Return what a process writes to standard error until a line with a part."""
    assert process.stderr is not None, "it is a pipe"
    lines = []
    for line in process.stderr:
        lines.append(line)
        if part in line:
            break
    return "".join(lines)


PHASES: dict[str, tuple[tuple[str, ...], str]] = {
    "import": (DEEP, "autopar: import"),
    "discover": (LONG, "autopar: discover"),
    "search": (LONG, ": best"),
    "simulate": ((*LONG, "--time-limit", "15"), "autopar: simulate"),
}
"""By name: what is run, and the line after which the phase has begun."""


def interrupt(world: World, phase: str, number: signal.Signals) -> str:
    """Send a signal in a phase."""
    args, line = PHASES[phase]
    process = world.start(*args, "-o", str(world.out))
    before = await_line(process, line)
    time.sleep(0.3)
    process.send_signal(number)
    ended = world.end(process, before)
    if phase in ("import", "discover"):
        world.ends_with(ended, 130, "error: interrupted")
        world.check(not ended.out and not any(world.out.iterdir()), "something was written")
        return "one message, nothing written"
    world.is_whole()
    if phase == "simulate" and ended.code == 0:  # the last plan was just simulated
        return "the plan, all files"
    world.ends_with(ended, 130, "finishing with the best so far")
    world.check("(interrupted: this" in " ".join(ended.out.split()), "the plan does not say that it was interrupted")
    return "the best plan so far, all files"


def interrupt_writing(world: World, number: signal.Signals) -> str:
    """Send a signal once the first file is there."""
    process = world.start(*QUICK, "-o", str(world.out))
    while not (world.out / "plan.json").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    ended = world.end(process)
    world.ends_with(ended, 0)
    world.is_whole()
    return "all files, complete"


def kill_parent(world: World, phase: str) -> str:
    """Kill the program."""
    args, line = PHASES[phase]
    process = world.start(*args, "-o", str(world.out))
    await_line(process, line)
    time.sleep(1.0)
    number = len(world.processes())
    process.kill()
    world.end(process)
    world.no_halves()
    return f"{number - 1} processes beside it"


def hang_up(world: World) -> str:
    """Send SIGTERM to every process of the group, as batch systems and `timeout` do."""
    process = world.start(*LONG, "--workers", "2", "-o", str(world.out))
    before = await_line(process, ": best")
    os.killpg(process.pid, signal.SIGTERM)
    ended = world.end(process, before)
    world.ends_with(ended, 130, "finishing with the best so far")
    world.is_whole()
    return "the best plan so far, all files"


def children(number: int) -> list[int]:
    """Return the processes that a process has started."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    return []


def descendants(number: int) -> list[int]:
    """Return all processes below a process."""
    return [own for child in children(number) for own in (child, *descendants(child))]


def named(numbers: Sequence[int], part: str) -> list[int]:
    """Return the processes whose command line has a part."""
    found = []
    for number in numbers:
        with suppress(OSError):
            if part in Path(f"/proc/{number}/cmdline").read_text():
                found.append(number)
    return found


def plain(folder: Path) -> dict[str, Any]:
    """Return the plan in a folder without what the clock, or the cache, has to do with."""
    if not (folder / "plan.json").exists():
        return {}
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_bytes())
    for name in ("phases", "history", "cached"):
        plan["search"].pop(name, None)
    return plan


def kill_worker(world: World, engine: Sequence[str], part: str) -> str:
    """Kill a process that searches, and compare the plan with that of a search without fault."""
    alone = world.folder / "alone"
    world.run(*JOB, "--no-cache", "--workers", "1", "-o", str(alone))
    process = world.start(*JOB, "--no-cache", "--workers", "2", *engine, "-o", str(world.out))
    before = await_line(process, ": best")
    servers = named(descendants(process.pid), part)
    workers = [own for server in servers for own in named(children(server), part)] or servers
    world.check(bool(workers), "no worker was found")
    for worker in workers[:1]:
        os.kill(worker, signal.SIGKILL)
    ended = world.end(process, before)
    world.ends_with(ended, 0)
    world.check(plain(world.out) == plain(alone), "another plan")
    return "done again by its successor, the same plan"


# Streams and disks.


def close_output(world: World) -> str:
    """Read no more than one line of standard output."""
    process = world.start(*QUICK, "-o", str(world.out))
    assert process.stdout is not None, "it is a pipe"
    process.stdout.close()
    process.stdout = None
    ended = world.end(process)
    world.ends_with(ended, 141)
    world.is_whole()
    world.check("error" not in ended.err, "an error is told that is none")
    return "exit code 141 without a message, all files"


def full_output(world: World, name: str) -> str:
    """Send standard output or standard error to a full disk."""
    with Path("/dev/full").open("w") as full:
        streams: dict[str, Any] = {name: full}
        ended = world.run(*QUICK, "-o", str(world.out), **streams)
    world.is_whole()
    if name == "stdout":
        world.ends_with(ended, 2, "cannot write standard output")
        return f"all files; {ended.error}"
    world.ends_with(ended, 0)
    world.check("mlp-xs" in ended.out, "no answer")
    return "the answer, all files; progress is dropped"


def full_folder(world: World, size: str) -> str:
    """Have a disk for the plan's files that is too small for them."""
    with small_disk(world.out, size):
        ended = world.run(*QUICK, "-o", str(world.out))
        there = sorted(path.name for path in world.out.iterdir())
        world.no_halves()
    world.ends_with(ended, 2, "No space left on device")
    world.check("mlp-xs" in ended.out, "the plan is lost")
    return f"the plan is printed, {', '.join(there) or 'no file'} written; {ended.error.partition(': ')[2]}"


def is_json(path: Path) -> bool:
    """Whether a file holds a whole JSON value."""
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def full_cache(world: World) -> str:
    """Have a disk for the cache that is too small for it."""
    with small_disk(world.cache, "16k"):
        ended = world.run(*QUICK, "-o", str(world.out))
        for path in world.cache.rglob("*.json"):  # a small file may have found room
            world.check(is_json(path), f"{path.name} is cut")
        others = [path.name for path in world.cache.rglob("*") if path.is_file() and path.suffix != ".json"]
    world.ends_with(ended, 0, "autopar: cache: cannot write")
    world.is_whole()
    world.check(not others, f"{others} are left")
    return "the plan, all files; a notice that nothing is kept"


def limited_files(world: World) -> str:
    """Limit the size of files, as quotas do."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000))
    ended = world.run(*QUICK, "-o", str(world.out), preexec_fn=limit)
    world.ends_with(ended, 2, "File too large")
    world.check("mlp-xs" in ended.out, "the plan is lost")
    world.no_halves()
    return f"the plan is printed; {ended.error.partition(': ')[2]}"


def fixed_cache(world: World) -> str:
    """Have a cache that cannot be written to."""
    with small_disk(world.cache, "1m", "ro"):
        ended = world.run(*QUICK)
    world.ends_with(ended, 2, "hint: choose another one with --cache-dir, or use --no-cache")
    return ended.error.partition(": ")[2]


def _turned(data: bytes) -> bytes:
    return data[:99] + bytes([data[99] ^ 1]) + data[100:]


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def damaged_cache(world: World) -> str:
    """Turn over a bit of every file of the cache, then cut every file."""
    world.run(*QUICK, "-o", str(world.out))
    expected, number = plain(world.out), 0
    for damage in (_turned, _cut):
        files = [path for path in world.cache.rglob("*") if path.is_file()]
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        number += len(files)
        ended = world.run(*QUICK, "-o", str(world.out))
        world.ends_with(ended, 0)
        world.check("autopar: search" in ended.err, "a damaged plan was believed")
        world.check(plain(world.out) == expected, "another plan")
    ended = world.run(*QUICK)
    world.check("autopar: search" not in ended.err, "the cache was not mended")
    return f"{number} files found damaged and made again, the same plan"


class _Hostile:
    """What does something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def shared_cache(world: World) -> str:
    """Put code in all forms into a cache that everybody may write to."""
    world.run(*QUICK, "-o", str(world.out))
    expected, done = plain(world.out), world.folder / "done"
    data = pickle.dumps(_Hostile(done))
    for folder in (world.cache, *(path for path in world.cache.rglob("*") if path.is_dir())):
        folder.chmod(0o777)
        code = f"import os; os.mkdir({str(done)!r})"
        for name in ("sitecustomize.py", "autopar.py", "numba.py", "json.py", "__init__.py"):
            (folder / name).write_text(code)
        (folder / "plan.pkl").write_bytes(data)
    for path in world.cache.rglob("*.json"):
        path.write_bytes(data)
    ended = world.run(*QUICK, "-o", str(world.out))
    world.ends_with(ended, 0)
    world.check(not done.exists(), "code of the cache was run")
    world.check(plain(world.out) == expected, "another plan")
    return "nothing of it is run, the same plan"


def shared_machine_code(world: World) -> str:
    """Have numba keep machine code where everybody may write."""
    folder = world.folder / "numba"
    folder.mkdir()
    folder.chmod(0o777)
    ended = world.run(*QUICK, environment={"NUMBA_CACHE_DIR": str(folder)})
    world.ends_with(ended, 2, "others may write to")
    return "refused, with the folder"


# Several at a time, and the order of hashes.


def together(world: World, number: int) -> str:
    """Run the same job several times at once on an empty cache."""
    processes = [world.start(*QUICK, "--workers", "1", "-o", str(world.folder / f"o{i}")) for i in range(number)]
    for process in processes:
        world.ends_with(world.end(process), 0)
    world.check(all(plain(world.folder / f"o{i}") == plain(world.folder / "o0") for i in range(number)), "other plans")
    ended = world.run(*QUICK, "-o", str(world.out))
    world.check("autopar: search" not in ended.err, "the cache has no answer")
    return "the same plan from all; the next one has it from the cache"


SAME: tuple[tuple[str, ...], ...] = (
    JOB,
    ("solve", "zoo:mlp-xs", "--gpus", "2", "--global-batch", "8", "--memory-limit", "0.03", "--grid", "0"),
    ("solve", "zoo:mixtral-8x7b", *(word for setting in (
        "num_layers=2", "hidden=32", "heads=4", "kv_heads=2", "ffn=40", "seq=6", "vocab=44", "experts=4",
    ) for word in ("--set", setting)), "--gpus", "4", "--global-batch", "8", "--grid", "0"),
    ("solve", "zoo:mlp-xs", "--gpus", "4", "--mode", "infer", "--grid", "0"),
)  # fmt: skip
"""Small jobs without limits of time."""


def same(world: World) -> str:
    """Run small jobs with other hashes, and by other numbers of workers."""
    runs = (("0", "1"), ("1", "2"), ("77", "1"))
    for number, job in enumerate(SAME):
        plans = []
        for seed, workers in runs:
            out = world.folder / f"{number}-{seed}"
            args = (*job, "--no-cache", "--workers", workers, "-o", str(out))
            world.ends_with(world.run(*args, environment={"PYTHONHASHSEED": seed}), 0)
            plans.append(plain(out))
        world.check(all(plan == plans[0] for plan in plans), f"other plans of {' '.join(job)}")
    return f"{len(SAME)} jobs, {len(runs)} runs each: the same plans"


# Ranks.


@contextmanager
def ranks(world: World) -> "Iterator[tuple[subprocess.Popen[str], str, list[int]]]":
    """Start a run of two ranks that goes on for long; yield it, what it wrote, and its ranks."""
    process = world.start("run", str(tiny_plan(world)), "--ranks", "2", "--steps", "1000000")
    before = await_line(process, "step")
    yield process, before, named(children(process.pid), "autopar.ranks.worker")


def tiny_plan(world: World) -> Path:
    """Return the file of a plan on two devices."""
    folder = world.folder / "tiny"
    settings = ("--set", "num_layers=3", "--set", "hidden=16", "--global-batch", "8", "--dp", "2")
    ended = world.run("predict", "zoo:mlp-xs", "--gpus", "2", *settings, "-o", str(folder))
    world.ends_with(ended, 0)
    return folder / "plan.json"


def break_rank(world: World, number: signal.Signals) -> str:
    """Kill or stop a rank."""
    with ranks(world) as (process, before, workers):
        os.kill(workers[1], number)
        ended = world.end(process, before)
    world.ends_with(ended, 5, f"rank 1 was {'killed' if number == signal.SIGKILL else 'stopped'} by {number.name}")
    return ended.error


def interrupt_run(world: World, number: signal.Signals) -> str:
    """Send a signal to the parent of all ranks."""
    with ranks(world) as (process, before, _):
        process.send_signal(number)
        ended = world.end(process, before)
    if number != signal.SIGKILL:
        world.ends_with(ended, 130, "error: interrupted")
    return "one message" if ended.error else "ranks end by themselves"


def taken_ports(world: World) -> str:
    """Take the ports that torch and Ray use if nobody says otherwise."""
    with ExitStack() as stack:
        for port in (29400, 29500, 6379, 8265):
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):  # taken already
                listener.bind(("", port))
                listener.listen()
        ended = world.run("run", str(tiny_plan(world)), "--ranks", "2", "--steps", "2")
    world.ends_with(ended, 0)
    return "the run is not disturbed"


# Limits of time and size.

LIMITED: dict[str, tuple[str, ...]] = {
    "gpt2": ("zoo:gpt2", "--gpus", "8"),
    "resnet50": ("zoo:resnet50", "--gpus", "8"),
    "llama3-70b": ("zoo:llama3-70b", "--gpus", "256"),
    "mixtral-8x7b": ("zoo:mixtral-8x7b", "--gpus", "64"),
    "unet-sd1": ("zoo:unet-sd1", "--gpus", "32", "--cluster", "v100"),
    "gpt3-175b": ("zoo:gpt3-175b", "--gpus", "1024", "--cluster", "a100"),
}
LIMIT = 20.0


def limited(world: World, args: Sequence[str], limit: float = LIMIT) -> str:
    """Solve within a limit of time, from a cold cache and without files."""
    ended = world.run("solve", *args, "--time-limit", f"{limit:g}", "--grid", "0", "--no-cache")
    world.ends_with(ended, 0)
    over = ended.seconds - limit
    world.check(over <= OVERTIME, f"{over:.1f} s over the limit")
    return f"{over:+.1f} s" if over > 0 else "within the limit"


def graph_of(world: World, count: int, *, distinct: bool) -> Path:
    """Return a model that is a chain of elementwise ops, all alike or each another one."""
    nodes = []
    for number in range(count):
        kind, attrs = ("LeakyRelu", {"alpha": 1e-3 + 1e-6 * number}) if distinct else ("Relu", {})
        nodes.append(helper.make_node(kind, [f"v{number}"], [f"v{number + 1}"], name=f"n{number}", **attrs))
    ends = [helper.make_tensor_value_info(f"v{end}", TensorProto.FLOAT, ["batch", 16]) for end in (0, count)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    path = world.folder / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def large_graph(world: World, count: int, *, distinct: bool) -> str:
    """Solve a large graph within a minute, and the half of one that a search without any plan goes on for."""
    path, limit = graph_of(world, count, distinct=distinct), 60.0
    settings = ("--gpus", "8", "--mode", "infer", "--global-batch", "8", "--grid", "0")
    ended = world.run("solve", str(path), *settings, "--time-limit", f"{limit:g}")
    world.check(ended.code in (0, 130), f"exit code {ended.code}: {ended.err[-500:]}")
    over = ended.seconds - limit
    world.check(over <= DEFAULT_SETTINGS.overtime_seconds + OVERTIME, f"{over:.1f} s over the limit")
    return f"{'a plan' if ended.code == 0 else ended.error}, {over:+.1f} s"


SIGNALS = (signal.SIGINT, signal.SIGTERM)

FAULTS: dict[str, Fault] = {
    **{
        f"{number.name}-{phase}": Fault(
            f"{number.name} in phase {phase}", partial(interrupt, phase=phase, number=number)
        )
        for number in SIGNALS
        for phase in PHASES
    },
    **{
        f"{number.name}-writing": Fault(
            f"{number.name} while files are written", partial(interrupt_writing, number=number)
        )
        for number in SIGNALS
    },
    "SIGTERM-group": Fault("SIGTERM to all processes of a search", hang_up),
    **{
        f"SIGKILL-{phase}": Fault(f"SIGKILL in phase {phase}", partial(kill_parent, phase=phase))
        for phase in ("discover", "search")
    },
    "SIGKILL-worker": Fault("SIGKILL of a worker of a search", partial(kill_worker, engine=(), part="forkserver")),
    "SIGKILL-ray": Fault(
        "SIGKILL of a Ray worker of a search",
        partial(kill_worker, engine=("--engine", "ray"), part="ray::RayWorker"),
        needs="ray",
    ),
    "closed-output": Fault("standard output closed by its reader", close_output),
    "full-output": Fault("standard output on a full disk", partial(full_output, name="stdout")),
    "full-progress": Fault("standard error on a full disk", partial(full_output, name="stderr")),
    "full-folder": Fault("no room for any file of -o", partial(full_folder, size="16k"), mounts=True),
    "full-folder-later": Fault("room for some files of -o", partial(full_folder, size="256k"), mounts=True),
    "limited-files": Fault("a limit of the size of files", limited_files),
    "full-cache": Fault("no room in the cache", full_cache, mounts=True),
    "fixed-cache": Fault("a read-only cache", fixed_cache, mounts=True),
    "damaged-cache": Fault("a cache with bits turned over and files cut", damaged_cache),
    "shared-cache": Fault("a cache that others have put code into", shared_cache),
    "shared-machine-code": Fault("numba's cache where others may write", shared_machine_code),
    "two-on-a-cache": Fault("two processes on one empty cache", partial(together, number=2)),
    "eight-at-once": Fault("eight searches at a time on one empty cache", partial(together, number=8)),
    "same-plan": Fault("other PYTHONHASHSEED, 1 or 2 workers", same),
    "SIGKILL-rank": Fault("SIGKILL of a rank", partial(break_rank, number=signal.SIGKILL), needs="torch"),
    "SIGSTOP-rank": Fault("SIGSTOP of a rank", partial(break_rank, number=signal.SIGSTOP), needs="torch"),
    "SIGTERM-run": Fault("SIGTERM of a run", partial(interrupt_run, number=signal.SIGTERM), needs="torch"),
    "SIGKILL-run": Fault("SIGKILL of a run", partial(interrupt_run, number=signal.SIGKILL), needs="torch"),
    "taken-ports": Fault("the usual ports are taken, in a run", taken_ports, needs="torch"),
    **{
        f"limit-{name}": Fault(f"--time-limit {LIMIT:g}, {' '.join(args)}", partial(limited, args=args))
        for name, args in LIMITED.items()
    },
    "100000-ops": Fault("a graph of 100,000 ops, --time-limit 60", partial(large_graph, count=100_000, distinct=False)),
    "20000-distinct-ops": Fault(
        "a graph of 20,000 distinct ops, --time-limit 60", partial(large_graph, count=20_000, distinct=True)
    ),
    "100000-gpus": Fault(
        "100,000 GPUs, --time-limit 60",
        partial(limited, args=("zoo:gpt2", "--gpus", "100000", "--global-batch", "100000"), limit=60.0),
    ),
}
"""By name, in the order of the page."""
