"""The parts of scripts/gpu_check.py that come before its checks: what a machine lacks (probe), what another machine
brings (pack), and the programs, unpacked or built (build). Each part is a function of the call."""
import functools
import glob
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import gpu_report

PACK = "scripts/gpu_check.py pack"
TOOLS = ("ncu", "compute-sanitizer", "mpirun")
PACKAGES = ("torch", "triton", "numpy", "matplotlib")
# Pure Python, which works with any version: plugins of pytest for several processes (xdist), any of which may crash or
# hang (timeout), and tqdm, which the scripts in data/ import.
PACKED_PACKAGES = ("pytest", "pytest-xdist", "pytest-timeout", "tqdm")


def output(*words, seconds=60):
    """What a command prints; "" if it is missing, hangs or fails."""
    try:
        return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True,
                              stdin=subprocess.DEVNULL, timeout=seconds).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def succeeds(*words):
    try:
        return subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def first_file(*patterns):
    return next((path for pattern in patterns for path in sorted(glob.glob(str(pattern)))), "")


@functools.cache
def make_variable(name):
    lines = output("make", "-s", f"--eval=show-it: ; @echo $({name})", "MAKECMDGOALS=help", "show-it").splitlines()
    return lines[-1] if lines else ""


def compiles(header):
    return succeeds("gcc", "-fsyntax-only", "-x", "c", "-include", header, "/dev/null")


def noted(path):
    return path.read_text() if path.exists() else ""


def jobs():
    return f"-j{os.cpu_count()}"


# ---------------------------------------------------------------- the programs

class Programs:
    """The programs in `build`, those that pack has built, and what make needs to build them here. They are identified
    by the contents of their sources, because copying may have changed the times of these."""

    def __init__(self, call):
        self.call, self.build, self.packed = call, Path(call.build), call.deps / "programs"
        # Two ranks need MPI and NCCL, which pack's programs do not have.
        self.use_pack = not any("mpi" in part.needs for part, _ in call.wanted)
        # For programs that run on another machine: no library that it may lack, and the instructions of every server of
        # the last ten years.
        self.portable = [f"GPUS={call.architecture}", "MARCH=x86-64-v3", "MPI=0", "ONEDNN=0", "BLAS=0", "NCCL=0"]

    @functools.cached_property
    def flags(self):
        """make's flags for what the Makefile does not find by itself: headers and libcudart_static.a from pack, and the
        cuBLASLt library that came with PyTorch or that the system has."""
        call, cudart = self.call, self.cudart()
        flags = [f"GPUS={call.architecture}", f"BUILD={call.build}", f"BIN={call.bin}"]
        if cudart.startswith(f"{call.deps}/"):
            flags.append(f"CUDART={cudart}")
        if self.cublas != make_variable("CUBLAS"):
            flags.append(f"CUBLAS={self.cublas}")
        return flags

    @functools.cached_property
    def cublas(self):
        """The folder with cuBLASLt's headers and library."""
        found = make_variable("CUBLAS")
        if "cublas" not in output("make", "-s", "lacking").split() and first_file(f"{found}/lib*/libcublasLt.so*"):
            return found
        library, mixed = first_file(*self.cublas_patterns()), self.call.deps / "cublas"
        if not library or not (mixed / "include/cublasLt.h").exists():
            return found
        (mixed / "lib").unlink(missing_ok=True)
        (mixed / "lib").symlink_to(Path(library).parent)
        return str(mixed)

    def cublas_patterns(self):
        code = "import nvidia; print(*nvidia.__path__, sep='\\n')"
        yield from (f"{path}/*/lib/libcublasLt.so.13" for path in output(self.call.python, "-c", code).splitlines())
        yield "/usr/local/cuda*/lib64/libcublasLt.so.13"
        yield from re.findall(r"libcublasLt\.so\.13.* => (.*)", output("ldconfig", "-p"))

    def cublas_library(self):
        return first_file(*self.cublas_patterns(), f"{self.cublas}/lib*/libcublasLt.so*")

    def cudart(self):
        folders = [make_variable("CUDA"), str(self.call.deps / "lib")]
        return first_file(*(f"{folder}/{below}libcudart_static.a" for folder in folders if folder
                            for below in ("", "lib*/", "targets/*/lib/")))

    def find_cublas(self):
        """Programs that were linked here know the folder of cuBLASLt's library; pack's do not."""
        folder, path = os.path.dirname(self.cublas_library()), os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder not in path:
            os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [*path, folder]))

    def paths(self, folder):
        call = self.call
        names = [f"{name}_gpt2{call.suffix}" for name in ("train", "test", "eval")] + ["train_gpt2", "eval_gpt2"]
        names += [f"{call.where}/tests/test_kernels", f"{call.where}/tests/test_matmul", f"{call.where}/flash.so"]
        return [folder / name for name in names]

    @staticmethod
    def sources(flags):
        """The contents of the file `sources` beside programs that were built with these flags from these sources."""
        return f"{gpu_report.version('build')}\n{' '.join(flags)}\n"

    def products(self):
        return hashlib.sha256(b"".join(path.read_bytes() for path in self.paths(self.build))).hexdigest()

    def has_same_sources(self):
        return noted(self.build / "sources") == self.sources(self.flags)

    def are_packed(self):
        """Whether the programs in `build` are pack's."""
        return self.use_pack and noted(self.build / "sources") == self.sources(self.portable)

    def has_pack(self):
        """Whether pack has built the programs from these sources for this GPU."""
        return self.use_pack and noted(self.packed / "sources") == self.sources(self.portable)

    def is_built(self):
        return (all(path.exists() for path in self.paths(self.build)) and (self.has_same_sources() or self.are_packed())
                and noted(self.build / "products") == self.products())

    def make(self, job):
        job.run("make", jobs(), *self.flags, *self.paths(self.build))
        (self.build / "products").write_text(self.products())

    def unpack(self, job):
        shutil.rmtree(self.build, ignore_errors=True)
        self.build.mkdir(parents=True)
        job.run(sys.executable, "-m", "tarfile", "-e", self.packed / "programs.tar.xz", self.build)
        self.check_start(job)
        (self.build / "products").write_text(self.products())
        shutil.copy(self.packed / "sources", self.build)
        job.say("built from these sources, and they start here")

    def check_start(self, job):
        """Checks that the loader finds the libraries of every program, in versions that are new enough, and that the
        processor has the instructions that they use."""
        for path in self.paths(self.build):
            done = subprocess.run(["ldd", path], capture_output=True, text=True)
            missing = [line for line in (done.stdout + done.stderr).splitlines() if "not found" in line]
            if missing:
                raise RuntimeError(missing[0].strip())
            if path.name.startswith(("train_", "eval_")):
                code = subprocess.run([path, "--help"], stdout=subprocess.DEVNULL, stderr=job.file).returncode
                if code:
                    raise RuntimeError(f"{path} --help: exit code {code}")


def part_build(call):
    programs, build = call.programs, Path(call.build)
    if programs.is_built():
        call.add(f"make, sm_{call.architecture}", "ok", f"the programs in {build} are built from these sources")
        return print("  nothing to do", flush=True)
    if programs.has_same_sources() and not (build / "products").exists():
        print(f"gpu_check: resuming an unfinished build in {build}", flush=True)
        for path in build.rglob("*"):      # these objects match the sources, whatever the times say
            os.utime(path)
    else:
        if build.exists():
            print(f"gpu_check: {build} holds programs built from other sources or with other flags; rebuilding them",
                  flush=True)
        if take_pack(call):
            return
        shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True, exist_ok=True)
    (build / "sources").write_text(programs.sources(programs.flags))
    call.fact(f"{os.cpu_count()} cores; cuBLASLt {programs.cublas}")
    call.check(f"make, sm_{call.architecture}", 20, 3600, programs.make)


def take_pack(call):
    """Unpacks the programs that pack has built, if they suit these sources and this GPU, and start on this machine."""
    programs = call.programs
    if programs.has_pack():
        programs.find_cublas()
        call.check(f"pack's programs, sm_{call.architecture}", 5, 60, programs.unpack, informational=True)
        if programs.is_built():
            return True
        call.fact("pack's programs cannot be used here")
    elif programs.use_pack and programs.packed.exists():
        call.fact("pack's programs were built from other sources or for another GPU: not used")
    return False


# ---------------------------------------------------------------- probe

def part_probe(call):
    programs, cuda, facts = call.programs, make_variable("CUDA"), []
    by_pack, to_build = f"{PACK} provides it", not call.dry and not programs.has_pack()
    if programs.has_pack():
        facts.append("programs: pack's, built from these sources for this GPU")

    def found(name, value, remedy, needed=False):
        """Adds the value to `facts`, or if it is empty, the consequence or the remedy."""
        if not value and needed:
            call.add(name, "FAILED", f"{name} is missing: {remedy}")
        else:
            facts.append(": ".join(filter(None, (name, value) if value else (name, "missing", remedy))))

    def without(name):
        users = [part.name for part in call.parts if name in part.needs.split()]
        return f"these parts need it: {', '.join(users)}" if users else ""

    found("GPU", os.environ["GPU_CHECK_DEVICE"].replace("CPU", ""), "nothing can be measured")
    driver = re.search(r"CUDA Version: ([\d.]+)", output("nvidia-smi", seconds=gpu_report.ASK_LIMIT))
    found("driver for CUDA", driver and driver[1], "the driver must support CUDA 13")
    for name in ("make", "g++"):
        found(name, output(name, "--version").partition("\n")[0], f"install {name}", to_build)
    release = re.search(r"release (.*)", output(f"{cuda}/bin/nvcc", "--version", seconds=gpu_report.ASK_LIMIT))
    found("nvcc", cuda and f"{cuda}, {release[1] if release else ''}",
          "scripts/setup_cuda.sh installs it; it needs a network", to_build)
    found("libcudart_static.a", programs.cudart(), by_pack, to_build)
    found("cublasLt.h", first_file(f"{programs.cublas}/include/cublasLt.h"), by_pack, to_build)
    found("libcublasLt", programs.cublas_library(), "it comes with PyTorch for CUDA 13", not call.dry)
    for name in ("cjson/cJSON.h", "xxhash.h"):
        found(name, "yes" if compiles(name) else "", by_pack, to_build)
    facts.append(f"Python: {output(call.python, '--version').strip()}, {shutil.which(call.python)}")
    for name in (*PACKAGES, *PACKED_PACKAGES):
        version = output(call.python, "-c", f"from importlib import metadata; print(metadata.version({name!r}))")
        found(f"Python's {name}", version.strip(), by_pack if name in PACKED_PACKAGES else without(name))
    for name in TOOLS:
        found(name, shutil.which(name), without(name))
    memory = re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    facts.append(f"CPU: {os.cpu_count()} cores, {int(memory[1]) / 1e6:.0f} GB of memory")
    data = call.text()
    facts.append(f"text to train on: {data}, " + (
        "with the CPU's losses, from pack" if call.has_packed_curve(data)
        else f"without the CPU's losses, so the CPU run takes minutes here ({PACK} provides them)"))
    call.fact(*facts)


# ---------------------------------------------------------------- pack

class Lacked(Exception):
    """What cannot be packed, and what the GPU machine then needs."""


def part_pack(call):
    """Packs each item separately, so that one that is unavailable does not hide the others."""
    not_packed = []
    for name in ("include", "lib", "python", "cublas"):
        (call.deps / name).mkdir(parents=True, exist_ok=True)
    for name, pack in PACKED.items():
        try:
            pack(call)
            print(f"gpu_check: packed: {name}", flush=True)
        except (Lacked, OSError, subprocess.SubprocessError) as error:
            print(f"gpu_check: pack: {error}", file=sys.stderr, flush=True)
            not_packed.append(name)
    size = sum(path.stat().st_size for path in call.deps.rglob("*") if path.is_file())
    print(f"gpu_check: {call.deps}: {size / 1e6:.0f} MB. Copy it together with the sources, without .git, .venv, "
          ".cuda, built programs and the rest of build", flush=True)
    if not_packed:
        raise SystemExit(f"gpu_check: pack: could not pack {' '.join(not_packed)}. See above for why, and for what the "
                         "GPU machine then needs")


def pack_libraries(call):
    """cJSON and xxHash, which are installed where the programs are built. Copies the files behind symbolic links, which
    might get lost on the way: the linker looks for .so, the loader for .so.N."""
    shutil.copytree("/usr/include/cjson", call.deps / "include/cjson", dirs_exist_ok=True)
    shutil.copy("/usr/include/xxhash.h", call.deps / "include")
    for path in (*glob.glob("/usr/lib/*/libcjson.so*"), *glob.glob("/usr/lib/*/libxxhash.so*")):
        shutil.copy(path, call.deps / "lib")


def pack_cuda(call):
    """What a CUDA Toolkit may lack: cuBLAS's headers, and the static library of the runtime."""
    library, headers = call.programs.cudart(), Path(make_variable("CUBLAS")) / "include"
    if not library or not (headers / "cublasLt.h").exists():
        raise Lacked("libcudart_static.a or cublasLt.h is missing here: scripts/setup_cuda.sh installs them")
    if not library.startswith(f"{call.deps}/"):
        shutil.copy(library, call.deps / "lib")
    shutil.copytree(headers, call.deps / "cublas/include", dirs_exist_ok=True)


def pack_python(call):
    new = call.deps / "python.new"
    flags = "-q --disable-pip-version-check --no-user --prefix= --root=/ --only-binary :all: --no-compile --target"
    for python in (".venv/bin/python", "python3"):
        shutil.rmtree(new, ignore_errors=True)
        if succeeds(python, "-m", "pip", "install", *flags.split(), new, *PACKED_PACKAGES):
            shutil.rmtree(call.deps / "python")
            new.rename(call.deps / "python")
            return
    raise Lacked(f"pip is missing or cannot download {' '.join(PACKED_PACKAGES)}. The GPU machine needs them to test "
                 "attention and evaluation")


# Text to train on where there are no shards and no network, one token per byte. 0 is the end-of-text token, so that
# every vocabulary is large enough. The losses are only good for comparing two trainers.
TEXT_FILES = ("README.md", "doc/*.md", "*.c", "*.h", "*.cu", "cuda/*", "math/*", "runtime/*", "attention/*.*")


def write_own_text(folder):
    """Writes this project's own pages and sources as a shard (doc/data.md, "Files")."""
    paths = sorted({path for pattern in TEXT_FILES
                    for path in gpu_report.ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc"})
    tokens = b"".join(b"\0" + path.read_bytes().replace(b"\0", b"") for path in paths)
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    (folder / "text_train_000001.bin").write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))


def pack_text(call):
    """Shards to train on: those in DATA, or this project's own text, one token per byte."""
    folder = call.deps / "text"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in call.text(packed=False).glob("*_train_*.bin"):
        shutil.copy(path, folder)


def pack_curve(call):
    """The CPU's losses, and the recipe that produced them."""
    if subprocess.run(["make", jobs(), "train_gpt2"], stdout=subprocess.DEVNULL).returncode:
        raise Lacked("train_gpt2 cannot be built here, so the GPU machine must do the CPU run (minutes)")
    folder = call.deps / "fp32_on_cpu"
    shutil.rmtree(folder, ignore_errors=True)
    if call.train_on_cpu(folder):
        raise Lacked("the CPU run failed")
    shutil.rmtree(folder / "ckpt", ignore_errors=True)


def pack_programs(call):
    """The programs, and the PyTorch package, for one GPU generation."""
    programs, folder = call.programs, Path("build/packed")
    if not call.dry and not make_variable("CUDA"):
        raise Lacked("nvcc is missing here, so the GPU machine must build the programs (half a minute on 16 cores): "
                     "scripts/setup_cuda.sh installs it")
    shutil.rmtree(programs.packed, ignore_errors=True)
    programs.packed.mkdir(parents=True)
    sources = programs.sources(programs.portable)
    words = ["make", jobs(), *programs.portable, f"BUILD={folder}", f"BIN={folder}", f"TORCH_CUDA={1 - call.dry}"]
    done = subprocess.run([*words, "attn_c", *programs.paths(folder)], capture_output=True, text=True)
    if done.returncode:
        raise Lacked("the programs cannot be built here, so the GPU machine must do it:\n"
                     + "\n".join((done.stdout + done.stderr).splitlines()[-25:]))
    if programs.sources(programs.portable) != sources:
        raise Lacked("the programs' sources changed while they were built")
    # Most of each CUDA program is the same kernels. A dictionary that is longer than a program makes the archive of all
    # hardly larger than that of one.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 512 << 20}]
    with lzma.open(programs.packed / "programs.tar.xz", "w", filters=filters) as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in (*programs.paths(folder), folder / "python"):
                tar.add(path, os.path.relpath(path, folder))
    (programs.packed / "sources").write_text(sources)


PACKED = {"libraries": pack_libraries, "cuda": pack_cuda, "python": pack_python, "text": pack_text, "curve": pack_curve,
          "programs": pack_programs}
