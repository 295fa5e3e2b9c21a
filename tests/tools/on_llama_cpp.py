"""llama.cpp's converter, and its quantizer behind it. Runs in an environment of the converter's requirements.

The converter comes from llama-cpp-python's source package; the quantizer is that package compiled, which the engine
benchmark installs too (`tandem_bench/peers/environments.py`). A way is a type of tensors: those that the converter
writes by itself, or a mixture of the quantizer's. Restored is what transformers makes of the file.
"""

import importlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from tandem_bench.peers.environments import ENVIRONMENTS, ensure
from tests.tools.written import GGUF_FILE, Restored, write_all

_PACKAGE = "llama-cpp-python==0.3.36"
_CONVERTED = ("f32", "f16", "bf16", "q8_0")
_NEEDED = ("/convert_hf_to_gguf.py", "/conversion/", "/gguf-py/gguf/")
_QUANTIZE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind.upper())
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


def write(source: Path, stored: Path, way: str) -> Restored:
    stored.mkdir()
    file = stored / GGUF_FILE
    if way in _CONVERTED:
        _convert(source, file, way)
    else:
        plain = stored.with_name("f32.gguf")
        _convert(source, plain, "f32")
        python = ensure(ENVIRONMENTS["llama.cpp"], print)
        subprocess.run([str(python), "-c", _QUANTIZE, str(plain), str(file), way], check=True, capture_output=True)
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(stored, gguf_file=GGUF_FILE, dtype=torch.float32)
    return Restored(weights={name: values.clone() for name, values in model.state_dict().items()})


def _convert(source: Path, file: Path, kind: str) -> None:
    folder = str(_converter())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    base: Any = importlib.import_module("conversion.base")
    # It knows pre-tokenizers by the hashes of public models' tokens, among which the built-in model is not.
    base.TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "smollm"
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    arguments = sys.argv
    sys.argv = ["convert_hf_to_gguf.py", str(source), "--outfile", str(file), "--outtype", kind]
    try:
        converter.main()
    finally:
        sys.argv = arguments


def _converter() -> Path:
    """The folder of the converter, unpacked beside this environment at its first use."""
    folder = Path(sys.prefix) / "llama.cpp"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as name:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
            subprocess.run([*fetch, "-d", name, _PACKAGE], check=True)
            [archive] = Path(name).glob("*.tar.gz")
            with tarfile.open(archive) as package:
                wanted = [one for one in package if "/vendor/llama.cpp" in one.name and _is_needed(one.name)]
                package.extractall(name, wanted, filter="data")
            [unpacked] = Path(name).glob("*/vendor/llama.cpp")
            unpacked.replace(folder)
    return folder


def _is_needed(name: str) -> bool:
    return any(part in name for part in _NEEDED)


if __name__ == "__main__":
    write_all(write)
