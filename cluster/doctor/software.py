"""Checks of installed software for `tandem doctor`: Python, torch, CUDA, Redis, compilers, the model."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cluster.distribution import installed_version
from cluster.doctor.findings import Finding, Status
from cluster.processes.effective_config import NEEDED_FILES, parse_hub_id, plan_processes
from cluster.processes.worker_gpus import WorkerGpus
from engine.model.config import load_model_config
from tandem.config.cluster import ClusterConfig
from tandem.config.worker import check_adapters
from tandem.errors import ConfigError
from tandem.model_files import check_gguf_file, has_model_file, is_gguf_file
from tandem.model_path import BUILTIN, is_local_model, model_directory
from tandem.native.build import COMPILERS, prebuilt_library
from tandem.process.gpu_host import GpuHost, NvidiaHost
from tandem.values.kv_layout import AUTO_DTYPE, may_differ_after_failover
from tandem.values.quantization import QUANTIZED_DTYPES
from tandem.values.roles import WorkerRole

MIN_PYTHON = (3, 11)
COMMAND_TIMEOUT_S = 10.0
_ROUTER_FILES: dict[str, tuple[str, ...]] = {name: (name,) for name in NEEDED_FILES}


def python(_config: ClusterConfig) -> list[Finding]:
    """Report the interpreter, and whether it was built without optimizations."""
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < MIN_PYTHON:
        hint = f"Tandem needs Python {'.'.join(map(str, MIN_PYTHON))} or newer"
        return [Finding(name="Python", status=Status.FAIL, detail=detail, hint=hint)]
    # Distributions optimize theirs, under /usr, by ways of their own.
    built_with: str | None = sysconfig.get_config_var("CONFIG_ARGS")
    if built_with is not None and "--enable-optimizations" not in built_with and sys.base_prefix != "/usr":
        hint = "built without --enable-optimizations: routers are up to 20 % slower than with a distribution's Python"
        return [Finding(name="Python", status=Status.INFO, detail=detail, hint=hint)]
    return [Finding(name="Python", status=Status.OK, detail=detail)]


def torch(_config: ClusterConfig) -> list[Finding]:
    """Check that torch loads, and report its threads and instruction set."""
    try:
        import torch as module
    except ImportError as error:
        hint = "`make setup`, or `pip install torch`"
        return [Finding(name="torch", status=Status.FAIL, detail=str(error), hint=hint)]
    detail = f"{module.__version__}, {module.get_num_threads()} threads, {module.backends.cpu.get_cpu_capability()}"
    return [Finding(name="torch", status=Status.OK, detail=detail)]


def cuda(_config: ClusterConfig) -> list[Finding]:
    """Report the GPUs that torch sees, or why it sees none, and NCCL."""
    try:
        import torch as module
    except ImportError:
        return []
    if not module.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()
        if driver and module.version.cuda is None:
            detail, hint = (
                "an NVIDIA driver is installed, but this torch is a CPU build",
                "install a CUDA build of torch",
            )
            return [Finding(name="CUDA", status=Status.WARN, detail=detail, hint=hint)]
        if driver:
            detail, hint = (
                f"torch for CUDA {module.version.cuda} sees no GPU",
                "check that the driver supports this CUDA version",
            )
            return [Finding(name="CUDA", status=Status.WARN, detail=detail, hint=hint)]
        return [
            Finding(name="CUDA", status=Status.INFO, detail="no GPU: workers compute on the CPU"),
            Finding(name="NCCL", status=Status.INFO, detail="not used without a GPU"),
        ]
    gpus = []
    for index in range(module.cuda.device_count()):
        of = module.cuda.get_device_properties(index)
        gpus.append(f"{of.name} ({of.total_memory / 2**30:.0f} GiB, sm_{of.major}{of.minor})")
    return [
        Finding(name="CUDA", status=Status.OK, detail=f"{module.version.cuda}: {', '.join(gpus)}"),
        _nccl(),
    ]


def gpus(config: ClusterConfig) -> list[Finding]:
    """Report which GPUs each worker of `tandem up` would get, and how much of each."""
    return gpu_table(config, NvidiaHost(os.environ))


def gpu_table(config: ClusterConfig, host: GpuHost) -> list[Finding]:
    """Report the assignment of workers to the GPUs of `host`."""
    num_gpus = len(host.names())
    if config.engine.device == "cpu" or not num_gpus:
        return []
    try:
        seats = WorkerGpus(host).seats(config, plan_processes(config))
    except ConfigError as error:
        return [Finding(name="GPUs", status=Status.FAIL, detail=str(error))]
    ranks: dict[int, list[str]] = {gpu: [] for gpu in range(num_gpus)}
    for name, seat in seats.items():
        for rank, gpu in enumerate(seat.gpus):
            ranks[gpu].append(f"{name} rank {rank}" if len(seat.gpus) > 1 else name)
    lines = [f"{num_gpus} visible, KV by {config.transfer.transport}"]
    lines += [f"GPU {gpu}: {', '.join(names) or 'nobody'}" for gpu, names in ranks.items()]
    if any(seat.sharers > 1 for seat in seats.values()):
        lines.append("workers on the same GPU share 80 % of its memory")
    detail = "\n".join(lines)
    idle = [gpu for gpu, names in ranks.items() if not names]
    if not idle:
        return [Finding(name="GPUs", status=Status.OK, detail=detail)]
    hint = f"GPU {', '.join(map(str, idle))} would be idle: raise prefill.replicas or decode.replicas"
    return [Finding(name="GPUs", status=Status.INFO, detail=detail, hint=hint)]


def _nccl() -> Finding:
    import torch as module

    if not module.distributed.is_available() or not module.distributed.is_nccl_available():
        hint = "tensor parallelism across GPUs needs it"
        return Finding(name="NCCL", status=Status.WARN, detail="missing in this build of torch", hint=hint)
    version = ".".join(map(str, module.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # an untyped function of torch
    return Finding(name="NCCL", status=Status.OK, detail=version)


def triton(_config: ClusterConfig) -> list[Finding]:
    """Report Triton, which GPU kernels need and a CPU does not."""
    version = installed_version("triton")
    detail = version or "not installed: needed for GPU kernels only"
    return [Finding(name="Triton", status=Status.OK if version else Status.INFO, detail=detail)]


def redis(_config: ClusterConfig) -> list[Finding]:
    """Report Redis, through which several routers share state; a single router needs none."""
    server = shutil.which("redis-server")
    client = installed_version("redis")
    parts = [f"server {server}" if server else "no server", f"client {client}" if client else "no client"]
    return [
        Finding(
            name="Redis",
            status=Status.OK if server and client else Status.INFO,
            detail=", ".join(parts),
            hint="" if server and client else "needed with several routers only: `apt install redis-server`",
        )
    ]


def compiler(config: ClusterConfig) -> list[Finding]:
    """Report the C++ compiler that native code is built with and, beside a GPU, the C compiler that Triton needs."""
    hint = "CPU kernels, movers of KV and native streams need one, and are replaced by slower code: `apt install g++`"
    found = [_cxx_compiler(hint)]
    if config.engine.device != "cpu" and NvidiaHost(os.environ).names():
        found.append(_c_compiler())
    return found


def router_compiler(_config: ClusterConfig) -> list[Finding]:
    """Report what a router's native code comes from: an image brings it along, elsewhere a C++ compiler builds it."""
    from router.fleet.native_streams import RECIPE

    if (library := prebuilt_library(RECIPE)) is not None:
        return [Finding(name="C++ compiler", status=Status.OK, detail=f"not needed: {library} is built")]
    hint = "without one, Python writes all tokens to clients, at 1.6 times the processor time: `apt install g++`"
    return [_cxx_compiler(hint)]


def _cxx_compiler(hint: str) -> Finding:
    """Report the compiler that `tandem.native.build` chooses; it must find the headers of its library as well."""
    name = "C++ compiler"
    path = next((path for one in COMPILERS if (path := shutil.which(one))), None)
    if path is None:
        return Finding(name=name, status=Status.WARN, detail=f"none found ({' or '.join(COMPILERS)})", hint=hint)
    if _output([path, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], "#include <unordered_map>\n") is None:
        return Finding(name=name, status=Status.WARN, detail=f"{path} compiles no C++17", hint=hint)
    return Finding(name=name, status=Status.OK, detail=_first_line(path))


def _c_compiler() -> Finding:
    name = "C compiler"
    path = next((path for one in ("cc", "gcc", "clang") if (path := shutil.which(one))), None)
    if path is None:
        hint = "Triton needs one to compile its launchers: `apt install gcc`"
        return Finding(name=name, status=Status.WARN, detail="none found", hint=hint)
    return Finding(name=name, status=Status.OK, detail=_first_line(path))


def _first_line(compiler: str) -> str:
    lines = (_output([compiler, "--version"]) or "").splitlines()
    return lines[0] if lines else compiler


def _output(command: list[str], text: str = "") -> str | None:
    """Return what a command prints, given a text to read; None where it fails."""
    try:
        done = subprocess.run(  # noqa: S603  # a program found by `which`, no shell
            command, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def model(config: ClusterConfig) -> list[Finding]:
    """Check that the configured model's files are where the workers will look for them."""
    return _model_files(config, _ROUTER_FILES | {"weights": ("*.safetensors", "*.gguf")})


def architecture(config: ClusterConfig) -> list[Finding]:
    """Check that workers can run the model that `config.json` describes."""
    if (directory := _directory(config)) is None or not has_model_file(directory / "config.json"):
        return []  # reported by `model`, or not downloaded yet
    try:
        found = load_model_config(directory).architecture
    except ConfigError as error:
        hint = "docs/use/models.md lists what is supported"
        return [Finding(name="architecture", status=Status.FAIL, detail=str(error), hint=hint)]
    return [Finding(name="architecture", status=Status.OK, detail=found)]


def adapters(config: ClusterConfig) -> list[Finding]:
    """Check the configured adapters as far as little of their files says."""
    if not config.model.adapters:
        return []
    try:
        check_adapters(config)
    except ConfigError as error:
        hint = "docs/use/models.md, LoRA adapters, says which can be served"
        return [Finding(name="adapters", status=Status.FAIL, detail=str(error), hint=hint)]
    return [Finding(name="adapters", status=Status.OK, detail=", ".join(config.model.adapters))]


def _directory(config: ClusterConfig) -> Path | None:
    """Return the model's directory or GGUF file; None if its files are not on this machine."""
    return model_directory(config.model.path) if is_local_model(config.model.path) else None


def dtype(config: ClusterConfig) -> list[Finding]:
    """Report the dtype that the model runs in, and what follows from it."""
    if _directory(config) is None or any(one.status is Status.FAIL for one in architecture(config)):
        return []  # the files are not here yet, or `architecture` reports what is wrong with them
    try:
        from engine.model.dtype import resolve_dtype

        found = resolve_dtype(config.model.dtype, config.model.path)
    except ImportError:
        return []  # reported by `torch`
    except ConfigError as error:
        return [Finding(name="dtype", status=Status.FAIL, detail=str(error), hint="set model.dtype")]
    chosen = f" ({_whose_dtype(config)})" if config.model.dtype == AUTO_DTYPE else ""
    quantized = {config.engine_of(pool).quantization for pool in (config.prefill, config.decode) if pool.replicas}
    has_gpus = config.engine.device != "cpu" and bool(NvidiaHost(os.environ).names())
    of_gpus = ("float16",) if has_gpus else ()
    if wanted := sorted(one for one in quantized if found not in (*QUANTIZED_DTYPES.get(one, (found,)), *of_gpus)):
        detail = f"{found}{chosen}, in which nothing is quantized as {wanted[0]}: workers would not start"
        return [Finding(name="dtype", status=Status.FAIL, detail=detail, hint="set model.dtype: bfloat16")]
    if not config.pools_quantize_alike:
        detail = (
            f"{found}{chosen}, but the pools quantize differently: an answer is that of whichever computed each part of"
            " its KV, so after a failover, or from cached blocks of an answer, it may be another"
        )
        hint = "quantize both pools alike (engine.quantization) where answers must not differ"
        return [Finding(name="dtype", status=Status.INFO, detail=detail, hint=hint)]
    if may_differ_after_failover(found, deterministic=config.engine.deterministic):
        detail = f"{found}{chosen}: text that resumes after a failover may differ from an uninterrupted answer"
        hint = "`engine.deterministic: true` or `model.dtype: float32` prevents that, at some cost in speed"
        return [Finding(name="dtype", status=Status.INFO, detail=detail, hint=hint)]
    return [Finding(name="dtype", status=Status.OK, detail=f"{found}{chosen}")]


def quality_gate(config: ClusterConfig) -> list[Finding]:
    """Check that workers can use `engine.quality_gate`; whether they pass it only they can find out."""
    if config.engine.quality_gate is None or (directory := _directory(config)) is None:
        return []
    from worker.quality_check import QualityCheck  # with torch, whose absence is a finding of its own

    try:
        check = QualityCheck.from_config(config, WorkerRole.DECODE)
        if check is None or any(one.status is Status.FAIL for one in architecture(config)):
            return []
        check.check_vocabulary(load_model_config(directory).vocab_size)
    except ConfigError as error:
        hint = "make one with `tandem eval MODEL --gate FILE` (docs/use/models.md)"
        return [Finding(name="quality gate", status=Status.FAIL, detail=str(error), hint=hint)]
    return [Finding(name="quality gate", status=Status.OK, detail=f"{check.num_tokens} tokens to score at each start")]


def _whose_dtype(config: ClusterConfig) -> str:
    return "auto: the built-in model's" if config.model.path == BUILTIN else "auto: the checkpoint's"


def tokenizer(config: ClusterConfig) -> list[Finding]:
    """Check that the model's files that a router reads are present."""
    return _model_files(config, _ROUTER_FILES)


def _gguf_file(path: Path) -> Finding:
    """It holds all of a model, or cannot be served."""
    try:
        check_gguf_file(path)
    except ConfigError as error:
        hint = "docs/use/models.md lists what is supported"
        return Finding(name="model", status=Status.FAIL, detail=str(error), hint=hint)
    return Finding(name="model", status=Status.OK, detail=str(path))


def _model_files(config: ClusterConfig, needed: dict[str, tuple[str, ...]]) -> list[Finding]:
    name = config.model.path
    if (directory := _directory(config)) is None:
        try:
            parse_hub_id(name)
        except ConfigError as error:
            return [Finding(name="model", status=Status.FAIL, detail=str(error), hint="docs/use/models.md")]
        hint = "its files are downloaded at the first start, if the network allows"
        return [Finding(name="model", status=Status.WARN, detail=f"{name} is not a local directory", hint=hint)]
    if is_gguf_file(directory):
        return [_gguf_file(directory)]
    missing = [what for what, patterns in needed.items() if not any(any(directory.glob(one)) for one in patterns)]
    if missing:
        hint = "train it: see training/README.md" if name == BUILTIN else "use a directory in Hugging Face layout"
        detail = f"{directory} lacks {', '.join(missing)}"
        return [Finding(name="model", status=Status.FAIL, detail=detail, hint=hint)]
    return [Finding(name="model", status=Status.OK, detail=f"{name} in {directory}")]
